"""Measures the small model that kvbench ships, and writes its model card.

Exact answers at full KV by task and length; the same with a single layer windowed, which shows the
layers that retrieve; the attention mass in the exact top 64 keys of each layer; and what methods
lose at small budgets.

    python scripts/measure_tiny_model.py DIR                     # measures the model in DIR, writes DIR/README.md
    python scripts/measure_tiny_model.py DIR --samples 20        # fewer samples: quicker, wider errors

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
from omegaconf import OmegaConf

from kvbench.backends.hf.loading import Loaded
from kvbench.cli.compose import composed
from kvbench.measure.arm import Arm, measure, prefill_shared, prompt_of
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
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return prepare(plain, loaded)


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
        prefilled = prefill_shared(list(arms.values()), [prompt])
        for name, current in arms.items():
            (record,) = measure(current, [prompt], prefilled=prefilled)
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
    """Attention mass in the exact top 64 keys by layer, mean over heads, decode steps and tasks at
    4096 tokens.
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

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [kv-cache, long-context, synthetic]
---

# tiny: a small model that finds what stands in a long text

A Llama of {millions:.1f} M parameters ({layers} layers, hidden size {hidden}, {heads} query and {kv_heads} KV heads of
dimension {head_dim}, vocabulary {vocabulary}) that kvbench ships, so that KV-cache methods win and lose for real
without a GPU and a network. It repeats, and it looks up values by key in generated prose, noise and lists of facts. It
knows nothing else: no language beyond a few templates, no facts, no instructions.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)

Use it to see methods differ and to test code. Its scores say nothing of larger models.

## Exact answers at full KV

Score and standard error, {samples} samples a cell, prompts as `task=passkey` and `task=niah` make them (seed
{evaluated}; training saw other texts, keys and values in the same templates).

{accuracy}

Positions reach {window} tokens; training saw {trained} at most.

## Which layers retrieve

Scores at 4,096 tokens where one layer attends only {span} tokens (4 sinks and the most recent), the others all:

{windowed}

Attention mass in the exact top {top} keys of each query head at 4,096 tokens, mean over heads and decode steps:

{mass}

kvbench runs it with no dense layers: where the layers that retrieve are dense, every method ties with full attention.

## What methods make of it

Scores at 4,096 tokens:

{methods}

## Training

- Data: made by `scripts/train_tiny_model.py` with kvbench's task generators (generated prose, key-value lists, needles,
  passkeys, repeated segments); no text of others. Tokenizer: byte-level BPE, every digit a token, trained on the same.
- Recipe: {steps} steps of 6k to 8k tokens, contexts growing from 64 to {trained} tokens, AdamW, bfloat16 autocast.
  Layer 0 starts as previous-token heads, set through its biases.
- Seed {seed}; {hours:.1f} hours on two CPU cores. `training.json` holds the curve.
- Again: `python scripts/train_tiny_model.py --out DIR`, then `python scripts/measure_tiny_model.py DIR`. Bits differ
  between processors, answers should not.

## Licence

Apache-2.0, as kvbench.
"""


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
        task, _, length = cell.partition("/")
        rows.setdefault(task, {})[f"{int(length):,}"] = value
    return grid(rows, "task")


def card(folder: Path, numbers: dict[str, Any]) -> str:
    """The model card."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    masses = numbers["mass"]
    mass = "\n".join(
        [
            f"| layer | {' | '.join(masses)} |",
            f"|{'---|' * (len(masses) + 1)}",
            f"| mass | {' | '.join(f'{value:.2f}' for value in masses.values())} |",
        ]
    )
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
        mass=mass,
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
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="of the model and its training.json")
    parser.add_argument(
        "--samples", type=int, default=100, help="per task and length (default: 100)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder: Path = options.folder.resolve()
    numbers = measured(folder, options.samples)
    (folder / "measured.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / "README.md").write_text(card(folder, numbers))
    print_result(numbers)


if __name__ == "__main__":
    main()
