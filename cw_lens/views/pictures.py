"""Pages as pictures, PNG, SVG or PDF, drawn by a browser that is there."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from cw_lens.browsers import driven, find_browser
from cw_lens.errors import InputError

PICTURES = (".png", ".svg", ".pdf")
SECONDS = 90.0
"""How long a picture may take, the browser's start included."""
WIDTH = 1000
"""Of the page when its picture is taken, in CSS pixels; a PNG has twice as many."""


def save_picture(document: str, path: Path) -> None:
    """Writes a picture of a page, light and without its controls, whole or not at all.

    Raises:
        InputError: no browser, no kaleido to drive it, a browser that fails, or a path that
            cannot be written.
    """
    remedy = "Save the page as .html, or"
    if find_spec("kaleido") is None:
        raise InputError(
            f"{path.name} needs kaleido to drive a browser, and it is missing. {remedy} "
            "pip install 'cw-lens[figures]'."
        )
    browser = find_browser()
    if browser is None:
        raise InputError(
            f"{path.name} needs a browser, and there is no chromium or chrome on the PATH. "
            f"{remedy} install one, or set BROWSER_PATH to it."
        )
    with tempfile.TemporaryDirectory() as folder:
        page, drawn = Path(folder) / "page.html", Path(folder) / f"page{path.suffix.lower()}"
        page.write_text(document, encoding="utf-8")
        order = {"browser": browser, "url": page.as_uri(), "path": str(drawn), "width": WIDTH}
        failure = driven(Path(__file__).with_name("picture_program.py"), order, SECONDS)
        if failure is not None or not drawn.exists():
            raise InputError(
                f"{browser} did not draw {path.name} ({failure or 'it wrote nothing'}). {remedy} "
                "set BROWSER_PATH to a browser that works."
            )
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(drawn.read_bytes())
            os.replace(partial, path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}. Check the path.") from error
