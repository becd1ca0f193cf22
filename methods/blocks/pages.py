"""Pages of consecutive tokens: their element-wise bounds, and the tokens of chosen pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def bounds(keys: torch.Tensor, page_size: int, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Element-wise minimum and maximum of the keys of every page.

    Args:
        keys: [B, Hkv, N, D].
        valid: [B, N] real tokens, or None: all.

    Returns:
        low, high: [B, Hkv, P, D] with P = ceil(N / page_size); a page without a valid token has (inf, -inf).
    """
    batch, kv_heads, count, head_dim = keys.shape
    short = -count % page_size
    ends = []
    for empty, reduce in ((torch.inf, torch.amin), (-torch.inf, torch.amax)):
        masked = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], empty)
        paged = pad(masked, (0, 0, 0, short), value=empty).view(batch, kv_heads, -1, page_size, head_dim)
        ends.append(reduce(paged, dim=3))
    return ends[0], ends[1]


def upper_bound(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Largest logit any key inside the bounds could have: sum over d of max(q_d low_d, q_d high_d).

    Args:
        query: [B, Hq, 1, D].
        low, high: [B, Hkv, P, D].

    Returns:
        [B, Hkv, G, P], unscaled.
    """
    batch, kv_heads, _, head_dim = low.shape
    rows = query.view(batch, kv_heads, -1, head_dim)
    # max(q l, q h) is q h where q > 0 and q l elsewhere: two products instead of a [G, P, D] tensor
    return rows.clamp(min=0) @ high.transpose(2, 3) + rows.clamp(max=0) @ low.transpose(2, 3)


def tokens_of_pages(pages: torch.Tensor, page_size: int, lengths: Sequence[int]) -> torch.Tensor:
    """Token ids of chosen pages.

    Args:
        pages: [B, H, P] page numbers, best first, trailing -1.
        lengths: tokens of each row; its last page may be partly filled.

    Returns:
        [B, H, P * page_size] int64, trailing -1: a partly filled last page stands behind all others.
    """
    length = torch.tensor(lengths, device=pages.device)[:, None, None]
    partial = (pages == length // page_size).to(torch.int8) + 2 * (pages < 0).to(torch.int8)
    pages = pages.gather(2, partial.argsort(dim=2, stable=True))
    tokens = pages[..., None] * page_size + torch.arange(page_size, device=pages.device)
    tokens = torch.where((pages[..., None] < 0) | (tokens >= length[..., None]), -1, tokens)
    return tokens.flatten(2)
