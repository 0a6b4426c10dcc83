"""Every notebook runs top to bottom on the embedded default, and shows what is committed."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import nbclient
import nbformat
import pytest

import cw_lens
import cw_lens.figures

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 1_000_000
MODULES = {"cw_lens": cw_lens, "cw_lens.figures": cw_lens.figures}
"""What a notebook may import from, and the names in their `__all__`."""
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
RELATIVE, ABSOLUTE = 0.03, 0.02
"""How far a number may be from the committed one: other machines round otherwise, and a near-tie
in a rank may fall the other way."""


def each(**marks):
    """One case for each notebook; those named have a mark more."""
    return pytest.mark.parametrize(
        "path",
        [pytest.param(p, marks=marks.get(f"n{p.name[:2]}", ()), id=p.stem) for p in NOTEBOOKS],
    )


@cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def complaints(cell):
    """What a cell wrote to stderr, or raised."""
    return [
        o
        for o in cell.outputs
        if o.output_type == "error" or (o.output_type == "stream" and o.name != "stdout")
    ]


def is_picture(output):
    """A figure, drawn or not, or a view: its frame when fresh, its picture where committed."""
    data = output.get("data", {})
    return '<iframe title="cw_lens"' in data.get("text/html", "") or any(
        kind.startswith(("image/", "application/vnd.plotly")) for kind in data
    )


def text_of(cell):
    """What a cell shows as text: printed, or its value; of a picture nothing."""
    shown = [output for output in cell.outputs if not is_picture(output)]
    return "\n".join(output.get("text") or output.data.get("text/plain", "") for output in shown)


def kinds(cell):
    return {"picture" if is_picture(output) else "text" for output in cell.outputs}


def differences(fresh, committed):
    """Where two texts differ: in words, or in numbers by more than rounding explains."""
    words = [re.sub(r"[\s-]+", " ", NUMBER.sub("#", text)).strip() for text in (fresh, committed)]
    if words[0] != words[1]:
        return [f"{words[0]!r} is not {words[1]!r}"]
    pairs = zip(NUMBER.findall(fresh), NUMBER.findall(committed), strict=True)
    return [
        f"{new} is not {old}"
        for new, old in pairs
        if abs(float(new) - float(old)) > ABSOLUTE + RELATIVE * abs(float(old))
    ]


def names_taken(source):
    """(module, name) for each name that a cell takes from cw_lens, attributes of modules too."""
    tree, taken = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            taken += [(a.name, None) for a in node.names if a.name.split(".")[0] == "cw_lens"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cw_lens":
            taken += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            base = re.sub(r"^figures$", "cw_lens.figures", ast.unparse(node.value))
            taken += [(base, node.attr)] if base in MODULES else []
    return taken


def is_public(module, name):
    if module not in MODULES:
        return False
    return name is None or name in MODULES[module].__all__ or f"{module}.{name}" in MODULES


# what the others show other tests show on every transformer-lens
ONCE = {f"n0{n}": pytest.mark.apart for n in (1, 2, 3, 5)}


@pytest.mark.golden
@pytest.mark.slow
@each(**ONCE)
def test_a_notebook_runs_and_shows_what_is_committed(path, tmp_path):
    committed, notebook = read(path), nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs = []
    client = nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    # figures are looked at where notebooks are made; here they need no browser
    # one thread: two workers share two cores, and waiting threads would take each other's time
    own = {"PLOTLY_RENDERER": "plotly_mimetype", "OMP_NUM_THREADS": "1"}
    client.execute(env=os.environ | own)
    for new, old in zip(code_cells(notebook), code_cells(committed), strict=True):
        assert not complaints(new), new.source
        assert kinds(new) == kinds(old), new.source
        assert not differences(text_of(new), text_of(old)), new.source


@each()
def test_every_code_cell_is_committed_with_what_it_shows(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        last = ast.parse(cell.source).body[-1]
        silent = isinstance(last, ast.Assign | ast.FunctionDef | ast.With | ast.For)
        assert bool(cell.outputs) != silent, cell.source
        assert not complaints(cell), cell.source
        html = "".join(o.get("data", {}).get("text/html", "") for o in cell.outputs)
        assert "<iframe" not in html and "<script" not in html, cell.source


@each()
def test_a_notebook_is_small_and_the_same_on_every_machine(path):
    assert path.stat().st_size < MOST_BYTES
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec"}
    assert notebook.metadata.kernelspec.name == "python3"
    for number, cell in enumerate(notebook.cells):
        assert cell.id == f"cell-{number:02d}" and set(cell.metadata) <= {"tags"}
    text = path.read_text()
    assert not re.search(r"0x[0-9a-f]{8}|/home/|/tmp/|/root/", text)


@each()
def test_a_notebook_opens_with_a_question_and_ends_with_what_to_try(path):
    cells = read(path).cells
    first, last = cells[0], cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    assert first.source.startswith("# ") and first.source.rstrip().endswith("?")
    assert re.search(r"arXiv 2606\.07604, sections? \d", first.source.replace("\n", " "))
    assert re.search(r"^## Try next$", last.source, re.MULTILINE)


@each()
def test_a_notebook_uses_public_names_alone(path):
    for cell in code_cells(read(path)):
        private = [taken for taken in names_taken(cell.source) if not is_public(*taken)]
        assert not private, cell.source
        assert not re.search(r"(?<!\w)_[a-z]\w*\.|\._[a-z]|import _", cell.source), cell.source


def test_there_are_five_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize(
    ("fresh", "committed", "said"),
    [
        ("a 0.512 b", "a 0.513  b", []),
        ("mean    0.600", "mean   -0.600", ["0.600 is not -0.600"]),
        ("mean 1.2e-05", "mean 0.0", []),
        ("120 pairs", "140 pairs", ["120 is not 140"]),
        ("120.4 pairs", "122.0 pairs", []),
        ("better", "worse", ["'better' is not 'worse'"]),
        ("layers [1, 2]", "layers [1]", ["'layers [#, #]' is not 'layers [#]'"]),
    ],
)
def test_numbers_may_differ_by_rounding_alone(fresh, committed, said):
    assert differences(fresh, committed) == said


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import cw_lens\ncw_lens.capture", []),
        ("from cw_lens import figures\nfigures.curve_figures(x)", []),
        ("from cw_lens.figures import curve_figures", []),
        ("import cw_lens\ncw_lens.geometry.decompose", [("cw_lens", "geometry")]),
        ("import cw_lens\ncw_lens.figures.sweep_figure", []),
        ("from cw_lens.runs import capture", [("cw_lens.runs", "capture")]),
        ("import cw_lens.runs", [("cw_lens.runs", None)]),
        ("from cw_lens import figures\nfigures.style", [("cw_lens.figures", "style")]),
        ("cw_lens.figures._curves", [("cw_lens.figures", "_curves")]),
    ],
)
def test_what_is_not_public_is_found(source, private):
    assert [taken for taken in names_taken(source) if not is_public(*taken)] == private
