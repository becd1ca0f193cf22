"""Compile operators' kernels for GPUs that are not here, down to their machine code; prints a line for each.

The first case of each operator for sm_80 and the largest for sm_90; `all` of them, or those of operators by name.

`tests/test_operators.py` runs it. A driver that only names the GPU stands for CUDA's.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

import torch
from operator_cases import calls
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED = 96 << 10  # bytes that a program may take on either GPU


class Absent:
    """The driver of a GPU of this compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what was compiled is kept by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


run = JITFunction.run


def compiled(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Instead of a launch."""
    began = time.monotonic()
    kernel = run(function, *args, grid=grid, warmup=True, **options)
    code = kernel.asm["cubin"]
    assert code and kernel.metadata.shared <= 96 << 10, (
        f"{function.__name__}: {kernel.metadata.shared} bytes of shared memory"
    )
    print(
        f"  {function.__name__}: {len(code)} bytes, shared {kernel.metadata.shared}, {time.monotonic() - began:.1f} s"
    )
    return kernel


def main() -> None:
    with mock.patch.object(JITFunction, "run", compiled):
        for capability in (80, 90):
            driver.set_active(Absent(capability))
            seen = set[str]()
            for call in calls():
                name = call.operator.name
                first, named = name not in seen, name in sys.argv[1:]
                seen.add(name)
                if named or "all" in sys.argv[1:] or (not sys.argv[1:] and (first if capability == 80 else call.large)):
                    print(f"sm_{capability} {name} {call.id}")
                    call.operator.launch(*call.arguments())


if __name__ == "__main__":
    main()
