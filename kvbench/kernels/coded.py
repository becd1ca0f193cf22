"""Rows of codes: what kernels must know of them, and how they become vectors of numbers in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from kvbench.kernels.vectors import (
    LANES,
    PAIR,
    called,
    fma,
    number_at,
    numbers_at,
    pointer,
    splatted,
)

GROUP = 32  # tokens, or channels of a row, that share parameters
TYPES = {"float32": types.float32, "float16": types.float16, "bfloat16": types.uint16}
FLOATS, WORDS = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))


@dataclass(frozen=True)
class Coded:
    """How rows of codes are held, of which kernels know no more than this.

    Codes stand first in a row, packed, the first in the low bits; the row's parameters follow them.

    Parameters
    ----------
    bits
        of a code: 2, 3, 4 or 8.
    numbers
        what codes stand for: "signed" (int8), "e4m3" (e4m3fn), "unsigned", or 2**bits numbers, not
        of 8 bits.
    unit
        of keys: a row's numbers are first divided by sqrt(sum of their squares + 1e-16).
    parameters
        "none"; "scale": x = number * scale; "range": x = number * scale + minimum.
    granularity
        what has its parameters: a "row"; of a row, `GROUP` "channels", all scales before all
        minima; or, of keys, each channel of `GROUP` "tokens", [2, D], elsewhere.
    parameter
        a parameter's type: "float32", "float16" or "bfloat16".
    """

    bits: int
    numbers: str | tuple[float, ...]
    unit: bool = False
    parameters: str = "none"
    granularity: str = "row"
    parameter: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.numbers, tuple) and (
            self.bits == 8 or len(self.numbers) != 2**self.bits
        ):
            raise ValueError(
                f"{len(self.numbers)} numbers for codes of {self.bits} bits: expected 2**bits, of 2"
                " to 4"
            )
        if self.numbers == "e4m3" and (self.unit or self.granularity != "row"):
            raise ValueError("numbers='e4m3': expected granularity='row' and unit=False")

    @property
    def only_keys(self) -> bool:
        """Kernels read no values that are held so."""
        return self.unit or self.granularity == "tokens"

    @property
    def kernel_argument(self) -> Held:
        """What kernels are given."""
        kind = self.numbers if isinstance(self.numbers, str) else "table"
        unit = "unit" if self.unit else "plain"
        facts = self.bits, kind, unit, self.parameters, self.granularity, self.parameter
        subclass: type[Held] = __getattr__("_".join(map(str, ("Held", *facts))))
        return subclass(0 if self.bits == 8 else _table(self.bits, self.numbers).ctypes.data)


@cache
def _table(bits: int, numbers: Any) -> NDArray[np.float32]:
    values = range(2**bits) if numbers == "unsigned" else numbers
    return np.resize(np.array(values, np.float32), LANES)


class Held(NamedTuple):
    """Rows of codes.

    Kernels are compiled for its subclasses, a class for what is known of rows but for their table.

    Attributes
    ----------
    table
        address of 16 float32: what codes stand for, again and again; 0 of 8 bits.
    """

    table: int


@cache
def __getattr__(name: str) -> Any:
    """The subclass of `Held` that its name describes: so any process finds what another one
    compiled for it.
    """
    if not name.startswith("Held_"):
        raise AttributeError(name)
    words = name.split("_")[1:]
    facts = Facts(int(words[0]), words[1], words[2] == "unit", *words[3:])
    return type(name, (Held,), {"__module__": __name__, "facts": facts})


class Facts(NamedTuple):
    """What is known of rows while a kernel is compiled: see `Coded`; or "native" numbers, whose
    type is `parameter`.
    """

    bits: int
    numbers: str
    unit: bool = False
    parameters: str = "none"
    granularity: str = "row"
    parameter: str = "float32"

    @classmethod
    def of(cls, stored: Any) -> Facts:
        """Those of rows of a Numba type."""
        if (kind := getattr(stored, "instance_class", None)) is not None:
            return kind.facts
        names = {of: name for name, of in TYPES.items()}
        return cls(stored.bitwidth, "native", parameter=names[stored])

    @property
    def grouped(self) -> bool:
        """Parameters are those of groups of tokens, elsewhere."""
        return self.granularity == "tokens"

    @property
    def scaled(self) -> bool:
        """A row has a scale that all of its numbers are to be multiplied with."""
        return self.granularity == "row" and (self.parameters != "none" or self.numbers == "e4m3")

    @property
    def ranged(self) -> bool:
        """And a minimum."""
        return self.scaled and self.parameters == "range"

    @property
    def spread(self) -> bool:
        """Neighbours are read into two vectors."""
        if self.numbers == "native":
            return self.parameter == "bfloat16"
        return self.bits == 4 and not self.grouped

    @property
    def factor(self) -> float:
        """What a row's scale is to be multiplied with: between the exponents' biases, see
        `decoded`.
        """
        return 256.0 if self.numbers == "e4m3" else 1.0


def decoded(builder: Any, codes: Any, to: Any, facts: Facts) -> Any:
    """Codes of 8 bits, of a row or one of them, as numbers; see `Facts.factor`."""
    if facts.numbers != "e4m3":
        return (builder.sitofp if facts.numbers == "signed" else builder.uitofp)(codes, to)
    # as float16, whose exponent is one bit longer: the sign fills it, and is taken out but for the
    # highest
    vector = isinstance(to, ir.VectorType)
    words, halves = (
        ir.VectorType(kind, LANES) if vector else kind for kind in (ir.IntType(16), ir.HalfType())
    )
    shift, mask = (
        ir.Constant(words, [value] * LANES if vector else value) for value in (7, 0xBFFF)
    )
    bits = builder.and_(builder.shl(builder.sext(codes, words), shift), mask)
    return builder.fpext(builder.bitcast(bits, halves), to)


class Reader:
    """Writes the code that reads vectors of rows; without the scale and the minimum that a whole
    row has.

    Parameters
    ----------
    stored
        the rows' Numba type.
    value
        one of that type.
    whole
        numbers of a row that are read.
    """

    def __init__(self, context: Any, builder: Any, stored: Any, value: Any, whole: Any) -> None:
        self._builder, self._whole = builder, whole
        self.facts = Facts.of(stored)
        self._features = context.codegen().magic_tuple()[2].split(",")
        if self.facts.bits < 8:
            self._table = numbers_at(builder, builder.extract_value(value, 0), types.float32)

    def vector(self, row: Any, parameters_at: Any, block: Any) -> Any:
        """The `block`-th vector of the row at an address, whose parameters are at another."""
        builder, facts = self._builder, self.facts
        at = builder.add(row, builder.mul(block, row.type(LANES * facts.bits // 8)))
        if facts.numbers == "native":
            return numbers_at(builder, at, TYPES[facts.parameter])
        if facts.bits == 8:
            codes = builder.load(pointer(builder, at, ir.VectorType(ir.IntType(8), LANES)), align=1)
            numbers = decoded(builder, codes, FLOATS, facts)
            return self._with_parameters(numbers, parameters_at, block)
        # Words that hold the first eight codes and the last eight; no byte is read but those of
        # these codes.
        half, step = LANES // 2, 2 * facts.bits - 4
        words = (
            builder.load(pointer(builder, at, ir.IntType(32)), align=1)
            for at in (at, builder.add(at, at.type(step)))
        )
        order = [lane + lane // half * half for lane in range(LANES)]
        codes = builder.shuffle_vector(
            *(splatted(builder, word) for word in words), ir.Constant(WORDS, order)
        )
        places = [lane * facts.bits - lane // half * 8 * step for lane in range(LANES)]
        numbers = self._numbers(builder.lshr(codes, ir.Constant(WORDS, places)))
        return self._with_parameters(numbers, parameters_at, block)

    def two(self, row: Any, parameters_at: Any, pair: Any) -> list[Any]:
        """The `pair`-th two vectors, as `kvbench.kernels.rows.lay_out` has it; see `vector`."""
        builder, facts = self._builder, self.facts
        word = row.type
        first = builder.mul(pair, word(2))
        if not facts.spread:
            return [
                self.vector(row, parameters_at, block)
                for block in (first, builder.add(first, word(1)))
            ]
        at = builder.add(row, builder.mul(pair, word(PAIR * facts.bits // 8)))
        if facts.numbers == "native":
            both = builder.load(pointer(builder, at, WORDS), align=2)
            even = builder.shl(both, ir.Constant(WORDS, [16] * LANES))
            odd = builder.and_(both, ir.Constant(WORDS, [0xFFFF0000] * LANES))
            return [builder.bitcast(half, FLOATS) for half in (even, odd)]
        even = builder.zext(
            builder.load(pointer(builder, at, ir.VectorType(ir.IntType(8), LANES)), align=1), WORDS
        )
        odd = builder.lshr(even, ir.Constant(WORDS, [4] * LANES))
        return [
            self._with_parameters(self._numbers(codes), parameters_at, first)
            for codes in (even, odd)
        ]

    def _numbers(self, codes: Any) -> Any:
        """What the low bits of words stand for."""
        builder, facts = self._builder, self.facts
        if "+avx512f" in self._features:  # which looks at the low 4 bits alone
            return called(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, self._table, codes)
        codes = builder.and_(codes, ir.Constant(WORDS, [2**facts.bits - 1] * LANES))
        if facts.numbers == "unsigned":
            return builder.sitofp(codes, FLOATS)
        if "+avx2" in self._features:
            low, high = (self._half(codes, half) for half in range(2))
            return builder.shuffle_vector(low, high, ir.Constant(WORDS, [*range(LANES)]))
        looked_up, index = self._table, ir.IntType(32)
        for lane in map(index, range(LANES)):
            number = builder.extract_element(self._table, builder.extract_element(codes, lane))
            looked_up = builder.insert_element(looked_up, number, lane)
        return looked_up

    def _half(self, codes: Any, half: int) -> Any:
        """Numbers of eight codes, on AVX2."""
        builder, eight = self._builder, ir.VectorType(ir.IntType(32), 8)

        def cut(numbers: Any, half: int) -> Any:
            return builder.shuffle_vector(
                numbers, numbers, ir.Constant(eight, [*range(8 * half, 8 * half + 8)])
            )

        codes = cut(codes, half)
        low, high = (
            # which looks at the low 3 bits alone
            called(builder, "llvm.x86.avx2.permps", table.type, table, codes)
            for table in (cut(self._table, part) for part in range(2))
        )
        return builder.select(
            builder.icmp_unsigned(">", codes, ir.Constant(eight, [7] * 8)), high, low
        )

    def _with_parameters(self, numbers: Any, parameters_at: Any, block: Any) -> Any:
        """The `block`-th vector with the parameters of its channels, or of their group."""
        builder, facts = self._builder, self.facts
        word = parameters_at.type
        if facts.parameters == "none" or facts.granularity == "row":
            return numbers
        of = TYPES[facts.parameter]
        first, many = builder.mul(block, word(LANES)), self._whole
        if facts.granularity == "channels":
            first, many = (builder.udiv(number, word(GROUP)) for number in (first, many))

        def parameters(place: Any) -> Any:
            if facts.granularity == "channels":
                return splatted(builder, number_at(builder, parameters_at, place, of))
            return numbers_at(
                builder, builder.add(parameters_at, builder.mul(place, word(of.bitwidth // 8))), of
            )

        if facts.parameters == "scale":
            return builder.fmul(numbers, parameters(first))
        return fma(builder, numbers, parameters(first), parameters(builder.add(first, many)))
