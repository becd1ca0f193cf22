"""Attention over a serving engine's blocks, and copies out of them: compiled, for `paged.py`."""

from __future__ import annotations

import numpy as np

from kvbench.kernels.attend import (
    LIST_PIECE,
    add_bias,
    begin_piece,
    join,
    queries,
    scratch,
    shares,
    space,
    write_piece,
)
from kvbench.kernels.rows import BLOCK, add_values, scale_logits, score, vectors, weigh
from kvbench.kernels.threads import claim, in_threads
from kvbench.kernels.vectors import (
    LANES,
    NOTHING,
    inner,
    kernel,
    load,
    plus,
    splat,
    store,
    times,
)


@kernel
def attend_blocks(  # type: ignore[no-untyped-def]
    threads, before, request, index, bias, blocks, rebuilt, stored, logits, results, out
):
    """Attention over lists of tokens that lie in a serving engine's blocks, in several threads.

    Of blocks with float32 in no tiles keys of neighbours are met dimension by dimension, and values
    where they lie; of others a few rows at a time are copied, and attended while they are in the
    cache.

    Parameters
    ----------
    threads, before, request, index, bias, rebuilt, logits, results, out
        as of `attend_lists`, without extras.
    blocks
        see `gather`, of all rows of the batch.
    stored
        the type of a number.

    Returns
    -------
    value
        0: no token was lost.
    """
    query, pieces = queries(request), -(-index.shape[2] // LIST_PIECE)
    piece_results = space(results, query, pieces, out)
    share = np.zeros(1, np.int64), (before, pieces), query, np.float32(request[5])
    size = len(query) * index.shape[2] * 2 * query.shape[2] * blocks[3].itemsize
    arguments = *share, index, bias, blocks, rebuilt, stored, logits, piece_results
    in_threads(shares(threads, len(query) * pieces, size), _attend_blocks, arguments)
    if out:
        join(piece_results, out, request[4], logits)
    return 0


@inner
def _attend_blocks(  # type: ignore[no-untyped-def]
    _, claims, pieces, query, scaling, index, bias, blocks, rebuilt, stored, logits, results
):
    """As many pieces of a layer's lists as other threads leave."""
    tables = blocks[0]
    cache = blocks[1]
    pair = blocks[2]
    number = blocks[3]
    count, head_dim = index.shape[2], query.shape[2]
    block_keys = np.empty((BLOCK, head_dim // pair), cache.dtype)
    block_values = np.empty((BLOCK, head_dim), number.dtype)
    keys = np.empty(BLOCK, np.intp)
    values = np.empty(BLOCK, np.intp)
    groups = np.empty(0, np.intp)
    size = head_dim * number.itemsize
    rank = np.empty(BLOCK, np.intp)
    ids = np.empty(BLOCK, np.int64)
    plain = pair == 1 and number.itemsize == 4
    for i in range(BLOCK):
        keys[i] = block_keys.ctypes.data + i * size
    work = scratch(query)
    block = np.empty((query.shape[1], BLOCK), np.float32)
    lists, heads = len(query) // len(index), cache.shape[1]
    before, pieces = pieces
    item = claim(claims)
    while item < len(query) * pieces:
        at, piece = item // pieces, item % pieces
        row = at // lists
        head, list_row = at % lists * heads // lists, min(at % lists, index.shape[1] - 1)
        begin_piece(work, query[at], stored)
        place, end = piece * LIST_PIECE, min(count, (piece + 1) * LIST_PIECE)
        while place < end:
            rows = 0
            while place < end and rows < BLOCK:
                if index[row, list_row, place] >= 0:
                    ids[rows], rank[rows] = index[row, list_row, place], place
                    rows += 1
                place += 1
            if not rows:
                break
            if plain and not rebuilt and _neighbours(ids, rows):
                _find_values(ids, rows, tables[row], cache, head, size, values)
                _score_columns(work.query, ids, rows, tables[row], cache, head, block)
            else:
                _copy_rows(ids, 0, rows, tables[row], cache, head, pair, block_keys, block_values)
                for i in range(rows):
                    values[i] = block_values.ctypes.data + i * size
                    if rebuilt:
                        keys[i] = rebuilt + ((row * heads + head) * count + rank[i]) * size
                score(work.query, keys, groups, (0, 0), rows, (keys[:0], 0), block, stored)
            scale_logits(block, rows, scaling)
            add_bias(block, rank[:rows], at, bias, logits)
            weigh(block, rows, work.most, work.total, work.sums)
            add_values(block, values, (0, 0), rows, (keys[:0], 0), work.sums, stored)
        write_piece(results[at, before + piece], work.most, work.total, work.sums, stored)
        item = claim(claims)


@inner
def _neighbours(ids, rows):  # type: ignore[no-untyped-def]
    """Whether half of ids[:rows] come right after the one before."""
    consecutive = 0
    for i in range(1, rows):
        consecutive += ids[i] == ids[i - 1] + 1
    return 2 * consecutive >= rows


@inner
def _find_values(ids, rows, table, cache, head, row, values):  # type: ignore[no-untyped-def]
    """The addresses of the values of ids[:rows], of so many bytes each, in blocks without tiles."""
    half = cache.shape[3] * cache.itemsize
    size = half // row
    for i in range(rows):
        block, at = table[ids[i] // size], ids[i] % size
        values[i] = cache.ctypes.data + ((block * cache.shape[1] + head) * 2 + 1) * half + at * row


@inner
def _score_columns(query, ids, rows, table, cache, head, logits):  # type: ignore[no-untyped-def]
    """As `score`, of float32 keys ids[:rows] in blocks without tiles.

    Neighbours in a block are scored by vectors, a query each.

    A vector's last lanes may be of what follows in the block, and are passed over.
    """
    many, head_dim = query.shape
    half = cache.shape[3] * cache.itemsize
    stride = half // head_dim
    size = cache.shape[3] // head_dim
    few = np.empty(LANES, np.float32)
    i = 0
    while i < rows:
        at, run = ids[i] % size, 1
        while run < LANES and i + run < rows and at + run < size and ids[i + run] == ids[i] + run:
            run += 1
        first = (
            cache.ctypes.data + (table[ids[i] // size] * cache.shape[1] + head) * 2 * half + 4 * at
        )
        for r in range(many):
            a = b = splat(NOTHING)
            for j in range(0, head_dim, 2):
                a = plus(a, times(load(first + j * stride), splat(query[r, j])))
                b = plus(b, times(load(first + (j + 1) * stride), splat(query[r, j + 1])))
            store(few.ctypes.data, plus(a, b))
            for k in range(run):
                logits[r, i + k] = few[k]
        i += run
    for r in range(many):
        for i in range(rows, vectors(rows)):
            logits[r, i] = -np.inf


@kernel
def gather(threads, claims, ids, blocks, keys, values):  # type: ignore[no-untyped-def]
    """Copy keys and values out of a serving engine's blocks, in so many threads.

    Parameters
    ----------
    claims
        [1] int64, the next piece, 0.
    ids
        [H, M] int64 token ids of one row; -1 is read as 0.
    blocks
        which blocks each row has, [B, n] int64; them all, [blocks, H, 2, W], a block's keys and its
        values, in words of one number, or of two where they are packed: keys by words of
        neighbouring dimensions, in tiles of 16 tokens, and values by words of neighbouring tokens,
        in tiles of 16 dimensions; numbers of a word, 1 or 2; and an array [0] of the type that a
        number has there.
    keys
        [H, M, words], to be written.
    values
        [H, M, D], numbers, likewise.
    """
    in_threads(threads, _gather, (claims, ids, blocks, keys, values))


@inner
def _gather(_, claims, ids, blocks, keys, values):  # type: ignore[no-untyped-def]
    """As many pieces as other threads leave."""
    tables, cache = blocks[0], blocks[1]
    pair = blocks[2]
    heads, count = ids.shape
    pieces = -(-count // BLOCK)
    item = claim(claims)
    while item < heads * pieces:
        head, first = item // pieces, item % pieces * BLOCK
        _copy_rows(
            ids[head],
            first,
            min(first + BLOCK, count),
            tables[0],
            cache,
            head,
            pair,
            keys[head],
            values[head],
        )
        item = claim(claims)


@inner
def _copy_rows(ids, first, end, table, cache, head, pair, keys, values):  # type: ignore[no-untyped-def]
    """Copy the rows of ids[first:end] to the same places of keys and values."""
    words, head_dim = keys.shape[1], values.shape[1]
    size = cache.shape[3] // words
    # bits of a word before the number of an even token, and of an odd one
    halves = np.zeros(2, cache.dtype)
    halves[1] = 8 * values.itemsize
    block = 0
    at = size
    following = -1
    for i in range(first, end):
        token = max(ids[i], 0)
        if token != following or at == size:  # lists often name neighbours, one after the other
            block, at = table[token // size], token % size
        if pair == 2:
            start = at // LANES * LANES * words + at % LANES
            for j in range(words):
                keys[i, j] = cache[block, head, 0, start + j * LANES]
            half = halves[at % 2]
            for group in range(0, head_dim, LANES):
                start = group * size // 2 + at // 2 * LANES
                for lane in range(LANES):
                    values[i, group + lane] = cache[block, head, 1, start + lane] >> half
        else:
            for j in range(words):
                keys[i, j] = cache[block, head, 0, j * size + at]
                values[i, j] = cache[block, head, 1, at * words + j]
        at, following = at + 1, token + 1
