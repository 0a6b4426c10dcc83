"""Runs as their folders hold them: the manifest and the tables that a page is drawn from."""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from cw_lens.folders import MANIFEST, RunFolderError
from cw_lens.store import STORE

INSIDE = ("figures", "kept")
"""Folders of a run's own, in which no other run is looked for."""
DEEPEST = 3
"""How many folders below the one named a run may lie."""


@dataclass(frozen=True, eq=False)
class StoredRun:
    """What one run found, without its model: all that its page is made of.

    Attributes:
        manifest: what was computed, on what, by which command.
        tables: by the name of their file.
    """

    manifest: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]

    @property
    def model(self) -> str:
        """What figures and tables call the model: its name without the folders before it."""
        return Path(str(self.manifest["model"]["name"])).name

    @property
    def recipe(self) -> str | None:
        """The command that makes the run again."""
        return self.manifest.get("recipe")

    def texts(self, data: str) -> int:
        """How many texts of a corpus were read."""
        return self.tokens_of_texts()[data][0]

    def tokens_of_texts(self) -> dict[str, tuple[int, int]]:
        """Corpus -> its texts, and the tokens of all of them."""
        texts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for data, _, length in self.manifest.get("tokens", []):
            texts[data] += 1
            tokens[data] += length
        return {data: (texts[data], tokens[data]) for data in texts}

    def where(self, data: str) -> str:
        """What figures say of their model and corpus."""
        texts = self.texts(data)
        return f"{self.model}, {data}, {texts} text{'s' * (texts != 1)}"

    def of(self, table: str, data: str) -> pd.DataFrame:
        """The rows of one corpus."""
        rows = self.tables[table]
        return rows.loc[rows["data"] == data]


def run_folders(folder: Path) -> list[Path]:
    """The folder, and those at most three below it, that hold a run or what is left of one.

    Raises:
        RunFolderError: there is no such folder, it cannot be read, or it holds no run.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise RunFolderError(
            f"{folder} {what}. Give a run folder, or a folder that holds several, such as runs."
        )
    found = [path for path in _walk(folder, 0) if _is_run(path)]
    if not found:
        raise RunFolderError(
            f"{folder} holds no run: there is no {MANIFEST} in it, nor up to {DEEPEST} folders "
            "below. Give a folder that a cw-lens command wrote with --out."
        )
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        RunFolderError: the run is not finished, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise RunFolderError(
            f"{folder} holds an unfinished run: there is no {MANIFEST}, which is written last. "
            "What was computed is kept: run the command again to go on."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(
            f"cannot read {path}: {reason}. Run the command again to write it anew."
        ) from error
    try:
        command = manifest["configuration"]["command"]
    except (TypeError, KeyError):
        command = None
    if not isinstance(command, str):
        raise RunFolderError(
            f"{path} names no command, so that nobody knows what it is a run of. Run the command "
            "again to write it anew."
        )
    return manifest


def read_run(
    folder: Path, manifest: Mapping[str, Any], needed: Collection[str], optional: Collection[str]
) -> StoredRun:
    """A run from its folder.

    Args:
        folder: of the run.
        manifest: as `read_manifest`.
        needed, optional: names of tables; of the optional ones those that are there are read.

    Raises:
        RunFolderError: a needed table is missing, or one cannot be read.
    """
    tables = {}
    for name in (*needed, *optional):
        path = folder / f"{name}.parquet"
        if path.exists() or name in needed:
            tables[name] = _table(path)
    return StoredRun(manifest, tables)


def _table(path: Path) -> pd.DataFrame:
    remedy = "Run the command again: it computes only what is missing."
    if not path.exists():
        raise RunFolderError(f"{path} is missing. {remedy}")
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # of pyarrow's errors too
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise RunFolderError(f"cannot read {path}: {reason}. {remedy}") from error


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth == DEEPEST:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise RunFolderError(f"cannot read {folder}: {error.strerror}.") from error
    for entry in entries:
        own = entry.name in INSIDE or entry.name.startswith(".")
        if entry.is_dir(follow_symlinks=False) and not own:
            yield from _walk(Path(entry.path), depth + 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a manifest, or a store without one: a run that was cut off."""
    if (folder / MANIFEST).exists() or (folder / STORE).exists():
        return True
    return any((folder / "kept" / name / STORE).exists() for name in _kept(folder))


def _kept(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder / "kept")]
    except OSError:
        return []
