"""Thousands of sampled tokens from one prompt: does a step take longer and hold more, the further
it is?

One prompt, one generation a method, on a model with random weights unless another is named; nothing
ends it but its last step. Time and bytes are taken at every step and shown as medians over
stretches of `--stretch` steps, so that what grows with the position shows and a disturbed step does
not.

    python scripts/bench_long.py                              full, icecache, racc and snapkv, 4,000 tokens
    python scripts/bench_long.py --tokens 16000 --methods full snapkv --figure long.png
    python scripts/bench_long.py model=llama3.1-8b-instruct model.weights=dummy dtype=bfloat16
    device=cuda

Prints one JSON object as its last line:
  ratios     of each method, the own time of a step in the last stretch over that in the second
  at         the last new token of each stretch
  step_ms    of each method, median milliseconds of a step, by stretch
  cpu_ms     the same of the process's own time on all cores, with its audit: other work disturbs it less
  device_mib, host_mib   keys and values held, at the end of each stretch
  looped     of each method, whether the output ended in a loop
  settings
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench import command_line, print_result, say
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from kvbench.backends.hf.generate import Choice, generate
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.sampling import Sampler
from kvbench.cli.compose import composed
from kvbench.engine.engine import Engine
from kvbench.report.data.style import style_of
from kvbench.runs.run import prepare
from kvbench.runs.summary import is_looped

METHODS = ("full", "icecache", "racc", "snapkv")
TITLES = {
    "step_ms": "time of a step, ms",
    "cpu_ms": "own time of a step, ms",
    "device_mib": "KV on the device, MiB",
    "host_mib": "KV on the host, MiB",
}


def main() -> None:
    """Generate with every method, print what was found, and draw it."""
    parser = command_line(__doc__)
    parser.add_argument("words", nargs="*", help="settings of every run, such as model=NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--stretch", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--figure", type=Path, help="draw it here, too")
    options = parser.parse_args()
    runs = {method: long_generation(method, options) for method in options.methods}
    result = {
        "ratios": {method: run["cpu_ms"][-1] / run["cpu_ms"][1] for method, run in runs.items()},
        "at": next(iter(runs.values()))["at"],
        **{name: {method: run[name] for method, run in runs.items()} for name in TITLES},
        "looped": {method: run["looped"] for method, run in runs.items()},
        "settings": {**vars(options), "figure": None},
    }
    if options.figure:
        draw(result, options.figure)
    print_result(result)


def long_generation(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times and bytes of one generation, by stretch of its steps."""
    words = [
        "model=dummy-tiny",
        "budget=256",
        f"method={method}",
        "protocol.generated=counted",
        *options.words,
    ]
    config: Any = OmegaConf.to_container(composed(*words), resolve=True)
    arm = prepare(config)
    model = arm.loaded.model
    torch.manual_seed(0)
    prompt = torch.randint(arm.loaded.card.vocabulary, (options.prompt,)).tolist()
    layers, tokenizer = arm.dense_layers, arm.loaded.tokenizer
    engine = engine_for(
        model,
        [options.prompt],
        arm.method,
        arm.budget,
        layers,
        tokenizer,
        new_tokens=options.tokens,
    )
    measurements: list[tuple[float, int, int]] = []
    generation = generate(
        model,
        [prompt],
        engine,
        max_new_tokens=options.tokens,
        choice=Choice(Sampler(options.temperature, ["bench_long"])),
        watch=lambda logits: measurements.append((time.process_time(), *bytes_of(engine))),
    )
    ends = range(options.stretch, len(generation.step_ms) + 1, options.stretch)
    spent = [0.0, *(1e3 * (after[0] - before[0]) for before, after in pairwise(measurements))]
    times, method_ms = (
        [statistics.median(steps[end - options.stretch : end]) for end in ends]
        for steps in (generation.step_ms, spent)
    )
    say(
        f"{method}: {times[0]:.3f} to {times[-1]:.3f} ms a step, of its own {method_ms[0]:.3f} to"
        f" {method_ms[-1]:.3f}"
    )
    return {
        "at": list(ends),
        "step_ms": times,
        "cpu_ms": method_ms,
        "device_mib": [measurements[end - 1][1] / 2**20 for end in ends],
        "host_mib": [measurements[end - 1][2] / 2**20 for end in ends],
        "looped": is_looped(generation.tokens[0]),
    }


def bytes_of(engine: Engine) -> tuple[int, int]:
    """Bytes of keys and values resident on the device and kept on the host, all layers."""
    stores = engine.stores.values()
    return sum(store.resident_bytes() for store in stores), sum(
        store.host_bytes() for store in stores
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """A panel over the position for each of `TITLES`."""
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    axes = figure.subplots(1, len(TITLES))
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        for method, values in result[name].items():
            style = style_of(method)
            axis.plot(
                result["at"],
                values,
                label=method,
                color=style.colour,
                marker=style.marker,
                markersize=3,
            )
        axis.set_xlabel("new tokens")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.locator_params(axis="x", nbins=5)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
