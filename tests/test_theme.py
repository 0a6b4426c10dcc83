"""Colours: what is signed is told apart without them, and everything shows in both themes."""

import numpy as np
import pytest

from cw_lens import theme
from cw_lens.figures.panels import STRONG

pytestmark = pytest.mark.apart

SERIES = ("BLACK", "ORANGE", "SKY", "GREEN", "BLUE", "VERMILLION", "PURPLE", "GREY")
LIGHT = {colour: colour for colour in theme.DARK}
SHARES = np.linspace(0, 1, 41)


def luminance(colour) -> float:
    """WCAG's relative luminance: what is left of a colour in grey."""
    if isinstance(colour, str):
        colour = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one, other) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def on(scale, themed, place):
    """The colour at a place of a scale from 0 to 1."""
    ends = [end for end, _ in scale]
    parts = [[int(themed[c][i : i + 2], 16) / 255 for i in (1, 3, 5)] for _, c in scale]
    return [float(np.interp(place, ends, part)) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("themed", [LIGHT, theme.DARK], ids=["light", "dark"])
def test_a_larger_size_stands_further_from_the_paper_on_both_sides(themed):
    for scale, signs in ((theme.DIVERGING, (-1, 1)), (theme.SEQUENTIAL, (2,))):
        for sign in signs:
            start = 0.5 if sign < 2 else 0.0
            places = [start + sign * share / 2 for share in SHARES]
            away = [contrast(on(scale, themed, place), themed[theme.PAPER]) for place in places]
            assert away[0] < 1.25
            assert np.all(np.diff(away) > 0)


@pytest.mark.parametrize("themed", [LIGHT, theme.DARK], ids=["light", "dark"])
def test_in_grey_the_two_sides_look_alike_and_a_minus_shows_on_each_negative_cell(themed):
    for share in SHARES:
        below, above = (on(theme.DIVERGING, themed, 0.5 + sign * share / 2) for sign in (-1, 1))
        assert contrast(below, above) < 1.5  # colour alone would not tell them apart
        sign = theme.PAPER if share >= STRONG else theme.INK
        assert contrast(below, themed[sign]) > 2.7


def test_every_series_shows_on_its_paper():
    for name in SERIES:
        colour = getattr(theme, name)
        assert contrast(colour, theme.PAPER) > 2.2
        assert contrast(theme.DARK.get(colour, colour), theme.DARK[theme.PAPER]) > 3
    drawn = [theme.DARK.get(getattr(theme, name), getattr(theme, name)) for name in SERIES]
    assert len(set(drawn)) == len(SERIES)


def test_the_page_of_explain_has_the_same_convention():
    from importlib.resources import files

    script = files("cw_lens.views").joinpath("core.js").read_text()
    for colour in (theme.ZERO, *theme.POSITIVE, *theme.NEGATIVE):
        assert f'"{colour}"' in script
        assert f'"{theme.DARK[colour]}"' in script
