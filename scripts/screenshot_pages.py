"""What there is to see: runs of every study, each view, each figure, and the page of all runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

MODEL = "smollm2-135m"
SHORT = "The river froze early that winter, and the ferry was pulled ashore before the first snow."
OTHER = "The river froze early that spring, and the boat was pulled ashore before the last snow."
SMALL = ["--examples", "2", "--max-tokens", "32"]
RUNS = {
    "explain": ["--text", SHORT],
    "faithfulness": [*SMALL, "--fractions", "0.1", "0.3", "0.7"],
    "sinks": [*SMALL, "--factors", "1", "0.5", "0"],
    "validate": ["--max-tokens", "8"],
    "tasks": ["--names", "lambada", "--examples", "4", "--fractions", "0.3", "0.7"],
    "paper": [
        *("table1", "table4", "fig3", "fig7", "fig11", "fig12"),
        *(*SMALL, "--fractions", "0.1", "0.5", "--points", "100000"),
    ],
}
"""The command of each study, and what makes it small."""

WIDE, NARROW, FIGURE = 1280, 390, 620
"""Of windows, in pixels; the last of one that holds a figure by itself."""
THEMES, LOOKS = ("light", "dark"), ("light", "grey", "dark", "dark-grey")


@dataclass(frozen=True)
class Shown:
    """A page, and the windows and looks in which its pictures are taken."""

    name: str
    path: Path
    windows: tuple[tuple[int, tuple[str, ...]], ...]


def runs(folder: Path) -> Iterator[str]:
    """Makes the run of each study, unless its folder holds a finished one, and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    # the beginnings of the texts that come with cw_lens: the last word is asked for
    lines = files("cw_lens").joinpath("data/samples.jsonl").read_text(encoding="utf-8").splitlines()
    held = [json.loads(line).get("text", "") for line in lines]
    texts = [text.split(". ")[0] for text in held if text][:6]
    rows = folder / "lambada.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    for command, options in RUNS.items():
        if (folder / command / "manifest.json").exists():
            continue
        more = ["--rows", f"lambada={rows}"] if command == "tasks" else []
        program = [str(Path(sys.executable).with_name("cw-lens")), command, *options, *more]
        subprocess.run(
            [*program, "--out", str(folder / command)], check=True, stdout=subprocess.DEVNULL
        )
        yield f"cw-lens {command}"


def views(folder: Path) -> Iterator[Shown]:
    """Each view of two short prompts, and the page of `explain` for a short text and a longer."""
    import cw_lens

    model = cw_lens.load_model(MODEL)
    longer = " ".join([SHORT, OTHER] * 2)
    short, other, long = (cw_lens.tokenize(model, text) for text in (SHORT, OTHER, longer))
    run = cw_lens.capture(model, cw_lens.tokenize(model, [SHORT, OTHER]))
    pages = {
        "show_heads": lambda: cw_lens.show_heads(run),
        "show_tokens": lambda: cw_lens.show_tokens(run),
        "show_tokens_of_a_query": lambda: cw_lens.show_tokens(run, query=-1),
        "show_overview": lambda: cw_lens.show_overview(run),
        "compare": lambda: cw_lens.compare(
            cw_lens.capture(model, short),
            cw_lens.capture(model, other),
            names=("winter", "spring"),
        ),
        "explain": lambda: cw_lens.explain_page(cw_lens.explain(model, short)),
        "explain_longer": lambda: cw_lens.explain_page(cw_lens.explain(model, long)),
    }
    for name, page in pages.items():
        path = folder / f"{name}.html"
        page().save(path)
        yield Shown(name, path, ((WIDE, LOOKS), (NARROW, THEMES)))


def studies(held: Path, folder: Path) -> Iterator[Shown]:
    """The figures of each run, and the page that joins the runs."""
    from cw_lens.figures.files import figure_page, get_plotlyjs
    from cw_lens.report import read_chapter, write_report

    (folder / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for command in RUNS:
        _, chapter = read_chapter(held / command)
        for section in chapter.sections:
            for name, figure in section.figures.items():
                path = folder / f"{command}-{name}.html"
                path.write_text(figure_page(figure), encoding="utf-8")
                yield Shown(f"figure-{path.stem}", path, ((FIGURE, LOOKS),))
    report = folder / "report.html"
    write_report(held, report)
    yield Shown("report", report, ((WIDE, THEMES), (NARROW, THEMES)))
