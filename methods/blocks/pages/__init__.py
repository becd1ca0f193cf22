"""Pages of consecutive tokens: their element-wise bounds, the largest logit inside them, and the
best pages' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from kvbench.kernels.operators import operator
from methods.blocks.kernels import KERNELS, is_readable
from methods.blocks.ragged import ranges
from methods.blocks.topk import ranked_ids

SHORTER = 2  # pages of a row that may have fewer tokens than all others: the last ones
WORTH_A_THREAD = 1 << 17  # multiplications; fewer are done before another thread has begun


def bounds(
    keys: torch.Tensor, pages: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Element-wise minimum and maximum of the keys of every page.

    Parameters
    ----------
    keys
        [H, N, D].
    pages
        [P + 1], where each page begins and the last one ends.
    longest
        most tokens of a page.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        low, high: [H, P, D].
    """
    offset = torch.arange(longest, device=keys.device)
    # a shorter page repeats its last token
    tokens = torch.minimum(pages[:-1, None] + offset, pages[1:, None] - 1)
    paged = [head[tokens] for head in keys]
    low = torch.stack([pages.amin(dim=1) for pages in paged])
    high = torch.stack([pages.amax(dim=1) for pages in paged])
    return low, high


def stacked_pages(sides: Sequence[torch.Tensor], empty: float, least: int = 0) -> torch.Tensor:
    """One side of the bounds of each row, [H, P, D], as one tensor [B, H, most P, D].

    Parameters
    ----------
    empty
        the bound of a page without a key: inf of the lower side, -inf of the upper.
    least
        pages to make room for.
    """
    most = max(least, *(side.shape[1] for side in sides))
    return torch.stack([pad(side, (0, 0, 0, most - side.shape[1]), value=empty) for side in sides])


def upper_bound(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Largest logit any key inside the bounds could have: sum over d of max(q_d low_d, q_d high_d).

    Parameters
    ----------
    query
        [B, Hq, 1, D].
    low, high
        [B, Hkv, P, D].

    Returns
    -------
    torch.Tensor
        [B, Hkv, G, P], unscaled.
    """
    rows = _grouped(query, low)
    # max(q l, q h) is q h where q > 0 and q l elsewhere: two products instead of a [G, P, D] tensor
    return rows.clamp(min=0) @ high.transpose(2, 3) + rows.clamp(max=0) @ low.transpose(2, 3)


def mean_bound(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Mean of `upper_bound` over all query heads: [B, P] float32.

    On a CPU one call into compiled code.

    Parameters
    ----------
    query
        [B, Hq, 1, D].
    low, high
        [B, Hkv, P, D].
    """
    if not is_readable(query):
        return upper_bound(query, low, high).float().mean(dim=(1, 2))
    scores = torch.empty(low.shape[:3])
    arrays = _grouped(query, low).contiguous(), low.contiguous(), high.contiguous()
    threads = min(torch.get_num_threads(), max(1, 2 * low.numel() // WORTH_A_THREAD))
    KERNELS.mean_bounds(threads, *arrays, scores.flatten(0, 1))
    return scores.mean(dim=1)


def _grouped(query: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Queries [B, Hq, 1, D] by the KV heads of bounds, [B, Hkv, G, D]."""
    return query.view(*low.shape[:2], -1, low.shape[3])


def take_in(key: torch.Tensor, low: torch.Tensor, high: torch.Tensor, page: torch.Tensor) -> None:
    """Widen, in place, the bounds of a page of every row by its new key.

    On a CPU one call into compiled code.

    Parameters
    ----------
    key
        [B, Hkv, 1, D].
    low, high
        [B, Hkv, P, D].
    page
        [B] int64, of each row, where the keys are.
    """
    if is_readable(key):
        KERNELS.take_in(low, high, page, key[:, :, 0].contiguous())
        return
    take_in_page(key, low, high, page)


@operator("methods.blocks.gpu.pages", writes=("low", "high"))
def take_in_page(
    key: torch.Tensor, low: torch.Tensor, high: torch.Tensor, page: torch.Tensor
) -> None:
    """See `take_in`."""
    page = page.view(-1, 1, 1, 1).expand_as(key)
    low.scatter_reduce_(2, page, key, "amin")
    high.scatter_reduce_(2, page, key, "amax")


@operator("methods.blocks.gpu.pages")
def page_bounds(
    query: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor | None,
    page_size: int,
    mean: bool,
) -> torch.Tensor:
    """`upper_bound` in float32, of each query head, or its mean over the group: [B, H, P].

    A page of which no token is among the `tokens` [B] of its row has -inf; a bound that is no
    number is inf, so that it is attended, and seen. `starts` as of `page_tokens`.
    """
    score = upper_bound(query.float(), low.float(), high.float())
    score = torch.where(score.isnan(), torch.inf, score)
    score = score.mean(dim=2) if mean else score.flatten(1, 2)
    first = token_edges(tokens, starts, low.shape[2], page_size)[:, None, :-1]
    return score.masked_fill(first == tokens[:, None, None], -torch.inf)


def token_edges(
    tokens: torch.Tensor, starts: torch.Tensor | None, pages: int, page_size: int
) -> torch.Tensor:
    """Where each page begins and the last one ends, [B, P + 1]: those to come where a row's
    `tokens` [B] end. `starts` as of `page_tokens`.
    """
    if starts is None:
        starts = torch.arange(pages + 1, device=tokens.device) * page_size
    return torch.minimum(starts, tokens[:, None])


class Ranges(NamedTuple):
    """What `page_tokens` chooses from, its arguments: pages of consecutive tokens."""

    scores: torch.Tensor
    tokens: torch.Tensor
    capacities: torch.Tensor
    rooms: torch.Tensor
    starts: torch.Tensor | None
    page_size: int
    most: int


@operator("methods.blocks.gpu.pages")
def page_tokens(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    capacities: torch.Tensor,
    rooms: torch.Tensor,
    starts: torch.Tensor | None,
    page_size: int,
    most: int,
) -> torch.Tensor:
    """The tokens of the best pages, page after page, [B, H, most] int64 with trailing -1.

    Parameters
    ----------
    scores
        [B, H, P], as `page_bounds` gives them.
    tokens
        [B], tokens of each row; its last page may end before.
    capacities
        [B]; a row of no more tokens attends all of them.
    rooms
        [B], what a row of more attends at most: whole pages, up to the first that does not fit.
    starts
        [B, P + 1] int64, where each page begins, which for those to come is after all tokens; None:
        all have `page_size` tokens.
    page_size
        the least tokens of a page, but for two of a row.
    most
        what any row attends at most.
    """
    rooms = torch.where(capacities >= tokens, tokens, rooms).clamp(max=most)[:, None]
    more = 0 if starts is None else SHORTER
    count = min(scores.shape[2], -(-most // page_size) + more)
    ranked = ranked_ids.reference(scores, -(-rooms // page_size) + more, count)
    edges = token_edges(tokens, starts, scores.shape[2], page_size)[:, None]
    edges = edges.expand(-1, scores.shape[1], -1)
    first = edges.gather(2, ranked.clamp(min=0))
    sizes = (edges.gather(2, ranked.clamp(min=0) + 1) - first).masked_fill(ranked < 0, 0)
    sizes = sizes.masked_fill(sizes.cumsum(dim=2) > rooms[..., None], 0)
    return ranges(first, sizes, most)[0]


def best_tokens(
    query: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    mean: bool,
    join: bool,
) -> torch.Tensor:
    """The tokens of the pages with the largest upper bounds, as many whole pages as fit.

    For tensors `is_readable`.

    Scores are float32, whatever the dtype of query and bounds; of equal ones the earlier page is
    better.

    Parameters
    ----------
    query
        [B, Hq, 1, D].
    low, high
        [B, Hkv, P or more, D].
    starts
        [B, P + 1], where each page of a row begins and the last one ends.
    rows
        [B, 3], of each row: its pages, the most that a list ranks, and the tokens that fit.
    mean
        rank pages by the mean bound over the query group, one list for each KV head.
    join
        join the lists of the group by rank, without repeats, the last page first.

    Returns
    -------
    torch.Tensor
        [B, Hq or, with `mean` or `join`, Hkv, n] int64, best page first, trailing -1.
    """
    batch, kv_heads = low.shape[:2]
    grouped = _grouped(query, low)
    lists = 1 if mean or join else grouped.shape[2]
    ids = torch.empty(batch * kv_heads, lists, int(rows[:, 2].max()), dtype=torch.int64)
    work = 2 * grouped.numel() * starts.shape[1]
    threads = min(torch.get_num_threads(), max(1, work // WORTH_A_THREAD))
    arrays = grouped.contiguous(), low.contiguous(), high.contiguous()
    longest = KERNELS.best_tokens(threads, *arrays, starts, rows, mean, join, ids)
    return ids.view(batch, -1, ids.shape[2])[:, :, :longest]
