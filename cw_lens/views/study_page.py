"""The page of one study, or of several: what was found, figures, tables, how to repeat it."""

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
from cw_lens.theme import theme_script
from cw_lens.views.columns import COUNT, HIGH, LOW, TABLES, TableWords, meaning
from cw_lens.views.libraries import library_elements
from cw_lens.views.page import Page, asset, filled
from cw_lens.views.payload import script_json


@dataclass(frozen=True, eq=False)
class Section:
    """One part of a chapter.

    Attributes:
        heading: above it.
        sentences: what was found, in plain words.
        figures: by name; the caption is in `layout.meta`, under "caption".
        tables: by the name of their file, which `TABLES` knows the title and columns of; a name
            that it does not know is the title itself.
    """

    heading: str
    sentences: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Chapter:
    """What one study shows.

    Attributes:
        title: its heading.
        sections: in their order.
        sentences: the verdict, at its top.
        notices: what a reader must know first, such as units that failed.
        facts: labelled lines such as model, texts and versions.
        certified: what its certificates prove, in a sentence.
        certificates: one row for each layer.
        recipe: the command that makes the run again.
        folder: the run's, on a page of several.
        link: an address of the run's own page, relative to the page, and what it shows.
    """

    title: str
    sections: Sequence[Section] = ()
    sentences: Sequence[str] = ()
    notices: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    certified: str = ""
    certificates: pd.DataFrame | None = None
    recipe: str | None = None
    folder: str = ""
    link: tuple[str, str] | None = None


def study_page(chapter: Chapter) -> Page:
    """A page that shows one study: verdict, figures, tables that sort, certificates, recipe, facts.

    It works from disk and asks for nothing; every text is shown as it is written. A table's CSV
    holds its numbers in full, in the order in which it is sorted.

    Raises:
        InputError: a table whose columns do not have a name each.
    """
    return _page(chapter.title, (), [chapter], joined=False)


def joined_page(title: str, chapters: Sequence[Chapter], notices: Sequence[str] = ()) -> Page:
    """A page of several studies with one table of contents, otherwise as `study_page`.

    Args:
        title: its heading.
        chapters: in their order.
        notices: what is missing on it, and why.

    Raises:
        InputError: as `study_page`.
    """
    return _page(title, notices, chapters, joined=True)


def _page(title: str, notices: Sequence[str], chapters: Sequence[Chapter], *, joined: bool) -> Page:
    payload = {
        "title": title,
        "joined": joined,
        "notices": list(notices),
        "chapters": [_chapter(chapter) for chapter in chapters],
    }
    own = "\n".join((asset("loader.js"), theme_script(), asset("study.js")))
    parts = {
        "css": asset("page.css"),
        "own_css": asset("study.css"),
        "data": script_json(payload),
        "libraries": library_elements(["plotly"]),
        "script": f'(() => {{\n"use strict";\n{own}\n}})();',
        "version": __version__,
    }
    document = filled("study.html", parts)
    return Page(document, len(document.encode()), ())


def _chapter(chapter: Chapter) -> dict[str, Any]:
    proofs = chapter.certificates
    return {
        "title": chapter.title,
        "folder": chapter.folder,
        "link": None if chapter.link is None else list(chapter.link),
        "sentences": list(chapter.sentences),
        "notices": list(chapter.notices),
        "sections": [_section(section) for section in chapter.sections],
        "certified": chapter.certified,
        "certificates": None if proofs is None else _table("certificates", proofs),
        "recipe": chapter.recipe,
        "facts": [list(fact) for fact in chapter.facts],
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "heading": section.heading,
        "sentences": list(section.sentences),
        "figures": [_figure(figure) for figure in section.figures.values()],
        "tables": [_table(name, table) for name, table in section.tables.items()],
    }


def _figure(figure: go.Figure) -> dict[str, Any]:
    # plotly's own JSON, which knows arrays and turns NaN into null
    drawn = json.loads(str(figure.to_json()))
    meta = drawn["layout"].pop("meta", None) or {}
    return {"figure": drawn, "caption": meta.get("caption", "").replace(" %", "\u00a0%")}


def _table(name: str, table: pd.DataFrame) -> dict[str, Any]:
    names = [str(column) for column in table.columns]
    if len(set(names)) < len(names):
        twice = next(column for column in names if names.count(column) > 1)
        raise InputError(f"table {name!r} has two columns {twice!r}; give each its own name.")
    words = TABLES.get(name, TableWords(name, ""))
    columns = [_column(column, table.iloc[:, place]) for place, column in enumerate(names)]
    for column in columns:
        column["meaning"] = meaning(name, column["name"]) or ""
    shown, same = _shown(columns, words)
    file = re.sub(r"[^\w.]+", "-", name).strip("-.") or "table"
    return {
        "title": words.title,
        "about": words.about,
        "file": file,
        "columns": columns,
        "shown": shown,
        "same": same,
    }


def _shown(
    columns: list[dict[str, Any]], words: TableWords
) -> tuple[list[dict[str, Any]], list[int]]:
    """The columns of a table as a page shows them, and those that are the same in all its rows.

    Ends of intervals, and the texts behind a number, stand in the number's own cell. The columns
    that people come for are the first. What is the same in all rows is said once.
    """
    places = {column["name"]: place for place, column in enumerate(columns)}
    ends = {
        name: [places.get(f"{name}{end}") for end in (LOW, HIGH, COUNT)]
        for name in places
        if f"{name}{LOW}" in places and f"{name}{HIGH}" in places
    }
    if words.interval in places and {"low", "high"} <= set(places):
        ends[words.interval] = [places["low"], places["high"], None]
    folded = {place for held in ends.values() for place in held if place is not None}
    free = [name for name, place in places.items() if place not in folded]
    # a column that the table is about stays, also where all its rows agree
    kept = {*ends, *words.first}
    rows = len(columns[0]["values"]) if columns else 0
    same = [
        name for name in free if name not in kept and rows > 1 and _alike(columns[places[name]])
    ]
    if len(same) == len(free):
        same = []
    first = [name for name in words.first if name in free]
    order = [*first, *(name for name in free if name not in first and name not in same)]
    shown = [
        {"column": places[name]} | dict(zip(("low", "high", "n"), ends.get(name, ()), strict=False))
        for name in order
    ]
    return shown, [places[name] for name in same]


def _alike(column: dict[str, Any]) -> bool:
    first = column["values"][0]
    return all(value == first for value in column["values"])


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
