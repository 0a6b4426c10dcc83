"""Task results to a table: accuracy, and what a removal cost, with intervals."""

import math
from collections.abc import Sequence
from typing import Any, cast

import pandas as pd
from scipy import stats

from cw_lens.errors import InputError
from cw_lens.statistics import CONFIDENCE, bootstrap_mean
from cw_lens.studies.comparisons import FEWEST_TEXTS
from cw_lens.studies.tasks import ItemResult

UNMASKED = "none"
"""Stands for the metric, and for what is removed, of runs in which nothing is."""

KEYS = ["task", "metric", "remove", "fraction"]


def results_table(
    task: str,
    results: Sequence[ItemResult],
    *,
    metric: str = UNMASKED,
    remove: str = UNMASKED,
    fraction: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per question: what `accuracy_table` takes, once such tables are concatenated.

    Args:
        task: its name.
        results: of `task_accuracy`.
        metric, remove, fraction, seed: what was removed; by default nothing.
    """
    columns = {
        "task": task,
        "metric": metric,
        "remove": remove,
        "fraction": float(fraction),
        "seed": seed,
        "example": [result.example for result in results],
        "correct": [result.correct for result in results],
        "gold_loglikelihood": [result.loglikelihoods[result.gold] for result in results],
    }
    return pd.DataFrame(columns, index=range(len(results)))


def accuracy_table(
    results: pd.DataFrame, *, confidence: float = CONFIDENCE, resamples: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """One row per task, metric, remove and fraction: accuracy, and what it lost by the removal.

    `accuracy` is the mean over questions, of which there are `n`; several seeds are averaged
    within a question first. `accuracy_low` and `accuracy_high` are Wilson's interval; averaged
    answers vary less than single ones, so that theirs, of the counts rounded outwards, is wide
    enough. `difference` is to the unmasked run (fraction 0), over the questions that both answer,
    with the paired bootstrap interval. `failed` counts questions left out because a log-likelihood
    was NaN.

    Args:
        results: a row per task, metric, remove, fraction, seed and example, with `correct`; as
            `results_table` makes them.
        confidence, resamples, seed: of the intervals.

    Raises:
        InputError: a column that is missing, or a task without an unmasked run.
    """
    missing = [name for name in (*KEYS, "seed", "example", "correct") if name not in results]
    if missing:
        raise InputError(f"the results have no column {missing[0]!r}; make them by results_table.")
    options: dict[str, Any] = {"confidence": confidence, "resamples": resamples, "seed": seed}
    rows = []
    for names, group in cast(list, list(results.groupby(KEYS, sort=True))):
        clean = results.loc[(results["task"] == names[0]) & (results["fraction"] == 0)]
        if clean.empty:
            raise InputError(
                f"{names[0]} has no unmasked run to compare with. Add its results with fraction 0."
            )
        correct, unmasked = _by_example(group), _by_example(clean)
        answered = correct.dropna()
        low, high = _wilson(answered.sum(), len(answered), confidence)
        lost = bootstrap_mean((correct - unmasked).dropna().to_numpy(), **options)
        rows.append(
            dict(zip(KEYS, names, strict=True))
            | {"n": len(answered), "seeds": group["seed"].nunique()}
            | {"failed": len(correct) - len(answered), "accuracy": answered.mean()}
            | {"accuracy_low": low, "accuracy_high": high, "difference": lost.value}
            | {"difference_low": lost.low, "difference_high": lost.high}
        )
    return pd.DataFrame(rows)


def accuracy_sentences(accuracy: pd.DataFrame) -> tuple[str, ...]:
    """Of each task and metric, what removing the largest fraction costs, the least costly first.

    Args:
        accuracy: of `accuracy_table`.
    """
    told = []
    removed = accuracy.loc[accuracy["fraction"] > 0]
    for names, rows in cast(list, list(removed.groupby(["task", "remove"], sort=False))):
        clean = accuracy.loc[(accuracy["task"] == names[0]) & (accuracy["fraction"] == 0)]
        last = rows.loc[rows["fraction"] == rows["fraction"].max()]
        last = last.sort_values("difference", ascending=False)
        told += [_sentence(row, clean.to_dict("records")[0]) for row in last.to_dict("records")]
    return tuple(told)


def _sentence(row: dict[str, Any], clean: dict[str, Any]) -> str:
    what = f"the {row['remove']} {100 * row['fraction']:g} % by {row['metric']} removed"
    numbers = (
        f"{row['accuracy']:.3f} against {clean['accuracy']:.3f}, difference "
        f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}], "
        f"{row['n']} questions"
    ).replace("-", "−")
    start = f"{row['task']}, {what}"
    if row["n"] < FEWEST_TEXTS:
        return f"{start}: no verdict from fewer than {FEWEST_TEXTS} questions ({numbers})."
    if row["difference_low"] <= 0 <= row["difference_high"]:
        return f"{start}: accuracy is not distinguishable from the unmasked run's ({numbers})."
    moved = "falls" if row["difference"] < 0 else "rises"
    return f"{start}: accuracy {moved} ({numbers})."


def _by_example(results: pd.DataFrame) -> pd.Series:
    """Mean over seeds of each question; NaN where one of them is."""
    questions = results.groupby("example")["correct"]
    return cast(pd.Series, questions.agg(lambda seeds: seeds.mean(skipna=False)))


def _wilson(correct: float, n: int, confidence: float) -> tuple[float, float]:
    if n == 0:
        return math.nan, math.nan
    tiny = 1e-9  # thirds do not add up to whole numbers
    counts = math.floor(correct + tiny), math.ceil(correct - tiny)
    low, high = (
        stats.binomtest(count, n).proportion_ci(confidence, method="wilson") for count in counts
    )
    return float(low.low), float(high.high)
