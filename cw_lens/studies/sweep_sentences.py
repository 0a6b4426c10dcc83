"""What the comparisons of a sweep say, in plain words, the most telling of them alone."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from cw_lens.studies.comparisons import EQUAL, FEW, FEWEST_TEXTS, short
from cw_lens.studies.curves import grouped
from cw_lens.value_edits import CONTROL, FIRST, SINKS

MORE, LESS = "harms more", "harms less"
"""Verdicts of a pair of edits, beside `EQUAL` and `FEW`."""

Row = dict[str, Any]

_WHOSE = {
    FIRST: "the first token's value",
    SINKS: "the sinks' values",
    CONTROL: "a control token's value",
}
_CUT = {
    "keep_parallel": "cut to the part along the mean",
    "keep_orthogonal": "without the part along the mean",
    "flip_parallel": "with the part along the mean reversed",
    "mean": "replaced by the mean",
}


def sweep_sentences(comparisons: pd.DataFrame, points: pd.DataFrame) -> tuple[str, ...]:
    """Of each corpus and target: the order of the sweep, its controls, what each part is worth.

    The controls are told for the factor nearest to 0 and the random vector for the whole value;
    surgery is told against the removal, and its two parts against each other. Where the first
    token is the only sink, the sinks' own rows say the same again and are not told.

    Args:
        comparisons, points: of `SweepCurves`.
    """
    told = []
    for (data, layers), rows in grouped(comparisons, ["data", "layers"]):
        where = f"{data}, layers {layers}"
        held = points.loc[(points["data"] == data) & (points["layers"] == layers)]
        for target in (FIRST, SINKS):
            mine = rows.loc[rows["target"] == target].to_dict("records")
            if target == SINKS and mine and _only_the_first(held):
                told.append(
                    f"{where}: the first token is the only sink there; editing all sinks is "
                    "editing its value alone."
                )
                continue
            steps = [row for row in mine if row["role"] == "step"]
            if len(steps) > 1:
                told.append(_order(where, target, steps))
            told += [_pair(where, row) for row in _telling(mine)]
    return tuple(told)


def _only_the_first(points: pd.DataFrame) -> bool:
    """Whether scaling the first token and all sinks changed the same number of values."""
    scaled = points.loc[(points["edit"] == "scale") & (points["factor"] != 1)]
    table = scaled.pivot(index="factor", columns="target", values="changed_values")
    if not {FIRST, SINKS} <= set(table.columns):
        return False
    both = table[[FIRST, SINKS]].dropna()
    return len(both) > 0 and bool((both[FIRST] == both[SINKS]).all())


def _telling(rows: list[Row]) -> Iterator[Row]:
    """The rows to tell of one target, in their order."""
    scaled = [abs(row["factor"]) for row in rows if row["role"] in ("control", SINKS)]
    for row in rows:
        at_the_end = scaled and abs(row["factor"]) == min(scaled)
        parts = {row["edit"], row["other_edit"]}
        if (
            (row["role"] in ("control", SINKS) and at_the_end)
            or (row["role"] == "random" and row["factor"] == 1)
            or (row["role"] == "surgery" and row["other_edit"] == "scale")
            or parts == {"keep_parallel", "keep_orthogonal"}
        ):
            yield row


def _order(where: str, target: str, steps: list[Row]) -> str:
    """Whether the loss grows at each step of the sweep."""
    factors = [steps[0]["other_factor"], *(row["factor"] for row in steps)]
    start = f"{where}, scaling {_WHOSE[target]} from {factors[0]:g} to {factors[-1]:g}"
    sizes = ", ".join(f"{short(row['difference'])} at {row['factor']:g}" for row in steps)
    verdicts = {row["verdict"] for row in steps}
    if FEW in verdicts:
        says = f"no verdict from fewer than {FEWEST_TEXTS} texts"
    elif verdicts == {MORE}:
        says = "the loss grows at each step"
    elif LESS in verdicts:
        says = f"the loss falls {_places(steps, LESS)}"
    else:
        says = f"it is not distinguishable whether the loss grows {_places(steps, EQUAL)}"
    return f"{start}: {says} (it grows by {sizes}; nats per token, {_texts(steps[0]['n'])})."


def _texts(n: int) -> str:
    return f"{n} text{'s' * (n != 1)}"


def _places(steps: list[Row], verdict: str) -> str:
    """Between which factors the steps of one verdict lie."""
    held = [row for row in steps if row["verdict"] == verdict]
    return " and ".join(f"from {row['other_factor']:g} to {row['factor']:g}" for row in held)


def _pair(where: str, row: Row) -> str:
    one = _described(row["edit"], row["target"], row["factor"])
    other = _described(row["other_edit"], row["other_target"], row["other_factor"])
    if not row["n"]:
        return f"{where}: {one} and {other} cannot be compared: no text holds both."
    interval = f" [{short(row['low'])}, {short(row['high'])}]" if row["n"] > 1 else ""
    numbers = (
        f"({short(row['value'])} against {short(row['other_value'])} nats per token, difference "
        f"{short(row['difference'])}{interval}, {_texts(row['n'])})"
    )
    if row["verdict"] == FEW:
        few = f"no verdict from fewer than {FEWEST_TEXTS} texts"
        return f"{where}: {one} and {other}: {few} {numbers}."
    if row["verdict"] == EQUAL:
        return f"{where}: {one} and {other} are not distinguishable {numbers}."
    return f"{where}: {one} {row['verdict']} than {other} {numbers}."


def _described(edit: str, target: str, factor: float) -> str:
    """An edit in words."""
    value = _WHOSE[target]
    times = "" if factor == 1 else f" times {factor:g}"
    if edit == "random":
        return f"{value} replaced by a random vector as long{times}"
    if edit in _CUT:
        return f"{value} {_CUT[edit]}{times}"
    if factor == 0:
        return f"{value} removed"
    return f"{value}{times or ' kept'}"
