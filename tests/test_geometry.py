"""Laws first, then the literal d_model oracle, then the edges of the definitions."""

import pytest
import torch
from hypothesis import given

from cw_lens import geometry
from cw_lens.errors import InputError
from cw_lens.layer import LOW_OUTPUT, LayerAttention, layer_attention
from cw_lens.metrics import METRICS
from tests import oracles
from tests.layers import any_layer, random_layer

REAL_METRICS = [name for name in METRICS if name != "gradient"]


def usable(layer: LayerAttention) -> torch.Tensor:
    """Real queries whose output is not below the floor."""
    return layer.query_mask & ~geometry.low_outputs(layer)


def assert_close(found: torch.Tensor, expected: torch.Tensor, within: float = 1e-5) -> None:
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= within * max(1.0, expected.abs().max().item())


@given(any_layer())
def test_inter_head_shares_sum_to_one_over_head_and_key(layer):
    total = geometry.inter_head_contributions(layer).sum(dim=(1, 3))
    assert_close(total[usable(layer)], torch.ones(int(usable(layer).sum())))
    assert (total[~layer.query_mask] == 0).all()


@given(any_layer())
def test_intra_head_shares_sum_to_one_over_key(layer):
    total = geometry.intra_head_contributions(layer).sum(dim=3)
    length = (layer.z @ layer.gram * layer.z).sum(-1).clamp_min(0).sqrt()
    counted = layer.query_mask[:, None] & (length > layer.head_output_floor[:, None, None])
    assert_close(total[counted], torch.ones(int(counted.sum())))
    assert (total.mT[~layer.query_mask] == 0).all()


@given(any_layer())
def test_three_factors_multiply_back_to_the_contribution(layer):
    factors = geometry.decompose(layer)
    product = factors.attention * factors.relative_norm * factors.cosine
    assert_close(product, geometry.inter_head_contributions(layer))
    assert (factors.cosine.abs() <= 1 + 1e-5).all()


@given(any_layer())
def test_factored_contributions_equal_the_literal_ones(layer):
    rows = usable(layer)[:, None, :, None]
    inter = geometry.inter_head_contributions(layer)
    assert_close(inter * rows, oracles.inter_head(layer) * rows)
    length = (layer.z @ layer.gram * layer.z).sum(-1).clamp_min(0).sqrt()
    counted = (length > layer.head_output_floor[:, None, None])[..., None]
    assert_close(
        geometry.intra_head_contributions(layer) * counted, oracles.intra_head(layer) * counted
    )


@given(any_layer())
def test_shares_with_the_output_bias_sum_to_one(layer):
    shares = geometry.inter_head_contributions(layer, include_bias=True).sum(dim=(1, 3))
    total = (shares + geometry.bias_share(layer))[usable(layer)]
    assert_close(total, torch.ones_like(total), 1e-4)


@given(any_layer())
def test_a_query_block_gives_the_rows_of_the_whole(layer):
    total = layer.pattern.shape[2]
    start, stop = total // 3, max(total // 3 + 1, 2 * total // 3)
    block = layer.queries(start, stop)
    keys = block.mask.shape[1]
    for name in REAL_METRICS:
        whole = METRICS[name](layer)[:, :, start:stop]
        assert_close(METRICS[name](block), whole[..., :keys], 1e-6)
        assert (whole[..., keys:] == 0).all()


@given(any_layer())
def test_nothing_is_nan_and_padding_is_zero(layer):
    for name in REAL_METRICS:
        edges = METRICS[name](layer)
        assert edges.isfinite().all()
        assert (edges.masked_fill(layer.edge_mask[:, None], 0) == 0).all(), name


def test_interference_and_pairs_add_up():
    layer = random_layer()
    contribution = oracles.inter_head(layer)
    found = geometry.interference(layer)
    assert_close(found.gross, contribution.abs().sum(-1))
    assert_close(found.net, contribution.sum(-1))
    edges = oracles.written(layer)[:, 2, 4]
    pairs = geometry.pairwise_interference(layer, head=2, query=4)
    assert_close(pairs, torch.einsum("bkm,bjm->bkj", edges, edges))
    block = layer.queries(3, 6)
    assert_close(geometry.pairwise_interference(block, head=2, query=4), pairs[:, :6, :6])


def test_target_contributions_take_any_direction():
    layer = random_layer()
    edges = oracles.written(layer)
    one = torch.randn(layer.output.shape[-1], dtype=torch.float64)
    expected = torch.einsum("bhqkm,m->bhqk", edges, one)
    assert_close(geometry.target_contributions(layer, one), expected)
    each = torch.randn_like(layer.output)
    expected = torch.einsum("bhqkm,bqm->bhqk", edges, each)
    assert_close(geometry.target_contributions(layer, each), expected)
    assert_close(geometry.projections(layer).sum(dim=(1, 3)), layer.output.pow(2).sum(-1))


def test_projected_value_norms_are_lengths_after_the_output_matrix():
    layer = random_layer()
    literal = torch.einsum("bhkd,hdm->bhkm", layer.value, layer.W_O).norm(dim=-1)
    assert_close(geometry.projected_value_norms(layer), literal)


def test_an_edge_removed_changes_the_output_by_what_it_wrote():
    layer = random_layer()
    pattern = layer.pattern.clone()
    pattern[1, 2, 5, 3] = 0
    left = torch.einsum("bhqk,bhkd,hdm->bqm", pattern, layer.value, layer.W_O)
    removed = layer.output[1, 5] - left[1, 5]
    share = geometry.inter_head_contributions(layer)[1, 2, 5, 3]
    assert_close(removed @ layer.output[1, 5] / layer.output[1, 5].pow(2).sum(), share, 1e-9)


def with_cancelling_query(size: float) -> LayerAttention:
    """Query 2 of three writes only `size` of what the others write: its two keys cancel."""
    pattern = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5 + size, 0.5, 0]])[None, None]
    value = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])[None, None]
    pattern[0, 0, 1] = torch.tensor([0.9, 0.1, 0])
    return layer_attention(
        4,
        pattern,
        value,
        W_O=torch.eye(2)[None],
        b_O=None,
        residual=torch.ones(1, 3, 2),
        ids=torch.arange(3)[None],
        mask=torch.ones(1, 3, dtype=torch.bool),
    )


def test_low_outputs_are_flagged_bounded_and_come_with_projections():
    layer = with_cancelling_query(1e-5)
    assert geometry.low_outputs(layer).tolist() == [[False, False, True]]
    floor = LOW_OUTPUT * 0.8
    assert_close(layer.output_floor, torch.tensor([floor]), 1e-6)
    projected = geometry.projections(layer)[0, 0, 2, 0].item()
    found = geometry.inter_head_contributions(layer)[0, 0, 2, 0].item()
    assert found == pytest.approx(projected / floor**2, rel=1e-4)


def test_an_exactly_zero_output_gives_no_nan():
    layer = with_cancelling_query(0.0)
    assert geometry.low_outputs(layer)[0, 2]
    for name in REAL_METRICS:
        assert METRICS[name](layer).isfinite().all(), name


def test_a_layer_that_writes_nothing_gives_zeros():
    layer = layer_attention(
        0,
        torch.ones(1, 1, 2, 2).tril() / 2,
        torch.zeros(1, 1, 2, 3),
        W_O=torch.ones(1, 3, 4),
        b_O=None,
        residual=torch.zeros(1, 2, 4),
        ids=torch.zeros(1, 2, dtype=torch.long),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    assert geometry.low_outputs(layer).all()
    for name in REAL_METRICS:
        assert METRICS[name](layer).isfinite().all(), name
    assert (geometry.inter_head_contributions(layer) == 0).all()


def test_one_token_gives_everything():
    layer = random_layer(batch=1, length=1)
    assert_close(geometry.inter_head_contributions(layer).sum(), torch.tensor(1.0))
    assert (METRICS["attention"](layer) == 1).all()


def test_low_precision_is_raised_to_float32():
    layer = random_layer(dtype=torch.bfloat16)
    assert layer.output.dtype == torch.float32
    total = geometry.inter_head_contributions(layer).sum(dim=(1, 3))
    assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: geometry.target_contributions(x, torch.ones(3)), "3 components.* 11.*d_model"),
        (lambda x: geometry.pairwise_interference(x, 9, 0), "layer 1 has heads 0 to 3.*head 9"),
        (lambda x: geometry.pairwise_interference(x, 0, 7), "queries 0 to 6.*query 7"),
        (lambda x: x.queries(3, 3), "layer 1 holds queries 0 to 7; cannot take 3 to 3"),
        (lambda x: x.queries(1, 4).queries(0, 1), "Take query blocks from the whole layer"),
        (lambda x: random_layer(heads=3, groups=2), "3 query heads and 2 value groups"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(InputError, match=message):
        call(random_layer())
