"""Decoding at length with methods that evict generated tokens: does a step, or memory, grow with the answer?

There is no model: queries, keys and values are random, and a step is what engine and method make of them. Times are CPU
time of the process, which other work on the machine disturbs little. An entry of a list is a tenth of the answer.

    python scripts/bench_evicting.py                                   # 4,000 tokens, a budget of 256, some minutes
    python scripts/bench_evicting.py --methods h2o rkv --tokens 1000

Prints one JSON object as its last line; by accounting, then by method:
  step_ms            CPU milliseconds of a step, the mean of each tenth
  last_over_second   of these, the last over the second: the first is still filling the budget
  resident_bytes     keys and values held on the device, at the end of each tenth
  allocated_bytes    what they take there, reserved slots included
  attended_mean, attended_max, over_rule   by the audit
  index_bytes        what the method itself holds, at the end
and settings. SCOPE's and R-KV's window and buffer are a quarter of the budget; RACC compresses what is
generated, which has a rule as published alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.engine.engine import Engine
from kvbench.method import Shape

METHODS = ("h2o", "raas", "scope", "rkv", "cake", "racc", "full")
ACCOUNTINGS = ("paper", "unified")


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
def bench(name: str, accounting: str, settings: argparse.Namespace) -> dict[str, Any]:
    """One method over the whole answer."""
    shape = Shape(
        layers=settings.layers,
        query_heads=8,
        kv_heads=2,
        head_dim=64,
        lengths=(settings.prompt,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        scaling=64**-0.5,
        sparse_layers=tuple(range(settings.layers)),
    )
    draw = torch.Generator().manual_seed(0)

    def vectors(count: int) -> list[tuple[torch.Tensor, ...]]:
        """Query, key and value of `count` tokens, for each layer."""
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        return [tuple(torch.randn(1, of, count, 64, generator=draw) for of in heads) for _ in range(shape.layers)]

    budget = Budget(None if name in ("racc", "full") else settings.budget, accounting)
    method = method_named(name, **options_of(name, settings.budget))
    engine = Engine(shape, method, budget, new_tokens=settings.tokens)
    engine.start_chunk(torch.zeros(1, settings.prompt, dtype=torch.int64))
    for layer, parts in enumerate(vectors(settings.prompt)):
        engine.attend(layer, *parts)
    tenths: list[dict[str, float]] = []
    seconds: list[float] = []
    for step in range(1, settings.tokens + 1):
        newest = vectors(1)
        start = time.process_time()
        engine.start_step(torch.zeros(1, dtype=torch.int64))
        for layer, parts in enumerate(newest):
            engine.attend(layer, *parts)
        seconds.append(time.process_time() - start)
        engine.settle()
        if step % (settings.tokens // 10) == 0:
            stores = engine.stores.values()
            tenths.append(
                {
                    "step_ms": round(1e3 * statistics.fmean(seconds), 3),
                    "resident_bytes": sum(store.resident_bytes() for store in stores),
                    "allocated_bytes": sum(store.allocated_bytes() for store in stores),
                }
            )
            seconds.clear()
    print(f"{accounting} {name}: {[tenth['step_ms'] for tenth in tenths]}", file=sys.stderr, flush=True)
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
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--accounting", nargs="+", default=ACCOUNTINGS, choices=ACCOUNTINGS)
    settings = parser.parse_args()
    found = {
        rule: {name: bench(name, rule, settings) for name in settings.methods if rule == "paper" or name != "racc"}
        for rule in settings.accounting
    }
    print(json.dumps({"settings": vars(settings), "threads": torch.get_num_threads(), **found}))


if __name__ == "__main__":
    main()
