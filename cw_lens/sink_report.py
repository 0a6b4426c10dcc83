"""What a run about sinks holds and shows: its tables, and its chapter made of them alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cw_lens.figures.geometry import (
    alignment_figure,
    cone_figure,
    cone_shares,
    norm_figure,
    norm_overview,
    sink_components,
)
from cw_lens.figures.sweeps import surgery_figure, sweep_figure
from cw_lens.statistics import CONFIDENCE
from cw_lens.stored_runs import StoredRun
from cw_lens.studies.alignment import Alignment
from cw_lens.studies.cone import Cone, cone_points
from cw_lens.studies.norm_model import NormModel, norm_points
from cw_lens.studies.readings import TextReading
from cw_lens.studies.sinks import SinkProfile
from cw_lens.studies.sweep_results import SweepCurves
from cw_lens.studies.sweep_sentences import sweep_sentences
from cw_lens.study_report import how
from cw_lens.views.study_page import Chapter, Section

Head = tuple[int, int]
"""A layer and a head of it."""

SINKS = (
    *("sinks", "sink_attention", "alignment_layers", "norm_model_heads", "norm_model"),
    *("cone_heads", "cone_layers", "sweep_units", "sweep", "sweep_comparisons"),
)
"""The tables that the chapter is made of, by the names of their files."""
POINTS = {"norm_points": "figure 5b", "cone_points": "figure 6a"}
"""Tables that runs of an earlier version lack, and what cannot be drawn without them."""
IF_THERE = ("sink_tokens", *POINTS)


def telling_norm(model: NormModel) -> Head:
    """The head to draw the norm model of: alpha* nearest to 1/2, among those that fit well.

    Where none explains half of the outputs' length, the best fit of all.
    """
    heads = model.heads
    held = heads.loc[heads["alpha_star"].between(0, 1, inclusive="neither")]
    held = held.loc[held["r2_norm"] >= 0.5]
    held = held.iloc[(held["alpha_star"] - 0.5).abs().argsort()]
    if not len(held):
        held = heads.sort_values("r2_norm", ascending=False, na_position="last")
    return _place(held)


def telling_cone(found: Cone) -> Head:
    """The head to draw the cone of: the one whose short outputs enter it most without the sink."""
    return _place(found.heads.sort_values("without_gain", ascending=False, na_position="last"))


def _place(heads: pd.DataFrame) -> Head:
    first = heads.to_dict("records")[0]
    return int(first["layer"]), int(first["head"])


def norm_point_table(
    readings: Sequence[TextReading], model: NormModel, head: Head | None
) -> pd.DataFrame:
    """The outputs of the head that figure 5b draws, by default `telling_norm`."""
    layer, head_ = head or telling_norm(model)
    return _with_head(norm_points(readings, model, layer, head_), layer, head_)


def cone_point_table(
    readings: Sequence[TextReading], found: Cone, head: Head | None
) -> pd.DataFrame:
    """The outputs of the head that figure 6a draws, by default `telling_cone`."""
    layer, head_ = head or telling_cone(found)
    return _with_head(cone_points(readings, layer, head_), layer, head_)


def _with_head(points: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    points = points.assign(layer=layer, head=head)
    first = ["data", "layer", "head"]
    return pd.DataFrame(points, columns=[*first, *points.columns.drop(first)])


def stored_norms(run: StoredRun, data: str) -> NormModel:
    """The norm model of one corpus, from its tables."""
    heads = run.of("norm_model_heads", data)
    summary = run.of("norm_model", data) if "norm_model" in run.tables else pd.DataFrame()
    fitted = int(np.isfinite(heads["g"]).sum())
    return NormModel(heads, summary, fitted, len(heads) - fitted, run.texts(data))


def norm_model_figure(run: StoredRun, data: str) -> Any:
    """Figure 5b of the head whose outputs were kept; None if none were."""
    points, fit = _kept_points(run, "norm_points", "norm_model_heads", data)
    return None if fit is None else norm_figure(points, fit, run.where(data), recipe=run.recipe)


def cone_plane_figure(run: StoredRun, data: str) -> Any:
    """Figure 6a of the head whose outputs were kept; None if none were."""
    points, fit = _kept_points(run, "cone_points", "cone_heads", data)
    return None if fit is None else cone_figure(points, fit, run.where(data), recipe=run.recipe)


def _kept_points(
    run: StoredRun, points: str, heads: str, data: str
) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The outputs of one head, and its row in the table of heads."""
    if points not in run.tables:
        return pd.DataFrame(), None
    held, table = run.of(points, data), run.of(heads, data)
    layer, head = int(held["layer"].iloc[0]), int(held["head"].iloc[0])
    row = table.loc[(table["layer"] == layer) & (table["head"] == head)]
    return held, row.to_dict("records")[0]


def missing_points(run: StoredRun, figures: Mapping[str, str]) -> list[str]:
    """What cannot be drawn of a run because an earlier version did not keep it.

    Args:
        run: any.
        figures: table -> what is drawn of it, "" for nothing.
    """
    return [
        f"{figure.capitalize()} is not drawn: {name}.parquet is not there. Runs of an earlier "
        "version did not keep it; the command of this run, given again, writes it."
        for name, figure in figures.items()
        if figure and name not in run.tables
    ]


def stored_sweep(run: StoredRun) -> SweepCurves:
    """The sweep of a run, from its tables; without units none is known to have failed."""
    points, comparisons = run.tables["sweep"], run.tables["sweep_comparisons"]
    units = run.tables.get("sweep_units", pd.DataFrame())
    numbers = [name for name in ("nll_sum", "clean_nll_sum", "kl_sum") if name in units]
    finite = np.isfinite(units[numbers].to_numpy(dtype=float)).all(axis=1)
    return SweepCurves(
        points=points,
        comparisons=comparisons,
        sentences=sweep_sentences(comparisons, points),
        failed=units.loc[~finite].reset_index(drop=True),
        confidence=CONFIDENCE,
    )


def sinks_chapter(run: StoredRun) -> Chapter:
    """The sweep first, then what the sinks of each corpus are like, then the tables."""
    curves = stored_sweep(run)
    corpora = run.tables["sinks"]["data"].drop_duplicates().tolist()
    shown = [name for name in (*SINKS, "sink_tokens") if name in run.tables]
    tables = {name: run.tables[name] for name in shown if name != "sweep_units"}
    sweep = {name: tables.pop(name) for name in ("sweep", "sweep_comparisons")}
    notices = missing_points(run, POINTS)
    if len(curves.failed):
        sweep["failed_edits"] = curves.failed
        notices.append(f"{len(curves.failed)} edits have no finite loss and are in no average.")
    return Chapter(
        "What do the attention sinks do?",
        [
            Section("The sink's value scaled, replaced and cut", (), _sweep(run, curves), sweep),
            *(_corpus(run, data) for data in corpora),
            Section("Tables behind the figures", tables=tables),
        ],
        sentences=curves.sentences,
        notices=notices,
        **how(run),
    )


def _sweep(run: StoredRun, curves: SweepCurves) -> dict[str, Any]:
    figures = {}
    for data in curves.points["data"].drop_duplicates():
        figures[f"{data}-fig6c-sweep"] = sweep_figure(curves, data, run.model, recipe=run.recipe)
        figures[f"{data}-surgery"] = surgery_figure(curves, data, run.model, recipe=run.recipe)
    return {name: figure for name, figure in figures.items() if figure is not None}


def _corpus(run: StoredRun, data: str) -> Section:
    """Everything about one corpus but the sweep."""
    where, recipe = run.where(data), run.recipe
    cone = Cone(run.of("cone_heads", data), run.of("cone_layers", data))
    alignment = Alignment(pd.DataFrame(), run.of("alignment_layers", data))
    figures = {
        "fig5a-alignment": alignment_figure(alignment, where, recipe=recipe),
        "fig5b-norm-model": norm_model_figure(run, data),
        "fig11-norm-models": norm_overview(stored_norms(run, data), where, recipe=recipe),
        "fig6a-cone": cone_plane_figure(run, data),
        "fig6b-short-outputs": cone_shares(cone, where, recipe=recipe),
        "sink-by-depth": sink_components(cone, where, recipe=recipe),
    }
    drawn = {f"{data}-{name}": figure for name, figure in figures.items() if figure is not None}
    return Section(f"Sinks of {data}", figures=drawn)


def sink_tables(
    profiles: Sequence[SinkProfile],
    units: pd.DataFrame,
    curves: SweepCurves,
    *,
    head: Head | None = None,
) -> dict[str, pd.DataFrame]:
    """All tables of a run, by file name; those of profiles with the corpus as first column.

    Args:
        profiles: of `sink_profiles`.
        units: of the sweep.
        curves: what they make.
        head: whose outputs are kept to be drawn; by default `telling_norm` and `telling_cone`.
    """
    of_profile: Mapping[str, Callable[[SinkProfile], pd.DataFrame | None]] = {
        "sinks": lambda p: p.counts.layers,
        "sink_attention": lambda p: p.counts.attention,
        "sink_positions": lambda p: p.counts.positions,
        "sink_tokens": lambda p: p.counts.tokens,
        "alignment_heads": lambda p: p.alignment.heads,
        "alignment_layers": lambda p: p.alignment.layers,
        "norm_model_heads": lambda p: p.norms.heads,
        "norm_model": lambda p: p.norms.summary,
        "norm_points": lambda p: norm_point_table(p.readings, p.norms, head),
        "cone_heads": lambda p: p.cone.heads,
        "cone_layers": lambda p: p.cone.layers,
        "cone_points": lambda p: cone_point_table(p.readings, p.cone, head),
    }
    tables = {}
    for name, take in of_profile.items():
        parts = [(profile.data, take(profile)) for profile in profiles]
        held = [part.assign(data=data) for data, part in parts if part is not None]
        if held:
            table = pd.concat(held, ignore_index=True)
            tables[name] = table[["data", *table.columns.drop("data")]]
    return tables | {
        "sweep_units": units,
        "sweep": curves.points,
        "sweep_comparisons": curves.comparisons,
    }
