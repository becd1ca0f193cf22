"""What a codec is: pure functions between rows [..., D] and the rows of bytes that hold them.

Who holds the bytes knows their width alone; only who writes a token and who attends it asks a
codec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from kvbench.kernels.coded import Coded


@dataclass(frozen=True)
class Codec:
    """Rows of one kind.

    Parameters
    ----------
    head_dim
        D.
    dtype
        of decoded rows, the model's.
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

    @property
    def row(self) -> Coded | None:
        """What a held row is to the CPU's kernels, which read it in place; None: nothing that they
        know.
        """
        raise NotImplementedError

    @property
    def rotation(self) -> torch.Tensor | None:
        """[D, D] float32, orthonormal: `row` holds x @ rotation; None: x."""
        return None

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., D], of any floating dtype, as they are held, [..., width]."""
        raise NotImplementedError

    def numbers(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """Held rows [..., width] as [..., D] in float32; parameters: see `kivi.Tokens`."""
        raise NotImplementedError

    def decode(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """As `numbers`, in the model's dtype."""
        return self.numbers(stored_rows, *parameters).to(self.dtype)


class Native(Codec):
    """Rows as they are."""

    row = None

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

    def decode(self, stored_rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The same."""
        return stored_rows


class Within(Codec):
    """A value that is the first D numbers of its key (latent attention): nothing of it is held."""

    row, width = None, 0

    @property
    def stored(self) -> torch.dtype:
        """The model's dtype."""
        return self.dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Nothing, [..., 0]."""
        return rows[..., :0]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., D] below 2**bits in bytes [..., D * bits / 8], the first in the low bits of the
    first.
    """
    bytes_ = bits // math.gcd(bits, 8)  # that hold whole codes
    count = 8 * bytes_ // bits
    word = torch.uint8 if bytes_ == 1 else torch.int32
    places = bits * torch.arange(count, dtype=word, device=codes.device)
    words = (codes.to(word).unflatten(-1, (-1, count)) << places).sum(dim=-1, dtype=word)
    if bytes_ == 1:
        return words
    shifts = 8 * torch.arange(bytes_, dtype=word, device=codes.device)
    return (words.unsqueeze(-1) >> shifts & 255).to(torch.uint8).flatten(-2)


def looked_up(code_bytes: torch.Tensor, bits: int, numbers: tuple[float, ...]) -> torch.Tensor:
    """What codes in bytes [..., D * bits / 8] stand for, [..., D] in float32: several of them by
    one look.
    """
    index = code_bytes.int()
    if bits == 3:
        a, b, c = index.unflatten(-1, (-1, 3)).unbind(-1)
        word = a | b << 8 | c << 16
        index = torch.stack([word & 4095, word >> 12], dim=-1).flatten(-2)
    return torch.nn.functional.embedding(
        index, _entries(bits, numbers).to(code_bytes.device)
    ).flatten(-2)


@cache
def _entries(bits: int, numbers: tuple[float, ...]) -> torch.Tensor:
    """What all codes in a byte stand for, by its value, [256, n]; of 3 bits in 12, [4096, 4]."""
    wide = 12 if bits == 3 else 8
    codes = torch.arange(2**wide)[:, None] >> bits * torch.arange(wide // bits) & 2**bits - 1
    return torch.tensor(numbers, dtype=torch.float32)[codes]


def steps(bits: int) -> tuple[float, ...]:
    """What codes stand for that are multiples of a step."""
    return tuple(map(float, range(2**bits)))


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [..., n] as their bytes, the lowest first."""
    if not numbers.numel():  # strides of an empty tensor are any, and torch asks for 1
        return numbers.new_zeros(
            *numbers.shape[:-1], numbers.shape[-1] * numbers.itemsize, dtype=torch.uint8
        )
    return numbers.contiguous().view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """As `Coded` has it."""
    return str(dtype).removeprefix("torch.")


def as_numbers(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [..., n] as numbers of a dtype, in float32."""
    if not raw.numel():
        return raw.new_zeros(*raw.shape[:-1], raw.shape[-1] // dtype.itemsize, dtype=torch.float32)
    return raw.contiguous().view(dtype).float()
