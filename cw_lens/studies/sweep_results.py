"""What a sweep of the sink's value shows: curves, and which edit harms more than which (SPEC 8)."""

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pandas as pd
from jaxtyping import Float

from cw_lens.errors import InputError
from cw_lens.statistics import Estimate, bootstrap_means
from cw_lens.studies.comparisons import EQUAL, FEW, FEWEST_TEXTS, mean_of
from cw_lens.studies.curves import NO_OP, by_fraction, delta_nll, grouped, series_points
from cw_lens.studies.sweep_sentences import LESS, MORE, sweep_sentences
from cw_lens.studies.sweeps import UNIT_COLUMNS
from cw_lens.value_edits import CONTROL, FIRST, SINKS, SURGERY

FAMILY = ["data", "layers"]
"""What series must share to be compared."""
SERIES = [*FAMILY, "edit", "target"]

Deltas = dict[tuple[str, str, float], Float[np.ndarray, " example"]]


@dataclass(frozen=True, eq=False)
class SweepCurves:
    """Curves over the factor, and what can be said of them. Curves are never made monotone.

    Attributes:
        points: one row per data, layers, edit, target and factor, the clean run being factor 1 of
            every scaled target: `n` examples, `n_seeds`, `failed` units, `predicted` tokens,
            `clean_perplexity`, `perplexity` = exp(sum of nll / predicted), `delta_perplexity` and
            `delta_nll` (mean over examples of nats per predicted token), each edited minus clean
            with `_low` and `_high`, `kl` (nats per predicted token), `top1_agreement` (share of
            predicted tokens) and `changed_values` (mean over the examples of the (head, key)
            values changed in all layers).
        comparisons: one row per pair of edits: `role` says why they are compared: the other is a
            "control" token scaled alike, a "random" vector as long, another kind of "surgery", the
            removal (scale by 0) included; the same values times the next larger factor, one "step"
            back in the sweep; or, all "sinks" scaled, the first token alone. `value`,
            `other_value` and their `difference` are mean changes of loss in nats per token, with
            `low` and `high`, over the `n` examples that hold both; `verdict` says whether the edit
            harms more or less than the other.
        sentences: what is most telling of them, as `sweep_sentences`.
        failed: the units without a finite loss, and why; they are in no number above.
        confidence: of each interval.
    """

    points: pd.DataFrame
    comparisons: pd.DataFrame
    sentences: tuple[str, ...]
    failed: pd.DataFrame
    confidence: float


def sweep_curves(
    units: pd.DataFrame, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> SweepCurves:
    """Curves and comparisons from a table with one row per unit of a `Sweep`.

    Losses of a control's seeds are averaged within each example first. An example with a failed
    unit is left out of that point. Intervals are bootstrapped over examples, drawn together with
    their token counts; they are not corrected for the number of comparisons.

    Args:
        units: columns as `cw_lens.studies.sweeps.UNIT_COLUMNS`.
        confidence: of each interval.
        resamples: how often examples are drawn.
        seed: of the draws.

    Raises:
        InputError: missing columns, no unit of an edit, or a unit that occurs twice.
    """
    _check(units)
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    finite = np.isfinite(units[["nll_sum", "clean_nll_sum", "kl_sum"]].to_numpy(float)).all(axis=1)
    examples = _per_example(units.assign(lost=~finite))
    points, comparisons = [], []
    for family, rows in grouped(examples, FAMILY):
        head = dict(zip(FAMILY, family, strict=True))
        axes = (sorted(rows["fraction"].unique()), sorted(rows["example"].unique()))
        deltas: Deltas = {}
        for (edit, target), series in grouped(rows, ["edit", "target"]):
            wide = by_fraction(series, *axes)
            for point in series_points(wide, axes[0], options)[0]:
                factor, _ = point.pop("fraction"), point.pop("removed_pairs")
                held = series.loc[(series["fraction"] == factor) & series["nll"].notna(), "removed"]
                key = {"edit": edit, "target": target, "factor": factor}
                changed = {"changed_values": mean_of(np.asarray(held, float))}
                points.append(head | key | point | changed)
            for factor, delta in zip(axes[0], delta_nll(wide), strict=True):
                if factor in set(series["fraction"]):
                    deltas[edit, target, factor] = delta
        comparisons += [head | row for row in _comparisons(deltas, options)]
    table = pd.DataFrame(points)
    compared = pd.DataFrame(comparisons, columns=_COMPARED)
    return SweepCurves(
        points=table,
        comparisons=compared,
        sentences=sweep_sentences(compared, table),
        failed=units.loc[~finite].reset_index(drop=True),
        confidence=confidence,
    )


def _check(units: pd.DataFrame) -> None:
    if not isinstance(units, pd.DataFrame):
        raise InputError(
            f"units is a {type(units).__name__}; it must be the table of a Sweep's units."
        )
    missing = [name for name in UNIT_COLUMNS if name not in units.columns]
    if missing:
        raise InputError(f"the table of units lacks the columns {', '.join(missing)}.")
    if set(units["edit"]) <= {NO_OP}:
        raise InputError(
            f"the table of units holds no edit: {len(units)} rows, all of the {NO_OP} run. Run the "
            "sweep for at least one condition."
        )
    again = units.loc[units.duplicated([*SERIES, "factor", "seed", "example"])]
    if len(again):
        first = again.iloc[0]
        raise InputError(
            f"{len(again)} units occur twice, first example {first['example']} of {first['data']} "
            f"for {first['edit']} at factor {first['factor']}. Keep one of each."
        )


def _per_example(units: pd.DataFrame) -> pd.DataFrame:
    """One row per series, factor and example: means over seeds; NaN where a unit failed.

    The no-op run stands for factor 1 of each target that was scaled in the same text. Named as
    removal curves name them.
    """
    idle, edited = units.loc[units["edit"] == NO_OP], units.loc[units["edit"] != NO_OP]
    text = [*FAMILY, "example"]
    scaled = edited.loc[(edited["edit"] == "scale") & ~edited["lost"], [*text, "target"]]
    whole = scaled.drop_duplicates().merge(idle.drop(columns="target"), on=text)
    whole = whole.assign(edit="scale")
    units = pd.concat([edited, whole]).sort_values(["example", "seed"], kind="stable")
    rows = units.rename(columns={"factor": "fraction"}).groupby(
        [*SERIES, "fraction", "example"], sort=False
    )
    examples = rows.agg(
        tokens=("tokens", "first"),
        nll=("nll_sum", "mean"),
        clean=("clean_nll_sum", "mean"),
        kl=("kl_sum", "mean"),
        agreed=("top1_agreed", "mean"),
        removed=("changed", "mean"),
        seeds=("seed", "size"),
        failed=("lost", "sum"),
    ).reset_index()
    # a mean over seeds skips NaN, and would hide the seed that failed
    examples.loc[examples["failed"] > 0, "nll"] = np.nan
    return examples


def _pairs(deltas: Deltas) -> list[tuple[str, tuple, tuple]]:
    """Which edits are compared, and why."""
    pairs = []
    for target in (FIRST, SINKS):
        scaled = [key for key in deltas if key[:2] == ("scale", target)]
        scaled.sort(key=lambda key: -key[2])
        pairs += [("step", key, before) for before, key in pairwise(scaled)]
        for key in scaled:
            if key[2] != 1:
                pairs.append(("control", key, ("scale", CONTROL, key[2])))
                if target == SINKS:
                    pairs.append(("sinks", key, ("scale", FIRST, key[2])))
            pairs.append(("random", key, ("random", target, key[2])))
        cut = [(kind, target, 1.0) for kind in SURGERY] + [("scale", target, 0.0)]
        pairs += [("surgery", *pair) for pair in combinations(cut, 2)]
    return [pair for pair in pairs if pair[1] in deltas and pair[2] in deltas]


_COMPARED = [
    *(*FAMILY, "role", "edit", "target", "factor", "other_edit", "other_target", "other_factor"),
    *("value", "other_value", "difference", "low", "high", "n", "verdict"),
]


def _comparisons(deltas: Deltas, options: dict) -> list[dict]:
    """One row per compared pair, without the family."""
    table = []
    for role, one, other in _pairs(deltas):
        difference = deltas[one] - deltas[other]
        mean = bootstrap_means(lambda mean: mean, difference[None], **options)[0]
        held = np.isfinite(difference)
        table.append(
            {"role": role}
            | dict(zip(("edit", "target", "factor"), one, strict=True))
            | dict(zip(("other_edit", "other_target", "other_factor"), other, strict=True))
            | {"value": mean_of(deltas[one][held]), "other_value": mean_of(deltas[other][held])}
            | {"difference": mean.value, "low": mean.low, "high": mean.high, "n": mean.n}
            | {"verdict": _verdict(mean)}
        )
    return table


def _verdict(difference: Estimate) -> str:
    if difference.n < FEWEST_TEXTS:
        return FEW
    if difference.low <= 0 <= difference.high:
        return EQUAL
    return MORE if difference.low > 0 else LESS
