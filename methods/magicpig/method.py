"""MagicPIG: attention sampled by locality-sensitive hashing (Chen et al. 2024, "MagicPIG: LSH
Sampling for Efficient LLM Generation", section 4).

Tokens are drawn by hash tables, the nearer a key is to the query the more likely, and attended with
the logarithm of that likelihood taken from their logits: an estimate of full attention, where a
top-k leaves many small weights out. Keys, values and tables live on the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.ragged import stacked
from methods.magicpig.tables import KERNELS, HashedSample, Tables, likelihood, meets

WINDOW = 8  # last queries of the prompt, by which a budget is met


@dataclass(eq=False)
class MagicPIG(Method):
    """Attend sinks, the prompt's last tokens and generated ones, and of the others a sample, of
    each query head.

    How many a step samples is chance. A budget C is their mean with sinks and local tokens, by the
    prompt's last queries: each layer has the most bits of a code, up to `bits`, with which no more
    than `tables` tables sample enough, and the fewest tables that do. Without a budget it has
    `bits` and `tables`.

    Where generated tokens count, the local ones are the most recent of all, and the prompt's others
    stay in the tables. With unified accounting a KV head attends C at most: its query heads look up
    no further table that would find more.

    Parameters
    ----------
    bits
        K, of a code.
    tables
        L.
    sinks
        first tokens, always attended; C / 16 where that is less.
    local
        last tokens of the prompt, always attended; C / 4 where that is less.

    Raises
    ------
    ValueError
        a code of more than 16 bits.
    """

    needs = Needs(home="host", host_keys=True, query_window=WINDOW)

    bits: int = 10
    tables: int = 150
    sinks: int = 4
    local: int = 64

    def __post_init__(self) -> None:
        if self.bits > 16:
            raise ValueError(f"bits={self.bits}: a table has 2^bits buckets; expected 16 at most")

    def check_options(self, budget: Budget) -> None:
        """Hash tables need a compiler."""
        super().check_options(budget)
        KERNELS.require()

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Draw the directions of each row, which all layers and heads share as in the published
        server.
        """
        if budget.unified and budget.size is None:
            raise ValueError(
                "budget=null: with protocol.accounting=unified a KV head attends C at most;"
                " expected tokens, such as 256, or a fraction of the prompt"
            )
        super().begin(shape, budget, view, context)
        self.directions = [
            torch.randn(
                self.tables, self.bits, shape.head_dim, generator=context.generator(0, row=row)
            )
            for row in range(shape.batch)
        ]
        self.hashed: dict[int, list[Tables | None]] = {}  # of each layer and row
        # of what a query head attends of C: how many times, sum, and sum of squares
        self.moments = [0.0, 0.0, 0.0]

    def _zones(self, row: int) -> tuple[int, int]:
        """Sinks and local tokens of a row."""
        if self.budget.size is None:
            return self.sinks, self.local
        capacity = self.capacities[row]
        return min(self.sinks, capacity // 16), min(self.local, capacity // 4)

    # -- tables ------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Hash the keys that no step is sure to attend."""
        self.hashed[layer] = []
        for row, length in enumerate(prompt.lengths):
            sinks, local = self._zones(row)
            stop = length if self.budget.counts_generated else length - local
            whole = stop <= sinks or not self.budget.counts_generated and self._holds(row, length)
            keys = prompt.keys[row, :, sinks:stop]
            queries = prompt.queries[row, :, -length:]
            self.hashed[layer].append(None if whole else self._tables(row, keys, queries))

    def _holds(self, row: int, count: int) -> bool:
        """Whether the budget of a row has room for so many tokens."""
        return self.budget.size is not None and count <= self.capacities[row]

    def _tables(self, row: int, keys: torch.Tensor, queries: torch.Tensor) -> Tables:
        """Tables over keys [Hkv, n, D], with as many bits as the last queries [Hq, W, D] of the
        prompt ask for.
        """
        sinks, local = self._zones(row)
        bits, tables = self.bits, self.tables
        if self.budget.size is not None:
            target = self.capacities[row] - sinks - local
            bits, tables = self._sizes(keys.float(), queries.float(), target)
        return Tables(keys, sinks, self.directions[row][:tables], bits)

    def _sizes(self, keys: torch.Tensor, queries: torch.Tensor, target: int) -> tuple[int, int]:
        """Bits and tables with which `target` of keys [Hkv, n, D] are sampled on average, by
        queries [Hq, W, D].
        """
        centred = keys - keys.mean(dim=1, keepdim=True)
        grouped = queries.unflatten(0, (len(keys), -1))  # [Hkv, G, W, D]
        products = grouped @ centred[:, None].transpose(2, 3)
        norms = grouped.norm(dim=3)[..., None] * centred.norm(dim=2)[:, None, None]
        cosines = products / norms.clamp(min=1e-20)

        def enough(bits: int, tables: int) -> bool:
            sampled = likelihood(meets(cosines, bits), tables)
            if self.budget.unified:
                sampled = 1 - (1 - sampled).prod(dim=1, keepdim=True)  # by any head of the group
            return float(sampled.sum(dim=3, dtype=torch.float64).mean()) >= target

        bits = 1 + bisect_right(
            range(2, self.bits + 1), False, key=lambda bits: not enough(bits, self.tables)
        )
        tables = 2 + bisect_left(
            range(2, self.tables), True, key=lambda tables: enough(bits, tables)
        )
        return bits, tables

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Tokens that are always attended, then those that the tables sample, with their
        weights.
        """
        queries, keys = query[:, :, 0].float().cpu(), self.view.host_keys(layer)
        rows = [self._attended(layer, row, queries[row], keys[row]) for row in range(len(queries))]
        index, weights = zip(*rows, strict=True)
        return Selection(stacked(index), stacked(weights).to(query.device))

    def _attended(
        self, layer: int, row: int, query: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [Hq, n] that query [Hq, D] of a row with keys [Hkv, S, D] attends, trailing -1, and
        their weights.
        """
        length, tables = self.view.lengths(layer)[row], self.hashed[layer][row]
        sinks, start = self._zones(row)[0], self._start(layer, row)
        if self._attends_all(layer, row):
            sinks = start = length
            tables = None
        always = sinks + length - start
        if tables is None:
            first = torch.cat([torch.arange(sinks), torch.arange(start, length)])
            index = first.expand(len(query), -1)
            sample = HashedSample(index, torch.zeros(index.shape), [0] * len(query))
        else:
            room = self.capacities[row] - always if self.budget.unified else None
            sample = tables.sample(query, keys, (sinks, start, length), room)
        self._count(layer, row, always, sample.counts)
        return sample.ids, sample.weights

    def _count(self, layer: int, row: int, always: int, sampled: list[int]) -> None:
        """Note that query heads attended `always` tokens, and sampled so many more, whose keys were
        read.
        """
        self.view.count_read(layer, sum(sampled))
        if not self.budget.counts_generated:  # generated tokens are on top of C
            always -= self.view.lengths(layer)[row] - self.shape.lengths[row]
        counts = [always + count for count in sampled]
        more = len(counts), sum(counts), sum(count * count for count in counts)
        self.moments = [total + new for total, new in zip(self.moments, more, strict=True)]

    def _attends_all(self, layer: int, row: int) -> bool:
        """Whether a row leaves nothing to sample from, or its budget has room for all that it has
        seen.
        """
        if self.budget.counts_generated and self.budget.size is not None:
            return self._holds(row, self.view.lengths(layer)[row])
        return self.hashed[layer][row] is None

    def _start(self, layer: int, row: int) -> int:
        """Where the most recent tokens begin that a step is sure to attend."""
        sinks, local = self._zones(row)
        counted = self.budget.counts_generated
        lengths = self.view.lengths(layer) if counted else self.shape.lengths
        return max(lengths[row] - local, sinks)

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """C with unified accounting; else there is no most, but a mean that the prompt's last
        queries have.
        """
        return self.budget.tokens(length) if self.budget.unified else None

    def report(self) -> dict[str, float]:
        """Bits and tables of a layer, on average; mean and deviation of what each query head
        attends of C.
        """
        built = [tables for rows in self.hashed.values() for tables in rows if tables is not None]
        if not built or not self.moments[0]:
            return {}
        mean, square = (total / self.moments[0] for total in self.moments[1:])
        return {
            "bits": sum(tables.bits for tables in built) / len(built),
            "tables": sum(tables.tables for tables in built) / len(built),
            "query_head_mean": mean,
            "query_head_deviation": max(square - mean**2, 0) ** 0.5,
        }
