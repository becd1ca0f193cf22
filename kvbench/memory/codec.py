"""How a token's key or value is held in fewer bits: pure functions between rows [..., D] and rows of bytes.

`Native` holds rows as they are. `Int8` and `Fp8` code a row with a scale of its own. `KiviValues` and `KiviKeys` are
KIVI's (Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3): asymmetric,
values in groups of channels, keys in groups of tokens. Who holds the bytes knows their width alone; only who writes a
token and who attends it asks a codec. The width of coded rows is a multiple of 4, so that a kernel reads whole words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

GROUP = 32  # numbers that share a scale and a minimum in KIVI


@dataclass(frozen=True)
class Codec:
    """Rows of one kind.

    Args:
        head_dim: D.
        dtype: of decoded rows, the model's.
    """

    head_dim: int
    dtype: torch.dtype

    @property
    def stored(self) -> torch.dtype:
        """Of a held row's elements."""
        return torch.uint8

    @property
    def width(self) -> int:
        """Elements of a held row."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Of a held row."""
        return self.width * self.stored.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., D] as they are held, [..., width]."""
        raise NotImplementedError

    def decode(self, held: torch.Tensor) -> torch.Tensor:
        """Held rows [..., width] as [..., D]."""
        raise NotImplementedError


class Native(Codec):
    """Rows as they are."""

    @property
    def stored(self) -> torch.dtype:
        """The model's dtype."""
        return self.dtype

    @property
    def width(self) -> int:
        """D."""
        return self.head_dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The same."""
        return rows

    def decode(self, held: torch.Tensor) -> torch.Tensor:
        """The same."""
        return held


class _Scaled(Codec):
    """One byte a channel, then the row's scale in float32: x = code * scale, scale = max |x| / largest code."""

    largest: ClassVar[float]

    @property
    def width(self) -> int:
        """D bytes and those of a float32."""
        return self.head_dim + 4

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, then the scale; all zero of a row of zeros."""
        rows = rows.float()
        scale = rows.abs().amax(dim=-1, keepdim=True) / self.largest
        codes = (rows / torch.where(scale > 0, scale, 1)).clamp(-self.largest, self.largest)
        return torch.cat([as_bytes(self._coded(codes)), as_bytes(scale)], dim=-1)

    def decode(self, held: torch.Tensor) -> torch.Tensor:
        """Codes times the scale."""
        codes, scale = held[..., : self.head_dim], held[..., self.head_dim :].contiguous().view(torch.float32)
        return (self._numbers(codes) * scale).to(self.dtype)

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Int8(_Scaled):
    """Symmetric 8-bit integers, a scale a token."""

    largest = 127.0

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round().to(torch.int8)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8(_Scaled):
    """8-bit floating point, 4 bits of exponent and 3 of mantissa without infinities (e4m3fn), a scale a token."""

    largest = 448.0

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(torch.float8_e4m3fn)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class Codecs(NamedTuple):
    """How a tier holds keys and how it holds values, each a row a token."""

    key: Codec
    value: Codec

    @classmethod
    def of(cls, kind: str, head_dim: int, dtype: torch.dtype) -> Codecs:
        """Those called `kind`, one of `ROWS`, for keys and values alike."""
        codec = ROWS[kind](head_dim, dtype)
        return cls(codec, codec)

    @property
    def nbytes(self) -> int:
        """Of a token's key and value in one KV head."""
        return self.key.nbytes + self.value.nbytes

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., D] as they are held."""
        return self.key.encode(key), self.value.encode(value)

    def decode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Held keys and values as [..., D]."""
        return self.key.decode(key), self.value.decode(value)

    def recoded(self, key: torch.Tensor, value: torch.Tensor, target: Codecs) -> tuple[torch.Tensor, torch.Tensor]:
        """Held keys and values as `target` holds them; between equals no bit changes."""
        return (key, value) if self == target else target.encode(*self.decode(key, value))


# Kinds of row that any token can have by itself.
ROWS: dict[str, type[Codec]] = {"native": Native, "fp8": Fp8, "int8": Int8}


@dataclass(frozen=True)
class KiviValues(Codec):
    """A value's channels in groups: packed codes, then of each group its scale, then of each its minimum.

    Args:
        bits: of a code, 2 or 4.
    """

    bits: int

    @property
    def width(self) -> int:
        """Bytes of the codes, and of a scale and a minimum for each group in the model's dtype."""
        return self._codes + 2 * self.head_dim // GROUP * self.dtype.itemsize

    @property
    def _codes(self) -> int:
        return self.head_dim * self.bits // 8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, scales, minima."""
        codes, scale, least = quantised(rows.unflatten(-1, (-1, GROUP)), -1, self.bits)
        parts = packed(codes.flatten(-2), self.bits), scale.squeeze(-1), least.squeeze(-1)
        return torch.cat([as_bytes(part) for part in parts], dim=-1)

    def decode(self, held: torch.Tensor) -> torch.Tensor:
        """Codes times their group's scale, and its minimum."""
        codes = unpacked(held[..., : self._codes], self.bits).unflatten(-1, (-1, GROUP))
        scale, least = held[..., self._codes :].contiguous().view(self.dtype).float().unsqueeze(-1).chunk(2, dim=-2)
        return (codes * scale + least).flatten(-2).to(self.dtype)


@dataclass(frozen=True)
class KiviKeys:
    """Keys in groups of consecutive tokens, each channel with a scale and a minimum of its own in each group.

    A token's codes stay together, so that single tokens can be read. The parameters of its group lie elsewhere.

    Args:
        head_dim, dtype: as of `Codec`.
        bits: of a code, 2 or 4.
    """

    head_dim: int
    dtype: torch.dtype
    bits: int

    @property
    def width(self) -> int:
        """Bytes of a token's codes."""
        return self.head_dim * self.bits // 8

    def encode(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., g, D] of whole groups of g tokens: codes [..., g, width], and scale and minimum [..., 2, D]."""
        codes, scale, least = quantised(keys, -2, self.bits)
        return packed(codes, self.bits), torch.cat([scale, least], dim=-2)

    def decode(self, held: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """Tokens [..., width], each with the parameters [..., 2, D] of its group, as [..., D]."""
        scale, least = parameters.float().unbind(-2)
        return (unpacked(held, self.bits) * scale + least).to(self.dtype)


def quantised(numbers: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KIVI's codes of groups that lie along `dim`, as uint8, and scale and minimum of each, in the numbers' dtype.

    Codes are the nearest to what is decoded, so they are of scale and minimum as these are held. A group of equal
    numbers has the scale 0.
    """
    least = numbers.amin(dim=dim, keepdim=True)
    most = numbers.amax(dim=dim, keepdim=True)
    scale = ((most.float() - least.float()) / (2**bits - 1)).to(numbers.dtype)
    steps = (numbers.float() - least.float()) / torch.where(scale > 0, scale, 1).float()
    return steps.clamp(0, 2**bits - 1).round().to(torch.uint8), scale, least


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., D] below 2**bits in bytes [..., D * bits / 8], the first in the low bits."""
    places = bits * torch.arange(8 // bits, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, len(places))) << places).sum(dim=-1, dtype=torch.uint8)


def unpacked(held: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., D] of bytes [..., D * bits / 8]."""
    places = bits * torch.arange(8 // bits, dtype=torch.uint8, device=held.device)
    return ((held.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(-2)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [..., n] as their bytes, the lowest first."""
    if not numbers.numel():  # strides of an empty tensor are any, and torch asks for 1
        return numbers.new_zeros(*numbers.shape[:-1], numbers.shape[-1] * numbers.itemsize, dtype=torch.uint8)
    return numbers.contiguous().view(torch.uint8)
