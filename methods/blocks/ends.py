"""Both ends of the prompt, which any method that evicts can be asked to keep whatever its scores
say.

Much of what a clever score keeps stands there: instructions, the question, attention sinks. With
the ends protected, methods differ by what they keep of the rest. For `methods.blocks.scorer`,
`methods.blocks.evictor` and their like.
"""

from __future__ import annotations

import math

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Shape, View


class KeepsEnds(Method):
    """Never drop the first and the last n = floor(p C) prompt tokens of a row, inside C; with p = 0
    nothing changes.

    A prompt of 2 n tokens or fewer stays whole.

    Attributes
    ----------
    protect
        p. `kvbench.config.build` sets it from the key of the method's YAML.
    ends
        n of each row.
    """

    protect: float = 0.0

    def end(self, capacity: int) -> int:
        """n of a budget of `capacity` tokens."""
        return math.floor(round(self.protect * capacity, 9))  # 0.29 * 100 is below 29 in binary

    def reserved(self, capacity: int) -> int:
        """Tokens of `capacity` that the method's own rule keeps whatever their scores, as the most
        recent ones.
        """
        return 0

    def check_options(self, budget: Budget) -> None:
        """Refuse a share that leaves nothing to choose of a budget in tokens."""
        super().check_options(budget)
        if isinstance(budget.size, int):
            self.check_end(self.end(budget.size), budget.size)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle what is protected of each row."""
        super().begin(shape, budget, view, context)
        self.ends = [self.end(capacity) for capacity in self.capacities]

    def check_budget(self) -> None:
        """Refuse what leaves nothing to choose of the budget of a row, too."""
        super().check_budget()
        for capacity in self.capacities if self.protect else ():
            self.check_end(self.end(capacity), capacity)

    def check_end(self, end: int, capacity: int) -> None:
        """Refuse two ends that leave nothing to choose of a list of `capacity` tokens."""
        reserved = self.reserved(capacity)
        if end and 2 * end >= capacity - reserved:
            taken = f", {reserved} of them taken," if reserved else ""
            raise ValueError(
                f"protect={self.protect}: twice {end} tokens leave nothing to choose of"
                f" {capacity}{taken} in this budget; expected a smaller share, or 0"
            )


def at_ends(
    ids: torch.Tensor, lengths: int | torch.Tensor, ends: int | torch.Tensor
) -> torch.Tensor:
    """True on ids of the first and the last `ends` tokens of prompts of `lengths` tokens, and on -1
    if there are any.

    Parameters
    ----------
    ids
        of any shape, later ids than the prompt's among them.
    lengths, ends
        broadcast to it.
    """
    return (ids < ends) | ((ids >= lengths - ends) & (ids < lengths))
