"""64 bytes at a time, for Numba kernels: looked up in tables, compared, and the outcomes as the
bits of a word.

LLVM finds none of this by itself. Where the processor looks up 64 bytes in one instruction (AVX-512
VBMI: Intel's since 2019, AMD's since 2022), `look_up` does; elsewhere it is a loop. All else is a
few instructions on any processor. An array is read and written `LANES` bytes at a time, whatever
its length: it has room for that.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from methods.blocks.kernels import jit

LANES = 64
ALL = np.uint64(2**64 - 1)

BYTE, WORD = ir.IntType(8), ir.IntType(64)
BYTES = ir.VectorType(BYTE, LANES)
NOTHING = ir.Constant(BYTES, None)
QUARTER = 256 // 4  # entries of a table that one register holds


def features() -> str:
    """What LLVM knows this processor to have, such as "+avx2,+avx512vbmi"."""
    if config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return config.CPU_FEATURES or ""
    try:
        return str(binding.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM cannot tell
        return ""


def looks_up(features: str) -> bool:
    """Whether a processor with these LLVM features looks up bytes in a table of 128, as
    `_look_up_quickly` needs.
    """
    return "+avx512vbmi" in features.split(",")


def _address(context, builder, kind, array, indexes):  # type: ignore[no-untyped-def]
    """Of the `LANES` bytes from array[indexes] on."""
    array_struct = context.make_array(kind)(context, builder, array)
    return builder.bitcast(
        cgutils.get_item_pointer(context, builder, kind, array_struct, indexes), BYTES.as_pointer()
    )


@intrinsic
def _look_up_quickly(_context, tables, ids, first, sums):  # type: ignore[no-untyped-def]
    """`look_up`; a table is four registers, either half of it looked up at once, and an id's
    highest bit decides.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        in_tables, in_ids, _, in_sums = signature.args
        tables, ids, first, sums = arguments
        two = ir.FunctionType(BYTES, [BYTES, BYTES, BYTES])
        permute = cgutils.get_or_insert_function(
            builder.module, two, "llvm.x86.avx512.vpermi2var.qi.512"
        )
        rows = context.make_array(in_ids)(context, builder, ids)
        total = cgutils.alloca_once_value(builder, NOTHING)
        with cgutils.for_range(builder, cgutils.unpack_tuple(builder, rows.shape, 2)[0]) as row:
            at = _address(context, builder, in_ids, ids, [row.index, first])
            id_vector, quarters = builder.load(at, align=1), []
            for entry in range(0, 256, QUARTER):
                at = _address(context, builder, in_tables, tables, [row.index, WORD(entry)])
                quarters.append(builder.load(at, align=1))
            lower, upper = (
                builder.call(permute, [quarters[at], id_vector, quarters[at + 1]]) for at in (0, 2)
            )
            values = builder.select(builder.icmp_signed("<", id_vector, NOTHING), upper, lower)
            builder.store(builder.add(builder.load(total), values), total)
        at = _address(context, builder, in_sums, sums, [first])
        builder.store(builder.load(total), at, align=1)
        return context.get_dummy_value()

    return types.void(tables, ids, first, sums), generate


@jit
def _look_up_plainly(tables, ids, first, sums):  # type: ignore[no-untyped-def]
    """`look_up`, one id after the other."""
    for i in range(first, first + LANES):
        total = np.uint8(0)
        for row in range(len(ids)):
            total += tables[row, ids[row, i]]
        sums[i] = total


look_up = _look_up_quickly if looks_up(features()) else _look_up_plainly
"""look_up(tables [S, 256], ids [S, n], first, sums [n]), all uint8: for `LANES` i from `first` on,
sums[i] = tables[0, ids[0, i]] + tables[1, ids[1, i]] + ..., modulo 256."""


@intrinsic
def at_least(_context, numbers, first, least):  # type: ignore[no-untyped-def]
    """A word (uint64) whose bit i says whether numbers[first + i], uint8, is no less than `least`,
    0 .. 255.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        numbers, first = arguments[:2]
        at = _address(context, builder, signature.args[0], numbers, [first])
        vector, least = builder.load(at, align=1), builder.trunc(arguments[2], BYTE)
        first_lane = builder.insert_element(
            ir.Constant(BYTES, ir.Undefined), least, ir.IntType(32)(0)
        )
        every = builder.shuffle_vector(
            first_lane, first_lane, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        )
        return builder.bitcast(builder.icmp_unsigned(">=", vector, every), WORD)

    return types.uint64(numbers, types.intp, types.intp), generate


@intrinsic
def ones(_context, word):  # type: ignore[no-untyped-def]
    """How many bits of a uint64 are set, int64."""

    def generate(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest(_context, word):  # type: ignore[no-untyped-def]
    """The number of the lowest bit that is set in a uint64 other than 0, int64."""

    def generate(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


@jit
def lowest_ones(word, count):  # type: ignore[no-untyped-def]
    """The word with no more than the `count` lowest of its bits."""
    rest = word
    for _ in range(count):
        rest &= rest - np.uint64(1)
    return word & ~rest
