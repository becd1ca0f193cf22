"""What a sweep costs whose arms share each prefill, beside runs of their own: ten arms on RULER with the small model.

Prints one JSON object as its last line:
  over_parts      seconds of the shared sweep over those inside its prefills and its arms; 1 would be no cost of sharing
  over_separate   seconds of the shared sweep over those of one run after another, model loading included in both
  same_outputs    whether every sample of every arm has the same output in both
  prefill_s, arms_s, shared_s, separate_s   these seconds
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import kvbench.measure.arm
import kvbench.runs.shared
from kvbench.cli.compose import composed
from kvbench.runs.run import run

ARMS = (
    *(("full", None),),
    *((method, budget) for method in ("quest", "snapkv", "streaming_llm") for budget in (128, 256, 512)),
)


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`call`, which adds what it takes to `seconds`."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    return wrapped


def outputs(folder: Path) -> dict[tuple[str, str], str]:
    """The output of every sample of every arm."""
    return {
        (path.parts[-3], record["id"]): record["output"]
        for path in folder.glob("runs/*/*/*/*/samples.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
    }


def main() -> None:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=4, help="samples of each arm")
    parser.add_argument("words", nargs="*", help="more of the config, such as model=dummy-tiny")
    arguments = parser.parse_intermixed_args()

    words = ["task=ruler", f"task.lengths=[{arguments.length}]", f"task.limit={arguments.samples}", *arguments.words]
    prefills: list[float] = []
    arms: list[float] = []
    kvbench.measure.arm.prefill_shared = timed(kvbench.measure.arm.prefill_shared, prefills)  # type: ignore[assignment]
    kvbench.runs.shared.measure = timed(kvbench.runs.shared.measure, arms)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:

        def configs(name: str) -> list[Any]:
            return [
                composed(f"method={method}", f"budget={budget or 'null'}", f"results_dir={folder}/{name}", *words)
                for method, budget in ARMS
            ]

        run(configs("warm")[0])  # imports and first calls
        start = time.perf_counter()
        kvbench.runs.shared.run_shared(configs("shared"), Console(file=sys.stderr))
        shared = time.perf_counter() - start
        start = time.perf_counter()
        for config in configs("separate"):
            run(config)
        separate = time.perf_counter() - start
        same = outputs(Path(folder, "shared")) == outputs(Path(folder, "separate"))
    result = {
        "over_parts": shared / (sum(prefills) + sum(arms)),
        "over_separate": shared / separate,
        "same_outputs": same,
        "prefill_s": sum(prefills),
        "arms_s": sum(arms),
        "shared_s": shared,
        "separate_s": separate,
        "arms": len(ARMS),
        "samples": arguments.samples,
        "length": arguments.length,
    }
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))


if __name__ == "__main__":
    main()
