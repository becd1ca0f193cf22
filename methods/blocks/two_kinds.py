"""What methods with two kinds of KV heads have in common: some keep everything, the others sinks
and recent tokens.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, HeadScores, Method, Prompt, Selection, Shape, Table, View
from methods.blocks.ragged import padded, stacked
from methods.blocks.recent import sinks_and_recent

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
        scores.refuse_other_shape(shape)
        self.ranked = [
            (layer, head) for layer, head in self.rank(scores) if layer in shape.sparse_layers
        ]
        self.head_count = len(shape.sparse_layers) * shape.kv_heads
        rank = {head: number for number, head in enumerate(self.ranked)}
        counts = torch.tensor([self.fitting(length) for length in shape.lengths])[:, None]
        self.retrieves: dict[int, torch.Tensor] = {}  # of each layer, [B, Hkv]
        self.kinds: dict[int, list[set[bool]]] = {}  # the same of each row, whichever head it is
        for layer in shape.sparse_layers:
            ranks = [rank.get((layer, head), self.head_count) for head in range(shape.kv_heads)]
            retrieving = torch.tensor(ranks) < counts
            self.retrieves[layer] = retrieving.to(shape.device_of(layer))
            self.kinds[layer] = [set(row) for row in retrieving.tolist()]
        # of each GPU, [2, B] `starts`, in the same memory in every step
        self.starts_on = {
            device: torch.zeros(2, shape.batch, dtype=torch.int64, device=device)
            for device in {shape.device_of(layer) for layer in shape.sparse_layers}
            if device.type == "cuda"
        }
        self.sinks_of = [self.first_tokens(length) for length in shape.lengths]
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
        for starts in self.starts_on.values():
            values = torch.tensor(self.starts).T.contiguous()
            starts.copy_(values.pin_memory(), non_blocking=True)

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
        return most if self.retrieves[layer].is_cpu else padded(most)

    def _first(self, layer: int, starts: list[tuple[int, int]]) -> torch.Tensor:
        """The first recent token of each head, [B, Hkv]."""
        device = self.shape.device_of(layer)
        if starts is self.starts and device in self.starts_on:
            other, retrieval = self.starts_on[device][..., None]
        else:
            other, retrieval = torch.tensor(starts, device=device).T[..., None]
        return torch.where(self.retrieves[layer], retrieval, other)

    def _attended(self, layer: int) -> torch.Tensor:
        """Token ids [B, Hkv, M]: recent ones, the newest first, and the sinks."""
        lengths, first = self.view.seen(layer), self._first(layer, self.starts)
        rows = []
        for row, length in enumerate(self.view.lengths(layer)):
            this_row, sinks = slice(row, row + 1), self.sinks_of[row]
            most = self._longest(layer, row, length)
            counts = lengths[this_row, None] - first[this_row] + sinks
            rows.append(sinks_and_recent(lengths[this_row], counts, sinks, most)[0])
        return stacked(rows)
