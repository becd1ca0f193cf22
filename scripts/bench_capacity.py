"""Requests at once in equal memory: how many of N tokens fit into M MiB, and what they make.

A method that frees memory pays where memory is what limits the requests that run at once. Clients
ask in a closed loop, each its next request when its last one is answered, until all are; full
attention and methods get the same M.

    .venv-vllm/bin/python scripts/bench_capacity.py --engine vllm --memory 96 192 --parts FOLDER
    python scripts/bench_capacity.py --engine hf --tokens 4096 --memory 96 192 384 --parts FOLDER

`--engine vllm`: full attention is vLLM's own, which queues and preempts; M is that of its blocks,
and of a method's copies beside them (`docs/guide/vllm.md`). Both arms have as many
seats as requests of the mean size fit. `--engine hf`: the batch of `KVCache` of which the audit
says that it fits, indexes included; it decodes over synthetic keys and reads no prompts, so that it
says nothing of them. Every arm is a process of its own, in turns: full, method, full, method. Its
numbers stay in FOLDER as a file, and what is there is not run again; a result has all that is
there, whichever command put it there.

Prints one JSON object as its last line. `cells`, one for each engine, model, N, answer, number of
requests and M, have
their settings, and `arms` with medians over rounds:
  at_once_mean, at_once_peak     requests of a forward pass: mean over time, and most
  decode_at_once                 of the passes that read no prompt, the mean over time
  tokens_per_s                   generated tokens over the time of all, prompts included
  decode_tokens_per_s            of the passes that read no prompt, over their time
  decode_share                   of all time, what those take
  ttft_s_p50, ttft_s_p95         from when a client asks, waiting included; tpot_ms_p50: between
                                 its tokens
  preemptions, seats             of all requests; and how many the scheduler may run at once
  blocks, blocks_peak            of vLLM's memory, and of them in use
  memory_bytes                   blocks, beside (copies), all: in `hf`, what the audit counts
  tokens_per_s_ratio, decode_ratio   over full attention's of the same round, the median; of the
                                     methods alone
and `crossings`: `memory_mib` from which on full attention is as fast, and its requests `at_once`
there, by tokens_per_s
and by decode_tokens_per_s, interpolated between several M; null: at none of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import command_line, once, print_result, say

from kvbench.cli.threads import wait_briefly

wait_briefly()  # as a run does, before torch is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402

from kvbench.backends.vllm.plan import check_installed  # noqa: E402
from kvbench.config import ASSETS, ConfigError, choices, fetched_folder, shipped  # noqa: E402
from kvbench.method import Shape  # noqa: E402
from kvbench.report.data.crossing import crossing  # noqa: E402

FULL = "full"
MIB = 2**20
BLOCK = 128  # tokens of a block, vLLM's default on a CPU
WARM = 4  # steps that are not counted
RATES = {"tokens_per_s": "tokens_per_s_ratio", "decode_tokens_per_s": "decode_ratio"}
# between whose memories arms may cross
GROUP = ("engine", "model", "tokens", "answer", "lengths", "requests")
SETTINGS = ("dtype", "budget", "clients", "chunk")

# Azure's LLM inference trace of 2023, conversations (CC BY; Patel et al., Splitwise, ISCA 2024): of
# tokens of 19,366 prompts and answers the quantiles at 2.5 %, 7.5 %, ... 97.5 %.
PROMPTS = (
    120, 200, 235, 379, 393, 400, 407, 428, 922, 1005,
    1034, 1058, 1083, 1112, 1153, 1277, 1434, 2310, 4075, 4092,
)  # fmt: skip
ANSWERS = (
    28, 48, 60, 72, 82, 88, 93, 99, 108, 120, 139, 162, 195, 373, 391, 396, 406, 416, 430, 522
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One arm in one memory.

    Attributes
    ----------
    engine, model, method, dtype
        names.
    tokens, answer
        of a prompt and its answer, the longest.
    memory
        MiB of keys and values.
    budget
        the method's.
    requests, clients
        in all, and that ask at once.
    lengths
        "equal", or "conversation": as in `PROMPTS`, scaled.
    chunk
        tokens of a forward pass.
    round
        of several.
    """

    engine: str
    model: str
    tokens: int
    memory: int
    method: str
    round: int
    dtype: str
    budget: int
    answer: int
    requests: int
    clients: int
    lengths: str
    chunk: int

    @property
    def name(self) -> str:
        """Of its file."""
        return "-".join(str(getattr(self, key)) for key in (*GROUP, "memory", "method", "round"))

    @property
    def longest(self) -> int:
        """Tokens of a request."""
        return self.tokens + self.answer

    @property
    def folder(self) -> Path:
        """Of the model."""
        return ASSETS / self.model if (ASSETS / self.model).is_dir() else fetched_folder(self.model)

    @property
    def conf(self) -> dict[str, Any]:
        """What `conf/model` says of the model, with the folder that it is read from."""
        return {**(shipped("model", self.model) or {}), "path": str(self.folder)}

    @property
    def shape(self) -> Shape:
        """Of the longest prompt alone."""
        sizes, dense = self.conf["config"], self.conf["dense_layers"]
        layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
        head_dim = sizes.get("head_dim") or sizes["hidden_size"] // heads
        dtype: torch.dtype = getattr(torch, self.dtype)
        sparse = tuple(layer for layer in range(layers) if layer not in dense)
        cpu, kv_heads = torch.device("cpu"), sizes["num_key_value_heads"]
        lengths, scaling = (self.longest,), head_dim**-0.5
        return Shape(layers, heads, kv_heads, head_dim, lengths, dtype, cpu, scaling, sparse)

    def bytes_of(self, dense: int, sparse: int) -> int:
        """Bytes of so many tokens in each dense and each sparse layer, in whole blocks."""
        shape, blocks = self.shape, (BLOCK * math.ceil(count / BLOCK) for count in (dense, sparse))
        layers = shape.layers - len(shape.sparse_layers), len(shape.sparse_layers)
        row = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        return row * sum(count * tokens for count, tokens in zip(layers, blocks, strict=True))

    def check(self) -> None:
        """Refuse a model that is not there, and a memory in which not even one request runs.

        Raises
        ------
        ConfigError
            names it.
        """
        if not self.folder.is_dir():
            raise ConfigError(
                f"--model {self.model}: not in {self.folder.parent}; kvbench fetch {self.model}"
                " first"
            )
        # vLLM leaves a block empty
        required = self.bytes_of(self.longest, self.longest) + self.bytes_of(BLOCK, BLOCK)
        if required > MIB * self.memory:
            raise ConfigError(
                f"--memory {self.memory}: one request of {self.model} with {self.longest} tokens"
                f" takes {math.ceil(required / MIB)} MiB; expected that or more"
            )

    def drawn_requests(self) -> list[Request]:
        """Prompts of random tokens.

        Of a trace every quantile comes as often, in an order of no meaning.
        """
        rng = random.Random(0)
        sizes = [(self.tokens, self.answer)] * self.requests
        if self.lengths == "conversation":
            prompts, answers = (
                _drawn(rng, self.requests, quantiles, longest)
                for quantiles, longest in ((PROMPTS, self.tokens), (ANSWERS, self.answer))
            )
            sizes = list(zip(prompts, answers, strict=True))
        # those before them may be special
        words = range(1000, min(30_000, self.conf["config"]["vocab_size"]))
        return [Request(rng.choices(words, k=prompt), answer) for prompt, answer in sizes]

    def seats(self, requests: Sequence[Request], plan: Any = None) -> int:
        """Requests that shall run at once: as many of the mean size as fit; few are preempted.

        While the longest prompt is read, the others have freed theirs.

        Parameters
        ----------
        requests
            all to come.
        plan
            the method and its budget; None: full attention.
        """
        from kvbench.backends.vllm.side import Side, rows_per_seat

        shape, room, rows = self.shape, MIB * self.memory, None
        if plan is not None and plan.frees:
            from kvbench.backends.vllm.requests import RequestEngine

            # not called
            turns = (
                {"rotary": lambda positions: None}
                if plan.build().needs.positions == "cache"
                else {}
            )
            rows = rows_per_seat(
                RequestEngine({}, shape, plan.build(), plan.sizes(), **turns).method, shape
            )
        whole = statistics.mean(self.bytes_of(request.size, request.size) for request in requests)
        if rows is None:
            return _between(1, (room - self.bytes_of(BLOCK, BLOCK)) // whole, self.clients)
        seat = Side.nbytes(1, rows, shape.head_dim, shape.dtype)
        after = statistics.mean(
            self.bytes_of(request.size, len(request.prompt) % BLOCK + request.answer)
            for request in requests
        )
        reading = self.bytes_of(self.longest, self.longest) + (
            self.bytes_of(BLOCK, 0) or self.bytes_of(BLOCK, BLOCK)
        )
        return _between(1, 1 + (room - reading - seat) // (after + seat), self.clients)

    def serve(self) -> dict[str, Any]:
        """One arm's numbers in vLLM."""
        requests = self.drawn_requests()
        served = VllmArm(self, requests)
        # of which nothing is counted
        closed_loop(served, [Request([1000] * min(300, self.tokens), WARM)], 1)
        steps = closed_loop(served, requests, self.clients)
        return {
            **over_time(steps),
            **over_requests(requests),
            "preemptions": sum(step.preempted for step in steps),
            "seats": served.seats,
            "blocks": served.blocks,
            "blocks_peak": max(step.blocks for step in steps),
            "memory_bytes": served.memory,
        }

    def decode(self) -> dict[str, Any]:
        """One arm's numbers of the largest batch that fits, over synthetic keys."""
        from kvbench.backends.hf import loading
        from kvbench.backends.hf.streamed import stream

        loaded = loading.load(self.conf, device="cpu", dtype=self.dtype)
        stream(loaded.model)
        with torch.inference_mode():
            row_bytes, _ = decoded(loaded, self, 1, WARM)
            batch = max(1, min(self.clients, MIB * self.memory // row_bytes))
            batch_bytes, steps = decoded(loaded, self, batch, self.answer)
        if batch_bytes > MIB * self.memory:
            raise ConfigError(
                f"{self.name}: a batch of {batch} holds {batch_bytes} bytes, more than"
                f" {self.memory} MiB"
            )
        result = over_time(steps)
        for name in ("tokens_per_s", "decode_share"):  # no prompt was read
            del result[name]
        result["tpot_ms_p50"] = 1e3 * statistics.median(step.seconds for step in steps)
        result["memory_bytes"] = {"all": batch_bytes}
        return {**result, "preemptions": 0, "seats": batch}

    def run(self) -> dict[str, float]:
        """A part measured in a process of its own.

        Raises
        ------
        ConfigError
            the process failed.
        """
        words = [sys.executable, __file__, "--part", json.dumps(asdict(self))]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{self.name}: failed, as it says above")
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        say(f"{self.name}: {result}")
        return result


# -- requests --------------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt, how many tokens are asked for, and when they came.

    Attributes
    ----------
    sent, first, last
        seconds, of one clock.
    tokens
        that it has made.
    """

    prompt: list[int]
    answer: int
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + self.answer

    def came(self, tokens: int, now: float) -> None:
        """So many more tokens are there."""
        self.first = self.first if self.tokens or not tokens else now
        self.tokens, self.last = self.tokens + tokens, now


def _drawn(rng: random.Random, count: int, quantiles: Sequence[int], longest: int) -> list[int]:
    """So many of a distribution's sizes, of which the largest becomes `longest`."""
    sizes = [
        max(2, quantiles[place * len(quantiles) // count] * longest // quantiles[-1])
        for place in range(count)
    ]
    rng.shuffle(sizes)
    return sizes


# -- vLLM ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A forward pass.

    Attributes
    ----------
    seconds
        that it took.
    rows
        requests in it.
    tokens
        that it made.
    decodes
        it read no prompt.
    blocks
        in use after it.
    preempted
        requests that lost their memory before it.
    """

    seconds: float
    rows: int
    tokens: int
    decodes: bool
    blocks: int
    preempted: int


class VllmArm:
    """A vLLM in this process, of one arm.

    Parameters
    ----------
    part
        the arm.
    requests
        all to come.

    Attributes
    ----------
    seats
        requests that it may run at once.
    """

    def __init__(self, part: Part, requests: Sequence[Request]) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # which would stand above the memory given
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
        from kvbench.backends.vllm.plan import RUNNER, Plan, vllm_options

        self._full, options = part.method == FULL, dict[str, Any]()
        plan: Plan | None = None
        os.environ[RUNNER] = "0"  # of both arms
        if not self._full:
            layers = {"dense_layers": part.conf["dense_layers"]}
            options = vllm_options(part.method, part.budget, **layers)
            plan = Plan(part.method, part.budget, **layers)
        self.seats = part.seats(requests, plan)
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm = LLM(
            str(part.folder),
            dtype=part.dtype,
            max_model_len=part.longest,
            max_num_batched_tokens=max(part.chunk, self.seats),
            max_num_seqs=self.seats,
            kv_cache_memory_bytes=MIB * part.memory,
            block_size=BLOCK,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,  # so that a step's tokens are there when it ends
            **options,
        )
        how = {
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        self._how = lambda tokens: SamplingParams(max_tokens=tokens, **how)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._pool, self._schedule = (
            self._scheduler.kv_cache_manager.block_pool,
            self._scheduler.schedule,
        )
        self._scheduler.schedule = self._noted
        self._empty = self._pool.get_num_free_blocks()

    def _noted(self, *arguments: Any) -> Any:
        """What vLLM schedules for a pass, which is looked at."""
        self._scheduled = self._schedule(*arguments)
        return self._scheduled

    def send(self, name: str, request: Request) -> None:
        """A client asks."""
        request.sent = time.perf_counter()
        self._engine.add_request(
            name, {"prompt_token_ids": request.prompt}, self._how(request.answer)
        )

    def step(self, requests: Mapping[str, Request]) -> tuple[Step, list[str]]:
        """One pass, and the names of the requests that it ended."""
        began = time.perf_counter()
        outputs = self._engine.step()
        now = time.perf_counter()
        new = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        for name, tokens in new.items():
            requests[name].came(tokens, now)
        counts, lost = (
            self._scheduled.num_scheduled_tokens.values(),
            self._scheduled.preempted_req_ids or (),
        )
        used = self._empty - self._pool.get_num_free_blocks()
        step = Step(
            now - began,
            len(counts),
            sum(new.values()),
            all(count == 1 for count in counts),
            used,
            len(lost),
        )
        return step, [output.request_id for output in outputs if output.finished]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes for keys and values: of blocks, beside them, and of both."""
        # each says the size of the one allocation in which groups of layers lie over each other
        blocks = max(tensor.size for tensor in self._scheduler.kv_cache_config.kv_cache_tensors)
        side_bytes = (
            0 if self._full else self._llm.collective_rpc("kvbench_counts")[0].get("side_bytes", 0)
        )
        return {"blocks": blocks, "beside": side_bytes, "all": blocks + side_bytes}

    @property
    def blocks(self) -> int:
        """All that there are for requests."""
        return int(self._empty)


def _between(low: int, value: float, high: int) -> int:
    return max(low, min(high, int(value)))


def closed_loop(served: Any, requests: Sequence[Request], clients: int) -> list[Step]:
    """All requests answered, by clients that send the next one when their last one has ended."""
    named = {str(number): request for number, request in enumerate(requests)}
    waiting, steps, under_way = iter(named.items()), list[Step](), 0
    while True:
        while under_way < clients and (next_request := next(waiting, None)) is not None:
            served.send(*next_request)
            under_way += 1
        if not under_way:
            return steps
        step, ended = served.step(named)
        steps.append(step)
        under_way -= len(ended)


def over_time(steps: Sequence[Step]) -> dict[str, Any]:
    """Requests at once, and tokens a second, of all passes and of those that read no prompt."""
    decoding = [step for step in steps if step.decodes]
    seconds, alone = (sum(step.seconds for step in some) for some in (steps, decoding))

    def rows(some: Iterable[Step], took: float) -> float:
        return sum(step.rows * step.seconds for step in some) / took

    result = {
        "seconds": seconds,
        "tokens": sum(step.tokens for step in steps),
        "at_once_mean": rows(steps, seconds),
        "at_once_peak": max(step.rows for step in steps),
        "decode_share": alone / seconds,
    }
    result["tokens_per_s"] = result["tokens"] / seconds
    if alone:
        result["decode_at_once"] = rows(decoding, alone)
        result["decode_tokens_per_s"] = sum(step.tokens for step in decoding) / alone
    return result


def over_requests(requests: Sequence[Request]) -> dict[str, float]:
    """Seconds to the first token, and ms from token to token."""
    waits = [request.first - request.sent for request in requests]
    paces = [
        1e3 * (request.last - request.first) / (request.tokens - 1)
        for request in requests
        if request.tokens > 1
    ]
    result = {f"ttft_s_p{percent}": float(np.percentile(waits, percent)) for percent in (50, 95)}
    return {**result, "tpot_ms_p50": statistics.median(paces)} if paces else result


# -- the harness -----------------------------------------------------------------------------------


def decoded(loaded: Any, part: Part, batch: int, steps: int) -> tuple[int, list[Step]]:
    """Bytes on the device of a batch with room for answers, and its steps after the first."""
    from kvbench.backends.hf.model import engine_for, method_named
    from kvbench.backends.hf.runner import ModelRunner
    from kvbench.budget import Budget
    from kvbench.measure.synthetic import SyntheticEngine

    budget = Budget(None if part.method == FULL else part.budget)
    method = method_named(part.method)
    room: dict[str, Any] = {"new_tokens": WARM + part.answer, "kind": SyntheticEngine}
    engine: Any = engine_for(
        loaded.model,
        [part.tokens] * batch,
        method,
        budget,
        loaded.dense_layers,
        loaded.tokenizer,
        **room,
    )
    prompts = torch.randint(256, (batch, part.tokens), generator=torch.Generator().manual_seed(0))
    engine.fill_prompt(prompts.tolist())
    passes, tokens = ModelRunner(loaded.model).passes(engine), prompts[:, -1]
    timed: list[Step] = []
    for _ in range(WARM + steps):
        began = time.perf_counter()
        tokens = passes.next_tokens(tokens)
        timed.append(Step(time.perf_counter() - began, batch, batch, True, 0, 0))
        engine.settle()
    audit = engine.report()
    return audit["device_kv_allocated_bytes"] + audit["index_bytes"], timed[WARM:]


# -- parts and their sum ---------------------------------------------------------------------------

ENGINES = {"vllm": Part.serve, "hf": Part.decode}


def merged(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Cells with their arms and settings, and where arms cross, of all parts."""
    parts: dict[tuple[Any, ...], dict[int, list[Any]]] = {}
    for entry in results:
        key = tuple(entry["part"][name] for name in GROUP)
        parts.setdefault(key, {}).setdefault(entry["part"]["memory"], []).append(entry)
    cells, crossed = list[Any](), list[Any]()
    for key, memories in sorted(parts.items()):
        group = dict(zip(GROUP, key, strict=True))
        arms = {memory: arms_of(by_method) for memory, by_method in sorted(memories.items())}
        for memory, by_method in arms.items():
            settings = {name: memories[memory][0]["part"].get(name) for name in SETTINGS}
            cells.append({**group, "memory_mib": memory, "settings": settings, "arms": by_method})
        crossed += [{**group, **entry} for entry in crossings(arms)]
    return {"cells": cells, "crossings": crossed}


def arms_of(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Each arm's medians over rounds, and its ratios to full attention's of the same round."""
    rounds: dict[str, dict[int, Any]] = {}
    for entry in parts:
        rounds.setdefault(entry["part"]["method"], {})[entry["part"]["round"]] = entry["found"]
    full, result = rounds.get(FULL, {}), dict[str, Any]()
    for method, by_round in sorted(rounds.items(), key=lambda arm: arm[0] != FULL):
        turns = list(by_round.values())
        names = [
            name
            for name in turns[0]
            if name != "memory_bytes" and all(name in turn for turn in turns)
        ]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
        medians |= {"rounds": len(turns), "memory_bytes": turns[0]["memory_bytes"]}
        for rate, ratio in RATES.items():
            both = [(by_round[turn], full[turn]) for turn in by_round.keys() & full.keys()]
            ratios = [
                ours[rate] / theirs[rate]
                for ours, theirs in both
                if rate in ours and rate in theirs
            ]
            if method != FULL and ratios:
                medians[ratio] = statistics.median(ratios)
        result[method] = medians
    return result


def crossings(arms: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """By method and rate, the MiB from which on full attention is as fast, and its requests there.

    Parameters
    ----------
    arms
        by MiB and method.
    """
    for method in sorted({method for by_method in arms.values() for method in by_method} - {FULL}):
        for rate in RATES:
            both = {
                mib: (by_method[FULL], by_method[method])
                for mib, by_method in sorted(arms.items())
                if rate in by_method.get(FULL, {}) and rate in by_method.get(method, {})
            }
            if both:
                full, other = (
                    {mib: 1 / pair[at][rate] for mib, pair in both.items()} for at in (0, 1)
                )
                memory = crossing(full, other)
                rows = [
                    pair[0].get("decode_at_once", pair[0]["at_once_mean"]) for pair in both.values()
                ]
                at_once = None if memory is None else float(np.interp(memory, list(both), rows))
                yield {"method": method, "by": rate, "memory_mib": memory, "at_once": at_once}


def parts_of(options: argparse.Namespace) -> Iterator[Part]:
    """All that was asked for: of each memory rounds, of a round the arms in turns."""
    common = {name: getattr(options, name) for name in (*GROUP, *SETTINGS) if name != "tokens"}
    for tokens in options.tokens:
        for memory in options.memory:
            for turn in range(options.rounds):
                for method in (FULL, *options.methods):
                    yield Part(tokens=tokens, memory=memory, round=turn, method=method, **common)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """What all parts in the folder come to, after those that were asked for and are not there."""
    if options.engine == "vllm":
        check_installed()
    parts = list(parts_of(options))
    for part in parts:
        part.check()
    for part in parts:
        once(options.parts / f"{part.name}.json", asdict(part), part.run)
    return merged(json.loads(path.read_text()) for path in sorted(options.parts.glob("*.json")))


def main() -> None:
    """Measure and print."""
    parser = command_line(
        __doc__,
        engine=("vllm", "", ENGINES),
        model=("smollm2-135m-instruct", "", choices("model")),
        methods=(["snapkv"], "", choices("method")),
        budget=256,
        tokens=([4096], "N, of the longest prompt"),
        memory=([192], "M, MiB for keys and values"),
        answer=(128, "tokens of the longest answer"),
        lengths=("equal", "all N, or as in a trace", ("equal", "conversation")),
        requests=(16, "in all"),
        clients=(16, "that ask at once"),
        dtype=("bfloat16", "", ("float32", "bfloat16")),
        chunk=(2048, "tokens of one forward pass"),
        rounds=1,
        parts=(Path("results/sweep_capacity"), "where measured parts stay"),
    )
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.part:
            part = Part(**options.part)
            print_result(ENGINES[part.engine](part))
        else:
            print_result({**measured(options), "threads": torch.get_num_threads()})
    except (ConfigError, ValueError) as error:
        sys.exit(f"bench_capacity: {error}")


if __name__ == "__main__":
    main()
