"""What Numba kernels share: how they are compiled, bfloat16, and the largest of many scores.

Kernels hold no state of their own and release the GIL, so that any number of threads may run them
side by side; none is parallel inside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels import compiled

# All of fastmath but "no NaN, no infinity": -inf marks what is absent, and a NaN key must stay one
# to be found.
FAST = {"contract", "reassoc", "nsz", "arcp"}
kernel = compiled.kernel(error_model="numpy", fastmath=FAST)
# What only kernels call needs no way in from Python, which takes half of the time to compile it.
jit = compiled.inner(error_model="numpy", fastmath=FAST)

MOST_FLOATS = 0x7F800000  # float32 numbers above zero, infinity included
SHORT = 8  # numbers that are sorted by insertion


def is_readable(tensor: torch.Tensor) -> bool:
    """Kernels can read it where it lies: on a CPU, float32 or bfloat16."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)


def stored(tensor: torch.Tensor) -> Any:
    """Numbers as kernels read them: float32, or bfloat16 seen as uint16; contiguous, in place if
    the tensor is.
    """
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


@intrinsic
def widen(_context, number):  # type: ignore[no-untyped-def]
    """A stored number as float32: float32 itself, or bfloat16 given as uint16, which is its upper
    half.
    """

    def same(_context, _builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return arguments[0]

    def shifted(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(word.type, 16)), ir.FloatType())

    return types.float32(number), same if number == types.float32 else shifted


@intrinsic
def prefetch(_context, array, row, column):  # type: ignore[no-untyped-def]
    """Have array[row, column] on its way to the cache."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        address = cgutils.get_item_pointer(
            context,
            builder,
            signature.args[0],
            context.make_array(signature.args[0])(context, builder, arguments[0]),
            list(arguments[1:]),
        )
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        of = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], of)
        # for reading, to stay in the cache, of data
        builder.call(fetch, [builder.bitcast(address, byte), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


@intrinsic
def _from_bits(_context, bits):  # type: ignore[no-untyped-def]
    """The float32 of the lower half of an int64."""

    def cast(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), cast


@jit
def _from_order(number):  # type: ignore[no-untyped-def]
    """Float32 number `number` in the order of all float32, that of zero being 0."""
    return _from_bits(number) if number >= 0 else -_from_bits(-number)


@jit
def best(scores, count, k, picked):  # type: ignore[no-untyped-def]
    """Put the indexes of the `k` largest of scores[:count] in `picked`, ascending; returns how
    many.

    Of equal ones the first count, NaN and -inf never. The smallest score that belongs to them is
    found by bisection over the float32 numbers in their order: some twenty counts that vectorise,
    where a heap or a quickselect mispredicts every other branch.
    """
    low, high = -MOST_FLOATS, MOST_FLOATS  # -inf belongs, NaN does not
    enough = count <= k
    while low < high and not enough:
        middle = (low + high + 1) >> 1
        threshold = _from_order(middle)
        above = np.int32(0)
        for i in range(count):
            above = np.int32(above + (scores[i] >= threshold))
        enough = above == k
        if above >= k:
            low = middle
        else:
            high = middle - 1
    threshold = _from_order(low)
    equal = k
    if not enough:
        for i in range(count):
            equal -= scores[i] > threshold
    equal = equal if threshold > -np.inf else 0
    filled = 0
    for i in range(count):
        if filled == k:
            break
        also = scores[i] == threshold and equal > 0
        # another takes its place where it is not among them: no branch depends on a score
        picked[filled] = i
        filled += (scores[i] > threshold) | also
        equal -= also
    return filled


@intrinsic
def _bits(_context, number):  # type: ignore[no-untyped-def]
    """The bits of a float32 as int32."""

    def cast(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        from llvmlite import ir

        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), cast


@jit
def sort(values, items, count):  # type: ignore[no-untyped-def]
    """Sort both by rising values, equal ones as they stood; NaN anywhere.

    A short list by insertion, which needs no memory. Others by one byte of the numbers in their
    order after the other, the lowest first: no branch depends on what they are. (np.argsort takes
    longer to compile than all the rest.)
    """
    if count <= SHORT:
        for index in range(1, count):
            value, item = values[index], items[index]
            at = index
            while at > 0 and values[at - 1] > value:
                values[at], items[at] = values[at - 1], items[at - 1]
                at -= 1
            values[at], items[at] = value, item
        return
    numbers, moved = np.empty((2, count), np.uint32), np.empty((2, count), np.int32)
    ends = np.zeros((4, 256), np.int32)
    for i in range(count):
        bits = np.int64(_bits(values[i]))
        number = np.uint32((bits if bits >= 0 else -(bits & 0x7FFFFFFF)) + (1 << 31))
        numbers[0, i], moved[0, i] = number, items[i]
        for byte in range(4):
            ends[byte, number >> np.uint32(8 * byte) & np.uint32(255)] += 1
    for byte in range(4):
        before, after = byte % 2, 1 - byte % 2
        start = np.int32(0)
        for value in range(256):
            bucket_size = ends[byte, value]
            ends[byte, value] = start
            start += bucket_size
        for i in range(count):
            number = numbers[before, i]
            value = number >> np.uint32(8 * byte) & np.uint32(255)
            at = ends[byte, value]
            ends[byte, value] = at + 1
            numbers[after, at], moved[after, at] = number, moved[before, i]
    for i in range(count):
        values[i], items[i] = _from_order(np.int64(numbers[0, i]) - (1 << 31)), moved[0, i]


@jit
def write_best(values, count, indexes, scores, picked):  # type: ignore[no-untyped-def]
    """Fill indexes [k] and scores [k] with the best of values[:count], best first, then -1 and
    -inf.
    """
    filled = best(values, count, len(indexes), picked)
    falling = np.empty(filled, np.float32)
    for i in range(filled):
        falling[i] = -values[picked[i]]
    sort(falling, picked, filled)
    indexes[filled:], scores[filled:] = -1, -np.inf
    for i in range(filled):
        indexes[i], scores[i] = picked[i], -falling[i]
