"""Decoding at length with methods that evict generated tokens: does a step, or memory, grow with the answer?

Each method reads the same prompt on a model and is given the same random tokens of the answer one by one. Times are CPU
time of the process, which other work on the machine disturbs little. A tenth of the answer is one entry of a list.

    python scripts/bench_evicting.py                                   # the small model, 4,000 tokens, a budget of 256
    python scripts/bench_evicting.py --methods h2o rkv --tokens 1000

Prints one JSON object as its last line; by method:
  step_ms            CPU milliseconds of a step, the mean of each tenth
  last_over_second   of these, the last over the second: the first is still filling the budget
  resident_bytes     keys and values held on the device, at the end of each tenth
  allocated_bytes    what they take there, reserved slots included
  attended_mean, attended_max, over_rule   by the audit
  index_bytes        what the method itself holds, at the end
and settings. SCOPE's and R-KV's window and buffer are a quarter of the budget; RACC compresses what is generated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch

from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.engine.generate import decode_step, prefill
from kvbench.engine.hf import EngineCache, engine_for, method_named
from kvbench.engine.models import Loaded, load

METHODS = ("h2o", "raas", "scope", "rkv", "racc", "full")


def options_of(method: str, budget: int) -> dict[str, Any]:
    """Settings in proportion to the budget, so that windows and buffers fill early in the answer."""
    if method == "scope":
        return {"window": budget // 4, "recent": budget // 8}
    if method == "rkv":
        return {"buffer": budget // 4}
    if method == "racc":
        return {"scenario": "silo", "every": 100, "window": 20, "lag": 50}
    return {}


@torch.inference_mode()
def bench(loaded: Loaded, name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """One method over the whole answer."""
    draw = random.Random(0)
    prompt, answer = ([draw.randrange(200) for _ in range(count)] for count in (settings.prompt, settings.tokens))
    budget = Budget(None if name in ("racc", "full") else settings.budget, settings.accounting)
    method = method_named(name, **options_of(name, settings.budget))
    engine = engine_for(loaded.model, [len(prompt)], method, budget, (), loaded.tokenizer, new_tokens=len(answer))
    cache = EngineCache(engine)
    prefill(loaded.model, [prompt], cache)
    tenths: list[dict[str, float]] = []
    seconds: list[float] = []
    for step, token in enumerate(answer, 1):
        start = time.process_time()
        decode_step(loaded.model, torch.tensor([token]), cache, [True])
        seconds.append(time.process_time() - start)
        engine.settle()
        if step % (len(answer) // 10) == 0:
            stores = engine.stores.values()
            tenths.append(
                {
                    "step_ms": round(1e3 * statistics.fmean(seconds), 3),
                    "resident_bytes": sum(store.resident_bytes() for store in stores),
                    "allocated_bytes": sum(store.allocated_bytes() for store in stores),
                }
            )
            seconds.clear()
            print(f"{name}: {step} tokens, {tenths[-1]}", file=sys.stderr, flush=True)
    audit = engine.report()
    lists = {key: [tenth[key] for tenth in tenths] for key in tenths[0]}
    told = {key: audit[key] for key in ("attended_mean", "attended_max", "over_rule", "index_bytes")}
    return {**lists, "last_over_second": round(lists["step_ms"][-1] / lists["step_ms"][1], 3), **told}


def main() -> None:
    """Read the settings, bench each method, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the answer, ten or more")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--accounting", default="paper", choices=["paper", "unified"])
    parser.add_argument("--model", default="tiny", help="a name in conf/model")
    settings = parser.parse_args()
    config = composed(f"model={settings.model}")
    loaded = load(config.model, "cpu", "float32", 0)
    methods = {name: bench(loaded, name, settings) for name in settings.methods}
    print(json.dumps({"settings": vars(settings), "threads": torch.get_num_threads(), "methods": methods}))


if __name__ == "__main__":
    main()
