"""Recall while keys drift: ParisKV's codes, beside centroids learned from the prompt.

A stream is read token by token. Every arm indexes its retrieval zone as ParisKV does, the prompt's
part at once and then `update` tokens at a time; at every --every-th step it is asked for the k
tokens of the zone with the largest product with the mean query of each group. Streams: `captured`,
from `conf/experiment/pariskv_drift.yaml` (words of the command line change it), whose model
generates --steps tokens after a prompt, all layers and KV heads, and `captured 1` and so on, after
other prompts of the task; `drifting`, synthetic keys of four heads, around topics that come and go,
so that in the end none of the prompt's is left, and queries for any topic so far. A captured one
takes five minutes; with --parts FOLDER what each gave stays as a file there, and the same command
goes on after it.

Prints one JSON object as its last line, and for each stream in it
  steps, zone    decode steps at which the arms were asked, and tokens in the zone then
  recall         of each arm at these steps: share of the exact top k, mean over layers and heads
    pariskv          with the published beta and rho
    pq_2x6, pq_dx8   product quantisation, faiss, trained on the prompt: 2 parts of 64 centroids
                     (PQCache's), and parts of 8 coordinates with 256
    pq_dx8_anew      pq_dx8, trained anew on the whole zone at every update: what the drift costs
                     it
    exact            every key scored, in bfloat16
  late_over_early   mean recall of the last quarter of the steps over that of the first, by arm
  drift             mean squared distance of the last quarter's keys to the nearest of 64
                    centroids of the prompt's keys over that of the prompt's own
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from bench import command_line, once, print_result, say
from capture_trace import capture, layers_of

from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from methods.pariskv.codebook import quotas, random_signs
from methods.pariskv.index import KernelIndex

Floats = np.ndarray[Any, np.dtype[np.float32]]

# of the drifting stream: topics at a time, tokens until the oldest gives way
HEADS = 4
TOPICS = 40
TOPIC_LIFE = 100
# of k-means: keys of a centroid, below which faiss would warn, and passes over the keys
FEW, ROUNDS = 10, 8


@dataclass(frozen=True)
class Stream:
    """One KV head: keys [T, D], and the mean queries [T - prompt, D] of generated tokens."""

    prompt: int
    keys: Floats
    queries: Floats

    def recalls(self, sizes: Sizes) -> Iterator[tuple[int, int, dict[str, float]]]:
        """(step, tokens in the zone, recall of each arm) at every step that asks."""
        by_name = arms(self.keys.shape[1])
        zone = self.prompt - sizes.local - sizes.sinks
        for arm in by_name.values():
            arm.extend(self.keys[sizes.sinks : sizes.sinks + zone])
        for step in range(1, len(self.queries) + 1):
            if self.prompt + step - sizes.local - sizes.sinks - zone >= sizes.update:
                first = sizes.sinks + zone
                zone += sizes.update
                for arm in by_name.values():
                    arm.extend(self.keys[first : sizes.sinks + zone])
            if step % sizes.every == 0:
                query = self.queries[step - 1]
                logits = self.keys[sizes.sinks : sizes.sinks + zone] @ query
                best = np.argpartition(-logits, sizes.k)[: sizes.k]
                yield (
                    step,
                    zone,
                    {
                        name: np.isin(best, arm.best(query, sizes.k)).mean()
                        for name, arm in by_name.items()
                    },
                )

    def drift(self) -> float:
        """How much farther the last keys lie from the prompt's centroids than the prompt's own."""
        kmeans = faiss.Kmeans(self.keys.shape[1], 64, seed=0)
        kmeans.train(self.keys[: self.prompt])
        late = self.keys[-((len(self.keys) - self.prompt) // 4) :]
        distances = [
            kmeans.index.search(keys, 1)[0].mean() for keys in (late, self.keys[: self.prompt])
        ]
        return float(distances[0] / distances[1])


@dataclass(frozen=True)
class Sizes:
    """ParisKV's zones, and how often the arms are asked."""

    sinks: int
    local: int
    update: int
    k: int
    every: int


# -- arms ------------------------------------------------------------------------------------------


# Each is an index of a growing zone: `extend` appends keys [n, D], first the prompt's; `best` finds
# k tokens for a query [D].


class ParisKV:
    """The method's own index."""

    def __init__(self, dim: int) -> None:
        self.index = KernelIndex(1, 1, random_signs(dim, 0), ThreadPoolExecutor(1))

    def extend(self, keys: Floats) -> None:
        self.index.extend(0, torch.from_numpy(keys)[None])

    def best(self, query: Floats, k: int) -> Any:
        quota = quotas(self.index.lengths[0], k)
        return self.index.search(torch.from_numpy(query)[None, None, None], {0: quota})[0][
            0
        ].numpy()


class Quantised:
    """Product quantisation; `anew`: trained again on all keys whenever some come."""

    def __init__(self, dim: int, parts: int, bits: int, anew: bool) -> None:
        self.dim = dim
        self.parts = parts
        self.bits = bits
        self.anew = anew
        self.keys = np.empty((0, dim), np.float32)

    def extend(self, keys: Floats) -> None:
        first = not len(self.keys)
        self.keys = np.concatenate([self.keys, keys])
        if first or self.anew:
            self.index = faiss.IndexPQ(self.dim, self.parts, self.bits, faiss.METRIC_INNER_PRODUCT)
            self.index.pq.cp.min_points_per_centroid, self.index.pq.cp.niter = FEW, ROUNDS
            self.index.train(self.keys)
            keys = self.keys
        self.index.add(keys)

    def best(self, query: Floats, k: int) -> Any:
        return self.index.search(query[None], k)[1][0]


class Exact:
    """Every key scored as it is stored, in bfloat16."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def extend(self, keys: Floats) -> None:
        self.keys = [torch.cat([*self.keys, torch.from_numpy(keys).bfloat16().float()])]

    def best(self, query: Floats, k: int) -> Any:
        return (self.keys[0] @ torch.from_numpy(query)).topk(k).indices.numpy()


def arms(dim: int) -> dict[str, Any]:
    """All arms, empty."""
    return {
        "pariskv": ParisKV(dim),
        "pq_2x6": Quantised(dim, 2, 6, False),
        "pq_dx8": Quantised(dim, dim // 8, 8, False),
        "pq_dx8_anew": Quantised(dim, dim // 8, 8, True),
        "exact": Exact(),
    }


# -- streams ---------------------------------------------------------------------------------------


def captured(words: Sequence[str], steps: int, sample: int) -> list[Stream]:
    """Every layer and KV head of a generation after a sample of the experiment's task.

    Raises
    ------
    ConfigError
        the words are wrong, or prompt and steps do not fit the model.
    """
    say(f"generating {steps} tokens after prompt {sample + 1}")
    arrays = capture(
        ["+experiment=pariskv_drift", f"task.samples={sample + 1}", *words], None, 1, steps, sample
    )
    prompt = json.loads(str(arrays["about"]))["prompt_tokens"]
    streams = []
    for trace in layers_of(arrays):
        kv_heads, dim = len(trace.keys), trace.keys.shape[2]
        queries = trace.queries[:, 1:].reshape(kv_heads, -1, steps, dim).mean(axis=1)
        streams += [
            Stream(prompt, keys, head_queries)
            for keys, head_queries in zip(trace.keys, queries, strict=True)
        ]
    return streams


def drifting(prompt: int, steps: int, dim: int) -> list[Stream]:
    """Keys around topics, the oldest ending every `TOPIC_LIFE` tokens; queries for any so far."""
    return [_drifting(np.random.default_rng(head), prompt, steps, dim) for head in range(HEADS)]


def _drifting(rng: np.random.Generator, prompt: int, steps: int, dim: int) -> Stream:
    total = prompt + steps
    centres = rng.standard_normal((TOPICS + total // TOPIC_LIFE + 1, dim))
    newest = TOPICS + np.arange(total) // TOPIC_LIFE
    topic = newest - rng.integers(0, TOPICS, total)
    keys = centres[topic] + 0.6 * rng.standard_normal((total, dim))
    centre_ids = (rng.random(steps) * newest[prompt:]).astype(int)
    queries = centres[centre_ids] + 0.6 * rng.standard_normal((steps, dim))
    return Stream(prompt, keys.astype(np.float32), queries.astype(np.float32))


# -- what is found ---------------------------------------------------------------------------------


def report(streams: Sequence[Stream], sizes: Sizes) -> dict[str, Any]:
    """Means over the heads of one generation."""
    per_head = []
    for number, stream in enumerate(streams, 1):
        say(f"head {number} of {len(streams)}")
        per_head.append(list(stream.recalls(sizes)))
    steps, zones = [at[0] for at in per_head[0]], [at[1] for at in per_head[0]]
    names = per_head[0][0][2]
    recall = {
        name: np.array([[at[2][name] for at in head] for head in per_head]).mean(axis=0)
        for name in names
    }
    quarter = max(1, len(steps) // 4)
    return {
        "steps": steps,
        "zone": zones,
        "recall": {name: curve.tolist() for name, curve in recall.items()},
        "late_over_early": {
            name: float(curve[-quarter:].mean() / curve[:quarter].mean())
            for name, curve in recall.items()
        },
        "drift": float(np.mean([stream.drift() for stream in streams])),
    }


def reports(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """The report of each stream, by its name; those of --parts are read."""
    settings = {"steps": options.steps, **asdict(sizes)}
    streams: dict[str, tuple[dict[str, Any], Callable[[], list[Stream]]]] = {}
    for sample in range(options.samples):
        part = {**settings, "overrides": options.overrides}
        make = partial(captured, options.overrides, options.steps, sample)
        streams[f"captured {sample}" if sample else "captured"] = part, make
    part = {**settings, "prompt": options.prompt, "dim": options.dim}
    streams["drifting"] = part, partial(drifting, options.prompt, options.steps, options.dim)
    return {
        name: once(
            options.parts and options.parts / f"{name}.json",
            part,
            lambda make=make: report(make(), sizes),
        )
        for name, (part, make) in streams.items()
    }


def main() -> None:
    """Generate, ask, print."""
    parser = command_line(
        __doc__,
        steps=(8192, "tokens to generate"),
        samples=(1, "prompts, each a stream"),
        every=(64, "steps between two questions"),
        prompt=(4096, "prompt tokens of the drifting stream"),
        dim=(128, "head dimension of the drifting stream"),
    )
    parser.add_argument(
        "overrides", nargs="*", help="changes to the experiment, as `python -m kvbench` takes them"
    )
    parser.add_argument(
        "--parts", type=Path, help="folder in which what each stream gave stays, to go on from"
    )
    options = parser.parse_intermixed_args()
    if not 0 < options.every <= options.steps:
        parser.error(f"--every {options.every}: expected 1 to --steps {options.steps}")
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: expected 0 or more")
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    try:
        method = composed("+experiment=pariskv_drift", *options.overrides).method.options
        sizes = Sizes(
            method["sinks"], method["local"], method["update"], method["k"], options.every
        )
        # of the prompt's zone 256 centroids are learned
        shortest = sizes.sinks + sizes.local + 256 * FEW
        if options.prompt < shortest:
            parser.error(f"--prompt {options.prompt}: expected {shortest} or more")
        print_result({"k": sizes.k, **reports(options, sizes)})
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
