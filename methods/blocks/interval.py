"""Any scorer while decoding: now and then all that is held is scored anew, and C tokens of it stay.

For scorers whose query heads do not choose for themselves, and whose heads and layers keep C each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Selection, Shape, View
from methods.blocks.ends import at_ends
from methods.blocks.queries import LastQueries
from methods.blocks.ragged import stacked
from methods.blocks.scorer import Scorer, last_tokens

QUERIES = 256  # last queries that a score learns from at most


@dataclass(eq=False)
class Interval(Scorer):
    """Keep C tokens after every `interval` steps, of the prompt and of what is generated.

    Put it before a scorer, as a dataclass where that has options:

        @dataclass(eq=False)
        class SnapKVDecode(Interval, SnapKV): ...

    The scorer is shown what is held as if it was a prompt: keys in the order of the text, and
    queries of the last tokens, which are all held, up to 256. RoPE is relative, so that places in
    what is held are as good as positions to a scorer that turns queries back and on.

    As such methods are published, the prompt stays whole until then. Where generated tokens count,
    C holds all: when it is full, be it with the prompt, enough goes for the next `interval` tokens,
    a quarter of C at most; nor is the scorer's window more than a quarter. A step is a token, be it
    one of a later turn that is read at once.

    Parameters
    ----------
    interval
        steps between two cuts.

    Attributes
    ----------
    reads_values
        the score needs values.
    """

    evicts = "always"
    reads_values = False

    interval: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs = replace(self.needs, queries=self.needs.query_window > 0, host_step=False)

    @property
    def at_rest(self) -> bool:
        """What is held is cut, again and again."""
        return False

    @property
    def layout(self) -> object:
        """All is attended in place, and cuts come after a step."""
        return ()

    def recent(self, capacity: int) -> int:
        """Last tokens that stay whatever their scores."""
        return min(self.window, capacity // 4) if self.budget.counts_generated else self.window

    def reserved(self, capacity: int) -> int:
        """The window, and the interval where it is inside."""
        return self.recent(capacity) + self.budget.counts_generated * self._interval(capacity)

    def layer_budgets(self, length: int) -> list[int]:
        """What a cut leaves in each sparse layer: C, or what the interval leaves of it."""
        capacity = self.budget.tokens(length)
        inside = self._interval(capacity) if self.budget.counts_generated else 0
        return [capacity - inside] * len(self.shape.sparse_layers)

    def _interval(self, capacity: int) -> int:
        return min(self.interval, capacity // 4) if self.budget.counts_generated else self.interval

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle when each row is cut, to how many tokens, and how many queries are asked then."""
        super().begin(shape, budget, view, context)
        self.keep_counts = self.budgets[shape.sparse_layers[0]]
        self.intervals = [self._interval(capacity) for capacity in self.capacities]
        # after a cut the window is held without a gap, and so is what has come since
        most = min(self.needs.query_window, QUERIES)
        since = [sum(pair) for pair in zip(self.intervals, self.windows, strict=True)]
        self.query_counts = [min(most, count) for count in since]
        self.queries: dict[int, LastQueries] = {}  # of each layer
        self.sizes = [*shape.lengths]  # tokens of each row that are held
        if budget.counts_generated:
            self.sizes, _ = self._cut(shape.lengths)

    def protected(self, prompt: Prompt) -> torch.Tensor:
        """[B, Hkv, N] bool: the window, and both ends of the prompt where they stand among what is
        held.
        """
        device = self.shown.device
        lengths = torch.tensor(self.shape.lengths, device=device)[:, None, None]
        ends = torch.tensor(self.ends, device=device)[:, None, None]
        return last_tokens(prompt, self.windows) | at_ends(self.shown, lengths, ends)

    def _cut(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens that these numbers of tokens become after the step, and the rows that are cut."""
        if self.budget.counts_generated:
            rows = [row for row, size in enumerate(sizes) if size >= self.capacities[row]]
        elif self.steps % self.interval == 0:
            rows = [row for row, size in enumerate(sizes) if size > self.keep_counts[row]]
        else:
            rows = []
        after = [*sizes]
        for row in rows:
            after[row] = self.keep_counts[row]
        return after, rows

    def first_cut(self, length: int) -> int:
        """As published the prompt stays whole for an interval."""
        return 1 if self.budget.counts_generated else self.interval + 1

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Cut the prompts that fill C, where generated tokens count; note the last queries."""
        self.queries[layer] = LastQueries(prompt.queries, max(self.query_counts))
        rows = [row for row, size in enumerate(self.sizes) if size < prompt.lengths[row]]
        query_counts = [prompt.queries.shape[2]] * self.shape.batch
        self._keep(layer, self.view.resident(layer), prompt, rows, query_counts)

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """All that is held; the query may be asked at the next cut."""
        self.queries[layer].append(query)
        return None

    def end_step(self) -> None:
        """Cut the rows whose interval is over."""
        self.steps += 1
        sizes = tuple(size + 1 for size in self.sizes)
        self.sizes, rows = self._cut(sizes)
        for layer in self.shape.sparse_layers if rows else ():
            resident = self.view.resident(layer)
            keys = self.view.keys(layer, resident)
            values = self.view.values(layer, resident) if self.reads_values else keys[..., :0]
            queries = self.queries[layer].ordered(self.steps)
            shown = Prompt(sizes, resident[:, 0, :0], keys, values, queries)
            self._keep(layer, resident, shown, rows, self.query_counts)

    def _keep(
        self,
        layer: int,
        resident: torch.Tensor,
        prompt: Prompt,
        rows: Collection[int],
        query_counts: Sequence[int],
    ) -> None:
        """Keep of what is held, ids [B, Hkv, M], the best tokens of these rows, and all of the
        others'.
        """
        ids = [resident[row, :, :size] for row, size in enumerate(prompt.lengths)]
        self.shown = resident
        for count in {query_counts[row] for row in rows}:
            first = max(0, prompt.queries.shape[2] - count)
            best, _ = self.best(layer, replace(prompt, queries=prompt.queries[:, :, first:]))
            for row in rows:
                if query_counts[row] == count:
                    slots = best[row, :, : self.sizes[row]].expand(self.shape.kv_heads, -1)
                    ids[row] = ids[row].gather(1, slots)
        self.view.keep(layer, stacked(ids), self._room())

    def _room(self) -> int:
        """Tokens that come until some row is cut."""
        if self.budget.counts_generated:
            pairs = zip(self.capacities, self.sizes, strict=True)
            return min(capacity - size for capacity, size in pairs)
        pairs = zip(self.keep_counts, self.sizes, strict=True)
        least = min(max(0, keeps - size) for keeps, size in pairs)
        return ((self.steps + least) // self.interval + 1) * self.interval - self.steps

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, and as published what has come since the last cut, and before the first everything."""
        if self.budget.counts_generated:
            return self.budget.tokens(length)
        whole = length + generated
        if generated <= self.interval:
            return whole
        newer = (generated - 1) % self.interval + 1
        return min(whole, self.budget.tokens(length) + newer)

    def mean_rule(self, length: int, generated: int) -> int:
        """The same, as all heads hold as many."""
        return self.rule(self.shape.sparse_layers[0], length, generated)
