"""The page of a study: what was found, its figures and tables, and how to repeat it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from cw_lens import __version__
from cw_lens.errors import InputError
from cw_lens.views.page import Page, _asset, _library
from cw_lens.views.payload import script_json


@dataclass(frozen=True, eq=False)
class Section:
    """One part of the page.

    Attributes:
        heading: above it.
        sentences: what was found, in plain words.
        figures: by name; the caption is in `layout.meta`, under "caption".
        tables: by title, which also names the CSV file.
    """

    heading: str
    sentences: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def study_page(
    title: str,
    sections: Sequence[Section],
    *,
    sentences: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
    notices: Sequence[str] = (),
    recipe: str | None = None,
) -> Page:
    """A page that shows a study: verdict, figures, tables that sort, recipe, facts.

    It works from disk and asks for nothing; every text is shown as it is written. A table's CSV
    holds its numbers in full, in the order in which it is sorted.

    Args:
        title: its heading.
        sections: in their order.
        sentences: the verdict, at its top.
        facts: labelled lines such as model, certificates and versions.
        notices: what a reader must know first, such as units that failed.
        recipe: the command that makes the run again.

    Raises:
        InputError: a table whose columns do not have a name each.
    """
    payload = {
        "title": title,
        "sentences": list(sentences),
        "notices": list(notices),
        "facts": [list(fact) for fact in facts],
        "recipe": recipe,
        "sections": [_section(section) for section in sections],
    }
    parts = {
        "css": _asset("page.css"),
        "data": script_json(payload),
        "plotly": _library("plotly", "package_data/plotly.min.js"),
        "script": f'(() => {{\n"use strict";\n{_asset("study.js")}\n}})();',
        "version": __version__,
    }
    # one pass: what is filled in is never searched for names
    document = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _asset("study.html"))
    return Page(document, len(document.encode()), ())


def _section(section: Section) -> dict[str, Any]:
    return {
        "heading": section.heading,
        "sentences": list(section.sentences),
        "figures": [_figure(figure) for figure in section.figures.values()],
        "tables": [_table(title, table) for title, table in section.tables.items()],
    }


def _figure(figure: go.Figure) -> dict[str, Any]:
    # plotly's own JSON, which knows arrays and turns NaN into null
    drawn = json.loads(str(figure.to_json()))
    meta = drawn["layout"].get("meta") or {}
    return {"figure": drawn, "caption": meta.get("caption", "")}


def _table(title: str, table: pd.DataFrame) -> dict[str, Any]:
    names = [str(name) for name in table.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"table {title!r} has two columns {twice!r}; give each its own name.")
    columns = [_column(name, table.iloc[:, place]) for place, name in enumerate(names)]
    file = re.sub(r"[^\w.]+", "-", title).strip("-.") or "table"
    return {"title": title, "file": file, "columns": columns}


def _column(name: str, column: pd.Series) -> dict[str, Any]:
    """The values of a column; of texts, each once, and which of them each row holds."""
    values = [_value(value) for value in column.tolist()]
    if all(isinstance(value, str) for value in values):
        places = {text: place for place, text in enumerate(dict.fromkeys(values))}
        return {"name": name, "levels": list(places), "values": [places[text] for text in values]}
    return {"name": name, "values": values}


def _value(value: Any) -> Any:
    """What JSON can hold: NaN is nothing, infinity and what JSON does not know are texts."""
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if isinstance(value, bool | int | float | str) else str(value)
