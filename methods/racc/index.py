"""The index over one KV head's evicted keys, by faiss: exact, product-quantised lists, or a graph.

Inner products become distances by the norm-augmenting transform (RACC, section 4.2): keys phi(x) =
[x; sqrt(M - |x|^2)] and queries upsilon(q) = [q; 0] have |upsilon(q) - phi(x)|^2 = |q|^2 + M - 2
<q, x>, so the nearest key has the largest inner product. M is the largest |x|^2; a key beyond it
makes a new index.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from methods.racc.settings import RACCOptions

try:
    import faiss
except ImportError as error:
    raise ImportError(
        "RACC searches with faiss, which is not installed; pip install faiss-cpu"
    ) from error

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

CENTROIDS = 256  # of one subspace: a code is a byte; so many keys are needed to train on, at least
KEYS_PER_LIST = 39  # fewer to train on, and faiss warns
LISTS, PROBES = 100, 10  # of ivfpq: lists at most, and lists looked into
NEIGHBOURS = 32  # M of hnsw
BUILD_BEAM, SEARCH_BEAM = 200, 100  # of hnsw, their widths


def augmented(keys: Floats, bound: float) -> Floats:
    """phi(x) of keys [n, D] with |x|^2 <= bound = M: [n, D + 1]."""
    last = np.sqrt(np.maximum(bound - _squares(keys), 0))
    return np.column_stack([keys, last.astype(np.float32)])


def _squares(keys: Floats) -> Floats:
    squares: Floats = np.einsum("nd,nd->n", keys, keys)
    return squares


def _normalised(vectors: Floats) -> Floats:
    lengths = np.sqrt(_squares(vectors))[:, None]
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


class KeyIndex:
    """Finds tokens by their keys.

    Used by one thread at a time, which should have called `faiss.omp_set_num_threads`.

    Parameters
    ----------
    options
        how keys are indexed.
    read
        keys [n, D] of token ids [n].
    seed
        of what faiss draws to train.

    Attributes
    ----------
    tokens
        ids, in the order in which faiss numbers them.
    keys_read
        keys read so far.
    rebuilds
        how often an index that was there was made anew: M was exceeded, or lists had outgrown their
        training.
    """

    def __init__(
        self, options: RACCOptions, read: Callable[[Tokens], Floats], seed: int = 0
    ) -> None:
        self.options, self.seed = options, seed
        self.tokens: Tokens = np.empty(0, np.int64)
        self.keys_read = self.rebuilds = 0
        self._read_keys = read
        self._index: Any = None
        self._bound, self._trained = 0.0, 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of faiss's own memory."""
        return 0 if self._index is None else int(faiss.serialize_index(self._index).nbytes)

    @property
    def searched_flat(self) -> bool:
        """The keys are too few for lists, so all are compared."""
        return self.options.index == "ivfpq" and 0 < self._trained < CENTROIDS

    def cover(self, tokens: Tokens) -> None:
        """Index those of `tokens` that are not there yet.

        Raises
        ------
        ValueError
            a key is not finite.
        """
        fresh = np.setdiff1d(tokens, self.tokens)
        if not len(fresh):
            return
        keys = self._read(fresh)
        self.tokens = np.concatenate([self.tokens, fresh])
        exceeded = self.options.metric == "ip" and float(_squares(keys).max()) > self._bound
        outgrown = self.options.index == "ivfpq" and len(self) >= 2 * self._trained
        if self._index is None:
            self._build(keys)
        elif exceeded or outgrown:
            self.rebuilds += 1
            self._build(self._read(self.tokens))
        else:
            self._index.add(self._points(keys))

    def search(self, query: Floats, k: int) -> Tokens:
        """The k nearest tokens to query [D], nearest first; fewer where there are fewer, or the
        lists hold fewer.
        """
        if self._index is None or not k:
            return np.empty(0, np.int64)
        point = np.zeros((1, self._index.d), np.float32)  # upsilon(q), and zeros beyond
        if self.options.metric == "cosine":
            query = _normalised(query[None])[0]
        point[0, : len(query)] = query
        nearest = self._index.search(point, min(k, len(self)))[1][0]
        return self.tokens[nearest[nearest >= 0]]

    def _read(self, tokens: Tokens) -> Floats:
        keys = np.ascontiguousarray(self._read_keys(tokens))
        self.keys_read += len(keys)
        bad = tokens[~np.isfinite(keys).all(axis=1)]
        if len(bad):
            raise ValueError(f"key {bad[0]} is not finite")
        return keys

    def _build(self, keys: Floats) -> None:
        self._trained = len(keys)
        self._bound = float(_squares(keys).max())
        points = self._points(keys)
        self._index = self._empty(points.shape[1])
        if not self._index.is_trained:
            self._index.train(points)
        self._index.add(points)

    def _empty(self, width: int) -> Any:
        index: Any
        if self.options.index == "hnsw":
            index = faiss.IndexHNSWFlat(width, NEIGHBOURS)
            index.hnsw.efConstruction, index.hnsw.efSearch = BUILD_BEAM, SEARCH_BEAM
            return index
        if self.searched_flat:
            warnings.warn(
                f"index=ivfpq: fewer keys than {CENTROIDS} are searched flat; its lists and codes"
                " need as many",
                stacklevel=2,
            )
        if self.options.index == "flat" or self.searched_flat:
            return faiss.IndexFlatL2(width)
        lists = max(1, min(LISTS, self._trained // KEYS_PER_LIST))
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, self.options.subspaces, 8)
        index.nprobe = PROBES
        index.cp.seed = index.pq.cp.seed = self.seed % 2**31
        return index

    def _points(self, keys: Floats) -> Floats:
        if self.options.metric == "cosine":
            return self._widened(_normalised(keys))
        return self._widened(augmented(keys, self._bound))

    def _widened(self, points: Floats) -> Floats:
        """With zeros up to a width that the subspaces divide: with phi's entry, 128 becomes 144."""
        if self.options.index != "ivfpq":
            return np.ascontiguousarray(points)
        return np.pad(points, ((0, 0), (0, -points.shape[1] % (2 * self.options.subspaces))))
