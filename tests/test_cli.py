"""`cw-lens explain` from the outside: what it writes, and what it says when it cannot."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import cw_lens
from cw_lens import cli
from cw_lens.explain_report import FILES
from cw_lens.metrics import METRICS
from cw_lens.prompts import prompts_from_ids
from cw_lens.views import explain_page
from tests.stored import undefined
from tests.tiny import tiny_llama, tiny_tokenizer

TEXT = "The ferry was pulled ashore."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that reads bytes."""
    path = tmp_path_factory.mktemp("model")
    save(tiny_llama(layers=3), path)
    return path


def save(model, path: Path) -> None:
    model.resize_token_embeddings(258)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `cw-lens` with these arguments; returns its exit code and all that it printed."""

    def run_command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["cw-lens", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run_command


def test_a_run_writes_its_folder_and_says_where(run, folder, tmp_path):
    out = tmp_path / "run"
    code, said = run("explain", folder, "--text", TEXT, "--out", out, "--layers", 0, -1)
    assert code == 0, said
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert str(out / "report.html") in said
    assert undefined(out) == []
    code, refused = run("report", out)
    assert code == 1 and "is no page that can be written anew from tables" in refused
    code, joined = run("report", tmp_path)
    assert code == 0 and f"page: {tmp_path / 'report.html'}" in joined
    assert f"explain: {out}" in joined
    assert "contribution" in said
    assert "mean" in said
    manifest = json.loads((out / "manifest.json").read_text())
    model = cw_lens.load_model(folder)
    prompts = cw_lens.tokenize(model, TEXT)
    assert manifest["prompt"]["ids"] == prompts.ids[0].tolist()
    assert manifest["shown_layers"] == [0, 2]
    assert manifest["prompt"]["first_is_bos"]
    assert manifest["cw_lens"] == cw_lens.__version__
    assert manifest["configuration"]["text"] == TEXT
    assert [c["layer"] for c in manifest["certificates"]] == [0, 1, 2]
    assert all(c["output_error"] < c["tolerance"] for c in manifest["certificates"])
    assert len(manifest["model"]["weight_hash"]) == 64
    nll = cw_lens.next_token_nll(model, prompts)
    assert manifest["prompt"]["perplexity"] == pytest.approx(nll.mean().exp().item(), rel=1e-5)

    tokens = pd.read_parquet(out / "token_scores.parquet")
    scores = cw_lens.token_scores(model, prompts, ["contribution"])["contribution"][0]
    length = prompts.ids.shape[1]
    assert len(tokens) == 3 * 4 * length
    row = tokens.query("layer == 2 and head == 1 and position == 5").iloc[0]
    assert row.token == prompts.tokens[0][5]
    assert row.token_id == prompts.ids[0, 5]
    assert row.contribution == pytest.approx(scores[2, 1, 5].item(), abs=1e-6)
    sinks = cw_lens.find_sinks(model, prompts)
    assert tokens.sink.tolist() == sinks[0].flatten().tolist()

    heads = pd.read_parquet(out / "heads.parquet")
    assert len(heads) == 3 * 4
    layer = cw_lens.capture(model, prompts).layers[1]
    inter = cw_lens.inter_head_contributions(layer)[0, 3]
    row = heads.query("layer == 1 and head == 3").iloc[0]
    assert row.first_attention == pytest.approx(layer.pattern[0, 3, :, 0].mean().item(), abs=1e-5)
    assert row.first_contribution == pytest.approx(inter[:, 0].mean().item(), abs=1e-5)
    assert row.gross == pytest.approx(inter.abs().sum(-1).mean().item(), abs=1e-5)
    assert row.net == pytest.approx(inter.sum(-1).mean().item(), abs=1e-5)
    entropy = torch.special.entr(layer.pattern[0, 3]).sum(-1).mean().item()
    assert row.attention_entropy == pytest.approx(entropy, abs=1e-4)
    share = inter.abs() / inter.abs().sum(-1, keepdim=True)
    entropy = torch.special.entr(share).sum(-1).mean().item()
    assert row.contribution_entropy == pytest.approx(entropy, abs=1e-4)
    weighted = METRICS["value_weighted"](layer)[0]
    share = weighted[3, :, 0] / weighted.sum(dim=(0, 2))
    assert row.first_value_weighted == pytest.approx(share.mean().item(), abs=1e-5)
    length_of = torch.einsum("qd,dm->qm", layer.z[0, 3], layer.W_O[3]).norm(dim=-1)
    assert row.output_norm == pytest.approx(length_of.mean().item(), rel=1e-4)


def test_the_same_run_may_be_repeated_and_another_is_refused(run, folder, tmp_path):
    out = tmp_path / "run"
    arguments = ["explain", folder, "--text", TEXT, "--out", out]
    assert run(*arguments)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run(*arguments)[0] == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    code, said = run("explain", folder, "--text", "Another text.", "--out", out)
    assert code == 1
    assert "already holds another run: text was" in said
    assert "--out" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "manifest.json").unlink()
    code, said = run(*arguments)
    assert code == 1
    assert "no manifest that can be read" in said


def test_a_file_holds_the_text(run, folder, tmp_path):
    (tmp_path / "text.txt").write_text("naïve\n")
    code, said = run("explain", folder, "--file", tmp_path / "text.txt", "--out", tmp_path / "run")
    assert code == 0, said
    assert (
        json.loads((tmp_path / "run" / "manifest.json").read_text())["prompt"]["tokens"][-1] == "↵"
    )


def test_metrics_of_choice_are_scored(run, folder, tmp_path):
    code, said = run(
        "explain",
        folder,
        "--text",
        "ab",
        "--out",
        tmp_path / "run",
        "--metrics",
        "gradient",
        "output_distance",
        "random",
    )
    assert code == 0, said
    tokens = pd.read_parquet(tmp_path / "run" / "token_scores.parquet")
    assert set(METRICS) <= set(tokens.columns)


def test_a_long_text_is_cut_when_asked(run, folder, tmp_path):
    text = "a" * 300
    code, said = run("explain", folder, "--text", text, "--out", tmp_path / "run")
    assert code == 1
    assert "has 301 tokens" in said
    assert "--truncate" in said
    arguments = ["--out", tmp_path / "run", "--truncate", "--size-budget", "25"]
    code, said = run("explain", folder, "--text", text, *arguments)
    assert code == 0, said
    assert len(json.loads((tmp_path / "run" / "manifest.json").read_text())["prompt"]["ids"]) == 128


def test_a_small_budget_is_kept_and_named(run, folder, tmp_path):
    arguments = ["explain", folder, "--text", "ab " * 40, "--out", tmp_path / "run"]
    code, said = run(*arguments, "--size-budget", "3.2")
    assert code == 0
    assert "at most 3.2 MB" in said
    assert "left out of the page:" in said
    assert (tmp_path / "run" / "report.html").stat().st_size < 3.2e6
    code, said = run(*arguments[:-1], tmp_path / "other", "--size-budget", "1")
    assert code == 1
    assert "a page of at most 1.0 MB cannot be made" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", ""], "text 0 is empty"),
        ([], "give the text with --text, or a file that holds it with --file"),
        (["--text", "a", "--file", "b"], "give the text with --text, or a file"),
        (["--file", "nowhere.txt"], "cannot read nowhere.txt: No such file"),
        (["--text", "a", "--metrics", "magic"], "unknown metric 'magic'; there are attention, val"),
        (["--text", "a", "--layers", "7"], "layer 7 does not exist: the model has layers 0 to 2"),
        (["--text", "a", "--dtype", "int3"], "unknown dtype 'int3'; there are float32"),
        (["--text", "a", "--out", "/dev/null/run"], "cannot write the output folder /dev/null/run"),
    ],
)
def test_bad_input_is_one_clear_message(run, folder, tmp_path, arguments, message):
    arguments = arguments if "--out" in arguments else [*arguments, "--out", tmp_path / "run"]
    code, said = run("explain", folder, *arguments)
    assert code == 1
    assert message in said
    assert "Traceback" not in said
    assert not [name for name in FILES if (tmp_path / "run" / name).exists()]


def test_a_file_that_is_no_text_is_named(run, folder, tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    code, said = run("explain", folder, "--file", tmp_path / "x", "--out", tmp_path / "run")
    assert code == 1
    assert "is not UTF-8 text" in said


def test_bad_models_are_one_clear_message(run, tmp_path):
    def refused(model: object, message: str) -> None:
        code, said = run("explain", model, "--text", "a", "--out", tmp_path / "run")
        assert code == 1 and message in said and "Traceback" not in said, said

    refused("nobody/no-such-model", "the embedded default")
    refused(tmp_path / "gone.gguf", "there is no file")
    (tmp_path / "x.gguf").write_bytes(b"GGUF broken")
    refused(tmp_path / "x.gguf", "damaged or cut short")
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    save(broken, tmp_path / "nan")
    refused(tmp_path / "nan", "holds values that are NaN or infinite")
    save(tiny_llama(), tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    refused(tmp_path / "bare", "has no tokenizer that loads")


def test_a_model_without_contributions_is_refused(run, tmp_path):
    """BitNet has a norm between sum of alpha v and the output matrix."""
    from transformers import BitNetConfig, BitNetForCausalLM

    config = BitNetConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    save(BitNetForCausalLM(config), tmp_path / "bitnet")
    code, said = run("explain", tmp_path / "bitnet", "--text", "ab", "--out", tmp_path / "run")
    assert code == 1
    assert "layer 0: a norm (attn_sub_norm) stands between sum of alpha v and the output" in said
    assert "Use a model without such a norm" in said


def test_warnings_are_printed_as_one_line(run, tmp_path):
    model = tiny_llama(layers=1)
    model.resize_token_embeddings(258)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(bos=False).save_pretrained(tmp_path / "model")
    code, said = run("explain", tmp_path / "model", "--text", "a", "--out", tmp_path / "run")
    assert code == 0, said  # one token, no BOS
    assert "cw-lens: the tokenizer has no BOS token" in said
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["prompt"]["perplexity"] is None
    assert not manifest["prompt"]["first_is_bos"]


def test_one_token_makes_a_page(llama):
    explanation = cw_lens.explain(llama, prompts_from_ids(llama, [[5]]))
    assert explanation.heads.first_attention.flatten().tolist() == [1.0] * 8
    page = explain_page(explanation)
    assert page.omissions == () and "\\u003c5" in page.html


def test_explain_takes_one_text(llama):
    with pytest.raises(
        cw_lens.errors.InputError, match="explain takes one text; the prompts hold 2"
    ):
        cw_lens.explain(llama, prompts_from_ids(llama, [[5], [6]]))


def test_the_console_script_and_its_exit_code(tmp_path):
    script = Path(sys.executable).with_name("cw-lens")
    said = subprocess.run([script, "version"], capture_output=True, text=True)
    assert (said.returncode, said.stdout.strip()) == (0, cw_lens.__version__)
    said = subprocess.run(
        [script, "explain", "--file", tmp_path / "x"], capture_output=True, text=True
    )
    assert said.returncode == 1
    assert said.stderr.startswith("cw-lens: cannot read")
    assert "Traceback" not in said.stderr
    said = subprocess.run([script, "explain", "--help"], capture_output=True, text=True)
    assert said.returncode == 0
    assert "--size-budget" in said.stdout
