"""What is special about the CPU executor: rows read where they lie, its own arithmetic, and parts for threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import CLOSE, drive, stream
from integrity import check

from kvbench.attention import cpu, reference
from kvbench.attention import executor as attention
from kvbench.attention import torch as torch_executor
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.memory.store import LayerStore
from kvbench.method import Method, Selection, Shape

CPU = torch.device("cpu")


def store_of(tokens: int, *, heads: int = 2, head_dim: int = 16, dtype: Any = torch.float32, **options: Any) -> Any:
    """One row of random tokens in a store of this kind, with room for one more."""
    rng = torch.Generator().manual_seed(0)
    store = LayerStore(1, heads, head_dim, tokens + 1, dtype, CPU, **options)
    key, value = (torch.randn(1, heads, tokens, head_dim, generator=rng).to(dtype) for _ in range(2))
    store.write_prompt(key, value, 0, [0])
    store.seal_prompt([tokens])
    store.leave_device()
    return store


def query_of(store: LayerStore, group: int = 3) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    like = store.device.pool.key
    return torch.randn(1, store.kv_heads * group, 1, like.shape[1], generator=rng).to(like.dtype)


def agrees(store: LayerStore, selection: Selection | None, group: int = 3, **near: float) -> None:
    """Output and probabilities are the oracle's."""
    query = query_of(store, group)
    for softcap in (None, 0.8):
        found = cpu.attend(query, store, selection, 0.3, probabilities=True, softcap=softcap)
        expected = reference.attend(query, store, selection, 0.3, probabilities=True, softcap=softcap)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **(near or {"rtol": 0, "atol": CLOSE}))


# -- which executor ----------------------------------------------------------------------------------------------------


def shape_of(dtype: torch.dtype) -> Shape:
    return Shape(1, 4, 2, 16, (10,), dtype, CPU, 0.25, (0,))


def test_auto_attends_in_place_on_a_cpu_what_the_kernels_read() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.executor("auto", shape_of(dtype)).name == "cpu"
    other = attention.executor("auto", shape_of(torch.float16))
    assert other.name == "torch"
    assert other.note == "cpu: reads float32 and bfloat16, not float16"
    with pytest.raises(ConfigError, match="attention=cpu: reads float32 and bfloat16, not float16"):
        attention.executor("cpu", shape_of(torch.float16))


# -- where tokens lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_tokens_of_both_tiers_are_attended_and_counted_as_if_copied(heads: int) -> None:
    moved: dict[str, list[int]] = {"cpu": [], "torch": []}
    rng = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(61, generator=rng)[:20] for _ in range(heads)])[None]
    for name, attend in (("cpu", cpu.attend), ("torch", torch_executor.attend)):
        store = store_of(60, on_drop="offload", moved=moved[name].append, in_place=name == "cpu")
        store.keep(torch.arange(0, 60, 3).expand(1, 1, -1))
        store.append(*torch.randn(2, 1, 2, 1, 16, generator=torch.Generator().manual_seed(3)))
        agrees(store, Selection(index))
        moved[name].clear()
        store.stage.forget()
        for step in range(3):
            attend(query_of(store), store, Selection(index.roll(step, 2)[:, :, 5:]), 0.3)
            store.count_fetched()
            moved[name].append(store.resident_bytes())
        check(store)
    assert [size for size in moved["cpu"] if size] == [size for size in moved["torch"] if size]
    assert moved["cpu"][0] > 0


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("token", [20, 21, 2**40])
def test_token_that_was_not_seen_is_named(home: Any, token: int) -> None:
    store = store_of(20, home=home)
    index = torch.tensor([[[3, token]]])
    with pytest.raises(LookupError) as error:
        cpu.attend(query_of(store), store, Selection(index), 0.3)
    with pytest.raises(LookupError) as theirs:
        torch_executor.attend(query_of(store), store, Selection(index), 0.3)
    assert str(error.value) == str(theirs.value)


def test_dropped_token_is_named() -> None:
    store = store_of(20)
    store.keep(torch.tensor([[[3, 5, 7]]]))
    agrees(store, Selection(torch.tensor([[[7, 3]]])))
    with pytest.raises(LookupError, match="token 4 .*dropped"):
        cpu.attend(query_of(store), store, Selection(torch.tensor([[[7, 4, 3]]])), 0.3)


def test_what_is_attended_in_place_is_counted_when_the_clock_has_stopped() -> None:
    moved: list[int] = []
    store = store_of(50, home="host", in_place=True, moved=moved.append)
    store.append(*torch.zeros(2, 1, 2, 1, 16))
    cpu.attend(query_of(store), store, Selection(torch.tensor([[[50, 4, 9]]])), 0.3)
    assert not moved
    store.count_fetched()
    assert moved == [2 * 2 * store.device.codecs.nbytes], "two tokens of two heads; the newest is on the device"
    assert store.resident_ids().tolist() == [[[4, 9, 50]] * 2]


def test_what_is_prefetched_counts_once() -> None:
    moved: list[int] = []
    store = store_of(50, home="host", in_place=True, moved=moved.append)
    index = torch.tensor([[[4, 9]]])
    store.prefetch(index)
    cpu.attend(query_of(store), store, Selection(index), 0.3)
    store.count_fetched()
    assert sum(moved) == 4 * store.device.codecs.nbytes
    key, value = store.gather(index.expand(1, 2, 2))
    for found, held in ((key, store.host.key), (value, store.host.value)):
        assert torch.equal(found, held[:, :, [4, 9]]), "staged without its rows, a token is read from the host"


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_every_bfloat16_is_read_exactly() -> None:
    patterns = torch.arange(2**16).to(torch.int32).sub(2**15).to(torch.int16).view(torch.bfloat16)
    value = torch.where(patterns.isfinite(), patterns, 0).view(1, 64, 1, 1024)
    store = LayerStore(1, 64, 1024, 1, torch.bfloat16, CPU)
    store.write_prompt(torch.zeros_like(value), value, 0, [0])
    store.seal_prompt([1])
    query = torch.zeros(1, 64, 1, 1024, dtype=torch.bfloat16)
    for selection in (None, Selection(torch.zeros(1, 1, 1, dtype=torch.int64))):
        assert torch.equal(cpu.attend(query, store, selection, 1.0)[0], value)


@pytest.mark.parametrize("head_dim", [4, 20, 64, 80])
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 300])
def test_any_size_of_head_and_list(head_dim: int, tokens: int) -> None:
    store = store_of(tokens, head_dim=head_dim)
    agrees(store, None)
    agrees(store, Selection(torch.arange(tokens).flip(0)[None, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", range(1, 10))
def test_any_number_of_queries_a_kv_head(group: int, dtype: torch.dtype) -> None:
    """A row is read once for up to four of them."""
    store = store_of(70, head_dim=36, dtype=dtype)
    near = {"rtol": 0, "atol": CLOSE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps}
    agrees(store, None, group, **near)
    agrees(store, Selection(torch.arange(0, 70, 3)[None, None]), group, **near)


def test_probabilities_are_right_over_the_whole_range() -> None:
    """Logits from 0 to 120 below the largest, whose weights reach below what float32 holds."""
    store = LayerStore(1, 1, 1, 2001, torch.float32, CPU)
    logits = -torch.linspace(0, 120, 2001)
    store.write_prompt(logits.view(1, 1, -1, 1), torch.ones(1, 1, 2001, 1), 0, [0])
    store.seal_prompt([2001])
    _, weights = cpu.attend(torch.ones(1, 1, 1, 1), store, None, 1.0, probabilities=True)
    assert weights is not None
    torch.testing.assert_close(weights[0, 0].double(), logits.double().softmax(0), rtol=1e-6, atol=1e-36)


def test_nan_stays_one_and_an_infinite_weight_takes_an_entry_away() -> None:
    store = store_of(30)
    index = torch.arange(20)[None, None]
    weight = torch.zeros(1, 6, 20)
    weight[:, :, 3:9] = -torch.inf
    agrees(store, Selection(index, log_weight=weight))
    store.device.key[0, 0, 5, 0] = torch.nan
    out, _ = cpu.attend(query_of(store), store, Selection(index), 0.3)
    assert out[0, :3].isnan().all()
    assert out[0, 3:].isfinite().all()


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set torch's threads, and have any work be worth one."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("selected", [False, True], ids=["resident", "selected"])
def test_parts_are_the_same_bits_for_any_number_of_threads(threads: Any, selected: bool) -> None:
    store = store_of(5000)
    rng = torch.Generator().manual_seed(5)
    selection = Selection(torch.randperm(5000, generator=rng)[:1500][None, None]) if selected else None
    found = []
    for count in (1, 2, 4, 7):
        threads(count)
        found.append(cpu.attend(query_of(store), store, selection, 0.3))
    assert all(torch.equal(out, found[0][0]) for out, _ in found)
    agrees(store, selection)


def test_missing_token_is_found_in_any_part(threads: Any) -> None:
    threads(4)
    store = store_of(2000)
    index = torch.arange(1500)
    index[1400] = 2000
    with pytest.raises(LookupError, match="token 2000 is not in the store"):
        cpu.attend(query_of(store), store, Selection(index[None, None]), 0.3)


def test_rows_of_a_batch_with_nothing_in_common_are_attended_as_alone() -> None:
    fixed = stream(90, 7, 31)
    batch = drive(fixed, Method(), None, executor="cpu")
    for row in range(3):
        alone = drive(fixed.row(row), Method(), None, executor="cpu")
        assert torch.equal(batch.outputs[:, :, row], alone.outputs[:, :, 0])


# -- what was worked out of a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["device", "host"])
def test_a_copy_of_a_store_goes_on_in_memory_of_its_own(home: str) -> None:
    """Also where addresses were worked out before."""
    store = store_of(20, home=home)
    new, other = (torch.full((1, 2, 1, 16), number) for number in (1.0, 2.0))
    everything = Selection(torch.arange(20)[None, None])
    before = cpu.attend(query_of(store), store, everything, 0.3)[0]
    one, two = copy.deepcopy(store), copy.deepcopy(store)
    one.append(new, new)
    two.append(other, other)
    three = copy.deepcopy(one)
    del store
    for twin, value in ((one, 1.0), (two, 2.0), (three, 1.0)):
        assert (twin.read(torch.tensor([[[20]]]).expand(1, 2, 1))[1] == value).all()
        assert torch.equal(cpu.attend(query_of(twin), twin, everything, 0.3)[0], before)
        agrees(twin, Selection(torch.arange(21)[None, None]))
        check(twin)


@pytest.mark.parametrize("keep", [None, torch.arange(0, 60, 3)])
def test_tokens_that_come_are_attended_from_then_on(keep: torch.Tensor | None) -> None:
    store = store_of(60, grows=True)
    if keep is not None:
        store.keep(keep[None, None])
    rng = torch.Generator().manual_seed(3)
    for _ in range(70):  # the memory is reserved anew on the way
        store.append(*(torch.randn(1, 16, 2, 1, generator=rng).permute(0, 2, 3, 1) for _ in range(2)))
        agrees(store, None)
    check(store)


@pytest.mark.parametrize("rows", [slice(1, 2), slice(1, 3)])
def test_rows_of_a_larger_batch_are_attended_as_they_are_alone(rows: slice) -> None:
    shape = Shape(1, 4, 2, 16, (40,) * (rows.stop - rows.start), torch.float32, CPU, 0.25, (0,))
    engines = [Engine(shape, Method(), Budget(None), new_tokens=2) for _ in range(2)]
    rng = torch.Generator().manual_seed(4)
    key, value = (torch.randn(4, 2, 40, 16, generator=rng) for _ in range(2))
    for engine in engines:
        engine.start_chunk(torch.zeros(shape.batch, 40, dtype=torch.int64))
        engine.fill(0, key[rows], value[rows], torch.zeros(shape.batch, 4, 0, 16))
        engine.start_step(torch.zeros(shape.batch, dtype=torch.int64))
    new = [torch.randn(4, heads, 1, 16, generator=rng) for heads in (4, 2, 2)]
    views = engines[0].attend(0, *(part[rows] for part in new))
    copies = engines[1].attend(0, *(part[rows].clone() for part in new))
    assert torch.equal(views, copies)
