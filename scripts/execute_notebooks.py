"""Runs each notebook top to bottom and writes it back with outputs that a code host can show.

    python scripts/execute_notebooks.py [notebooks/NAME.ipynb ...]

plotly draws PNG, which needs kaleido and a browser. A view of cw_lens, a page of scripts in a
frame, becomes a picture of that page and a line that says how to get it back. Nothing that changes
from run to run is kept: no times, no versions, no counts of other cells.
"""

import argparse
import base64
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from cw_lens.browsers import find_browser

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
MOST_BYTES = 1_000_000
"""Of one notebook, so that it opens on a code host."""
WIDTH, HEIGHT = 960, 1080
"""Of the pictures of views, in pixels: what is below is left out."""
SETTLE_MS = 2000
INTERACTIVE = "A picture of the view: run this cell and it is interactive."

_FRAME = '<iframe title="cw_lens"'
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel; its files go to a folder that is dropped."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=900,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute(env=os.environ | {"PLOTLY_RENDERER": "png"})
    return notebook


def stable(notebook: nbformat.NotebookNode) -> None:
    """Takes out of the notebook what differs from run to run, or machine to machine."""
    notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict(
            {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        )
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            for kind, text in output.get("data", {}).items():
                if kind.startswith("text/") and isinstance(text, str):
                    output.data[kind] = _ADDRESS.sub("", text)


def without_frames(notebook: nbformat.NotebookNode) -> None:
    """Puts a picture in the place of each view's frame.

    All frames stand in one document, as in a notebook: the first holds the libraries of the others.
    """
    framed = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if _FRAME in output.get("data", {}).get("text/html", "")
    ]
    if not framed:
        return
    from playwright.sync_api import sync_playwright

    body = "".join(f"<div>{output.data['text/html']}</div>" for output in framed)
    body += f'<div style="height:{HEIGHT}px"></div>'  # the last frame, too, can be on top
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "views.html"
        page.write_text(f'<!doctype html><meta charset="utf-8">{body}', encoding="utf-8")
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=find_browser(), args=flags)
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri(), wait_until="load")
        frames = tab.locator('iframe[title="cw_lens"]')
        if frames.count() != len(framed):
            raise RuntimeError(f"{len(framed)} outputs hold {frames.count()} frames; one each.")
        for number, output in enumerate(framed):
            frame = frames.nth(number)
            for _ in range(2):  # a frame in sight draws, and grows to what it has drawn
                frame.evaluate("frame => frame.scrollIntoView({ block: 'start' })")
                tab.wait_for_timeout(SETTLE_MS)
            box = frame.bounding_box()
            clip = box | {"height": min(box["height"], HEIGHT - box["y"])}
            png = base64.b64encode(tab.screenshot(clip=clip, timeout=60_000)).decode()
            output.data = nbformat.from_dict({"image/png": png, "text/plain": INTERACTIVE})
        browser.close()


def main() -> int:
    """Executes the notebooks named, or all; 1 if one is too large to be committed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    paths = parser.parse_args().paths or sorted(FOLDER.glob("*.ipynb"))
    too_large = False
    for path in paths:
        start = time.monotonic()
        notebook = execute(path)
        seconds = time.monotonic() - start
        without_frames(notebook)
        stable(notebook)
        nbformat.write(notebook, path)
        size = path.stat().st_size
        too_large |= size >= MOST_BYTES
        sys.stdout.write(f"{path.name}: {seconds:.0f} s, {size / 1e3:.0f} kB\n")
        sys.stdout.flush()
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main())
