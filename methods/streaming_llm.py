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
from methods.blocks.recent import recent_and_sinks, sinks_and_recent

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
        self.needs = Needs(positions=self.positions, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Note the budget of each row."""
        super().begin(shape, budget, view, context)
        # of each layer, the tokens that each row attends at most, [B, 1], and the same on a GPU
        self.counts: dict[int, torch.Tensor] = {}
        self.counts_on: dict[int, torch.Tensor] = {}
        if shape.device.type == "cuda":
            self.sinks_on = shape.for_layers(torch.full((shape.batch,), self.sinks))
        capacities = torch.tensor(self.capacities)[:, None]
        for layer in shape.sparse_layers:
            self._share(layer, capacities)
        self.steps = 0
        # of this step on each device, the same in every layer
        self.windows: dict[torch.device, Selection] = {}

    def _share(self, layer: int, counts: torch.Tensor) -> None:
        """A layer attends so many tokens of each row at most, [B, 1] on the CPU."""
        self.counts[layer] = counts
        if self.shape.device.type == "cuda":
            self.counts_on[layer] = self.counts[layer].to(self.shape.device_of(layer))

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop all of the prompt but sinks and window."""
        self._drop(layer)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """The window moves on."""
        self.windows = {}

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The window, newest first, and the sinks."""
        if query.device not in self.windows:
            self.windows[query.device] = Selection(self._attended(layer), sinks=self.sinks)
        return self.windows[query.device]

    def end_step(self) -> None:
        """Now and then drop what has left the window; between two drops it is not attended."""
        self.steps += 1
        if self.counts_on:  # a graph has those of the next steps
            self.windows = {}
        if self.steps % DROP_EVERY == 0:
            for layer in self.shape.sparse_layers:
                self._drop(layer)

    def _drop(self, layer: int) -> None:
        pairs = zip(self.view.lengths(layer), self.counts[layer][:, 0].tolist(), strict=True)
        if any(length > count for length, count in pairs):
            self.view.keep(layer, self._attended(layer), DROP_EVERY)

    def _attended(self, layer: int) -> torch.Tensor:
        """Token ids [B, 1, M], the newest first, the sinks last; on a GPU in lists that are as long
        in every step.
        """
        if layer in self.counts_on:
            most = int(self.counts[layer].max())
            sinks: torch.Tensor = self.sinks_on[layer]
            ids: torch.Tensor = recent_and_sinks(
                self.view.seen(layer), self.counts_on[layer], sinks, most
            )
            return ids
        lengths, counts = self.view.lengths(layer), self.counts[layer]
        most = max(map(min, lengths, counts[:, 0].tolist()))
        return sinks_and_recent(torch.tensor(lengths), counts, self.sinks, most)
