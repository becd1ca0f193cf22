"""Stored rows of keys and values, in any number of bits, and queries that meet them.

A stored row is an address: of a device block, a host block, replaced keys or extra entries. It
holds numbers in their type (float32, or bfloat16 as uint16), or codes (`kvbench.kernels.coded`),
which become numbers in the registers into which they are read; kernels are compiled for the type of
either. The scale and the minimum of a whole row go into its logit, or its weight. Of 32 neighbours
in bfloat16, or in 4 bits, those of even indexes are one vector, and those of odd indexes the next,
an operation each; what meets them, and what they are added to, is laid out in that order
(`lay_out`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels.coded import FLOATS, TYPES, Facts, Reader, decoded
from kvbench.kernels.vectors import (
    LANES,
    LINE,
    NOTHING,
    PAIR,
    called,
    exponential,
    fetch,
    first_of,
    fma,
    four_sums,
    inner,
    larger,
    largest_of,
    load,
    number_at,
    numbers_at,
    plus,
    pointer,
    splat,
    splatted,
    store,
    sum_of,
    times,
    vector,
)

BLOCK = 64  # rows whose logits are made before their values are read
TINY = float(np.float32(1e-16))  # is added to the sum of a row's squares, whose root divides it


def _whether(fact: str) -> Any:
    """A function of the type of rows, for kernels, that is a constant there: one of `Facts`."""

    @intrinsic
    def answer(_context, stored):  # type: ignore[no-untyped-def]
        value = getattr(Facts.of(stored), fact)
        return types.boolean(stored), lambda context, *_: context.get_constant(types.boolean, value)

    return answer


grouped, spread = _whether("grouped"), _whether("spread")
scaled, ranged = _whether("scaled"), _whether("ranged")


@intrinsic
def load_scalar(_context, row, channel, stored):  # type: ignore[no-untyped-def]
    """One number of the row at an address, without the row's scale; not of packed codes, which are
    read by vectors.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        row, channel = arguments[:2]
        facts = Facts.of(signature.args[2])
        if facts.numbers == "native":
            return number_at(builder, row, channel, signature.args[2])
        if facts.bits < 8:
            return ir.FloatType()(ir.Undefined)
        code = builder.load(pointer(builder, builder.add(row, channel), ir.IntType(8)), align=1)
        return decoded(builder, code, ir.FloatType(), facts)

    return types.float32(types.intp, types.intp, stored), generate


@intrinsic
def load_parameters(_context, rows, count, offset, stored):  # type: ignore[no-untyped-def]
    """The scales and the minima of `count` rows, of 1 to 16, as two vectors; 1 and 0 where rows
    have none.

    Lanes after the last row's are as its own.

    Parameters
    ----------
    rows
        address of the rows' addresses.
    offset
        bytes from a row to its parameters.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        rows, count = arguments[:2]
        facts, word = Facts.of(signature.args[3]), rows.type
        of, many = TYPES[facts.parameter], {"none": 0, "scale": 1, "range": 2}[facts.parameters]
        per_lane = [ir.Constant(FLOATS, [value] * LANES) for value in (1.0, 0.0)]
        last = builder.sub(count, word(1))
        for lane in range(LANES if many else 0):
            index = builder.select(builder.icmp_unsigned("<", word(lane), count), word(lane), last)
            at = builder.add(rows, builder.mul(index, word(word.width // 8)))
            parameters = builder.add(builder.load(pointer(builder, at, word)), arguments[2])
            for n in range(many):
                number = number_at(builder, parameters, word(n), of)
                per_lane[n] = builder.insert_element(per_lane[n], number, ir.IntType(32)(lane))
        scale, least = per_lane
        scale = builder.fmul(scale, ir.Constant(FLOATS, [facts.factor] * LANES))
        return context.make_tuple(builder, signature.return_type, (scale, least))

    return types.UniTuple(vector, 2)(types.intp, types.intp, types.intp, stored), generate


class _Sums:
    """Products of four rows with queries, summed up in registers by the code that it writes.

    Parameters
    ----------
    queries
        address of each.
    unit
        rows are divided by sqrt(sum of their squares + 1e-16).
    """

    def __init__(self, builder: Any, queries: list[Any], unit: bool) -> None:
        nothing = ir.Constant(FLOATS, [0.0] * LANES)

        def zeros() -> list[Any]:
            return [cgutils.alloca_once_value(builder, nothing) for _ in range(4)]

        self._builder, self._queries = builder, queries
        self._sums = [zeros() for _ in queries]
        self._squares = zeros() if unit else []

    def add(self, read: list[Any], first: Any) -> None:
        """Add the products of a vector of each row with those of the queries, `first` bytes on, and
        with itself.
        """
        builder = self._builder
        for sum, y in zip(self._squares, read, strict=bool(self._squares)):
            builder.store(fma(builder, y, y, builder.load(sum)), sum)
        for query, query_sums in zip(self._queries, self._sums, strict=True):
            x = numbers_at(builder, builder.add(query, first), types.float32)
            for sum, y in zip(query_sums, read, strict=True):
                builder.store(fma(builder, x, y, builder.load(sum)), sum)

    def products(self) -> list[Any]:
        """Of each query, a vector of 4."""
        products = [self._joined(sums) for sums in self._sums]
        if not self._squares:
            return products
        squares = self._joined(self._squares)
        squares = self._builder.fadd(squares, ir.Constant(squares.type, [TINY] * 4))
        lengths = called(self._builder, "llvm.sqrt.v4f32", squares.type, squares)
        return [self._builder.fdiv(four, lengths) for four in products]

    def _joined(self, sums: list[Any]) -> Any:
        return four_sums(self._builder, *(self._builder.load(sum) for sum in sums))


@intrinsic(prefer_literal=True)
def score_four(_context, queries, stride, rows, parameters, whole, stored, logits, count):  # type: ignore[no-untyped-def]
    """Write the products of `count` queries with four rows, a vector of 4 to each row of logits
    [count, BLOCK].

    A row is read once for all queries: their sums stay in registers, which is why `count` is a
    literal.

    Parameters
    ----------
    queries, logits
        addresses of the first; a query, float32 as `lay_out` has it, is `stride` bytes from the
        next.
    rows, parameters
        addresses of the four rows and of their parameters.
    whole
        numbers of a row that are read, a multiple of `LANES`.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        queries, stride, rows, parameters, whole, stored_value, logits, _ = arguments
        word = queries.type
        four_rows = [
            (builder.extract_value(rows, n), builder.extract_value(parameters, n)) for n in range(4)
        ]
        reader = Reader(context, builder, signature.args[5], stored_value, whole)
        numbers = range(signature.args[7].literal_value)
        addresses = [builder.add(queries, builder.mul(stride, word(q))) for q in numbers]
        sums = _Sums(builder, addresses, reader.facts.unit)
        pairs = builder.udiv(whole, word(PAIR))
        with cgutils.for_range(builder, pairs) as loop:
            read = [reader.two(*row, loop.index) for row in four_rows]
            first = builder.mul(loop.index, word(4 * PAIR))
            for n, at in enumerate((first, builder.add(first, word(4 * LANES)))):
                sums.add([two[n] for two in read], at)
        with builder.if_then(builder.icmp_unsigned("<", builder.mul(pairs, word(PAIR)), whole)):
            block = builder.mul(pairs, word(2))
            read = [reader.vector(*row, block) for row in four_rows]
            sums.add(read, builder.mul(pairs, word(4 * PAIR)))
        for q, products in enumerate(sums.products()):
            to = pointer(builder, builder.add(logits, word(4 * BLOCK * q)), products.type)
            builder.store(products, to, align=4)
        return context.get_dummy_value()

    four = types.UniTuple(types.intp, 4)
    return types.void(
        types.intp, types.intp, four, four, types.intp, stored, types.intp, count
    ), generate


@intrinsic(prefer_literal=True)
def add_rows(  # type: ignore[no-untyped-def]
    _context, weights, rows, offset, many, block, whole, stored, sums, stride, count, vectors
):
    """Add `many` rows to each of `count` sums, one vector or two of them, by weights [count,
    BLOCK]; see `score_four`.

    The sums stay in registers.

    Parameters
    ----------
    weights
        address of the first.
    rows
        address of the rows' addresses.
    offset
        bytes from a row to its parameters.
    block
        which of the rows' vectors, or which two.
    sums
        address of the first, as `lay_out` has it; a sum is `stride` bytes from the next.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weights, rows, offset, many, block, whole, stored_value, sums, stride, _, _ = arguments
        count, vectors = (argument.literal_value for argument in signature.args[9:])
        word = weights.type
        reader = Reader(context, builder, signature.args[6], stored_value, whole)
        first = builder.add(sums, builder.mul(block, word(4 * LANES * vectors)))

        def place(q: int, n: int) -> Any:
            """Where the `n`-th vector of the `q`-th sum lies."""
            offset = builder.add(builder.mul(stride, word(q)), word(4 * LANES * n))
            return pointer(builder, builder.add(first, offset), FLOATS)

        def register(q: int, n: int) -> Any:
            return cgutils.alloca_once_value(builder, builder.load(place(q, n), align=4))

        accumulators = [[register(q, n) for n in range(vectors)] for q in range(count)]
        with cgutils.for_range(builder, many) as loop:
            at = builder.add(rows, builder.mul(loop.index, word(word.width // 8)))
            row = builder.load(pointer(builder, at, word))
            by = builder.add(row, offset)
            read = reader.two(row, by, block) if vectors == 2 else [reader.vector(row, by, block)]
            for q, per_query in enumerate(accumulators):
                at = builder.add(word(4 * BLOCK * q), builder.mul(loop.index, word(4)))
                at = pointer(builder, builder.add(weights, at), ir.FloatType())
                weight = splatted(builder, builder.load(at, align=4))
                for sum, y in zip(per_query, read, strict=True):
                    builder.store(fma(builder, weight, y, builder.load(sum)), sum)
        for q, per_query in enumerate(accumulators):
            for n, sum in enumerate(per_query):
                builder.store(builder.load(sum), place(q, n), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6, stored, types.intp, types.intp, count, vectors), generate


@inner
def paired(count, stored):  # type: ignore[no-untyped-def]
    """How many of `count` numbers of this type are read by neighbours, into two vectors."""
    return count // PAIR * PAIR if spread(stored) else 0


@inner
def lay_out(numbers, laid, stored):  # type: ignore[no-untyped-def]
    """Write numbers [R, D] in the order in which they meet rows of this type."""
    rows, count = numbers.shape
    pairs = paired(count, stored)
    for r in range(rows):
        for first in range(0, pairs, PAIR):
            for i in range(LANES):
                laid[r, first + i] = numbers[r, first + 2 * i]
                laid[r, first + LANES + i] = numbers[r, first + 2 * i + 1]
        for j in range(pairs, count):
            laid[r, j] = numbers[r, j]


@inner
def score(query, keys, groups, layout, count, ahead, logits, stored):  # type: ignore[no-untyped-def]
    """logits [R, BLOCK]: query [R, D] . each of the rows at the addresses keys[:count]; -inf up to
    a whole vector.

    Parameters
    ----------
    query
        as `lay_out` has it for keys.
    groups
        addresses of the parameters of each key's group, where this kind has groups.
    layout
        bytes from a row to its parameters; those of a row that is fetched.
    ahead
        which rows are fetched, see `_fetch_rows`.
    """
    many, head_dim = query.shape
    offset, size = layout
    whole = head_dim // LANES * LANES
    for i in range(0, count, 4):
        _fetch_rows(ahead, i, 4, size)
        rows = _four(keys, i, count, 0)
        by = _four(groups, i, count, 0) if grouped(stored) else _four(keys, i, count, offset)
        to = logits.ctypes.data + 4 * i
        meet(query.ctypes.data, 4 * head_dim, many, rows, by, whole, stored, to)
    for r in range(many):
        for i in range(count):
            for j in range(whole, head_dim):
                logits[r, i] += query[r, j] * load_scalar(keys[i], j, stored)
    if scaled(stored):
        _scale(query, keys, offset, count, logits, stored)
    for r in range(many):
        for i in range(count, vectors(count)):
            logits[r, i] = -np.inf


@inner
def _four(addresses, first, count, offset):  # type: ignore[no-untyped-def]
    """Four of `count` addresses, so many bytes on; after the last one the last again."""
    last = count - 1
    return (
        addresses[first] + offset,
        addresses[min(first + 1, last)] + offset,
        addresses[min(first + 2, last)] + offset,
        addresses[min(first + 3, last)] + offset,
    )


@inner
def _scale(query, keys, offset, count, logits, stored):  # type: ignore[no-untyped-def]
    """Multiply logits [R, BLOCK] by the scale of each key, and add its minimum's product with a
    query.
    """
    for i in range(0, count, LANES):
        few = min(count - i, LANES)
        scale, least = load_parameters(keys.ctypes.data + i * keys.itemsize, few, offset, stored)
        for r in range(len(query)):
            at = logits.ctypes.data + 4 * (r * BLOCK + i)
            products = times(load(at), scale)
            if ranged(stored):
                products = plus(products, times(least, splat(total_of(query[r]))))
            store(at, products)


@inner
def total_of(numbers):  # type: ignore[no-untyped-def]
    """Their sum."""
    sum, rest = splat(NOTHING), NOTHING
    whole = len(numbers) // LANES * LANES
    for i in range(0, whole, LANES):
        sum = plus(sum, load(numbers.ctypes.data + 4 * i))
    for i in range(whole, len(numbers)):
        rest += numbers[i]
    return sum_of(sum) + rest


@inner
def meet(query, stride, many, rows, parameters, whole, stored, logits):  # type: ignore[no-untyped-def]
    """The products of four rows with `many` queries; see `score_four`, of which these are the
    addresses.
    """
    for r in range(0, many, 4):
        first, to = query + r * stride, logits + 4 * r * BLOCK
        remaining = many - r
        if remaining >= 4:
            score_four(first, stride, rows, parameters, whole, stored, to, 4)
        elif remaining == 3:
            score_four(first, stride, rows, parameters, whole, stored, to, 3)
        elif remaining == 2:
            score_four(first, stride, rows, parameters, whole, stored, to, 2)
        else:
            score_four(first, stride, rows, parameters, whole, stored, to, 1)


@inner
def scale_logits(logits, count, scaling):  # type: ignore[no-untyped-def]
    """Multiply logits [R, BLOCK], of which `count` are there."""
    factor = splat(scaling)
    for r in range(len(logits)):
        first = logits.ctypes.data + 4 * r * BLOCK
        for here in range(first, first + 4 * count, 4 * LANES):
            store(here, times(load(here), factor))


@inner
def weigh(logits, count, most, total, sums):  # type: ignore[no-untyped-def]
    """Turn logits [R, BLOCK] into weights, exp of what they are below the largest so far; scale the
    sums to it.
    """
    head_dim = sums.shape[1]
    for r in range(len(most)):
        at, end = logits.ctypes.data + 4 * r * BLOCK, logits.ctypes.data + 4 * (r * BLOCK + count)
        maxima = load(at)
        for here in range(at, end, 4 * LANES):
            maxima = larger(maxima, load(here))
        largest = largest_of(maxima)
        if largest > most[r]:
            shrink = first_of(exponential(splat(most[r] - largest)))
            most[r] = largest
            total[r] *= shrink
            for j in range(head_dim):
                sums[r, j] *= shrink
        below = splat(-most[r])
        added = splat(NOTHING)
        for here in range(at, end, 4 * LANES):
            weight = exponential(plus(load(here), below))
            store(here, weight)
            added = plus(added, weight)
        total[r] += sum_of(added)


@inner
def add_values(weights, values, layout, count, ahead, sums, stored):  # type: ignore[no-untyped-def]
    """Add to sums [R, D] the rows at the addresses values[:count], by weights [R, BLOCK]; see
    `score`.

    Of rows that have a scale of their own, weights are multiplied with it, in place.
    """
    many, head_dim = sums.shape
    offset, size = layout
    whole, stride = head_dim // LANES * LANES, 4 * head_dim
    if scaled(stored):
        _scale_weights(weights, values, offset, count, sums, stored)
    for i in range(0, count, LANES):
        _fetch_rows(ahead, i, LANES, size)
        rows, few = values.ctypes.data + i * values.itemsize, min(count - i, LANES)
        for r in range(0, many, 4):
            by, to = weights.ctypes.data + 4 * (r * BLOCK + i), sums.ctypes.data + r * stride
            _add_some(by, rows, offset, few, whole, stored, to, stride, min(many - r, 4))
    for r in range(many):
        for i in range(count):
            for j in range(whole, head_dim):
                sums[r, j] += weights[r, i] * load_scalar(values[i], j, stored)


@inner
def _scale_weights(weights, values, offset, count, sums, stored):  # type: ignore[no-untyped-def]
    """Multiply weights [R, BLOCK] by the scale of each value, and add to sums its minimum."""
    for i in range(0, count, LANES):
        few = min(count - i, LANES)
        scale, least = load_parameters(
            values.ctypes.data + i * values.itemsize, few, offset, stored
        )
        for r in range(len(sums)):
            at = weights.ctypes.data + 4 * (r * BLOCK + i)
            if ranged(stored):
                added = sum_of(times(load(at), least))
                for j in range(sums.shape[1]):
                    sums[r, j] += added
            store(at, times(load(at), scale))


@inner
def _add_some(by, rows, offset, few, whole, stored, to, stride, count):  # type: ignore[no-untyped-def]
    """Add `few` rows to each of `count` sums, 1 to 4; see `add_rows`, of which these are the
    arguments.
    """
    pairs = whole // PAIR
    for pair in range(pairs):
        if count == 4:
            add_rows(by, rows, offset, few, pair, whole, stored, to, stride, 4, 2)
        elif count == 3:
            add_rows(by, rows, offset, few, pair, whole, stored, to, stride, 3, 2)
        elif count == 2:
            add_rows(by, rows, offset, few, pair, whole, stored, to, stride, 2, 2)
        else:
            add_rows(by, rows, offset, few, pair, whole, stored, to, stride, 1, 2)
    if pairs * PAIR < whole:
        last = 2 * pairs
        for q in range(count):
            weight, sums = by + 4 * q * BLOCK, to + q * stride
            add_rows(weight, rows, offset, few, last, whole, stored, sums, stride, 1, 1)


@inner
def _fetch_rows(ahead, first, count, size):  # type: ignore[no-untyped-def]
    """Have rows of `size` bytes on their way to the cache; rows that lie apart wait for memory, one
    by one.

    Parameters
    ----------
    ahead
        the rows' addresses; and where rows are neighbours, none of these and the address of the
        first.
    """
    rows, stretch = ahead
    if stretch:
        for line in range(stretch + first * size, stretch + (first + count) * size, LINE):
            fetch(line)
    for i in range(first, min(first + count, len(rows))):
        for line in range(0, size, LINE):
            fetch(rows[i] + line)


@inner
def vectors(count):  # type: ignore[no-untyped-def]
    """As many numbers as whole vectors hold."""
    return -(-count // LANES) * LANES
