"""Figures as files: a page each, and images where a browser can draw them."""

import html
import json
import os
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from cw_lens.browsers import driven, find_browser
from cw_lens.folders import made_folder, replace_file
from cw_lens.theme import theme_script

START_SECONDS, IMAGE_SECONDS = 30.0, 30.0
"""How long the browser may take to start, and for any one image."""

CONFIG = {"displaylogo": False, "responsive": False, "toImageButtonOptions": {"format": "svg"}}


@dataclass(frozen=True)
class WrittenFigures:
    """The files that were written.

    Attributes:
        paths: of the pages and images.
        message: why there are no images, and how to get them; None if there are.
    """

    paths: tuple[Path, ...]
    message: str | None


def write_figures(
    folder: Path, figures: dict[str, go.Figure], recipe: str | None = None
) -> WrittenFigures:
    """The files of each figure: a page always, PNG and SVG where kaleido and a browser are there.

    The pages share one plotly.min.js beside them and need no network. An image is twice as large
    as the figure, in pixels. What goes wrong with images is told in the message, never raised.

    Args:
        folder: made if it is missing.
        figures: by name, as `curve_figures` gives them.
        recipe: the command that makes the figures again; put into each figure's `layout.meta`.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    made_folder(folder)
    if figures:
        replace_file(folder / "plotly.min.js", get_plotlyjs().encode())
    paths = []
    for name, figure in figures.items():
        if recipe is not None:
            meta = figure.to_dict()["layout"].get("meta") or {}
            figure.update_layout(meta=meta | {"recipe": recipe})
        path = folder / f"{name}.html"
        replace_file(path, figure_page(figure).encode())
        paths.append(path)
    images, message = _write_images(folder, figures)
    return WrittenFigures((*paths, *images), message)


def figure_page(figure: go.Figure) -> str:
    """A page of one figure and its caption, beside plotly.min.js, in the theme of its reader."""
    drawn = str(figure.to_json())
    meta = json.loads(drawn)["layout"].get("meta") or {}
    words = {
        "title": meta.get("item") or "cw_lens",
        "caption": (meta.get("caption") or "").replace(" %", "\u00a0%"),
        "recipe": meta.get("recipe") or "",
    }
    parts = {name: html.escape(text) for name, text in words.items()} | {
        "figure": drawn.replace("<", "\\u003c"),
        "config": json.dumps(CONFIG),
        "theme": theme_script(),
    }
    page = files("cw_lens.figures").joinpath("figure.html").read_text(encoding="utf-8")
    # one pass: what is filled in is never searched for names
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page)


def _write_images(
    folder: Path, figures: dict[str, go.Figure]
) -> tuple[tuple[Path, ...], str | None]:
    if not figures:
        return (), None
    if find_spec("kaleido") is None:
        return (), (
            "Figures are in figures/ as pages. To have them as PNG and SVG too: "
            "pip install 'cw-lens[figures]'."
        )
    browser = find_browser()
    if browser is None:
        return (), (
            "No PNG and SVG were drawn: there is no chromium or chrome on the PATH. Install one, "
            "or set BROWSER_PATH to it."
        )
    # kaleido writes to the very path, so that a picture cut short never bears the final name
    partial = {
        folder / f"{name}.{ending}": folder / f".{name}.partial.{ending}"
        for name in figures
        for ending in ("png", "svg")
    }
    wanted = [
        {
            "fig": json.loads(str(figures[path.stem].to_json())),
            "path": str(drawn),
            "opts": {"format": path.suffix[1:], "scale": 2 if path.suffix == ".png" else 1},
        }
        for path, drawn in partial.items()
    ]
    failure = _draw(wanted, browser)
    done = [path for path, drawn in partial.items() if not failure and drawn.exists()]
    for path, drawn in partial.items():
        if path in done:
            os.replace(drawn, path)
        else:
            drawn.unlink(missing_ok=True)
    if failure is None and len(done) < len(partial):
        failure = f"it left out {len(partial) - len(done)} of {len(partial)}"
    if failure is None:
        return tuple(done), None
    return tuple(done), (
        f"No PNG and SVG were drawn: {browser} failed ({failure}). The pages hold the same "
        "figures. For images set BROWSER_PATH to a browser that works."
    )


def _draw(figures: list[dict], browser: str) -> str | None:
    """Why the browser did not draw them; None if it did."""
    order = {
        "figures": figures,
        "browser": browser,
        "start_seconds": START_SECONDS,
        "image_seconds": IMAGE_SECONDS,
    }
    # the program keeps to its own limits; this one is for a program that does not
    limit = 2 * START_SECONDS + IMAGE_SECONDS * len(figures)
    return driven(Path(__file__).with_name("images.py"), order, limit)
