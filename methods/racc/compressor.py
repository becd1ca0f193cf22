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
from methods.racc.residents import NO_TOKEN, Residents, ascending

Vote = Literal["softmax_l2", "softmax_all", "raw"]


@dataclass(frozen=True)
class Cycle:
    """When generated tokens are compressed, and by which votes.

    Attributes:
        every, window: n and w, tokens between two compressions and in the observation window.
        alpha: share of L2 that stays.
        vote: softmax over L2, softmax over all that is resident, or the raw logits (equations 5 and 6).
        vote_kernel: width of the votes' mean pooling, odd.
    """

    every: int = 400
    window: int = 40
    alpha: float = 0.6
    vote: Vote = "softmax_l2"
    vote_kernel: int = 5

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
            self.voting[layer] = Voting.over(residents.older(starts), ascending(residents.all(starts)))
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

    def kept(self, layer: int) -> torch.Tensor:
        """The share alpha of L2 with most votes, [B, Hkv, M], -1 = none; the next window votes anew."""
        return self.voting.pop(layer).best(self.cycle.alpha, self.cycle.vote_kernel)


@dataclass
class Voting:
    """The votes of one window for the tokens of L2.

    Attributes:
        ids: [B, Hkv, M] ascending, `NO_TOKEN` after the last.
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
        """No votes yet, for `ids` among the tokens on the device, both ascending."""
        slots = torch.searchsorted(resident, ids).clamp(max=resident.shape[2] - 1)
        return cls(ids, slots, int(slots.min()), torch.zeros(ids.shape, device=ids.device))

    def best(self, alpha: float, kernel: int) -> torch.Tensor:
        """The share alpha of each head's tokens with most votes, smoothed by mean pooling: [B, Hkv, M], -1 = none."""
        smoothed = avg_pool1d(self.votes, kernel, stride=1, padding=kernel // 2)
        ranked = smoothed.masked_fill(self.ids == NO_TOKEN, -torch.inf).argsort(dim=2, descending=True, stable=True)
        sizes = (self.ids != NO_TOKEN).sum(dim=2).tolist()
        counts = torch.tensor([[share(alpha, size) for size in heads] for heads in sizes], device=ranked.device)
        chosen = torch.arange(ranked.shape[2], device=ranked.device) < counts[..., None]
        return torch.where(chosen, self.ids.gather(2, ranked), -1)[:, :, : int(counts.max())]
