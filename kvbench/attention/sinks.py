"""Sinks that a model has learned (gpt-oss): a logit of each query head, which takes its share of
the softmax and adds nothing to the output. In a decode step a sink is one more entry, with a value
of zero, which every executor knows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of logits [B, Hkv, G, ..., n] beside sinks [Hq], which get the rest of 1; None: there
    are none.
    """
    if sinks is None:
        return logits.softmax(dim=-1)
    sink_logits = (
        sinks.to(logits.dtype)
        .view(1, *logits.shape[1:3], *[1] * (logits.ndim - 3))
        .expand(*logits.shape[:-1], 1)
    )
    return torch.cat([logits, sink_logits], dim=-1).softmax(dim=-1)[..., :-1]


def with_sinks(
    selection: Selection | None, store: LayerStore, sinks: torch.Tensor | None, key: torch.Tensor
) -> Selection | None:
    """A selection (None: all tokens of the store) with sinks [Hq] as its last extra entry; as it is
    without sinks.

    Parameters
    ----------
    key
        [B, Hkv, n, D], like the stored ones.
    """
    if sinks is None:
        return selection
    selection = selection or Selection(store.resident_ids())
    nothing = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    sink = Extra(nothing, nothing, sinks.float().view(1, -1, 1).expand(len(key), -1, 1))
    return replace(selection, extra=joined(selection.extra, sink))


def joined(first: Extra | None, second: Extra) -> Extra:
    """The extra entries of both, one after the other."""
    if first is None:
        return second
    key, value = (
        torch.cat(both, dim=2) for both in ((first.key, second.key), (first.value, second.value))
    )
    return Extra(
        key, value, torch.cat([first.log_weight.float(), second.log_weight.float()], dim=2)
    )
