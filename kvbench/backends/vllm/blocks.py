"""Layers whose blocks of the prompt vLLM frees once it is read, by its registry of kinds of memory.

Importing this registers them, in whichever process: that of the scheduler reads their names in the
worker's answer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

# vLLM registers its own kinds, unless there are some already
KVCacheSpecRegistry.check_kv_cache_spec_registry({})


class FreedPromptManager(FullAttentionManager):  # type: ignore[misc]
    """As of full attention, but that prompts are freed."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that hold nothing but the prompt, once its last token has been read.

        In that pass the worker has copied what the method keeps.
        """
        if num_prompt_tokens is not None and processed_computed_tokens >= num_prompt_tokens:
            self._remove_blocks_in_range(request_id, 0, num_prompt_tokens // self.block_size)


@register_kv_cache_spec(manager_class=FreedPromptManager)
@dataclass(frozen=True, kw_only=True)
class FreedPromptSpec(AttentionSpec):  # type: ignore[misc]
    """A layer's memory, of which the prompt's blocks are freed.

    While it is read it takes as much as any other.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Of one request."""
        pages: int = (
            cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes
        )
        return pages


def freed(spec: FullAttentionSpec) -> FreedPromptSpec:
    """The same memory, but that prompts are freed."""
    return FreedPromptSpec(
        **{field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
    )
