"""Probes: how good is a selection, measured against full attention on the same query?

A probe keeps a shadow copy of all keys and values, outside the audit, so a run with probes
publishes no timings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvbench.attention.sinks import softmax
from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import uploaded
from kvbench.method import Selection, Shape

RECENT_STEPS = 32  # selections in which `seen` looks for an id (LycheeCluster, Fig. 9)


class Probe:
    """Compares selections with full attention on every n-th decode step, per layer and query head.

    Measures, each 0..1 but for the error, means over rows and steps:
        recall: share of the exact top-k keys that were selected, k = the number selected.
        mass: attention probability of the selected keys.
        error: |output - full output| / |full output|.
        jaccard: selected now and one step ago, over selected in either.
        seen: share of the selected that was selected in one of the last 32 steps.

    Parameters
    ----------
    shape
        sizes of the generation.
    every
        decode steps between two measurements.
    """

    def __init__(self, shape: Shape, every: int) -> None:
        self.shape, self.every = shape, every
        self.stores: dict[int, LayerStore] = {}
        self._steps: dict[int, int] = {}
        self._recent: dict[int, deque[torch.Tensor]] = {}
        self._sums: dict[int, dict[str, torch.Tensor]] = {}  # [Hq] each
        self._counts: dict[int, dict[str, int]] = {}
        self._curve: dict[int, dict[str, list[float]]] = {}  # of a step, the mean of each layer

    def begin_layer(self, layer: int, store: LayerStore) -> None:
        """Copy the prompt of one sparse layer."""
        key, value = store.device.key, store.device.value
        kv_heads, capacity = key.shape[1:3]
        size = len(key), kv_heads, key.shape[3], capacity
        shadow = LayerStore(*size, key.dtype, key.device, grows=True, latent_dim=store.latent_dim)
        shadow.device.key.copy_(key)
        shadow.device.value.copy_(value)
        shadow.seal_prompt(store.lengths)
        self.stores[layer] = shadow
        self._steps[layer] = 0
        self._recent[layer] = deque(maxlen=RECENT_STEPS)
        self._sums[layer], self._counts[layer] = {}, {}

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take note of a token [B, Hkv, 1, D] that is read and not decoded, such as a
        later turn's.
        """
        self.stores[layer].append(key, value)

    def step(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        selection: Selection | None,
        resident: torch.Tensor,
        out: torch.Tensor,
        active: Sequence[bool],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Take note of a decode step, and measure it when its turn has come.

        Parameters
        ----------
        query, out
            [B, Hq, 1, D], before and after attention.
        key, value
            [B, Hkv, 1, D] of the current token.
        selection
            what was attended; None = the tokens `resident` [B, Hkv, n].
        active
            rows that still generate; the others are not measured.
        sinks
            [Hq], see `kvbench.attention.sinks`; their share of the attention is no key's.
        """
        self.append(layer, key, value)
        chosen = self._chosen(self.stores[layer], selection, resident)
        if self._steps[layer] % self.every == 0:
            self._measure(layer, query, chosen, out, list(active), sinks)
        self._steps[layer] += 1
        self._recent[layer].append(chosen)

    def report(self) -> dict[str, Any]:
        """Means over layers and heads; under "layers" the values of each layer by query head; under
        "steps" those of each measured step: "step" (1 is the first decode step) and, for each
        measure, a list as long, with None where a step has no step before it.
        """
        layers = {
            str(layer): {
                name: (total / self._counts[layer][name]).tolist() for name, total in sums.items()
            }
            for layer, sums in self._sums.items()
            if sums
        }
        names = {name for values in layers.values() for name in values}
        means = {
            name: (
                sum(sum(values[name]) / len(values[name]) for values in layers.values())
                / len(layers)
            )
            for name in sorted(names)
        }
        steps: dict[str, list[Any]] = {"step": [step + 1 for step in self._curve]}
        for name in sorted(names):
            curve = [values.get(name) for values in self._curve.values()]
            steps[name] = [
                round(sum(layer_values) / len(layer_values), 4) if layer_values else None
                for layer_values in curve
            ]
        return {**means, "layers": layers, "steps": steps} if layers else {}

    def _chosen(
        self, shadow: LayerStore, selection: Selection | None, resident: torch.Tensor
    ) -> torch.Tensor:
        """[B, Hq, n] bool, the tokens each query head attended."""
        index = resident if selection is None else uploaded(selection.index, resident.device)
        index = index.expand(
            index.shape[0], max(index.shape[1], self.shape.kv_heads), index.shape[2]
        )
        index = index.repeat_interleave(self.shape.query_heads // index.shape[1], dim=1)
        chosen = torch.zeros(
            *index.shape[:2], max(shadow.lengths) + 1, dtype=torch.bool, device=index.device
        )
        chosen.scatter_(2, torch.where(index < 0, chosen.shape[2] - 1, index), True)
        return chosen[..., :-1]

    def _measure(
        self,
        layer: int,
        query: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
        active: list[bool],
        sinks: torch.Tensor | None,
    ) -> None:
        add = partial(self._add, layer, active)
        stored = self.stores[layer].device.resident()
        count = stored.key.shape[2]
        rows = query.view(*stored.key.shape[:2], -1, query.shape[3]).float()
        logits = self.shape.logits(rows @ stored.key.float().transpose(2, 3))
        if stored.mask is not None:
            logits = logits.masked_fill(~stored.mask[:, :, None], -torch.inf)
        weights = softmax(logits, sinks)
        full = (weights @ stored.value.float()).view(len(query), self.shape.query_heads, -1)
        weights = weights.view(len(query), self.shape.query_heads, count)

        size = chosen.sum(dim=2)
        order = weights.argsort(dim=2, descending=True, stable=True)
        best = torch.arange(count, device=weights.device) < size[..., None]
        hits = (chosen.gather(2, order) & best).sum(dim=2)
        add("recall", hits / size.clamp(min=1))
        add("mass", (weights * chosen).sum(dim=2))
        add("error", (out[:, :, 0].float() - full).norm(dim=2) / full.norm(dim=2).clamp(min=1e-30))
        if self._recent[layer]:
            last = _padded(self._recent[layer][-1], count)
            add("jaccard", (chosen & last).sum(dim=2) / (chosen | last).sum(dim=2).clamp(min=1))
            recently = torch.stack([_padded(recent, count) for recent in self._recent[layer]]).any(
                dim=0
            )
            add("seen", (chosen & recently).sum(dim=2) / size.clamp(min=1))

    def _add(self, layer: int, active: list[bool], name: str, values: torch.Tensor) -> None:
        """Add one step's values [B, Hq]."""
        total = values[active].float().mean(dim=0).cpu()
        self._curve.setdefault(self._steps[layer], {}).setdefault(name, []).append(
            float(total.mean())
        )
        sums, counts = self._sums[layer], self._counts[layer]
        sums[name] = sums.get(name, torch.zeros_like(total)) + total
        counts[name] = counts.get(name, 0) + 1


def _padded(chosen: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[2]))
