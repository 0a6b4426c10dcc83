"""Removal curves and their areas as figures (the paper's figures 3, 4, 8, 9 and 10)."""

import math
import re
from collections.abc import Iterable
from statistics import median

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cw_lens.figures.style import Style, dress, plain, series_styles
from cw_lens.figures.words import area_caption, area_text, caption, point_text, texts
from cw_lens.studies.comparisons import conditions
from cw_lens.studies.curves import RemovalCurves
from cw_lens.studies.paper import curve_item
from cw_lens.theme import INK

DIRECTIONS = {"highest": "comprehensiveness", "lowest": "sufficiency"}
SWITCH_TO_LOG = 5
"""From this ratio of largest to smallest perplexity on, the axis is logarithmic."""


def curve_figures(curves: RemovalCurves, *, recipe: str | None = None) -> dict[str, go.Figure]:
    """One figure per corpus, granularity, sink protection and direction, and one of the AOPCs.

    A curve shows perplexity = exp(sum of nll / predicted tokens) against the share of pairs
    removed, over a dashed line at the clean one, on a logarithmic axis where it spans much:
    delta perplexity may be negative, and stands in the text of each point. Its bars are the
    interval of delta perplexity over texts, put on the clean perplexity. The AOPC is in nats per
    predicted token.

    Each figure's `layout.meta` holds its `caption`, the `recipe`, and of a curve the `item` of the
    paper that it is to be compared with. The names are fit for files.

    Args:
        curves: from `removal_curves`.
        recipe: the command that makes the figures again.
    """
    points = curves.points
    styles = series_styles(_distinct(points, ["series", "metric", "ranking"]))
    figures: dict[str, go.Figure] = {}
    meta = {"recipe": recipe, "confidence": curves.confidence}
    for key in _distinct(points, ["data", "granularity", "protected"]):
        for remove, name in DIRECTIONS.items():
            rows = _of(points, (*key, remove))
            if len(rows):
                figures[_free_name(figures, (*key, name))] = _curves(rows, styles, meta)
        if len(curves.aopc):  # the paper's runs of an earlier version kept none
            areas = _areas(_of(curves.aopc, key), styles, meta)
            figures[_free_name(figures, (*key, "aopc"))] = areas
    return figures


def _distinct(table: pd.DataFrame, columns: list[str]) -> list[tuple[str, str, str]]:
    """The combinations of three columns, in the order in which they first occur."""
    return list(table[columns].drop_duplicates().itertuples(index=False, name=None))


def _of(table: pd.DataFrame, key: tuple[str, ...]) -> pd.DataFrame:
    """The rows of one corpus, granularity and protection, and of one direction if it is given."""
    columns = ["data", "granularity", "protected", "remove"][: len(key)]
    return table.loc[(table[columns] == key).all(axis=1)]


def _curves(points: pd.DataFrame, styles: dict[str, Style], meta: dict) -> go.Figure:
    remove = points["remove"].iloc[0]
    figure = go.Figure()
    for name in points["series"].unique():
        rows = points.loc[(points["series"] == name) & (points["n"] > 0)]
        above = rows["delta_perplexity_high"] - rows["delta_perplexity"]
        below = rows["delta_perplexity"] - rows["delta_perplexity_low"]
        colour, marker, dash = styles[name]
        figure.add_trace(
            go.Scatter(
                name=plain(name),
                x=rows["fraction"].tolist(),
                y=rows["perplexity"].tolist(),
                error_y=_bars(above, below, width=2),
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 1.5},
                marker={"color": colour, "symbol": marker, "size": 7},
                hoverinfo="text",
                hovertext=[point_text(row) for row in rows.to_dict("records")],
            )
        )
    _axes(figure, points)
    title = f"{DIRECTIONS[remove].capitalize()}: the {remove} removed"
    dress(figure, title, _subtitle(points), len(points["series"].unique()) + 1)
    item = curve_item(points.to_dict("records")[0])
    text = caption(points, meta["confidence"])
    figure.update_layout(meta=meta | {"caption": text, "item": item})
    return figure


def _axes(figure: go.Figure, points: pd.DataFrame) -> None:
    """Axes that hold every point and bar, and the line of the clean perplexity."""
    clean = points["clean_perplexity"].dropna()
    end = points["fraction"].max() * 1.04 + 0.005
    figure.update_xaxes(
        title_text="(head, token) pairs removed, share of the eligible",
        tickformat=".0%",
        range=[0, end],
    )
    figure.update_yaxes(title_text="perplexity", title_standoff=8, automargin=True)
    if not len(clean):
        return
    level = median(clean.tolist())
    line = {"color": INK, "dash": "dash", "width": 1}
    figure.add_trace(
        go.Scatter(
            name="clean: nothing removed",
            x=[0, end],
            y=[level, level],
            mode="lines",
            line=line,
            hoverinfo="text",
            hovertext=f"clean perplexity {level:.4g}",
        )
    )
    ends = clean + points["delta_perplexity_high"], clean + points["delta_perplexity_low"]
    drawn = pd.concat([points["perplexity"], clean, *ends]).tolist()
    drawn = [value for value in drawn if 0 < value < math.inf]
    low, high = min(drawn), max(drawn)
    if high / low >= SWITCH_TO_LOG:
        ticks = _log_ticks(low, high)
        span = math.log10(high / low)
        limits = [math.log10(low) - 0.06 * span, math.log10(high) + 0.06 * span]
        labels = [f"{tick:,.15g}" if tick < 1e6 else f"{tick:.0e}" for tick in ticks]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=labels, range=limits)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 ... between the ends; powers of ten alone, or of more, where that is much."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, (last - first) // 8)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, step) for factor in factors]
    return [tick for tick in ticks if low / 1.1 <= tick <= high * 1.1]


def _areas(aopc: pd.DataFrame, styles: dict[str, Style], meta: dict) -> go.Figure:
    """The AOPC of each series, in one panel per direction, the best at the top of the first."""
    directions = [remove for remove in DIRECTIONS if remove in set(aopc["remove"])]
    order = _ranked(aopc, directions[0])
    figure = make_subplots(1, len(directions), shared_yaxes=True, horizontal_spacing=0.06)
    for column, remove in enumerate(directions, start=1):
        for row in aopc.loc[aopc["remove"] == remove].to_dict("records"):
            colour, marker, _ = styles[row["series"]]
            above, below = row["aopc_high"] - row["aopc"], row["aopc"] - row["aopc_low"]
            figure.add_trace(
                go.Scatter(
                    name=plain(row["series"]),
                    x=[row["aopc"]],
                    y=[order.index(row["series"])],
                    error_x=_bars([above], [below], width=4),
                    mode="markers",
                    marker={"color": colour, "symbol": marker, "size": 8},
                    hoverinfo="text",
                    hovertext=[area_text(row)],
                    showlegend=False,
                ),
                row=1,
                col=column,
            )
        better = "larger is better" if remove == "highest" else "smaller is better"
        title = f"{DIRECTIONS[remove]}<br>nats per token<br>{better}"
        figure.update_xaxes(
            title={"text": title, "standoff": 8}, rangemode="tozero", row=1, col=column
        )
    figure.update_yaxes(
        tickvals=list(range(len(order))),
        ticktext=[_broken(name) for name in order],
        range=[-0.6, len(order) - 0.4],
        automargin=True,
    )
    dress(figure, "Area over the perturbation curve (AOPC)", _subtitle(aopc), 0)
    figure.update_layout(height=180 + 30 * len(order))
    figure.update_layout(margin={"l": 60, "b": 92}, title={"xref": "container", "x": 0.02})
    figure.update_layout(meta=meta | {"caption": area_caption(aopc, meta["confidence"])})
    return figure


def _ranked(aopc: pd.DataFrame, remove: str) -> list[str]:
    """Series from the worst to the best of one direction, after those that it lacks."""
    rows = aopc.loc[aopc["remove"] == remove]
    ranked = rows.sort_values("aopc", ascending=remove == "highest", na_position="first")
    names = ranked["series"].tolist()
    others = [name for name in aopc["series"].unique().tolist() if name not in names]
    return others + names


def _bars(above: Iterable[float], below: Iterable[float], *, width: int) -> dict:
    return {
        "type": "data",
        "symmetric": False,
        "array": list(above),
        "arrayminus": list(below),
        "thickness": 1,
        "width": width,
    }


def _subtitle(rows: pd.DataFrame) -> str:
    first = rows.to_dict("records")[0]
    where = conditions(first["data"], first["granularity"], first["protected"])
    return f"{where}, {texts(rows['n'])}"


def _broken(name: str) -> str:
    """A long name on two lines, parted at the underscore nearest to its middle."""
    places = [place for place, letter in enumerate(name) if letter == "_"]
    if len(name) <= 24 or not places:
        return plain(name)
    middle = min(places, key=lambda place: abs(place - len(name) / 2)) + 1
    return f"{plain(name[:middle])}<br>{plain(name[middle:])}"


def _free_name(taken: Iterable[str], parts: tuple[str, ...]) -> str:
    """A name from the parts that is fit for a file, and not taken."""
    slug = re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-.")[-120:]
    name, number = slug, 2
    while name in taken:
        name, number = f"{slug}-{number}", number + 1
    return name
