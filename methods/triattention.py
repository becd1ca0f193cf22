"""TriAttention: keys scored by what queries will ask on average (2026, "TriAttention", and its
public code).

Before RoPE the queries of a head lie close to their mean. What a key will receive is then known
before any query comes: its product with the mean query at the distances to come, and the more, the
longer it is, where queries scatter around their mean. Means and lengths are measured once for a
model, by `kvbench calibrate`. Generated tokens fill a buffer; when it is full the C best tokens
stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Rotation, Shape, View
from methods.blocks.ends import KeepsEnds, at_ends
from methods.blocks.topk import top_earliest

DISTANCES = 2 ** torch.arange(17)  # 1, 2, 4 .. 65536: how far ahead of now the queries to come are


@dataclass(eq=False)
class TriAttention(KeepsEnds):
    """Keep C tokens, of the prompt and of what is generated, whenever the buffer is full; not the
    newest as such.

    The scores of a query head are made comparable by their mean and deviation; of a group the
    largest counts. Where generated tokens count, the buffer is a part of C, a quarter at most.

    Parameters
    ----------
    heads
        "auto", the file of the model, or another file of `kvbench calibrate`.
    buffer
        tokens that come before the cache is pruned anew.
    pin_prompt
        the prompt stays, inside C, which has to be larger (as published). Else it is scored as all
        tokens.
    sets
        "model", a KV head keeps the same tokens in every layer, by the mean over the layers;
        "layer", its own.
    """

    evicts = "always"

    heads: str = "auto"
    buffer: int = 128
    pin_prompt: bool = False
    sets: Literal["model", "layer"] = "model"

    def __post_init__(self) -> None:
        self.needs = Needs(head_scores=self.heads, rotation=True, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle what is kept of each row, and what each query head asks on average.

        Raises
        ------
        ValueError
            the head scores are of another model or have no queries, or a pinned prompt leaves no
            room.
        """
        super().begin(shape, budget, view, context)
        self.keep_counts = [capacity - self.reserved(capacity) for capacity in self.capacities]
        self.limits = [
            capacity + (0 if budget.counts_generated else self.buffer)
            for capacity in self.capacities
        ]
        self.sizes = [*shape.lengths]  # tokens of each row in the cache
        for length, keeps in zip(shape.lengths, self.keep_counts, strict=True):
            if self.pin_prompt and length >= keeps:
                raise ValueError(
                    f"method.pin_prompt=true: a prompt of {length} tokens, of which"
                    f" budget={budget.size} keeps {keeps}; expected a budget that has room for"
                    " generated tokens, or method.pin_prompt=false"
                )
        self._take_scores()

    def reserved(self, capacity: int) -> int:
        """The buffer, where it is inside."""
        return min(self.buffer, capacity // 4) if self.budget.counts_generated else 0

    def _take_scores(self) -> None:
        """Of each layer, the mean query over the distances to come, and how far queries scatter in
        each pair.
        """
        scores, rotation = self.context.head_scores, self.context.rotation
        assert scores is not None and rotation is not None, (
            "the harness hands over what `needs` asks for"
        )
        if not scores.query_means:
            raise ValueError(
                "method.heads: scores without mean queries; expected a file of kvbench calibrate"
            )
        self.speed = speeds(rotation, self.shape.head_dim, self.shape.device)
        ahead = turns(self.speed, DISTANCES.to(self.speed.device)).mean(dim=0)
        self.means: dict[int, torch.Tensor] = {}  # [Hq, D / 2] complex
        self.scatter: dict[int, torch.Tensor] = {}  # [Hq, D / 2], E|q| - |E q|
        for layer in self.shape.sparse_layers:
            means = torch.tensor(scores.query_means[layer]).double()
            sizes = torch.tensor(scores.query_sizes[layer]).double()
            pairs = torch.complex(*means.chunk(2, dim=-1))
            device = self.shape.device_of(layer)
            self.means[layer] = pairs.to(device) * ahead.to(device)
            self.scatter[layer] = (sizes - pairs.abs()).to(device)

    def end_prefill(self) -> None:
        """Prune the prompts that fill the cache, as the authors' vLLM plugin does.

        The code of their experiments prunes after decode steps alone, so that the first attends the
        whole prompt.
        """
        self._prune()

    def end_step(self) -> None:
        """Prune the rows whose buffer is full."""
        self.sizes = [size + 1 for size in self.sizes]
        self._prune()

    def _prune(self) -> None:
        rows = [row for row, size in enumerate(self.sizes) if size >= self.limits[row]]
        if not rows:
            return
        layers = self.shape.sparse_layers
        cache = {layer: self.view.resident(layer) for layer in layers}
        scores = {layer: self._scores(layer, cache[layer], rows) for layer in layers}
        if self.sets == "model":
            here = [of_layer.to(self.shape.device) for of_layer in scores.values()]
            scores = self.shape.for_layers(torch.stack(here).mean(dim=0))
        for row in rows:
            self.sizes[row] = self.keep_counts[row]
        room = min(limit - size for limit, size in zip(self.limits, self.sizes, strict=True))
        for layer in layers:
            counts = torch.tensor(self.sizes, device=cache[layer].device)
            best = top_earliest(scores[layer], max(self.sizes), counts)
            ids = cache[layer].gather(2, best.clamp(min=0)).masked_fill(best < 0, -1)
            self.view.keep(layer, ids, room)

    def _scores(self, layer: int, ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """What each token [B, Hkv, n] is worth; infinite in other rows, -inf where there is no
        token.
        """
        keys, lengths = self.view.keys(layer, ids), self.view.lengths(layer)
        scores = torch.where(ids < 0, -torch.inf, torch.inf)
        for row in rows:
            first, last = self.shape.lengths[row] if self.pin_prompt else 0, self.sizes[row]
            received = self.received(layer, keys[row, :, first:last].float(), lengths[row])
            deviation = received.std(dim=-1, correction=0, keepdim=True).clamp(min=1e-6)
            worth = ((received - received.mean(dim=-1, keepdim=True)) / deviation).amax(dim=1)
            stays = at_ends(ids[row, :, first:last], self.shape.lengths[row], self.ends[row])
            scores[row, :, first:last] = worth.masked_fill(stays, torch.inf)
        return scores

    def received(self, layer: int, keys: torch.Tensor, now: int) -> torch.Tensor:
        """What the query heads will give to keys [Hkv, n, D] on average, `now` tokens seen,
        unscaled: [Hkv, G, n].

        For each pair f of a key that stood at p, with k_f before RoPE, the mean over the distances
        d of |E q_f| |k_f| cos(omega_f (now - p + d) + arg(E q_f conj k_f)), and (E|q_f| - |E q_f|)
        |k_f|. The first is a product: of the mean query at now + d, and the key as it is stored.
        """
        query = self.means[layer] * turns(self.speed, now).to(keys.device)
        query = torch.cat([query.real, query.imag], dim=-1).float().unflatten(0, (len(keys), -1))
        scatter = self.scatter[layer].float().unflatten(0, (len(keys), -1))
        return query @ keys.mT + scatter @ torch.hypot(*keys.chunk(2, dim=-1)).mT

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, and as published the buffer."""
        return self.budget.tokens(length) + (0 if self.budget.counts_generated else self.buffer)


def speeds(rotation: Rotation, width: int, device: torch.device) -> torch.Tensor:
    """The angle by which a position turns each pair (f, f + D / 2), [D / 2] in float64: read off
    position 1.

    Raises
    ------
    ValueError
        the model pairs other dims, or does not turn all of them.
    """
    unit = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)]).double().to(device)
    first = torch.ones(1, 1, 2, dtype=torch.int64, device=device)
    turned, across = rotation.turn(torch.stack([unit, unit.flip(0)])[None, None], first)[0, 0]
    real, imaginary = turned.chunk(2)
    is_turn = torch.allclose(torch.hypot(real, imaginary), torch.ones_like(real), rtol=0, atol=1e-5)
    if not is_turn or not torch.allclose(across, torch.cat([-imaginary, real]), rtol=0, atol=1e-5):
        raise ValueError(
            "triattention: this model's rotary positions do not turn the dims f and f + D / 2 as a"
            " pair"
        )
    return torch.atan2(imaginary, real)


def turns(speed: torch.Tensor, positions: torch.Tensor | int) -> torch.Tensor:
    """The turn of each pair by a number of positions, or by each of several [n], as complex
    numbers: [(n,) D / 2].
    """
    angle = (positions[:, None] if isinstance(positions, torch.Tensor) else positions) * speed
    return torch.polar(torch.ones_like(angle), angle)
