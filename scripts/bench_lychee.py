"""What LycheeCluster's index costs and what it finds: builds, searches, bytes, recall.

And what delimiters are worth.

Times are CPU time of one process, which other work on the machine disturbs little; arms take turns,
and medians count.

Prints one JSON object as its last line:
  index      for each seed and n of --lengths, synthetic keys of --heads KV heads, bf16, and
             chunks of 8 to 16 tokens:
    full_s, two_level_s    seconds to cluster all chunks, by both builds; settled_s: full with two
                           iterations of k-means
    pool_s                 seconds to take the chunks' means, in either build
    build_ratio            two_level_s over full_s; with_pooling: the same with pool_s added to
                           both
    recall                 of the best --budget tokens of a query in those its chunks hold, by
                           build, mean over queries
    bytes_over_kv          index bytes over those of keys and values, by radii (exact keeps
                           representatives)
    search_us, scan_us     one search of all heads, and scoring all their keys; search_over_scan
    graft_over_search      adding a chunk to all heads, per token of the chunk, over one search
  model      for each n of --model-lengths, the small model reading RULER's needles in prose,
             --budget tokens:
    build_share            of the prefill, by build: building the index over the whole; build_s,
                           prefill_s without it
    retrieval_share        of a decode step: selection and index updates over the whole;
                           selection_share, update_share: each of them; step_ms
    chunk_tokens           mean length of its chunks
  structure  the paper's pilot study: JSON documents with facts in some records, the question read
             as decode steps, --small-budget tokens, everything counted: score, and answer_recall,
             the share of the answer's tokens that the best head of the layer that retrieves
             attends as it writes them; gain: structure over fixed chunks of 16 or of 12 tokens,
             whichever score higher, and of the scores for each document

Synthetic keys: an autoregressive walk (0.9) of anisotropic normals, j^-0.4, over a mean of their
length; queries lie near keys. On the small model all layers are sparse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from bench import command_line, median_us, print_result, say
from json_texts import LAYOUTS, document

from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.config import bind_methods
from kvbench.engine.batch import Generation, generate
from kvbench.engine.request import QuestionTokens

bind_methods()

from methods.blocks.chunking import Chunks  # noqa: E402
from methods.lychee.clustering import ClusterLayout, pooled  # noqa: E402
from methods.lychee.index import ChunkSearch, ClusterIndex  # noqa: E402

PARTS = ("index", "model", "structure")
RETRIEVES = 1  # the small model's layer that finds what was asked for
NEW = 12  # tokens of an answer about a document
LENGTHS = [4096, 5376, 6656, 8192, 9472, 10752, 12032, 13312, 14592, 16000]  # that the model reads


# -- the index on made keys ------------------------------------------------------------------------


def synthetic(
    count: int, heads: int, dim: int, queries: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [H, n, D] bf16 and queries [H, Q, D]."""
    rng = torch.Generator().manual_seed(seed)
    deviation = torch.arange(1, dim + 1) ** -0.4
    steps = torch.randn(count, heads, dim, generator=rng) * (1 - 0.9**2) ** 0.5
    walk = torch.empty_like(steps)
    here = torch.randn(heads, dim, generator=rng)
    for at in range(count):
        here = 0.9 * here + steps[at]
        walk[at] = here
    mean = torch.randn(heads, 1, dim, generator=rng)
    mean = mean * deviation.norm() / mean.norm(dim=2, keepdim=True)
    walk = walk.transpose(0, 1) * deviation
    near = torch.randint(count, (queries,), generator=rng)
    query_vectors = walk[:, near] + 0.5 * deviation * torch.randn(
        heads, queries, dim, generator=rng
    )
    return (mean + walk).bfloat16(), query_vectors


def token_recall(
    index: ClusterIndex,
    chunks: Chunks,
    keys: torch.Tensor,
    queries: torch.Tensor,
    budget: int,
    search: ChunkSearch,
) -> float:
    """Share of each query's best `budget` tokens in the chunks that fit into `budget` tokens."""
    best = (queries @ keys.float().transpose(1, 2)).topk(budget, dim=2).indices
    chunk_ids = index.best_chunks(queries, queries.norm(dim=2), budget, search)
    tokens = chunks.tokens(chunks.fitting(chunk_ids, budget))
    mask = torch.zeros(*queries.shape[:2], keys.shape[1] + 1).scatter_(
        2, tokens.where(tokens >= 0, keys.shape[1]), 1
    )
    return float(mask.gather(2, best).mean())


def bench_index(count: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds, search and bytes over `count` tokens."""
    say(f"index: {count} tokens, seed {seed}")
    keys, queries = synthetic(count, arguments.heads, arguments.dim, arguments.queries, seed)
    rng = torch.Generator().manual_seed(1)
    ends = torch.randint(8, 17, (count // 8,), generator=rng).cumsum(0)
    chunks = Chunks(
        torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < count], torch.tensor([count])])
    )
    points, lengths = pooled(keys, chunks.bounds, "mean"), chunks.lengths

    def make(**layout: Any) -> ClusterIndex:
        settled = ClusterLayout(**{"radii": "exact", "move_units": False, **layout})
        return ClusterIndex(points, lengths, settled, keys.dtype, torch.Generator().manual_seed(2))

    builds = {
        "full": partial(make),
        "two_level": partial(make, build="two_level"),
        "settled": partial(make, iterations=2),
    }
    builds["pool"] = partial(pooled, keys, chunks.bounds, "mean")
    us = median_us(
        {name: lambda _, call=call: call() for name, call in builds.items()},
        range(arguments.repeats if count > 20_000 else 5),
    )
    seconds = {name: micros / 1e6 for name, micros in us.items()}
    kv = 2 * keys.numel() * keys.element_size()
    room = min(arguments.budget, count // 4)
    full = make()
    indexes = {"full": full, "two_level": make(build="two_level"), "settled": make(iterations=2)}
    return {
        "n": count,
        "seed": seed,
        "chunks": len(chunks),
        **{f"{name}_s": value for name, value in seconds.items()},
        "build_ratio": seconds["two_level"] / seconds["full"],
        "build_ratio_with_pooling": (
            (seconds["two_level"] + seconds["pool"]) / (seconds["full"] + seconds["pool"])
        ),
        "recall": {
            name: token_recall(index, chunks, keys, queries, room, ChunkSearch())
            for name, index in indexes.items()
        },
        "bytes_over_kv": {
            "exact": index_bytes(full) / kv,
            "strict": index_bytes(make(radii="strict")) / kv,
        },
        **step_times(full, chunks, keys.float(), queries[:, :1], room),
    }


def step_times(
    index: ClusterIndex, chunks: Chunks, keys: torch.Tensor, query: torch.Tensor, room: int
) -> dict[str, float]:
    """What a decode step's search takes beside a scan, and adding a chunk beside a search."""
    norms = query.norm(dim=2)
    grafted = deepcopy(index)
    chunk = keys[:, 0]
    us = median_us(
        {
            "search": lambda _: chunks.tokens(
                chunks.fitting(index.best_chunks(query, norms, room, ChunkSearch()), room)
            ),
            "scan": lambda _: (query @ keys.transpose(1, 2)).topk(room, dim=2),
            "graft": lambda _: grafted.graft(chunk, 12),
        },
        range(31),
    )
    return {
        "search_us": us["search"],
        "scan_us": us["scan"],
        "search_over_scan": us["search"] / us["scan"],
        "graft_over_search": us["graft"] / 12 / us["search"],
    }


def index_bytes(index: ClusterIndex) -> int:
    """Bytes of an index's tensors."""
    return sum(value.nbytes for value in vars(index).values() if isinstance(value, torch.Tensor))


# -- in a model ------------------------------------------------------------------------------------


def answer(
    loaded: Loaded, prompt: list[int], method: Any, budget: Budget, steps: int, **how: Any
) -> Generation:
    """What a method makes of a prompt that is prefilled already, `steps` decode steps long."""
    layers, tokenizer = loaded.dense_layers, loaded.tokenizer
    engine = engine_for(
        loaded.model, [len(prompt)], method, budget, layers, tokenizer, new_tokens=steps
    )
    return generate(ModelRunner(loaded.model), [prompt], engine, **how)


def bench_model(loaded: Loaded, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Shares of time where the model reads `count` tokens and answers with --steps."""
    say(f"model: {count} tokens")
    words = ("task=niah", "task.subsets=[niah_single_2]", f"task.lengths=[{count}]")
    task = composed(*words).task.build()
    prompt = loaded.tokenizer(next(iter(task.samples(loaded.tokenizer, 0))).prompt)["input_ids"]
    steps, budget = arguments.steps, Budget(arguments.budget)
    began = time.perf_counter()
    shared = prefill_once(loaded.model, [prompt], [], max_new_tokens=steps, chunk=4096)
    prefill_s = time.perf_counter() - began
    rows: dict[str, list[dict[str, float]]] = {"full": [], "two_level": []}
    for _ in range(arguments.repeats):
        for name, of_build in rows.items():
            method: Any = method_named("lychee", build=name)
            done = answer(
                loaded, prompt, method, budget, steps, max_new_tokens=steps, prefilled=shared
            )
            ms = sum(done.breakdown_ms.values())
            selection = done.breakdown_ms["select"] / ms
            update = done.breakdown_ms["index_update"] / ms
            of_build.append(
                {
                    "build_s": done.prefill_ms["index_build"] / 1e3,
                    "step_ms": ms,
                    "retrieval_share": selection + update,
                    "selection_share": selection,
                    "update_share": update,
                }
            )
    middle = {
        name: {key: statistics.median(row[key] for row in of_build) for key in of_build[0]}
        for name, of_build in rows.items()
    }
    build_s = {name: times.pop("build_s") for name, times in middle.items()}
    return {
        "n": len(prompt),
        "chunk_tokens": float(method.rows[0].text.chunks.lengths.float().mean()),
        "prefill_s": prefill_s,
        "build_s": build_s,
        "build_share": {name: seconds / (seconds + prefill_s) for name, seconds in build_s.items()},
        **middle["full"],
    }


# -- chunks at delimiters --------------------------------------------------------------------------

PILOT = {
    "lychee structure": ("lychee", {"chunking": "structure"}),
    "lychee fixed": ("lychee", {"chunking": "fixed"}),
    "lychee fixed 12": ("lychee", {"chunking": "fixed", "max_chunk": 12}),
    "quest structure": ("quest_structure", {}),
    "quest fixed": ("quest", {}),
    "quest fixed 12": ("quest", {"page_size": 12}),
}


def bench_structure(loaded: Loaded, arguments: argparse.Namespace) -> dict[str, Any]:
    """Score and answer recall of chunks at delimiters and of fixed ones, by layout."""
    result: dict[str, Any] = {}
    for layout in LAYOUTS:
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in PILOT}
        for seed in range(arguments.samples):
            say(f"structure: {layout}, sample {seed + 1} of {arguments.samples}")
            text, question, value = document(layout, arguments.document, seed, loaded)
            begin = text.index(value)
            read = loaded.tokenizer(text, return_offsets_mapping=True)
            offsets, ids = read["offset_mapping"], read["input_ids"]
            answer_tokens = {
                at
                for at, (first, end) in enumerate(offsets)
                if first < begin + len(value) and end > begin
            }
            question_ids = loaded.tokenizer(question, add_special_tokens=False)["input_ids"]
            budget, steps = Budget(arguments.small_budget, "unified"), NEW + len(question_ids)
            shared = prefill_once(loaded.model, [ids], [], max_new_tokens=steps, chunk=4096)
            for name, (method_name, options) in PILOT.items():
                method = method_named(method_name, **options)
                shares = watch_answer(method, answer_tokens)
                how = {
                    "max_new_tokens": NEW,
                    "question": QuestionTokens([question_ids]),
                    "prefilled": shared,
                }
                done = answer(loaded, ids, method, budget, steps, **how)
                output = loaded.tokenizer.decode(done.tokens[0], skip_special_tokens=True)
                # the last step of the question and those that follow write the answer
                writing = shares[1 - NEW : 1 - NEW + len(answer_tokens)]
                results[name].append(
                    (100.0 * (value in output.replace(" ", "")), statistics.fmean(writing))
                )
        keys = ("score", "answer_recall")
        means = {
            name: dict(zip(keys, map(statistics.fmean, zip(*rows, strict=True)), strict=True))
            for name, rows in results.items()
        }
        gain: dict[str, Any] = {}
        for method in ("lychee", "quest"):
            ours = f"{method} structure"
            fixed = max(
                (f"{method} fixed", f"{method} fixed 12"), key=lambda name: means[name]["score"]
            )
            gain[method] = {key: means[ours][key] - means[fixed][key] for key in keys}
            gain[method]["scores"] = [
                first[0] - other[0]
                for first, other in zip(results[ours], results[fixed], strict=True)
            ]
        result[layout] = {**means, "gain": gain}
    return result


def watch_answer(method: Any, answer_tokens: set[int]) -> list[float]:
    """Note at every step which share of `answer_tokens` the best head attends.

    Of the layer that retrieves.
    """
    shares: list[float] = []
    select = method.select

    def watched(layer: int, query: torch.Tensor) -> Any:
        selection = select(layer, query)
        if layer == RETRIEVES:
            heads: Sequence[Sequence[int]] = selection.index[0].tolist()
            shares.append(
                max(len(answer_tokens.intersection(head)) / len(answer_tokens) for head in heads)
            )
        return selection

    method.select = watched
    return shares


def main() -> None:
    """Measure what is asked for, print."""
    parser = command_line(
        __doc__,
        parts=(list(PARTS), "what to measure", PARTS),
        lengths=([4096, 16384, 65536], "synthetic keys"),
        seeds=(1, "sets of synthetic keys"),
        heads=(8, "KV heads of synthetic keys"),
        dim=(128, "head dimension of synthetic keys"),
        queries=(32, "queries a head, for recall"),
        budget=(1024, "tokens attended, for index and model"),
        repeats=(3, "turns of slow measurements"),
        steps=(32, "tokens it writes, for shares of a step"),
        samples=(10, "documents of each layout"),
        document=(2048, "tokens of a document"),
        small_budget=(128, "tokens attended, for structure"),
    )
    parser.add_argument(
        "--model-lengths", type=int, nargs="*", default=LENGTHS, help="tokens it reads"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    print_result(measured(arguments))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts that are asked for."""
    loaded = load(composed("model=tiny").model, device="cpu")
    result: dict[str, Any] = {}
    for part in arguments.parts:
        if part == "index":
            bench_index(2048, 0, arguments)  # warm
            many = [(count, seed) for seed in range(arguments.seeds) for count in arguments.lengths]
            result[part] = [bench_index(count, seed, arguments) for count, seed in many]
        elif part == "model":
            result[part] = [
                bench_model(loaded, count, arguments) for count in arguments.model_lengths
            ]
        else:
            result[part] = bench_structure(loaded, arguments)
    return result


if __name__ == "__main__":
    main()
