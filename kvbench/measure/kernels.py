"""A bar while the kernels are compiled that runs need and nobody has compiled yet."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvbench.kernels import library
from kvbench.kernels.listed import compile_listed, missing, required_by
from kvbench.kernels.often import LINE_SECONDS
from kvbench.measure.arm import Setup


def compile_for(arms: Sequence[Setup], console: Console) -> None:
    """Compile what runs of one model need, before their time is taken."""
    load_library(console)
    kinds = {name for arm in arms for name in arm.config.kv.listed}
    dtype = str(arms[0].loaded.dtype).removeprefix("torch.")
    compile_kernels(
        required_by(dtype, {*kinds, *(arm.config.method.name for arm in arms)}), console
    )


def load_library(console: Console) -> None:
    """Load the kernels in C++, built first if nobody has built them, and say so, or why there are
    none.
    """
    if library.is_unbuilt():
        console.print("building kernels in C++, once: some seconds", soft_wrap=True)
    if (reason := library.why_missing()) is not None:
        console.print(f"attention=torch, which is slower: {reason}", soft_wrap=True)


def compile_kernels(numbers: Iterable[int], console: Console) -> int:
    """Compile those that nobody has, side by side, with a bar or a line now and then; how many
    these were.
    """
    uncompiled = missing(numbers)
    if not uncompiled:
        return 0
    drawn, line_at = console.is_terminal or console.is_jupyter, -math.inf
    count, remaining = (
        TextColumn("kernel {task.completed:.0f} of {task.total:.0f}"),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(
        count, BarColumn(), remaining, console=console, disable=not drawn, transient=True
    ) as bars:
        bar = bars.add_task("kernels", total=len(uncompiled), left="")

        def say(ready: int, seconds: float) -> None:
            nonlocal line_at
            remaining = f"some {seconds:.0f} s left"
            bars.update(bar, completed=ready, left=remaining)
            if not drawn and time.monotonic() - line_at >= LINE_SECONDS:
                line_at = time.monotonic()
                console.print(
                    f"compiling {len(uncompiled)} kernels, once: {ready} done, {remaining}",
                    soft_wrap=True,
                )

        compile_listed(uncompiled, say)
    return len(uncompiled)
