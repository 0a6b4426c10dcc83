"""The run folders of studies: tables, curves as figures, a page, and the manifest last."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

import cw_lens
from cw_lens.figures import curve_figures, write_figures
from cw_lens.folders import MANIFEST, REPORT, replace_file, versions
from cw_lens.studies.comparisons import sentences
from cw_lens.studies.curves import RemovalCurves, no_op_failures
from cw_lens.views.study_page import Section, study_page

PACKAGES = ("torch", "transformers", "transformer-lens", "scipy", "pandas", "plotly", "kaleido")
FIGURES = "figures"
"""The folder of the figures' files."""


def write_faithfulness(
    folder: Path,
    units: pd.DataFrame,
    curves: RemovalCurves,
    facts: Mapping[str, Any],
    recipe: str,
) -> str | None:
    """Writes units, curves, comparisons, figures and page; why images are missing, if they are.

    Args:
        folder: of the run.
        units: one row for each.
        curves: what they make.
        facts: for the manifest: configuration, model, corpora, certificates.
        recipe: the command that makes the run again.

    Raises:
        RunFolderError: a file cannot be written.
    """
    tables = {"curves": curves.points, "aopc": curves.aopc, "comparisons": curves.comparisons}
    _write_tables(folder, {"units": units}, csv=False)
    _write_tables(folder, tables)
    notices = []
    moved = no_op_failures(units)
    if len(moved):
        notices.append(
            f"{len(moved)} no-op runs differ from the clean run: nothing here can be trusted."
        )
    idle = len(units.query("fraction > 0 and removed == 0"))
    if idle:
        notices.append(
            f"In {idle} of {len(units)} units nothing was removed: the fraction of the eligible "
            "pairs is less than one pair, or almost every token counts as a sink. Their changes "
            "of 0 are in the averages."
        )
    if len(curves.failed):
        notices.append(
            f"{len(curves.failed)} of {len(units)} units have a loss that is NaN or infinite; "
            "they are listed below and are in no average."
        )
    figures = curve_figures(curves, recipe=recipe)
    sections = [Section("Curves", figures=figures)]
    sections.append(
        Section(
            "Area over the perturbation curve, and every comparison",
            sentences=curves.sentences,
            tables={"AOPC": curves.aopc, "Comparisons": curves.comparisons},
        )
    )
    sections.append(Section("Every point of the curves", tables={"Curves": curves.points}))
    if len(curves.failed):
        sections.append(Section("Units that failed", tables={"Failed units": curves.failed}))
    page = study_page(
        "Is the model hurt most by losing what a metric calls important?",
        sections,
        sentences=headlines(curves),
        facts=fact_lines(facts),
        notices=notices,
        recipe=recipe,
    )
    return _finish(folder, figures, page.html, facts, recipe)


def write_study(
    folder: Path,
    title: str,
    tables: Mapping[str, pd.DataFrame],
    shown: Sequence[Section],
    *,
    facts: Mapping[str, Any],
    recipe: str,
    sentences: Sequence[str] = (),
) -> str | None:
    """Writes the tables (parquet and csv), a page of these sections, and the manifest.

    Raises:
        RunFolderError: a file cannot be written.
    """
    _write_tables(folder, tables)
    figures = {name: figure for section in shown for name, figure in section.figures.items()}
    page = study_page(title, shown, sentences=sentences, facts=fact_lines(facts), recipe=recipe)
    return _finish(folder, figures, page.html, facts, recipe)


def headlines(curves: RemovalCurves) -> tuple[str, ...]:
    """The sentences that set contributions beside attention, whichever is better.

    Where the two were not both studied, the first four of all.
    """
    table = curves.comparisons
    series = ["attention", "contribution"]
    chosen = table.loc[table["metric"].isin(series) & table["other"].isin(series)]
    return sentences(chosen) or curves.sentences[:4]


def fact_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The manifest's facts as labelled lines."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in facts.items()
        if name != "certificates"
    ]


def _write_tables(folder: Path, tables: Mapping[str, pd.DataFrame], *, csv: bool = True) -> None:
    for name, table in tables.items():
        replace_file(folder / f"{name}.parquet", table.to_parquet(index=False))
        if csv:
            replace_file(folder / f"{name}.csv", table.to_csv(index=False).encode())


def _finish(
    folder: Path,
    figures: dict[str, go.Figure],
    html: str,
    facts: Mapping[str, Any],
    recipe: str,
) -> str | None:
    written = write_figures(folder / FIGURES, figures, recipe) if figures else None
    replace_file(folder / REPORT, html.encode())
    manifest = {
        "cw_lens": cw_lens.__version__,
        **facts,
        "recipe": recipe,
        "versions": versions(*PACKAGES),
    }
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    return None if written is None else written.message
