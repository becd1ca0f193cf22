"""RaaS: what no step looks at any more goes first (Hu et al. 2025, "RaaS: Reasoning-Aware Attention
Sparsity for Efficient LLM Reasoning").

Reasoning has milestones, tokens that matter for some steps and then never again. A page gets the
time of a step as its stamp when the step attends it with more than alpha, and the page with the
oldest stamp is evicted. The prompt stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Shape, View
from methods.blocks import list_kernels
from methods.blocks.evictor import Evictor
from methods.blocks.held import TokenLists
from methods.blocks.topk import Granularity
from methods.snapkv import SnapKV


class _Prompt(SnapKV):
    """SnapKV that protects a quarter of a small C, as where generated tokens count, so that votes
    have the rest.
    """

    def recent(self, capacity: int) -> int:
        """Last tokens that are protected in a budget of `capacity` tokens."""
        return min(self.window, capacity // 4)

    def check_budget(self) -> None:
        """RaaS checks its own; that of a pinned prompt is none of a user's."""


@dataclass(eq=False)
class RaaS(Evictor):
    """Attend the prompt and C generated tokens, those whose pages were looked at last.

    The paper estimates what a page receives from its representative, as Quest does; here it is the
    most that any of its tokens received. No official code is known, and what becomes of a prompt
    beyond the budget is not said.

    Parameters
    ----------
    alpha
        attention probability above which a page is stamped, of a group the mean.
    page_size
        tokens that share a stamp and go together; 1: each token has its own. Generated tokens begin
        a page.
    pin_prompt
        the prompt stays, outside C. Otherwise, and where generated tokens count, it is cut to C as
        SnapKV does, and its pages age as others do, the ones with fewest votes first.
    granularity
        "kv_head", a list for the group; "query_head", one for each query head.
    """

    host_step = False

    alpha: float = 1e-4
    page_size: int = 16
    pin_prompt: bool = True
    granularity: Granularity = "kv_head"

    def __post_init__(self) -> None:
        super().__init__(_Prompt(), self.granularity)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle whether the prompt is pinned."""
        self.pinned = self.pin_prompt and not budget.counts_generated
        super().begin(shape, budget, view, context)

    def reserved(self, capacity: int) -> int:
        """The page of the current token."""
        return self.page_size

    def stays(self, capacity: int, length: int) -> int:
        """The current token is one of the C; a pinned prompt is outside."""
        return capacity - 1 + (length if self.pinned else 0)

    def first_cut(self, length: int) -> int:
        """C tokens are generated before one goes, where the prompt is pinned."""
        pinned = self.pin_prompt and not self.budget.counts_generated
        return self.budget.tokens(length) + 1 if pinned else 1

    def prompt_budget(self) -> Budget:
        """A pinned prompt stays whole."""
        return Budget(max(self.shape.lengths)) if self.pinned else super().prompt_budget()

    def note_prompt(self, layer: int, tokens: TokenLists, prompt: Prompt) -> None:
        """Stamps before those of the steps, between -1 and 0: later ones for pages with
        more votes.
        """
        stamps = self._of_pages(layer, tokens, -1 / (1 + tokens.numbers))
        tokens.numbers.copy_(stamps.masked_fill(tokens.ids < 0, torch.inf))

    def note(self, layer: int, tokens: TokenLists, attention: torch.Tensor) -> None:
        """Stamp with the time of the step what was looked at, and the page that the current token
        is in.
        """
        looked = attention.scatter(2, tokens.counts[..., None] - 1, torch.inf)
        step = (self.view.seen(layer)[:, None, None] - self.lengths[layer]).float()
        stamped = self._of_pages(layer, tokens, looked) > self.alpha
        tokens.numbers.copy_(torch.where(stamped, step, tokens.numbers))

    def make_room(self, layer: int, tokens: TokenLists) -> None:
        """Evict the page with the oldest stamp."""
        if tokens.width > min(self.limits):
            worth, pages = self.worth(layer, tokens), self._pages(layer, tokens)
            oldest = worth.argmin(dim=2, keepdim=True)
            # of a page at an end the rest stays
            goes = (pages == pages.gather(2, oldest)) & worth.isfinite()
            size = goes.sum(dim=2, keepdim=True)
            full = (tokens.counts > self.limit[layer])[..., None]
            tokens.drop(oldest, size * full, max(self.limits))

    def worth(self, layer: int, tokens: TokenLists) -> torch.Tensor:
        """The stamps; a pinned prompt stays."""
        if self.pinned:
            return tokens.numbers.masked_fill(tokens.ids < self.lengths[layer], torch.inf)
        return super().worth(layer, tokens)

    def _pages(self, layer: int, tokens: TokenLists) -> torch.Tensor:
        """The page of each token, [B, H, width]; there is one that begins with the first generated
        token.
        """
        far = torch.iinfo(torch.int64).max // 2  # where there is no token
        return torch.where(tokens.ids < 0, far, tokens.ids - self.lengths[layer]) // self.page_size

    def _of_pages(self, layer: int, tokens: TokenLists, numbers: torch.Tensor) -> torch.Tensor:
        """The largest number of each token's page, [B, H, width]."""
        if self.page_size == 1:
            return numbers
        if numbers.device.type == "cpu":
            largest = torch.empty_like(numbers)
            ids, firsts = tokens.ids.contiguous().numpy(), self.lengths[layer].view(-1).numpy()
            arrays = numbers.contiguous().numpy(), largest.numpy()
            list_kernels.largest_of_pages(ids, firsts, self.page_size, *arrays)
            return largest
        pages = self._pages(layer, tokens)
        number = torch.zeros_like(pages)  # of the page in its list
        number[..., 1:] = (pages[..., 1:] != pages[..., :-1]).cumsum(dim=2)
        most = torch.zeros_like(numbers).scatter_reduce_(
            2, number, numbers, "amax", include_self=False
        )
        return most.gather(2, number)
