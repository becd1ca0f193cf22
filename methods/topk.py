"""The exact top-k oracle (MagicPIG's `TopkCache`; sparse-attention-hub's `OracleTopK` without
sinks).

At every step attend the C keys that receive most attention, found by scanning all of them: what the
budget could buy if finding the tokens cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Selection, Shape, View
from methods.blocks.pages import Ranges
from methods.blocks.products import past_products, products
from methods.blocks.topk import Granularity, interleave, top_earliest


@dataclass(eq=False)
class TopK(Method):
    """Exact top-C of every past token, the current one included.

    Parameters
    ----------
    granularity
        "query_head", each query head its own C tokens (as published); "kv_head", the C tokens with
        the largest attention probability summed over the group, the fair ceiling for methods that
        select per KV head.
    """

    needs = Needs(crops=True, host_step=False)

    granularity: Granularity = "query_head"

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Note the budget of each row."""
        super().begin(shape, budget, view, context)
        self.counts = shape.for_layers(torch.tensor(self.capacities))

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Score every key seen so far, and take the C best."""
        keys, lengths = self.view.keys(layer), self.view.lengths(layer)
        kv_heads, count = keys.shape[1:3]
        if keys.is_cuda:  # lists are as long in every step, and what no token is yet is masked
            logits, lengths = (
                past_products(query, keys, self.view.seen(layer)),
                (count,) * len(keys),
            )
        else:
            logits = products(query, keys)
            if min(lengths) < count:
                past = torch.arange(count) < self.view.seen(layer)[:, None]
                logits = logits.masked_fill(~past[:, None, None], -torch.inf)
        most = max(map(min, zip(self.capacities, lengths, strict=True)))
        if self.granularity == "kv_head":
            shared = self.shape.logits(logits).softmax(dim=-1).sum(dim=2)
            shared = shared.masked_fill(logits[:, :, 0].isneginf(), -torch.inf)
            return Selection(top_earliest(shared, most, self.counts[layer]))
        index = top_earliest(logits.flatten(1, 2), most, self.counts[layer])
        if self.budget.unified:
            index = interleave(index, kv_heads, most, self.counts[layer])
        return Selection(index)

    def ranges(self, layer: int, query: torch.Tensor) -> Ranges:
        """On a GPU the tokens as pages of one, and what each query head attends of them."""
        keys, seen, counts = self.view.keys(layer), self.view.seen(layer), self.counts[layer]
        logits = past_products(query, keys, seen).flatten(1, 2)
        most = min(max(self.capacities), logits.shape[2])
        return Ranges(logits, seen, counts, counts, None, 1, most)

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """C, of each query head where they choose for themselves."""
        tokens = self.budget.tokens(length)
        per_query_head = self.granularity == "query_head" and not self.budget.unified
        return tokens * self.shape.group if per_query_head else tokens
