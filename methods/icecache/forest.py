"""The trees of a layer, which all KV heads ask, and add to, in one call into compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from methods.blocks.heads import in_threads
from methods.icecache.index import DCITree
from methods.icecache.kernels import KERNELS, Tree
from methods.icecache.settings import Search
from methods.icecache.tree import Floats, Workspace

Tokens = NDArray[np.int64]

# multiplications that take longer than it takes to wake a thread of the pool
WORTH_A_THREAD = 1 << 22
WORTH_A_TEAM = 1 << 17  # multiplications; fewer are done before a thread of torch's has begun


class RefusedError(ValueError):
    """Numbers that an index cannot rank.

    `head`: which tree refused them, counted over rows and KV heads.
    """

    def __init__(self, head: int, words: str) -> None:
        super().__init__(words)
        self.head = head


class Forest:
    """The trees of all rows and KV heads of one layer, [B][Hkv], with one layout but for the page
    size.

    Trees keep their own arrays, which move as they grow. What compiled code knows is a directory of
    where they are.

    Parameters
    ----------
    trees
        of each row and KV head; they are used in place.
    pool
        where threads beside the caller's come from.
    workspaces
        one for each thread; several forests may share them.
    """

    def __init__(
        self, trees: Sequence[Sequence[DCITree]], pool: Executor, workspaces: Sequence[Workspace]
    ) -> None:
        self._trees = [tree for heads in trees for tree in heads]
        self._pool, self._workspaces = pool, workspaces
        self._cached_arrays: list[Tree | None] = [None] * len(self._trees)
        self._directory = np.zeros((len(self._trees), len(self._trees[0].arrays.line)), np.int64)
        self._scored = 0  # keys in the last search

    def __getstate__(self) -> dict[str, Any]:
        """A copy's trees lie elsewhere."""
        return {**self.__dict__, "_cached_arrays": [None] * len(self._trees)}

    def attend(
        self, queries: Floats, regions: Tokens, search: Search, longest: int
    ) -> tuple[Tokens, int]:
        """What each KV head attends, see `attend` of `kernels.cpp`.

        Parameters
        ----------
        queries
            [B, Hkv, G, D].
        regions
            [B, 5] as there.
        longest
            most tokens that one attends.

        Returns
        -------
        tuple[Tokens, int]
            [B, Hkv, n <= longest] tokens, trailing -1, and how many keys were scored.

        Raises
        ------
        RefusedError
            a query is not finite.
        """
        flat, tree = queries.reshape(-1, *queries.shape[2:]), self._trees[0]
        index = np.empty((len(flat), longest), np.int64)
        used, read, refused = np.empty((3, len(flat)), np.int64)
        ranked = search.exhaustive_below, search.rank_by == "centroid", tree.exact
        how = search.fov, float(search.fov_share), *ranked, *(tree.p_dci(search) or (0, 0, 0.0))
        directory = self._find()
        threads = self._workspaces[: max(1, self._scored * flat[0].size // WORTH_A_TEAM)]
        works = np.stack([each.fit(tree.arrays, flat.shape[1]).line for each in threads])
        KERNELS.attend(works, directory, flat, regions, *how, index, used, read, refused)
        if refused.any():
            raise RefusedError(int(refused.argmax()), "a query is not finite")
        self._scored = int(read.sum())
        most = int(used.max())
        return index[:, :most].reshape(*queries.shape[:2], most), self._scored

    def insert(self, counts: Sequence[int]) -> None:
        """Take the next `counts[row]` rows of key memory into the trees of each row.

        Raises
        ------
        RefusedError
            a key is not finite.
        """
        remaining = np.repeat(np.array(counts, np.int64), len(self._trees) // len(counts))
        if self._trees[0].layout.levels == "counter":
            remaining -= self._insert_leaves(np.array(counts, np.int64))
        errors: dict[int, ValueError] = {}

        def finish(first: int, stop: int, workspace: Workspace) -> None:
            for at in range(first, stop):
                try:
                    if remaining[at]:  # a newcomer is promoted, finds no room, or is no number
                        self._trees[at].insert(int(remaining[at]), workspace)
                except ValueError as error:
                    errors[at] = error
                    return

        if remaining.any():
            self._share_out(finish, WORTH_A_THREAD * len(self._workspaces))
        if errors:
            head = min(errors)
            raise RefusedError(head, str(errors[head])) from errors[head]

    def _insert_leaves(self, counts: Tokens) -> Tokens:
        """Take in up to counts[row] rows of key memory, as far as they are leaves; how many each
        tree took.
        """
        layout, like = self._trees[0].layout, self._trees[0].arrays
        how = (*map(float, layout.promotion), layout.fov, layout.exhaustive_below)
        greedy, directory = layout.split == "greedy", self._find()
        taken = np.zeros(len(self._trees), np.int64)

        def add(first: int, stop: int, workspace: Workspace) -> None:
            work = workspace.fit(like, 1)
            KERNELS.insert_leaves(directory, first, stop, counts, *how, greedy, work.line, taken)

        nodes = sum(tree.nodes for tree in self._trees)
        self._share_out(add, int(counts.max()) * nodes * like.keys.shape[1])
        return taken

    def _find(self) -> Tokens:
        """The directory, with the arrays that have moved since."""
        for at, (tree, cached) in enumerate(zip(self._trees, self._cached_arrays, strict=True)):
            if tree.arrays is not cached:
                self._cached_arrays[at] = tree.arrays
                self._directory[at] = tree.arrays.line
                for workspace in self._workspaces:
                    workspace.fit(tree.arrays, 1)
        return self._directory

    def _share_out(self, do: Callable[[int, int, Workspace], None], work: int) -> None:
        """do(first, stop, workspace) over all trees, in several threads where `work`
        multiplications are worth it.
        """
        threads = self._workspaces[: max(1, work // WORTH_A_THREAD)]
        in_threads(self._pool, len(self._trees), threads, do)
