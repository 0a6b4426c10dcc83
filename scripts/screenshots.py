"""Takes pictures of every view, figure and report page: light, dark, in grey, wide and narrow.

    python scripts/screenshots.py [WORD ...]   # all, or those whose names hold one of the words

The runs that the pages show are of the embedded model and small; they are made once and kept in
screenshots/runs, while pages and figures are drawn anew each time. Ends with 1 if a page writes to
its console, scrolls sideways, or has letters beyond the edge of a figure; the rest is for eyes.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from screenshot_pages import Shown, runs, studies, views

from cw_lens.browsers import find_browser

FOLDER = Path(__file__).resolve().parents[1] / "screenshots"
GREYS = {"light": "", "grey": "grayscale(1)", "dark": "", "dark-grey": "grayscale(1)"}
"""The filter of each look."""
TALLEST = 2000
"""Of windows, and so of pictures, in pixels: parts that are taller are cut."""

DRAW = """async () => {
  for (const box of document.querySelectorAll("details")) {
    if (box.closest("#contents, .legend") === null) box.open = true;
  }
  for (let top = 0; top < document.documentElement.scrollHeight; top += innerHeight / 2) {
    scrollTo(0, top);
    await new Promise((next) => setTimeout(next, 60));
  }
  const plots = [...document.querySelectorAll(".plot")];
  const undrawn = () => plots.filter((plot) => !plot.querySelector(".main-svg"));
  for (let tries = 0; tries < 100 && undrawn().length; tries++) {
    undrawn()[0].scrollIntoView();
    await new Promise((next) => setTimeout(next, 100));
  }
  scrollTo(0, 0);
  await document.fonts.ready;
}"""
"""Draws what waits to be seen."""
PARTS = """() => [...document.querySelectorAll("header, article, section")]
  .filter((part) => part.offsetHeight)
  .map((part) => [part.id || part.localName, part.getBoundingClientRect().top + scrollY])"""
FAULTS = """() => {
  const page = document.documentElement;
  const wide = page.scrollWidth > innerWidth ? [`is ${page.scrollWidth} pixels wide`] : [];
  const cut = [...document.querySelectorAll(".main-svg text")].filter((text) => {
    const figure = text.closest(".main-svg").getBoundingClientRect();
    const letters = text.getBoundingClientRect();
    return letters.width && (letters.left < figure.left - 1 || letters.right > figure.right + 1
      || letters.top < figure.top - 1 || letters.bottom > figure.bottom + 1);
  });
  return [...wide, ...cut.map((text) => `cuts off "${text.textContent}"`)];
}"""


def say(text: str) -> None:
    """A line of progress, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pieces(tab: Any, width: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The parts of a page by name, each from its top to the next part's."""
    height = tab.evaluate("document.body.offsetHeight")
    parts = tab.evaluate(PARTS) or [("", 0)]
    tops = [0, *(int(top) for _, top in parts[1:]), height]
    for (name, _), top, end in zip(parts, tops, tops[1:], strict=False):
        for place, start in enumerate(range(top, end, TALLEST)):
            clip = {"x": 0, "y": start, "width": width, "height": min(TALLEST, end - start)}
            yield f"{name}-{place + 1}" if place else name, clip


def shoot(browser: Any, page: Shown, out: Path) -> list[str]:
    """Takes the pictures of a page, one for each of its parts; what is wrong with it."""
    faults: list[str] = []
    for width, looks in page.windows:
        context = browser.new_context(offline=True, viewport={"width": width, "height": TALLEST})
        tab = context.new_page()
        tab.on("console", lambda message, to=faults: to.append(message.text))
        tab.on("pageerror", lambda error, to=faults: to.append(str(error)))
        tab.goto(page.path.as_uri())
        if tab.locator("body.report, body.view").count():
            tab.locator("html[data-state=ready]").wait_for(state="attached")
        tab.evaluate(DRAW)
        for look in looks:  # a page follows its theme, without being opened again
            tab.emulate_media(color_scheme="dark" if look.startswith("dark") else "light")
            tab.evaluate("grey => document.documentElement.style.filter = grey", GREYS[look])
            tab.wait_for_timeout(700)  # circuitsvis says nothing when it has drawn
            for name, clip in pieces(tab, width):
                picture = "-".join(part for part in (page.name, name, str(width), look) if part)
                top = tab.evaluate("y => { scrollTo(0, y); return scrollY; }", clip["y"])
                clip["y"] -= top
                tab.screenshot(path=out / f"{picture}.png", clip=clip)
        faults += [f"{fault} ({width} pixels)" for fault in tab.evaluate(FAULTS)]
        context.close()
    return faults


def sheet(out: Path) -> None:
    """A page of all pictures in the folder."""
    lines = ['<!doctype html><meta charset="utf-8"><title>cw_lens</title>']
    for path in sorted(out.glob("*.png")):
        lines.append(f'<h2>{path.stem}</h2><img loading="lazy" src="{path.name}">')
    (out / "index.html").write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """Takes the pictures asked for; 1 if a page is at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="take those whose names hold one of these")
    words = parser.parse_args().words
    program = find_browser()
    if program is None:
        sys.exit("There is no chromium on the PATH: run scripts/install-chromium.sh.")
    from playwright.sync_api import sync_playwright

    start = time.monotonic()
    pages = FOLDER / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    for made in runs(FOLDER / "runs"):
        say(f"{made}, {time.monotonic() - start:.0f} s")
    failed = False
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        for page in chain(views(pages), studies(FOLDER / "runs", pages)):
            if words and not any(word in page.name for word in words):
                continue
            faults = shoot(browser, page, FOLDER)
            say("\n  ".join([page.name, *faults]))
            failed |= bool(faults)
        browser.close()
    sheet(FOLDER)
    say(f"{FOLDER / 'index.html'}: {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
