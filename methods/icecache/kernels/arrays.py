"""The arrays of a DCI tree, and the memory that its kernels work in.

A kernel is given neither array by array: it gets the address of a line, which says where each array
is and how large. So one number goes from function to function and not two hundred, of which most of
the compiled code would consist, and most of the time that it takes to compile.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

Array = np.ndarray[Any, Any]

POINT = np.dtype(
    [("page", "i4"), ("slot", "i4"), ("node", "i4"), ("norm2", "f4"), ("affinity", "f4")],
    align=True,
)
PAGE = np.dtype([("node", "i4"), ("count", "i4"), ("next", "i4")], align=True)
NODE = np.dtype([("point", "i4"), ("level", "i4"), ("first", "i4"), ("children", "i4")], align=True)

POINTS, NODES, PAGES, FREE, TOP = range(5)  # indexes in Tree.state
NONE, ROOT = -1, 0

SIZES = 3  # numbers of a line that name an array: its address, rows and columns


class _Lined:
    """Arrays in a tuple, and the line that names them."""

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """[SIZES * arrays] int64."""
        arrays: Any = self
        numbers: list[int] = []
        for array in arrays:
            numbers += (array.ctypes.data, *array.shape, 1)[:SIZES]
        return np.array(numbers)

    @cached_property
    def address(self) -> int:
        """Of the line, for compiled code."""
        return int(self.line.ctypes.data)

    def __getstate__(self) -> None:
        """A copy is elsewhere."""

    @classmethod
    def numba_type(cls, kinds: Iterable[types.Array]) -> Lined:
        """What kernels take it for, of arrays of these types."""
        return Lined(cls, kinds)


class _Tree(NamedTuple):
    keys: Array
    point: Array
    page: Array
    slots: Array
    node: Array
    node_key: Array
    node_sum: Array
    projection: Array
    direction: Array
    level_size: Array
    state: Array
    largest: Array
    token: Array
    sketch: Array
    step: Array


class Tree(_Lined, _Tree):
    """The arrays of one tree; capacities are those of the arrays, what is used stands in `state`.

    Attributes
    ----------
    keys
        [rows, D] float32, or uint16: the bits of bfloat16. The store's own memory.
    point
        [rows] `POINT`: page and slot, own node (`NONE` at level 1), |k|^2, k . parent (0 below the
        root).
    page
        [pages] `PAGE`: its node, members, next page of the node or of the free list.
    slots
        [pages, page size] int32 points, `NONE` after the last member.
    node
        [nodes] `NODE`: own point, level (the root's is top + 1), first page, children.
    node_key, node_sum
        [nodes, D] float32, own key and the sum of the children's.
    projection
        [rows, J] float32, <k, u_j> without the height's share, which changes with c.
    direction
        [J, D + 1] float32 unit vectors u_j.
    level_size
        [levels] int64, points of each level.
    state
        [5] int64: points, nodes, pages ever used, first free page, top level.
    largest
        [1] float32, c^2.
    token
        [rows] int32, the token whose key lies in each row.
    sketch
        [rows, D up to a whole number of vectors] int8, a key's numbers in steps, off by half a step
        at most.
    step
        [rows, 1] float32, the step of each sketch.
    """


class _Workspace(NamedTuple):
    nodes: Array
    node_score: Array
    marked: Array
    opened: Array
    rows: Array
    step: Array
    score: Array
    pages: Array
    starts: Array
    scratch: Array
    picked: Array
    members: Array
    exact: Array


class WorkArrays(_Lined, _Workspace):
    """Memory for one kernel at a time; G queries.

    Attributes
    ----------
    nodes, node_score
        [nodes + 3] int32, nodes that were scored, and [G, nodes + 3] float32, their scores.
    marked, opened
        [nodes] uint8, nodes whose children are wanted, and those whose children were scored on the
        way.
    rows, step, score
        [points + 3] int32, points that were scored, page by page; [points + 3] float32, the steps
        of their sketches; and [G, points + 3] float32, their scores.
    pages, starts
        [points + 3] int32, the pages of `rows`, and where in it each begins; then the end of the
        last.
    scratch, picked
        [longest list] float32 and int32.
    members, exact
        [points + 3] int32, points whose keys are read, and [1, points + 3] float32, their scores.
    """


class Lined(types.Type):
    """A `Tree` or a `WorkArrays` in a kernel: a pointer to its line.

    Parameters
    ----------
    of
        which of the two.
    kinds
        of their arrays.
    """

    def __init__(self, of: Any, kinds: Iterable[types.Array]) -> None:
        self.instance_class, self.types = of, tuple(kinds)
        super().__init__(f"{of.__name__}({self.types[0].dtype})")

    @property
    def key(self) -> Any:
        return self.instance_class, self.types


@register_model(Lined)
class _LinedModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())


@typeof_impl.register(_Lined)
def _type_of(value: Any, context: Any) -> Lined:
    return value.numba_type(typeof_impl(array, context) for array in value)


@unbox(Lined)
def _address_of(kind, value, c):  # type: ignore[no-untyped-def]
    address = c.pyapi.object_getattr_string(value, "address")
    number = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    return NativeValue(
        c.builder.inttoptr(number, ir.IntType(64).as_pointer()), is_error=c.pyapi.c_api_error()
    )


@infer_getattr
class _Arrays(AttributeTemplate):  # type: ignore[misc]
    key = Lined

    def generic_resolve(self, kind: Lined, name: str) -> types.Array | None:
        return dict(zip(kind.instance_class._fields, kind.types, strict=True)).get(name)


@lower_getattr_generic(Lined)
def _array(context, builder, kind, line, name):  # type: ignore[no-untyped-def]
    """One of the arrays.

    Nothing moves while a kernel runs, so a loop needs to look only once where it is.
    """
    number = kind.instance_class._fields.index(name)
    first, of = SIZES * number, kind.types[number]
    array = context.make_array(of)(context, builder)
    itemsize = context.get_abi_sizeof(context.get_data_type(of.dtype))
    address, *shape = (
        builder.load(builder.gep(line, [ir.IntType(64)(first + at)])) for at in range(1 + of.ndim)
    )
    for number in (address, *shape):
        number.set_metadata("invariant.load", builder.module.add_metadata([]))
    strides = [ir.IntType(64)(itemsize)]
    if of.ndim == 2:
        strides.insert(0, builder.mul(shape[1], strides[0]))
    data = builder.inttoptr(address, array.data.type)
    populate_array(array, data, shape, strides, ir.IntType(64)(itemsize), meminfo=None)
    return array._getvalue()


@intrinsic
def at(_context, directory, number, example):  # type: ignore[no-untyped-def]
    """The tree, or the workspace, of a line of a directory [lines, ...]; `example`: any
    of these.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        of = signature.args[0]
        lines = context.make_array(of)(context, builder, arguments[0])
        start = [arguments[1], ir.IntType(64)(0)]
        return cgutils.get_item_pointer(context, builder, of, lines, start)

    return example(directory, types.intp, example), generate
