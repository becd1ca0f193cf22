"""The sources that a run's numbers come from: which files they are, and the hash of what they compute. No torch.

What cannot change a number does not count: docstrings, comments, annotations, formatting, the order of definitions, and
the file of a set in which a definition stands. Every top-level statement becomes a digest of its syntax, and the hash
is that of all digests, sorted. Where a statement uses a name of its module, its digest holds what that name is bound
to: the digest of a definition of the set, or the dotted name of what a library has. So definitions may move between
files and imports follow them, but a definition that finds another helper of the same name in its new file has another
digest.

What counts: the names of definitions, arguments and variables, and the class or function that one stands in.
`kernels.attend` and `attend` are one where `kernels` is a module of the set. What is not seen: the order of top-level
statements that bind different names, and an import that is there for its effects alone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvbench.config import PACKAGE
from kvbench.runs.syntax import Import, Source, parsed

STANDARD = Path(sysconfig.get_path("stdlib"))

# So often a digest takes in the digests of what it uses: two definitions differ by the helpers of their helpers, too.
DEPTH = 3

# What only checks, prints, stores or wires: counting it would throw away hours of results for a new progress bar. Tasks
# come in through `module_sources`, so that an edited task reruns its own runs only.
NOT_NUMBERS = {
    *("__init__.py", "__main__.py", "cli", "config.py", "models/hub.py", "report", "runs", "tasks"),
    *("backends/vllm/metrics.py", "backends/vllm/server.py"),
}

Place = tuple[str, int]  # a statement: its module, and which of that module's it is
Meaning = tuple[Place | None, str]  # a definition and its attribute, "" for none; or None and a name from elsewhere


def source_hash(paths: Iterable[Path], beside: Iterable[Path] = ()) -> str:
    """12 hex digits of what files compute: Python by its syntax, all else by name and bytes; not where they lie.

    Args:
        paths: the files, in any order.
        beside: Python files whose definitions these may use, and which do not count themselves.
    """
    files = {path: path.read_bytes() for path in paths}
    python = {path: source for path, source in files.items() if path.suffix == ".py"}
    data = sorted((path.name, _sha(source)) for path, source in files.items() if path not in python)
    around = _definitions(tuple((path, path.read_bytes()) for path in sorted(beside)), None)
    code = _definitions(tuple(sorted(python.items())), around)
    return _sha(json.dumps([data, sorted(code.digests.values())]).encode())[:12]


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=64)  # in a sweep the harness is one set, and each method and task another
def _definitions(files: tuple[tuple[Path, bytes], ...], beside: Definitions | None) -> Definitions:
    modules: dict[str, Source] = {}
    for path, source in files:
        name = module_name(path)
        modules[str(path) if name in modules else name] = _parsed(path, source)  # folders of no package may share names
    return Definitions(modules, beside)


def _digest(syntax: str, uses: Iterable[Iterable[Meaning]], known: Mapping[Place, str]) -> str:
    meanings = ["|".join((known.get(place, "") if place else "") + name for place, name in use) for use in uses]
    return _sha("\n".join([syntax, *meanings]).encode())


class Definitions:
    """The statements of a set of modules.

    Args:
        modules: by dotted name.
        beside: another set, whose definitions these may use.

    Attributes:
        digests: of what each statement computes.
    """

    def __init__(self, modules: Mapping[str, Source], beside: Definitions | None) -> None:
        self._modules: dict[str, Source] = {**(beside._modules if beside else {}), **modules}
        self._tops = {_top(module) for module in self._modules}
        statements = {
            (module, number): statement
            for module, source in modules.items()
            for number, statement in enumerate(source.statements)
        }
        meant = {
            place: [self._meanings(place[0], *use) for use in statement.uses] for place, statement in statements.items()
        }
        self.digests: dict[Place, str] = {}
        for _ in range(DEPTH + 1):
            known = {**(beside.digests if beside else {}), **self.digests}
            self.digests = {
                place: _digest(statement.syntax, meant[place], known) for place, statement in statements.items()
            }

    def _meanings(self, module: str, name: str, attribute: str, seen: frozenset[str] = frozenset()) -> list[Meaning]:
        """What `name` or `name.attribute` may be in a module of the set; what nothing there binds is its name."""
        source, key = self._modules[module], f"{module}.{name}"
        if key in seen or not (name in source.definitions or name in source.imports):
            return [(None, f"{name}.{attribute}")]
        found: list[Meaning] = [((module, number), attribute) for number in source.definitions.get(name, ())]
        for bound in sorted(source.imports.get(name, ())):
            found += self._imported(bound, attribute, seen | {key})
        return found

    def _imported(self, bound: Import, attribute: str, seen: frozenset[str]) -> list[Meaning]:
        if bound.dotted in self._modules and attribute:
            return self._meanings(bound.dotted, attribute, "", seen)
        if bound.module in self._modules and bound.dotted not in self._modules:
            return self._meanings(bound.module, bound.name, attribute, seen)
        # A module of the set, or what stands in no file of it: of our own packages it may have moved.
        name = bound.dotted.rpartition(".")[2] if _top(bound.module) in self._tops else bound.dotted
        return [(None, f"{name}.{attribute}")]


def harness_sources(backend: str, package: Path = PACKAGE) -> list[Path]:
    """The files of kvbench that can change a number of a run with this backend; of tasks see `module_sources`.

    Everything but what prints, stores or reports. Of the backends, the one that runs and what it imports of others.
    """
    every = {path.relative_to(package): path for path in package.rglob("*.py")}
    files = {path for place, path in every.items() if NOT_NUMBERS.isdisjoint({place.parts[0], place.as_posix()})}
    backends = {module_name(path): path for path in files if path.parent.parent == package / "backends"}
    own = [name for name, path in backends.items() if path.parent.name == backend]
    return sorted({*files.difference(backends.values()), *_reached(own, backends.get).values()})


def module_sources(target: str) -> list[Path]:
    """The files of a class or function such as "methods.quest.Quest", found without importing anything.

    The module's own file, every module it imports, directly or not, that belongs to the same package or lies outside
    the installed libraries (shared blocks, a parent method, a helper beside a user's own method), and the data files
    `data/<module>.*` beside each; nothing of the harness.

    Raises:
        ModuleNotFoundError: the module has no Python source.
    """
    module = target.rpartition(".")[0]

    def file(name: str) -> Path | None:
        path = _source_file(name)
        if path is None or _is_harness(path) or (_is_library(path) and _top(name) != _top(module)):
            return None
        return path

    found = _reached([module], file)
    if module not in found:
        raise ModuleNotFoundError(f"{target}: no Python source found for module {module!r}")
    data = {file for path in found.values() for file in path.parent.glob(f"data/{path.stem}.*")}
    return sorted({*found.values(), *data})


def _reached(modules: Iterable[str], file: Callable[[str], Path | None]) -> dict[str, Path]:
    """The files of modules and of all that they import, directly or not, where `file` has one for the name."""
    found: dict[str, Path | None] = {}
    waiting = set(modules)
    while waiting:
        name = waiting.pop()
        found[name] = path = file(name)
        if path is not None:
            imports = itertools.chain.from_iterable(_parsed(path, path.read_bytes()).imports.values())
            waiting |= {name for bound in imports for name in (bound.module, bound.dotted)} - found.keys()
    return {name: path for name, path in found.items() if path is not None}


def _is_harness(path: Path) -> bool:
    """Whether a file is kvbench's own and no task: those that may change a number are `harness_sources`."""
    return path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] != "tasks"


def _is_library(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version the run records anyway."""
    return path.is_relative_to(STANDARD) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _parsed(path: Path, source: bytes) -> Source:
    name = module_name(path)
    return parsed(source, name if path.name == "__init__.py" else name.rpartition(".")[0])


def module_name(path: Path) -> str:
    """The dotted name of a file, as far up as folders have an `__init__.py`."""
    parts = [] if path.name == "__init__.py" else [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.insert(0, folder.name)
    return ".".join(parts)


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
