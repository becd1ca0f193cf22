"""Vectors of sixteen float32 in a register, spelt out for Numba, which would compile no loop over a
row as well.

What other kernels are made of: how they are compiled, reading and writing float32 and bfloat16 (as
uint16), arithmetic, sums, exp(x).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from kvbench.kernels import compiled

LANES = 16
PAIR = 2 * LANES  # numbers that are read at once
LINE = 64  # bytes of a cache's line
LOWEST = np.finfo(np.float32).min  # finite, so that its difference from a logit of -inf is one
NOTHING, ONE = np.float32(0), np.float32(1)
kernel = compiled.kernel(error_model="numpy")
inner = compiled.inner(error_model="numpy")


class Vector(types.Type):
    """Sixteen float32 in a register."""

    def __init__(self) -> None:
        super().__init__("Vector")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Any) -> None:
        super().__init__(manager, type_, ir.VectorType(ir.FloatType(), LANES))


def pointer(builder: Any, address: Any, of: Any) -> Any:
    """An address as a pointer to a type."""
    return builder.inttoptr(address, of.as_pointer())


def called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A call of one of LLVM's own functions."""
    of = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(
        builder.module.globals.get(name) or ir.Function(builder.module, of, name), arguments
    )


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return called(builder, "llvm.fma.v16f32", a.type, a, b, c)


def splatted(builder: Any, number: Any) -> Any:
    """A vector of one number, of any type."""
    lanes = ir.VectorType(number.type, LANES)
    first_lane = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first_lane, first_lane, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def widened(builder: Any, word: Any, to: Any) -> Any:
    """bfloat16, given as uint16, is the upper half of a float32."""
    whole = (
        ir.VectorType(ir.IntType(32), LANES) if isinstance(to, ir.VectorType) else ir.IntType(32)
    )
    shift = ir.Constant(whole, [16] * LANES if isinstance(to, ir.VectorType) else 16)
    return builder.bitcast(builder.shl(builder.zext(word, whole), shift), to)


@intrinsic
def load(_context, address):  # type: ignore[no-untyped-def]
    """The vector of 16 float32 at an address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return numbers_at(builder, arguments[0], types.float32)

    return vector(types.intp), generate


@intrinsic
def store(_context, address, numbers):  # type: ignore[no-untyped-def]
    """Write a vector to an address."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store(arguments[1], pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def put(_context, address, place, number, stored):  # type: ignore[no-untyped-def]
    """Write a number, or a vector, as those from an address on, to the nearest bfloat16, of two the
    even one.
    """
    many = isinstance(number, Vector)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        address, place = arguments[:2]
        number, stored = arguments[2], signature.args[3]
        word, half = ir.IntType(32), ir.IntType(16)
        if many:
            word, half = ir.VectorType(word, LANES), ir.VectorType(half, LANES)

        def fixed(bits: int) -> Any:
            return ir.Constant(word, [bits] * LANES if many else bits)

        at = builder.add(address, builder.mul(place, place.type(stored.bitwidth // 8)))
        if stored != types.float32:
            bits = builder.bitcast(number, word)
            odd = builder.and_(builder.lshr(bits, fixed(16)), fixed(1))
            nearest = builder.add(builder.add(bits, fixed(0x7FFF)), odd)
            rounded = builder.select(
                builder.fcmp_unordered("uno", number, number), fixed(0x7FC00000), nearest
            )
            number = builder.trunc(builder.lshr(rounded, fixed(16)), half)
        builder.store(number, pointer(builder, at, number.type), align=stored.bitwidth // 8)
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
        return splatted(builder, arguments[0])

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
            builder.shuffle_vector(
                numbers, numbers, ir.Constant(ir.VectorType(ir.IntType(32), count), lanes)
            )
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


def four_sums(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors, in four lanes."""

    def shuffled(x: Any, y: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(
            x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        )

    def added(x: Any, y: Any, lanes: list[int], offset: int) -> Any:
        """Lanes of x and y (from `LANES` on), and those `offset` lanes on."""
        return builder.fadd(
            shuffled(x, y, lanes), shuffled(x, y, [lane + offset for lane in lanes])
        )

    quarters = range(0, LANES, 4)
    halves = [lane for q in quarters for lane in (q, q + 1, LANES + q, LANES + q + 1)]
    singles = [lane for q in quarters for lane in (q, q + 2, LANES + q, LANES + q + 2)]
    # a, b, c, d in each quarter
    sums = added(added(a, b, halves, 2), added(c, d, halves, 2), singles, 1)
    sums = added(sums, sums, [*range(8)], 8)
    return added(sums, sums, [*range(4)], 4)


def numbers_at(builder: Any, address: Any, stored: Any) -> Any:
    """The vector of 16 numbers at an address, stored as float32, float16 or bfloat16."""
    return _as_float32(builder, address, stored, lambda kind: ir.VectorType(kind, LANES))


def number_at(builder: Any, address: Any, place: Any, stored: Any) -> Any:
    """One of the numbers from an address on, as `numbers_at`."""
    at = builder.add(address, builder.mul(place, place.type(stored.bitwidth // 8)))
    return _as_float32(builder, at, stored, lambda kind: kind)


def _as_float32(builder: Any, address: Any, stored: Any, many: Any) -> Any:
    kind = {
        types.float32: ir.FloatType(),
        types.float16: ir.HalfType(),
        types.uint16: ir.IntType(16),
    }[stored]
    loaded = builder.load(pointer(builder, address, many(kind)), align=stored.bitwidth // 8)
    if stored == types.float32:
        return loaded
    to = many(ir.FloatType())
    return builder.fpext(loaded, to) if stored == types.float16 else widened(builder, loaded, to)


# exp(x) = 2^n exp(r), n = x / ln 2 to the nearest, r = x - n ln 2: Cephes' expf, whose relative
# error is below 2e-7
_LOG2E = 1.44269504088896341
_ROUND, _LOW = 12582912.0, -87.0
_LN2 = (0.693359375, -2.12194440e-4)  # the first is exact in a few bits, so that n times it is, too
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


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
        rounded = fma(builder, within, number(_LOG2E), number(_ROUND))  # its lowest bits are n
        n = builder.fsub(rounded, number(_ROUND))
        r = fma(builder, n, number(-_LN2[1]), fma(builder, n, number(-_LN2[0]), within))
        sum = number(_POLYNOMIAL[0])
        for factor in _POLYNOMIAL[1:]:
            sum = fma(builder, sum, r, number(factor))
        sum = fma(builder, sum, builder.fmul(r, r), builder.fadd(r, number(1)))
        power = builder.shl(builder.bitcast(rounded, words), ir.Constant(words, [23] * LANES))
        power = builder.add(power, ir.Constant(words, [127 << 23] * LANES))
        product = builder.fmul(sum, builder.bitcast(power, x.type))
        return builder.select(low, number(0), product)

    return vector(vector), generate


@intrinsic
def fetch(_context, address):  # type: ignore[no-untyped-def]
    """Have what is at an address on its way to the cache."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        flag = ir.IntType(32)
        byte = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        called(builder, "llvm.prefetch.p0", ir.VoidType(), byte, flag(0), flag(3), flag(1))
        return context.get_dummy_value()

    return types.void(types.intp), generate
