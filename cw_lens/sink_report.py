"""What a run about sinks shows: the sections of its page, and its tables."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from cw_lens.studies.cone import Cone, cone_points
from cw_lens.studies.norm_model import NormModel, norm_points
from cw_lens.studies.sinks import SinkProfile
from cw_lens.studies.sweep_results import SweepCurves
from cw_lens.views.study_page import Section

Head = tuple[int, int]
"""A layer and a head of it."""


def model_label(facts: Mapping[str, Any]) -> str:
    """What figures call the model: its name without the folders before it."""
    return Path(str(facts["model"]["name"])).name


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


def head_row(found: NormModel | Cone, layer: int, head: int) -> dict[str, Any]:
    """What was found of one head."""
    heads = found.heads
    return heads.loc[(heads["layer"] == layer) & (heads["head"] == head)].to_dict("records")[0]


def profile_section(profile: SinkProfile, where: str, *, head: Head | None, recipe: str) -> Section:
    """Everything about one corpus but the sweep.

    Args:
        profile: of `sink_profiles`.
        where: model, corpus and texts, for the figures.
        head: which to draw alone; by default `telling_norm` and `telling_cone`.
        recipe: the command that makes the run again.
    """
    fitted = head or telling_norm(profile.norms)
    drawn = head or telling_cone(profile.cone)
    points = norm_points(profile.readings, profile.norms, *fitted)
    plane = cone_points(profile.readings, *drawn)
    fit, frame = head_row(profile.norms, *fitted), head_row(profile.cone, *drawn)
    figures = {
        "fig5a-alignment": alignment_figure(profile.alignment, where, recipe=recipe),
        "fig5b-norm-model": norm_figure(points, fit, where, recipe=recipe),
        "fig11-norm-models": norm_overview(profile.norms, where, recipe=recipe),
        "fig6a-cone": cone_figure(plane, frame, where, recipe=recipe),
        "fig6b-short-outputs": cone_shares(profile.cone, where, recipe=recipe),
        "sink-by-depth": sink_components(profile.cone, where, recipe=recipe),
    }
    figures = {f"{profile.data}-{name}": figure for name, figure in figures.items()}
    tables = {
        f"Sinks by layer, {profile.data}": profile.counts.layers,
        f"Norm model, {profile.data}": profile.norms.heads,
        f"Norm model, all heads, {profile.data}": profile.norms.summary,
        f"Cone by layer, {profile.data}": profile.cone.layers,
        f"Alignment by layer, {profile.data}": profile.alignment.layers,
    }
    if profile.counts.tokens is not None:
        tables[f"Tokens that are sinks, {profile.data}"] = profile.counts.tokens
    return Section(f"Sinks of {profile.data}", figures=figures, tables=tables)


def sweep_section(curves: SweepCurves, model: str, *, recipe: str) -> Section:
    """What is lost as the sink's value is scaled, replaced and cut."""
    figures = {}
    for data in curves.points["data"].drop_duplicates():
        figures[f"{data}-fig6c-sweep"] = sweep_figure(curves, data, model, recipe=recipe)
        figures[f"{data}-surgery"] = surgery_figure(curves, data, model, recipe=recipe)
    tables = {"Sweep": curves.points, "Comparisons of edits": curves.comparisons}
    if len(curves.failed):
        tables["Edits that failed"] = curves.failed
    return Section(
        "The sink's value scaled, replaced and cut",
        sentences=curves.sentences,
        figures={name: figure for name, figure in figures.items() if figure is not None},
        tables=tables,
    )


def profile_tables(profiles: Sequence[SinkProfile]) -> dict[str, pd.DataFrame]:
    """All tables of the profiles, by file name, the corpus as their first column."""
    of_profile: Mapping[str, Callable[[SinkProfile], pd.DataFrame | None]] = {
        "sinks": lambda p: p.counts.layers,
        "sink_attention": lambda p: p.counts.attention,
        "sink_positions": lambda p: p.counts.positions,
        "sink_tokens": lambda p: p.counts.tokens,
        "alignment_heads": lambda p: p.alignment.heads,
        "alignment_layers": lambda p: p.alignment.layers,
        "norm_model_heads": lambda p: p.norms.heads,
        "norm_model": lambda p: p.norms.summary,
        "cone_heads": lambda p: p.cone.heads,
        "cone_layers": lambda p: p.cone.layers,
    }
    tables = {}
    for name, take in of_profile.items():
        parts = [(profile.data, take(profile)) for profile in profiles]
        held = [part.assign(data=data) for data, part in parts if part is not None]
        if held:
            table = pd.concat(held, ignore_index=True)
            tables[name] = table[["data", *table.columns.drop("data")]]
    return tables
