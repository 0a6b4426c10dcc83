"""The colours of figures and pages, in the light and in the dark, and how a page follows its theme.

Series have the colours of Okabe and Ito, which the colour-blind tell apart and which show on white
and on the dark paper alike; only black turns white. Signed numbers have one convention everywhere,
on the page of `explain` too: **zero is the paper, blue is positive, orange is negative, and a
larger size stands further from the paper**.

A scale of two hues is symmetric in luminance: in grey, 0.5 and -0.5 look the same. Making one end
lighter would not help, since a middling blue would then look like a strong orange. So the sign is
not left to colour: where cells are large enough to hold one, each negative cell bears a minus
(`head_maps`), which a printer without colours keeps.
"""

import json
from importlib.resources import files

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
INK, RULE, PAPER, EMPTY = "#1c1c1e", "#e3e3e6", "#ffffff", "#d0d0d4"
"""Of letters and axes, of grid lines, of the ground, and of cells that hold no number."""

ZERO, POSITIVE, NEGATIVE = "#f7f7f7", ("#7fb0d6", "#0b4a8f"), ("#e9ab6c", "#9c4a02")
"""Of signed numbers: at zero, and on each side in the middle and at the end of the scale."""

DIVERGING = [
    [0.0, NEGATIVE[1]],
    [0.25, NEGATIVE[0]],
    [0.5, ZERO],
    [0.75, POSITIVE[0]],
    [1.0, POSITIVE[1]],
]
SEQUENTIAL = [[0.0, ZERO], [0.5, POSITIVE[0]], [1.0, POSITIVE[1]]]

DARK = {
    BLACK: "#f4f4f6",
    GREY: "#9a9aa2",
    INK: "#e7e7ea",
    RULE: "#33343a",
    PAPER: "#17181b",
    EMPTY: "#4a4b52",
    ZERO: "#24262b",
    POSITIVE[0]: "#3d6f9e",
    POSITIVE[1]: "#8cc6ff",
    NEGATIVE[0]: "#9a6232",
    NEGATIVE[1]: "#ffb46b",
}
"""Light colour -> what stands for it on the dark paper; the others are the same on both."""


def theme_script() -> str:
    """A script that defines `themed(value)`: a figure's parts in the colours of the theme."""
    text = files("cw_lens").joinpath("theme.js").read_text(encoding="utf-8")
    return text.replace("{{dark}}", json.dumps({k.lower(): v for k, v in DARK.items()}))
