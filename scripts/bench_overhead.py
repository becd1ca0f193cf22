"""What kvbench costs: time and memory of method=full over transformers' own generate.

Both sides run the same random-weight model on the same prompt in one process. After its own prefill
each side decodes in short bursts, turn by turn, so that a noisy machine disturbs both alike; the
ratio is of the medians over all steps. Peak memory is the largest resident set of a child process
that does one side alone.

Prints one JSON object as its last line:
  time_ratio_4k, time_ratio_16k   ms per token, kvbench over transformers (sdpa, DynamicCache);
                                  1.0 = no overhead
  mem_ratio                       peak resident bytes, kvbench over transformers, at the longest
                                  context
  ms_per_token                    the raw medians of the time ratios, by context
  peak_bytes                      the raw bytes of mem_ratio
  same_tokens                     both sides generated the same tokens
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench import command_line, print_result
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from kvbench.backends.hf import loading as models
from kvbench.backends.hf.hooks import NAME
from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.model import method_named
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import choices, shipped
from kvbench.engine.engine import Engine
from kvbench.engine.request import chosen_tokens

CHUNK = 2048  # prompt tokens in one forward pass, the same on both sides
SIDES = ("kvbench", "transformers")


class Kvbench:
    """method=full in the measured loop."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> None:
        self.model = model
        model.set_attn_implementation(NAME)
        shape = shape_of(model, [prompt.shape[1]], (), model.dtype, model.device)
        engine = Engine(shape, method_named("full"), Budget(None), new_tokens=new_tokens)
        self.engine, runner = engine, ModelRunner(model)
        self.tokens = chosen_tokens(runner.prefill(engine, prompt.tolist(), CHUNK))
        self.passes = runner.passes(engine)
        self.generated = self.tokens.tolist()

    def burst(self, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps."""
        self.model.set_attn_implementation(NAME)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.tokens = self.passes.next_tokens(self.tokens)
            self.generated += self.tokens.tolist()
            seconds.append(time.perf_counter() - start)
            self.engine.settle()
        return seconds


class Transformers:
    """model.generate with sdpa and DynamicCache; a streamer stamps every token."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.length = prompt.shape[1]
        model.set_attn_implementation("sdpa")
        for start in range(0, self.length, CHUNK):
            part = prompt[:, start : start + CHUNK]
            logits = model(
                input_ids=part, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            ).logits
        self.ids = torch.cat([prompt, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)

    @property
    def generated(self) -> list[int]:
        tokens: list[int] = self.ids[0, self.length :].tolist()
        return tokens

    def burst(self, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps, all but the first of a call of generate."""
        self.model.set_attn_implementation("sdpa")
        stamps = _Stamps()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            generation_config=GenerationConfig(max_new_tokens=steps + 1, pad_token_id=0),
            streamer=stamps,
        )
        return [
            after - before for before, after in zip(stamps.times, stamps.times[1:], strict=False)
        ]


class _Stamps:
    """A streamer: notes when each token comes; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt = True

    def put(self, _: torch.Tensor) -> None:
        if not self.prompt:
            self.times.append(time.perf_counter())
        self.prompt = False

    def end(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Measure, or be the child process that prints its peak memory."""
    parser = command_line(
        __doc__,
        model=("dummy-100m", "with random weights", choices("model")),
        contexts=([4096, 16384], "prompt tokens"),
        bursts=(6, "turns of each side"),
        steps=(8, "decode steps in one turn"),
    )
    # the child process of mem_ratio
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(_peak_bytes(arguments))
    else:
        print_result(_measure(arguments))


def _side(name: str, model: PreTrainedModel, context: int, arguments: argparse.Namespace) -> Any:
    prompt = torch.randint(256, (1, context), generator=torch.Generator().manual_seed(0))
    new_tokens = 2 + arguments.bursts * (arguments.steps + 1)
    return (Kvbench if name == "kvbench" else Transformers)(model, prompt, new_tokens)


def _load(name: str) -> PreTrainedModel:
    return models.load(shipped("model", name) or {}).model


@torch.inference_mode()
def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = _load(arguments.model)
    result: dict[str, Any] = {"ms_per_token": {}, "same_tokens": True}
    for context in arguments.contexts:
        sides = {name: _side(name, model, context, arguments) for name in SIDES}
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for _ in range(arguments.bursts):
            for name, side in sides.items():
                seconds[name] += side.burst(arguments.steps)
        label = f"{context // 1024}k"
        medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
        result[f"time_ratio_{label}"] = medians["kvbench"] / medians["transformers"]
        result["ms_per_token"][label] = medians
        both = zip(sides["kvbench"].generated, sides["transformers"].generated, strict=False)
        result["same_tokens"] &= all(ours == theirs for ours, theirs in both)
    del sides, model
    result["peak_bytes"] = {name: _peak_of_child(name, arguments) for name in SIDES}
    result["mem_ratio"] = result["peak_bytes"]["kvbench"] / result["peak_bytes"]["transformers"]
    return result


def _peak_of_child(side: str, arguments: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--peak", side, "--model", arguments.model]
    command += ["--contexts", str(max(arguments.contexts))]
    command += ["--bursts", "1", "--steps", str(arguments.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@torch.inference_mode()
def _peak_bytes(arguments: argparse.Namespace) -> int:
    model = _load(arguments.model)
    _side(arguments.peak, model, arguments.contexts[0], arguments).burst(arguments.steps)
    # not getrusage: its maximum is inherited from the parent process
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) * 1024


if __name__ == "__main__":
    main()
