"""Operators of a device tier on a GPU: a token of every row comes, and where tokens lie.

In torch here, as Triton kernels in `kvbench.memory.gpu`.
"""

from __future__ import annotations

import torch

from kvbench.kernels.operators import operator


@operator("kvbench.memory.gpu", writes=("keys", "values", "ids", "slots", "filled", "seen"))
def put_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor | None,
    slots: torch.Tensor,
    filled: torch.Tensor,
    seen: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Store the next token of every row and count it.

    Parameters
    ----------
    keys, values
        [T, width], the pool.
    ids
        [B, Hkv, capacity], the token in each slot of a head's room; None: slot = id.
    slots
        [B * Hkv], the pool's slot of the next token.
    filled
        [B, Hkv], slots filled.
    seen
        [B], tokens seen, the id of the next one.
    key, value
        [B, Hkv, 1, width], as they are held.
    """
    keys.index_copy_(0, slots, key.flatten(0, 2))
    values.index_copy_(0, slots, value.flatten(0, 2))
    if ids is not None:
        ids.scatter_(2, filled[..., None], seen.view(-1, 1, 1).expand(*filled.shape, 1))
    for counter in (slots, filled, seen):
        counter.add_(1)


@operator("kvbench.memory.gpu")
def locate_tokens(
    index: torch.Tensor, ids: torch.Tensor | None, filled: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool's slots of token ids, and which are ids; a token that is not here aborts.

    Parameters
    ----------
    index
        [B, Hkv, M], -1 = none: any slot.
    ids, filled
        as in `put_token`.
    first
        [B, Hkv], where the room of each head begins in the pool.
    """
    tokens, present = index.clamp(min=0), index >= 0
    if ids is None:
        slots, here = tokens, tokens < filled[..., None]
    else:
        slots = torch.searchsorted(ids, tokens).clamp(max=ids.shape[2] - 1)
        here = ids.gather(2, slots) == tokens
    torch._assert_async((here | ~present).all())
    return slots.masked_fill(~(here & present), 0) + first[..., None], present


@operator("kvbench.memory.gpu", writes=("listed", "last"))
def list_tokens(
    index: torch.Tensor,
    ids: torch.Tensor | None,
    filled: torch.Tensor,
    first: torch.Tensor,
    listed: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Write lists of the pool's slots as a paged kernel reads them, in pages of one token.

    Parameters
    ----------
    index
        [B, Hs, M], trailing -1, Hs a multiple of Hkv: lists of query heads.
    ids, filled, first
        as in `locate_tokens`.
    listed
        [B * Hs, pages] int32, of which the first M are written.
    last
        [B * Hs] int32, tokens of the last page where all pages but that one are full: below 1 where
        a list ends before.
    """
    of_kv_heads = index.reshape(*filled.shape, -1)
    slots, present = locate_tokens.reference(of_kv_heads, ids, filled, first)
    listed[:, : index.shape[2]] = slots.view(len(listed), -1)
    torch.sub(present.view(len(listed), -1).sum(dim=1), listed.shape[1] - 1, out=last)
