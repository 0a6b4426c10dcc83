"""`cw-lens sinks` and `paper` from the outside: what they write, take up and refuse."""

import json

import pandas as pd
import pytest

from cw_lens.report import write_report
from tests.stored import undefined
from tests.test_cli import folder, run, save  # noqa: F401 - fixtures
from tests.test_cli_studies import content, no_images  # noqa: F401 - fixtures

pytestmark = pytest.mark.apart

SMALL = ("--examples", 2, "--max-tokens", 20, "--factors", 0.5, 0.0, "--layers", 0, 1)
PAPER = ("--examples", 2, "--max-tokens", 20, "--fractions", 0.5, "--factors", 0.5, 0.0)


@pytest.fixture
def sinks(run, folder, no_images):  # noqa: F811
    return lambda out, *more: run("sinks", folder, *SMALL, "--out", out, *more)


@pytest.fixture
def paper(run, folder, no_images):  # noqa: F811
    def command(out, *items_and_more):
        return run("paper", *items_and_more, "--model", folder, *PAPER, "--out", out)

    return command


def made_again(out):
    """`cw-lens report` writes the very page that the run wrote."""
    before = (out / "report.html").read_bytes()
    write_report(out)
    assert (out / "report.html").read_bytes() == before


def test_sinks_writes_tables_figures_and_page(sinks, tmp_path):
    out = tmp_path / "run"
    code, said = sinks(out)
    assert code == 0, said
    names = {path.stem for path in out.glob("*.parquet")}
    assert names == {
        *("sinks", "sink_attention", "sink_positions", "sink_tokens", "cone_heads", "cone_layers"),
        *("alignment_heads", "alignment_layers", "norm_model_heads", "norm_model"),
        *("sweep", "sweep_units", "sweep_comparisons", "norm_points", "cone_points"),
    }
    figures = {path.stem.removeprefix("samples-") for path in (out / "figures").glob("*.html")}
    assert figures == {
        *("fig5a-alignment", "fig5b-norm-model", "fig6a-cone", "fig6b-short-outputs"),
        *("fig6c-sweep", "fig11-norm-models", "sink-by-depth", "surgery"),
    }
    units = pd.read_parquet(out / "sweep_units.parquet")
    assert set(units["layers"]) == {"0-1"} and set(units["data"]) == {"samples"}
    # no-op, two targets scaled twice and cut in four ways, and three seeds of two controls
    assert len(units) == 2 * (1 + 2 * 2 + 2 * 4 + 3 * (2 + 1))
    heads = pd.read_parquet(out / "cone_heads.parquet")
    assert {"inside", "inside_without", "inside_rerun"} <= set(heads.columns)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["sink_layers"] == [0, 1]
    assert manifest["recipe"].startswith("cw-lens sinks")
    assert str(out / "report.html") in said
    assert undefined(out) == []
    made_again(out)


def test_sinks_again_writes_the_same_and_refuses_another_configuration(sinks, tmp_path):
    out = tmp_path / "run"
    assert sinks(out)[0] == 0
    before = content(out)
    code, said = sinks(out)
    assert code == 0 and "were finished before and are kept" in said
    assert content(out) == before
    code, said = sinks(out, "--seeds", 4)
    assert code == 1 and "holds another run: seeds was 3 there and is 4 here" in said
    assert content(out) == before


def test_sinks_cut_off_are_taken_up(sinks, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert sinks(whole)[0] == 0

    def cut(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cw_lens.studies.sweeps.Sweep._units", cut)
        code, said = sinks(out)
        assert code == 130 and "run the same command again" in said
    assert not (out / "report.html").exists()
    code, said = sinks(out)
    assert code == 0 and "2 of 2 batches were finished before and are kept" in said
    assert (out / "sweep.csv").read_bytes() == (whole / "sweep.csv").read_bytes()
    assert (out / "cone_heads.csv").read_bytes() == (whole / "cone_heads.csv").read_bytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--head", 9, 0], "layer 9, head 0 does not exist; there are layers 0 to 2 with 4 heads"),
        (["--layers", 7], "layer 7 does not exist"),
        (["--seeds", 2], "2 seeds of the controls are too few"),
        (["--factors", "nan"], "the factor is nan; it must be a finite number"),
    ],
)
def test_bad_input_is_one_clear_message(sinks, tmp_path, more, message):
    code, said = sinks(tmp_path / "run", *more)
    assert code == 1 and message in said and "Traceback" not in said


def test_paper_holds_every_item_against_the_paper(paper, tmp_path):
    out = tmp_path / "run"
    code, said = paper(out, "all", "--layers", 0, 1)
    assert code == 0, said
    table = pd.read_csv(out / "paper.csv")
    items = [f"table{n}" for n in (1, 2, 4, 5)] + [f"fig{n}" for n in (3, 4, 8, 9, 10, 11, 12)]
    items += ["fig5a", "fig5b", "fig6b", "fig6c"]
    assert set(table["item"]) == set(items)
    assert table["tokens"].unique().tolist() == [40] and set(table["data"]) == {"samples"}
    printed = table.loc[table["quantity"] == "R² of c on attention * cosine, other keys", "paper"]
    assert printed.tolist() == [0.834]
    assert set(table.loc[table["claim"].notna(), "holds"]) == {"too few texts"}
    drawn = {path.stem.split("-")[0] for path in (out / "figures").glob("*.html")}
    assert drawn == {*items, "fig6a", "fig7"} - {"table2", "table5"}
    assert "The paper against here" in said
    assert undefined(out) == []
    made_again(out)


def test_paper_reads_only_what_an_item_needs(paper, tmp_path):
    out = tmp_path / "run"
    code, said = paper(out, "table5")
    assert code == 0, said
    assert set(pd.read_csv(out / "paper.csv")["item"]) == {"table5"}
    assert not (out / "figures").exists()
    assert {path.stem for path in out.glob("*.parquet")} == {"paper", "entropies"}
    code, said = paper(tmp_path / "other", "fig2")
    assert code == 1 and "unknown item 'fig2'; there are table1" in said


def test_a_model_without_sink_layers_says_so(paper, tmp_path, monkeypatch):
    monkeypatch.setattr("cw_lens.studies.sinks.sink_layers", lambda readings: ())
    code, said = paper(tmp_path / "run", "fig6c")
    assert code == 1 and "there is no sink layer to scale the sink in. Name layers" in said
