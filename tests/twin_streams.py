"""Streams, events and memory of the devices of `twin`: orders of operations, and who may use a storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from twin import Twin
    from twin_graphs import Graph

Clock = dict["Stream", int]  # of each stream, how many of its operations are known to be over

# A program may keep streams for longer than one `with`.
here: list[Twin] = []
streams: WeakSet[Stream] = WeakSet()
capturing: list[Graph] = []  # the graph that is being captured, if any
registered: dict[int, int] = {}  # bytes of host memory that was pinned after it was allocated, by address


def captures_here() -> bool:
    """Whether this thread captures; what others do meanwhile is theirs (`capture_error_mode="thread_local"`)."""
    return bool(capturing) and capturing[-1].thread == get_ident()


class Stream:
    """Twin of torch.cuda.Stream: counts its operations and knows which of the other streams' come before its next."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = the_device("cuda" if device is None else device)
        self.clock = {self: 0}
        self.freed: Clock = {}  # last uses, by other streams, of memory that this one may hand out again
        streams.add(self)

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        merged(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        merged(self.clock, stream.clock)

    def synchronize(self) -> None:
        here[-1].sync("Stream.synchronize", self.clock)

    def query(self) -> bool:
        return before(self.clock, here[-1].known)


class Event:
    """Twin of torch.cuda.Event; a graph records it if it is external."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._external = external
        self.timing, self.clock, self.at = enable_timing, dict[Stream, int](), 0.0
        self.device: torch.device | None = None  # that of its first stream

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or here[-1].stream()
        if self.device not in (None, stream.device):
            raise RuntimeError(f"the event is of {self.device}, and the stream of {stream.device}")
        self.device = stream.device
        if captures_here() and not self._external:
            self.clock = {}  # between operations of the graph alone
            return
        if captures_here():
            capturing[-1].nodes.append((self._record, (stream,), {}, []))
        self._record(stream)

    def _record(self, stream: Stream) -> None:
        stream.tick()
        self.clock, self.at = dict(stream.clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or here[-1].stream()).wait_event(self)

    def synchronize(self) -> None:
        here[-1].sync("Event.synchronize", self.clock)

    def query(self) -> bool:
        return before(self.clock, here[-1].known)

    def elapsed_time(self, end: Event) -> float:
        if not (self.timing and end.timing and self.clock and end.clock):
            raise ValueError("both events need enable_timing=True and must be recorded")
        if self.device != end.device:
            raise RuntimeError("no time passes between events of two devices")
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready: the events are not complete")
        return (end.at - self.at) * 1e3


def merged(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def before(clock: Clock, *others: Clock) -> bool:
    """Every operation of `clock` is over in one of the others."""
    return all(any(tick <= other.get(stream, 0) for other in others) for stream, tick in clock.items())


class Allocation:
    """The mark of a device storage: its size while it lives, and which streams have used it last."""

    def __init__(self, cuda: Twin, size: int, device: torch.device) -> None:
        self.cuda, self.device, self.size, self.home = cuda, device, 0, cuda.stream(device)
        self.recorded: set[Stream] = set()
        self.writes, self.reads = {self.home: self.home.tick()}, dict[Stream, int]()
        freed, self.home.freed = self.home.freed, {}
        if not cuda.ordered(freed, device):
            raise RuntimeError("memory is handed out again that another stream may still use: record_stream or a wait")
        self.size = size
        cuda.allocated += size
        cuda.peak, cuda.reserved = max(cuda.peak, cuda.allocated), max(cuda.reserved, cuda.allocated)

    def use(self, write: bool) -> None:
        """The current stream reads or writes; refuses what is not ordered after all that it must come after."""
        earlier = [self.writes, self.reads] if write else [self.writes]
        if not all(self.cuda.ordered(uses, self.device) for uses in earlier):
            raise RuntimeError("a stream meets another one's tensor without a wait between them")
        stream = self.cuda.stream(self.device)
        if write:
            self.writes, self.reads = {stream: stream.tick()}, {}
        else:
            self.reads[stream] = stream.tick()

    def __del__(self) -> None:
        self.cuda.allocated -= self.size
        for stream, tick in [*self.writes.items(), *self.reads.items()]:
            if stream is not self.home and stream not in self.recorded:
                merged(self.home.freed, {stream: tick})


class Flight(NamedTuple):
    """A copy that the host has not waited for: which operation of its stream, which way, and what waiting does."""

    stream: Stream
    tick: int
    up: bool
    land: Callable[[], object]


def the_device(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return here[-1].current
    if device.type == "cuda" and device.index >= here[-1].count:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
    return device
