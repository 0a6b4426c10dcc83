import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cw_lens

ROOT = Path(__file__).parents[1]


def test_importing_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys, time; start = time.perf_counter(); import cw_lens;"
        "print(time.perf_counter() - start);"
        "print(sorted({'torch', 'transformers', 'transformer_lens', 'requests', 'httpx',"
        "'urllib.request', 'socket', 'pandas'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(5):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        elapsed, loaded = said.stdout.splitlines()
        assert loaded == "[]"
        seconds.append(float(elapsed))
    assert statistics.median(seconds) < 0.3


def test_every_public_name_is_there_and_nothing_else():
    for name in cw_lens.__all__:
        assert getattr(cw_lens, name) is not None
        assert name in dir(cw_lens)
    with pytest.raises(AttributeError, match="module 'cw_lens' has no attribute 'nonsense'"):
        cw_lens.nonsense  # noqa: B018


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cw_lens.__version__ == project["version"]
