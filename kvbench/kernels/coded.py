"""Rows of codes: what kernels must know of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

GROUP = 32  # tokens, or channels of a row, that share parameters


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
    def name(self) -> str:
        """As `cpp/attend.h` lists the formats that kernels read."""
        kind = self.numbers if isinstance(self.numbers, str) else "table"
        unit = ("unit",) if self.unit else ()
        return " ".join(
            (str(self.bits), kind, *unit, self.parameters, self.granularity, self.parameter)
        )

    @property
    def table(self) -> int:
        """Address of 16 float32: what codes stand for, again and again; 0 of 8 bits."""
        return 0 if self.bits == 8 else int(_table(self.bits, self.numbers).ctypes.data)


@cache
def _table(bits: int, numbers: str | tuple[float, ...]) -> NDArray[np.float32]:
    values = range(2**bits) if isinstance(numbers, str) else numbers
    return np.resize(np.array(values, np.float32), 16)
