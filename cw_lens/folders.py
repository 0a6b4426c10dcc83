"""Run folders: one command's output each, never mixed with another's, every file whole."""

import json
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cw_lens.errors import CWLensError
from cw_lens.store import STORE, short

MANIFEST = "manifest.json"
REPORT = "report.html"


class RunFolderError(CWLensError, OSError):
    """A run folder that cannot be written, or that holds another run."""


def prepare_folder(folder: Path, configuration: dict[str, Any], *, resumable: bool = False) -> None:
    """Makes the folder and makes sure that it may be written and holds no other run.

    A folder that holds a run of the same configuration is written anew. A resumable run may find
    a store of units, whose configuration is compared when it is opened, once nobody else holds it.

    Raises:
        RunFolderError: naming the first field in which the runs differ, or why it cannot be
            written.
    """
    elsewhere = "Give another folder with --out, or remove this one."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunFolderError(
            f"cannot write the output folder {folder}: {error.strerror}. Give another with --out."
        ) from error
    if resumable and (folder / STORE).exists():
        return
    held = [name for name in (MANIFEST, REPORT, STORE) if (folder / name).exists()]
    held += [path.name for path in sorted(folder.glob("*.parquet"))]
    if not held:
        return
    try:
        other = json.loads((folder / MANIFEST).read_text())["configuration"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFolderError(
            f"{folder} holds {held[0]} but no manifest that can be read. {elsewhere}"
        ) from None
    for field, value in configuration.items():
        if other.get(field) != value:
            raise RunFolderError(
                f"{folder} already holds another run: {field} was {short(other.get(field))} "
                f"there and is {short(value)} here. {elsewhere}"
            )


def made_folder(folder: Path) -> Path:
    """The folder, made if it is missing.

    Raises:
        RunFolderError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {folder}: {error.strerror}. Make room there and run the same command "
            "again, or give another folder with --out."
        ) from error
    return folder


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        RunFolderError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):  # else it would keep a full disk full
            partial.unlink(missing_ok=True)
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. Make room there and run the same command "
            "again, or give another folder with --out."
        ) from error


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of Python and of these packages, None of one that is not installed."""

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {"python": platform.python_version()} | {package: of(package) for package in packages}
