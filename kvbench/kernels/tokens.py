"""A new token's keys and values: whether they are finite, and the slots they go into.

In torch each of these takes some ten operations on a few numbers, in every layer of every step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from kvbench.kernels.library import library, why_missing


class Slots(ctypes.Structure):
    """Where the next token of each of H KV heads goes.

    Attributes
    ----------
    keys, values
        addresses of those in all slots.
    key_size, value_size
        bytes of a key and of a value.
    first
        [H] int64, where the slots of each KV head begin.
    ids
        [H, slots] int64, the tokens in them; slots = 0 where slot = id.
    slots, heads, per_row
        the width of `ids`, H, and KV heads of a row of the batch.
    """

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_size", c_int64),
        ("value_size", c_int64),
        ("first", c_void_p),
        ("ids", c_void_p),
        ("slots", c_int64),
        ("heads", c_int64),
        ("per_row", c_int64),
    ]

    def put(
        self, key: torch.Tensor, value: torch.Tensor, used: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Put the next token of each KV head into the slot after the used ones, which is used from
        now on.

        Parameters
        ----------
        key, value
            of H KV heads, of all rows of the batch, as they are held.
        used
            [B, Hkv] int64, slots that each uses.
        tokens
            [B] int64, ids of the new ones.
        """
        parts = (part.data_ptr() for part in (key, value, used, tokens))
        library().put(ctypes.byref(self), *parts)


def finite(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether no query and no key, both contiguous and of one dtype, has NaN or inf."""
    numbers = query.data_ptr(), query.numel(), key.data_ptr(), key.numel()
    return bool(library().finite(*numbers, query.dtype == torch.bfloat16))


def put_in_place(
    rows: torch.Tensor,
    pool: torch.Tensor,
    slot_of: torch.Tensor,
    present: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Put rows, one of each KV head, into the slots of their tokens, which are there from now on.

    Parameters
    ----------
    rows
        of each KV head, contiguous.
    pool
        [B, Hkv, S, width], all slots.
    slot_of, present
        [B, Hkv, S], the slot of each token id, and whether it is there.
    tokens
        [B] int64, the ids.
    """
    heads = slot_of.shape[1]
    if why_missing() is not None:
        at = tokens.view(-1, 1, 1).expand(-1, heads, 1)
        slot = slot_of.gather(2, at)[..., None].expand(-1, -1, -1, pool.shape[3])
        pool.scatter_(2, slot, rows.view(len(tokens), heads, 1, pool.shape[3]))
        present.scatter_(2, at, True)
        return
    where = (part.data_ptr() for part in (slot_of, present, tokens))
    size = pool.shape[3] * pool.itemsize
    sizes = slot_of.shape[0] * heads, heads, slot_of.shape[2]
    library().put_in_place(rows.data_ptr(), pool.data_ptr(), size, *where, *sizes)
