"""The options of IceCache: how its trees are built, how they are asked, and what a step attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Breadth:
    """How much of a tree is looked at: by a query, and in the search for the parent of a
    new point.
    """

    # nodes whose children a query looks at; the width of the beam of P-DCI, and of the search for
    # parents
    fov: int = 30
    # levels of up to so many points are ranked whole, of larger ones what is below the best `fov`
    # nodes one level above
    exhaustive_below: int = 4096


@dataclass(frozen=True)
class Layout(Breadth):
    """How a tree is built (section 3)."""

    # members of a page, s; of the method: where at least half of the slots are left to recall
    page_size: int = 16
    # shares of the points of level 1, and of the levels above, that belong one level higher (r1,
    # r2)
    promotion: tuple[float, float] = (0.01, 0.2)
    # counter: the next arrival is promoted where the level above has room; counter_ceil: where it
    # has less than its share, which is seen one arrival later (the authors' code); random: by
    # seeded draws
    levels: Literal["counter", "counter_ceil", "random"] = "counter"
    # nearest: of the level above; anchored: in a build from more than `exhaustive_below` points of
    # level 1 most choose among the parents of anchors near them (the authors' code)
    parents: Literal["nearest", "anchored"] = "nearest"
    # tokens from one anchor to the next, how many anchors are asked on either side, and how far a
    # parent may be, in distances of its farthest child so far; see `kernels.anchored_nodes`
    anchors: tuple[int, int, float] = (120, 30, 0.9)
    # how a node's children are shared out into pages: sorted by one random projection; greedy: near
    # ones together
    split: Literal["projection", "greedy"] = "projection"
    # which of a node's pages have one member more where they do not come out even
    remainder: Literal["first", "last"] = "first"
    # (L, m), composite and simple indices of P-DCI, then searched; (0, 0): none
    projections: tuple[int, int] = (0, 0)
    # a promoted newcomer takes over the points below it that are nearer to it than to their parents
    reparent: bool = True

    def __post_init__(self) -> None:
        if len(self.promotion) != 2 or len(self.projections) != 2:
            raise ValueError(
                f"promotion={self.promotion}, projections={self.projections}: two numbers each"
            )
        if len(self.anchors) != 3 or any(number != int(number) for number in self.anchors[:2]):
            raise ValueError(
                f"anchors={self.anchors}: interval and reach, whole numbers, and a threshold"
            )
        numbers = {  # a file has lists
            "promotion": tuple(self.promotion),
            "anchors": (*map(int, self.anchors[:2]), float(self.anchors[2])),
            "projections": tuple(self.projections),
        }
        for key, values in numbers.items():
            object.__setattr__(self, key, values)
        if not all(0 < share < 1 for share in self.promotion):
            raise ValueError(f"promotion={self.promotion}: shares lie between 0 and 1")
        if min(self.anchors) <= 0:
            raise ValueError(f"anchors={self.anchors}: (interval, reach, threshold), all above 0")
        least, most = min(self.projections), max(self.projections)
        if least < 0 or (least == 0) != (most == 0):
            raise ValueError(
                f"projections={self.projections}: (L, m) of at least 1 each, or (0, 0)"
            )

    @property
    def directions(self) -> int:
        """Random directions every key is projected on."""
        composites, simple = self.projections
        return max(composites * simple, int(self.split == "projection"))


@dataclass(frozen=True)
class Search(Breadth):
    """How a tree is asked."""

    # nodes whose children a query looks at, as a share of the indexed tokens; the larger of this
    # and `fov` holds
    fov_share: float = 0.001
    # nodes are ranked by their own key, or by the mean of their children
    rank_by: Literal["point", "centroid"] = "point"
    # share of a node's children, those nearest in projection, that are enough for P-DCI
    prop_to_retrieve: float = 0.8


@dataclass(frozen=True)
class IceCacheOptions(Layout, Search):
    """All options of the method."""

    # tokens of a page where less than half of the slots would be left to recall
    small_page_size: int = 8
    sink_pages: int = 2  # first pages, always attended
    window_pages: int = 2  # last pages, always attended
    index: Literal["dci", "exact"] = "dci"  # exact: the same pages, found by scoring every key
    # the first of so many sparse layers has trees; the others attend the tokens it found (section
    # 4.3)
    reuse: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.projections) and self.rank_by == "centroid":
            raise ValueError(
                f"rank_by={self.rank_by}, projections={self.projections}: P-DCI ranks by point"
            )
        if self.small_page_size > self.page_size:
            raise ValueError(
                f"small_page_size={self.small_page_size}: at most page_size={self.page_size}"
            )
