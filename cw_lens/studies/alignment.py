"""Which way the first key's projected value points, and the others (SPEC 8; paper, figure 5a)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.sites import UnsupportedModelError
from cw_lens.statistics import bootstrap_means, interval_columns
from cw_lens.studies.readings import TextReading, joined

COSINES = ("first_cosine", "first_spread", "others_cosine", "others_spread")


@dataclass(frozen=True, eq=False)
class Alignment:
    """Cosines between the projected values of one head, text by text.

    Each number has its interval over texts in `_low` and `_high`, and in `_n` the texts where it
    is defined: `first_` needs another key than the first, `others_` two of them.

    Attributes:
        heads: one row per layer and head: `first_cosine`, the mean over texts of the mean of
            cos(v_1 W_O, v_j W_O) over the keys j after the first, and `first_spread`, that of its
            standard deviation within a text; `others_cosine` and `others_spread` for the pairs of
            keys after the first; `left_out`, values of length 0, which have no direction.
        layers: one row per layer, of the same numbers averaged over the heads of each text.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame


def layer_alignment(layer: LayerAttention) -> dict[str, Num[Tensor, " head"]]:
    """Mean and standard deviation of each head's cosines in one text, and the values left out.

    Nothing of size [key, key] is made: with n_j = v_j / ||v_j W_O||, S their sum and M the sum of
    n_j n_j^T, the cosines of all ordered pairs sum to S^T G S, their squares to tr(M G M G).

    Raises:
        InputError, UnsupportedModelError: as `text_values`.
    """
    value, gram = text_values(layer)
    squared = ((value @ gram) * value).sum(dim=-1)
    held = squared > 0
    unit = torch.where(held[..., None], value / squared.sqrt()[..., None], 0.0)
    first, others, n = unit[:, :1], unit[:, 1:], held[:, 1:].sum(dim=-1)
    to_first = (others @ gram @ first.mT).squeeze(-1)
    total = others.sum(dim=1, keepdim=True)
    second = others.mT @ others @ gram
    # each value with itself has cosine 1, and each pair is there twice
    pairs = ((total @ gram @ total.mT).flatten() - n) / 2
    squares = ((second * second.mT).sum(dim=(1, 2)) - n) / 2
    of_first = _mean_and_spread(to_first.sum(dim=-1), to_first.square().sum(-1), n * held[:, 0])
    of_others = _mean_and_spread(pairs, squares, n * (n - 1) // 2)
    found = dict(zip(COSINES, (*of_first, *of_others), strict=True))
    return found | {"left_out": (~held).sum(dim=-1)}


def alignment(
    readings: Sequence[TextReading], *, study: str = "alignment", **options: Any
) -> Alignment:
    """Cosines by layer and by head, with intervals over texts.

    Args:
        readings: of `layer_alignment`.
        study: the name under which it was read.
        options: confidence, resamples and seed of the bootstrap, as `bootstrap_means`.

    Raises:
        InputError: no readings, or as `joined` and `bootstrap_means`.
    """
    layers, found = texts_together(readings, study, (*COSINES, "left_out"))
    left_out = found.pop("left_out").sum(axis=-1)
    heads, by_layer = mean_tables(layers, found, **options)
    return Alignment(with_counts(heads, left_out=left_out), by_layer)


def text_values(
    layer: LayerAttention,
) -> tuple[Float[Tensor, "head key d_head"], Float[Tensor, "head d_head other"]]:
    """The values of one whole text and W_O W_O^T, in float64: <v_i W_O, v_j W_O> = v_i^T G v_j.

    Raises:
        InputError: as `require_one_text`.
        UnsupportedModelError: a gate, so that there is no one value for all queries.
    """
    require_one_text(layer)
    if layer.gate is not None:
        raise UnsupportedModelError(
            f"layer {layer.index} has a gate between the values and the output matrix: each query "
            "sees other values, and the geometry of the sink's value is not defined. Read the "
            "layers without a gate, with layers=[...]."
        )
    return layer.value[0].double(), layer.gram.double()


def require_one_text(layer: LayerAttention) -> None:
    """Refuses what the studies of single texts would misread.

    Raises:
        InputError: more than one example, padding, or a block of the queries.
    """
    whole = layer.pattern.shape[2] == layer.mask.shape[1]
    if len(layer.mask) != 1 or not bool(layer.mask.all()) or not whole:
        raise InputError(
            f"layer {layer.index} holds {len(layer.mask)} examples, "
            f"{int((~layer.mask).sum())} positions of padding and {layer.pattern.shape[2]} of "
            f"{layer.mask.shape[1]} queries; the geometry of a text is read from one whole text "
            "without padding. Read it with read_text."
        )


def texts_together(
    readings: Sequence[TextReading], study: str, names: Sequence[str]
) -> tuple[tuple[int, ...], dict[str, Float[np.ndarray, "layer head text"]]]:
    """The numbers of the layers, and the [layer, head] arrays of a study with a last axis of texts.

    Raises:
        InputError: no readings, or as `joined`.
    """
    texts = joined(readings)
    if not texts:
        raise InputError(f"there are no readings of {study!r}; read at least one text.")
    stacked = {
        name: np.stack([text[study][name] for text in texts], axis=-1).astype(float)
        for name in names
    }
    return texts[0].layers, stacked


def mean_tables(
    layers: Sequence[int],
    found: Mapping[str, Float[np.ndarray, "layer head text"]],
    **options: Any,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means over texts with their intervals: one row per layer and head, and one row per layer.

    A layer's number in a text is the mean over its heads that have it. Options as
    `bootstrap_means`.
    """
    size, heads = next(iter(found.values())).shape[:2]
    by_head: dict[str, Any] = {
        "layer": np.repeat(layers, heads),
        "head": np.tile(np.arange(heads), size),
    }
    by_layer: dict[str, Any] = {"layer": list(layers)}
    for name, numbers in found.items():
        rows, mean = numbers.reshape(size * heads, -1), mean_of_finite(numbers, axis=1)
        by_head |= interval_columns(name, bootstrap_means(_same, rows, **options))
        by_layer |= interval_columns(name, bootstrap_means(_same, mean, **options))
    return pd.DataFrame(by_head), pd.DataFrame(by_layer)


def mean_of_finite(x: np.ndarray, axis: int) -> np.ndarray:
    """Mean along an axis of the numbers that are finite; NaN where none is."""
    return np.ma.filled(np.ma.masked_invalid(x).mean(axis=axis), np.nan)


def with_counts(heads: pd.DataFrame, **counts: Float[np.ndarray, "layer head"]) -> pd.DataFrame:
    """The table of heads with these counts; without the heads that a layer lacks (count NaN)."""
    heads = heads.assign(**{name: count.ravel() for name, count in counts.items()})
    heads = heads.dropna(subset=list(counts)).reset_index(drop=True)
    return heads.astype(dict.fromkeys(counts, int))


def _mean_and_spread(
    total: Float[Tensor, " head"], squares: Float[Tensor, " head"], n: Int[Tensor, " head"]
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Mean and standard deviation from sums over n numbers; NaN where there are none."""
    mean = torch.where(n > 0, total / n, torch.nan)
    variance = torch.where(n > 0, squares / n, torch.nan) - mean.square()
    return mean, variance.clamp_min(0.0).sqrt()


def _same(mean: np.ndarray) -> np.ndarray:
    return mean
