"""Products of keys with queries and with one another, norms and projections."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from methods.blocks.kernels import jit, kernel, prefetch, widen
from methods.icecache.kernels.arrays import NONE

LANES, SKETCH_LANES = 8, 16  # numbers of a vector
TILE = 4  # keys, and queries at most, whose products are summed side by side: no sum waits for another
AHEAD, SKETCHES_AHEAD = 16, 32  # keys that are fetched early; the hardware looks no farther than a page of memory

STEPS = np.float32(127)  # largest number of a sketch
UNITS = np.float32(16383)  # largest number of a query that sketches are asked: int32 holds the sum of 1,032 products
HALF = np.float32(0.52)  # of a step or unit: how far a number is from its sketch, and what products lose in rounding
NOTHING = np.float32(1e-30)  # below, a sketch has no steps

LINE = 64  # bytes of a cache line


def _tile(group, sketched=False):  # type: ignore[no-untyped-def]
    """An intrinsic: the products of `TILE` rows of a matrix with `group` queries, each vector loaded once for all.

    Of plain loops LLVM makes half of the speed: it adds up the lanes of every sum alone. Sketches, int8 with int16
    queries, are multiplied in whole numbers and added up in pairs, for which CPUs have an instruction.
    """
    lanes = SKETCH_LANES if sketched else LANES

    @intrinsic
    def tile(_context, matrix, rows, i, queries, g, out):  # type: ignore[no-untyped-def]
        """out[g + j, i + t] = queries[g + j] . matrix[rows[i + t]]."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            from llvmlite import ir

            matrix_type, _, _, queries_type, _, out_type = signature.args
            vector, number = ir.VectorType(ir.FloatType(), lanes), context.get_value_type(types.intp)
            sums_type = ir.VectorType(ir.IntType(32) if sketched else ir.FloatType(), LANES)
            flags = ("contract", "reassoc", "nsz", "arcp")

            def place(kind, array, *index):  # type: ignore[no-untyped-def]
                view = context.make_array(kind)(context, builder, value=array)
                return cgutils.get_item_pointer(context, builder, kind, view, list(index), wraparound=False)

            def loaded(kind, pointer, at, wide):  # type: ignore[no-untyped-def]
                """`lanes` numbers from pointer[at], or one, as float32, of sketches as int32."""
                stored = context.get_value_type(kind.dtype)
                pointer = builder.gep(pointer, [at])
                if wide:
                    stored = ir.VectorType(stored, lanes)
                    pointer = builder.bitcast(pointer, stored.as_pointer())
                value = builder.load(pointer, align=kind.dtype.bitwidth // 8)
                if kind.dtype == types.float32:
                    return value
                word = ir.VectorType(ir.IntType(32), lanes) if wide else ir.IntType(32)
                if sketched:
                    return builder.sext(value, word)
                shift = ir.Constant(word, [16] * lanes if wide else 16)
                bits = builder.shl(builder.zext(value, word), shift)
                return builder.bitcast(bits, vector if wide else ir.FloatType())

            def plus(one, other):  # type: ignore[no-untyped-def]
                return builder.add(one, other) if sketched else builder.fadd(one, other, flags=flags)

            def added(one, other, left, right):  # type: ignore[no-untyped-def]
                kind = ir.VectorType(ir.IntType(32), len(left))
                return plus(*(builder.shuffle_vector(one, other, ir.Constant(kind, which)) for which in (left, right)))

            array, lists, first, asked, query, sums = arguments
            zero = ir.Constant(number, 0)
            keys, queries, outs = [], [], []
            for t in range(TILE):
                at = builder.add(first, ir.Constant(number, t))
                row = builder.sext(builder.load(place(signature.args[1], lists, at)), number)
                keys.append(place(matrix_type, array, row, zero))
            for j in range(group):
                at = builder.add(query, ir.Constant(number, j))
                queries.append(place(queries_type, asked, at, zero))
                outs.append(place(out_type, sums, at, first))
            nothing = ir.Constant(sums_type, None)
            totals = [[cgutils.alloca_once_value(builder, nothing) for _ in keys] for _ in queries]

            def multiplied(asks, part, wide):  # type: ignore[no-untyped-def]
                if sketched:
                    product = builder.mul(asks, part, flags=("nsw",))
                    return added(product, product, list(range(0, lanes, 2)), list(range(1, lanes, 2)))
                product = builder.fmul(asks, part, flags=flags)
                if wide:
                    return product
                return builder.insert_element(nothing, product, ir.Constant(ir.IntType(32), 0))

            def accumulate(k, wide):  # type: ignore[no-untyped-def]
                parts = [loaded(matrix_type, key, k, wide) for key in keys]
                for pointer, of_query in zip(queries, totals, strict=True):
                    asks = loaded(queries_type, pointer, k, wide)
                    for part, total in zip(parts, of_query, strict=True):
                        builder.store(plus(builder.load(total), multiplied(asks, part, wide)), total)

            width = builder.extract_value(context.make_array(queries_type)(context, builder, value=asked).shape, 1)
            whole = builder.and_(width, ir.Constant(number, -lanes))
            with cgutils.for_range_slice(builder, zero, whole, ir.Constant(number, lanes), number) as (k, _):
                accumulate(k, True)
            if not sketched:
                with cgutils.for_range_slice(builder, whole, width, ir.Constant(number, 1), number) as (k, _):
                    accumulate(k, False)

            even, odd = [0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]
            low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
            for pointer, of_query in zip(outs, totals, strict=True):
                a, b, c, d = map(builder.load, of_query)
                both = added(added(a, b, even, odd), added(c, d, even, odd), low, high)
                four = added(both, both, [0, 1, 2, 3], [4, 5, 6, 7])
                if sketched:
                    four = builder.sitofp(four, ir.VectorType(ir.FloatType(), TILE))
                builder.store(four, builder.bitcast(pointer, four.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(matrix, rows, i, queries, g, out), generate

    return tile


_keys_of_1, _keys_of_2, _keys_of_3, _keys_of_4 = (_tile(group) for group in range(1, TILE + 1))
_sketches_of_1, _sketches_of_2, _sketches_of_3, _sketches_of_4 = (_tile(group, True) for group in range(1, TILE + 1))


@jit
def _fetch(matrix, rows, i):  # type: ignore[no-untyped-def]
    """Have `TILE` rows on their way to the cache."""
    for t in range(TILE):
        for k in range(0, matrix.shape[1], LINE // matrix.itemsize):
            prefetch(matrix, rows[i + t], k)


@jit
def products(matrix, rows, start, stop, queries, out):  # type: ignore[no-untyped-def]
    """out[g, i] = queries[g] . matrix[rows[i]], start <= i < stop; three entries from `stop` on are overwritten."""
    if start == stop:
        return
    rows[stop : stop + 3] = rows[stop - 1]
    for i in range(start, stop, TILE):
        if i + AHEAD + TILE < stop:
            _fetch(matrix, rows, i + AHEAD)
        for g in range(0, queries.shape[0], TILE):
            left = queries.shape[0] - g
            if left >= 4:
                _keys_of_4(matrix, rows, i, queries, g, out)
            elif left == 3:
                _keys_of_3(matrix, rows, i, queries, g, out)
            elif left == 2:
                _keys_of_2(matrix, rows, i, queries, g, out)
            else:
                _keys_of_1(matrix, rows, i, queries, g, out)


@jit
def products_of_one(matrix, rows, stop, query, out):  # type: ignore[no-untyped-def]
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
    """out[g, i] = asks[g] . sketch of rows[i], and step[i] its step, i < stop; three entries more are overwritten."""
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
            left = asks.shape[0] - g
            if left >= 4:
                _sketches_of_4(tree.sketch, rows, i, asks, g, out)
            elif left == 3:
                _sketches_of_3(tree.sketch, rows, i, asks, g, out)
            elif left == 2:
                _sketches_of_2(tree.sketch, rows, i, asks, g, out)
            else:
                _sketches_of_1(tree.sketch, rows, i, asks, g, out)


@jit
def asked_in_steps(queries, width):  # type: ignore[no-untyped-def]
    """Queries [G, D] as sketches [G, width] are asked.

    Returns:
        asks: [G, width] int16, in units.
        unit: [G].
        half: [G], how many steps of a key's sketch its q.k can be off: half a step of each number, half a unit of
            each of the query, and what is lost in rounding.
    """
    group, head_dim = queries.shape
    asks, unit, half = np.zeros((group, width), np.int16), np.zeros(group, np.float32), np.zeros(group, np.float32)
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
    return asks, unit, half


@kernel
def measure(tree, start, stop):  # type: ignore[no-untyped-def]
    """Norms, projections without the height's share, and sketches of rows start .. stop - 1, and c.

    Returns:
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
    """A key in whole steps of 1/127 of its largest number; what is next to nothing is less than half of one step."""
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
    products_of_one(tree.keys, rows, count, query, work.score)
    height = height_of(tree, row)
    for i in range(count):
        work.scratch[i] = work.score[0, i]
        work.score[0, i] += height * height_of(tree, rows[i])
