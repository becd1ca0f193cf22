"""The index of one layer's retrieval zones: the codes of their tokens, kept token after token, and
the search.

What is found in a row's zone is numbered as in its sequence. `VectorIndex` computes in torch on the
device of the queries, `KernelIndex` in Numba on the CPU; the same keys give the same codes and the
same answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from methods.blocks.heads import in_threads
from methods.blocks.lanes import LANES
from methods.pariskv import kernels, vectorised
from methods.pariskv.codebook import CENTROIDS, SUBSPACE, Quotas, quotas, random_signs

BLOCK = 4096  # keys that are encoded at once
SPARE = 16  # a share of 1 / SPARE more is reserved for tokens to come

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
    ids
        [B, Hkv, S, capacity] uint8, S = D / 8: the signs of each subspace; capacity is a multiple
        of 64.
    codes
        [B, Hkv, capacity, S + S / 2] int32: 4-bit codes and bfloat16 weights, see
        `vectorised.encode`.
    counts
        [B, Hkv, S, 256] int32, tokens with each id.
    """

    def __init__(
        self, batch: int, kv_heads: int, signs: torch.Tensor, begins: Sequence[int] | None = None
    ) -> None:
        subspaces, device = len(signs) // SUBSPACE, signs.device
        self.signs, self.lengths = signs, [0] * batch
        self.begins = [0] * batch if begins is None else begins
        self.ids = torch.zeros(batch, kv_heads, subspaces, 0, dtype=torch.uint8, device=device)
        self.codes = torch.zeros(
            batch, kv_heads, 0, subspaces * 3 // 2, dtype=torch.int32, device=device
        )
        self.counts = torch.zeros(
            batch, kv_heads, subspaces, CENTROIDS, dtype=torch.int32, device=device
        )

    def extend(self, row: int, keys: torch.Tensor) -> None:
        """Append keys [Hkv, n, head_dim] to the zone of a row.

        Raises
        ------
        ValueError
            a key is not finite, or too large to square.
        """
        first, last = self.lengths[row], self.lengths[row] + keys.shape[1]
        if last > self.ids.shape[3]:
            capacity = -(-(last + last // SPARE) // LANES) * LANES
            self.ids, self.codes = _longer(self.ids, 3, capacity), _longer(self.codes, 2, capacity)
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            self._encode(row, start, keys[:, start - first : stop - first].to(self.signs.device))
        self.lengths[row] = last

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
    """All KV heads of a row at once, in torch."""

    def _encode(self, row: int, start: int, keys: torch.Tensor) -> None:
        here = slice(start, start + keys.shape[1])
        ids, self.codes[row, :, here] = vectorised.encode(keys, self.signs)
        self.ids[row, :, :, here] = ids.transpose(1, 2)
        self.counts[row] += vectorised.count_ids(self.ids[row, :, :, here])

    def ranked(
        self, queries: torch.Tensor, quotas: Mapping[int, Quotas]
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """See `Index.ranked`."""
        results = {}
        for row, of_row in quotas.items():
            used = slice(self.lengths[row])
            zone = self.ids[row, :, :, used], self.codes[row, :, used], self.counts[row]
            tokens, estimates = vectorised.search(*zone, queries[row], self.signs, of_row)
            results[row] = torch.where(tokens < 0, -1, self.begins[row] + tokens), estimates
        return results


class KernelIndex(Index):
    """One KV head after the other in each thread, in Numba.

    Parameters
    ----------
    pool
        where threads that encode a prompt come from.
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

    def head(self, row: int, head: int) -> tuple[Any, ...]:
        """What the kernels read of one KV head, in place: ids, codes, halves and counts."""
        codes = self.codes[row, head].numpy()
        return (
            self.ids[row, head].numpy(),
            codes.view(np.uint32),
            codes.view(np.uint16),
            self.counts[row, head].numpy(),
        )

    def _encode(self, row: int, start: int, keys: torch.Tensor) -> None:
        signs = self.signs.numpy()

        def encode(first: int, stop: int, _: int) -> int:
            return max(
                kernels.encode(keys[head].float().numpy(), signs, start, *self.head(row, head))
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
        ids = np.empty((len(rows) * heads, int(rows[:, 4].max())), np.int64)
        estimated = np.empty(ids.shape, np.float32)
        threads = max(1, heads * int(rows[:, 1].sum()) // WORTH_A_THREAD)
        kernels.search(
            min(torch.get_num_threads(), threads),
            self._zone(),
            queries.float().cpu().contiguous().numpy(),
            self.signs.numpy(),
            rows,
            spans,
            ids,
            estimated,
        )
        answers = [
            torch.from_numpy(array).unflatten(0, (len(rows), heads)) for array in (ids, estimated)
        ]
        return {
            row: (tokens[:, : of.retrieved], estimates[:, : of.retrieved])
            for (row, of), tokens, estimates in zip(quotas.items(), *answers, strict=True)
        }

    def _zone(self) -> tuple[Any, ...]:
        """What `kernels.search` reads of all KV heads, in place."""
        codes = self.codes.numpy()
        return self.ids.numpy(), codes.view(np.uint32), codes.view(np.uint16), self.counts.numpy()


@lru_cache(maxsize=64)  # all layers of a step ask for the same
def _search_arrays(
    rows: tuple[tuple[int, int, int, Quotas], ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and spans as `kernels.search` takes them, of rows, their zones' lengths and beginnings,
    and quotas.
    """
    numbers = [(row, length, begin, of.candidates, of.retrieved) for row, length, begin, of in rows]
    return np.array(numbers), np.array([of.tiers for *_, of in rows])


@cache
def compile_kernels(pool: Executor) -> None:
    """Run every kernel once on a few keys: compiled, or read from disk, before anything
    is timed.
    """
    keys, signs = torch.zeros(1, 8, 32), random_signs(32, 0)
    index = KernelIndex(1, 1, signs, pool)
    index.extend(0, keys)
    index.search(keys[None, :, :1], {0: quotas(8, 1)})


def _longer(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    size = list(tensor.shape)
    size[dim] = length
    longer = tensor.new_zeros(size)
    longer.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return longer
