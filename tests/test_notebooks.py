"""Every notebook runs from its first cell to its last, and is kept with the pictures that it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
each = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)


def without_their_picture(notebook: Any) -> list[str]:
    """The cells that end in a figure and do not show it."""
    return [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code"
        and cell.source.splitlines()[-1].startswith("figures.draw(")
        and not any("image/png" in output.get("data", {}) for output in cell.outputs)
    ]


@each
def test_a_notebook_is_kept_with_its_pictures_and_is_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert without_their_picture(notebook) == []
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not any("skipped: " in str(cell.get("outputs")) for cell in notebook.cells)  # kept where all packages were
    assert path.stat().st_size < 300_000
    assert not any(word in path.read_text() for word in ("site-packages", "/home/", "/tmp/", "Traceback"))


@pytest.mark.slow
@each
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
    assert without_their_picture(notebook) == []
