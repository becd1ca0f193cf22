"""Pages of consecutive tokens: their element-wise bounds, and the largest logit inside them."""

from __future__ import annotations

import torch


def bounds(keys: torch.Tensor, pages: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Element-wise minimum and maximum of the keys of every page.

    Args:
        keys: [H, N, D].
        pages: [P + 1], where each page begins and the last one ends.
        longest: most tokens of a page.

    Returns:
        low, high: [H, P, D].
    """
    offset = torch.arange(longest, device=keys.device)
    tokens = torch.minimum(pages[:-1, None] + offset, pages[1:, None] - 1)  # a shorter page repeats its last token
    paged = [head[tokens] for head in keys]
    return torch.stack([page.amin(dim=1) for page in paged]), torch.stack([page.amax(dim=1) for page in paged])


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
