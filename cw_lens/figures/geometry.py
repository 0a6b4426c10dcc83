"""What sinks do, as figures: alignment by depth, norm model, cone (paper, figures 5, 6 and 11)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cw_lens.figures.panels import head_maps, interval_lines, tidy, with_caption
from cw_lens.figures.style import dress
from cw_lens.studies.alignment import Alignment
from cw_lens.studies.cone import Cone
from cw_lens.studies.norm_model import NormModel, norm_bins, predicted_norm
from cw_lens.theme import BLUE, GREY, INK, VERMILLION

MOST_POINTS = 1500
"""Points that one figure draws at most: evenly spaced in their order where there are more."""


def alignment_figure(alignment: Alignment, where: str, *, recipe: str | None = None) -> go.Figure:
    """Figure 5a: cosines of the first key's projected value to the others', and among those.

    Args:
        alignment: from the study of that name.
        where: model and corpus, as plain text.
        recipe: the command that makes the figure again.
    """
    names = {"first_cosine": "first key to the others", "others_cosine": "among the others"}
    figure = interval_lines(
        tidy(alignment.layers, names),
        x="layer",
        series="series",
        title="Where projected values point, by depth",
        subtitle=where,
        x_title="layer",
        y_title="mean cosine",
        level=0.0,
    )
    return with_caption(
        figure,
        f"Mean cosine between projected values within a text, mean over heads; {where}. Bars: "
        "95 % bootstrap intervals over texts. Compare figure 5a of the paper (arXiv 2606.07604).",
        recipe,
    )


def norm_figure(
    points: pd.DataFrame, fit: Mapping[str, Any], where: str, *, recipe: str | None = None
) -> go.Figure:
    """Figure 5b: the length of one head's outputs against their attention to the first key.

    Args:
        points: of `norm_points`.
        fit: the head's row of `NormModel.heads`, as a dict.
        where, recipe: as `alignment_figure`.
    """
    figure = go.Figure()
    shown = _thinned(points)
    bins = norm_bins(points)
    figure.add_trace(
        go.Scatter(
            name="one query",
            x=shown["attention"].tolist(),
            y=shown["norm"].tolist(),
            mode="markers",
            marker={"color": GREY, "size": 3, "opacity": 0.7},
            hoverinfo="skip",
        )
    )
    figure.add_trace(
        go.Scatter(
            name="mean and spread of a bin",
            x=bins["attention"].tolist(),
            y=bins["norm"].tolist(),
            error_y={"type": "data", "array": bins["spread"].tolist(), "thickness": 1, "width": 2},
            mode="markers",
            marker={"color": BLUE, "size": 8, "symbol": "diamond"},
            hovertemplate="attention %{x:.3f}<br>length %{y:.4g}<extra></extra>",
        )
    )
    grid = np.linspace(0, 1, 101)
    figure.add_trace(
        go.Scatter(
            name="norm model",
            x=grid.tolist(),
            y=predicted_norm(grid, fit["g"], fit["kappa"], fit["V"]).tolist(),
            mode="lines",
            line={"color": VERMILLION, "width": 2},
            hovertemplate="attention %{x:.2f}<br>predicted %{y:.4g}<extra></extra>",
        )
    )
    star = fit["alpha_star"]
    if 0 < star < 1:
        figure.add_vline(x=star, line={"color": INK, "dash": "dash", "width": 1})
        figure.add_annotation(
            x=star,
            y=0.98,
            yref="paper",
            yanchor="top",
            xshift=-4 if star > 0.5 else 4,
            xanchor="right" if star > 0.5 else "left",
            text=f"α* = {star:.3f}",
            showarrow=False,
        )
    figure.update_xaxes(title_text="attention to the first key", range=[-0.01, 1.02])
    figure.update_yaxes(
        title_text="length of the head's output, residual stream units", rangemode="tozero"
    )
    name = f"layer {fit['layer']:.0f}, head {fit['head']:.0f}"
    dress(figure, f"The norm model of {name}", where, 3)
    return with_caption(
        figure,
        f"||o||, in units of the residual stream, against the attention to the first key in "
        f"{name}; {where}; {len(points)} queries, "
        f"of which {len(shown)} are drawn. g = {fit['g']:.3g}, κ = {fit['kappa']:.3g}, "
        f"||v₁|| = {math.sqrt(fit['V']):.3g}, R² of the predicted length {fit['r2_norm']:.3g}. "
        "Compare figure 5b of the paper (arXiv 2606.07604).",
        recipe,
    )


def norm_overview(model: NormModel, where: str, *, recipe: str | None = None) -> go.Figure:
    """Figure 11: g, the attention of least output and the fit, for every head.

    Args:
        model, where, recipe: as `alignment_figure`.
    """
    table = model.heads.assign(
        relative_g=model.heads["g"] / (model.heads["V"] ** 0.5 * model.heads["kappa"]),
        inner=model.heads["alpha_star"].where(model.heads["alpha_star"].between(0, 1)),
    )
    figure = head_maps(
        table,
        {"relative_g": "g / (||v₁|| κ)", "inner": "α*, where in (0, 1)", "r2_norm": "R² of ||o||"},
        title="The norm model of every head",
        subtitle=where,
        signed=("relative_g",),
    )
    return with_caption(
        figure,
        f"Fits over {model.texts} texts; {where}. g below 0 (orange, with a minus): the "
        "other keys write against the first. Grey: no minimum between 0 and 1, or no fit. Compare "
        "figure 11 of the paper (arXiv 2606.07604).",
        recipe,
    )


def cone_figure(
    points: pd.DataFrame, fit: Mapping[str, Any], where: str, *, recipe: str | None = None
) -> go.Figure:
    """Figure 6a: one head's outputs in the plane of mu and the sink, with the sink and without.

    Args:
        points: of `cone_points`.
        fit: the head's row of `Cone.heads`, as a dict.
        where, recipe: as `alignment_figure`.
    """
    figure = make_subplots(
        1,
        2,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=["with the sink", "its term taken away"],
    )
    shown = _thinned(points)
    size = float(np.nanmax(np.abs(points[["x", "y", "x_without", "y_without"]].to_numpy()))) or 1.0
    angle = math.radians(fit["cone_angle"])
    for place, ending in enumerate(("", "_without"), start=1):
        for end in (angle, -angle):
            figure.add_trace(
                go.Scatter(
                    name="edge of the cone",
                    x=[0, 2 * size * math.cos(end)],
                    y=[0, 2 * size * math.sin(end)],
                    mode="lines",
                    line={"color": INK, "dash": "dot", "width": 1},
                    showlegend=place == 1 and end > 0,
                    hoverinfo="skip",
                ),
                row=1,
                col=place,
            )
        for low, name, colour, symbol, length in (
            (False, "output", BLUE, "circle", 4),
            (True, "shortest quarter", VERMILLION, "x", 6),
        ):
            rows = shown.loc[shown["low"] == low]
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=rows[f"x{ending}"].tolist(),
                    y=rows[f"y{ending}"].tolist(),
                    mode="markers",
                    marker={"color": colour, "symbol": symbol, "size": length, "opacity": 0.8},
                    showlegend=place == 1,
                    hovertemplate="along μ %{x:.4g}<br>along u %{y:.4g}<extra></extra>",
                ),
                row=1,
                col=place,
            )
        figure.update_xaxes(title_text="along μ", range=[-size * 1.05, size * 1.05], col=place)
    figure.update_yaxes(range=[-size * 1.05, size * 1.05])
    name = f"layer {fit['layer']:.0f}, head {fit['head']:.0f}"
    dress(figure, f"The semantic cone of {name}", where, 3)
    figure.update_yaxes(title_text="along u", row=1, col=1)
    figure.update_xaxes(title_standoff=6)
    figure.update_annotations(font_size=12)
    figure.update_layout(margin={"t": 76})
    return with_caption(
        figure,
        f"Head outputs of {name}, in units of the residual stream, in the plane of μ, the mean "
        f"direction of the non-sink values, and the sink's own; {where}; {len(points)} outputs, of "
        f"which {len(shown)} are drawn. "
        f"Mean cone: {fit['cone_angle']:.1f} degrees around μ hold 90 % of the non-sink values. Of "
        f"the shortest quarter of outputs {_percent(fit['inside'])} lie inside with the sink, "
        f"{_percent(fit['inside_without'])} without. Compare figure 6a of the paper (arXiv "
        "2606.07604).",
        recipe,
    )


def cone_shares(cone: Cone, where: str, *, recipe: str | None = None) -> go.Figure:
    """Figure 6b: by layer, how many of the shortest outputs lie inside the cone.

    Args:
        cone, where, recipe: as `alignment_figure`.
    """
    names = {
        "inside": "with the sink",
        "inside_without": "its term taken away",
        "inside_rerun": "its value 0 throughout",
    }
    names = {column: name for column, name in names.items() if column in cone.layers}
    figure = interval_lines(
        tidy(cone.layers, names),
        x="layer",
        series="series",
        title="Short outputs inside the semantic cone",
        subtitle=where,
        x_title="layer",
        y_title="share of the shortest quarter",
    )
    figure.update_yaxes(tickformat=".0%", range=[-0.03, 1.03])
    return with_caption(
        figure,
        "Share of the shortest quarter of each head's outputs that lies inside the cone of the "
        f"non-sink values, mean over heads; {where}. Bars: 95 % bootstrap intervals over texts. "
        "Compare figure 6b of the paper (arXiv 2606.07604).",
        recipe,
    )


def sink_components(cone: Cone, where: str, *, recipe: str | None = None) -> go.Figure:
    """By layer, the sink's value along the mean direction of the others, and orthogonal to it.

    Args:
        cone, where, recipe: as `alignment_figure`.
    """
    names = {"a": "a, along μ", "b": "b, orthogonal to μ"}
    figure = interval_lines(
        tidy(cone.layers, names),
        x="layer",
        series="series",
        title="The sink's value, along the others and orthogonal to them",
        subtitle=where,
        x_title="layer",
        y_title="length in units of the residual stream",
        level=0.0,
    )
    return with_caption(
        figure,
        f"Mean over heads and texts; {where}. Bars: 95 % bootstrap intervals over texts.",
        recipe,
    )


def _thinned(points: pd.DataFrame) -> pd.DataFrame:
    return points.iloc[:: max(1, math.ceil(len(points) / MOST_POINTS))]


def _percent(share: float) -> str:
    return "an unknown share" if math.isnan(share) else f"{100 * share:.0f} %"
