"""The index of IceCache for one KV head: a DCI tree whose nodes keep their children in pages (M-DCI, ICLR 2026).

A point is a row of the key memory that the caller owns: float32 keys [rows, D], or bfloat16 keys seen as uint16. Keys
are read where they lie; only promoted keys (a share r of them) are copied, so that a level can be ranked in one pass.

How pages and the store's arrangement meet. The method hands over one KV head's host keys without the sinks,
`host.key[b, h, sinks:]`: row i then holds the i-th indexed token, the window's tokens follow, later tokens land in
their own rows, and `insert` takes the next rows into the tree as they leave the window. Right after `build` the
method asks every head for `arrange()`, which answers with the tokens in page order and renumbers the tree to match,
and passes sinks, this order and all later tokens unchanged to `view.arrange`: from then on row i holds what was token
order[i], and each page is one contiguous block. Nobody may ask the tree between the two. Tokens inserted later are
rows of their own at the end, and re-parented ones stay where they are, so a page is then a block and a few single rows;
arranging again, once the tokens inserted outnumber some share of the tree, makes it a block again. `tokens` translates
pages to token numbers at any time. After a reallocation of the host memory the method calls `bind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from methods.icecache import kernels
from methods.icecache.kernels import NODES, NONE, PAGES, POINTS, ROOT, TOP, Tree

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Keys = NDArray[np.float32] | NDArray[np.uint16]

MAX_LEVELS = 32
NO_WORK = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Layout:
    """How a tree is built.

    Attributes:
        page_size: members of a page, s.
        promotion: shares of the points of level 1, and of the levels above, that belong one level higher (r1, r2).
        levels: "counter", the next arrival is promoted where the level above has room; "random", by seeded draws.
        split: how a node's children are shared out into pages: sorted by one random "projection", or "greedy", near
            ones together.
        projections: (L, m), composite and simple indices to prune a node's children with (P-DCI); (0, 0): none.
        fov: beam width of the parent search, in levels that are not searched exhaustively.
        exhaustive_below: points of a level up to which all of it is searched for parents.
        reparent: a promoted newcomer takes over the points below it that are nearer to it than to their parents.
    """

    page_size: int = 16
    promotion: tuple[float, float] = (0.01, 0.2)
    levels: Literal["counter", "random"] = "counter"
    split: Literal["projection", "greedy"] = "projection"
    projections: tuple[int, int] = (0, 0)
    fov: int = 30
    exhaustive_below: int = 4096
    reparent: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 2:
            raise ValueError(f"page_size={self.page_size}: a page has at least 2 members")
        if not all(0 < share < 1 for share in self.promotion):
            raise ValueError(f"promotion={self.promotion}: shares lie between 0 and 1")
        _one_of("levels", self.levels, ("counter", "random"))
        _one_of("split", self.split, ("projection", "greedy"))
        if min(self.projections) < 0 or (min(self.projections) == 0) != (max(self.projections) == 0):
            raise ValueError(f"projections={self.projections}: (L, m) of at least 1 each, or (0, 0)")

    @property
    def directions(self) -> int:
        """Random directions every key is projected on."""
        composites, simple = self.projections
        return max(composites * simple, int(self.split == "projection"))


@dataclass(frozen=True)
class Search:
    """How a tree is asked.

    Attributes:
        fov: nodes whose children each query looks at.
        rank_by: rank nodes by their own key ("point") or by the mean of their children ("centroid").
        exhaustive_below: points of a level up to which all of it is ranked; a larger one only below the best `fov`
            nodes of the level above.
        prop_to_retrieve: share of a node's children, those nearest in projection, that are scored; for trees with
            projections.
    """

    fov: int = 30
    rank_by: Literal["point", "centroid"] = "point"
    exhaustive_below: int = 4096
    prop_to_retrieve: float = 1.0

    def __post_init__(self) -> None:
        _one_of("rank_by", self.rank_by, ("point", "centroid"))
        if self.fov < 1 or not 0 < self.prop_to_retrieve <= 1:
            raise ValueError(f"fov={self.fov}, prop_to_retrieve={self.prop_to_retrieve}: at least 1, and in (0, 1]")


@dataclass(frozen=True)
class Answer:
    """What a query group found.

    Attributes:
        ids: [G, P] page numbers or token numbers, best first, trailing -1.
        scores: [G, P] query . key, of a page its best member's, -inf behind.
        ranked: nodes scored to find the way, a key or a centroid each.
        evaluated: keys scored as results; with rank_by="point" the ranked ones are among them.
    """

    ids: Ints
    scores: Floats
    ranked: int
    evaluated: int


class Workspace:
    """Scratch memory for builds, inserts and queries, one call at a time; grows with the trees it meets."""

    def __init__(self) -> None:
        self._arrays = kernels.Workspace(*[np.zeros(0)] * len(kernels.Workspace._fields))
        self._sizes = (0, 0, 0)

    def fit(self, tree: Tree, group: int) -> kernels.Workspace:
        """Arrays for `tree` and a group of queries."""
        points, nodes = len(tree.point) + 3, len(tree.node) + 3
        wanted = (group, points, nodes)
        if any(size > held for size, held in zip(wanted, self._sizes, strict=True)):
            group, points, nodes = map(max, wanted, self._sizes)
            longest = max(points, nodes)  # a page has a member, so there are no more pages than points
            self._sizes = (group, points, nodes)
            self._arrays = kernels.Workspace(
                nodes=np.empty(nodes, np.int32),
                node_score=np.empty((max(group, kernels.BLOCK), nodes), np.float32),
                marked=np.empty(nodes, np.uint8),
                rows=np.empty(points, np.int32),
                pages=np.empty(points, np.int32),
                score=np.empty((group, points), np.float32),
                scratch=np.empty(longest, np.float32),
                picked=np.empty(longest, np.int32),
            )
        return self._arrays


class DCITree:
    """A DCI tree over the first `count` rows of `keys`.

    One thread at a time may build, insert or arrange; any number may ask, each with its own workspace. The same keys,
    layout and seed give the same tree whatever else runs.

    Args:
        keys: [rows, D] float32, or uint16 (bfloat16 bits), C-contiguous; rows beyond `count` are for `insert`.
        count: keys to build from, in order of arrival.
        seed: of directions and random levels.

    Attributes:
        arrays: the tree itself, see `kernels.Tree`; for looking only.

    Raises:
        ValueError: a key among those indexed is not finite, or the memory is not as above.
    """

    def __init__(self, keys: Keys, count: int, layout: Layout, seed: int, workspace: Workspace | None = None) -> None:
        self.layout = layout
        self._random = np.random.default_rng(seed)
        _check_memory(keys, count)
        head_dim, directions = keys.shape[1], layout.directions
        direction = self._random.standard_normal((directions, head_dim + 1)).astype(np.float32)
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        self.arrays = Tree(
            keys=keys,
            point=np.zeros(count, kernels.POINT),
            page=np.zeros(1, kernels.PAGE),
            slots=np.full((1, layout.page_size), NONE, np.int32),
            node=np.zeros(1, kernels.NODE),
            node_key=np.zeros((1, head_dim), np.float32),
            node_sum=np.zeros((1, head_dim), np.float32),
            projection=np.zeros((count, directions), np.float32),
            direction=direction,
            level_size=np.zeros(MAX_LEVELS, np.int64),
            state=np.array([0, 1, 0, NONE, 0]),
            largest=np.zeros(1, np.float32),
        )
        self.arrays.point["node"] = NONE
        self.arrays.node[ROOT] = (NONE, 1, NONE, 0)
        self._token = np.arange(max(count, 1), dtype=np.int32)  # the token in each row
        if count:
            self._build(count, workspace or Workspace())

    def _build(self, count: int, workspace: Workspace) -> None:
        self._measure(0, count)
        levels, sizes = self._levels(count)
        promoted = count - int(sizes[1])
        self._grow(count, promoted + 1, count // self.layout.page_size + promoted + 1)
        self.arrays.level_size[:] = sizes
        self.arrays.state[[POINTS, TOP]] = count, levels.max()
        self.arrays.node[ROOT]["level"] = levels.max() + 1
        for level in range(levels.max(), 0, -1):
            rows = np.flatnonzero(levels == level).astype(np.int32)
            if level > 1:
                kernels.add_nodes(self.arrays, rows, level)
            parents = self._parents(rows, level, workspace)
            kernels.load_children(self.arrays, rows, parents, self._greedy, workspace.fit(self.arrays, 1))

    # -- what there is ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.arrays.state[POINTS])

    @property
    def nodes(self) -> int:
        """Nodes that can have children: the promoted points and the root."""
        return int(self.arrays.state[NODES])

    @property
    def pages(self) -> int:
        """One more than the largest page number in use; some below may be free."""
        return int(self.arrays.state[PAGES])

    @property
    def counts(self) -> Ints:
        """[pages] members of each page, 0: free."""
        counts: Ints = self.arrays.page["count"][: self.pages]
        return counts

    @property
    def nbytes(self) -> int:
        """Bytes of the index, the caller's keys not among them."""
        return sum(array.nbytes for array in self.arrays[1:]) + self._token.nbytes

    def tokens(self, pages: Ints) -> Ints:
        """Tokens of pages [...]: [..., page size] int32, trailing -1; page -1 has none."""
        rows = self.arrays.slots[pages]
        tokens: Ints = np.where((rows == NONE) | (pages[..., None] == NONE), NONE, self._token[rows])
        return tokens

    def take_changed(self) -> Ints:
        """Pages whose members changed since the last call, freed and new ones among them."""
        dirty = self.arrays.page["dirty"][: self.pages]
        changed = np.flatnonzero(dirty).astype(np.int32)
        dirty[:] = 0
        return changed

    # -- asking ----------------------------------------------------------------------------------------------------

    def best_pages(self, queries: Floats, wanted: int, search: Search, workspace: Workspace) -> Answer:
        """The `wanted` distinct pages of the best members, for each query [G, D] of a group."""
        ranked, evaluated, work = self._score(queries, search, workspace)
        ids, scores = _answer_arrays(len(queries), wanted)
        kernels.best_pages(self.arrays, evaluated, ids, scores, work)
        return Answer(ids, scores, ranked, evaluated)

    def best_tokens(self, queries: Floats, wanted: int, search: Search, workspace: Workspace) -> Answer:
        """The tokens of the `wanted` best keys, for each query [G, D] of a group."""
        ranked, evaluated, work = self._score(queries, search, workspace)
        rows, scores = _answer_arrays(len(queries), wanted)
        kernels.best_rows(evaluated, rows, scores, work)
        return Answer(np.where(rows == NONE, NONE, self._token[rows]), scores, ranked, evaluated)

    def _score(self, queries: Floats, search: Search, workspace: Workspace) -> tuple[int, int, kernels.Workspace]:
        """Nodes ranked, keys evaluated; the scores are in the workspace."""
        self._check_queries(queries)
        work = workspace.fit(self.arrays, len(queries))
        composites, simple = self.layout.projections if search.prop_to_retrieve < 1 else (0, 0)
        by_centroid = search.rank_by == "centroid"
        ranked, evaluated = kernels.search(
            self.arrays,
            queries,
            search.fov,
            search.exhaustive_below,
            by_centroid,
            composites,
            simple,
            search.prop_to_retrieve,
            work,
        )
        return ranked, evaluated, work

    def _check_queries(self, queries: Floats) -> None:
        if queries.dtype != np.float32 or queries.ndim != 2 or queries.shape[1] != self.arrays.keys.shape[1]:
            raise ValueError(f"queries must be float32 [G, {self.arrays.keys.shape[1]}], got {_kind(queries)}")
        if not np.isfinite(queries).all():
            raise ValueError("a query is not finite")

    # -- changing --------------------------------------------------------------------------------------------------

    def insert(self, count: int, workspace: Workspace) -> None:
        """Take the next `count` rows of the key memory into the tree.

        Raises:
            ValueError: a key is not finite (then nothing changed), or the memory has no such rows.
        """
        first = len(self)
        _check_memory(self.arrays.keys, first + count)
        self._grow(first + count, 0, 0)
        self._measure(first, first + count)
        self._token[first : first + count] = np.arange(first, first + count)
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
            kernels.add_nodes(self.arrays, rows, level)
        if level > state[TOP]:
            state[TOP] = level
            self.arrays.node[ROOT]["level"] = level + 1
            if level > 1:
                kernels.take_over_root(self.arrays, node, workspace.fit(self.arrays, 1))
        elif level > 1 and self.layout.reparent:
            self._reparent(node, workspace)
        parents = self._parents(rows, level, workspace)
        self._grow(0, 0, self.pages + len(rows))
        kernels.add_children(self.arrays, rows, parents, self._greedy, workspace.fit(self.arrays, 1))

    def _reparent(self, node: int, workspace: Workspace) -> None:
        """Give a new node the points below it that are nearer to it than to their parents."""
        work = workspace.fit(self.arrays, 1)
        moved = kernels.leave_for(self.arrays, node, self.layout.fov, self.layout.exhaustive_below, work)
        rows = work.rows[:moved].copy()
        self._grow(0, 0, self.pages + -(-moved // self.layout.page_size))
        parents = np.full(moved, node, np.int32)
        kernels.load_children(self.arrays, rows, parents, self._greedy, workspace.fit(self.arrays, 1))

    def arrange(self) -> Ints:
        """Renumber rows so that every page is one block of them; the order of tokens [n] the key memory must take.

        Row i must hold the key of token order[i] before the tree is asked again.
        """
        tree, count = self.arrays, len(self)
        slots = tree.slots[: self.pages]
        held = slots != NONE
        order = slots[held]
        rows = np.empty(count, np.int32)
        rows[order] = np.arange(count, dtype=np.int32)
        slots[held] = np.arange(count, dtype=np.int32)
        tree.point[:count] = tree.point[order]
        tree.projection[:count] = tree.projection[order]
        promoted = tree.node["point"][1 : self.nodes]
        promoted[:] = rows[promoted]
        self._token[:count] = self._token[order]
        return self._token[:count].copy()

    def bind(self, keys: Keys) -> None:
        """The keys lie in other memory now, in the same rows."""
        _check_memory(keys, len(self))
        if keys.dtype != self.arrays.keys.dtype or keys.shape[1] != self.arrays.keys.shape[1]:
            raise ValueError(f"the tree was built from {_kind(self.arrays.keys)}, and was given {_kind(keys)}")
        self.arrays = self.arrays._replace(keys=keys)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _parents(self, rows: Ints, level: int, workspace: Workspace) -> Ints:
        """The nodes whose children points of `level` become."""
        parents = np.zeros(len(rows), np.int32)
        if level == self.arrays.state[TOP]:
            self.arrays.point["affinity"][rows] = 0
            return parents
        work = workspace.fit(self.arrays, 1)
        kernels.nearest_nodes(
            self.arrays, rows, level + 1, self.layout.fov, self.layout.exhaustive_below, work, parents
        )
        return parents

    @property
    def _greedy(self) -> bool:
        return self.layout.split == "greedy"

    def _measure(self, start: int, stop: int) -> None:
        """Norms and projections of new rows, and c."""
        tree = self.arrays
        wrong = kernels.squared_norms(tree.keys, start, stop, tree.point)
        if wrong != NONE:
            raise ValueError(f"key {wrong} is not finite, or too large to square")
        tree.largest[0] = max(tree.largest[0], tree.point["norm2"][start:stop].max(initial=0))
        kernels.project(tree, start, stop)

    def _levels(self, count: int) -> tuple[Ints, NDArray[np.int64]]:
        """Levels of the next arrivals, and the sizes of all levels with them."""
        draws = self._random.random(count if self.layout.levels == "random" else 0)
        levels, sizes = np.empty(count, np.int32), self.arrays.level_size.copy()
        kernels.assign_levels(sizes, self.arrays.state[TOP], draws, *self.layout.promotion, levels)
        return levels, sizes

    def _grow(self, points: int, nodes: int, pages: int) -> None:
        """Make room, at least doubling what is too small."""
        tree = self.arrays
        if points > len(tree.point):
            size = max(points, 2 * len(tree.point))
            tree = tree._replace(point=_longer(tree.point, size), projection=_longer(tree.projection, size))
            self._token = _longer(self._token, size)
        if nodes > len(tree.node):
            size = max(nodes, 2 * len(tree.node))
            names = ("node", "node_key", "node_sum")
            tree = tree._replace(**{name: _longer(getattr(tree, name), size) for name in names})
        if pages > len(tree.page):
            size = max(pages, 2 * len(tree.page))
            slots = _longer(tree.slots, size)
            slots[len(tree.page) :] = NONE
            tree = tree._replace(page=_longer(tree.page, size), slots=slots)
        self.arrays = tree


class ExactScan(DCITree):
    """The same pages, found by scoring every key: what a search can at best find, and the price of not searching."""

    def _score(self, queries: Floats, search: Search, workspace: Workspace) -> tuple[int, int, kernels.Workspace]:
        self._check_queries(queries)
        work = workspace.fit(self.arrays, len(queries))
        return 0, kernels.scan(self.arrays, queries, work), work


@cache
def compile_kernels(dtype: np.dtype[Any]) -> None:
    """Run every kernel once on a few keys of this dtype: compiled, or read from disk, before anything is timed."""
    keys, queries, work = np.zeros((100, 8), dtype), np.zeros((1, 8), np.float32), Workspace()
    for split in ("projection", "greedy"):
        tree = DCITree(keys, 10, Layout(2, (0.2, 0.3), split=split), 0, work)  # type: ignore[arg-type]
        tree.insert(90, work)
        tree.best_tokens(queries, 1, Search(), work)
    kernels.interleave(tree.best_pages(queries, 1, Search(), work).ids, 1)
    ExactScan(keys, 10, Layout(), 0, work).best_pages(queries, 1, Search(), work)


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value}: one of {', '.join(choices)}")


def _longer(array: Any, size: int) -> Any:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _answer_arrays(group: int, wanted: int) -> tuple[Ints, Floats]:
    return np.empty((group, wanted), np.int32), np.empty((group, wanted), np.float32)


def _kind(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _check_memory(keys: Keys, count: int) -> None:
    if keys.dtype not in (np.float32, np.uint16) or keys.ndim != 2 or not keys.flags.c_contiguous:
        raise ValueError(f"keys must be contiguous [rows, D] of float32, or bfloat16 seen as uint16, got {_kind(keys)}")
    if count > len(keys):
        raise ValueError(f"{count} keys to index, and memory of {len(keys)}")
