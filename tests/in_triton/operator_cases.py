"""Operators with arguments that they meet, for the tests in Triton's interpreter and its compiler.

Numbers here are small integers, whose sums are exact in any order: a kernel must choose what its reference does, and
many of them are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.attention import flashinfer
from kvbench.attention import torch as attention
from kvbench.config import bind_methods
from kvbench.kernels.operators import Operator
from kvbench.memory import device, stage, transfer
from kvbench.memory.device import NO_TOKEN

bind_methods()

from methods import cake, rocketkv  # noqa: E402
from methods.blocks import held, pages, products, recent, scorer, topk  # noqa: E402
from methods.twilight import estimate  # noqa: E402


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
    import search_cases

    yield from ranking()
    yield from paging()
    yield from pruning()
    yield from holding()
    yield from ends()
    yield from scored()
    yield from storing()
    yield from staging()
    yield from scanning()
    yield from retrieving()
    yield from attending()
    yield from search_cases.calls()


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


# -- pages -------------------------------------------------------------------------------------------------------------

SHAPES = ((1, 64), (2, 96), (3, 128), (4, 128), (5, 256), (6, 96), (7, 64), (8, 128))  # query heads of a KV head, and D


def paging() -> Iterator[Call]:
    """Rows of unequal length, pages that end in the middle, pages to come, and a row that attends all it has."""
    for group, size in SHAPES:
        dtype = torch.bfloat16 if group % 2 else torch.float32
        for page in (16, 5):
            tokens = torch.tensor([9 * page + 3, 2 * page])
            low, high = paged(2, 10, size, dtype)
            key, sizes = integers(2, 2, 1, size, seed=3, dtype=dtype), torch.tensor([page, page - 1])
            query = integers(2, 2 * group, 1, size, seed=2, dtype=dtype)
            name = f"{group}-{size}-{page}"
            yield Call(pages.take_in_page, name, fresh(key, low, high, (tokens - 1) // sizes))
            for mean, starts in ((False, None), (True, None), (False, uneven(page, tokens))):
                arguments = fresh(query, low, high, tokens, starts, page, mean)
                yield Call(pages.page_bounds, f"{name}-{mean}-{starts is None}", arguments, close=1e-6)
                scored = pages.page_bounds.reference(*arguments()[:-1], False)
                for most in (3 * page, 2, 4 * page + 1):
                    limits = torch.tensor([most - 1, 3 * page]), torch.tensor([most, page]), starts
                    yield Call(
                        pages.page_tokens,
                        f"{name}-{most}-{starts is None}",
                        fresh(scored, tokens, *limits, page, max(most, 2 * page)),
                    )
    large = torch.tensor([131072])
    for size in (64, 96, 128, 256):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            blocks = torch.zeros(1, 1, 8192, size, dtype=dtype), torch.zeros(1, 1, 8192, size, dtype=dtype)
            key, query = (torch.zeros(1, heads, 1, size, dtype=dtype) for heads in (1, 4))
            name = f"8192-{size}-{dtype}"
            yield Call(pages.take_in_page, name, fresh(key, *blocks, large // 16 - 1), large=True)
            yield Call(pages.page_bounds, name, fresh(query, *blocks, large, None, 16, False), large=True)
    for starts in (None, 16 * torch.arange(8193)[None]):
        arguments = torch.zeros(1, 2, 8192), large, torch.tensor([1024]), torch.tensor([1024]), starts, 16, 1024
        yield Call(pages.page_tokens, f"8192-{starts is None}", fresh(*arguments), large=True)


def pruning() -> Iterator[Call]:
    """Keys whose estimates are exact, of pages and of single tokens, which are kept as far as they hold a share."""
    for group, size in SHAPES:
        dtype = torch.bfloat16 if group % 2 else torch.float32
        tokens, slots = torch.tensor([83, 40]), 90
        codes = integers(2, 2, slots, size // 2, low=0, high=256, seed=group, dtype=torch.uint8)
        steps = torch.stack([integers(2, 2, slots, low=1, high=4), integers(2, 2, slots, seed=1)], dim=3) / 64
        query = integers(2, 2 * group, 1, size, seed=2, dtype=dtype)
        for page, starts in ((8, None), (8, uneven(8, tokens)), (1, None)):
            count = slots if page == 1 else 10
            scored = integers(2, 2 * group, count, seed=3)
            scored = scored.masked_fill(torch.arange(count) * page >= tokens[:, None, None], -torch.inf)
            ranges = scored, tokens, torch.tensor([20, 48]), torch.tensor([24, 48]), starts, page, 48
            logits = 0.125, None if page == 8 else 30.0
            pruned = query, codes, steps, *logits, torch.tensor([0.85, torch.inf]).double(), torch.zeros(2).long()
            name = f"{group}-{size}-{page}-{starts is None}"
            yield Call(estimate.pruned_pages, name, fresh(*ranges, *pruned))
        key, low = query[:, :2], integers(2, 2, 10, size, dtype=dtype)
        for bounds in ((None, None, None), (low, low + 2, torch.tensor([9, 0]))):
            arguments = key, tokens, codes, steps, *bounds
            yield Call(estimate.take_in_coded, f"{group}-{size}-{bounds[0] is None}", fresh(*arguments))
    coded = torch.zeros(1, 2, 131072, 64, dtype=torch.uint8), torch.zeros(1, 2, 131072, 2)
    limits = torch.tensor([131072]), torch.tensor([8192]), torch.tensor([8192])
    ranges = torch.zeros(1, 8, 8192), *limits, None, 16, 8192
    pruned = torch.zeros(1, 8, 1, 128), *coded, 0.1, None, torch.tensor([0.85]).double(), torch.zeros(2).long()
    yield Call(estimate.pruned_pages, "131072-8192", fresh(*ranges, *pruned), large=True)


def uneven(page: int, tokens: torch.Tensor) -> torch.Tensor:
    """Where ten pages of `page` tokens or some more begin, the last ones of fewer; those to come after all."""
    starts = (torch.arange(11) * page + torch.arange(11) // 2).repeat(2, 1)
    starts = torch.where(starts < tokens[:, None], starts, 1 << 62)
    starts[0, 8] = starts[0, 7] + 1  # a short page before the last
    return starts


def paged(heads: int, count: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of pages of two rows, the last ones without a key."""
    one, other = (integers(2, heads, count, size, seed=seed, dtype=dtype) for seed in (0, 1))
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    low[1, :, 2:], high[1, :, 2:] = torch.inf, -torch.inf
    low[0, 0, 4], high[0, 0, 4] = low[0, 0, 1], high[0, 0, 1]
    return low, high


def fresh(*arguments: Any) -> Callable[[], tuple[Any, ...]]:
    """The same arguments in memory of their own, whenever they are asked for."""
    return lambda: tuple(part.clone() if isinstance(part, torch.Tensor) else part for part in arguments)


# -- lists that tokens leave, and memory -------------------------------------------------------------------------------


def holding() -> Iterator[Call]:
    """Lists that are full and lists that are not, worth what is equal, and one in which nothing may go."""
    for heads, room in ((1, 8), (3, 70), (8, 1100)):
        counts = torch.randint(1, room - 2, (2, heads), generator=torch.Generator().manual_seed(room))
        slot = torch.arange(room)
        ids = torch.where(slot < counts[..., None], 3 * slot, -1)
        numbers = integers(2, heads, room).masked_fill(ids < 0, torch.inf)
        arguments = ids, numbers, counts
        yield Call(held.append_token, f"{heads}-{room}", fresh(*arguments, torch.tensor([900, 5000]), 0.5))
        width, seen = room - 3, torch.tensor([9000, 3 * room])
        each = torch.tensor([[room // 2], [0]]), counts - torch.arange(heads) % 2, None
        first, recent = torch.tensor([6, 0]), torch.tensor([7, 8 * room])
        both = torch.tensor([40, 30]), torch.tensor([2, 5])  # lengths of prompts, and of their ends
        for how, group, stay in (
            (held.KEEP, 1, (None, None, *both)),
            (held.ADD, 3, (recent, None, None, None)),
            (held.REPLACE, 8, (None, first, None, None)),
            (held.STAMP, 2, (recent, first, *both)),
            (held.STAMP, 1, (None, first, None, None)),
        ):
            # shares of a power of two, whose mean over a group is exact in any order
            received = integers(2, heads * group, width, low=0, seed=how) * torch.tensor(group / 64)
            received = received.masked_fill(~(slot < counts[..., None]).repeat_interleave(group, 1)[..., :width], 0)
            of = torch.tensor([12, 0]), torch.tensor([0.04, 0.05]), 16 if group == 1 and how == held.STAMP else 1
            for limits in each:
                name = f"{heads}-{room}-{how}-{of[2]}-{'none' if limits is None else len(limits[0])}"
                parts = *arguments, received, width, seen, how, limits, *of, *stay
                yield Call(held.evict_tokens, name, fresh(*parts))


def ends() -> Iterator[Call]:
    """Rows within their count, and beyond it; lists without sinks, or with nothing but sinks."""
    for heads, most in ((1, 9), (3, 64)):
        counts = torch.tensor([[9, 5, 40], [7, 64, 3]])[:, :heads].contiguous()
        for sinks in ([4, 0], [3, 3]):
            arguments = torch.tensor([50, 6]), counts, torch.tensor(sinks), most
            yield Call(recent.recent_and_sinks, f"{heads}-{most}-{sinks}", fresh(*arguments))


def scored() -> Iterator[Call]:
    """Recent tokens that have moved on and some that have not, prompts whose end stays; what CAKE keeps of a step."""
    limits = torch.tensor([[30, 50], [40, 60], [10, 0], [100, 1 << 62]])
    for group, (heads, size) in enumerate(((1, 9), (3, 64), (8, 1100)), start=1):
        seen, most = torch.tensor([130, 2000]), size + 2000
        ids = integers(2, heads, size, low=0, high=30, dtype=torch.int64)
        ids[1, :, size // 2 :] = -1
        name = f"{heads}-{size}"
        yield Call(scorer.newest_and_scored, name, fresh(ids, seen, limits, most))
        weights = integers(2, heads, size)
        yield Call(scorer.scored_weights, name, fresh(weights, seen, limits, group, most))
    for group, _ in SHAPES:
        for heads, older, window, end in ((1, 12, 4, 0), (2, 1100, 32, 3)):
            ids = torch.stack([torch.randperm(older + window) for _ in range(heads)])
            received = integers(heads * group, older + window + 3, low=0) * torch.tensor(group / 64)
            arguments = ids[:, :-1] * 0, ids, received[:, :-3], window, 5, older, end
            yield Call(cake.keep_received, f"{group}-{heads}-{older}", fresh(*arguments))


def storing() -> Iterator[Call]:
    """Heads with equal and with unequal room, slots that are ids and slots that are not, rows of bytes."""
    rooms = torch.tensor([[16, 48, 32], [16, 16, 32]])
    first = rooms.flatten().cumsum(0).view(2, 3) - rooms
    filled = torch.tensor([[3, 40, 31], [0, 15, 7]])
    slot = torch.arange(48)
    ids = torch.where(slot < filled[..., None], 2 * slot + 1, NO_TOKEN)
    for key_size, value_size, dtype in ((64, 64, torch.bfloat16), (96, 96, torch.float32), (68, 36, torch.uint8)):
        pool = [torch.zeros(160, size, dtype=dtype) for size in (key_size, value_size)]
        token = [integers(2, 3, 1, size, low=0, dtype=dtype) for size in (key_size, value_size)]
        counters = (first + filled).flatten(), filled, torch.tensor([90, 31])
        for lists in (None, ids):
            name = f"{key_size}-{value_size}-{lists is not None}"
            yield Call(device.put_token, name, fresh(*pool, lists, *counters, *token))
    for lists in (None, ids):
        drawn = torch.randint(0, 1000, (2, 3, 300), generator=torch.Generator().manual_seed(1))
        drawn = torch.where(filled[..., None] > 0, drawn % filled.clamp(min=1)[..., None], -1)
        drawn = drawn.masked_fill(integers(2, 3, 300) > 3, -1)
        index = drawn if lists is None else torch.where(drawn < 0, -1, 2 * drawn + 1)
        yield Call(device.locate_tokens, f"{lists is not None}", fresh(index, lists, filled, first))
        yield Call(device.find_tokens, f"{lists is not None}", fresh(index + (index > 40), lists, filled))
        trailing = index.sort(dim=2, descending=True).values
        for group in (1, 3):
            to_write = torch.full((6 * group, 130), 7, dtype=torch.int32), torch.zeros(6 * group, dtype=torch.int32)
            of_heads = trailing.view(2, 3, 300)[..., :100].repeat_interleave(group, dim=1)
            of_heads[0, 0], of_heads[1, 1, 60:] = -1, -1
            arguments = fresh(of_heads, lists, filled, first, *to_write)
            yield Call(device.list_tokens, f"{lists is not None}-{group}", arguments)
        of_all = index[:1, :1].expand(2, 3, -1) * 0 - 1
        yield Call(device.locate_tokens, f"{lists is not None}-none", lambda a=of_all, b=lists: (a, b, filled, first))
    near, far = torch.tensor([[0, -1, -1, 4, 6], [-1, 3, -1, -1, -1]])
    for dtype, sides in ((torch.bfloat16, 2), (torch.uint8, 2), (torch.float32, 1)):
        for here, new in ((5, 2), (5, 0), (0, 7), (0, 0)):
            parts = [
                [integers(count, width, low=0, seed=count, dtype=dtype) for width in (80, 64)[:sides] if count]
                for count in (here, new, 20)
            ]
            local = near if here + new == 7 else near.clamp(max=here - 1)
            yield Call(transfer.fetch, f"{here}-{new}-{dtype}", lambda a=local, b=far, c=parts: (a, b, *c))


def staging() -> Iterator[Call]:
    """Repeats, entries that are none, tokens that are staged, the newest one, and a list in another order of memory."""
    for count, size in ((1, 0), (40, 16), (70, 48), (1500, 1024)):
        seen = torch.tensor([2 * count + 9, count + 2])
        index = torch.stack([integers(3, count, low=-1, high=int(end), seed=count, dtype=torch.int64) for end in seen])
        index[0, 1] = -1
        index[:, 0, 0] = seen - 1
        here = integers(2, 3, size, low=0, high=count + 2, dtype=torch.int64)
        staged = device.with_free_slots(device.distinct(device.lists_of(here)), size + 16) if size else None
        for newest in (True, False):
            arguments = index, staged, seen, newest, 8192, torch.tensor([5, 7])
            yield Call(stage.stage_lists, f"{count}-{size}-{newest}", fresh(*arguments))
    arguments = torch.zeros(1, 8, 4096, dtype=torch.int64), None, torch.tensor([9]), True, 131072, torch.zeros(2).long()
    yield Call(stage.stage_lists, "4096", fresh(*arguments), large=True)


# -- methods -----------------------------------------------------------------------------------------------------------


def scanning() -> Iterator[Call]:
    """All keys, ragged, of which a view is read in place."""
    for group, size in SHAPES:
        dtype = torch.bfloat16 if group % 2 else torch.float32
        keys = integers(2, 3, 80, size, seed=4, dtype=dtype)[:, 1:, :70]
        query = integers(2, 2 * group, 1, size, seed=5, dtype=dtype)
        arguments = query, keys, torch.tensor([70, 33])
        yield Call(products.past_products, f"{group}-{size}", lambda given=arguments: given)


def retrieving() -> Iterator[Call]:
    """RocketKV's pages, of another size in each row; one attends all that it has."""
    for group, size in SHAPES:
        dtype = torch.bfloat16 if group % 2 else torch.float32
        low, high = paged(2, 10, size, dtype)
        tokens, page_sizes = torch.tensor([27, 7]), torch.tensor([3, 4])
        # no two channels are as large, and no number is rounded
        channel = torch.arange(size)
        query = integers(2, 2 * group, 1, size, low=0, seed=6) + channel / 65536
        query = torch.where(channel % 3 == 0, -query, query)
        rows = tokens, page_sizes, torch.tensor([size // 2, size])
        arguments = query, low, high, *rows, 0.125
        yield Call(rocketkv.page_logits, f"{group}-{size}", fresh(*arguments), close=2e-5)
        logits = rocketkv.page_logits.reference(*arguments)
        prompt_ids = torch.stack([3 * torch.arange(20), 5 * torch.arange(20)])[:, None].repeat(1, 2, 1)
        for most in (8, 11):
            limits = torch.tensor([[20, 8], [most, 4], [20, 5], [100, 90]])
            arguments = logits, tokens, page_sizes, limits, prompt_ids, most, -(-most // 3) + 1
            yield Call(rocketkv.best_entries, f"{group}-{size}-{most}", fresh(*arguments))
    tokens, page_sizes, prompt_ids = (
        torch.tensor([40000]),
        torch.tensor([5]),
        torch.zeros(1, 1, 40000, dtype=torch.int64),
    )
    limits = torch.tensor([[1024], [512], [39000], [131072]])
    arguments = torch.zeros(1, 1, 4, 8000), tokens, page_sizes, limits, prompt_ids, 512, 104
    yield Call(rocketkv.best_entries, "large", fresh(*arguments), large=True)


def attending() -> Iterator[Call]:
    """Lists of KV heads and of query heads, some of whose entries are none."""
    for group, size in SHAPES:
        dtype = torch.bfloat16 if group % 2 else torch.float32
        pool = [integers(200, size, seed=seed, dtype=dtype) for seed in (7, 8)]
        query = integers(2, 2 * group, 1, size, seed=9, dtype=dtype)
        for lists in {2, 2 * group}:
            drawn = torch.randint(0, 200, (2, lists, 70), generator=torch.Generator().manual_seed(3))
            present = torch.arange(70) < torch.tensor([[[70]], [[9]]])
            weights = integers(2, 2 * group, 70, seed=10) if lists == 2 else None
            cap = 0.7 if lists == 2 else None
            arguments = query, *pool, drawn, present.expand_as(drawn).contiguous(), weights, 0.03, cap
            close = 1e-2 if dtype == torch.bfloat16 else 1e-5  # the rounding of bfloat16
            yield Call(attention.attend_seen, f"{group}-{size}-{lists}", fresh(*arguments), close=close)
        out, sums = integers(2, 2 * group, 1, size, seed=11, dtype=dtype), integers(2, 2 * group, seed=12)
        sums[1, 0] = -5e4  # of a list without tokens
        for count in (1, 20):
            extra = [integers(2, 2, count, size, seed=seed, dtype=dtype) for seed in (13, 14)]
            weights = integers(2, 2 * group, count, seed=15)
            weights[0, 0, 1:] = -torch.inf
            arguments = out, sums, query, *extra, weights, 0.03, None if count == 1 else 0.7
            yield Call(flashinfer.with_extra, f"{group}-{size}-{count}", fresh(*arguments), close=close)
    for size, count in ((1, 3), (6, 1100)):
        drawn = integers(size, count, low=0, high=9000, dtype=torch.int64)
        listed = torch.full((size, count + 7), 7, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
        for present in (None, torch.arange(count) < torch.arange(size)[:, None] * 200):
            name = f"{size}-{count}-{present is None}"
            yield Call(flashinfer.list_slots, name, fresh(drawn, present, *listed))
    for kv_heads, count in ((1, 3), (3, 1100)):
        first = torch.arange(2 * kv_heads).view(2, kv_heads) * 160
        listed = torch.full((2 * kv_heads, count), 7, dtype=torch.int32), torch.zeros(2 * kv_heads, dtype=torch.int32)
        arguments = first, first // 2 + 3, *listed, 16, count + 20
        yield Call(flashinfer.list_pages, f"{kv_heads}-{count}", fresh(*arguments))
