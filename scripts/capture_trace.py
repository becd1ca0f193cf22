"""Save what attention sees, for the benchmarks' --trace: queries, keys and values of layers.

The model reads one prompt of a task with full attention and, with --generate, goes on greedily from
there. FILE is an .npz with, for each layer L of H query and Hkv KV heads and head dim D, all after
RoPE,
  keys.L, values.L   [Hkv, n, D] float32, of every token but the last generated one, which nothing
                     has read
  queries.L          [H, w, D] float32, of the last w of these tokens
and `about`, a JSON text: model, task, sample, dtype, prompt and generated tokens.

    python scripts/capture_trace.py needle.npz --layers 1,3 task=niah task.lengths=[4096]
    python scripts/capture_trace.py long.npz model.path=FOLDER task=longbench task.data_dir=FOLDER
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench import command_line
from numpy.typing import NDArray

from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.batch import generate
from kvbench.measure.arm import Arm
from kvbench.measure.prompts import TokenizedSample, prompt_of
from kvbench.measure.work import samples
from kvbench.method import Method, Needs, Prompt
from kvbench.runs.run import prepare

Floats = NDArray[np.float32]


class Trace(NamedTuple):
    """One layer's queries [H, w, D] of w tokens, keys and values [Hkv, n, D], after RoPE."""

    layer: int
    queries: Floats
    keys: Floats
    values: Floats


def load(path: str | Path) -> list[Trace]:
    """The layers of a captured file, in their order."""
    with np.load(path) as file:
        return layers_of(file)


def layers_of(arrays: Mapping[str, Any]) -> list[Trace]:
    """The layers of what `capture` gives."""
    layers = sorted(int(name.removeprefix("keys.")) for name in arrays if name.startswith("keys."))
    return [
        Trace(at, *(arrays[f"{part}.{at}"] for part in ("queries", "keys", "values")))
        for at in layers
    ]


class Capture(Method):
    """Full attention that notes queries, keys and values.

    Of the last `window` prompt tokens and all later ones.
    """

    def __init__(self, layers: Sequence[int], window: int) -> None:
        self.needs = Needs(query_window=window)
        self.captured: dict[int, list[tuple[torch.Tensor, ...]]] = {layer: [] for layer in layers}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        if layer in self.captured:
            self._note(layer, prompt.queries, prompt.keys, prompt.values)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.new = key, value

    def select(self, layer: int, query: torch.Tensor) -> None:
        if layer in self.captured:
            self._note(layer, query, *self.new)

    def _note(self, layer: int, *parts: torch.Tensor) -> None:
        self.captured[layer].append(tuple(part[0].float().cpu().clone() for part in parts))

    def arrays(self) -> dict[str, Floats]:
        """What was seen, as the file holds it."""
        return {
            f"{name}.{layer}": torch.cat(parts, dim=1).numpy()
            for layer, steps in self.captured.items()
            for name, parts in zip(
                ("queries", "keys", "values"), zip(*steps, strict=True), strict=True
            )
        }


def capture(
    overrides: Sequence[str],
    layers: Sequence[int] | None,
    window: int,
    new_tokens: int,
    number: int,
) -> dict[str, Any]:
    """The file's arrays for sample `number` of the task that the overrides name.

    Parameters
    ----------
    layers
        None: all.

    Raises
    ------
    ConfigError
        the overrides are wrong, or the model has no such layer, the task no such sample.
    """
    arm = prepare(composed("method=full", *overrides))
    count = arm.loaded.card.layers
    wrong = [layer for layer in layers or () if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"--layers {wrong[0]}: {arm.loaded.name} has layers 0 to {count - 1}")
    prompt = _prompt(arm, number)
    ids = prompt.ids + prompt.question
    method = Capture(range(count) if layers is None else layers, min(window, len(ids)))
    model, tokenizer = arm.loaded.model, arm.loaded.tokenizer
    more = new_tokens + 1
    engine = engine_for(model, [len(ids)], method, Budget(None), (), tokenizer, new_tokens=more)
    progress = _progress if sys.stderr.isatty() else None
    chunk = arm.protocol.prefill_chunk
    generate(
        ModelRunner(model),
        [ids],
        engine,
        max_new_tokens=more,
        prefill_chunk=chunk,
        progress=progress,
    )
    description = {
        "model": arm.loaded.name,
        "task": arm.config.task.name,
        "sample": prompt.record["id"],
        "dtype": str(arm.loaded.model.dtype).removeprefix("torch."),
        "prompt_tokens": len(ids),
        "generated_tokens": new_tokens,
    }
    return {**method.arrays(), "about": np.array(json.dumps(description))}


def _prompt(arm: Arm, number: int) -> TokenizedSample:
    """The prompt of a task's sample, from 0."""
    sample = next(itertools.islice(samples(arm, None), number, None), None)
    if sample is None:
        raise ConfigError(
            f"--sample {number}: the task has {len(arm.task)} samples, the first is 0"
        )
    prompt = prompt_of(arm, sample)
    if prompt.record["error"]:
        raise ConfigError(f"--sample {number}: {prompt.record['error']}")
    return prompt


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _progress(done: int, total: int) -> None:
    print(
        f"\r{done} of {total} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True
    )


def main() -> None:
    """Capture, save, say what was saved."""
    parser = command_line(
        __doc__,
        window=(512, "last prompt tokens whose queries are saved"),
        generate=(0, "tokens to generate, read and save after the prompt"),
        sample=(0, "which sample of the task, from 0"),
    )
    parser.add_argument("file", type=Path, help="the .npz to write")
    parser.add_argument(
        "overrides", nargs="*", help="model, task and protocol as `python -m kvbench` takes them"
    )
    parser.add_argument("--layers", type=_numbers, help="layers to save, as in 1,3; default: all")
    arguments = parser.parse_intermixed_args()
    if arguments.file.suffix != ".npz":
        parser.error(f"{arguments.file}: expected a name that ends in .npz")
    for name, least in (("window", 1), ("generate", 0), ("sample", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: expected {least} or more")
    try:
        arrays = capture(
            arguments.overrides,
            arguments.layers,
            arguments.window,
            arguments.generate,
            arguments.sample,
        )
    except ConfigError as error:
        parser.error(str(error))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.file, **arrays)
    for name, array in arrays.items():
        print(f"{name:12}{list(array.shape) if array.shape else array}")


if __name__ == "__main__":
    main()
