"""A page: one document of HTML with its scripts and data inside, and the ways it is shown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from cw_lens import __version__
from cw_lens.errors import InputError
from cw_lens.views.libraries import library_elements
from cw_lens.views.notebook import framed
from cw_lens.views.pictures import PICTURES, save_picture

SHARED_SCRIPTS = ("loader.js", "core.js", "facts.js")
PROMPT_SCRIPTS = ("edges.js", "text.js", "maps.js", "factors.js", "grid.js", "compare.js")
"""The page's own scripts, in the order in which they are joined into one: those that know no
prompt, and those that run anew for each."""

SECTIONS = {
    "text": (),
    "maps": ("plotly",),
    "grid": ("plotly", "circuitsvis"),
    "factors": ("plotly",),
    "compare": (),
}
"""What a page may show, and the libraries that each part draws with."""


@dataclass(frozen=True)
class Page:
    """A page that needs nothing but a browser: no network, no other file.

    As the last line of a notebook's cell it shows itself in a frame of its own; the libraries
    that it draws with are put into the notebook once, with the first page shown. It draws again
    when the notebook is reopened, and in what `jupyter nbconvert --to html` makes of it; where
    JupyterLab does not trust a notebook, a line stands in its place and says what to do.

    Attributes:
        html: the whole document.
        estimated_bytes: the size that was expected before it was made.
        omissions: what was left out to keep it small; also said on the page.
    """

    html: str = field(repr=False)
    estimated_bytes: int
    omissions: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """The path, after the page was written there.

        Args:
            path: ends in .html, or in .png, .svg or .pdf for a picture of the page as it first
                shows itself, without its controls, drawn by a browser that is there.

        Raises:
            InputError: another ending, a path that cannot be written, or a picture where there is
                no browser or no kaleido to drive it (pip install 'cw-lens[figures]').
        """
        path = Path(path)
        ending = path.suffix.lower()
        if ending in PICTURES:
            save_picture(self.html, path)
            return path
        if ending not in (".html", ".htm"):
            raise InputError(
                f"cannot save a page as {path.name!r}: give a path that ends in .html, or in "
                f"{', '.join(PICTURES)} for a picture."
            )
        try:
            path.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}. Check the path.") from error
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that a notebook's styles and scripts stay apart."""
        return framed(self.html)


def document(data: str, sections: Sequence[str], *, view: bool) -> str:
    """The page around its data, a JSON text; each library is in it once.

    Args:
        data: safe inside a script element.
        sections: of `SECTIONS`; they stand in the page's own order.
        view: whether it is a small page for a notebook.
    """
    shared = "\n".join(asset(name) for name in SHARED_SCRIPTS)
    each = "\n".join(asset(name) for name in PROMPT_SCRIPTS)
    libraries = dict.fromkeys(name for section in sections for name in SECTIONS[section])
    parts = {
        "css": asset("page.css"),
        "data": data,
        "libraries": library_elements(list(libraries)),
        "script": f'(() => {{\n"use strict";\n{shared}\n'
        f"function showPrompt(PROMPT, life) {{\n{each}\n}}\n{asset('prompts.js')}\n}})();",
        "version": __version__,
        "kind": "view" if view else "report",
    }
    return filled("page.html", parts)


def filled(template: str, parts: dict[str, str]) -> str:
    """A template with each {{name}} in it replaced, in one pass: no part is searched for names."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], asset(template))


@cache
def asset(name: str) -> str:
    """A file that lies beside this one."""
    return files("cw_lens.views").joinpath(name).read_text(encoding="utf-8")
