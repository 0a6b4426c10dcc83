"""The paper's tables and figures from a run: the comparison, its page and its files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from cw_lens.figures import curve_figures
from cw_lens.figures.geometry import (
    alignment_figure,
    cone_figure,
    cone_shares,
    norm_figure,
    norm_overview,
)
from cw_lens.figures.sweeps import sweep_figure
from cw_lens.figures.weights import (
    amplification_figure,
    first_weight_figure,
    joint_figure,
    regression_figure,
)
from cw_lens.sink_report import Head, head_row, model_label, telling_cone, telling_norm
from cw_lens.studies import paper as claims
from cw_lens.studies.alignment import alignment
from cw_lens.studies.components import components
from cw_lens.studies.concentration import concentration
from cw_lens.studies.cone import cone, cone_points
from cw_lens.studies.curves import RemovalCurves
from cw_lens.studies.losses import StudyText
from cw_lens.studies.norm_model import norm_model, norm_points
from cw_lens.studies.paper_rows import Row, paper_table, verdicts
from cw_lens.studies.readings import TextReading, by_corpus
from cw_lens.studies.sweep_results import SweepCurves
from cw_lens.study_report import write_study
from cw_lens.views.study_page import Section


@dataclass
class PaperRun:
    """What a run has gathered for the tables and figures that it was asked for.

    Attributes:
        items: names out of `ITEMS`.
        texts: what was read.
        facts: for the manifest.
        recipe: the command that makes the run again.
        head: the layer and head to draw alone, None for one that the norm model fits best.
        readings, reruns: of the streamed studies, and without the sink.
        sweep, curves: of the sink's value, and of removals.
    """

    items: Sequence[str]
    texts: Sequence[StudyText]
    facts: Mapping[str, Any]
    recipe: str
    head: Head | None = None
    readings: Sequence[TextReading] = ()
    reruns: Sequence[TextReading] = ()
    sweep: SweepCurves | None = None
    curves: RemovalCurves | None = None
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    figures: dict[str, go.Figure] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def model(self) -> str:
        """What figures and tables call the model."""
        return model_label(self.facts)

    def where(self, data: str) -> str:
        """What figures say of their model and corpus."""
        texts = sum(text.data == data for text in self.texts)
        return f"{self.model}, {data}, {texts} text{'s' * (texts != 1)}"

    def add(self, data: str, rows: Sequence[Row]) -> None:
        """Keeps the rows of the items that were asked for."""
        self.rows += [{**row, "data": data} for row in rows if row["item"] in self.items]

    def draw(self, item: str, data: str, function: Callable[..., go.Figure], *of: Any) -> None:
        """Keeps the figure of an item, if it was asked for."""
        if item in self.items:
            self.figures[f"{item}-{data}"] = function(*of, recipe=self.recipe)

    def keep(self, name: str, data: str, table: pd.DataFrame) -> None:
        """Adds one corpus' rows to a table, the corpus as their first column."""
        rows = table.copy()
        rows.insert(0, "data", data)
        before = [self.tables[name]] if name in self.tables else []
        self.tables[name] = pd.concat([*before, rows], ignore_index=True)


def write_paper(folder: Path, run: PaperRun, points: int) -> tuple[pd.DataFrame, str | None]:
    """Writes tables, figures and page; the comparison, and why images are missing, if they are.

    Args:
        folder: of the run.
        run: what was gathered.
        points: of each regression, at most.

    Raises:
        RunFolderError: a file cannot be written.
    """
    _weights(run, points)
    _geometry(run)
    _losses(run)
    tokens = Counter()
    for text in run.texts:
        tokens[text.data] += text.prompts.ids.shape[1]
    order = {item: place for place, item in enumerate(run.items)}
    found = sorted(run.rows, key=lambda row: (order[row["item"]], row["data"]))
    table = paper_table(found, run.model, tokens)
    figures = dict(sorted(run.figures.items(), key=lambda kept: order[kept[0].split("-")[0]]))
    message = write_study(
        folder,
        "The paper, reproduced",
        {"paper": table, **run.tables},
        [
            Section("The paper against here", tables={"Paper against here": table}),
            Section("Figures", figures=figures),
            Section("Tables behind them", tables=run.tables),
        ],
        facts=run.facts,
        recipe=run.recipe,
        sentences=verdicts(table),
    )
    return table, message


def _weights(run: PaperRun, points: int) -> None:
    """Tables 1 to 5, figures 7 and 12."""
    held = run.readings[0].found if run.readings else {}
    corpora = by_corpus(run.readings) if held else {}
    if "components" in held:
        found = components(run.readings, capacity=points)
        run.tables |= {
            "components": found.regressions,
            "component_correlations": found.correlations,
            "component_samples": found.samples,
        }
        for data in corpora:
            joint = _of(found.joint, data)
            run.add(data, claims.component_rows(found, data))
            of_data = _of(found.regressions, data)
            run.draw("table1", data, regression_figure, of_data, run.where(data))
            all_keys = joint.loc[joint["keys"] == "all"]
            run.draw("fig7", data, joint_figure, all_keys, run.where(data))
        run.add("all corpora", claims.corpora_rows(found))
    if "concentration" in held:
        found = concentration(run.readings)
        run.tables |= {
            "first_key_weights": found.weights,
            "entropies": found.entropies,
            "amplification": found.amplification,
        }
        for data in corpora:
            run.add(data, claims.concentration_rows(found, data))
            weights, ratios = _of(found.weights, data), _of(found.amplification, data)
            run.draw("table4", data, first_weight_figure, weights, run.where(data))
            run.draw("fig12", data, amplification_figure, ratios, run.where(data))


def _geometry(run: PaperRun) -> None:
    """Figures 5, 6a, 6b and 11."""
    reruns = by_corpus(run.reruns) if run.reruns else {}
    for data, readings in (by_corpus(run.readings) if run.readings else {}).items():
        where, held = run.where(data), readings[0].found
        if "alignment" in held:
            found = alignment(readings)
            run.keep("alignment", data, found.layers)
            run.add(data, claims.alignment_rows(readings))
            run.draw("fig5a", data, alignment_figure, found, where)
        if "norm_model" in held:
            model = norm_model(readings)
            run.keep("norm_model_heads", data, model.heads)
            run.keep("norm_model", data, model.summary)
            run.add(data, claims.norm_rows(model))
            layer, head = run.head or telling_norm(model)
            points, fit = norm_points(readings, model, layer, head), head_row(model, layer, head)
            run.draw("fig5b", data, norm_figure, points, fit, where)
            run.draw("fig11", data, norm_overview, model, where)
        if "cone" in held:
            found = cone(readings, reruns.get(data, ()))
            run.keep("cone_heads", data, found.heads)
            run.keep("cone_layers", data, found.layers)
            run.add(data, claims.cone_rows(readings))
            layer, head = run.head or telling_cone(found)
            plane, fit = cone_points(readings, layer, head), head_row(found, layer, head)
            run.draw("fig6a", data, cone_figure, plane, fit, where)
            run.draw("fig6b", data, cone_shares, found, where)


def _losses(run: PaperRun) -> None:
    """Figures 3, 4, 6c and 8 to 10."""
    if run.sweep is not None:
        run.tables |= {"sweep": run.sweep.points, "sweep_comparisons": run.sweep.comparisons}
        for data in run.sweep.points["data"].drop_duplicates():
            run.add(data, claims.sweep_rows(run.sweep, data))
            run.draw("fig6c", data, sweep_figure, run.sweep, data, run.model)
    if run.curves is not None:
        run.tables |= {"curves": run.curves.points, "comparisons": run.curves.comparisons}
        for row in claims.curve_rows(run.curves):
            run.add(row["data"], [row])
        for name, figure in curve_figures(run.curves, recipe=run.recipe).items():
            item = figure.to_dict()["layout"]["meta"].get("item")
            if item in run.items:
                run.figures[f"{item}-{name}"] = figure


def _of(table: pd.DataFrame, data: str) -> pd.DataFrame:
    return table.loc[table["data"] == data]
