"""What code a run's numbers come from, as its id has it. No torch.

kvbench's own code counts by versions that are raised by hand: `HARNESS` below, `version:` in the
YAML of each method, task and backend, and those of `kvbench.memory.kinds`. `tests/test_goldens.py`
fails where numbers change and the version does not. Names, comments, docstrings and the place of a
definition are in no id. Code that is not kvbench's has no version that anybody must raise: it
counts by the bytes of its files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.backends.run_config import RunConfig
from kvbench.config import TargetConfig

# Raised when a change of the engine, the store, an executor, the loading of models or the protocol
# changes numbers of methods and tasks that are themselves unchanged.
HARNESS = 1

OURS = ("kvbench", "methods")


def versions_of(config: RunConfig) -> dict[str, Any]:
    """The versions of all that makes the numbers of a run; of users' code a digest."""
    return {
        "harness": HARNESS,
        "backend": config.backend.version,
        "method": version_of(config.method),
        "task": version_of(config.task),
        **({"kv": config.kv.versions} if config.kv.coded else {}),
    }


def versions_in(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of a stored run.

    Runs of before there were any have the first ones, and of users' code the digest that stands in
    their place.
    """
    if "versions" in identity:
        return dict(identity["versions"])
    target = identity["config"]["method"].get("_target_", "")
    is_users = target and _top(target) not in OURS
    return {
        "harness": 1,
        "backend": 1,
        "method": identity.get("source", "") if is_users else 1,
        "task": 1,
    }


def is_ours(choice: TargetConfig) -> bool:
    """Whether a method or task is kvbench's own, with a version."""
    return _top(choice.target) in OURS and choice.version is not None


def version_of(choice: TargetConfig) -> int | str:
    """Of a method or task: its `version`, or the digest of its code."""
    if is_ours(choice):
        assert choice.version is not None
        return choice.version
    return files_digest(files_of(choice.target))


def files_digest(paths: Iterable[Path]) -> str:
    """12 hex digits of files, by their names and bytes, in any order; not where they lie. "" for
    none.
    """
    named = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths)
    return hashlib.sha256(repr(named).encode()).hexdigest()[:12] if named else ""


def files_of(target: str) -> list[Path]:
    """The files of a class such as "mymethod.Mine", found without importing anything.

    Its module's, and those that it imports, directly or not: of its own package, or of the folder
    that it lies in where that is no folder of installed libraries.

    Raises
    ------
    ModuleNotFoundError
        the module has no Python source.
    """
    module = target.rpartition(".")[0]
    top = _top(module)
    root = _folder_of(top)
    installed = not {"site-packages", "dist-packages"}.isdisjoint(root.parts)
    files: dict[str, Path] = {}
    waiting = {module}
    while waiting:
        name = waiting.pop()
        stem = root.joinpath(*name.split("."))
        candidates = (stem.with_suffix(".py"), stem / "__init__.py")
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            continue
        files[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = {
            candidate: _top(candidate) for candidate in _imported(path, package) - files.keys()
        }
        waiting |= {
            candidate
            for candidate, its in imported.items()
            if its == top or not (installed or its in OURS)
        }
    if module not in files:
        raise ModuleNotFoundError(f"{target}: no Python source found for module {module!r}")
    return sorted(files.values())


def _top(dotted: str) -> str:
    return dotted.partition(".")[0]


def _folder_of(top: str) -> Path:
    """The folder in which a top-level package or module lies.

    Raises
    ------
    ModuleNotFoundError
        it has no file.
    """
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None or not (places := spec.submodule_search_locations or [spec.origin or ""]):
        raise ModuleNotFoundError(f"{top}: no Python source found for it")
    return Path(places[0]).parent


def _imported(path: Path, package: str) -> set[str]:
    """Dotted names that may be modules which a file of `package` imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*filter(None, prefix), *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names - {""}
