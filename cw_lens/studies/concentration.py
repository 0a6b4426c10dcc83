"""How far each row is gathered on the first key, and how far apart contribution and attention lie.

Tables 4 and 5 of the paper, and its appendix D.6: weight of the first key, entropy of the rows with
and without it, and c / alpha by position and depth. Queries whose output is low have no shares:
they are left out, and counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens.geometry import low_outputs
from cw_lens.layer import LayerAttention
from cw_lens.scores import QUERY_BLOCK
from cw_lens.statistics import bootstrap_means
from cw_lens.studies.alignment import require_one_text
from cw_lens.studies.readings import TextReading, by_corpus

FIRST_WEIGHTS = ("attention", "value_weighted", "contribution", "absolute_contribution")
"""Weights of the first key, in the order of the axis that holds them."""

ROW_WEIGHTS = ("attention", "value_weighted", "contribution")
"""Weights whose rows have an entropy, in the order of the axis that holds them."""

RATIOS = ("mean of c / alpha", "sum of c / sum of alpha")

_BY_KEY = ("amplification", "edges", "attention", "contribution")
_TINY = 1e-38  # what a logarithm takes 0 for; times a weight of 0 it is 0 again


@dataclass(frozen=True, eq=False)
class Concentration:
    """Tables of one row per corpus (`data`), layer and quantity; `layer` <NA> is all together.

    `value` is the mean over all that the texts hold; `low` and `high` are the ends of its 95 %
    bootstrap interval over the `n` texts, NaN for a single one.

    Attributes:
        weights: mean weight of the first key (paper, table 4), by `weight`: `attention` is the mean
            over heads, `value_weighted` is normalised over head and key and summed over heads,
            `contribution` is signed and summed over heads: the layer's share. The share of |c| in
            the head's own row, mean over heads, is `absolute_contribution`.
        entropies: mean entropy in nats of the heads' rows, normalised over keys (paper, table 5),
            by `weight` (alpha, alpha ||v W_O||, |c|) and `first_key`: whether the row holds the
            first key, or is normalised over the others. A row without any weight is left out.
        amplification: c / alpha, which is ||v W_O|| / ||o|| times the cosine (paper, D.6), of the
            keys from `position` to `last`, by `ratio`: the mean over the edges that have weight,
            or the sum of c divided by the sum of alpha.
        queries: of each corpus, over all layers: those `read` and those `low`, left out.
    """

    weights: pd.DataFrame
    entropies: pd.DataFrame
    amplification: pd.DataFrame
    queries: pd.DataFrame


def layer_concentration(layer: LayerAttention) -> dict[str, Tensor]:
    """Sums over the queries of one layer of one text, which `concentration` makes means of.

    `first` [weight, head]: weight of the first key, in the order of `FIRST_WEIGHTS`. `entropy`,
    `other_entropy` [weight, head]: in nats, of the rows with and without the first key, and `rows`,
    `other_rows`: how many have weight. `amplification`, `edges`, `attention`, `contribution` [key]:
    over heads and queries, c / alpha where alpha > 0, the number of those, alpha and c. `queries`
    and `low_queries`: the number taken and left out.

    Raises:
        InputError: as `require_one_text`.
    """
    require_one_text(layer)
    low = low_outputs(layer)
    keys = layer.mask.shape[1]
    totals: dict[str, Tensor] = {
        "queries": (~low).sum().double(),
        "low_queries": low.sum().double(),
    }
    for block in layer.query_blocks(QUERY_BLOCK):
        rows = ~low[:, block.query_start : block.query_start + block.pattern.shape[2]]
        for name, found in _block_sums(block, rows).items():
            size = keys if name in _BY_KEY else found.shape[-1]
            total = totals.setdefault(name, found.new_zeros(*found.shape[:-1], size))
            total[..., : found.shape[-1]] += found
    return totals


def concentration(readings: Sequence[TextReading], **options: Any) -> Concentration:
    """The tables of all corpora, from readings that hold `layer_concentration`.

    Args:
        readings: of any texts in any order, under the name "concentration".
        options: confidence, resamples and seed of the bootstrap, as `bootstrap_means`.

    Raises:
        InputError: no readings, or as `joined` and `bootstrap_means`.
        KeyError: readings without "concentration".
    """
    tables: dict[str, list[pd.DataFrame]] = {}
    for data, texts in by_corpus(readings).items():
        held = _with_all_layers([reading["concentration"] for reading in texts])
        frames = {
            "weights": _weights(held, options),
            "entropies": _entropies(held, options),
            "amplification": _amplification(held, options),
        }
        layers = pd.array([*texts[0].layers, pd.NA], dtype="Int64")
        for frame in frames.values():
            frame["layer"] = layers[frame["layer"].to_numpy()]
        counts = [sum(text[name][-1] for text in held) for name in ("queries", "low_queries")]
        frames["queries"] = pd.DataFrame({"read": [int(counts[0])], "low": [int(counts[1])]})
        for name, frame in frames.items():
            frame.insert(0, "data", data)
            tables.setdefault(name, []).append(frame)
    return Concentration(**{name: pd.concat(f, ignore_index=True) for name, f in tables.items()})


def _block_sums(
    block: LayerAttention, rows: Bool[Tensor, "batch query"]
) -> dict[str, Float[Tensor, "*axes"]]:
    """The sums of one block of queries; a block's keys are those that it sees."""
    norm = block.output_norm[..., None]
    pulled_back = einsum(
        block.output / norm / norm, block.W_O, "batch query m, head d m -> batch head query d"
    )
    ratio = block.aligned(pulled_back)  # c / alpha
    contribution = block.pattern * ratio
    size, surprise = contribution.abs(), _surprise(block.pattern)
    found = [
        _row_sums(block.pattern, surprise),
        _weighted_row_sums(block.pattern, surprise, block.edge_value_norm),
        _row_sums(size, _surprise(size)),
    ]
    taken = rows[:, None]
    seen = (block.pattern > 0).to(ratio)
    first = (
        block.pattern[..., 0],
        _divided(found[1]["first"], found[1]["weight"].sum(dim=1, keepdim=True)),
        contribution[..., 0],
        _divided(size[..., 0], found[2]["weight"]),
    )
    sums = {"first": _over_queries(first, taken)}
    for name in ("entropy", "other_entropy", "rows", "other_rows"):
        sums[name] = _over_queries([one[name] for one in found], taken)
    by_key = zip(_BY_KEY, (ratio * seen, seen, block.pattern, contribution), strict=True)
    for name, edges in by_key:
        sums[name] = torch.matmul(taken[:, :, None].to(edges), edges).double().sum(dim=(0, 1, 2))
    return sums


Edges = Float[Tensor, "batch head query key"]
Rows = Float[Tensor, "batch head query"]


def _surprise(weight: Edges) -> Edges:
    """w log w, 0 for a weight of 0; in place, since an edge costs more to move than to compute."""
    return weight.clamp_min(_TINY).log_().mul_(weight)


def _row_sums(weight: Edges, surprise: Edges) -> dict[str, Rows]:
    """What `_rows` makes of the weights of each edge and their w log w."""
    others, other_surprise = weight[..., 1:].sum(dim=-1), surprise[..., 1:].sum(dim=-1)
    return _rows(weight[..., 0], surprise[..., 0], others, other_surprise)


def _weighted_row_sums(
    pattern: Edges, surprise: Edges, norm: Float[Tensor, "batch head query_or_1 key"]
) -> dict[str, Rows]:
    """`_row_sums` of alpha n, n the lengths: its w log w is n (alpha log alpha) + alpha (n log n).

    Where all queries see the same lengths, the sums over keys are products with two vectors.
    """
    own = _surprise(norm)
    if norm.shape[2] > 1:
        return _row_sums(pattern * norm, surprise * norm + pattern * own)

    def over(keys: slice) -> tuple[Rows, Rows]:
        n, n_log_n = norm[..., keys].mT, own[..., keys].mT
        weight = pattern[..., keys] @ n
        return weight[..., 0], (surprise[..., keys] @ n + pattern[..., keys] @ n_log_n)[..., 0]

    return _rows(*over(slice(0, 1)), *over(slice(1, None)))


def _rows(first: Rows, first_surprise: Rows, others: Rows, other_surprise: Rows) -> dict[str, Rows]:
    """Weight and entropy of each row with and without the first key; 0 for a row without weight.

    H(w / W) = log W - (sum of w log w) / W; `rows` is 1 where there is a row, else 0.
    """
    whole = others + first
    return {
        "first": first,
        "weight": whole,
        "entropy": _entropy(whole, other_surprise + first_surprise),
        "rows": (whole > 0).to(whole),
        "other_entropy": _entropy(others, other_surprise),
        "other_rows": (others > 0).to(others),
    }


def _entropy(whole: Rows, surprise: Rows) -> Rows:
    return torch.where(whole > 0, whole.log() - surprise / whole, 0.0).clamp_min(0.0)


def _divided(top: Float[Tensor, "*axes"], bottom: Float[Tensor, "*#axes"]) -> Tensor:
    return torch.where(bottom > 0, top / bottom, 0.0)


def _over_queries(
    numbers: Sequence[Float[Tensor, "batch head query"]], taken: Bool[Tensor, "batch 1 query"]
) -> Float[Tensor, "weight head"]:
    return torch.stack(list(numbers)).masked_fill(~taken, 0.0).double().sum(dim=(1, 3))


def _with_all_layers(texts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Each array with one more entry along the layers: the sum of all; no head or key is 0."""
    held = []
    for text in texts:
        arrays = {name: np.nan_to_num(array, nan=0.0) for name, array in text.items()}
        held.append({k: np.concatenate([a, a.sum(axis=0)[None]]) for k, a in arrays.items()})
    return held


def _weights(texts: Sequence[Mapping[str, np.ndarray]], options: dict) -> pd.DataFrame:
    totals = np.stack([text["first"].sum(axis=-1) for text in texts], axis=-1)
    queries = np.stack([text["queries"] for text in texts], axis=-1)
    rows = np.stack([text["rows"].sum(axis=-1) for text in texts], axis=-1)
    counts = np.stack([rows[:, 0], queries, queries, rows[:, 2]], axis=1)
    names = pd.MultiIndex.from_product(
        [range(len(totals)), FIRST_WEIGHTS], names=["layer", "weight"]
    )
    return _means(names, totals, counts, options)


def _entropies(texts: Sequence[Mapping[str, np.ndarray]], options: dict) -> pd.DataFrame:
    def of_kind(*names: str) -> np.ndarray:  # layer weight first_key text
        return np.stack(
            [np.stack([text[name].sum(axis=-1) for name in names], axis=-1) for text in texts],
            axis=-1,
        )

    totals = of_kind("entropy", "other_entropy")
    names = pd.MultiIndex.from_product(
        [range(len(totals)), ROW_WEIGHTS, [True, False]], names=["layer", "weight", "first_key"]
    )
    return _means(names, totals, of_kind("rows", "other_rows"), options)


def _amplification(texts: Sequence[Mapping[str, np.ndarray]], options: dict) -> pd.DataFrame:
    """Positions in bins: 0, 1, 2 to 3, 4 to 7 and so on."""
    longest = max(text["edges"].shape[-1] for text in texts)
    starts = [0, *(1 << power for power in range((longest - 1).bit_length()))]

    def binned(name: str) -> np.ndarray:  # layer bin text
        sums = np.zeros((len(texts[0][name]), len(starts), len(texts)))
        for place, text in enumerate(texts):
            reached = [start for start in starts if start < text[name].shape[-1]]
            sums[:, : len(reached), place] = np.add.reduceat(text[name], reached, axis=-1)
        return sums

    totals = np.stack([binned("amplification"), binned("contribution")], axis=2)
    counts = np.stack([binned("edges"), binned("attention")], axis=2)
    names = pd.MultiIndex.from_product(
        [range(len(totals)), starts, RATIOS], names=["layer", "position", "ratio"]
    )
    table = _means(names, totals, counts, options)
    table.insert(2, "last", np.maximum(2 * table["position"] - 1, 0))
    return table


def _means(
    names: pd.MultiIndex, totals: np.ndarray, counts: np.ndarray, options: dict
) -> pd.DataFrame:
    """Total over count of all texts, a row for each name; texts without any are left out."""
    totals, counts = (np.reshape(x, (len(names), -1)).astype(float) for x in (totals, counts))
    counts = np.where(counts > 0, counts, np.nan)
    estimates = bootstrap_means(lambda total, count: total / count, totals, counts, **options)
    columns = [(e.value, e.low, e.high, e.n) for e in estimates]
    table = pd.DataFrame(columns, columns=["value", "low", "high", "n"])
    return pd.concat([names.to_frame(index=False), table], axis=1)
