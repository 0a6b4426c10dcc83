"""Fixtures: tiny random models of many shapes, the embedded default model, a headless browser."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never reach for a hub

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("cw_lens", "beartype.beartype")  # shapes are checked in every test

from hypothesis import settings

import cw_lens
from cw_lens.models import load_model

settings.register_profile("cw_lens", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("cw_lens")
torch.set_num_threads(1)  # two pytest workers share two cores

SHARED = Path(__file__).parents[2] / "shared"
GOLDEN = SHARED / "golden" / "smollm2_135m.json"
ON_FOUR = int(version("transformer-lens").split(".")[0]) >= 4


@pytest.fixture(scope="session")
def smollm2() -> object:
    """The embedded default model, on whichever transformer-lens is installed."""
    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def golden() -> dict:
    """Numbers of an independent, slow, float64 computation; not part of this repository."""
    import json

    if not GOLDEN.exists():
        pytest.skip(f"the golden numbers are not on this machine ({GOLDEN.name})")
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """Debian's chromium, headless; a test that needs it fails where it is missing."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.fail("the browser tests need chromium: run scripts/install-chromium.sh")
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def llama() -> object:
    """A tiny random grouped-query model with large value and output biases, no tokenizer."""
    from tests.tiny import tiny_llama

    return cw_lens.wrap_model(tiny_llama(heads=4, groups=2, bias=True))


@pytest.fixture
def folder(tmp_path):
    """A model folder as save_pretrained writes it, tokenizer included."""
    from tests.tiny import tiny_llama, tiny_tokenizer

    model = tiny_llama()
    model.resize_token_embeddings(258)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
