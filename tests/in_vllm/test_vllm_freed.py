"""Prompts whose blocks vLLM frees: its own manager of blocks alone, and an engine with a small model."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from driver import slow, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_vllm_requests import SIZE, Serving

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvbench.backends.vllm.blocks import freed
from kvbench.backends.vllm.paged import Memory
from kvbench.backends.vllm.plan import Plan, vllm_options
from kvbench.config import ASSETS, ConfigError

BLOCKS, SPARSE = 30, 2  # in all, and groups of layers whose prompts are freed
LONGEST = 200


class Blocks:
    """vLLM's manager with one group of dense layers and some whose prompts are freed, as its scheduler asks it."""

    def __init__(self) -> None:
        dense = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [
            KVCacheGroupSpec(["0"], dense),
            *(KVCacheGroupSpec([str(1 + n)], freed(dense)) for n in range(SPARSE)),
        ]
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(config, LONGEST, SIZE, SIZE, enable_caching=False)
        self.running: dict[str, Request] = {}
        self.read: dict[str, int] = {}  # of each, tokens computed before its last pass
        self.empty = self.manager.block_pool.get_num_free_blocks()

    @property
    def used(self) -> int:
        """Blocks that some request has."""
        return self.empty - self.manager.block_pool.get_num_free_blocks()

    def run(self, name: str, prompt: int, tokens: int) -> bool:
        """Compute so many more tokens of a request; False: there is no room, and nothing was done."""
        request = self.request(name, prompt)
        left = request.num_prompt_tokens - request.num_computed_tokens
        tokens = min(tokens, left) if left > 0 else min(1, LONGEST - request.num_computed_tokens)
        return not tokens or self.compute(request, tokens)

    def request(self, name: str, prompt: int) -> Request:
        """One that runs, or begins to."""
        if name not in self.running:
            how = SamplingParams(max_tokens=LONGEST)
            self.running[name] = Request(name, [1] * prompt, how, None)
        return self.running[name]

    def compute(self, request: Request, tokens: int) -> bool:
        """Have blocks for so many more tokens, which are computed then; False: as of `run`."""
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        self.read[request.request_id] = request.num_computed_tokens
        request.num_computed_tokens += tokens
        return True

    def leave(self, name: str) -> None:
        """The request has ended, was cancelled or is preempted."""
        if (request := self.running.pop(name, None)) is not None:
            self.manager.free(request)

    def most(self) -> int:
        """Blocks that all requests may have: of all tokens in dense layers, in others without a prompt that is read."""
        total = 0
        for request in self.running.values():
            prompt, whole = request.num_prompt_tokens, -(-request.num_computed_tokens // SIZE)
            gone = prompt // SIZE if self.read[request.request_id] >= prompt else 0
            total += whole + SPARSE * (whole - gone)
        return total


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90), st.integers(1, 64), st.booleans()), max_size=60))
def test_blocks_in_use_are_those_of_dense_layers_and_of_what_came_after_the_prompts(
    doings: list[tuple[int, int, int, bool]],
) -> None:
    blocks = Blocks()
    for name, prompt, tokens, goes in doings:
        if (goes and tokens > 48) or not blocks.run(str(name), prompt, tokens):
            blocks.leave(str(name))
        assert blocks.used == blocks.most()
    for name in list(blocks.running):
        blocks.leave(name)
    assert blocks.used == 0, "none is lost"


def test_two_thousand_short_requests_leave_no_block_behind() -> None:
    blocks, rng = Blocks(), random.Random(0)
    for number in range(2000):
        name, prompt = str(number % 6), rng.randint(1, 60)
        for tokens in (prompt // 2 + 1, prompt, 1, 1, 1)[: rng.randint(1, 5)]:
            while not blocks.run(name, prompt, tokens):
                blocks.leave(rng.choice([other for other in blocks.running if other != name]))
        blocks.leave(name)
    for name in list(blocks.running):
        blocks.leave(name)
    assert blocks.used == 0


class Managed(Serving):
    """Requests whose blocks are vLLM's manager's: one memory for all layers, each layer a group of its own."""

    def __init__(self, method: str) -> None:
        fixed = [stream(length, steps=60, layers=1 + SPARSE, head_dim=32, seed=length) for length in (97, 60, 130, 33)]
        super().__init__(Plan(method, 48, dense_layers=(0,)), "vec", fixed, frees=True)
        self.pool = Blocks()
        whole = torch.full((BLOCKS, *self.caches.shape[2:]), torch.nan)
        self.caches = whole.expand(1 + SPARSE, *whole.shape)
        self.requests.memory.update({layer: Memory(whole, self.isa) for layer in range(1 + SPARSE)})
        self.requests.groups = range(1 + SPARSE)

    def leave(self, request: int, how: str) -> None:
        """See `Serving.leave`."""
        self.pool.leave(str(request))
        self.requests.forget([str(request)])
        self.computed[request] = 0
        if how == "end":
            self.longest.pop(request, None)

    def step(self, counts: dict[int, int]) -> None:
        """See `Serving.step`; who has no room is preempted."""
        room = {}
        for request, count in counts.items():
            if self.pool.compute(self.pool.request(str(request), self.fixed[request].lengths[0]), count):
                room[request] = count
            else:
                self.leave(request, "preempt")
        if room:
            super().step(room)

    def _tables(self, request: int, end: int) -> torch.Tensor:
        own = self.pool.manager.get_block_ids(str(request))
        return torch.tensor([[*blocks, *[0] * (BLOCKS - len(blocks))] for blocks in own])

    def check(self) -> None:
        """Every request that runs has a seat and the blocks that it may have, and no other has any."""
        assert self.side is not None and self.pool.used == self.pool.most()
        free = set(self.side.free)
        assert len(free) == len(self.side.free) == len(self.fixed) - len(self.pool.running)


DOINGS = st.sampled_from([*["run"] * 6, "wait", "preempt", "end"])


@pytest.mark.parametrize("method", ["snapkv", *slow("streaming_llm", "adakv_snapkv", "keydiff")])
@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(passes=st.lists(st.tuples(st.sampled_from([16, 50, 200]), *[DOINGS] * 4), max_size=14))
def test_whoever_comes_and_goes_attends_what_it_keeps_alone_and_gives_seat_and_blocks_back(
    method: str, passes: list[tuple[int, str, str, str, str]]
) -> None:
    serving = Managed(method)
    for tokens, *doings in passes:
        counts = {}
        for request, doing in enumerate(doings):
            if doing == "run":
                counts[request] = max(1, min(tokens, serving.to_read(request)))
            elif doing != "wait":
                serving.leave(request, doing)
        serving.step(counts)
        serving.check()
    for request in range(len(serving.fixed)):
        serving.leave(request, "end")
    serving.check()
    assert not serving.pool.used


STEPS, BUDGET = 12, 64
LENGTHS = (500, 130, 33, 257, 64)


class Freeing:
    """A vLLM in this process that frees prompts, and how many blocks it had in use after each step."""

    def __init__(self, method: str, **more: Any) -> None:
        self.llm = LLM(
            str(ASSETS / "tiny"),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            **{"max_num_batched_tokens": 256, "max_num_seqs": 17, "max_model_len": 1024, "enable_prefix_caching": False}
            | more,
            **vllm_options(method, BUDGET, dense_layers=(0,)),
        )
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = self._scheduler.kv_cache_manager
        self.used, self.preempted = list[int](), 0
        schedule = self._scheduler.schedule

        def counted(*given: Any, **named: Any) -> Any:
            made = schedule(*given, **named)
            self.preempted += len(made.preempted_req_ids or ())
            return made

        self._scheduler.schedule = counted

    def tokens(
        self, prompts: list[list[int]], steps: int = STEPS, cancelled: Mapping[int, int] | None = None
    ) -> list[list[int]]:
        """What follows each prompt, all at once; of those that are cancelled, after so many tokens.

        Blocks and seats are all free afterwards.
        """
        engine, pool, found = self.llm.llm_engine, self.manager.block_pool, dict[int, list[int]]()
        how = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        empty, self.used, self.preempted = pool.get_num_free_blocks(), [], 0
        for row, prompt in enumerate(prompts):
            engine.add_request(str(row), {"prompt_token_ids": prompt}, how)
        while engine.has_unfinished_requests():
            for one in engine.step():
                row = int(one.request_id)
                found[row] = list(one.outputs[0].token_ids)
                if len(found[row]) == (cancelled or {}).get(row):
                    engine.abort_request([one.request_id])
            self.used.append(empty - pool.get_num_free_blocks())
        engine.step()  # in which the worker hears of the last that have ended
        assert pool.get_num_free_blocks() == empty, "no block is lost"
        assert self.llm.collective_rpc(_seats_taken) == [0], "no seat is lost"
        return [found[row] for row in range(len(prompts))]

    def run(self, method: str, budget: int = BUDGET) -> None:
        """From now on this method runs."""
        self.llm.collective_rpc("kvbench_run", args=({"method": method, "budget": budget, "dense_layers": [0]},))

    def audits(self) -> list[dict[str, Any]]:
        """Of all requests."""
        return list(self.llm.collective_rpc("kvbench_reports")[0].values())


def _seats_taken(wrapper: Any) -> int:
    worker = wrapper.worker
    return int(worker.vllm_config.scheduler_config.max_num_seqs - len(worker._requests._side.free))


def prompts(*lengths: int) -> list[list[int]]:
    return [random.Random(length).choices(range(300, 4000), k=length) for length in lengths]


@pytest.fixture(scope="module")
def freeing() -> Iterator[Freeing]:
    yield from _freeing()


@pytest.fixture(scope="module")
def crowded() -> Iterator[Freeing]:
    """Room for few of the requests that may run at once."""
    yield from _freeing(num_gpu_blocks_override=40, max_model_len=192, max_num_seqs=8)


def _freeing(**more: Any) -> Iterator[Freeing]:
    from vllm.distributed import cleanup_dist_env_and_memory

    served = Freeing("snapkv", **more)
    yield served
    served.llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def test_after_a_prompt_its_blocks_are_free_but_in_dense_layers(freeing: Freeing) -> None:
    freeing.tokens(prompts(500))
    groups = len(freeing.manager.kv_cache_config.kv_cache_groups)
    assert groups > 1 and max(freeing.used) == groups * 16, "500 tokens take 16 blocks of 32 in each group"
    assert freeing.used[-2] == 16 + (groups - 1), "and then 16 in the dense one, and one where the text goes on"
    [audit] = freeing.audits()
    assert "visibility_only" not in audit and audit["attended_mean"] <= BUDGET + STEPS
    freeing.tokens(prompts(*range(320, 328)), steps=20)
    assert max(freeing.used) < 8 * groups * 11, "not all prompts are there at once"
    assert freeing.used[14] == 8 * (11 + (groups - 1)), "once they are read, and before one of them ends"


def test_a_request_is_answered_among_others_as_alone(freeing: Freeing) -> None:
    asked = prompts(*LENGTHS, *range(90, 102))
    together = freeing.tokens(asked)
    assert together[:5] == [freeing.tokens([prompt])[0] for prompt in asked[:5]]
    assert freeing.tokens(asked, cancelled={1: 1})[2:5] == together[2:5]


@pytest.mark.parametrize("method", ["snapkv", *slow("streaming_llm", "keydiff")])
def test_requests_that_are_preempted_or_cancelled_leave_nothing_and_change_no_answer(
    crowded: Freeing, method: str
) -> None:
    crowded.run(method)
    asked = prompts(100, 75, 123, 60, 90, 112)
    together = crowded.tokens(asked, steps=40)
    assert crowded.preempted > 1
    assert together == [crowded.tokens([prompt], steps=40)[0] for prompt in asked]
    assert not crowded.preempted, "alone each has room"
    found = crowded.tokens(asked, steps=40, cancelled={0: 3, 4: 30})
    assert all(found[row] == together[row] for row in (1, 2, 3, 5))


@pytest.mark.slow
def test_two_thousand_short_requests_leave_no_block_and_no_seat_taken(crowded: Freeing) -> None:
    rng = random.Random(0)
    crowded.run("snapkv")
    for _ in range(20):
        asked = prompts(*(rng.randint(1, 90) for _ in range(100)))
        crowded.tokens(asked, steps=3, cancelled={row: 1 for row in range(100) if rng.random() < 0.1})


def test_one_engine_frees_for_one_kind_of_method(freeing: Freeing) -> None:
    expected = freeing.tokens(prompts(300))
    for method, budget in (("quest", 64), ("snapkv", 65)):
        with pytest.raises(ConfigError, match="this engine frees what snapkv drops"):
            freeing.run(method, budget)
    with pytest.raises(ConfigError, match="method=null"):
        freeing.llm.collective_rpc("kvbench_run", args=(None,))
    freeing.run("knorm")
    assert freeing.tokens(prompts(300)) and "visibility_only" not in freeing.audits()[0]
    freeing.run("snapkv")
    assert freeing.tokens(prompts(300)) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True: snapkv"),
        ({"max_num_seqs": 2**15, "max_num_batched_tokens": 2**15}, "max_num_seqs=32768: what is kept"),
    ],
)
def test_what_cannot_be_freed_or_held_is_refused_before_the_engine_starts(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Freeing("snapkv", **more)
