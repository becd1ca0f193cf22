"""How tokens travel between host and device: pinned memory, landings, rows the device reads itself, a filled prompt."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import twin
from driver import SMALL, drive, stream
from hypothesis import given
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.engine.engine import Engine
from kvbench.measure.job import is_failed_sample
from kvbench.memory import transfer
from kvbench.memory.codecs import Codecs
from kvbench.memory.host import Arrival, HostTier
from kvbench.memory.transfer import fetch
from kvbench.method import Method, Needs, Prompt, Shape
from kvbench.spans import Spans

CUDA = torch.device("cuda:0")


@pytest.fixture
def cuda() -> Iterator[twin.Twin]:
    with twin.device() as cuda:
        yield cuda


def block(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def hosted(batch: int, kv_heads: int, width: int, capacity: int) -> HostTier:
    return HostTier((batch, kv_heads), Codecs.native(width, torch.float32), torch.device(CUDA), capacity)


# -- pinned memory -----------------------------------------------------------------------------------------------------


def test_blocks_are_pinned_in_pages_of_their_own(cuda: twin.Twin) -> None:
    tiers = [hosted(1, 2, 3, capacity) for capacity in (37, 3700)]
    assert all(tier.key.is_pinned() and tier.value.is_pinned() and not tier.key.any() for tier in tiers)
    assert all(at % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 for at, size in twin.registered.items())
    for tier in tiers:
        size = twin.registered[tier.key.data_ptr()]
        assert 0 <= size - tier.key.nbytes < mmap.PAGESIZE, "of no more than its own size"


def test_a_block_is_lent_again_once_its_owner_is_gone(cuda: twin.Twin) -> None:
    first = hosted(1, 2, 5, 41)
    held = {first.key.data_ptr(), first.value.data_ptr()}
    second = hosted(1, 2, 5, 41)
    assert not held & {second.key.data_ptr(), second.value.data_ptr()}, "a block has one owner"
    del first
    gc.collect()
    third = hosted(1, 2, 5, 41)
    assert {third.key.data_ptr(), third.value.data_ptr()} == held


def test_memory_of_generations_past_is_given_back_before_none_is_left(
    cuda: twin.Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Spans()
    transfer.pinned_zeros((7, 7), torch.float32, owner)
    del owner
    gc.collect()
    assert any(transfer._free.values())
    pin, calls = transfer._register, []

    def full_once(nbytes: int) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) == 1:
            raise RuntimeError("CUDA error: out of memory")
        return pin(nbytes)

    monkeypatch.setattr(transfer, "_register", full_once)
    owner = Spans()
    assert transfer.pinned_zeros((3, mmap.PAGESIZE), torch.bfloat16, owner).shape == (3, mmap.PAGESIZE)
    assert calls == [6 * mmap.PAGESIZE] * 2 and not any(transfer._free.values())


def test_memory_that_the_system_does_not_give_fails_the_sample(cuda: twin.Twin) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        transfer.pinned_zeros((1 << 50,), torch.uint8, Spans())
    assert is_failed_sample(error.value)


# -- new tokens --------------------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_new_token_before_it_is_read(cuda: twin.Twin) -> None:
    prompt, new = block(2, 2, 16, 4), block(2, 2, 3, 4, seed=1)
    tier = hosted(2, 2, 4, 12)
    tier.write_prompt(prompt.to(CUDA), prompt.to(CUDA), [5, 3])
    key = new.to(CUDA)
    tier.append([5, 3], key[:, :, :1], -key[:, :, :1])
    cuda.finish()
    with cuda.no_sync():
        tier.append([6, 4], key[:, :, 1:2], -key[:, :, 1:2])
    assert tier.key[0, 0, 5].equal(new[0, 0, 0]) and not tier.key[0, 0, 6].equal(new[0, 0, 1])
    rows = tier.gather(torch.tensor([[5, 6], [3, 4]])[:, None].expand(2, 2, 2))
    assert torch.equal(rows[0], new[:, :, :2]) and torch.equal(rows[1], -new[:, :, :2])


def test_an_arrival_is_waited_for_by_who_asks(cuda: twin.Twin) -> None:
    prompt = block(1, 1, 16, 4)
    tier = hosted(1, 1, 4, 16)
    there = prompt.to(CUDA)
    cuda.syncs.clear()
    tier.write_prompt(there, there, [16])
    arrival = Arrival(tier, 16)
    assert not cuda.syncs and not tier.key.equal(prompt)
    assert arrival.result()[0].equal(prompt)


# -- rows the device reads itself --------------------------------------------------------------------------------------


@given(st.data())
def test_fetched_rows_come_from_their_side(data: st.DataObject) -> None:
    here, host = block(data.draw(st.integers(0, 3)), 4), block(data.draw(st.integers(1, 5)), 4, seed=1)
    near = data.draw(st.lists(st.integers(-1, len(here) - 1), max_size=6))
    far = [data.draw(st.integers(-1, len(host) - 1)) if at < 0 else -1 for at in near]
    lists = (torch.tensor(rows, dtype=torch.int64) for rows in (near, far))
    (rows,) = fetch(*lists, [here[:1]] if len(here) else [], [here[1:]] if len(here) else [], [host])
    zero = torch.zeros(4)
    for row, local, remote in zip(rows, near, far, strict=True):
        assert torch.equal(row, here[local] if local >= 0 else host[remote] if remote >= 0 else zero)


# -- spans on a stream -------------------------------------------------------------------------------------------------


def test_spans_are_the_stream_s_times(cuda: twin.Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("twin_streams.time.perf_counter", lambda: now)
    spans = Spans(CUDA)
    for turn in range(1, 3):  # events of the first turn serve again in the second
        with spans("outer"):
            now += 1
            with spans("inner"):
                now += 2
            now += 4
        assert sum(spans.seconds.values()) == 7 * (turn - 1), "nothing new is known before the stream is waited for"
        spans.fold()
        assert spans.seconds == {"outer": 5 * turn, "inner": 2 * turn}
        now += 8
    assert sum(map(len, spans._idle.values())) <= 4, "a turn takes four, and they are used again"
    with spans("outer"):
        now += 1
    assert spans.reset() == {"outer": 11, "inner": 4}
    assert spans.reset() == {}


def test_noting_a_span_makes_no_host_wait(cuda: twin.Twin) -> None:
    spans = Spans(CUDA)
    with cuda.no_sync(), spans("outer"), spans("inner"):
        torch.zeros(3, device=CUDA).add_(1)


# -- a prompt that no forward pass has made ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "snapkv", "icecache", "quest"])
def test_a_filled_prompt_is_a_prefilled_one(name: str) -> None:
    fixed = stream(90, 90, layers=2)
    prefilled = drive(fixed, method_named(name), SMALL)
    shape = prefilled.engine.shape
    engine = Engine(shape, method_named(name), Budget(SMALL), new_tokens=fixed.steps)
    engine.start_chunk(fixed.tokens[:, :90])
    for layer in range(2):
        key, value, query = (part[layer, :, :, :90] for part in (fixed.keys, fixed.values, fixed.queries))
        engine.fill(layer, key, value, query[:, :, -40:])
    outputs = []
    for step in range(90, 90 + fixed.steps):
        engine.start_step(fixed.tokens[:, step])
        now = [part[:, :, :, step, None] for part in (fixed.queries, fixed.keys, fixed.values)]
        outputs.append(torch.stack([engine.attend(layer, *(part[layer] for part in now)) for layer in range(2)]))
    assert torch.equal(torch.stack(outputs)[..., 0, :], prefilled.outputs)


def test_what_only_a_forward_pass_shows_cannot_be_filled() -> None:
    class Sums(Method):
        needs = Needs(attention_sums=True)

        def prefill(self, layer: int, prompt: Prompt) -> None:
            raise AssertionError("there are no sums")

    cpu = torch.device("cpu")
    shape = Shape(1, 2, 1, 4, (5,), torch.float32, cpu, 0.5, (0,))
    engine = Engine(shape, Sums(), Budget(None), new_tokens=1)
    engine.start_chunk(torch.zeros(1, 5, dtype=torch.int64))
    rows: Any = block(1, 1, 5, 4)
    with pytest.raises(ValueError, match="attention sums"):
        engine.fill(0, rows, rows, block(1, 2, 5, 4))
