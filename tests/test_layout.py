"""The layout of the source: what may import what, how large things are, and that public names say what they do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

# From the ground up: a file imports of its own room and of those before it.
ROOMS = (
    ("config", "spans", "budget", "method"),
    ("kernels",),
    ("memory",),
    ("attention",),
    ("models",),
    ("engine",),
    ("tasks",),
    ("backends",),
    ("measure",),
    ("runs",),
    ("report",),
    ("cli",),
    ("__main__", "__init__"),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((CHECKOUT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


Definition = ast.FunctionDef | ast.ClassDef
MODULES = {name_of(path): path for path in sources("kvbench", "methods")}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything in a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> set[str]:
    """The modules of kvbench and methods that a file imports, for types alone or inside a function, too."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else node.module for part in parts}
    return found & MODULES.keys()


@cache
def imports() -> dict[str, set[str]]:
    return {module: imported(path) - {module} for module, path in MODULES.items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    list(TopologicalSorter(imports()).static_order())  # raises CycleError, which names them


def test_no_import_runs_up() -> None:
    def floor(module: str) -> int:
        parts = module.split(".")
        return FLOOR[parts[1] if len(parts) > 1 else "__init__"]

    up = [
        f"{module} imports {other}"
        for module, others in imports().items()
        if module.startswith("kvbench.")
        for other in others
        if other != "kvbench" and floor(other) > floor(module)
    ]
    assert not up


def test_the_top_of_the_package_is_seen_at_a_glance() -> None:
    top = [path.name for path in (CHECKOUT / "kvbench").iterdir() if path.name not in ("__pycache__", "README.md")]
    assert len(top) <= 18
    assert {path.removesuffix(".py") for path in top} - {"assets"} == FLOOR.keys()


def test_a_method_knows_the_interface_alone_and_the_harness_no_method() -> None:
    theirs = {other for module, others in imports().items() if module.startswith("methods") for other in others}
    assert {module.split(".")[1] for module in theirs if "." in module and module.startswith("kvbench")} == {
        "method",
        "budget",
        "kernels",
    }
    ours = {other for module, others in imports().items() if module.startswith("kvbench") for other in others}
    assert not {module for module in ours if module.startswith("methods")}


def test_only_backends_know_a_library_that_runs_models() -> None:
    asked = re.compile(r"^\s*(?:from|import) (?:transformers|vllm)\b", re.MULTILINE)
    know = {name_of(path) for path in sources("kvbench", "methods") if asked.search(path.read_text())}
    elsewhere = {name for name in know if not name.startswith("kvbench.backends.")}
    assert elsewhere == {"kvbench.models.types", "kvbench.models.card"}, "the types of its objects, and its configs"


def test_hydra_is_used_by_its_public_names_alone() -> None:
    assert [path.name for path in sources("kvbench", "scripts") if "hydra._" in path.read_text()] == []


def test_compiled_code_is_cpp_alone() -> None:
    asked = re.compile(r"^\s*(?:from|import) (?:numba|llvmlite|cffi|cython)\b", re.MULTILINE)
    assert [path.name for path in sources("kvbench", "methods", "scripts") if asked.search(path.read_text())] == []


def definitions(path: Path) -> Iterator[tuple[str, Definition]]:
    """Public classes and functions, and the public methods of public classes."""
    for node in nodes(path)[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


@pytest.mark.parametrize("package", ["kvbench", "methods"])
def test_public_names_say_what_they_do(package: str) -> None:
    public = {
        f"{name_of(path)}.{name}": ast.get_docstring(node)
        for path in sources(package)
        for name, node in definitions(path)
    }
    missing = sorted(name for name, docstring in public.items() if not docstring)
    assert len(missing) <= 0.05 * len(public), missing


CODE = ("kvbench", "methods", "scripts", "tests")
PRODUCT = CODE[:-1]


def length_of(function: ast.FunctionDef) -> int:
    """Its lines without the docstring, from its own line on: a decorator may list the cases of a test."""
    documented = function.body[0] if ast.get_docstring(function) else None
    prose = documented.end_lineno - documented.lineno + 1 if documented else 0  # type: ignore[operator]
    return (function.end_lineno or 0) - function.lineno + 1 - prose


@pytest.mark.parametrize("package", CODE)
def test_nine_of_ten_functions_are_short(package: str) -> None:
    lengths = sorted(
        length_of(node) for path in sources(package) for node in nodes(path) if isinstance(node, ast.FunctionDef)
    )
    assert lengths[9 * len(lengths) // 10] <= 25


def test_a_file_reads_in_one_sitting() -> None:
    sizes = {str(path.relative_to(CHECKOUT)): len(path.read_text().splitlines()) for path in sources(*CODE)}
    assert {name: size for name, size in sizes.items() if size > (400 if name.startswith("methods") else 800)} == {}


def first_parameter(function: ast.FunctionDef) -> str:
    """The name of the class that its first parameter is said to be; "" for another type, or none."""
    annotation = function.args.args[0].annotation if function.args.args else None
    if isinstance(annotation, ast.Constant):
        return str(annotation.value)
    return annotation.id if isinstance(annotation, ast.Name) else ""


@pytest.mark.parametrize("package", PRODUCT)
def test_what_works_on_an_object_is_a_method_of_its_class(package: str) -> None:
    """A function whose first argument is a class of its own file is that class' method, taken out of it."""
    outside = []
    for path in sources(package):
        top = nodes(path)[0].body  # type: ignore[attr-defined]
        classes = {node.name for node in top if isinstance(node, ast.ClassDef)}
        functions = [node for node in top if isinstance(node, ast.FunctionDef)]
        outside += [f"{name_of(path)}.{node.name}" for node in functions if first_parameter(node) in classes]
    assert outside == []


@pytest.mark.parametrize("package", PRODUCT)
def test_a_statement_says_one_thing(package: str) -> None:
    """At most two assignments to three or more names in a thousand lines."""
    dense = [
        f"{path.relative_to(CHECKOUT)}:{node.lineno}"
        for path in sources(package)
        for node in nodes(path)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Tuple) and len(target.elts) >= 3 for target in node.targets)
    ]
    lines = sum(len(path.read_text().splitlines()) for path in sources(package))
    assert len(dense) <= 0.002 * lines, dense


# Words that say nothing of what a name holds, as one of the words of a name.
VAGUE = {
    *("own", "found", "given", "held", "made", "kept", "asked", "wanted", "known", "seen", "needed", "told", "said"),
    *("one", "each", "around", "beside", "apart", "alike", "together", "left", "coming", "going", "about"),
}
TWICE = {"Backend"}  # what runs a model: kvbench's interface, and the class that vLLM finds by this name


def names_of(node: ast.AST) -> str:
    """The identifier that a node is or binds; "" for none."""
    if isinstance(node, ast.Name | ast.arg | ast.Attribute | ast.FunctionDef | ast.ClassDef):
        return next(str(value) for key in ("id", "arg", "attr", "name") if (value := getattr(node, key, None)))
    return ""


@pytest.mark.parametrize("package", PRODUCT)
def test_names_say_what_things_are(package: str) -> None:
    identifiers = [name for path in sources(package) for node in nodes(path) if (name := names_of(node))]
    vague = Counter(name for name in identifiers if not VAGUE.isdisjoint(name.lower().strip("_").split("_")))
    assert vague.total() <= 0.01 * len(identifiers), vague.most_common(20)


@pytest.mark.parametrize("package", ["kvbench", "methods"])
def test_no_two_classes_have_one_name(package: str) -> None:
    classes = Counter(node.name for path in sources(package) for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} <= TWICE


@pytest.mark.slow
def test_kvcache_brings_neither_command_line_nor_runs_nor_reports() -> None:
    code = (
        "import sys; from kvbench import KVCache;"
        "print(*(name for name in sys.modules"
        " if name.startswith(('kvbench.cli', 'kvbench.runs', 'kvbench.report', 'kvbench.measure', 'hydra'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
