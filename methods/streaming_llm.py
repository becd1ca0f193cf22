"""StreamingLLM: attention sinks and a sliding window (Xiao et al. 2024, "Efficient Streaming
Language Models with Attention Sinks", section 3.2).

The first 4 tokens and the C - 4 most recent ones are attended, at positions inside the cache; all
others are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.recent import sinks_and_recent

# decode steps between two evictions: between them memory holds up to this many tokens more
DROP_EVERY = 32


@dataclass(eq=False)
class StreamingLLM(Method):
    """Attend `sinks` first and C - sinks most recent tokens, the current one included.

    Parameters
    ----------
    sinks
        first tokens that always stay.
    positions
        "cache", keys are rotated to their index in the selection (the official code, which caches
        keys before RoPE); "original", they keep the positions of the text (KVCache-Factory).
    """

    evicts = "always"

    sinks: int = 4
    positions: Literal["cache", "original"] = "cache"

    def __post_init__(self) -> None:
        if self.positions not in ("cache", "original"):
            raise ValueError(f"positions={self.positions}: cache or original")
        self.needs = Needs(positions=self.positions)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Note the budget of each row."""
        super().begin(shape, budget, view, context)
        # of each layer, the tokens that each row attends at most, [B, 1]
        capacities = torch.tensor(self.capacities)[:, None]
        self.counts = dict.fromkeys(shape.sparse_layers, capacities)
        self.steps = 0
        self.window: Selection | None = None  # of this step, the same in every layer

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop all of the prompt but sinks and window."""
        self._drop(layer)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """The window moves on."""
        self.window = None

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The window, newest first, and the sinks."""
        self.window = self.window or Selection(self._attended(layer))
        return self.window

    def end_step(self) -> None:
        """Now and then drop what has left the window; between two drops it is not attended."""
        self.steps += 1
        if self.steps % DROP_EVERY == 0:
            for layer in self.shape.sparse_layers:
                self._drop(layer)

    def _drop(self, layer: int) -> None:
        pairs = zip(self.view.lengths(layer), self.counts[layer][:, 0].tolist(), strict=True)
        if any(length > count for length, count in pairs):
            self.view.keep(layer, self._attended(layer), DROP_EVERY)

    def _attended(self, layer: int) -> torch.Tensor:
        """Token ids [B, 1, M] on the CPU: the newest first, the sinks last."""
        lengths, counts = self.view.lengths(layer), self.counts[layer]
        most = max(map(min, lengths, counts[:, 0].tolist()))
        return sinks_and_recent(torch.tensor(lengths), counts, self.sinks, most)
