"""Figures of the sink studies and of the factors: what is drawn is what the tables hold."""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from cw_lens import theme
from cw_lens.figures.geometry import (
    MOST_POINTS,
    alignment_figure,
    cone_figure,
    cone_shares,
    norm_figure,
    norm_overview,
    sink_components,
)
from cw_lens.figures.outcomes import accuracy_figure
from cw_lens.figures.panels import head_maps, interval_rows
from cw_lens.figures.style import plain
from cw_lens.figures.sweeps import surgery_figure, sweep_figure
from cw_lens.figures.weights import (
    amplification_figure,
    first_weight_figure,
    joint_figure,
    regression_figure,
)
from cw_lens.studies.alignment import Alignment
from cw_lens.studies.cone import Cone
from cw_lens.studies.norm_model import NormModel, norm_bins, predicted_norm
from cw_lens.studies.sweep_results import sweep_curves
from tests.test_sweeps import made_up

pytestmark = pytest.mark.apart

LAYERS, HEADS = 4, 3
WHERE = "model, 100 % <b>of</b> texts"


def measured(n: int, **columns: float) -> dict[str, np.ndarray]:
    """Columns around these levels, each with an uneven interval and its texts."""
    draw = np.random.default_rng(0)
    found = {}
    for name, level in columns.items():
        value = level + draw.normal(0, 0.1, n)
        found |= {name: value, f"{name}_low": value - 0.2, f"{name}_high": value + 0.3}
        found[f"{name}_n"] = np.full(n, 8)
    return found


def by_layer(**columns: float) -> pd.DataFrame:
    return pd.DataFrame({"layer": range(LAYERS)} | measured(LAYERS, **columns))


def held(figure: go.Figure) -> dict[str, go.Scatter]:
    """The series by name."""
    return {trace.name: trace for trace in figure.data}


def captions_are_text(figure: go.Figure) -> str:
    """The caption, which a page escapes by itself: it must hold no markup of its own."""
    caption = figure.layout.meta["caption"]
    assert WHERE in caption and "&#" not in caption and "nan" not in caption
    assert plain(WHERE) in figure.layout.title.text
    assert figure.layout.meta["recipe"] == "cw-lens sinks"
    return caption


def drawn_with_bars(trace: go.Scatter, table: pd.DataFrame, column: str) -> None:
    assert list(trace.x) == table["layer"].tolist()
    assert list(trace.y) == table[column].tolist()
    assert trace.error_y.symmetric is False
    np.testing.assert_allclose(trace.error_y.array, 0.3)
    np.testing.assert_allclose(trace.error_y.arrayminus, 0.2)
    assert all("8 texts" in text and "[" in text for text in trace.hovertext)


def test_alignment_is_drawn_by_layer_with_its_intervals():
    table = by_layer(first_cosine=-0.2, others_cosine=0.2)
    figure = alignment_figure(Alignment(pd.DataFrame(), table), WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    drawn_with_bars(held(figure)["first key to the others"], table, "first_cosine")
    drawn_with_bars(held(figure)["among the others"], table, "others_cosine")
    assert len(figure.data) == 2


def test_shares_and_components_of_the_cone():
    table = by_layer(inside=0.4, inside_without=0.6, inside_rerun=0.5, a=-1.0, b=2.0)
    cone = Cone(pd.DataFrame(), table)
    figure = cone_shares(cone, WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    for name, column in (
        ("with the sink", "inside"),
        ("its term taken away", "inside_without"),
        ("its value 0 throughout", "inside_rerun"),
    ):
        drawn_with_bars(held(figure)[name], table, column)
    without = table.drop(columns=[n for n in table.columns if "rerun" in n])
    once = cone_shares(Cone(pd.DataFrame(), without), WHERE)
    assert [trace.name for trace in once.data] == ["with the sink", "its term taken away"]
    parts = sink_components(cone, WHERE, recipe="cw-lens sinks")
    captions_are_text(parts)
    drawn_with_bars(held(parts)["a, along μ"], table, "a")
    drawn_with_bars(held(parts)["b, orthogonal to μ"], table, "b")


FIT = {"layer": 2, "head": 1, "g": -3.0, "kappa": 4.0, "V": 9.0, "alpha_star": 0.6, "r2_norm": 0.8}


def norm_table(n: int) -> pd.DataFrame:
    draw = np.random.default_rng(1)
    attention = draw.uniform(size=n)
    predicted = predicted_norm(attention, -3.0, 4.0, 9.0)
    norm = predicted + draw.normal(0, 0.1, n)
    return pd.DataFrame({"attention": attention, "norm": norm, "predicted": predicted})


def test_the_norm_model_is_drawn_over_what_was_measured():
    points = norm_table(2 * MOST_POINTS + 1)
    figure = norm_figure(points, FIT, WHERE, recipe="cw-lens sinks")
    caption = captions_are_text(figure)
    shown = points.iloc[::3]  # evenly, so that no more than MOST_POINTS are drawn
    assert f"{len(points)} queries, of which {len(shown)} are drawn" in caption
    assert "g = -3, κ = 4, ||v₁|| = 3, R² of the predicted length 0.8" in caption
    series = held(figure)
    assert list(series["one query"].x) == shown["attention"].tolist()
    assert list(series["one query"].y) == shown["norm"].tolist()
    bins = norm_bins(points)
    assert list(series["mean and spread of a bin"].y) == bins["norm"].tolist()
    assert list(series["mean and spread of a bin"].error_y.array) == bins["spread"].tolist()
    line = series["norm model"]
    np.testing.assert_allclose(line.y, predicted_norm(np.array(line.x), -3.0, 4.0, 9.0))
    assert [shape.x0 for shape in figure.layout.shapes] == [0.6]
    assert figure.layout.annotations[-1].text == "α* = 0.600"
    outside = norm_figure(points, FIT | {"alpha_star": 1.2}, WHERE)
    assert not outside.layout.shapes and not outside.layout.annotations


def head_table(**columns: np.ndarray) -> pd.DataFrame:
    places = {
        "layer": np.repeat(range(LAYERS), HEADS),
        "head": np.tile(np.arange(HEADS), LAYERS),
    }
    return pd.DataFrame(places | columns)


def test_the_overview_maps_every_head():
    n = LAYERS * HEADS
    draw = np.random.default_rng(2)
    table = head_table(
        g=draw.normal(size=n), V=draw.uniform(1, 2, n), kappa=draw.uniform(1, 2, n),
        alpha_star=np.linspace(-0.2, 1.2, n), r2_norm=draw.uniform(size=n),
    )  # fmt: skip
    figure = norm_overview(NormModel(table, pd.DataFrame(), n, 0, 8), WHERE, recipe="cw-lens sinks")
    assert "Fits over 8 texts" in captions_are_text(figure)
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    g, star, fit = (np.array(trace.z, dtype=float) for trace in maps)
    expected = (table["g"] / (table["V"] ** 0.5 * table["kappa"])).to_numpy()
    np.testing.assert_allclose(g, expected.reshape(LAYERS, HEADS))
    inner = table["alpha_star"].to_numpy().reshape(LAYERS, HEADS)
    np.testing.assert_array_equal(np.isnan(star), (inner < 0) | (inner > 1))
    np.testing.assert_allclose(star[~np.isnan(star)], inner[(inner >= 0) & (inner <= 1)])
    np.testing.assert_allclose(fit.ravel(), table["r2_norm"])
    relative, *others = maps
    assert relative.zmid == 0 and relative.zmin == -relative.zmax
    assert all(trace.zmin == 0 and trace.zmid is None for trace in others)


def signs(figure: go.Figure) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.name == "negative"]


def test_every_negative_cell_bears_a_minus_and_no_other_cell_does():
    values = np.array([-1.0, -0.9, -0.5, -1e-6, 0.0, 1e-6, 0.5, 0.9, 1.0, np.nan, 0.2, -0.2])
    table = head_table(size=values, share=values)
    names = {"size": "size", "share": "share"}
    figure = head_maps(table, names, title="t", subtitle="s", signed=("size",))
    marked = [(y, x) for trace in signs(figure) for x, y in zip(trace.x, trace.y, strict=True)]
    negative = table.loc[table["size"] < 0, ["layer", "head"]].itertuples(index=False, name=None)
    assert sorted(marked) == sorted(negative)
    assert {trace.xaxis for trace in signs(figure)} == {"x"}  # the signed map alone
    ink, paper = signs(figure)
    assert (ink.marker.color, len(ink.x)) == (theme.INK, 3)
    assert (paper.marker.color, len(paper.x)) == (theme.PAPER, 2)


@pytest.mark.parametrize(
    ("heads", "across", "marked"), [(9, 3, True), (32, 1, True), (128, 1, False)]
)
def test_maps_of_many_heads_stand_below_each_other(heads, across, marked):
    places = {"layer": np.repeat(range(30), heads), "head": np.tile(np.arange(heads), 30)}
    table = pd.DataFrame(places | {name: -np.ones(30 * heads) for name in "abc"})
    names = dict(zip("abc", "abc", strict=True))
    figure = head_maps(table, names, title="t", subtitle="s", signed=("a",))
    lefts = {figure.layout[f"xaxis{n}"].domain[0] for n in ("", 2, 3)}
    assert len(lefts) == across
    assert bool(signs(figure)) == marked


def test_the_cone_is_drawn_with_its_outputs_on_both_sides():
    draw = np.random.default_rng(3)
    n = 40
    points = pd.DataFrame(
        draw.normal(size=(n, 4)), columns=["x", "y", "x_without", "y_without"]
    ).assign(low=np.arange(n) < 10)
    fit = {"layer": 1, "head": 0, "cone_angle": 30.0, "inside": 0.25, "inside_without": 0.75}
    figure = cone_figure(points, fit, WHERE, recipe="cw-lens sinks")
    caption = captions_are_text(figure)
    assert "30.0 degrees around μ hold 90 %" in caption
    assert "outputs 25 % lie inside with the sink, 75 % without" in caption
    for axis, ending in (("x", ""), ("x2", "_without")):
        mine = [trace for trace in figure.data if trace.xaxis == axis]
        edges = [t for t in mine if t.name == "edge of the cone"]
        slopes = sorted(t.y[1] / t.x[1] for t in edges)
        np.testing.assert_allclose(slopes, [-math.tan(math.pi / 6), math.tan(math.pi / 6)])
        for name, low in (("output", False), ("shortest quarter", True)):
            (trace,) = [t for t in mine if t.name == name]
            rows = points[points["low"] == low]
            assert list(trace.x) == rows[f"x{ending}"].tolist()
            assert list(trace.y) == rows[f"y{ending}"].tolist()
    unknown = cone_figure(points, fit | {"inside": math.nan}, WHERE)
    assert "outputs an unknown share lie inside" in unknown.layout.meta["caption"]


def test_regressions_are_rows_of_intervals():
    rows = [
        {"keys": keys, "scale": scale, "regressor": name, "r2": r2 / by, "low": r2 - 0.1}
        | {"high": r2 + 0.2, "texts": 8}
        for scale, by in (("raw", 1), ("log", 2))
        for keys, r2 in (("all", 0.3), ("first", 0.5), ("other", -0.2))
        for name in ("attention", "cosine")
    ]
    figure = regression_figure(pd.DataFrame(rows), WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    assert {t.name: list(t.x) for t in figure.data} == {
        "all keys": [0.3, 0.3], "first key": [0.5, 0.5], "other keys": [-0.2, -0.2]
    }  # fmt: skip
    for trace in figure.data:
        np.testing.assert_allclose(trace.error_x.array, 0.2)
        np.testing.assert_allclose(trace.error_x.arrayminus, 0.1)
    assert list(figure.layout.yaxis.ticktext) == ["attention", "cosine"]
    low, high = figure.layout.xaxis.range
    assert low < -0.2 and high > 1  # nothing is cut off


def test_rows_without_intervals_have_no_bars():
    table = pd.DataFrame({"row": ["a", "b"], "series": "s", "value": [1.0, 2.0]})
    options = {"title": "t", "subtitle": "", "x_title": "x"}
    figure = interval_rows(table, row="row", series="series", **options)
    assert figure.data[0].error_x.array is None
    none = table.assign(low=np.nan, high=np.nan)
    assert interval_rows(none, row="row", series="series", **options).data[0].error_x.array is None


def test_joint_distributions_count_in_powers_of_ten():
    pairs = (("attention", "cosine"), ("attention", "relative_norm"))
    rows = [
        {"x": x, "y": y, "x_low": i, "x_high": i + 1, "y_low": j, "y_high": j + 1}
        | {"points": 10 ** (i + 2 * j)}
        for x, y in pairs
        for i, j in ((0, 0), (2, 0), (2, 1))
    ]
    figure = joint_figure(pd.DataFrame(rows), WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    assert len(figure.data) == 2
    for trace in figure.data:
        # no point lies between 1 and 2, where the cells stay empty
        assert [list(row) for row in trace.z] == [[0.0, None, 2.0], [None, None, 4.0]]
        assert list(trace.x) == [0, 1, 2, 3] and list(trace.y) == [0, 1, 2]  # edges
    assert figure.layout.xaxis.title.text == "log₁₀ α"
    assert figure.layout.yaxis.title.text == "cosine"


def test_the_first_keys_weight_leaves_the_mean_over_layers_out():
    rows = [
        {"layer": layer, "weight": name, "value": 0.5, "low": 0.3, "high": 0.8, "n": 8}
        for name in ("attention", "contribution")
        for layer in (0, 1, pd.NA)
    ]
    figure = first_weight_figure(pd.DataFrame(rows), WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    assert {t.name: (list(t.x), list(t.y)) for t in figure.data} == {
        name: ([0, 1], [0.5, 0.5]) for name in ("attention", "contribution")
    }


def test_amplification_is_drawn_against_the_position_from_1():
    rows = [
        {"layer": layer, "position": p, "ratio": "mean", "value": v, "low": v, "high": v, "n": 8}
        for layer in (pd.NA, 0)
        for p, v in ((0, 0.1), (1, 0.8), (3, 1.1))
    ]
    figure = amplification_figure(pd.DataFrame(rows), WHERE, recipe="cw-lens sinks")
    captions_are_text(figure)
    (trace,) = figure.data
    assert list(trace.x) == [1, 2, 4] and list(trace.y) == [0.1, 0.8, 1.1]
    assert list(figure.layout.xaxis.tickvals) == [1, 2, 4]


def test_sweep_and_surgery_are_drawn_from_the_points():
    curves = sweep_curves(made_up(), resamples=50)
    figure = sweep_figure(curves, "texts", "100 % <b>m</b>", recipe="r")
    caption = figure.layout.meta["caption"]
    assert "100 % <b>m</b>, texts, layers 2-5, 12 texts" in caption and "&#" not in caption
    series = held(figure)
    # a series has its colour whether all sinks are drawn or not
    assert list(series) == [
        "first token", "control token", "random vector, as long", "all sinks"
    ]  # fmt: skip
    points = curves.points.set_index(["edit", "target", "factor"])["delta_nll"]
    assert dict(zip(series["first token"].x, series["first token"].y, strict=True)) == {
        factor: points["scale", "first", factor] for factor in (0.0, 0.5, 1.0)
    }
    assert dict(
        zip(series["random vector, as long"].x, series["random vector, as long"].y, strict=True)
    ) == {factor: points["random", "first", factor] for factor in (0.5, 1.0)}
    assert figure.layout.xaxis.autorange == "reversed"
    cut = surgery_figure(curves, "texts", "m")
    assert cut is not None
    kinds = list(cut.layout.yaxis.ticktext)
    first = held(cut)["first token"]
    drawn = {kinds[round(y)]: x for x, y in zip(first.x, first.y, strict=True)}
    assert drawn == {
        "removed": points["scale", "first", 0.0],
        "along μ alone": points["keep_parallel", "first", 1.0],
        "orthogonal to μ alone": points["keep_orthogonal", "first", 1.0],
        "mean of the others": points["mean", "first", 1.0],
    }
    assert list(held(cut)["all sinks"].x) == [points["scale", "sinks", 0.0]]


def test_a_sweep_without_surgery_has_no_such_figure():
    units = made_up()
    units = units[units["edit"].isin(["no_op", "scale", "random"])]
    assert surgery_figure(sweep_curves(units, resamples=50), "texts", "m") is None


def test_the_axis_of_accuracy_holds_shares_alone():
    row = {"task": "boolq", "metric": "attention", "remove": "lowest", "n": 40}
    row |= {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    table = pd.DataFrame([row | {"fraction": 0.0, "remove": "none"}, row | {"fraction": 0.7}])
    figure = accuracy_figure(table, "boolq", "lowest", "model")
    low, high = figure.layout.xaxis.range
    assert low == 0 and 0.7 < high < 0.8
