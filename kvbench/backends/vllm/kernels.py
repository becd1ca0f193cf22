"""Attention over a serving engine's blocks, and copies out of them: `kvbench/kernels/cpp/blocks.h`,
for `paged.py`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from kvbench.attention.cpu import Part, kinds_of
from kvbench.kernels.attend import LIST_PIECE, Kinds, Request, pieces_of
from kvbench.kernels.library import library
from kvbench.memory.codecs import Codecs


class Blocks(ctypes.Structure):
    """Blocks of all requests, and which of them each row of a batch has.

    Parameters
    ----------
    tables
        [B, blocks of a row] int64.
    cache
        [blocks, Hkv, block size, 2 D]: a block's keys and its values, in words of `pair` numbers.
    pair
        1, or 2: keys by words of neighbouring dimensions, in tiles of 16 tokens, and values by
        words of neighbouring tokens, in tiles of 16 dimensions.
    """

    _fields_ = [
        ("tables", c_void_p),
        ("table_length", c_int64),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("heads", "block_words", "pair", "number_size", "head_dim")),
    ]

    def __init__(self, tables: torch.Tensor, cache: torch.Tensor, pair: int) -> None:
        head_dim = cache.shape[3] // 2
        sizes = cache.shape[1], cache.shape[2] * head_dim // pair, pair, cache.itemsize, head_dim
        super().__init__(tables.data_ptr(), tables.shape[1], cache.data_ptr(), *sizes)
        self.alive = tables, cache


class BlockLists(ctypes.Structure):
    """Lists of tokens that lie in blocks, as `kvbench.kernels.attend.Lists` has them."""

    _fields_ = [
        ("index", c_void_p),
        *((name, c_int64) for name in ("batch", "lists", "count")),
        ("bias", c_void_p),
        ("bias_columns", c_int64),
        ("rebuilt", c_void_p),
        ("blocks", Blocks),
        ("kinds", Kinds),
    ]

    def attend(self, request: Request) -> int:
        """Attention over lists of tokens that lie in blocks, in several threads; 0: no token was
        lost.
        """
        return library().attend_blocks(ctypes.byref(request), ctypes.byref(self))


def blocks_part(
    index: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    rebuilt: torch.Tensor | None,
    dtype: torch.dtype,
) -> Part:
    """The tokens of lists [B, Hs, M], with keys that replace all of theirs."""
    rows = BlockLists(
        index.data_ptr(),
        len(index),
        index.shape[1],
        index.shape[2],
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[2],
        0 if rebuilt is None else rebuilt.data_ptr(),
        blocks,
        kinds_of(Codecs.native(blocks.head_dim, dtype)),
    )
    pieces = pieces_of(index.shape[2], LIST_PIECE)
    return Part(pieces, rows, (index, bias, blocks, rebuilt))


def gather(
    threads: int, blocks: Blocks, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Copy keys and values [H, M, D] of token ids [H, M] of one row out of blocks, in so many
    threads; -1 is read as 0.
    """
    parts = keys.data_ptr(), values.data_ptr()
    call = ctypes.byref(blocks), ids.data_ptr(), ids.shape[1]
    library().gather(threads, *call, *parts)
