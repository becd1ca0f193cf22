"""How a tree is built, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """How a tree is built.

    Attributes:
        page_size: members of a page, s.
        promotion: shares of the points of level 1, and of the levels above, that belong one level higher (r1, r2).
        levels: "counter", the next arrival is promoted where the level above has room; "counter_ceil", where it has
            less than its share, which is seen one arrival later (the authors' code); "random", by seeded draws.
        parents: "nearest", the nearest of the level above; "anchored", in a build from more than `exhaustive_below`
            points of level 1 most of these choose among the parents of anchors near them (the authors' code).
        anchors: (interval, reach, threshold): how far anchors are apart, how many of them are asked on either side, and
            how far a parent may be, in distances of its farthest child so far; see `kernels.anchored_nodes`.
        split: how a node's children are shared out into pages: sorted by one random "projection", or "greedy", near
            ones together.
        remainder: the "first" or the "last" of a node's pages have one member more where they do not come out even.
        projections: (L, m), composite and simple indices of P-DCI, by which the tree is then searched; (0, 0): none.
        fov: beam width of the parent search, in levels that are not searched exhaustively.
        exhaustive_below: points of a level up to which all of it is searched for parents.
        reparent: a promoted newcomer takes over the points below it that are nearer to it than to their parents.
    """

    page_size: int = 16
    promotion: tuple[float, float] = (0.01, 0.2)
    levels: Literal["counter", "counter_ceil", "random"] = "counter"
    parents: Literal["nearest", "anchored"] = "nearest"
    anchors: tuple[int, int, float] = (120, 30, 0.9)
    split: Literal["projection", "greedy"] = "projection"
    remainder: Literal["first", "last"] = "first"
    projections: tuple[int, int] = (0, 0)
    fov: int = 30
    exhaustive_below: int = 4096
    reparent: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 2:
            raise ValueError(f"page_size={self.page_size}: a page has at least 2 members")
        if not all(0 < share < 1 for share in self.promotion):
            raise ValueError(f"promotion={self.promotion}: shares lie between 0 and 1")
        _one_of("levels", self.levels, ("counter", "counter_ceil", "random"))
        _one_of("parents", self.parents, ("nearest", "anchored"))
        if min(self.anchors) <= 0:
            raise ValueError(f"anchors={self.anchors}: (interval, reach, threshold), all above 0")
        _one_of("split", self.split, ("projection", "greedy"))
        _one_of("remainder", self.remainder, ("first", "last"))
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
        fov: nodes whose children each query looks at; by P-DCI the width of its beam at every level.
        rank_by: rank nodes by their own key ("point") or by the mean of their children ("centroid").
        exhaustive_below: points of a level up to which all of it is ranked; a larger one only below the best `fov`
            nodes of the level above.
        prop_to_retrieve: share of a node's children, those nearest in projection, that are enough for P-DCI.
    """

    fov: int = 30
    rank_by: Literal["point", "centroid"] = "point"
    exhaustive_below: int = 4096
    prop_to_retrieve: float = 1.0

    def __post_init__(self) -> None:
        _one_of("rank_by", self.rank_by, ("point", "centroid"))
        if self.fov < 1 or not 0 < self.prop_to_retrieve <= 1:
            raise ValueError(f"fov={self.fov}, prop_to_retrieve={self.prop_to_retrieve}: at least 1, and in (0, 1]")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value}: one of {', '.join(choices)}")
