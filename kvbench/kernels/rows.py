"""Stored rows of keys and values, in any number of bits, and queries that meet them.

A stored row is an address: of a device block, a host block, replaced keys or extra entries. It holds numbers in their
type (float32, or bfloat16 as uint16), or codes in one of the ways below (`kvbench.memory.codec`), which become numbers
in the registers into which they are read; kernels are compiled for the type of either. Codes stand first in a row, and
their scale (of KIVI's values: scales, then minima) after them. Of 32 neighbours in bfloat16 those of even indexes are
one vector, and those of odd indexes the next, an operation each; what meets them, and what they are added to, is laid
out in that order (`lay_out`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels.vectors import (
    LANES,
    LINE,
    NOTHING,
    PAIR,
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
)

BLOCK = 64  # rows whose logits are made before their values are read
GROUP = 32  # tokens whose keys, and channels of a value, that share a scale and a minimum in KIVI


@dataclass(frozen=True)
class Coded:
    """How rows of codes are held, of which kernels know no more than this.

    Codes stand first in a row, packed, the first in the low bits; the row's parameters follow them.

    Args:
        bits: of a code: 2, 3, 4 or 8.
        numbers: what codes stand for: "signed" (int8), "e4m3" (e4m3fn), "unsigned", or 2**bits numbers, not of 8 bits.
        parameters: "none"; "scale": x = number * scale; "range": x = number * scale + minimum.
        each: what has parameters of its own: a "row"; of a row, `GROUP` "channels", all scales before all minima; or
            each channel of `GROUP` "tokens", [2, D], elsewhere.
        parameter: a parameter's type: "float32", "float16" or "model", that of the model's numbers.
        unit: of keys: a row's numbers are first divided by sqrt(sum of their squares + 1e-16).
    """

    bits: int
    numbers: str | tuple[float, ...]
    parameters: str = "none"
    each: str = "row"
    parameter: str = "float32"
    unit: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.numbers, tuple) and (self.bits == 8 or len(self.numbers) != 2**self.bits):
            raise ValueError(f"{len(self.numbers)} numbers for codes of {self.bits} bits: expected 2**bits, of 2 to 4")


class Int8(NamedTuple):
    """Symmetric integers, a scale a row."""

    scale: np.float32 = np.float32(0)


class Fp8(NamedTuple):
    """e4m3fn, a scale a row."""

    scale: np.float32 = np.float32(0)


class Kivi4(NamedTuple):
    """Codes of 4 bits, scales and minima as wide as the model's numbers; those of keys, by group, lie elsewhere."""

    parameter: Any


class Kivi2(NamedTuple):
    """As `Kivi4`, of 2 bits."""

    parameter: Any


SCALED, KIVI = (Int8, Fp8), {Kivi4: 4, Kivi2: 2}  # bits of a code


def kind_of(stored: Any) -> Any:
    """Which of the above a Numba type is of; None: of numbers."""
    return getattr(stored, "instance_class", None)


@intrinsic
def grouped(_context, stored):  # type: ignore[no-untyped-def]
    """Whether keys of this kind have their parameters by groups of tokens."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.boolean, kind_of(signature.args[0]) in KIVI)

    return types.boolean(stored), generate


@intrinsic
def load_one(_context, row, beside, channel, stored):  # type: ignore[no-untyped-def]
    """One number of the row at an address, its parameters at another; not of KIVI's, whose rows are whole vectors."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        row, beside, channel, _ = arguments
        stored = signature.args[3]
        if kind_of(stored) is None:
            return number_at(builder, row, channel, stored)
        if kind_of(stored) in KIVI:
            return ir.FloatType()(ir.Undefined)
        code = builder.load(pointer(builder, builder.add(row, channel), ir.IntType(8)), align=1)
        return builder.fmul(_decoded(builder, code, ir.FloatType(), stored), _scale(builder, beside, stored))

    return types.float32(types.intp, types.intp, types.intp, stored), generate


def _decoded(builder: Any, codes: Any, to: Any, stored: Any) -> Any:
    """Codes of 8 bits, of a row or one of them, as numbers: what their scale (`_scale`) is to be multiplied with."""
    if kind_of(stored) is Int8:
        return builder.sitofp(codes, to)
    # e4m3 as float16, whose exponent is one bit longer: the sign fills it, and is taken out but for the highest
    vector = isinstance(to, ir.VectorType)
    words, halves = (ir.VectorType(kind, LANES) if vector else kind for kind in (ir.IntType(16), ir.HalfType()))
    shift, mask = (ir.Constant(words, [value] * LANES if vector else value) for value in (7, 0xBFFF))
    return builder.fpext(
        builder.bitcast(builder.and_(builder.shl(builder.sext(codes, words), shift), mask), halves), to
    )


def _scale(builder: Any, beside: Any, stored: Any) -> Any:
    """The scale of a row's decoded codes, stored at an address."""
    scale = builder.load(pointer(builder, beside, ir.FloatType()), align=1)
    return builder.fmul(scale, scale.type(256.0)) if kind_of(stored) is Fp8 else scale  # between the exponents' biases


def _channels(builder: Any, row: Any, beside: Any, block: Any, whole: Any, stored: Any, by_channel: bool) -> Any:
    """A vector of a row, the `block`-th, but for the scale that the whole row has.

    Args:
        row, beside: addresses of the codes and of the parameters.
        whole: numbers of the row.
        by_channel: KIVI's parameters are of each channel, as those of keys, or of each group of channels.
    """
    kind, word, lanes = kind_of(stored), row.type, ir.VectorType(ir.FloatType(), LANES)
    if kind is None:
        step = LANES * stored.bitwidth // 8
        return numbers_at(builder, builder.add(row, builder.mul(block, word(step))), stored)
    if kind not in KIVI:
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        at = pointer(builder, builder.add(row, builder.mul(block, word(LANES))), bytes_)
        return _decoded(builder, builder.load(at, align=1), lanes, stored)
    bits, parameter, words = KIVI[kind], stored.dtype, ir.VectorType(ir.IntType(32), LANES)
    at = builder.add(row, builder.mul(block, word(LANES * bits // 8)))
    held = builder.load(pointer(builder, at, ir.VectorType(ir.IntType(32), LANES * bits // 32)), align=1)
    held = builder.shuffle_vector(held, held, ir.Constant(words, [lane * bits // 32 for lane in range(LANES)]))
    places = ir.Constant(words, [lane * bits % 32 for lane in range(LANES)])
    codes = builder.and_(builder.lshr(held, places), ir.Constant(words, [2**bits - 1] * LANES))
    if by_channel:
        first = builder.add(beside, builder.mul(block, word(LANES * parameter.bitwidth // 8)))
        past = builder.mul(whole, word(parameter.bitwidth // 8))
        scale, least = (numbers_at(builder, at, parameter) for at in (first, builder.add(first, past)))
    else:
        group = builder.udiv(block, word(GROUP // LANES))
        places = group, builder.add(group, builder.udiv(whole, word(GROUP)))
        scale, least = (splatted(builder, number_at(builder, beside, place, parameter)) for place in places)
    return fma(builder, builder.sitofp(codes, lanes), scale, least)


def _two(builder: Any, row: Any, beside: Any, pair: Any, whole: Any, stored: Any, by_channel: bool) -> list[Any]:
    """Two vectors of a row, the `pair`-th, as `lay_out` has it; see `_channels`."""
    word = row.type
    if stored != types.uint16:
        first = builder.mul(pair, word(2))
        blocks = first, builder.add(first, word(1))
        return [_channels(builder, row, beside, block, whole, stored, by_channel) for block in blocks]
    words, lanes = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
    both = builder.load(pointer(builder, builder.add(row, builder.mul(pair, word(2 * PAIR))), words), align=2)
    even = builder.shl(both, ir.Constant(words, [16] * LANES))
    odd = builder.and_(both, ir.Constant(words, [0xFFFF0000] * LANES))
    return [builder.bitcast(half, lanes) for half in (even, odd)]


@intrinsic
def spread(_context, stored):  # type: ignore[no-untyped-def]
    """Whether neighbours of this type are read into two vectors."""
    return types.boolean(stored), lambda context, builder, signature, _: context.get_constant(
        types.boolean, signature.args[0] == types.uint16
    )


@intrinsic(prefer_literal=True)
def score_four(_context, queries, apart, rows, beside, whole, stored, logits, count):  # type: ignore[no-untyped-def]
    """Write the products of `count` queries with four rows, a vector of 4 to each row of logits [count, BLOCK].

    A row is read once for all queries: their sums stay in registers, which is why `count` is a literal.

    Args:
        queries, logits: addresses of the first; a query, float32 as `lay_out` has it, is `apart` bytes from the
            next.
        rows, beside: addresses of the four rows and of their parameters.
        whole: numbers of a row that are read, a multiple of `LANES`.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        queries, apart, rows, beside, whole, _, logits, _ = arguments
        of, lanes, word = signature.args[5], ir.VectorType(ir.FloatType(), LANES), queries.type
        rows, beside = ([builder.extract_value(four, n) for n in range(4)] for four in (rows, beside))
        four, nothing = list(zip(rows, beside, strict=True)), ir.Constant(lanes, [0.0] * LANES)
        asked = [builder.add(queries, builder.mul(apart, word(q))) for q in range(signature.args[7].literal_value)]
        sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(4)] for _ in asked]

        def meet(read: list[Any], first: Any) -> None:
            """Add the products of a vector of each row with those of the queries, `first` bytes on."""
            for query, own in zip(asked, sums, strict=True):
                x = numbers_at(builder, builder.add(query, first), types.float32)
                for sum, y in zip(own, read, strict=True):
                    builder.store(fma(builder, x, y, builder.load(sum)), sum)

        pairs = builder.udiv(whole, word(PAIR))
        with cgutils.for_range(builder, pairs) as loop:
            read = [_two(builder, *one, loop.index, whole, of, True) for one in four]
            first = builder.mul(loop.index, word(4 * PAIR))
            for n, at in enumerate((first, builder.add(first, word(4 * LANES)))):
                meet([two[n] for two in read], at)
        with builder.if_then(builder.icmp_unsigned("<", builder.mul(pairs, word(PAIR)), whole)):
            block = builder.mul(pairs, word(2))
            read = [_channels(builder, *one, block, whole, of, True) for one in four]
            meet(read, builder.mul(pairs, word(4 * PAIR)))
        scales = None
        if kind_of(of) in SCALED:
            scales = ir.Constant(ir.VectorType(ir.FloatType(), 4), ir.Undefined)
            for n, at in enumerate(beside):
                scales = builder.insert_element(scales, _scale(builder, at, of), ir.IntType(32)(n))
        for q, own in enumerate(sums):
            found = four_sums(builder, *(builder.load(sum) for sum in own))
            if scales is not None:
                found = builder.fmul(found, scales)
            builder.store(found, pointer(builder, builder.add(logits, word(4 * BLOCK * q)), found.type), align=4)
        return context.get_dummy_value()

    four = types.UniTuple(types.intp, 4)
    return types.void(types.intp, types.intp, four, four, types.intp, stored, types.intp, count), generate


@intrinsic(prefer_literal=True)
def add_rows(_context, weights, rows, beside, many, block, whole, stored, sums, apart, count, vectors):  # type: ignore[no-untyped-def]
    """Add `many` rows to each of `count` sums, one vector or two of them, by weights [count, BLOCK]; see `score_four`.

    The sums stay in registers.

    Args:
        weights: address of the first.
        rows: address of the rows' addresses.
        beside: bytes from a row to its parameters.
        block: which of the rows' vectors, or which two.
        sums: address of the first, as `lay_out` has it; a sum is `apart` bytes from the next.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weights, rows, beside, many, block, whole, _, sums, apart, _, _ = arguments
        count, vectors = (argument.literal_value for argument in signature.args[9:])
        of, lanes, word = signature.args[6], ir.VectorType(ir.FloatType(), LANES), weights.type
        first = builder.add(sums, builder.mul(block, word(4 * LANES * vectors)))
        places = [
            [
                pointer(
                    builder, builder.add(first, builder.add(builder.mul(apart, word(q)), word(4 * LANES * n))), lanes
                )
                for n in range(vectors)
            ]
            for q in range(count)
        ]
        found = [[cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in own] for own in places]
        with cgutils.for_range(builder, many) as loop:
            at = builder.add(rows, builder.mul(loop.index, word(word.width // 8)))
            row = builder.load(pointer(builder, at, word))
            by = builder.add(row, beside)
            if vectors == 2:
                read = _two(builder, row, by, block, whole, of, False)
            else:
                read = [_channels(builder, row, by, block, whole, of, False)]
            scale = _scale(builder, by, of) if kind_of(of) in SCALED else None
            for q, own in enumerate(found):
                at = builder.add(weights, builder.add(word(4 * BLOCK * q), builder.mul(loop.index, word(4))))
                weight = builder.load(pointer(builder, at, ir.FloatType()), align=4)
                weight = splatted(builder, weight if scale is None else builder.fmul(weight, scale))
                for sum, y in zip(own, read, strict=True):
                    builder.store(fma(builder, weight, y, builder.load(sum)), sum)
        for own, to in zip(found, places, strict=True):
            for sum, place in zip(own, to, strict=True):
                builder.store(builder.load(sum), place, align=4)
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
    """logits [R, BLOCK]: query [R, D] . each of the rows at the addresses keys[:count]; -inf up to a whole vector.

    Args:
        query: as `lay_out` has it for keys.
        groups: addresses of the parameters of each key's group, where this kind has groups.
        layout: bytes from a row to its parameters; those of a row that is fetched.
        ahead: which rows are fetched, see `_fetch_rows`.
    """
    many, head_dim = query.shape
    beside, size = layout
    whole, last = head_dim // LANES * LANES, count - 1
    for i in range(0, count, 4):
        _fetch_rows(ahead, i, 4, size)
        a, b, c, d = keys[i], keys[min(i + 1, last)], keys[min(i + 2, last)], keys[min(i + 3, last)]
        rows, by = (a, b, c, d), (a + beside, b + beside, c + beside, d + beside)
        if grouped(stored):
            by = groups[i], groups[min(i + 1, last)], groups[min(i + 2, last)], groups[min(i + 3, last)]
        meet(query.ctypes.data, 4 * head_dim, many, rows, by, whole, stored, logits.ctypes.data + 4 * i)
    for r in range(many):
        for i in range(count):
            for j in range(whole, head_dim):
                logits[r, i] += query[r, j] * load_one(keys[i], keys[i] + beside, j, stored)
        for i in range(count, vectors(count)):
            logits[r, i] = -np.inf


@inner
def meet(query, apart, many, rows, beside, whole, stored, logits):  # type: ignore[no-untyped-def]
    """The products of four rows with `many` queries; see `score_four`, of which these are the addresses."""
    for r in range(0, many, 4):
        first, to, left = query + r * apart, logits + 4 * r * BLOCK, many - r
        if left >= 4:
            score_four(first, apart, rows, beside, whole, stored, to, 4)
        elif left == 3:
            score_four(first, apart, rows, beside, whole, stored, to, 3)
        elif left == 2:
            score_four(first, apart, rows, beside, whole, stored, to, 2)
        else:
            score_four(first, apart, rows, beside, whole, stored, to, 1)


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
    """Turn logits [R, BLOCK] into weights, exp of what they are below the largest so far; scale the sums to it."""
    head_dim = sums.shape[1]
    for r in range(len(most)):
        at, end = logits.ctypes.data + 4 * r * BLOCK, logits.ctypes.data + 4 * (r * BLOCK + count)
        found = load(at)
        for here in range(at, end, 4 * LANES):
            found = larger(found, load(here))
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
            weight = exponential(plus(load(here), below))
            store(here, weight)
            added = plus(added, weight)
        total[r] += sum_of(added)


@inner
def add_values(weights, values, layout, count, ahead, sums, stored):  # type: ignore[no-untyped-def]
    """Add to sums [R, D] the rows at the addresses values[:count], by weights [R, BLOCK]; see `score`."""
    many, head_dim = sums.shape
    beside, size = layout
    whole, apart = head_dim // LANES * LANES, 4 * head_dim
    pairs = whole // PAIR
    for i in range(0, count, LANES):
        _fetch_rows(ahead, i, LANES, size)
        rows, few = values.ctypes.data + i * values.itemsize, min(count - i, LANES)
        for r in range(0, many, 4):
            by, to, left = weights.ctypes.data + 4 * (r * BLOCK + i), sums.ctypes.data + r * apart, many - r
            for pair in range(pairs):
                if left >= 4:
                    add_rows(by, rows, beside, few, pair, whole, stored, to, apart, 4, 2)
                elif left == 3:
                    add_rows(by, rows, beside, few, pair, whole, stored, to, apart, 3, 2)
                elif left == 2:
                    add_rows(by, rows, beside, few, pair, whole, stored, to, apart, 2, 2)
                else:
                    add_rows(by, rows, beside, few, pair, whole, stored, to, apart, 1, 2)
            if pairs * PAIR < whole:
                for q in range(min(left, 4)):
                    own, own_sum = by + 4 * q * BLOCK, to + q * apart
                    add_rows(own, rows, beside, few, 2 * pairs, whole, stored, own_sum, apart, 1, 1)
    for r in range(many):
        for i in range(count):
            for j in range(whole, head_dim):
                sums[r, j] += weights[r, i] * load_one(values[i], values[i] + beside, j, stored)


@inner
def _fetch_rows(ahead, first, count, size):  # type: ignore[no-untyped-def]
    """Have rows of `size` bytes on their way to the cache; rows that lie apart wait for memory, one by one.

    Args:
        ahead: the rows' addresses; and where rows are neighbours, none of these and the address of the first.
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
