"""What a forward pass through a KVCache is given: its mask and positions, and a token of
several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from kvbench.config import ConfigError
from kvbench.memory.transfer import uploaded

UNPADDED = (
    "without the prompt's padding tokens would stand in other positions; expected the mask of the"
    " whole conversation"
)


def lengths_and_offsets(
    padding: torch.Tensor | None, batch: int, columns: int
) -> tuple[list[int], list[int]]:
    """Lengths and offsets of a left-padded prompt from its 2D mask [B, >= first chunk]."""
    if padding is None:
        return [columns] * batch, [0] * batch
    real = padding != 0
    if not bool(real.any(dim=1).all()):
        raise ValueError(
            "the first prefill chunk holds only padding of some row; raise prefill_chunk_size"
        )
    offsets = real.int().argmax(dim=1).tolist()
    if any(not bool(row[offset:].all()) for row, offset in zip(real, offsets, strict=True)):
        raise ValueError("kvbench needs the padding on the left: tokenizer.padding_side = 'left'")
    return [columns - offset for offset in offsets], offsets


def check_length(length: int | None, columns: int, ended: bool = False) -> None:
    """Whether so many columns may be those of a prompt of `length`, so far or, where it has ended,
    in all.

    Raises
    ------
    ConfigError
        they may not.
    """
    if length is not None and (columns > length or (ended and columns < length)):
        more = "" if ended else " or more"
        raise ConfigError(
            f"prompt_length={length}: the prompt has {columns} columns{more}; expected those"
        )


def check_rows(cached_rows: int, rows: int) -> None:
    """Whether a cache that holds so many rows, -1 before the first, may read so many.

    Raises
    ------
    ValueError
        it may not.
    """
    if cached_rows not in (-1, rows):
        raise ValueError(
            f"this KVCache holds {cached_rows} rows and is given {rows}: take a new one"
        )


class Columns(NamedTuple):
    """What a forward pass reads.

    Attributes
    ----------
    name
        by which it is given it, "input_ids" or "inputs_embeds".
    rows, width
        how much that is.
    mask
        [rows, columns so far]; None: no padding.
    """

    name: str
    rows: int
    width: int
    mask: torch.Tensor | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], past: int) -> Columns:
        """Of a pass after `past` columns.

        Raises
        ------
        ValueError
            its mask is no 2D one of all columns, those seen among them.
        """
        name = "input_ids" if arguments.get("input_ids") is not None else "inputs_embeds"
        (rows, width), mask = arguments[name].shape[:2], arguments.get("attention_mask")
        shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        if mask is not None and shape != [rows, past + width]:
            raise ValueError(
                f"attention_mask={shape}: this KVCache has read {past} tokens and is given {width},"
                f" so expected [{rows}, {past + width}]; a KVCache serves one conversation at a"
                " time"
            )
        return cls(name, rows, width, mask)

    def last_tokens(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The token ids of the last column, [rows]; -1 of embeddings."""
        ids: torch.Tensor | None = arguments.get("input_ids")
        return torch.full((self.rows,), -1) if ids is None else ids[:, -1]


def shown_tokens(
    tokens: torch.Tensor, mask: torch.Tensor | None, offsets: Sequence[int], past: int
) -> torch.Tensor:
    """Tokens [B] on the CPU, and with them, as a GPU makes the host wait for each, a look at the
    mask of their pass.

    Raises
    ------
    ValueError
        it does not show all that was read but the prompt's padding, of `offsets` columns.
    """
    if mask is None and any(offsets):
        raise ValueError(f"attention_mask=None: {UNPADDED}")
    if mask is None:
        return tokens.cpu()
    fits = ~_misfits(mask, offsets).any() if any(offsets) else mask.all()
    if not mask.is_cpu:
        both = torch.cat([tokens, fits.to(tokens).view(1)]).cpu()
        tokens, fits = both[:-1], both[-1]
    if not fits:
        _refuse_mask(_misfits(mask, offsets), offsets, past)
    return tokens.cpu()


def _misfits(mask: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """Where a mask [B, n] is other than the prompt's padding with ones after it: bools [B, n]."""
    first = uploaded(torch.tensor(offsets), mask.device)[:, None]
    return (mask == 0) != (torch.arange(mask.shape[1], device=mask.device) < first)


def _refuse_mask(misfits: torch.Tensor, offsets: Sequence[int], past: int) -> NoReturn:
    row, column = misfits.nonzero()[0].tolist()
    if column < offsets[row]:
        raise ValueError(f"attention_mask: {UNPADDED}")
    where = f"attention_mask: hides column {column} of row {row}"
    if column >= past:
        raise ValueError(
            f"{where}, a new token, as where a later turn was padded; expected turns of one length,"
            " or a KVCache for each row, and ones for a row that has ended"
        )
    raise ValueError(
        f"{where}, which this KVCache has read, and it hides no token later on; expected the"
        " prompt's mask with ones after it, or without these tokens a new KVCache"
    )


def refuse_packed(positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Refuse positions [B, q] of a prompt that begin anew within a row, as those of packed
    sequences do.

    Parameters
    ----------
    mask
        [B, >= q], whose last q columns are theirs; None: no padding.

    Raises
    ------
    ValueError
        they do.
    """
    if positions is None or positions.ndim != 2:  # of several axes: places in an image
        return
    back = positions.diff(dim=1) < 0
    if mask is not None:
        back = back & (mask[:, -positions.shape[1] : -1] != 0)
    if bool(back.any()):
        raise ValueError(
            "position_ids: begin anew within a row, as of sequences that are packed; expected one"
            " sequence a row, the shorter ones padded on the left"
        )


def columns(arguments: dict[str, Any], name: str, at: int, past: int) -> dict[str, Any]:
    """What a forward pass was given of its token `at` alone, after `past` tokens read before it."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    return {
        name: arguments[name][:, at : at + 1],
        "attention_mask": None if mask is None else mask[:, : past + at + 1],
        "position_ids": None if positions is None else positions[..., at : at + 1],
    }
