"""Every notebook runs from top to bottom in a real kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

CLAIMS = {
    "zero3_step_by_step": ("largest difference 0.0e+00", "weights differ by at most "),
    "train_in_jupyter": ("val_perplexity",),
    "fine_tune_with_lora": ("ANNA: WHAT IS", "the same text when merged: True"),
}
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    said += "".join(str(o.get("data", {}).get("text/plain")) for c in notebook.cells for o in c.get("outputs", []))
    for claim in ("ZeRO-3 on 2 ranks", *CLAIMS[path.stem]):
        assert claim in said


def test_there_are_notebooks_with_their_outputs():
    assert {path.stem for path in NOTEBOOKS} == set(CLAIMS)
    for path in NOTEBOOKS:
        assert path.stat().st_size < 150_000
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2
        assert not any("/" + "site-packages" in str(cell.outputs) for cell in cells)
