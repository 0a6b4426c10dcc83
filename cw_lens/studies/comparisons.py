"""Which metric's curve lies above which: paired differences, verdicts, sentences (SPEC 7)."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from cw_lens.statistics import Estimate, bootstrap_means

FEWEST_TEXTS = 6
"""Below six texts no verdict is given: even if all agree, chance alone does that in 1 of 16."""

BETTER, WORSE, EQUAL, FEW = "better", "worse", "not distinguishable", "too few texts"


def comparison_table(
    family: dict[str, str],
    fractions: list[float],
    deltas: dict[str, Float[np.ndarray, "fraction example"]],
    rankings: dict[str, str],
    options: dict,
) -> pd.DataFrame:
    """One row per series, other series, role and fraction, NaN for the AOPC.

    `role` says why the two are compared: the other is `attention`, `random`, or the `next best`,
    which follows in the order of the AOPC. Better is larger where the highest were removed and
    smaller where the lowest were. The interval is of the mean difference over the examples that
    hold both; `verdict` says on which side of 0 it lies.

    Args:
        family: data, granularity, protected and remove.
        fractions: of each row of the deltas.
        deltas: delta_nll of each series, nats per token; NaN where a unit failed.
        rankings: of each series; attention of the same ranking is taken where there are two.
        options: confidence, resamples and seed of the bootstrap.
    """
    sign = 1 if family["remove"] == "highest" else -1
    # the AOPC leads, then the fractions; an example that lacks a fraction has no AOPC
    values = {name: np.vstack([delta.mean(axis=0), delta]) for name, delta in deltas.items()}
    goodness = {name: sign * mean_of(rows[0]) for name, rows in values.items()}
    ranked = sorted(
        (name for name in values if not np.isnan(goodness[name])), key=lambda name: -goodness[name]
    )
    # a series without an AOPC has no rank, but may have differences at some fractions
    order = ranked + [name for name in values if name not in ranked]
    table = []
    for name in order:
        for role, other in _others(name, ranked, rankings):
            difference = values[name] - values[other]
            paired = [np.where(np.isnan(difference), np.nan, values[key]) for key in (name, other)]
            estimates = bootstrap_means(lambda mean: mean, difference, **options)
            for row, (fraction, mean) in enumerate(
                zip([np.nan, *fractions], estimates, strict=True)
            ):
                table.append(
                    family
                    | {"metric": name, "other": other, "role": role, "fraction": fraction}
                    | {"ranking": rankings[name], "other_ranking": rankings[other]}
                    | {"value": mean_of(paired[0][row]), "other_value": mean_of(paired[1][row])}
                    | {"difference": mean.value, "low": mean.low, "high": mean.high, "n": mean.n}
                    | {"verdict": _verdict(sign, mean)}
                )
    columns = (*family, "metric", "ranking", "other", "other_ranking", "role", "fraction")
    numbers = ("value", "other_value", "difference", "low", "high", "n", "verdict")
    return pd.DataFrame(table, columns=[*columns, *numbers])


def sentences(comparisons: pd.DataFrame) -> tuple[str, ...]:
    """What each compared pair's AOPC says, in plain words; a pair is named once in a family."""
    told: dict[tuple, str] = {}
    for row in comparisons.loc[comparisons["fraction"].isna()].to_dict("records"):
        where = (row["data"], row["granularity"], row["protected"], row["remove"])
        told.setdefault((*where, frozenset((row["metric"], row["other"]))), _sentence(row))
    return tuple(told.values())


def conditions(data: str, granularity: str, protected: str) -> str:
    """A family in words: corpus, granularity and what became of the sinks."""
    sinks = "sinks not protected" if protected == "none" else f"sinks protected ({protected})"
    return f"{data}, {granularity} granularity, {sinks}"


def _others(name: str, ranked: list[str], rankings: dict[str, str]) -> list[tuple[str, str]]:
    """With whom a series is compared, and why."""
    found = []
    for role in ("attention", "random"):
        alike = [other for other in rankings if other in (role, f"{role} ({rankings[other]})")]
        same = [other for other in alike if rankings[other] == rankings[name]]
        if alike and name not in alike:
            found.append((role, (same or alike)[0]))
    behind = ranked[ranked.index(name) + 1 :] if name in ranked else []
    return found + [("next best", other) for other in behind[:1]]


def mean_of(values: Float[np.ndarray, " example"]) -> float:
    """Mean of the finite values; NaN if there is none."""
    held = values[np.isfinite(values)]
    return float(held.mean()) if len(held) else np.nan


def _verdict(sign: int, difference: Estimate) -> str:
    if difference.n < FEWEST_TEXTS:
        return FEW
    if difference.low <= 0 <= difference.high:
        return EQUAL
    return BETTER if sign * difference.low > 0 else WORSE


def _sentence(row: dict) -> str:
    where = conditions(row["data"], row["granularity"], row["protected"])
    metric, other = row["metric"], row["other"]
    if row["ranking"] != row["other_ranking"]:  # gradient in a run that ranks online
        metric, other = (
            name if name.endswith(")") else f"{name} ({ranking})"
            for name, ranking in ((metric, row["ranking"]), (other, row["other_ranking"]))
        )
    start = f"{where}, removing the {row['remove']}: {metric}"
    texts = f"{row['n']} text{'s' * (row['n'] != 1)}"
    if not row["n"]:
        return f"{start} and {other} cannot be compared: no text holds every fraction of both."
    areas = f"AOPC {short(row['value'])} against {short(row['other_value'])} nats per token"
    interval = f" [{short(row['low'])}, {short(row['high'])}]" if row["n"] > 1 else ""
    numbers = f"({areas}, difference {short(row['difference'])}{interval}, {texts})"
    if row["verdict"] == FEW:
        return f"{start} and {other}: no verdict from fewer than {FEWEST_TEXTS} texts {numbers}."
    if row["verdict"] == EQUAL:
        return f"{start} and {other} are not distinguishable {numbers}."
    more = "more" if row["difference"] > 0 else "less"
    return f"{start} harms the model {more} than {other} {numbers}."


def short(value: float) -> str:
    """Three significant digits and a true minus sign."""
    return f"{value:.3g}".replace("-", "−")
