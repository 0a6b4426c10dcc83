"""Vision models: prompts of images, scores over patches, and what is refused."""

import pytest
import torch

import cw_lens
from cw_lens.prompts import PromptError
from tests.families import IMAGE, prompts, wrapped


@pytest.fixture(scope="module")
def vit():
    return wrapped("vit")


def test_each_patch_is_a_position_after_cls(vit):
    given = prompts(vit)
    assert given.tokens[0][:6] == ("CLS", "0,0", "0,1", "0,2", "0,3", "1,0")
    assert given.ids.shape == (2, 17) and given.mask.all()
    assert not torch.equal(given.ids[0], given.ids[1])
    same = cw_lens.prompts_from_images(vit, given.pixels[[0, 0]])
    assert torch.equal(same.ids[0], same.ids[1])


def test_a_patch_that_changes_moves_its_own_key(vit):
    """Position 1 + 4 * row + column is that patch: its residual alone differs at layer 0."""
    given = prompts(vit)
    pixels = given.pixels.clone()
    pixels[0, :, 2:4, 4:6] += 1  # row 1, column 2
    before = cw_lens.capture(vit, given, layers=[0]).layers[0].residual[0]
    after = cw_lens.capture(vit, cw_lens.prompts_from_images(vit, pixels), layers=[0])
    changed = (after.layers[0].residual[0] - before).abs().sum(-1).nonzero().flatten().tolist()
    assert changed == [1 + 4 * 1 + 2]
    assert given.tokens[0][7] == "1,2"


def test_scores_are_means_over_all_queries(vit):
    given = prompts(vit)
    layer = cw_lens.capture(vit, given, layers=[1]).layers[0]
    assert not layer.causal
    scores = cw_lens.token_scores(vit, given, ["signed_contribution"], layers=[1])
    expected = cw_lens.inter_head_contributions(layer).mean(dim=2)
    torch.testing.assert_close(scores["signed_contribution"][:, 0], expected)
    assert cw_lens.find_sinks(vit, given, "first", layers=[1])[:, 0, :, 0].all()


@pytest.mark.parametrize(
    "shape", [(3, IMAGE, IMAGE), (0, 3, IMAGE, IMAGE), (1, 1, IMAGE, IMAGE), (1, 3, IMAGE, 4)]
)
def test_images_of_another_shape_are_refused(vit, shape):
    message = r"the model takes \[batch, 3, 8, 8\] \(batch, channel, height, width\)\. Use its imag"
    with pytest.raises(PromptError, match=message):
        cw_lens.prompts_from_images(vit, torch.zeros(shape))


def test_images_with_nan_are_refused(vit):
    with pytest.raises(
        PromptError, match=r"pixels hold NaN or infinity in torch.float32\. Check the im"
    ):
        cw_lens.prompts_from_images(vit, torch.full((1, 3, IMAGE, IMAGE), torch.nan))


def test_a_text_model_takes_no_images(llama):
    with pytest.raises(PromptError, match="reads text, not images. Make its prompts with tokenize"):
        cw_lens.prompts_from_images(llama, torch.zeros(1, 3, IMAGE, IMAGE))


def test_an_image_model_takes_no_text(vit):
    with pytest.raises(PromptError, match="reads images, not text.* prompts_from_images"):
        cw_lens.prompts_from_ids(vit, [[1, 2, 3]])
    with pytest.raises(PromptError, match="reads images, not text.* prompts_from_images"):
        cw_lens.tokenize(vit, "a cat")
