"""Results as self-contained pages: no network, JavaScript once, every text shown as text."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cw_lens.studies.explain import Explanation
from cw_lens.views.budget import plan_page
from cw_lens.views.payload import payload

SIZE_BUDGET = 25e6
"""Bytes that a page may take unless another budget is given."""


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page.

    Attributes:
        html: the page.
        estimated_bytes: its size as estimated before it was drawn.
        omissions: what the size budget left out; the page says so too.
    """

    html: str
    estimated_bytes: int
    omissions: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """Writes the page and returns its path."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path


def explain_page(
    explanation: Explanation, *, size_budget: float = SIZE_BUDGET, recipe: str = ""
) -> Page:
    """The page of one text: verdict, coloured text, layer and head maps, head grids, factors.

    Args:
        explanation: from `cw_lens.explain`.
        size_budget: bytes that the page may take; beyond them the strongest layers, heads and
            tokens are kept and the page says what was left out.
        recipe: the command that makes the page again, printed on it.

    Raises:
        InputError: a budget in which not even one layer, head and token fit.
    """
    scripts = [_plotly(), _circuitsvis(), _asset("page.js")]
    fixed = sum(len(script.encode()) for script in scripts) + len(_asset("page.css").encode())
    plan = plan_page(explanation, size_budget, fixed + 20_000)
    data = json.dumps(payload(explanation, plan, recipe), separators=(",", ":"))
    html = _asset("page.html")
    parts = {
        "STYLE": _asset("page.css"),
        # "<" would let a token end the script element
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028"),
        "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    for name, content in parts.items():
        html = html.replace(f"<!--{name}-->", content, 1)
    return Page(html=html, estimated_bytes=plan.estimated_bytes, omissions=plan.omissions)


def _asset(name: str) -> str:
    return (files("cw_lens.views") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _inline(get_plotlyjs())


def _circuitsvis() -> str:
    source = files("circuitsvis") / "dist" / "cdn" / "iife.js"
    return _inline(source.read_text(encoding="utf-8").split("//# sourceMappingURL")[0])


def _inline(script: str) -> str:
    """A script that may stand inside a script element; a string's meaning does not change."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
