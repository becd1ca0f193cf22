"""Time by span: where a step's milliseconds go, on a CPU and on a GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

PARTS = ("index_build", "index_update", "select", "transfer", "attention", "model", "other")
# The spans that end within a CUDA graph, and the events that note when.
GraphNotes = list[tuple[str, torch.cuda.Event]]


class Spans:
    """Exclusive time by name.

    A span inside another is taken off the outer one, so the parts add up.

        with spans("attention"):
            ...
            spans.then("select")
            ...

    On a CPU that is wall time. A GPU computes while the program goes on, so there the stream itself
    notes the time where a span begins and ends; where it stands still because the host is busy,
    that is time of the host's span. Of several GPUs one notes at a time, see `on`. A CUDA graph
    notes the times of its spans in each replay, see `of_graph`.

    Parameters
    ----------
    device
        what computes first; None: a CPU.

    Attributes
    ----------
    seconds
        time by name since `reset`, on a GPU as of the last `fold`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._named: dict[str, _Span] = {}
        self._open: list[str] = []
        self._since: Any = 0.0
        self._graph: GraphNotes | None = None  # those of the graph that is being captured
        # whose stream notes the time
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._noted: list[tuple[torch.device, str, torch.cuda.Event, torch.cuda.Event]] = []
        # events recorded since the last `fold`, and those to use again, which are a device's
        self._used: list[tuple[torch.device, torch.cuda.Event]] = []
        self._idle: dict[Any, list[torch.cuda.Event]] = defaultdict(list)

    def __call__(self, name: str) -> _Span:
        span = self._named.get(name)
        if span is None:
            span = self._named[name] = _Span(self, name)
        return span

    def then(self, name: str) -> None:
        """The innermost span ends here, and this one takes its place."""
        self._switch()
        self._open[-1] = name

    def reset(self) -> dict[str, float]:
        """Return the times so far and start from zero."""
        self.fold()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def on(self, device: torch.device) -> None:
        """What follows is computed by this GPU; what it did before this call, it did in no span."""
        if self._gpu is not None and device != self._gpu:
            self._switch()
            self._gpu = device
            self._since = self._note()

    @contextmanager
    def of_graph(self, notes: GraphNotes) -> Iterator[None]:
        """Meanwhile a graph is captured, whose events `notes` gets; they count once `replayed`."""
        self._graph = notes
        try:
            yield
        finally:
            self._graph = None

    def replayed(self, notes: GraphNotes) -> None:
        """The stream replays a graph, which notes these times."""
        for name, end in notes:
            if self._gpu is not None:
                self._noted.append((self._gpu, name, self._since, end))
                self._since = end

    def fold(self) -> None:
        """Read the times that the streams have noted; waits for them."""
        for end in {gpu: end for gpu, _, _, end in self._noted}.values():
            end.synchronize()
        for _, name, begin, end in self._noted:
            self.seconds[name] += begin.elapsed_time(end) / 1e3
        self._noted.clear()
        used, self._used = self._used, []
        for gpu, event in used:
            if event is self._since:
                self._used.append((gpu, event))
            else:
                self._idle[gpu].append(event)

    def _switch(self) -> None:
        if self._graph is not None:
            if self._gpu is not None:
                self._graph.append((self._open[-1], self._recorded(external=True)))
            return
        now: Any = time.perf_counter() if self._gpu is None else self._note()
        if self._open:
            if self._gpu is not None:
                self._noted.append((self._gpu, self._open[-1], self._since, now))
            else:
                self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def _note(self) -> torch.cuda.Event:
        idle = self._idle[self._gpu]
        event = self._recorded(idle.pop() if idle else None)
        assert self._gpu is not None
        self._used.append((self._gpu, event))
        return event

    def _recorded(self, event: torch.cuda.Event | None = None, **kind: bool) -> torch.cuda.Event:
        event = event or torch.cuda.Event(enable_timing=True, **kind)
        event.record(torch.cuda.current_stream(self._gpu))
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
