"""The paper's tables and figures from a run: the tables that a run keeps, and what they show."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from cw_lens.figures import curve_figures
from cw_lens.figures.geometry import alignment_figure, cone_shares, norm_overview
from cw_lens.figures.sweeps import sweep_figure
from cw_lens.figures.weights import (
    amplification_figure,
    first_weight_figure,
    joint_figure,
    regression_figure,
)
from cw_lens.sink_report import (
    Head,
    cone_plane_figure,
    cone_point_table,
    missing_points,
    norm_model_figure,
    norm_point_table,
    stored_norms,
    stored_sweep,
)
from cw_lens.stored_runs import StoredRun
from cw_lens.studies import paper as claims
from cw_lens.studies.alignment import Alignment, alignment
from cw_lens.studies.components import components
from cw_lens.studies.concentration import concentration
from cw_lens.studies.cone import Cone, cone
from cw_lens.studies.curves import RemovalCurves
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import norm_model
from cw_lens.studies.paper_items import named_items
from cw_lens.studies.paper_rows import Row, paper_table, verdicts
from cw_lens.studies.readings import TextReading, by_corpus
from cw_lens.studies.sweep_results import SweepCurves
from cw_lens.study_report import how, stored_curves
from cw_lens.views.study_page import Chapter, Section

_CURVES = ("curves", "comparisons")

TABLES: dict[str, tuple[str, ...]] = {
    "table1": ("components", "component_samples"),
    "table2": ("component_correlations", "component_samples"),
    "table3": ("components", "component_samples"),
    "table4": ("first_key_weights",),
    "table5": ("entropies",),
    "fig3": _CURVES,
    "fig4": _CURVES,
    "fig5a": ("alignment",),
    "fig5b": ("norm_model_heads", "norm_model"),
    "fig6a": ("cone_heads",),
    "fig6b": ("cone_layers",),
    "fig6c": ("sweep", "sweep_comparisons"),
    "fig7": ("component_samples",),
    "fig8": _CURVES,
    "fig9": _CURVES,
    "fig10": _CURVES,
    "fig11": ("norm_model_heads", "norm_model"),
    "fig12": ("amplification",),
}
"""The tables behind each table and figure of the paper, by the names of their files."""

LATER = {
    "fig5b": {"norm_points": "figure 5b"},
    "fig6a": {"cone_points": "figure 6a"},
    "fig7": {"component_joint": "figure 7"},
    **{figure: {"aopc": ""} for figure in ("fig3", "fig4", "fig8", "fig9", "fig10")},
}
"""Those that runs of an earlier version lack, and what cannot be drawn without them."""


@dataclass
class PaperRun:
    """What a run has gathered for the tables and figures that it was asked for.

    Attributes:
        items: names out of `ITEMS`.
        texts: what was read.
        model: its name.
        head: the layer and head to draw alone, None for one that the norm model fits best.
        readings, reruns: of the streamed studies, and without the sink.
        sweep, curves: of the sink's value, and of removals.
    """

    items: Sequence[str]
    texts: Sequence[StudyText]
    model: str
    head: Head | None = None
    readings: Sequence[TextReading] = ()
    reruns: Sequence[TextReading] = ()
    sweep: SweepCurves | None = None
    curves: RemovalCurves | None = None
    found: dict[str, pd.DataFrame] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, data: str, rows: Sequence[Row]) -> None:
        """Keeps the rows of the items that were asked for."""
        self.rows += [{**row, "data": data} for row in rows if row["item"] in self.items]

    def keep(self, name: str, table: pd.DataFrame, data: str | None = None) -> None:
        """Keeps a table, or one corpus' rows of it, the corpus as their first column."""
        if data is not None and "data" not in table:
            table = table.copy()
            table.insert(0, "data", data)
        before = [self.found[name]] if name in self.found else []
        self.found[name] = pd.concat([*before, table], ignore_index=True)


def named_tables(items: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The tables behind these items; and those that runs of an earlier version lack, with what
    cannot be drawn without them."""
    needed = dict.fromkeys(["paper", *(name for item in items for name in TABLES[item])])
    later = {name: what for item in items for name, what in LATER.get(item, {}).items()}
    return list(needed), later


def paper_tables(run: PaperRun, points: int) -> dict[str, pd.DataFrame]:
    """The comparison, and the tables behind the items that were asked for, by file name.

    Args:
        run: what was gathered.
        points: of each regression, at most.
    """
    _weights(run, points)
    _geometry(run)
    _losses(run)
    tokens: Counter[str] = Counter()
    for text in run.texts:
        tokens[text.data] += text.prompts.ids.shape[1]
    order = {item: place for place, item in enumerate(run.items)}
    found = sorted(run.rows, key=lambda row: (order[row["item"]], row["data"]))
    needed, later = named_tables(run.items)
    kept = {"paper": paper_table(found, run.model, tokens)} | run.found
    return {name: kept[name] for name in (*needed, *later) if name in kept}


def _weights(run: PaperRun, points: int) -> None:
    """Tables 1 to 5, figures 7 and 12."""
    held = run.readings[0].found if run.readings else {}
    corpora = by_corpus(run.readings) if held else {}
    if "components" in held:
        found = components(run.readings, capacity=points)
        run.keep("components", found.regressions)
        run.keep("component_correlations", found.correlations)
        run.keep("component_samples", found.samples)
        run.keep("component_joint", found.joint)
        for data in corpora:
            run.add(data, claims.component_rows(found, data))
        run.add("all corpora", claims.corpora_rows(found))
    if "concentration" in held:
        found = concentration(run.readings)
        run.keep("first_key_weights", found.weights)
        run.keep("entropies", found.entropies)
        run.keep("amplification", found.amplification)
        for data in corpora:
            run.add(data, claims.concentration_rows(found, data))


def _geometry(run: PaperRun) -> None:
    """Figures 5, 6a, 6b and 11."""
    reruns = by_corpus(run.reruns) if run.reruns else {}
    for data, readings in (by_corpus(run.readings) if run.readings else {}).items():
        held = readings[0].found
        if "alignment" in held:
            run.keep("alignment", alignment(readings).layers, data)
            run.add(data, claims.alignment_rows(readings))
        if "norm_model" in held:
            model = norm_model(readings)
            run.keep("norm_model_heads", model.heads, data)
            run.keep("norm_model", model.summary, data)
            run.keep("norm_points", norm_point_table(readings, model, run.head), data)
            run.add(data, claims.norm_rows(model))
        if "cone" in held:
            found = cone(readings, reruns.get(data, ()))
            run.keep("cone_heads", found.heads, data)
            run.keep("cone_layers", found.layers, data)
            run.keep("cone_points", cone_point_table(readings, found, run.head), data)
            run.add(data, claims.cone_rows(readings))


def _losses(run: PaperRun) -> None:
    """Figures 3, 4, 6c and 8 to 10."""
    if run.sweep is not None:
        run.keep("sweep", run.sweep.points)
        run.keep("sweep_comparisons", run.sweep.comparisons)
        for data in run.sweep.points["data"].drop_duplicates():
            run.add(data, claims.sweep_rows(run.sweep, data))
    if run.curves is not None:
        run.keep("curves", run.curves.points)
        run.keep("comparisons", run.curves.comparisons)
        run.keep("aopc", run.curves.aopc)
        for row in claims.curve_rows(run.curves):
            run.add(row["data"], [row])


def paper_chapter(run: StoredRun) -> Chapter:
    """The comparison first, then the figures, then the tables behind them."""
    items = paper_items(run.manifest)
    table = run.tables["paper"]
    points = ("norm_points", "cone_points", "component_joint")
    behind = {name: t for name, t in run.tables.items() if name != "paper" and name not in points}
    sections = [Section("The paper against here", tables={"paper": table})]
    figures = _figures(run, items)
    if figures:
        sections.append(Section("Figures", figures=figures))
    sections.append(Section("Tables behind them", tables=behind))
    return Chapter(
        "The paper, reproduced",
        sections,
        sentences=verdicts(table),
        notices=missing_points(run, named_tables(items)[1]),
        **how(run),
    )


def paper_items(manifest: Mapping[str, Any]) -> list[str]:
    """The items that a run was asked for."""
    return named_items(manifest["configuration"]["items"])


def _figures(run: StoredRun, items: Sequence[str]) -> dict[str, go.Figure]:
    """The figures of these items, in their order, from the tables alone."""
    recipe = run.recipe
    drawn: dict[str, go.Figure] = {}
    for item in items:
        for data in run.tokens_of_texts():
            figure = _ITEM_FIGURES[item](run, data) if item in _ITEM_FIGURES else None
            if figure is not None:
                drawn[f"{item}-{data}"] = figure
    if "curves" in run.tables:
        for name, figure in curve_figures(stored_curves(run), recipe=recipe).items():
            item = figure.to_dict()["layout"]["meta"].get("item")
            if item in items:
                drawn[f"{item}-{name}"] = figure
    place = {item: place for place, item in enumerate(items)}
    return dict(sorted(drawn.items(), key=lambda kept: place[kept[0].split("-")[0]]))


def _of_table(name: str, function: Callable[..., go.Figure]) -> Callable[[StoredRun, str], Any]:
    """A figure of one corpus' rows of a table."""
    return lambda run, data: function(run.of(name, data), run.where(data), recipe=run.recipe)


def _joint(run: StoredRun, data: str) -> go.Figure | None:
    if "component_joint" not in run.tables:
        return None
    joint = run.of("component_joint", data)
    return joint_figure(joint.loc[joint["keys"] == "all"], run.where(data), recipe=run.recipe)


def _aligned(rows: pd.DataFrame, where: str, *, recipe: str | None) -> go.Figure:
    return alignment_figure(Alignment(pd.DataFrame(), rows), where, recipe=recipe)


def _shares(rows: pd.DataFrame, where: str, *, recipe: str | None) -> go.Figure:
    return cone_shares(Cone(pd.DataFrame(), rows), where, recipe=recipe)


_ITEM_FIGURES: dict[str, Callable[[StoredRun, str], Any]] = {
    "table1": _of_table("components", regression_figure),
    "table4": _of_table("first_key_weights", first_weight_figure),
    "fig5a": _of_table("alignment", _aligned),
    "fig5b": norm_model_figure,
    "fig6a": cone_plane_figure,
    "fig6b": _of_table("cone_layers", _shares),
    "fig6c": lambda run, data: sweep_figure(stored_sweep(run), data, run.model, recipe=run.recipe),
    "fig7": _joint,
    "fig11": lambda run, data: norm_overview(
        stored_norms(run, data), run.where(data), recipe=run.recipe
    ),
    "fig12": _of_table("amplification", amplification_figure),
}
"""Table or figure of the paper -> its figure here, of one corpus. Curves are drawn apart."""
