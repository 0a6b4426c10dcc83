"""Pages inside a notebook: each in a frame, their libraries once for the whole notebook.

A library of megabytes in every output makes notebooks that nobody can open. So the first cell that
shows a page holds the libraries, in the notebook's own document, and every frame asks for them by
message. Where two outputs do not share a document (Colab), or nothing tells one cell from another,
each page holds its own.
"""

import html
import json
import re
import sys
from functools import cache
from importlib.resources import files
from typing import Any

Cell = tuple[str, int]
"""What tells a cell from others, and how often the session had run one when this one ran."""

NOT_RUN = (
    "This view is drawn by scripts, which are not run here. Trust the notebook (JupyterLab’s "
    "command “Trust Notebook”), or run this cell."
)
"""Inside the frame's element, where browsers show it to nobody: JupyterLab takes frames out of a
notebook that it does not trust and leaves their text."""

_LIBRARY = re.compile(r'(<script type="text/plain" class="library" data-name="([\w-]+)">)(.*?)</')
_homes: dict[str, Cell] = {}  # of each library, the cell whose output holds it, in this session


def framed(document: str) -> str:
    """A page as the HTML of a cell's output.

    The frame has no rights on the notebook; it may run scripts and download.
    """
    cell = _running_cell()
    host = ""
    if cell is not None:
        for _, name, packed in _LIBRARY.findall(document):
            if _is_new_here(name, cell):
                host += f"window.cw_lens_libraries[{json.dumps(name)}] = {json.dumps(packed)};\n"
        document = _LIBRARY.sub(r"\1</", document)
    return (
        f"<script>\n{_relay()}{host}</script>\n"
        '<iframe title="cw_lens" class="cw-lens" sandbox="allow-scripts allow-downloads" '
        'style="width:100%;height:640px;border:0" '
        f'srcdoc="{html.escape(document)}">{NOT_RUN}</iframe>'
    )


def forget_libraries() -> None:
    """Lets the next view shown hold the libraries again, where the cell that did is gone."""
    _homes.clear()


def _is_new_here(name: str, cell: Cell) -> bool:
    """Whether this run of this cell must hold the library: no other cell does.

    A cell that is run again loses its old output and the library with it, so it gets it again.
    """
    home = _homes.get(name)
    if home is not None and (home[0] != cell[0] or home == cell):
        return False
    _homes[name] = cell
    return True


def _running_cell() -> Cell | None:
    """The cell that is being run; None where pages had better hold their own libraries."""
    if "IPython" not in sys.modules or "google.colab" in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    parent = kernel.get_parent("shell")
    name = parent.get("metadata", {}).get("cellId") or parent.get("content", {}).get("code")
    return (name, shell.execution_count) if name else None


@cache
def _relay() -> str:
    return files("cw_lens.views").joinpath("notebook.js").read_text(encoding="utf-8")
