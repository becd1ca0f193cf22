"""What stays on the device of tokens that live on the host: policies against textbook caches, and equal outputs."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from driver import drive, slow, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError
from kvbench.memory.store import LayerStore
from kvbench.method import DeviceCache


class TextbookLRU:
    """Blocks by when they were last used."""

    def __init__(self, room: int) -> None:
        self.room, self.blocks = room, OrderedDict[int, None]()

    def use(self, block: int) -> None:
        if block not in self.blocks and len(self.blocks) == self.room:
            self.blocks.popitem(last=False)
        self.blocks[block] = None
        self.blocks.move_to_end(block)


class TextbookLFU:
    """Blocks by how often they were used since they came, equal ones by when they got there."""

    def __init__(self, room: int) -> None:
        self.room, self.often = room, dict[int, list[int]]()

    def use(self, block: int) -> None:
        times = next((times for times, blocks in self.often.items() if block in blocks), 0)
        if times:
            self.often[times].remove(block)
        elif len(self.blocks) == self.room:
            self.often[min(times for times, blocks in self.often.items() if blocks)].pop(0)
        self.often.setdefault(times + 1, []).append(block)

    @property
    def blocks(self) -> list[int]:
        return [block for blocks in self.often.values() for block in blocks]


class Reference:
    """The device of one row: a set of tokens for each KV head, and what was found there and what was moved."""

    def __init__(self, cache: DeviceCache, heads: int) -> None:
        self.cache, self.device = cache, [set[int]() for _ in range(heads)]
        self.hits = self.misses = self.moved = 0
        self.past: list[list[set[int]]] = [[set() for _ in range(heads)]]
        self.blocks = {"lru": TextbookLRU, "lfu": TextbookLFU}.get(cache.policy, TextbookLRU)(
            cache.tokens // cache.block
        )

    def step(self, asked: list[set[int]], length: int) -> None:
        kept = self.keep(asked, length)
        for head, wanted in enumerate(asked):
            self.hits += len(wanted & self.device[head])
            self.misses += len(wanted - self.device[head] - {length - 1})
            stays = wanted | kept[head]
            self.moved += len(stays - self.device[head] - {length - 1})
            self.device[head] = stays

    def keep(self, asked: list[set[int]], length: int) -> list[set[int]]:
        if self.cache.policy == "last":
            self.past = [*self.past, asked][-self.cache.steps :]
            return [set().union(*each) for each in zip(*self.past, strict=True)]
        size, again = self.cache.block, self.past[-1]
        self.past.append(asked)
        new = [token for head, before in zip(asked, again, strict=True) for token in head - before - {length - 1}]
        uses = Counter(token // size for token in new if (token // size + 1) * size <= length)
        for block in sorted(uses, key=lambda block: (uses[block], block))[-self.blocks.room :]:
            self.blocks.use(block)
        return [{block * size + at for block in self.blocks.blocks for at in range(size)} for _ in asked]


CACHES = st.one_of(
    st.builds(DeviceCache, steps=st.integers(1, 3)),
    st.builds(DeviceCache, policy=st.sampled_from(["lru", "lfu"]), tokens=st.integers(4, 17), block=st.integers(1, 4)),
)


@settings(max_examples=30, deadline=None)
@given(
    cache=CACHES,
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=2),
    heads=st.integers(1, 2),
    steps=st.integers(1, 8),
    in_place=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_hits_misses_and_what_is_held_are_those_of_a_textbook_cache(
    cache: DeviceCache, lengths: list[int], heads: int, steps: int, in_place: bool, seed: int
) -> None:
    rng, moved, found = random.Random(seed), list[int](), list[tuple[int, int]]()
    store = LayerStore(
        len(lengths),
        heads,
        1,
        max(lengths) + steps,
        torch.float32,
        torch.device("cpu"),
        home="host",
        in_place=in_place,
        cache=cache,
        moved=lambda size: moved.append(size // 8),  # bytes of a key and a value of one number each
        count_hits=lambda here, brought: found.append((here, brought)),
    )
    numbers = torch.arange(max(lengths) + steps).float().view(1, 1, -1, 1).expand(len(lengths), heads, -1, 1)
    store.write_prompt(numbers[:, :, : max(lengths)], -numbers[:, :, : max(lengths)], 0, [0] * len(lengths))
    store.seal_prompt(lengths)
    store.leave_device()
    rows = [Reference(cache, heads) for _ in lengths]
    for _ in range(steps):
        new = torch.tensor(store.lengths).float().view(-1, 1, 1, 1).expand(-1, heads, 1, 1)
        store.append(new, -new)
        asked = [[set(rng.choices(range(length), k=5)) for _ in range(heads)] for length in store.lengths]
        index = torch.tensor([[[*head, *[-1] * (6 - len(head))] for head in row] for row in asked])
        if in_place:
            store.attended(index)
        else:
            key, value = store.gather(index)
            there = index >= 0
            assert torch.equal(key[there][:, 0], index[there].float()) and torch.equal(value, -key)
        store.count_fetched()
        for reference, row, length in zip(rows, asked, store.lengths, strict=True):
            reference.step(row, length)
        check(store)
        held = store.resident_ids()
        for row, reference in enumerate(rows):
            assert [{*head} - {-1} for head in held[row].tolist()] == reference.device
    assert sum(moved) == sum(row.moved for row in rows)
    assert [sum(each) for each in zip(*found, strict=True)] == [
        sum(row.hits for row in rows),
        sum(row.misses for row in rows),
    ]
    if cache.policy != "last":  # what is brought up early is there beside what stays
        store.prefetch(torch.zeros(len(lengths), heads, 1, dtype=torch.int64))
        store.stage.receive()  # type: ignore[union-attr]
        stays = [{0} | row.keep([set()] * heads, 0)[0] for row in rows]
        assert [{*head} - {-1} for row in store.resident_ids().tolist() for head in row] == [
            own for own in stays for _ in range(heads)
        ]


@pytest.mark.parametrize("executor", ["torch", *slow("cpu")])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pqcache", {"cache": "lru", "cache_tokens": 24, "cache_block": 8}),
        ("pqcache", {"cache": "lfu", "cache_tokens": 24, "cache_block": 8}),
        ("clusterkv", {"cache_steps": 3}),
    ],
)
def test_outputs_are_those_without_it(name: str, options: dict[str, Any], executor: str) -> None:
    fixed = stream(90, 47, steps=8)
    plain, cached = (drive(fixed, method_named(name, **own), 32, executor=executor) for own in ({}, options))
    assert torch.equal(plain.outputs, cached.outputs)
    before, after = plain.audit, cached.audit
    assert before["attended_mean"] == after["attended_mean"]
    assert before["cache_hit_share"] < after["cache_hit_share"] <= 1
    assert before["device_kv_bytes"] < after["device_kv_bytes"]


def test_a_cache_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_tokens=64: .*cache_block=128"):
        method_named("pqcache", cache="lfu", cache_tokens=64)
