"""The site builds without a warning, lacks nothing, fetches nothing, and what it shows runs."""

import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock

import cw_lens
from cw_lens import cli, models, sites
from cw_lens.cli.tasks import RESULT_COLUMNS
from cw_lens.metrics import METRICS
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.studies.accuracy import accuracy_table
from tests.browser import opened
from tests.site import Page, blocks, broken_links, entries, same_output
from tests.test_cli import folder, run, save  # noqa: F401 - fixtures
from tests.test_cli_studies import no_images  # noqa: F401 - fixture

pytestmark = [pytest.mark.slow, pytest.mark.apart]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOW_TO = sorted(path for path in (DOCS / "how-to").glob("*.md") if path.stem != "index")
TINY = ("--examples", 1, "--max-tokens", 16)
RUNS = {
    "explain": ("--text", "The ferry was pulled ashore."),
    "faithfulness": (*TINY, "--fractions", 0.5, "--metrics", "attention", "contribution"),
    "validate": ("--max-tokens", 6, "--layers", 0, "--metrics", "attention"),
    "sinks": (*TINY, "--factors", 0.0, "--layers", 0, 1),
    "paper": (*TINY, "--fractions", 0.5, "--factors", 0.5, 0.0, "--layers", 0, 1),
}
ITEMS = ("table1", "table4", "table5", "fig3", "fig5a", "fig5b", "fig6a", "fig6c", "fig12")
"""Of the paper: together they write every table."""
ELSEWHERE = {"paper": ("sinks", "faithfulness"), "sinks": ("faithfulness",)}
"""Sections that also explain what a command writes."""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site, once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, done = base / "site", base / "site-is-built"
    with FileLock(base / "site.lock"):
        if not done.exists():
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
            command += ["-d", base / "doctrees", DOCS, out]
            built = subprocess.run(command, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            done.touch()
    return out


@pytest.fixture(scope="session")
def pages(site):
    return {
        path.resolve(): Page(path.resolve())
        for path in site.rglob("*.html")
        if "_static" not in path.parts
    }


def test_the_api_pages_hold_every_public_name_and_no_other(site):
    found = entries(site / "objects.inv")
    public = {name for name in found if re.fullmatch(r"cw_lens\.\w+", name)}
    assert public == {f"cw_lens.{name}" for name in cw_lens.__all__}, (
        "docs/api/ and cw_lens.__all__ differ: give each public name a line in the page of its "
        "subject, views.md for a new view"
    )
    registered = {f"cw_lens.metrics.{name}" for name in METRICS}
    registered |= {f"cw_lens.sinks.{name}" for name in SINK_DETECTORS}
    assert registered <= set(found), "docs/api/scores.md lacks a metric or a sink detector"


def test_every_notebook_is_a_tutorial(site, pages):
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    links = pages[(site / "tutorials.html").resolve()].links
    for path in notebooks:
        assert (site / "notebooks" / f"{path.stem}.html").exists()
        assert f"notebooks/{path.stem}.html" in links
    assert len(notebooks) == len(list((site / "notebooks").glob("*.html")))


def test_every_link_leads_somewhere_and_nothing_is_fetched(pages):
    assert len(pages) > 20
    assert not broken_links(pages)
    outside = [link for page in pages.values() for link in page.fetched if "//" in link]
    assert not [link for link in outside if not link.startswith("data:")]


def test_the_notation_names_hooks_that_are_there(llama):
    said = (DOCS / "notation.md").read_text()
    names = sites.cache_names(llama, 0)
    for name in names.values():
        assert f"`{name.removeprefix('blocks.0.')}`" in said
    assert set(names.values()) <= set(llama.hook_dict)
    for name in METRICS:
        assert f"`{name}`" in said


@pytest.mark.parametrize("page", [*HOW_TO, DOCS / "install.md"], ids=lambda page: page.stem)
def test_commands_have_the_options_that_pages_give_them(page):
    for language, content in blocks(page):
        for line in content.replace("\\\n", " ").splitlines() if language == "console" else []:
            words = shlex.split(line, comments=True)
            if words[:1] == ["cw-lens"]:
                known = inspect.signature(getattr(cli, words[1])).parameters
                for option in (word for word in words if word.startswith("--")):
                    assert option[2:].replace("-", "_") in known, line


@pytest.fixture
def command(run, folder, no_images, tmp_path, monkeypatch):  # noqa: F811
    """Runs a command small, in a folder of its own, on a tiny random model."""
    monkeypatch.chdir(tmp_path)

    def run_small(name: str, out: str) -> dict[str, pd.DataFrame]:
        model = (*ITEMS, "--model", folder) if name == "paper" else (folder,)
        code, said = run(name, *model, *RUNS[name], "--out", out)
        assert code == 0, said
        return {path.stem: pd.read_parquet(path) for path in Path(out).glob("*.parquet")}

    return run_small


@pytest.mark.golden
@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_what_a_page_shows_is_what_it_prints(page, smollm2, command, run, monkeypatch):  # noqa: F811
    if "runs/faithful/" in page.read_text():
        command("faithfulness", "runs/faithful")
    monkeypatch.setattr(cw_lens, "load_model", lambda: smollm2)
    monkeypatch.setattr(models, "load_model", lambda *_, **__: smollm2)
    names: dict[str, object] = {}
    printed, ran = "", 0
    for language, content in blocks(page):
        if language == "console" and content.startswith("cw-lens explain"):
            code, said = run(*shlex.split(content)[1:])
            assert code == 0, said
        elif language == "python":
            with redirect_stdout(io.StringIO()) as out:
                exec(compile(content, str(page), "exec"), names)
            printed, ran = out.getvalue(), ran + 1
        elif language == "text":
            assert same_output(printed, content), printed
    assert ran


@pytest.mark.parametrize("name", RUNS)
def test_the_columns_of_every_table_are_explained(name, command):
    tables = command(name, "run")
    assert tables
    require_explained(name, tables)


def test_the_columns_of_tasks_are_explained():
    rows = [("boolq", "none", "none", 0.0, 0, example, 1.0, -0.5) for example in range(2)]
    results = pd.DataFrame(rows, columns=list(RESULT_COLUMNS))
    require_explained("tasks", {"results": results, "accuracy": accuracy_table(results)})


def require_explained(command: str, tables: dict[str, pd.DataFrame]) -> None:
    """Each table and column is named in the command's section of the page, or where it sends."""
    text = (DOCS / "how-to" / "reading-a-report.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    read = "".join(sections[name] for name in (command, *ELSEWHERE.get(command, ())))
    said = set(re.findall(r"`(\w+)`", read))
    missing = set(tables) - said
    for name, table in tables.items():
        columns = {re.sub(r"_(low|high|n)$", "", column) for column in table.columns} - set(METRICS)
        missing |= {f"{name}.{column}" for column in columns if column not in said}
    assert sorted(missing) == []


@pytest.mark.browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_the_site_opens_from_disk(chromium, site, width, theme):
    for name in ("index", "api/reading", "notebooks/01_first_look", "how-to/reading-a-report"):
        with opened(chromium, site / f"{name}.html", width=width, theme=theme) as page:
            page.settle()
            assert not [said for said in page.complaints if not said.startswith("[PST]")]
            assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
            shown = "[document.documentElement.dataset.theme, document.documentElement.scrollWidth]"
            assert page.tab.evaluate(shown) == [theme, width]
