import pytest
import torch
from hypothesis import given

import cw_lens
from cw_lens.errors import InputError
from cw_lens.metrics import METRICS
from cw_lens.prompts import prompts_from_ids
from cw_lens.scores import layer_scores
from tests import oracles
from tests.layers import any_layer, random_layer
from tests.test_geometry import REAL_METRICS, assert_close


@given(any_layer())
def test_scores_equal_the_literal_mean_over_later_queries(layer):
    scores = layer_scores(layer, {"signed_contribution": METRICS["signed_contribution"]})
    edges = METRICS["signed_contribution"](layer)
    expected = oracles.token_score(edges, layer.mask, layer.causal)
    assert_close(scores["signed_contribution"], expected)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_scores_do_not_depend_on_the_block_of_queries(monkeypatch, size):
    layer = random_layer(length=13, padding="left")
    functions = {name: METRICS[name] for name in REAL_METRICS}
    monkeypatch.setattr("cw_lens.scores.QUERY_BLOCK", 13)
    whole = layer_scores(layer, functions)
    monkeypatch.setattr("cw_lens.scores.QUERY_BLOCK", size)
    for name, scores in layer_scores(layer, functions).items():
        assert_close(scores, whole[name], 1e-9)


def test_scores_of_a_model_stack_its_layers(llama):
    prompts = prompts_from_ids(llama, [[1, 5, 9, 14, 3], [1, 7, 2]])
    scores = cw_lens.token_scores(llama, prompts, list(METRICS), layers=[-1])
    assert scores.layers == (1,)
    assert scores.metrics == tuple(METRICS)
    run = cw_lens.capture(llama, prompts, layers=[1], gradient=True)
    for name, metric in METRICS.items():
        expected = oracles.token_score(metric(run.layers[0]), prompts.mask)
        assert scores[name].shape == (2, 1, 4, 5)
        assert_close(scores[name][:, 0], expected)
    assert [c.layer for c in scores.certificates] == [1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_scores_as_one_by_one(llama, side):
    rows = [[1, 5, 9, 14, 3, 8], [1, 7, 2], [4]]
    batch = prompts_from_ids(llama, rows, padding_side=side)
    together = cw_lens.token_scores(llama, batch, list(METRICS))
    for number, row in enumerate(rows):
        alone = cw_lens.token_scores(llama, prompts_from_ids(llama, [row]), list(METRICS))
        for name in METRICS:
            real = together[name][number][..., batch.mask[number]]
            assert_close(real, alone[name][0])
            assert (together[name][number][..., ~batch.mask[number]] == 0).all()


def test_a_metric_of_ones_own_is_a_function(llama):
    prompts = prompts_from_ids(llama, [[1, 5, 9]])
    doubled = cw_lens.token_scores(llama, prompts, {"twice": lambda layer: 2 * layer.pattern})
    plain = cw_lens.token_scores(llama, prompts, "attention")
    assert torch.equal(doubled["twice"], 2 * plain["attention"])


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["attention", "nonsense"], "unknown metric 'nonsense'; there are attention, value_w"),
        ([], "no metrics asked for; there are attention"),
        ({"short": lambda layer: layer.pattern[..., :1]}, r"'short' returned shape .* layer 0"),
        ({"bad": lambda layer: layer.pattern / 0}, "'bad' gives NaN or infinite.* layer 0"),
    ],
)
def test_wrong_metrics_are_named(llama, metrics, message):
    with pytest.raises(InputError, match=message):
        cw_lens.token_scores(llama, prompts_from_ids(llama, [[1, 5, 9]]), metrics)


def test_scores_name_what_they_hold(llama):
    scores = cw_lens.token_scores(llama, prompts_from_ids(llama, [[1, 5]]), "attention")
    with pytest.raises(KeyError, match="no scores of 'gradient'; there are attention"):
        scores["gradient"]


def test_a_metric_of_ones_own_counts_only_where_a_query_sees_a_key():
    layer = random_layer(padding="right")
    ones = layer_scores(layer, {"ones": lambda block: torch.ones_like(block.pattern)})["ones"]
    assert torch.equal(ones, layer.mask[:, None].expand_as(ones).to(ones.dtype))


def test_a_metric_of_ones_own_may_be_anything_where_no_query_sees_a_key():
    layer = random_layer(padding="left")
    own = {"cosine": lambda block: block.pattern / block.pattern}  # NaN where the pattern is 0
    ones = layer_scores(layer, own)["cosine"]
    assert torch.equal(ones, layer.mask[:, None].expand_as(ones).to(ones.dtype))
