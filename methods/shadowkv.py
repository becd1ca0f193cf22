"""ShadowKV: low-rank keys on the device, values on the host (Sun et al. 2025, "ShadowKV: KV Cache
in Shadows for High-Throughput Long-Context LLM Inference", section 4).

Before RoPE the keys of a prompt have a low rank. Their factors stay on the device, with the mean
key of each chunk of 8 tokens and with the chunks whose keys resemble their mean least. A query
picks chunks by their means; their keys are rebuilt from the factors, and only their values are
brought up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity, embedding, pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.chunking import keys_of_row
from methods.blocks.products import products
from methods.blocks.ragged import stacked
from methods.blocks.topk import top_earliest

SPARE_CHUNKS = 64  # means to make room for when generated tokens have filled the last ones


def low_rank(keys: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two factors whose product is, of all of this rank, nearest to the keys of all KV heads side
    by side.

    That is their truncated SVD, found by the eigenvectors of a matrix [Hkv * D, Hkv * D], however
    long the prompt.

    Parameters
    ----------
    keys
        [Hkv, n, D].

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        U S [n, rank] and V [Hkv, rank, D] in float64.
    """
    flat = keys.double().transpose(0, 1).flatten(1)
    basis = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -rank:]  # eigenvalues ascend
    return flat @ basis, basis.T.unflatten(1, (keys.shape[0], -1)).transpose(0, 1)


@dataclass(eq=False)
class ShadowKV(Method):
    """Attend the best C / 8 chunks of each KV head, outlying chunks, the prompt's last tokens and
    generated ones.

    Chunks are ranked by the softmax of the query's products with their means, the largest of the
    group's query heads. Outlying, last and generated tokens are exact, and outside C. Where
    generated tokens count, outliers have an eighth of C at most and recent tokens a quarter, and
    generated tokens before these are in chunks that are ranked as others are. A prompt that the
    budget covers stays on the device as it is.

    Parameters
    ----------
    chunk_size
        tokens of a chunk.
    outliers
        chunks with the lowest least cosine of a key and the mean.
    local
        last whole chunks of the prompt; they stay, with the tokens after them.
    rank
        of the keys, as a share of Hkv * D.
    """

    needs = Needs(rotation=True, on_drop="offload", rebuilds_keys=True)

    chunk_size: int = 8
    outliers: int = 48
    local: int = 4
    rank: float = 160 / 1024

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Share the budget of each row out; nothing is summed up yet."""
        super().begin(shape, budget, view, context)
        zones = [self._zones(capacity) for capacity in self.capacities]
        self.last = [local for _, local in zones]  # of each row, chunks
        self.outlier_counts = [
            min(outliers, self._chunks(row, shape.lengths[row]))
            for row, (outliers, _) in enumerate(zones)
        ]
        self.means: dict[int, torch.Tensor] = {}  # of each layer, [B, Hkv, P, D]
        # [B, Hkv, P] bool, outliers, and chunks that are not there
        self.closed: dict[int, torch.Tensor] = {}
        self.outlying: dict[int, list[torch.Tensor]] = {}  # of each row, chunks [Hkv, n]
        # [B, N, r] and [B, Hkv, r, D], where needed
        self.factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _zones(self, capacity: int) -> tuple[int, int]:
        """Outlying chunks, and last ones, with a budget of `capacity` tokens."""
        if not self.budget.counts_generated:
            return self.outliers, self.local
        chunks = capacity // self.chunk_size
        return min(self.outliers, chunks // 8), min(self.local, chunks // 4)

    def _chunks(self, row: int, length: int) -> int:
        """Chunks before the last tokens, when a row has `length` tokens."""
        if not self.budget.counts_generated:
            length = self.shape.lengths[row]
        return max(0, length // self.chunk_size - self.last[row])

    def _room(self, row: int, length: int) -> int:
        """Chunks to choose when a row has `length` tokens: all but the outliers, where C covers
        them.
        """
        size, chunks = self.chunk_size, self._chunks(row, length)
        capacity = self.capacities[row]
        if self.budget.counts_generated and capacity < length:
            capacity -= self.outlier_counts[row] * size + length - chunks * size
        return min(capacity // size, chunks - self.outlier_counts[row])

    # -- index -------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Means, outliers, and where C does not cover a prompt, factors; what is not exact then
        leaves the device.
        """
        size = self.chunk_size
        counts = [self._chunks(row, length) for row, length in enumerate(prompt.lengths)]
        most = max(counts)
        chunks = prompt.keys[:, :, : most * size].unflatten(2, (most, size)).float()
        means = chunks.mean(dim=3)
        ends = torch.tensor(counts, device=means.device)[:, None, None]
        absent = torch.arange(most, device=means.device) >= ends
        closed = absent.expand(means.shape[:3]).clone()
        similarity = cosine_similarity(means[:, :, :, None], chunks, dim=4).amin(dim=3)
        outliers = top_earliest(
            (-similarity).masked_fill(closed, -torch.inf), max(self.outlier_counts)
        )
        self.outlying[layer] = []
        for row, count in enumerate(self.outlier_counts):
            closed[row].scatter_(1, outliers[row, :, :count], True)
            self.outlying[layer].append(outliers[row, :, :count])
        self.means[layer] = means.masked_fill(absent[..., None], 0).to(prompt.keys.dtype)
        self.closed[layer] = closed
        covered = [
            self._room(row, length) == counts[row] - self.outlier_counts[row]
            for row, length in enumerate(prompt.lengths)
        ]
        if not all(covered):
            self._leave_device(layer, prompt, covered)

    def _leave_device(self, layer: int, prompt: Prompt, covered: list[bool]) -> None:
        """Keep outliers and last tokens on the device, and of all keys the factors; a prompt that
        is covered stays.
        """
        heads, dim = prompt.keys.shape[1], prompt.keys.shape[3]
        rank = math.ceil(self.rank * heads * dim)
        tokens = prompt.keys.new_zeros(len(covered), prompt.keys.shape[2], rank)
        basis = prompt.keys.new_zeros(len(covered), heads, rank, dim)
        rotation, ids = self.context.rotation, []
        assert rotation is not None
        for row, length in enumerate(prompt.lengths):
            at = torch.arange(length, device=prompt.keys.device)
            if covered[row]:
                ids.append(at.expand(heads, -1))
                continue
            keys = prompt.keys[row : row + 1, :, :length].float()
            keys = rotation.back(keys, at[None, None])
            tokens[row, :length], basis[row] = low_rank(keys[0], rank)
            ids.append(self._attended(layer, row, length, self.outlying[layer][row][:, :0]))
        self.factors[layer] = tokens, basis
        self.view.keep(layer, stacked(ids))

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Where generated tokens count, a chunk that leaves the recent ones is summed up."""
        for row, length in enumerate(self.view.lengths(layer)):
            new = self._chunks(row, length) - 1
            if new < self._chunks(row, length - 1):
                continue
            if new >= self.means[layer].shape[2]:
                self.means[layer] = pad(self.means[layer], (0, 0, 0, SPARE_CHUNKS))
                self.closed[layer] = pad(self.closed[layer], (0, SPARE_CHUNKS), value=True)
            first = new * self.chunk_size
            keys = keys_of_row(self.view, layer, row, first, first + self.chunk_size)
            self.means[layer][row, :, new] = keys.float().mean(dim=1)
            self.closed[layer][row, :, new] = False

    def _attended(self, layer: int, row: int, length: int, chosen: torch.Tensor) -> torch.Tensor:
        """The tokens of chosen chunks [Hkv, n], of outlying ones, and recent ones of a row of
        `length`: [Hkv, m].
        """
        chunks = torch.cat([chosen, self.outlying[layer][row]], dim=1)
        offsets = torch.arange(self.chunk_size, device=chunks.device)
        tokens = chunks[..., None] * self.chunk_size + offsets
        first = self._chunks(row, length) * self.chunk_size
        recent = torch.arange(first, length, device=chunks.device)
        return torch.cat([tokens.flatten(1), recent.expand(len(chunks), -1)], dim=1)

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The best chunks' tokens, and those beside them."""
        lengths = self.view.lengths(layer)
        rooms = [self._room(row, length) for row, length in enumerate(lengths)]
        best = top_earliest(self._scores(layer, query), max(rooms))
        rows = [
            self._attended(layer, row, lengths[row], best[row, :, :room])
            for row, room in enumerate(rooms)
        ]
        index = stacked(rows)
        if layer not in self.factors:
            return Selection(index)
        rebuilt = self._rebuilt(layer, index[:, :, : max(rooms) * self.chunk_size])
        return Selection(index, keys=rebuilt.to(query.dtype))

    def _scores(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, P], the log of the largest softmax that a query head of the group gives each
        chunk.
        """
        logits = self.shape.logits(products(query, self.means[layer]))
        logits = logits.masked_fill(self.closed[layer][:, :, None], -torch.inf)
        return logits.log_softmax(dim=3).amax(dim=2)

    def _rebuilt(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Keys [B, Hkv, M, D] of tokens [B, Hkv, M]; of those not of the prompt, any."""
        tokens, basis = self.factors[layer]
        rotation = self.context.rotation
        assert rotation is not None
        index = index.clamp(0, tokens.shape[1] - 1)
        factors = torch.stack([*map(embedding, index, tokens)])
        return rotation.turn(factors.float() @ basis.float(), index)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C and what is outside: outliers, last tokens and generated ones; C alone where these
        count.
        """
        capacity = self.budget.tokens(length)
        if self.budget.counts_generated:
            return capacity
        return capacity + (self.outliers + self.local + 1) * self.chunk_size - 1 + generated
