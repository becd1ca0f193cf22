"""The exact top-k oracle (MagicPIG's `TopkCache`; sparse-attention-hub's `OracleTopK` without sinks).

At every step attend the C keys that receive most attention, found by scanning all of them: what the budget could buy
if finding the tokens cost nothing.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvbench.method import Method, Selection
from methods.blocks.topk import interleave, top


class TopK(Method):
    """Exact top-C of every past token, the current one included.

    Args:
        granularity: "query_head", each query head its own C tokens (as published); "kv_head", the C tokens with the
            largest attention probability summed over the group, the fair ceiling for methods that select per KV head.
    """

    def __init__(self, granularity: Literal["query_head", "kv_head"] = "query_head") -> None:
        self.granularity = granularity

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        keys, lengths = self.view.keys(layer), self.view.lengths(layer)
        batch, kv_heads, count, _ = keys.shape
        grouped = query.view(batch, kv_heads, self.shape.group, -1)
        logits = (grouped.float() @ keys.float().transpose(2, 3)) * self.shape.scaling
        past = torch.arange(count, device=keys.device) < torch.tensor(lengths, device=keys.device)[:, None]
        logits = logits.masked_fill(~past[:, None, None], -torch.inf)
        capacity = [min(pair) for pair in zip(self.capacities, lengths, strict=True)]
        if self.granularity == "kv_head":
            shared = logits.softmax(dim=-1).sum(dim=2).masked_fill(~past[:, None], -torch.inf)
            return Selection(top(shared, capacity))
        index = top(logits.flatten(1, 2), capacity)
        if self.budget.unified:
            index = interleave(index, kv_heads, capacity)
        return Selection(index)

    def rule(self, length: int, generated: int) -> int | None:
        tokens = self.budget.tokens(length)
        per_query_head = self.granularity == "query_head" and not self.budget.unified
        return tokens * self.shape.group if per_query_head else tokens
