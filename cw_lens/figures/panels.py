"""Lines with intervals, rows of intervals and maps of heads: what studies' figures are made of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cw_lens.figures.style import STYLES, WIDTH, Style, dress, plain, series_styles
from cw_lens.theme import (
    BLACK,
    BLUE,
    DIVERGING,
    EMPTY,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    SEQUENTIAL,
    SKY,
    VERMILLION,
)

CYCLE = (
    (BLUE, "circle", "solid"),
    (VERMILLION, "square", "dash"),
    (GREEN, "diamond", "dot"),
    (ORANGE, "triangle-up", "dashdot"),
    (PURPLE, "x", "longdash"),
    (SKY, "pentagon", "longdashdot"),
    (BLACK, "triangle-down", "solid"),
    (GREY, "circle-open", "dot"),
)
"""Colour, marker and dash of the series of a figure, in their order."""

MOST_HEADS_ABREAST = 12
"""Maps of layer by head stand side by side up to so many heads, and below each other beyond."""
SMALLEST_CELL = 5.0
"""Pixels that a cell must have to each side to bear a minus."""
STRONG = 0.65
"""From this share of the scale on a minus is drawn in the paper's colour: the ink would be lost."""


def interval_lines(
    table: pd.DataFrame,
    *,
    x: str,
    series: str,
    value: str = "value",
    title: str,
    subtitle: str,
    x_title: str,
    y_title: str,
    level: float | None = None,
) -> go.Figure:
    """Each series against x, with the interval in `low` and `high` as a bar on each point.

    Args:
        table: one row a point.
        x, series, value: its columns.
        title, subtitle, x_title, y_title: plain text.
        level: where a thin line is drawn across, such as at zero.
    """
    figure = go.Figure()
    names = [str(name) for name in table[series].drop_duplicates()]
    styles = _styles(names)
    for place, name in enumerate(names):
        rows = table.loc[table[series].astype(str) == name]
        colour, marker, dash = styles[place]
        figure.add_trace(
            go.Scatter(
                name=plain(name),
                x=rows[x].tolist(),
                y=rows[value].tolist(),
                error_y=_bars(rows, value, colour),
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 1.5},
                marker={"color": colour, "symbol": marker, "size": 6},
                hoverinfo="text",
                hovertext=[interval_text(name, row, x, value) for row in rows.to_dict("records")],
            )
        )
    if level is not None:
        figure.add_hline(y=level, line={"color": INK, "width": 0.8})
    figure.update_xaxes(title_text=plain(x_title))
    figure.update_yaxes(title_text=plain(y_title), title_standoff=8, automargin=True)
    dress(figure, title, subtitle, len(names))
    figure.update_layout(showlegend=len(names) > 1)
    return figure


def interval_rows(
    table: pd.DataFrame,
    *,
    row: str,
    series: str,
    value: str = "value",
    title: str,
    subtitle: str,
    x_title: str,
    level: float | None = None,
) -> go.Figure:
    """One line of the figure for each `row`, a marker with its interval for each series.

    Args: as `interval_lines`; `row` names the column whose values stand at the left, the first on
    top.
    """
    figure = go.Figure()
    labels = [str(name) for name in table[row].drop_duplicates()]
    names = [str(name) for name in table[series].drop_duplicates()]
    for place, name in enumerate(names):
        rows = table.loc[table[series].astype(str) == name]
        colour, marker, _ = CYCLE[place % len(CYCLE)]
        offset = 0.66 * (place - (len(names) - 1) / 2) / max(1, len(names))
        figure.add_trace(
            go.Scatter(
                name=plain(name),
                x=rows[value].tolist(),
                y=[labels.index(str(label)) + offset for label in rows[row]],
                error_x=_bars(rows, value, colour),
                mode="markers",
                marker={"color": colour, "symbol": marker, "size": 8},
                hoverinfo="text",
                hovertext=[interval_text(name, r, row, value) for r in rows.to_dict("records")],
            )
        )
    if level is not None:
        figure.add_vline(x=level, line={"color": INK, "width": 0.8})
    figure.update_xaxes(title_text=plain(x_title))
    figure.update_yaxes(
        tickvals=list(range(len(labels))),
        ticktext=[plain(label) for label in labels],
        range=[len(labels) - 0.4, -0.6],
        automargin=True,
    )
    dress(figure, title, subtitle, len(names))
    figure.update_layout(showlegend=len(names) > 1, height=170 + 34 * len(labels) + 10 * len(names))
    return figure


def head_maps(
    table: pd.DataFrame,
    values: Mapping[str, str],
    *,
    title: str,
    subtitle: str,
    signed: Sequence[str] = (),
) -> go.Figure:
    """A map of layer by head for each of these columns, each with its own scale.

    They stand side by side, or below each other where heads are many. A negative cell of a signed
    map bears a minus, so that its sign is there without colours, unless it is too small to. A cell
    without a number is grey.

    Args:
        table: one row per layer and head.
        values: column -> what it is called.
        title, subtitle: plain text.
        signed: the columns that are drawn around zero, with two colours.
    """
    heads, layers = (len(set(table[name].tolist())) for name in ("head", "layer"))
    stacked = heads > MOST_HEADS_ABREAST
    columns, rows = (1, len(values)) if stacked else (len(values), 1)
    gap = 0.16 / max(1, columns - 1) if columns > 1 else 0.1
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[plain(name) for name in values.values()],
        shared_yaxes=not stacked,
        horizontal_spacing=gap,
        vertical_spacing=0.26 / rows,
    )
    panel = 9 * min(layers, 60) + (40 if stacked else 68)
    width = (WIDTH - 78) * (0.86 if stacked else (1 - gap * (columns - 1)) / columns)
    cell = min(width / heads, panel / layers)
    for place, (column, name) in enumerate(values.items(), start=1):
        grid = table.pivot(index="layer", columns="head", values=column)
        row, col = (place, 1) if stacked else (1, place)
        axes = figure.to_dict()["layout"]
        number = "" if place == 1 else place
        bar = _bar_place(axes[f"xaxis{number}"], axes[f"yaxis{number}"], stacked)
        drawn = _head_map(grid, name, around=column in signed, bar=bar)
        figure.add_trace(drawn, row=row, col=col)
        if column in signed and cell >= SMALLEST_CELL:
            for marks in _minus_signs(grid, drawn.to_plotly_json()["zmax"], 0.7 * min(cell, 11.0)):
                figure.add_trace(marks, row=row, col=col)
        figure.update_xaxes(title_text="head", title_standoff=2, row=row, col=col)
        if stacked or place == 1:
            figure.update_yaxes(title_text="layer", row=row, col=col)
    dress(figure, title, subtitle, 0)
    figure.update_yaxes(showgrid=False, range=_ends(table["layer"].tolist()))
    figure.update_xaxes(showgrid=False, range=_ends(table["head"].tolist()))
    figure.update_annotations(font_size=12)
    figure.update_layout(
        height=rows * (panel + (70 if stacked else 0)) + (110 if stacked else 192),
        margin={"t": 84, "b": 50 if stacked else 108},
        showlegend=False,
        plot_bgcolor=EMPTY,
    )
    return figure


def _ends(numbers: Sequence[int]) -> list[float]:
    return [min(numbers) - 0.5, max(numbers) + 0.5]


def _bar_place(x: Mapping[str, Any], y: Mapping[str, Any], stacked: bool) -> dict[str, Any]:
    """Where the colour bar of a panel stands: below it, or at its right."""
    shape: dict[str, Any] = {"thickness": 10, "tickfont": {"size": 10}, "nticks": 4}
    if stacked:
        (low, high) = y["domain"]
        return shape | {"x": 1.0, "xpad": 4, "y": (low + high) / 2, "len": high - low}
    left, right = x["domain"]
    return shape | {
        "orientation": "h",
        "x": (left + right) / 2,
        "len": right - left,
        "y": -0.16,
        "yanchor": "top",
    }


def _head_map(grid: pd.DataFrame, name: str, *, around: bool, bar: dict[str, Any]) -> go.Heatmap:
    numbers = grid.to_numpy(dtype=float)
    finite = np.abs(numbers[np.isfinite(numbers)])
    size = float(np.quantile(finite, 0.98)) if len(finite) else 1.0
    return go.Heatmap(
        z=[[None if not np.isfinite(v) else v for v in row] for row in numbers],
        x=[int(head) for head in grid.columns],
        y=[int(layer) for layer in grid.index],
        colorscale=DIVERGING if around else SEQUENTIAL,
        zmid=0 if around else None,
        zmin=-(size or 1.0) if around else 0,
        zmax=size or 1.0,
        colorbar=bar,
        hovertemplate="layer %{y}, head %{x}<br>" + f"{plain(name)} %{{z:.4g}}<extra></extra>",
    )


def _minus_signs(grid: pd.DataFrame, end: float, length: float) -> list[go.Scatter]:
    """A minus on each negative cell, in the ink or, where the cell is strong, in the paper."""
    places = [
        (x, y, value)
        for y, row in zip(grid.index.tolist(), grid.to_numpy(dtype=float).tolist(), strict=True)
        for x, value in zip(grid.columns.tolist(), row, strict=True)
        if value < 0
    ]
    signs = []
    for colour, strong in ((INK, False), (PAPER, True)):
        held = [(x, y) for x, y, value in places if (-value >= STRONG * end) == strong]
        if held:
            signs.append(
                go.Scatter(
                    name="negative",
                    x=[x for x, _ in held],
                    y=[y for _, y in held],
                    mode="markers",
                    marker={
                        "symbol": "line-ew",
                        "size": length,
                        "color": colour,
                        "line": {"width": 1, "color": colour},
                    },
                    hoverinfo="skip",
                    showlegend=False,
                )
            )
    return signs


def with_caption(figure: go.Figure, caption: str, recipe: str | None) -> go.Figure:
    """The figure with what stands below it, and the command that makes it again."""
    figure.update_layout(meta={"caption": caption, "recipe": recipe})
    return figure


def interval_text(name: str, row: Mapping[str, Any], x: str, value: str) -> str:
    """All numbers of one point, as plotly's markup."""
    place = row[x] if isinstance(row[x], str) else f"{row[x]:.4g}"
    text = f"<b>{plain(name)}</b><br>{plain(x.replace('_', ' '))} {plain(str(place))}<br>"
    number = f"{row[value]:.4g}"
    if math.isfinite(row.get("low", math.nan)):
        number += f" [{row['low']:.4g}, {row['high']:.4g}]"
    text += number.replace("-", "−")
    return text + (f"<br>{int(row['n'])} texts" if "n" in row else "")


def _styles(names: Sequence[str]) -> list[Style]:
    """Those of the metrics where some series are metrics, which look the same in all figures."""
    if not set(names) & set(STYLES):
        return [CYCLE[place % len(CYCLE)] for place in range(len(names))]
    return list(series_styles([(name, name, "online") for name in names]).values())


def _bars(rows: pd.DataFrame, value: str, colour: str) -> dict[str, Any] | None:
    if "low" not in rows or not len(rows["low"].dropna()):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": (rows["high"] - rows[value]).tolist(),
        "arrayminus": (rows[value] - rows["low"]).tolist(),
        "thickness": 1,
        "width": 2,
        "color": colour,
    }


def tidy(table: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """One row per row and column: `series`, `value`, and `low`, `high`, `n` where there are any.

    Args:
        table: with columns named `x`, `x_low`, `x_high`, `x_n`.
        columns: the x of those that are wanted -> what their series is called.
    """
    parts = []
    others = [n for n in table.columns if not any(n == c or n.startswith(f"{c}_") for c in columns)]
    for column, name in columns.items():
        part = table[others].assign(series=name, value=table[column])
        for end in ("low", "high", "n"):
            if f"{column}_{end}" in table:
                part[end] = table[f"{column}_{end}"]
        parts.append(part)
    return pd.concat(parts, ignore_index=True)
