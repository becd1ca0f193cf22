"""Run the notebooks and keep what they show in them.

Warnings, which name this machine's folders, are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"


def main() -> None:
    """Run those that are named (`1_compare_methods`), or all."""
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(
        FOLDER.glob("*.ipynb")
    ):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, timeout=1800, resources={"metadata": {"path": str(FOLDER)}}
        ).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
