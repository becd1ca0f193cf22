"""Decode steps of every method on a CPU, attended in place (attention=cpu) and copied first (attention=torch).

Stores are filled with synthetic keys (`task.prefill=false task.keys=synthetic_attention`), so that an index has
something to find and no model reads the prompt. A method's engines, one for each executor, decode beside those of full
attention, a step each in turn, so that a noisy machine disturbs all alike; times are medians over steps, in ms.

    python scripts/bench_decode.py --lengths 4096 32768 --methods quest icecache

Prints one JSON object as its last line; for each length, method and executor:
  tpot                 of a step
  model, attention, transfer, select, ...   parts of it
  rest                 tpot without the model's part
  rest_over_full       over the rest of full attention by `cpu`, measured in the same turns
  floor, rest_over_floor   keys and values attended, in bytes, over the bandwidth of a copy; rest over that
  attended_mean, moved_bytes_per_step   by the audit
and copy_bandwidth (bytes a second), threads, settings.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from kvbench.budget import Budget
from kvbench.config import choices, shipped
from kvbench.engine import models
from kvbench.engine.generate import decode_step
from kvbench.engine.hf import EngineCache, engine_for, method_named
from kvbench.measure import hardware
from kvbench.measure.synthetic import SyntheticEngine

EXECUTORS = ("cpu", "torch")
WARM = 2  # steps that are not counted


class Side:
    """One method with one executor.

    Attributes:
        ms: of each part, the times of all steps.
    """

    def __init__(self, loaded: models.Loaded, method: str, executor: str, length: int, given: Any) -> None:
        self.model = loaded.model
        budget = Budget(None if method == "full" else given.budget)
        room = WARM + given.steps
        common: dict[str, Any] = {"new_tokens": room, "attention": executor, "kind": SyntheticEngine}
        self.engine = engine_for(self.model, [length], method_named(method), budget, (), loaded.tokenizer, **common)
        assert isinstance(self.engine, SyntheticEngine)
        tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
        self.engine.fill_prompt(tokens.tolist())
        self.cache, self.tokens = EngineCache(self.engine), tokens[:, -1]
        self.engine.spans.reset()
        self.ms: dict[str, list[float]] = defaultdict(list)

    def step(self, counts: bool) -> None:
        """Decode a token."""
        began = time.perf_counter()
        with self.engine.spans("other"):
            self.tokens = decode_step(self.model, self.tokens, self.cache, [True])
        spent = time.perf_counter() - began
        self.engine.settle()
        parts = self.engine.spans.reset()
        if counts:
            for name, seconds in {**parts, "tpot": spent, "rest": spent - parts["model"]}.items():
                self.ms[name].append(1e3 * seconds)

    def report(self, bandwidth: float) -> dict[str, float]:
        """Medians, and what the audit says."""
        found = {name: statistics.median(times) for name, times in self.ms.items()}
        audit = self.engine.report()
        attended = hardware.attended_bytes(self.engine.shape, audit["attended_mean"], self.engine.audit.steps)
        found["floor"] = 1e3 * attended / bandwidth
        found["rest_over_floor"] = found["rest"] / found["floor"]
        return found | {name: audit[name] for name in ("attended_mean", "moved_bytes_per_step")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dummy-100m", choices=choices("model"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--methods", nargs="+", default=["snapkv", "quest", "lychee", "pariskv", "icecache"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="that are counted, of each engine")
    given = parser.parse_args()
    config = {**(shipped("model", given.model) or {}), "weights": "dummy"}
    loaded = models.load(config, device="cpu", dtype=given.dtype)
    bandwidth = hardware.bandwidth(torch.device("cpu")).copy
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with torch.inference_mode():
        for length in given.lengths:
            for method in given.methods:
                gc.collect()
                names = [(name, executor) for name in ("full", method) for executor in EXECUTORS]
                sides = {name: Side(loaded, *name, length, given) for name in names}
                for turn in range(WARM + given.steps):
                    for side in sides.values():
                        side.step(counts=turn >= WARM)
                full = statistics.median(sides["full", "cpu"].ms["rest"])
                for (name, executor), side in sides.items():
                    report = side.report(bandwidth)
                    report["rest_over_full"] = report["rest"] / full
                    rounded = {key: round(value, 3) for key, value in report.items()}
                    of = name if name == method else f"full beside {method}"
                    found.setdefault(str(length), {}).setdefault(of, {})[executor] = rounded
                    print(length, of, executor, rounded, flush=True)
                del sides, side
    about = {"copy_bandwidth": bandwidth, "threads": torch.get_num_threads(), "settings": vars(given)}
    print(json.dumps({**found, **about}))


if __name__ == "__main__":
    main()
