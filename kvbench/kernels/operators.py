"""Operators: what a GPU computes in one launch, for `memory/` and for methods.

Each is written twice: in torch, which says what it computes, and as a Triton kernel, which a GPU
runs. It is an operator of torch, so that a CUDA graph captures it and whatever counts operations
counts one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

_LIBRARY = torch.library.Library("kvbench", "DEF")


class Operator:
    """An operator of torch, called as the function that says what it computes.

    Parameters
    ----------
    reference
        in torch, with types on all parameters. What it returns is new: no view of an argument.
    kernels
        the module that launches the kernel, in a function of the same name and parameters; it may
        import Triton, as it is imported when a GPU needs it. Lengths are tensors there, too: it
        looks at no number on the device.
    writes
        names of the parameters that are written in place.
    """

    def __init__(
        self, reference: Callable[..., Any], kernels: str, writes: Sequence[str] = ()
    ) -> None:
        self.reference, self._kernels = reference, kernels
        self.name, self.__doc__ = reference.__name__, reference.__doc__
        schema = torch.library.infer_schema(reference, mutates_args=writes)
        _LIBRARY.define(f"{self.name}{schema}")
        _LIBRARY.impl(self.name, reference, "CPU")
        _LIBRARY.impl(self.name, self._on_gpu, "CUDA")
        self._operator = getattr(torch.ops.kvbench, self.name).default

    def __call__(self, *args: Any) -> Any:
        """Compute on the device of the tensors; on a CPU past torch's dispatcher, which would take
        as long as a small reference.
        """
        if next(part for part in args if isinstance(part, torch.Tensor)).is_cpu:
            return self.reference(*args)
        return self._operator(*args)

    def launch(self, *args: Any) -> Any:
        """Compute by the Triton kernel, on the current device or in Triton's interpreter."""
        return getattr(import_module(self._kernels), self.name)(*args)

    def _on_gpu(self, *args: Any) -> Any:
        here = next(part.device for part in args if isinstance(part, torch.Tensor) and part.is_cuda)
        with torch.cuda.device(here):
            return self.launch(*args)


def operator(kernels: str, writes: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """A decorator that makes an operator of its reference in torch; see `Operator`."""
    return lambda reference: Operator(reference, kernels, writes)
