"""The reference executor, oracle of the others: fp32, every token ever seen under a mask, one query
head at a time.

It shares no line with them: it never gathers by a selection, but scatters the selection onto the
whole sequence, read from whatever tier it lies in. So it moves nothing between tiers, and its audit
counts no moved bytes.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from kvbench.memory.store import DEVICE, LayerStore
from kvbench.method import Selection


def attend(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    scaling: float,
    probabilities: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kvbench.attention.executor.Executor`."""
    if selection is None:
        store.resident()  # refuses where nothing is resident to attend
    else:
        selection = store.with_stored_keys(selection)
    batch, query_heads = query.shape[:2]
    out = torch.empty_like(query)
    weights: list[torch.Tensor] = []
    for row in range(batch):
        for head in range(query_heads):
            vector, group = query[row, head, 0].float().cpu(), query_heads // store.kv_heads
            attended, weight = _head(vector, store, selection, row, head, group, scaling)
            out[row, head, 0] = attended.to(query.dtype)
            weights.append(weight)
    if not probabilities:
        return out, None
    padded = pad_sequence(weights, batch_first=True)
    return out, padded.view(batch, query_heads, -1).to(query.device)


def _head(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    row: int,
    head: int,
    group: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [D] of one query head, and the weight of each entry in the order of its selection."""
    kv_head = head // group
    tokens = store.everything(row, kv_head)
    ids, key = tokens.ids, tokens.key.float()
    value = tokens.value.float()
    if selection is None:
        here = store.tiers()[row, kv_head, ids] == DEVICE
        key, value = key[here], value[here]
        weight = (key @ query * scaling).softmax(dim=0)
        return weight @ value, weight
    heads = selection.index.shape[1]
    index = selection.index[
        row, head if heads == store.kv_heads * group else min(kv_head, heads - 1)
    ]
    index_of = {int(token): at for at, token in enumerate(ids)}
    logits = torch.full((ids.shape[0],), -torch.inf)
    order: list[int] = []
    index = index.cpu()
    for rank, token in enumerate(index.tolist()):
        if token < 0:
            continue
        at = index_of[token]
        order.append(at)
        entry_key = (
            key[at] if selection.keys is None else selection.keys[row, kv_head, rank].float().cpu()
        )
        logits[at] = (entry_key @ query) * scaling
        if selection.log_weight is not None:
            logits[at] += float(selection.log_weight[row, head, rank])
    if selection.extra is not None:
        extra = selection.extra
        more = (extra.key[row, kv_head].float().cpu() @ query) * scaling + extra.log_weight[
            row, head
        ].float().cpu()
        order += range(len(logits), len(logits) + len(more))
        logits, value = (
            torch.cat([logits, more]),
            torch.cat([value, extra.value[row, kv_head].float().cpu()]),
        )
    weight = logits.softmax(dim=0)
    ranked = torch.zeros(index.shape[0] + len(weight) - len(ids))
    valid = torch.cat([index >= 0, torch.ones(len(weight) - len(ids), dtype=torch.bool)])
    ranked[valid] = weight[order]
    return weight @ value, ranked
