"""CUDA devices that are not there, for tests without a GPU: `with twin.device() as cuda: ...`, or `device(2)` for two.

Tensors of a device are CPU tensors whose storage carries a mark. A torch function mode sees every call from Python,
answers `.device` and its like by the mark, refuses what CUDA refuses, computes on the CPU (the same bits as for CPU
tensors), and marks the results. A dispatch mode below it sees the ATen operations of a call, to count host syncs and to
follow which stream reads and writes what.

Modelled: devices that must not mix; host syncs, by a list of operations; streams and events, as partial orders; copies
that are not done before something waits for them; device memory, by living storages, of all devices
together. Nothing is asynchronous in fact: work runs at once, and what CUDA leaves to chance is decided against the
program.
- Two streams that meet in one tensor without a wait between them, or in freed memory that a stream hands out again:
  RuntimeError at the second one.
- A copy down into pinned memory: poison (NaN, or the smallest integer) until the host has waited for it.
- A copy up from pinned memory: if the host has written there before it waited for the copy, AssertionError as it waits,
  or at the end of the `with`.
`cuda.finish()` is time passing: all that is in flight completes, and no wait is counted.

CUDA graphs: see `twin_graphs`; which streams a replay uses is not followed.

Not modelled: kernels, their numerics and their time, autograd. Memory is counted
without rounding. A syncing operation that is not in `SYNCING` goes unseen, as does what reads or writes memory behind
torch's back: numpy, and kernels of our own, for which `cuda.kernel` stands in; for the one that reads rows of host
memory it does so from the start, and refuses tensors of another device than the current one, as Triton's launch does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from twin_graphs import Graph, graph, one_operation, refuse_capture
from twin_streams import Allocation, Clock, Event, Flight, Stream, before, here, merged, registered, streams, the_device

from kvbench.memory import transfer
from kvbench.memory.transfer import side_stream

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")  # the first device, and the host
CAPACITY = 80 << 30  # bytes of device memory that the device claims to have
INSIDE = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).with_suffix("")),
)  # beginnings of files that no sync is noted in

# ATen operations for which the host waits, since it needs a value or the size of their result.
SYNCING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "isin", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
# Calls that give a number of Python.
NUMBERS = ("item", "__bool__", "__int__", "__float__", "__index__", "__format__")
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Calls that use of the other tensor its shape or kind only, and calls for which one of 0 dimensions is no scalar.
SHAPE_ONLY = {"expand_as", "view_as", "reshape_as", "is_same_size", "_has_compatible_shallow_copy_type"}
JOINING = {"cat", "concat", "stack", "hstack", "vstack"}
# Functions of torch.cuda that have nothing to do here.
IDLE = {
    *("_lazy_init", "init", "set_device", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"),
    *("check_error",),
}


# -- streams -----------------------------------------------------------------------------------------------------------


# -- the device --------------------------------------------------------------------------------------------------------


class Twin(TorchFunctionMode):
    """The devices, as `device()` gives them.

    Args:
        count: how many there are.

    Attributes:
        syncs: (operation, "file:line") of every time the host waited.
        allocated, peak: bytes of the living device storages, now and at most.
        reserved: what torch has taken from the devices, of which it gives nothing back.
        known: of each stream, the operations that the host knows to be over.
    """

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.count = count
        self.syncs: list[tuple[str, str]] = []
        self.allocated = self.peak = self.reserved = 0
        self.known: Clock = {}
        here.append(self)
        self.defaults = {at: Stream(at) for at in (torch.device("cuda", index) for index in range(count))}
        self._local = threading.local()
        self._flights: list[Flight] = []
        self._landing = threading.Lock()
        self._forbidden = False

    @property
    def current(self) -> torch.device:
        """The current device of this thread."""
        return getattr(self._local, "device", CUDA)

    @property
    def default(self) -> Stream:
        """The current device's stream, where nobody has set another."""
        return self.defaults[self.current]

    def stream(self, device: Any = None) -> Stream:
        """The current stream of a device, the current one by default, in this thread."""
        at = self.current if device is None else the_device(device)
        return self._streams.get(at, self.defaults[at])

    @property
    def _streams(self) -> dict[torch.device, Stream]:
        return self._local.__dict__.setdefault("streams", {})

    def set_stream(self, stream: Stream) -> None:
        self._local.device, self._streams[stream.device] = stream.device, stream

    @contextlib.contextmanager
    def use_device(self, device: Any) -> Iterator[None]:
        before, self._local.device = self.current, self.current if device is None else the_device(device)
        try:
            yield
        finally:
            self._local.device = before

    @contextlib.contextmanager
    def use_stream(self, stream: Stream | None) -> Iterator[None]:
        with self.use_device(stream and stream.device):
            before = self.stream()
            self.set_stream(stream or before)
            try:
                yield
            finally:
                self.set_stream(before)

    def ordered(self, uses: Clock, device: torch.device) -> bool:
        """The next operation of the device's current stream comes after all of these."""
        return before(uses, self.stream(device).clock, self.known)

    def sync(self, name: str, clock: Clock) -> None:
        """The host waits for these operations; notes where."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename.startswith(INSIDE):
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        refuse_capture(f"{name} at {where}")
        self.syncs.append((name, where))
        if self._forbidden:
            raise RuntimeError(f"{name} at {where}: the host waits for the device")
        self._complete(clock)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Refuse every sync inside."""
        before, self._forbidden = self._forbidden, True
        try:
            yield
        finally:
            self._forbidden = before

    def synchronize(self, device: Any = None) -> None:
        self.sync("cuda.synchronize", self.stream(device).clock)
        self.finish()

    def finish(self) -> None:
        """Complete all that is in flight, as time would."""
        for stream in list(streams):
            self._complete(stream.clock)

    def _complete(self, clock: Clock) -> None:
        merged(self.known, clock)
        self._land(lambda flight: flight.tick <= self.known.get(flight.stream, 0))

    def _land(self, there: Callable[[Flight], bool]) -> None:
        with self._landing, torch.inference_mode():  # which may write to what was made inside it, in any thread
            landed = [flight for flight in self._flights if there(flight)]
            self._flights = [flight for flight in self._flights if flight not in landed]
            for flight in landed:
                flight.land()

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """target.copy_(source), from the host to a device, from there to the host, or between two devices."""
        if not source.numel():
            return target
        if on_device(target) and on_device(source):
            ends = [(end, self.stream(device_of(end))) for end in (target, source)]
            for _, stream in ends:  # torch has each of the two wait for the other
                merged(stream.clock, {**ends[0][1].clock, **ends[1][1].clock})
            for end, _ in ends:
                end.untyped_storage().twin.use(write=end is target)
            return target.copy_(source)
        refuse_capture("a copy between host and device")
        up = on_device(target)
        here = (target if up else source).untyped_storage().twin
        here.use(write=up)
        stream = self.stream(here.device)
        if not (non_blocking and is_pinned(source if up else target)):
            self.sync("copy up" if up else "copy down", stream.clock)
            return target.copy_(source)
        before = source.clone()

        def check() -> None:
            now, then = (side.contiguous().view(-1).view(torch.uint8) for side in (source, before))
            assert torch.equal(now, then), "pinned memory was overwritten while a copy from it might be in flight"

        self._flights.append(Flight(stream, stream.tick(), up, check if up else lambda: target.copy_(before)))
        return target.copy_(source if up else _poison(before))

    def move(self, source: torch.Tensor, device: torch.device, non_blocking: bool, **layout: Any) -> torch.Tensor:
        """A copy on the other side; what comes down without blocking comes into pinned memory, as CUDA has it."""
        target = torch.empty_like(source, **layout)
        if device.type == "cuda":
            self.mark(target, device)
        elif non_blocking:
            target.untyped_storage().twin = "pinned"
        return self.copy(target, source, non_blocking)

    def mark(self, tensor: torch.Tensor, device: torch.device) -> None:
        """This tensor's storage is on a device."""
        if not on_device(tensor):
            storage = tensor.untyped_storage()
            storage.twin = Allocation(self, storage.nbytes(), device)

    def kernel(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` instead of a kernel of our own, which may read pinned memory from the device.

        It finds there what was copied down on its stream, or on one that its stream has waited for.
        """

        def launch(*args: Any) -> Any:
            places = {device_of(one) for one in _tensors(args) if on_device(one)}
            if places != {self.current}:
                raise RuntimeError(f"a kernel is launched on {self.current} with tensors of {places}")
            self._land(lambda flight: not flight.up and self.ordered({flight.stream: flight.tick}, self.current))
            with torch._C.DisableTorchFunction():
                return self.call(func, args, {}, mixes=True)

        return launch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (handler := HANDLERS.get(func)) is not None:
            return handler(self, func, *args, **kwargs)
        return func(*args, **kwargs) if func.__name__ in ("__get__", "__set__") else self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], mixes: bool = False) -> Any:
        """Compute on the CPU; `mixes`: the call may be given tensors of both sides."""
        asked = kwargs.get("device")
        if asked is not None:
            asked = the_device(asked)
            kwargs["device"] = CPU if asked.type == "cuda" else asked
        pinned, tensors = kwargs.pop("pin_memory", False), [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        there = {device_of(tensor) for tensor in tensors if on_device(tensor)}
        if not there:
            out = func(*args, **kwargs)
        elif len(there) > 1 and func.__name__ not in SHAPE_ONLY:
            raise RuntimeError(
                f"{func.__name__}: expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(map(str, there)))}!"
            )
        else:
            least = 0 if func.__name__ in JOINING else 1
            mixes = mixes or func.__name__ in SHAPE_ONLY
            if not mixes and any(tensor.dim() >= least and on_host(tensor) for tensor in tensors):
                raise RuntimeError(
                    f"{func.__name__}: expected all tensors to be on the same device, but found at least two devices, "
                    f"{next(iter(there))} and cpu!"
                )
            with _Watch(self, tensors):
                out = func(*args, **kwargs)
        at = asked if asked is not None else device_of(next(filter(on_device, tensors))) if there else CPU
        if at.type == "cuda":
            for tensor in _tensors(out):
                if not tensor.is_meta:
                    self.mark(tensor, at)
        elif pinned:
            out.untyped_storage().twin = "pinned"
        return out


class _Watch(TorchDispatchMode):
    """Sees the ATen operations of one call on device tensors: counts syncs, and notes who reads and writes what."""

    def __init__(self, cuda: Twin, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.cuda = cuda
        self.stream = cuda.stream(device_of(next(filter(on_device, tensors))))
        self.host = {tensor.untyped_storage()._cdata for tensor in tensors if on_host(tensor)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for at, name, write in _accesses(func):
            for tensor in _tensors(args[at] if at < len(args) else kwargs.get(name)):
                if on_device(tensor):
                    tensor.untyped_storage().twin.use(write)
        out = func(*args, **kwargs)
        name = func._opname
        if name in SYNCING and args[0].untyped_storage()._cdata not in self.host:
            self.cuda.sync(name, self.stream.clock)
        elif name in INDEXING and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
            self.cuda.sync(f"{name} with a mask", self.stream.clock)
        elif func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.cuda.sync(name, self.stream.clock)
        return out


@cache
def _accesses(func: Any) -> list[tuple[int, str, bool]]:
    """Place, name and whether it is written, of each tensor that an operation does more with than view it."""
    return [
        (at, argument.name, argument.alias_info is not None)
        for at, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type) and (argument.alias_info is None or argument.alias_info.is_write)
    ]


# -- what the function mode answers itself -----------------------------------------------------------------------------


def _to(cuda: Twin, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and isinstance(args[0], torch.Tensor):
        other, *rest = args
        kwargs |= {"dtype": other.dtype, **dict(zip(("non_blocking", "copy"), rest, strict=False))}
        args = (device_of(other),)
    if args and isinstance(args[0], int):
        args = (the_device(args[0]), *args[1:])
    always = kwargs.pop("copy", False)
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    wanted: dict[str, Any] = {"dtype": tensor.dtype if dtype is None else dtype}
    if layout is not None:
        wanted["memory_format"] = layout
    device = the_device(device) if device is not None else None
    if device is None or "meta" in (device.type, tensor.device.type) or device_of(tensor) == device:
        return cuda.call(func, (tensor,), {**wanted, "device": device, "copy": always})
    return cuda.move(tensor, device, non_blocking, **wanted)


def _up(cuda: Twin, func: Any, tensor: torch.Tensor, device: Any = "cuda", non_blocking: bool = False) -> torch.Tensor:
    return _to(cuda, torch.Tensor.to, tensor, device, non_blocking=non_blocking)


def _copy(cuda: Twin, func: Any, target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    if device_of(target) == device_of(source):
        return cuda.call(func, (target, source), {})
    return cuda.copy(target, source, non_blocking)


def _getitem(cuda: Twin, func: Any, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    _check_index(cuda, tensor, index)
    return cuda.call(func, (tensor, index), {}, mixes=True)


def _setitem(cuda: Twin, func: Any, tensor: torch.Tensor, index: Any, value: Any, *args: Any) -> Any:
    _check_index(cuda, tensor, index)
    if isinstance(value, torch.Tensor) and value.dim() and device_of(value) != device_of(tensor):
        if any(one.dim() for one in _tensors(index)):
            both = sorted([str(device_of(value)), str(device_of(tensor))], reverse=True)
            raise RuntimeError(
                f"index_put_: expected values on the same device as self, but found {' and '.join(both)}"
            )
        return cuda.copy(tensor[index], value)
    return cuda.call(func, (tensor, index, value, *args), {}, mixes=True)


def _check_index(cuda: Twin, tensor: torch.Tensor, index: Any) -> None:
    """A device tensor may be indexed from the host, and waits for the index to come up; not the other way round."""
    indices = [one for one in _tensors(index) if one.dim()]
    if on_device(tensor):
        parts = index if isinstance(index, tuple) else (index,)
        lists = any(hasattr(part, "__len__") and not isinstance(part, torch.Tensor) for part in parts)
        edges = [edge for part in parts if isinstance(part, slice) for edge in (part.start, part.stop, part.step)]
        for edge in filter(on_device, _tensors(edges) if torch.is_inference_mode_enabled() else []):
            cuda.sync("slice", cuda.stream(device_of(edge)).clock)
        if lists or any(map(on_host, indices)):
            cuda.sync("indexing from the host", cuda.stream(device_of(tensor)).clock)
    elif any(map(on_device, indices)):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")


def _from_data(cuda: Twin, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if func == torch.Tensor.new_tensor:
        like, *args = args
        kwargs = {"dtype": like.dtype, "device": device_of(like), **kwargs}
    data = args[0] if args else kwargs["data"]
    device = kwargs.pop("device", None)
    if not isinstance(data, torch.Tensor):
        return _to(
            cuda, torch.Tensor.to, cuda.call(torch.tensor, args, kwargs, mixes=True), CPU if device is None else device
        )
    always = func not in (torch.as_tensor, torch.asarray) or bool(kwargs.get("copy"))
    return _to(cuda, torch.Tensor.to, data, device, kwargs.get("dtype"), copy=always)


def _numpy(cuda: Twin, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if on_device(tensor):
        raise TypeError(f"can't convert {device_of(tensor)} device type tensor to numpy. Use Tensor.cpu() first.")
    return func(tensor, *args, **kwargs)


def _number(cuda: Twin, func: Any, tensor: torch.Tensor, *args: Any) -> Any:
    """Of one element; in inference mode no operation is dispatched for it."""
    if on_device(tensor):
        tensor.untyped_storage().twin.use(write=False)
        cuda.sync(func.__name__.strip("_"), cuda.stream(device_of(tensor)).clock)
    return func(tensor, *args)


def _tolist(cuda: Twin, func: Any, tensor: torch.Tensor) -> Any:
    return func(_to(cuda, torch.Tensor.to, tensor, CPU))


def _pin_memory(cuda: Twin, func: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if on_device(tensor):
        raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be pinned")
    if is_pinned(tensor):
        return tensor
    pinned = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)  # refused if expanded
    pinned.untyped_storage().twin = "pinned"
    return pinned


def _says(answer: Callable[[torch.device], Any]) -> Callable[..., Any]:
    """What a tensor of a device answers; a CPU tensor answers itself."""
    return lambda cuda, func, tensor, *args: answer(device_of(tensor)) if on_device(tensor) else func(tensor, *args)


HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device.__get__: _says(lambda device: device),
    torch.Tensor.is_cuda.__get__: _says(lambda device: True),
    torch.Tensor.is_cpu.__get__: _says(lambda device: False),
    torch.Tensor.get_device: _says(lambda device: device.index),
    torch.Tensor.is_pinned: lambda cuda, func, tensor, device=None: is_pinned(tensor),
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda cuda, func, tensor, **layout: _to(cuda, torch.Tensor.to, tensor, CPU, **layout),
    torch.Tensor.cuda: _up,
    torch.Tensor.copy_: _copy,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.tolist: _tolist,
    **dict.fromkeys((getattr(torch.Tensor, name) for name in NUMBERS), _number),
    torch.Tensor.__getitem__: _getitem,
    **dict.fromkeys((torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.Tensor.index_put), _setitem),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor), _from_data),
}


# -- small things ------------------------------------------------------------------------------------------------------


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and isinstance(getattr(tensor.untyped_storage(), "twin", None), Allocation)


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.untyped_storage().twin.device if on_device(tensor) else CPU


def on_host(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, CausalBias) or on_device(tensor))


def is_pinned(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    later = any(0 <= storage.data_ptr() - first < size for first, size in registered.items())
    return later or getattr(storage, "twin", None) == "pinned"


def _tensors(thing: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [tensor for part in thing for tensor in _tensors(part)] if isinstance(thing, (list, tuple)) else []


def _poison(like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bool:
        return ~like
    return torch.full_like(like, torch.nan if like.is_floating_point() else torch.iinfo(like.dtype).min)


class _Generator(torch.Generator):
    """A generator of any device draws the CPU's numbers."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


@contextlib.contextmanager
def device(count: int = 1) -> Iterator[Twin]:
    """Inside, torch has so many CUDA devices; the worker threads of thread pools have them too."""
    cuda, submit = Twin(count), ThreadPoolExecutor.submit

    def submit_inside(pool: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def inside() -> Any:
            with cuda:
                return job(*args, **kwargs)

        return submit(pool, inside)

    properties = SimpleNamespace(name="twin", total_memory=CAPACITY, major=9, minor=0, multi_processor_count=1)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: registered.update({pointer: size}),
        cudaHostUnregister=registered.pop,
    )
    patched = {
        **{name: lambda *_, **__: None for name in IDLE},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: count,
        "current_device": lambda: cuda.current.index,
        "device": cuda.use_device,
        "get_device_name": lambda device=None: "twin",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "cudart": lambda: runtime,
        "Stream": Stream,
        "Event": Event,
        "stream": cuda.use_stream,
        "set_stream": cuda.set_stream,
        "current_stream": cuda.stream,
        "default_stream": lambda device=None: cuda.defaults[cuda.current if device is None else the_device(device)],
        "synchronize": cuda.synchronize,
        "memory_allocated": lambda device=None: cuda.allocated,
        "max_memory_allocated": lambda device=None: cuda.peak,
        "memory_reserved": lambda device=None: cuda.reserved,
        "reset_peak_memory_stats": lambda device=None: setattr(cuda, "peak", cuda.allocated),
        "CUDAGraph": Graph,
        "graph": graph,
        "mem_get_info": lambda device=None: (CAPACITY - cuda.reserved, CAPACITY),
    }
    kernel = one_operation(cuda.kernel(transfer.fetch.reference))
    fetched = lambda _, func, *args: (kernel if on_device(args[0]) else transfer.fetch.reference)(*args)  # noqa: E731
    record_stream = lambda tensor, stream: tensor.untyped_storage().twin.recorded.add(stream)  # noqa: E731
    with (
        mock.patch.multiple(torch.cuda, **patched),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(transfer, "_free", defaultdict(list)),  # what is pinned here is so nowhere else
        mock.patch.dict(HANDLERS, {torch.ops.kvbench.fetch.default: fetched}),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
        mock.patch.object(ThreadPoolExecutor, "submit", submit_inside),
        cuda,
    ):
        side_stream.cache_clear()
        try:
            yield cuda
            cuda.finish()
        finally:
            here.pop()
            registered.clear()
            side_stream.cache_clear()
