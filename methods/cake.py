"""CAKE: layers share one budget by what each would lose (Qin et al. 2025, "CAKE: Cascading and
Adaptive KV Cache Eviction with Layer Preferences", section 4).

A layer whose attention is dispersed over the prompt, and shifts from query to query, gets more of
the budget. Prompts are compressed as the layers are read: each new layer takes its part of the
budget from those before it, which shrink again, so that beside the budget there is one layer's
prompt at a time. While decoding each layer keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d

from kvbench.budget import Budget
from kvbench.kernels.operators import operator
from kvbench.method import Context, Needs, Prompt, Selection, Shape, View
from methods.blocks.ends import KeepsEnds, at_ends
from methods.blocks.evictor import DROP_EVERY
from methods.blocks.ragged import stacked
from methods.blocks.scorer import ROLLING_WINDOW, last_tokens
from methods.blocks.topk import top_earliest
from methods.blocks.votes import pooled_votes, window_probabilities


@dataclass(eq=False)
class CAKE(KeepsEnds):
    """Keep b_l scored tokens and the W most recent in layer l; the mean of b_l + W is C.

    As published, C stay after each step, and the next token is attended on top of them; a prompt of
    at most C + W tokens is cut to C by the first step. Where generated tokens count, the next token
    has a slot of its own among the C, and W is min(32, C / 4).

    Parameters
    ----------
    tau1, tau2
        a layer prefers H^(1 / tau1) V^(1 / tau2), of the dispersion H and the shift V of its
        attention.
    gamma
        what the variance over the window's queries weighs beside the mean in the importance of a
        token.
    window
        last queries of the prompt that are asked, and tokens that stay, W; 2 or more have a
        variance.
    kernel
        width of the mean pooling over neighbours, odd.
    """

    evicts = "always"

    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float = 200.0
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        self.needs = Needs(query_window=self.window, probabilities=True, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Nothing is held yet, and no layer has said what it prefers."""
        super().begin(shape, budget, view, context)
        self.windows = [self.recent(capacity) for capacity in self.capacities]
        self.preferences: list[list[float]] = []  # of each layer so far and row
        self.scored: dict[int, list[int]] = {}  # b_l of each row
        # of each row [Hkv, n], in the order of the cache: the best first, then the W most recent in
        # theirs
        self.cached_ids: dict[int, list[torch.Tensor]] = {}
        self.attended_ids: dict[int, list[torch.Tensor]] = {}  # and the current token
        self.steps = 0

    # -- prefill: the cascade ----------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Rank the layer's tokens, and share the budget out anew between all layers so far."""
        importance, preference = self.measure(prompt)
        self.preferences.append(preference.tolist())
        ranked = top_earliest(importance, importance.shape[2])
        self.cached_ids[layer], self.scored[layer] = [], []
        for row, length in enumerate(prompt.lengths):
            position = torch.arange(length, device=ranked.device).repeat(ranked.shape[1], 1)
            older = length - self.windows[row]
            evicts = self.evicts_prompt(length)
            self.cached_ids[layer].append(
                torch.cat([ranked[row, :, :older], position[:, older:]], 1) if evicts else position
            )
            self.scored[layer].append(self.mean_scored(length))
        long = [row for row, length in enumerate(prompt.lengths) if self.evicts_prompt(length)]
        shrunk = {shrinking for row in long for shrinking in self.cascade(row, prompt.lengths[row])}
        for shrinking in shrunk:
            self.view.keep(shrinking, stacked(self.cached_ids[shrinking]), DROP_EVERY)

    def measure(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """What the window's attention to the tokens before it says of them, and of the layer.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            The importance of each token to each KV head [B, Hkv, N], -inf where it is none or stays
            anyhow; and the layer's preference [B].
        """
        lengths = torch.tensor(prompt.lengths, device=prompt.keys.device)
        count = prompt.queries.shape[2]
        valid = torch.arange(count, device=lengths.device) >= (count - lengths)[:, None]  # [B, W]
        valid = valid[:, None, :, None]
        number = valid.sum(dim=2)  # of queries, [B, 1, 1]
        stays = last_tokens(prompt, self.windows)
        position = torch.arange(stays.shape[2], device=stays.device)
        ends = torch.tensor(self.ends, device=stays.device)[:, None, None]
        importance = []
        dispersion, shift = lengths.new_zeros(2, len(lengths), dtype=torch.float64)
        # [B, G, W, N]
        for attention in window_probabilities(prompt, self.window, self.shape):
            older = attention.masked_fill(stays[:, None], 0)
            mean = older.sum(dim=2) / number
            deviation = (older - mean[:, :, None]).square().masked_fill(~valid, 0)
            variance = deviation.sum(dim=2) / (number - 1).clamp(min=1)
            importance.append(mean + self.gamma * variance)
            dispersion = dispersion - (older * (older + 1e-10).log()).sum(dim=(1, 2, 3)).double()
            shift = shift + variance.sum(dim=(1, 2)).double()
        smoothed = pooled_votes(
            torch.cat(importance, dim=1), self.shape.kv_heads, self.kernel, "mean", "before"
        )
        smoothed = smoothed.masked_fill(at_ends(position, lengths[:, None, None], ends), torch.inf)
        none = stays | (position >= lengths[:, None, None])
        preference = dispersion.clamp(min=0) ** (1 / self.tau1) * shift ** (1 / self.tau2)
        return smoothed.masked_fill(none, -torch.inf), preference

    def cascade(self, row: int, length: int) -> list[int]:
        """Share the row's whole budget out between the layers so far; which hold less now."""
        # in each layer, whatever its share of the rest
        window, ends = self.windows[row], 2 * self.ends[row]
        total = self.mean_scored(length) * len(self.shape.sparse_layers)
        total -= ends * len(self.preferences)
        preferences = [preference[row] for preference in self.preferences]
        shares = layer_budgets(preferences, total, length - window - ends)
        shrunk = []
        for layer, share in zip(self.cached_ids, shares, strict=True):
            ids, budget = self.cached_ids[layer][row], ends + share
            older = ids.shape[1] - window
            self.scored[layer][row] = budget
            if budget < older:
                self.cached_ids[layer][row] = torch.cat([ids[:, :budget], ids[:, older:]], dim=1)
                shrunk.append(layer)
        return shrunk

    # -- decode ------------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """What is held, and the current token."""
        self.attended_ids[layer] = [
            torch.cat([ids, newest.expand(len(ids), 1)], dim=1)
            for ids, newest in zip(self.cached_ids[layer], self.view.seen(layer) - 1, strict=True)
        ]
        return Selection(stacked(self.attended_ids[layer]))

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        """Keep the W most recent tokens, and of the others those that received most attention in
        this step.

        Neighbours, over which the attention is smoothed, are those in the order of the cache, as in
        the published code.
        """
        for row, ids in enumerate(self.attended_ids.pop(layer)):
            window, count = self.windows[row], ids.shape[1]
            older, scored = count - window, self.scored[layer][row]
            if older > scored:
                held = self.cached_ids[layer][row]
                if held.shape[1] != scored + window:
                    held = ids.new_empty(len(ids), scored + window)
                ends = self.shape.lengths[row], self.ends[row]
                attention = probabilities[row, :, :count]
                keep_received(held, ids, attention, window, self.kernel, *ends)
                ids = held  # mostly the same memory, so that a step can be captured
            self.cached_ids[layer][row] = ids

    @property
    def layout(self) -> object:
        """How long the lists are, which stay so once they are full."""
        return [ids.shape[1] for rows in self.cached_ids.values() for ids in rows]

    def end_step(self) -> None:
        """Now and then free the memory of what was evicted."""
        self.steps += 1
        if self.steps % DROP_EVERY == 0:
            for layer, rows in self.cached_ids.items():
                self.view.keep(layer, stacked(rows), DROP_EVERY)

    # -- budget ------------------------------------------------------------------------------------

    def recent(self, capacity: int) -> int:
        """Most recent tokens that stay, of `capacity`."""
        return min(ROLLING_WINDOW, capacity // 4) if self.budget.counts_generated else self.window

    def reserved(self, capacity: int) -> int:
        """The most recent ones, and the next token's slot."""
        return self.recent(capacity) + self.budget.counts_generated

    def mean_scored(self, length: int) -> int:
        """Mean of b_l for a prompt of `length` tokens."""
        capacity = self.budget.tokens(length)
        return capacity - self.recent(capacity) - self.budget.counts_generated

    def evicts_prompt(self, length: int) -> bool:
        """Whether a prompt of `length` tokens is compressed before the first step."""
        capacity = self.budget.tokens(length)
        return length > (capacity - 1 if self.budget.counts_generated else capacity + self.window)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What the other layers could leave to one; the first step as published sees all of a
        prompt up to C + W.
        """
        if generated == 1 and not self.evicts_prompt(length):
            return length + 1
        total = self.mean_scored(length) * len(self.shape.sparse_layers)
        return min(length + generated, self.recent(self.budget.tokens(length)) + total + 1)

    def mean_rule(self, length: int, generated: int) -> int:
        """C, and as published the current token."""
        if generated == 1 and not self.evicts_prompt(length):
            return length + 1
        return self.budget.tokens(length) + (not self.budget.counts_generated)


@operator("methods.blocks.gpu.cake", writes=("held",))
def keep_received(
    held: torch.Tensor,
    ids: torch.Tensor,
    attention: torch.Tensor,
    window: int,
    kernel: int,
    length: int,
    end: int,
) -> None:
    """Write to `held` [Hkv, n] the n - window of ids that received most attention, best first, and
    the last `window`.

    Parameters
    ----------
    ids
        [Hkv, m], m > n.
    attention
        [Hq, m] float32, the mean of whose groups is smoothed over `kernel` neighbours among those
        before the window.
    length, end
        of the prompt, and tokens at either end of it that stay.
    """
    older = ids.shape[1] - window
    received = attention.unflatten(0, (len(ids), -1)).mean(dim=1)[:, :older]
    smoothed = avg_pool1d(received, kernel, stride=1, padding=kernel // 2)
    if end:
        smoothed = smoothed.masked_fill(at_ends(ids[:, :older], length, end), torch.inf)
    best = smoothed.argsort(dim=1, descending=True, stable=True)[:, : held.shape[1] - window]
    torch.cat([ids.gather(1, best), ids[:, older:]], dim=1, out=held)


def layer_budgets(preferences: Sequence[float], total: int, most: int) -> list[int]:
    """Scored tokens of each layer in proportion to the preferences, `total` together.

    Parameters
    ----------
    most
        tokens there are in each layer.
    """
    whole = sum(preferences)
    shares = [
        total * (preference / whole if whole else 1 / len(preferences))
        for preference in preferences
    ]
    return [min(budget, most) for budget in adjust_budgets(shares, total, most)]


def adjust_budgets(shares: Sequence[float], total: int, most: int) -> list[int]:
    """Shares as whole numbers that sum to `total`, as the published code makes them.

    What layers would get above `most` goes equally to the others, which may get above it by that.
    """
    budgets = [int(share) for share in shares]
    excess = sum(max(budget - most, 0) for budget in budgets)
    budgets = [min(budget, most) for budget in budgets]
    budgets = _spread(budgets, excess, [budget < most for budget in budgets])
    missing = total - sum(budgets)
    return _spread(
        budgets, missing, [budget < most if missing > 0 else budget > 1 for budget in budgets]
    )


def _spread(budgets: Sequence[int], amount: int, takes: Sequence[bool]) -> list[int]:
    """The budgets with an amount, which may be negative, shared out evenly; what is left over goes
    to the first.
    """
    if not any(takes):
        return list(budgets)
    sign = 1 if amount > 0 else -1
    quotient, remainder = divmod(abs(amount), sum(takes))
    rank = [sum(takes[:at]) for at in range(len(takes))]
    return [
        budget + sign * (quotient + (rank[at] < remainder)) * takes[at]
        for at, budget in enumerate(budgets)
    ]
