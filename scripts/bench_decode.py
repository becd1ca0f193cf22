"""Decode steps of full attention and of methods on a CPU: how near each comes to what it must read.

Stores are filled with synthetic keys (`task.prefill=false task.keys=synthetic_attention`), so that
an index has something to find and no model reads the prompt. A method's engine decodes beside one
of full attention, a step each in turn, so that a noisy machine disturbs both alike. Steps in which
an index grows or tokens are evicted count, too.

    python scripts/bench_decode.py                     # 4k to 128k tokens, half an hour
    python scripts/bench_decode.py --cells 32768:1024 --methods icecache --kv native int8 fp8

Prints one JSON object as its last line; by dtype, cell (tokens:budget) and method, and with
several `--kv` by those:
  tpot, tpot_p50, tpot_p95   of a step, ms: the mean, the median and the 95th percentile
  p95_over_mean              of tpot
  model, attention, transfer, select, ...   parts of it, means
  rest                       tpot without the model's part
  compiled, compiled_share   with --compiled, of the rest: inside compiled code that attends or
                             searches; what is left is Python, and torch's operations on a few
                             numbers
  rest_over_full             over that of full attention, measured in the same turns
  tpot_over_first            over that of the first `--kv`, median of turns; so
                             attention_over_first
  must_read_ms, rest_over_must_read   keys and values attended, in bytes, over the bandwidth of a
                                      copy; rest over that
  floor_ms                   the same with the weights that the model reads
  attended_mean, moved_bytes_per_step   by the audit
and copy_bandwidth (bytes a second), threads, cpu, settings. results/bench_decode_cpu.json names its
command.
"""

from __future__ import annotations

import argparse
import gc
import pkgutil
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from bench import command_line, print_result, rounded, say

from kvbench.cli.threads import wait_briefly

wait_briefly()  # as a run does, before torch is loaded

import torch  # noqa: E402

from kvbench.backends.hf import loading as models  # noqa: E402
from kvbench.backends.hf.model import engine_for, method_named  # noqa: E402
from kvbench.backends.hf.runner import ModelRunner  # noqa: E402
from kvbench.backends.hf.streamed import stream  # noqa: E402
from kvbench.budget import Budget  # noqa: E402
from kvbench.config import choices, shipped  # noqa: E402
from kvbench.measure import hardware  # noqa: E402
from kvbench.measure.synthetic import SyntheticEngine  # noqa: E402
from kvbench.memory.kinds import kv_of  # noqa: E402

# Compiled code that a layer's step calls: of a module, or of a class in it.
COMPILED = {
    "kvbench.kernels.attend:ResidentRows": ("attend",),
    "kvbench.kernels.attend:Lists": ("attend",),
    "kvbench.kernels.attend:Request": ("join",),
    "methods.blocks.kernels:KERNELS": ("best_tokens", "mean_bounds", "take_in"),
    "methods.icecache.kernels:KERNELS": ("attend",),
    "methods.lychee.index:KERNELS": ("best_tokens",),
    "methods.pariskv.index:KERNELS": ("search",),
}
METHODS = ("snapkv", "quest", "lychee", "pariskv", "icecache")
CELLS = ((4096, 256), (16384, 1024), (32768, 1024), (131072, 1024))
WARM = 4  # steps that are not counted


class Compiled:
    """The clock of the functions in `COMPILED`, which it takes the places of.

    Attributes
    ----------
    seconds
        in them since the last reset.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        for place, names in COMPILED.items():
            owner = pkgutil.resolve_name(place)
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed

    def reset(self) -> float:
        """The seconds, which begin anew."""
        spent, self.seconds = self.seconds, 0.0
        return spent


class Side:
    """One method, and keys and values held in one way.

    Attributes
    ----------
    ms
        of each part, the times of all steps.
    """

    def __init__(
        self,
        loaded: models.Loaded,
        method: str,
        kv: str,
        tokens: int,
        budget: int,
        steps: int,
        compiled: Compiled | None = None,
    ) -> None:
        self.model, self.compiled = loaded.model, compiled
        limit = Budget(None if method == "full" else budget)
        room: dict[str, Any] = {"new_tokens": WARM + steps, "kind": SyntheticEngine}
        arm = method_named(method), limit, (), loaded.tokenizer
        self.engine = engine_for(self.model, [tokens], *arm, kv=kv_of(kv), **room)
        assert isinstance(self.engine, SyntheticEngine)
        prompt = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0))
        self.engine.fill_prompt(prompt.tolist())
        self.passes, self.tokens = ModelRunner(self.model).passes(self.engine), prompt[:, -1]
        self.engine.spans.reset()
        self.ms: dict[str, list[float]] = defaultdict(list)

    def step(self, counts: bool) -> None:
        """Decode a token."""
        if self.compiled is not None:
            self.compiled.reset()
        began = time.perf_counter()
        with self.engine.spans("other"):
            self.tokens = self.passes.next_tokens(self.tokens)
        spent = time.perf_counter() - began
        self.engine.settle()
        parts = self.engine.spans.reset()
        if counts:
            parts |= {"tpot": spent, "rest": spent - parts["model"]}
            parts |= {} if self.compiled is None else {"compiled": self.compiled.reset()}
            for name, seconds in parts.items():
                self.ms[name].append(1e3 * seconds)

    def report(self, full: Side, first: Side, bandwidth: float) -> dict[str, float]:
        """What the module's docstring names."""
        steps = len(self.ms["tpot"])
        # a part that a step had not took 0
        result = {name: sum(times) / steps for name, times in self.ms.items()}
        result["tpot_p50"] = statistics.median(self.ms["tpot"])
        result["tpot_p95"] = statistics.quantiles(self.ms["tpot"], n=20)[-1]
        result["p95_over_mean"] = result["tpot_p95"] / result["tpot"]
        if self.compiled is not None:
            result["compiled_share"] = result["compiled"] / result["rest"]
        result["rest_over_full"] = result["rest"] * steps / sum(full.ms["rest"])
        for name in ("tpot", "attention"):
            ratios = (
                ours / theirs for ours, theirs in zip(self.ms[name], first.ms[name], strict=True)
            )
            result[f"{name}_over_first"] = statistics.median(ratios)
        audit = self.engine.report()
        attended = audit["attended_bytes_per_step"]
        result["must_read_ms"] = 1e3 * attended / bandwidth
        result["rest_over_must_read"] = result["rest"] / result["must_read_ms"]
        weights = hardware.read_weight_bytes(self.model, rows=1)
        result["floor_ms"] = 1e3 * hardware.floor_seconds(weights, attended, bandwidth)
        result |= {name: audit[name] for name in ("attended_mean", "moved_bytes_per_step")}
        return result


def with_full(
    loaded: models.Loaded,
    method: str,
    kinds: list[str],
    sizes: tuple[int, int, int],
    compiled: Compiled | None,
) -> dict[str, Any]:
    """A method and full attention over keys and values of each kind.

    The method's reports by kind, full attention's as "full".

    Parameters
    ----------
    sizes
        tokens of the prompt, budget, steps.
    """
    gc.collect()
    bandwidth = hardware.bandwidth(torch.device("cpu")).copy
    sides = {
        (name, kv): Side(loaded, name, kv, *sizes, compiled)
        for kv in kinds
        for name in ("full", method)
    }
    for turn in range(WARM + sizes[-1]):
        for side in sides.values():
            side.step(counts=turn >= WARM)
    full, first = (sides[name, kinds[0]] for name in ("full", method))
    reports = {
        key: side.report(full, first if key[0] == method else full, bandwidth)
        for key, side in sides.items()
    }
    return {kv: {**reports[method, kv], "full": reports["full", kv]} for kv in kinds}


def main() -> None:
    """Measure and print."""
    parser = command_line(
        __doc__,
        model=("dummy-100m", "", choices("model")),
        dtypes=(["float32", "bfloat16"], "", ("float32", "bfloat16")),
        methods=(list(METHODS), "", choices("method")),
        kv=(["native"], "", choices("kv")),
        steps=(64, "that are counted, of each engine"),
        compiled=(False, "time what compiled code takes, too"),
    )
    parser.add_argument(
        "--cells", type=_cell, nargs="+", default=list(CELLS), help="prompt tokens:budget"
    )
    options = parser.parse_args()
    result = measured(options)
    machine = {
        "copy_bandwidth": hardware.bandwidth(torch.device("cpu")).copy,
        "threads": torch.get_num_threads(),
        "cpu": torch.cpu.get_capabilities().get("architecture", ""),
    }
    print_result({**result, **machine, "settings": vars(options)})


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The reports by dtype, cell and method."""
    compiled = Compiled() if options.compiled else None
    result: dict[str, Any] = {}
    for dtype in options.dtypes:
        config = {**(shipped("model", options.model) or {}), "weights": "dummy"}
        loaded = models.load(config, device="cpu", dtype=dtype)
        stream(loaded.model)
        for tokens, budget in options.cells:
            for method in options.methods:
                sizes = tokens, budget, options.steps
                with torch.inference_mode():
                    reports = with_full(loaded, method, options.kv, sizes, compiled)
                shown = reports if len(reports) > 1 else reports[options.kv[0]]
                result.setdefault(dtype, {}).setdefault(f"{tokens}:{budget}", {})[method] = shown
                say(f"{dtype} {tokens}:{budget} {method} {rounded(shown, 4)}")
    return result


def _cell(word: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]+:[0-9]+", word):
        raise argparse.ArgumentTypeError(
            f"{word}: expected prompt tokens and budget, as in 32768:1024"
        )
    tokens, budget = word.split(":")
    return int(tokens), int(budget)


if __name__ == "__main__":
    main()
