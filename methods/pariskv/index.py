"""The index of one layer's retrieval zones: the codes of their tokens, kept token after token, and
the search.

What is found in a row's zone is numbered as in its sequence. `VectorIndex` computes in torch on the
device of the queries, `KernelIndex` in C++ on the CPU; the same keys give the same codes and the
same answers. On a device a token's codes hold no bit twice, 96 bytes where D = 128: ids are the
signs. For the CPU they stand in the codes once more, 112 bytes: a vote reads the ids of 64 tokens
in a row, and a rerank the codes of one token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.kernels.library import CppFile
from methods.blocks.heads import in_threads
from methods.pariskv import codebook, vectorised
from methods.pariskv.codebook import CENTROIDS, SUBSPACE, Quotas

# built so that sums and products are those of `vectorised`, to the bit
KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"), is_exact=True)

LANES = 64  # tokens whose votes are counted at once
BLOCK = 4096  # keys that are encoded at once
SPARE = 16  # a share of 1 / SPARE more is reserved for tokens to come

MOST = "candidates", "retrieved"  # of `Quotas`, what sizes a search's tensors

WORTH_A_THREAD = 1 << 11  # tokens; the votes of fewer are counted before another thread has begun


class Index(ABC):
    """Codes of the retrieval zones of one layer.

    Parameters
    ----------
    batch, kv_heads
        rows and KV heads.
    signs
        [D], see `codebook.random_signs`; its device is that of the index.
    begins
        of each row, the token with which its zone begins; None: 0.

    Attributes
    ----------
    lengths
        tokens in the zone of each row.
    capacity
        tokens that a zone has room for, a multiple of 64.
    counts
        [B, Hkv, S, 256] int32, S = D / 8: tokens with each id, which are the signs of a subspace.
    """

    def __init__(
        self, batch: int, kv_heads: int, signs: torch.Tensor, begins: Sequence[int] | None = None
    ) -> None:
        self.signs, self.lengths, self.capacity = signs, [0] * batch, 0
        self.begins = [0] * batch if begins is None else begins
        self.counts = torch.zeros(
            batch,
            kv_heads,
            len(signs) // SUBSPACE,
            CENTROIDS,
            dtype=torch.int32,
            device=signs.device,
        )

    def extend(self, row: int, keys: torch.Tensor) -> None:
        """Append keys [Hkv, n, head_dim] to the zone of a row.

        Raises
        ------
        ValueError
            a key is not finite, or too large to square.
        """
        first, last = self.lengths[row], self.lengths[row] + keys.shape[1]
        if last > self.capacity:
            self.capacity = -(-(last + self._spare(last)) // LANES) * LANES
            self._grow()
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            self._encode(row, start, keys[:, start - first : stop - first].to(self.signs.device))
        self.lengths[row] = last

    def _spare(self, length: int) -> int:
        """Tokens to reserve room for beside the `length` that a zone has."""
        return length // SPARE

    @abstractmethod
    def _grow(self) -> None:
        """Make room for `capacity` tokens in each zone."""

    @abstractmethod
    def _encode(self, row: int, start: int, keys: torch.Tensor) -> None:
        """Store the codes of keys [Hkv, n, head_dim] from index `start` on, and count their ids."""

    @abstractmethod
    def ranked(
        self, queries: torch.Tensor, quotas: Mapping[int, Quotas]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The tokens that seem to have the largest product with the mean of their group's queries.

        Parameters
        ----------
        queries
            [B, Hkv, G, head_dim].
        quotas
            of each row that asks.

        Returns
        -------
        dict[int, tuple[torch.Tensor, torch.Tensor]]
            for each of these rows, [Hkv, k] int64 tokens of its zone, best first, and the estimated
            products, float32; -1 and -inf where the estimate is NaN.
        """

    def search(
        self, queries: torch.Tensor, quotas: Mapping[int, Quotas]
    ) -> dict[int, torch.Tensor]:
        """`ranked` without the estimates."""
        return {row: tokens for row, (tokens, _) in self.ranked(queries, quotas).items()}


class VectorIndex(Index):
    """All rows and KV heads at once, in torch.

    Parameters
    ----------
    to_come
        tokens that a zone gets after the first ones, at most; None: unknown.
    asks
        what searches of all layers on this device have last asked for, as a tensor there; made
        here if None.

    Attributes
    ----------
    codes
        of [B, Hkv, capacity] tokens.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        signs: torch.Tensor,
        begins: Sequence[int] | None = None,
        to_come: int | None = None,
        asks: dict[Any, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(batch, kv_heads, signs, begins)
        self._to_come, self._asks = to_come, {} if asks is None else asks
        none = torch.zeros(batch, kv_heads, 0, signs.shape[0], device=signs.device)
        self.codes = vectorised.encode(none, signs)

    def _spare(self, length: int) -> int:
        return super()._spare(length) if self._to_come is None else self._to_come

    def _grow(self) -> None:
        self.codes = vectorised.Codes(*(_longer(part, 2, self.capacity) for part in self.codes))

    def _encode(self, row: int, start: int, keys: torch.Tensor) -> None:
        here = slice(start, start + keys.shape[1])
        codes = vectorised.encode(keys, self.signs)
        for part, added in zip(self.codes, codes, strict=True):
            part[row, :, here] = added
        self.counts[row] += vectorised.count_ids(codes.ids)

    def ranked(
        self, queries: torch.Tensor, quotas: Mapping[int, Quotas]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """See `Index.ranked`."""
        if not quotas:
            return {}
        most = [max(getattr(of, name) for of in quotas.values()) for name in MOST]
        tokens, estimates = vectorised.search_codes(
            queries, self.signs, *self.codes, self.counts, self._asked(quotas), *most
        )
        return {
            row: (tokens[row, :, : of.retrieved], estimates[row, :, : of.retrieved])
            for row, of in quotas.items()
        }

    def _asked(self, quotas: Mapping[int, Quotas]) -> torch.Tensor:
        """What each row asks for, as `search_codes` takes it; uploaded when it changes."""
        tiers = len(next(iter(quotas.values())).tiers)
        rows = tuple(
            (length, begin, of.candidates, of.retrieved, *of.tiers) if of else (0,) * (4 + tiers)
            for row, (length, begin) in enumerate(zip(self.lengths, self.begins, strict=True))
            for of in [quotas.get(row)]
        )
        if rows not in self._asks:
            self._asks.clear()
            asks = torch.tensor(rows).T.contiguous()
            if self.signs.is_cuda:
                asks = asks.pin_memory().to(self.signs.device, non_blocking=True)
            self._asks[rows] = asks
        return self._asks[rows]


class KernelIndex(Index):
    """One KV head after the other in each thread, in C++.

    Parameters
    ----------
    pool
        where threads that encode a prompt come from.

    Attributes
    ----------
    ids
        [B, Hkv, S, capacity] uint8.
    codes
        [B, Hkv, capacity, S + S / 2] int32: for each subspace a word of eight 4-bit codes, lowest
        bits first, then the weights as bfloat16, two in a word.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        signs: torch.Tensor,
        pool: Executor,
        begins: Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch, kv_heads, signs, begins)
        self._pool = pool
        subspaces = self.counts.shape[2]
        self.ids = torch.zeros(batch, kv_heads, subspaces, 0, dtype=torch.uint8)
        self.codes = torch.zeros(batch, kv_heads, 0, subspaces * 3 // 2, dtype=torch.int32)

    def _grow(self) -> None:
        self.ids = _longer(self.ids, 3, self.capacity)
        self.codes = _longer(self.codes, 2, self.capacity)

    def head(self, row: int, head: int) -> tuple[torch.Tensor, ...]:
        """What the kernels read of one KV head, in place: ids, codes and counts."""
        return self.ids[row, head], self.codes[row, head], self.counts[row, head]

    def _encode(self, row: int, start: int, keys: torch.Tensor) -> None:
        how = codebook.THRESHOLDS, codebook.LEVELS, codebook.NO_RADIUS, codebook.NO_ALIGNMENT

        def encode(first: int, stop: int, _: int) -> int:
            return max(
                KERNELS.encode(
                    keys[head].float().contiguous(), self.signs, *how, start, *self.head(row, head)
                )
                for head in range(first, stop)
            )

        threads = range(torch.get_num_threads())
        if max(in_threads(self._pool, len(keys), threads, encode)) >= 0:
            raise ValueError("a key is not finite, or too large to square")

    def ranked(
        self, queries: torch.Tensor, quotas: Mapping[int, Quotas]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """See `Index.ranked`."""
        if not quotas:
            return {}
        heads = self.counts.shape[1]
        rows, spans = _search_arrays(
            tuple((row, self.lengths[row], self.begins[row], of) for row, of in quotas.items())
        )
        ids = torch.empty(len(rows) * heads, int(rows[:, 4].max()), dtype=torch.int64)
        estimated = torch.empty(ids.shape)
        threads = max(1, heads * int(rows[:, 1].sum()) // WORTH_A_THREAD)
        KERNELS.search(
            min(torch.get_num_threads(), threads),
            *(self.ids, self.codes, self.counts),
            queries.float().cpu().contiguous(),
            *(self.signs, codebook.LEVELS),
            *(rows, spans, ids, estimated),
        )
        answers = [array.unflatten(0, (len(rows), heads)) for array in (ids, estimated)]
        return {
            row: (tokens[:, : of.retrieved], estimates[:, : of.retrieved])
            for (row, of), tokens, estimates in zip(quotas.items(), *answers, strict=True)
        }


@lru_cache(maxsize=64)  # all layers of a step ask for the same
def _search_arrays(
    rows: tuple[tuple[int, int, int, Quotas], ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and spans as `search` of `kernels.cpp` takes them, of rows, their zones' lengths and
    beginnings, and quotas.
    """
    numbers = [(row, length, begin, of.candidates, of.retrieved) for row, length, begin, of in rows]
    return np.array(numbers), np.array([of.tiers for *_, of in rows])


def _longer(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    size = list(tensor.shape)
    size[dim] = length
    longer = tensor.new_zeros(size)
    longer.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return longer
