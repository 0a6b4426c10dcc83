"""Pages of runs: the one that a study ends with, and the one that joins several.

Both are drawn by the same function of what a run folder holds: `CHAPTERS` names it for each
command.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa

import cw_lens
from cw_lens.errors import CWLensError
from cw_lens.explain_report import EXPLANATION, explain_chapter
from cw_lens.figures import write_figures
from cw_lens.folders import MANIFEST, REPORT, RunFolderError, replace_file, versions
from cw_lens.paper_report import named_tables, paper_chapter, paper_items
from cw_lens.sink_report import IF_THERE, SINKS, sinks_chapter
from cw_lens.stored_runs import StoredRun, read_manifest, read_run, run_folders
from cw_lens.study_report import (
    FAITHFULNESS,
    TASKS,
    VALIDATION,
    faithfulness_chapter,
    tasks_chapter,
    validation_chapter,
)
from cw_lens.views.study_page import Chapter, joined_page, study_page

PACKAGES = ("torch", "transformers", "transformer-lens", "scipy", "pandas", "plotly", "kaleido")
FIGURES = "figures"
"""The folder of the figures' files."""
PARQUET_ONLY = ("units", "norm_points", "cone_points", "component_joint")
"""Tables that are too long to be read as text."""
MARK = b'<meta name="generator" content="cw_lens '
"""Stands in every page that may be written anew from tables."""

Tables = tuple[Sequence[str], Sequence[str]]
"""Names of the tables that a chapter needs, and of those that it takes if they are there."""


@dataclass(frozen=True)
class Kind:
    """How a command's runs are shown.

    Attributes:
        chapter: what a run shows.
        tables: those that it is made of, by the manifest.
        own_page: whether its own page is drawn from more than the tables.
    """

    chapter: Callable[[StoredRun], Chapter]
    tables: Callable[[Mapping[str, Any]], Tables]
    own_page: bool = False


def _paper_tables(manifest: Mapping[str, Any]) -> Tables:
    needed, later = named_tables(paper_items(manifest))
    return needed, list(later)


CHAPTERS = {
    "explain": Kind(explain_chapter, lambda _: (EXPLANATION, ()), own_page=True),
    "faithfulness": Kind(faithfulness_chapter, lambda _: (FAITHFULNESS, ())),
    "validate": Kind(validation_chapter, lambda _: (VALIDATION, ())),
    "tasks": Kind(tasks_chapter, lambda _: (TASKS, ())),
    "sinks": Kind(sinks_chapter, lambda _: (SINKS, IF_THERE)),
    "paper": Kind(paper_chapter, _paper_tables),
}
"""Each command that writes a run folder, in the order in which a page shows them."""


@dataclass(frozen=True)
class Joined:
    """What a page joins.

    Attributes:
        path: of the page.
        runs: the folders that are on it, and their commands.
        broken: why others are not, one sentence for each.
    """

    path: Path
    runs: tuple[tuple[Path, str], ...]
    broken: tuple[str, ...]


def write_study(
    folder: Path, tables: Mapping[str, pd.DataFrame], facts: Mapping[str, Any], recipe: str
) -> tuple[Chapter, str | None]:
    """Writes the tables (parquet and csv), figures, page and, last, the manifest of a study.

    Args:
        folder: of the run.
        tables: by the name of their file.
        facts: for the manifest: configuration, model, corpora, certificates.
        recipe: the command that makes the run again.

    Returns:
        What the page shows, and how to get images of the figures, if there are none.

    Raises:
        RunFolderError: a file cannot be written.
    """
    for name, table in tables.items():
        replace_file(folder / f"{name}.parquet", table.to_parquet(index=False))
        if name not in PARQUET_ONLY:
            replace_file(folder / f"{name}.csv", table.to_csv(index=False).encode())
    manifest = {
        "cw_lens": cw_lens.__version__,
        **json.loads(json.dumps(facts)),  # as it is read again
        "recipe": recipe,
        "versions": versions(*PACKAGES),
    }
    kind = CHAPTERS[manifest["configuration"]["command"]]
    chapter = kind.chapter(StoredRun(manifest, tables))
    figures = {name: drawn for part in chapter.sections for name, drawn in part.figures.items()}
    written = write_figures(folder / FIGURES, figures, recipe) if figures else None
    replace_file(folder / REPORT, study_page(chapter).html.encode())
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    return chapter, None if written is None else written.message


def write_report(folder: Path, out: Path | None = None) -> Joined:
    """Writes one page of all runs in a folder, from what they hold; no model is run.

    The page of a single study is written anew as its run wrote it. A run that is broken or not
    finished is left out, and the page says which and why.

    Args:
        folder: a run folder, or one with run folders up to three folders below it.
        out: the page; by default report.html in the folder.

    Raises:
        RunFolderError: there is no run that can be shown, or the page cannot be written, or it
            would replace a file that is no page of this kind.
    """
    folders = run_folders(folder)
    path = folder / REPORT if out is None else out
    chapters: list[tuple[int, Path, str, Chapter]] = []
    broken = []
    for run in folders:
        try:
            command, chapter = read_chapter(run)
        except CWLensError as error:
            broken.append(str(error))
            continue
        chapters.append((list(CHAPTERS).index(command), run, command, chapter))
    if not chapters:
        raise RunFolderError(broken[0] if len(broken) == 1 else _none_whole(folder, broken))
    _require_own(path)
    chapters.sort(key=lambda held: held[0])
    if len(folders) == 1 and folders[0] == folder and not CHAPTERS[chapters[0][2]].own_page:
        page = study_page(chapters[0][3])
    else:
        placed = [_placed(*held[1:], folder=folder, page=path) for held in chapters]
        notices = [f"Left out: {why}" for why in broken]
        page = joined_page(f"Studies in {folder.resolve().name}", placed, notices)
    replace_file(path, page.html.encode())
    runs = tuple((run, command) for _, run, command, _ in chapters)
    return Joined(path, runs, tuple(broken))


def read_chapter(folder: Path) -> tuple[str, Chapter]:
    """The command of a run, and what it shows.

    Raises:
        RunFolderError: the run is not finished, of a command that has no page, or its files cannot
            be read or do not hold what they must.
    """
    manifest = read_manifest(folder)
    command = manifest["configuration"]["command"]
    if command not in CHAPTERS:
        raise RunFolderError(
            f"{folder} holds a run of {command!r}, which this version has no page for; it knows "
            f"{', '.join(CHAPTERS)}. Use the version that wrote it: {manifest.get('cw_lens')}."
        )
    kind = CHAPTERS[command]
    try:
        return command, kind.chapter(read_run(folder, manifest, *kind.tables(manifest)))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        pa.ArrowException,
    ) as error:
        what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        raise RunFolderError(
            f"{folder} cannot be shown: its files do not hold what a run of {command} writes "
            f"({what.removesuffix(': ')}). Run the command again to write them anew."
        ) from error


def _none_whole(folder: Path, broken: Sequence[str]) -> str:
    return f"none of the {len(broken)} runs in {folder} can be shown. " + " ".join(broken)


def _require_own(path: Path) -> None:
    """Refuses to replace what `write_report` and `write_study` did not write.

    Raises:
        RunFolderError: naming it.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. Give another page with --out."
        ) from error
    # pages of an earlier version bear no mark, but their manifest lies beside them
    if MARK not in start and not _is_page_of_a_study(path):
        raise RunFolderError(
            f"{path} is no page that can be written anew from tables, and is kept. Give another "
            "page with --out, such as --out joined.html."
        )


def _is_page_of_a_study(path: Path) -> bool:
    if path.name != REPORT:
        return False
    try:
        command = read_manifest(path.parent)["configuration"]["command"]
    except RunFolderError:
        return False
    return command in CHAPTERS and not CHAPTERS[command].own_page


def _placed(run: Path, command: str, chapter: Chapter, *, folder: Path, page: Path) -> Chapter:
    """A chapter with its run's folder, and a link to its own page."""
    shown = {"explain": "The coloured text, maps and factors are on its own page"}
    link = None
    own = run / REPORT
    if own.exists() and own.resolve() != page.resolve():
        address = quote(Path(os.path.relpath(own, page.resolve().parent)).as_posix())
        link = (address, shown.get(command, "Its own page"))
    name = str(run.relative_to(folder)) if run != folder else folder.resolve().name
    return replace(chapter, folder=f"{name} (cw-lens {command})", link=link)
