"""Attention over rows where they lie: what `cpp/attend.h` computes, and the structures it takes.

Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the
weights and the weighted sum of the values, which are joined (flash-decoding). Pieces do not depend
on the number of threads, so neither does the result. Kernels hold no state and release the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache

from kvbench.kernels.library import library

LIST_PIECE = 256  # entries of a selected list
DENSE_PIECE = 512


class Kind(ctypes.Structure):
    """How keys, or values, are stored.

    Attributes
    ----------
    format
        see `format_number`.
    size
        bytes of a row.
    offset
        bytes from a row to its parameters.
    table
        address of 16 float32: what codes stand for, again and again; 0 of 8 bits.
    """

    _fields_ = [("format", c_int64), ("size", c_int64), ("offset", c_int64), ("table", c_void_p)]


class Kinds(ctypes.Structure):
    """How keys and values are stored, and bytes of the parameters of a group of keys."""

    _fields_ = [("key", Kind), ("value", Kind), ("group_size", c_int64)]


class Request(ctypes.Structure):
    """One call.

    Attributes
    ----------
    threads
        how many at most.
    worth
        bytes of keys and values that each must have.
    query
        address of the queries [L, R, D], list l a KV head of a row.
    lists, rows, head_dim
        L, R, D.
    is_bfloat16
        type of the queries and of the output; else float32.
    scaling, softcap
        of the logits, see `kvbench.method.capped`; 0: no cap.
    logits
        address of [L, R, columns] float32, where they are wanted, else 0; if there is `out` they
        become probabilities.
    columns
        of logits.
    before
        pieces of each list that stand in `results` already.
    pieces
        P.
    results
        address of [L, P, R, D + 2] float32, written for each piece: the weighted sum of values, the
        largest logit, and the sum of weights.
    out
        address of the output, of the queries' shape and type, if this call is all that is attended;
        else 0.
    """

    _fields_ = [
        ("threads", c_int64),
        ("worth", c_int64),
        ("query", c_void_p),
        ("lists", c_int64),
        ("rows", c_int64),
        ("head_dim", c_int64),
        ("is_bfloat16", c_int64),
        ("scaling", c_double),
        ("softcap", c_double),
        ("logits", c_void_p),
        ("columns", c_int64),
        ("before", c_int64),
        ("pieces", c_int64),
        ("results", c_void_p),
        ("out", c_void_p),
    ]

    def join(self) -> None:
        """Join the pieces of each list, `results`, to the output; logits become probabilities."""
        library().join(ctypes.byref(self))


class ResidentRows(ctypes.Structure):
    """Slots that are attended.

    Attributes
    ----------
    used
        address of [L] int64, slots of each list.
    first
        [L] int64, where the slots of each list begin in the pool.
    column
        [L] int64, of the logits, that the first slot of each list has.
    keys, values, parameters
        addresses of the pool's keys, of its values, and of the parameters of its groups of keys.
    kinds
        of all these rows.
    """

    _fields_ = [
        *((name, c_void_p) for name in ("used", "first", "column", "keys", "values", "parameters")),
        ("kinds", Kinds),
    ]

    def attend(self, request: Request) -> int:
        """Attention over all used slots of each KV head, in several threads; 0: no token was
        lost.
        """
        return library().attend_resident(ctypes.byref(request), ctypes.byref(self))


class NearRows(ctypes.Structure):
    """Where the tokens on the device lie, of all H KV heads of all rows of a batch.

    Attributes
    ----------
    keys, values, parameters
        as of `ResidentRows`.
    ids
        [H, slots] int64, the token in each slot, ascending; slots = 0 where slot = id.
    first
        [H] int64, where the slots of each begin.
    used
        [H] int64, slots used.
    begin, end
        [H] int64, the first slot, and the slot after the last, that are attended.
    heads, slots
        H, and the width of `ids`.
    """

    _names = "keys", "values", "parameters", "ids", "first", "used", "begin", "end"
    _fields_ = [*((name, c_void_p) for name in _names), ("heads", c_int64), ("slots", c_int64)]


class FarRows(ctypes.Structure):
    """Where the tokens on the host lie; all 0: there are none.

    Attributes
    ----------
    keys, values
        addresses of [H, slots, D].
    slot_of
        [H, slots] int64, of each token id.
    present
        [H, slots] bool, whether the token is there.
    attended
        whether those that are there are attended.
    """

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slot_of", c_void_p),
        ("present", c_void_p),
        ("slots", c_int64),
        ("attended", c_int64),
    ]


class Lists(ctypes.Structure):
    """Lists of tokens; a row of the batch has L / B, one for each KV head or more.

    Tokens are attended where they are stored as `kinds` says; those that are held elsewhere are for
    another call.

    Attributes
    ----------
    index
        address of [B, lists, count] int64 token ids, -1 = none; lists is 1 or L / B.
    batch, lists, count
        its shape.
    bias, bias_columns
        [L, R, columns] float32, added to the logits, or 0.
    near, far
        where tokens lie.
    rebuilt
        keys [H, rebuilt_count, D] that replace those of the first entries of each list, or 0.
    rebuilt_near
        whether they stand for keys on the device, too; else for the host's alone, which none
        follows.
    extra_keys, extra_values
        entries [H, extra_count, D] beside the tokens, a piece of their own.
    extra_column
        of the logits and the bias, that the first has.
    kinds
        of all these rows.
    """

    _fields_ = [
        ("index", c_void_p),
        ("batch", c_int64),
        ("lists", c_int64),
        ("count", c_int64),
        ("bias", c_void_p),
        ("bias_columns", c_int64),
        ("near", NearRows),
        ("far", FarRows),
        ("rebuilt", c_void_p),
        ("rebuilt_count", c_int64),
        ("rebuilt_near", c_int64),
        ("extra_keys", c_void_p),
        ("extra_values", c_void_p),
        ("extra_count", c_int64),
        ("extra_column", c_int64),
        ("kinds", Kinds),
    ]

    def attend(self, request: Request) -> int:
        """Attention over lists of tokens, in several threads; pieces that named a token that is in
        neither tier.
        """
        return library().attend_lists(ctypes.byref(request), ctypes.byref(self))


def pieces_of(count: int, size: int) -> int:
    """Pieces of `size` that a list of `count` is cut into."""
    return -(-count // size)


@cache
def format_number(name: str, of_values: bool) -> int | None:
    """The number of a format of keys or of values: `Coded.name`, or a dtype; None: no kernel reads
    it.
    """
    text = ctypes.create_string_buffer(name.encode())
    number = library().find_format(ctypes.addressof(text), of_values)
    return None if number < 0 else number
