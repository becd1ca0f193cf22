"""Attention over rows where they lie: the compiled half of `kvbench.attention.cpu`.

Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the
weights and the weighted sum of the values, and `merge` joins those of a list (flash-decoding).
Pieces do not depend on the number of threads, so neither does what comes out. Kernels hold no state
and release the GIL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvbench.kernels.coded import GROUP
from kvbench.kernels.lists import place
from kvbench.kernels.rows import (
    BLOCK,
    add_values,
    grouped,
    lay_out,
    load_scalar,
    paired,
    scale_logits,
    score,
    weigh,
)
from kvbench.kernels.threads import claim, in_threads
from kvbench.kernels.vectors import (
    LANES,
    LINE,
    LOWEST,
    NOTHING,
    PAIR,
    exponential,
    fetch,
    first_of,
    inner,
    kernel,
    put,
    splat,
)

LIST_PIECE = 256  # entries of a selected list
DENSE_PIECE = 512


class NearRows(NamedTuple):
    """Where the tokens on the device lie, of all H KV heads of all rows of a batch.

    Attributes
    ----------
    keys, values, parameters
        addresses; see `attend_resident`.
    first
        [H], where the slots of each begin.
    ids
        [H, S], the token in each slot, ascending; [H, 0] where slot = id.
    used
        [H], slots used.
    begin, end
        [H], the first slot, and the slot after the last, that are attended.
    """

    keys: Any
    values: Any
    parameters: Any
    first: Any
    ids: Any
    used: Any
    begin: Any
    end: Any


class FarRows(NamedTuple):
    """Where the tokens on the host lie.

    Attributes
    ----------
    keys, values
        addresses of [H, slots, D].
    slot_of
        [H, slots], of each token id.
    present
        [H, slots], whether the token is there.
    attended
        whether those that are there are attended.
    """

    keys: Any
    values: Any
    slots: Any
    slot_of: Any
    present: Any
    attended: Any


class RebuiltKeys(NamedTuple):
    """Keys [H, count, D] that replace those of the first entries of each list.

    Attributes
    ----------
    keys
        their address; 0: there are none.
    near
        whether they stand for keys on the device, too; else for the host's alone, which none
        follows.
    """

    keys: Any
    count: Any
    near: Any


class ExtraRows(NamedTuple):
    """Entries beside the tokens.

    Attributes
    ----------
    keys, values
        addresses of [H, count, D].
    column
        of the logits, that the first has.
    """

    keys: Any
    values: Any
    count: Any
    column: Any


class RowKinds(NamedTuple):
    """How keys and values are stored.

    Attributes
    ----------
    key, value
        a number of their type, or how their codes are held; see `kvbench.kernels.rows`.
    keys, values
        bytes of a row, and from it to its parameters, of each.
    group_size
        bytes of the parameters of a group of keys.
    """

    key: Any
    value: Any
    keys: Any
    values: Any
    group_size: Any


def pieces_of(count: int, size: int) -> int:
    """Pieces of `size` that a list of `count` is cut into."""
    return -(-count // size)


@inner
def queries(request):  # type: ignore[no-untyped-def]
    """Queries [L, R, D] in float32; see `attend_resident`."""
    query = np.empty((request[1], request[2], request[3]), np.float32)
    numbers = query.reshape(query.size)
    for i in range(len(numbers)):
        numbers[i] = load_scalar(request[0], i, request[4])
    return query


@inner
def shares(threads, pieces, size):  # type: ignore[no-untyped-def]
    """How many threads so many pieces are worth, with `size` bytes of keys and values in all."""
    most, worth = threads
    return max(1, min(most, pieces, size // worth))


@inner
def space(results, query, pieces, out):  # type: ignore[no-untyped-def]
    """Where pieces of a call leave their results: if they are all, in memory of their own."""
    if not out:
        return results
    rows, head_dim = query.shape[1:]
    return np.empty((len(query), pieces, rows, head_dim + 2), np.float32)


class Scratch(NamedTuple):
    """What a thread works on, of one piece at a time.

    Attributes
    ----------
    query
        [R, D], as `lay_out` has it for keys.
    most, total
        [R], the largest logit so far, and the sum of the weights.
    sums
        [R, D], the weighted sum of the values.
    """

    query: Any
    most: Any
    total: Any
    sums: Any


@inner
def scratch(query):  # type: ignore[no-untyped-def]
    """A `Scratch` in lines of the cache that no other thread writes."""
    rows, shape = query.shape[1], query.shape[1:]
    return Scratch(
        np.empty(shape, np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty(shape, np.float32),
    )


@inner
def begin_piece(work, query, stored):  # type: ignore[no-untyped-def]
    """Nothing is attended yet by queries [R, D], which meet keys of this type."""
    work.most[:] = LOWEST
    work.total[:] = 0
    work.sums[:] = 0
    lay_out(query, work.query, stored)


@inner
def write_piece(result, most, total, sums, stored):  # type: ignore[no-untyped-def]
    """The results of a piece, [R, D + 2], whose sums are laid out as values of this type
    are read.
    """
    rows, head_dim = sums.shape
    pairs = paired(head_dim, stored)
    for r in range(rows):
        for first in range(0, pairs, PAIR):
            for i in range(LANES):
                result[r, first + 2 * i] = sums[r, first + i]
                result[r, first + 2 * i + 1] = sums[r, first + LANES + i]
        for j in range(pairs, head_dim):
            result[r, j] = sums[r, j]
        result[r, head_dim], result[r, head_dim + 1] = most[r], total[r]


@kernel
def attend_resident(  # type: ignore[no-untyped-def]
    threads, before, request, used, first, column, pool, stored, logits, results, out
):
    """Attention over all used slots of each KV head, in several threads.

    Parameters
    ----------
    threads
        how many at most, and bytes of keys and values that each must have.
    before
        pieces of each list that stand in `results` already.
    request
        address of the queries [L, R, D], list l a KV head of a row; L, R, D; a number of their
        type, and the scaling of the logits.
    used
        [L] int64, slots of each list that are attended.
    first
        [L] int64, where the slots of each list begin in the pool.
    column
        [L] int64, of the logits, that the first slot of each list has.
    pool
        address of the pool's keys, of its values, and of the parameters of its groups of keys; see
        `score`.
    stored
        a `RowKinds` as a tuple, as are the others below.
    logits
        [L, R, n], where they are wanted, else [0, 0, 0]; if there is `out` they become
        probabilities.
    results
        [L, P, R, D + 2], written for each piece: the weighted sum of values, the largest logit, and
        the sum of weights.
    out
        address of the output, of the queries' shape and type, if these slots are all that is
        attended; else 0.

    Returns
    -------
    value
        0: no token was lost.
    """
    query, claims = queries(request), np.zeros(1, np.int64)
    longest, total = 0, 0
    for head in range(len(used)):
        longest, total = max(longest, used[head]), total + used[head]
    pieces = -(-longest // DENSE_PIECE)
    piece_results = space(results, query, pieces, out)
    share = claims, (before, pieces), query, np.float32(request[5])
    arguments = *share, used, first, column, pool, stored, logits, piece_results
    size = total * (stored[2][0] + stored[3][0])
    in_threads(shares(threads, len(query) * pieces, size), _attend_resident, arguments)
    if out:
        join(piece_results, out, request[4], logits)
    return 0


@inner
def _attend_resident(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, used, first, column, pool, stored, logits, results
):
    """As many pieces of a layer's attention as other threads leave."""
    key, value = pool[0], pool[1]
    kinds = RowKinds(*stored)
    (key_size, key_offset), (value_size, value_offset) = kinds.keys, kinds.values
    work, block = scratch(query), np.empty((query.shape[1], BLOCK), np.float32)
    keys, values = np.empty(BLOCK, np.intp), np.empty(BLOCK, np.intp)
    groups = np.empty(BLOCK, np.intp)
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        head, piece = item // pieces, item % pieces
        begin_piece(work, query[head], kinds.key)
        end = min((piece + 1) * DENSE_PIECE, used[head])
        for start in range(piece * DENSE_PIECE, end, BLOCK):
            count = min(BLOCK, end - start)
            slot = first[head] + start
            for i in range(count):
                keys[i], values[i] = key + (slot + i) * key_size, value + (slot + i) * value_size
                if grouped(kinds.key):
                    groups[i] = pool[2] + (slot + i) // GROUP * kinds.group_size
            ahead = keys[:0], value + slot * value_size
            layout = key_offset, value_size
            score(work.query, keys, groups, layout, count, ahead, block, kinds.key)
            scale_logits(block, count, scaling)
            if logits.shape[2]:
                for r in range(len(block)):
                    for i in range(count):
                        logits[head, r, column[head] + start + i] = block[r, i]
            weigh(block, count, work.most, work.total, work.sums)
            ahead = keys[:0], key + (slot + BLOCK) * key_size
            layout = value_offset, key_size
            add_values(block, values, layout, count, ahead, work.sums, kinds.value)
        write_piece(results[head, before + piece], work.most, work.total, work.sums, kinds.value)
        item = claim(claims)


@kernel
def attend_lists(  # type: ignore[no-untyped-def]
    threads, before, request, index, bias, near, far, rebuilt, extra, stored, logits, results, out
):
    """Attention over lists of tokens, in several threads.

    Tokens are attended where they are stored as `stored` says; those that are held elsewhere are
    for another call.

    Parameters
    ----------
    threads, before, request
        as of `attend_resident`; a row of the batch has L / B lists, one for each KV head or more.
        Pieces are of `LIST_PIECE` entries, and one of extra entries, where there are any.
    index
        [B, 1 or L / B, M] int64 token ids, -1 = none.
    bias
        [L, R, M + E], added to the logits, or [0, 0, 0].
    near, far, rebuilt, extra, stored
        a `NearRows`, `FarRows`, `RebuiltKeys` and `ExtraRows` with E entries, and the `RowKinds` of
        all these rows.
    logits
        [L, R, M + E], where they are wanted, else [0, 0, 0]; an entry that is absent is not
        written.
    results, out
        as of `attend_resident`.

    Returns
    -------
    value
        Pieces that named a token that is in neither tier.
    """
    query, claims = queries(request), np.zeros(2, np.int64)
    pieces = -(-index.shape[2] // LIST_PIECE) + (extra[2] > 0)
    piece_results = space(results, query, pieces, out)
    share = claims, (before, pieces), query, np.float32(request[5])
    arguments = *share, index, bias, near, far, rebuilt, extra, stored, logits, piece_results
    size = len(query) * index.shape[2] * (stored[2][0] + stored[3][0])
    in_threads(shares(threads, len(query) * pieces, size), _attend_lists, arguments)
    if out:
        join(piece_results, out, request[4], logits)
    return claims[1]


@inner
def _attend_lists(  # type: ignore[no-untyped-def]
    _, claims, span, query, scaling, index, bias, near, far, rebuilt, extra, stored, logits, results
):
    """As many pieces of a layer's lists as other threads leave."""
    kinds, extra_rows = RowKinds(*stored), ExtraRows(*extra)
    (key_size, key_offset), (value_size, value_offset) = kinds.keys, kinds.values
    where = NearRows(*near), FarRows(*far), RebuiltKeys(*rebuilt)
    room = max(LIST_PIECE, extra_rows.count)
    keys, values = np.empty(room, np.intp), np.empty(room, np.intp)
    groups, rank = np.empty(room, np.intp), np.empty(room, np.intp)
    work, block = scratch(query), np.empty((query.shape[1], BLOCK), np.float32)
    lists, heads = len(query) // len(index), len(where[0].used) // len(index)
    before, pieces = span
    item = claim(claims)
    while item < len(query) * pieces:
        at, piece = item // pieces, item % pieces
        row = at // lists
        head = row * heads + at % lists * heads // lists
        begin_piece(work, query[at], kinds.key)
        if extra_rows.count and piece == pieces - 1:
            entries = _find_extra(extra_rows, head, kinds, keys, values, rank)
        else:
            tokens = index[row, min(at % lists, index.shape[1] - 1)]
            first = piece * LIST_PIECE
            entries = _find(tokens, first, head, where, kinds, keys, values, groups, rank)
            if entries < 0:
                claim(claims[1:])
                entries = 0
        for start in range(0, entries, BLOCK):
            rows = min(BLOCK, entries - start)
            places, layout = rank[start : start + rows], (key_offset, value_size)
            ahead = values[start : start + rows], 0
            score(work.query, keys[start:], groups[start:], layout, rows, ahead, block, kinds.key)
            scale_logits(block, rows, scaling)
            add_bias(block, places, at, bias, logits)
            weigh(block, rows, work.most, work.total, work.sums)
            layout, ahead = (value_offset, key_size), (keys[start + rows : entries], 0)
            add_values(block, values[start:], layout, rows, ahead, work.sums, kinds.value)
        write_piece(results[at, before + piece], work.most, work.total, work.sums, kinds.value)
        item = claim(claims)


@inner
def add_bias(block, places, at, bias, logits):  # type: ignore[no-untyped-def]
    """Add to logits [R, BLOCK] of list `at` what stands at these places of it, and write them
    there; see `attend_lists`.
    """
    for r in range(len(block)):
        if bias.shape[2]:
            for i in range(len(places)):
                block[r, i] += bias[at, r, places[i]]
        if logits.shape[2]:
            for i in range(len(places)):
                logits[at, r, places[i]] = block[r, i]


@inner
def _find_extra(extra, head, kinds, keys, values, rank):  # type: ignore[no-untyped-def]
    """Where the extra entries of a KV head lie, as `_find` has it; how many there are."""
    for i in range(extra.count):
        at = head * extra.count + i
        keys[i], values[i] = extra.keys + at * kinds.keys[0], extra.values + at * kinds.values[0]
        rank[i] = extra.column + i
    return extra.count


@inner
def _find(tokens, first, head, where, kinds, keys, values, groups, rank):  # type: ignore[no-untyped-def]
    """Where the tokens of a piece lie, from the `first` of a list on: addresses of their keys,
    values and groups' parameters, and the place of each in the list.

    Returns
    -------
    value
        How many of them are to be attended, -1 where one is in neither tier, or has no key.
    """
    near, far, rebuilt = where
    key_size, value_size = kinds.keys[0], kinds.values[0]
    used = near.used[head]
    here = near.ids[head, :used]
    count = guess = 0
    for i in range(first, min(first + LIST_PIECE, len(tokens))):
        token = tokens[i]
        if token < 0:
            continue
        slot = -1
        if near.ids.shape[1]:
            # lists often name neighbours, one after the other
            if guess >= len(here) or here[guess] != token:
                guess = place(here, token)
            if guess < len(here) and here[guess] == token:
                slot = guess
                guess += 1
        elif token < used:
            slot = token
        is_near = slot >= 0
        if is_near:
            if not near.begin[head] <= slot < near.end[head]:
                continue
            at = near.first[head] + slot
            keys[count], values[count] = near.keys + at * key_size, near.values + at * value_size
            if grouped(kinds.key):
                groups[count] = near.parameters + at // GROUP * kinds.group_size
        elif token < far.slots and far.present[head, token]:
            if not far.attended:
                continue
            at = head * far.slots + far.slot_of[head, token]
            keys[count], values[count] = far.keys + at * key_size, far.values + at * value_size
            if rebuilt.keys and i >= rebuilt.count:
                return -1
        else:
            return -1
        if rebuilt.keys and (rebuilt.near or not is_near):
            keys[count] = rebuilt.keys + (head * rebuilt.count + i) * key_size
        if count < BLOCK:
            for line in range(0, key_size, LINE):
                fetch(keys[count] + line)
        rank[count] = i
        count += 1
    return count


@kernel
def merge(results, out, stored, logits):  # type: ignore[no-untyped-def]
    """See `join`."""
    join(results, out, stored, logits)


@inner
def join(results, out, stored, logits):  # type: ignore[no-untyped-def]
    """Join the pieces of each list.

    Parameters
    ----------
    results
        as of `attend_resident`.
    out
        address of [L, R, D], in the type of `stored`.
    logits
        [L, R, n], which become probabilities.
    """
    pieces, rows = results.shape[1:3]
    head_dim = results.shape[3] - 2
    sum = np.empty(head_dim, np.float32)
    for head in range(len(results)):
        for r in range(rows):
            largest, whole = LOWEST, NOTHING
            for piece in range(pieces):
                largest = max(largest, results[head, piece, r, head_dim])
            sum[:] = 0
            for piece in range(pieces):
                part = results[head, piece, r]
                weight = first_of(exponential(splat(part[head_dim] - largest)))
                whole += weight * part[head_dim + 1]
                for j in range(head_dim):
                    sum[j] += weight * part[j]
            for j in range(head_dim):
                put(out, (head * rows + r) * head_dim + j, sum[j] / whole, stored)
            for i in range(logits.shape[2]):
                weight = first_of(exponential(splat(logits[head, r, i] - largest)))
                logits[head, r, i] = weight / whole
