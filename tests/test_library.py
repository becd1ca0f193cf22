"""Kernels in C++: built once, where this user alone can write, and what happens where no compiler is."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvbench.attention.executor import executor
from kvbench.kernels import library, private
from kvbench.kernels.library import CppFile
from kvbench.method import Shape

SHAPE = Shape(1, 4, 2, 32, (8,), torch.float32, torch.device("cpu"), 1.0, (0,))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels are built by a compiler that only copies what was built before."""
    library.library()
    real, compiler = library.KVBENCH.built(), tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{real}" "$last"\n')
    compiler.chmod(0o755)
    place = tmp_path / "kernels"
    monkeypatch.setattr(library, "_compiler", lambda: str(compiler))
    monkeypatch.setattr(library, "_folders", lambda sources: iter([place]))
    yield place


def test_what_is_built_is_found_again_by_sources_compiler_and_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CppFile(library.KVBENCH.path)
    assert file.is_unbuilt()
    path = file.build()
    assert file.built() == path and not file.is_unbuilt()
    monkeypatch.setattr(library, "_level", lambda: "x86-64-v2")
    assert file.built() is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "_folders", lambda sources: iter([folder]))
    assert file.built() is None, "by another compiler"
    monkeypatch.setattr(library, "_compiler", lambda: None)
    assert file.built() == path, "no compiler is here, and what another one built is as good"


def test_two_that_build_at_once_leave_one_whole_file(folder: Path) -> None:
    with ThreadPoolExecutor() as pool:
        paths = {*pool.map(lambda _: library.KVBENCH.build(), range(4))}
    assert [*folder.iterdir()] == [*paths] and len(paths) == 1
    assert ctypes.CDLL(str(paths.pop())).kvbench_find_format


def test_what_another_user_can_write_is_not_loaded(folder: Path) -> None:
    library.KVBENCH.build().chmod(0o666)
    assert library.KVBENCH.built() is None


def test_where_no_folder_can_be_written_kernels_are_built_for_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_folders", lambda sources: iter(()))
    path = library.KVBENCH.build()
    assert ctypes.CDLL(str(path)).kvbench_find_format and path.parent.stat().st_mode & 0o77 == 0
    shutil.rmtree(path.parent)


def test_a_compiler_that_fails_is_named_with_its_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = folder.parent / "wrong"
    wrong.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such vectors' >&2\nexit 1\n")
    wrong.chmod(0o755)
    monkeypatch.setattr(library, "_compiler", lambda: str(wrong))
    with pytest.raises(library.NoKernels, match="wrong does not build .*kernels.cpp: .*no such vectors"):
        library.KVBENCH.build()
    assert not [*folder.iterdir()]


def test_without_a_compiler_torch_attends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no C++ compiler is here"
    monkeypatch.setattr("kvbench.attention.cpu.why_missing", lambda: reason)
    chosen = executor("auto", SHAPE)
    assert chosen.name == "torch" and chosen.note == f"cpu: {reason}"


def test_a_run_without_a_compiler_and_without_kernels_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from kvbench.kernels import library; library._folders = lambda sources: iter(());"
        "library._compiler = lambda: None; from kvbench.cli.main import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["method=quest", "budget=64", "task.lengths=[200]", "task.limit=1", f"results_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("attention=torch") == 1 and "no C++ compiler" in done.stdout


def test_arrays_that_a_kernel_does_not_take_are_refused() -> None:
    ids, numbers = torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(2, 3)
    with pytest.raises(TypeError, match="count_lists does not take torch.int64, torch.float32"):
        library.KVBENCH.count_lists(ids, numbers, numbers)
    with pytest.raises(TypeError, match="contiguous"):
        library.KVBENCH.count_lists(ids.transpose(1, 2), numbers, numbers)


@dataclass
class Opened:
    """A folder `cache` in a folder `above`, and how both are."""

    above: int = 0o755
    cache: int = 0o700
    owner: int | None = None
    group: int | None = None


@pytest.mark.parametrize(
    ("opened", "which"),
    [
        (Opened(), None),
        (Opened(cache=0o755), None),
        (Opened(above=0o1777), None),
        (Opened(cache=0o777), "cache"),
        (Opened(cache=0o1777), "cache"),
        (Opened(above=0o777), "above"),
        (Opened(cache=0o770), None),
        (Opened(cache=0o770, group=65534), "cache"),
        (Opened(owner=65534), "cache"),
        (Opened(cache=0o500, owner=65534), "cache"),
    ],
)
def test_a_folder_that_another_user_can_write_to_is_no_place_for_kernels(
    opened: Opened, which: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (opened.owner or opened.group) and os.geteuid():
        pytest.skip("only root gives files away")
    monkeypatch.setattr(private, "_is_of_one", lambda group: group == tmp_path.stat().st_gid)
    cache = tmp_path / "above" / "cache"
    cache.mkdir(parents=True)
    os.chown(cache, -1 if opened.owner is None else opened.owner, -1 if opened.group is None else opened.group)
    cache.chmod(opened.cache)
    cache.parent.chmod(opened.above)
    first = private.open_to_others(cache)
    assert (None if first is None else first.name) == which
    if opened.cache == 0o1777:  # as /tmp: what this user makes in it nobody else takes away
        assert private.open_to_others(cache / "kernels") is None


@pytest.mark.slow  # builds
def test_functions_of_one_name_stay_apart_and_changed_sources_are_built_anew(tmp_path: Path) -> None:
    """Two files may name functions alike, and a file may come back changed."""

    def times(number: int) -> int:
        path = tmp_path / str(number % 2) / "kernels.cpp"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            '#include "methods.h"\n'
            f"__attribute__((noinline)) inline int64_t scaled(int64_t x) {{ return {number} * x; }}\n"
            "static int64_t times(int64_t x) { return scaled(x); }\nKERNEL(times)\n"
        )
        return CppFile(path).times(5)

    try:
        assert [times(2), times(3), times(5), times(4)] == [10, 15, 25, 20]
    finally:
        del library.FILES[-4:]
