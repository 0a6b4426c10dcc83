"""`cw-lens faithfulness`, `validate` and `tasks` from the outside: output, refusals, kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
import torch

from cw_lens.store import STORE
from tests.stored import undefined
from tests.test_cli import folder, run, save  # noqa: F401 - fixtures
from tests.tiny import tiny_llama

SMALL = ("--examples", 3, "--max-tokens", 24, "--fractions", 0.2, 0.6)
METRICS = ("--metrics", "attention", "contribution", "gradient")
OUTPUT = {
    "aopc.csv",
    "aopc.parquet",
    "comparisons.csv",
    "comparisons.parquet",
    "curves.csv",
    "curves.parquet",
    "figures",
    "manifest.json",
    "report.html",
    "units.parquet",
    STORE,
}


@pytest.fixture
def no_images(monkeypatch):
    """Images take a browser ten seconds; tests/test_figures.py draws them."""
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")


@pytest.fixture
def study(run, folder, no_images):  # noqa: F811
    def command(out, *more):
        return run("faithfulness", folder, *SMALL, *METRICS, "--out", out, *more)

    return command


def content(out: Path) -> dict[str, bytes]:
    kept = (".running", STORE)
    return {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in kept}


def test_a_run_writes_units_curves_figures_and_page(study, folder, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    more = ["--granularity", "layer", "global", "--protected", "cosine", "none"]
    code, said = study(out, *more)
    assert code == 0, said
    assert {p.name for p in out.iterdir()} - {".running"} == OUTPUT
    units = pd.read_parquet(out / "units.parquet")
    assert len(units) == 3 * (1 + 2 * 2 * (3 + 3) * 2 * 2)
    needed = "example tokens metric remove granularity ranking protected fraction seed nll_sum"
    assert set(f"{needed} clean_nll_sum".split()) <= set(units.columns)
    assert units["data"].unique().tolist() == ["samples"]
    assert units["tokens"].max() == 24
    curves = pd.read_parquet(out / "curves.parquet")
    pd.testing.assert_frame_equal(curves, pd.read_csv(out / "curves.csv"), check_dtype=False)
    assert len(curves) == 2 * 2 * (3 + 1) * 2 * 2
    assert len(list((out / "figures").glob("*.html"))) == 2 * 2 * 3
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["configuration"]["fractions"] == [0.2, 0.6]
    assert manifest["corpora"][0]["source"].startswith("shipped with cw_lens, sha256 ")
    assert manifest["recipe"].startswith("cw-lens faithfulness")
    assert [c["layer"] for c in manifest["certificates"]] == [0, 1, 2]
    shares = manifest["protected_share"]
    assert set(shares) == {"cosine"} and set(shares["cosine"]) == {"0", "1", "2"}
    assert all(0 < share <= 1 for share in shares["cosine"].values())
    page = (out / "report.html").read_text()
    assert manifest["recipe"].split(" --out")[0] in page.replace("\\u0027", "'")
    assert "No PNG and SVG were drawn" in said and str(out / "report.html") in said
    assert "contribution" in said and "3 texts" in said
    assert said.index("page: ") < said.index("No PNG and SVG were drawn")
    assert undefined(out) == []


@pytest.mark.apart
def test_the_same_command_again_writes_the_same(study, tmp_path):
    out = tmp_path / "run"
    assert study(out)[0] == 0
    before = content(out)
    code, said = study(out)
    assert code == 0, said
    assert "batches were finished before and are kept" in said
    assert content(out) == before


@pytest.mark.apart
@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["--fractions", "0.3"], "fractions was [0.2, 0.6] there and is [0.3] here"),
        (["--batch-size", "4"], "batch_size was 8 there and is 4 here"),
        (["--ranking", "clean"], 'ranking was "online" there and is "clean" here'),
    ],
)
def test_another_configuration_does_not_mix_with_the_run(study, tmp_path, more, field):
    out = tmp_path / "run"
    assert study(out)[0] == 0
    before = content(out)
    code, said = study(out, *more)
    assert code == 1 and f"holds another run: {field}" in said
    assert "--out" in said and "Traceback" not in said
    assert content(out) == before


@pytest.mark.apart
@pytest.mark.parametrize("last", range(0, 13, 4))
def test_a_run_cut_off_while_it_writes_its_report_is_taken_up(study, tmp_path, monkeypatch, last):
    """The disk fills up at one file or another: what is there is whole, and more room is enough."""
    import cw_lens.folders

    whole, out = tmp_path / "whole", tmp_path / "run"
    assert study(whole)[0] == 0
    named = {n for n in content(whole) if n.endswith((".html", ".json"))}  # of the folder's name
    replace, written = cw_lens.folders.os.replace, []

    def full(source, target):
        if len(written) == last:
            raise OSError(28, "No space left on device")
        written.append(target)
        replace(source, target)

    monkeypatch.setattr(cw_lens.folders.os, "replace", full)
    code, said = study(out)
    assert code == 1 and "No space left on device. Make room there and run the same" in said
    assert not list(out.rglob("*.partial"))
    there = {name for name in content(out) if name not in named}
    assert all(content(out)[name] == content(whole)[name] for name in there)
    monkeypatch.setattr(cw_lens.folders.os, "replace", replace)
    code, said = study(out)
    assert code == 0, said
    assert all(content(out)[n] == content(whole)[n] for n in set(content(whole)) - named)


@pytest.mark.apart
def test_other_weights_or_texts_under_the_same_name_are_refused(run, no_images, tmp_path):  # noqa: F811
    save(tiny_llama(), tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "The ferry was pulled ashore."}\n' * 2)
    out = tmp_path / "run"
    command = ["faithfulness", tmp_path / "model", *SMALL, "--data", texts, "--out", out]
    assert run(*command)[0] == 0
    save(tiny_llama(seed=1), tmp_path / "model")
    code, said = run(*command)
    assert code == 1 and "holds another run: weight_hash was" in said
    texts.write_text('{"text": "Another ferry was pulled ashore."}\n' * 2)
    code, said = run(*command)
    assert code == 1 and "holds another run: sources was" in said


@pytest.mark.apart
def test_an_unfinished_run_of_another_command_is_kept(run, study, folder, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    assert study(out)[0] == 0
    for made in (*out.glob("*.parquet"), out / "report.html", out / "manifest.json"):
        made.unlink()
    held = (out / STORE).read_bytes()
    for command in (["validate", folder], ["tasks", folder]):
        code, said = run(*command, "--out", out)
        assert code == 1 and 'command was "faithfulness" there and is' in said
    code, said = run("explain", folder, "--text", "ab", "--out", out)
    assert code == 1 and "holds units.sqlite but no manifest" in said
    assert (out / STORE).read_bytes() == held


@pytest.mark.apart
def test_a_folder_of_another_command_is_refused(run, study, folder, tmp_path):  # noqa: F811
    assert run("explain", folder, "--text", "ab", "--out", tmp_path / "a")[0] == 0
    code, said = study(tmp_path / "a")
    assert code == 1 and 'command was "explain" there and is "faithfulness" here' in said
    assert not (tmp_path / "a" / STORE).exists()
    assert study(tmp_path / "b")[0] == 0
    code, said = run("explain", folder, "--text", "ab", "--out", tmp_path / "b")
    assert code == 1 and 'command was "faithfulness" there and is "explain" here' in said


@pytest.mark.apart
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--fractions", "0"], "the fractions are [0.0]; give at least one above 0"),
        (["--fractions", "2"], "the fractions are [2.0]"),
        (["--metrics", "magic"], "unknown metric 'magic'"),
        (["--seeds", "1"], "1 seeds of the random control are too few"),
        (["--protected", "bos"], "unknown protected 'bos'; there are cosine"),
        (["--max-tokens", "1"], "max_tokens"),
        (["--examples", "0"], "examples"),
        (["--batch-size", "0"], "a batch size of 0"),
        (["--remove"], "remove is empty; name at least one of highest, lowest."),
        (["--protected"], "protected is empty; name at least one of cosine"),
        (["--data"], "no corpus is named; give --data samples"),
        (["--data", "\udcff.jsonl"], "is not UTF-8. Rename the file."),
        (["--data", "samples", "samples"], "two corpora are named samples"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
    ],
)
def test_bad_input_is_one_clear_message(study, tmp_path, more, message):
    code, said = study(tmp_path / "run", *more)
    assert code == 1, said
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "run" / "manifest.json").exists()
    if "--dtype" not in more:
        assert study(tmp_path / "run")[0] == 0  # a run that finished nothing holds no folder


@pytest.mark.apart
@pytest.mark.parametrize("name", ["a[/b]", "[red]", "x:x:", "</script><b>", "%{x}"])
def test_names_are_shown_as_they_are(run, folder, no_images, tmp_path, name):  # noqa: F811
    out = tmp_path / name.replace("/", "")
    texts = tmp_path / f"{name.replace('/', '')}.jsonl"
    texts.write_text('{"text": "The ferry."}\n')
    code, said = run("faithfulness", folder, *SMALL, "--data", texts, "--out", out)
    assert code == 0, said
    assert str(out / "report.html") in said.replace("\n", "")
    assert "<b>" not in (out / "report.html").read_text().partition("<script")[0]


def test_tasks_need_a_task(run, folder, tmp_path):  # noqa: F811
    code, said = run("tasks", folder, "--names", "--out", tmp_path / "run")
    assert code == 1 and "no task is named; give --names mmlu" in said


def test_a_loss_that_is_nan_is_reported_and_not_averaged(run, no_images, tmp_path, monkeypatch):  # noqa: F811
    """One text's predictions are NaN: its units are listed, the others make the curves."""
    from cw_lens.studies import faithfulness

    losses = faithfulness.losses

    def broken(logits, ids, clean):
        found = losses(logits, ids, clean)
        return {**found, "nll_sum": float("nan")} if len(ids) == 11 else found

    monkeypatch.setattr(faithfulness, "losses", broken)
    save(tiny_llama(), tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": "The ferry."}, {"text": "A river."}, {"text": "No snow."}]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    code, said = run("faithfulness", tmp_path / "model", *SMALL, "--data", texts, "--out", out)
    assert code == 0, said
    units = pd.read_parquet(out / "units.parquet")
    failed = units["nll_sum"].isna()
    assert 0 < failed.sum() < len(units)
    curves = pd.read_csv(out / "curves.csv")
    assert set(curves["n"]) == {len(set(units.loc[~failed, "example"]))}
    assert curves["perplexity"].notna().all()
    assert "units have a loss that is NaN" in (out / "report.html").read_text()


LISTENING = """
import signal
from cw_lens.cli import main
# a shell's background ignores SIGINT, and its children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def started(folder, out, *more):  # noqa: F811
    """The command in a process of its own; its output goes to a file beside the folder."""
    arguments = ["faithfulness", folder, *SMALL, *METRICS, "--out", out, *more]
    environment = os.environ | {"BROWSER_PATH": "/nowhere/chromium", "OMP_NUM_THREADS": "1"}
    said = out.with_suffix(".log").open("w")
    return subprocess.Popen(
        [sys.executable, "-c", LISTENING, *(str(a) for a in arguments)],
        stdout=said,
        stderr=subprocess.STDOUT,
        env=environment,
    )


def finished(out: Path, mode: str = "ro") -> int:
    """Batches in the store, without disturbing the run; "rw" recovers one that was killed."""
    import sqlite3

    try:
        with sqlite3.connect(f"file:{out / STORE}?mode={mode}", uri=True) as other:
            return other.execute("SELECT count(*) FROM batches").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def wait_for(condition, process, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the command ended early"
        assert time.monotonic() < end, "nothing was finished"
        time.sleep(0.002)


@pytest.mark.apart
@pytest.mark.slow
def test_killed_ten_times_and_resumed_it_gives_the_same_table(folder, tmp_path):  # noqa: F811
    """SIGKILL at random moments; the table of the tenth resumption is that of a whole run."""
    draw = random.Random(0)
    whole = started(folder, tmp_path / "whole")
    assert whole.wait() == 0, (tmp_path / "whole.log").read_text()
    out = tmp_path / "killed"
    held, seen = 0, []
    for _ in range(10):
        process = started(folder, out)
        wait_for(lambda held=held: finished(out) > held, process)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert finished(out, "rw") >= held
        held = finished(out, "rw")
        seen.append(held)
    assert seen[0] < seen[-1]
    last = started(folder, out)
    assert last.wait() == 0, out.with_suffix(".log").read_text()
    assert "batches were finished before" in out.with_suffix(".log").read_text()
    names = ("units.parquet", "curves.parquet", "aopc.csv", "comparisons.csv")
    assert all((out / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


@pytest.mark.apart
@pytest.mark.slow
def test_interrupted_it_says_so_and_a_second_run_at_once_is_refused(folder, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    long = ("--granularity", "layer", "head", "global", "--protected", "cosine", "none")
    process = started(folder, out, *long, "--seeds", 30)
    wait_for(lambda: finished(out) > 1, process)
    process.send_signal(signal.SIGSTOP)  # holds it there while another one tries
    try:
        other = started(folder, out, *long, "--seeds", 30)
        assert other.wait() == 1
        assert "another cw-lens is running in" in out.with_suffix(".log").read_text()
    finally:
        process.send_signal(signal.SIGCONT)
    log = out.with_suffix(".log")
    for _ in range(5):  # Python drops one that meets it in a finaliser: a person presses again
        if "interrupted; nothing" in log.read_text():  # on its way out; one more would kill it
            break
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    process.wait(timeout=60)
    assert process.returncode == 130, log.read_text()
    assert finished(out) > 1


def test_validate_writes_ablations_and_correlations(run, folder, no_images, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    command = ["validate", folder, "--max-tokens", 6, "--layers", 0, -1, "--out", out]
    command += ["--metrics", "attention", "contribution", "random"]
    code, said = run(*command)
    assert code == 0, said
    ablations = pd.read_parquet(out / "ablations.parquet")
    assert len(ablations) == 2 * 4 * 6
    assert set(ablations["layer"]) == {0, 2}
    found = pd.read_csv(out / "correlations.csv")
    assert len(found) == 3 * 2 * 2
    assert "Rank correlation with the measured change in loss" in said
    assert undefined(out) == []
    before = content(out)
    assert run(*command)[0] == 0
    assert content(out) == before
    code, said = run(*command, "--batch-size", 5)
    assert code == 1 and "batch_size was 32 there and is 5 here" in said


def test_tasks_write_results_and_accuracy(run, folder, no_images, tmp_path):  # noqa: F811
    rows = tmp_path / "boolq.jsonl"
    row = {"passage": "Ice is cold.", "question": "is ice cold", "answer": True}
    rows.write_text("".join(json.dumps(row | {"answer": bool(i % 2)}) + "\n" for i in range(4)))
    out = tmp_path / "run"
    command = ["tasks", folder, "--names", "boolq", "--rows", f"boolq={rows}", "--out", out]
    command += ["--metrics", "attention", "--fractions", 0.5, "--examples", 4, "--batch-size", 2]
    code, said = run(*command)
    assert code == 0, said
    results = pd.read_parquet(out / "results.parquet")
    assert len(results) == 4 * (1 + 1 + 3)
    accuracy = pd.read_csv(out / "accuracy.csv", keep_default_na=False)
    assert set(zip(accuracy["metric"], accuracy["fraction"], strict=True)) == {
        ("none", 0.0),
        ("attention", 0.5),
        ("random", 0.5),
    }
    assert (accuracy["n"] == 4).all()
    assert undefined(out) == []
    before = content(out)
    code, said = run(*command)
    assert code == 0, said
    assert content(out) == before
    code, said = run(*command[:4], "--rows", "boolq", "--out", tmp_path / "other")
    assert code == 1 and "--rows 'boolq' is not task=FILE" in said
    code, said = run(*command[:4], "--rows", f"piqa={rows}", "--out", tmp_path / "other")
    assert code == 1 and "of a task that is not run; those run are boolq." in said


def test_devices_and_dtypes_are_the_models(run, folder, no_images, tmp_path):  # noqa: F811
    command = ["faithfulness", folder, *SMALL, "--out", tmp_path / "run", "--dtype", "bfloat16"]
    code, said = run(*command, "--metrics", "contribution")
    assert code == 0, said
    units = pd.read_parquet(tmp_path / "run" / "units.parquet")
    assert torch.tensor(units["nll_sum"].to_numpy()).isfinite().all()
