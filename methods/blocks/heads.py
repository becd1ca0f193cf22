"""Work on KV heads, side by side in the worker pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
W = TypeVar("W")


def in_threads(
    pool: Executor, count: int, workspaces: Sequence[W], do: Callable[[int, int, W], T]
) -> list[T]:
    """do(first, stop, workspace) over all of `count` heads, in as many threads as there are
    workspaces.

    For work that needs no Python for a single head. The caller's thread is one of them.

    Returns
    -------
    list[T]
        what `do` returned, in the order of the heads.
    """
    threads = max(1, min(len(workspaces), count))
    ends = [count * number // threads for number in range(threads + 1)]
    waiting = [pool.submit(do, ends[at], ends[at + 1], workspaces[at]) for at in range(1, threads)]
    return [do(0, ends[1], workspaces[0]), *(future.result() for future in waiting)]
