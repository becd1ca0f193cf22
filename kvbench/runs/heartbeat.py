"""Signs of life of a process that holds a run folder, which any machine can see. No torch.

A lock or a process id says only on its own machine whether the process lives. A file's time says it
on every machine that has mounted the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvbench.kernels.often import every
from kvbench.runs.folder import RunFolder

BEAT_SECONDS = 15.0
DEAD_SECONDS = 90.0  # without a sign of life; clocks of machines differ, and a busy one is late


@contextmanager
def beating(folders: Sequence[RunFolder]) -> Iterator[None]:
    """Give signs of life of these folders while the block runs."""

    def beat() -> None:
        for folder in folders:
            folder.beat()

    with every(BEAT_SECONDS, beat):
        yield
