"""Operators with arguments that they meet, for the tests in Triton's interpreter and its compiler.

Numbers here are small integers, whose sums are exact in any order: a kernel must choose what its reference does, and
many of them are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.config import bind_methods
from kvbench.kernels.operators import Operator

bind_methods()

from methods.blocks import topk  # noqa: E402


@dataclass
class Call:
    """An operator, and arguments of it; `large` ones are no work for the interpreter."""

    operator: Operator
    id: str
    arguments: Callable[[], tuple[Any, ...]]
    large: bool = False
    close: float = 0.0  # what a result that is rounded may be off by


def integers(*size: int, low: int = -4, high: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Random small integers as numbers of a type."""
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls() -> Iterator[Call]:
    """All of them."""
    yield from ranking()


# -- lists of scores ---------------------------------------------------------------------------------------------------


def ranking() -> Iterator[Call]:
    """Ties, zeros of both signs, infinities, what is no number, lists that are shorter than what is wanted."""
    for count, most in ((1, 1), (5, 5), (100, 17), (2500, 64)):
        for wanted in (None, [[most], [most // 2]], [[0, 1, most], [most // 2, 2 * most, 3]]):
            counts = None if wanted is None else torch.tensor(wanted)
            yield Call(topk.ranked_ids, f"{count}-{most}-{wanted}", lambda a=count, b=counts, c=most: (scores(a), b, c))
    yield Call(topk.ranked_ids, "131072-1024", lambda: (scores(131072), None, 1024), large=True)
    yield Call(topk.ranked_ids, "8192-4096", lambda: (scores(8192), None, 4096), large=True)


def scores(count: int) -> torch.Tensor:
    drawn = integers(2, 3, count)
    drawn[:, 0] += torch.rand(2, count, generator=torch.Generator().manual_seed(count))
    drawn[0, 1] *= -1  # zeros of both signs
    drawn[:, 2, count // 3 :] = -torch.inf
    drawn[1, 1, :: count // 2 + 1] = torch.inf
    drawn[0, 0, 0] = torch.nan
    return drawn
