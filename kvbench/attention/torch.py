"""The torch executor: gather what is selected, one scaled_dot_product_attention.

Also the dense attention of prefill.

The G query heads of a KV head ride on the query axis, so keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from kvbench.attention.sinks import softmax
from kvbench.kernels.operators import operator
from kvbench.memory.device import Located, Resident
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, capped

# queries of a prompt, of all in a batch, whose weights are computed together: a CPU's cache holds
# them
BLOCK = 16
BLOCK_CUDA = 64


def attend(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    scaling: float,
    probabilities: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kvbench.attention.executor.Executor`."""
    if (
        query.is_cuda
        and selection is not None
        and (probabilities or softcap is not None or selection.log_weight is not None)
    ):
        here = store.stage is None and not store.latent_dim
        in_place = here and store.device.pool.key.dtype == query.dtype
        plain = selection.keys is None and selection.extra is None
        if in_place and plain and selection.index.is_cuda:
            located, size = _located(store, selection.index, query.shape[1])
            assert located.present is not None
            lists = located.slots.view(size), located.present.view(size)
            weight = selection.log_weight
            out, weights = attend_seen(query, *located.pool, *lists, weight, scaling, softcap)
            return out, weights if probabilities else None
    if selection is None:
        resident = store.resident()
        bias = None if resident.mask is None else resident.mask[:, :, None]
        attended = Attended(resident.key, resident.value, bias)
    else:
        attended = _selected(store, selection, query.shape[1])
    # [B, Hs, rows, D]: the query heads that share a list of keys are rows of one attention
    bias = attended.bias
    rows = query.reshape(len(query), attended.key.shape[1], -1, query.shape[3])
    weights = None
    if probabilities or softcap is not None:
        shared = _probabilities(rows, attended.key, bias, scaling, softcap)
        weights = shared.view(*query.shape[:2], -1) if probabilities else None
    if softcap is not None:  # torch's own attention knows none
        out = (shared @ attended.value.float()).to(query.dtype)
        return out.view(*query.shape[:3], out.shape[3]), weights
    # a CPU's kernels take it in float32
    if query.is_cuda and bias is not None and bias.dtype != torch.bool:
        bias = bias.to(query.dtype)
    blocks = attended.key, attended.value
    out = scaled_dot_product_attention(rows, *blocks, attn_mask=bias, scale=scaling)
    return out.reshape(*query.shape[:3], out.shape[3]), weights


class Attended(NamedTuple):
    """What is attended: keys and values [B, Hs, M (+ E), D] with Hs = Hkv or Hq, and a bias that
    broadcasts over the rows, of bool a mask (None: none).
    """

    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None

    def with_extra(self, selection: Selection, query_heads: int) -> Attended:
        """Append the synthetic entries, [B, Hs, E, D], to the selected ones."""
        extra = selection.extra
        assert extra is not None
        bias, size = self.bias, self.key.shape[:3]
        rows = query_heads // size[1]
        repeat = size[1] // extra.key.shape[1]
        key = torch.cat([self.key, extra.key.repeat_interleave(repeat, dim=1)], dim=2)
        value = torch.cat([self.value, extra.value.repeat_interleave(repeat, dim=1)], dim=2)
        entries = (*size[:2], rows, size[2])
        if bias is None:
            bias = key.new_zeros(entries, dtype=torch.float32)
        elif bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill(~bias, -torch.inf)
        weight = extra.log_weight.view(*entries[:3], -1).float()
        return Attended(key, value, torch.cat([bias.expand(entries), weight], dim=3))


def _selected(store: LayerStore, selection: Selection, query_heads: int) -> Attended:
    selection = store.with_stored_keys(selection)
    located, size = _located(store, selection.index, query_heads)
    key, value = (block.view(*size, block.shape[-1]) for block in located.rows())
    if selection.keys is not None:
        key = selection.keys
    bias = None if located.present is None else located.present.reshape(*size[:2], 1, size[2])
    if selection.log_weight is not None:
        log_weight = selection.log_weight.view(*size[:2], -1, size[2]).float()
        bias = log_weight if bias is None else log_weight.masked_fill(~bias, -torch.inf)
    if selection.extra is not None:
        return Attended(key, value, bias).with_extra(selection, query_heads)
    return Attended(key, value, bias)


def _located(
    store: LayerStore, index: torch.Tensor, query_heads: int
) -> tuple[Located, torch.Size]:
    """Where the tokens of an index [B, Hs, M] lie, and the size of their lists: of Hkv or Hq."""
    if index.shape[1] == query_heads != store.kv_heads:
        return store.locate(index.reshape(len(index), store.kv_heads, -1)), index.shape
    index = index.expand(-1, store.kv_heads, -1)
    return store.locate(index), index.shape


def is_list(selection: Selection) -> bool:
    """Whether tokens are attended as they are stored, all with one weight, and nothing else."""
    return selection.log_weight is None and selection.keys is None and selection.extra is None


@operator("kvbench.attention.gpu")
def attend_seen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    present: torch.Tensor,
    log_weights: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [B, Hq, 1, D] to lists of slots, and the probabilities [B, Hq, M] float32.

    Parameters
    ----------
    keys, values
        [T, D], the pool.
    slots, present
        [B, Hs, M], Hs = Hkv or Hq, and which of them count; one of each list at least.
    log_weights
        [B, Hq, M], added to the logits; None: nothing.
    """
    rows = query.reshape(*slots.shape[:2], -1, query.shape[3])
    key, value = (
        part.index_select(0, slots.reshape(-1)).view(*slots.shape, -1) for part in (keys, values)
    )
    bias = present[:, :, None]
    if log_weights is not None:
        log_weights = log_weights.float().view(*slots.shape[:2], -1, slots.shape[2])
        bias = log_weights.masked_fill(~bias, -torch.inf)
    weights = _probabilities(rows, key, bias, scaling, softcap)
    if softcap is not None:
        out = (weights @ value.float()).to(query.dtype)
    else:
        bias = bias if bias.dtype == torch.bool else bias.to(query.dtype)
        out = scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(query.shape), weights.view(*query.shape[:2], -1)


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    logits = capped((query.float() @ key.float().transpose(2, 3)) * scaling, softcap)
    if bias is not None:
        logits = (
            logits.masked_fill(~bias, -torch.inf)
            if bias.dtype == torch.bool
            else logits + bias.float()
        )
    return logits.softmax(dim=-1)


def prefill(
    query: torch.Tensor,
    store: LayerStore,
    column: int,
    offsets: Sequence[int],
    scaling: float,
    sinks: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
) -> torch.Tensor:
    """Dense causal attention of a prefill chunk over everything stored before and in it.

    Parameters
    ----------
    query
        [B, Hq, q, D], columns column .. column + q - 1; row b's token 0 stands at column
        `offsets[b]`.
    store
        holds the chunk's keys and values already.
    sinks
        [Hq], see `kvbench.attention.sinks`; None: the model has none.
    softcap
        see `kvbench.method.capped`.

    Returns
    -------
    torch.Tensor
        [B, Hq, q, D of values]; what stands at padding columns is finite and without meaning.
    """
    if sinks is not None or softcap is not None:
        return _prefill_by_blocks(query, store, column, offsets, scaling, sinks, softcap)
    end = column + query.shape[2]
    key, value = store.device.prompt_rows(end)
    at_once = column == 0 and not any(offsets)
    mask: torch.Tensor | None = None
    if query.is_cuda and not at_once and not any(offsets):
        mask = causal_lower_right(query.shape[2], end)  # a kernel knows it: no [q, end] is made
    elif not at_once:
        mask = _causal(column, end, offsets, query.device)
    out = scaled_dot_product_attention(
        query,
        key,
        key if store.latent_dim else value,  # torch is quick where values are as wide as keys
        attn_mask=mask,
        is_causal=at_once and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[..., : value.shape[3]]


def _causal(column: int, end: int, offsets: Sequence[int], device: torch.device) -> torch.Tensor:
    """[B or 1, 1, q, end] bool, which keys the queries of columns column .. end - 1 see; padding
    looks at token 0.
    """
    first = torch.tensor(offsets if any(offsets) else [0], device=device)[:, None]
    position = (torch.arange(column, end, device=device) - first).clamp(min=0)
    return (torch.arange(end, device=device) <= position[..., None])[:, None]


def _prefill_by_blocks(
    query: torch.Tensor,
    store: LayerStore,
    column: int,
    offsets: Sequence[int],
    scaling: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """`prefill` with sinks or a soft cap: torch's own attention knows neither."""
    value = store.device.prompt_rows(column + query.shape[2])[1][:, :, None].float()
    blocks = _causal_weights(query, store, column, offsets, scaling, sinks, softcap)
    out = torch.cat([weights @ value[..., : weights.shape[4], :] for _, weights in blocks], dim=3)
    return out.flatten(1, 2).to(query.dtype)


def turn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: Resident,
    scaling: float,
    sinks: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Dense causal attention of new tokens over themselves and what is stored, which need not be
    all that was.

    Parameters
    ----------
    query
        [B, Hq, q, D].
    key, value
        [B, Hkv, q, D], of the same tokens.
    past
        what is stored, see `Tiers.remaining`.
    sinks
        [Hq], see `kvbench.attention.sinks`; None: the model has none.
    weights
        [B, Hkv, n], added to the logits of what is stored; None: nothing.
    softcap
        see `kvbench.method.capped`.

    Returns
    -------
    torch.Tensor
        [B, Hq, q, D].
    """
    gqa = query.shape[1] != key.shape[1]
    plain = sinks is None and weights is None and softcap is None
    key, value = torch.cat([past.key, key], dim=2), torch.cat([past.value, value], dim=2)
    if plain and past.mask is None and query.is_cuda:
        mask: torch.Tensor = causal_lower_right(query.shape[2], key.shape[2])
    else:
        mask = _turn_mask(query, past, weights)
    if sinks is None and softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa
        )
    grouped = query.float().unflatten(1, (key.shape[1], -1))  # [B, Hkv, G, q, D]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    causal = mask if mask.ndim == 2 else mask.float().view(*grouped.shape[:4], -1)
    logits = capped(grouped @ key[:, :, None].float().transpose(3, 4) * scaling, softcap) + causal
    return (softmax(logits, sinks) @ value[:, :, None].float()).flatten(1, 2).to(query.dtype)


def _turn_mask(query: torch.Tensor, past: Resident, weights: torch.Tensor | None) -> torch.Tensor:
    """Which entries new tokens see, bool [q, n + q] or [B, Hq, q, n + q]; with weights a bias."""
    heads, width = query.shape[1:3]
    stored, group = past.key.shape[2], heads // past.key.shape[1]
    mask = torch.ones(width, stored + width, dtype=torch.bool, device=query.device).tril(stored)
    if past.mask is not None:
        causal = mask[:, stored:].expand(len(query), heads, -1, -1)
        present = past.mask.repeat_interleave(group, dim=1)[:, :, None].expand(-1, -1, width, -1)
        mask = torch.cat([present, causal], dim=3)
    if weights is None:
        return mask
    added = pad(weights, (0, width)).repeat_interleave(group, dim=1)[:, :, None]
    return added.masked_fill(~mask, -torch.inf).to(query.dtype)


def attention_received(
    query: torch.Tensor,
    store: LayerStore,
    column: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    scaling: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention probability each key receives from the chunk's real queries, summed; arguments as
    for `prefill`.

    Parameters
    ----------
    lengths
        prompt tokens of each row; queries of padding columns do not count.

    Returns
    -------
    torch.Tensor
        [B, Hq, column + q] fp32, by token position.
    """
    first = torch.tensor(offsets, device=query.device)[:, None]
    last = first + torch.tensor(lengths, device=query.device)[:, None]
    columns_read = column + query.shape[2]
    received = query.new_zeros(*query.shape[:2], columns_read, dtype=torch.float32)
    blocks = _causal_weights(query, store, column, offsets, scaling, sinks, softcap)
    for columns, weights in blocks:
        real = ((columns >= first) & (columns < last)).float()
        received[..., : weights.shape[4]] += (real[:, None, None, None] @ weights).flatten(1, 3)
    return received


def _causal_weights(
    query: torch.Tensor,
    store: LayerStore,
    column: int,
    offsets: Sequence[int],
    scaling: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Columns [n] of a block of a chunk's queries, and their attention weights [B, Hkv, G, n,
    visible] in fp32, for the keys up to the last that one of them sees.
    """
    batch, width = len(query), query.shape[2]
    key = store.device.key[:, :, : column + width].float().transpose(2, 3)
    grouped = query.view(batch, key.shape[1], -1, width, query.shape[3])
    first = torch.tensor(offsets, device=query.device)[:, None]
    block = max(1, (BLOCK_CUDA if query.is_cuda else BLOCK) // batch)
    for start in range(0, width, block):
        part = grouped[:, :, :, start : start + block].float() * scaling
        columns = torch.arange(column + start, column + start + part.shape[3], device=query.device)
        visible = max(column + start + part.shape[3] - min(offsets), 1)
        # these keys come before every query of the block
        by_all = max(column + start - max(offsets), 0)
        later = torch.arange(by_all, visible, device=query.device)
        hidden = later > (columns - first).clamp(min=0)[..., None]  # padding looks at token 0
        # query heads of a KV head are rows of one product: torch would copy the keys for each
        logits = capped(part.flatten(2, 3) @ key[..., :visible], softcap)
        logits = logits.unflatten(2, part.shape[2:4])
        logits[..., by_all:].masked_fill_(hidden[:, None, None], -torch.inf)
        yield columns, softmax(logits, sinks)
