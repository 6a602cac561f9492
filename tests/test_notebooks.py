"""Every notebook runs from top to bottom in a real kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "ZeRO-3 on 2 ranks" in said


def test_there_are_notebooks():
    assert NOTEBOOKS
