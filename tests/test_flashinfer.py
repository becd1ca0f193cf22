"""The FlashInfer executor over its twin: what is listed, planned and written, and that nothing waits for the device."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import flashinfer_twin
import pytest
import torch
import twin
from driver import CLOSE, SMALL, Case, drive, each_method_in_turn, same_attended, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import everything

from kvbench.attention import executor as attention
from kvbench.attention.executor import reference
from kvbench.attention.flashinfer import PLANS, AttentionPlan, FlashInfer, planned
from kvbench.attention.torch import attend, prefill
from kvbench.config import ConfigError
from kvbench.memory.device import Pool
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

SCALE = 0.3
HEADS = (6, 3)  # query heads, KV heads


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_twin.install(monkeypatch)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin takes float32 and small heads too, so that a token more or less is no matter of rounding."""
    monkeypatch.setattr(flashinfer_twin, "DTYPES", flashinfer_twin.DTYPES | {torch.float32})
    monkeypatch.setattr(flashinfer_twin, "HEAD_DIMS", flashinfer_twin.HEAD_DIMS | {8})


def shape_of(store: LayerStore, query_heads: int) -> Shape:
    key, lengths = store.device.pool.key, tuple(store.lengths)
    return Shape(1, query_heads, store.kv_heads, key.shape[1], lengths, key.dtype, key.device, SCALE, (0,))


def filled(
    *lengths: int,
    kv_heads: int = HEADS[1],
    head_dim: int = 8,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> LayerStore:
    """A store with random prompts of these lengths, the first of `steps` new tokens appended."""
    rng = torch.Generator().manual_seed(sum(lengths))
    longest = max(lengths)
    store = LayerStore(len(lengths), kv_heads, head_dim, longest + steps, dtype, torch.device(device), **options)
    store.write_prompt(*random(rng, store, longest), 0, [0] * len(lengths))
    store.seal_prompt(lengths)
    store.leave_device()
    store.append(*random(rng, store, 1))
    return store


def random(rng: torch.Generator, store: LayerStore, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, Hkv, tokens, D]."""
    like = store.device.pool.key
    size = (*store.device.used.shape, tokens, like.shape[1])
    key, value = (torch.randn(size, generator=rng).to(like.dtype).to(like.device) for _ in range(2))
    return key, value


def queries(store: LayerStore, query_heads: int = HEADS[0], seed: int = 7) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    like = store.device.pool.key
    size = (len(store.lengths), query_heads, 1, like.shape[1])
    return (2 * torch.randn(size, generator=rng)).to(like.dtype).to(like.device)


def some(store: LayerStore, heads: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random lists [B, heads, count] of tokens that are there, 1 to `count` in each, then -1."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for row, length in enumerate(store.lengths):
        for head in range(heads):
            kv_head = head * store.kv_heads // heads
            there = everything(store, row, kv_head)[0] if heads > 1 else torch.arange(length)
            ids = there[torch.randperm(len(there), generator=rng)][:count]
            ids = ids[: int(torch.randint(1, count + 1, (), generator=rng))]
            rows.append(torch.nn.functional.pad(ids, (0, count - len(ids)), value=-1))
    return torch.stack(rows).view(len(store.lengths), heads, count)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


# -- agreement ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    lists=st.sampled_from(["one", "kv_head", "query_head"]),
    count=st.integers(1, 90),
    home=st.sampled_from(["device", "host"]),
    seed=st.integers(0, 99),
    softcap=st.sampled_from([None, 0.8]),
)
def test_selections_agree_with_the_reference(
    lengths: list[int],
    kv_heads: int,
    group: int,
    lists: str,
    count: int,
    home: Any,
    seed: int,
    softcap: float | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_twin, "DTYPES", {torch.float32})
        patch.setattr(flashinfer_twin, "HEAD_DIMS", {8})
        store = filled(*lengths, kv_heads=kv_heads, home=home)
        query = queries(store, kv_heads * group, seed)
        heads = {"one": 1, "kv_head": kv_heads, "query_head": kv_heads * group}[lists]
        selection = Selection(some(store, heads, count, seed))
        run = FlashInfer(replace(shape_of(store, kv_heads * group), softcap=softcap))
        out, weights = run(query, store, selection, SCALE)
        assert weights is None
        same(out, reference.attend(query, store, selection, SCALE, softcap=softcap)[0])
        if home == "device":
            same(run(query, store, None, SCALE)[0], reference.attend(query, store, None, SCALE, softcap=softcap)[0])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [1, 17])  # the reserved slots end within a page, and pages behind it
@pytest.mark.parametrize("lengths", [(1,), (15, 16, 17), (31, 64, 5)])
def test_everything_resident_is_attended_in_place(lengths: tuple[int, ...], steps: int) -> None:
    store = filled(*lengths, steps=steps)
    store.device.key[:, :, max(store.lengths) :] = torch.nan  # what was never written is never read
    query = queries(store)
    out, _ = FlashInfer(shape_of(store, HEADS[0]))(query, store, None, SCALE)
    same(out, reference.attend(query, store, None, SCALE)[0])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("on_drop", ["discard", "offload"])
def test_what_heads_keep_for_themselves_is_attended(on_drop: Any) -> None:
    store = filled(40, 23, steps=3, on_drop=on_drop)
    kept = some(store, HEADS[1], 19, seed=3)
    kept[..., 0] = torch.tensor(store.lengths)[:, None] - 1  # the current token, once
    kept[..., 1:] = torch.where(kept[..., 1:] == kept[..., :1], -1, kept[..., 1:]).sort(dim=2, descending=True).values
    store.keep(kept)
    store.append(*random(torch.Generator().manual_seed(5), store, 1))
    query, run = queries(store), FlashInfer(shape_of(store, HEADS[0]))
    same(run(query, store, None, SCALE)[0], reference.attend(query, store, None, SCALE)[0])
    for heads in HEADS:
        selection = Selection(some(store, heads, 12, seed=heads))
        same(run(query, store, selection, SCALE)[0], reference.attend(query, store, selection, SCALE)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@each_method_in_turn
def test_every_method_runs_through_it_as_through_the_reference(
    case: Case, accounting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.flashinfer, "unfit", lambda shape: None)
    fixed = stream(70, 40, steps=6, head_dim=8)
    ours = drive(fixed, case.build(), SMALL, accounting=accounting, executor="flashinfer", dense_layers=[1])
    theirs = drive(fixed, case.build(), SMALL, accounting=accounting, executor="reference", dense_layers=[1])
    assert same_attended(ours.seen, theirs.seen)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=CLOSE)
    assert "flashinfer" in ours.audit["executor"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_precision_agrees_within_its_rounding(dtype: torch.dtype, head_dim: int) -> None:
    store = filled(300, 120, head_dim=head_dim, dtype=dtype)
    query, run = queries(store), FlashInfer(shape_of(store, HEADS[0]))
    for selection in (None, Selection(some(store, HEADS[1], 200))):
        out, expected = run(query, store, selection, SCALE)[0], reference.attend(query, store, selection, SCALE)[0]
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=0.02)


def write(plan: AttentionPlan, pages: torch.Tensor, lengths: torch.Tensor | int) -> None:
    """List pages [requests, M] of a pool, and tokens of each list."""
    plan._indices.view(len(pages), plan._pages)[:, : pages.shape[1]] = pages
    plan._last_page_len[:] = lengths - (plan._pages - 1) * plan._page


def test_tokens_and_pages_are_numbered_in_the_pool() -> None:
    """Out of a pool whose values say where they lie, a list of one token is that token."""
    value = torch.arange(192, dtype=torch.float16)[:, None].repeat(1, 64)
    pool = Pool(value, value)
    shape = Shape(1, 6, 3, 64, (20, 20), torch.float16, torch.device("cpu"), 1.0, (0,))
    asked = torch.tensor([[7], [0], [191], [33], [66], [99]])
    for page in (1, 16):
        plan = AttentionPlan(shape, 6, 2, 64 // page, page, 1.0)
        write(plan, asked // page, 1)
        out, _ = plan.attend(torch.zeros(2, 6, 1, 64, dtype=torch.float16), pool)
        assert torch.equal(out[..., 0, 0].view(6, 2), (asked // page * page).expand(6, 2).half())


def test_list_without_tokens_gives_zeros() -> None:
    shape = Shape(1, 2, 2, 64, (9,), torch.float16, torch.device("cpu"), 1.0, (0,))
    block = torch.ones(1, 2, 4096, 64, dtype=torch.float16)
    plan = AttentionPlan(shape, 2, 1, 256, 16, 1.0)
    write(plan, torch.tensor([[0], [0]]), torch.tensor([0, 4096]))
    out, _ = plan.attend(block[:, :, :1], Pool.of(block, block))
    assert out[0, :, 0, 0].tolist() == [0, 1]


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
def test_growing_generation_is_planned_once() -> None:
    store = filled(30, 11, steps=20)
    run, rng = FlashInfer(shape_of(store, HEADS[0])), torch.Generator().manual_seed(1)
    for step in range(20):
        query = queries(store, seed=step)
        selection = Selection(some(store, HEADS[1], 10 + step, seed=step))
        same(run(query, store, None, SCALE)[0], reference.attend(query, store, None, SCALE)[0])
        same(run(query, store, selection, SCALE)[0], reference.attend(query, store, selection, SCALE)[0])
        if step < 19:
            store.append(*random(rng, store, 1))
    assert [(plan["page"], plan["pages"][0]) for plan in flashinfer_twin.planned] == [(16, 4), (1, 64)]


def test_lists_are_planned_a_quarter_longer_at_most() -> None:
    lengths = [planned(count) for count in range(1, 100_000)]
    assert all(count <= length <= max(count + 63, 1.25 * count) for count, length in enumerate(lengths, 1))
    assert lengths == sorted(lengths)
    assert len(set(lengths[:4096])) == 20  # plans for every length up to 4096


@pytest.mark.usefixtures("exact")
def test_few_plans_are_kept_and_those_in_use_stay() -> None:
    store = filled(700)
    run, query = FlashInfer(shape_of(store, HEADS[0])), queries(store)
    for count in [*range(64, 64 * (PLANS + 3), 64), 64]:
        run(query, store, None, SCALE)
        out, _ = run(query, store, selection := Selection(torch.arange(count)[None, None]), SCALE)
        same(out, reference.attend(query, store, selection, SCALE)[0])
        assert len(run._plans) <= PLANS
    assert sum(plan["page"] == 16 for plan in flashinfer_twin.planned) == 1
    assert flashinfer_twin.planned[-1]["pages"][0] == 64  # made anew


def test_twin_refuses_what_the_kernels_would_read_wrong() -> None:
    shape = Shape(1, 1, 1, 64, (9,), torch.float16, torch.device("cpu"), 1.0, (0,))
    block = torch.zeros(1, 1, 512, 64, dtype=torch.float16)
    plan = AttentionPlan(shape, 1, 1, 512, 1, 1.0)

    def attend(length: int, page: int = 0) -> None:
        write(plan, torch.tensor([[page]]), length)
        plan.attend(block[:, :, :1], Pool.of(block, block))

    attend(512)
    with pytest.raises(IndexError, match="513 tokens long, 512 were planned"):
        attend(513)
    with pytest.raises(IndexError, match="-1 tokens"):
        attend(-1)
    with pytest.raises(IndexError, match="not one of 512"):
        attend(1, page=512)
    plan._wrapper._kernel.tensor_cores = False
    with pytest.raises(IndexError, match="starts behind its end"):
        attend(1)


@pytest.mark.parametrize(("home", "lengths"), [("device", (40, 23)), ("host", (40, 40))])
def test_no_call_waits_for_the_device(home: Any, lengths: tuple[int, ...]) -> None:
    with twin.device() as cuda:
        store = filled(*lengths, head_dim=64, dtype=torch.bfloat16, device="cuda", steps=4, home=home)
        if home == "host":
            store.first(1)["on_host"].result()  # as an index over the prompt does
        run, rng = FlashInfer(shape_of(store, HEADS[0])), torch.Generator().manual_seed(2)
        query = queries(store)
        lists = [some(store, heads, 20, seed=heads) for heads in (1, *HEADS)]
        asked: list[Selection | None] = [Selection(index) for index in lists]
        if home == "device":
            asked += [Selection(index.cuda()) for index in lists] + [None]
        for selection in asked:  # plans
            run(query, store, selection, SCALE)
        store.append(*random(rng, store, 1))
        plans = len(flashinfer_twin.planned)
        with cuda.no_sync():
            outputs = [run(query, store, selection, SCALE)[0] for selection in asked]
        assert len(flashinfer_twin.planned) == plans
        for out, selection in zip(outputs, asked, strict=True):
            expected = reference.attend(query, store, selection, SCALE)[0]
            torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=0.02)


# -- what a list cannot say --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_torch_takes_what_a_list_cannot_say(softcap: float | None) -> None:
    store = filled(30, 20)
    query, index = queries(store), some(store, HEADS[1], 12)
    weight, keys = torch.randn(2, HEADS[0], 12), torch.randn(2, HEADS[1], 12, 8)
    entries = [torch.randn(2, HEADS[1], 3, 8), torch.randn(2, HEADS[1], 3, 8), torch.randn(2, HEADS[0], 3)]
    entries[2][0, :, 1:] = -torch.inf
    extra, run = (
        Selection(index, extra=Extra(*entries)),
        FlashInfer(replace(shape_of(store, HEADS[0]), softcap=softcap)),
    )
    oracle = partial(reference.attend, softcap=softcap)
    assert run.used() == "flashinfer"
    for selection in (Selection(index, log_weight=weight), Selection(index, keys=keys)):
        same(run(query, store, selection, SCALE)[0], oracle(query, store, selection, SCALE)[0])
        assert run.used() == "torch"
    same(run(query, store, extra, SCALE)[0], oracle(query, store, extra, SCALE)[0])
    _, weights = run(query, store, Selection(index), SCALE, probabilities=True)
    assert weights is not None
    same(weights, attend(query, store, Selection(index), SCALE, probabilities=True, softcap=softcap)[1])
    run(query, store, Selection(index), SCALE)
    assert run.used() == "flashinfer, torch"


def test_tokens_on_the_host_must_be_selected() -> None:
    store = filled(30, home="host")
    with pytest.raises(LookupError, match="must select"):
        FlashInfer(shape_of(store, HEADS[0]))(queries(store), store, None, SCALE)


# -- which executor runs -----------------------------------------------------------------------------------------------


def a_shape(device: str = "cuda:0", head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Shape:
    return Shape(1, 4, 2, head_dim, (9,), dtype, torch.device(device), 1.0, (0,))


def test_auto_takes_flashinfer_on_a_gpu_and_what_reads_in_place_on_a_cpu() -> None:
    with twin.device():
        assert attention.executor("auto", a_shape()).name == "flashinfer"
        chosen = attention.executor("flashinfer", a_shape(dtype=torch.float16))
        assert (chosen.name, chosen.note) == ("flashinfer", None)
    for name, expected in (("auto", "cpu"), ("torch", "torch")):
        chosen = attention.executor(name, a_shape("cpu"))
        assert (chosen.name, chosen.note, chosen.used()) == (expected, None, expected)
    assert attention.executor("reference", a_shape("cpu")).name == "reference"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (a_shape("cpu"), "cpu is not a CUDA device"),
        (a_shape(head_dim=16), "head dim 16 is not one of 64, 128, 256"),
        (a_shape(dtype=torch.float32), "dtype float32 is not one of bfloat16, float16"),
    ],
)
def test_where_flashinfer_cannot_run_asking_for_it_is_an_error(shape: Shape, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention=flashinfer: {reason}; attention=auto takes what runs$"):
        attention.executor("flashinfer", shape)
    if shape.device.type == "cuda":
        chosen = attention.executor("auto", shape)
        assert (chosen.name, chosen.note) == ("torch", f"flashinfer: {reason}")


def test_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(sys, "path", [])
    with twin.device():
        note = attention.executor("auto", a_shape()).note
    assert note == "flashinfer: the package is not installed, pip install 'kvbench[flashinfer]'"


def test_kernel_that_does_not_compile_or_run_is_found_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("Ninja build failed\nwith pages of output")

    monkeypatch.setattr(flashinfer_twin.BatchDecodeWithPagedKVCacheWrapper, "plan", broken)
    with twin.device():
        assert attention.executor("auto", a_shape()).note == "flashinfer: does not run here (Ninja build failed)"


def test_unknown_executor_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="attention=fast: no such executor; one of auto, reference, torch, cpu, flashinfer"
    ):
        attention.executor("fast", a_shape())


# -- prefill -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("chunk", [7, 64])
def test_prefill_agrees_with_masked_attention(left: bool, chunk: int) -> None:
    lengths, kv_heads = (33, 9, 20), HEADS[1]
    longest = max(lengths)
    offsets = [longest - length if left else 0 for length in lengths]
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS[0], longest, 8, generator=rng)
    key, value = (torch.randn(3, kv_heads, longest, 8, generator=rng) for _ in range(2))
    store = LayerStore(3, kv_heads, 8, longest, torch.float32, torch.device("cpu"))
    run = FlashInfer(replace(shape_of(store, HEADS[0]), softcap=0.8), dense="flashinfer")
    for column in range(0, longest, chunk):
        part = slice(column, column + chunk)
        store.write_prompt(key[:, :, part], value[:, :, part], column, offsets)
        ours = run.prefill(query[:, :, part], store, column, offsets, SCALE)
        theirs = prefill(query[:, :, part], store, column, offsets, SCALE, softcap=0.8)
        assert bool(ours.isfinite().all())
        for row, offset in enumerate(offsets):
            real = slice(max(0, offset - column), None)
            same(ours[row, :, real], theirs[row, :, real])


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package itself, where it is installed."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        pytest.skip("flashinfer is not installed")


def test_twin_has_the_signatures_of_the_package(real: Any) -> None:
    def parameters(call: Any) -> list[tuple[str, Any, Any]]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(call).parameters.values()]

    ours, theirs = flashinfer_twin.BatchDecodeWithPagedKVCacheWrapper, real.BatchDecodeWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "_plan_impl", "run"):
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name
    ours, theirs = flashinfer_twin.single_prefill_with_kv_cache, real.single_prefill_with_kv_cache
    assert parameters(ours) == parameters(theirs)


def test_package_s_own_wrapper_runs_over_the_twin_s_kernel(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the package that is Python: what it takes, keeps, copies and hands to the compiled part."""
    monkeypatch.setattr(
        importlib.import_module("flashinfer.decode"), "get_batch_prefill_module", flashinfer_twin.Kernel
    )
    with twin.device() as cuda:
        store = filled(40, 23, head_dim=64, dtype=torch.bfloat16, device="cuda", steps=4)
        run, query = FlashInfer(shape_of(store, HEADS[0])), queries(store)
        assert attention.executor("auto", shape_of(store, HEADS[0])).name == "flashinfer"
        lists = [some(store, heads, 20, seed=heads) for heads in (1, *HEADS)]
        asked = [None, *(Selection(index.cuda()) for index in lists)]
        for selection in asked:
            run(query, store, selection, SCALE)
        store.append(*random(torch.Generator().manual_seed(2), store, 1))
        with cuda.no_sync():
            outputs = [run(query, store, selection, SCALE)[0] for selection in asked]
        for out, selection in zip(outputs, asked, strict=True):
            expected = reference.attend(query, store, selection, SCALE)[0]
            torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=0.02)
