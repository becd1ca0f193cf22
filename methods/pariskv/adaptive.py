"""How many of a search's candidates are attended where k adapts to the attention they hold
(ParisKV's published code).

A token's benefit is exp(scaling q.k) |v|: its part of the output, before the softmax divides. The
best k candidates by benefit are attended, and k is the least with which they and the tokens always
attended hold a share theta of the benefit of these tokens and of all candidates.
"""

from __future__ import annotations

import numpy as np
import torch

from methods.blocks.kernels import kernel, write_best
from methods.blocks.softcap import capped
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


@kernel
def write_enough(  # type: ignore[no-untyped-def]
    keys, queries, norms, always, tokens, estimates, scaling, softcap, theta, least, ids
):
    """The best candidates by benefit, as many as are enough, of all KV heads of a row on a CPU.

    Parameters
    ----------
    keys
        [H, n, D] float32 of the tokens always attended.
    queries
        [H, G, D] float32; the group's mean counts.
    norms
        [H, N] float32, of the values of all tokens.
    always
        [n] int64, which these are.
    tokens
        [H, C] int64, candidates, trailing -1.
    estimates
        [H, C] float32, of their products with the mean query.
    scaling, softcap
        of the logits; 0: no cap.
    least
        how many are attended whatever they hold.
    ids
        [H, most] int64; written, the best first, trailing -1.

    Returns
    -------
    value
        how many all heads attend together.
    """
    count, most = tokens.shape[1], ids.shape[1]
    total = 0
    logits, benefit = np.empty(len(always), np.float32), np.empty(count, np.float32)
    order, picked = np.empty(most, np.int32), np.empty(most, np.int32)
    scores = np.empty(most, np.float32)
    mean = np.empty(keys.shape[2], np.float32)
    for head in range(len(keys)):
        for d in range(len(mean)):
            mean[d] = 0
            for asks in range(queries.shape[1]):
                mean[d] += queries[head, asks, d]
            mean[d] /= np.float32(queries.shape[1])
        peak = np.float32(-np.inf)
        for at in range(len(always)):
            logits[at] = 0
            for d in range(len(mean)):
                logits[at] += keys[head, at, d] * mean[d]
            logits[at] = capped(logits[at] * scaling, softcap)
            peak = max(peak, logits[at])
        for at in range(count):
            benefit[at] = capped(scaling * estimates[head, at], softcap)
            peak = max(peak, benefit[at])
        certain, whole = 0.0, 0.0
        for at in range(len(always)):
            certain += np.exp(logits[at] - peak) * norms[head, always[at]]
        for at in range(count):
            norm = norms[head, max(tokens[head, at], 0)]
            benefit[at] = np.exp(benefit[at] - peak) * norm
            whole += benefit[at]
        write_best(benefit, count, order, scores, picked)
        used, sum = 0, certain
        while used < most and (used < least or used == 0 or sum < theta * (certain + whole)):
            ids[head, used] = tokens[head, order[used]] if order[used] >= 0 else -1
            sum += max(scores[used], 0.0)
            used += 1
        ids[head, used:] = -1
        total += used
    return total
