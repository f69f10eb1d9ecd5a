"""The notebooks run from top to bottom as a user would run them, show what they say, and stay small."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def _written(notebook) -> str:
    """All that the notebook's cells have written, stderr included."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or str(output.get("data") or output) for output in outputs)


def test_quickstart_is_there():
    assert "quickstart" in [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_as_committed_is_small_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 15
    assert path.stat().st_size < 60_000
    for unwanted in ("Traceback", "Warning", "site-packages"):
        assert unwanted not in _written(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_executed_raises_and_warns_nothing(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    # `python3` is the interpreter of this very environment; the folder is the one that Jupyter would start in.
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": FOLDER}})
    client.execute()  # raises CellExecutionError with the cell and its traceback
    assert _written(notebook).strip()
    assert "Warning" not in _written(notebook)
