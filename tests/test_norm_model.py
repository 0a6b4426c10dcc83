"""The norm model: literal fits, planted heads, its minimum, split corpora and undefined fits."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies.norm_model import (
    NormModel,
    layer_head_norms,
    norm_bins,
    norm_model,
    norm_points,
    predicted_norm,
)
from cw_lens.studies.readings import joined
from tests.layers import random_layer
from tests.test_alignment import FEW, planted, reading, same_tables, texts_of

pytestmark = pytest.mark.apart

V, KAPPA, G = 9.0, 2.0, -1.5


def looking(alpha: Tensor) -> Tensor:
    """Attention to the first key as given from the second query on, the rest on the second key."""
    keys = len(alpha) + 1
    pattern = torch.zeros(keys, keys).double()
    pattern[:, 0] = torch.cat([torch.ones(1).double(), alpha])
    pattern[1:, 1] = 1 - alpha
    return pattern[None]


def planted_head(alpha: Tensor, g: float = G, **options) -> LayerAttention:
    """||v_1||^2 = V, all others of length KAPPA and inner product g with the first."""
    first = torch.tensor([V**0.5, 0, 0]).double()
    along = g / V**0.5
    other = torch.tensor([along, (KAPPA**2 - along**2) ** 0.5, 0]).double()
    values = torch.stack([first, *[other] * len(alpha)])[None]
    return planted(values, looking(alpha.double()), **options)


def planted_texts(**options) -> list:
    alphas = [torch.linspace(0.05, 0.95, 9), torch.linspace(0.2, 0.6, 5), torch.tensor([0.5])]
    return [
        reading("norm_model", [layer_head_norms(planted_head(alpha, **options))], number)
        for number, alpha in enumerate(alphas)
    ]


def literal(layers: list[LayerAttention], head: int) -> dict[str, float]:
    """Fits of all queries by numpy's least squares, from vectors in d_model."""
    x, w_norm, dots, norms, squared, alphas = [], [], [], [], [], []
    for layer in layers:
        value = (layer.value[0, head].double() @ layer.W_O[head].double()).numpy()
        pattern = layer.pattern[0, head].double().numpy()
        squared.append(value[0] @ value[0])
        for query in range(1, len(pattern)):
            w = sum(pattern[query, key] * value[key] for key in range(1, len(value)))
            x.append(1 - pattern[query, 0])
            alphas.append(pattern[query, 0])
            w_norm.append(np.linalg.norm(w))
            dots.append(value[0] @ w)
            norms.append(np.linalg.norm(pattern[query, 0] * value[0] + w))

    def r2(measured, predicted):
        measured = np.array(measured)
        away = ((measured - measured.mean()) ** 2).sum()
        return 1 - ((measured - predicted) ** 2).sum() / away

    x, alphas = np.array(x), np.array(alphas)
    kappa = np.linalg.lstsq(x[:, None], np.array(w_norm), rcond=None)[0][0]
    g = np.linalg.lstsq(x[:, None], np.array(dots), rcond=None)[0][0]
    V = np.mean(squared)
    curvature = V - 2 * g + kappa**2
    square = alphas**2 * V + 2 * alphas * x * g + x**2 * kappa**2
    return {
        "n": len(x),
        "g": g,
        "kappa": kappa,
        "V": V,
        "alpha_star": (kappa**2 - g) / curvature if curvature > 0 else np.nan,
        "r2_w": r2(w_norm, kappa * x),
        "r2_g": r2(dots, g * x),
        "r2_norm": r2(norms, np.sqrt(np.maximum(square, 0))),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fits_are_those_of_least_squares_in_d_model(dtype):
    layers = [
        random_layer(1, 4, 2, length, seed=length, dtype=dtype) for length in (2, 1, 9, 3, 12)
    ]
    texts = [reading("norm_model", [layer_head_norms(x)], n) for n, x in enumerate(layers)]
    result = norm_model(texts, **FEW)
    # the text of one token has no query; it is left out, its V too
    used = [layer for layer in layers if layer.mask.shape[1] > 1]
    assert (result.texts, result.fitted, result.undefined) == (4, 4, 0)
    for head in range(4):
        row = result.heads.iloc[head]
        for name, number in literal(used, head).items():
            assert row[name] == pytest.approx(number, rel=2e-5, abs=1e-5, nan_ok=True), name


def test_a_planted_head_is_recovered():
    result = norm_model(planted_texts(), **FEW)
    row = result.heads.iloc[0]
    assert row[["g", "kappa", "V"]].tolist() == pytest.approx([G, KAPPA, V], rel=1e-5)
    assert row[["r2_w", "r2_g", "r2_norm"]].tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert row["alpha_star"] == pytest.approx((4 + 1.5) / (9 + 3 + 4), rel=1e-5)
    assert row["n"] == 15
    for name in ("g", "kappa", "alpha_star"):
        assert row[f"{name}_low"] == pytest.approx(row[name], rel=1e-5)
        assert row[f"{name}_high"] == pytest.approx(row[name], rel=1e-5)
    values = result.summary.set_index("quantity")["value"].to_dict()
    assert values == pytest.approx(
        {"negative_g": 1, "inner_minimum": 1, "r2_w": 1, "r2_g": 1, "r2_norm": 1}, abs=1e-5
    )


@pytest.mark.parametrize("g", [-5.0, -1.5, 0.0, 3.0])
def test_alpha_star_is_where_a_grid_search_finds_the_shortest_output(g):
    row = norm_model(planted_texts(g=g), **FEW).heads.iloc[0]
    grid = np.linspace(0, 1, 100_001)
    lengths = predicted_norm(grid, row["g"], row["kappa"], row["V"])
    assert row["alpha_star"] == pytest.approx(grid[lengths.argmin()], abs=1e-4)


def test_a_minimum_outside_and_no_minimum():
    # g above kappa^2: the shortest output is beyond alpha = 0
    result = norm_model(planted_texts(g=5.0), **FEW)
    assert result.heads["alpha_star"][0] == pytest.approx((4 - 5) / (9 - 10 + 4), rel=1e-5)
    shares = result.summary.set_index("quantity")["value"]
    assert (shares["negative_g"], shares["inner_minimum"]) == (0, 0)
    # all values alike: the output has one length at every alpha, nothing to explain
    same = torch.ones(1, 6, 3).double()
    flat = reading(
        "norm_model", [layer_head_norms(planted(same, looking(torch.linspace(0.1, 0.9, 5))))]
    )
    row = norm_model([flat], **FEW).heads.iloc[0]
    assert row["kappa"] ** 2 == pytest.approx(row["V"], rel=1e-5)
    assert np.isnan(row["r2_norm"]) and row["r2_w"] == pytest.approx(1, abs=1e-5)


def test_what_little_is_not_on_the_first_key_is_measured():
    """As a difference z - alpha v_1, in float32, w would be rounding."""
    alpha = torch.tensor([1 - 2.0**-20, 1 - 2.0**-21])
    found = layer_head_norms(planted_head(alpha, dtype=torch.float32))
    assert found["rest_norm"][0].double().numpy() == pytest.approx(
        KAPPA * (1 - alpha.double()).numpy(), rel=1e-5
    )
    assert found["first_dot_rest"][0].double().numpy() == pytest.approx(
        G * (1 - alpha.double()).numpy(), rel=1e-5
    )


def test_undefined_fits_are_nan_and_counted():
    ones = torch.ones(4).double()
    all_first = reading("norm_model", [layer_head_norms(planted_head(ones))])
    one_query = reading("norm_model", [layer_head_norms(planted_head(ones[:1] / 2))])
    for text in (all_first, one_query):
        result = norm_model([text], **FEW)
        assert (result.fitted, result.undefined) == (0, 1)
        numbers = result.heads.drop(columns=["layer", "head", "n"])
        assert numbers.isna().all(axis=None)
        assert result.summary[["value", "low", "high"]].isna().all(axis=None)
    two = torch.stack([planted_head(ones).pattern[0, 0], planted_head(ones / 2).pattern[0, 0]])
    values = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(3)).double()
    mixed = norm_model([reading("norm_model", [layer_head_norms(planted(values, two))])], **FEW)
    assert (mixed.fitted, mixed.undefined) == (1, 1)
    assert np.isfinite(mixed.summary.set_index("quantity")["value"]["negative_g"])


def test_intervals_are_over_texts_and_options_reach_them():
    texts = texts_of("norm_model", layer_head_norms, (5, 9, 8, 7, 6, 6))
    wide, narrow = norm_model(texts, **FEW), norm_model(texts, confidence=0.5, **FEW)
    for name in ("g", "kappa", "alpha_star"):
        for table in (wide.heads, narrow.heads):
            assert (table[f"{name}_low"] < table[name]).all()
            assert (table[name] < table[f"{name}_high"]).all()
        assert (narrow.heads[f"{name}_low"] > wide.heads[f"{name}_low"]).all()
    summary = wide.summary
    assert ((summary["low"] <= summary["value"]) & (summary["value"] <= summary["high"])).all()
    one = norm_model(texts[:1], **FEW)
    assert one.heads["g_low"].isna().all() and one.heads["g"].notna().all()
    assert one.summary[["low", "high"]].isna().all(axis=None)


def test_shares_are_drawn_for_all_heads_at_once():
    """g < 0 in all heads of two texts and in none of the third: a draw's share is 0 or 1."""
    alpha = torch.linspace(0.1, 0.9, 5)
    texts = []
    for number, g in enumerate([-2.0, -2.0, 2.0]):
        texts.append(
            reading("norm_model", [layer_head_norms(planted_head(alpha, g=g))] * 3, number)
        )
    result = norm_model(texts, **FEW)
    shares = result.summary.set_index("quantity").loc["negative_g"]
    assert (shares["value"], shares["low"], shares["high"]) == (1, 0, 1)


def test_split_readings_join_into_the_same_tables():
    texts = texts_of("norm_model", layer_head_norms)
    parts = joined(texts[3:], texts[:1], texts[1:3])
    same_tables(norm_model(texts, **FEW), norm_model(parts, **FEW))
    same_tables(norm_model(texts, **FEW), norm_model(texts[::-1], **FEW))


def test_layers_may_have_fewer_heads():
    layers = [random_layer(1, 4, 2, 6, seed=1), random_layer(1, 2, 2, 6, seed=2)]
    result = norm_model([reading("norm_model", [layer_head_norms(x) for x in layers])], **FEW)
    assert list(zip(result.heads["layer"], result.heads["head"], strict=True)) == [
        *((2, head) for head in range(4)),
        *((3, head) for head in range(2)),
    ]
    alone = norm_model([reading("norm_model", [layer_head_norms(layers[1])])], **FEW)
    assert result.heads["g"][4:].tolist() == alone.heads["g"].tolist()
    assert (result.fitted, result.undefined) == (6, 0)


def test_a_sample_of_queries_is_the_same_for_all_heads_and_layers():
    layer = random_layer(1, length=60, seed=4)
    some = layer_head_norms(layer, rate=0.3, seed=1)
    assert 5 < len(some["query"]) < 35
    whole = layer_head_norms(layer)
    assert whole["query"].tolist() == list(range(1, 60))
    at = some["query"].long() - 1
    for name in ("attention", "rest_norm", "first_dot_rest"):
        assert torch.allclose(some[name], whole[name][:, at], rtol=1e-5)
    again = layer_head_norms(layer, rate=0.3, seed=1)["query"]
    assert again.tolist() == some["query"].tolist()
    assert layer_head_norms(layer, rate=0.3, seed=2)["query"].tolist() != some["query"].tolist()
    other = layer_head_norms(random_layer(1, length=60, seed=5), rate=0.3, seed=1)
    assert other["query"].tolist() != some["query"].tolist()


def test_points_and_bins_of_one_head():
    texts = texts_of("norm_model", layer_head_norms, (5, 9, 3))
    model = norm_model(texts, **FEW)
    points = norm_points(texts, model, 3, 1)
    assert len(points) == 4 + 8 + 2
    assert points["query"].tolist() == [*range(1, 5), *range(1, 9), 1, 2]
    assert points["example"].tolist() == [0] * 4 + [1] * 8 + [2] * 2
    layer = random_layer(1, 4, 2, 9, seed=11)  # layer 3 of text 1
    norm = (layer.z[0, 1, 1:] @ layer.W_O[1]).norm(dim=-1)
    assert points["norm"][4:12].to_numpy() == pytest.approx(norm.numpy(), rel=1e-5)
    row = model.heads.loc[(model.heads["layer"] == 3) & (model.heads["head"] == 1)].iloc[0]
    predicted = predicted_norm(points["attention"], row["g"], row["kappa"], row["V"])
    assert points["predicted"].to_numpy() == pytest.approx(predicted.to_numpy())
    error = ((points["norm"] - points["predicted"]) ** 2).sum()
    away = ((points["norm"] - points["norm"].mean()) ** 2).sum()
    assert row["r2_norm"] == pytest.approx(1 - error / away, rel=1e-9)


def test_bins_hold_means_and_spreads():
    points = pd.DataFrame(
        {
            "attention": [0.0, 0.24, 0.25, 1.0, 0.99],
            "norm": [1.0, 3.0, 5.0, 2.0, 8.0],
            "predicted": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    table = norm_bins(points, bins=4)
    assert table.columns.tolist() == [
        *("low", "high", "n", "attention", "norm", "predicted", "spread")
    ]
    assert table.values.tolist() == [
        pytest.approx([0, 0.25, 2, 0.12, 2, 1.5, 1]),
        pytest.approx([0.25, 0.5, 1, 0.25, 5, 3, 0]),
        pytest.approx([0.75, 1, 2, 0.995, 5, 4.5, 3]),
    ]
    assert len(norm_bins(points)) == 4


def test_what_cannot_be_read_is_refused():
    with pytest.raises(UnsupportedModelError, match="layer 1 has a gate between the values and"):
        layer_head_norms(random_layer(1, gated=True))
    with pytest.raises(InputError, match="layer 1 holds 2 examples"):
        layer_head_norms(random_layer(2))
    for rate in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match=f"rate is {rate}; it is the share of queries"):
            layer_head_norms(random_layer(1), rate=rate)
    alone = texts_of("norm_model", layer_head_norms, (1, 1))
    for texts in ([], alone):
        with pytest.raises(InputError, match="no reading of 'norm_model' holds a query after"):
            norm_model(texts)
    texts = texts_of("norm_model", partial(layer_head_norms, rate=0.9), (8,))
    model: NormModel = norm_model(texts, **FEW)
    for layer, head in ((4, 0), (2, 4), (2, -1)):
        with pytest.raises(InputError, match=rf"layer {layer}, head {head} was not fitted; there"):
            norm_points(texts, model, layer, head)
    with pytest.raises(InputError, match="bins is 0; at least 1 is needed"):
        norm_bins(norm_points(texts, model, 2, 0), bins=0)
