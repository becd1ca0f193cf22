"""Codes of a token as numbers, for ParisKV's kernels: eight subspaces at once where the processor
can.

LLVM finds none of this by itself: the levels are a table that a register holds, and looking eight
up is an instruction (AVX2). The sums run in the order of `Codes.estimates`, so that both give
the same bits.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels.vectors import called, inner
from methods.blocks.kernels import widen
from methods.blocks.lanes import features
from methods.pariskv import codebook

SUBSPACE = codebook.SUBSPACE
LEVELS, DECODED = codebook.LEVELS.numpy(), codebook.DECODED.numpy()
EIGHT = 8  # subspaces whose codes are decoded at once
NIBBLE = np.uint32(15)


def permutes(features: str) -> bool:
    """Whether a processor with these LLVM features looks up eight numbers at once, as `_quickly`
    needs.
    """
    return "+avx2" in features.split(",")


@intrinsic
def _quickly(_context, codes, halves, token, first, rotated, terms):  # type: ignore[no-untyped-def]
    """`terms_of`: the three low bits of a code look up its level, and its fourth is the sign."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        in_codes, in_halves, _, _, in_rotated, in_terms = signature.args
        codes, halves, token, first, rotated, terms = arguments
        word, number = ir.IntType(32), ir.FloatType()
        words, numbers = ir.VectorType(word, EIGHT), ir.VectorType(number, EIGHT)

        def at(kind, array, indexes, of):  # type: ignore[no-untyped-def]
            """Where array[indexes] lies, as a pointer to a type."""
            view = context.make_array(kind)(context, builder, array)
            address = cgutils.get_item_pointer(context, builder, kind, view, indexes)
            return builder.bitcast(address, of.as_pointer())

        def every(value):  # type: ignore[no-untyped-def]
            return ir.Constant(words, [value] * EIGHT)

        levels = ir.Constant(numbers, [float(level) for level in LEVELS])
        code_words = builder.load(at(in_codes, codes, [token, first], words), align=1)
        summands = []
        for coordinate in range(SUBSPACE):
            code = builder.lshr(code_words, every(4 * coordinate)) if coordinate else code_words
            level = called(builder, "llvm.x86.avx2.permps", numbers, levels, code)
            negative = builder.and_(builder.not_(builder.shl(code, every(28))), every(1 << 31))
            signed = builder.xor(builder.bitcast(level, words), negative)
            place = at(in_rotated, rotated, [ir.IntType(64)(coordinate), first], numbers)
            of_query = builder.load(place, align=1)
            summands.append(builder.fmul(builder.bitcast(signed, numbers), of_query))
        pairs = [builder.fadd(*summands[i : i + 2]) for i in range(0, SUBSPACE, 2)]
        product = functools.reduce(builder.fadd, pairs)
        subspaces = context.make_array(in_rotated)(context, builder, rotated).shape
        after = builder.mul(cgutils.unpack_tuple(builder, subspaces, 2)[1], ir.IntType(64)(2))
        narrow = ir.VectorType(ir.IntType(16), EIGHT)
        place = at(in_halves, halves, [token, builder.add(after, first)], narrow)
        halves_of = builder.zext(builder.load(place, align=1), words)
        weights = builder.bitcast(builder.shl(halves_of, every(16)), numbers)
        place = at(in_terms, terms, [first], numbers)
        builder.store(builder.fmul(product, weights), place, align=1)
        return context.get_dummy_value()

    return types.void(codes, halves, types.intp, types.intp, rotated, terms), generate


@inner
def terms_plainly(codes, halves, token, first, rotated, terms):  # type: ignore[no-untyped-def]
    """`terms_of`, one subspace after the other."""
    for subspace in range(first, min(first + EIGHT, len(terms))):
        product = np.float32(0)
        for pair in range(SUBSPACE // 2):
            both = codes[token, subspace] >> np.uint32(8 * pair)
            low, high = DECODED[both & NIBBLE], DECODED[both >> np.uint32(4) & NIBBLE]
            product += low * rotated[2 * pair, subspace] + high * rotated[2 * pair + 1, subspace]
        terms[subspace] = product * widen(halves[token, 2 * len(terms) + subspace])


terms_of = _quickly if permutes(features()) else terms_plainly
"""terms_of(codes, halves [n, ...], token, first, rotated [8, S], terms [S]): a token's weight_b
<v_b, z_b> of the eight subspaces from `first` on.
"""
