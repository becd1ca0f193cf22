"""What methods with two kinds of KV heads have in common: some keep everything, the others sinks
and recent tokens.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, HeadScores, Method, Prompt, Selection, Shape, Table, View
from methods.blocks.ragged import padded, stacked
from methods.blocks.recent import recent_and_sinks, sinks_and_recent

# decode steps between two evictions: between them memory holds up to this many tokens more
DROP_EVERY = 32


def by_head(table: Table) -> dict[tuple[int, int], float]:
    """A score for each (layer, KV head) of a model."""
    return {
        (layer, head): score for layer, row in enumerate(table) for head, score in enumerate(row)
    }


class TwoKinds(Method):
    """Retrieval heads keep all that they have room for, the others less.

    Subclass; write `rank`, `fitting`, `entries`.

    Attributes
    ----------
    extra_entries
        entries of a head beside its tokens, once it has dropped some: a compensation token.
    ranked
        (layer, KV head) of the sparse layers' heads that may retrieve, the best first.
    head_count
        KV heads of all sparse layers.
    starts
        of each row, the first recent token of a head that does not retrieve, and of one that does;
        `former_starts`: one step before.
    """

    extra_entries = 0

    def rank(self, scores: HeadScores) -> list[tuple[int, int]]:
        """(layer, KV head) of a model's heads that may retrieve, the best first."""
        raise NotImplementedError

    def fitting(self, length: int) -> int:
        """How many of them a prompt of `length` tokens leaves room for."""
        raise NotImplementedError

    def entries(self, length: int, generated: int) -> tuple[int, int]:
        """Entries of a retrieval head, and of another, after so many generated tokens."""
        raise NotImplementedError

    def first_tokens(self, length: int) -> int:
        """Sinks of every head of a row with such a prompt."""
        raise NotImplementedError

    @property
    def rolls(self) -> bool:
        """Some head lets go of tokens while others are generated."""
        return self.evicts == "always" or self.budget.counts_generated

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Find the retrieval heads, and how many of them each row has room for.

        Raises
        ------
        ValueError
            the head scores are of a model of another shape.
        """
        super().begin(shape, budget, view, context)
        scores = context.head_scores
        assert scores is not None, "the harness hands over what `needs` asks for"
        self.ranked = [
            (layer, head) for layer, head in self.rank(scores) if layer in shape.sparse_layers
        ]
        self.head_count = len(shape.sparse_layers) * shape.kv_heads
        rank = {head: number for number, head in enumerate(self.ranked)}
        counts = torch.tensor([self.fitting(length) for length in shape.lengths])[:, None]
        self.retrieves: dict[int, torch.Tensor] = {}  # of each layer, [B, Hkv] on the CPU
        self.kinds: dict[int, list[set[bool]]] = {}  # the same of each row, whichever head it is
        for layer in shape.sparse_layers:
            ranks = [rank.get((layer, head), self.head_count) for head in range(shape.kv_heads)]
            self.retrieves[layer] = torch.tensor(ranks) < counts
            self.kinds[layer] = [set(row) for row in self.retrieves[layer].tolist()]
        self.sinks_of = [self.first_tokens(length) for length in shape.lengths]
        # on a GPU: of each layer, tokens that its heads attend, [B, Hkv], in the same memory in
        # every step, and the sinks of each row
        self.counts_on: dict[int, torch.Tensor] = {}
        self.sinks_on: dict[int, torch.Tensor] = {}
        if shape.device.type == "cuda":
            size = len(shape.sparse_layers), shape.batch, shape.kv_heads
            self.counts_of = {
                device: torch.zeros(size, dtype=torch.int64, device=device)
                for device in {shape.device_of(layer) for layer in shape.sparse_layers}
            }
            for at, layer in enumerate(shape.sparse_layers):
                self.counts_on[layer] = self.counts_of[shape.device_of(layer)][at]
            self.sinks_on = shape.for_layers(torch.tensor(self.sinks_of))
        self.generated = 0
        self.starts = [(sinks, sinks) for sinks in self.sinks_of]
        self._move()

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What a head of the layer holds, a retrieval head where it has one."""
        retrieval, other = self.entries(length, generated)
        retrieving = {ranked_layer for ranked_layer, _ in self.ranked[: self.fitting(length)]}
        return retrieval if layer in retrieving else other

    def report(self) -> dict[str, float]:
        """Retrieval heads that had room, a row."""
        counts = [self.fitting(length) for length in self.shape.lengths]
        return {"retrieval_heads": sum(counts) / len(counts)}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop what lies between the sinks and the recent tokens."""
        if self.drops:
            self.view.keep(layer, self._attended(layer), DROP_EVERY if self.rolls else None)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """The recent tokens move on."""
        self.generated += 1
        self._move()

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, newest first, and the sinks."""
        return Selection(self._attended(layer))

    def end_step(self) -> None:
        """Now and then drop what has left the recent tokens; between two drops it is not
        attended.
        """
        if self.rolls and self.generated % DROP_EVERY == 0 and self.drops:
            for layer in self.shape.sparse_layers:
                self.view.keep(layer, self._attended(layer), DROP_EVERY)

    @property
    def drops(self) -> bool:
        """Some head has dropped tokens."""
        return any(
            start > sinks
            for sinks, row in zip(self.sinks_of, self.starts, strict=True)
            for start in row
        )

    def _move(self) -> None:
        self.former_starts, self.starts = self.starts, []
        for length, sinks in zip(self.shape.lengths, self.sinks_of, strict=True):
            retrieval, other = self.entries(length, self.generated)
            total = length + self.generated
            self.starts.append(
                (self._start(total, other, sinks), self._start(total, retrieval, sinks))
            )
        if self.counts_on:
            counts = torch.stack([*map(self._counts, self.retrieves)]).pin_memory()
            for on_device in self.counts_of.values():
                on_device.copy_(counts, non_blocking=True)

    def _start(self, total: int, entries: int, sinks: int) -> int:
        """The first recent token of a head that attends `entries` of `total` tokens."""
        return total - (entries - sinks - self.extra_entries) if total > entries else sinks

    @property
    def layout(self) -> object:
        """How long lists are, and whether some head has dropped tokens."""
        sizes = [
            [self._longest(layer, row, length + 1) for row, length in enumerate(lengths)]
            for layer in self.shape.sparse_layers
            for lengths in [self.view.lengths(layer)]
        ]
        return sizes, self.drops

    def _longest(self, layer: int, row: int, length: int) -> int:
        """Tokens of a layer's longest list in a row of `length` tokens, on a GPU rounded up."""
        most = max(
            length - self.starts[row][kind] + self.sinks_of[row] for kind in self.kinds[layer][row]
        )
        return padded(most) if self.counts_on else most

    def _first(self, layer: int, starts: list[tuple[int, int]]) -> torch.Tensor:
        """The first recent token of each head, [B, Hkv] on the CPU."""
        other, retrieval = torch.tensor(starts).T[..., None]
        return torch.where(self.retrieves[layer], retrieval, other)

    def _counts(self, layer: int) -> torch.Tensor:
        """Tokens that each head attends, [B, Hkv] on the CPU."""
        pairs = zip(self.shape.lengths, self.sinks_of, strict=True)
        totals = torch.tensor([length + self.generated + sinks for length, sinks in pairs])
        return totals[:, None] - self._first(layer, self.starts)

    def _attended(self, layer: int) -> torch.Tensor:
        """Token ids [B, Hkv, M]: recent ones, the newest first, and the sinks."""
        lengths, counts = self.view.lengths(layer), self.counts_on.get(layer)
        most = [self._longest(layer, row, length) for row, length in enumerate(lengths)]
        if counts is not None:
            seen = self.view.seen(layer)
            ids: torch.Tensor = recent_and_sinks(seen, counts, self.sinks_on[layer], max(most))
            return ids
        counts, totals = self._counts(layer), torch.tensor(lengths)
        rows = []
        for row, sinks in enumerate(self.sinks_of):
            this_row = slice(row, row + 1)
            ids = sinks_and_recent(totals[this_row], counts[this_row], sinks, most[row])
            rows.append(ids[0])
        return stacked(rows)
