"""How the site is built: `make docs`. Nothing is fetched, by the build or by its pages."""

import re
import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from cw_lens import __version__

HERE = Path(__file__).parent
NOTEBOOKS = HERE / "notebooks"
MADE_BY_HAND = ("EditPlan", "ValueEdit")

project = "cw_lens"
author = "The cw_lens authors"
copyright = "The cw_lens authors, MIT licence"
release = version = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# the outputs that the repository holds are shown; the tests execute the notebooks
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, Any] = {}  # those of MyST-NB come from a CDN
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = True

default_role = "py:obj"  # docstrings write names between single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 72
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = f"cw_lens {release}"
html_show_sourcelink = False
html_copy_source = False
ALONE = ("install", "notation", "what-works-where", "precision", "the-paper-reproduced")
html_sidebars = {page: [] for page in (*ALONE, "changelog", "contributing")}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_theme_options = {
    "logo": {"text": "cw_lens"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
}


def copied_notebooks() -> None:
    """Sphinx reads nothing outside its own folder, so that the tutorials are copied into it."""
    NOTEBOOKS.mkdir(exist_ok=True)
    sources = {path.name: path for path in (HERE.parent / "notebooks").glob("*.ipynb")}
    for copy in NOTEBOOKS.glob("*.ipynb"):
        if copy.name not in sources:
            copy.unlink()
    for name, path in sources.items():
        shutil.copy2(path, NOTEBOOKS / name)  # with its time: what did not change is not built anew


def readable(_app: Any, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings as napoleon and reStructuredText take them.

    A bar is a length there and a substitution here; the specification that "SPEC" cites is not
    part of this repository, and what it says is on the page of the notation. Of a property
    napoleon takes what stands before a colon for its type.
    """
    if what == "property" and lines:
        lines[0] = lines[0].replace(": ", " – ")
    text = re.sub(r" ?\(SPEC [\d, and]+\)|SPEC [\d, and]+; ", "", "\n".join(lines))
    parts = re.split(r"(``?[^`]+``?)", text)
    lines[:] = "".join(
        part if part.startswith("`") else part.replace("|", r"\|") for part in parts
    ).split("\n")


def typed(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """The types of attributes, which napoleon puts below their text, as those of arguments."""
    moved: list[str] = []
    head = 0
    for line in lines:
        if line.startswith("   :type:") and head:
            moved.insert(head, re.sub(r"[\w.]+\.(\w+)", r"\1", line))  # without the modules
            continue
        moved.append(line)
        if line.startswith(".. attribute::"):
            head = len(moved)
    lines[:] = moved


def made_by_hand(
    _app: Any, what: str, name: str, obj: Any, _options: Any, signature: str, returned: str
) -> tuple[str | None, str | None]:
    """No constructor is shown of what cw_lens makes itself; the attributes say what it holds."""
    if what == "class" and is_dataclass(obj) and not name.endswith(MADE_BY_HAND):
        return "", None
    return signature, returned


def setup(app: Any) -> None:
    """Before and after napoleon, which has priority 500, reads the docstrings."""
    app.connect("autodoc-process-docstring", readable, priority=100)
    app.connect("autodoc-process-docstring", typed, priority=900)
    app.connect("autodoc-process-signature", made_by_hand)


copied_notebooks()
