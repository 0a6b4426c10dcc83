"""Every notebook runs top to bottom on the embedded default, without a hub."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells if not cell.source.lstrip().startswith("def "))
    complaints = [o for cell in cells for o in cell.outputs if o.output_type in ("stream", "error")]
    assert not complaints
    assert path.stat().st_size < 1e6


def test_there_is_a_notebook_to_run():
    assert NOTEBOOKS
