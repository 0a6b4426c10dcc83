"""What runs of faithfulness, validate and tasks show: their chapters, from tables and manifest.

A chapter is a function of a `StoredRun` alone, so that the page at the end of a run and that of
`cw-lens report` are the same.
"""

from typing import Any

import numpy as np
import pandas as pd

from cw_lens.figures import curve_figures
from cw_lens.figures.outcomes import accuracy_figure, correlation_figure
from cw_lens.run_facts import certified, fact_lines
from cw_lens.statistics import CONFIDENCE
from cw_lens.stored_runs import StoredRun
from cw_lens.studies.accuracy import accuracy_sentences
from cw_lens.studies.comparisons import sentences
from cw_lens.studies.curves import NO_OP, RemovalCurves, no_op_failures
from cw_lens.studies.validation import validation_sentences
from cw_lens.views.study_page import Chapter, Section

FAITHFULNESS = ("units", "curves", "aopc", "comparisons")
VALIDATION = ("ablations", "correlations")
TASKS = ("results", "accuracy")
"""The tables of each study, by the names of their files."""


def how(run: StoredRun) -> dict[str, Any]:
    """What every chapter says of how its run was made: recipe, certificates, facts."""
    sentence, table = certified(run)
    return {
        "recipe": run.recipe,
        "facts": fact_lines(run),
        "certified": sentence,
        "certificates": table,
    }


def faithfulness_tables(units: pd.DataFrame, curves: RemovalCurves) -> dict[str, pd.DataFrame]:
    """The tables of a run of faithfulness, by file name."""
    return dict(zip(FAITHFULNESS, (units, *_curve_tables(curves)), strict=True))


def _curve_tables(curves: RemovalCurves) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    return curves.points, curves.aopc, curves.comparisons


def stored_curves(run: StoredRun) -> RemovalCurves:
    """The curves of a run, from its tables; without units none is known to have failed."""
    points, comparisons = run.tables["curves"], run.tables["comparisons"]
    units = run.tables.get("units", pd.DataFrame())
    numbers = [name for name in ("nll_sum", "clean_nll_sum", "kl_sum") if name in units]
    lost = ~np.isfinite(units[numbers].to_numpy(dtype=float)).all(axis=1)
    if len(units):
        lost &= (units["metric"] != NO_OP).to_numpy()
    return RemovalCurves(
        points=points,
        aopc=run.tables.get("aopc", pd.DataFrame()),
        comparisons=comparisons,
        sentences=sentences(comparisons),
        failed=units.loc[lost].reset_index(drop=True),
        confidence=CONFIDENCE,
    )


def faithfulness_chapter(run: StoredRun) -> Chapter:
    """Curves, their areas, comparisons and what failed."""
    curves, units = stored_curves(run), run.tables["units"]
    sections = [
        Section("Curves", figures=curve_figures(curves, recipe=run.recipe)),
        Section(
            "Every comparison, over all fractions and at each",
            sentences=curves.sentences,
            tables={"aopc": curves.aopc, "comparisons": curves.comparisons},
        ),
        Section("Every point of the curves", tables={"curves": curves.points}),
    ]
    if len(curves.failed):
        sections.append(Section("Units that failed", tables={"failed_units": curves.failed}))
    return Chapter(
        "Is the model hurt most by losing what a metric calls important?",
        sections,
        sentences=headlines(curves),
        notices=_notices(units, curves),
        **how(run),
    )


def _notices(units: pd.DataFrame, curves: RemovalCurves) -> list[str]:
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
    return notices


def headlines(curves: RemovalCurves) -> tuple[str, ...]:
    """The sentences that set contributions beside attention, whichever is better.

    Where the two were not both studied, the first four of all.
    """
    table = curves.comparisons
    series = ["attention", "contribution"]
    chosen = table.loc[table["metric"].isin(series) & table["other"].isin(series)]
    return sentences(chosen) or curves.sentences[:4]


def validation_chapter(run: StoredRun) -> Chapter:
    """Rank correlations of token scores with what masking each value does."""
    found = run.tables["correlations"]
    corpora = ", ".join(run.tables["ablations"]["data"].drop_duplicates())
    texts = sum(run.texts(data) for data in run.tokens_of_texts())
    where = f"{run.model}, {corpora}, {texts} text{'s' * (texts != 1)}"
    figure = correlation_figure(found, where, recipe=run.recipe)
    return Chapter(
        "Do token scores rank single values as the loss does?",
        [
            Section(
                "Rank correlations",
                figures={"rank-correlations": figure},
                tables={"correlations": found},
            )
        ],
        sentences=validation_sentences(found),
        **how(run),
    )


def tasks_chapter(run: StoredRun) -> Chapter:
    """Accuracy on each task, and what removal costs."""
    accuracy = run.tables["accuracy"]
    removed = accuracy.loc[accuracy["fraction"] > 0, ["task", "remove"]].drop_duplicates()
    figures = {
        f"{task}-{remove}": accuracy_figure(accuracy, task, remove, run.model, recipe=run.recipe)
        for task, remove in removed.itertuples(index=False, name=None)
    }
    return Chapter(
        "What is left of a model's accuracy?",
        [Section("Accuracy", figures=figures, tables={"accuracy": accuracy})],
        sentences=accuracy_sentences(accuracy),
        **how(run),
    )
