"""Compression of generated tokens (RACC, section 4.1 and Algorithm 1).

After every n generated tokens the queries of the last w, the observation window, have voted for the older ones, and a
share alpha of these stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import avg_pool1d

from kvbench.method import Shape, View
from methods.racc.ratio import share
from methods.racc.residents import NO_TOKEN, Residents, ascending, packed

Vote = Literal["softmax_l2", "softmax_all", "raw"]
Order = Literal["token", "cache"]


@dataclass(frozen=True)
class Cycle:
    """When generated tokens are compressed, and by which votes.

    Attributes:
        every, window: n and w, tokens between two compressions and in the observation window.
        alpha: share of L2 that stays.
        vote: softmax over L2, softmax over all that is resident, or the raw logits (equations 5 and 6).
        vote_kernel: width of the votes' mean pooling, odd.
        vote_order: whose neighbours it takes: by position, or as the published cache has them, found tokens first.
        shifted: the token before each chosen one stays, as in the published code (see `Voting.best`).
    """

    every: int = 400
    window: int = 40
    alpha: float = 0.6
    vote: Vote = "softmax_l2"
    vote_kernel: int = 5
    vote_order: Order = "token"
    shifted: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: expected a share in (0, 1]")
        if self.every <= self.window:
            raise ValueError(
                f"every={self.every}: expected more tokens than the observation window has, window={self.window}"
            )

    def votes(self, step: int) -> bool:
        """The query of decode step 1, 2, ... is one of the window's."""
        return (step - 1) % self.every >= self.every - self.window

    def ends(self, step: int) -> bool:
        """After this decode step generated tokens are compressed."""
        return step % self.every == 0


class Compressor:
    """Collects the votes of a window, and chooses what stays.

    Attributes:
        voting: the votes of each layer, while its window votes.
    """

    def __init__(self, cycle: Cycle, shape: Shape, view: View) -> None:
        self.cycle, self.shape, self.view = cycle, shape, view
        self.voting: dict[int, Voting] = {}

    def vote(self, layer: int, query: torch.Tensor, residents: Residents) -> None:
        """Add what the query [B, Hq, 1, D] of a step in the window says of L2: in fp32, summed over the group."""
        lengths = self.view.lengths(layer)
        if layer not in self.voting:
            starts = [length - 1 for length in lengths]  # the window begins with this token
            older = residents.older(starts, by_position=self.cycle.vote_order == "token")
            self.voting[layer] = Voting.over(older, ascending(residents.all(starts)))
        voting, way = self.voting[layer], self.cycle.vote
        keys = self.view.keys(layer)
        grouped = query.unflatten(1, (self.shape.kv_heads, -1))[:, :, :, 0].float()
        first = 0 if way == "softmax_all" else voting.first
        logits = grouped @ keys[:, :, first:].float().transpose(2, 3) * self.shape.scaling
        if way == "softmax_all":
            resident = ascending(residents.all(lengths))
            absent = (resident == NO_TOKEN)[:, :, None, : logits.shape[3]]
            logits = logits.masked_fill(absent, -torch.inf).softmax(dim=-1)
        slots = (voting.slots - first).clamp(min=0)[:, :, None].expand(-1, -1, self.shape.group, -1)
        of_older, absent = logits.gather(3, slots), (voting.ids == NO_TOKEN)[:, :, None]
        if way == "softmax_l2":
            of_older = of_older.masked_fill(absent, -torch.inf).softmax(dim=-1)
        voting.votes += of_older.masked_fill(absent, 0).sum(dim=2)

    def kept(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The share alpha of L2 with most votes, and what is lost: see `Voting.best`. The next window votes anew."""
        return self.voting.pop(layer).best(self.cycle)


@dataclass
class Voting:
    """The votes of one window for the tokens of L2.

    Attributes:
        ids: [B, Hkv, M] in the order of `Cycle.vote_order`, `NO_TOKEN` after the last.
        slots: their index among the tokens on the device, [B, Hkv, M].
        first: the smallest of these.
        votes: [B, Hkv, M] fp32, summed over queries and group.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    first: int
    votes: torch.Tensor

    @classmethod
    def over(cls, ids: torch.Tensor, resident: torch.Tensor) -> Voting:
        """No votes yet, for `ids` among the tokens on the device, which ascend."""
        slots = torch.searchsorted(resident, ids).clamp(max=resident.shape[2] - 1)
        return cls(ids, slots, int(slots.min()), torch.zeros(ids.shape, device=ids.device))

    def best(self, cycle: Cycle) -> tuple[torch.Tensor, torch.Tensor]:
        """The share alpha of each head's tokens with most votes, smoothed by mean pooling, in the order of `ids`.

        The published code gathers one place early: of each token that the votes chose the one before it stays. What is
        before the first is the prompt's last token, which is there anyhow; the last token of L2 nobody gathers.

        Returns:
            What stays [B, Hkv, M], and what is lost, neither kept nor dropped, [B, Hkv, 1 or 0]; -1 = none.
        """
        there = self.ids != NO_TOKEN
        smoothed = avg_pool1d(self.votes, cycle.vote_kernel, stride=1, padding=cycle.vote_kernel // 2)
        ranks = smoothed.masked_fill(~there, -torch.inf).argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        sizes = there.sum(dim=2)
        counts = [[share(cycle.alpha, size) for size in heads] for heads in sizes.tolist()]
        chosen = ranks < torch.tensor(counts, device=ranks.device)[..., None]
        lost = self.ids[:, :, :0]
        if cycle.shifted:
            chosen = torch.nn.functional.pad(chosen[:, :, 1:], (0, 1))
            last = self.ids.gather(2, (sizes - 1).clamp(min=0)[..., None])
            lost = torch.where(sizes[..., None] > 0, last, -1)
        kept = packed(torch.where(chosen, self.ids, -1))
        return kept[:, :, : max(map(max, counts))], lost
