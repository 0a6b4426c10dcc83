"""How a head's attention to the first key sets the length of its output (SPEC 8; figures 5b, 11).

With v_1 the first key's projected value and alpha its weight, o = alpha v_1 + w, w the part of all
other keys. The model: ||w|| = kappa (1 - alpha) and <v_1, w> = g (1 - alpha), so that
||o||^2 = alpha^2 V + 2 alpha (1 - alpha) g + (1 - alpha)^2 kappa^2 with V = ||v_1||^2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Num
from torch import Tensor

from cw_lens.errors import InputError, spans
from cw_lens.layer import LayerAttention
from cw_lens.noise import mixed, uniform
from cw_lens.statistics import Estimate, bootstrap_together, interval_columns
from cw_lens.studies.alignment import mean_of_finite, text_values
from cw_lens.studies.readings import TextReading, joined

_FLAT = 1e-12  # a spread below a millionth of the size is rounding of float32
_FITTED = ("g", "kappa", "V", "alpha_star", "r2_w", "r2_g", "r2_norm")
_SUMMARY = ("negative_g", "inner_minimum", "r2_w", "r2_g", "r2_norm")


@dataclass(frozen=True, eq=False)
class NormModel:
    """The fit of every head, over all texts.

    Attributes:
        heads: one row per layer and head, each number but `n` with `_low` and `_high` over texts:
            `n` queries; `g` and `kappa`, fitted through the origin; `V`, the mean over texts of
            ||v_1||^2; `alpha_star` = (kappa^2 - g) / (V - 2 g + kappa^2), the attention at which
            the model's output is shortest, NaN where it has no minimum; `r2_w` and `r2_g` of the
            two fits and `r2_norm` of the predicted against the measured length, 1 - SS_res / SS_tot
            about the mean, NaN where the measured does not vary. All are NaN where fewer than two
            queries, or none that looks beyond the first key, leave the fit undefined.
        summary: one row per quantity with `value`, `low`, `high`: `negative_g` and
            `inner_minimum`, the shares of fitted heads with g < 0 and with 0 < alpha_star < 1,
            and `r2_w`, `r2_g`, `r2_norm`, means over heads. Texts are drawn for all heads
            at once and the fits made anew, except that of r2_norm, whose prediction is held.
        fitted: how many heads have a fit.
        undefined: how many have none.
        texts: how many texts have a query after the first; others are left out.
    """

    heads: pd.DataFrame
    summary: pd.DataFrame
    fitted: int
    undefined: int
    texts: int


def layer_head_norms(
    layer: LayerAttention, *, rate: float = 1.0, seed: int = 0
) -> dict[str, Num[Tensor, "*shape"]]:
    """What the norm model is fitted to, at each query after the first, which sees itself alone.

    `attention` to the first key, `rest_norm` = ||w|| and `first_dot_rest` = <v_1, w>, [head, query]
    in float32; `query`, their positions; `first_norm_squared` = ||v_1||^2, [head]. w is summed from
    the other keys: as a difference it would be lost where almost all attention is on the first.

    Args:
        layer: one text.
        rate: the share of queries to keep, the same in all layers and heads; functools.partial
            sets another for corpora too large to keep all.
        seed: with the text, says which.

    Raises:
        InputError: a rate outside (0, 1], and as `text_values`.
        UnsupportedModelError: as `text_values`.
    """
    if not 0 < rate <= 1:
        raise InputError(f"rate is {rate}; it is the share of queries to keep, above 0 up to 1.")
    value, gram = text_values(layer)
    first = value[:, :1] @ gram
    query = 1 + torch.arange(value.shape[1] - 1, device=value.device)
    query = query[uniform(mixed(mixed(layer.prompt_digest + seed) + query)) < rate]
    pattern = layer.pattern[0, :, query]
    rest = (pattern[..., 1:] @ layer.value[0, :, 1:]).double()
    return {
        "query": query.int(),
        "attention": pattern[..., 0].float(),
        "rest_norm": ((rest @ gram) * rest).sum(dim=-1).clamp_min(0.0).sqrt().float(),
        "first_dot_rest": (rest @ first.mT).squeeze(-1).float(),
        "first_norm_squared": (first * value[:, :1]).sum(dim=(1, 2)),
    }


def norm_model(
    readings: Sequence[TextReading], *, study: str = "norm_model", **options: Any
) -> NormModel:
    """The fit of every layer and head over a corpus, with intervals over texts.

    Each query counts once. One V serves all texts of a head, so that the table holds the model.

    Args:
        readings: of `layer_head_norms`.
        study: the name under which it was read.
        options: confidence, resamples and seed of the bootstrap, as `bootstrap_together`.

    Raises:
        InputError: no text with a query after the first, or as `joined`, `bootstrap_together`.
    """
    texts = [text for text in joined(readings) if text[study]["query"].shape[1]]
    if not texts:
        raise InputError(
            f"no reading of {study!r} holds a query after the first; read at least one text of "
            "two tokens, and keep some of its queries."
        )
    layers, heads = texts[0].layers, texts[0][study]["attention"].shape[1]
    moments = _stacked([_moments(text[study]) for text in texts])
    fit = _fit({name: numbers.sum(axis=-1) for name, numbers in moments.items()})
    grid = {name: numbers.reshape(len(layers), heads) for name, numbers in fit.items()}
    moments |= _stacked([_missed(text[study], grid) for text in texts])
    names, n = list(moments), moments["n"].sum(axis=-1)

    def numbers(means: Float[np.ndarray, "row draw"]) -> Float[np.ndarray, "number draw"]:
        totals = means.reshape(len(names), len(n), -1) * len(texts)
        drawn = dict(zip(names, totals, strict=True))
        fit = _fit(drawn)
        fit["r2_norm"] = _r2(drawn["missed"], drawn["o"], drawn["oo"], drawn["n"])
        return np.concatenate([*(fit[name] for name in _FITTED), _summary(fit)])

    found = bootstrap_together(numbers, np.concatenate(list(moments.values())), **options)
    columns: dict[str, Any] = {
        "layer": np.repeat(layers, heads),
        "head": np.tile(np.arange(heads), len(layers)),
        "n": n.astype(int),
    }
    for place, name in enumerate(_FITTED):
        columns |= _without_n(name, found[place * len(n) : (place + 1) * len(n)])
    table = pd.DataFrame(columns)
    table = table.loc[table["n"] > 0].reset_index(drop=True)  # a layer may lack some heads
    fitted = int(np.isfinite(table["g"]).sum())
    summary = {"quantity": _SUMMARY} | _without_n("value", found[len(_FITTED) * len(n) :])
    summary = pd.DataFrame(summary).rename(columns={"value_low": "low", "value_high": "high"})
    return NormModel(table, summary, fitted, len(table) - fitted, len(texts))


def predicted_norm(attention: Any, g: Any, kappa: Any, V: Any) -> Any:
    """The model's length of a head's output, in units of the residual stream; arrays or numbers.

    A fit need not be that of any vectors: where its square falls below 0 the length is 0.
    """
    rest = 1 - attention
    squared = attention**2 * V + 2 * attention * rest * g + rest**2 * kappa**2
    return np.sqrt(np.maximum(squared, 0.0))


def norm_points(
    readings: Sequence[TextReading],
    model: NormModel,
    layer: int,
    head: int,
    *,
    study: str = "norm_model",
) -> pd.DataFrame:
    """One row per text and query of one head: `attention` to the first key, `norm`, `predicted`.

    Raises:
        InputError: a layer or head that the model was not fitted to.
    """
    row = model.heads.loc[(model.heads["layer"] == layer) & (model.heads["head"] == head)]
    if row.empty:
        raise InputError(
            f"layer {layer}, head {head} was not fitted; there are layers "
            f"{spans(model.heads['layer'].tolist())} with "
            f"{model.heads['head'].max() + 1} heads at most."
        )
    g, kappa, V = (float(row[name].iloc[0]) for name in ("g", "kappa", "V"))
    parts = []
    for text in joined(readings):
        held, place = text[study], text.layers.index(layer)
        attention = held["attention"][place, head].astype(float)
        parts.append(
            pd.DataFrame(
                {
                    "data": text.data,
                    "example": text.example,
                    "query": held["query"][place].astype(int),
                    "attention": attention,
                    "norm": _measured_norm(held)[place, head],
                    "predicted": predicted_norm(attention, g, kappa, V),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def norm_bins(points: pd.DataFrame, bins: int = 20) -> pd.DataFrame:
    """Figure 5b: one row per bin of attention that holds a point.

    Bins are equally wide from 0 to 1: `low`, `high`, `n` points, the means of `attention`, `norm`
    and `predicted` over them, and `spread`, the standard deviation of the measured norm.

    Raises:
        InputError: no bins.
    """
    if bins < 1:
        raise InputError(f"bins is {bins}; at least 1 is needed, 20 are reasonable.")
    place = np.minimum((points["attention"].to_numpy() * bins).astype(int), bins - 1)
    held, place, n = np.unique(place, return_inverse=True, return_counts=True)

    def mean(numbers: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=numbers) / n

    names = ("attention", "norm", "predicted")
    means = {name: mean(points[name].to_numpy()) for name in names}
    away = points["norm"].to_numpy() - means["norm"][place]
    edges = {"low": held / bins, "high": (held + 1) / bins}
    return pd.DataFrame(edges | {"n": n} | means | {"spread": np.sqrt(mean(away**2))})


Held = Mapping[str, np.ndarray]
Grid = Float[np.ndarray, "layer head"]
Rows = Float[np.ndarray, "row *draw"]


def _without_n(name: str, estimates: Sequence[Estimate]) -> dict[str, list]:
    """Columns of a number and its interval; all rest on the same texts."""
    columns = interval_columns(name, estimates)
    del columns[f"{name}_n"]
    return columns


def _measured_norm(held: Held) -> Float[np.ndarray, "layer head query"]:
    """||o|| from ||alpha v_1 + w||^2, in float64."""
    attention, rest, dot = _terms(held)
    squared = attention**2 * held["first_norm_squared"][..., None] + 2 * attention * dot + rest**2
    return np.sqrt(np.maximum(squared, 0.0))


def _terms(held: Held) -> list[Float[np.ndarray, "layer head query"]]:
    return [held[name].astype(float) for name in ("attention", "rest_norm", "first_dot_rest")]


def _moments(held: Held) -> dict[str, Grid]:
    """Sums over the queries of one text that the fits are made of; x = 1 - alpha, d = <v_1, w>."""
    attention, w, d = _terms(held)
    x, o = 1 - attention, _measured_norm(held)
    products = {"xx": x * x, "xw": x * w, "xd": x * d, "w": w, "ww": w * w, "d": d, "dd": d * d}
    products |= {"o": o, "oo": o * o}
    sums = {name: product.sum(axis=-1) for name, product in products.items()}
    V = held["first_norm_squared"]
    return sums | {"n": np.isfinite(attention).sum(axis=-1), "V": V, "texts": np.ones_like(V)}


def _missed(held: Held, fit: Mapping[str, Grid]) -> dict[str, Grid]:
    """Sum over one text's queries of (measured - predicted norm)^2."""
    g, kappa, V = (fit[name][..., None] for name in ("g", "kappa", "V"))
    error = _measured_norm(held) - predicted_norm(held["attention"].astype(float), g, kappa, V)
    return {"missed": (error**2).sum(axis=-1)}


def _stacked(texts: Sequence[Mapping[str, Grid]]) -> dict[str, Float[np.ndarray, "row text"]]:
    """Layers and heads on one axis, texts on the other."""
    return {
        name: np.stack([text[name].ravel() for text in texts], axis=-1).astype(float)
        for name in texts[0]
    }


def _fit(total: Mapping[str, Rows]) -> dict[str, Rows]:
    """Least squares through the origin, from sums over queries."""
    defined = (total["n"] > 1.5) & (total["xx"] > 0)
    xx = np.where(defined, total["xx"], np.nan)
    g, kappa = total["xd"] / xx, total["xw"] / xx
    V = np.where(defined, total["V"] / total["texts"], np.nan)
    curvature = V - 2 * g + kappa**2
    missed_w = total["ww"] - 2 * kappa * total["xw"] + kappa**2 * xx
    missed_g = total["dd"] - 2 * g * total["xd"] + g**2 * xx
    return {
        "g": g,
        "kappa": kappa,
        "V": V,
        "alpha_star": (kappa**2 - g) / np.where(curvature > 0, curvature, np.nan),
        "r2_w": _r2(missed_w, total["w"], total["ww"], total["n"]),
        "r2_g": _r2(missed_g, total["d"], total["dd"], total["n"]),
    }


def _r2(missed: Rows, sums: Rows, squares: Rows, n: Rows) -> Rows:
    """1 - SS_res / SS_tot about the mean; NaN where all are equal."""
    spread = squares - sums**2 / np.where(n > 0, n, np.nan)
    return 1 - missed / np.where(spread > _FLAT * squares, spread, np.nan)


def _summary(fit: Mapping[str, Float[np.ndarray, "row draw"]]) -> Float[np.ndarray, "number draw"]:
    """The numbers of `NormModel.summary`, over the heads that have them."""
    fitted = np.isfinite(fit["g"])
    inner = (fit["alpha_star"] > 0) & (fit["alpha_star"] < 1)
    shares = [np.where(fitted, flag, np.nan) for flag in (fit["g"] < 0, inner)]
    numbers = [*shares, fit["r2_w"], fit["r2_g"], fit["r2_norm"]]
    return np.stack([mean_of_finite(number, axis=0) for number in numbers])
