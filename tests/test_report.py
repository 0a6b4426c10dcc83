"""`cw-lens report`: pages made again from what run folders hold, alone and joined."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from cw_lens.cli import corpus_texts
from cw_lens.errors import spans
from cw_lens.folders import RunFolderError
from cw_lens.paper_report import TABLES as PAPER_TABLES
from cw_lens.report import CHAPTERS, read_chapter, write_report, write_study
from cw_lens.run_facts import certified, fact_lines
from cw_lens.store import STORE
from cw_lens.stored_runs import StoredRun
from cw_lens.studies.accuracy import accuracy_table
from cw_lens.studies.curves import removal_curves
from cw_lens.studies.paper_items import ITEMS
from cw_lens.studies.sweep_results import sweep_curves
from cw_lens.studies.validation import validation_table
from cw_lens.study_report import faithfulness_tables
from cw_lens.views.columns import TABLES, meaning
from tests.browser import opened
from tests.stored import undefined
from tests.test_sweeps import made_up as made_up_sweep
from tests.units import made_up_units

pytestmark = pytest.mark.apart

HOSTILE = "</script><b>\"q\" 'a' \u202eevil\u202c \U0001f600 \x07 $x$ %{y}"
OWN_PAGE = "The coloured text, maps and factors are on its own page"
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def facts(command, data="texts", texts=12, **configuration):
    proofs = [
        {"layer": layer, "value_error": 1e-7 * layer, "output_error": 2e-7, "tolerance": 1e-4}
        | {"low_outputs": 0, "dtype": "float32", "space": "residual"}
        for layer in range(4)
    ]
    return {
        "configuration": {"command": command, "model": "tiny", "field": None} | configuration,
        "model": {"name": f"tiny {HOSTILE}", "n_layers": 4, "layers_without_attention": []},
        "corpora": [{"name": data, "source": "made up", "rows": list(range(texts))}],
        "tokens": [[data, example, 10] for example in range(texts)],
        "protected_share": {"cosine": {"0": 0.01, "1": 0.03}} if command != "sinks" else {},
        "certificates": proofs,
    }


def faithfulness_run(folder):
    units = made_up_units({"attention": 1.0, "contribution": 2.0, HOSTILE: 1.5, "random": 0.1})
    tables = faithfulness_tables(units, removal_curves(units, resamples=50))
    return folder, tables, facts("faithfulness"), f"cw-lens faithfulness --data '{HOSTILE}'"


def validation_run(folder):
    draw = np.random.default_rng(0)
    places = {"layer": np.repeat([0, 1], 20), "head": 0, "position": np.tile(range(20), 2)}
    table = pd.DataFrame({"data": "texts", "example": 0} | places)
    effect = draw.normal(size=40)
    table = table.assign(nll_sum=3 + effect, clean_nll_sum=3.0, delta_nll=effect)
    table = table.assign(attention=draw.uniform(size=40), contribution=np.abs(effect))
    table["sink"] = table["position"] == 0
    found = validation_table(table, ["attention", "contribution"], resamples=20)
    made = {"ablations": table, "correlations": found}
    return folder, made, facts("validate", texts=1), "cw-lens validate"


def tasks_run(folder):
    rows = [
        {"task": "boolq", "metric": metric, "remove": remove, "fraction": fraction, "seed": 0}
        | {"example": example, "correct": float(example % every > 0), "gold_loglikelihood": -1.0}
        for metric, remove, fraction, every in (
            ("none", "none", 0.0, 10),
            ("attention", "lowest", 0.7, 2),
            ("contribution", "lowest", 0.7, 10),
        )
        for example in range(40)
    ]  # fmt: skip
    results = pd.DataFrame(rows)
    tables = {"results": results, "accuracy": accuracy_table(results, resamples=50)}
    held = facts("tasks")
    given = {name: held[name] for name in ("configuration", "model")}
    given["tasks"] = [{"name": "boolq", "source": "s", "harness": "h"}]
    return folder, tables, given, "cw-lens tasks"


def paper_run(folder):
    curves = sweep_curves(made_up_sweep(), resamples=50)
    row = {"item": "fig6c", "data": "texts", "quantity": HOSTILE, "paper": np.nan, "here": 0.5}
    row |= {"low": 0.4, "high": 0.6, "claim": "positive", "holds": "no", "texts": 8}
    tables = {
        "paper": pd.DataFrame([row | {"tokens": 80, "model": "tiny"}] * 30),
        "sweep": curves.points,
        "sweep_comparisons": curves.comparisons,
    }
    return folder, tables, facts("paper", items=["fig6c"]), "cw-lens paper fig6c"


MADE = {
    "faithfulness": faithfulness_run,
    "validate": validation_run,
    "tasks": tasks_run,
    "paper": paper_run,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of one run of each of these commands."""
    folder = tmp_path_factory.mktemp("whole") / "runs"
    for command, make in MADE.items():
        out = folder / command
        out.mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BROWSER_PATH", "/nowhere/chromium")
            write_study(*make(out))
    return folder


@pytest.fixture
def runs(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "runs")


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", MADE)
def test_the_page_of_a_run_comes_out_of_its_tables_byte_for_byte(runs, command):
    page = runs / command / "report.html"
    before, others = page.read_bytes(), content(runs)
    page.unlink()
    joined = write_report(runs / command)
    assert page.read_bytes() == before
    assert (joined.path, joined.runs, joined.broken) == (page, ((runs / command, command),), ())
    assert content(runs) == others
    write_report(runs / command)  # over its own page
    assert page.read_bytes() == before


def test_a_folder_of_runs_becomes_one_page(runs):
    before = content(runs)
    joined = write_report(runs)
    assert joined.path == runs / "report.html" and joined.broken == ()
    assert [command for _, command in joined.runs] == [c for c in CHAPTERS if c in MADE]
    page = joined.path.read_text()
    assert page.count('data-name="plotly-') == 1
    data = json.loads(DATA.search(page)[1])
    chapters = {chapter["folder"].split(" ")[0]: chapter for chapter in data["chapters"]}
    for command, chapter in chapters.items():
        alone = json.loads(DATA.search((runs / command / "report.html").read_text())[1])
        (own,) = alone["chapters"]
        for part in ("title", "sentences", "sections", "recipe", "facts", "certificates"):
            assert chapter[part] == own[part], (command, part)
        assert chapter["sentences"], command
        assert chapter["link"][0] == f"{command}/report.html"
        assert any(section["figures"] for section in chapter["sections"]), command
    assert {path: b for path, b in content(runs).items() if path != joined.path} == before
    again = joined.path.read_bytes()
    assert write_report(runs).path.read_bytes() == again  # its own page is written anew


def test_runs_lie_up_to_three_folders_below_and_links_are_relative(runs, tmp_path):
    deep = tmp_path / "a b" / "c%" / "d"
    shutil.copytree(runs / "tasks", deep)
    (tmp_path / "a b" / "c%" / "d" / "figures" / "no").mkdir(parents=True)
    shutil.rmtree(runs)
    out = tmp_path / "page.html"
    joined = write_report(tmp_path, out)
    (chapter,) = json.loads(DATA.search(out.read_text())[1])["chapters"]
    assert chapter["link"][0] == "a%20b/c%25/d/report.html"
    assert joined.runs == ((deep, "tasks"),)
    shutil.move(deep, deep.parent / "e" / "d")
    with pytest.raises(RunFolderError, match="holds no run: there is no manifest.json in it"):
        write_report(tmp_path)


def broken(run, kind):
    manifest = run / "manifest.json"
    held = json.loads(manifest.read_text())
    if kind == "unfinished":
        manifest.unlink()
        (run / STORE).touch()
    elif kind == "unfinished passes":
        manifest.unlink()
        (run / "kept" / "sweep").mkdir(parents=True)
        (run / "kept" / "sweep" / STORE).touch()
    elif kind == "half a manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif kind == "not text":
        manifest.write_bytes(b"\xff\xfe")
    elif kind == "no command":
        manifest.write_text(json.dumps(held | {"configuration": [1]}))
    elif kind == "unknown command":
        held["configuration"]["command"] = "dance"
        manifest.write_text(json.dumps(held))
    elif kind == "missing table":
        (run / "curves.parquet").unlink()
    elif kind == "cut table":
        (run / "curves.parquet").write_bytes((run / "curves.parquet").read_bytes()[:200])
    elif kind == "other table":
        pd.DataFrame({"a": [1]}).to_parquet(run / "curves.parquet")


BROKEN = {
    "unfinished": "faithfulness holds an unfinished run: there is no manifest.json",
    "unfinished passes": "faithfulness holds an unfinished run: there is no manifest.json",
    "half a manifest": r"cannot read .*manifest.json: Unterminated string|cannot read .*Expecting",
    "not text": r"cannot read .*manifest.json: 'utf-8' codec",
    "no command": "manifest.json names no command",
    "unknown command": "holds a run of 'dance', which this version has no page for; it knows",
    "missing table": r"curves.parquet is missing. Run the command again",
    "cut table": r"cannot read .*curves.parquet: .*Run the command again",
    "other table": r"its files do not hold what a run of faithfulness writes \(KeyError",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_run_is_refused_alone_and_left_out_of_a_page_of_several(runs, kind):
    broken(runs / "faithfulness", kind)
    before = content(runs)
    with pytest.raises(RunFolderError, match=BROKEN[kind]) as caught:
        write_report(runs / "faithfulness")
    assert "\n" not in str(caught.value)
    assert content(runs) == before
    joined = write_report(runs)
    (why,) = joined.broken
    assert re.search(BROKEN[kind], why)
    data = json.loads(DATA.search(joined.path.read_text())[1])
    assert data["notices"] == [f"Left out: {why}"]
    assert len(data["chapters"]) == len(MADE) - 1


def test_where_every_run_is_broken_all_reasons_are_told(runs):
    for command in MADE:
        (runs / command / "manifest.json").write_text("{")
    with pytest.raises(RunFolderError, match="none of the 4 runs in .* can be shown") as caught:
        write_report(runs)
    assert str(caught.value).count("cannot read") == 4
    assert not (runs / "report.html").exists()


def test_no_folder_a_file_and_a_page_of_another_are_refused(runs, tmp_path):
    with pytest.raises(RunFolderError, match="nowhere does not exist. Give a run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="manifest.json is a file. Give a run folder"):
        write_report(runs / "paper" / "manifest.json")
    (runs / "report.html").write_text("<p>my own notes</p>")
    with pytest.raises(RunFolderError, match="is no page that can be written anew from tables"):
        write_report(runs)
    assert (runs / "report.html").read_text() == "<p>my own notes</p>"
    with pytest.raises(RunFolderError, match="cannot write .*missing/page.html: No such file"):
        write_report(runs, tmp_path / "missing" / "page.html")
    with pytest.raises(RunFolderError, match="cannot write .*: Is a directory"):
        write_report(runs, tmp_path)


def test_the_page_of_explain_is_kept_and_linked(runs, tmp_path):
    run = runs / "explain"
    run.mkdir()
    places = pd.MultiIndex.from_product([[0, 1], [0, 1], range(3)])
    scores = pd.DataFrame(list(places), columns=["layer", "head", "position"])
    scores = scores.assign(token_id=scores["position"], token=HOSTILE, sink=False)
    scores = scores.assign(attention=np.arange(12.0), contribution=1.0)
    scores.to_parquet(run / "token_scores.parquet")
    heads = scores[["layer", "head"]].drop_duplicates()
    names = ("first_attention", "first_value_weighted", "first_contribution")
    heads = heads.assign(**dict.fromkeys(names, 0.25))
    heads.to_parquet(run / "heads.parquet")
    held = facts("explain", text=HOSTILE) | {"recipe": None}
    del held["tokens"], held["corpora"]
    (run / "manifest.json").write_text(json.dumps(held))
    (run / "report.html").write_text("the page of explain")
    with pytest.raises(RunFolderError, match="is no page that can be written anew .* --out"):
        write_report(run)
    assert (run / "report.html").read_text() == "the page of explain"
    write_report(run, tmp_path / "alone.html")
    write_report(runs)
    chapter = json.loads(DATA.search((runs / "report.html").read_text())[1])["chapters"][0]
    assert chapter["link"] == ["explain/report.html", OWN_PAGE]
    # attention is a mean over the two heads, a contribution their sum
    assert "gets 0.25 of the attention and gives 0.50 of what" in chapter["sentences"][0]
    tokens = chapter["sections"][0]["tables"][0]
    columns = {column["name"]: column["values"] for column in tokens["columns"]}
    assert columns["attention"] == [4.5, 5.5, 6.5]


def test_a_run_of_an_earlier_version_says_what_it_cannot_draw(runs):
    run = runs / "paper"
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["configuration"]["items"] = ["fig6a", "fig6c"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    columns = {"data": ["texts"], "layer": [0], "head": [0]}
    pd.DataFrame(columns).to_parquet(run / "cone_heads.parquet")
    _, chapter = read_chapter(run)
    (notice,) = chapter.notices
    assert notice.startswith("Figure 6a is not drawn: cone_points.parquet is not there.")


def test_every_column_of_a_table_has_a_meaning_of_its_own(whole):
    for command in MADE:
        assert [name for name in undefined(whole / command) if HOSTILE not in name] == []
    assert meaning("curves", "nonsense") is None and meaning("nonsense", "nonsense_low") is None
    assert meaning("curves", "aopc_low") == ("lower end of the 95 % interval of aopc")
    assert meaning("norm_points", "attention") == "attention of the query to the first key"
    assert meaning("token_scores", "attention").startswith("token score by attention: alpha")
    for name, words in TABLES.items():
        assert words.title[0].isupper() and "_" not in words.title, name
        for column in (*words.first, *([words.interval] if words.interval else [])):
            assert meaning(name, column) or column in ("holds", "data"), (name, column)


def test_every_item_of_the_paper_has_its_tables():
    assert set(PAPER_TABLES) == set(ITEMS)
    named = {name for names in PAPER_TABLES.values() for name in names}
    assert named <= set(TABLES)


def test_facts_are_lines_in_words():
    held = facts("faithfulness", fractions=[0.1, 0.5], metrics=["attention"], allow_folded=False)
    lines = dict(fact_lines(StoredRun(held | {"versions": {"torch": "2", "kaleido": None}}, {})))
    assert lines["Command"] == "cw-lens faithfulness"
    options = "model: tiny; fractions: 0.1 0.5; metrics: attention; allow folded: no"
    assert lines["Options"] == options
    assert lines["Corpus texts"] == (
        "12 texts, 120 tokens with the first (BOS); rows 0 to 11; made up"
    )
    assert lines["Pairs that cosine protects"] == (
        "2 % of the (head, token) pairs, mean over layers; at least 1 %, at most 3 % (layer 1)"
    )
    assert lines["Versions"] == "torch 2"
    assert not {"tokens", "protected_share", "certificates"} & set(lines)
    assert not any(set(text) & set("{}[]") for name, text in lines.items() if name != "Model")
    empty = dict(fact_lines(StoredRun(held | {"protected_share": {}}, {})))
    assert not any("protects" in name for name in empty)
    strange = StoredRun(held | {"corpora": 3, "new_thing": {"a": 1}}, {})
    assert dict(fact_lines(strange))["New thing"] == '{"a": 1}'


def test_certificates_name_the_worst_layer():
    sentence, table = certified(StoredRun(facts("faithfulness"), {}))
    assert sentence == (
        "Σ α v W_O is the output that the model computed in each of 4 layers on the first text, "
        "within 3.0e-07 (layer 3); 1e-04 is tolerated."
    )
    assert table["layer"].tolist() == [0, 1, 2, 3]
    assert certified(StoredRun({}, {})) == ("This command keeps no certificates.", None)


def test_accuracy_is_told_in_sentences(runs):
    _, chapter = read_chapter(runs / "tasks")
    first, second = chapter.sentences
    assert first.startswith(
        "boolq, the lowest 70 % by contribution removed: accuracy is not distinguishable from the "
        "unmasked run's (0.900 against 0.900, difference +0.000"
    )
    assert (
        "70 % by attention removed: accuracy falls (0.500 against 0.900, difference −0.4" in second
    )


def test_numbers_are_spelled_as_spans():
    assert spans(range(30)) == "0 to 29"
    assert spans([5, 0, 1, 2, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert spans([]) == ""


def test_how_to_get_images_is_said_once_and_last(capsys, monkeypatch, tmp_path):
    from cw_lens.cli.console import console

    monkeypatch.setattr(console, "file", None)
    corpus_texts.say_where(tmp_path, "To have them as PNG and SVG too: pip install x.")
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[-1] == "To have them as PNG and SVG too: pip install x."
    assert lines[0].startswith("page: ")


@pytest.fixture(scope="module")
def joined(whole, tmp_path_factory):
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("joined") / "runs")
    (folder / "cut").mkdir()
    (folder / "cut" / "manifest.json").write_text(HOSTILE)
    return write_report(folder).path


@pytest.mark.browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "dark")])
def test_the_joined_page_works_in_silence(chromium, joined, width, theme):
    with opened(chromium, joined, width=width, theme=theme) as shown:
        tab = shown.tab
        assert tab.locator(".chapter").count() == len(MADE)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        # each entry of the contents leads to a part of that name
        links = tab.locator("#contents a")
        if width < 1250:
            tab.locator("#contents summary").click()
        assert links.count() >= 3 * len(MADE)
        for place in (2, links.count() - 1):
            links.nth(place).click()
            name = links.nth(place).text_content()
            part = tab.evaluate("document.querySelector(location.hash).firstChild.textContent")
            assert part == name
            top = tab.evaluate("document.querySelector(location.hash).getBoundingClientRect().top")
            end = "innerHeight + scrollY >= document.documentElement.scrollHeight - 2"
            assert abs(top) < 3 or tab.evaluate(end)
        # hostile names are text
        assert tab.locator("b").count() == tab.locator(".same b").count()
        said = tab.locator("#notices").text_content()
        assert "cut/manifest.json" in said and said.startswith("Left out: cannot read")
        assert HOSTILE in tab.locator("pre.recipe").first.text_content()
        # every figure is drawn in the theme's colours, with letters of a size to be read
        plots = tab.locator(".plot")
        for place in range(plots.count()):
            plots.nth(place).scroll_into_view_if_needed()
            plots.nth(place).locator(".point").first.wait_for()
        paper, ink = ("rgb(23, 24, 27)", "rgb(231, 231, 234)") if theme == "dark" else (
            "rgb(255, 255, 255)", "rgb(28, 28, 30)")  # fmt: skip
        colours = tab.evaluate(
            "[...document.querySelectorAll('.plot')].map((p) => ["
            " getComputedStyle(p.querySelector('.main-svg')).backgroundColor,"
            " getComputedStyle(p.querySelector('.xtick text')).fill])"
        )
        assert {tuple(pair) for pair in colours} == {(paper, ink)}
        black = {"light": "rgb(0, 0, 0)", "dark": "rgb(244, 244, 246)"}[theme]
        first = plots.first.locator(".scatterlayer .js-line").first
        assert first.evaluate("line => getComputedStyle(line).stroke") == black  # attention
        sizes = tab.evaluate(
            "[...document.querySelectorAll('.plot text')].filter((t) => t.textContent)"
            ".map((t) => parseFloat(getComputedStyle(t).fontSize))"
        )
        assert min(sizes) >= 10
        assert shown.complaints == []
        assert shown.requests == [joined.as_uri()]


@pytest.mark.browser
def test_another_theme_draws_the_figures_again(chromium, joined):
    with opened(chromium, joined) as shown:
        plot = shown.tab.locator(".plot").first
        plot.scroll_into_view_if_needed()
        plot.locator(".point").first.wait_for()
        shown.tab.emulate_media(color_scheme="dark")
        shown.tab.wait_for_function(
            "() => getComputedStyle(document.querySelector('.plot .main-svg')).backgroundColor"
            " === 'rgb(23, 24, 27)'"
        )
        assert shown.complaints == []


@pytest.mark.browser
def test_a_figures_own_page_follows_the_theme(chromium, joined):
    path = sorted((joined.parent / "faithfulness" / "figures").glob("*comprehensiveness.html"))[0]
    with opened(chromium, path, theme="dark") as shown:
        shown.tab.wait_for_selector(".scatterlayer .point")
        ground = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"
        assert shown.tab.evaluate(ground) == "rgb(23, 24, 27)"
        line = shown.tab.locator(".scatterlayer .js-line").first
        assert line.evaluate("line => getComputedStyle(line).stroke") == "rgb(244, 244, 246)"
        assert "95\u00a0% bootstrap intervals" in shown.tab.locator("p").text_content()
        assert HOSTILE in shown.tab.locator("pre").text_content()
        assert shown.complaints == []
