"""LycheeCluster (2026): chunks that follow the structure of the text, found by a hierarchical index
with upper bounds.

The past of a sequence is sinks, chunks of 8 to 16 tokens, and a buffer of recent tokens. A step
attends the sinks, the buffer, and the chunks of the clusters whose members can have the largest
inner product with the query. The buffer holds what was generated since it was full; then it becomes
chunks, which are grafted onto the nearest clusters, and is empty again (section 4 and algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.chunking import Chunking, Packing, Text, cutter, keys_of_row
from methods.blocks.kernels import is_readable
from methods.blocks.ragged import stacked, without_gaps
from methods.blocks.topk import interleave
from methods.lychee.clustering import ClusterLayout, pooled
from methods.lychee.index import ClusterIndex
from methods.lychee.search import ChunkSearch


@dataclass(frozen=True)
class RowRegions:
    """How the past of one row is divided; the same in all layers and heads, for chunks follow the
    text alone.

    Attributes
    ----------
    text
        its chunks; after them the buffer.
    capacity
        the row's budget C in tokens.
    sinks
        first tokens, always attended.
    room
        most tokens of chunks that a step attends.
    """

    text: Text
    capacity: int
    sinks: int
    room: int

    @property
    def sparse(self) -> bool:
        """There is more than a step attends."""
        return self.text.length > self.capacity and self.text.end - self.sinks > self.room

    def fixed(self) -> torch.Tensor:
        """The tokens always attended: buffer, newest first, and sinks; of a row that is not sparse
        all.
        """
        newest = torch.arange(self.text.length - 1, self.first - 1, -1)
        return torch.cat([newest, torch.arange(self.sinks)])

    @property
    def first(self) -> int:
        """The oldest of the newest tokens, which are always attended."""
        return self.text.end if self.sparse else self.sinks

    @property
    def most_new(self) -> int:
        """Tokens that can be the newest ones, until some of them become chunks."""
        return self.text.most if self.sparse else max(self.capacity, self.room + self.text.most)


class Split(NamedTuple):
    """Tokens of a budget that are sinks, those of the buffer, and those of chunks."""

    sinks: int
    buffer: int
    room: int


@dataclass(frozen=True)
class LycheeOptions(ClusterLayout):
    """All options of the method."""

    sinks: int = 16  # first tokens, always attended
    buffer: int = 128  # most recent tokens that are not in a chunk yet, at most
    # the prompt's last tokens begin in the buffer; else it begins empty, as in algorithm 1
    seed_buffer: bool = False
    # what leaves a full buffer: all of it, as in algorithm 1, or its oldest chunk
    packing: Packing = "buffer"
    chunking: Chunking = "structure"  # chunks end at delimiters; fixed: all have `max_chunk` tokens
    min_chunk: int = 8  # tokens of a chunk
    max_chunk: int = 16
    # by the mean bound over the query group, one choice for all; query_head: each its own
    selection: Literal["kv_head", "query_head"] = "kv_head"
    ub_weight: Literal[1, 0] = 1  # see `ChunkSearch`, this and the next
    units_searched: int = 16

    def __post_init__(self) -> None:
        if self.min_chunk > self.max_chunk:
            raise ValueError(f"min_chunk={self.min_chunk}: at most max_chunk={self.max_chunk}")
        if self.buffer < self.max_chunk:
            raise ValueError(
                f"buffer={self.buffer}: at least max_chunk={self.max_chunk}, for a chunk is cut"
                " when it is full"
            )


class LycheeCluster(Method):
    """Attend sinks, buffer, and C - sinks tokens of the best clusters' chunks.

    As published the buffer stands outside C. Where generated tokens count (unified accounting, or
    generated=counted), min(sinks, C / 16) sinks, a buffer of C / 4 and chunks share C. A sequence
    within C is attended whole; its index is built once there are more chunks than a step attends.
    """

    options_type = LycheeOptions

    def __init__(self, options: LycheeOptions) -> None:
        self.options = options
        self.needs = Needs(token_text=options.chunking == "structure", host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Nothing is cut or indexed yet."""
        super().begin(shape, budget, view, context)
        options = self.options
        self.cutter = cutter(options.chunking, options.min_chunk, options.max_chunk, context.pieces)
        self.rows: list[RowRegions] = []
        # of each row, the same in all layers of a step
        self.fixed: list[torch.Tensor] = []
        self.newest: dict[torch.device, list[torch.Tensor]] = {}  # on a GPU, without the sinks
        self.counting: dict[torch.device, torch.Tensor] = {}  # 0, 1, 2, ...
        self.indexes: dict[int, list[ClusterIndex | None]] = {}

    def _split(self, capacity: int) -> Split:
        """How a budget of `capacity` tokens is divided."""
        sinks, buffer = self.options.sinks, self.options.buffer
        if not self.budget.counts_generated:
            return Split(sinks, buffer, capacity - sinks)
        sinks = min(sinks, capacity // 16)
        buffer = max(capacity // 4, self.options.max_chunk)
        return Split(sinks, buffer, capacity - sinks - buffer)

    def check_budget(self) -> None:
        """Refuse what leaves no room for chunks, too: compiled code writes lists of this length."""
        super().check_budget()
        for capacity in self.capacities:
            split = self._split(capacity)
            if split.room < 1:
                taken = f"{split.sinks} sinks and a buffer of {split.buffer} tokens"
                raise ValueError(f"budget={capacity}: {taken} leave no chunk; expected more tokens")

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Cut the prompt into chunks, once for all layers, and cluster those of this
        layer's keys.
        """
        if not self.rows:
            ids = prompt.token_ids.cpu()
            self.rows = [
                self._regions(ids[row, :length], self.capacities[row])
                for row, length in enumerate(prompt.lengths)
            ]
        self.indexes[layer] = [
            self._index(layer, number, keys) if row.sparse else None
            for number, (row, keys) in enumerate(zip(self.rows, prompt.keys, strict=True))
        ]

    def _regions(self, ids: torch.Tensor, capacity: int) -> RowRegions:
        split, options = self._split(capacity), self.options
        sinks = min(split.sinks, len(ids))
        text = Text(
            ids,
            self.cutter,
            split.buffer,
            self.shape.device,
            first=sinks,
            whole_prompt=not options.seed_buffer,
            packing=options.packing,
        )
        return RowRegions(text, capacity, sinks, split.room)

    def _index(self, layer: int, row: int, keys: torch.Tensor) -> ClusterIndex:
        """An index of a row's chunks so far, from keys [Hkv, n, D] of all tokens up to
        their end.
        """
        chunks = self.rows[row].text.chunks.on(keys.device)
        representatives = pooled(keys, chunks.bounds, self.options.pooling)
        generator = self.context.generator(layer, row=row)
        return ClusterIndex(representatives, chunks.lengths, self.options, keys.dtype, generator)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """Read the new tokens; a full buffer, or its oldest tokens, become chunks."""
        for row, token in zip(self.rows, tokens.tolist(), strict=bool(self.rows)):
            row.text.append(token)
        if self.shape.device.type == "cpu":
            self.fixed = [row.fixed() for row in self.rows]

    def end_step(self) -> None:
        """Forget what was the same in all layers of the step."""
        self.newest = {}

    @property
    def layout(self) -> object:
        """How much of each text is in chunks; None: that changes now."""
        indexes = self.indexes[self.shape.sparse_layers[0]]
        rows = [*zip(self.rows, indexes, strict=True)]
        if any(row.text.cut or (row.sparse and index is None) for row, index in rows):
            return None
        return [(row.text.end, row.sparse) for row in self.rows]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Index a row that has become sparse; graft the chunks that have left the buffer, oldest
        first.
        """
        for number, (row, index) in enumerate(zip(self.rows, self.indexes[layer], strict=True)):
            end, cut = row.text.end, row.text.cut
            if index is not None and cut:
                keys = keys_of_row(self.view, layer, number, end - sum(cut), end)
                bounds = torch.tensor([0, *accumulate(cut)], device=keys.device)
                representatives = pooled(keys, bounds, self.options.pooling)
                for chunk, length in enumerate(cut):
                    index.graft(representatives[:, chunk], length)
            elif index is None and row.sparse:
                keys = keys_of_row(self.view, layer, number, 0, end)
                self.indexes[layer][number] = self._index(layer, number, keys)

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """The buffer, newest first, the sinks, and the chunks of the best clusters."""
        per_query_head = self.options.selection == "query_head" and not self.budget.counts_generated
        heads = self.shape.query_heads if per_query_head else self.shape.kv_heads
        if not per_query_head and not any(row.sparse for row in self.rows):
            return None
        grouped = query[:, :, 0].unflatten(1, (self.shape.kv_heads, -1))
        joins = self.options.selection == "query_head" and self.budget.counts_generated
        if is_readable(query) and not joins:
            return Selection(self._compiled(layer, grouped.float().contiguous(), heads))
        lists, mean = [], self.options.selection == "kv_head"
        for row, index in enumerate(self.indexes[layer]):
            if index is not None and query.is_cuda and not joins:
                of_row, seen = self.rows[row], self.view.seen(layer)[row]
                chunks, room = of_row.text.chunks.on(query.device), of_row.room
                fixed = seen, of_row.first, of_row.most_new, of_row.sinks
                how = self._search(of_row), fixed
                lists.append(index.best_tokens(grouped[row], mean, chunks, room, *how))
                continue
            parts = [tokens.expand(heads, -1) for tokens in self._fixed(layer, row, query)]
            if index is not None:
                parts.append(self._best(self.rows[row], index, grouped[row].float()))
            joined = torch.cat(parts, dim=1)
            lists.append(without_gaps(joined) if query.is_cuda else joined)
        return Selection(stacked(lists))

    def _fixed(self, layer: int, row: int, query: torch.Tensor) -> list[torch.Tensor]:
        """`RowRegions.fixed` in parts, on a GPU in lists that are as long in every step until some
        of the tokens become chunks.
        """
        device = query.device
        if device.type == "cpu":
            return [self.fixed[row]]
        most = max(max(each.most_new, each.sinks) for each in self.rows)
        if device not in self.counting or len(self.counting[device]) < most:
            self.counting[device] = torch.arange(most, device=device)
        if device not in self.newest:
            self.newest[device] = [
                self._newest(each, seen)
                for each, seen in zip(self.rows, self.view.seen(layer), strict=True)
            ]
        return [self.newest[device][row], self.counting[device][: self.rows[row].sinks]]

    def _newest(self, row: RowRegions, seen: torch.Tensor) -> torch.Tensor:
        """The newest tokens of a row on a GPU that has seen so many, trailing -1."""
        ids = seen - 1 - self.counting[seen.device][: row.most_new]
        return ids.masked_fill(ids < row.first, -1)

    def _compiled(self, layer: int, grouped: torch.Tensor, heads: int) -> torch.Tensor:
        """The same on a CPU, where no lists are joined: [B, heads, n], for queries [B, Hkv, G,
        D].
        """
        mean, indexes = self.options.selection == "kv_head", self.indexes[layer]
        fixed = self.fixed
        rooms = [0 if index is None else self.rows[row].room for row, index in enumerate(indexes)]
        most = max(len(tokens) + room for tokens, room in zip(fixed, rooms, strict=True))
        lists, longest = torch.full((len(indexes), heads, most), -1), 0
        for number, (row, index) in enumerate(zip(self.rows, indexes, strict=True)):
            if index is None:
                lists[number, :, : len(fixed[number])] = fixed[number]
                longest = max(longest, len(fixed[number]))
                continue
            how, chunks = self._search(row), row.text.chunks
            most = index.write_best_tokens(
                grouped[number], mean, chunks, row.room, how, fixed[number], lists[number]
            )
            longest = max(longest, most)
        return lists[:, :, :longest]

    def _search(self, row: RowRegions) -> ChunkSearch:
        options = self.options
        return ChunkSearch(
            options.units_searched, options.ub_weight, options.min_chunk, row.text.short
        )

    def _best(self, row: RowRegions, index: ClusterIndex, queries: torch.Tensor) -> torch.Tensor:
        """Tokens of the best chunks for queries [Hkv, G, D]: [Hkv or Hq, n], trailing -1."""
        chunks, search = row.text.chunks.on(queries.device), self._search(row)
        mean = self.options.selection == "kv_head"
        if mean or not self.budget.counts_generated:
            return index.best_tokens(queries, mean, chunks, row.room, search)
        best = index.best_chunks(queries, queries.norm(dim=2), row.room, search)
        joined = best.flatten(0, 1)[None]
        best = interleave(joined, len(best), best[0].numel()).transpose(0, 1)
        return chunks.tokens(chunks.fitting(best, row.room), row.room).flatten(0, 1)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """Sinks, buffer and chunks: the chunks of each query head where they choose for
        themselves.
        """
        capacity = self.budget.tokens(length)
        if self.budget.counts_generated:
            return capacity
        lists = self.shape.group if self.options.selection == "query_head" else 1
        return self.options.sinks + lists * (capacity - self.options.sinks) + self.options.buffer
