"""Which tokens of a layer are on the device: the prompt (L1), older generated tokens (L2), the
window (L3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from methods.blocks.ragged import stacked
from methods.blocks.topk import interleave
from methods.racc.index import Tokens

NO_TOKEN = torch.iinfo(torch.int64).max  # sorts after every token id


class Residents:
    """The tokens of one layer whose home is the device.

    Parameters
    ----------
    lengths
        prompt tokens of each row; all are on the device at first.
    kv_heads
        of the layer.
    group
        lists for each of them: G where every query head has a cache of its own, else 1.
    search_prompt
        prompt tokens that are evicted may be found again.

    Attributes
    ----------
    device_ids
        tokens on the device since the last eviction, [B, H, M] with H = kv_heads * group, trailing
        -1.
    since
        tokens of each row that there were then; all later ones are on the device, too.
    count
        tokens of `device_ids` per list, on average.
    prompt
        L1, [B, H, M].
    generated
        those of `device_ids` that are not L1, [B, H, M], in the order of the cache.
    lost
        tokens that no search shall find, [B, H, M], -1 = none.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        kv_heads: int,
        device: torch.device,
        group: int = 1,
        search_prompt: bool = True,
    ) -> None:
        self._kv_heads, self._heads = kv_heads, kv_heads * group
        self._device = device
        self._searched_from = [0 if search_prompt else length for length in lengths]
        self.lost = torch.empty(len(lengths), self._heads, 0, dtype=torch.int64, device=device)
        self.hold(self.range([0] * len(lengths), lengths), lengths)
        self.end_prompt()

    def end_prompt(self) -> None:
        """What is held now is L1."""
        self.prompt, self.generated = self.device_ids, self.device_ids[:, :, :0]

    def hold(self, ids: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """Note that of the tokens so far `ids` [B, H, M] are on the device."""
        self.device_ids, self.since = packed(ids), lengths
        self.count = float((ids >= 0).sum()) / (ids.shape[0] * ids.shape[1])

    def all(self, lengths: Sequence[int], *others: torch.Tensor) -> torch.Tensor:
        """All tokens on the device when rows have `lengths`, newer ones first, then others: [B, H,
        M], trailing -1.
        """
        return packed(torch.cat([self.range(self.since, lengths), self.device_ids, *others], dim=2))

    def of_kv_heads(self, lengths: Sequence[int]) -> torch.Tensor:
        """The same, a group's lists joined, by position: [B, Hkv, M], `NO_TOKEN` after the last."""
        ids = self.all(lengths)
        most = ids.shape[2] * ids.shape[1] // self._kv_heads
        return ascending(interleave(ids, self._kv_heads, most))

    def older(self, lengths: Sequence[int], by_position: bool) -> torch.Tensor:
        """L2, if the window begins after `lengths` tokens: [B, H, M], `NO_TOKEN` after the last.

        By position, or in the order of the cache: found tokens, those kept before, newer ones.
        """
        ids = torch.cat([self.generated, self.range(self.since, lengths)], dim=2)
        return ascending(ids) if by_position else listed(packed(ids))

    def evicted(self) -> list[list[Tokens]]:
        """[B][Hkv] tokens that are on the host since the last eviction, and may be found there."""
        on_device = torch.cat([self.device_ids, self.lost], dim=2).cpu()
        on_device = on_device.reshape(on_device.shape[0], self._kv_heads, -1)
        longest = max(self.since)
        gone = torch.ones(*on_device.shape[:2], longest + 1, dtype=torch.bool)
        gone.scatter_(2, torch.where(on_device < 0, longest, on_device), False)
        rows = []
        for heads, first, length in zip(gone, self._searched_from, self.since, strict=True):
            rows.append([first + head[first:length].nonzero()[:, 0].numpy() for head in heads])
        return rows

    def range(self, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
        """Tokens first[b] .. last[b] - 1 of each row, [B, H, M] with trailing -1."""
        rows = list(zip(first, last, strict=True))
        if len(set(rows)) == 1:
            return torch.arange(*rows[0], device=self._device).expand(len(rows), self._heads, -1)
        return stacked(
            [torch.arange(*row, device=self._device).expand(self._heads, -1) for row in rows]
        )


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """Ids [B, H, M], -1 = none, in ascending order with `NO_TOKEN` after the last."""
    return listed(ids).sort(dim=2).values


def listed(ids: torch.Tensor) -> torch.Tensor:
    """Ids [B, H, M] with `NO_TOKEN` for -1."""
    return torch.where(ids < 0, NO_TOKEN, ids)


def packed(ids: torch.Tensor) -> torch.Tensor:
    """Ids [B, H, M] with every -1 at the end, the others in their order."""
    if not ids.is_cuda and bool((ids >= 0).all()):
        return ids
    return ids.gather(2, (ids < 0).to(torch.int8).argsort(dim=2, stable=True))
