"""KIVI's asymmetric codes: keys in groups of tokens, values in groups of channels.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.kernels import codes as kernels
from kvbench.kernels.coded import GROUP, Coded
from kvbench.memory.codecs.codec import (
    Codec,
    as_bytes,
    as_numbers,
    looked_up,
    name_of,
    packed,
    steps,
)


@dataclass(frozen=True)
class Channels(Codec):
    """Channels in groups: packed codes, then of each group its scale, then of each its minimum, in
    the model's dtype.

    KIVI's values, and `int4`, which holds keys so, too.

    Parameters
    ----------
    bits
        of a code, 2 or 4.
    """

    bits: int

    @property
    def width(self) -> int:
        """Bytes of the codes, and of a scale and a minimum for each group."""
        return self._codes + 2 * self.head_dim // GROUP * self.dtype.itemsize

    @property
    def _codes(self) -> int:
        return self.head_dim * self.bits // 8

    @property
    def row(self) -> Coded:
        """Scales and minima stand after the codes."""
        return Coded(
            self.bits,
            "unsigned",
            parameters="range",
            granularity="channels",
            parameter=name_of(self.dtype),
        )

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes, scales, minima."""
        if self.dtype in (torch.float32, torch.bfloat16) and kernels.is_quick(rows):
            return kernels.encoded(rows, "channels", self.width, self.bits, self.dtype)
        codes, scale, least = quantised(rows.unflatten(-1, (-1, GROUP)), -1, self.bits, self.dtype)
        parts = packed(codes.flatten(-2), self.bits), scale.squeeze(-1), least.squeeze(-1)
        return torch.cat([as_bytes(part) for part in parts], dim=-1)

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Codes times their group's scale, and its minimum."""
        codes = looked_up(stored_rows[..., : self._codes], self.bits, steps(self.bits)).unflatten(
            -1, (-1, GROUP)
        )
        scale, least = (
            as_numbers(stored_rows[..., self._codes :], self.dtype).unsqueeze(-1).chunk(2, dim=-2)
        )
        return (codes * scale + least).flatten(-2)


@dataclass(frozen=True)
class Tokens(Codec):
    """Keys in groups of consecutive tokens, each channel with a scale and a minimum of its own in
    each group.

    A token's codes stay together, so that single tokens can be read. The parameters of its group
    lie elsewhere, so that `encode` gives them beside the codes, and `numbers` and `decode` take
    them.

    Parameters
    ----------
    bits
        of a code, 2 or 4.
    """

    bits: int

    @property
    def width(self) -> int:
        """Bytes of a token's codes."""
        return self.head_dim * self.bits // 8

    @property
    def nbytes(self) -> int:
        """Of the codes, with a token's share of the parameters."""
        return self.width + 2 * self.head_dim * self.dtype.itemsize // GROUP

    @property
    def row(self) -> Coded:
        """Scales and minima are by groups of tokens."""
        return Coded(
            self.bits,
            "unsigned",
            parameters="range",
            granularity="tokens",
            parameter=name_of(self.dtype),
        )

    def encode(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Keys [..., g, D] of whole groups of g tokens: codes [..., g, width], and scale and
        minimum [..., 2, D].
        """
        codes, scale, least = quantised(keys, -2, self.bits, self.dtype)
        return packed(codes, self.bits), torch.cat([scale, least], dim=-2)

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Tokens [..., width], each with the parameters [..., 2, D] of its group, as [..., D] in
        float32.
        """
        scale, least = parameters[0].float().unbind(-2)
        return looked_up(stored_rows, self.bits, steps(self.bits)) * scale + least


def quantised(
    numbers: torch.Tensor, dim: int, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KIVI's codes of groups that lie along `dim`, as uint8, and scale and minimum of each, in a
    dtype.

    Codes are the nearest to what is decoded, so they are of scale and minimum as these are held. A
    group of equal numbers has the scale 0.
    """
    least = numbers.amin(dim=dim, keepdim=True).to(dtype)
    most = numbers.amax(dim=dim, keepdim=True)
    scale = ((most.float() - least.float()) / (2**bits - 1)).to(dtype)
    places = (numbers.float() - least.float()) / torch.where(scale > 0, scale, 1).float()
    return places.clamp(0, 2**bits - 1).round().to(torch.uint8), scale, least
