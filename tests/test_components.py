"""Regressions of contributions on their factors, from a sample of the edges."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GroupKFold, KFold, cross_val_score

from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions
from cw_lens.layer import layer_attention
from cw_lens.statistics import expanded_confidence
from cw_lens.studies.components import PAIRS, components
from cw_lens.studies.edge_samples import FACTORS, layer_components, sampling_rates
from cw_lens.studies.readings import TextReading, _stacked, from_bytes, joined, to_bytes
from tests import oracles
from tests.layers import random_layer

pytestmark = pytest.mark.apart

NUMBERS = {"first_rate": 1.0, "other_rate": 1.0, "low_queries": 0, "first_edges": 10}
SHAPES = [
    {"heads": 4, "groups": 2, "length": 7},
    {"heads": 3, "groups": 1, "length": 6, "gated": True},
    {"heads": 2, "groups": 2, "length": 5, "causal": False, "gated": True},
    {"heads": 1, "groups": 1, "length": 2},
]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read(example, layers, data="d", **options) -> TextReading:
    """The layers of one text, as a pass over the model would leave them."""
    found = [layer_components(layer, **options) for layer in layers]
    arrays = {name: _stacked([one[name].numpy() for one in found]) for name in found[0]}
    tokens = layers[0].mask.shape[1]
    return TextReading(data, example, tokens, tuple(range(len(layers))), {"components": arrays})


def a_text(example, length=6, n_layers=2, data="d", **options) -> TextReading:
    layers = [
        replace(random_layer(1, length=length, seed=7 * example + index), index=index)
        for index in range(n_layers)
    ]
    return read(example, layers, data, **options)


def made(example, columns, **numbers) -> TextReading:
    """A text whose points are given."""
    n = len(columns["attention"])
    rest = {"key": np.ones(n), "priority": np.linspace(0, 1, n, endpoint=False)}
    arrays = {name: np.asarray(column)[None] for name, column in (rest | columns).items()}
    counts = {name: np.array([number]) for name, number in (NUMBERS | numbers).items()}
    arrays |= {"other_edges": np.array([n])} | counts
    return TextReading("d", example, 9, (0,), {"components": arrays})


def points_of(readings, where=lambda keys: keys >= 0):
    """Columns of all points, in order, and the place of each one's text."""
    parts = []
    for place, reading in enumerate(readings):
        table = reading["components"]
        held = np.isfinite(table["priority"]) & where(table["key"])
        columns = {name: table[name][held] for name in (*FACTORS, "contribution", "priority")}
        parts.append(pd.DataFrame(columns | {"text": place}))
    return pd.concat(parts, ignore_index=True)


def regressors(points):
    raw = {name: points[name] for name in FACTORS}
    return raw | {f"{x} * {y}": points[x] * points[y] for x, y in PAIRS}


def rows(table, **where):
    for name, value in where.items():
        table = table.loc[table[name] == value]
    return table


@pytest.mark.parametrize("shape", SHAPES)
def test_every_edge_is_drawn_once_and_has_the_factors_of_literal_formulas(shape):
    layer = random_layer(1, **shape)
    found = layer_components(layer)
    head, query, key = (found[name].long() for name in ("head", "query", "key"))
    edges = layer.edge_mask[0].expand(layer.pattern.shape[1:])
    drawn = torch.zeros_like(edges, dtype=torch.int64)
    drawn.index_put_((head, query, key), torch.ones_like(head), accumulate=True)
    assert torch.equal(drawn, edges.long())
    assert found["other_edges"] + found["first_edges"] == edges.sum() == len(head)
    assert found["first_edges"] == (key == 0).sum()
    written = oracles.written(layer)[0]
    output = written.sum(dim=(0, 2))
    value = layer.value[0, :, None].expand(*edges.shape, -1)
    value = value if layer.gate is None else value * layer.gate[0, :, :, None]
    projected = torch.einsum("hqkd,hdm->hqkm", value, layer.W_O)
    expected = {
        "attention": layer.pattern[0],
        "relative_norm": projected.norm(dim=-1) / output.norm(dim=-1)[:, None],
        "cosine": torch.cosine_similarity(projected, output[:, None], dim=-1),
        "contribution": oracles.inter_head(layer)[0],
    }
    for name, values in expected.items():
        at = values[head, query, key]
        assert torch.allclose(found[name], at, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("shape", SHAPES)
def test_points_in_single_precision_are_those_of_the_geometry(shape):
    layer = random_layer(1, dtype=torch.float32, **shape)
    found = layer_components(layer)
    at = (0, *(found[name].long() for name in ("head", "query", "key")))
    whole = decompose(layer)
    assert all(found[name].dtype == torch.float32 for name in (*FACTORS, "head", "priority"))
    for name in FACTORS:
        values = getattr(whole, name).expand_as(layer.pattern)[at]
        assert torch.allclose(found[name], values, rtol=1e-6, atol=1e-6), name
    values = inter_head_contributions(layer)[at]
    assert torch.allclose(found["contribution"], values, rtol=1e-6, atol=1e-6)


def test_points_are_gathered_in_parts(monkeypatch):
    layer = random_layer(1, length=9)
    whole = layer_components(layer)
    monkeypatch.setattr("cw_lens.studies.edge_samples._POINTS", 7)
    parts = layer_components(layer)
    assert all(torch.allclose(parts[name], whole[name], rtol=1e-14) for name in whole)


def test_low_outputs_are_left_out_and_counted():
    layer = random_layer(1, heads=2, groups=1, length=6)
    value = layer.value[:, :1].clone()
    value[:, :, 0] = 0.0  # all that the first query sees
    layer = layer_attention(
        1,
        layer.pattern,
        value,
        W_O=layer.W_O,
        b_O=None,
        residual=layer.residual,
        ids=torch.arange(6)[None],
        mask=layer.mask,
    )
    found = layer_components(layer)
    assert found["low_queries"] == 1
    assert found["query"].min() == 1
    assert (found["first_edges"], found["other_edges"]) == (2 * 5, 2 * 15)


def test_a_sample_is_uniform_over_edges():
    layer = random_layer(1, heads=2, groups=1, length=8)
    rate, first_rate, draws = 0.2, 0.5, 400
    counts = torch.zeros(layer.pattern.shape[1:])
    sizes, priorities = [], []
    for seed in range(draws):
        found = layer_components(layer, rate=rate, first_rate=first_rate, seed=seed)
        at = tuple(found[name].long() for name in ("head", "query", "key"))
        assert len(set(zip(*(column.tolist() for column in at), strict=True))) == len(at[0])
        counts[at] += 1
        other = found["key"] > 0
        sizes.append(int(other.sum()))
        priorities.append(found["priority"][other])
    assert counts[~layer.edge_mask[0].expand_as(counts)].sum() == 0
    for share, held in (
        (first_rate, counts[:, :, 0].flatten()),
        (rate, counts[:, :, 1:][layer.edge_mask[0, :, 1:].expand(2, -1, -1)]),
    ):
        expected = draws * share
        chi2 = float(((held - expected) ** 2).sum() / (expected * (1 - share)))
        assert 0.001 < stats.chi2.sf(chi2, len(held)) < 0.999
    # as many as independent draws give, whose number varies
    assert np.var(sizes) == pytest.approx(56 * rate * (1 - rate), rel=0.25)
    assert stats.kstest(torch.cat(priorities).numpy() / rate, "uniform").pvalue > 0.001


def test_a_sample_depends_on_its_own_text_layer_and_seed_alone():
    def places(layer, seed=0):
        found = layer_components(layer, rate=0.3, first_rate=0.3, seed=seed)
        return torch.stack([found[name] for name in ("head", "query", "key")]).tolist()

    layer = random_layer(1, length=9)
    other = random_layer(1, length=9, seed=1)
    assert places(layer) == places(layer)
    assert places(layer) == places(replace(layer, value=other.value))
    changed = replace(layer, prompt_digest=other.prompt_digest), replace(layer, index=2)
    assert all(places(layer) != places(one) for one in changed)
    assert places(layer) != places(layer, seed=1)


def test_rates_give_the_capacity_and_hardly_more():
    rates = sampling_rates([512, 256], 9, 30, capacity=10_000)
    others, firsts = 270 * (512 * 511 + 256 * 255) // 2, 270 * 768
    assert rates["rate"] == pytest.approx(10_500 / others, rel=1e-12)
    assert rates["first_rate"] == pytest.approx(10_500 / firsts, rel=1e-12)
    assert sampling_rates([2, 1], 2, 2) == {"rate": 1.0, "first_rate": 1.0}
    assert sampling_rates([1], 2, 2, capacity=1) == {"rate": 1.0, "first_rate": 1.0}


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ("all", lambda key: key >= 0),
        ("first", lambda key: key == 0),
        ("other", lambda key: key > 0),
    ],
)
def test_regressions_are_those_of_scikit_learn(keys, where):
    readings = [a_text(example, length=4 + example) for example in range(6)]
    found = components(readings, seed=3)
    points = points_of(readings, where)
    logs = np.log10(np.abs(points[[*FACTORS, "contribution"]]))
    log_regressors = {name: logs[name] for name in FACTORS}
    log_regressors |= {f"{x} * {y}": logs[x] + logs[y] for x, y in PAIRS}
    folds = KFold(5, shuffle=True, random_state=3)
    for scale, columns, c in (
        ("raw", regressors(points), points["contribution"]),
        ("log", log_regressors, logs["contribution"]),
    ):
        table = rows(found.regressions, keys=keys, scale=scale).set_index("regressor")
        assert list(table.index) == list(columns)
        for name, x in columns.items():
            options = {"X": x.to_numpy()[:, None], "y": c, "scoring": "r2"}
            r2 = cross_val_score(LinearRegression(), cv=folds, **options)
            assert table.loc[name, "r2"] == pytest.approx(r2.mean(), abs=1e-10)
            assert table.loc[name, "spread"] == pytest.approx(r2.std(ddof=1), abs=1e-10)
            by_text = cross_val_score(
                LinearRegression(), cv=GroupKFold(5), groups=points["text"], **options
            )
            assert table.loc[name, "r2_by_text"] == pytest.approx(by_text.mean(), abs=1e-10)
    table = rows(found.correlations, keys=keys).set_index(["first", "second"])
    held = list(folds.split(logs))
    for x, y in PAIRS:
        assert table.loc[(x, y), "r"] == pytest.approx(np.corrcoef(logs[x], logs[y])[0, 1])
        by_fold = [np.corrcoef(logs[x].iloc[at], logs[y].iloc[at])[0, 1] for _, at in held]
        assert table.loc[(x, y), "spread"] == pytest.approx(np.std(by_fold, ddof=1))
    sample = rows(found.samples, keys=keys).iloc[0]
    assert sample["points"] == sample["edges"] == len(points)
    assert sample["zero"] == sample["low_queries"] == 0


def test_intervals_are_those_of_texts_drawn_with_replacement():
    readings = [a_text(example, length=4 + example) for example in range(5)]
    found = components(readings, seed=3)
    points = points_of(readings)
    x, c = points["attention"] * points["cosine"], points["contribution"]
    logs = np.log10(points[["attention", "relative_norm"]])
    columns = np.stack([x, c, logs["attention"], logs["relative_norm"]])
    groups = [columns[:, points["text"] == place] for place in range(5)]
    draw = np.random.default_rng(3)
    r2, correlations = [], []
    for _ in range(10_000):
        drawn = np.concatenate([groups[place] for place in draw.integers(0, 5, size=5)], axis=1)
        r2.append(np.corrcoef(drawn[:2])[0, 1] ** 2)
        correlations.append(np.corrcoef(drawn[2:])[0, 1])
    tail = (1 - expanded_confidence(0.95, 5)) / 2
    row = rows(found.regressions, keys="all", scale="raw", regressor="attention * cosine").iloc[0]
    held_out = row["r2"] - np.corrcoef(x, c)[0, 1] ** 2
    ends = np.quantile(r2, [tail, 1 - tail]) + held_out
    assert held_out < -1e-4 and row[["low", "high"]].tolist() == pytest.approx(ends)
    assert row["low"] < row["r2"] < row["high"]
    row = rows(found.correlations, keys="all", first="attention", second="relative_norm").iloc[0]
    ends = np.quantile(correlations, [tail, 1 - tail])
    assert row[["low", "high"]].tolist() == pytest.approx(ends)
    assert row["texts"] == 5


def uniform_values(seed=0, length=12, heads=3):
    """A layer where every projected value is the same, so that c = alpha / heads."""
    layer = random_layer(1, heads=heads, length=length, groups=1, seed=seed)
    return layer_attention(
        0,
        layer.pattern,
        torch.full_like(layer.value[:, :1], 0.5),
        W_O=torch.ones_like(layer.W_O),
        b_O=None,
        residual=layer.residual,
        ids=torch.full((1, length), seed),
        mask=layer.mask,
    )


def test_where_values_are_all_the_same_attention_explains_everything():
    readings = [read(seed, [uniform_values(seed)]) for seed in range(6)]
    found = components(readings)
    points = points_of(readings)
    assert np.allclose(points["contribution"], points["attention"] / 3, atol=1e-12)
    for keys in ("all", "first", "other"):
        table = rows(found.regressions, keys=keys, scale="raw").set_index("regressor")
        whole = ["attention", "attention * relative_norm", "attention * cosine"]
        for column in ("r2", "r2_by_text", "low", "high"):
            assert table.loc[whole, column].tolist() == pytest.approx([1.0] * 3, abs=1e-5)
        nothing = table.drop(index=whole)
        assert nothing["r2"].abs().max() < 0.1
        logs = rows(found.regressions, keys=keys, scale="log").set_index("regressor")
        assert logs.loc[whole, "r2"].tolist() == pytest.approx([1.0] * 3, abs=1e-5)


def test_a_mix_with_noise_has_the_share_that_was_planted():
    draw = np.random.default_rng(0)
    readings = []
    for example in range(8):
        factors = {name: draw.normal(size=20_000) for name in FACTORS}
        factors["contribution"] = factors["attention"] + 2 * draw.normal(size=20_000)
        readings.append(made(example, factors))
    found = components(readings)
    table = rows(found.regressions, keys="other", scale="raw").set_index("regressor")
    assert table.loc["attention", "r2"] == pytest.approx(0.2, abs=0.005)
    assert table.loc["attention", "low"] < 0.2 < table.loc["attention", "high"]
    assert table.drop(index="attention")["r2"].abs().max() < 1e-3
    correlations = rows(found.correlations, keys="other")
    assert correlations["r"].abs().max() < 0.01


def test_points_without_a_logarithm_are_counted_and_left_out():
    draw = np.random.default_rng(1)
    columns = {name: draw.uniform(0.1, 1, size=40) for name in FACTORS}
    columns["cosine"][::4] *= -1
    columns["attention"][3] = columns["cosine"][5] = 0.0
    columns["contribution"] = np.prod([columns[name] for name in FACTORS], axis=0)
    found = components([made(0, columns)])
    sample = rows(found.samples, keys="other").iloc[0]
    assert (sample["points"], sample["zero"]) == (40, 2)
    sound = np.delete(np.arange(40), [3, 5])
    x, y = (np.log(np.abs(columns[name][sound])) for name in ("attention", "cosine"))
    row = rows(found.correlations, keys="other", first="attention", second="cosine").iloc[0]
    assert row["r"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    joint = rows(found.joint, keys="other")
    assert joint.groupby(["x", "y"])["points"].sum().tolist() == [38] * 3
    assert joint.loc[joint["y"] == "cosine", "y_low"].min() < -0.1  # the sign is kept


def test_cells_of_a_joint_distribution_hold_their_points():
    columns = {
        "attention": [0.5, 0.5, 1e-3, 1e-30],
        "relative_norm": [10.0, 10.0, 1e-1, 1e9],
        "cosine": [-0.99, -0.99, 0.01, 1.0],
        "contribution": [1.0, 1.0, 1.0, 1.0],
    }
    joint = rows(components([made(0, columns)]).joint, keys="other")
    table = rows(joint, x="attention", y="cosine")[
        ["x_low", "x_high", "y_low", "y_high", "points"]
    ].to_numpy()
    expected = [[-10, -9.8, 0.96, 1, 1], [-3, -2.8, 0, 0.04, 1], [-0.4, -0.2, -1, -0.96, 2]]
    assert np.allclose(table, expected)
    norms = rows(joint, x="attention", y="relative_norm")
    assert norms["y_high"].tolist() == pytest.approx([3.0, -0.96, 1.08])


def test_parts_of_a_corpus_join_into_exactly_the_same_tables():
    readings = [a_text(i, length=3 + i, rate=0.7, first_rate=0.9) for i in range(6)]
    readings += [a_text(i, data="e", length=9, rate=0.5) for i in range(2)]
    kept = [from_bytes(r.data, r.example, r.tokens, to_bytes(r)) for r in readings]
    whole = components(readings, capacity=100)
    parts = components(joined(kept[5:], kept[:5]), capacity=100)
    for name in ("regressions", "correlations", "joint", "samples"):
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(parts, name), check_exact=True)
    assert list(whole.samples["data"]) == ["d"] * 3 + ["e"] * 3
    alone = components(readings[6:], capacity=100)
    of_whole = rows(whole.regressions, data="e").reset_index(drop=True)
    pd.testing.assert_frame_equal(of_whole, alone.regressions, check_exact=True)


def test_denser_samples_are_thinned_and_the_lowest_priorities_kept():
    readings = [
        a_text(0, length=20, rate=0.2, first_rate=0.9),
        a_text(1, length=20, rate=0.6, first_rate=0.6),
    ]
    found = components(readings, capacity=60)
    points = points_of(readings)
    first = pd.concat([points_of([r], lambda key: key == 0) for r in readings])
    held = {
        "all": points.loc[points["priority"] <= 0.2],
        "first": first.loc[first["priority"] <= 0.6],
        "other": points_of(readings, lambda key: key > 0).query("priority <= 0.2"),
    }
    for keys, sample in held.items():
        assert rows(components(readings).samples, keys=keys).iloc[0]["points"] == len(sample) > 60
        lowest = sample.nsmallest(60, "priority")
        joint = rows(found.joint, keys=keys, x="attention", y="cosine")
        expected, *_ = np.histogram2d(
            np.log10(lowest["attention"]),
            lowest["cosine"],
            bins=50,
            range=[(-10, 0), (-1, 1)],
        )
        assert joint["points"].tolist() == expected[expected > 0].tolist()
        assert rows(found.samples, keys=keys).iloc[0]["points"] == 60


def test_a_single_text_has_no_interval_and_no_folds_of_texts():
    found = components([a_text(0, length=8)])
    table = found.regressions
    assert table["r2"].notna().all()
    assert table[["low", "high", "r2_by_text"]].isna().all(axis=None)
    assert found.correlations["r"].notna().all()
    assert found.correlations[["low", "high"]].isna().all(axis=None)


def test_texts_of_one_and_two_tokens():
    found = components([a_text(0, length=1), a_text(1, length=2)])
    samples = found.samples.set_index("keys")
    assert samples["points"].to_dict() == {"all": 32, "first": 24, "other": 8}
    assert samples["edges"].tolist() == samples["points"].tolist()
    others = rows(found.regressions, keys="other")
    assert others["r2"].isna().all()  # fewer than two points a fold
    assert (others["texts"] == 1).all()
    alone = components([a_text(0, length=1)])
    others = rows(alone.regressions, keys="other")
    assert others["r2"].isna().all() and (others["texts"] == 0).all()
    assert rows(alone.correlations, keys="other")["r"].isna().all()
    assert len(rows(alone.joint, keys="other")) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampling_rates([], 1, 1), "0 lengths, 1 heads, 1 layers"),
        (lambda: sampling_rates([3, 0], 1, 1), "nothing below 1"),
        (lambda: sampling_rates([3], 1, 1, capacity=0), "a capacity of 0: give"),
        (lambda: layer_components(random_layer(1), rate=0.0), r"rates of 0.0 and 1.0; they lie"),
        (lambda: layer_components(random_layer(1), first_rate=1.5), "rates of 1.0 and 1.5"),
        (lambda: layer_components(random_layer(2)), "layer 1 holds 2 examples, 0 positions"),
        (lambda: components([]), "no readings: give those of at least one text"),
        (lambda: components([a_text(0)], capacity=0), "a capacity of 0 keeps no points"),
        (lambda: components([a_text(0), a_text(0)]), "d, example 0 was read twice"),
    ],
)
def test_what_cannot_be_read_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_readings_without_a_sample_are_refused():
    with pytest.raises(KeyError, match="'components' was not read"):
        components([TextReading("d", 0, 3, (0,), {"cone": {}})])
