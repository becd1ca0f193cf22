"""What methods with two kinds of KV heads have in common: some keep everything, the others sinks
and recent tokens.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, HeadScores, Method, Prompt, Selection, Shape, View
from methods.blocks.ragged import stacked
from methods.blocks.recent import sinks_and_recent

# decode steps between two evictions: between them memory holds up to this many tokens more
DROP_EVERY = 32


class TwoKinds(Method):
    """Retrieval heads keep all that they have room for, the others less.

    Subclass; write `rank`, `fitting`, `entries`.

    Attributes
    ----------
    extra_entries
        entries of a head beside its tokens, once it has dropped some: a compensation token.
    ranked
        (layer, KV head) of the sparse layers' heads that may retrieve, the best first.
    heads
        of all sparse layers.
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
        self.heads = len(shape.sparse_layers) * shape.kv_heads
        rank = {head: number for number, head in enumerate(self.ranked)}
        counts = torch.tensor([self.fitting(length) for length in shape.lengths])[:, None]
        self.retrieves: dict[int, torch.Tensor] = {}  # of each layer, [B, Hkv]
        self.kinds: dict[int, list[set[bool]]] = {}  # the same of each row, whichever head it is
        for layer in shape.sparse_layers:
            ranks = [rank.get((layer, head), self.heads) for head in range(shape.kv_heads)]
            retrieving = torch.tensor(ranks) < counts
            self.retrieves[layer] = retrieving.to(shape.device_of(layer))
            self.kinds[layer] = [set(row) for row in retrieving.tolist()]
        self.sinks_of = [self.first_tokens(length) for length in shape.lengths]
        self.generated = 0
        self.starts = [(sinks, sinks) for sinks in self.sinks_of]
        self._move()

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What a head of the layer holds, a retrieval head where it has one."""
        retrieval, other = self.entries(length, generated)
        return (
            retrieval
            if any(layer == ranked_layer for ranked_layer, _ in self.ranked[: self.fitting(length)])
            else other
        )

    def report(self) -> dict[str, float]:
        """Retrieval heads that had room, a row."""
        counts = [self.fitting(length) for length in self.shape.lengths]
        return {"retrieval_heads": sum(counts) / len(counts)}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop what lies between the sinks and the recent tokens."""
        if self.drops:
            ids = self._attended(layer, self._first(layer, self.starts))
            self.view.keep(layer, ids, DROP_EVERY if self.rolls else None)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """The recent tokens move on."""
        self.generated += 1
        self._move()

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, newest first, and the sinks."""
        return Selection(self._attended(layer, self._first(layer, self.starts)))

    def end_step(self) -> None:
        """Now and then drop what has left the recent tokens; between two drops it is not
        attended.
        """
        if self.rolls and self.generated % DROP_EVERY == 0 and self.drops:
            for layer in self.shape.sparse_layers:
                self.view.keep(
                    layer, self._attended(layer, self._first(layer, self.starts)), DROP_EVERY
                )

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
            total, (retrieval, other) = (
                length + self.generated,
                self.entries(length, self.generated),
            )
            first = [
                total - (entries - sinks - self.extra_entries) if total > entries else sinks
                for entries in (other, retrieval)
            ]
            self.starts.append((first[0], first[1]))

    def _first(self, layer: int, starts: list[tuple[int, int]]) -> torch.Tensor:
        """The first recent token of each head, [B, Hkv]."""
        other, retrieval = torch.tensor(starts, device=self.shape.device_of(layer)).T[..., None]
        return torch.where(self.retrieves[layer], retrieval, other)

    def _attended(self, layer: int, first: torch.Tensor) -> torch.Tensor:
        """Token ids [B, Hkv, M] where recent ones begin with `first` [B, Hkv]: the newest first,
        the sinks last.
        """
        lengths, rows = self.view.seen(layer), []
        for row, (length, sinks) in enumerate(
            zip(self.view.lengths(layer), self.sinks_of, strict=True)
        ):
            this_row = slice(row, row + 1)
            most = max(length - self.starts[row][kind] + sinks for kind in self.kinds[layer][row])
            counts = lengths[this_row, None] - first[this_row] + sinks
            rows.append(sinks_and_recent(lengths[this_row], counts, sinks, most)[0])
        return stacked(rows)
