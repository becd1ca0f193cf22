"""Claims about the code that a run id is made of: which files count, and which edits of them make another run."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.config import PACKAGE
from kvbench.runs.code import harness_sources, module_sources, source_hash

CHECKOUT = PACKAGE.parent


def names(paths: list[Path], root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in paths}


# -- which files count ------------------------------------------------------------------------------------------------


@pytest.fixture
def methods(tmp_path, monkeypatch):
    """A package of methods that cannot be imported, only read."""
    root = tmp_path / "mymethods"
    (root / "blocks").mkdir(parents=True)
    (root / "data").mkdir()
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (root / "blocks" / "__init__.py").write_text("")
    (root / "blocks" / "pages.py").write_text("from .votes import vote\n")
    (root / "blocks" / "votes.py").write_text("import numpy, json\n")
    (root / "blocks" / "unused.py").write_text("")
    (root / "parent.py").write_text("from mymethods.blocks import pages\nraise RuntimeError('imported')\n")
    (root / "child.py").write_text("def f():\n    from mymethods.parent import Parent\n")
    (root / "other.py").write_text("import torch\n")
    (root / "data" / "child.yaml").write_text("a: 1\n")
    (tmp_path / "alone.py").write_text("import alone_helper\nfrom mymethods.blocks.votes import vote\n")
    (tmp_path / "alone_helper.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def test_a_methods_sources_are_what_it_imports_read_not_imported(methods):
    found = names(module_sources("mymethods.child.Child"), methods)
    blocks = {"blocks/__init__.py", "blocks/pages.py", "blocks/votes.py"}
    assert found == {"child.py", "parent.py", "data/child.yaml", *blocks}
    assert names(module_sources("mymethods.other.Other"), methods) == {"other.py"}
    assert "mymethods" not in sys.modules


def test_a_method_outside_any_package_brings_its_helpers(methods):
    found = names(module_sources("alone.Alone"), methods.parent)
    assert found == {"alone.py", "alone_helper.py", "mymethods/blocks/votes.py"}


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"methods\.nothing\.Here"):
        module_sources("methods.nothing.Here")


def test_an_edited_parent_method_changes_the_hash_and_an_unrelated_file_does_not(methods):
    before = source_hash(module_sources("mymethods.child.Child"))
    (methods / "blocks" / "unused.py").write_text("changed = 1\n")
    assert source_hash(module_sources("mymethods.child.Child")) == before
    (methods / "parent.py").write_text("changed = 1\n")
    assert source_hash(module_sources("mymethods.child.Child")) != before


def test_the_harness_core_is_what_changes_numbers():
    core = names(harness_sources("hf"), PACKAGE)
    assert {"method.py", "budget.py", "memory/store.py", "measure/protocol.py", "attention/torch.py"} <= core
    assert not {"runs/folder.py", "runs/run.py", "cli/checks.py", "__init__.py", "tasks/passkey.py"} & core


def test_a_tasks_sources_hold_its_prompt_strings():
    found = names(module_sources("kvbench.tasks.passkey.Passkey"), CHECKOUT / "kvbench")
    assert {"tasks/passkey.py", "tasks/data/passkey.yaml"} <= found


# What several modules of a task read is in no run id: whoever changes such a file gives it another name.
SHARED_DATA = {
    "longproc/data/strings.yaml": "b01e468519f79baf8bba417ffaffe2555ad4a10edd429caaa66aadec3849ed6e",
    "ruler/data/wonderwords.json": "04130d003b9cdfc37d43ac5c04dacf53f47f6b07a163e25c6db5ff101db988af",
}


def test_data_that_makes_prompts_is_in_the_run_id_or_does_not_change():
    tasks = PACKAGE / "tasks"
    files = [path for path in tasks.rglob("data/*") if path.is_file()]
    alone = {path for path in files if not (path.parent.parent / f"{path.stem}.py").is_file()}
    found = {str(path.relative_to(tasks)): hashlib.sha256(path.read_bytes()).hexdigest() for path in alone}
    assert found == SHARED_DATA


def test_a_tasks_sources_hold_nothing_of_the_harness():
    found = names(module_sources("kvbench.tasks.gsm8k.Gsm8k"), CHECKOUT / "kvbench")
    assert "tasks/sources.py" in found and {file.partition("/")[0] for file in found} == {"tasks"}


def test_results_import_no_torch():
    imports = "import sys, kvbench.runs.folder, kvbench.runs.summary, kvbench.runs.code as code"
    program = f"{imports}; code.module_sources('methods.full.Full'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT).returncode == 0


# -- which edits count: on a copy of the harness ----------------------------------------------------------------------


class Copy:
    """The harness somewhere else, where it can be edited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        unread = shutil.ignore_patterns("assets", "report", "cli", "tasks", "__pycache__", "*.md")
        shutil.copytree(PACKAGE, root, ignore=unread)

    def hash(self, backend: str = "hf") -> str:
        return source_hash(harness_sources(backend, self.root))

    def rewrite(self, change: Callable[[str], str], files: str = "**/*.py") -> None:
        """Change the text of files, at least one of them."""
        before = {path: path.read_text() for path in self.root.glob(files)}
        after = {path: change(text) for path, text in before.items()}
        assert after != before
        for path, text in after.items():
            path.write_text(text)


@pytest.fixture
def harness(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "kvbench")


class Bare(ast.NodeTransformer):
    """A file without docstrings, and without the annotations of functions."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        return node


def rewritten(text: str) -> str:
    """A file in another format, without comments, docstrings and annotations, its definitions in the opposite order."""
    tree = Bare().visit(ast.parse(text))
    places = [place for place, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for place, node in zip(places, [tree.body[place] for place in reversed(places)], strict=True):
        tree.body[place] = node
    return ast.unparse(tree)


def test_comments_docstrings_annotations_format_and_order_of_the_whole_harness_do_not_count(harness: Copy) -> None:
    before = harness.hash()
    assert before == source_hash(harness_sources("hf"))  # wherever it lies
    harness.rewrite(rewritten)
    assert harness.hash() == before


def test_a_module_that_moves_or_joins_another_is_the_same_code(harness: Copy) -> None:
    before = harness.hash()
    (harness.root / "memory/slots.py").rename(harness.root / "attention/places.py")
    harness.rewrite(lambda text: text.replace("kvbench.memory.slots", "kvbench.attention.places"))
    assert harness.hash() == before
    moved = harness.root / "memory/transfer.py"
    harness.rewrite(lambda text: text + moved.read_text().replace("from __future__ import annotations", ""), "spans.py")
    moved.unlink()
    harness.rewrite(lambda text: text.replace("kvbench.memory.transfer", "kvbench.spans"))
    assert harness.hash() == before
    harness.rewrite(lambda text: text.replace("def uploaded(", "def brought("), "spans.py")
    assert harness.hash() != before


def test_of_the_backends_only_the_one_that_ran_counts(harness: Copy) -> None:
    before = {name: harness.hash(name) for name in ("hf", "vllm")}
    harness.rewrite(lambda text: text + "\n\nLIMIT = 3\n", "**/vllm/paged.py")
    assert harness.hash("hf") == before["hf"] and harness.hash("vllm") != before["vllm"]
    harness.rewrite(lambda text: text + "\n\nLIMIT = 3\n", "memory/store.py")
    assert harness.hash("hf") != before["hf"]


# -- which edits count: on a small package ----------------------------------------------------------------------------

CORE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from package.blocks import pages
from package.blocks.pages import near, size_of

LIMIT = 3

@dataclass
class Options:
    size: int = 4
    share: float
    shared: ClassVar[int] = 1

def helper(x):
    return x + LIMIT

def chosen(x: int, scale: float = 1.0) -> int:
    total: float = helper(x) + scale * LIMIT
    return np.maximum(near(total), pages.far(total)) < size_of(x)
"""
PAGES = """
LIMIT = 3

def helper(x):
    return x * LIMIT

def near(x):
    return helper(x)

def far(x):
    return -x

def size_of(x):
    return x * 2
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., str]:
    """The hash of the small package; its files edited as pairs of old and new text say."""

    def hashed(*edits: tuple[str, str]) -> str:
        files = {"core.py": CORE, "blocks/pages.py": PAGES, "data/core.yaml": "a: 1\n"}
        for old, new in edits:
            assert any(old in text for text in files.values())
            files = {name: text.replace(old, new) for name, text in files.items()}
        root = tmp_path / "package"
        for name, text in {"__init__.py": "", "blocks/__init__.py": "", **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return source_hash(path for path in root.rglob("*") if path.is_file())

    return hashed


SAME = {
    "a docstring": ("def far(x):", 'def far(x):\n    """Opposite."""'),
    "a field's docstring": ("size: int = 4", 'size: int = 4\n    """How many."""'),
    "a comment": ("LIMIT = 3", "LIMIT = 3  # pages"),
    "an argument's annotation": ("x: int, scale: float", "x: float, scale"),
    "a variable's annotation": ("total: float =", "total ="),
    "a field's annotation": ("share: float", "share: int"),
    "an import for types alone": ("LIMIT = 3", "if TYPE_CHECKING:\n    import torch\nLIMIT = 3"),
}
OTHER = {
    "a constant": ("x * 2", "x * 3"),
    "its type": ("x * 2", "x * 2.0"),
    "a constant elsewhere": ("LIMIT = 3", "LIMIT = 4"),
    "an operator": ("x * LIMIT", "x + LIMIT"),
    "a default": ("scale: float = 1.0", "scale: float = 2.0"),
    "a called name": ("np.maximum", "np.minimum"),
    "a field's default": ("size: int = 4", "size: int = 5"),
    "a field's name": ("share: float", "part: float"),
    "the order of fields": ("    size: int = 4\n    share: float", "    share: float\n    size: int = 4"),
    "a field that is none": ("size: int = 4", "size: ClassVar[int] = 4"),
    "a decorator": ("@dataclass", "@dataclass(order=True)"),
    "a library": ("import numpy as np", "import torch as np"),
    "a name that an import binds to another definition": ("near, size_of", "far as near, size_of"),
    "two that changed places": ("near, size_of", "near as size_of, size_of as near"),
    "an attribute of a module": ("pages.far", "pages.near"),
    "a definition more": ("def far", "def farther(x):\n    return x\n\ndef far"),
    "a byte of data": ("a: 1", "a: 2"),
}


@pytest.mark.parametrize("edit", SAME)
def test_an_edit_that_can_change_no_number_keeps_the_hash(small: Callable[..., str], edit: str) -> None:
    assert small(SAME[edit]) == small()


@pytest.mark.parametrize("edit", OTHER)
def test_an_edit_that_may_change_a_number_changes_the_hash(small: Callable[..., str], edit: str) -> None:
    assert small(OTHER[edit]) != small()


def test_it_is_the_same_by_which_import_a_definition_comes(small: Callable[..., str]) -> None:
    assert small(("import numpy as np", "import numpy"), ("np.maximum", "numpy.maximum")) == small()
    assert small(("import near,", "import far, near,"), ("pages.far(total)", "far(total)")) == small()
    assert small(("import near,", "import near as close,"), ("near(total)", "close(total)")) == small()


def hashed(root: Path, one: str, two: str) -> str:
    """The hash of a package of two modules."""
    root.mkdir(exist_ok=True)
    for name, text in {"__init__": "", "one": one, "two": two}.items():
        (root / f"{name}.py").write_text(text)
    return source_hash(root.glob("*.py"))


def test_a_moved_function_that_finds_another_helper_is_another(tmp_path: Path) -> None:
    def placed(one: str, two: str) -> str:
        return hashed(tmp_path / "package", one + "def helper(x):\n    return x + LIMIT\n", two)

    function = "def chosen(x):\n    return helper(x)\n"
    for ours, theirs in (
        ("LIMIT = 1\n", "LIMIT = 1\ndef helper(x):\n    return x - LIMIT\n"),
        ("LIMIT = 1\n", "LIMIT = 2\ndef helper(x):\n    return x + LIMIT\n"),  # a helper by other means
    ):
        before = placed(ours + function, theirs)
        called = function.replace("helper", "first")
        assert placed(ours, theirs + "from package.one import helper as first\n" + called) == before
        assert placed(ours, theirs + function) != before


def test_files_of_one_name_in_folders_that_are_no_packages_all_count(tmp_path: Path) -> None:
    files = [tmp_path / folder / "helper.py" for folder in ("one", "two")]
    seen = set()
    for values in ((1, 2), (3, 2), (1, 3)):
        for file, value in zip(files, values, strict=True):
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"LIMIT = {value}\n")
        seen.add(source_hash(files))
    assert len(seen) == 3


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.text("ab \n#'", max_size=9)), min_size=2, max_size=6),
    st.randoms(),
)
@settings(max_examples=30)
def test_definitions_may_stand_in_any_file_and_order(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, bool, str]], shuffler: random.Random
) -> None:
    """Each function uses the one before it, and imports it where that stands in the other file."""
    root = tmp_path_factory.getbasetemp() / "drawn" / "package"
    root.parent.mkdir(exist_ok=True)

    def program(values: list[int], second: list[bool], words: list[str]) -> str:
        files: dict[bool, list[str]] = {False: [], True: []}
        for place, (value, here, said) in enumerate(zip(values, second, words, strict=True)):
            used = f"f{place - 1}(x)" if place else "x"
            files[here].append(f"def f{place}(x):\n    {said!r}\n    return {used} + {value}\n")
            if place and second[place - 1] != here:
                files[here].append(f"from package.{'two' if second[place - 1] else 'one'} import f{place - 1}\n")
        for texts in files.values():
            shuffler.shuffle(texts)
        return hashed(root, "".join(files[False]), "".join(files[True]))

    values, second, words = (list(column) for column in zip(*drawn, strict=True))
    plain = program(values, [False] * len(values), [""] * len(values))
    assert program(values, second, words) == plain
    values[-1] += 1
    assert program(values, second, words) != plain


# -- a sweep that goes on ---------------------------------------------------------------------------------------------


@pytest.mark.slow  # two starts of a process
def test_a_sweep_runs_nothing_again_after_edits_that_change_no_number(tmp_path: Path) -> None:
    for folder in ("kvbench", "methods", "conf"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)  # with the kernels that are compiled there

    def swept() -> dict[str, bytes]:
        words = ["-m", "method=full,streaming_llm", "budget=64", "task.lengths=[512]", "task.limit=1", "dtype=float32"]
        subprocess.run(
            [sys.executable, "-m", "kvbench", *words, "results_dir=results", "attention=torch"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=True,
        )
        found = (tmp_path / "results").rglob("samples.jsonl")
        return {path.parent.name: path.read_bytes() for path in found}  # with the times that each sample took

    first = swept()
    assert len(first) == 2

    def edit(name: str, old: str, new: str) -> None:
        path = tmp_path / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    edit("kvbench/memory/store.py", '"""', '"""Edited. ')
    edit("methods/streaming_llm.py", '"""', '"""Edited. ')
    edit("kvbench/backends/vllm/paged.py", "return ", "return 0 or ")
    assert swept() == first
