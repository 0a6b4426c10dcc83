"""Running a model: our hooks write and go, the gradient's refusals, devices are left alone."""

import pytest
import torch

import cw_lens
from cw_lens import backend
from cw_lens.prompts import prompts_from_ids
from cw_lens.sites import UnsupportedModelError, attention_site
from tests.families import prompts, wrapped

ROWS = [[1, 5, 9, 14]]


def test_a_loss_that_does_not_depend_on_z_has_no_gradient(llama):
    given = prompts_from_ids(llama, ROWS)
    cut = (attention_site(llama, 1).points["output"], lambda output: output.detach() * 0)
    with backend.hooked([cut]), pytest.raises(UnsupportedModelError, match="loss does not depend"):
        cw_lens.token_scores(llama, given, ["gradient"], layers=[1])


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_model_that_predicts_no_next_token_has_no_gradient_and_no_loss(name):
    model = wrapped(name)
    given = prompts(model)
    for refuse in (
        lambda: cw_lens.token_scores(model, given, ["gradient"]),
        lambda: cw_lens.next_token_nll(model, given),
    ):
        with pytest.raises(
            UnsupportedModelError, match=r"does not predict the next .* Use the oth"
        ):
            refuse()


def test_hooks_of_ours_replace_and_are_removed():
    module = torch.nn.Identity()
    with backend.hooked([(module, lambda x: x + 1), (module, lambda _: None)]):
        assert module(torch.zeros(1)).item() == 1
    assert module(torch.zeros(1)).item() == 0
