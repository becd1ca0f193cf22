"""Methods and tasks of installed packages, by their entry points.

A package `kvbench_mine` with `method/mine.yaml` beside its code declares

    [project.entry-points."kvbench.methods"]
    mine = "kvbench_mine"

and `method=mine` finds it; tasks likewise, by "kvbench.tasks" and `task/`. Nothing is imported to
find one. Imports no torch.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Plugin(NamedTuple):
    """What an entry point names.

    Attributes
    ----------
    package
        name and version of the distribution, "kvbench-mine 0.1".
    folder
        of its choices: the file is `folder/method/NAME.yaml`.
    file
        None: there is no such package, or no such file in it.
    """

    package: str
    folder: Path | None
    file: Path | None


@functools.cache
def plugins(group: str) -> dict[str, Plugin]:
    """What installed packages add to a group, "method" or "task", by its name.

    Of two packages with one name the first in the order of their names has it.
    """
    points = sorted(entry_points(group=f"kvbench.{group}s"), key=_package, reverse=True)
    return {point.name: _plugin(group, point) for point in points}


def plugin_folders() -> list[Path]:
    """The folders of all packages with methods or tasks, each once."""
    every = [*plugins("method").values(), *plugins("task").values()]
    return sorted({plugin.folder for plugin in every if plugin.folder is not None})


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _plugin(group: str, point: EntryPoint) -> Plugin:
    spec = find_spec(point.value) if point.value.isidentifier() else None
    places = (spec.submodule_search_locations if spec is not None else None) or []
    folder = next(map(Path, places), None)
    file = None if folder is None else folder / group / f"{point.name}.yaml"
    return Plugin(_package(point), folder, file if file is not None and file.is_file() else None)
