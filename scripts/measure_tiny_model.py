"""Measures the small model that kvbench ships, and writes its model card.

Exact answers at full KV by task and length; the same with a single layer windowed, which shows the
layers that retrieve; the attention mass in the exact top 64 keys of each layer; and what methods
lose at small budgets.

    python scripts/measure_tiny_model.py DIR               # the model in DIR; writes DIR/README.md
    python scripts/measure_tiny_model.py DIR --samples 20  # fewer samples: quicker, wider errors

DIR holds the model and training.json as scripts/train_tiny_model.py leaves them. The numbers go
into DIR/measured.json and the last line printed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench import command_line, print_result, say

from kvbench.backends.hf.loading import Loaded
from kvbench.cli.compose import composed
from kvbench.measure.arm import Arm
from kvbench.measure.job import PromptJob, SharedPrompts
from kvbench.measure.prompts import prompt_of
from kvbench.runs.run import prepare
from kvbench.tasks import Sample

LENGTHS = (1024, 2048, 4096, 8192)
ABLATED = 4096  # tokens, where layers are windowed and methods compared
NIAH = ("niah_single_1", "niah_single_2", "niah_multikey_1")
WINDOW = 128  # tokens that a windowed layer attends: 4 sinks and the most recent
TOP = 64
SEED = 1  # of the samples
METHODS = (("topk", 64), ("topk", 128), ("quest", 64), ("snapkv", 64), ("streaming_llm", 128))

Cells = dict[str, dict[str, float]]


def arm(folder: Path, loaded: Loaded | None, *words: str) -> Arm:
    """An arm on the model in a folder."""
    config = composed(f"model.path={folder}", "protocol.dense_layers=[]", f"seed={SEED}", *words)
    return prepare(config, loaded)


def tasks(lengths: Sequence[int], samples: int) -> list[list[str]]:
    """Words that choose each task."""
    positions, keys = min(samples, 20), max(1, math.ceil(samples / 20))
    return [
        [
            "task=passkey",
            f"task.lengths={list(lengths)}",
            f"task.positions={positions}",
            f"task.keys={keys}",
        ],
        [
            "task=niah",
            f"task.lengths={list(lengths)}",
            f"task.subsets={list(NIAH)}",
            f"task.samples={samples}",
        ],
    ]


def cell_of(arm: Arm, sample: Sample) -> str:
    """ "passkey/4096", "niah_single_1/4096"."""
    return sample.group if "/" in sample.group else f"{arm.task.name}/{sample.group}"


def side_by_side(arms: dict[str, Arm]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every sample through every arm after one prefill: cell, the arm's name, the record."""
    first = next(iter(arms.values()))
    for sample in first.task.samples(first.loaded.tokenizer, SEED):
        prompt = prompt_of(first, sample)
        shared = SharedPrompts(list(arms.values()), [prompt])
        for name, current in arms.items():
            (record,) = PromptJob(current, [prompt], shared).run()
            if record["error"]:
                raise SystemExit(f"{sample.id}, {name}: {record['error']}")
            yield cell_of(current, sample), name, record


def scores(
    folder: Path, loaded: Loaded, lengths: Sequence[int], samples: int, arms: dict[str, list[str]]
) -> dict[str, Cells]:
    """Mean score and standard error, 0-100, of each arm (name -> words) and cell."""
    by_arm: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    for words in tasks(lengths, samples):
        built = {name: arm(folder, loaded, *words, *overrides) for name, overrides in arms.items()}
        for cell, name, record in side_by_side(built):
            by_arm[name].setdefault(cell, []).append(record["scores"][built[name].task.metric])
    return {
        name: {cell: mean(values) for cell, values in cells.items()}
        for name, cells in by_arm.items()
    }


def mean(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard error x 100."""
    average = sum(values) / len(values)
    spread = math.sqrt(
        sum((value - average) ** 2 for value in values) / max(1, len(values) - 1) / len(values)
    )
    return {"score": round(100 * average, 1), "stderr": round(100 * spread, 1), "n": len(values)}


def masses(folder: Path, loaded: Loaded, samples: int) -> dict[str, float]:
    """Attention mass in the exact top 64 keys by layer.

    Mean over heads, decode steps and tasks at 4,096 tokens.
    """
    by_layer: dict[str, list[float]] = {}
    for words in tasks([ABLATED], samples):
        probing = {
            "topk": arm(folder, loaded, *words, "method=topk", f"budget={TOP}", "probe.every=1")
        }
        for _, _, record in side_by_side(probing):
            for layer, values in record["probe"]["layers"].items():
                by_layer.setdefault(layer, []).append(sum(values["mass"]) / len(values["mass"]))
    return {
        layer: round(sum(values) / len(values), 3) for layer, values in sorted(by_layer.items())
    }


def measured(folder: Path, samples: int) -> dict[str, Any]:
    """All numbers of the card."""
    start = time.monotonic()
    loaded = arm(folder, None).loaded
    layers = loaded.card.layers
    full = ["method=full", "budget=null"]
    accuracy = scores(folder, loaded, LENGTHS, samples, {"full": full})["full"]
    say(str(accuracy))

    windowed = {"none": full}
    for layer in range(layers):
        others = [other for other in range(layers) if other != layer]
        window = ["method=streaming_llm", "method.positions=original", f"budget={WINDOW}"]
        windowed[str(layer)] = [*window, f"protocol.dense_layers={others}"]
    by_layer = scores(folder, loaded, [ABLATED], min(samples, max(10, samples // 2)), windowed)
    say(str(by_layer))

    methods = {
        f"{name} {budget}": [f"method={name}", f"budget={budget}"] for name, budget in METHODS
    }
    separation = scores(folder, loaded, [ABLATED], samples, {"full": full, **methods})
    say(str(separation))
    return {
        "samples": samples,
        "accuracy": accuracy,
        "windowed": by_layer,
        "mass": masses(folder, loaded, min(samples, max(4, samples // 10))),
        "methods": separation,
        "seconds": round(time.monotonic() - start),
    }


# -- the card --------------------------------------------------------------------------------------

CARD = Path(__file__).with_name("tiny_model_card.md").read_text(encoding="utf-8")


def grid(rows: dict[str, Cells], corner: str) -> str:
    """A Markdown table: a line each row, a column each cell."""
    cells = list(next(iter(rows.values())))
    lines = [f"| {' | '.join([corner, *cells])} |", f"|{'---|' * (len(cells) + 1)}"]
    for name, values in rows.items():
        written = [f"{values[cell]['score']:.0f} ± {values[cell]['stderr']:.0f}" for cell in cells]
        lines.append(f"| {' | '.join([name, *written])} |")
    return "\n".join(lines)


def by_length(cells: Cells) -> str:
    """A Markdown table: a line each task, a column each length."""
    rows: dict[str, Cells] = {}
    for cell, value in cells.items():
        task, length = cell.split("/")
        rows.setdefault(task, {})[f"{int(length):,}"] = value
    return grid(rows, "task")


def mass_table(masses: dict[str, float]) -> str:
    """A Markdown table: a column each layer."""
    values = " | ".join(f"{value:.2f}" for value in masses.values())
    rule = "---|" * (len(masses) + 1)
    return f"| layer | {' | '.join(masses)} |\n|{rule}\n| mass | {values} |"


def card(folder: Path, numbers: dict[str, Any]) -> str:
    """The model card."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    return CARD.format(
        millions=parameters(folder) / 1e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        window=f"{config['max_position_embeddings']:,}",
        samples=numbers["samples"],
        evaluated=SEED,
        trained=f"{max(entry['length'] for entry in training['curve']):,}",
        accuracy=by_length(numbers["accuracy"]),
        windowed=grid(numbers["windowed"], "layer windowed"),
        span=WINDOW,
        top=TOP,
        mass=mass_table(numbers["mass"]),
        methods=grid(numbers["methods"], "method, budget"),
        steps=f"{training['steps']:,}",
        seed=training["seed"],
        hours=training["seconds"] / 3600,
    )


def parameters(folder: Path) -> int:
    """Numbers in the model's safetensors file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def main() -> None:
    """Parse the command line, measure, write."""
    parser = command_line(
        __doc__,
        samples=(100, "per task and length (default: 100)"),
        threads=(2, "of torch (default: 2)"),
    )
    parser.add_argument("folder", type=Path, help="of the model and its training.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder: Path = options.folder.resolve()
    numbers = measured(folder, options.samples)
    (folder / "measured.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "README.md").write_text(card(folder, numbers))
    print_result(numbers)


if __name__ == "__main__":
    main()
