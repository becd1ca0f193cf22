"""Codes of a token as numbers, for ParisKV's kernels: eight subspaces at once where the processor
can.

LLVM finds none of this by itself: the levels are a table that a register holds, and looking eight
up is an instruction (AVX2). The sums run in the order of `vectorised.estimate`, so that both give
the same bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels.vectors import inner
from methods.blocks.kernels import widen
from methods.blocks.lanes import features
from methods.pariskv import codebook

SUBSPACE, LEVELS, DECODED = codebook.SUBSPACE, codebook.LEVELS.numpy(), codebook.DECODED.numpy()
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

        def pointer(kind, array, indexes, of):  # type: ignore[no-untyped-def]
            array_struct = context.make_array(kind)(context, builder, array)
            return builder.bitcast(
                cgutils.get_item_pointer(context, builder, kind, array_struct, indexes),
                of.as_pointer(),
            )

        def every(value):  # type: ignore[no-untyped-def]
            return ir.Constant(words, [value] * EIGHT)

        look_up = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(numbers, [numbers, words]), "llvm.x86.avx2.permps"
        )
        levels = ir.Constant(numbers, [float(level) for level in LEVELS])
        code_words, summands = (
            builder.load(pointer(in_codes, codes, [token, first], words), align=1),
            [],
        )
        for coordinate in range(SUBSPACE):
            code = builder.lshr(code_words, every(4 * coordinate)) if coordinate else code_words
            level = builder.bitcast(builder.call(look_up, [levels, code]), words)
            negative = builder.and_(builder.not_(builder.shl(code, every(28))), every(1 << 31))
            decoded = builder.bitcast(builder.xor(level, negative), numbers)
            of_query = builder.load(
                pointer(in_rotated, rotated, [ir.IntType(64)(coordinate), first], numbers), align=1
            )
            summands.append(builder.fmul(decoded, of_query))
        product, *others = (
            builder.fadd(summands[at], summands[at + 1]) for at in range(0, SUBSPACE, 2)
        )
        for other in others:
            product = builder.fadd(product, other)
        narrow = ir.VectorType(ir.IntType(16), EIGHT)
        subspaces = context.make_array(in_rotated)(context, builder, rotated).shape
        after = builder.mul(cgutils.unpack_tuple(builder, subspaces, 2)[1], ir.IntType(64)(2))
        weights = builder.load(
            pointer(in_halves, halves, [token, builder.add(after, first)], narrow), align=1
        )
        weights = builder.bitcast(builder.shl(builder.zext(weights, words), every(16)), numbers)
        builder.store(
            builder.fmul(product, weights), pointer(in_terms, terms, [first], numbers), align=1
        )
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
