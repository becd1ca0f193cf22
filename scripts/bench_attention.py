"""The attention kernels of one layer side by side, on a GPU or (small, torch alone) on a CPU.

Prints one JSON object as its last line. Times are milliseconds, medians of calls that take turns:
  full        every token in place: each executor's `ms`, and flashinfer_over_torch
  selected    `budget` tokens of each KV head, chosen at random: the same, and over_full (of the
              quickest of each)
  prefill     a chunk in front (`first`) and one at the end of the context (`last`): sdpa's and
              FlashInfer's ms, and flashinfer_over_sdpa
  offload     `budget` tokens of each KV head that live on the host, `turnover` of them new in
              each step: chosen on the CPU (`bulk`) or on the device (`uva`, on a GPU);
              moved_gib_s, and uva_over_bulk
  device, dtype, context, budget, sizes, turnover   what was measured
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from bench import command_line, print_result

from kvbench.attention import executor as attention
from kvbench.attention.flashinfer import FlashInfer, unfit
from kvbench.backends.hf.loading import DTYPES
from kvbench.measure import hardware
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape

ROUNDS = 20


def store_of(shape: Shape, context: int, home: Any = "device") -> LayerStore:
    """A layer's store with random keys and values in every slot."""
    store = LayerStore(
        shape.batch,
        shape.kv_heads,
        shape.head_dim,
        context + 64,
        shape.dtype,
        shape.device,
        home=home,
    )
    store.device.key[:, :, :context].normal_()
    store.device.value[:, :, :context].normal_()
    store.seal_prompt([context] * shape.batch)
    store.leave_device()
    return store


def medians(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Median milliseconds of each call; they take turns, after one round that warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            times[name].append(1e3 * hardware.seconds(call, device))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def decode(
    shape: Shape, store: LayerStore, query: torch.Tensor, selection: Selection | None
) -> dict[str, Any]:
    """The executors that run here, on one selection."""
    names = ["torch"] if unfit(shape) else ["torch", "flashinfer"]
    executors = {name: attention.executor(name, shape) for name in names}
    calls = {
        name: lambda run=run: run(query, store, selection, shape.scaling)
        for name, run in executors.items()
    }
    return compared(medians(calls, shape.device), "flashinfer", "torch")


def compared(ms: dict[str, float], first: str, other: str) -> dict[str, Any]:
    """Times with the ratio of two of them, where both were taken."""
    ratio = {f"{first}_over_{other}": ms[first] / ms[other]} if first in ms and other in ms else {}
    return {"ms": ms, **ratio}


def prefill(shape: Shape, store: LayerStore, column: int, width: int) -> dict[str, Any]:
    """Dense attention of one chunk."""
    query = torch.randn(
        shape.batch, shape.query_heads, width, shape.head_dim, device=shape.device
    ).to(shape.dtype)
    dense = {"sdpa": attention.executor("torch", shape)}
    if not unfit(shape):
        dense["flashinfer"] = FlashInfer(shape, dense="flashinfer")
    offsets = [0] * shape.batch
    calls = {
        name: lambda run=run: run.prefill(query, store, column, offsets, shape.scaling)
        for name, run in dense.items()
    }
    return compared(medians(calls, shape.device), "flashinfer", "sdpa")


def offload(shape: Shape, context: int, budget: int, turnover: float) -> dict[str, Any]:
    """A step's selection brought up from the host."""
    reused = budget - max(1, int(turnover * budget))
    order = torch.rand(shape.batch, shape.kv_heads, context).argsort(dim=2)
    result: dict[str, Any] = {}
    for name, side in (("bulk", "cpu"), ("uva", shape.device)):
        if name == "uva" and shape.device.type != "cuda":
            continue
        store = store_of(shape, context, home="host")
        steps = [
            torch.cat([order[..., :reused], order[..., start : start + budget - reused]], dim=2).to(
                side
            )
            for start in range(reused, context - (budget - reused), budget - reused)
        ]
        turn = iter(steps * (1 + (ROUNDS + 2) // len(steps)))
        result[name] = medians(
            {"ms": lambda store=store, turn=turn: store.locate(next(turn))}, shape.device
        )
        moved = (budget - reused) * shape.batch * shape.kv_heads * store.device.codecs.nbytes
        result[name]["moved_gib_s"] = moved / 2**30 / (result[name]["ms"] / 1e3)
    if "uva" in result:
        result["uva_over_bulk"] = result["uva"]["ms"] / result["bulk"]["ms"]
    return result


def shape_of(args: argparse.Namespace) -> Shape:
    """One layer, as the command line has it."""
    query_heads, kv_heads = args.heads
    return Shape(
        1,
        query_heads,
        kv_heads,
        args.head_dim,
        (args.context,) * args.batch,
        DTYPES[args.dtype],
        torch.device(args.device),
        args.head_dim**-0.5,
        sparse_layers=(0,),
    )


def in_place(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Decode steps over all tokens and over a selection, and prefill, of tokens on the device."""
    store = store_of(shape, args.context)
    sizes = shape.batch, shape.query_heads, 1, shape.head_dim
    query = torch.randn(*sizes, device=shape.device).to(shape.dtype)
    scores = torch.rand(shape.batch, shape.kv_heads, args.context, device=shape.device)
    chosen = Selection(scores.topk(args.budget, dim=2).indices)
    full = decode(shape, store, query, None)
    selected = decode(shape, store, query, chosen)
    selected["over_full"] = min(selected["ms"].values()) / min(full["ms"].values())
    starts = {"first": 0, "last": args.context - args.chunk}
    chunks = {name: prefill(shape, store, at, args.chunk) for name, at in starts.items()}
    return {"full": full, "selected": selected, "prefill": chunks}


def main() -> None:
    """Measure and print."""
    gpu = torch.cuda.is_available()
    parser = command_line(
        __doc__,
        device="cuda" if gpu else "cpu",
        dtype=("bfloat16" if gpu else "float32", "", DTYPES),
        context=(131072 if gpu else 8192, "tokens in the store"),
        budget=(1024 if gpu else 256, "tokens selected for each KV head"),
        chunk=(4096 if gpu else 256, "tokens of a prefill chunk"),
        turnover=(0.2, "share of the selection that is new in a step"),
        head_dim=128,
        batch=1,
    )
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QUERY", "KV"))
    args = parser.parse_args()
    if args.chunk > args.context or args.budget > args.context // 2:
        parser.error(
            f"--context {args.context}: at least --chunk {args.chunk} and twice --budget"
            f" {args.budget}"
        )
    shape = shape_of(args)
    torch.manual_seed(0)
    with torch.inference_mode():
        report = in_place(shape, args)
        report["offload"] = offload(shape, args.context, args.budget, args.turnover)
    gpu_name = torch.cuda.get_device_name(shape.device) if shape.device.type == "cuda" else ""
    settings = {name: getattr(args, name) for name in ("dtype", "context", "budget", "turnover")}
    sizes = {name: getattr(shape, name) for name in ("query_heads", "kv_heads", "head_dim")}
    print_result(
        {
            **report,
            "device": gpu_name or f"cpu, {torch.get_num_threads()} threads",
            "sizes": {**sizes, "batch": args.batch},
            **settings,
        }
    )


if __name__ == "__main__":
    main()
