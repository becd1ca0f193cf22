"""Executors of a Selection: from (query, store, selection) to the attention output.

`reference` is the oracle, fp32 and slow; `torch` gathers and calls scaled_dot_product_attention. All agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvbench.attention import reference
from kvbench.attention import torch as torch_executor
from kvbench.method import Selection
from kvbench.store import LayerStore

if TYPE_CHECKING:  # at run time the name `torch` is this package's executor
    from torch import Tensor

EXECUTORS = ("reference", "torch")


class Executor(Protocol):
    """One decode step's attention in one layer."""

    def __call__(
        self,
        query: Tensor,
        store: LayerStore,
        selection: Selection | None,
        scaling: float,
        probabilities: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: [B, Hq, 1, D].
            store: the layer's keys and values.
            selection: what to attend; None = everything resident, in place.
            scaling: factor on the logits.
            probabilities: also return the attention probabilities.

        Returns:
            Output [B, Hq, 1, D] in the query's dtype, and probabilities [B, Hq, M (+ E)] or None.
        """


def executor(name: str) -> tuple[str, Executor]:
    """The executor called `name`, or the best one here for "auto", with its true name."""
    if name in ("auto", "torch"):
        return "torch", torch_executor.attend
    if name == "reference":
        return "reference", reference.attend
    raise ValueError(f"attention={name}: no such executor; one of auto, {', '.join(EXECUTORS)}")
