"""SnapKV: prompt compression by the votes of an observation window (Li et al. 2024, "SnapKV: LLM Knows What You Are
Looking for Before Generation", section 4).

The last prompt queries vote for the prompt keys they attend; the votes are smoothed, and only the best keys and the
window itself stay. All else is gone for good.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.topk import top_earliest
from methods.blocks.votes import Join, Pooling, pooled_votes, window_votes

ROLLING_WINDOW = 32  # most recent tokens protected where generated tokens count, at most a quarter of the budget


class SnapKV(Method):
    """Keep the C - W prompt tokens with most votes and the W of the window, once, after the prompt.

    As published, generated tokens are kept on top of C. Where they count (unified accounting, or generated=counted),
    C - w voted tokens and the w most recent ones stay, w = min(32, C / 4): generated tokens push older ones out.

    Args:
        window: queries that vote, W.
        kernel: width of the smoothing, odd.
        pooling: "max" or "mean".
        join: the group's mean is taken "before" (KVCache-Factory) or "after" pooling (kvpress).
    """

    def __init__(self, window: int = 32, kernel: int = 7, pooling: Pooling = "max", join: Join = "before") -> None:
        self.window, self.kernel, self.pooling, self.join = window, kernel, pooling, join
        self.needs = Needs(query_window=window)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        super().begin(shape, budget, view, context)
        self.voted: dict[int, list[torch.Tensor]] = {}  # [Hkv, V] of each row, where generated tokens count
        self.recent = [self._window(capacity) for capacity in self.capacities]
        rows = [self._layer_capacities(length) for length in shape.lengths]
        layers = dict(zip(shape.sparse_layers, zip(*rows, strict=True), strict=True))
        self.layer_capacities: dict[int, tuple[int, ...]] = layers  # of each row, the window included
        self.steps = 0

    def prefill(self, layer: int, prompt: Prompt) -> None:
        capacities = self.layer_capacities[layer]
        if not self.budget.counts_generated and all(map(int.__ge__, capacities, prompt.lengths)):
            return
        votes = window_votes(prompt, self.window, self.shape.scaling)
        position = torch.arange(votes.shape[2], device=votes.device)
        length = torch.tensor(prompt.lengths, device=votes.device)[:, None, None]
        window = length - torch.tensor(self.recent, device=votes.device)[:, None, None]
        votes = votes.masked_fill(position >= window, 0)  # the window does not vote for itself, nor smooth its votes
        scores = pooled_votes(votes, self.shape.kv_heads, self.kernel, self.pooling, self.join)
        scores = scores.masked_fill(position >= window, torch.inf).masked_fill(position >= length, -torch.inf)
        counts = [min(pair) for pair in zip(capacities, prompt.lengths, strict=True)]
        kept = top_earliest(
            scores, max(counts), torch.tensor(counts, device=votes.device)
        )  # the window first, then the voted
        self.view.keep(layer, kept)
        if self.budget.counts_generated:
            self.voted[layer] = [
                row[:, window:count] for row, window, count in zip(kept, self.recent, counts, strict=True)
            ]

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        if not self.budget.counts_generated:
            return None
        return Selection(self._rolling(layer))

    def end_step(self) -> None:
        self.steps += 1
        if self.budget.counts_generated and self.steps % ROLLING_WINDOW == 0:
            for layer in self.shape.sparse_layers:
                self.view.keep(layer, self._rolling(layer))

    def _window(self, capacity: int) -> int:
        return min(ROLLING_WINDOW, capacity // 4) if self.budget.counts_generated else self.window

    def _layer_capacities(self, length: int) -> list[int]:
        """What each sparse layer keeps of a prompt of `length` tokens, C on average."""
        return [self.budget.tokens(length)] * len(self.shape.sparse_layers)

    def _rolling(self, layer: int) -> torch.Tensor:
        """The voted tokens and as many of the most recent as the budget still holds, [B, Hkv, <= C]."""
        rows = []
        for row, length in enumerate(self.view.lengths(layer)):
            voted = self.voted[layer][row]
            oldest = max(self.shape.lengths[row] - self.recent[row], 0)  # the voted part ends before it
            first = max(oldest, length - self.layer_capacities[layer][row] + voted.shape[1])
            newest = torch.arange(first, length, device=voted.device)
            rows.append(torch.cat([voted, newest.expand(voted.shape[0], -1)], dim=1))
        longest = max(row.shape[1] for row in rows)
        return torch.stack([pad(row, (0, longest - row.shape[1]), value=-1) for row in rows])

    def rule(self, length: int, generated: int) -> int:
        capacity = max(self._layer_capacities(length))
        return capacity if self.budget.counts_generated else capacity + generated
