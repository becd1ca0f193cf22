"""Attention over rows where they lie, in Numba: the compiled half of `kvbench.attention.cpu`.

Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the weights and the
weighted sum of the values, and `merge` joins those of a list (flash-decoding). Pieces do not depend on the number of
threads, so neither does what comes out. Kernels hold no state and release the GIL.

A stored row is an address: of a device block, a host block, replaced keys or extra entries. Arithmetic is float32 in
vectors of 16 that are spelt out (`Vector`), as no loop over a row would be compiled as well. All kernels are in this
file, since Numba does not see that a kernel of another file has changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from kvbench.team import claim, together

LANES = 16
LINE = 64  # bytes of a cache's line
BLOCK = 64  # rows whose logits are made before their values are read
LIST_PIECE = 256  # entries of a selected list
DENSE_PIECE = 512

LOWEST = np.finfo(np.float32).min  # finite, so that its difference from a logit of -inf is one
NOTHING, ONE = np.float32(0), np.float32(1)

kernel = njit(nogil=True, cache=True, error_model="numpy")
inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


# -- vectors -----------------------------------------------------------------------------------------------------------


class Vector(types.Type):
    """Sixteen float32 in a register."""

    def __init__(self) -> None:
        super().__init__("Vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Any) -> None:
        from llvmlite import ir

        super().__init__(manager, type_, ir.VectorType(ir.FloatType(), LANES))


def _pointer(builder: Any, address: Any, of: Any) -> Any:
    return builder.inttoptr(address, of.as_pointer())


def _called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    from llvmlite import ir

    of = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, of, name), arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _called(builder, "llvm.fma.v16f32", a.type, a, b, c)


def _splat(builder: Any, number: Any) -> Any:
    from llvmlite import ir

    lanes = ir.VectorType(number.type, LANES)
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _widened(builder: Any, word: Any, to: Any) -> Any:
    """bfloat16, given as uint16, is the upper half of a float32."""
    from llvmlite import ir

    whole = ir.VectorType(ir.IntType(32), LANES) if isinstance(to, ir.VectorType) else ir.IntType(32)
    shift = ir.Constant(whole, [16] * LANES if isinstance(to, ir.VectorType) else 16)
    return builder.bitcast(builder.shl(builder.zext(word, whole), shift), to)


@intrinsic
def size_of(_context, stored):  # type: ignore[no-untyped-def]
    """Bytes of a stored number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.intp, signature.args[0].bitwidth // 8)

    return types.intp(stored), generate


@intrinsic
def load(_context, address, stored):  # type: ignore[no-untyped-def]
    """The vector of 16 numbers at an address, of the type of `stored`: float32, or bfloat16 as uint16."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _numbers(builder, arguments[0], signature.args[1])

    return vector(types.intp, stored), generate


@intrinsic
def load_one(_context, address, stored):  # type: ignore[no-untyped-def]
    """The number at an address, as `load`."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        if signature.args[1] == types.float32:
            return builder.load(_pointer(builder, arguments[0], ir.FloatType()), align=4)
        word = builder.load(_pointer(builder, arguments[0], ir.IntType(16)), align=2)
        return _widened(builder, word, ir.FloatType())

    return types.float32(types.intp, stored), generate


@intrinsic
def store(_context, address, numbers):  # type: ignore[no-untyped-def]
    """Write a vector to an address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], _pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def splat(_context, number):  # type: ignore[no-untyped-def]
    """A vector of one number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _splat(builder, arguments[0])

    return vector(types.float32), generate


@intrinsic
def plus(_context, a, b):  # type: ignore[no-untyped-def]
    """a + b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fadd(*arguments)

    return vector(vector, vector), generate


@intrinsic
def larger(_context, a, b):  # type: ignore[no-untyped-def]
    """The larger of each two numbers; a where b is NaN."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    return vector(vector, vector), generate


def _halves(builder: Any, numbers: Any, join: Any) -> Any:
    """Numbers of all lanes joined into one, lanes by halves."""
    from llvmlite import ir

    count = numbers.type.count
    while count > 1:
        count //= 2
        low, high = (
            builder.shuffle_vector(numbers, numbers, ir.Constant(ir.VectorType(ir.IntType(32), count), lanes))
            for lanes in (list(range(count)), list(range(count, 2 * count)))
        )
        numbers = join(low, high)
    return builder.extract_element(numbers, ir.IntType(32)(0))


@intrinsic
def first_of(_context, numbers):  # type: ignore[no-untyped-def]
    """The first number of a vector."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        return builder.extract_element(arguments[0], ir.IntType(32)(0))

    return types.float32(vector), generate


@intrinsic
def sum_of(_context, numbers):  # type: ignore[no-untyped-def]
    """The sum of a vector."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _halves(builder, arguments[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def largest_of(_context, numbers):  # type: ignore[no-untyped-def]
    """The largest number of a vector."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        def join(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        return _halves(builder, arguments[0], join)

    return types.float32(vector), generate


def _sums(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors, in four lanes."""
    from llvmlite import ir

    def shuffled(x: Any, y: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

    def added(x: Any, y: Any, lanes: list[int], beside: int) -> Any:
        """Lanes of x and y (from `LANES` on), and those `beside` them."""
        return builder.fadd(shuffled(x, y, lanes), shuffled(x, y, [lane + beside for lane in lanes]))

    quarters = range(0, LANES, 4)
    halves = [lane for q in quarters for lane in (q, q + 1, LANES + q, LANES + q + 1)]
    singles = [lane for q in quarters for lane in (q, q + 2, LANES + q, LANES + q + 2)]
    sums = added(added(a, b, halves, 2), added(c, d, halves, 2), singles, 1)  # a, b, c, d in each quarter
    sums = added(sums, sums, [*range(8)], 8)
    return added(sums, sums, [*range(4)], 4)


def _numbers(builder: Any, address: Any, stored: Any) -> Any:
    """The vector of 16 numbers at an address, stored as float32 or as bfloat16."""
    from llvmlite import ir

    lanes = ir.VectorType(ir.FloatType(), LANES)
    if stored == types.float32:
        return builder.load(_pointer(builder, address, lanes), align=4)
    words = ir.VectorType(ir.IntType(16), LANES)
    return _widened(builder, builder.load(_pointer(builder, address, words), align=2), lanes)


@intrinsic(prefer_literal=True)
def score_four(_context, queries, apart, rows, whole, stored, logits, count):  # type: ignore[no-untyped-def]
    """Write the products of `count` queries with four rows, a vector of 4 to each row of logits [count, BLOCK].

    A row is read once for all queries: their sums stay in registers, which is why `count` is a literal.

    Args:
        queries, logits: addresses of the first; a query is `apart` bytes from the next.
        rows: addresses of the four rows.
        whole: numbers of a row that are read, a multiple of `LANES`.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        queries, apart, rows, whole, _, logits, _ = arguments
        of, lanes, word = signature.args[4], ir.VectorType(ir.FloatType(), LANES), queries.type
        width = 4 if of == types.float32 else 2
        nothing = ir.Constant(lanes, [0.0] * LANES)
        asked = [builder.add(queries, builder.mul(apart, word(q))) for q in range(signature.args[6].literal_value)]
        sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(4)] for _ in asked]
        with cgutils.for_range(builder, builder.udiv(whole, word(LANES))) as loop:
            at = builder.mul(loop.index, word(width * LANES))
            read = [_numbers(builder, builder.add(builder.extract_value(rows, n), at), of) for n in range(4)]
            for query, own in zip(asked, sums, strict=True):
                place = builder.add(query, builder.mul(loop.index, word(4 * LANES)))
                x = _numbers(builder, place, types.float32)
                for sum, y in zip(own, read, strict=True):
                    builder.store(_fma(builder, x, y, builder.load(sum)), sum)
        for q, own in enumerate(sums):
            found = _sums(builder, *(builder.load(sum) for sum in own))
            builder.store(found, _pointer(builder, builder.add(logits, word(4 * BLOCK * q)), found.type), align=4)
        return context.get_dummy_value()

    four = types.UniTuple(types.intp, 4)
    return types.void(types.intp, types.intp, four, types.intp, stored, types.intp, count), generate


@intrinsic(prefer_literal=True)
def add_four(_context, weights, rows, whole, stored, sums, apart, count):  # type: ignore[no-untyped-def]
    """Add four rows to each of `count` sums, by weights [count, BLOCK] of which 4 a row are read; see `score_four`.

    Args:
        weights, sums: addresses of the first; a sum is `apart` bytes from the next.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        weights, rows, whole, _, sums, apart, _ = arguments
        of, lanes, word = signature.args[3], ir.VectorType(ir.FloatType(), LANES), weights.type
        width, many = 4 if of == types.float32 else 2, signature.args[6].literal_value

        def weight(q: int, row: int) -> Any:
            at = builder.add(weights, word(4 * (BLOCK * q + row)))
            return _splat(builder, builder.load(_pointer(builder, at, ir.FloatType()), align=4))

        by = [[weight(q, row) for row in range(4)] for q in range(many)]
        with cgutils.for_range(builder, builder.udiv(whole, word(LANES))) as loop:
            at = builder.mul(loop.index, word(width * LANES))
            read = [_numbers(builder, builder.add(builder.extract_value(rows, n), at), of) for n in range(4)]
            place = builder.add(sums, builder.mul(loop.index, word(4 * LANES)))
            for q, own in enumerate(by):
                pointer = _pointer(builder, builder.add(place, builder.mul(apart, word(q))), lanes)
                sum = builder.load(pointer, align=4)
                for one, y in zip(own, read, strict=True):
                    sum = _fma(builder, one, y, sum)
                builder.store(sum, pointer, align=4)
        return context.get_dummy_value()

    four = types.UniTuple(types.intp, 4)
    return types.void(types.intp, four, types.intp, stored, types.intp, types.intp, count), generate


# exp(x) = 2^n exp(r), n = x / ln 2 to the nearest, r = x - n ln 2: Cephes' expf, whose relative error is below 2e-7
_LOG2E, _ROUND, _LOW = 1.44269504088896341, 12582912.0, -87.0
_LN2 = (0.693359375, -2.12194440e-4)  # the first is exact in a few bits, so that n times it is, too
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic
def exponential(_context, x):  # type: ignore[no-untyped-def]
    """exp of numbers that are at most 0 or NaN; 0 below -87."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        (x,) = arguments
        words = ir.VectorType(ir.IntType(32), LANES)

        def number(value: float) -> Any:
            return ir.Constant(x.type, [float(np.float32(value))] * LANES)

        low = builder.fcmp_ordered("<", x, number(_LOW))
        within = builder.select(low, number(_LOW), x)
        rounded = _fma(builder, within, number(_LOG2E), number(_ROUND))  # its lowest bits are n
        n = builder.fsub(rounded, number(_ROUND))
        r = _fma(builder, n, number(-_LN2[1]), _fma(builder, n, number(-_LN2[0]), within))
        sum = number(_POLYNOMIAL[0])
        for factor in _POLYNOMIAL[1:]:
            sum = _fma(builder, sum, r, number(factor))
        sum = _fma(builder, sum, builder.fmul(r, r), builder.fadd(r, number(1)))
        power = builder.shl(builder.bitcast(rounded, words), ir.Constant(words, [23] * LANES))
        power = builder.add(power, ir.Constant(words, [127 << 23] * LANES))
        found = builder.fmul(sum, builder.bitcast(power, x.type))
        return builder.select(low, number(0), found)

    return vector(vector), generate


@intrinsic
def fetch(_context, address):  # type: ignore[no-untyped-def]
    """Have what is at an address on its way to the cache."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        flag = ir.IntType(32)
        byte = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), byte, flag(0), flag(3), flag(1))
        return context.get_dummy_value()

    return types.void(types.intp), generate


# -- one block of rows -------------------------------------------------------------------------------------------------


@inner
def _score(query, keys, count, ahead, logits, stored):  # type: ignore[no-untyped-def]
    """logits [R, BLOCK]: query [R, D] . each of the rows at the addresses keys[:count]; -inf up to a whole vector."""
    many, head_dim = query.shape
    size, whole = size_of(stored), head_dim // LANES * LANES
    last = count - 1
    for i in range(0, count, 4):
        _fetch_four(ahead, i, size * head_dim)
        rows = keys[i], keys[min(i + 1, last)], keys[min(i + 2, last)], keys[min(i + 3, last)]
        for r in range(0, many, 4):
            asked, to, left = query.ctypes.data + 4 * r * head_dim, logits.ctypes.data + 4 * (r * BLOCK + i), many - r
            if left >= 4:
                score_four(asked, 4 * head_dim, rows, whole, stored, to, 4)
            elif left == 3:
                score_four(asked, 4 * head_dim, rows, whole, stored, to, 3)
            elif left == 2:
                score_four(asked, 4 * head_dim, rows, whole, stored, to, 2)
            else:
                score_four(asked, 4 * head_dim, rows, whole, stored, to, 1)
    for r in range(len(query)):
        if whole < head_dim:
            for i in range(count):
                for j in range(whole, head_dim):
                    logits[r, i] += query[r, j] * load_one(keys[i] + size * j, stored)
        for i in range(count, _vectors(count)):
            logits[r, i] = -np.inf


@inner
def _weigh(logits, count, most, total, sums):  # type: ignore[no-untyped-def]
    """Turn logits [R, BLOCK] into weights, exp of what they are below the largest so far; scale the sums to it."""
    head_dim = sums.shape[1]
    for r in range(len(most)):
        at, end = logits.ctypes.data + 4 * r * BLOCK, logits.ctypes.data + 4 * (r * BLOCK + count)
        found = load(at, NOTHING)
        for here in range(at, end, 4 * LANES):
            found = larger(found, load(here, NOTHING))
        largest = largest_of(found)
        if largest > most[r]:
            shrink = first_of(exponential(splat(most[r] - largest)))
            most[r] = largest
            total[r] *= shrink
            for j in range(head_dim):
                sums[r, j] *= shrink
        below = splat(-most[r])
        added = splat(NOTHING)
        for here in range(at, end, 4 * LANES):
            weight = exponential(plus(load(here, NOTHING), below))
            store(here, weight)
            added = plus(added, weight)
        total[r] += sum_of(added)


@inner
def _add_values(weights, values, count, ahead, sums, stored):  # type: ignore[no-untyped-def]
    """Add to sums [R, D] the rows at the addresses values[:count], by weights [R, BLOCK] that are 0 after them."""
    many, head_dim = sums.shape
    size, whole = size_of(stored), head_dim // LANES * LANES
    last = count - 1
    for i in range(0, count, 4):
        _fetch_four(ahead, i, size * head_dim)
        rows = values[i], values[min(i + 1, last)], values[min(i + 2, last)], values[min(i + 3, last)]
        for r in range(0, many, 4):
            by, to, left = weights.ctypes.data + 4 * (r * BLOCK + i), sums.ctypes.data + 4 * r * head_dim, many - r
            if left >= 4:
                add_four(by, rows, whole, stored, to, 4 * head_dim, 4)
            elif left == 3:
                add_four(by, rows, whole, stored, to, 4 * head_dim, 3)
            elif left == 2:
                add_four(by, rows, whole, stored, to, 4 * head_dim, 2)
            else:
                add_four(by, rows, whole, stored, to, 4 * head_dim, 1)
    if whole < head_dim:
        for r in range(len(sums)):
            for i in range(count):
                for j in range(whole, head_dim):
                    sums[r, j] += weights[r, i] * load_one(values[i] + size * j, stored)


@inner
def _fetch_four(rows, first, size):  # type: ignore[no-untyped-def]
    """Have four rows of `size` bytes on their way to the cache; rows that lie apart wait for memory, one by one."""
    for i in range(first, min(first + 4, len(rows))):
        for line in range(0, size, LINE):
            fetch(rows[i] + line)


@inner
def _vectors(count):  # type: ignore[no-untyped-def]
    """As many numbers as whole vectors hold."""
    return -(-count // LANES) * LANES


# -- pieces ------------------------------------------------------------------------------------------------------------


def pieces_of(count: int, size: int) -> int:
    """Pieces of `size` that a list of `count` is cut into."""
    return -(-count // size)


@inner
def _own(query):  # type: ignore[no-untyped-def]
    """The results of a piece, while it is at work: in lines of the cache that no other thread writes."""
    rows, head_dim = query.shape[1:]
    return np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty((rows, head_dim), np.float32)


@kernel
def attend_resident(threads, claims, pieces, query, used, first, key, value, stored, logits, most, total, sums):  # type: ignore[no-untyped-def]
    """Attention over all used slots of each KV head, in so many threads.

    Args:
        claims: [1] int64, the next piece, 0.
        pieces: of each list, `DENSE_PIECE` slots each.
        query: [L, R, D], times the scaling; list l is a KV head of a row.
        used: [L] int64, slots of each list that are attended.
        first: [L] int64, where the slots of each list begin in the pool.
        key, value: addresses of the pool [T, D].
        stored: a number of the pool's type.
        logits: [L, R, n], where they are wanted, else [L, R, 0].
        most, total, sums: [L * pieces, R], the same, and [L * pieces, R, D], written for each piece.
    """
    arguments = claims, pieces, query, used, first, key, value, stored, logits, most, total, sums
    together(threads, _attend_resident, arguments)


@inner
def _attend_resident(_, claims, pieces, query, used, first, key, value, stored, logits, most, total, sums):  # type: ignore[no-untyped-def]
    """As many pieces of a layer's attention as other threads leave."""
    block = np.empty((query.shape[1], BLOCK), np.float32)
    keys, values = np.empty(BLOCK, np.intp), np.empty(BLOCK, np.intp)
    own_most, own_total, own_sums = _own(query)
    row = query.shape[2] * size_of(stored)
    item = claim(claims)
    while item < len(most):
        head, piece = item // pieces, item % pieces
        own_most[:], own_total[:], own_sums[:] = LOWEST, 0, 0
        end = min((piece + 1) * DENSE_PIECE, used[head])
        for start in range(piece * DENSE_PIECE, end, BLOCK):
            count = min(BLOCK, end - start)
            for i in range(count):
                at = (first[head] + start + i) * row
                keys[i], values[i] = key + at, value + at
            _score(query[head], keys, count, values[:count], block, stored)
            if logits.shape[2]:
                logits[head, :, start : start + count] = block[:, :count]
            _weigh(block, count, own_most, own_total, own_sums)
            keys += BLOCK * row
            _add_values(block, values, count, keys[:count], own_sums, stored)
        most[item], total[item], sums[item] = own_most, own_total, own_sums
        item = claim(claims)


@kernel
def attend_lists(  # type: ignore[no-untyped-def]
    threads, claims, pieces, query, index, bias, device, host, own, extra, stored, logits, most, total, sums
):
    """Attention over lists of tokens, in so many threads.

    Args:
        claims: [2] int64, the next piece, 0, and how many pieces named a token that is in neither tier, 0.
        pieces: of each list: `LIST_PIECE` entries each, and one of extra entries, where there are any.
        query: [L, R, D], times the scaling; a row of the batch has L / B lists, one for each KV head or more.
        index: [B, 1 or L / B, M] int64 token ids, -1 = none.
        bias: [L, R, M + E], added to the logits, or [L, R, 0].
        device: addresses of the keys and values [T, D] of all H KV heads of all rows, where those of each begin [H],
            the ids in their slots [H, S], or [H, 0] where slot = id, and [H] slots used.
        host: addresses of the keys and values [H, S', D], S', the slots of the ids [H, S'], and whether a token is
            there [H, S'].
        own: address of keys [H, M, D] in place of the stored ones, or 0.
        extra: addresses of the keys and values [H, E, D] of extra entries, and E.
        stored: a number of the type of all these rows.
        logits: [L, R, M + E], where they are wanted, else [L, R, 0]; an entry that is absent is not written.
        most, total, sums: [L * pieces, R], the same, and [L * pieces, R, D], written for each piece.
    """
    arguments = claims, pieces, query, index, bias, device, host, own, extra, stored, logits, most, total, sums
    together(threads, _attend_lists, arguments)


@inner
def _attend_lists(_, claims, pieces, query, index, bias, device, host, own, extra, stored, logits, most, total, sums):  # type: ignore[no-untyped-def]
    """As many pieces of a layer's lists as other threads leave."""
    extra_key, extra_value, extras = extra
    count = index.shape[2]
    room = max(LIST_PIECE, extras)
    keys, values, rank = np.empty(room, np.intp), np.empty(room, np.intp), np.empty(room, np.intp)
    block = np.empty((query.shape[1], BLOCK), np.float32)
    own_most, own_total, own_sums = _own(query)
    size = query.shape[2] * size_of(stored)
    lists, heads = len(query) // len(index), len(device[4]) // len(index)
    item = claim(claims)
    while item < len(most):
        at, piece = item // pieces, item % pieces
        row = at // lists
        head = row * heads + at % lists * heads // lists
        own_most[:], own_total[:], own_sums[:] = LOWEST, 0, 0
        if extras and piece == pieces - 1:
            found = extras
            for i in range(extras):
                step = (head * extras + i) * size
                keys[i], values[i], rank[i] = extra_key + step, extra_value + step, count + i
        else:
            start = piece * LIST_PIECE
            tokens = index[row, min(at % lists, index.shape[1] - 1), start : start + LIST_PIECE]
            found = _find(tokens, head, device, host, size, keys, values, rank)
            if found < 0:
                claim(claims[1:])
                found = 0
            for i in range(found):
                rank[i] += start
                if own:
                    keys[i] = own + (head * count + rank[i]) * size
        for start in range(0, found, BLOCK):
            rows = min(BLOCK, found - start)
            _score(query[at], keys[start:], rows, values[start : start + rows], block, stored)
            for r in range(query.shape[1]):
                if bias.shape[2]:
                    for i in range(rows):
                        block[r, i] += bias[at, r, rank[start + i]]
                if logits.shape[2]:
                    for i in range(rows):
                        logits[at, r, rank[start + i]] = block[r, i]
            _weigh(block, rows, own_most, own_total, own_sums)
            _add_values(block, values[start:], rows, keys[start + rows : found], own_sums, stored)
        most[item], total[item], sums[item] = own_most, own_total, own_sums
        item = claim(claims)


@inner
def _find(tokens, head, device, host, size, keys, values, rank):  # type: ignore[no-untyped-def]
    """Where tokens lie: addresses of their keys and values, and the place of each in the list.

    Returns:
        How many there are, -1 where one is in neither tier.
    """
    near_key, near_value, first, ids, used = device
    far_key, far_value, far_slots, slot_of, present = host
    here = ids[head, : used[head]]
    found, guess = 0, 0
    for i in range(len(tokens)):
        token = tokens[i]
        if token < 0:
            continue
        slot = -1
        if ids.shape[1]:
            if guess >= len(here) or here[guess] != token:  # lists often name neighbours, one after the other
                guess = np.searchsorted(here, token)
            if guess < len(here) and here[guess] == token:
                slot = guess
                guess += 1
        elif token < used[head]:
            slot = token
        if slot >= 0:
            at = (first[head] + slot) * size
            keys[found], values[found] = near_key + at, near_value + at
        elif token < far_slots and present[head, token]:
            at = (head * far_slots + slot_of[head, token]) * size
            keys[found], values[found] = far_key + at, far_value + at
        else:
            return -1
        if found < BLOCK:
            for line in range(0, size, LINE):
                fetch(keys[found] + line)
        rank[found] = i
        found += 1
    return found


@kernel
def merge(pieces, most, total, sums, out, logits):  # type: ignore[no-untyped-def]
    """Join the pieces of each list: out [L, R, D], and logits [L, R, n] become probabilities."""
    lists, rows, head_dim = out.shape
    for head in range(lists):
        for r in range(rows):
            largest, whole = LOWEST, NOTHING
            for item in range(head * pieces, (head + 1) * pieces):
                largest = max(largest, most[item, r])
            out[head, r] = 0
            for item in range(head * pieces, (head + 1) * pieces):
                weight = first_of(exponential(splat(most[item, r] - largest)))
                whole += weight * total[item, r]
                for j in range(head_dim):
                    out[head, r, j] += weight * sums[item, r, j]
            for j in range(head_dim):
                out[head, r, j] /= whole
            for i in range(logits.shape[2]):
                logits[head, r, i] = first_of(exponential(splat(logits[head, r, i] - largest))) / whole
