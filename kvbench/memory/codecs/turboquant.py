"""TurboQuant: a rotation makes channels alike, so one table of numbers fits them all.

Zandieh et al. 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
sections 3.1 (`Lloyd`) and 3.2 (`Residual`). And as vLLM 0.32 has it (`quantization/turboquant`):
keys turned by a Hadamard matrix, the decoded direction made a unit vector again, values coded in
even steps between their least and largest number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from kvbench.kernels import codes as kernels
from kvbench.kernels.coded import Coded
from kvbench.memory.codecs.codec import Codec, as_bytes, as_numbers, looked_up, packed, steps

# The positive half of the numbers that are nearest to a Gaussian's in the mean square, by bits of a
# code.
CENTROIDS = {
    2: (0.45257, 1.50956),
    3: (0.24498, 0.75565, 1.34318, 2.15035),
    4: (0.12843, 0.38814, 0.65688, 0.94245, 1.25626, 1.61788, 2.06845, 2.73092),
}


@cache
def table(bits: int, head_dim: int) -> tuple[float, ...]:
    """What codes stand for in a unit vector of D channels, ascending; a channel of it has a
    variance of 1 / D.
    """
    half = [number / math.sqrt(head_dim) for number in CENTROIDS[bits]]
    return (*(-number for number in reversed(half)), *half)


@cache
def _bounds(bits: int, head_dim: int) -> torch.Tensor:
    """Halfway between the numbers of `table`."""
    numbers = torch.tensor(table(bits, head_dim))
    return (numbers[1:] + numbers[:-1]) / 2


@dataclass(frozen=True)
class Lloyd(Codec):
    """The direction of a row by the nearest of a table's numbers (Algorithm 1), then its norm in
    float16.

    Parameters
    ----------
    bits
        of a code, 2 to 4.
    unit
        the decoded direction is made a unit vector.
    """

    bits: int
    unit: bool = False

    @property
    def width(self) -> int:
        """Bytes of the codes and of a float16."""
        return self.head_dim * self.bits // 8 + 2

    @property
    def row(self) -> Coded:
        """The norm is the scale."""
        return Coded(
            self.bits, table(self.bits, self.head_dim), self.unit, "scale", parameter="float16"
        )

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, then the norm; a number between two of the table goes up."""
        norm, direction = _direction(rows)
        codes = _nearest(direction, _bounds(self.bits, self.head_dim), self.bits)
        return torch.cat([codes, as_bytes(norm.half())], dim=-1)

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The table's numbers times the norm."""
        codes, norm = stored_rows.split([self.width - 2, 2], dim=-1)
        numbers = looked_up(codes, self.bits, table(self.bits, self.head_dim))
        if self.unit:
            numbers = numbers / (numbers.square().sum(dim=-1, keepdim=True) + 1e-16).sqrt()
        return numbers * as_numbers(norm, torch.float16)


@dataclass(frozen=True)
class Residual(Codec):
    """`Lloyd` with a bit less, and of what it leaves the signs of random projections (Algorithm 2):
    products with queries have no bias. Then the norm, and that of the residual in parts of it, in
    float16.

    Parameters
    ----------
    bits
        of a code and its sign, 3 or 4.
    """

    bits: int

    row = None  # every channel is a sum over all signs: no kernel reads that in place

    @property
    def width(self) -> int:
        """Bytes of codes, signs and two float16."""
        return self.head_dim * self.bits // 8 + 4

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, signs, the norm, that of the residual."""
        norm, direction = _direction(rows)
        bits, bounds = self.bits - 1, _bounds(self.bits - 1, self.head_dim)
        numbers = torch.tensor(table(bits, self.head_dim), device=rows.device)
        residual = direction - numbers[_indexes(direction, bounds)]
        directed = residual @ _projection(self.head_dim).T.to(rows.device)
        norms = torch.cat([norm, residual.norm(dim=-1, keepdim=True)], dim=-1).half()
        codes = _nearest(direction, bounds, bits), _nearest(directed, torch.zeros(1), 1)
        return torch.cat([*codes, as_bytes(norms)], dim=-1)

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The table's numbers and the expected residual, times the norm."""
        eighth = self.head_dim // 8
        codes, signs, norms = stored_rows.split([eighth * (self.bits - 1), eighth, 4], dim=-1)
        norm, residual_norm = as_numbers(norms, torch.float16).split(1, dim=-1)
        numbers = looked_up(codes, self.bits - 1, table(self.bits - 1, self.head_dim))
        directed = looked_up(signs, 1, (-1.0, 1.0)) @ _projection(self.head_dim).to(
            stored_rows.device
        )
        return (numbers + residual_norm * math.sqrt(math.pi / 2) / self.head_dim * directed) * norm


@dataclass(frozen=True)
class Uniform(Codec):
    """vLLM's values: codes in even steps from a row's least number to its largest, then step and
    least in float16.

    Parameters
    ----------
    bits
        of a code, 3 or 4.
    """

    bits: int

    @property
    def width(self) -> int:
        """Bytes of the codes and of two float16."""
        return self.head_dim * self.bits // 8 + 4

    @property
    def row(self) -> Coded:
        """The step is the scale."""
        return Coded(self.bits, "unsigned", parameters="range", parameter="float16")

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, of the step before it is rounded; then step and least number."""
        if kernels.is_quick(rows):
            return kernels.encoded(rows, "steps", self.width, self.bits)
        rows = rows.float()
        least = rows.amin(dim=-1, keepdim=True)
        step = ((rows.amax(dim=-1, keepdim=True) - least) / (2**self.bits - 1)).clamp(min=1e-8)
        codes = ((rows - least) / step + 0.5).floor().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return torch.cat(
            [packed(codes, self.bits), as_bytes(torch.cat([step, least], dim=-1).half())], dim=-1
        )

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Codes times the step, and the least number."""
        codes, numbers = stored_rows.split([self.width - 4, 4], dim=-1)
        step, least = as_numbers(numbers, torch.float16).split(1, dim=-1)
        return looked_up(codes, self.bits, steps(self.bits)) * step + least


def _nearest(numbers: torch.Tensor, bounds: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed codes [..., D * bits / 8] of numbers [..., D], between which bounds they lie; one at a
    bound goes up.
    """
    if kernels.is_quick(numbers):
        width = numbers.shape[-1] * bits // 8
        return kernels.encoded(numbers, "nearest", width, bits, bounds=bounds)
    return packed(_indexes(numbers, bounds), bits)


def _indexes(numbers: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(numbers, bounds.to(numbers.device), right=True)


def _direction(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms [..., 1] of rows [..., D], and these over them."""
    rows = rows.float()
    norm = rows.norm(dim=-1, keepdim=True)
    return norm, rows / (norm + 1e-8)


@cache
def _projection(size: int) -> torch.Tensor:
    """[D, D] Gaussian numbers, drawn once."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(size + 1))
