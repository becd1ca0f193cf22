"""What a run is: the name of its arm, and the hash of all that may change one of its numbers. No torch."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.budget import has_budget
from kvbench.config import PACKAGE
from kvbench.memory.kinds import kv_in

STANDARD = Path(sysconfig.get_path("stdlib"))


def arm_name(config: Mapping[str, Any]) -> str:
    """The folder of a run's method and budget, for people: "quest-256", "full" of a method without a budget,
    "quest-256-int8" where keys and values are coded, and "quest-256-vllm" in vLLM.
    """
    budget = f"-{_size(config)}" if has_budget(config["method"]) else ""
    return f"{config['method']['name']}{budget}{_accounting(config)}{_kv(config)}{_backend(config)}"


def backend_name(config: Mapping[str, Any]) -> str:
    """What runs the model, "hf" or "vllm"."""
    return str(config["backend"]["name"])


def former_arm_name(config: Mapping[str, Any]) -> str:
    """The same before methods without a budget had one folder for all: "full-256"."""
    return f"{config['method']['name']}-{_size(config)}{_accounting(config)}{_kv(config)}"


def _size(config: Mapping[str, Any]) -> Any:
    return "preset" if config["budget"] is None else config["budget"]


def _accounting(config: Mapping[str, Any]) -> str:
    return "-unified" if config["protocol"]["accounting"] == "unified" else ""


def _kv(config: Mapping[str, Any]) -> str:
    kv = kv_in(config)
    return f"-{kv}" if kv.coded else ""


def _backend(config: Mapping[str, Any]) -> str:
    return "" if backend_name(config) == "hf" else f"-{backend_name(config)}"


def budget_of(config: Mapping[str, Any]) -> Any:
    """The budget that a run was asked for; None where its method has none: whatever was asked for is one run."""
    return config["budget"] if has_budget(config["method"]) else None


LOCAL = "local"  # an identity's word for a path to data: what it leads to counts, not where it lies

# What arms that share a prefill may differ in.
APART = ("method", "budget", "kv", "probe")


def run_id(identity: Mapping[str, Any]) -> str:
    """12 hex digits naming `identity` (JSON values, finite numbers); key order does not matter, 1 and 1.0 differ."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _short(canonical.encode())


def source_hash(paths: Iterable[Path]) -> str:
    """12 hex digits of the names and bytes of these files, whatever their order and wherever the checkout lies."""
    files = sorted((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in set(paths))
    return _short(json.dumps(files).encode())


# What only checks, prints, stores or wires: counting it would throw away hours of results for a new progress bar. Tasks
# come in through `module_sources`, so that an edited task reruns its own runs only.
NOT_NUMBERS = {
    "__init__.py",
    "__main__.py",
    "cli",
    "config.py",
    "demo.py",
    "fetch.py",
    "hub.py",
    "report",
    "runs",
    "score.py",
    "status.py",
    "tasks",
}


def harness_sources() -> list[Path]:
    """The kvbench files that can change a number: everything but what prints, stores, reports or is a task."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in NOT_NUMBERS)


def module_sources(target: str) -> list[Path]:
    """The files of a class or function such as "methods.quest.Quest", found without importing anything.

    The module's own file, every module it imports, directly or not, that belongs to the same package or lies outside
    the installed libraries (shared blocks, a parent method, a helper beside a user's own method), and the data files
    `data/<module>.*` beside each; nothing of the harness.

    Raises:
        ModuleNotFoundError: the module has no Python source.
    """
    module = target.rpartition(".")[0]
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = None if name in found else _source_file(name)
        if path is not None and not _is_harness(path) and (_top(name) == _top(module) or not _is_library(path)):
            found[name] = path
            waiting += _imported_names(name, path)
    if module not in found:
        raise ModuleNotFoundError(f"{target}: no Python source found for module {module!r}")
    data = {file for path in found.values() for file in path.parent.glob(f"data/{path.stem}.*")}
    return sorted({*found.values(), *data})


def _is_harness(path: Path) -> bool:
    """Whether a file is kvbench's own and no task: those that may change a number are `harness_sources`."""
    return path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] != "tasks"


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _source_file(module: str) -> Path | None:
    """The file of a dotted module name. Only the top level is looked up by Python, as deeper look-ups would import."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    stems = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for stem in stems for file in (stem.with_name(stem.name + ".py"), stem / "__init__.py")]
    candidates = files if rest else [Path(spec.origin)]
    return next((file for file in candidates if file.suffix == ".py" and file.is_file()), None)


def _is_library(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version the run records anyway."""
    return path.is_relative_to(STANDARD) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _imported_names(module: str, path: Path) -> tuple[str, ...]:
    """Dotted names that may be modules imported by a file: `from a import b` gives both "a" and "a.b"."""
    return _imports(path.read_bytes(), module if path.name == "__init__.py" else module.rpartition(".")[0])


@functools.cache  # each arm of a sweep asks for much the same files
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, package)
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(names)
