"""LycheeCluster (2026): chunks that follow the structure of the text, found by a hierarchical index with upper bounds.

The past of a sequence is sinks, chunks of 8 to 16 tokens, and a buffer of recent tokens. A step attends the sinks, the
buffer, and the chunks of the clusters whose members can have the largest inner product with the query. When the buffer
is full its oldest tokens become a chunk, which is grafted onto the nearest cluster (section 4 and algorithm 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import pad

from kvbench.method import Budget, Context, Method, Needs, Prompt, Selection, Shape
from methods.blocks.chunking import Cutter, delimiters
from methods.blocks.topk import interleave
from methods.lychee.index import Build, Chunks, ClusterIndex, Layout, Pooling, Radii, Search, pooled

if TYPE_CHECKING:
    from kvbench.store import View


class Sequence:
    """How the past of one row is parted; the same in all layers and heads, for it follows the text alone.

    Args:
        ids: the prompt, [N] on the CPU.
        capacity: the row's budget C in tokens.
        sinks: first tokens, always attended.
        buffer: most tokens behind the last chunk, always attended.
        seed_buffer: the prompt's last tokens stay in the buffer; else the prompt is cut to its end.
        room: most tokens of chunks that a step attends.
        cutter: cuts the text.
        device: of the keys.

    Attributes:
        chunks: all chunks so far.
        end: where the last chunk ends and the buffer begins.
        grafted: tokens of the chunk that the newest token has pushed out of the buffer, or 0.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        capacity: int,
        sinks: int,
        buffer: int,
        seed_buffer: bool,
        room: int,
        cutter: Cutter,
        device: torch.device,
    ) -> None:
        self.capacity, self.sinks, self.buffer, self.room = capacity, min(sinks, len(ids)), buffer, room
        self._cutter = cutter
        bounds = self.sinks + cutter.bounds(ids[self.sinks :], buffer if seed_buffer else 0)
        self.chunks, self.end, self.grafted = Chunks(bounds.to(device)), int(bounds[-1]), 0
        self._recent = ids[self.end :].tolist()

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.end + len(self._recent)

    @property
    def sparse(self) -> bool:
        """There is more than a step attends."""
        return self.length > self.capacity and self.end - self.sinks > self.room

    def append(self, token: int) -> None:
        """Read the next token, and cut a chunk off the buffer if that is more than it holds."""
        self._recent.append(token)
        self.grafted = 0
        if len(self._recent) > self.buffer:
            ahead = torch.tensor(self._recent[: self._cutter.longest + 1])
            self.grafted = int(self._cutter.bounds(ahead)[1])
            self.end += self.grafted
            self.chunks = self.chunks.extended(self.end)
            del self._recent[: self.grafted]

    def fixed(self) -> torch.Tensor:
        """The tokens always attended: buffer, newest first, and sinks; of a row that is not sparse all."""
        device = self.chunks.bounds.device
        first = self.end if self.sparse else self.sinks
        newest = torch.arange(self.length - 1, first - 1, -1, device=device)
        return torch.cat([newest, torch.arange(self.sinks, device=device)])


class LycheeCluster(Method):
    """Attend sinks, buffer, and C - sinks tokens of the best clusters' chunks.

    As published the buffer stands outside C. Where generated tokens count (unified accounting, or generated=counted),
    min(sinks, C / 16) sinks, a buffer of C / 4 and chunks share C. A sequence within C is attended whole; its index is
    built once there are more chunks than a step attends.

    Args:
        sinks: first tokens, always attended.
        buffer: most recent tokens that are not in a chunk yet.
        seed_buffer: the prompt's last tokens begin in the buffer (the paper keeps no window of the prompt: false).
        chunking: "structure", chunks end at delimiters; "fixed", all have `max_chunk` tokens.
        min_chunk, max_chunk: tokens of a chunk.
        selection: "kv_head", by the mean bound over the query group, one choice for all; "query_head", each its own.
        ub_weight, units_searched: see `Search`.
        cluster_size, units, iterations, build, pooling, radii: see `Layout`.
    """

    def __init__(
        self,
        sinks: int = 16,
        buffer: int = 128,
        seed_buffer: bool = True,
        chunking: Literal["structure", "fixed"] = "structure",
        min_chunk: int = 8,
        max_chunk: int = 16,
        selection: Literal["kv_head", "query_head"] = "kv_head",
        ub_weight: Literal[1, 0] = 1,
        units_searched: int = 16,
        cluster_size: int = 2,
        units: int = 64,
        iterations: int = 10,
        build: Build = "full",
        pooling: Pooling = "mean",
        radii: Radii = "exact",
    ) -> None:
        if min_chunk > max_chunk:
            raise ValueError(f"min_chunk={min_chunk}: at most max_chunk={max_chunk}")
        if buffer < max_chunk:
            raise ValueError(f"buffer={buffer}: at least max_chunk={max_chunk}, for a chunk is cut when it is full")
        self.sinks, self.buffer, self.seed_buffer = sinks, buffer, seed_buffer
        self.chunking, self.min_chunk, self.max_chunk = chunking, min_chunk, max_chunk
        self.selection = selection
        self.search = Search(units_searched, ub_weight, min_chunk)
        self.layout = Layout(cluster_size, units, iterations, build, pooling, radii)
        self.needs = Needs(token_text=chunking == "structure")

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        super().begin(shape, budget, view, context)
        found = None
        if self.chunking == "structure":
            if context.pieces is None:
                raise ValueError(
                    "method.chunking=structure: the tokenizer gives no text of its tokens; use method.chunking=fixed"
                )
            found = delimiters(context.pieces)
        self.cutter = Cutter(self.min_chunk, self.max_chunk, found)
        self.rows: list[Sequence] = []
        self.indexes: dict[int, list[ClusterIndex | None]] = {}

    def _split(self, capacity: int) -> tuple[int, int, int]:
        """Sinks, buffer and tokens of chunks with a budget of `capacity` tokens."""
        if not self.budget.counts_generated:
            return self.sinks, self.buffer, capacity - self.sinks
        sinks, buffer = min(self.sinks, capacity // 16), max(capacity // 4, self.max_chunk)
        return sinks, buffer, capacity - sinks - buffer

    def prefill(self, layer: int, prompt: Prompt) -> None:
        if not self.rows:
            self.rows = [
                self._sequence(ids[:length].cpu(), capacity)
                for ids, length, capacity in zip(prompt.token_ids, prompt.lengths, self.capacities, strict=True)
            ]
        self.indexes[layer] = [
            self._index(layer, row, keys) if row.sparse else None
            for row, keys in zip(self.rows, prompt.keys, strict=True)
        ]

    def _sequence(self, ids: torch.Tensor, capacity: int) -> Sequence:
        sinks, buffer, room = self._split(capacity)
        return Sequence(ids, capacity, sinks, buffer, self.seed_buffer, room, self.cutter, self.shape.device)

    def _index(self, layer: int, row: Sequence, keys: torch.Tensor) -> ClusterIndex:
        """An index of the chunks so far, from keys [Hkv, n, D] of all tokens up to their end."""
        representatives = pooled(keys, row.chunks.bounds, self.layout.pooling)
        generator = self.context.generator(layer)
        return ClusterIndex(representatives, row.chunks.lengths, self.layout, keys.dtype, generator)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        for row, token in zip(self.rows, tokens.tolist(), strict=bool(self.rows)):
            row.append(token)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for number, row in enumerate(self.rows):
            index = self.indexes[layer][number]
            if index is None and row.sparse:
                self.indexes[layer][number] = self._index(layer, row, self._keys(layer, number, 0, row.end))
            elif index is not None and row.grafted:
                keys = self._keys(layer, number, row.end - row.grafted, row.end)
                whole = torch.tensor([0, row.grafted], device=keys.device)
                index.graft(pooled(keys, whole, self.layout.pooling)[:, 0], row.grafted)

    def _keys(self, layer: int, row: int, first: int, end: int) -> torch.Tensor:
        """Keys [Hkv, n, D] of the tokens first .. end - 1 of one row."""
        ids = torch.full((self.shape.batch, 1, end - first), -1)
        ids[row] = torch.arange(first, end)
        return self.view.keys(layer, ids.to(self.shape.device))[row]

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        own = self.selection == "query_head" and not self.budget.counts_generated
        heads = self.shape.query_heads if own else self.shape.kv_heads
        if not own and not any(row.sparse for row in self.rows):
            return None
        grouped = query[:, :, 0].float().unflatten(1, (self.shape.kv_heads, -1))
        lists = []
        for row, index, queries in zip(self.rows, self.indexes[layer], grouped, strict=True):
            tokens = row.fixed().expand(heads, -1)
            if index is not None:
                tokens = torch.cat([tokens, self._best(row, index, queries)], dim=1)
            lists.append(tokens)
        longest = max(tokens.shape[1] for tokens in lists)
        return Selection(torch.stack([pad(tokens, (0, longest - tokens.shape[1]), value=-1) for tokens in lists]))

    def _best(self, row: Sequence, index: ClusterIndex, queries: torch.Tensor) -> torch.Tensor:
        """Tokens of the best chunks for queries [Hkv, G, D]: [Hkv or Hq, n], trailing -1."""
        norms = queries.norm(dim=2)
        if self.selection == "kv_head":
            queries, norms = queries.mean(dim=1, keepdim=True), norms.mean(dim=1, keepdim=True)
        chunks = index.best_chunks(queries, norms, row.room, self.search)
        if self.selection == "query_head" and self.budget.counts_generated:
            heads, group, count = chunks.shape
            chunks = interleave(chunks.view(1, -1, count), heads, [group * count]).view(heads, 1, -1)
        return row.chunks.tokens(row.chunks.fitting(chunks, row.room)).flatten(0, 1)

    def rule(self, length: int, generated: int) -> int:
        capacity = self.budget.tokens(length)
        if self.budget.counts_generated:
            return capacity
        lists = self.shape.group if self.selection == "query_head" else 1
        return self.sinks + lists * (capacity - self.sinks) + self.buffer
