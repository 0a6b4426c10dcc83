"""The explain page: one file of HTML with its scripts and data inside."""

import html
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from cw_lens import __version__
from cw_lens.errors import InputError
from cw_lens.studies.explain import Explanation
from cw_lens.views.budget import fits_layer_scores, select
from cw_lens.views.payload import explain_payload, layer_payload, script_json

SCRIPTS = ("core.js", "facts.js", "text.js", "edges.js", "maps.js", "grid.js", "factors.js")
"""The page's own scripts, in the order in which they are joined into one."""


NO_LAYER_SCORES = "Token scores layer by layer. Kept: their mean over layers."


@dataclass(frozen=True)
class Page:
    """A page that needs nothing but a browser: no network, no other file.

    Attributes:
        html: the whole document.
        estimated_bytes: the size that was expected before it was made.
        omissions: what was left out to keep it small; also said on the page.
    """

    html: str
    estimated_bytes: int
    omissions: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """The path, after the page was written there."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that a notebook's styles and scripts stay apart."""
        return (
            '<iframe title="cw_lens" sandbox="allow-scripts allow-downloads" '
            'style="width:100%;height:860px;border:1px solid #8884" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def explain_page(
    explanation: Explanation, *, size_budget: float = 25e6, recipe: str | None = None
) -> Page:
    """A page that shows one explanation: text, layer and head maps, head grid, factors, proofs.

    Its size is known before it is made. Above the budget the strongest layers are kept, then
    heads, then tokens, and the page says what was left out.

    Args:
        explanation: from `explain`.
        size_budget: what the page may take, in bytes; its scripts alone take 6.2 MB.
        recipe: the command that makes this page again.

    Raises:
        InputError: a budget too small for any page, NaN, or layers that are not whole.
    """
    n_tokens = explanation.prompts.ids.shape[1]
    for layer in explanation.layers:
        if tuple(layer.pattern.shape[::2]) != (1, n_tokens) or layer.pattern.shape[3] != n_tokens:
            raise InputError(
                f"layer {layer.index} has a pattern of shape {tuple(layer.pattern.shape)} (batch, "
                f"head, query, key); a page shows one text, here of {n_tokens} tokens, whole."
            )
    layer_scores = fits_layer_scores(explanation, size_budget)
    payload = explain_payload(explanation, recipe, layer_scores=layer_scores)
    fixed_bytes = len(_document("").encode()) + len(script_json(payload))
    selection = select(explanation, fixed_bytes=fixed_bytes, size_budget=size_budget)
    chosen = {layer.index: layer for layer in explanation.layers}
    omissions = (() if layer_scores else (NO_LAYER_SCORES,)) + selection.omissions
    payload["omissions"] = list(omissions)
    payload["held_tokens"] = None if len(selection.tokens) == n_tokens else selection.tokens
    payload["layers"] = [
        layer_payload(chosen[index], heads, selection.tokens)
        for index, heads in selection.heads.items()
    ]
    document = _document(script_json(payload))
    return Page(document, selection.estimated_bytes, omissions)


def _document(data: str) -> str:
    """The page around its data, a JSON text; each library is in it once."""
    own = "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "css": _asset("page.css"),
        "data": data,
        "plotly": _library("plotly", "package_data/plotly.min.js"),
        "circuitsvis": _library("circuitsvis", "dist/cdn/iife.js"),
        "script": f'(() => {{\n"use strict";\n{own}\n}})();',
        "version": __version__,
    }
    # one pass: what is filled in is never searched for names
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _asset("page.html"))


@cache
def _asset(name: str) -> str:
    return files("cw_lens.views").joinpath(name).read_text(encoding="utf-8")


@cache
def _library(package: str, path: str) -> str:
    """A package's script, as it may stand inside a script element."""
    text = files(package).joinpath(path).read_text(encoding="utf-8")
    # in a JavaScript string, the only place where these occur, a backslash changes nothing
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
