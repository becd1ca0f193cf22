"""How many of a search's candidates are attended where k adapts to the attention they hold
(ParisKV's published code).

A token's benefit is exp(scaling q.k) |v|: its part of the output, before the softmax divides. The
best k candidates by benefit are attended, and k is the least with which they and the tokens always
attended hold a share theta of the benefit of these tokens and of all candidates.
"""

from __future__ import annotations

import torch

from methods.blocks.topk import top_earliest


def enough(
    always: torch.Tensor,
    always_norms: torch.Tensor,
    logits: torch.Tensor,
    norms: torch.Tensor,
    theta: float,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best candidates by benefit, and how many of them are enough.

    Parameters
    ----------
    always, always_norms
        [H, n], exact logits of the tokens always attended, and the norms of their values.
    logits, norms
        [H, C], the same of candidates, whose logits are estimates; -inf for what is none.
    theta
        share of the benefit that is enough.
    most
        candidates to rank, C at most.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        order [H, most], the best first, and k [H, 1], 1 at least; above `most` where these are not
        enough.
    """
    # none may always be attended
    peak = torch.cat([always, logits], dim=1).amax(dim=1, keepdim=True)
    certain = ((always - peak).exp() * always_norms).sum(dim=1, keepdim=True)
    # where not even the peak is a number, none is better
    benefit = ((logits - peak).exp() * norms).nan_to_num()
    order = top_earliest(benefit[None], most)[0]
    sums = certain + benefit.gather(1, order).cumsum(dim=1)
    short = sums < theta * (certain + benefit.sum(dim=1, keepdim=True))
    return order, short.sum(dim=1, keepdim=True) + 1
