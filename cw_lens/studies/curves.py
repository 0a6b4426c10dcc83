"""Removal curves: how much worse a model predicts as a metric's pairs are removed (SPEC 7)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Float

from cw_lens.errors import InputError
from cw_lens.statistics import Estimate, bootstrap_mean, bootstrap_means
from cw_lens.studies.comparisons import comparison_table, sentences

FAMILY = ["data", "granularity", "protected", "remove"]
"""What series must share to be compared. The ranking is not in it: `gradient` and global plans are
ranked from a clean pass also where the other rows are ranked online."""
SERIES = [*FAMILY, "metric", "ranking"]
COLUMNS = (
    *SERIES,
    *("example", "tokens", "fraction", "seed"),
    *("removed", "nll_sum", "clean_nll_sum", "kl_sum", "top1_agreed"),
)
"""What a table of units must hold; losses and divergences are sums over predicted tokens, nats."""
NO_OP = "no_op"
"""The metric's name in units of the no-op run: everything is done, and nothing is removed."""


@dataclass(frozen=True, eq=False)
class RemovalCurves:
    """Curves, their areas and what can be said of them. Curves are never made monotone.

    In each table `series` is the metric's name, with its ranking where one family has both.

    Attributes:
        points: one row per series and fraction: `n` examples, `n_seeds`, `failed` units,
            `removed_pairs` (mean over texts of the (head, token) pairs really removed: sinks that
            arise in a masked pass are protected in it, so that an online plan may remove fewer
            than its fraction of the clean run's), `predicted` tokens, `clean_perplexity`,
            `perplexity` = exp(sum of nll / predicted), `delta_perplexity` and `delta_nll` (mean
            over examples of nats per predicted token), each masked minus clean with `_low` and
            `_high`, `kl` (nats per predicted token) and `top1_agreement` (share of predicted
            tokens).
        aopc: one row per series: `aopc`, the mean over the family's fractions of delta_nll, in
            nats per token, with `_low` and `_high` over the `n` examples that hold every
            fraction; `aopc_delta_perplexity`, the plain mean of delta_perplexity.
        comparisons: one row per series, `other`, `role` and fraction (NaN: the AOPC): `value`,
            `other_value` and their `difference` in nats per token with `low` and `high`, over the
            `n` examples that hold both, and a `verdict`.
        sentences: one per compared pair, on its AOPC.
        failed: the units whose loss or divergence is not finite; they are in no number above.
        confidence: of each interval.
    """

    points: pd.DataFrame
    aopc: pd.DataFrame
    comparisons: pd.DataFrame
    sentences: tuple[str, ...]
    failed: pd.DataFrame
    confidence: float


def removal_curves(
    units: pd.DataFrame, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> RemovalCurves:
    """Curves and comparisons from a table with one row per unit.

    Losses of a metric's seeds are averaged within each example first, so a point of `random` shows
    its mean draw. An example with a failed unit is left out of that point, and of the AOPC.
    Intervals are bootstrapped over examples, whose losses and token counts are drawn together;
    they are not corrected for the number of comparisons.

    Args:
        units: columns as `COLUMNS`; rows of metric `no_op` are no curve.
        confidence: of each interval.
        resamples: how often examples are drawn.
        seed: of the draws.

    Raises:
        InputError: no unit of a curve, missing columns, a unit that occurs twice, an unknown
            direction, or an example that predicts nothing.
    """
    _check(units)
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    units = units.loc[units["metric"] != NO_OP]
    numbers = units[["nll_sum", "clean_nll_sum", "kl_sum"]].to_numpy(dtype=float)
    finite = np.isfinite(numbers).all(axis=1)
    measured = _per_example(units.assign(failed=~finite))
    names = _series_names(measured)
    points, areas, comparisons = [], [], []
    for family, rows in grouped(measured, FAMILY):
        label: dict[str, str] = dict(zip(FAMILY, family, strict=True))
        fractions = sorted(rows["fraction"].unique())
        axes = (fractions, sorted(rows["example"].unique()))
        deltas: dict[str, np.ndarray] = {}
        rankings: dict[str, str] = {}
        for (metric, ranking), series in grouped(rows, ["metric", "ranking"]):
            name = names[*family, metric, ranking]
            head = label | {"metric": metric, "ranking": ranking, "series": name}
            wide = by_fraction(series, *axes)
            of_series, area = series_points(wide, fractions, options)
            points += [head | point for point in of_series]
            areas.append(head | area)
            deltas[name], rankings[name] = delta_nll(wide), ranking
        comparisons.append(comparison_table(label, fractions, deltas, rankings, options))
    compared = pd.concat(comparisons, ignore_index=True)
    return RemovalCurves(
        points=pd.DataFrame(points),
        aopc=pd.DataFrame(areas),
        comparisons=compared,
        sentences=sentences(compared),
        failed=units.loc[~finite].reset_index(drop=True),
        confidence=confidence,
    )


def no_op_failures(units: pd.DataFrame) -> pd.DataFrame:
    """The units of metric `no_op` whose loss is not the clean one bit for bit; none if all is well.

    Raises:
        InputError: missing columns.
    """
    _check_columns(units, ("metric", "nll_sum", "clean_nll_sum"))
    same = (units["nll_sum"] == units["clean_nll_sum"]) | (
        units["nll_sum"].isna() & units["clean_nll_sum"].isna()
    )
    moved = (units["metric"] == NO_OP) & ~same
    return units.loc[moved].reset_index(drop=True)


def _check_columns(units: pd.DataFrame, columns: tuple[str, ...]) -> None:
    if not isinstance(units, pd.DataFrame):
        raise InputError(
            f"units is a {type(units).__name__}; it must be the table that faithfulness returns, "
            "or a units.parquet read by pandas."
        )
    missing = [name for name in columns if name not in units.columns]
    if missing:
        raise InputError(
            f"the table of units lacks the columns {', '.join(missing)}; it holds "
            f"{', '.join(map(str, units.columns)) or 'none'}."
        )


def _check(units: pd.DataFrame) -> None:
    _check_columns(units, COLUMNS)
    if set(units["metric"]) <= {NO_OP}:
        raise InputError(
            f"the table of units holds no curve: {len(units)} rows, all of metric {NO_OP}. Run the "
            "study for at least one metric."
        )
    unknown = sorted(set(units["remove"]) - {"highest", "lowest"})
    if unknown:
        raise InputError(f"remove is {unknown[0]!r} in a unit; it is 'highest' or 'lowest'.")
    short = units.loc[~(units["tokens"] >= 2)]
    if len(short):
        first = short.iloc[0]
        raise InputError(
            f"example {first['example']} of {first['data']} has {first['tokens']} token; the first "
            "token is not predicted, so it needs two. Leave it out."
        )
    again = units.loc[units.duplicated([*SERIES, "fraction", "seed", "example"])]
    if len(again):
        first = again.iloc[0]
        raise InputError(
            f"{len(again)} units occur twice, first example {first['example']} of {first['data']} "
            f"for {first['metric']} at fraction {first['fraction']}. Keep one of each."
        )


def _per_example(units: pd.DataFrame) -> pd.DataFrame:
    """One row per series, fraction and example: means over seeds; NaN where a unit failed."""
    units = units.sort_values(["example", "seed"], kind="stable")  # sums ignore the rows' order
    keys = [*SERIES, "fraction", "example"]
    rows = units.groupby(keys, sort=False, observed=True)
    examples = rows.agg(
        tokens=("tokens", "first"),
        nll=("nll_sum", "mean"),
        clean=("clean_nll_sum", "mean"),
        kl=("kl_sum", "mean"),
        agreed=("top1_agreed", "mean"),
        removed=("removed", "mean"),
        seeds=("seed", "size"),
        failed=("failed", "sum"),
    )
    # a mean over seeds skips NaN, and would hide the seed that failed
    examples.loc[examples["failed"] > 0, "nll"] = np.nan
    return examples.reset_index()


def grouped(table: pd.DataFrame, keys: list[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The rows of each combination of keys, in the order in which they first occur."""
    return cast(list, list(table.groupby(keys, sort=False, observed=True)))


def _series_names(examples: pd.DataFrame) -> dict[tuple[str, ...], str]:
    """Each series' name: its metric, and its ranking where its family has the metric twice."""
    series = [key for key, _ in grouped(examples, SERIES)]
    times = Counter(key[:-1] for key in series)
    return {key: f"{key[-2]} ({key[-1]})" if times[key[:-1]] > 1 else key[-2] for key in series}


def by_fraction(
    series: pd.DataFrame, fractions: list, examples: list
) -> dict[str, Float[np.ndarray, "fraction example"]]:
    """Each measured number of one series as a matrix; NaN where a unit failed or is missing."""
    places = (
        np.searchsorted(fractions, series["fraction"].to_numpy()),
        np.searchsorted(examples, series["example"].to_numpy()),
    )
    wide = {}
    for name in ("nll", "clean", "tokens", "kl", "agreed", "removed", "seeds", "failed"):
        wide[name] = np.full((len(fractions), len(examples)), np.nan)
        wide[name][places] = series[name]
    return wide


def delta_nll(wide: dict[str, np.ndarray]) -> Float[np.ndarray, "fraction example"]:
    """Masked minus clean, nats per predicted token."""
    return (wide["nll"] - wide["clean"]) / (wide["tokens"] - 1)


def series_points(
    wide: dict[str, np.ndarray], fractions: list, options: dict
) -> tuple[list[dict], dict]:
    """The points of one curve, and its area."""
    delta = delta_nll(wide)
    held = np.isfinite(delta)
    predicted = np.where(held, wide["tokens"] - 1, 0)
    total = predicted.sum(axis=1)
    measures = (wide["nll"], wide["clean"], wide["tokens"] - 1)
    change = bootstrap_means(_delta_perplexity, *measures, **options)
    mean = bootstrap_means(_same, delta, **options)
    points = []
    for row, fraction in enumerate(fractions):
        if np.isnan(wide["seeds"][row]).all():
            continue  # the series has no unit at this fraction
        here = held[row]
        nll, clean, kl, agreed = (
            wide[name][row][here].sum() / total[row] if here.any() else np.nan
            for name in ("nll", "clean", "kl", "agreed")
        )
        points.append(
            {
                "fraction": fraction,
                "n": int(here.sum()),
                "n_seeds": int(np.nanmax(wide["seeds"][row])),
                "failed": int(np.nansum(wide["failed"][row])),
                "removed_pairs": float(np.nanmean(wide["removed"][row])),
                "predicted": int(total[row]),
                "clean_perplexity": float(_exp(clean)),
                "perplexity": float(_exp(nll)),
                **_columns("delta_perplexity", change[row]),
                **_columns("delta_nll", mean[row]),
                "kl": kl,
                "top1_agreement": agreed,
            }
        )
    area = bootstrap_mean(delta.mean(axis=0), **options)
    changes = [estimate.value for estimate in change]
    return points, {
        "n": area.n,
        "fractions": len(fractions),
        **_columns("aopc", area),
        "aopc_delta_perplexity": float(np.mean(changes)),
    }


def _columns(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _same(mean: np.ndarray) -> np.ndarray:
    return mean


def _delta_perplexity(nll: np.ndarray, clean: np.ndarray, predicted: np.ndarray) -> Any:
    """Masked minus clean perplexity, from means over examples."""
    return _exp(nll / predicted) - _exp(clean / predicted)


def _exp(loss: np.ndarray | float) -> Any:
    """Perplexity of a loss in nats per token; infinite beyond 709."""
    with np.errstate(over="ignore"):
        return np.exp(loss)
