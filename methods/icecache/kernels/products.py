"""Products of keys with queries and with one another, norms and projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from methods.blocks.kernels import jit, kernel, prefetch, widen
from methods.icecache.kernels.arrays import NONE

LANES, SKETCH_LANES = 8, 16  # numbers of a vector
# keys, and queries at most, whose products are summed side by side: no sum waits for another
TILE = 4
# keys that are fetched early; the hardware looks no farther than a page of memory
AHEAD, SKETCHES_AHEAD = 16, 32

STEPS = np.float32(127)  # largest number of a sketch
# largest number of a query that sketches are asked: int32 holds the sum of 1,032 products
UNITS = np.float32(16383)
# of a step or unit: how far a number is from its sketch, and what products lose in rounding
HALF = np.float32(0.52)
NOTHING = np.float32(1e-30)  # below, a sketch has no steps

LINE = 64  # bytes of a cache line

# of float32 arithmetic, as `methods.blocks.kernels.FAST`
FLAGS = ("contract", "reassoc", "nsz", "arcp")
# Lanes of two vectors of eight that are added up until the sums of four vectors stand side by side.
EVEN, ODD = [0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]
LOW, HIGH = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]


class _Writer:
    """Writes the instructions of a tile, for keys of float32 or bfloat16, or for sketches (int8,
    queries int16).

    A row is the Numba type of its array and a pointer to its first number.
    """

    def __init__(self, context, builder, sketched):  # type: ignore[no-untyped-def]
        self.context, self.builder = context, builder
        self.sketched = sketched
        self.lanes = SKETCH_LANES if sketched else LANES
        self.index = context.get_value_type(types.intp)
        self.sum = ir.VectorType(ir.IntType(32) if sketched else ir.FloatType(), LANES)

    def number(self, value):  # type: ignore[no-untyped-def]
        """An index that is known now."""
        return ir.Constant(self.index, value)

    def pointer(self, kind, array, *index):  # type: ignore[no-untyped-def]
        """Where array[index] lies."""
        view = self.context.make_array(kind)(self.context, self.builder, value=array)
        return cgutils.get_item_pointer(
            self.context, self.builder, kind, view, list(index), wraparound=False
        )

    def load(self, row, at, wide):  # type: ignore[no-untyped-def]
        """A vector of `lanes` numbers of a row from index `at` on, or one number: float32, of
        sketches int32.
        """
        (kind, pointer), builder = row, self.builder
        stored = self.context.get_value_type(kind.dtype)
        pointer = builder.gep(pointer, [at])
        if wide:
            stored = ir.VectorType(stored, self.lanes)
            pointer = builder.bitcast(pointer, stored.as_pointer())
        value = builder.load(pointer, align=kind.dtype.bitwidth // 8)
        if kind.dtype == types.float32:
            return value
        word = ir.VectorType(ir.IntType(32), self.lanes) if wide else ir.IntType(32)
        if self.sketched:
            return builder.sext(value, word)
        shift = ir.Constant(word, [16] * self.lanes if wide else 16)
        bits = builder.shl(builder.zext(value, word), shift)
        return builder.bitcast(bits, self.sum if wide else ir.FloatType())

    def plus(self, first, second):  # type: ignore[no-untyped-def]
        """The sum of two vectors."""
        if self.sketched:
            return self.builder.add(first, second)
        return self.builder.fadd(first, second, flags=FLAGS)

    def plus_lanes(self, first, second, first_lanes, second_lanes):  # type: ignore[no-untyped-def]
        """The sum of lanes `first_lanes` and `second_lanes` of two vectors, numbered
        through both.
        """
        kind = ir.VectorType(ir.IntType(32), len(first_lanes))
        a, b = (
            self.builder.shuffle_vector(first, second, ir.Constant(kind, lanes))
            for lanes in (first_lanes, second_lanes)
        )
        return self.plus(a, b)

    def product(self, query, key, wide):  # type: ignore[no-untyped-def]
        """What a step adds to a sum: a vector of products, of sketches added up in pairs; one
        product as lane 0.
        """
        if self.sketched:
            product = self.builder.mul(query, key, flags=("nsw",))
            even, odd = [*range(0, self.lanes, 2)], [*range(1, self.lanes, 2)]
            return self.plus_lanes(product, product, even, odd)
        product = self.builder.fmul(query, key, flags=FLAGS)
        if wide:
            return product
        return self.builder.insert_element(
            ir.Constant(self.sum, None), product, ir.Constant(ir.IntType(32), 0)
        )

    def add_products(self, keys, queries, sums, start, stop, wide):  # type: ignore[no-untyped-def]
        """Add the products of numbers start .. stop - 1 of all keys with all queries to
        sums[query][key].
        """
        builder, step = self.builder, self.number(self.lanes if wide else 1)
        with cgutils.for_range_slice(builder, start, stop, step, self.index) as (k, _):
            numbers = [self.load(key, k, wide) for key in keys]
            for query, of_query in zip(queries, sums, strict=True):
                query_vector = self.load(query, k, wide)
                for number, total in zip(numbers, of_query, strict=True):
                    product = self.product(query_vector, number, wide)
                    builder.store(self.plus(builder.load(total), product), total)

    def store_sums(self, sums, pointer):  # type: ignore[no-untyped-def]
        """Add up the lanes of each of `TILE` sums, and store these as float32 side by side."""
        loaded = [self.builder.load(sum) for sum in sums]
        two, others = (self.plus_lanes(loaded[at], loaded[at + 1], EVEN, ODD) for at in (0, 2))
        both = self.plus_lanes(two, others, LOW, HIGH)
        four = self.plus_lanes(both, both, [0, 1, 2, 3], [4, 5, 6, 7])
        if self.sketched:
            four = self.builder.sitofp(four, ir.VectorType(ir.FloatType(), TILE))
        self.builder.store(four, self.builder.bitcast(pointer, four.type.as_pointer()), align=4)


def _tile(group, sketched=False):  # type: ignore[no-untyped-def]
    """An intrinsic: the products of `TILE` rows of a matrix with `group` queries, each vector
    loaded once for all.

    Of plain loops LLVM makes half of the speed: it adds up the lanes of every sum alone. Sketches,
    int8 with int16 queries, are multiplied in whole numbers and added up in pairs, for which CPUs
    have an instruction.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        matrix_type, rows_type, _, queries_type, _, out_type = signature.args
        matrix, rows, i, query_array, g, out = arguments
        code = _Writer(context, builder, sketched)
        keys, queries, outs = [], [], []  # type: ignore[var-annotated]
        zero = code.number(0)
        for t in range(TILE):
            row = builder.load(code.pointer(rows_type, rows, builder.add(i, code.number(t))))
            row = builder.sext(row, code.index)
            keys.append((matrix_type, code.pointer(matrix_type, matrix, row, zero)))
        for j in range(group):
            at = builder.add(g, code.number(j))
            queries.append((queries_type, code.pointer(queries_type, query_array, at, zero)))
            outs.append(code.pointer(out_type, out, at, i))
        nothing = ir.Constant(code.sum, None)
        sums = [[cgutils.alloca_once_value(builder, nothing) for _ in keys] for _ in queries]
        array = context.make_array(queries_type)(context, builder, value=query_array)
        width = builder.extract_value(array.shape, 1)
        whole = builder.and_(width, code.number(-code.lanes))
        code.add_products(keys, queries, sums, zero, whole, wide=True)
        if not sketched:  # whose width is a whole number of vectors
            code.add_products(keys, queries, sums, whole, width, wide=False)
        for pointer, of_query in zip(outs, sums, strict=True):
            code.store_sums(of_query, pointer)
        return context.get_dummy_value()

    @intrinsic
    def tile(_context, matrix, rows, i, queries, g, out):  # type: ignore[no-untyped-def]
        """out[g + j, i + t] = queries[g + j] . matrix[rows[i + t]]."""
        return types.void(matrix, rows, i, queries, g, out), generate

    return tile


_keys_of_1, _keys_of_2 = _tile(1), _tile(2)
_keys_of_3, _keys_of_4 = _tile(3), _tile(4)
_sketches_of_1, _sketches_of_2 = _tile(1, True), _tile(2, True)
_sketches_of_3, _sketches_of_4 = _tile(3, True), _tile(4, True)


class SketchedQueries(NamedTuple):
    """Queries [G, D] as sketches [G, width] are asked.

    Attributes
    ----------
    numbers
        [G, width] int16, in units.
    unit
        [G].
    half
        [G], how many steps of a key's sketch its q.k can be off: half a step of each number, half a
        unit of each of the query, and what is lost in rounding.
    """

    numbers: Any
    unit: Any
    half: Any


@jit
def _fetch(matrix, rows, i):  # type: ignore[no-untyped-def]
    """Have `TILE` rows on their way to the cache."""
    for t in range(TILE):
        for k in range(0, matrix.shape[1], LINE // matrix.itemsize):
            prefetch(matrix, rows[i + t], k)


@jit
def products(matrix, rows, start, stop, queries, out):  # type: ignore[no-untyped-def]
    """out[g, i] = queries[g] . matrix[rows[i]], start <= i < stop; three entries from `stop` on are
    overwritten.
    """
    if start == stop:
        return
    rows[stop : stop + 3] = rows[stop - 1]
    for i in range(start, stop, TILE):
        if i + AHEAD + TILE < stop:
            _fetch(matrix, rows, i + AHEAD)
        for g in range(0, queries.shape[0], TILE):
            remaining = queries.shape[0] - g
            if remaining >= 4:
                _keys_of_4(matrix, rows, i, queries, g, out)
            elif remaining == 3:
                _keys_of_3(matrix, rows, i, queries, g, out)
            elif remaining == 2:
                _keys_of_2(matrix, rows, i, queries, g, out)
            else:
                _keys_of_1(matrix, rows, i, queries, g, out)


@jit
def single_query_products(matrix, rows, stop, query, out):  # type: ignore[no-untyped-def]
    """As `products` from 0 on, with one query [1, D]: compiled in a fraction of the time."""
    if stop == 0:
        return
    rows[stop : stop + 3] = rows[stop - 1]
    for i in range(0, stop, TILE):
        if i + AHEAD + TILE < stop:
            _fetch(matrix, rows, i + AHEAD)
        _keys_of_1(matrix, rows, i, query, 0, out)


@jit
def sketched_products(tree, rows, stop, asks, out, step):  # type: ignore[no-untyped-def]
    """out[g, i] = asks[g] . sketch of rows[i], and step[i] its step, i < stop; three entries more
    are overwritten.
    """
    if stop == 0:
        return
    rows[stop : stop + 3] = rows[stop - 1]
    for i in range(0, stop, TILE):
        if i + SKETCHES_AHEAD + TILE < stop:
            _fetch(tree.step, rows, i + SKETCHES_AHEAD)
            _fetch(tree.sketch, rows, i + SKETCHES_AHEAD)
        for t in range(TILE):
            step[i + t] = tree.step[rows[i + t], 0]
        for g in range(0, asks.shape[0], TILE):
            remaining = asks.shape[0] - g
            if remaining >= 4:
                _sketches_of_4(tree.sketch, rows, i, asks, g, out)
            elif remaining == 3:
                _sketches_of_3(tree.sketch, rows, i, asks, g, out)
            elif remaining == 2:
                _sketches_of_2(tree.sketch, rows, i, asks, g, out)
            else:
                _sketches_of_1(tree.sketch, rows, i, asks, g, out)


@jit
def quantised_queries(queries, width):  # type: ignore[no-untyped-def]
    """`SketchedQueries` of queries [G, D]."""
    group, head_dim = queries.shape
    asks = np.zeros((group, width), np.int16)
    unit, half = np.zeros(group, np.float32), np.zeros(group, np.float32)
    for g in range(group):
        largest = np.float32(0)
        for k in range(head_dim):
            largest = max(largest, abs(queries[g, k]))
            half[g] += HALF * abs(queries[g, k])
        if largest < NOTHING:
            half[g] *= 2 * STEPS + 2
        else:
            unit[g] = largest / UNITS
            half[g] += HALF * head_dim * STEPS * unit[g]
            for k in range(head_dim):
                asks[g, k] = np.int16(np.rint(queries[g, k] / unit[g]))
    return SketchedQueries(asks, unit, half)


@kernel
def measure(tree, start, stop):  # type: ignore[no-untyped-def]
    """Norms, projections without the height's share, and sketches of rows start .. stop - 1, and c.

    Returns
    -------
    value
        the first row that is not finite, then nothing changed but norms, or `NONE`.
    """
    for row in range(start, stop):
        total = np.float32(0)
        for k in range(tree.keys.shape[1]):
            total += widen(tree.keys[row, k]) * widen(tree.keys[row, k])
        if not total < np.inf:
            return row
        tree.point[row].norm2 = total
    for row in range(start, stop):
        tree.largest[0] = max(tree.largest[0], tree.point[row].norm2)
        for j in range(len(tree.direction)):
            total = np.float32(0)
            for k in range(tree.keys.shape[1]):
                total += widen(tree.keys[row, k]) * tree.direction[j, k]
            tree.projection[row, j] = total
        _sketch(tree, row)
    return NONE


@jit
def _sketch(tree, row):  # type: ignore[no-untyped-def]
    """A key in whole steps of 1/127 of its largest number; what is next to nothing is less than
    half of one step.
    """
    largest = np.float32(0)
    for k in range(tree.keys.shape[1]):
        largest = max(largest, abs(widen(tree.keys[row, k])))
    nothing = largest < NOTHING
    tree.step[row, 0] = 2 * largest if nothing else largest / STEPS
    steps = np.float32(0) if nothing else STEPS / largest
    for k in range(tree.keys.shape[1]):
        tree.sketch[row, k] = np.int8(np.rint(widen(tree.keys[row, k]) * steps))


@jit
def height_of(tree, row):  # type: ignore[no-untyped-def]
    """The height of a key, from its norm and the largest one."""
    return np.sqrt(max(tree.largest[0] - tree.point[row].norm2, np.float32(0)))


@jit
def affinities(tree, row, rows, count, work):  # type: ignore[no-untyped-def]
    """work.score[0, i] = c^2 <T_K(row), T_K(rows[i])> and work.scratch[i] = row . rows[i]."""
    query = np.empty((1, tree.keys.shape[1]), np.float32)
    for k in range(tree.keys.shape[1]):
        query[0, k] = widen(tree.keys[row, k])
    single_query_products(tree.keys, rows, count, query, work.score)
    height = height_of(tree, row)
    for i in range(count):
        work.scratch[i] = work.score[0, i]
        work.score[0, i] += height * height_of(tree, rows[i])
