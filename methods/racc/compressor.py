"""Compression of generated tokens (RACC, section 4.1 and Algorithm 1).

After every n generated tokens the queries of the last w, the observation window, have voted for the
older ones, and a share alpha of these stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import avg_pool1d, pad

from kvbench.method import Shape, View
from methods.racc.ratio import share
from methods.racc.residents import NO_TOKEN, Residents, ascending, packed
from methods.racc.settings import RACCOptions


@dataclass
class Compressor:
    """Collects the votes of a window, and chooses what stays.

    Attributes
    ----------
    voting
        the votes of each layer, while its window votes.
    """

    options: RACCOptions
    shape: Shape
    view: View
    voting: dict[int, Voting] = field(default_factory=dict)

    def vote(self, layer: int, query: torch.Tensor, residents: Residents) -> None:
        """Add what the query [B, Hq, 1, D] of a step in the window says of L2: in fp32, summed over
        a list's heads.
        """
        lengths = self.view.lengths(layer)
        if layer not in self.voting:
            starts = [length - 1 for length in lengths]  # the window begins with this token
            older = residents.older(starts, by_position=self.options.vote_order == "token")
            self.voting[layer] = Voting.over(older, residents.of_kv_heads(starts))
        voting, way = self.voting[layer], self.options.vote
        keys = self.view.keys(layer)
        grouped = query.unflatten(1, (self.shape.kv_heads, -1))[:, :, :, 0].float()
        first = 0 if way == "softmax_all" else voting.first
        logits = self.shape.logits(grouped @ keys[:, :, first:].float().transpose(2, 3))
        if way == "softmax_all":
            present = self._by_group(self._present(residents, lengths))[..., : logits.shape[3]]
            logits = logits.masked_fill(~present, -torch.inf).softmax(dim=-1)
        slots = self._by_group((voting.slots - first).clamp(min=0))
        of_older = logits.gather(3, slots.expand(-1, -1, self.shape.group, -1))
        absent = self._by_group(voting.ids == NO_TOKEN)
        if way == "softmax_l2":
            of_older = of_older.masked_fill(absent, -torch.inf).softmax(dim=-1)
        of_lists = of_older.masked_fill(absent, 0).flatten(1, 2)
        voting.votes += of_lists.unflatten(1, (voting.ids.shape[1], -1)).sum(dim=2)

    def _by_group(self, lists: torch.Tensor) -> torch.Tensor:
        """[B, H, M] as [B, Hkv, 1 or G, M]."""
        return lists.unflatten(1, (self.shape.kv_heads, -1))

    def _present(self, residents: Residents, lengths: Sequence[int]) -> torch.Tensor:
        """[B, H, n] bool: which of the tokens on the device, in their order, each list holds."""
        list_ids, resident = ascending(residents.all(lengths)), residents.of_kv_heads(lengths)
        slots = slots_of(list_ids, resident).masked_fill(list_ids == NO_TOKEN, resident.shape[2])
        sizes = *list_ids.shape[:2], resident.shape[2] + 1
        present = torch.zeros(sizes, dtype=torch.bool, device=list_ids.device)
        return present.scatter(2, slots, True)[..., :-1]

    def pop_best(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The share alpha of L2 with most votes, and what is lost: see `Voting.best`.

        The next window votes anew.
        """
        return self.voting.pop(layer).best(self.options)


@dataclass
class Voting:
    """The votes of one window for the tokens of L2.

    Attributes
    ----------
    ids
        [B, H, M] in the order of `RACCOptions.vote_order`, `NO_TOKEN` after the last; H as in
        `Residents`.
    slots
        their index among the tokens on the device, [B, H, M].
    first
        the smallest of these.
    votes
        [B, H, M] fp32, summed over queries, and over the query heads that share a list.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    first: int
    votes: torch.Tensor

    @classmethod
    def over(cls, ids: torch.Tensor, resident: torch.Tensor) -> Voting:
        """No votes yet, for `ids` [B, H, M] among the tokens on the device [B, Hkv, n], which
        ascend.
        """
        slots = slots_of(ids, resident)
        return cls(ids, slots, int(slots.min()), torch.zeros(ids.shape, device=ids.device))

    def best(self, options: RACCOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """The share alpha of each head's tokens with most votes, smoothed by mean pooling, in the
        order of `ids`.

        With `shifted`, as in the published code, the token before each chosen one stays in its
        stead. Before the first is the prompt's last token, which stays anyway; the last token of L2
        never does.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            What stays [B, H, M], and what is lost, neither kept nor dropped, [B, H, 1 or 0]; -1 =
            none.
        """
        there = self.ids != NO_TOKEN
        kernel = options.vote_kernel
        smoothed = avg_pool1d(self.votes, kernel, stride=1, padding=kernel // 2)
        smoothed = smoothed.masked_fill(~there, -torch.inf)
        ranks = smoothed.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        sizes = there.sum(dim=2)
        counts = [[share(options.alpha, size) for size in heads] for heads in sizes.tolist()]
        chosen = ranks < torch.tensor(counts, device=ranks.device)[..., None]
        lost = self.ids[:, :, :0]
        if options.shifted:
            chosen = pad(chosen[:, :, 1:], (0, 1))
            last = self.ids.gather(2, (sizes - 1).clamp(min=0)[..., None])
            lost = torch.where(sizes[..., None] > 0, last, -1)
        retained = packed(torch.where(chosen, self.ids, -1))
        return retained[:, :, : max(map(max, counts))], lost


def slots_of(ids: torch.Tensor, resident: torch.Tensor) -> torch.Tensor:
    """Index of ids [B, H, M] among their KV heads' tokens on the device [B, Hkv, n], which ascend;
    any for others.
    """
    slots = torch.searchsorted(resident, ids.view(*resident.shape[:2], -1))
    return slots.clamp(max=resident.shape[2] - 1).view(ids.shape)
