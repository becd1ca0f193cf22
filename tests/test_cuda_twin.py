"""The harness and every method on the twin of a CUDA device: the same results, and no wait that is not needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import driver
import pytest
import torch
from driver import (
    CLOSE,
    METHODS,
    SMALL,
    Attended,
    Case,
    drive,
    each_accounting,
    each_method,
    each_method_in_turn,
    numbers,
    run_loop,
    slow,
    stream,
)
from twin import Twin, device
from twin_streams import Clock, Event, Stream

from kvbench.backends.hf.cache import KVCache
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import shipped
from kvbench.engine.batch import generate
from kvbench.engine.engine import Engine
from kvbench.memory import stage
from kvbench.memory.view import StoreView
from methods.racc.index import KeyIndex

CASES = {case.id: case for case in METHODS}
DROPPING = ["streaming_llm", "snapkv", "pyramidkv"]  # evict what was generated, every so many steps:
EVICTION = 32
CHANGING = [
    *DROPPING,
    "racc",
    "snapkv_racc-hnsw",
    "icecache_reuse",
    "pariskv-torch",
    "lychee",
    "lychee-query_head",
]
QUIET = ["full", "topk", "topk-kv_head", "quest", "quest-kv_head", "quest_structure", "pariskv", *DROPPING]

each_quiet = pytest.mark.parametrize("case", [CASES[name] for name in QUIET], ids=QUIET)
each_batch = pytest.mark.parametrize("lengths", [(150,), (150, 90)], ids=["one", "ragged"])


@pytest.fixture
def cuda() -> Iterator[Twin]:
    with device() as cuda:
        yield cuda


@pytest.fixture
def above(cuda: Twin) -> Loaded:
    """The dummy Llama on the device, in the CPU's precision."""
    config = shipped("model", "dummy-tiny")
    assert config is not None
    return load(config, device="cuda", dtype="float32")


def up(fixed: driver.Stream) -> driver.Stream:
    """The stream on the device."""
    return replace(fixed, **{name: getattr(fixed, name).cuda() for name in ("queries", "keys", "values", "tokens")})


def ids(seen: Sequence[Attended]) -> list[list[list[list[int]]]]:
    """What was attended in which order, whatever the padding."""
    return [[[[i for i in head if i >= 0] for head in row] for row in one.index.tolist()] for one in seen]


def agree(fixed: driver.Stream, case: Case, accounting: str, **options: int) -> None:
    here = drive(fixed, case.build(), SMALL, accounting=accounting, **options)
    there = drive(up(fixed), case.build(), SMALL, accounting=accounting, **options)
    assert there.outputs.is_cuda
    assert ids(there.seen) == ids(here.seen)
    assert (there.outputs.cpu() - here.outputs).abs().max() <= CLOSE
    # What is brought up to be read, and not to be attended, takes room on the device alone.
    same = here.audit.keys() - {"transfer", "index_bytes", "executor", "device_kv_allocated_bytes"}
    assert {key: there.audit[key] for key in same} == {key: here.audit[key] for key in same}


@each_method_in_turn
def test_a_method_on_the_device_gives_what_it_gives_on_the_cpu(cuda: Twin, case: Case, accounting: str) -> None:
    agree(stream(*{"paper": (150, 90), "unified": (150,)}[accounting], steps=4), case, accounting, chunk=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=[pytest.mark.slow] * (at % 3 > 0)) for at, name in enumerate(CHANGING)],
)
def test_so_it_does_while_buffers_fill_and_tokens_are_evicted(cuda: Twin, case: Case) -> None:
    agree(stream(100, 60, steps=EVICTION + 4), case, "unified" if case.id in DROPPING else "paper")


@pytest.mark.slow
@each_method
def test_the_measured_loop_generates_the_same(cuda: Twin, above: Loaded, tiny: Loaded, case: Case) -> None:
    prompts = [numbers(150), numbers(90, seed=1)]
    here, _ = run_loop(tiny, prompts, case.build(), SMALL, steps=4)
    there, _ = run_loop(above, prompts, case.build(), SMALL, steps=4, prefill_chunk=64)
    assert there.tokens == here.tokens


# -- no wait that is not needed ----------------------------------------------------------------------------------------


@each_quiet
@each_batch
@each_accounting
def test_a_decode_step_makes_the_host_wait_for_nothing(
    cuda: Twin, case: Case, lengths: tuple[int, ...], accounting: str
) -> None:
    """But for an eviction, or a buffer that is full, every so many steps."""
    start, attend = Engine.start_step, Engine.attend

    def quiet(work: Callable[..., object]) -> Callable[..., object]:
        def call(engine: Engine, *args: torch.Tensor) -> object:
            with cuda.no_sync() if engine.prefilled else nullcontext():
                return work(engine, *args)

        return call

    with (
        mock.patch.object(Engine, "start_step", quiet(start)),
        mock.patch.object(Engine, "attend", quiet(attend)),
        mock.patch("driver.watch", lambda method: []),
    ):
        drive(up(stream(*lengths, steps=3)), case.build(), SMALL, accounting=accounting)


@pytest.mark.parametrize(("name", "waits"), [("icecache", 2), ("icecache_reuse", 1)])
def test_an_index_on_the_cpu_waits_for_its_queries_only(cuda: Twin, name: str, waits: int) -> None:
    """Of the layers that search; what they find goes up by itself."""
    fixed, counts, start = up(stream(150, 90, steps=3)), [], Engine.start_step

    def counted(engine: Engine, *args: torch.Tensor) -> None:
        cuda.syncs.clear()
        start(engine, *args)

    def settled(engine: Engine) -> None:
        counts.append(len(cuda.syncs))

    with (
        mock.patch.object(Engine, "start_step", counted),
        mock.patch.object(Engine, "settle", settled),
        mock.patch("driver.watch", lambda method: []),
    ):
        drive(fixed, CASES[name].build(), SMALL)
    assert counts == [waits] * 3


@pytest.mark.slow
@each_quiet
def test_the_measured_loop_waits_once_a_step(cuda: Twin, above: Loaded, case: Case) -> None:
    """For the tokens that come down; what the audit counts once the clock has stopped is left out."""
    settle, outside = Engine.settle, 0

    def uncounted(engine: Engine) -> None:
        nonlocal outside
        before = len(cuda.syncs)
        settle(engine)
        outside += len(cuda.syncs) - before

    prompts, waits = [numbers(150), numbers(90, seed=1)], []
    with mock.patch.object(Engine, "settle", uncounted):
        for steps in (3, 7):
            cuda.syncs.clear()
            outside = 0
            run_loop(above, prompts, case.build(), SMALL, steps=steps, accounting="unified")
            waits.append(len(cuda.syncs) - outside)
    assert waits[1] - waits[0] == 4


@pytest.mark.parametrize("padding", [0, 9])
def test_a_mask_that_a_cache_looks_at_costs_a_step_no_wait_of_its_own(cuda: Twin, above: Loaded, padding: int) -> None:
    prompt, token = torch.tensor([numbers(60)]).cuda(), torch.tensor([[7]]).cuda()
    mask = torch.ones(1, 64, dtype=torch.int64)
    mask[:, :padding] = 0
    mask, waits = mask.cuda(), []
    for masked in (False, True):
        cache = KVCache(above.model, "full", None)
        above.model(prompt, attention_mask=mask[:, :60] if masked else None, past_key_values=cache)
        cuda.syncs.clear()
        for columns in (61, 62, 63):
            above.model(token, attention_mask=mask[:, :columns] if masked else None, past_key_values=cache)
        waits.append(len(cuda.syncs))
    assert waits[0] == waits[1] <= 2 * 3


def test_what_icecache_has_found_is_sent_ahead_to_the_layers_that_reuse_it(cuda: Twin) -> None:
    """And no token twice: see the moved bytes of `agree`."""
    sent: list[int] = []
    prefetch = StoreView.prefetch

    def noted(view: StoreView, layer: int, ids: torch.Tensor) -> None:
        sent.append(layer)
        prefetch(view, layer, ids)

    with mock.patch.object(StoreView, "prefetch", noted):
        agree(stream(150, 90, steps=2, layers=4), CASES["icecache_reuse"], "paper")
    assert sent == [1, 2] * 2 * 2  # three layers share the trees of the first; two steps, here and there


# -- beside the computation -------------------------------------------------------------------------------------------

FETCHING = ["icecache", *slow("icecache_reuse", "pariskv-torch", "shadowkv", "racc_paper", "pqcache")]


@pytest.mark.parametrize("name", FETCHING)
def test_what_comes_up_beside_the_computation_is_what_comes_up_in_turn(
    cuda: Twin, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed, found = up(stream(150, 90, steps=4)), []
    for _ in range(2):
        found.append(drive(fixed, CASES[name].build(), SMALL))
        monkeypatch.setattr(stage, "side_stream", torch.cuda.current_stream)
    beside, in_turn = found
    assert torch.equal(beside.outputs.cpu(), in_turn.outputs.cpu())
    assert ids(beside.seen) == ids(in_turn.seen) and beside.audit == in_turn.audit


@pytest.mark.parametrize("name", ["icecache", "pariskv-torch"])
def test_rows_that_are_read_before_they_are_there_are_a_race(
    cuda: Twin, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned on the CPU, and read by the device itself."""
    monkeypatch.setattr(stage.Stage, "_wait_for", lambda *_: None)
    with pytest.raises(RuntimeError, match="without a wait between them"):
        drive(up(stream(150, 90, steps=2)), CASES[name].build(), SMALL)


@pytest.mark.parametrize("name", ["icecache", "pariskv-torch"])
def test_a_breakdown_says_how_long_rows_were_waited_for(cuda: Twin, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, wait, waits = 0.0, Stream.wait_event, 0

    def waited(stream: Stream, event: Event) -> None:
        nonlocal now, waits
        wait(stream, event)
        now, waits = now + 1, waits + 1  # on this clock nothing else takes time

    monkeypatch.setattr("twin_streams.time.perf_counter", lambda: now)
    monkeypatch.setattr(Stream, "wait_event", waited)
    driven = drive(up(stream(150, 90, steps=3)), CASES[name].build(), SMALL)
    spent = driven.engine.spans.reset()
    assert spent["waiting"] + spent["transfer"] == waits  # the other: for a prompt that was still on its way down
    assert spent["waiting"] >= 3


def test_a_query_leaves_the_device_and_an_answer_comes_up_without_a_wait(cuda: Twin) -> None:
    """Of RACC's searches; what waits in a layer is the list of what lies where."""
    fixed, waits = up(stream(150, 90, steps=4)), list[str]()
    sync = Twin.sync

    def noted(cuda: Twin, name: str, clock: Clock) -> None:
        if threading.current_thread() is threading.main_thread():
            sync(cuda, name, clock)
            waits.append(cuda.syncs[-1][1].partition(":")[0])
        else:
            sync(cuda, name, clock)

    with mock.patch.object(Twin, "sync", noted), mock.patch("driver.watch", lambda method: []):
        drive(fixed, CASES["racc_paper"].build(), SMALL)
    assert "retrieval.py" not in waits


def test_a_search_that_is_late_is_waited_for_in_a_part_of_its_own() -> None:
    """RACC's of the step before, which is asked for where its layer attends."""

    def slow_search(index: KeyIndex, *args: Any) -> Any:
        time.sleep(5e-3)
        return search(index, *args)

    search = KeyIndex.search
    with mock.patch.object(KeyIndex, "search", slow_search):
        driven = drive(stream(150, steps=4), CASES["racc_paper"].build(), SMALL)
    assert driven.engine.spans.reset()["waiting"] > 5e-3


# -- other ways in -----------------------------------------------------------------------------------------------------


def test_one_prefill_serves_many_methods(cuda: Twin, above: Loaded, tiny: Loaded) -> None:
    prompts = [numbers(150), numbers(90, seed=1)]
    cases = [CASES[name] for name in ("snapkv", "icecache_reuse", "quest", "pariskv", "snapkv_racc", "full")]
    methods = [case.build() for case in cases]
    shared = prefill_once(above.model, prompts, [method.needs for method in methods], max_new_tokens=4)
    for case, method in zip(cases, methods, strict=True):
        there, _ = run_loop(above, prompts, method, SMALL, steps=3, prefilled=shared)
        here, _ = run_loop(tiny, prompts, case.build(), SMALL, steps=3)
        assert there.tokens == here.tokens, case.id


@pytest.mark.parametrize("name", ["snapkv", "icecache", *slow("full", "quest", "pariskv", "racc", "lychee")])
def test_probes_measure_the_same(cuda: Twin, above: Loaded, tiny: Loaded, name: str) -> None:
    def probed(loaded: Loaded) -> dict[str, float]:
        prompts, method = [numbers(150), numbers(90, seed=1)], CASES[name].build()
        engine = engine_for(
            loaded.model, [150, 90], method, Budget(SMALL), (), loaded.tokenizer, new_tokens=4, probe_every=2
        )
        report = generate(ModelRunner(loaded.model), prompts, engine, max_new_tokens=4).probe
        return {name: value for name, value in report.items() if isinstance(value, float)}

    assert probed(above) == pytest.approx(probed(tiny), abs=CLOSE)


@pytest.mark.parametrize("name", ["snapkv", "icecache", *slow("quest", "pariskv")])
def test_generate_of_transformers_runs_on_a_padded_batch(cuda: Twin, above: Loaded, tiny: Loaded, name: str) -> None:
    def generated(loaded: Loaded) -> list[list[int]]:
        short = numbers(90, seed=1)
        prompts = torch.tensor([numbers(120), [0] * 30 + short], device=loaded.model.device)
        mask = torch.ones_like(prompts)
        mask[1, :30] = 0
        cache = KVCache(loaded.model, name, SMALL, dense_layers=())
        new = loaded.model.generate(
            prompts, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
        )
        return new.tolist()

    assert generated(above) == generated(tiny)
