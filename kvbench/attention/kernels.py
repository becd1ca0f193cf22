"""Attention over rows where they lie, in Numba: the compiled half of `kvbench.attention.cpu`.

Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the weights and the
weighted sum of the values, and `merge` joins those of a list (flash-decoding). Pieces do not depend on the number of
threads, so neither does what comes out. Kernels hold no state and release the GIL. The last part is a model's own
layers, whose weights are rows, too.

A stored row is an address: of a device block, a host block, replaced keys or extra entries. Rows in fewer bits
(`kvbench.memory.codec`) become numbers in the registers into which they are read. Arithmetic is float32 in vectors of
16 that are spelt out (`Vector`), as no loop over a row would be compiled as well. Of 32 neighbours in bfloat16 those of
even places are one vector, and those of odd places the next, an operation each; what meets them, and what they are
added to, is laid out in that order (`_lay_out`). All kernels are in this file, since Numba does not see that a kernel
of another file has changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from kvbench.team import claim, together

LANES = 16
PAIR = 2 * LANES  # numbers that are read at once
LINE = 64  # bytes of a cache's line
BLOCK = 64  # rows whose logits are made before their values are read
LIST_PIECE = 256  # entries of a selected list
DENSE_PIECE = 512
OUTPUTS_PIECE = 2 * BLOCK  # of a linear layer
AHEAD = 4608  # bytes after those of a weight that are read, on their way to the cache; past its end nothing happens
GROUP = 32  # tokens whose keys, and channels of a value, that share a scale and a minimum in KIVI

LOWEST = np.finfo(np.float32).min  # finite, so that its difference from a logit of -inf is one
NOTHING, ONE = np.float32(0), np.float32(1)

kernel = njit(nogil=True, cache=True, error_model="numpy")
inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


# -- how a row is stored -----------------------------------------------------------------------------------------------
# A number in its type (float32, or bfloat16 as uint16), or one of these: kernels are compiled for its type alone. Codes
# stand first in a row, and their scale (of KIVI's values: scales, then minima) after them.


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


def _kind(stored: Any) -> Any:
    """Which of the above a Numba type is of; None: of numbers."""
    return getattr(stored, "instance_class", None)


# -- vectors -----------------------------------------------------------------------------------------------------------


class Vector(types.Type):
    """Sixteen float32 in a register."""

    def __init__(self) -> None:
        super().__init__("Vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, ir.VectorType(ir.FloatType(), LANES))


def _pointer(builder: Any, address: Any, of: Any) -> Any:
    return builder.inttoptr(address, of.as_pointer())


def _called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    of = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, of, name), arguments)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _called(builder, "llvm.fma.v16f32", a.type, a, b, c)


def _splat(builder: Any, number: Any) -> Any:
    lanes = ir.VectorType(number.type, LANES)
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _widened(builder: Any, word: Any, to: Any) -> Any:
    """bfloat16, given as uint16, is the upper half of a float32."""
    whole = ir.VectorType(ir.IntType(32), LANES) if isinstance(to, ir.VectorType) else ir.IntType(32)
    shift = ir.Constant(whole, [16] * LANES if isinstance(to, ir.VectorType) else 16)
    return builder.bitcast(builder.shl(builder.zext(word, whole), shift), to)


@intrinsic
def grouped(_context, stored):  # type: ignore[no-untyped-def]
    """Whether keys of this kind have their parameters by groups of tokens."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.boolean, _kind(signature.args[0]) in KIVI)

    return types.boolean(stored), generate


@intrinsic
def load(_context, address):  # type: ignore[no-untyped-def]
    """The vector of 16 float32 at an address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _numbers(builder, arguments[0], types.float32)

    return vector(types.intp), generate


@intrinsic
def load_one(_context, row, beside, channel, stored):  # type: ignore[no-untyped-def]
    """One number of the row at an address, its parameters at another; not of KIVI's, whose rows are whole vectors."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        row, beside, channel, _ = arguments
        stored = signature.args[3]
        if _kind(stored) is None:
            return _number(builder, row, channel, stored)
        if _kind(stored) in KIVI:
            return ir.FloatType()(ir.Undefined)
        code = builder.load(_pointer(builder, builder.add(row, channel), ir.IntType(8)), align=1)
        return builder.fmul(_decoded(builder, code, ir.FloatType(), stored), _scale(builder, beside, stored))

    return types.float32(types.intp, types.intp, types.intp, stored), generate


@intrinsic
def store(_context, address, numbers):  # type: ignore[no-untyped-def]
    """Write a vector to an address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], _pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def put(_context, address, place, number, stored):  # type: ignore[no-untyped-def]
    """Write a number, or a vector, as those from an address on, to the nearest bfloat16, of two the even one."""
    many = isinstance(number, Vector)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address, place, number, _ = arguments
        stored, word, half = signature.args[3], ir.IntType(32), ir.IntType(16)
        if many:
            word, half = ir.VectorType(word, LANES), ir.VectorType(half, LANES)

        def fixed(bits: int) -> Any:
            return ir.Constant(word, [bits] * LANES if many else bits)

        at = builder.add(address, builder.mul(place, place.type(stored.bitwidth // 8)))
        if stored != types.float32:
            bits = builder.bitcast(number, word)
            odd = builder.and_(builder.lshr(bits, fixed(16)), fixed(1))
            nearest = builder.add(builder.add(bits, fixed(0x7FFF)), odd)
            kept = builder.select(builder.fcmp_unordered("uno", number, number), fixed(0x7FC00000), nearest)
            number = builder.trunc(builder.lshr(kept, fixed(16)), half)
        builder.store(number, _pointer(builder, at, number.type), align=stored.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, vector if many else types.float32, stored), generate


@intrinsic
def width_of(_context, stored):  # type: ignore[no-untyped-def]
    """Bytes of a number in its type."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.get_constant(types.intp, signature.args[0].bitwidth // 8)

    return types.intp(stored), generate


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
def times(_context, a, b):  # type: ignore[no-untyped-def]
    """a * b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fmul(*arguments)

    return vector(vector, vector), generate


@intrinsic
def over(_context, a, b):  # type: ignore[no-untyped-def]
    """a / b."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fdiv(*arguments)

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
    lanes = ir.VectorType(ir.FloatType(), LANES)
    if stored == types.float32:
        return builder.load(_pointer(builder, address, lanes), align=4)
    words = ir.VectorType(ir.IntType(16), LANES)
    return _widened(builder, builder.load(_pointer(builder, address, words), align=2), lanes)


def _number(builder: Any, address: Any, place: Any, stored: Any) -> Any:
    """One of the numbers from an address on, as `_numbers`."""
    size = stored.bitwidth // 8
    at = builder.add(address, builder.mul(place, place.type(size)))
    if stored == types.float32:
        return builder.load(_pointer(builder, at, ir.FloatType()), align=size)
    return _widened(builder, builder.load(_pointer(builder, at, ir.IntType(16)), align=size), ir.FloatType())


def _decoded(builder: Any, codes: Any, to: Any, stored: Any) -> Any:
    """Codes of 8 bits, of a row or one of them, as numbers: what their scale (`_scale`) is to be multiplied with."""
    if _kind(stored) is Int8:
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
    scale = builder.load(_pointer(builder, beside, ir.FloatType()), align=1)
    return builder.fmul(scale, scale.type(256.0)) if _kind(stored) is Fp8 else scale  # between the exponents' biases


def _channels(builder: Any, row: Any, beside: Any, block: Any, whole: Any, stored: Any, by_channel: bool) -> Any:
    """A vector of a row, the `block`-th, but for the scale that the whole row has.

    Args:
        row, beside: addresses of the codes and of the parameters.
        whole: numbers of the row.
        by_channel: KIVI's parameters are of each channel, as those of keys, or of each group of channels.
    """
    kind, word, lanes = _kind(stored), row.type, ir.VectorType(ir.FloatType(), LANES)
    if kind is None:
        step = LANES * stored.bitwidth // 8
        return _numbers(builder, builder.add(row, builder.mul(block, word(step))), stored)
    if kind not in KIVI:
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        at = _pointer(builder, builder.add(row, builder.mul(block, word(LANES))), bytes_)
        return _decoded(builder, builder.load(at, align=1), lanes, stored)
    bits, parameter, words = KIVI[kind], stored.dtype, ir.VectorType(ir.IntType(32), LANES)
    at = builder.add(row, builder.mul(block, word(LANES * bits // 8)))
    held = builder.load(_pointer(builder, at, ir.VectorType(ir.IntType(32), LANES * bits // 32)), align=1)
    held = builder.shuffle_vector(held, held, ir.Constant(words, [lane * bits // 32 for lane in range(LANES)]))
    places = ir.Constant(words, [lane * bits % 32 for lane in range(LANES)])
    codes = builder.and_(builder.lshr(held, places), ir.Constant(words, [2**bits - 1] * LANES))
    if by_channel:
        first = builder.add(beside, builder.mul(block, word(LANES * parameter.bitwidth // 8)))
        past = builder.mul(whole, word(parameter.bitwidth // 8))
        scale, least = (_numbers(builder, at, parameter) for at in (first, builder.add(first, past)))
    else:
        group = builder.udiv(block, word(GROUP // LANES))
        places = group, builder.add(group, builder.udiv(whole, word(GROUP)))
        scale, least = (_splat(builder, _number(builder, beside, place, parameter)) for place in places)
    return _fma(builder, builder.sitofp(codes, lanes), scale, least)


def _two(builder: Any, row: Any, beside: Any, pair: Any, whole: Any, stored: Any, by_channel: bool) -> list[Any]:
    """Two vectors of a row, the `pair`-th, as `_lay_out` has it; see `_channels`."""
    word = row.type
    if stored != types.uint16:
        first = builder.mul(pair, word(2))
        blocks = first, builder.add(first, word(1))
        return [_channels(builder, row, beside, block, whole, stored, by_channel) for block in blocks]
    words, lanes = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
    both = builder.load(_pointer(builder, builder.add(row, builder.mul(pair, word(2 * PAIR))), words), align=2)
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
        queries, logits: addresses of the first; a query, float32 as `_lay_out` has it, is `apart` bytes from the
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
                x = _numbers(builder, builder.add(query, first), types.float32)
                for sum, y in zip(own, read, strict=True):
                    builder.store(_fma(builder, x, y, builder.load(sum)), sum)

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
        if _kind(of) in SCALED:
            scales = ir.Constant(ir.VectorType(ir.FloatType(), 4), ir.Undefined)
            for n, at in enumerate(beside):
                scales = builder.insert_element(scales, _scale(builder, at, of), ir.IntType(32)(n))
        for q, own in enumerate(sums):
            found = _sums(builder, *(builder.load(sum) for sum in own))
            if scales is not None:
                found = builder.fmul(found, scales)
            builder.store(found, _pointer(builder, builder.add(logits, word(4 * BLOCK * q)), found.type), align=4)
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
        sums: address of the first, as `_lay_out` has it; a sum is `apart` bytes from the next.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weights, rows, beside, many, block, whole, _, sums, apart, _, _ = arguments
        count, vectors = (argument.literal_value for argument in signature.args[9:])
        of, lanes, word = signature.args[6], ir.VectorType(ir.FloatType(), LANES), weights.type
        first = builder.add(sums, builder.mul(block, word(4 * LANES * vectors)))
        places = [
            [
                _pointer(
                    builder, builder.add(first, builder.add(builder.mul(apart, word(q)), word(4 * LANES * n))), lanes
                )
                for n in range(vectors)
            ]
            for q in range(count)
        ]
        found = [[cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in own] for own in places]
        with cgutils.for_range(builder, many) as loop:
            at = builder.add(rows, builder.mul(loop.index, word(word.width // 8)))
            row = builder.load(_pointer(builder, at, word))
            by = builder.add(row, beside)
            if vectors == 2:
                read = _two(builder, row, by, block, whole, of, False)
            else:
                read = [_channels(builder, row, by, block, whole, of, False)]
            scale = _scale(builder, by, of) if _kind(of) in SCALED else None
            for q, own in enumerate(found):
                at = builder.add(weights, builder.add(word(4 * BLOCK * q), builder.mul(loop.index, word(4))))
                weight = builder.load(_pointer(builder, at, ir.FloatType()), align=4)
                weight = _splat(builder, weight if scale is None else builder.fmul(weight, scale))
                for sum, y in zip(own, read, strict=True):
                    builder.store(_fma(builder, weight, y, builder.load(sum)), sum)
        for own, to in zip(found, places, strict=True):
            for sum, place in zip(own, to, strict=True):
                builder.store(builder.load(sum), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6, stored, types.intp, types.intp, count, vectors), generate


# exp(x) = 2^n exp(r), n = x / ln 2 to the nearest, r = x - n ln 2: Cephes' expf, whose relative error is below 2e-7
_LOG2E, _ROUND, _LOW = 1.44269504088896341, 12582912.0, -87.0
_LN2 = (0.693359375, -2.12194440e-4)  # the first is exact in a few bits, so that n times it is, too
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic
def exponential(_context, x):  # type: ignore[no-untyped-def]
    """exp of numbers that are at most 0 or NaN; 0 below -87."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
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
        flag = ir.IntType(32)
        byte = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        _called(builder, "llvm.prefetch.p0", ir.VoidType(), byte, flag(0), flag(3), flag(1))
        return context.get_dummy_value()

    return types.void(types.intp), generate


# -- one block of rows -------------------------------------------------------------------------------------------------


@inner
def _paired(count, stored):  # type: ignore[no-untyped-def]
    """How many of `count` numbers of this type are read by neighbours, into two vectors."""
    return count // PAIR * PAIR if spread(stored) else 0


@inner
def _lay_out(numbers, laid, stored):  # type: ignore[no-untyped-def]
    """Write numbers [R, D] in the order in which they meet rows of this type."""
    rows, count = numbers.shape
    pairs = _paired(count, stored)
    for r in range(rows):
        for first in range(0, pairs, PAIR):
            for i in range(LANES):
                laid[r, first + i] = numbers[r, first + 2 * i]
                laid[r, first + LANES + i] = numbers[r, first + 2 * i + 1]
        for j in range(pairs, count):
            laid[r, j] = numbers[r, j]


@inner
def _score(query, keys, groups, layout, count, ahead, logits, stored):  # type: ignore[no-untyped-def]
    """logits [R, BLOCK]: query [R, D] . each of the rows at the addresses keys[:count]; -inf up to a whole vector.

    Args:
        query: as `_lay_out` has it for keys.
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
        _meet(query.ctypes.data, 4 * head_dim, many, rows, by, whole, stored, logits.ctypes.data + 4 * i)
    for r in range(many):
        for i in range(count):
            for j in range(whole, head_dim):
                logits[r, i] += query[r, j] * load_one(keys[i], keys[i] + beside, j, stored)
        for i in range(count, _vectors(count)):
            logits[r, i] = -np.inf


@inner
def _meet(query, apart, many, rows, beside, whole, stored, logits):  # type: ignore[no-untyped-def]
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
def _scale_logits(logits, count, scaling):  # type: ignore[no-untyped-def]
    """Multiply logits [R, BLOCK], of which `count` are there."""
    factor = splat(scaling)
    for r in range(len(logits)):
        first = logits.ctypes.data + 4 * r * BLOCK
        for here in range(first, first + 4 * count, 4 * LANES):
            store(here, times(load(here), factor))


@inner
def _weigh(logits, count, most, total, sums):  # type: ignore[no-untyped-def]
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
def _add_values(weights, values, layout, count, ahead, sums, stored):  # type: ignore[no-untyped-def]
    """Add to sums [R, D] the rows at the addresses values[:count], by weights [R, BLOCK]; see `_score`."""
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
def _vectors(count):  # type: ignore[no-untyped-def]
    """As many numbers as whole vectors hold."""
    return -(-count // LANES) * LANES


# -- pieces ------------------------------------------------------------------------------------------------------------


def pieces_of(count: int, size: int) -> int:
    """Pieces of `size` that a list of `count` is cut into."""
    return -(-count // size)


@inner
def _own(query):  # type: ignore[no-untyped-def]
    """Queries and results of a piece, while it is at work: in lines of the cache that no other thread writes."""
    rows, shape = query.shape[1], query.shape[1:]
    return (
        np.empty(shape, np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty(shape, np.float32),
    )


@inner
def _write(found, most, total, sums, stored):  # type: ignore[no-untyped-def]
    """The results of a piece, [R, D + 2], whose sums are laid out as values of this type are read."""
    rows, head_dim = sums.shape
    pairs = _paired(head_dim, stored)
    for r in range(rows):
        for first in range(0, pairs, PAIR):
            for i in range(LANES):
                found[r, first + 2 * i] = sums[r, first + i]
                found[r, first + 2 * i + 1] = sums[r, first + LANES + i]
        for j in range(pairs, head_dim):
            found[r, j] = sums[r, j]
        found[r, head_dim], found[r, head_dim + 1] = most[r], total[r]


@kernel
def attend_resident(  # type: ignore[no-untyped-def]
    threads, claims, pieces, query, scaling, used, first, column, held, stored, logits, results
):
    """Attention over all used slots of each KV head, in so many threads.

    Args:
        claims: [1] int64, the next piece, 0.
        pieces: of each list, `DENSE_PIECE` slots each: the first in `results`, and how many.
        query: [L, R, D] float32; list l is a KV head of a row.
        scaling: of the logits, float32.
        used: [L] int64, slots of each list that are attended.
        first: [L] int64, where the slots of each list begin in the pool.
        column: [L] int64, of the logits, that the first slot of each list has.
        held: address of the pool's keys, of its values, and of the parameters of its groups of keys; see `_score`.
        stored: how keys, and how values are stored, see there; bytes of a row and to its parameters, of each.
        logits: [L, R, n], where they are wanted, else [L, R, 0].
        results: [L, P, R, D + 2], written for each piece: the weighted sum of values, the largest logit, and the sum of
            weights.
    """
    arguments = claims, pieces, query, scaling, used, first, column, held, stored, logits, results
    together(threads, _attend_resident, arguments)


@inner
def _attend_resident(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, used, first, column, held, stored, logits, results
):
    """As many pieces of a layer's attention as other threads leave."""
    key, value, parameters = held
    key_kind, value_kind, (key_size, key_beside), (value_size, value_beside), group_size = stored
    block = np.empty((query.shape[1], BLOCK), np.float32)
    keys, values, groups = np.empty(BLOCK, np.intp), np.empty(BLOCK, np.intp), np.empty(BLOCK, np.intp)
    asked, own_most, own_total, own_sums = _own(query)
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        head, piece = item // pieces, item % pieces
        own_most[:], own_total[:], own_sums[:] = LOWEST, 0, 0
        _lay_out(query[head], asked, key_kind)
        end = min((piece + 1) * DENSE_PIECE, used[head])
        for start in range(piece * DENSE_PIECE, end, BLOCK):
            count = min(BLOCK, end - start)
            slot = first[head] + start
            for i in range(count):
                keys[i], values[i] = key + (slot + i) * key_size, value + (slot + i) * value_size
                if grouped(key_kind):
                    groups[i] = parameters + (slot + i) // GROUP * group_size
            ahead = keys[:0], value + slot * value_size
            _score(asked, keys, groups, (key_beside, value_size), count, ahead, block, key_kind)
            _scale_logits(block, count, scaling)
            if logits.shape[2]:
                at = column[head] + start
                logits[head, :, at : at + count] = block[:, :count]
            _weigh(block, count, own_most, own_total, own_sums)
            ahead = keys[:0], key + (slot + BLOCK) * key_size
            _add_values(block, values, (value_beside, key_size), count, ahead, own_sums, value_kind)
        _write(results[head, before + piece], own_most, own_total, own_sums, value_kind)
        item = claim(claims)


@kernel
def attend_lists(  # type: ignore[no-untyped-def]
    threads, claims, pieces, query, scaling, index, bias, device, host, own, extra, stored, logits, results
):
    """Attention over lists of tokens, in so many threads.

    Tokens are attended where they are stored as `stored` says; those that are held elsewhere are for another call.

    Args:
        claims: [2] int64, the next piece, 0, and how many pieces named a token that is in neither tier, 0.
        pieces: as of `attend_resident`, `LIST_PIECE` entries each, and one of extra entries, where there are any.
        query, scaling: as of `attend_resident`; a row of the batch has L / B lists, one for each KV head or more.
        index: [B, 1 or L / B, M] int64 token ids, -1 = none.
        bias: [L, R, M + E], added to the logits, or [L, R, 0].
        device: addresses of the keys, values and parameters of all H KV heads of all rows (see `attend_resident`),
            where those of each begin [H], the ids in their slots [H, S], or [H, 0] where slot = id, [H] slots used, and
            [H] the first slot and the slot after the last that are attended.
        host: addresses of the keys and values [H, S', D], S', the slots of the ids [H, S'], whether a token is there
            [H, S'], and whether those that are there are attended.
        own: address of keys [H, M, D] in place of the stored ones, or 0.
        extra: addresses of the keys and values [H, E, D] of extra entries, E, and which of the logits is their first.
        stored: as of `attend_resident`, of all these rows.
        logits: [L, R, M + E], where they are wanted, else [L, R, 0]; an entry that is absent is not written.
        results: as of `attend_resident`.
    """
    arguments = claims, pieces, query, scaling, index, bias, device, host, own, extra, stored, logits, results
    together(threads, _attend_lists, arguments)


@inner
def _attend_lists(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, index, bias, device, host, own, extra, stored, logits, results
):
    """As many pieces of a layer's lists as other threads leave."""
    extra_key, extra_value, extras, column = extra
    key_kind, value_kind, (key_size, key_beside), (value_size, value_beside), group_size = stored
    count = index.shape[2]
    room = max(LIST_PIECE, extras)
    keys, values, rank = np.empty(room, np.intp), np.empty(room, np.intp), np.empty(room, np.intp)
    groups = np.empty(room, np.intp)
    asked, own_most, own_total, own_sums = _own(query)
    block = np.empty((query.shape[1], BLOCK), np.float32)
    lists, heads = len(query) // len(index), len(device[5]) // len(index)
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        at, piece = item // pieces, item % pieces
        row = at // lists
        head = row * heads + at % lists * heads // lists
        own_most[:], own_total[:], own_sums[:] = LOWEST, 0, 0
        _lay_out(query[at], asked, key_kind)
        if extras and piece == pieces - 1:
            found = extras
            for i in range(extras):
                place = head * extras + i
                keys[i], values[i], rank[i] = extra_key + place * key_size, extra_value + place * value_size, column + i
        else:
            start = piece * LIST_PIECE
            tokens = index[row, min(at % lists, index.shape[1] - 1), start : start + LIST_PIECE]
            found = _find(tokens, head, device, host, stored, keys, values, groups, rank)
            if found < 0:
                claim(claims[1:])
                found = 0
            for i in range(found):
                rank[i] += start
                if own:
                    keys[i] = own + (head * count + rank[i]) * key_size
        for start in range(0, found, BLOCK):
            rows = min(BLOCK, found - start)
            ahead = values[start : start + rows], 0
            _score(asked, keys[start:], groups[start:], (key_beside, value_size), rows, ahead, block, key_kind)
            _scale_logits(block, rows, scaling)
            for r in range(query.shape[1]):
                if bias.shape[2]:
                    for i in range(rows):
                        block[r, i] += bias[at, r, rank[start + i]]
                if logits.shape[2]:
                    for i in range(rows):
                        logits[at, r, rank[start + i]] = block[r, i]
            _weigh(block, rows, own_most, own_total, own_sums)
            ahead = keys[start + rows : found], 0
            _add_values(block, values[start:], (value_beside, key_size), rows, ahead, own_sums, value_kind)
        _write(results[at, before + piece], own_most, own_total, own_sums, value_kind)
        item = claim(claims)


@inner
def _find(tokens, head, device, host, stored, keys, values, groups, rank):  # type: ignore[no-untyped-def]
    """Where tokens lie: addresses of their keys, values and groups' parameters, and the place of each in the list.

    Returns:
        How many of them are to be attended, -1 where one is in neither tier.
    """
    near_key, near_value, parameters, first, ids, used, begin, end = device
    far_key, far_value, far_slots, slot_of, present, far_too = host
    key_kind, _, (key_size, _), (value_size, _), group_size = stored
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
            if not begin[head] <= slot < end[head]:
                continue
            at = first[head] + slot
            keys[found], values[found] = near_key + at * key_size, near_value + at * value_size
            if grouped(key_kind):
                groups[found] = parameters + at // GROUP * group_size
        elif token < far_slots and present[head, token]:
            if not far_too:
                continue
            at = head * far_slots + slot_of[head, token]
            keys[found], values[found] = far_key + at * key_size, far_value + at * value_size
        else:
            return -1
        if found < BLOCK:
            for line in range(0, key_size, LINE):
                fetch(keys[found] + line)
        rank[found] = i
        found += 1
    return found


@kernel
def attend_blocks(  # type: ignore[no-untyped-def]
    threads, claims, pieces, query, scaling, index, bias, blocks, own, stored, logits, results
):
    """Attention over lists of tokens that lie in a serving engine's blocks, in so many threads.

    A few rows at a time are copied out of their block, and attended while they are in the cache.

    Args:
        claims, pieces, query, scaling, index, bias, own, logits, results: as of `attend_lists`, without extra entries.
        blocks: see `gather`, of all rows of the batch.
        stored: the type of a number.
    """
    arguments = claims, pieces, query, scaling, index, bias, blocks, own, stored, logits, results
    together(threads, _attend_blocks, arguments)


@inner
def _attend_blocks(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, index, bias, blocks, own, stored, logits, results
):
    """As many pieces of a layer's lists as other threads leave."""
    tables, cache, pair, number = blocks
    count, head_dim = index.shape[2], query.shape[2]
    own_keys, own_values = np.empty((BLOCK, head_dim // pair), cache.dtype), np.empty((BLOCK, head_dim), number.dtype)
    keys, values, groups = np.empty(BLOCK, np.intp), np.empty(BLOCK, np.intp), np.empty(0, np.intp)
    size, rank, ids = head_dim * number.itemsize, np.empty(BLOCK, np.intp), np.empty(BLOCK, np.int64)
    for i in range(BLOCK):
        keys[i], values[i] = own_keys.ctypes.data + i * size, own_values.ctypes.data + i * size
    asked, own_most, own_total, own_sums = _own(query)
    block = np.empty((query.shape[1], BLOCK), np.float32)
    lists, heads = len(query) // len(index), cache.shape[1]
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        at, piece = item // pieces, item % pieces
        row = at // lists
        head, own_list = at % lists * heads // lists, min(at % lists, index.shape[1] - 1)
        own_most[:], own_total[:], own_sums[:] = LOWEST, 0, 0
        _lay_out(query[at], asked, stored)
        place, end = piece * LIST_PIECE, min(count, (piece + 1) * LIST_PIECE)
        while place < end:
            rows = 0
            while place < end and rows < BLOCK:
                if index[row, own_list, place] >= 0:
                    ids[rows], rank[rows] = index[row, own_list, place], place
                    rows += 1
                place += 1
            _copy_rows(ids, 0, rows, tables[row], cache, head, pair, own_keys, own_values)
            if own:
                for i in range(rows):
                    keys[i] = own + ((row * heads + head) * count + rank[i]) * size
            _score(asked, keys, groups, (0, 0), rows, (keys[:0], 0), block, stored)
            _scale_logits(block, rows, scaling)
            for r in range(query.shape[1]):
                if bias.shape[2]:
                    for i in range(rows):
                        block[r, i] += bias[at, r, rank[i]]
                if logits.shape[2]:
                    for i in range(rows):
                        logits[at, r, rank[i]] = block[r, i]
            _weigh(block, rows, own_most, own_total, own_sums)
            _add_values(block, values, (0, 0), rows, (keys[:0], 0), own_sums, stored)
        _write(results[at, before + piece], own_most, own_total, own_sums, stored)
        item = claim(claims)


@kernel
def gather(threads, claims, ids, blocks, keys, values):  # type: ignore[no-untyped-def]
    """Copy keys and values out of a serving engine's blocks, in so many threads.

    Args:
        claims: [1] int64, the next piece, 0.
        ids: [H, M] int64 token ids of one row; -1 is read as 0.
        blocks: which blocks each row has, [B, n] int64; them all, [blocks, H, 2, W], a block's keys and its values, in
            words of one number, or of two where they are packed: keys by words of neighbouring dimensions, in tiles of
            16 tokens, and values by words of neighbouring tokens, in tiles of 16 dimensions; numbers of a word, 1 or 2;
            and an array [0] of the type that a number has there.
        keys: [H, M, words], to be written.
        values: [H, M, D], numbers, likewise.
    """
    together(threads, _gather, (claims, ids, blocks, keys, values))


@inner
def _gather(_, claims, ids, blocks, keys, values):  # type: ignore[no-untyped-def]
    """As many pieces as other threads leave."""
    tables, cache, pair, _ = blocks
    heads, count = ids.shape
    pieces = -(-count // BLOCK)
    item = claim(claims)
    while item < heads * pieces:
        head, first = item // pieces, item % pieces * BLOCK
        _copy_rows(ids[head], first, min(first + BLOCK, count), tables[0], cache, head, pair, keys[head], values[head])
        item = claim(claims)


@inner
def _copy_rows(ids, first, end, table, cache, head, pair, keys, values):  # type: ignore[no-untyped-def]
    """Copy the rows of ids[first:end] to the same places of keys and values."""
    words, head_dim = keys.shape[1], values.shape[1]
    size = cache.shape[3] // words
    halves = np.zeros(2, cache.dtype)  # bits of a word before the number of an even token, and of an odd one
    halves[1] = 8 * values.itemsize
    block, at, following = 0, size, -1
    for i in range(first, end):
        token = max(ids[i], 0)
        if token != following or at == size:  # lists often name neighbours, one after the other
            block, at = table[token // size], token % size
        if pair == 2:
            start = at // LANES * LANES * words + at % LANES
            for j in range(words):
                keys[i, j] = cache[block, head, 0, start + j * LANES]
            half = halves[at % 2]
            for group in range(0, head_dim, LANES):
                start = group * size // 2 + at // 2 * LANES
                for lane in range(LANES):
                    values[i, group + lane] = cache[block, head, 1, start + lane] >> half
        else:
            for j in range(words):
                keys[i, j], values[i, j] = cache[block, head, 0, j * size + at], cache[block, head, 1, at * words + j]
        at, following = at + 1, token + 1


@kernel
def merge(results, out, stored, logits):  # type: ignore[no-untyped-def]
    """Join the pieces of each list.

    Args:
        results: as of `attend_resident`.
        out: address of [L, R, D], in the type of `stored`.
        logits: [L, R, n], which become probabilities.
    """
    lists, pieces, rows, width = results.shape
    head_dim = width - 2
    sum = np.empty(head_dim, np.float32)
    for head in range(lists):
        for r in range(rows):
            largest, whole = LOWEST, NOTHING
            for piece in range(pieces):
                largest = max(largest, results[head, piece, r, head_dim])
            sum[:] = 0
            for piece in range(pieces):
                own = results[head, piece, r]
                weight = first_of(exponential(splat(own[head_dim] - largest)))
                whole += weight * own[head_dim + 1]
                for j in range(head_dim):
                    sum[j] += weight * own[j]
            for j in range(head_dim):
                put(out, (head * rows + r) * head_dim + j, sum[j] / whole, stored)
            for i in range(logits.shape[2]):
                logits[head, r, i] = first_of(exponential(splat(logits[head, r, i] - largest))) / whole


# -- a model's layers, for a few tokens --------------------------------------------------------------------------------
# Arguments of all: addresses of what they are named after, in the type of `stored`; `rows` tokens. Sums and what lies
# between are float32; results are rounded once.


@kernel
def products(threads, x, weight, bias, out, rows, inputs, outputs, stored):  # type: ignore[no-untyped-def]
    """A linear layer, in so many threads: out [rows, outputs] = x [rows, inputs] . weight [outputs, inputs]^T + bias.

    Args:
        bias: [outputs], or 0.
    """
    _linear(threads, _given(x, rows, inputs, stored), (weight,), bias, (out,), (outputs,), stored, stored)


@kernel
def gated(threads, x, gate, up, down, out, rows, inputs, hidden, stored):  # type: ignore[no-untyped-def]
    """A feed-forward part, in so many threads: down . (silu(gate . x) * (up . x)).

    Args:
        x, out: [rows, inputs]; gate, up: [hidden, inputs]; down: [inputs, hidden].
    """
    count, beside = rows * hidden, -(-LANES // hidden)  # rows for what whole vectors read and write behind the last
    gates, ups = np.empty((rows + beside, hidden), np.float32), np.empty((rows + beside, hidden), np.float32)
    between = np.intp(gates.ctypes.data), np.intp(ups.ctypes.data)
    _linear(threads, _given(x, rows, inputs, stored), (gate, up), 0, between, (hidden, hidden), stored, NOTHING)
    nothing, one, minus = splat(NOTHING), splat(ONE), splat(-ONE)
    for i in range(0, count, LANES):
        number = load(gates.ctypes.data + 4 * i)  # arrays that are read by address alone would be freed before
        negated = times(number, minus)
        smaller = exponential(times(larger(negated, nothing), minus))  # of min(number, 0)
        whole = plus(one, exponential(times(larger(number, negated), minus)))
        weight = over(times(number, smaller), whole)
        store(ups.ctypes.data + 4 * i, times(load(ups.ctypes.data + 4 * i), weight))
    _lay_out(ups[:rows], gates[:rows], stored)
    _linear(threads, gates[:rows], (down,), 0, (out,), (inputs,), stored, stored)


@kernel
def rotated(threads, x, weights, angles, outs, rows, inputs, heads, stored):  # type: ignore[no-untyped-def]
    """Queries, keys and values of tokens, in so many threads, the first two turned by their positions' angles (RoPE).

    Args:
        weights: three, [heads * D, inputs].
        angles: cosines and sines, [rows, D].
        outs: [rows, heads * D], for each weight.
        heads: of queries; of keys, as of values; D.
    """
    query_heads, kv_heads, head_dim = heads
    sizes = query_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    queries, keys = np.empty((rows, sizes[0]), np.float32), np.empty((rows, sizes[1]), np.float32)
    values = np.empty((rows, sizes[2]), np.float32)
    between = np.intp(queries.ctypes.data), np.intp(keys.ctypes.data), np.intp(values.ctypes.data)
    _linear(threads, _given(x, rows, inputs, stored), weights, 0, between, sizes, stored, NOTHING)
    _turn(queries, angles, outs[0], head_dim, stored)
    _turn(keys, angles, outs[1], head_dim, stored)
    for r in range(rows):
        for i in range(sizes[2]):
            put(outs[2], r * sizes[2] + i, values[r, i], stored)


@inner
def _turn(vectors, angles, out, head_dim, stored):  # type: ignore[no-untyped-def]
    """Write vectors [rows, heads * D], each half of a head turned against the other; see `rotated`."""
    rows, width = vectors.shape
    cosines, sines = angles
    half = head_dim // 2
    for r in range(rows):
        for head in range(0, width, head_dim):
            for i in range(head_dim):
                other = vectors[r, head + i - half] if i >= half else -vectors[r, head + i + half]
                cosine = load_one(cosines, cosines, r * head_dim + i, stored)
                sine = load_one(sines, sines, r * head_dim + i, stored)
                put(out, r * width + head + i, vectors[r, head + i] * cosine + other * sine, stored)


@kernel
def normed(x, weight, out, rows, width, epsilon, stored):  # type: ignore[no-untyped-def]
    """Vectors x [rows, width] over their root mean square, times a weight [width] (Zhang and Sennrich, 2019)."""
    numbers = np.empty(width, np.float32)
    for first in range(0, rows * width, width):
        for i in range(width):
            numbers[i] = load_one(x, x, first + i, stored)
        scale = np.float32(1 / np.sqrt(np.mean(numbers * numbers) + epsilon))
        for i in range(width):
            put(out, first + i, numbers[i] * scale * load_one(weight, weight, i, stored), stored)


@inner
def _given(x, rows, width, stored):  # type: ignore[no-untyped-def]
    """The numbers [rows, width] at an address, laid out for weights."""
    numbers, laid = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    for r in range(rows):
        for j in range(width):
            numbers[r, j] = load_one(x, x, r * width + j, stored)
    _lay_out(numbers, laid, stored)
    return laid


@inner
def _linear(threads, x, weights, bias, outs, outputs, stored, written):  # type: ignore[no-untyped-def]
    """Linear layers of the same x [rows, inputs], in so many threads.

    Args:
        weights, outs: addresses, of each layer.
        bias: address, of all of them, or 0.
        outputs: how many, of each.
        stored, written: a number of the weights, and of the results, as they are stored.
    """
    layers = np.empty((len(weights), 4), np.int64)
    pieces = 0
    for i in range(len(weights)):
        layers[i] = weights[i], outs[i], outputs[i], pieces
        pieces += -(-outputs[i] // OUTPUTS_PIECE)
    threads = min(threads, pieces)
    together(threads, _products, (np.zeros(threads, np.int64), pieces, x, layers, bias, stored, written))


@inner
def _products(number, claims, pieces, x, layers, bias, stored, written):  # type: ignore[no-untyped-def]
    """As many pieces of the outputs of layers as other threads leave, after those of a stretch of its own.

    Where a core reads one long stretch, its own hardware is ahead of it; lines on the way to one core and read by the
    other are read twice.
    """
    block, threads = np.empty((len(x), BLOCK), np.float32), len(claims)
    for turn in range(threads):
        own = (number + turn) % threads
        before, end = pieces * own // threads, pieces * (own + 1) // threads
        piece = before + claim(claims[own:])
        while piece < end:
            layer = len(layers) - 1
            while layers[layer, 3] > piece:
                layer -= 1
            weight, out, outputs, before_it = layers[layer]
            end_of_it = min(outputs, (piece - before_it + 1) * OUTPUTS_PIECE)
            for first in range((piece - before_it) * OUTPUTS_PIECE, end_of_it, BLOCK):
                count = min(BLOCK, end_of_it - first)
                _some_products(x, weight, first, count, block, stored)
                for r in range(len(x)):
                    _put_products(block[r], bias, first, count, out, r * outputs, stored, written)
            piece = before + claim(claims[own:])


@inner
def _some_products(x, weight, first, count, block, stored):  # type: ignore[no-untyped-def]
    """block [rows, BLOCK] = x [rows, inputs] . `count` rows of a weight, from `first` on."""
    many, inputs = x.shape
    size, whole = inputs * width_of(stored), inputs // LANES * LANES
    at, last = weight + first * size, weight + (first + count - 1) * size
    for i in range(0, count, 4):
        rows = at, min(at + size, last), min(at + 2 * size, last), min(at + 3 * size, last)
        for line in range(at + AHEAD, at + AHEAD + 4 * size, LINE):
            fetch(line)
        _meet(x.ctypes.data, 4 * inputs, many, rows, rows, whole, stored, block.ctypes.data + 4 * i)
        at += 4 * size
    if whole < inputs:
        for r in range(many):
            for i in range(count):
                row = weight + (first + i) * size
                for j in range(whole, inputs):
                    block[r, i] += x[r, j] * load_one(row, 0, j, stored)


@inner
def _put_products(products, bias, first, count, out, place, stored, written):  # type: ignore[no-untyped-def]
    """Write the products of one row of x to out, from `place` + `first` on."""
    if bias:
        for i in range(count):
            products[i] += load_one(bias, bias, first + i, stored)
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        put(out, place + first + i, load(products.ctypes.data + 4 * i), written)
    for i in range(whole, count):
        put(out, place + first + i, products[i], written)
