"""RazorAttention: a few heads keep everything, the others a window (Tang et al. 2024,
"RazorAttention: Efficient KV Cache Compression Through Retrieval Heads", section 3).

Retrieval heads are those that look back to earlier copies of a token, or to what followed them,
found once for a model by `kvbench calibrate`. All other heads keep sinks and recent tokens; one
compensation token, the mean of the keys and values that a head has dropped, stands for all of these
with their number as weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Extra, HeadScores, Needs, Prompt, Selection, Shape, View
from methods.blocks.two_kinds import TwoKinds, by_head


@dataclass(eq=False)
class RazorAttention(TwoKinds):
    """Retrieval heads keep everything, the others the first `sinks` tokens, recent ones and one for
    the rest.

    C is the mean over the KV heads of all sparse layers. Of the retrieval heads those with the best
    scores, as many as leave the other heads half of C or more; these share out what is left. With
    budget=null all retrieval heads keep everything, and another head max(window, N / ratio) recent
    tokens of a prompt of N.

    As published the prompt is compressed and all that is generated stays. Where generated tokens
    count, the retrieval heads' are taken from the other heads', down to half of C; from then on
    they, too, keep recent tokens only.

    Parameters
    ----------
    heads
        "auto", the file of the model, or another file of `kvbench calibrate`.
    echo, induction
        share of the model's KV heads that are retrieval heads by either score.
    sinks
        first tokens that always stay.
    window, ratio
        see above (S_0 and C in the paper).
    """

    evicts = "counted"
    extra_entries = 1

    heads: str = "auto"
    echo: float = 0.01
    induction: float = 0.14
    sinks: int = 4
    window: int = 4000
    ratio: int = 5

    def __post_init__(self) -> None:
        self.needs = Needs(head_scores=self.heads)

    def rank(self, scores: HeadScores) -> list[tuple[int, int]]:
        """The best by either score."""
        return retrieval_heads(scores, self.echo, self.induction)

    # -- the budget --------------------------------------------------------------------------------

    def total(self, length: int) -> int:
        """Entries of all heads together, of a prompt of `length` tokens."""
        if self.budget.size is None:
            others = self.head_count - len(self.ranked)
            window = max(self.window, length // self.ratio)
            return len(self.ranked) * length + others * (self.sinks + window + 1)
        return self.head_count * self.budget.tokens(length)

    def least(self, length: int) -> int:
        """Entries that a head which does not retrieve keeps at least: half of C."""
        share = 0 if self.budget.size is None else self.total(length) // self.head_count // 2
        return max(self.sinks + 2, share)

    def fitting(self, length: int) -> int:
        """Retrieval heads that a prompt of `length` tokens leaves room for."""
        least = self.least(length)
        if length <= least:
            return len(self.ranked)
        room = self.total(length) - self.head_count * least
        return min(len(self.ranked), max(0, room) // (length - least))

    def entries(self, length: int, generated: int) -> tuple[int, int]:
        """Entries of a retrieval head, and of another, after so many generated tokens."""
        retrieving = self.fitting(length)
        others, total = self.head_count - retrieving, self.total(length)
        whole = length + (generated if self.budget.counts_generated else 0)
        other = max((total - retrieving * whole) // others, self.least(length)) if others else 0
        retrieval = (total - others * other) // retrieving if retrieving else other
        free = 0 if self.budget.counts_generated else generated
        return retrieval + free, (other or retrieval) + free

    def first_tokens(self, length: int) -> int:
        """As many of any prompt."""
        return self.sinks

    def mean_rule(self, length: int, generated: int) -> float:
        """C, the mean over heads; generated tokens on top of it, unless they count."""
        free = 0 if self.budget.counts_generated else generated
        return self.total(length) / self.head_count + free

    # -- one generation ----------------------------------------------------------------------------

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No head has dropped anything yet."""
        super().begin(shape, budget, view, context)
        self.needs = replace(self.needs, host_step=self.rolls)  # reads what heads let go of
        # of each layer, the sums [2, B, Hkv, D] of the keys and of the values that its heads have
        # dropped
        self.dropped: dict[int, torch.Tensor] = {}
        # on a GPU: of each layer the compensation tokens, and for which starts
        self.compensating: dict[int, tuple[list[tuple[int, int]], Extra]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Drop what lies between the sinks and the recent tokens, and remember its mean."""
        sums = torch.zeros(
            2, *prompt.keys.shape[:2], prompt.keys.shape[3], device=prompt.keys.device
        )
        for row, starts in enumerate(self.starts):
            for retrieves, start in enumerate(starts):
                matching = (self.retrieves[layer][row] == retrieves).to(sums.device)
                for which, block in enumerate((prompt.keys, prompt.values)):
                    between = block[row, :, self.sinks : start].float()
                    width = between.shape[2]
                    sums[which, row, :, :width] += between.sum(dim=1) * matching[:, None]
        self.dropped[layer] = sums
        super().prefill(layer, prompt)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Remember what the new token pushes out of the recent ones."""
        pairs = zip(self.starts, self.former_starts, strict=True)
        most = max(now - before for pair in pairs for now, before in zip(*pair, strict=True))
        if most > 0:
            self._take_in(layer, most)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, the sinks, and the compensation token of those between."""
        selection = super().select(layer, query)
        if not self.drops:
            return selection
        starts, extra = self.compensating.get(layer) or ([], None)
        if extra is None or starts != self.starts:
            extra = self._compensation(layer)
            if query.is_cuda:
                self.compensating[layer] = self.starts, extra
        return replace(selection, extra=extra)

    def _take_in(self, layer: int, most: int) -> None:
        """Add to the sums the tokens that have just left the recent ones, `most` of any head."""
        device = self.dropped[layer].device
        before = self._first(layer, self.former_starts).to(device)
        now = self._first(layer, self.starts).to(device)
        ids = before[..., None] + torch.arange(most, device=now.device)
        departed = ids < now[..., None]
        ids = torch.where(departed, ids, -1)
        for which, read in enumerate((self.view.keys, self.view.values)):
            vectors = read(layer, ids).float() * departed[..., None]
            self.dropped[layer][which, ..., : vectors.shape[3]] += vectors.sum(dim=2)

    def _compensation(self, layer: int) -> Extra:
        """The mean of what each head has dropped, with its number as weight; none (log 0) where
        that is nothing.
        """
        first = self._first(layer, self.starts).to(self.dropped[layer].device)
        count = (first - self.sinks).clamp(min=0).float()
        means = (self.dropped[layer] / count.clamp(min=1)[..., None]).to(self.shape.dtype)
        key, value = means[..., None, :]
        value = value[..., : self.shape.latent_dim or None]
        return Extra(key, value, count.log().repeat_interleave(self.shape.group, dim=1)[..., None])


def retrieval_heads(scores: HeadScores, echo: float, induction: float) -> list[tuple[int, int]]:
    """(layer, KV head) of a model's retrieval heads, those with the best score first.

    They are the round(echo * n) heads of all n with the largest echo scores, and so for induction.
    """
    by_echo, by_induction = by_head(scores.echo), by_head(scores.induction)

    def best(of: dict[tuple[int, int], float], share: float) -> list[tuple[int, int]]:
        ranked = sorted(of, key=lambda head: -of[head])
        return ranked[: round(share * len(of))]

    chosen = {*best(by_echo, echo), *best(by_induction, induction)}
    return sorted(chosen, key=lambda head: (-max(by_echo[head], by_induction[head]), head))
