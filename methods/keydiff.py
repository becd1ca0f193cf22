"""KeyDiff: the keys stay that resemble the others least (Park et al. 2025, "KeyDiff: Key
Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments", section 3).

A key near the mean direction of all keys is one of many; those that point elsewhere receive
attention. No query is needed to see this, so that a cache can be pruned while a prompt is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import cosine_similarity, normalize

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.ends import KeepsEnds, at_ends
from methods.blocks.interval import Interval
from methods.blocks.ragged import stacked
from methods.blocks.scorer import Scorer
from methods.blocks.topk import top_earliest


class KeyDiff(Scorer):
    """Keep the C prompt tokens whose keys have the smallest cosine with the anchor; no window, no
    sinks.
    """

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """How far each key of a row is from their anchor."""
        scores = torch.zeros(prompt.keys.shape[:3], device=prompt.keys.device)
        for row, length in enumerate(prompt.lengths):
            scores[row, :, :length] = difference(prompt.keys[row, :, :length])
        return scores


class KeyDiffDecode(Interval, KeyDiff):
    """KeyDiff over all that is held, every `interval` decode steps."""


@dataclass(eq=False)
class KeyDiffBlocks(KeepsEnds):
    """Keep C tokens after each block of the text, from its first token on; the newest ones may go
    at once.

    Generated tokens go on with the blocks. The paper prunes as the prompt is read, so that later
    tokens attend what is left of it. The harness's prefill is dense: the blocks are found
    afterwards, over its keys, in memory that has held the whole prompt; the report says what a
    prefill in blocks would have held.

    Where generated tokens count, the block is a part of C, a quarter at most; the first one that is
    pruned fills C.

    Parameters
    ----------
    block
        tokens that come before the cache is pruned, B.
    """

    evicts = "always"

    needs = Needs(host_step=False)

    block: int = 128

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle the blocks of each row."""
        super().begin(shape, budget, view, context)
        self.blocks = [self._blocks(capacity) for capacity in self.capacities]

    def _blocks(self, capacity: int) -> Blocks:
        """With a budget of `capacity` tokens."""
        if not self.budget.counts_generated:
            return Blocks(self.block, capacity, 0)
        size = min(self.block, capacity // 4)
        return Blocks(size, capacity - size, capacity - size)

    def reserved(self, capacity: int) -> int:
        """The block where it is inside."""
        return capacity - self._blocks(capacity).keep_count

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep what a prefill in blocks leaves."""
        rows = []
        for row, (length, blocks) in enumerate(zip(prompt.lengths, self.blocks, strict=True)):
            keys = prompt.keys[row, :, :length]
            ids = torch.arange(min(blocks.first, length), device=keys.device).expand(len(keys), -1)
            for start in range(blocks.first, length, blocks.size):
                end = min(start + blocks.size, length)
                come = torch.arange(start, end, device=keys.device).expand(len(keys), -1)
                ids = torch.cat([ids, come], dim=1)
                if blocks.full(end):
                    slots = ids[..., None].expand(-1, -1, keys.shape[2])
                    ids = self._pruned(row, ids, keys.gather(1, slots))
            rows.append(ids)
        self._keep(layer, rows)

    def end_step(self) -> None:
        """Prune the rows whose block is full."""
        lengths = self.view.lengths(self.shape.sparse_layers[0])
        pairs = [*zip(lengths, self.blocks, strict=True)]
        full = any(blocks.full(length) for length, blocks in pairs)
        for layer in self.shape.sparse_layers if full else ():
            resident, rows = self.view.resident(layer), []
            keys = self.view.keys(layer, resident)
            for row, (length, blocks) in enumerate(pairs):
                ids = resident[row, :, : blocks.resident_count(length)]
                if blocks.full(length):
                    ids = self._pruned(row, ids, keys[row, :, : ids.shape[1]])
                rows.append(ids)
            self._keep(layer, rows)

    def _pruned(self, row: int, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Of token ids [H, n] of a row those that stay after a block, by their keys [H, n, D];
        ascending.
        """
        stays = at_ends(ids, self.shape.lengths[row], self.ends[row])
        scores = difference(keys).masked_fill(stays, torch.inf)
        best = top_earliest(scores[None], self.blocks[row].keep_count)[0]
        return ids.gather(1, best).sort(dim=1).values

    def _keep(self, layer: int, rows: list[torch.Tensor]) -> None:
        """Keep these ids of each row, with room for what comes until one is pruned next."""
        pairs = zip(self.view.lengths(layer), self.blocks, strict=True)
        self.view.keep(layer, stacked(rows), min(blocks.room(length) for length, blocks in pairs))

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, and as published the tokens of the block, which the current one may fill."""
        return self._blocks(self.budget.tokens(length)).resident_count(length + generated)

    def report(self) -> dict[str, float]:
        """Tokens of a KV head that a prefill in blocks holds at most, in one layer."""
        pairs = zip(self.shape.lengths, self.blocks, strict=True)
        most = max(blocks.max_resident_count(length) for length, blocks in pairs)
        return {"block_prefill_tokens_max": most}


class Blocks(NamedTuple):
    """How a row is read.

    Attributes
    ----------
    size
        tokens of a block.
    keep_count
        tokens that stay after it.
    first
        where the first one begins.
    """

    size: int
    keep_count: int
    first: int

    def full(self, length: int) -> bool:
        """Whether the last of `length` tokens ends a block, and some have to go."""
        return length > self.keep_count and (length - self.first) % self.size == 0

    def resident_count(self, length: int) -> int:
        """Tokens that are held of `length`, those of a full block all among them."""
        newer = (length - self.first - 1) % self.size + 1
        return min(length - newer, self.keep_count) + newer if length > self.keep_count else length

    def max_resident_count(self, length: int) -> int:
        """The most tokens that are held while `length` are read; later blocks hold no fewer."""
        return max(
            self.resident_count(prefix) for prefix in range(max(0, length - self.size), length + 1)
        )

    def room(self, length: int) -> int:
        """Tokens after the last of `length` until some have to go."""
        whole = (max(length, self.keep_count) - self.first) // self.size
        return self.first + (whole + 1) * self.size - length


def difference(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine of each of keys [H, n, D] with their anchor, the mean of their directions:
    [H, n] fp32.
    """
    keys = keys.float()
    anchor = normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)
