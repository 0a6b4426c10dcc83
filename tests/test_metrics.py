"""Each metric against its own definition; the laws that all share are in test_geometry."""

from functools import partial

import pytest
import torch

from cw_lens.errors import InputError
from cw_lens.metrics import METRICS, PAPER_METRICS, random
from tests import oracles
from tests.layers import random_layer
from tests.test_geometry import assert_close


def test_all_ten_are_there():
    assert list(METRICS) == [
        "attention",
        "value_weighted",
        "value_weighted_output_normalized",
        "contribution",
        "signed_contribution",
        "intra_head_contribution",
        "output_distance",
        "stream_contribution",
        "gradient",
        "random",
    ]
    assert set(PAPER_METRICS) <= set(METRICS)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_metrics_equal_their_literal_formulas(padding):
    layer = random_layer(batch=3, padding=padding)
    edges = oracles.written(layer)
    norm = edges.norm(dim=-1)
    output = edges.sum(dim=(1, 3)).norm(dim=-1)[:, None, :, None]
    inter = oracles.inter_head(layer)
    assert (inter < -1e-3).any()
    stream = layer.residual.norm(dim=-1)[:, None, :, None]
    real = layer.query_mask[:, None, :, None]
    expected = {
        "attention": layer.pattern,
        "value_weighted": norm,
        "value_weighted_output_normalized": torch.where(real, norm / output, 0.0),
        "contribution": inter.abs(),
        "signed_contribution": inter,
        "intra_head_contribution": oracles.intra_head(layer),
        "output_distance": oracles.output_distance(layer),
        "stream_contribution": torch.where(real, inter.abs() * output / stream, 0.0),
    }
    for name, values in expected.items():
        assert_close(METRICS[name](layer), values, 1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_output_distance_is_the_same_in_small_blocks(monkeypatch, causal):
    layer = random_layer(causal=causal)
    whole = METRICS["output_distance"](layer)
    assert_close(whole, oracles.output_distance(layer), 1e-9)
    monkeypatch.setattr("cw_lens.metrics._ALTI_ELEMENTS", 100)
    assert torch.equal(METRICS["output_distance"](layer), whole)


def test_random_is_uniform_seeded_and_the_same_for_every_query():
    layer = random_layer(batch=1, heads=64, groups=64, length=64)
    edges = random(layer)
    drawn = edges[0, :, -1]  # the last query sees every key
    expected = drawn[:, None].expand(edges[0].shape).masked_fill(~layer.edge_mask, 0.0)
    assert torch.equal(edges[0], expected)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean().item() - 0.5) < 0.01
    assert abs(drawn.var().item() - 1 / 12) < 0.005
    assert (torch.corrcoef(drawn) - torch.eye(64)).abs().max() < 0.6  # of 64 draws each
    assert len(drawn.unique()) > 0.99 * drawn.numel()
    assert torch.equal(random(layer), edges)
    assert not torch.equal(partial(random, seed=1)(layer), edges)


def test_random_does_not_see_padding_or_the_rest_of_the_batch():
    from cw_lens.layer import layer_attention

    def layer(ids: list[list[int]], pad: list[int]):
        batch, length = len(ids), len(ids[0])
        mask = torch.tensor([[i >= p for i in range(length)] for p in pad])
        return layer_attention(
            0,
            torch.ones(batch, 1, length, length).tril(),
            torch.ones(batch, 1, length, 1),
            W_O=torch.ones(1, 1, 1),
            b_O=None,
            residual=torch.ones(batch, length, 1),
            ids=torch.tensor(ids),
            mask=mask,
        )

    alone = random(layer([[5, 6, 7]], [0]))
    padded = random(layer([[9, 9, 9, 9, 9], [0, 0, 5, 6, 7]], [0, 2]))
    assert torch.equal(padded[1, :, 2:, 2:], alone[0])
    assert not torch.equal(padded[0, :, 2:, 2:], alone[0])


def test_gradient_without_a_backward_pass_says_so():
    with pytest.raises(InputError, match=r"layer 1 holds no gradient.*gradient=True"):
        METRICS["gradient"](random_layer())
