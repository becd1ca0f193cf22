"""Which kernels each method calls, so that they can be compiled before it does.

`conf/kernels.json` has them, as `scripts/list_kernels.py` found them. What it does not list, such
as those of a method of one's own, is compiled when it is first called.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable

from kvbench.config import conf_dir
from kvbench.kernels.build import Job, build

SHARED = "full"  # the method whose kernels all others call, too


@functools.cache
def listed() -> tuple[list[Job], dict[str, dict[str, list[int]]]]:
    """All kernels of the list; and by dtype and name, of a method or `kv=` of a kind, the numbers
    of those it needs.
    """
    kernels = json.loads((conf_dir() / "kernels.json").read_text())
    return [
        Job(name, kinds, seconds, tuple(calls))
        for name, kinds, seconds, calls in kernels["kernels"]
    ], kernels["used"]


def required_by(dtype: str, names: Iterable[str]) -> list[int]:
    """The numbers of the kernels that methods, and kinds of keys and values, need in a dtype."""
    jobs, used = listed()
    numbers: set[int] = set()
    for name in (SHARED, *names):
        numbers.update(used.get(dtype, {}).get(name, ()))
    for number in sorted(numbers, reverse=True):
        numbers.update(jobs[number].calls)
    return sorted(numbers)


def missing(numbers: Iterable[int]) -> list[int]:
    """Those of them that are to be compiled."""
    return [number for number in numbers if listed()[0][number].missing()]


@functools.cache
def compile_silently(dtype: str, *names: str) -> None:
    """Compile what `required_by` lists and nobody has compiled, where no bar can be drawn."""
    compile_listed(missing(required_by(dtype, names)))


def compile_listed(
    numbers: Iterable[int], say: Callable[[int, float], None] = lambda ready, seconds: None
) -> None:
    """Compile these; see `kvbench.kernels.build.build`."""
    build(listed()[0], list(numbers), say)
