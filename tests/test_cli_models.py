"""The command line on many kinds of model: doctor, spaces, hybrids, encoders."""

import json

import pandas as pd
import pytest

from cw_lens.cli.console import console
from tests.families import hf_model
from tests.test_cli import run, save  # noqa: F401 - a fixture

TEXT = "The ferry was pulled ashore."


@pytest.fixture(autouse=True)
def _wide_console(monkeypatch):
    monkeypatch.setattr(console, "width", 200)


@pytest.fixture
def saved(tmp_path):
    def folder(name):
        save(hf_model(name), tmp_path / name)
        return tmp_path / name

    return folder


def test_doctor_prints_a_table_and_exits_with_0(run, saved):  # noqa: F811
    code, said = run("doctor", saved("gemma2"))
    assert code == 0, said
    for words in (
        "in all 2 layers",
        "z W_O + b_O = output",
        "a norm follows the output matrix",
        "land at hook_z, in one query head alone",
        "<s> (id 0), added by tokenize",
    ):
        assert words in said


def test_doctor_exits_with_1_where_something_needed_is_refused(run, saved):  # noqa: F811
    code, said = run("doctor", saved("bitnet"))
    assert code == 1
    assert "cw-lens: " in said and "is refused: attention. The table says why" in said
    assert "Use a model without such a norm." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("space", ["residual", "attention"])
def test_the_manifest_names_the_space(run, saved, tmp_path, space):  # noqa: F811
    folder, out = saved("olmo2"), tmp_path / "run"
    code, said = run("explain", folder, "--text", TEXT, "--space", space, "--out", out)
    assert code == 0, said
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["space"] == manifest["configuration"]["space"] == space
    assert {c["space"] for c in manifest["certificates"]} == {space}
    assert manifest["configuration"]["allow_folded"] is False
    assert manifest["model"]["weights"] == "raw"
    other = {"residual": "attention", "attention": "residual"}[space]
    code, said = run("explain", folder, "--text", TEXT, "--space", other, "--out", out)
    assert code == 1 and f'space was "{space}" there and is "{other}" here' in said


def test_a_hybrid_is_explained_in_the_layers_that_have_attention(run, saved, tmp_path):  # noqa: F811
    folder, out = saved("jamba"), tmp_path / "run"
    code, said = run("explain", folder, "--text", TEXT, "--out", out)
    assert code == 0, said
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"]["layers_without_attention"] == [0]
    assert [c["layer"] for c in manifest["certificates"]] == [1]
    code, said = run("explain", folder, "--text", TEXT, "--layers", "0", "--out", tmp_path / "x")
    assert code == 1
    assert "layer 0 has no attention" in said and "Traceback" not in said


@pytest.mark.parametrize("command", ["sinks", "paper"])
def test_sinks_of_a_hybrid(run, saved, tmp_path, monkeypatch, command):  # noqa: F811
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")  # images take ten seconds
    folder, out = saved("jamba"), tmp_path / "run"
    small = ["--examples", 2, "--max-tokens", 12, "--factors", 0.0, "--layers", 1]
    asked = [folder] if command == "sinks" else ["all", "--model", folder, "--fractions", 0.5]
    code, said = run(command, *asked, *small, "--out", out)
    assert code == 0, said
    heads = [pd.read_parquet(out / f"{name}_heads.parquet") for name in ("cone", "norm_model")]
    assert [set(table["layer"]) for table in heads] == [{1}, {1}]
    assert set(pd.read_parquet(out / "sweep.parquet")["layers"]) == {"1"}
    code, said = run(command, *asked, *small[:-1], 0, "--out", tmp_path / "other")
    assert code == 1 and "layer 0 has no attention" in said and "Traceback" not in said


def test_an_encoder_is_explained_without_a_loss(run, saved, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    code, said = run("explain", saved("bert"), "--text", TEXT, "--out", out)
    assert code == 0, said
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["prompt"]["perplexity"] is None
    assert "the model does not predict next tokens" in (out / "report.html").read_text()
