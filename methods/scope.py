"""SCOPE: prefill and decoding compressed apart (Wu et al. 2025, "SCOPE: Optimizing Key-Value Cache
Compression in Long-context Generation", section 4).

What a compressor leaves of the prompt stays for good. Of the generated tokens a window stays: the
most recent ones, and those that the current step attends most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Shape, View
from methods.blocks.evictor import Evictor
from methods.blocks.held import KEEP, REPLACE, Eviction
from methods.blocks.scorer import Scorer
from methods.blocks.topk import Granularity
from methods.h2o import HeavyHitters
from methods.pyramidkv import PyramidKV
from methods.snapkv import SnapKV

Strategy = Literal["slide", "adaptive", "discontinuous"]
SCORERS: dict[str, Callable[..., Scorer]] = {
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "h2o": HeavyHitters,
}


@dataclass(eq=False)
class SCOPE(Evictor):
    """Keep C prompt tokens, and a window of generated ones.

    Where generated tokens count, they share C with the prompt: they have what it leaves of C, and
    where that is less than a quarter, its tokens with the smallest scores give way until it is
    that; half of a quarter are recent ones.

    Parameters
    ----------
    compressor
        what cuts the prompt.
    prompt_window
        tokens of its window.
    granularity
        "kv_head", a set for the group, by its mean; "query_head", each query head its own
        (published).
    strategy
        how the window grows. "slide": it does not, once there are `window` tokens. "adaptive": it
        begins with `recent` tokens, and grows by one in `delta` steps. "discontinuous": as
        adaptive, but tokens are evicted only after every `delta` steps that would have done so.
    window
        generated tokens that stay, M.
    recent
        of these the most recent ones, which stay whatever their attention.
    delta
        see `strategy`; None: such that the window is full with the answer.

    Raises
    ------
    ValueError
        the window holds recent tokens alone, or delta is no number of steps.
    """

    how = REPLACE

    compressor: Literal["snapkv", "pyramidkv", "h2o"] = "snapkv"
    prompt_window: int = 8
    granularity: Granularity = "kv_head"
    strategy: Strategy = "slide"
    window: int = 512
    recent: int = 256
    delta: int | None = None

    def __post_init__(self) -> None:
        if self.recent >= self.window:
            raise ValueError(
                f"recent={self.recent}: expected fewer tokens than the decoding window has,"
                f" window={self.window}"
            )
        if self.delta is not None and (type(self.delta) is not int or self.delta < 1):
            raise ValueError(f"delta={self.delta}: expected steps, 1 or more, or null")
        super().__init__(SCORERS[self.compressor](window=self.prompt_window), self.granularity)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle delta, and where generated tokens count their part of each layer's budget."""
        super().begin(shape, budget, view, context)
        self.growth = self._growth(context.new_tokens)
        # generated tokens that stay; steps that did not evict
        self.size = self.waited = self.excess = 0
        self.prompt: dict[int, torch.Tensor] = {}  # tokens of it in each list, [B, H]
        # the same with generated ones that stay, and how many of these
        self.limits_of: dict[int, tuple[int | None, torch.Tensor]] = {}
        # of each row, [B, 1], the next token's slot left out
        self.capacity: dict[int, torch.Tensor] = {}
        for layer, rows in self.scorer.budgets.items():
            self.capacity[layer] = torch.tensor(rows, device=shape.device_of(layer))[:, None] - 1
            if budget.counts_generated:
                for end, capacity in zip(self.ends, rows, strict=True):
                    self.check_end(end, capacity)  # of a pyramid, where prompt tokens give way

    def _growth(self, new_tokens: int | None) -> int:
        """Steps in which the window grows by one."""
        if self.strategy == "slide" or self.delta is not None:
            return self.delta or 1
        if new_tokens is None:
            raise ValueError(
                f"delta=null: strategy={self.strategy} takes it from the length of the answer,"
                " which is not known here; expected steps, such as 15"
            )
        return max(1, (new_tokens - self.recent) // (self.window - self.recent))

    def reserved(self, capacity: int) -> int:
        """The prompt's window, and what generated tokens have at least where they count."""
        return self.scorer.window + (capacity // 4 if self.budget.counts_generated else 0)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """How many generated tokens stay after this step."""
        super().step(tokens, positions, active)
        most = self._window(self.steps)
        self.size += 1
        waits = self.strategy == "discontinuous" and self.size >= most and self.waited < self.growth
        if self.size >= most:
            self.waited = self.waited + 1 if waits else 0
        self.excess = 0 if waits else max(0, self.size - most)
        self.size -= self.excess

    def _window(self, step: int) -> int:
        """Generated tokens that stay after a step."""
        if self.strategy == "slide":
            return self.window
        return self.recent + (step - 1) // self.growth

    def eviction(self, layer: int) -> Eviction:
        """A generated token is worth what it receives in this step, a prompt token its score; the
        prompt and recent tokens stay.
        """
        lengths, recent = self.lengths[layer], self._recent(layer)
        return Eviction(None, 0, origin=lengths, first=lengths, recent=recent)

    def make_room(self, layer: int, how: int, attention: torch.Tensor) -> None:
        """Evict the generated tokens of which there are too many, and where they count a prompt
        token.
        """
        tokens, seen = self.token_lists[layer], self.view.seen(layer)
        if layer not in self.prompt:
            self.prompt[layer] = tokens.counts.clone()
        counted, eviction = self.budget.counts_generated, self.eviction(layer)
        times = max(self.excess, int(counted)) if self.steps else 0
        if not times:
            tokens.evict(how, eviction, seen, attention)
        for _ in range(times):
            most = tokens.width - (not counted)
            tokens.evict(
                how, eviction._replace(limits=self._limits(layer), most=most), seen, attention
            )
            how = KEEP
        if counted:
            self.prompt[layer].sub_((tokens.counts > self.capacity[layer]).long())
            most = max(self.scorer.budgets[layer]) - 1
            generated = seen - self.lengths[layer]
            eviction = Eviction(self.capacity[layer], most, recent=generated)
            tokens.evict(KEEP, eviction, seen, attention)

    @property
    def layout(self) -> object:
        """How long the lists are, and how many tokens go: the same once the window is full."""
        return super().layout, self.size, self.excess

    def _recent(self, layer: int) -> torch.Tensor:
        """Recent tokens of each row that stay, [B]."""
        if not self.budget.counts_generated:
            return self.each(layer, self.recent)
        return ((self.capacity[layer][:, 0] + 1) // 8).clamp(max=self.recent)

    def _limits(self, layer: int) -> torch.Tensor:
        """Tokens that stay of each list, [B, H]: those of the prompt, and generated ones beside
        them.
        """
        prompt = self.prompt[layer]
        if not self.budget.counts_generated:
            size, limits = self.limits_of.get(layer, (None, prompt))
            if size != self.size:
                limits = prompt + self.size
            if prompt.is_cuda:  # it grows no more once the window is full
                self.limits_of[layer] = self.size, limits
            return limits
        part = (self.capacity[layer] + 1) // 4
        room = torch.maximum(part - 1, self.capacity[layer] - prompt)
        return prompt + room.clamp(max=self.size)

    def most(self, layer: int, length: int, generated: int) -> int:
        """The layer's C, and what the window has come to, with the current token."""
        capacity = self.scorer.layer_budgets(length)[self.shape.sparse_layers.index(layer)]
        if self.budget.counts_generated:
            return capacity
        waiting = self.growth - 1 if self.strategy == "discontinuous" else 0
        return capacity + min(generated, self._window(generated) + waiting + 1)

    def mean_rule(self, length: int, generated: int) -> int | None:
        """Where generated tokens count, C of each list: a pyramid's layers share it out."""
        lists = max(1, self.lists // self.shape.kv_heads)
        return lists * self.budget.tokens(length) if self.budget.counts_generated else None
