"""The paper's printed numbers and claims, held against what a run found (arXiv 2606.07604).

Its models have 1 to 8 billion parameters; what is to agree with another model is the claim, not
the digits. A claim holds ("yes") or fails ("no") where the interval over texts says so, and is
"not distinguishable" where it does not. Fewer than six texts give no verdict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from cw_lens.statistics import bootstrap_mean
from cw_lens.studies.alignment import mean_of_finite
from cw_lens.studies.components import PAIRS, Components
from cw_lens.studies.concentration import Concentration
from cw_lens.studies.curves import RemovalCurves
from cw_lens.studies.edge_samples import FACTORS
from cw_lens.studies.norm_model import NormModel
from cw_lens.studies.paper_rows import (
    NO,
    UNKNOWN,
    YES,
    Row,
    above,
    below,
    largest,
    paper_row,
    smallest,
)
from cw_lens.studies.readings import TextReading
from cw_lens.studies.sweep_results import SweepCurves

ENDS = ("low", "high")

REGRESSORS = (*FACTORS, *(f"{x} * {y}" for x, y in PAIRS))
TABLE_1 = {
    "all": (0.055, 0.000, 0.036, 0.489, 0.305, 0.020),
    "first": (0.079, 0.027, 0.518, 0.157, 0.611, 0.725),
    "other": (0.449, 0.000, 0.028, 0.579, 0.834, 0.021),
}
"""R² of c on `REGRESSORS`, LLaMA-3.1-8B on FineWeb-Edu, by keys."""
TABLE_2 = {
    ("attention", "relative_norm"): -0.287,
    ("attention", "cosine"): 0.147,
    ("relative_norm", "cosine"): -0.070,
}
TABLE_4 = {"attention": 0.708, "value_weighted": 0.159, "contribution": 0.142}
"""Mean weight of the first key, LLaMA-3.1-8B; the paper prints the same for its 3B."""
TABLE_5 = {
    True: {"attention": 1.21, "value_weighted": 2.30, "contribution": 1.79},
    False: {"attention": 2.61, "value_weighted": 2.58, "contribution": 2.27},
}
"""Mean entropy in nats with and without the first key, LLaMA-3.1-8B."""
FIGURE_5A = {"first_cosine": -0.2, "others_cosine": 0.2}
"""About, as read off the figure."""

ALIKE = 0.1
"""Two corpora are said to give the same R² where none differs by as much."""


def component_rows(found: Components, data: str) -> list[Row]:
    """Tables 1 and 2 on one corpus."""
    table = found.regressions.query("data == @data and scale == 'raw'")
    rows = []
    for keys, printed in TABLE_1.items():
        held = _by(table.loc[table["keys"] == keys], "regressor")
        best = {"first": "relative_norm * cosine", "other": "attention * cosine"}.get(keys)
        for name, paper in zip(REGRESSORS, printed, strict=True):
            claim, holds = "", ""
            if keys == "all" and name == "attention":
                claim = "below 1/2"
                holds = below(held[name], 0.5)
            if name == best:
                claim, holds = "the largest of the six", largest(held, name)
            here = held[name] | {"value": held[name]["r2"], "n": held[name]["texts"]}
            what = f"R² of c on {name}, {keys} keys"
            rows.append(paper_row("table1", what, here, paper=paper, claim=claim, holds=holds))
    table = found.correlations.query("data == @data and keys == 'all'")
    for row in table.to_dict("records"):
        paper = TABLE_2[row["first"], row["second"]]
        here = row | {"value": row["r"], "n": row["texts"]}
        what = f"correlation of log {row['first']} and log {row['second']}"
        rows.append(paper_row("table2", what, here, paper=paper, **_same_sign(here, paper)))
    return rows


def corpora_rows(found: Components) -> list[Row]:
    """Table 3: whether another corpus gives the same R²; none for a single corpus."""
    table = found.regressions.query("scale == 'raw'")
    first, *others = table["data"].drop_duplicates().tolist()
    rows = []
    for other in others:
        for keys in TABLE_1:
            held = [
                _by(table.loc[(table["data"] == name) & (table["keys"] == keys)], "regressor")
                for name in (first, other)
            ]
            apart = [_apart(held[0][name], held[1][name]) for name in REGRESSORS]
            here = {end: float(np.max([row[end] for row in apart])) for end in ("value", *ENDS)}
            here["n"] = min(row["texts"] for rows in held for row in rows.values())
            what = f"largest difference in R² between {first} and {other}, {keys} keys"
            holds = below(here, ALIKE)
            rows.append(paper_row("table3", what, here, claim=f"below {ALIKE}", holds=holds))
    return rows


def concentration_rows(found: Concentration, data: str) -> list[Row]:
    """Tables 4 and 5 and appendix D.6 (`fig12`) on one corpus."""
    rows = []
    weights = _by(found.weights.query("data == @data and layer.isna()"), "weight")
    for name, paper in TABLE_4.items():
        claim, holds = "", ""
        if name != "attention":
            claim = "below the first key's attention"
            holds = below(weights[name], weights["attention"]["low"])
        what = f"weight of the first key, {name}"
        rows.append(paper_row("table4", what, weights[name], paper=paper, claim=claim, holds=holds))
    whole = found.entropies.query("data == @data and layer.isna()")
    for first_key, printed in TABLE_5.items():
        held = _by(whole.loc[whole["first_key"] == first_key], "weight")
        held = {name: held[name] for name in printed}
        for name, paper in printed.items():
            claim, holds = "", ""
            if name == ("attention" if first_key else "contribution"):
                claim, holds = "the lowest of the three", smallest(held, name)
            what = f"entropy of {name}, {'with' if first_key else 'without'} the first key"
            rows.append(
                paper_row("table5", what, held[name], paper=paper, claim=claim, holds=holds)
            )
    ratios = found.amplification.query(
        "data == @data and layer.isna() and ratio == 'sum of c / sum of alpha'"
    )
    held = _by(ratios, "position")
    if len(held) > 1:
        claim, holds = "lower than at any later position", smallest(held, 0)
        rows.append(paper_row("fig12", "c / α at the first key", held[0], claim=claim, holds=holds))
    return rows


def alignment_rows(readings: Sequence[TextReading]) -> list[Row]:
    """Figure 5a: cosines over all layers and heads of one corpus, with intervals over texts."""
    rows = []
    for name, paper in FIGURE_5A.items():
        here = _over_texts(readings, lambda text, name=name: text["alignment"][name])
        what = f"mean {name.replace('_', ' ')} of projected values"
        rows.append(paper_row("fig5a", what, here, paper=paper, **_same_sign(here, paper)))
    return rows


def norm_rows(model: NormModel) -> list[Row]:
    """Figures 5b and 11: signs and minima of the fits, over all heads."""
    summary = _by(model.summary, "quantity")
    rows = []
    for name, item, what, claim in (
        ("negative_g", "fig11", "share of heads with g < 0", "above 1/2"),
        ("inner_minimum", "fig11", "share of heads with 0 < α* < 1", "above 1/2"),
        ("r2_norm", "fig5b", "mean R² of the predicted norm", "above 1/2"),
    ):
        here = summary[name] | {"n": model.texts}
        rows.append(paper_row(item, what, here, claim=claim, holds=above(here, 0.5)))
    return rows


def cone_rows(readings: Sequence[TextReading]) -> list[Row]:
    """Figure 6b: how much more often a short output lies inside the cone without the sink."""
    here = _over_texts(readings, lambda t: t["cone"]["inside_without"] - t["cone"]["inside"])
    what = "share of short outputs inside the cone, without the sink's term minus with it"
    claim = "positive"
    return [paper_row("fig6b", what, here, claim=claim, holds=above(here, 0.0))]


def sweep_rows(curves: SweepCurves, data: str) -> list[Row]:
    """Figure 6c: what removing the first token's value costs, its order, and a control."""
    points = curves.points.query("data == @data and edit == 'scale' and target == 'first'")
    rows = []
    for row in points.loc[points["factor"] == 0].to_dict("records"):
        here = {end or "value": row[f"delta_perplexity{end and '_' + end}"] for end in ("", *ENDS)}
        here["n"] = row["n"]
        what = "change in perplexity without the first token's value (γ = 0)"
        rows.append(paper_row("fig6c", what, here, claim="positive", holds=above(here, 0.0)))
    compared = curves.comparisons.query("data == @data and edit == 'scale' and target == 'first'")
    steps = compared.loc[compared["role"] == "step"].to_dict("records")
    if len(steps) > 1:
        held = [above(row, 0.0) for row in steps]
        holds = next(verdict for verdict in (NO, UNKNOWN, YES) if verdict in held)
        deciding = [row for row, verdict in zip(steps, held, strict=True) if verdict == holds]
        least = min(deciding, key=lambda row: row["difference"])
        what = "smallest growth in loss from one γ to the next lower one, nats a token"
        here = least | {"value": least["difference"]}
        rows.append(paper_row("fig6c", what, here, claim="positive at every step", holds=holds))
    for row in compared.loc[compared["factor"] == 0].to_dict("records"):
        if row["role"] == "control":
            here = row | {"value": row["difference"]}
            what = "change in loss, first token minus a control token (γ = 0), nats a token"
            rows.append(paper_row("fig6c", what, here, claim="positive", holds=above(here, 0.0)))
    return rows


def curve_item(row: Mapping[str, Any]) -> str | None:
    """The figure of the paper that shows removals such as this; None if none does."""
    protected = row["protected"] != "none"
    if row["granularity"] == "layer":
        return ("fig3" if row["remove"] == "highest" else "fig4") if protected else "fig8"
    return {"global": "fig9", "head": "fig10"}.get(row["granularity"]) if protected else None


def curve_rows(curves: RemovalCurves) -> list[Row]:
    """Figures 3, 4, 8, 9 and 10: contribution against attention, areas over the fractions.

    The corpus is under "data".
    """
    # attention may be the next best too, which makes a second row of the same numbers
    table = curves.comparisons.query("metric == 'contribution' and role == 'attention'")
    rows = []
    for row in table.loc[table["fraction"].isna()].to_dict("records"):
        item = curve_item(row)
        if item is not None:
            here = row | {"value": row["difference"]}
            more = row["remove"] == "highest"
            holds = above(here, 0.0) if more else below(here, 0.0)
            what = f"AOPC of contribution minus attention, {row['remove']} removed"
            claim = "positive" if more else "negative"
            rows.append(
                paper_row(item, what, here, claim=claim, holds=holds) | {"data": row["data"]}
            )
    return rows


def _same_sign(here: Mapping[str, Any], paper: float) -> dict[str, str]:
    """The claim that a number has the sign that the paper prints, and whether it holds."""
    if paper < 0:
        return {"claim": "negative", "holds": below(here, 0.0)}
    return {"claim": "positive", "holds": above(here, 0.0)}


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """The distance of two R², and the least and most that their intervals leave to it.

    Wider than the interval of a difference: both would have to miss at once.
    """
    ends = one["low"] - other["high"], one["high"] - other["low"]
    least, most = max(ends[0], -ends[1], 0.0), max(ends[1], -ends[0])
    return {"value": abs(one["r2"] - other["r2"]), "low": least, "high": most}


def _by(table: pd.DataFrame, column: str) -> dict[Any, dict[str, Any]]:
    """The rows by what is in one column."""
    return {row[column]: row for row in table.to_dict("records")}


def _over_texts(
    readings: Sequence[TextReading], of_text: Callable[[TextReading], np.ndarray]
) -> dict[str, Any]:
    """The mean of a statistic over all layers and heads, with its interval over texts."""
    numbers = [mean_of_finite(of_text(text).ravel(), axis=0) for text in readings]
    return asdict(bootstrap_mean(numbers))
