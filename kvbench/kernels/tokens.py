"""A new token's keys and values: whether they are finite, and the slots they go into.

In torch each of these takes some ten operations on a few numbers, in every layer of every step.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench.kernels.rows import load_scalar
from kvbench.kernels.vectors import inner, kernel, pointer


@intrinsic
def _copy(_context, to, source, size):  # type: ignore[no-untyped-def]
    """Copy so many bytes from one address to another."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte = cgutils.int8_t
        to, source = (pointer(builder, address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@inner
def _finite(address, count, stored):  # type: ignore[no-untyped-def]
    wrong = 0
    for i in range(count):
        x = load_scalar(address, i, stored)
        wrong |= x - x != 0  # of NaN and inf it is NaN
    return wrong == 0


@kernel
def finite(query, key, stored):  # type: ignore[no-untyped-def]
    """Whether no query and no key has NaN or inf: their address and how many numbers these are; of
    which type.
    """
    return _finite(*query, stored) and _finite(*key, stored)


@kernel
def put(key, value, room, used, tokens):  # type: ignore[no-untyped-def]
    """Put the next token of each KV head into the slot after the used ones, which is used from now
    on.

    Parameters
    ----------
    key, value
        addresses of those of H KV heads, of all rows of the batch, as they are held.
    room
        addresses of the keys and values in all slots, bytes of a key and of a value; [B, Hkv] where
        the slots of each KV head begin, and [B, Hkv, S] ids of the tokens in them, or [B, Hkv, 0]
        where slot = id.
    used
        [B, Hkv] int64, slots that each uses.
    tokens
        [B], ids of the new ones.
    """
    keys, values = room[0], room[1]
    key_size, value_size = room[2], room[3]
    first, ids = room[4], room[5]
    batch, heads = used.shape
    for row in range(batch):
        for head in range(heads):
            at, slot = row * heads + head, first[row, head] + used[row, head]
            _copy(keys + slot * key_size, key + at * key_size, key_size)
            _copy(values + slot * value_size, value + at * value_size, value_size)
            if ids.shape[2]:
                ids[row, head, used[row, head]] = tokens[row]
            used[row, head] += 1


@kernel
def put_in_place(rows, pool, size, slot_of, present, tokens):  # type: ignore[no-untyped-def]
    """Put rows of so many bytes, one of each KV head, into the slots of their tokens, which are
    there from now on.

    Parameters
    ----------
    rows, pool
        their address, and that of a block with S slots for each KV head.
    slot_of, present
        [B, Hkv, S], the slot of each token id, and whether it is there.
    tokens
        [B], the ids.
    """
    heads, slots = slot_of.shape[1:]
    for row in range(len(slot_of)):
        for head in range(heads):
            at = row * heads + head
            slot = at * slots + slot_of[row, head, tokens[row]]
            _copy(pool + slot * size, rows + at * size, size)
            present[row, head, tokens[row]] = True
