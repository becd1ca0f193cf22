"""CUDA graphs of the twin: a captured step is repeated on the same memory with the same numbers, and no Python runs.

Refused while capturing, as CUDA does: a wait of the host, a copy between host and device. A replay runs the same
operations with the tensors that they had, and results go where they went; so a number or an address that should have
changed gives other results here as it does on a GPU. Memory of a graph is never handed out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twin_streams import Allocation, captures_here, capturing

# Operations that do nothing on the device.
SILENT = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("_unsafe_view", "_reshape_alias", "resize_", "set_"),
}


def refuse_capture(what: str) -> None:
    """Refuse what CUDA refuses while a stream is captured."""
    if captures_here():
        capturing[-1].refused = True
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def one_operation(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands for a kernel, which a graph repeats as a whole."""

    @wraps(kernel)
    def launch(*args: Any) -> Any:
        if not captures_here():
            return kernel(*args)
        graph = capturing[-1]
        graph.inside_kernel += 1
        try:
            out = kernel(*args)
        finally:
            graph.inside_kernel -= 1
        graph.nodes.append((kernel, args, {}, _tensors(out)))
        return out

    return launch


class Graph:
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        nodes: of each operation the function, its arguments, and the new tensors that it gave.
        thread: that captures it.
        inside_kernel: how many functions that stand for a kernel run now.
        refused: an operation was not permitted.
        overwritten: tensors, each with what it held before an operation wrote to it.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[tuple[Callable[..., Any], Any, dict[str, Any], list[torch.Tensor]]] = []
        self.inside_kernel = 0
        self.refused, self.thread = False, 0
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fresh: bool | None = None  # captured, and not yet replayed: the twin has run it already

    def pool(self) -> object:
        return self

    def end(self) -> None:
        if self.refused:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._fresh = True
        self.overwritten.clear()

    def undo(self) -> None:
        """The capture has failed, and the device has done nothing."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(), torch._C._DisableTorchDispatch():
            for tensor, before in reversed(self.overwritten):
                tensor.copy_(before)

    def replay(self) -> None:
        assert self._fresh is not None and not capturing, "a graph is replayed after its capture"
        if self._fresh:
            self._fresh = False
            return
        with torch._C.DisableTorchFunction(), torch.inference_mode(), torch._C._DisableTorchDispatch():
            for func, args, kwargs, outs in self.nodes:
                for old, new in zip(outs, _tensors(func(*args, **kwargs)), strict=False):
                    assert old.shape == new.shape and old.dtype == new.dtype
                    old.copy_(new)


class _Capture(TorchDispatchMode):
    """Notes the operations on device tensors."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            named = zip(func._schema.arguments, args, strict=False)
            written = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
            self.graph.overwritten += [(tensor, tensor.clone()) for tensor in _tensors(written)]
        out = func(*args, **kwargs)
        if self.graph.inside_kernel or func._opname in SILENT:
            return out
        given = _tensors((args, kwargs))
        if given and not any(isinstance(getattr(t.untyped_storage(), "twin", None), Allocation) for t in given):
            return out  # of the host
        before = {tensor.untyped_storage()._cdata for tensor in given}
        shared = any(tensor.untyped_storage()._cdata in before for tensor in _tensors(out))
        if func._schema.is_mutable or not shared:
            self.graph.nodes.append((func, args, kwargs, [] if shared else _tensors(out)))
        return out


@contextlib.contextmanager
def graph(
    cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    assert not capturing, "one capture at a time"
    cuda_graph.thread = get_ident()
    capturing.append(cuda_graph)
    try:
        with _Capture(cuda_graph):
            yield
    finally:
        capturing.pop()
        if cuda_graph.refused:
            cuda_graph.undo()
    cuda_graph.end()


def _tensors(thing: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]
