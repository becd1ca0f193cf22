"""RocketKV: evict once, then retrieve among what is left (Behnam et al. 2025, "RocketKV:
Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression").

Of a prompt of N = c C tokens SnapKV, with a wide pooling, keeps N / c^alpha. Pages of these are
summed up by the minimum and the maximum of each channel. At each step the channels where the
queries are largest estimate what a token of every page receives, and the tokens of the best pages
are attended. As in the authors' code the softmax is over tokens: a short last page counts less than
the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2, sqrt

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.kernels.operators import operator
from kvbench.method import Context, Method, Prompt, Selection, Shape, View, capped
from methods.blocks.pages import bounds, stacked_pages, take_in
from methods.blocks.ragged import entries, ranges, stacked
from methods.blocks.topk import ranked_ids, top_earliest
from methods.snapkv import SnapKV

SPARE_PAGES = 64  # pages of summaries to add when the generated tokens have filled the last ones


class _Votes(SnapKV):
    """SnapKV that keeps of a prompt what the second stage chooses from."""

    def layer_budgets(self, length: int) -> list[int]:
        """The same in each layer."""
        return [retained_tokens(length, self.budget.tokens(length))] * len(self.shape.sparse_layers)


@dataclass(eq=False)
class RocketKV(Method):
    """Attend C / 2 tokens of those that are left of the prompt and of all generated ones; none of
    them is protected.

    Generated tokens extend the pages, in the order of the text. While a row has C tokens or fewer
    it attends all. With unified accounting it attends C tokens.

    Parameters
    ----------
    window
        prompt queries that vote, and whose tokens stay.
    kernel
        width of the smoothing, odd.
    """

    window: int = 32
    kernel: int = 63

    def __post_init__(self) -> None:
        self.votes = _Votes(self.window, self.kernel)
        self.needs = replace(self.votes.needs, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle for each row the tokens that are attended, those of a page, and the channels that
        are looked at.
        """
        super().begin(shape, budget, view, context)
        self.votes.begin(shape, Budget(budget.size, minimum=budget.minimum), view, context)
        self.retained = [*map(retained_tokens, shape.lengths, self.capacities)]
        sizes = [
            page_and_channels(retained, capacity, shape.head_dim)
            for retained, capacity in zip(self.retained, self.capacities, strict=True)
        ]
        self.page, self.channels = zip(*sizes, strict=True)
        if shape.device.type == "cuda":  # of each row, the tokens that are gone, and of a page
            pairs = zip(shape.lengths, self.retained, strict=True)
            gone = [length - kept for length, kept in pairs]
            self.gone = shape.for_layers(torch.tensor(gone))
            self.page_sizes = shape.for_layers(torch.tensor(self.page))
            self.channels_of = shape.for_layers(torch.tensor(self.channels))
            room = [self._most(capacity, capacity + 1) for capacity in self.capacities]
            limits = torch.tensor([self.capacities, room, self.retained, [*shape.lengths]])
            self.limits = shape.for_layers(limits)
        # of each layer, of the prompt, [B, Hkv, n], trailing -1
        self.prompt_ids: dict[int, torch.Tensor] = {}
        self.low: dict[int, torch.Tensor] = {}  # [B, Hkv, pages, D]; +inf in a page without a key
        self.high: dict[int, torch.Tensor] = {}  # -inf in a page without a key
        # on each GPU, what each row holds, and its last page: the same in all layers of a step
        self.held_on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep what the window votes for, and sum up its pages."""
        ids, _ = self.votes.best(layer, prompt)
        ids = ids.masked_fill(ids < 0, ids.shape[2] + prompt.keys.shape[2]).sort(dim=2).values
        lows, highs = [], []
        for row, (retained, page) in enumerate(zip(self.retained, self.page, strict=True)):
            index = ids[row, :, :retained, None].expand(-1, -1, prompt.keys.shape[3])
            edges = torch.arange(-(-retained // page) + 1, device=index.device) * page
            keys = prompt.keys[row].gather(1, index)
            low, high = bounds(keys, edges.clamp(max=retained), page)
            lows.append(low)
            highs.append(high)
        least = 0
        if prompt.keys.is_cuda:  # all there will be, where that is known, in the same memory
            come = (self.context.new_tokens or 0) + 1
            pairs = zip(self.retained, self.page, strict=True)
            least = max(-(-(retained + come) // page) for retained, page in pairs)
        self.low[layer] = stacked_pages(lows, torch.inf, least)
        self.high[layer] = stacked_pages(highs, -torch.inf, least)
        self.prompt_ids[layer] = ids.masked_fill(ids >= prompt.keys.shape[2], -1)
        if self.retained != [*prompt.lengths]:
            self.view.keep(layer, self.prompt_ids[layer])

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new key joins its row's last page, or begins the next one."""
        last = self._last_pages(layer)
        if max(last) >= self.low[layer].shape[2]:
            self.low[layer] = pad(self.low[layer], (0, 0, 0, SPARE_PAGES), value=torch.inf)
            self.high[layer] = pad(self.high[layer], (0, 0, 0, SPARE_PAGES), value=-torch.inf)
        page = torch.tensor(last)
        if key.is_cuda:
            if layer == self.shape.sparse_layers[0]:
                self.held_on = {}  # it may come again, where a step was not captured
            page = self._on_device(layer)[1]
        take_in(key, self.low[layer], self.high[layer], page)

    def _last_pages(self, layer: int, more: int = 0) -> list[int]:
        """The page of each row's last token, when so many more have come."""
        tokens = zip(self._tokens(layer), self.page, strict=True)
        return [(count + more - 1) // page for count, page in tokens]

    def _on_device(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`_tokens`, and the last pages, [B] both; `append` asks first."""
        device = self.low[layer].device
        if device not in self.held_on:
            tokens = self.view.seen(layer) - self.gone[layer]
            self.held_on[device] = tokens, (tokens - 1) // self.page_sizes[layer]
        return self.held_on[device]

    def end_step(self) -> None:
        """Forget what was the same in all layers of the step."""
        self.held_on = {}

    @property
    def layout(self) -> object:
        """Pages that there is memory for, and tokens that are attended."""
        layer = self.shape.sparse_layers[0]
        if max(self._last_pages(layer, 1)) >= self.low[layer].shape[2]:
            return None
        tokens = zip(self.capacities, self._tokens(layer), strict=True)
        attended = [self._most(capacity, count + 1) for capacity, count in tokens]
        return self.low[layer].shape[2], attended

    def _tokens(self, layer: int) -> list[int]:
        """What each row holds."""
        lengths = zip(self.view.lengths(layer), self.shape.lengths, self.retained, strict=True)
        return [retained + length - prompt for length, prompt, retained in lengths]

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The tokens of the pages with the largest estimates, page after page."""
        if query.is_cuda:
            return Selection(self._selected_on_device(layer, query))
        rows = enumerate(self._tokens(layer))
        return Selection(stacked([self._row(layer, row, tokens, query) for row, tokens in rows]))

    def _selected_on_device(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The same with as many pages in every step; those to come receive nothing."""
        tokens, sizes = self._on_device(layer)[0], self.page_sizes[layer]
        rows = zip(self.capacities, self._tokens(layer), strict=True)
        most = max(self._most(capacity, count) for capacity, count in rows)
        bounds = self.low[layer], self.high[layer]
        scaling, channels = self.shape.scaling, self.channels_of[layer]
        logits = page_logits(query, *bounds, tokens, sizes, channels, scaling)
        logits = capped(logits, self.shape.softcap)
        pages = -(-most // min(self.page)) + 1
        limits = self.limits[layer]
        ids: torch.Tensor = best_entries(
            logits, tokens, sizes, limits, self.prompt_ids[layer], most, pages
        )
        return ids

    def _row(self, layer: int, row: int, tokens: int, query: torch.Tensor) -> torch.Tensor:
        """What a row that holds so many tokens attends, [Hkv, n]."""
        retained, page = self.retained[row], self.page[row]
        most = self._most(self.capacities[row], tokens)
        low, high = (part[layer][row].float() for part in (self.low, self.high))
        starts = torch.arange(0, tokens, page)
        sizes = (tokens - starts).clamp(max=page)
        low, high = (part[:, : len(sizes)] for part in (low, high))
        grouped = query[row, :, 0].float().unflatten(0, (self.shape.kv_heads, -1))
        logits = estimates(grouped, low, high, self.channels[row], self.shape.scaling)
        scores = received(capped(logits, self.shape.softcap), sizes)
        # one page more than they take: the last one may be short
        best = top_earliest(scores[None], -(-most // page) + 1)[0]
        here = best.clamp(min=0)
        slots, _ = entries(starts[here], sizes[here].masked_fill(best < 0, 0), most)
        of_prompt = self.prompt_ids[layer][row].gather(1, slots.clamp(0, retained - 1))
        generated = slots - retained + self.shape.lengths[row]
        return torch.where(slots < retained, of_prompt, generated)

    def _most(self, capacity: int, tokens: int) -> int:
        """What is attended of so many tokens."""
        if self.budget.unified or tokens <= capacity:
            return min(tokens, capacity)
        return round(capacity / 2)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """Half of C, or as many tokens as there are, up to C; unified: C."""
        capacity = self.budget.tokens(length)
        return self._most(capacity, retained_tokens(length, capacity) + generated)


def retained_tokens(length: int, capacity: int) -> int:
    """Of a prompt of `length` tokens N / c^alpha: c = N / C, alpha = min(.2 + .06 log2 c, .8); of C
    or fewer all.
    """
    ratio = max(1.0, length / capacity)
    return int(length / ratio ** min(0.2 + 0.06 * log2(ratio), 0.8))


def page_and_channels(retained: int, capacity: int, head_dim: int) -> tuple[int, int]:
    """Tokens of a page and channels that are looked at: together they read 1 / c2 of the keys, c2 =
    retained / C.
    """
    ratio = max(1.0, retained / capacity)
    page = min(int(ratio), ceil(sqrt(ratio)))
    return page, round(head_dim * page / ratio)


def estimates(
    query: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    channels: int,
    scaling: float,
) -> torch.Tensor:
    """The logit of a token of each page, estimated, of all query heads of its KV head: [Hkv, G, P].

    A page is looked at in the channels where the group's |q| is largest in sum: at its maximum
    where the group's q sums to more than 0, else at its minimum. What a query head leaves out makes
    its logits larger. All tokens of a page have its logit.

    Parameters
    ----------
    query
        [Hkv, G, D].
    low, high
        [Hkv, P, D], bounds of the pages.
    channels
        that are looked at.
    scaling
        factor on logits of all channels.
    """
    size = query.abs()
    best = size.sum(dim=1).topk(channels, dim=1).indices[:, None]
    covered = size.gather(2, best.expand(-1, query.shape[1], -1)).sum(dim=2, keepdim=True)
    upward = query.sum(dim=1, keepdim=True).gather(2, best) > 0
    page = best.expand(-1, low.shape[1], -1)
    bound = torch.where(upward, high.gather(2, page), low.gather(2, page))
    looking = query.gather(2, best.expand(-1, query.shape[1], -1))
    # a query may be zero there
    share = (covered / size.sum(dim=2, keepdim=True)).nan_to_num(1).clamp(min=1e-6)
    return looking @ bound.mT * scaling / share.sqrt()


def received(logits: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """What a token of each page receives from all query heads, [..., Hkv, P], by their logits
    [..., Hkv, G, P] and sizes that broadcast to them; -inf of a page of no size.
    """
    all_tokens = (logits + sizes.log()).logsumexp(dim=-1, keepdim=True)
    each = (logits - all_tokens).exp().masked_fill(sizes == 0, -torch.inf)
    return each.sum(dim=-2)


@operator("methods.blocks.gpu.rocketkv")
def page_logits(
    query: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    tokens: torch.Tensor,
    page_sizes: torch.Tensor,
    channels: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """`estimates` of rows [B, Hq, 1, D], -inf for pages to come: [B, Hkv, G, P].

    Parameters
    ----------
    low, high
        [B, Hkv, P, D].
    tokens, page_sizes, channels
        [B] of each row: what it holds, of a page, and that are looked at.
    """
    grouped, first = (
        query.float().view(*low.shape[:2], -1, low.shape[3]),
        torch.arange(low.shape[2]),
    )
    rows = []
    for row, count in enumerate(channels.tolist()):
        empty = first * page_sizes[row] >= tokens[row]
        lower = low[row].float().masked_fill(empty[:, None], 0)
        upper = high[row].float().masked_fill(empty[:, None], 0)
        logits = estimates(grouped[row], lower, upper, count, scaling)
        rows.append(logits.masked_fill(empty, -torch.inf))
    return torch.stack(rows)


@operator("methods.blocks.gpu.rocketkv")
def best_entries(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    page_sizes: torch.Tensor,
    limits: torch.Tensor,
    prompt_ids: torch.Tensor,
    most: int,
    pages: int,
) -> torch.Tensor:
    """The tokens of the pages that receive most, page after page, [B, Hkv, most] int64 with
    trailing -1.

    Parameters
    ----------
    logits, tokens, page_sizes
        as of `page_logits`.
    limits
        [4, B], of each row: tokens of which all are attended, what is attended of more, what is
        left of the prompt, and its length.
    prompt_ids
        [B, Hkv, n], what is left of the prompt.
    most
        what any row attends.
    pages
        that any list takes at most: one more than `most` fill, as the last one may be short.
    """
    rooms = torch.where(tokens <= limits[0], tokens, limits[1]).clamp(max=most)
    retained, lengths = limits[2:, :, None, None]
    first = torch.arange(logits.shape[3], device=logits.device) * page_sizes[:, None]
    sizes = torch.minimum((tokens[:, None] - first).clamp(min=0), page_sizes[:, None])
    scores = received(logits, sizes[:, None, None])
    counts = (-(-rooms // page_sizes) + 1)[:, None]
    best = ranked_ids.reference(scores, counts, min(pages, logits.shape[3]))
    of_best = sizes[:, None].expand_as(scores).gather(2, best.clamp(min=0))
    starts = best * page_sizes[:, None, None]
    slots = ranges(starts, of_best.masked_fill(best < 0, 0), most)[0]
    over = torch.arange(most, device=slots.device) >= rooms[:, None, None]
    slots = slots.masked_fill(over, -1)
    of_prompt = prompt_ids.gather(2, torch.minimum(slots.clamp(min=0), retained - 1))
    ids = torch.where(slots < retained, of_prompt, slots - retained + lengths)
    return ids.masked_fill(slots < 0, -1)
