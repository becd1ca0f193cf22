"""The server of `kvbench/backends/vllm/README.md`, by the command that stands there, for this machine alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from transformers import AutoModelForCausalLM

import kvbench
from kvbench import KVCache
from kvbench.config import ASSETS

TINY = ASSETS / "tiny"
README = Path(kvbench.__file__).parent / "backends" / "vllm" / "README.md"
STEPS = 8
PATIENCE = 300.0  # seconds until it listens; an idle machine takes some twenty
DIRECT = build_opener(ProxyHandler({}))


def asked(url: str, **body: Any) -> dict[str, Any]:
    """The answer to a request."""
    data = json.dumps(body).encode() if body else None
    with DIRECT.open(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.loads(answer.read() or "{}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that runs quest with a budget of 256 tokens."""
    [command] = re.findall(r"^VLLM_USE_V2_MODEL_RUNNER=0 .*?[^\\]$", README.read_text(), re.MULTILINE | re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = command.replace(".venv-vllm/bin/python", sys.executable).replace("FOLDER", str(TINY))
    command += f" --host 127.0.0.1 --port {port} --max-model-len 1024 --dtype float32 --enforce-eager"
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                asked(f"http://127.0.0.1:{port}/health")
                break
            except (URLError, OSError):
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def served(server: str, prompt: list[int]) -> list[int]:
    """The tokens that the server generates."""
    how = {"max_tokens": STEPS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return list(asked(server, model=str(TINY), prompt=prompt, **how)["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def generated(model: Any, prompt: list[int], **more: Any) -> list[int]:
    """The tokens that transformers generates."""
    ids = torch.tensor([prompt])
    how = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    return list(model.generate(ids, attention_mask=torch.ones_like(ids), **how, **more)[0, len(prompt) :].tolist())


def test_a_prompt_within_the_budget_is_answered_as_by_plain_transformers(server: str, model: Any) -> None:
    prompt = random.Random(0).choices(range(300, 4000), k=100)
    assert served(server, prompt) == generated(model, prompt)


def test_a_longer_prompt_is_answered_as_by_the_same_method_in_transformers(server: str, model: Any) -> None:
    prompts = [random.Random(seed).choices(range(300, 4000), k=700) for seed in range(4)]
    ours = [served(server, prompt) for prompt in prompts]
    assert ours == [generated(model, one, past_key_values=KVCache(model, "quest", 256)) for one in prompts]
    assert ours != [generated(model, one) for one in prompts], "as if no method ran"
