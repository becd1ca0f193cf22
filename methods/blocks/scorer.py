"""What methods that score the prompt's tokens once and keep the best have in common: all but the
score.

Pruning, rows of different lengths, both accountings and the rule are here;
`docs/guide/write_a_method.md` has an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.kernels.operators import operator
from kvbench.method import Context, Prompt, Selection, Shape, View
from methods.blocks.ends import KeepsEnds
from methods.blocks.head_budgets import HeadBudgets
from methods.blocks.ragged import padded, stacked
from methods.blocks.topk import Lists, interleave, top_earliest

# most recent tokens protected where generated tokens count, at most a quarter of the budget
ROLLING_WINDOW = 32
NEVER = 1 << 62  # tokens that nobody generates


class Scorer(KeepsEnds):
    """Keep the C prompt tokens with the largest scores, once, after the prompt.

    Subclass, and write `score`.

    As such methods are published, generated tokens are kept on top of C. Where they count (unified
    accounting, or generated=counted), C - w scored tokens and the w most recent ones stay, w =
    min(32, C / 4): generated tokens push older ones out. That takes a budget of 4 tokens or more.
    Protected ends of the prompt are among the scored ones, and the recent ones are then those of
    the other tokens.

    Where each query head keeps tokens of its own, it attends these alone, and their union over the
    group is what is held. Under unified accounting the lists of a group are joined by rank and cut
    to C, which all of it attends.

    Attributes
    ----------
    window
        last tokens of the prompt that stay whatever their scores, as an observation window does.
    granularity
        whether a KV head keeps C tokens, or each query head, or the layer the same in all of its
        heads.
    heads
        how these heads share out what they keep together; None: each keeps C.
    """

    evicts: Literal["counted", "always"] = "counted"
    window: int = 0
    granularity: Lists = "kv_head"
    heads: HeadBudgets | None = None

    def __post_init__(self) -> None:
        """Called once the options are there, which are fields of a dataclass: what follows from
        them, such as `needs`. Here nothing does.
        """

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """How much each prompt token is worth to each KV head, [B, Hkv, N]: the larger, the sooner
        it is kept.

        With granularity "query_head" to each query head, [B, Hq, N]; with "layer" to all heads, [B,
        1, N].

        Of equal scores the earlier token is kept. What stands at and beyond a row's length is
        ignored, and so are the scores of tokens that are protected.
        """
        raise NotImplementedError

    def layer_budgets(self, length: int) -> list[int]:
        """Tokens that each sparse layer keeps of a prompt of `length` tokens, C on average.

        Here C in each.
        """
        return [self.budget.tokens(length)] * len(self.shape.sparse_layers)

    def recent(self, capacity: int) -> int:
        """Last tokens that are protected in a budget of `capacity` tokens."""
        return min(ROLLING_WINDOW, capacity // 4) if self.budget.counts_generated else self.window

    def reserved(self, capacity: int) -> int:
        """The recent ones."""
        return self.recent(capacity)

    def fixed(self, capacity: int) -> int:
        """Tokens that stay whatever their scores, of a longer prompt than `capacity`: both ends and
        the recent ones.
        """
        return self.end(capacity) + self._last(self.end(capacity), self.recent(capacity))

    def _last(self, end: int, window: int) -> int:
        """Protected tokens at the end of a prompt.

        The recent ones that move on come before its protected end.
        """
        return end + window if self.budget.counts_generated else max(end, window)

    def protected(self, prompt: Prompt) -> torch.Tensor:
        """[B, 1, N] bool: the tokens that stay whatever their scores, and what stands beyond a
        row's length.
        """
        last = last_tokens(prompt, [*map(self._last, self.ends, self.windows)])
        ends = torch.tensor(self.ends, device=last.device)[:, None, None]
        return last | (torch.arange(last.shape[2], device=last.device) < ends)

    @property
    def at_rest(self) -> bool:
        """Where generated tokens do not count, and no query head chooses for itself."""
        return self.granularity != "query_head" and not self.budget.counts_generated

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Share the budget of each row out between the layers."""
        super().begin(shape, budget, view, context)
        self.windows = [self.recent(capacity) for capacity in self.capacities]
        rows = [self.layer_budgets(length) for length in shape.lengths]
        layers = dict(zip(shape.sparse_layers, zip(*rows, strict=True), strict=True))
        # of each row, the protected tokens included
        self.budgets: dict[int, tuple[int, ...]] = layers
        self.recents = [self._first_recent(row) for row in range(shape.batch)]
        # of each layer and row, [H, n] that were kept for their scores, trailing -1; not where all
        # that is held is attended
        self.scored: dict[int, list[torch.Tensor]] = {}
        # of each layer, what `newest_and_scored` takes of them
        self.lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.steps = 0

    def _first_recent(self, row: int) -> tuple[int, int]:
        """The first of the recent tokens as the prompt ends, and the one after the last of them."""
        end = self.ends[row] if self.budget.counts_generated else 0
        last = max(self.shape.lengths[row] - end, 0)
        return min(max(last - self.windows[row], end), last), last

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep the protected tokens and those with the best scores; a prompt within its budget
        stays whole.
        """
        counts = [*map(min, self.budgets[layer], prompt.lengths)]
        whole = counts == [*prompt.lengths]
        if whole and self.at_rest:
            return
        ids, _ = self.best(layer, prompt)
        if not whole:
            self.view.keep(layer, ids, ROLLING_WINDOW if self.budget.counts_generated else None)
        if not self.at_rest:
            most = self._most_of_heads(layer, prompt)
            self.scored[layer] = [
                _without(ids[row, :, : most[row]], first, last)
                for row, (first, last) in enumerate(self.recents)
            ]

    def best(self, layer: int, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """The protected tokens and those with the best scores.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            Ids [B, H, n], the protected ones first, then best first, trailing -1; and the scores of
            all [B, H, N], infinite for protected ones. H is the number of KV heads, or of query
            heads where each has its own.

        Raises
        ------
        FloatingPointError
            a score is no number.
        """
        counts = [*map(min, self.budgets[layer], prompt.lengths)]
        scores = self.score(layer, prompt).masked_fill(self.protected(prompt), torch.inf)
        real = prompt.valid()
        if real is not None:
            scores = scores.masked_fill(~real[:, None], -torch.inf)
        if scores.isnan().any():
            raise FloatingPointError(
                f"layer {layer}: a score is no number; keys or queries are too large to square"
            )
        limits = torch.tensor(counts, device=scores.device)
        if self.heads is None:
            limits = limits[:, None].expand(scores.shape[:2])
        else:
            limits = self.heads.counts(scores, limits)
        most = max(self._most_of_heads(layer, prompt))
        ids = top_earliest(scores, most, limits)  # the protected ones first
        if self.budget.unified and self.granularity == "query_head":
            of_groups = limits.unflatten(1, (self.shape.kv_heads, -1)).sum(dim=2)
            ids = interleave(ids, self.shape.kv_heads, most, of_groups // self.shape.group)
        return ids, scores

    def _most_of_heads(self, layer: int, prompt: Prompt) -> list[int]:
        """Tokens of each row that one of its heads may keep."""
        return [
            self._most_of_head(min(capacity, length), length)
            for capacity, length in zip(self.budgets[layer], prompt.lengths, strict=True)
        ]

    def _most_of_head(self, capacity: int, length: int) -> int:
        """Tokens that one head may keep of a prompt of `length` tokens where heads keep `capacity`
        on average.
        """
        if self.heads is None:
            return capacity
        choosing = self.shape.kv_heads if self.granularity == "kv_head" else self.shape.query_heads
        return self.heads.most(capacity, self.fixed(self.budget.tokens(length)), length, choosing)

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """All that is held, in place, or of each head what is its own and what C still holds."""
        return None if self.at_rest else Selection(self._attended(layer))

    def end_step(self) -> None:
        """Now and then forget what has left the rolling window."""
        self.steps += 1
        if self.budget.counts_generated and self.steps % ROLLING_WINDOW == 0:
            for layer in self.shape.sparse_layers:
                self.view.keep(layer, self._attended(layer), ROLLING_WINDOW)

    def _attended(self, layer: int) -> torch.Tensor:
        """The window and the generated tokens, as far as C holds them if they count, and the scored
        ones, [B, H, M].

        H is the number of query heads where each has its own, of KV heads where not.
        """
        if self.shape.device_of(layer).type == "cuda":
            ids: torch.Tensor = newest_and_scored(*self._lists(layer), self._most_on_device(layer))
            return ids
        rows = []
        for row, length in enumerate(self.view.lengths(layer)):
            scored, prompt = self.scored[layer][row], self.shape.lengths[row]
            first, last = self.recents[row]
            if self.budget.counts_generated:  # which push the oldest recent ones out
                first += max(0, length - max(self.budgets[layer][row], prompt))
            end = prompt - last  # the protected end, which is among the scored ones
            newest = torch.arange(first, length - end, device=scored.device)
            if end:
                newest = newest + end * (newest >= last)
            rows.append(torch.cat([newest.expand(scored.shape[0], -1), scored], dim=1))
        return stacked(rows)

    def _lists(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The scored tokens of all rows, tokens seen, and limits, as of `newest_and_scored`; on a
        GPU in the same memory in every step.
        """
        lists = self.lists.get(layer)
        if lists is None:
            pushing = self.budget.counts_generated
            limits = [
                (first, last, length - last, max(capacity, length) if pushing else NEVER)
                for (first, last), length, capacity in zip(
                    self.recents, self.shape.lengths, self.budgets[layer], strict=True
                )
            ]
            scored, columns = stacked(self.scored[layer]), torch.tensor(limits).T.contiguous()
            if scored.is_cuda:
                columns = columns.pin_memory()
            lists = scored, columns.to(scored.device, non_blocking=True)
            if scored.is_cuda:
                self.lists[layer] = lists
        return lists[0], self.view.seen(layer), lists[1]

    def _most_on_device(self, layer: int, more: int = 0) -> int:
        """Room for what is attended after `more` tokens, as much in most steps."""
        rows = zip(self.view.lengths(layer), self.recents, self.scored[layer], strict=True)
        return max(padded(length + more - first) + ids.shape[1] for length, (first, _), ids in rows)

    @property
    def layout(self) -> object:
        """How long lists are."""
        layer = self.shape.sparse_layers[0]
        return self.at_rest or self._most_on_device(layer, 1)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """The head's share of C, the group's union of it; generated tokens on top of it, unless
        they count.
        """
        capacity = self.layer_budgets(length)[self.shape.sparse_layers.index(layer)]
        return self._most(self._most_of_head(capacity, length), length, generated)

    def mean_rule(self, length: int, generated: int) -> int:
        """The shares of layers and heads are C on average, and what comes on top is the same in
        each.
        """
        return self._most(self.budget.tokens(length), length, generated)

    def _most(self, capacity: int, length: int, generated: int) -> int:
        """Entries that a KV head may attend of `capacity` tokens, the group's union and generated
        tokens included.
        """
        if self.granularity == "query_head" and not self.budget.unified:
            fixed = self.fixed(self.budget.tokens(length))
            capacity = fixed + self.shape.group * (capacity - fixed)
        return capacity if self.budget.counts_generated else capacity + generated


@operator("methods.blocks.gpu.scorer")
def newest_and_scored(
    scored: torch.Tensor, seen: torch.Tensor, limits: torch.Tensor, most: int
) -> torch.Tensor:
    """The tokens after the scored ones, and these behind them: [B, H, most] int64, trailing -1.

    Parameters
    ----------
    scored
        [B, H, n] int64, trailing -1.
    seen
        [B], tokens of each row.
    limits
        [4, B] int64: the first of the recent tokens when the prompt ended, and the one after the
        last of them; the prompt's tokens after that, which are among the scored ones; and how many
        tokens there may be before the recent ones are pushed out.
    """
    begin, count = _newest(seen, limits)
    place = torch.arange(most, device=scored.device)
    newest = begin + place
    newest = newest + limits[2, :, None, None] * (newest >= limits[1, :, None, None])
    older = (place - count).clamp(0, scored.shape[2]).expand(-1, scored.shape[1], -1)
    return torch.where(place < count, newest, pad(scored, (0, 1), value=-1).gather(2, older))


@operator("methods.blocks.gpu.scorer")
def scored_weights(
    weights: torch.Tensor, seen: torch.Tensor, limits: torch.Tensor, group: int, most: int
) -> torch.Tensor:
    """Of what `newest_and_scored` lists the `weights` [B, H, n] of scored tokens, of others 0, as
    often as there are query heads in a group: [B, H * group, most].
    """
    _, count = _newest(seen, limits)
    older = torch.arange(most, device=weights.device) - count
    at = torch.where(older < 0, weights.shape[2], older.clamp(max=weights.shape[2]))
    of_heads = pad(weights, (0, 1)).gather(2, at.expand(-1, weights.shape[1], -1))
    return of_heads.repeat_interleave(group, dim=1)


def _newest(seen: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token that is attended without a score, and how many are, [B, 1, 1] both."""
    begin = limits[0] + (seen - limits[3]).clamp(min=0)
    return begin[:, None, None], (seen - limits[2] - begin)[:, None, None]


def last_tokens(prompt: Prompt, counts: Sequence[int]) -> torch.Tensor:
    """[B, 1, N] bool, True from the first of the last `counts` tokens of each row on."""
    first = [length - count for length, count in zip(prompt.lengths, counts, strict=True)]
    position = torch.arange(prompt.keys.shape[2], device=prompt.keys.device)
    return position >= torch.tensor(first, device=position.device)[:, None, None]


def _without(ids: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Ids [H, n] without those from `first` to before `last`, of which each list has as many."""
    return ids[(ids < first) | (ids >= last)].view(ids.shape[0], -1)
