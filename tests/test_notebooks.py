"""Every notebook runs from its first cell to its last, and is kept with the pictures that it draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import nbformat
import pytest
from nbclient import NotebookClient

from kvbench.backends.hf.cache import Question

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


@each
def test_what_a_notebook_says_is_run_or_holds(path: Path) -> None:
    """Numbers of claims, methods and presets are printed by cells; a value of an option is one that it takes."""
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    assert not re.findall(r"\b\d+ (?:claims|methods|presets|tasks|models)\b", prose)
    for value in re.findall(r'`question="(\w+)"`', prose):
        assert value in get_args(Question)


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
