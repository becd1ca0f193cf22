"""The arrays of a DCI tree in memory that grows: what is in which page, and where the keys lie.

How pages and the store's arrangement meet. The method hands over one KV head's host keys without
the sinks, `host.key[b, h, sinks:]`: row i then holds the i-th indexed token, the window's tokens
follow, later tokens land in their own rows, and `insert` takes the next rows into the tree as they
leave the window. Right after `build` the method asks every head for `arrange()`, which answers with
the tokens in page order and renumbers the tree to match, and passes sinks, this order and all later
tokens unchanged to `view.arrange`: from then on row i holds what was token order[i], and each page
is one contiguous block. Nobody may ask the tree between the two. Tokens inserted later are rows of
their own at the end, and re-parented ones stay where they are, so a page is then a block and a few
single rows; arranging again, once the tokens inserted outnumber some share of the tree, makes it a
block again. `tokens` translates pages to token numbers at any time. After a reallocation of the
host memory the method calls `bind`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from methods.icecache import kernels
from methods.icecache.kernels import KERNELS, NODES, NONE, PAGES, POINTS, ROOT, SKETCH_LANES, Tree
from methods.icecache.settings import Layout

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Keys = NDArray[np.float32] | NDArray[np.uint16]

MAX_LEVELS = 32


class WorkSizes(NamedTuple):
    """What a workspace has room for."""

    group: int
    points: int
    nodes: int


class Workspace:
    """Scratch memory for builds, inserts and queries, one call at a time; grows with the trees it
    meets.
    """

    def __init__(self) -> None:
        self._arrays = kernels.WorkArrays(*[np.zeros(0)] * len(kernels.WorkArrays._fields))
        self._sizes = WorkSizes(0, 0, 0)

    def fit(self, tree: Tree, group: int) -> kernels.WorkArrays:
        """Arrays for `tree` and a group of queries."""
        points = len(tree.point) + max(3, tree.slots.shape[1])
        required = WorkSizes(group, points, len(tree.node) + 3)
        if any(size > available for size, available in zip(required, self._sizes, strict=True)):
            self._sizes = WorkSizes(*map(max, required, self._sizes))
            points, nodes = self._sizes.points, self._sizes.nodes
            group = self._sizes.group
            # a page has a member, so there are no more pages than points
            longest = max(points, nodes)
            self._arrays = kernels.WorkArrays(
                nodes=np.empty(nodes, np.int32),
                node_score=np.empty((max(group, kernels.PARENTS_AT_ONCE), nodes), np.float32),
                marked=np.empty(nodes, np.uint8),
                opened=np.empty(nodes, np.uint8),
                rows=np.empty(points, np.int32),
                step=np.empty(points, np.float32),
                score=np.empty((group, points), np.float32),
                pages=np.empty(points, np.int32),
                starts=np.empty(points, np.int32),
                scratch=np.empty(longest, np.float32),
                picked=np.empty(longest, np.int32),
                members=np.empty(points, np.int32),
                exact=np.empty((1, points), np.float32),
            )
        return self._arrays


class PagedTree:
    """A tree over rows of `keys`, empty at first, and its pages.

    Parameters
    ----------
    keys
        [rows, D] float32, or uint16 (bfloat16 bits), C-contiguous.
    count
        rows to begin with; there is room for as many again, if `keys` has so many.
    seed
        of directions.

    Attributes
    ----------
    arrays
        the tree itself, see `kernels.Tree`; for looking only.

    Raises
    ------
    ValueError
        the memory is not as above, or has fewer rows.
    """

    def __init__(self, keys: Keys, count: int, layout: Layout, seed: int) -> None:
        self.layout = layout
        self._random = np.random.default_rng(seed)
        check_memory(keys, count)
        head_dim, directions = keys.shape[1], layout.directions
        room = max(1, min(len(keys), 2 * count))  # zeros take no memory before they are written
        direction = self._random.standard_normal((directions, head_dim + 1)).astype(np.float32)
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        self.arrays = Tree(
            keys=keys,
            point=np.zeros(room, kernels.POINT),
            page=np.zeros(1, kernels.PAGE),
            slots=np.zeros((1, layout.page_size), np.int32),
            node=np.zeros(1, kernels.NODE),
            node_key=np.zeros((1, head_dim), np.float32),
            node_sum=np.zeros((1, head_dim), np.float32),
            projection=np.zeros((room, directions), np.float32),
            direction=direction,
            level_size=np.zeros(MAX_LEVELS, np.int64),
            state=np.array([0, 1, 0, NONE, 0]),
            largest=np.zeros(1, np.float32),
            token=np.zeros(room, np.int32),
            sketch=np.zeros((room, -(-head_dim // SKETCH_LANES) * SKETCH_LANES), np.int8),
            step=np.zeros((room, 1), np.float32),
        )
        self.arrays.point["node"][:count] = NONE
        self.arrays.token[:count] = np.arange(count)
        self.arrays.node[ROOT] = (NONE, 1, NONE, 0)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no keys before it is bound to some."""
        return {**self.__dict__, "arrays": self.arrays._replace(keys=self.arrays.keys[:0])}

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
        return sum(array.nbytes for array in self.arrays[1:])

    def tokens(self, pages: Ints) -> Ints:
        """Tokens of pages [...]: [..., page size] int32, trailing -1; page -1 has none."""
        rows = self.arrays.slots[pages]
        tokens: Ints = np.where(
            (rows == NONE) | (pages[..., None] == NONE), NONE, self.arrays.token[rows]
        )
        return tokens

    def arrange(self) -> Ints:
        """Renumber rows so that every page is one block of them; the order of tokens [n] the key
        memory must take.

        Row i must hold the key of token order[i] before the tree is asked again.
        """
        tree, count = self.arrays, len(self)
        slots = tree.slots[: self.pages]
        occupied = slots != NONE
        order = slots[occupied]
        rows = np.empty(count, np.int32)
        rows[order] = np.arange(count, dtype=np.int32)
        slots[occupied] = np.arange(count, dtype=np.int32)
        tree.point[:count] = tree.point[order]
        for array in (tree.projection, tree.sketch, tree.step):
            array[:count] = array[order]
        promoted = tree.node["point"][1 : self.nodes]
        promoted[:] = rows[promoted]
        tree.token[:count] = tree.token[order]
        return tree.token[:count].copy()

    def bind(self, keys: Keys) -> None:
        """The keys lie in other memory now, in the same rows."""
        check_memory(keys, len(self))
        if keys.dtype != self.arrays.keys.dtype or keys.shape[1] != self.arrays.keys.shape[1]:
            raise ValueError(
                f"the tree was built from {kind(self.arrays.keys)}, and was given {kind(keys)}"
            )
        self.arrays = self.arrays._replace(keys=keys)

    # -- room and measures, for what builds a tree -------------------------------------------------

    def _measure(self, start: int, stop: int) -> None:
        """Norms, projections and sketches of new rows, and c."""
        wrong = KERNELS.measure_rows(self.arrays.line, start, stop)
        if wrong != NONE:
            raise ValueError(f"key {wrong} is not finite, or too large to square")

    def _grow(self, points: int, nodes: int, pages: int) -> None:
        """Make room, at least doubling what is too small."""
        tree = self.arrays
        if points > len(tree.point):
            size = max(points, 2 * len(tree.point))
            rows = ("point", "projection", "token", "sketch", "step")
            tree = tree._replace(**{name: _longer(getattr(tree, name), size) for name in rows})
        if nodes > len(tree.node):
            size = max(nodes, 2 * len(tree.node))
            names = ("node", "node_key", "node_sum")
            tree = tree._replace(**{name: _longer(getattr(tree, name), size) for name in names})
        if pages > len(tree.page):
            size = max(pages, 2 * len(tree.page))
            tree = tree._replace(page=_longer(tree.page, size), slots=_longer(tree.slots, size))
        self.arrays = tree


def _longer(array: Any, size: int) -> Any:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def as_stored(keys: torch.Tensor) -> Keys:
    """Keys as a tree reads them, float32 or bfloat16 seen as uint16, in place."""
    is_bfloat16 = keys.dtype == torch.bfloat16
    array: Keys = keys.view(torch.uint16).numpy() if is_bfloat16 else keys.numpy()
    return array


def kind(array: Any) -> str:
    """The type and shape of an array, for messages."""
    return f"{array.dtype} {list(array.shape)}"


def check_memory(keys: Keys, count: int) -> None:
    """Refuse keys that kernels cannot read, or that are fewer than `count`."""
    if keys.dtype not in (np.float32, np.uint16) or keys.ndim != 2 or not keys.flags.c_contiguous:
        raise ValueError(
            "keys must be contiguous [rows, D] of float32, or bfloat16 seen as uint16, got"
            f" {kind(keys)}"
        )
    if count > len(keys):
        raise ValueError(f"{count} keys to index, and memory of {len(keys)}")
