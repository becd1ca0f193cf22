"""vAttention: heavy tokens exactly, and of the others a sample as large as an error bound asks for
(Desai et al. 2025, "vAttention: Verified Sparse Attention"; code in xAlg-ai/sparse-attention-hub,
Apache-2.0).

Of the tokens that are neither sinks, recent, nor heavy, a first sample says how much their weights
scatter. By the central limit theorem so many are then drawn that the softmax's denominator errs by
no more than a share epsilon, but with probability delta; each stands for those that were not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Selection, Shape, View
from methods.blocks.products import products
from methods.blocks.ragged import stacked


@dataclass(eq=False)
class VAttention(Method):
    """Attend at most C tokens of each KV head, the current one included; a group samples as one, as
    its query head asks that needs most. Heavy are the keys with most attention of the group.

    Parameters
    ----------
    epsilon, delta
        of the bound.
    sinks
        first tokens, always attended.
    window, heavy, base
        shares of C: recent tokens, heavy ones, and the first sample.
    """

    needs = Needs(crops=True)

    epsilon: float = 0.05
    delta: float = 0.05
    sinks: int = 4
    window: float = 0.125
    heavy: float = 0.25
    base: float = 0.125

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Nothing was estimated yet."""
        super().begin(shape, budget, view, context)
        self.quantile = NormalDist().inv_cdf(1 - self.delta)
        self.counts = torch.zeros(3, dtype=torch.int64)  # estimates; those that held, had room

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Score every key seen so far, as the published code does for its oracle's tokens."""
        logits = products(query, self.view.keys(layer)) * self.shape.scaling
        rows = [
            self._row(layer, row, logits[row, ..., :length])
            for row, length in enumerate(self.view.lengths(layer))
        ]
        index = stacked([ids for ids, _ in rows])
        weights = index.new_zeros(index.shape, dtype=torch.float32)
        for row, (ids, log_weight) in enumerate(rows):
            weights[row, :, : ids.shape[1]] = log_weight
        return Selection(index, weights.repeat_interleave(self.shape.group, dim=1))

    def _row(self, layer: int, row: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logarithms of weights [Hkv, C] of a row, by its logits [Hkv, G, n]."""
        length = logits.shape[2]
        most = min(self.capacities[row], length)
        recent, heavy = max(1, int(self.window * most)), int(self.heavy * most)
        shared = logits.softmax(dim=2).sum(dim=1)
        shared[:, : self.sinks] = shared[:, length - recent :] = torch.inf
        known = min(self.sinks + recent + heavy, length)
        generator = torch.Generator().manual_seed(self.context.layer_seed(layer, row) ^ length)
        order = torch.rand(shared.shape, generator=generator).to(shared.device)
        order.scatter_add_(1, shared.topk(known, dim=1).indices, torch.ones_like(order))
        ids = order.argsort(dim=1, descending=True, stable=True)[:, :most]
        if most == length:
            return ids, torch.zeros_like(ids, dtype=torch.float32)
        return self._sampled(ids, logits, known, max(2, int(self.base * most)))

    def _sampled(
        self, ids: torch.Tensor, logits: torch.Tensor, known: int, base: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ids [Hkv, C], the first `known` and as many as the bound asks for, the rest -1; each
        of these stands for as many as were not drawn.
        """
        weights = (logits - logits.amax(dim=2, keepdim=True)).exp()
        ranked = weights.gather(2, ids[:, None].expand(-1, logits.shape[1], -1))
        first, rest = ranked[..., known : known + base], logits.shape[2] - known
        total = ranked[..., :known].sum(dim=2) + rest * first.mean(dim=2)
        needed = (self.quantile * first.std(dim=2) * rest / (self.epsilon * total)) ** 2
        room, place = ids.shape[1] - known, torch.arange(ids.shape[1], device=ids.device)
        counts = needed.amax(dim=1, keepdim=True).floor().clamp(base, room)  # [Hkv, 1]
        log_weight = torch.where(place < known, 0, (rest / counts).log())
        drawn = place < known + counts
        estimate = (ranked * (log_weight.exp() * drawn)[:, None]).sum(dim=2)
        held = (estimate / weights.sum(dim=2) - 1).abs() <= self.epsilon
        self.counts += torch.stack([torch.ones_like(held), held, needed <= room]).sum((1, 2)).cpu()
        return torch.where(drawn, ids, -1), log_weight

    def report(self) -> dict[str, float]:
        """In which share of steps and query heads the denominator erred by epsilon at most, and C
        had room for what the bound asked for.
        """
        every, held, had_room = self.counts.tolist()
        return {"bound_held": held / max(every, 1), "bound_had_room": had_room / max(every, 1)}
