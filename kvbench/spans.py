"""Time by span: where a step's milliseconds go, on a CPU and on a GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

PARTS = ("index_build", "index_update", "select", "transfer", "attention", "model", "other")


class Spans:
    """Exclusive time by name: a span inside another is taken off the outer one, so the parts add up.

        with spans("attention"):
            ...

    On a CPU that is wall time. A GPU computes behind the program's back, so there the stream itself notes the time
    where a span begins and ends; where it stands still because the host is busy, that is time of the host's span.

    Args:
        device: what computes; None: a CPU.

    Attributes:
        seconds: time by name since `reset`, on a GPU as of the last `fold`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since: Any = 0.0
        self._on_stream = device is not None and device.type == "cuda"
        self._noted: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._idle: list[torch.cuda.Event] = []  # events to use again

    def __call__(self, name: str) -> _Span:
        return _Span(self, name)

    def reset(self) -> dict[str, float]:
        """Return the times so far and start from zero."""
        self.fold()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def fold(self) -> None:
        """Read the times that the stream has noted; waits for it."""
        if not self._noted:
            return
        self._noted[-1][2].synchronize()
        for name, start, end in self._noted:
            self.seconds[name] += start.elapsed_time(end) / 1e3
        over = {id(event): event for _, *ends in self._noted for event in ends if event is not self._since}
        self._idle.extend(over.values())
        self._noted.clear()

    def _switch(self) -> None:
        now: Any = self._note() if self._on_stream else time.perf_counter()
        if self._open:
            if self._on_stream:
                self._noted.append((self._open[-1], self._since, now))
            else:
                self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def _note(self) -> torch.cuda.Event:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class _Span:
    spans: Spans
    name: str

    def __enter__(self) -> None:
        self.spans._switch()
        self.spans._open.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.spans._switch()
        self.spans._open.pop()
