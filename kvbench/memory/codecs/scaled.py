"""A byte a channel: 8-bit integers and 8-bit floating point."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from kvbench.kernels import codes
from kvbench.kernels.coded import Coded
from kvbench.memory.codecs.codec import Codec, as_bytes, as_numbers


class _Scaled(Codec):
    """Codes, then the row's scale in float32: x = code * scale, scale = max |x| / largest code."""

    largest: ClassVar[float]
    encoding: ClassVar[Literal["int8", "e4m3"]]

    @property
    def width(self) -> int:
        """D bytes and those of a float32."""
        return self.head_dim + 4

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, then the scale; all zero of a row of zeros."""
        if codes.is_quick(rows):
            return codes.encoded(rows, self.encoding, self.width)
        rows = rows.float()
        scale = rows.abs().amax(dim=-1, keepdim=True) / self.largest
        numbers = (rows / torch.where(scale > 0, scale, 1)).clamp(-self.largest, self.largest)
        return torch.cat([as_bytes(self._coded(numbers)), as_bytes(scale)], dim=-1)

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Codes times the scale."""
        return self._numbers(stored_rows[..., : self.head_dim]) * as_numbers(
            stored_rows[..., self.head_dim :], torch.float32
        )

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Int8(_Scaled):
    """Symmetric 8-bit integers, a scale a token."""

    largest, encoding = 127.0, "int8"
    row = Coded(8, "signed", parameters="scale")

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round().to(torch.int8)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8(_Scaled):
    """8-bit floating point, 4 bits of exponent and 3 of mantissa without infinities (e4m3fn), a
    scale a token.
    """

    largest, encoding = 448.0, "e4m3"
    row = Coded(8, "e4m3", parameters="scale")

    def _coded(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(torch.float8_e4m3fn)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class E4m3(Codec):
    """e4m3fn without a scale, as TurboQuant's keys of 8 bits in vLLM are; what is larger than 448
    becomes 448.
    """

    row = Coded(8, "e4m3")

    @property
    def width(self) -> int:
        """D bytes."""
        return self.head_dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The nearest."""
        return as_bytes(rows.float().clamp(-448, 448).to(torch.float8_e4m3fn))

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Exactly."""
        return stored_rows.view(torch.float8_e4m3fn).float()
