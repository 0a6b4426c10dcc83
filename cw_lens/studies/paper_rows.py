"""A number of the paper beside one found here, and whether the paper's claim about it holds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from cw_lens.studies.comparisons import EQUAL, FEW, FEWEST_TEXTS

YES, NO, UNKNOWN = "yes", "no", EQUAL
"""A claim holds or fails where an interval says so, and is not distinguishable otherwise."""

COLUMNS = ("quantity", "paper", "here", "low", "high", "claim", "holds", "texts")
"""Of a table "paper against here"; `paper` is NaN where it prints no number."""


Row = dict[str, Any]
"""A number of this run by `item`, the table or figure, and `COLUMNS`: `quantity` is what it is,
`here`, `low`, `high` and `texts` this run's, its interval and the texts it rests on; `claim` is
what the paper says of it, and `holds` one of `YES`, `NO`, `UNKNOWN` and `FEW`; both are "" where
there is no claim."""


def paper_table(rows: Sequence[Row], model: str, tokens: Mapping[str, int]) -> pd.DataFrame:
    """One row per number: item, data, `COLUMNS`, the corpus' tokens and the model.

    Args:
        rows: each with the corpus under "data".
        model: its name.
        tokens: of all texts of each corpus.
    """
    table = pd.DataFrame(list(rows), columns=["item", "data", *COLUMNS])
    every = sum(tokens.values())
    return table.assign(
        tokens=[tokens.get(data, every) for data in table["data"]],
        model=model,
    )


def verdicts(table: pd.DataFrame) -> tuple[str, ...]:
    """How many of the claims hold, and those that do not, as sentences."""
    claimed = table.loc[table["claim"] != ""]
    if not len(claimed):
        return ()
    counts = claimed["holds"].value_counts().to_dict()
    untold = counts.get(UNKNOWN, 0) + counts.get(FEW, 0)
    sentences = [
        f"Of {len(claimed)} claims of the paper, of signs and orders, {counts.get(YES, 0)} hold "
        f"here, {counts.get(NO, 0)} do not, {untold} cannot be told."
    ]
    for row in claimed.loc[claimed["holds"] == NO].to_dict("records"):
        interval = f" [{row['low']:.3g}, {row['high']:.3g}]" if row["low"] == row["low"] else ""
        sentences.append(
            f"{row['item']}, {row['data']}: {row['quantity']} is {row['here']:.3g}{interval}; that "
            f"it is {row['claim']} does not hold here."
        )
    return tuple(sentences)


def paper_row(
    item: str,
    quantity: str,
    found: Mapping[str, Any],
    *,
    paper: float = math.nan,
    claim: str = "",
    holds: str = "",
) -> Row:
    """A number of this run, from its `value`, `low`, `high` and `n` texts.

    Args:
        item: the table or figure.
        quantity: what the number is.
        found: the number.
        paper: what the paper prints.
        claim, holds: what it says, and the verdict, which fewer than six texts do not allow.
    """
    if claim and found["n"] < FEWEST_TEXTS:
        holds = FEW
    numbers = {"here": found["value"], "low": found["low"], "high": found["high"]}
    held = {"item": item, "quantity": quantity, "paper": paper, **numbers, "texts": found["n"]}
    return held | {"claim": claim, "holds": holds}


def above(here: Mapping[str, Any], level: float) -> str:
    """Whether an interval lies above a level."""
    return YES if here["low"] > level else NO if here["high"] < level else UNKNOWN


def below(here: Mapping[str, Any], level: float) -> str:
    """Whether an interval lies below a level."""
    return YES if here["high"] < level else NO if here["low"] > level else UNKNOWN


def largest(held: Mapping[Any, Mapping[str, Any]], name: Any) -> str:
    """Whether the interval of one lies above those of all others."""
    verdicts = [above(held[name], other["high"]) for key, other in held.items() if key != name]
    if any(other["low"] > held[name]["high"] for other in held.values()):
        return NO
    return YES if all(verdict == YES for verdict in verdicts) else UNKNOWN


def smallest(held: Mapping[Any, Mapping[str, Any]], name: Any) -> str:
    """Whether the interval of one lies below those of all others."""
    turned = {key: {"low": -row["high"], "high": -row["low"]} for key, row in held.items()}
    return largest(turned, name)
