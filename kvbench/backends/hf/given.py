"""What a forward pass through a KVCache is given: its padding, and a token of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbench.config import ConfigError

UNPADDED = (
    "without the prompt's padding tokens would stand in other positions; expected the mask of the whole conversation"
)


def left_padded(padding: torch.Tensor | None, batch: int, columns: int) -> tuple[list[int], list[int]]:
    """Lengths and offsets of a left-padded prompt from its 2D mask [B, >= first chunk]."""
    if padding is None:
        return [columns] * batch, [0] * batch
    if not bool(padding.any(dim=1).all()):
        raise ValueError("the first prefill chunk holds only padding of some row; raise prefill_chunk_size")
    offsets = padding.int().argmax(dim=1).tolist()
    if any(not bool(row[offset:].all()) for row, offset in zip(padding, offsets, strict=True)):
        raise ValueError("kvbench needs the padding on the left: tokenizer.padding_side = 'left'")
    return [columns - offset for offset in offsets], offsets


def check_length(length: int | None, columns: int, ended: bool = False) -> None:
    """Whether so many columns may be those of a prompt of `length`, so far or, where it has ended, in all.

    Raises:
        ConfigError: they may not.
    """
    if length is not None and (columns > length or (ended and columns < length)):
        more = "" if ended else " or more"
        raise ConfigError(f"prompt_length={length}: the prompt has {columns} columns{more}; expected those")


def check_mask(mask: torch.Tensor | None, seen: int, width: int, offsets: Sequence[int]) -> None:
    """Whether a mask is that of `width` columns after those seen, and after the prompt pads nothing else.

    Args:
        mask: [B, seen + width]; None: pads nothing.
        offsets: columns of padding before each row of the prompt that was read; () while it is read.

    Raises:
        ValueError: it is not.
    """
    if mask is None:
        if any(offsets):
            raise ValueError(f"attention_mask=None: {UNPADDED}")
        return
    if mask.ndim != 2 or mask.shape[1] != seen + width:
        raise ValueError(
            f"attention_mask={list(mask.shape)}: this KVCache has read {seen} tokens and is given {width}, so "
            f"expected [{len(mask)}, {seen + width}]; a KVCache serves one conversation at a time"
        )
    for row, offset in zip(mask, offsets, strict=False) if width > 1 else ():
        if bool(row[:offset].any()):
            raise ValueError(f"attention_mask: {UNPADDED}")
        if not bool(row[offset:].all()):
            raise ValueError("a later turn was padded: give all rows turns of one length, or each row its own KVCache")


def columns(given: dict[str, Any], name: str, at: int, seen: int) -> dict[str, Any]:
    """What a forward pass was given of its token `at` alone, after `seen` tokens read before it."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    return {
        name: given[name][:, at : at + 1],
        "attention_mask": None if mask is None else mask[:, : seen + at + 1],
        "position_ids": None if positions is None else positions[..., at : at + 1],
    }
