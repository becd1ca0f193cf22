"""PyramidKV: SnapKV's votes with budgets that fall from layer to layer (Cai et al. 2024,
"PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", section 4).

Lower layers spread their attention and get more of the budget, upper layers gather it on few tokens
and get less. The mean over the layers is the budget, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from methods.snapkv import SnapKV


@dataclass(eq=False)
class PyramidKV(SnapKV):
    """Keep c_l voted prompt tokens in layer l, and the window in each; the mean of c_l + W is C.

    A prompt of fewer than 2 (C - W) tokens gives every layer the same, as the published code does.
    Where generated tokens count, the layers' C - w voted tokens are shared out likewise.

    Parameters
    ----------
    beta
        the last layer keeps 1 / beta of the mean, the first what makes up for it.
    """

    beta: int = 20
    window: int = 8

    def layer_budgets(self, length: int) -> list[int]:
        """The pyramid of a prompt of `length` tokens, from the first sparse layer to the last."""
        capacity = self.budget.tokens(length)
        fixed, layers = self.fixed(capacity), len(self.shape.sparse_layers)
        voted = capacity - fixed
        if length <= capacity or length < 2 * voted:
            return [capacity] * layers
        return [fixed + count for count in pyramid(voted, layers, self.beta, length - fixed)]


def pyramid(mean: int, layers: int, beta: int, most: int) -> list[int]:
    """Tokens of each layer, falling by equal steps; they sum to layers * mean.

    The published code rounds the step down, so that its layers sum to more. Here each layer is
    rounded: up in the lower half, down in the upper, which cancels.

    Parameters
    ----------
    mean
        tokens per layer, on average.
    layers
        how many, at least 1.
    beta
        the last layer gets mean / beta, rounded down, and the first 2 mean - mean / beta.
    most
        tokens there are; where the first layer would get more, it gets these, and the last what is
        left.
    """
    first = min(2 * mean - mean // beta, most)
    last = 2 * mean - first
    steps = max(layers - 1, 1)
    lower = [first - (first - last) * layer // steps for layer in range(layers // 2)]
    middle = [mean] * (layers % 2)
    return [*lower, *middle, *(first + last - count for count in reversed(lower))]
