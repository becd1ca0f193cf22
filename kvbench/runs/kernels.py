"""Which kernels runs need, and a bar while the missing ones are compiled.

`methods/kernels.json` lists the kernels that each method of kvbench calls, as `scripts/list_kernels.py` found them.
What it does not list, such as those of a method of one's own, is compiled when it is first called.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

import methods
from kvbench.kernels.build import Job, build
from kvbench.measure.arm import Setup
from kvbench.memory.kinds import kv_in
from kvbench.runs.terminal import Console

SHARED = "full"  # the method whose kernels all others call, too


@functools.cache
def listed() -> tuple[list[Job], dict[str, dict[str, list[int]]]]:
    """All kernels of the list; and by dtype and name, of a method or `kv=` of a kind, the numbers of those it needs."""
    found = json.loads(Path(methods.__path__[0], "kernels.json").read_text())
    return [Job(name, kinds, seconds, tuple(calls)) for name, kinds, seconds, calls in found["kernels"]], found["used"]


def needed_by(dtype: str, names: Iterable[str]) -> list[int]:
    """The numbers of the kernels that runs of methods and kinds of keys and values need, and those that these call."""
    jobs, used = listed()
    found: set[int] = set()
    for name in (SHARED, *names):
        found.update(used.get(dtype, {}).get(name, ()))
    for number in sorted(found, reverse=True):
        found.update(jobs[number].calls)
    return sorted(found)


def compile_for(arms: Sequence[Setup], console: Console) -> None:
    """Compile what runs of one model need, before their time is taken; a GPU's arms need what selects on the CPU."""
    kinds = {f"kv={kind}" for arm in arms for kind in kv_in(arm.config)}
    dtype = str(arms[0].loaded.dtype).removeprefix("torch.")
    compile_kernels(needed_by(dtype, {*kinds, *(arm.config["method"]["name"] for arm in arms)}), console)


def compile_kernels(numbers: Iterable[int], console: Console) -> int:
    """Compile those that are not on disk, side by side, with a bar; how many these were."""
    jobs, _ = listed()
    missing = [number for number in numbers if jobs[number].missing()]
    if not missing:
        return 0
    drawn = console.is_terminal or console.is_jupyter
    if not drawn:
        console.print(f"{len(missing)} kernels are compiled, once")
    columns = (
        TextColumn("kernel {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, disable=not drawn, transient=True) as bars:
        bar = bars.add_task("kernels", total=len(missing), left="compiled once")

        def say(ready: int, seconds: float) -> None:
            bars.update(bar, completed=ready, left=f"some {timedelta(seconds=round(seconds))} left" if seconds else "")

        build(jobs, missing, say)
    return len(missing)
