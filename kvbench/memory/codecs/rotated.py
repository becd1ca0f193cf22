"""Rows that are turned before they are coded, so that no channel stands out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvbench.kernels.coded import Coded
from kvbench.memory.codecs.codec import Codec

FEW = 2**14  # numbers that one thread turns before two have met


@dataclass(frozen=True)
class Rotated(Codec):
    """What another codec holds, of rows that are turned.

    Parameters
    ----------
    inner
        that codec.
    turn
        gives the rotation [D, D] float32, orthonormal, of D.
    """

    inner: Codec
    turn: Callable[[int], torch.Tensor]

    @property
    def width(self) -> int:
        """That of `inner`."""
        return self.inner.width

    @property
    def nbytes(self) -> int:
        """That of `inner`."""
        return self.inner.nbytes

    @property
    def row(self) -> Coded | None:
        """That of `inner`."""
        return self.inner.row

    @property
    def rotation(self) -> torch.Tensor:
        """That of `turn`."""
        return self.turn(self.head_dim)

    def encode(self, rows: torch.Tensor) -> Any:
        """`inner`'s, of the turned rows."""
        return self.inner.encode(turned(rows, self.rotation))

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """`inner`'s, turned back."""
        return turned(self.inner.numbers(stored_rows, *parameters), self.rotation.T)


def turned(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] times [D, D], in float32."""
    rows = rows.float()
    if rows.is_cpu and rows.numel() <= FEW:
        return torch.from_numpy(rows.numpy() @ rotation.numpy())
    return rows @ rotation.to(rows.device)


@cache
def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), a power of two; it is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return matrix / size**0.5


@cache
def haar(size: int) -> torch.Tensor:
    """A rotation drawn once, uniformly (QR of Gaussian numbers, its signs made unique)."""
    drawn = torch.randn(
        size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64
    )
    q, r = torch.linalg.qr(drawn)
    return (q * r.diagonal().sign()).float()
