"""The blocks' C++ (`kernels.cpp`), and which tensors it reads."""

from __future__ import annotations

from pathlib import Path

import torch

from kvbench.kernels.library import CppFile

KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"))


def is_readable(tensor: torch.Tensor) -> bool:
    """Kernels can read it where it lies: on a CPU, float32 or bfloat16."""
    return is_compiled(tensor) and tensor.dtype in (torch.float32, torch.bfloat16)


def is_compiled(tensor: torch.Tensor) -> bool:
    """It is on a CPU, and kernels are there."""
    return tensor.device.type == "cpu" and KERNELS.why_missing is None
