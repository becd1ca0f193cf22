"""Q-Filters: keys are worth what they have of the direction in which queries lie (Godey et al.
2025, "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", section 3; its public
code names no licence, kvpress' press is Apache-2.0).

The queries of a head lie mostly on one side of the origin, along their first singular vector. Where
that points is measured once for a model, by `kvbench calibrate method=qfilter`; no query of the
prompt is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.method import Method, Needs, Prompt
from methods.blocks.scorer import Scorer

EVERY_QUERY = 1 << 30
EVERY = 4  # so many tokens of a text give one query to the decomposition


@dataclass(eq=False)
class QFilter(Scorer):
    """Keep the prompt tokens whose keys have most of the mean direction of a group's query heads.

    Parameters
    ----------
    filters
        "auto", the file of the model, or another file of `kvbench calibrate method=qfilter`.
    window
        last tokens of the prompt, which stay.
    """

    filters: str = "auto"
    window: int = 0

    def __post_init__(self) -> None:
        self.needs = Needs(head_scores=self.filters, measures="filters")

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The key along the direction, [B, Hkv, N]."""
        measured = self.context.head_scores
        assert measured is not None, "the harness hands over what `needs` asks for"
        directions = torch.tensor(measured.filters[layer], device=prompt.keys.device)
        return (prompt.keys.float() @ directions[:, :, None])[..., 0]

    def calibrator(self) -> Directions:
        """Measures the directions."""
        return Directions()


class Directions(Method):
    """Keeps a quarter of all queries that it is shown, of each layer [Hq, n, D], with RoPE."""

    needs = Needs(query_window=EVERY_QUERY)

    def __init__(self) -> None:
        self.queries: dict[int, list[torch.Tensor]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Take in a prompt's queries."""
        self.queries.setdefault(layer, []).append(prompt.queries[0, :, ::EVERY].float())

    def measure(
        self, texts: Sequence[list[int]], read: Callable[[list[int]], None]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of each group, the mean of its heads' first singular vectors, each turned to where most
        of the head's queries lie.
        """
        for text in texts:
            read(text)
        table = []
        for queries in (torch.cat(parts, dim=1) for parts in self.queries.values()):
            first = torch.linalg.eigh((queries.mT @ queries).double()).eigenvectors[..., -1].float()
            ahead = ((queries @ first[:, :, None]) > 0).float().mean(dim=1) > 0.5  # [Hq, 1]
            turned = torch.where(ahead, first, -first).unflatten(0, (self.shape.kv_heads, -1))
            table.append(turned.mean(dim=1).tolist())
        return {"filters": table}, {"queries": sum(part.shape[1] for part in self.queries[0])}
