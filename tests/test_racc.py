"""RACC against a plain reading of its paper and code: what is kept, what is moved, what is found, and when."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from driver import CLOSE, Driven, Inline, Stream, drive, each_accounting, same_attended, stream
from integrity import everything, tiers_of

import kvbench.engine.engine
from kvbench.backends.hf.cache import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.cli.compose import composed
from kvbench.config import ConfigError, bind_methods, method_config
from kvbench.engine.engine import Engine
from kvbench.measure.job import PromptJob
from kvbench.measure.prompts import prompt_of
from kvbench.measure.work import samples
from kvbench.runs.run import prepare

bind_methods()

from methods.racc.background import Batch  # noqa: E402
from methods.racc.index import KeyIndex  # noqa: E402
from methods.racc.ratio import retained, share  # noqa: E402
from methods.racc.retrieval import Log, Retriever  # noqa: E402
from methods.racc.settings import RACCOptions  # noqa: E402


def small(name: str = "racc", **options: Any) -> Any:
    """Cycles of 20 tokens whose last 5 vote, after which 60 % of the older ones stay; a tenth of all is retrieved."""
    cycle: dict[str, Any] = {"scenario": "silo", "every": 20, "window": 5, "beta": 0.1, "prompt_window": 8}
    if name == "racc":
        cycle["lag"] = 10
    return method_named(name, **{**cycle, **options})


def long(*lengths: int, steps: int = 70, layers: int = 1, **sizes: Any) -> Stream:
    return stream(*lengths, steps=steps, layers=layers, **sizes)


def after_steps(method: Any, do: Callable[[], Any]) -> None:
    """Have `do` called at the end of every step."""
    end_step = method.end_step
    method.end_step = lambda: (end_step(), do())


class Cycle(NamedTuple):
    """What a layer held on the device before and after one compression, as [row][KV head] lists of tokens."""

    step: int
    lengths: tuple[int, ...]
    before: Any
    after: Any


def watched(
    fixed: Stream, method: Any, budget: int | float | None = None, **options: Any
) -> tuple[Driven, list[Cycle]]:
    """Drive, and note each compression of layer 0 by what the store says."""
    cycles: list[Cycle] = []
    end_step = method.end_step

    def on_device() -> list[list[list[int]]]:
        store = method.view._stores[0]
        ids = store.device.token_ids()
        return [[[token for token in head if token >= 0] for head in row] for row in ids.tolist()]

    def noted() -> None:
        before = on_device()
        end_step()
        after = on_device()
        if before != after:
            cycles.append(Cycle(method.steps, method.view.lengths(0), before, after))

    method.end_step = noted
    return drive(fixed, method, budget, **options), cycles


# -- compression -------------------------------------------------------------------------------------------------------


def votes(
    fixed: Stream, row: int, head: int, older: Sequence[int], cycle: Cycle, kind: str, window: int
) -> list[float]:
    """Equations 5 and 6, and Algorithm 1, one query at a time; then mean pooling over five neighbours."""
    group = fixed.queries.shape[2] // fixed.keys.shape[2]
    keys = fixed.keys[0, row, head].double()
    sums = dict.fromkeys(older, 0.0)
    for position in range(cycle.lengths[row] - window, cycle.lengths[row]):
        resident = [token for token in cycle.before[row][head] if token <= position]
        for query in fixed.queries[0, row, head * group : (head + 1) * group, position].double():
            logits = {token: float(query @ keys[token]) * fixed.scaling for token in resident}
            over = older if kind == "softmax_l2" else resident
            total = 1.0 if kind == "raw" else sum(math.exp(logits[token]) for token in over)
            for token in older:
                sums[token] += logits[token] if kind == "raw" else math.exp(logits[token]) / total
    flat = [sums[token] for token in older]
    return [sum(flat[max(0, at - 2) : at + 3]) / 5 for at in range(len(flat))]


@pytest.mark.parametrize("kind", ["softmax_l2", "softmax_all", "raw"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_each_cycle_keeps_the_share_of_older_tokens_with_most_votes(kind: str, beta: float) -> None:
    """kept + dropped = L2 exactly, |kept| = floor(alpha |L2|), L1 and L3 are there; with and without moved tokens."""
    fixed = long(60, 33)
    _, cycles = watched(fixed, small(vote=kind, beta=beta))
    assert [cycle.step for cycle in cycles] == [20, 40, 60]
    moved = 0
    for cycle in cycles:
        for row, prompt in enumerate(fixed.lengths):
            start = cycle.lengths[row] - 5
            for head in range(2):
                before, after = cycle.before[row][head], set(cycle.after[row][head])
                older = [token for token in before if prompt <= token < start]
                arrived = after - set(before)
                kept = after & set(older)
                moved += len(arrived)
                assert after == set(range(prompt)) | kept | arrived | set(range(start, cycle.lengths[row]))
                assert len(kept) == share(0.6, len(older))
                scores = votes(fixed, row, head, older, cycle, kind, 5)
                least = min(score for token, score in zip(older, scores, strict=True) if token in kept)
                dropped = [score for token, score in zip(older, scores, strict=True) if token not in kept]
                assert least >= max(dropped) - 1e-4
    assert (moved > 0) == (beta > 0)


def test_the_ways_to_vote_choose_differently() -> None:
    """The reading above could not tell them apart if they chose alike."""
    kept = [watched(long(60), small(vote=kind))[1][0].after for kind in ("softmax_l2", "softmax_all", "raw")]
    assert kept[0] != kept[1] and kept[1] != kept[2] and kept[0] != kept[2]


def test_keys_and_values_survive_every_move_bit_for_bit() -> None:
    fixed, method = long(60, 33, layers=2), small()
    driven = drive(fixed, method, None)
    for layer, store in driven.engine.stores.items():
        for row, prompt in enumerate(fixed.lengths):
            for head in range(2):
                ids, keys, values = everything(store, row, head)
                assert ids.tolist() == list(range(prompt + fixed.steps)), "device and host hold each token once"
                assert torch.equal(keys, fixed.keys[layer, row, head, : len(ids)])
                assert torch.equal(values, fixed.values[layer, row, head, : len(ids)])


def test_device_and_host_hold_each_token_once_after_every_step() -> None:
    """`tiers` refuses a token in two; here none is in neither."""
    (fixed, method), seen = (long(60, 33), small()), []

    def check_tiers() -> None:
        store = method.view._stores[0]
        for row, length in enumerate(store.lengths):
            tiers = tiers_of(store)[row, :, :length]
            assert bool((tiers > 0).all())
            seen.append(int((tiers == 2).sum()))

    after_steps(method, check_tiers)
    drive(fixed, method, None)
    assert max(seen) > 40


@pytest.mark.parametrize("name", ["racc", "racc_paper"])
def test_alpha_of_one_is_full_attention(name: str) -> None:
    fixed = long(60, 33, layers=2)
    driven, full = (drive(fixed, method, None) for method in (small(name, alpha=1.0), method_named("full")))
    assert torch.equal(driven.outputs, full.outputs)
    assert all(at.in_place for at in driven.seen)
    assert driven.audit["host_bytes"] == driven.audit["searches"] == 0


@pytest.mark.parametrize("name", ["racc", "racc_paper"])
def test_beta_of_zero_is_compression_alone(name: str) -> None:
    """Nothing is searched, nothing comes back, and the sizes are those of compression."""
    driven, cycles = watched(long(60), small(name, beta=0.0))
    assert driven.audit["searches"] == driven.audit["moved_bytes_per_step"] == 0
    for number, cycle in enumerate(cycles, 1):
        assert set(cycle.after[0][0]) <= set(cycle.before[0][0])
        assert len(cycle.after[0][0]) == 60 + retained(number, 0.6, 20, 5)


@each_accounting
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize(("name", "alone"), [("snapkv_racc", "snapkv"), ("pyramidkv_racc", "pyramidkv")])
def test_without_retrieval_a_compressed_prompt_is_the_compressor_s(
    name: str, alone: str, granularity: str, accounting: str
) -> None:
    fixed = long(150, 90, layers=3, steps=24)
    ours = drive(fixed, method_named(name, beta=0.0, granularity=granularity), 48, accounting=accounting)
    theirs = drive(fixed, method_named(alone, granularity=granularity), 48, accounting=accounting)
    # lists of query heads stand in another order
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=CLOSE * (granularity == "query_head"))
    assert ours.audit["device_kv_bytes"] == theirs.audit["device_kv_bytes"]
    assert [at.sets(0) for at in ours.seen] == [at.sets(0) for at in theirs.seen]


def test_sizes_of_the_published_code_are_met() -> None:
    """n = 400, w = 40, alpha = 0.6, beta = 1 % after a prompt of 100: the spec's simulation, in the store."""
    method = method_named("racc", scenario="silo")
    driven, cycles = watched(long(100, steps=2000, query_heads=1, kv_heads=1, head_dim=8), method)
    assert [len(cycle.after[0][0]) - 100 for cycle in cycles] == [256, 409, 512, 578, 621]
    evicted = [len(set(cycle.before[0][0]) - set(cycle.after[0][0])) for cycle in cycles]
    assert evicted == [144, 247, 308, 349, 376]
    audit = driven.audit
    assert audit["ratio_end"] == 621 / 2000
    assert audit["ratio_peak"] == (578 + 400 - 1) / 2000, "each step is counted at its end, the fifth after compression"
    assert audit["attended_max"] == method.rule(0, 100, 2000) == 100 + 578 + 400
    assert (audit["searches"], audit["staleness_mean"], audit["over_rule"]) == (3, 200, False)


# -- retrieval ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["ip", "cosine"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_each_step_attends_what_an_earlier_query_finds(metric: str, lag: int) -> None:
    """The evicted tokens with the largest product with the group's mean query, `lag` steps before."""
    fixed, method = long(60, 33), small("racc_paper", lag=lag, metric=metric)
    found: dict[tuple[int, int, int], set[int]] = {}  # by step, row and KV head
    resident: dict[tuple[int, int, int], set[int]] = {}
    select = method.select

    def noted(layer: int, query: torch.Tensor) -> Any:
        host = method.view._stores[0].host
        for row, length in enumerate(method.view.lengths(0)):
            for head in range(2):
                evicted = [] if host is None else host.present[row, head].nonzero()[:, 0].tolist()
                resident[method.steps, row, head] = set(range(length)) - set(evicted)
                keys = fixed.keys[0, row, head, evicted].double()
                if metric == "cosine":
                    keys = keys / keys.norm(dim=1, keepdim=True)
                mean = query[row, 2 * head : 2 * head + 2, 0].double().mean(dim=0)
                order = (keys @ mean).argsort(descending=True)[: share(0.1, length)]
                found[method.steps, row, head] = {evicted[at] for at in order.tolist()}
        return select(layer, query)

    method.select = noted
    for at in drive(fixed, method, None).seen:
        for row in (0, 1):
            for head, ids in enumerate(at.sets(row)):
                assert ids == resident[at.step, row, head] | found.get((at.step - lag, row, head), set())
    assert sum(map(len, found.values())) > 500


@pytest.mark.parametrize(("scenario", "budget"), [("silo", None), ("lilo", None), ("liso", 20)])
def test_everything_retrieved_at_once_is_full_attention(scenario: str, budget: int | None) -> None:
    """link=step, lag 0 and beta 1 bring back all that was evicted."""
    fixed = long(60, 33, layers=2, steps=70)
    method = small("racc_paper", scenario=scenario, lag=0, beta=1.0, capacity=20)
    driven, full = drive(fixed, method, budget), drive(fixed, method_named("full"), None)
    torch.testing.assert_close(driven.outputs, full.outputs, rtol=0, atol=CLOSE)
    assert driven.audit["host_bytes"] > 0 and driven.audit["moved_bytes_per_step"] > 0


def test_found_tokens_return_to_the_cache_and_are_evicted_again() -> None:
    """The code's link: from the third cycle on, asked for at its half, in the cache from its end."""
    fixed, method = long(60, steps=200), small()
    driven, cycles = watched(fixed, method)
    arrived = [set(cycle.after[0][0]) - set(cycle.before[0][0]) for cycle in cycles]
    expected = [share(0.1, 60 + 20 * number - 10) if number > 2 else 0 for number in range(1, 11)]
    assert [len(tokens) for tokens in arrived] == expected
    assert any(
        tokens & set(cycle.before[0][0]) - set(cycle.after[0][0])
        for tokens, cycle in zip(arrived, cycles[1:], strict=False)
    )
    assert all(at.in_place for at in driven.seen), "what is in the cache needs no gather"
    assert not driven.audit["over_rule"]
    at_end = driven.audit["attended_max"]
    assert at_end == method.rule(0, 60, 200), "the rule is no more than what is attended"


def test_a_prompt_s_evicted_tokens_are_found_again() -> None:
    """Table 4's use: a late query points at a key that no window query looked at."""
    fixed = long(300, steps=4, query_heads=2, kv_heads=2)
    fixed.keys[..., 0] = 0
    fixed.queries[..., 0] = 0
    fixed.keys[0, 0, :, 100, 0] = 40.0
    fixed.queries[0, 0, :, 301:, 0] = 10.0
    for beta, expected in ((0.02, [False, False, True, True]), (0.0, [False] * 4)):
        seen = [100 in at.sets(0)[0] for at in drive(fixed, method_named("snapkv_racc", beta=beta), 64).seen]
        assert seen == expected, "asked in step 2, attended in step 3"


def test_under_unified_accounting_an_eighth_is_retrieved() -> None:
    """Through evictions of generated tokens, which are found again as well; a short row stays whole while it fits."""
    fixed = long(150, 60, steps=150, layers=2)
    for name in ("snapkv_racc", "pyramidkv_racc"):
        method = method_named(name)
        driven = drive(fixed, method, 80, accounting="unified")
        late = [at for at in driven.seen if at.step > 3]
        for at in driven.seen:
            for row, length in enumerate(at.lengths):
                if length <= 80:
                    assert at.sets(row) == [set(range(length))] * 2
        by_layer = [[len(ids) for at in late if at.layer == layer for ids in at.sets(0)] for layer in (0, 1)]
        assert sum(map(max, by_layer)) == 2 * 80
        assert all(set(counts) == {max(counts)} for counts in by_layer)
        hosts = [set(np.flatnonzero(store.host.present[0, 0])) for store in driven.engine.stores.values()]
        returned = [at.sets(0)[0] & hosts[at.layer] for at in late]
        assert any(token >= 150 for tokens in returned for token in tokens), "generated tokens are found, too"
        assert not driven.audit["over_rule"]


def test_other_indexes_and_their_fallback_run_in_the_background() -> None:
    fixed = long(60, steps=60)
    exact = drive(fixed, small("racc_paper"), None)
    graph = drive(fixed, small("racc_paper", index="hnsw"), None)
    with pytest.warns(UserWarning, match="searched flat"):
        coded = drive(fixed, small("racc_paper", index="ivfpq"), None)
    assert [at.sets(0) for at in coded.seen] == [at.sets(0) for at in exact.seen]
    same = np.mean([a.sets(0) == b.sets(0) for a, b in zip(graph.seen, exact.seen, strict=True)])
    assert same > 0.8
    assert graph.audit["index_bytes"] > exact.audit["index_bytes"] > 0


def test_keys_that_were_read_and_memory_of_the_index_are_in_the_audit() -> None:
    """Flat, cosine: each evicted key is read once and copied as fp32."""
    fixed = long(150, steps=3)
    quiet, busy = (drive(fixed, method_named("snapkv_racc", beta=beta, metric="cosine"), 50) for beta in (0.0, 0.1))
    evicted = 2 * (150 - 50)
    assert busy.audit["read_bytes_per_step"] * 3 == evicted * 16 * 4 and quiet.audit["read_bytes_per_step"] == 0
    more = busy.audit["index_bytes"] - quiet.audit["index_bytes"]
    assert evicted * (16 * 4 + 8) < more < evicted * (16 * 4 + 8) + 4000


# -- background work ---------------------------------------------------------------------------------------------------


class Late(ThreadPoolExecutor):
    """Starts each job in a thread once `wait` has returned."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__(max_workers=3)
        self.wait = wait

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(lambda: (self.wait(), fn(*args, **kwargs))[1])


Pools = Callable[[Executor], None]


@pytest.fixture
def searched_by(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Have the jobs of engines to come run by this pool."""
    return lambda pool: monkeypatch.setattr(kvbench.engine.engine, "worker_pool", lambda: pool)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lag"), [("racc", 10), ("racc_paper", 1), ("racc_paper", 4)])
def test_scores_never_depend_on_timing(name: str, lag: int, searched_by: Pools) -> None:
    fixed, waits = long(60, 33, layers=2, steps=90), itertools.cycle([2e-3, 4e-3, 1e-3, 3e-3, 0])
    found = []
    for pool in (Inline(), Late(lambda: time.sleep(next(waits)))):
        searched_by(pool)
        found.append(drive(fixed, small(name, lag=lag), None))
    assert same_attended(found[0].seen, found[1].seen)
    assert torch.equal(found[0].outputs, found[1].outputs)
    assert found[0].audit == found[1].audit


@pytest.mark.parametrize("name", ["racc", "racc_paper"])
def test_a_slow_search_never_blocks_decoding_in_free_mode(name: str, searched_by: Pools) -> None:
    """No job ends before the last step: decoding goes on with what it has, and counts the steps that went without."""
    gate = threading.Event()
    searched_by(Late(gate.wait))
    method, fixed = small(name, mode="free"), long(60, steps=101)
    alone = drive(fixed, small(name, beta=0.0), None)
    after_steps(method, lambda: gate.set() if method.steps == 101 else None)
    driven = drive(fixed, method, None)
    assert torch.equal(driven.outputs, alone.outputs)
    assert driven.audit["searches_late"] == (3 + 3 if name == "racc" else 81)
    assert driven.audit["staleness_max"] == 0, "nothing was used"


def test_an_old_answer_is_used_and_its_age_is_in_the_audit(searched_by: Pools) -> None:
    """The first answer stays for ten steps, in which no search ends."""
    gate = threading.Event()
    searched_by(Late(gate.wait))
    method, fixed = small("racc_paper", mode="free"), long(60, steps=60)
    step = method.step

    def noted(*arguments: torch.Tensor) -> None:
        step(*arguments)
        if method.steps in (23, 34, 60):
            gate.set()
            while any(retriever.busy for retriever in method.retrieval.layers.values()):
                time.sleep(1e-3)
        elif method.steps in (24, 35):
            gate.clear()

    method.step = noted
    audit = drive(fixed, method, None).audit
    assert audit["searches"] >= 2 and audit["searches_late"] >= 10
    assert audit["staleness_max"] >= 10


@pytest.mark.parametrize("name", ["racc", "racc_paper"])
def test_a_failed_search_is_counted_in_free_mode_and_ends_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch, searched_by: Pools
) -> None:
    fixed = long(60, steps=101)
    alone = drive(fixed, small(name, beta=0.0), None)

    def broken(*_: Any) -> Any:
        raise RuntimeError("the search broke")

    searched_by(Inline())
    monkeypatch.setattr(KeyIndex, "search", broken)
    driven = drive(fixed, small(name, mode="free"), None)
    assert torch.equal(driven.outputs, alone.outputs)
    asked = 3 if name == "racc" else 81  # the last step's answer nobody looks at
    assert (driven.audit["searches"], driven.audit["searches_failed"]) == (asked, asked - (name == "racc_paper"))
    with pytest.raises(RuntimeError, match="the search broke"):
        drive(fixed, small(name), None)


def test_free_mode_with_searches_that_are_done_at_once_is_one_step_late(searched_by: Pools) -> None:
    searched_by(Inline())
    fixed = long(60, steps=60)
    free, exact = drive(fixed, small("racc_paper", mode="free"), None), drive(fixed, small("racc_paper", lag=1), None)
    assert same_attended(free.seen, exact.seen)
    assert (free.audit["searches_late"], free.audit["staleness_max"]) == (0, 1)


def test_a_key_that_is_no_number_names_layer_and_head() -> None:
    fixed = stream(150, steps=3, layers=3)
    fixed.keys[2, 0, 1, 7, 5] = torch.nan
    fixed.queries[2] = 0  # no vote is NaN but those for the bad key
    with pytest.raises(FloatingPointError, match="layer 2, KV head 1: a key is not finite"):
        drive(fixed, method_named("snapkv_racc"), 48)


def test_the_audit_of_a_generation_that_an_error_ended_waits_for_nothing() -> None:
    method, engines = small("racc_paper"), list[Engine]()
    select = method.select

    def breaks(layer: int, query: torch.Tensor) -> Any:
        if (method.steps, layer) == (30, 1):
            raise RuntimeError("out of luck")
        return select(layer, query)

    method.select = breaks
    with pytest.raises(RuntimeError, match="out of luck"):
        drive(long(60, layers=2), method, None, after_prefill=engines.append)
    assert engines[0].report()["index_bytes"] > 0


@pytest.mark.slow
def test_a_copy_has_what_the_jobs_at_work_make_of_the_indexes() -> None:
    class SlowIndex:
        covered = keys_read = rebuilds = 0

        def cover(self, tokens: Any) -> None:
            time.sleep(0.05)
            self.covered += len(tokens)

    with ThreadPoolExecutor(1) as pool:
        jobs = Batch(pool.submit, 1)
        retriever = Retriever(0, [[SlowIndex()]], jobs.submit, RACCOptions(), print, Log(), nullcontext)  # type: ignore[list-item]
        for _ in range(2):
            retriever.cover(0, [[np.arange(3)]])
        jobs.flush()
        ((copied,),) = copy.deepcopy(retriever, {id(retriever._submit.__self__): jobs}).index
    assert copied.covered == 6  # type: ignore[attr-defined]


def test_a_cache_that_grows_finds_the_same() -> None:
    """Under left padding the store's final length is unknown, and host memory moves while it is searched."""
    fixed = long(60, 40, steps=420)
    known, grown = (drive(fixed, small("racc_paper"), None, left=left) for left in (False, True))
    assert [at.sets(0) for at in known.seen] == [at.sets(0) for at in grown.seen]
    torch.testing.assert_close(known.outputs, grown.outputs, rtol=0, atol=CLOSE)


# -- scenarios and budgets ---------------------------------------------------------------------------------------------


def scenario_of(fixed: Stream, budget: int | float | None, **options: Any) -> str:
    method = method_named("racc", prompt_window=8, capacity=40)
    drive(fixed, method, budget, **options)
    return str(method.scenario)


def test_auto_takes_liso_where_the_answer_is_shorter_than_the_prompt() -> None:
    assert scenario_of(long(60, steps=59), None) == "liso"
    assert scenario_of(long(60, steps=60), None) == "silo"
    assert scenario_of(long(60, 30, steps=40), None) == "silo", "than every prompt"
    assert scenario_of(long(60, steps=80), 40) == "liso", "a budget in tokens is a prompt's"
    assert scenario_of(long(60, steps=80), None, accounting="unified") == "liso", "which has the only rule for it"
    assert scenario_of(long(60, steps=80), None, left=True) == "liso", "the length of the answer is not known"


def test_the_answer_s_length_reaches_the_method_in_a_run() -> None:
    """Samples say how many tokens they may generate."""
    words = ["model=dummy-tiny", "method=racc", "method.prompt_window=16", "budget=null", "task.lengths=[300]"]
    arm = prepare(composed(*words, "task.limit=1"))
    prompt = prompt_of(arm, next(samples(arm, 1)))
    for tokens, scenario in ((10, "liso"), (400, "silo")):
        sample = replace(prompt.sample, max_new_tokens=tokens)
        PromptJob(arm, [replace(prompt, sample=sample)]).run()
        assert arm.method.scenario == scenario  # type: ignore[attr-defined]


@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_a_share_of_generated_tokens_sets_alpha(ratio: float) -> None:
    """Formula (4) counts neither the window nor what was found before, so what is measured is a little more."""
    method = small(every=50, beta=0.01, lag=25)
    driven = drive(long(60, steps=1000), method, ratio)
    assert sum(method.options.alpha**age for age in range(1, 21)) / 20 + 0.01 == pytest.approx(ratio)
    assert ratio < driven.audit["ratio_end"] < ratio + 0.05
    assert driven.audit["ratio_mean"] < driven.audit["ratio_peak"] < ratio + 0.1
    assert not driven.audit["over_rule"]


def test_lilo_compresses_both_and_counts_all() -> None:
    fixed = long(200, steps=400)
    method = small(scenario="lilo", every=50, beta=0.01)
    driven, cycles = watched(fixed, method, 0.25)
    assert [cycle.step for cycle in cycles] == list(range(50, 401, 50))
    kept = cycles[-1].after[0][0]
    assert len([token for token in kept if token < 200]) >= 50
    assert method.residents[0].prompt.shape[2] == 50
    assert set(method.residents[0].prompt[0, 0].tolist()) <= set(kept), "L1 stays as it is"
    assert 0.25 < driven.audit["ratio_end"] < 0.3
    assert not driven.audit["over_rule"]
    assert all(everything(store, 0, 0)[0].tolist() == list(range(600)) for store in driven.engine.stores.values())


@pytest.mark.parametrize("scenario", ["silo", "lilo"])
def test_budgets_without_a_rule_are_refused(scenario: str) -> None:
    method = small(scenario=scenario)
    for budget, accounting, words in (
        (64, "paper", f"budget=64: in scenario={scenario} a budget is the share"),
        (0.15, "unified", f"protocol.accounting=unified: scenario={scenario} has no rule"),
        (0.005, "paper", "budget=0.005: a ratio of 0.005 is not above beta=0.1"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            drive(long(60), method, budget, accounting=accounting)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="budget=0.15: alpha follows from the length of the answer"):
        drive(long(60), method, 0.15, left=True)


def test_the_minimum_is_of_a_prompt_that_is_compressed(tiny: Loaded) -> None:
    for name, least in (("racc", 136), ("snapkv_racc", 40), ("pyramidkv_racc", 16)):
        with pytest.raises(ConfigError, match=f"{least - 1}.*minimum of {name}, {least} tokens"):
            KVCache(tiny.model, name, least - 1)
        with pytest.raises(ConfigError, match=f"39.*minimum of {name}, 40 tokens"):
            KVCache(tiny.model, name, 39, accounting="unified")
        KVCache(tiny.model, name, least)
    with pytest.raises(ConfigError, match="a prompt's 300 tokens, below the minimum of the method, 40"):
        drive_with_minimum(long(300, steps=3), method_named("snapkv_racc"), 0.1, 40)
    drive_with_minimum(long(300, steps=20), small(scenario="silo"), 0.15, 40)
    composed("method=racc", "method.scenario=silo", "budget=0.15", "task.lengths=[300]")


def drive_with_minimum(fixed: Stream, method: Any, budget: float, minimum: int) -> None:
    begin = method.begin
    method.begin = lambda shape, given, *rest: begin(shape, replace(given, minimum=minimum), *rest)
    drive(fixed, method, budget)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alpha": 0.0}, "alpha=0.0: expected a share in"),
        ({"alpha": 1.2}, "alpha=1.2: expected a share in"),
        ({"beta": -0.1}, "beta=-0.1: expected a share in"),
        ({"beta": 1.5}, "beta=1.5: expected a share in"),
        ({"every": 40}, "every=40: expected more tokens than the observation window has, window=40"),
        ({"lag": 400}, "lag=400: expected fewer steps than lie between two compressions, every=400"),
        ({"index": "lsh"}, r"index=lsh: expected flat \| ivfpq \| hnsw"),
        ({"compressor": "h2o"}, r"compressor=h2o: expected snapkv \| pyramidkv \| none"),
        ({"kernel": 4}, "kernel=4: expected an odd whole number"),
        ({"mode": "async"}, r"mode=async: expected deterministic \| free"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        method_config("racc", **options).build()
    assert "\n" not in str(error.value)


def test_more_subspaces_than_the_dimension_are_refused() -> None:
    with pytest.raises(ConfigError, match="subspaces=17: at most the head dimension, 16"):
        drive(long(60), small(index="ivfpq", subspaces=17), None)
    with pytest.warns(UserWarning, match="searched flat"):
        drive(long(60), small(index="ivfpq", subspaces=16), None)


def test_an_uncompressed_prompt_is_attended_whole() -> None:
    fixed, full = long(150, steps=5), method_named("full")
    method = method_named("racc", scenario="liso", compressor="none")
    assert torch.equal(drive(fixed, method, 64).outputs, drive(fixed, full, None).outputs)


def test_the_audit_says_what_became_of_the_searches() -> None:
    audit = drive(long(60), small(), None).audit
    names = {"searches", "searches_late", "searches_failed", "staleness_mean", "staleness_max", "index_rebuilds"}
    assert names | {"ratio_end", "ratio_mean", "ratio_peak"} <= audit.keys()
