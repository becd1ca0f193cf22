"""The reference executor, oracle of the others: fp32, every token ever seen under a mask, one query
head at a time.

It shares no line with them: it never gathers by a selection, but scatters the selection onto the
whole sequence, read from whatever tier it lies in. So it moves nothing between tiers, and its audit
counts no moved bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from kvbench.memory.device import Resident
from kvbench.memory.store import LayerStore
from kvbench.method import Selection


def attend(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    scaling: float,
    probabilities: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kvbench.attention.executor.Executor`."""
    if selection is None:
        store.resident()  # refuses where nothing is resident to attend
        tokens = StoredTokens.of(store.device.token_ids(), store.device.resident())
    else:
        selection = store.with_stored_keys(selection)
        tokens = StoredTokens.of(store.remaining_ids(), store.remaining())
    batch, query_heads = query.shape[:2]
    logits = partial(_logits, scaling=scaling, softcap=softcap)
    out = query.new_empty(*query.shape[:3], tokens.value.shape[3])
    weights: list[torch.Tensor] = []
    for row in range(batch):
        for head in range(query_heads):
            vector, group = query[row, head, 0].float().cpu(), query_heads // store.kv_heads
            attended, weight = _head(vector, tokens, selection, row, head, group, logits)
            out[row, head, 0] = attended.to(query.dtype)
            weights.append(weight)
    if not probabilities:
        return out, None
    padded = pad_sequence(weights, batch_first=True)
    return out, padded.view(batch, query_heads, -1).to(query.device)


class StoredTokens(NamedTuple):
    """Tokens of a store, on the CPU: ids [B, Hkv, n], -1 for none, keys and values [B, Hkv, n, D]
    in float32.
    """

    ids: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, stored: Resident) -> StoredTokens:
        """With the ids of what is stored."""
        return cls(ids.cpu(), stored.key.float().cpu(), stored.value.float().cpu())

    def of_head(self, row: int, head: int) -> StoredTokens:
        """Those of one KV head, [n] and [n, D], by id."""
        ids, order = self.ids[row, head].sort()
        order, ids = order[ids >= 0], ids[ids >= 0]
        return StoredTokens(ids, self.key[row, head, order], self.value[row, head, order])


def _logits(
    key: torch.Tensor, query: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Logits [...] of keys [..., D] for a query [D]."""
    logits = key @ query * scaling
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _head(
    query: torch.Tensor,
    tokens: StoredTokens,
    selection: Selection | None,
    row: int,
    head: int,
    group: int,
    logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [D] of one query head, and the weight of each entry in the order of its selection."""
    kv_head = head // group
    stored = tokens.of_head(row, kv_head)
    ids, key = stored.ids, stored.key
    value = stored.value
    if selection is None:
        weight = logits_of(key, query).softmax(dim=0)
        return weight @ value, weight
    heads = selection.index.shape[1]
    by_query = heads == tokens.ids.shape[1] * group
    index = selection.index[row, head if by_query else min(kv_head, heads - 1)]
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
        logits[at] = logits_of(entry_key, query)
        if selection.log_weight is not None:
            logits[at] += float(selection.log_weight[row, head, rank])
    if selection.extra is not None:
        extra = selection.extra
        more = logits_of(extra.key[row, kv_head].float().cpu(), query)
        more = more + extra.log_weight[row, head].float().cpu()
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
