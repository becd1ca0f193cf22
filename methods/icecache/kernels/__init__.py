"""Numba kernels of the DCI tree. `index.py` calls them, nobody else.

They hold no state of their own and release the GIL: any number of threads may build, or ask,
different trees at once, and different workspaces may ask the same tree. Nothing here allocates what
it can take from a `WorkArrays`.

Words: a point is a row of the key memory. A node is the parent of points: node 0 is the root, every
other node is itself a point of level 2 or more. A node's children lie in its chain of pages. The
height of a key is sqrt(c^2 - |k|^2), the last coordinate of c T_K(k), where c is the largest norm.
"""

from methods.blocks.kernels import kernel
from methods.icecache.kernels import choosing, p_dci, ranking
from methods.icecache.kernels.anchors import anchored_nodes
from methods.icecache.kernels.arrays import (
    FREE,
    NODE,
    NODES,
    NONE,
    PAGE,
    PAGES,
    POINT,
    POINTS,
    ROOT,
    SIZES,
    TOP,
    Tree,
    WorkArrays,
)
from methods.icecache.kernels.layer import attend, insert_leaves
from methods.icecache.kernels.levels import (
    BLOCK,
    add_nodes,
    assign_levels,
    assign_levels_in_turn,
    leave_for,
    nearest_nodes,
    take_over_root,
)
from methods.icecache.kernels.pages import add_children, load_children
from methods.icecache.kernels.products import SKETCH_LANES, measure

# The parts of `attend`, of one tree
scan, search = kernel(ranking.scan.py_func), kernel(ranking.search.py_func)
best_pages, best_rows = kernel(choosing.best_pages.py_func), kernel(choosing.best_rows.py_func)
p_dci_pages, p_dci_rows = kernel(p_dci.p_dci_pages.py_func), kernel(p_dci.p_dci_rows.py_func)
interleave = kernel(choosing.interleave.py_func)

__all__ = [
    "BLOCK",
    "FREE",
    "NODE",
    "NODES",
    "NONE",
    "PAGE",
    "PAGES",
    "POINT",
    "POINTS",
    "ROOT",
    "SIZES",
    "SKETCH_LANES",
    "TOP",
    "Tree",
    "WorkArrays",
    "add_children",
    "add_nodes",
    "anchored_nodes",
    "assign_levels",
    "assign_levels_in_turn",
    "attend",
    "best_pages",
    "best_rows",
    "insert_leaves",
    "interleave",
    "leave_for",
    "load_children",
    "measure",
    "nearest_nodes",
    "p_dci_pages",
    "p_dci_rows",
    "scan",
    "search",
    "take_over_root",
]
