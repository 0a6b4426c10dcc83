"""Run folders: one command's output each, never mixed with another's, every file whole."""

import json
import os
import platform
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

    A folder that holds a run of the same configuration is written anew; a resumable run may also
    find its own store of units, which is compared when it is opened.

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
    kinds = (MANIFEST, REPORT) if resumable else (MANIFEST, REPORT, STORE)
    held = [name for name in kinds if (folder / name).exists()]
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


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all.

    Raises:
        RunFolderError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. Give another folder with --out."
        ) from error


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of Python and of these packages, None of one that is not installed."""

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {"python": platform.python_version()} | {package: of(package) for package in packages}
