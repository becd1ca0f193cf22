"""`kvbench serve`: a server for this machine alone, what it answers and counts, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from kvbench import KVCache
from kvbench.backends.vllm import metrics
from kvbench.backends.vllm.plan import Plan
from kvbench.backends.vllm.server import SPACE, serve
from kvbench.config import ASSETS, ConfigError

TINY = ASSETS / "tiny"
METHOD, BUDGET = "snapkv", 256  # which frees prompts
SEATS = 4
PATIENCE = 900.0  # seconds for what takes some twenty on an idle machine
DIRECT = build_opener(ProxyHandler({}))


class Server(NamedTuple):
    """One that listens.

    Attributes:
        process: of the command, which leads a group of its own.
    """

    process: subprocess.Popen[bytes]
    port: int

    def open(self, path: str, **body: Any) -> Any:
        data = json.dumps({"model": "tiny", **body}).encode() if body else None
        asked = Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        return DIRECT.open(asked, timeout=PATIENCE)

    def tokens(self, prompt: list[int], steps: int = 8) -> list[int]:
        """What it generates."""
        how = {"max_tokens": steps, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with self.open("/v1/completions", prompt=prompt, **how) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def families(self) -> dict[str, Metric]:
        """What `/metrics` says of kvbench, by names."""
        with self.open("/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {one.name.removeprefix("kvbench_"): one for one in families if one.name.startswith("kvbench_")}

    def numbers(self) -> dict[str, float]:
        return {name: family.samples[0].value for name, family in self.families().items()}

    def comes_to(self, what: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The numbers, as soon as they are so."""
        until = time.monotonic() + PATIENCE
        while not what(found := self.numbers()):
            assert time.monotonic() < until, found
            time.sleep(0.05)
        return found

    def left(self) -> list[str]:
        """Processes of the group that live."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = stat.read_text().rpartition(") ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, group = rest.split()[:3]
            if int(group) == self.process.pid and state != "Z":
                found.append(name)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["model=tiny", f"method={METHOD}", f"budget={BUDGET}", "dtype=float32", "--port", str(port)]
    more = ["--", "--max-model-len", "1024", "--max-num-seqs", str(SEATS), "--kv-cache-memory-bytes", "256M"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbench", "serve", *words, *more],
            stdout=out,
            stderr=out,
            env=env | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
    started = Server(process, port)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                started.open("/health").close()
                break
            except (URLError, OSError):
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.5)
        yield started
    finally:
        if started.left():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def generated(model: Any, prompt: list[int], **more: Any) -> list[int]:
    """The tokens that transformers generates."""
    ids = torch.tensor([prompt])
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    return list(model.generate(ids, attention_mask=torch.ones_like(ids), **how, **more)[0, len(prompt) :].tolist())


def drawn(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(300, 4000), k=length)


def test_a_prompt_within_the_budget_is_answered_as_by_plain_transformers(server: Server, model: Any) -> None:
    assert server.tokens(drawn(0, 100)) == generated(model, drawn(0, 100))


def test_a_longer_prompt_is_answered_as_by_the_same_method_in_transformers(server: Server, model: Any) -> None:
    prompts = [drawn(seed, 700) for seed in range(4)]
    ours = [server.tokens(prompt) for prompt in prompts]
    caches = [KVCache(model, METHOD, BUDGET, dense_layers=()) for _ in prompts]
    assert ours == [generated(model, one, past_key_values=cache) for one, cache in zip(prompts, caches, strict=True)]
    assert ours != [generated(model, one) for one in prompts], "as if no method ran"


def test_what_requests_hold_is_counted_while_they_run(server: Server) -> None:
    before = server.numbers()
    assert not before["blocks_used"] and not before["side_used_bytes"]
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.tokens, drawn(seed, 700), steps=200) for seed in range(2)]
        found = server.comes_to(lambda now: now["side_used_bytes"] == now["side_bytes"] * 2 / SEATS)
        assert 0 < found["blocks_used"] < found["blocks"]
        assert [len(one.result()) for one in asked] == [200, 200]
    after = server.comes_to(lambda now: not now["blocks_used"] and not now["side_used_bytes"])
    attended, full = (after[name] - before[name] for name in ("attended_entries", "full_attention_entries"))
    steps = range(701, 900)
    expected = sum(BUDGET + step - 700 for step in steps) / sum(steps)
    assert attended / full == pytest.approx(expected, rel=0.05)  # SnapKV's window is inside its budget or beside it


def test_a_request_that_nobody_waits_for_gives_back_what_it_held(server: Server) -> None:
    answer = server.open("/v1/completions", prompt=drawn(0, 700), max_tokens=300, ignore_eos=True, stream=True)
    answer.readline()
    server.comes_to(lambda now: bool(now["side_used_bytes"]))
    answer.close()
    server.comes_to(lambda now: not now["blocks_used"] and not now["side_used_bytes"])


def test_scrapes_in_a_long_step_wait_for_one_answer_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 0.01)
    asked: list[asyncio.Future[list[dict[str, float]]]] = []

    def rpc(name: str) -> asyncio.Future[list[dict[str, float]]]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    async def answers(*request: Any) -> None:
        pass

    counts = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=9))
    engine = SimpleNamespace(collective_rpc=rpc, vllm_config=counts)
    request = {"type": "http", "path": "/metrics", "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
    middleware = metrics.Metrics(answers)

    async def scrapes() -> None:
        for _ in range(3):
            await middleware(request, None, None)
        assert len(asked) == 1
        asked[0].set_result([{"side_bytes": 5}, {"side_bytes": 6}])
        await asyncio.sleep(0)
        await middleware(request, None, None)
        assert len(asked) == 2

    try:
        asyncio.run(scrapes())
        assert REGISTRY.get_sample_value("kvbench_side_bytes") == 11, "of two workers"
    finally:
        REGISTRY.unregister(middleware.numbers)


def test_every_number_is_of_a_kind_and_says_what_it_is(server: Server) -> None:
    families = server.families()
    counters = {"attended_entries", "full_attention_entries"}
    gauges = {"blocks", "blocks_used", "side_bytes", "side_used_bytes", "attended_share"}
    assert families.keys() == counters | gauges
    assert {name for name, family in families.items() if family.type == "counter"} == counters
    assert all(family.type == "gauge" for name, family in families.items() if name in gauges)
    assert all(family.documentation.endswith(".") for family in families.values())


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("quest", "--nosuch", "after --, unrecognized arguments: --nosuch"),
        ("quest", "--model elsewhere", "--model: kvbench says that to vLLM; expected model="),
        ("quest", "--max-model-len 9999999", "vLLM refuses this: User-specified max_model_len"),
        ("quest", "--kv-cache-memory-bytes 1M", "a request of max_model_len=16384 tokens takes"),
        ("quest", "--kv-cache-memory-bytes 1000000G", "GiB are free"),
        ("quest", "--kv-cache-dtype fp8", "kv_cache_dtype=fp8"),
        ("snapkv", "--enable-prefix-caching", "enable_prefix_caching=True: snapkv"),
        ("snapkv", "--max-num-seqs 32768 --max-num-batched-tokens 32768", "max_num_seqs=32768: what is kept"),
    ],
)
def test_what_the_engine_could_not_give_is_refused_before_it_starts(
    method: str, more: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPACE, raising=False)
    with pytest.raises(ConfigError, match=message) as refused:
        serve(Plan(method, BUDGET), ["--model", str(TINY), "--dtype", "float32"], more.split())
    assert "\n" not in str(refused.value)


def test_ctrl_c_ends_the_server_and_its_engine(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGINT)  # as of a terminal, to all of its processes
    assert server.process.wait(PATIENCE) == 0
    until = time.monotonic() + PATIENCE
    while left := server.left():
        assert time.monotonic() < until, left
        time.sleep(0.1)
