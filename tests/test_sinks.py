import pytest
import torch

import cw_lens
from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.prompts import prompts_from_ids
from cw_lens.sinks import (
    SINK_DETECTORS,
    CrowdedSinksWarning,
    protected_share,
    warn_if_crowded,
)

FIRST = [True, False, False, False, False]


def planted(residual: list[list[float]], pad: int = 0, value: torch.Tensor | None = None):
    """One head that attends evenly, over tokens whose layer inputs are given."""
    length = len(residual)
    x = torch.tensor(residual)
    mask = torch.tensor([[i >= pad for i in range(length)]])
    pattern = torch.ones(1, 1, length, length).tril() * mask[:, None, None, :]
    pattern = pattern / pattern.sum(-1, keepdim=True).clamp_min(1)
    return layer_attention(
        0,
        pattern,
        torch.randn(1, 1, length, 2) if value is None else value,
        W_O=torch.eye(2)[None],
        b_O=None,
        residual=x[None],
        ids=torch.arange(length)[None],
        mask=mask,
    )


def found(detector: str, layer: LayerAttention) -> list[bool]:
    return SINK_DETECTORS[detector](layer)[0, 0].tolist()


def test_cosine_marks_what_points_as_the_first_token():
    layer = planted([[9.0, 1.0], [0.1, -3.0], [18.0, 2.2], [-9.0, -1.0], [5.0, 5.0]])
    assert found("cosine", layer) == [True, False, True, False, False]


def test_cosine_fails_and_centred_cosine_holds_where_the_stream_is_anisotropic():
    shift = torch.tensor([100.0, 100.0])
    x = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0], [8.0, 0.4]]) + shift
    layer = planted(x.tolist())
    assert found("cosine", layer) == [True] * 5
    assert found("centred_cosine", layer) == [True, False, False, False, True]


def test_the_median_is_taken_over_the_other_real_positions_only():
    # with the padding or the first token in it, the third token would not be marked
    pads = [[50.0, 50.0]] * 2
    x = [[5.0, 0.0], [3.0, 6.0], [8.0, 4.0], [-9.0, -3.0], [-9.0, 2.0]]
    expected = [True, False, True, False, False]
    assert found("centred_cosine", planted(x)) == expected
    assert found("centred_cosine", planted(pads + x, pad=2)) == [False, False, *expected]


def test_the_first_real_position_is_not_position_zero():
    layer = planted([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]], pad=1)
    assert found("first", layer) == [False, True, False]
    assert found("cosine", layer) == [False, True, True]


def test_value_cosine_compares_projected_values():
    value = torch.tensor([[2.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [-2.0, 0.0]])
    layer = planted([[1.0, 0.0]] * 5, value=value[None, None])
    assert found("value_cosine", layer) == [True, True, False, False, False]


def test_received_attention_marks_keys_that_get_more_than_a_third_of_it():
    layer = planted([[1.0, 0.0]] * 4)
    # even attention: key 0 gets (1 + 1/2 + 1/3 + 1/4) / 4 = .52, key 1 .36, key 2 .29, key 3 .25
    assert found("received_attention", layer) == [True, True, False, False]


def test_one_and_two_tokens_have_a_sink():
    for rows in ([[1.0, 2.0]], [[1.0, 2.0], [-2.0, 1.0]]):
        for detector in ("cosine", "first"):
            assert found(detector, planted(rows)) == [True, False][: len(rows)]
    assert found("centred_cosine", planted([[1.0, 2.0]])) == [True]


def test_find_sinks_reads_a_model(llama):
    prompts = prompts_from_ids(llama, [[1, 5, 9, 4], [1, 3]])
    for detector in SINK_DETECTORS:
        marked = cw_lens.find_sinks(llama, prompts, detector)
        assert marked.shape == (2, 2, 4, 4)
        assert marked.dtype == torch.bool
        assert not marked[1, :, :, 2:].any()
    assert cw_lens.find_sinks(llama, prompts, layers=[0])[:, 0, :, 0].all()


def test_an_unknown_detector_is_named(llama):
    with pytest.raises(InputError, match="unknown detector 'nose'; there are cosine, centred"):
        cw_lens.find_sinks(llama, prompts_from_ids(llama, [[1]]), "nose")


def test_crowded_detectors_are_warned_about_with_the_share_of_real_tokens():
    mask = torch.tensor([[True] * 8, [True] * 4 + [False] * 4])
    sinks = torch.zeros(2, 2, 3, 8, dtype=torch.bool)
    sinks[:, :, :, 0] = True  # one a text and head: 6 of 36 pairs
    sinks[0, 1, :, :4] = True  # and three more in layer 7
    share = protected_share(sinks, mask)
    torch.testing.assert_close(share, torch.tensor([6 / 36, 15 / 36]))
    message = r"cosine detector marks more than 25% .* in layers 7 \(42%\).*try the centred_cosine"
    with pytest.warns(CrowdedSinksWarning, match=message):
        warn_if_crowded(sinks, mask, [3, 7], "cosine")
    with pytest.warns(CrowdedSinksWarning, match="try the first detector"):
        warn_if_crowded(sinks, mask, [3, 7], "centred_cosine")


def test_one_sink_of_a_short_text_is_no_crowd(recwarn):
    sinks = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    sinks[..., 0] = True  # a third of the tokens
    warn_if_crowded(sinks, torch.ones(1, 3, dtype=torch.bool), [0], "cosine")
    assert not recwarn


def test_find_sinks_and_explain_warn(llama):
    given = prompts_from_ids(llama, [[1, 5, 9, 4]])
    with torch.no_grad():
        llama.embed.weight[:] = llama.embed.weight[0] + 0.01 * llama.embed.weight
    with pytest.warns(CrowdedSinksWarning, match=r"layers 0 \(100%\)"):
        cw_lens.find_sinks(llama, given)
    with pytest.warns(CrowdedSinksWarning, match=r"layers 0 \(100%\)"):
        cw_lens.explain(llama, given)
