"""Products of queries with all keys of their KV head."""

from __future__ import annotations

import torch

from kvbench.kernels.library import why_missing
from kvbench.kernels.operators import operator
from kvbench.kernels.products import products as score
from methods.blocks.kernels import is_readable

WORTH_A_THREAD = 1 << 17  # multiplications; fewer are done before another thread has begun


def products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q.k of each query head, unscaled.

    On a CPU one call into compiled code, which reads keys where they lie.

    Parameters
    ----------
    query
        [B, Hq, 1, D].
    keys
        [B, Hkv, n, D].

    Returns
    -------
    torch.Tensor
        [B, Hkv, G, n] float32.
    """
    grouped = query.float().view(*keys.shape[:2], -1, keys.shape[3])
    if not is_readable(keys) or keys.stride(3) != 1 or why_missing() is not None:
        return grouped @ keys.float().transpose(2, 3)
    scores = torch.empty(*grouped.shape[:3], keys.shape[2])
    threads = min(torch.get_num_threads(), max(1, scores.numel() * keys.shape[3] // WORTH_A_THREAD))
    score(threads, grouped.contiguous(), keys, scores)
    return scores


@operator("methods.blocks.gpu.products")
def past_products(query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """As `products`, -inf for what is not among the `seen` [B] tokens of its row."""
    grouped = query.float().view(*keys.shape[:2], -1, keys.shape[3])
    past = torch.arange(keys.shape[2], device=keys.device) < seen[:, None]
    logits = grouped @ keys.float().transpose(2, 3)
    return logits.masked_fill(~past[:, None, None], -torch.inf)
