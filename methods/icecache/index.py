"""The index of IceCache for one KV head: a DCI tree whose nodes keep their children in pages
(M-DCI, ICLR 2026).

A point is a row of the key memory that the caller owns: float32 keys [rows, D], or bfloat16 keys
seen as uint16. Keys are read where they lie; only promoted keys (a share r of them) are copied, so
that a level can be ranked in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from methods.icecache.kernels import KERNELS, NODES, NONE, POINTS, ROOT, TOP, WorkArrays
from methods.icecache.settings import Layout, Search
from methods.icecache.tree import Floats, Ints, Keys, PagedTree, Workspace, check_memory, kind


@dataclass(frozen=True)
class SearchResult:
    """What a query group found.

    Attributes
    ----------
    ids
        [G, P] page numbers or token numbers, best first, trailing -1.
    scores
        [G, P] query . key, of a page its best member's, -inf after the last.
    ranked
        nodes scored to find the way, a key or a centroid each.
    evaluated
        keys scored as results, for pages by their sketches first; with rank_by="point" the ranked
        ones are among them.
    """

    ids: Ints
    scores: Floats
    ranked: int
    evaluated: int


class Listing(NamedTuple):
    """What a search has listed in its workspace.

    Attributes
    ----------
    ranked
        nodes scored to find the way.
    pages
        that are to be scored.
    """

    ranked: int
    pages: int
    work: WorkArrays


class DCITree(PagedTree):
    """A DCI tree over the first `count` rows of `keys`.

    One thread at a time may build, insert or arrange; any number may ask, each with its own
    workspace. The same keys, layout and seed give the same tree whatever else runs.

    Parameters
    ----------
    keys
        [rows, D] float32, or uint16 (bfloat16 bits), C-contiguous; rows beyond `count` are for
        `insert`.
    count
        keys to build from, in order of arrival.
    seed
        of directions and random levels.

    Attributes
    ----------
    arrays
        the tree itself, see `kernels.Tree`; for looking only.
    exact
        every page is scored, whatever the search.

    Raises
    ------
    ValueError
        a key among those indexed is not finite, or the memory is not as above.
    """

    exact = False

    def __init__(
        self, keys: Keys, count: int, layout: Layout, seed: int, workspace: Workspace | None = None
    ) -> None:
        super().__init__(keys, count, layout, seed)
        self._next_level = 1  # of the next arrival, where levels are counted in turn
        if count:
            self._build(count, workspace or Workspace())

    # -- asking ------------------------------------------------------------------------------------

    def best_pages(
        self, queries: Floats, count: int, search: Search, workspace: Workspace
    ) -> SearchResult:
        """The `count` distinct pages of the best members, for each query [G, D] of a group."""
        return self._best(False, queries, count, search, workspace)

    def best_tokens(
        self, queries: Floats, count: int, search: Search, workspace: Workspace
    ) -> SearchResult:
        """The tokens of the `count` best keys, for each query [G, D] of a group."""
        result = self._best(True, queries, count, search, workspace)
        tokens = np.where(result.ids == NONE, NONE, self.arrays.token[result.ids])
        return replace(result, ids=tokens)

    def _best(
        self,
        of_rows: bool,
        queries: Floats,
        count: int,
        search: Search,
        workspace: Workspace,
    ) -> SearchResult:
        """The best of the pages that are listed, or of their rows; or by P-DCI, if used."""
        ids = np.empty((len(queries), count), np.int32)
        scores = np.empty((len(queries), count), np.float32)
        if p_dci := self.p_dci(search):
            work = self._work_arrays(queries, workspace)
            how = search.fov, *p_dci, of_rows, ids, scores, work.line
            evaluated = KERNELS.choose_by_p_dci(self.arrays.line, queries, *how)
            return SearchResult(ids, scores, 0, evaluated)
        listing = self._listed(queries, search, workspace)
        pages, work = listing.pages, listing.work
        KERNELS.choose(self.arrays.line, pages, queries, of_rows, ids, scores, work.line)
        return SearchResult(ids, scores, listing.ranked, int(work.starts[pages]))

    def p_dci(self, search: Search) -> tuple[int, int, float] | None:
        """Composite indices, simple ones of each, and the share of a node's children for P-DCI;
        None: it is unused.
        """
        composites, simple = self.layout.projections
        return (composites, simple, float(search.prop_to_retrieve)) if composites else None

    def _listed(self, queries: Floats, search: Search, workspace: Workspace) -> Listing:
        work = self._work_arrays(queries, workspace)
        how = search.fov, search.exhaustive_below, search.rank_by == "centroid"
        ranked = np.empty(1, np.int64)
        pages = KERNELS.list_best(self.arrays.line, queries, *how, work.line, ranked)
        return Listing(int(ranked[0]), pages, work)

    def _work_arrays(self, queries: Floats, workspace: Workspace) -> WorkArrays:
        """Memory to ask in, once the queries have been looked at."""
        head_dim = self.arrays.keys.shape[1]
        if queries.dtype != np.float32 or queries.ndim != 2 or queries.shape[1] != head_dim:
            raise ValueError(f"queries must be float32 [G, {head_dim}], got {kind(queries)}")
        if not np.isfinite(queries).all():
            raise ValueError("a query is not finite")
        return workspace.fit(self.arrays, len(queries))

    # -- building and inserting --------------------------------------------------------------------

    def _build(self, count: int, workspace: Workspace) -> None:
        self._measure(0, count)
        levels, sizes = self._levels(count)
        promoted = count - int(sizes[1])
        later = len(self.arrays.point) - count
        nodes = promoted + 1 + int(np.ceil(self.layout.promotion[0] * later))
        self._grow(count, nodes, (count + 2 * later) // self.layout.page_size + nodes)
        self.arrays.level_size[:] = sizes
        self.arrays.state[[POINTS, TOP]] = count, levels.max()
        self.arrays.node[ROOT]["level"] = levels.max() + 1
        for level in range(levels.max(), 0, -1):
            rows = np.flatnonzero(levels == level).astype(np.int32)
            if level > 1:
                KERNELS.nodes(self.arrays.line, rows, level)
            anchored = self.layout.parents == "anchored" and level == 1 < levels.max()
            if anchored and len(rows) > self.layout.exhaustive_below:
                parents = self._anchored_parents(rows, workspace)
            else:
                parents = self._parents(rows, level, workspace)
            self._load(rows, parents, workspace)

    def insert(self, count: int, workspace: Workspace) -> None:
        """Take the next `count` rows of the key memory into the tree.

        Raises
        ------
        ValueError
            a key is not finite (then nothing changed), or the memory has no such rows.
        """
        first = len(self)
        check_memory(self.arrays.keys, first + count)
        self._grow(first + count, 0, 0)
        self._measure(first, first + count)
        self.arrays.token[first : first + count] = np.arange(first, first + count)
        levels, _ = self._levels(count)
        self.arrays.point["node"][first : first + count] = NONE
        self._grow(0, self.nodes + int((levels > 1).sum()), 0)
        start = 0
        while start < count:
            promoted = np.flatnonzero(levels[start:] > 1)
            stop = start + max(1, promoted[0]) if len(promoted) else count
            rows = np.arange(first + start, first + stop, dtype=np.int32)
            self._add(rows, int(levels[start]), workspace)
            start = stop

    def _add(self, rows: Ints, level: int, workspace: Workspace) -> None:
        """Insert points of level 1, or one of a higher level."""
        state = self.arrays.state
        state[POINTS] += len(rows)
        self.arrays.level_size[level] += len(rows)
        node = int(state[NODES])
        if level > 1:
            KERNELS.nodes(self.arrays.line, rows, level)
        if level > state[TOP]:
            state[TOP] = level
            self.arrays.node[ROOT]["level"] = level + 1
            if level > 1:
                KERNELS.new_root(self.arrays.line, node, workspace.fit(self.arrays, 1).line)
        elif level > 1 and self.layout.reparent:
            self._reparent(node, workspace)
        parents = self._parents(rows, level, workspace)
        self._grow(0, 0, self.pages + len(rows))
        work = workspace.fit(self.arrays, 1)
        KERNELS.add(self.arrays.line, rows, parents, self._greedy, work.line)

    def _reparent(self, node: int, workspace: Workspace) -> None:
        """Give a new node the points below it that are nearer to it than to their parents."""
        work = workspace.fit(self.arrays, 1)
        wide = self.layout.fov, self.layout.exhaustive_below
        moved = KERNELS.leaving(self.arrays.line, node, *wide, work.line)
        rows = work.rows[:moved].copy()
        self._grow(0, 0, self.pages + -(-moved // self.layout.page_size))
        self._load(rows, np.full(moved, node, np.int32), workspace)

    def _load(self, rows: Ints, parents: Ints, workspace: Workspace) -> None:
        """Put points into the pages of nodes that have none yet."""
        late, work = self.layout.remainder == "last", workspace.fit(self.arrays, 1)
        KERNELS.load_pages(self.arrays.line, rows, parents, self._greedy, late, work.line)

    def _parents(self, rows: Ints, level: int, workspace: Workspace) -> Ints:
        """The nodes whose children points of `level` become."""
        parents = np.zeros(len(rows), np.int32)
        if level == self.arrays.state[TOP]:
            self.arrays.point["affinity"][rows] = 0
            return parents
        work = workspace.fit(self.arrays, 1)
        wide = self.layout.fov, self.layout.exhaustive_below
        KERNELS.parents(self.arrays.line, rows, level + 1, *wide, work.line, parents)
        return parents

    def _anchored_parents(self, rows: Ints, workspace: Workspace) -> Ints:
        """The nodes of level 2 that points of level 1 choose, most of them among the parents of
        anchors near them.
        """
        parents, work = np.empty(len(rows), np.int32), workspace.fit(self.arrays, 1)
        wide = self.layout.fov, self.layout.exhaustive_below
        interval, reach, threshold = self.layout.anchors
        how = interval, reach, float(threshold), *wide, work.line, parents
        KERNELS.anchored_parents(self.arrays.line, rows, 2, *how)
        return parents

    @property
    def _greedy(self) -> bool:
        return self.layout.split == "greedy"

    def _levels(self, count: int) -> tuple[Ints, NDArray[np.int64]]:
        """Levels of the next arrivals, and the sizes of all levels with them."""
        levels, sizes = np.empty(count, np.int32), self.arrays.level_size.copy()
        top, promotion = self.arrays.state[TOP], [*map(float, self.layout.promotion)]
        if self.layout.levels == "counter_ceil":
            self._next_level = KERNELS.assign_levels_in_turn(
                sizes, top, self._next_level, *promotion, levels
            )
        else:
            draws = self._random.random(count if self.layout.levels == "random" else 0)
            KERNELS.levels(sizes, top, draws, *promotion, levels)
        return levels, sizes


class ExactScan(DCITree):
    """The same pages, found by scoring every key: what a search can at best find, and the price of
    not searching.
    """

    exact = True

    def p_dci(self, search: Search) -> None:
        """Never."""

    def _listed(self, queries: Floats, search: Search, workspace: Workspace) -> Listing:
        work = self._work_arrays(queries, workspace)
        return Listing(0, KERNELS.list_all(self.arrays.line, work.line), work)
