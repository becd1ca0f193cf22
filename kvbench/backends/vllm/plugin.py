"""vLLM's entry point (group `vllm.general_plugins`): loaded in every process of every vLLM beside which kvbench is."""

from __future__ import annotations

import sys
from typing import Any

BACKEND = "kvbench.backends.vllm.backend.Backend"


def register() -> None:
    """Have vLLM's CPU attention go through kvbench, which changes nothing in an engine that names no method."""
    from vllm.triton_utils import dispatcher
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    if dispatcher._rebind_kernels is not _rebind_kernels:
        _vllms.append(dispatcher._rebind_kernels)
        dispatcher._rebind_kernels = _rebind_kernels


_vllms: list[Any] = []  # its own function


def _rebind_kernels(overrides: Any) -> None:
    """vLLM's, which asks every object of every module for its attributes, and fails at llvmlite's library.

    That object has whatever attribute it is asked for. Here kvbench has imported it before, for its own kernels.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
    try:
        _vllms[0](overrides)
    finally:
        sys.modules.update(hidden)
