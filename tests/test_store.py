"""A layer's store against a plain Python twin: nothing is lost, and no token lives in two tiers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import twin
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import DEVICE, DROPPED, HOST, check, everything, tiers_of

from kvbench.memory.device import NO_TOKEN, whole_pages
from kvbench.memory.store import LayerStore

HEAD_DIM = 3
ENTRY = 2 * HEAD_DIM * 4  # bytes of one token's key and value in one KV head
PADDING = 1e6  # stands in padding columns; no read may ever show it


def key_of(row: int, head: int, token: int) -> list[float]:
    """Another vector for every token of every head, exact in fp32."""
    return [row * 4096.0 + head * 512 + token, row + 0.5, head + 0.25]


def value_of(row: int, head: int, token: int) -> list[float]:
    return [-number for number in key_of(row, head, token)]


class StoreTwin(RuleBasedStateMachine):
    """A store and its twin after the prompt, and what must be equal in them after every call.

    The twin is three plain things: the tier of every token [row][head][token], the staged tokens [row][head] (and those
    that will be, once what was prefetched is asked for), and the number of entries moved up.
    """

    home = "device"
    on_drop = "discard"
    device = "cpu"
    survives = True  # a token that is not there is refused, and aborts no kernel of a real device

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.moved_bytes: list[int] = []
        self.staged_slots = 0
        self.coming: list[list[set[int]]] | None = None

    # -- the prompt ----------------------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def read_prompt(self, data: st.DataObject) -> None:
        self.lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "lengths")
        self.heads = data.draw(st.integers(1, 3), "heads")
        self.grows = data.draw(st.booleans(), "grows")
        columns = max(self.lengths) + data.draw(st.integers(0, 3), "more padding")
        offsets = [data.draw(st.integers(0, columns - length), "offset") for length in self.lengths]
        spare = data.draw(st.integers(0, 12), "spare")
        capacity = data.draw(st.integers(1, columns), "capacity") if self.grows else columns + spare
        self.room = capacity - max(self.lengths)  # tokens that may still come where the store may not grow
        batch = len(self.lengths)
        device = torch.device(self.device)
        self.store = LayerStore(
            batch,
            self.heads,
            HEAD_DIM,
            capacity,
            torch.float32,
            device,
            home=self.home,  # type: ignore[arg-type]
            on_drop=self.on_drop,  # type: ignore[arg-type]
            grows=self.grows,
            moved=self.moved_bytes.append,
        )
        prompt = torch.full((2, batch, self.heads, columns, HEAD_DIM), PADDING)
        for row, (length, offset) in enumerate(zip(self.lengths, offsets, strict=True)):
            for head in range(self.heads):
                for token in range(length):
                    prompt[0, row, head, offset + token] = torch.tensor(key_of(row, head, token))
                    prompt[1, row, head, offset + token] = torch.tensor(value_of(row, head, token))
        prompt, column = prompt.to(device), 0
        while column < columns:
            width = data.draw(st.integers(1, columns - column), "chunk")
            self.store.write_prompt(*prompt[:, :, :, column : column + width], column, offsets)
            column += width
        self.store.seal_prompt(self.lengths)
        if self.home == "host":
            self.check_copy_on_host()
            self.store.leave_device()
        first = HOST if self.home == "host" else DEVICE
        self.tiers = [[[first] * length for _ in range(self.heads)] for length in self.lengths]
        self.staged: list[list[set[int]]] = [[set() for _ in range(self.heads)] for _ in self.lengths]
        self.block = self.pointers()

    def check_copy_on_host(self) -> None:
        future = self.store.first(max(self.lengths))["on_host"]
        key, value = future.result(timeout=0)
        for row, length in enumerate(self.lengths):
            for head in range(self.heads):
                assert key[row, head, :length].tolist() == [key_of(row, head, token) for token in range(length)]
                assert value[row, head, :length].tolist() == [value_of(row, head, token) for token in range(length)]

    # -- what the twin knows -------------------------------------------------------------------------------------------

    def every_head(self) -> list[tuple[int, int]]:
        return [(row, head) for row in range(len(self.lengths)) for head in range(self.heads)]

    def tokens_in(self, row: int, head: int, *tiers: int) -> list[int]:
        return [token for token, tier in enumerate(self.tiers[row][head]) if tier in tiers]

    def pointers(self) -> tuple[int, int]:
        return self.store.device.pool.key.data_ptr(), self.store.device.pool.value.data_ptr()

    def brought_up(self, row: int, head: int, tokens: set[int]) -> int:
        """Entries of one head that a gather of `tokens` moves; they and no others are staged afterwards."""
        wanted = {token for token in tokens if self.tiers[row][head][token] == HOST}
        newest = {len(self.tiers[row][head]) - 1} if self.home == "host" and self.appended else set()
        moving = wanted - self.staged[row][head] - newest
        self.staged[row][head] = wanted
        return len(moving)

    appended = evicted = False

    def draw_index(self, data: st.DataObject, *, repeats: bool, tiers: tuple[int, ...] = (DEVICE, HOST)) -> Any:
        """Ids [B, Hkv, M] of tokens that are still there, other ones for every head, -1 anywhere."""
        width = data.draw(st.integers(1, 7), "width")
        index = torch.full((len(self.lengths), self.heads, width), -1)
        for row, head in self.every_head():
            there = self.tokens_in(row, head, *tiers)
            if there:
                chosen = st.lists(st.sampled_from(there), max_size=width, unique=not repeats)
                ids = data.draw(chosen, "ids")
                ids += [-1] * (width - len(ids))
                index[row, head] = torch.tensor(data.draw(st.permutations(ids), "order"))
        return index

    # -- after every rule ----------------------------------------------------------------------------------------------

    @invariant()
    def the_store_finds_itself_whole(self) -> None:
        check(self.store)

    @invariant()
    def lengths_and_tiers_are_the_twins(self) -> None:
        assert self.store.lengths == [len(row[0]) for row in self.tiers]
        tiers = tiers_of(self.store)  # asserts itself that no token is in two
        assert tiers.shape[2] == max(self.store.lengths)
        for row, head in self.every_head():
            beyond = [DROPPED] * (tiers.shape[2] - len(self.tiers[row][head]))
            assert tiers[row, head].tolist() == self.tiers[row][head] + beyond

    @invariant()
    def nothing_is_lost(self) -> None:
        for row, head in self.every_head():
            ids, key, value = everything(self.store, row, head)
            there = self.tokens_in(row, head, DEVICE, HOST)
            assert ids.tolist() == there
            assert key.tolist() == [key_of(row, head, token) for token in there]
            assert value.tolist() == [value_of(row, head, token) for token in there]

    @invariant()
    def resident_is_what_the_device_holds(self) -> None:
        ids = self.store.resident_ids()
        for row, head in self.every_head():
            here = sorted({*self.tokens_in(row, head, DEVICE), *self.staged[row][head]})
            assert ids[row, head].tolist() == here + [-1] * (ids.shape[2] - len(here))
        if self.home == "device":
            key, value, mask = self.store.resident()
            for row, head in self.every_head():
                here = self.tokens_in(row, head, DEVICE)
                used = slice(None) if mask is None else mask[row, head]
                assert key[row, head, used].tolist() == [key_of(row, head, token) for token in here]
                assert value[row, head, used].tolist() == [value_of(row, head, token) for token in here]

    @invariant()
    def bytes_are_the_twins(self) -> None:
        on_device = sum(len({*self.tokens_in(r, h, DEVICE), *self.staged[r][h]}) for r, h in self.every_head())
        assert self.store.resident_bytes() == on_device * ENTRY
        assert self.store.host_bytes() == sum(len(self.tokens_in(r, h, HOST)) for r, h in self.every_head()) * ENTRY
        assert sum(self.moved_bytes) == self.moved * ENTRY

    @invariant()
    def blocks_neither_move_nor_hold_more_than_reserved(self) -> None:
        if self.grows:
            return
        assert self.pointers() == self.block, "only keep may take new memory"
        held = [len(self.tokens_in(r, h, DEVICE)) for r, h in self.every_head()]
        if not self.evicted:
            held = [max(held)] * len(held)  # each row takes as much as the longest
        slots = [max(count + self.room, 1) if self.home == "device" else 0 for count in held]
        assert self.store.allocated_bytes() == sum(map(whole_pages, slots + [self.staged_slots] * len(held))) * ENTRY


class StoreMachine(StoreTwin):
    """Random calls on a store; after each, everything it says is compared with the twin."""

    @rule()
    def append(self) -> None:
        at = [[len(self.tiers[row][0])] * self.heads for row in range(len(self.lengths))]
        key = torch.tensor([[key_of(r, h, t) for h, t in enumerate(row)] for r, row in enumerate(at)])[:, :, None]
        value = torch.tensor([[value_of(r, h, t) for h, t in enumerate(row)] for r, row in enumerate(at)])[:, :, None]
        if not self.grows and not self.room:
            with pytest.raises(RuntimeError, match="reserved"):
                self.store.append(key.to(self.device), value.to(self.device))
            return
        self.store.append(key.to(self.device), value.to(self.device))
        self.appended = True
        self.room -= 1
        for row, head in self.every_head():
            self.tiers[row][head].append(HOST if self.home == "host" else DEVICE)

    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        index = self.draw_index(data, repeats=True)
        read = self.store.read if data.draw(st.booleans(), "by read") and self.home == "device" else self.store.gather
        self.adopt()
        before, transfers = self.moved, self.count_transfers()
        self.moved += sum(self.brought_up(row, head, self.named(index, row, head)) for row, head in self.every_head())
        self.staged_slots = max(len(self.staged[row][head]) for row, head in self.every_head())
        if self.device != "cpu" and data.draw(st.booleans(), "made on the device"):
            key, value = read(index.to(self.device))
            if self.reads_itself:
                assert not transfers, "the device reads by itself"
                self.staged_slots = index.shape[2]
                self.store.count_fetched()
                before = self.moved
        else:
            key, value = read(index)
        assert len(transfers) == (self.moved > before), "one transfer carries all that a gather moves"
        self.check_rows(index, key, value)

    @property
    def reads_itself(self) -> bool:
        return self.home == "host" and self.store.host is not None and not self.store.host.arranged

    @precondition(lambda self: self.store.host is not None)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        """What comes up early is moved once, and what cannot come is passed over."""
        self.adopt()
        index = self.draw_index(data, repeats=True)
        before, transfers, staged = self.moved, self.count_transfers(), [list(heads) for heads in self.staged]
        self.moved += sum(self.brought_up(row, head, self.named(index, row, head)) for row, head in self.every_head())
        unseen = torch.full_like(index[..., :1], max(self.store.lengths) + data.draw(st.integers(0, 3), "unseen"))
        self.store.prefetch(torch.cat([index, unseen], dim=2))
        assert len(transfers) == (self.moved > before)
        self.staged, self.coming = staged, self.staged

    def adopt(self) -> None:
        """What was prefetched is staged."""
        if self.coming is not None:
            self.staged, self.coming = self.coming, None
            self.store.stage.receive()
            self.staged_slots = max(len(self.staged[row][head]) for row, head in self.every_head())

    def named(self, index: torch.Tensor, row: int, head: int) -> set[int]:
        return {token for token in index[row, head].tolist() if token >= 0}

    def count_transfers(self) -> list[int]:
        """Entries of each transfer from now on."""
        transfers: list[int] = []
        if self.store.host is not None:
            stage = self.store.stage
            origins = type(stage)._origins.__get__(stage)

            def counted(ids: torch.Tensor, seen: torch.Tensor) -> Any:
                near, far = origins(ids, seen)
                if not ids.is_cuda and (far >= 0).any():
                    transfers.append(int((far >= 0).sum()))
                return near, far

            stage._origins = counted
        return transfers

    def check_rows(self, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        assert key.shape == value.shape == (*index.shape, HEAD_DIM)
        assert bool(torch.isfinite(key).all() and torch.isfinite(value).all())
        for row, head in self.every_head():
            for at, token in enumerate(index[row, head].tolist()):
                if token >= 0:
                    assert key[row, head, at].tolist() == key_of(row, head, token)
                    assert value[row, head, at].tolist() == value_of(row, head, token)

    @precondition(lambda self: self.survives)
    @rule(data=st.data())
    def gather_what_is_not_there(self, data: st.DataObject) -> None:
        row, head = data.draw(st.sampled_from(self.every_head()), "head")
        length = len(self.tiers[row][head])
        lost = [*self.tokens_in(row, head, DROPPED), length, length + 1, length + 1000]
        index = self.draw_index(data, repeats=True)
        index[row, head, 0] = data.draw(st.sampled_from(lost), "lost")
        self.adopt()
        checked_there = self.device != "cpu" and self.store.host is None
        for read in (self.store.gather, self.store.read):
            with pytest.raises(RuntimeError if checked_there else LookupError):
                read(index)

    @precondition(lambda self: self.home == "device")
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        index = self.draw_index(data, repeats=False)
        if data.draw(st.booleans(), "the same for all heads"):
            index = self.shared_by_heads(index)
        self.adopt()
        self.moved += sum(self.brought_up(row, head, self.named(index, row, head)) for row, head in self.every_head())
        if data.draw(st.booleans(), "named by two query heads, some by both"):
            column = torch.arange(index.shape[2]) % 3
            self.store.keep(torch.stack([index.masked_fill(column == own, -1) for own in (0, 1)], dim=2).flatten(1, 2))
        else:
            self.store.keep(index if index[:, :1].ne(index).any() else index[:, :1])
        self.block, self.evicted = self.pointers(), True
        for row, head in self.every_head():
            kept = self.named(index, row, head)
            self.staged[row][head], self.staged_slots = set(), 0
            for token in self.tokens_in(row, head, DEVICE):
                self.tiers[row][head][token] = HOST if self.on_drop == "offload" else DROPPED
            for token in kept:
                self.tiers[row][head][token] = DEVICE

    def shared_by_heads(self, index: torch.Tensor) -> torch.Tensor:
        """The first head's list for all, less what another head has no more."""
        index = index[:, :1].repeat(1, self.heads, 1)
        for row in range(len(self.lengths)):
            for at, token in enumerate(index[row, 0].tolist()):
                if token >= 0 and any(self.tiers[row][head][token] == DROPPED for head in range(self.heads)):
                    index[row, :, at] = -1
        return index

    @precondition(lambda self: self.home == "device" and self.survives)
    @rule(data=st.data())
    def keep_what_cannot_be_kept(self, data: st.DataObject) -> None:
        row, head = data.draw(st.sampled_from(self.every_head()), "head")
        index = self.draw_index(data, repeats=False)
        lost = [*self.tokens_in(row, head, DROPPED), len(self.tiers[row][head])]
        self.adopt()
        if data.draw(st.booleans(), "twice") and index.shape[2] > 1 and index[row, head].max() >= 0:
            index[row, head, :2] = index[row, head].max()
            with pytest.raises(ValueError, match="twice"):
                self.store.keep(index)
        else:
            index[row, head, 0] = data.draw(st.sampled_from(lost), "lost")
            with pytest.raises(RuntimeError if self.device != "cpu" and self.store.host is None else LookupError):
                self.store.keep(index)

    @precondition(lambda self: self.home == "host")
    @rule()
    def keep_is_for_another_home(self) -> None:
        with pytest.raises(ValueError, match="home is the device"):
            self.store.keep(torch.zeros(len(self.lengths), self.heads, 1, dtype=torch.int64))

    @rule(data=st.data())
    def arrange(self, data: st.DataObject) -> None:
        count = max(len(row[0]) for row in self.tiers)
        orders = [data.draw(st.permutations(range(count)), "order") for _ in self.every_head()]
        order = torch.tensor(orders).view(len(self.lengths), self.heads, count)
        if self.store.host is None:
            with pytest.raises(ValueError, match="home='host'"):
                self.store.arrange(order)
            return
        if count > 1 and data.draw(st.booleans(), "not a permutation"):
            order[-1, -1, 0] = order[-1, -1, 1]
            with pytest.raises(ValueError, match="once"):
                self.store.arrange(order)
            return
        self.store.arrange(order)
        for row, head in self.every_head():
            for slot, token in enumerate(order[row, head].tolist()):
                if token < len(self.tiers[row][head]) and self.tiers[row][head][token] == HOST:
                    assert self.store.host.key[row, head, slot].tolist() == key_of(row, head, token)
                    assert self.store.host.value[row, head, slot].tolist() == value_of(row, head, token)

    @precondition(lambda self: self.home == "host")
    @rule(data=st.data())
    def read_in_place(self, data: st.DataObject) -> None:
        """Reading host memory where it lies stages nothing and moves nothing."""
        transfers = self.count_transfers()
        index = self.draw_index(data, repeats=True)
        self.check_rows(index, *self.store.read(index))
        longest = max(len(row[0]) for row in self.tiers)
        everything = torch.full((len(self.lengths), self.heads, longest), -1)
        for row, head in self.every_head():
            length = len(self.tiers[row][head])
            everything[row, head, :length] = torch.arange(length)
        self.check_rows(everything, *self.store.read(None))
        assert not transfers

    @precondition(lambda self: self.home == "host")
    @rule()
    def nothing_is_resident_in_place(self) -> None:
        with pytest.raises(LookupError, match="must select"):
            self.store.resident()


# -- unequal KV heads --------------------------------------------------------------------------------------------------


@pytest.fixture
def bytes_since() -> Iterator[Callable[[torch.dtype], int]]:
    """The bytes of the memory that tensors of a dtype have which the test made."""

    def count(dtype: torch.dtype) -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dtype == dtype]
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        return sum(storage.nbytes() for storage in storages.values())

    gc.collect()
    gc.freeze()  # what is there already is no longer listed, nor looked through
    yield count
    gc.unfreeze()


@pytest.mark.parametrize("on_drop", ["discard", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_unequal_length_take_what_is_said_to_be_allocated(
    dtype: torch.dtype, on_drop: Any, bytes_since: Callable[[torch.dtype], int]
) -> None:
    """200, 8, 8 and 8 tokens of 256 take that, four free slots each, and what is left of each one's last page."""
    entry = 2 * 16 * dtype.itemsize
    store = LayerStore(1, 4, 16, 260, dtype, torch.device("cpu"), on_drop=on_drop)
    store.write_prompt(torch.zeros(1, 4, 256, 16, dtype=dtype), torch.zeros(1, 4, 256, 16, dtype=dtype), 0, [0])
    store.seal_prompt([256])
    assert store.allocated_bytes() == bytes_since(dtype)
    index = torch.full((1, 4, 200), -1)
    for head, count in enumerate([200, 8, 8, 8]):
        index[0, head, :count] = torch.arange(count)
    store.keep(index)
    assert store.resident_bytes() == (200 + 3 * 8) * entry
    on_host = 0 if store.host is None else 2 * store.host.key.untyped_storage().nbytes()
    assert store.allocated_bytes() == bytes_since(dtype) - on_host
    assert store.allocated_bytes() == (208 + 3 * 16) * entry


def test_a_head_that_keeps_nothing_is_asked_for_nothing() -> None:
    store = LayerStore(1, 2, 16, 40, torch.float32, torch.device("cpu"))
    store.write_prompt(torch.ones(1, 2, 40, 16), torch.ones(1, 2, 40, 16), 0, [0])
    store.seal_prompt([40])
    index = torch.full((1, 2, 20), -1)
    index[0, 0] = torch.arange(20)
    store.keep(index)
    check(store)
    key, _ = store.gather(index)
    assert torch.equal(key[0, 0], torch.ones(20, 16)) and bool(key.isfinite().all())


# -- the check itself --------------------------------------------------------------------------------------------------


def small_store(home: Any = "device", on_drop: Any = "discard") -> LayerStore:
    """Two rows of 20 and 12 tokens with two KV heads; tokens 3, 5 and 7 are staged where the home is the host."""
    store = LayerStore(2, 2, HEAD_DIM, 24, torch.float32, torch.device("cpu"), home=home, on_drop=on_drop)
    store.write_prompt(torch.zeros(2, 2, 20, HEAD_DIM), torch.zeros(2, 2, 20, HEAD_DIM), 0, [0, 0])
    store.seal_prompt([20, 12])
    store.leave_device()
    if home == "host":
        store.locate(torch.tensor([3, 5, 7]).expand(2, 2, 3))
    return store


def evicted(on_drop: str) -> LayerStore:
    """The same with tokens 1, 4 and 9 kept on the device."""
    store = small_store(on_drop=on_drop)
    store.keep(torch.tensor([1, 4, 9]).expand(2, 1, 3))
    return store


def uneven() -> LayerStore:
    """The same with 17 tokens of one KV head, and one or none of the others."""
    store = small_store()
    index = torch.full((2, 2, 17), -1)
    index[0, 0], index[:, 1, 0] = torch.arange(17), 3
    store.keep(index)
    return store


DAMAGES: dict[str, tuple[Callable[[], LayerStore], Callable[[Any], object]]] = {
    "used without a token": (lambda: evicted("discard"), lambda store: store.device.used.add_(1)),
    "used beyond what was seen": (small_store, lambda store: store.device.used.add_(1)),
    "used beyond what is reserved": (small_store, lambda store: setattr(store.device, "reserved", 19)),
    "reserved beyond what is there": (small_store, lambda store: setattr(store.device, "reserved", 33)),
    "a hole": (lambda: evicted("discard"), lambda store: store.device.ids[0, 1, 0:1].fill_(NO_TOKEN)),
    "out of order": (lambda: evicted("discard"), lambda store: store.device.ids[0, 1, 0:1].fill_(6)),
    "a token twice": (lambda: evicted("discard"), lambda store: store.device.ids[0, 1, 0:1].fill_(4)),
    "a token of no row": (lambda: evicted("discard"), lambda store: store.device.ids[1, 1, 2:3].fill_(12)),
    "a token lost": (small_store, lambda store: store.device.used.sub_(1)),
    "not finite": (small_store, lambda store: store.device.pool.value[-1:].fill_(torch.nan)),
    "half a page": (small_store, lambda store: store.device.room.sub_(8)),
    "keys without values": (small_store, lambda store: cut(store.device, "value")),
    "slots of nobody": (small_store, lambda store: (cut(store.device, "key"), cut(store.device, "value"))),
    "too little room": (uneven, lambda store: store.device.room[0].copy_(store.device.room[0].flip(0))),
    "two tiers": (lambda: evicted("offload"), lambda store: store.host.present[0, 1, 4:5].fill_(True)),
    "no tier": (lambda: evicted("offload"), lambda store: store.host.present[0, 1, 5:6].fill_(False)),
    "no home": (lambda: small_store("host"), lambda store: store.host.present[0, 1, 9:10].fill_(False)),
    "unseen on the host": (lambda: small_store("host"), lambda store: store.host.present[1, 0, 12:13].fill_(True)),
    "one slot for two": (lambda: small_store("host"), lambda store: store.host.slot_of[1, 0, 3:4].fill_(4)),
    "another order": (lambda: small_store("host"), lambda store: store.host.slot_of.copy_(store.host.slot_of.flip(2))),
    "staged twice": (lambda: small_store("host"), lambda store: store.stage.staged.ids[0, 0, 1:2].fill_(3)),
    "staged from nowhere": (lambda: small_store("host"), lambda store: store.stage.staged.ids[1, 0, 2:3].fill_(15)),
}


def cut(tier: Any, name: str) -> None:
    tier.pool = tier.pool._replace(**{name: getattr(tier.pool, name)[:-8]})


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_check_finds_every_damage(damage: str) -> None:
    build, harm = DAMAGES[damage]
    store = build()
    check(store)
    harm(store)
    with pytest.raises(AssertionError):
        check(store)


def test_a_store_outgrows_the_memory_it_began_in() -> None:
    """Of which the one that lent it had reserved more than the new one asks for."""
    lent = LayerStore(2, 2, HEAD_DIM, 600, torch.float32, torch.device("cpu"))
    prompt = torch.arange(2 * 2 * 20 * HEAD_DIM, dtype=torch.float32).view(2, 2, 20, HEAD_DIM)
    lent.write_prompt(prompt, -prompt, 0, [0, 0])
    lent.seal_prompt([20, 12])
    shared = lent.device.key, lent.device.value
    store = LayerStore(2, 2, HEAD_DIM, 20, torch.float32, torch.device("cpu"), grows=True, shared=shared)
    store.seal_prompt(lent.lengths)
    new = torch.ones(2, 2, 1, HEAD_DIM)
    store.append(new, -new)
    check(store)
    ids, key, value = everything(store, 0, 1)
    assert ids.tolist() == list(range(21))
    assert torch.equal(key, torch.cat([prompt[0, 1], new[0, 1]])) and torch.equal(value, -key)
    assert torch.equal(lent.device.key[:, :, :20], prompt), "what was lent is as it was"


# -- machines ----------------------------------------------------------------------------------------------------------


class Discarding(StoreMachine):
    """Home is the device, and what is dropped is gone."""


class Offloading(StoreMachine):
    """Home is the device, and what is dropped goes to the host."""

    on_drop = "offload"


class Hosted(StoreMachine):
    """Home is the host; selected tokens are staged."""

    home = "host"


class OnTwin(StoreMachine):
    """The same on a CUDA device that is not there."""

    device = "cuda:0"

    def __init__(self) -> None:
        super().__init__()
        self.cuda = ExitStack()
        self.cuda.enter_context(twin.device())

    def teardown(self) -> None:
        self.cuda.close()


DiscardingOnTwin = type("DiscardingOnTwin", (OnTwin, Discarding), {})
OffloadingOnTwin = type("OffloadingOnTwin", (OnTwin, Offloading), {})
HostedOnTwin = type("HostedOnTwin", (OnTwin, Hosted), {})

often = settings(
    max_examples=15,
    stateful_step_count=20,
    phases=[phase for phase in Phase if phase is not Phase.explain],  # takes minutes, and says little
    suppress_health_check=[HealthCheck.too_slow],
)
TestDiscarding, TestOffloading, TestHosted = Discarding.TestCase, Offloading.TestCase, Hosted.TestCase
TestDiscardingOnTwin, TestOffloadingOnTwin = DiscardingOnTwin.TestCase, OffloadingOnTwin.TestCase
TestHostedOnTwin = HostedOnTwin.TestCase
for case in (TestDiscardingOnTwin, TestOffloadingOnTwin, TestHostedOnTwin):
    pytest.mark.slow(case)
TestDiscarding.settings = TestOffloading.settings = TestHosted.settings = often
TestDiscardingOnTwin.settings = TestOffloadingOnTwin.settings = TestHostedOnTwin.settings = settings(
    often, max_examples=25
)
