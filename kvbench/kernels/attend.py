"""Attention over rows where they lie: the compiled half of `kvbench.attention.cpu`.

Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the
weights and the weighted sum of the values, and `merge` joins those of a list (flash-decoding).
Pieces do not depend on the number of threads, so neither does what comes out. Kernels hold no state
and release the GIL.
"""

from __future__ import annotations

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


def pieces_of(count: int, size: int) -> int:
    """Pieces of `size` that a list of `count` is cut into."""
    return -(-count // size)


@inner
def queries(request):  # type: ignore[no-untyped-def]
    """Queries [L, R, D] in float32; see `attend_resident`."""
    address, lists, rows, head_dim, number, _ = request
    query = np.empty((lists, rows, head_dim), np.float32)
    for head in range(lists):
        for r in range(rows):
            for j in range(head_dim):
                query[head, r, j] = load_scalar(address, (head * rows + r) * head_dim + j, number)
    return query


@inner
def shares(threads, pieces, size):  # type: ignore[no-untyped-def]
    """How many threads so many pieces are worth, with `size` bytes of keys and values in all."""
    most, worth = threads
    return max(1, min(most, pieces, size // worth))


@inner
def space(results, query, pieces, out):  # type: ignore[no-untyped-def]
    """Where pieces of a call leave their results: if they are all, in memory of their own."""
    lists, rows, head_dim = query.shape
    return np.empty((lists, pieces, rows, head_dim + 2), np.float32) if out else results


@inner
def scratch(query):  # type: ignore[no-untyped-def]
    """Queries and results of a piece, while it is at work: in lines of the cache that no other
    thread writes.
    """
    rows, shape = query.shape[1], query.shape[1:]
    return (
        np.empty(shape, np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty(shape, np.float32),
    )


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
        how keys, and how values are stored, see there; bytes of a row and to its parameters, of
        each.
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
    query, claims, longest, total = queries(request), np.zeros(1, np.int64), 0, 0
    for head in range(len(used)):
        longest, total = max(longest, used[head]), total + used[head]
    pieces = -(-longest // DENSE_PIECE)
    piece_results = space(results, query, pieces, out)
    arguments = (
        claims,
        (before, pieces),
        query,
        np.float32(request[5]),
        used,
        first,
        column,
        pool,
        stored,
        logits,
        piece_results,
    )
    work = shares(threads, len(query) * pieces, total * (stored[2][0] + stored[3][0]))
    in_threads(work, _attend_resident, arguments)
    if out:
        join(piece_results, out, request[4], logits)
    return 0


@inner
def _attend_resident(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, used, first, column, pool, stored, logits, results
):
    """As many pieces of a layer's attention as other threads leave."""
    key, value, parameters = pool
    key_kind, value_kind, (key_size, key_offset), (value_size, value_offset), group_size = stored
    block = np.empty((query.shape[1], BLOCK), np.float32)
    keys, values, groups = (
        np.empty(BLOCK, np.intp),
        np.empty(BLOCK, np.intp),
        np.empty(BLOCK, np.intp),
    )
    laid_query, most, total, sums = scratch(query)
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        head, piece = item // pieces, item % pieces
        most[:], total[:], sums[:] = LOWEST, 0, 0
        lay_out(query[head], laid_query, key_kind)
        end = min((piece + 1) * DENSE_PIECE, used[head])
        for start in range(piece * DENSE_PIECE, end, BLOCK):
            count = min(BLOCK, end - start)
            slot = first[head] + start
            for i in range(count):
                keys[i], values[i] = key + (slot + i) * key_size, value + (slot + i) * value_size
                if grouped(key_kind):
                    groups[i] = parameters + (slot + i) // GROUP * group_size
            ahead = keys[:0], value + slot * value_size
            score(laid_query, keys, groups, (key_offset, value_size), count, ahead, block, key_kind)
            scale_logits(block, count, scaling)
            if logits.shape[2]:
                for r in range(len(block)):
                    for i in range(count):
                        logits[head, r, column[head] + start + i] = block[r, i]
            weigh(block, count, most, total, sums)
            ahead = keys[:0], key + (slot + BLOCK) * key_size
            add_values(block, values, (value_offset, key_size), count, ahead, sums, value_kind)
        write_piece(results[head, before + piece], most, total, sums, value_kind)
        item = claim(claims)


@kernel
def attend_lists(  # type: ignore[no-untyped-def]
    threads,
    before,
    request,
    index,
    bias,
    device,
    host,
    rebuilt,
    extra,
    stored,
    logits,
    results,
    out,
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
    device
        addresses of the keys, values and parameters of all H KV heads of all rows (see
        `attend_resident`), where those of each begin [H], the ids in their slots [H, S], or [H, 0]
        where slot = id, [H] slots used, and [H] the first slot and the slot after the last that are
        attended.
    host
        addresses of the keys and values [H, S', D], S', the slots of the ids [H, S'], whether a
        token is there [H, S'], and whether those that are there are attended.
    rebuilt
        address of keys [H, K, D] that replace those of each list's first K entries, or 0; K; and
        whether of tokens on the device, too, as K = M, or of the host's alone, which none follows.
    extra
        addresses of the keys and values [H, E, D] of extra entries, E, and which of the logits is
        their first.
    stored
        as of `attend_resident`, of all these rows.
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
    arguments = *share, index, bias, device, host, rebuilt, extra, stored, logits, piece_results
    size = len(query) * index.shape[2] * (stored[2][0] + stored[3][0])
    in_threads(shares(threads, len(query) * pieces, size), _attend_lists, arguments)
    if out:
        join(piece_results, out, request[4], logits)
    return claims[1]


@inner
def _attend_lists(  # type: ignore[no-untyped-def]
    _,
    claims,
    pieces,
    query,
    scaling,
    index,
    bias,
    device,
    host,
    rebuilt,
    extra,
    stored,
    logits,
    results,
):
    """As many pieces of a layer's lists as other threads leave."""
    (rebuilt_key, rebuilt_count, rebuilt_near), (extra_key, extra_value, extras, column) = (
        rebuilt,
        extra,
    )
    key_kind, value_kind, (key_size, key_offset), (value_size, value_offset), group_size = stored
    room = max(LIST_PIECE, extras)
    keys, values, rank = np.empty(room, np.intp), np.empty(room, np.intp), np.empty(room, np.intp)
    groups = np.empty(room, np.intp)
    laid_query, most, total, sums = scratch(query)
    block = np.empty((query.shape[1], BLOCK), np.float32)
    lists, heads = len(query) // len(index), len(device[5]) // len(index)
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        at, piece = item // pieces, item % pieces
        row = at // lists
        head = row * heads + at % lists * heads // lists
        most[:], total[:], sums[:] = LOWEST, 0, 0
        lay_out(query[at], laid_query, key_kind)
        if extras and piece == pieces - 1:
            entries = extras
            for i in range(extras):
                place = head * extras + i
                keys[i], values[i], rank[i] = (
                    extra_key + place * key_size,
                    extra_value + place * value_size,
                    column + i,
                )
        else:
            start = piece * LIST_PIECE
            tokens = index[row, min(at % lists, index.shape[1] - 1), start : start + LIST_PIECE]
            rebuilt = (
                (
                    rebuilt_key + (head * rebuilt_count + start) * key_size
                    if rebuilt_key
                    else rebuilt_key
                ),
                rebuilt_count - start,
                rebuilt_near,
            )
            entries = _find(tokens, head, device, host, rebuilt, stored, keys, values, groups, rank)
            if entries < 0:
                claim(claims[1:])
                entries = 0
            for i in range(entries):
                rank[i] += start
        for start in range(0, entries, BLOCK):
            rows = min(BLOCK, entries - start)
            ahead = values[start : start + rows], 0
            score(
                laid_query,
                keys[start:],
                groups[start:],
                (key_offset, value_size),
                rows,
                ahead,
                block,
                key_kind,
            )
            scale_logits(block, rows, scaling)
            for r in range(query.shape[1]):
                if bias.shape[2]:
                    for i in range(rows):
                        block[r, i] += bias[at, r, rank[start + i]]
                if logits.shape[2]:
                    for i in range(rows):
                        logits[at, r, rank[start + i]] = block[r, i]
            weigh(block, rows, most, total, sums)
            ahead = keys[start + rows : entries], 0
            add_values(
                block, values[start:], (value_offset, key_size), rows, ahead, sums, value_kind
            )
        write_piece(results[at, before + piece], most, total, sums, value_kind)
        item = claim(claims)


@inner
def _find(tokens, head, device, host, rebuilt, stored, keys, values, groups, rank):  # type: ignore[no-untyped-def]
    """Where tokens lie: addresses of their keys, values and groups' parameters, and the place of
    each in the list.

    Returns
    -------
    value
        How many of them are to be attended, -1 where one is in neither tier, or has no key.
    """
    near_key, near_value, parameters, first, ids, used, begin, end = device
    (
        (far_key, far_value, far_slots, slot_of, present, far_too),
        (rebuilt_key, rebuilt_count, rebuilt_near),
    ) = (
        host,
        rebuilt,
    )
    key_kind, _, (key_size, _), (value_size, _), group_size = stored
    here = ids[head, : used[head]]
    count, guess = 0, 0
    for i in range(len(tokens)):
        token = tokens[i]
        if token < 0:
            continue
        slot = -1
        if ids.shape[1]:
            # lists often name neighbours, one after the other
            if guess >= len(here) or here[guess] != token:
                guess = place(here, token)
            if guess < len(here) and here[guess] == token:
                slot = guess
                guess += 1
        elif token < used[head]:
            slot = token
        if slot >= 0:
            if not begin[head] <= slot < end[head]:
                continue
            at = first[head] + slot
            keys[count], values[count] = near_key + at * key_size, near_value + at * value_size
            if rebuilt_key and rebuilt_near:
                keys[count] = rebuilt_key + i * key_size
            if grouped(key_kind):
                groups[count] = parameters + at // GROUP * group_size
        elif token < far_slots and present[head, token]:
            if not far_too:
                continue
            at = head * far_slots + slot_of[head, token]
            keys[count], values[count] = far_key + at * key_size, far_value + at * value_size
            if rebuilt_key and i >= rebuilt_count:
                return -1
            if rebuilt_key:
                keys[count] = rebuilt_key + i * key_size
        else:
            return -1
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
    lists, pieces, rows, width = results.shape
    head_dim = width - 2
    sum = np.empty(head_dim, np.float32)
    for head in range(lists):
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
                logits[head, r, i] = (
                    first_of(exponential(splat(logits[head, r, i] - largest))) / whole
                )
