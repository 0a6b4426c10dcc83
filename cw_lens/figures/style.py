"""The style that all figures share: restrained, fit for a paper, told apart without colour.

Colours are those of Okabe and Ito, which the colour-blind tell apart; a marker and a dash of its
own tell each metric in black and white. Names are shown as they are written, never read as markup.
"""

import math
from collections.abc import Iterable

import plotly.graph_objects as go

from cw_lens.theme import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    RULE,
    SKY,
    VERMILLION,
)

Style = tuple[str, str, str]
"""Colour, marker and dash."""

STYLES = {
    "attention": (BLACK, "circle", "solid"),
    "value_weighted": (ORANGE, "square", "solid"),
    "value_weighted_output_normalized": (VERMILLION, "diamond", "dash"),
    "contribution": (BLUE, "triangle-up", "solid"),
    "signed_contribution": (BLUE, "triangle-down", "dash"),
    "intra_head_contribution": (SKY, "pentagon", "dashdot"),
    "output_distance": (VERMILLION, "hexagon", "dot"),
    "stream_contribution": (GREEN, "star", "solid"),
    "gradient": (PURPLE, "x", "dash"),
    "random": (GREY, "circle-open", "dot"),
}
"""Colour, marker and dash of each metric that cw_lens ships."""
OTHER_STYLES = (
    (GREEN, "cross", "dashdot"),
    (PURPLE, "star-triangle-up", "longdash"),
    (SKY, "bowtie", "dash"),
    (ORANGE, "hourglass", "longdash"),
    (VERMILLION, "star-diamond", "longdashdot"),
)
"""Those of a user's own metrics, in alphabetical order, from the start again after the last."""

WIDTH = 540
"""Of a figure, in pixels. In a column of text 5.5 inches wide, 7 points are 9.6 of them."""
SMALLEST = 10
"""Of letters, in pixels."""
LONG = (26, 34)
"""Letters of a name from which on a legend is set small, and from which on one name fills a row."""
FONT = "Liberation Sans, Arial, Helvetica, DejaVu Sans, sans-serif"


def series_styles(series: Iterable[tuple[str, str, str]]) -> dict[str, Style]:
    """Each series' style from its name, metric and ranking.

    Where a metric has two rankings, the clean one has open markers and long dashes.
    """
    series = list(series)
    own = sorted({metric for _, metric, _ in series} - set(STYLES))
    cycle = {name: OTHER_STYLES[place % len(OTHER_STYLES)] for place, name in enumerate(own)}
    styles = {}
    for name, metric, ranking in series:
        colour, marker, dash = (STYLES | cycle)[metric]
        if name != metric and ranking == "clean":
            marker, dash = f"{marker.removesuffix('-open')}-open-dot", "longdash"
        styles[name] = (colour, marker, dash)
    return styles


def dress(figure: go.Figure, title: str, subtitle: str, entries: int) -> None:
    """Gives a figure the style; its legend stands below, two names in a row, or one if long.

    Args:
        figure: to change.
        title, subtitle: above it, as plain text.
        entries: how many names its legend holds.
    """
    longest = max((len(getattr(trace, "name", None) or "") for trace in figure.data), default=0)
    abreast = 1 if longest > LONG[1] else 2
    legend = 19 * math.ceil(entries / abreast)
    figure.update_layout(
        template="none",
        width=WIDTH,
        height=380 + legend,
        margin={"l": 62, "r": 16, "t": 58, "b": 56 + legend},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": FONT, "size": 12, "color": INK},
        title={
            "text": f"{plain(title)}<br><span style='font-size:11px'>{plain(subtitle)}</span>",
            "x": 0,
            "xref": "paper",
            "font": {"size": 14},
        },
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "entrywidthmode": "fraction",
            "entrywidth": 1 / abreast,
            "font": {"size": SMALLEST if longest > LONG[0] else 11},
        },
        hoverlabel={"align": "left", "font": {"size": 12}},
    )
    line = {"showline": True, "linecolor": INK, "gridcolor": RULE, "zeroline": False}
    line |= {"ticks": "outside", "ticklen": 4, "title_font_size": 12}
    figure.update_xaxes(**line)
    figure.update_yaxes(**line)


def plain(text: str) -> str:
    """Text that plotly shows as it is, and does not read as tags, formulas or templates."""
    for mark, name in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("$", "&#36;"),
        ("%", "&#37;"),
    ):
        text = text.replace(mark, name)
    return text
