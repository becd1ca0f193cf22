"""vLLM's CPU attention, but for what a method selects.

With `worker.py` all that knows how its engine runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from kvbench.backends.vllm.paged import Memory
from kvbench.backends.vllm.requests import Requests, Scheduled
from kvbench.config import ConfigError


class WorkerPass:
    """A forward pass of the worker's model runner: what it computes of which request.

    Parameters
    ----------
    runner
        vLLM's, which has decided by the time of the first attention.
    requests
        that kvbench knows.

    Attributes
    ----------
    current
        the pass that is going on; None: one that no method is in, such as vLLM's own trials.
    """

    current: WorkerPass | None = None

    def __init__(self, runner: Any, requests: Requests) -> None:
        self.requests, self._runner = requests, runner
        self._begun = False
        self._parts: dict[tuple[int, ...], tuple[torch.Tensor, CPUAttentionMetadata]] = {}

    def __enter__(self) -> WorkerPass:
        WorkerPass.current = self
        return self

    def __exit__(self, *error: object) -> None:
        WorkerPass.current = None
        if self._begun and error[0] is None:
            state = self._runner.execute_model_state  # None: nothing is to be drawn
            self.requests.end_pass(None if state is None else state.logits)

    def begin(self, metadata: CPUAttentionMetadata) -> None:
        """The first layer's attention: who is in the batch, in which row."""
        if self._begun:
            return
        self._begun = True
        self.starts = metadata.query_start_loc.tolist()
        batch, states = self._runner.input_batch, self._runner.requests
        tables, self.requests.groups = _tables()
        rows = []
        for row, name in enumerate(batch.req_ids[: len(self.starts) - 1]):
            computed = int(batch.num_computed_tokens_cpu[row])
            end = computed + self.starts[row + 1] - self.starts[row]
            ids = torch.from_numpy(batch.token_ids_cpu[row, :end]).long()
            rows.append(
                Scheduled(name, states[name].num_prompt_tokens, ids, computed, tables[:, row])
            )
        self.requests.start_pass(rows)

    def part(
        self,
        rows: Sequence[int],
        metadata: CPUAttentionMetadata,
        impl: Attention,
        isa: str,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, CPUAttentionMetadata]:
        """The tokens of some requests, by index in the pass, and what vLLM's attention is given."""
        key = id(metadata), *rows
        if key not in self._parts:
            tokens = torch.cat(
                [torch.arange(self.starts[row], self.starts[row + 1]) for row in rows]
            )
            counts = torch.tensor([self.starts[row + 1] - self.starts[row] for row in rows])
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(
                metadata.query_start_loc.dtype
            )
            lengths = metadata.seq_lens[list(rows)].contiguous()
            schedule = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(rows),
                num_heads=impl.num_heads,
                num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size,
                seq_lens=lengths,
                dtype=dtype,
                query_start_loc=starts,
                causal=metadata.causal,
                sliding_window_size=impl.sliding_window,
                isa=isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=impl.kv_cache_dtype,
            )
            self._parts[key] = (
                tokens,
                replace(
                    metadata,
                    num_actual_tokens=len(tokens),
                    max_query_len=int(counts.max()),
                    query_start_loc=starts,
                    max_seq_len=int(lengths.max()),
                    seq_lens=lengths,
                    block_table=metadata.block_table[list(rows)].contiguous(),
                    slot_mapping=metadata.slot_mapping[tokens],
                    scheduler_metadata=schedule,
                ),
            )
        return self._parts[key]


def _tables() -> tuple[torch.Tensor, list[int]]:
    """Blocks of the requests of a pass, [groups, B, blocks], and the group of each layer."""
    table_index = dict[int, int]()
    groups = dict[int, int]()
    tables = list[torch.Tensor]()
    for name, metadata in get_forward_context().attn_metadata.items():
        if id(metadata) not in table_index:
            table_index[id(metadata)] = len(tables)
            tables.append(metadata.block_table)
        groups[extract_layer_index(name)] = table_index[id(metadata)]
    return torch.stack(tables).to(torch.int64), [groups[layer] for layer in sorted(groups)]


class Attention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer: vLLM's, and that of the decode steps for which a method selects."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See vLLM's."""
        current = WorkerPass.current
        if current is None or attn_metadata is None:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        self._refuse_strange()
        current.begin(attn_metadata)
        requests = current.requests
        index = extract_layer_index(layer.layer_name)
        isa = layer.isa
        if (
            index not in requests.memory
            or requests.memory[index].whole.data_ptr() != kv_cache.data_ptr()
        ):
            requests.memory[index] = Memory(kv_cache, isa)
        others = requests.attend(index, query, key, value, current.starts)
        if len(others) == len(current.starts) - 1:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        elif others:
            tokens, metadata = current.part(others, attn_metadata, self, isa, query.dtype)
            new = query[tokens], key[tokens], value[tokens], kv_cache, metadata
            output[tokens] = super().forward(layer, *new, torch.empty_like(output[tokens]))
        requests.finish(output)
        return output

    def _refuse_strange(self) -> None:
        """Refuse attention that kvbench would compute wrong.

        Raises
        ------
        ConfigError
            names what it has.
        """
        strange = {
            "attn_type": self.attn_type != AttentionType.DECODER and self.attn_type,
            "sinks": self.sinks is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "logits_soft_cap": self.logits_soft_cap,
            "sliding_window": self.sliding_window > 0 and self.sliding_window,
            "kv_cache_dtype": self.is_fp8_kv_cache and self.kv_cache_dtype,
            "kv_sharing": self.kv_sharing_target_layer_name,
        }
        for name, value in strange.items():
            if value:
                raise ConfigError(
                    f"the model's attention has {name}={value}: kvbench runs plain causal attention"
                    " in vLLM"
                )


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with kvbench's attention."""

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        """See vLLM's."""
        return Attention
