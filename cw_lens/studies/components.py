"""What makes a contribution: how well its factors, alone and in pairs, explain it.

Tables 1, 2 and 3 and figure 7 of the paper, from a uniform sample of the edges of a corpus.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.stats import DegenerateDataWarning
from sklearn.model_selection import GroupKFold, KFold

from cw_lens.errors import InputError
from cw_lens.statistics import bootstrap_means, correlation, line_r2, pair_sums
from cw_lens.studies.edge_samples import CAPACITY, FACTORS
from cw_lens.studies.readings import TextReading, by_corpus

KEYS = {"all": ("first", "other"), "first": ("first",), "other": ("other",)}
"""The samples, and the kinds of keys that each is drawn from."""

PAIRS = tuple(combinations(FACTORS, 2))


FOLDS, BINS = 5, 50
RANGES = {"attention": (-10.0, 0.0), "relative_norm": (-3.0, 3.0), "cosine": (-1.0, 1.0)}
"""Ends of the axes of the joint distributions: powers of ten, for the cosine itself."""


@dataclass(frozen=True, eq=False)
class Components:
    """Tables of one row per corpus (`data`), `keys` ("all", "first", "other") and quantity.

    Attributes:
        regressions: R^2 of the linear regression of c on one `regressor`, a factor or a product of
            two (paper, tables 1 and 3), on the `scale` "raw", or "log" of the magnitudes. `r2` is
            held out, the mean over five shuffled folds of points, `spread` their standard
            deviation; `r2_by_text` is held out over five folds of whole texts, NaN for fewer
            texts. `low` and `high` are the ends of the 95 % bootstrap interval over the `texts` of
            the regression's own R^2, moved by what holding out takes from it; NaN for one text.
        correlations: Pearson's `r` of the logarithms of two factors' magnitudes, `first` and
            `second` (paper, table 2), over all points, with `low` and `high` over texts and the
            `spread` over the five folds.
        joint: `points` in each cell of two factors `x` and `y` that is not empty (paper, figure 7),
            in powers of ten, for the cosine itself. What lies beyond the axes is in the last cell.
        samples: `points` of each sample, how many of them have a factor of 0 and so no logarithm
            (`zero`), the number of `edges` they were drawn from, and of `low_queries`, over all
            layers, which were left out because their output is too short to take shares of.
    """

    regressions: pd.DataFrame
    correlations: pd.DataFrame
    joint: pd.DataFrame
    samples: pd.DataFrame


def components(
    readings: Sequence[TextReading], *, capacity: int = CAPACITY, seed: int = 0
) -> Components:
    """The tables of all corpora, from readings that hold `layer_components`.

    "all" is a uniform sample of all edges: the denser of first and other keys is thinned to the
    rate of the other kind, and readings of different rates to the lowest. The interval of an R^2
    comes from sums over each text, drawn with replacement, which say all about the line of one
    regressor. A draw repeats points, so that none can be held out of it: the interval is as wide as
    that of the R^2 of all points, around the held-out one.

    Args:
        readings: of any texts in any order, under the name "components".
        capacity: points that each of the three samples keeps at most, of lowest priority.
        seed: of the folds and of the bootstrap.

    Raises:
        InputError: no readings, a capacity below 1, or as `joined`.
        KeyError: readings without "components".
    """
    if capacity < 1:
        raise InputError(f"a capacity of {capacity} keeps no points; the paper's is {CAPACITY}.")
    tables: dict[str, list[pd.DataFrame]] = {}
    for data, texts in by_corpus(readings).items():
        held = [reading["components"] for reading in texts]
        for keys, kinds in KEYS.items():
            points, text = _sample(held, keys, capacity)
            frames = _tables(points, text, len(held), seed)
            counted = {"edges": [f"{kind}_edges" for kind in kinds], "low_queries": ["low_queries"]}
            for count, names in counted.items():
                frames["samples"][count] = sum(int(t[name].sum()) for t in held for name in names)
            for name, frame in frames.items():
                frame.insert(0, "data", data)
                frame.insert(1, "keys", keys)
                tables.setdefault(name, []).append(frame)
    return Components(**{name: pd.concat(t, ignore_index=True) for name, t in tables.items()})


def _sample(
    texts: Sequence[Mapping[str, np.ndarray]], keys: str, capacity: int
) -> tuple[dict[str, np.ndarray], Int[np.ndarray, " point"]]:
    """The factors and c of each point of a uniform sample, and the number of its text."""
    rate = min(text[f"{kind}_rate"].min() for text in texts for kind in KEYS[keys])
    parts = []
    for number, text in enumerate(texts):
        # rounded as the priorities were, so that none lies above the rate it was drawn at
        taken = text["priority"] <= text["priority"].dtype.type(rate)
        if keys != "all":
            taken &= (text["key"] == 0) == (keys == "first")
        part = {name: text[name][taken] for name in ("priority", *FACTORS, "contribution")}
        parts.append(part | {"text": np.full(taken.sum(), number)})
    points = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    lowest = np.sort(np.argsort(points.pop("priority"), kind="stable")[:capacity])
    points = {name: column[lowest] for name, column in points.items()}
    return points, points.pop("text")


def _tables(
    points: Mapping[str, np.ndarray], text: Int[np.ndarray, " point"], n_texts: int, seed: int
) -> dict[str, pd.DataFrame]:
    """Every table of one sample."""
    sound = np.logical_and.reduce([column != 0 for column in points.values()])
    logs = {name: np.log10(np.abs(column[sound])) for name, column in points.items()}
    scales = (("raw", points, text, np.multiply), ("log", logs, text[sound], np.add))
    regressions = []
    for scale, columns, texts, product in scales:
        factors = [columns[name] for name in FACTORS]
        factors += [product(columns[x], columns[y], dtype=float) for x, y in PAIRS]
        sums = _fold_sums([(x, columns["contribution"]) for x in factors], texts, n_texts, seed)
        regressions.append(_regressions(sums, seed).assign(scale=scale))
    sums = _fold_sums([(logs[x], logs[y]) for x, y in PAIRS], text[sound], n_texts, seed)
    return {
        "regressions": pd.concat(regressions),
        "correlations": _correlations(sums, seed),
        "joint": _joint(logs | {"cosine": points["cosine"][sound]}),
        "samples": pd.DataFrame({"points": [len(sound)], "zero": [int((~sound).sum())]}),
    }


def _fold_sums(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    text: Int[np.ndarray, " point"],
    n_texts: int,
    seed: int,
) -> Float[np.ndarray, "sum row text fold"]:
    """`pair_sums` of each pair of columns, by text and by one of five shuffled folds of points."""
    fold = np.zeros(len(text), dtype=int)
    if len(text) >= 2 * FOLDS:
        for number, (_, held) in enumerate(
            KFold(FOLDS, shuffle=True, random_state=seed).split(text)
        ):
            fold[held] = number
    sums = [pair_sums(x, y, FOLDS * text + fold, FOLDS * n_texts) for x, y in pairs]
    return np.stack(sums, axis=1).reshape(6, len(pairs), n_texts, FOLDS)


def _regressions(sums: Float[np.ndarray, "sum row text fold"], seed: int) -> pd.DataFrame:
    by_text = sums.sum(axis=3)
    points = by_text[0, 0].astype(int)  # of each text
    fold = np.zeros(len(points), dtype=int)  # of each text; one for all has nothing to fit to
    if (points > 0).sum() >= FOLDS:
        groups = np.repeat(np.arange(len(points)), points)
        for number, (_, held) in enumerate(GroupKFold(FOLDS).split(groups, groups=groups)):
            fold[np.unique(groups[held])] = number
    of_texts = np.stack([by_text[:, :, fold == n].sum(axis=2) for n in range(FOLDS)], axis=2)
    held_out, by_text_held_out = (
        line_r2(folds.sum(axis=2, keepdims=True) - folds, folds)
        for folds in (sums.sum(axis=2), of_texts)
    )
    table = _intervals(lambda *sums: line_r2(np.stack(sums), np.stack(sums)), by_text, seed)
    r2 = held_out.mean(axis=1)
    for end in ("low", "high"):
        table[end] += r2 - table["value"]
    table["value"] = r2
    table.insert(0, "regressor", [*FACTORS, *(f"{x} * {y}" for x, y in PAIRS)])
    table["spread"] = held_out.std(axis=1, ddof=1)
    table["r2_by_text"] = by_text_held_out.mean(axis=1)
    return table.rename(columns={"value": "r2"})


def _correlations(sums: Float[np.ndarray, "sum row text fold"], seed: int) -> pd.DataFrame:
    table = _intervals(lambda *sums: correlation(np.stack(sums)), sums.sum(axis=3), seed)
    table.insert(0, "first", [x for x, _ in PAIRS])
    table.insert(1, "second", [y for _, y in PAIRS])
    table["spread"] = correlation(sums.sum(axis=2)).std(axis=1, ddof=1)
    return table.rename(columns={"value": "r"})


def _intervals(
    statistic: Callable[..., np.ndarray], sums: Float[np.ndarray, "sum row text"], seed: int
) -> pd.DataFrame:
    """The statistic of each row over all texts that have points, with its interval.

    NaN ends where some draw of texts has no variance to explain, as of texts of one token.
    """
    n, *totals = sums
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)
        estimates = bootstrap_means(statistic, np.where(n > 0, n, np.nan), *totals, seed=seed)
    columns = [(e.value, e.low, e.high, e.n) for e in estimates]
    return pd.DataFrame(columns, columns=["value", "low", "high", "texts"])


def _joint(columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
    frames = []
    for pair in PAIRS:
        ends = [RANGES[name] for name in pair]
        axes = [np.clip(columns[name], *end) for name, end in zip(pair, ends, strict=True)]
        counts, x_edges, y_edges = np.histogram2d(*axes, bins=BINS, range=ends)
        x, y = counts.nonzero()
        cells = {"x": pair[0], "x_low": x_edges[x], "x_high": x_edges[x + 1]}
        cells |= {"y": pair[1], "y_low": y_edges[y], "y_high": y_edges[y + 1]}
        frames.append(pd.DataFrame(cells | {"points": counts[x, y].astype(int)}))
    return pd.concat(frames)
