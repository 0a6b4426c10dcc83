"""Weight of the first key, entropies of rows, and c / alpha by position."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from cw_lens.errors import InputError
from cw_lens.geometry import low_outputs
from cw_lens.layer import layer_attention
from cw_lens.studies.concentration import concentration, layer_concentration
from cw_lens.studies.heads import layer_head_statistics
from cw_lens.studies.readings import TextReading, _stacked, from_bytes, joined, to_bytes
from tests import oracles
from tests.layers import random_layer

pytestmark = pytest.mark.apart

SHAPES = [
    {"heads": 4, "groups": 2, "length": 7},
    {"heads": 3, "groups": 1, "length": 6, "gated": True},
    {"heads": 2, "groups": 2, "length": 5, "causal": False, "gated": True},
    {"heads": 2, "groups": 1, "length": 2},
    {"heads": 2, "groups": 1, "length": 1},
]
TABLES = ("weights", "entropies", "amplification", "queries")


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read(example, layers, data="d") -> TextReading:
    found = [layer_concentration(layer) for layer in layers]
    arrays = {name: _stacked([one[name].numpy() for one in found]) for name in found[0]}
    tokens = layers[0].mask.shape[1]
    return TextReading(data, example, tokens, tuple(range(len(layers))), {"concentration": arrays})


def a_text(example, length=6, n_layers=2, data="d") -> TextReading:
    layers = [random_layer(1, length=length, seed=7 * example + i) for i in range(n_layers)]
    return read(example, layers, data)


def with_values(pattern, value, W_O):
    """A layer of one text; pattern [head, query, key], value [group, key, d_head]."""
    length = pattern.shape[-1]
    return layer_attention(
        0,
        pattern[None].double(),
        value[None].double(),
        W_O=W_O.double(),
        b_O=None,
        residual=torch.zeros(1, length, W_O.shape[-1]).double(),
        ids=torch.arange(length)[None],
        mask=torch.ones(1, length, dtype=torch.bool),
    )


def rows(table, **where):
    for name, value in where.items():
        table = table.loc[table[name].isna() if value is pd.NA else table[name] == value]
    return table


def entropy_of(weights):
    """In nats, of weights that need not sum to 1; None if there are none."""
    total = sum(weights)
    return -sum(w / total * math.log(w / total) for w in weights if w > 0) if total > 0 else None


def literal(layer):
    """The tables of one layer, one edge at a time; `entropies` by weight and first_key."""
    c, written = oracles.inter_head(layer)[0], oracles.written(layer)[0]
    alpha, length = layer.pattern[0].double(), written.norm(dim=-1)
    low = low_outputs(layer)[0]
    heads, queries, keys = alpha.shape
    first = {name: [] for name in ("attention", "value_weighted", "contribution", "absolute")}
    entropies, ratios = {}, {}
    for i in range(queries):
        if low[i]:
            continue
        first["value_weighted"].append(float(length[:, i, 0].sum() / length[:, i].sum()))
        first["contribution"].append(float(c[:, i, 0].sum()))
        for h in range(heads):
            first["attention"].append(float(alpha[h, i, 0]))
            first["absolute"].append(float(c[h, i, 0].abs() / c[h, i].abs().sum()))
            kinds = {
                "attention": alpha[h, i].tolist(),
                "value_weighted": length[h, i].tolist(),
                "contribution": c[h, i].abs().tolist(),
            }
            for name, row in kinds.items():
                for first_key, part in ((True, row), (False, row[1:])):
                    found = entropy_of(part)
                    if found is not None:
                        entropies.setdefault((name, first_key), []).append(found)
            for j in range(keys):
                if alpha[h, i, j] > 0:
                    pair = float(c[h, i, j]), float(alpha[h, i, j])
                    ratios.setdefault(1 << j.bit_length() - 1 if j else 0, []).append(pair)
    first["absolute_contribution"] = first.pop("absolute")
    return {name: np.mean(values) for name, values in first.items()}, entropies, ratios


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [2, 64])
def test_tables_are_those_of_literal_loops(shape, block, monkeypatch):
    monkeypatch.setattr("cw_lens.studies.concentration.QUERY_BLOCK", block)
    layer = random_layer(1, **shape)
    found = concentration([read(0, [layer])])
    weights, entropies, ratios = literal(layer)
    for layer_number in (0, pd.NA):
        table = rows(found.weights, layer=layer_number).set_index("weight")["value"]
        assert table.to_dict() == pytest.approx(weights, rel=1e-10)
        for row in rows(found.entropies, layer=layer_number).itertuples():
            values = entropies.get((row.weight, row.first_key), [])
            mean = np.mean(values) if values else np.nan
            assert row.value == pytest.approx(mean, rel=1e-9, abs=1e-12, nan_ok=True)
        table = rows(found.amplification, layer=layer_number)
        assert table["position"].unique().tolist() == sorted(ratios)
        for row in table.itertuples():
            c, alpha = np.array(ratios[row.position]).T
            mean = row.ratio == "mean of c / alpha"
            expected = (c / alpha).mean() if mean else c.sum() / alpha.sum()
            assert row.value == pytest.approx(expected, rel=1e-9)
    assert len(found.entropies) == 2 * 6


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_single_precision_is_close_and_agrees_with_the_heads(shape):
    layer = random_layer(1, dtype=torch.float32, **shape)
    found = layer_concentration(layer)
    parts = {name: getattr(layer, name) for name in ("W_O", "residual", "gate", "b_O")}
    double = layer_concentration(
        layer_attention(
            1,
            layer.pattern.double(),
            layer.value.double(),
            ids=torch.zeros(layer.mask.shape, dtype=torch.long),
            mask=layer.mask,
            causal=layer.causal,
            **{name: None if part is None else part.double() for name, part in parts.items()},
        )
    )
    queries = found["queries"]
    heads = layer_head_statistics(layer)
    for place, name in enumerate(("attention", "value_weighted", "contribution")):
        first = found["first"][place] / queries
        assert torch.allclose(first, heads[f"first_{name}"].double(), atol=1e-6)
        entropy = found["entropy"][place] / queries
        assert torch.allclose(entropy, heads[f"{name}_entropy"].double(), atol=1e-6)
    for name, value in found.items():
        assert value.dtype == torch.float64
        assert torch.allclose(value, double[name], rtol=1e-5, atol=1e-5), name


def test_uniform_rows_have_the_logarithm_of_their_length():
    length, heads = 9, 2
    pattern = torch.ones(heads, length, length).double().tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)
    layer = with_values(pattern, torch.ones(1, length, 3), torch.ones(heads, 3, 4))
    found = concentration([read(0, [layer])])
    n = np.arange(1, length + 1)
    for name in ("attention", "value_weighted", "contribution"):
        table = rows(found.entropies, layer=0, weight=name).set_index("first_key")["value"]
        assert table[True] == pytest.approx(np.log(n).mean(), abs=1e-12)
        # the first query has no other key: it has no row, not a row of entropy 0
        assert table[False] == pytest.approx(np.log(n[1:] - 1).mean(), abs=1e-12)
    table = rows(found.weights, layer=0).set_index("weight")["value"]
    assert table.tolist() == pytest.approx([(1 / n).mean()] * 4, abs=1e-12)
    assert rows(found.amplification, layer=0)["value"].to_numpy() == pytest.approx(1 / heads)


def test_rows_on_one_key_have_no_entropy_and_a_sink_has_what_was_planted():
    length = 6
    pattern = torch.eye(length)[None].clone()
    layer = with_values(pattern, torch.ones(1, length, 2), torch.ones(1, 2, 2))
    found = concentration([read(0, [layer])])
    assert found.entropies["value"].abs().max() < 1e-12
    assert rows(found.weights, layer=0)["value"].tolist() == pytest.approx([1 / 6] * 4)
    # a query gives 0.8 to a first value of length 1 along x, 0.2 to itself, of length 4 along -x
    # for odd queries: o = 0.8 - 0.8, low; and 8 along x for even ones: o = 0.8 + 1.6
    pattern = 0.8 * torch.eye(length)[:1].expand(length, length) + 0.2 * torch.eye(length)
    value = torch.tensor([1.0, -4.0, 8.0, -4.0, 8.0, -4.0])[None, :, None]
    layer = with_values(pattern[None], value, torch.tensor([[[1.0, 0.0]]]))
    found = concentration([read(0, [layer])])
    assert found.queries.to_dict("records") == [{"data": "d", "read": 3, "low": 3}]
    table = rows(found.weights, layer=0).set_index("weight")["value"]
    shares = [(1 + 0.8 + 0.8) / 3, (1 + 2 * 0.8 / 2.4) / 3]
    assert table["attention"] == pytest.approx(shares[0])
    assert table[1:].tolist() == pytest.approx([shares[1]] * 3)
    table = rows(found.amplification, layer=0).set_index(["position", "ratio"])["value"]
    assert table[0, "mean of c / alpha"] == pytest.approx((1 + 2 / 2.4) / 3)
    assert table[0, "sum of c / sum of alpha"] == pytest.approx((1 + 2 * 0.8 / 2.4) / 2.6)
    assert table[2, "mean of c / alpha"] == pytest.approx(8 / 2.4)
    assert np.isnan(table[1, "mean of c / alpha"])  # its only reader is low


def test_signed_and_absolute_shares_differ_where_heads_cancel():
    # one query of interest: head 0 writes 3 by the first key and -1 by itself, head 1 writes 2
    pattern = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])
    value = torch.tensor([[[6.0], [-2.0]], [[1.0], [2.0]]])
    layer = with_values(pattern, value, torch.ones(2, 1, 1))
    found = layer_concentration(layer.queries(0, 2))
    firsts = (found["first"] / found["queries"]).sum(dim=-1)  # of heads
    assert firsts[2] == pytest.approx((1 + 3 / 4) / 2)
    assert firsts[1] == pytest.approx((1 + 3 / 6) / 2)
    assert firsts[3] == pytest.approx((2 + 3 / 4) / 2)
    table = rows(concentration([read(0, [layer])]).weights, layer=0).set_index("weight")["value"]
    assert table["contribution"] == pytest.approx(0.875)
    assert table["absolute_contribution"] == pytest.approx((2 + 0.75) / 4)


def test_edges_without_weight_have_no_amplification():
    # the last query sees no key but itself, as in a sliding window
    pattern = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0, 0, 1.0]]])
    value = torch.tensor([[[1.0], [3.0], [5.0]]])
    found = concentration([read(0, [with_values(pattern, value, torch.ones(1, 1, 1))])])
    table = rows(found.amplification, layer=0, ratio="mean of c / alpha").set_index("position")
    assert table["value"].tolist() == pytest.approx([(1 + 1 / 2) / 2, 3 / 2, 1.0])
    assert table["last"].tolist() == [0, 1, 3]
    others = rows(found.entropies, layer=0, weight="attention", first_key=False)
    assert others["value"].tolist() == pytest.approx([0.0])


def test_parts_of_a_corpus_join_into_exactly_the_same_tables():
    readings = [a_text(i, length=1 + 3 * i) for i in range(5)]
    readings += [a_text(i, data="e", length=9) for i in range(2)]
    kept = [from_bytes(r.data, r.example, r.tokens, to_bytes(r)) for r in readings]
    whole = concentration(readings)
    parts = concentration(joined(kept[4:], kept[:4]))
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(parts, name), check_exact=True)
    alone = concentration(readings[5:])
    for name in TABLES:
        of_whole = rows(getattr(whole, name), data="e").reset_index(drop=True)
        pd.testing.assert_frame_equal(of_whole, getattr(alone, name), check_exact=True)


def test_means_weigh_queries_and_intervals_are_over_the_texts():
    layers = [random_layer(1, length=length, seed=length) for length in (3, 10, 6, 5, 4, 7)]
    found = concentration([read(i, [layer]) for i, layer in enumerate(layers)], resamples=500)
    of_texts = [layer_concentration(layer) for layer in layers]
    total = sum(float(one["first"][2].sum()) for one in of_texts)
    row = rows(found.weights, layer=0, weight="contribution").iloc[0]
    assert row["value"] == pytest.approx(total / 35)
    assert row["n"] == 6
    assert row["low"] < row["value"] < row["high"]
    # only one text reaches key 8
    far = rows(found.amplification, layer=0, position=8)
    assert (far["n"] == 1).all() and far[["low", "high"]].isna().all(axis=None)
    assert far["value"].notna().all()
    again = concentration(
        [read(i, [layer]) for i, layer in enumerate(layers)], resamples=500, seed=1
    )
    for name in ("weights", "entropies", "amplification"):
        assert not getattr(again, name)["low"].equals(getattr(found, name)["low"])
        assert getattr(again, name)["value"].equals(getattr(found, name)["value"])


def test_all_layers_together_are_the_mean_over_layers():
    found = concentration([a_text(0, length=8, n_layers=3)])
    assert found.weights["layer"].dtype == "Int64"
    by_layer = found.weights.dropna(subset="layer").groupby("weight")["value"].mean()
    together = rows(found.weights, layer=pd.NA).set_index("weight")["value"]
    assert together.to_dict() == pytest.approx(by_layer.to_dict())
    assert found.queries.to_dict("records") == [{"data": "d", "read": 24, "low": 0}]


def test_layers_with_fewer_heads_count_by_their_own():
    layers = [random_layer(1, heads=heads, groups=1, length=5) for heads in (4, 2)]
    found = concentration([read(0, layers)])
    for number, layer in enumerate(layers):
        table = rows(found.weights, layer=number).set_index("weight")["value"]
        assert table.to_dict() == pytest.approx(literal(layer)[0])


def test_one_token_has_all_on_the_first_key_and_no_other_row():
    found = concentration([a_text(0, length=1)])
    assert rows(found.weights, layer=pd.NA)["value"].tolist() == pytest.approx([1.0] * 4)
    assert rows(found.entropies, first_key=True)["value"].to_numpy() == pytest.approx(0.0)
    others = rows(found.entropies, first_key=False)
    assert others["value"].isna().all() and (others["n"] == 0).all()
    assert found.amplification["position"].unique().tolist() == [0]
    assert found.weights[["low", "high"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: concentration([]), "no readings: give those of at least one text"),
        (lambda: concentration([a_text(0), a_text(0)]), "d, example 0 was read twice"),
        (lambda: concentration([a_text(0)], confidence=2.0), "confidence is 2"),
        (lambda: layer_concentration(random_layer(2)), "layer 1 holds 2 examples, 0 positions"),
        (
            lambda: layer_concentration(random_layer(2, padding="left").examples(slice(1, 2))),
            "layer 1 holds 1 examples, 1 positions of padding",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_readings_without_the_study_are_refused():
    with pytest.raises(KeyError, match="'concentration' was not read"):
        concentration([TextReading("d", 0, 3, (0,), {"cone": {}})])
