"""A page in headless Chromium, from disk, with the network off, and all that it complains about."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTIONS = ("text-section", "maps-section", "grid-section", "factors-section", "notes-section")
HEADS_DRAWN = """n => {
  const all = [...document.querySelectorAll('#head-grid canvas')];
  return all.length === n && all.every((canvas) => {
    if (!canvas.width || !canvas.height) return false;
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    return data.some((x) => x > 0 && x < 255);
  });
}"""


@dataclass
class Opened:
    """An open page: playwright's own in `tab`, and what it said and asked for."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def show(self, section: str) -> None:
        """Scrolls to a section, which draws it."""
        self.tab.evaluate("id => document.getElementById(id).scrollIntoView()", section)

    def show_heads(self, heads: int) -> None:
        """Scrolls to the head grid and waits until the mean and each head are drawn."""
        self.show("grid-section")
        self.tab.wait_for_function(HEADS_DRAWN, arg=heads + 1, timeout=60_000)

    def plots(self, host: str) -> list[dict]:
        """Values and ranges of the plotly maps under an element, once they are drawn."""
        self.show(f"{host}-section")
        self.tab.wait_for_function(
            "id => { const all = [...document.querySelectorAll(`#${id} .plot`)];"
            " return all.length && all.every((p) => p.querySelector('.hm image')); }",
            arg=host,
            timeout=30_000,
        )
        return self.tab.evaluate(
            "id => [...document.querySelectorAll(`#${id} .plot`)].map((p) => ({"
            " name: p.id, z: p.data[0].z, top: p.data[0].zmax, bottom: p.data[0].zmin,"
            " bar: [...p.querySelectorAll('.colorbar .cbaxis text')].filter("
            " (t) => getComputedStyle(t).display !== 'none').map((t) => t.textContent),"
            " ticks: [...p.querySelectorAll('.ytick text')].map((t) => t.textContent) }))",
            host,
        )

    def large(self) -> list[list[float | None]]:
        """The values of the large map beside the head grid."""
        self.tab.locator("#large .hm image").wait_for(state="attached")
        return self.tab.evaluate("document.getElementById('large').data[0].z")

    def settle(self) -> None:
        """Waits until what is queued is painted."""
        self.tab.evaluate(
            "new Promise((done) => requestAnimationFrame(() => setTimeout(() =>"
            " requestAnimationFrame(() => setTimeout(done, 50)))))"
        )


@contextmanager
def opened(
    browser: Any, path: Path, *, width: int = 1280, theme: str = "light"
) -> Iterator[Opened]:
    """The page at `path`."""
    context = browser.new_context(
        offline=True, viewport={"width": width, "height": 800}, color_scheme=theme
    )
    page = Opened(context.new_page())
    page.tab.on("console", lambda message: page.complaints.append(message.text))
    page.tab.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.tab.on("request", lambda request: page.requests.append(request.url))
    page.tab.goto(path.as_uri())
    if page.tab.locator("body.report, body.view").count():  # unpacks its libraries first
        page.tab.locator("html[data-state=ready]").wait_for(state="attached")
    yield page
    context.close()
