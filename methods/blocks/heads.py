"""Work on every KV head, side by side in the worker pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
W = TypeVar("W")


def for_heads(
    pool: Executor,
    batch: int,
    kv_heads: int,
    workspaces: Sequence[W],
    do: Callable[[int, int, W], T],
) -> list[list[T]]:
    """do(row, head, workspace) for each KV head, in as many threads as there are workspaces; the
    caller's is one.

    A workspace serves one thread at a time; which heads it meets depends on the counts alone.

    Returns
    -------
    list[list[T]]
        [B][Hkv] what `do` returned.
    """
    pairs = [(row, head) for row in range(batch) for head in range(kv_heads)]
    threads = max(1, min(len(workspaces), len(pairs)))

    def share(number: int) -> list[T]:
        return [do(row, head, workspaces[number]) for row, head in pairs[number::threads]]

    waiting = [pool.submit(share, number) for number in range(1, threads)]
    shares = [share(0), *(future.result() for future in waiting)]
    done = [shares[at % threads][at // threads] for at in range(len(pairs))]
    return [done[first : first + kv_heads] for first in range(0, len(done), kv_heads)]


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
