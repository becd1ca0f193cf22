"""How many of a search's candidates are attended where k adapts to the attention they hold (ParisKV's published code).

A token's benefit is exp(scaling q.k) |v|: its part of the output, before the softmax divides. The best k candidates by
benefit are attended, and k is the least with which they and the tokens always attended hold a share theta of the
benefit of these tokens and of all candidates.
"""

from __future__ import annotations

import torch


def enough(
    always: torch.Tensor, always_norms: torch.Tensor, logits: torch.Tensor, norms: torch.Tensor, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates by benefit, and how many of them are enough.

    Args:
        always, always_norms: [H, n], exact logits of the tokens always attended, and the norms of their values.
        logits, norms: [H, C], the same of candidates, whose logits are estimates; -inf for what is none.
        theta: share of the benefit that is enough.

    Returns:
        order [H, C], the best first, and k [H, 1], 1 at least.
    """
    peak = torch.cat([always, logits], dim=1).amax(dim=1, keepdim=True)  # none may always be attended
    held = ((always - peak).exp() * always_norms).sum(dim=1, keepdim=True)
    benefit, order = ((logits - peak).exp() * norms).sort(dim=1, descending=True, stable=True)
    short = held + benefit.cumsum(dim=1) < theta * (held + benefit.sum(dim=1, keepdim=True))
    return order, short.sum(dim=1, keepdim=True) + 1
