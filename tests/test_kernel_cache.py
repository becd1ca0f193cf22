"""What Numba has compiled is made anew when any file of kernels has changed, not only the one that it stands in."""

from __future__ import annotations

import os
from pathlib import Path

from kvbench.kernels.cache import forget_old_kernels


def test_a_changed_file_of_kernels_makes_the_kernels_that_call_it_compile_again(tmp_path: Path) -> None:
    def file(name: str, at: int) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        os.utime(path, (at, at))
        return path

    file("one/kernels/caller.py", 10)
    called = file("blocks/kernels.py", 20)
    file("one/method.py", 99)  # no kernels: its changes cost no compilation
    old, new = file("one/kernels/__pycache__/caller.nbi", 19), file("one/kernels/__pycache__/called.nbi", 21)
    data = file("one/kernels/__pycache__/caller.1.nbc", 19)  # another process could find it under a new index
    forget_old_kernels(tmp_path)
    assert not old.exists() and not data.exists() and new.exists()
    os.utime(called, (30, 30))
    forget_old_kernels(tmp_path)
    assert not new.exists()
    kept = file("one/kernels/__pycache__/called.nbi", 31)
    forget_old_kernels(tmp_path)
    assert kept.exists()
    (tmp_path / "one/lanes.py").write_text("@jit\ndef add(a, b): ...\n")  # compiled, whatever the file's name
    forget_old_kernels(tmp_path)
    assert not kept.exists()


def test_kernels_are_old_where_a_package_changed_whose_functions_they_call(tmp_path: Path) -> None:
    caller, called = tmp_path / "caller/__pycache__/kernels.nbi", tmp_path / "called/kernels.py"
    for path in (caller, called):
        path.parent.mkdir(parents=True)
        path.write_text("")
    os.utime(caller, (10, 10))
    forget_old_kernels(tmp_path / "caller")
    assert caller.exists()
    forget_old_kernels(tmp_path / "caller", tmp_path / "called")
    assert not caller.exists()
