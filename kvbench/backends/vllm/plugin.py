"""vLLM's entry point (group `vllm.general_plugins`), loaded in every process of every vLLM."""

from __future__ import annotations

BACKEND = "kvbench.backends.vllm.backend.Backend"


def register() -> None:
    """Have vLLM's CPU attention go through kvbench.

    In an engine that names no method nothing changes.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
