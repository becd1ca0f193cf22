"""What methods that evict while they decode have in common: all but which token is worth least.

A token comes with each step, and one goes from each list that is full, by what the attention of the
steps has shown. Memory, rows of different lengths and what query heads share are here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Selection, Shape, View
from methods.blocks.ends import KeepsEnds
from methods.blocks.held import KEEP, Eviction, TokenLists
from methods.blocks.scorer import Scorer
from methods.blocks.topk import Lists

# decode steps between two evictions from memory: up to so many tokens there are attended no longer
DROP_EVERY = 32


class Evictor(KeepsEnds):
    """Attend the tokens that are held, and let go of the ones worth least.

    Subclass, and say `how` attention changes the number beside each token; `eviction` has the rest.

    A scorer cuts the prompt to the budget. After every step the token with the least number goes. C
    stay after each step, and the next token is attended on top of them; where generated tokens
    count, it is one of the C.

    Each KV head has a list, for which the attention of its query heads is averaged; with
    granularity "query_head" each query head has one, and memory holds what any of a group does.
    Under unified accounting the group has one in either case. With "layer" all heads share one.

    Parameters
    ----------
    scorer
        of the prompt's tokens.
    granularity
        whose lists they are.

    Attributes
    ----------
    host_step
        as of `kvbench.method.Needs`.
    how
        what attention makes of the numbers: KEEP, ADD, REPLACE or STAMP of `methods.blocks.held`.
    token_lists
        of each layer; the numbers are the prompt's scores at first.
    """

    evicts = "always"
    host_step = False
    how = KEEP

    def __init__(self, scorer: Scorer, granularity: Lists = "kv_head") -> None:
        self.scorer, self.granularity = scorer, granularity
        self.needs = replace(scorer.needs, probabilities=True, host_step=self.host_step)

    def note_prompt(self, layer: int, tokens: TokenLists, prompt: Prompt) -> None:
        """Change the numbers of the prompt's tokens: their scores, infinite for protected ones.

        Here they stay.
        """

    def stays(self, capacity: int, length: int) -> int:
        """Tokens of a list of a budget and a prompt of so many tokens that stay until the next
        token comes.
        """
        return capacity - self.budget.counts_generated

    def eviction(self, layer: int) -> Eviction:
        """What goes from the lists of a layer: here of each that is full the token with the least
        number, but for the protected ends.
        """
        full = self.token_lists[layer].width > min(self.limits)
        limits = self.limit[layer] if full else None
        ends = self.end_of[layer] if any(self.ends) else None
        return Eviction(limits, max(self.limits), lengths=self.lengths[layer], ends=ends)

    def each(self, layer: int, number: float) -> torch.Tensor:
        """[B] of this number where a layer is; a GPU is given it once."""
        device = self.shape.device_of(layer)
        if device.type == "cpu":
            return torch.full((self.shape.batch,), number)
        if (number, device) not in self.numbers:
            self.numbers[number, device] = torch.full((self.shape.batch,), number, device=device)
        return self.numbers[number, device]

    def make_room(self, layer: int, how: int, attention: torch.Tensor) -> None:
        """Note the attention of a step, and evict; after the prompt, and after every step."""
        tokens, seen = self.token_lists[layer], self.view.seen(layer)
        tokens.evict(how, self.eviction(layer), seen, attention)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle whose lists there will be; none of them holds anything yet."""
        super().begin(shape, budget, view, context)
        joined = self.granularity == "query_head" and budget.unified
        granularity: Lists = "kv_head" if joined else self.granularity
        counts = {"layer": 1, "kv_head": shape.kv_heads, "query_head": shape.query_heads}
        self.lists = counts[granularity]
        self.scorer.granularity, self.scorer.protect = granularity, self.protect
        self.scorer.begin(shape, self.prompt_budget(), view, context)
        self.limits = [*map(self.stays, self.capacities, shape.lengths)]
        self.limit = shape.for_layers(torch.tensor(self.limits)[:, None])
        self.lengths = shape.for_layers(torch.tensor(shape.lengths))
        self.end_of = shape.for_layers(torch.tensor(self.ends))
        self.numbers: dict[tuple[float, torch.device], torch.Tensor] = {}  # see `each`
        self.token_lists: dict[int, TokenLists] = {}
        self.in_memory: dict[int, bool] = {}  # whether a layer's lists began as those of memory
        self.steps = 0

    def prompt_budget(self) -> Budget:
        """What the scorer leaves of the prompt. Here C tokens."""
        return Budget(self.budget.size)

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep of the prompt what the scorer chooses."""
        ids, scores = self.scorer.best(layer, prompt)
        tokens = self.token_lists[layer] = TokenLists(ids, scores.gather(2, ids.clamp(min=0)))
        self.note_prompt(layer, tokens, prompt)
        self.make_room(layer, KEEP, scores[..., :0])
        self.view.keep(layer, tokens.ids, DROP_EVERY)
        full = int(tokens.counts.max()) == tokens.width
        self.in_memory[layer] = self.lists == self.shape.kv_heads and full

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """Count the steps."""
        self.steps += 1

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The current token comes."""
        self.token_lists[layer].append(self.view.seen(layer))

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """What is held: all that memory holds, while no token has gone."""
        tokens = self.token_lists[layer]
        if tokens.counts.is_cuda:  # in every step, so that these are alike
            return Selection(tokens.ids.clone())
        return None if self.in_memory[layer] and tokens.untouched else Selection(tokens.ids)

    @property
    def layout(self) -> object:
        """How long the lists are, which stay so once they are full."""
        return [(tokens.width, tokens.untouched) for tokens in self.token_lists.values()]

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        """Note the attention of the step, and let the token worth least go."""
        self.make_room(layer, self.how, probabilities)

    def end_step(self) -> None:
        """Now and then free the memory of what was evicted."""
        if self.steps % DROP_EVERY == 0:
            for layer, tokens in self.token_lists.items():
                self.view.keep(layer, tokens.ids, DROP_EVERY)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What each list may hold; the union of a group is no larger than all of its lists."""
        return max(1, self.lists // self.shape.kv_heads) * self.most(layer, length, generated)

    def most(self, layer: int, length: int, generated: int) -> int:
        """Most tokens of one list, arguments as for `rule`: those that stay, and the
        current one.
        """
        return self.stays(self.budget.tokens(length), length) + 1
