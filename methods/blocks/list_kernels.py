"""What blocks do with lists on a CPU, in Numba, all lists in one call: rank, join ranges, page."""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, write_best


@kernel
def best_lists(threads, scores, counts, ids):  # type: ignore[no-untyped-def]
    """The best of each list of scores, best first, in so many threads; see `best` for what is equal
    or no number.

    Parameters
    ----------
    scores
        [B, H, n] float32.
    counts
        [B, 1 or H] int64, wanted of a row or list.
    ids
        [B, H, k] int64; written, trailing -1.
    """
    in_threads(threads, _best_lists, (np.zeros(1, np.int64), scores, counts, ids))


@jit
def _best_lists(_, claims, scores, counts, ids):  # type: ignore[no-untyped-def]
    lists, longest = scores.shape[1], ids.shape[2]
    values, picked = np.empty(longest, np.float32), np.empty(longest, np.int32)
    at = claim(claims)
    while at < len(scores) * lists:
        row, head = at // lists, at % lists
        most = min(longest, counts[row, head * counts.shape[1] // lists])
        chosen = ids[row, head, :most]
        write_best(scores[row, head], scores.shape[2], chosen, values[:most], picked)
        ids[row, head, most:] = -1
        at = claim(claims)


@kernel
def entries(starts, ends, numbers, source):  # type: ignore[no-untyped-def]
    """The numbers of the ranges of each list, see `methods.blocks.ragged.entries`.

    Parameters
    ----------
    starts
        [L, K] int64, where each range begins.
    ends
        [L, K] int64, entries of a list up to the end of each range.
    numbers, source
        [L, T] int64; written: the first T entries, trailing -1, and the range of each.
    """
    for row in range(len(starts)):
        done = 0
        for span in range(starts.shape[1]):
            first = starts[row, span] - done
            while done < min(ends[row, span], numbers.shape[1]):
                numbers[row, done], source[row, done] = first + done, span
                done += 1
        numbers[row, done:], source[row, done:] = -1, starts.shape[1] - 1


@kernel
def sinks_and_recent(lengths, counts, sinks, ids):  # type: ignore[no-untyped-def]
    """Write ids [B, H, most] int64, see `methods.blocks.recent.sinks_and_recent`."""
    for row in range(ids.shape[0]):
        for head in range(ids.shape[1]):
            count = counts[row, head]
            valid = min(lengths[row], count)
            for at in range(ids.shape[2]):
                token = lengths[row] - 1 - at
                if at >= count - sinks:
                    token = min(token, count - 1 - at)
                ids[row, head, at] = token if at < valid else -1


@kernel
def largest_of_pages(ids, firsts, size, numbers, largest):  # type: ignore[no-untyped-def]
    """The largest number of each token's page.

    Parameters
    ----------
    ids
        [B, H, n] int64, ascending, trailing -1, which is in no page.
    firsts
        [B] int64, a token with which a page of `size` tokens begins.
    numbers
        [B, H, n] float32, a number for each token.
    largest
        [B, H, n] float32; written.
    """
    for row in range(ids.shape[0]):
        for head in range(ids.shape[1]):
            token_ids = ids[row, head]
            start = stop = 0
            while start < len(token_ids):
                most, page = numbers[row, head, start], (token_ids[start] - firsts[row]) // size
                while stop < len(token_ids) and token_ids[stop] >= 0:
                    if (token_ids[stop] - firsts[row]) // size != page:
                        break
                    most = max(most, numbers[row, head, stop])
                    stop += 1
                stop = max(stop, start + 1)
                largest[row, head, start:stop] = most
                start = stop
