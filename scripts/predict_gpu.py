"""Predicts the time of a decode step on an H200 from launches and bytes; nothing is measured here.

    time = bytes that a step must read / bandwidth + launches x time of a launch

Launches are those of `tests/goldens/launches.json`, bytes those of Llama 3.1 8B's shape at C =
1,024, bandwidth and the time of a launch those of one H200 (results/gpu/gpu_check.json). The table
goes into docs/guide/attention.md, anew with each call: when the counts have changed, run it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import command_line
from gpu_check import GOALS, ON_HOST

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
PAGE = ROOT / "docs" / "guide" / "attention.md"
MARK = "<!-- predicted: python scripts/predict_gpu.py -->"

BANDWIDTH = 4.236e12  # bytes a second, of a copy inside the device
# us of the device: what it computed beyond the floor over the launches that were counted then, of
# full, snapkv, keydiff, quest and lychee (1.9 to 2.2)
IN_A_GRAPH = 2.1
FROM_PYTHON = 20.0  # us of the host, likewise of the whole step (19 to 23)
LENGTHS, BUDGET = (36000, 131072), 1024

# Llama 3.1 8B in bfloat16
LAYERS, DENSE, KV_HEADS, HEAD_DIM, BYTES = 32, 2, 8, 128, 2
HIDDEN, FEED_FORWARD, VOCABULARY = 4096, 14336, 128256
TOKEN = KV_HEADS * 2 * HEAD_DIM * BYTES  # a token's keys and values in one layer

# What a method reads to choose, in bytes a token and KV head: all keys; two bounds of a page of 16;
# strict bounds of chunks (2.25 % of keys and values); a byte for each of 16 subspaces, and 96 of
# each tenth token; two codes. What those that are not here read does not grow with the length.
SCANNED = {
    "topk": HEAD_DIM * BYTES,
    "quest": 2 * HEAD_DIM * BYTES / 16,
    "lychee": 0.0225 * 2 * HEAD_DIM * BYTES,
    "pariskv": 16 + 0.1 * 96,
    "pqcache": 2,
}


class Step(NamedTuple):
    """A predicted step, in ms.

    Attributes
    ----------
    floor
        weights, and keys and values attended.
    scan
        what is read to choose.
    device
        floor, scan and launches.
    host
        launches of the parts between graphs, at the pace of Python; 0 where a step is one graph.
    """

    floor: float
    scan: float
    device: float
    host: float

    @property
    def whole(self) -> float:
        """What the graphs take, and what runs between them."""
        return self.device + self.host


def weight_bytes() -> int:
    """Bytes of weights that a step reads: all but the input embedding."""
    attention = 2 * HIDDEN * (HIDDEN + KV_HEADS * HEAD_DIM)
    layer = attention + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
    return BYTES * (LAYERS * layer + VOCABULARY * HIDDEN + HIDDEN)


def predicted(method: str, length: int, launches: dict[str, float], host_part: bool) -> Step:
    """A step of one row; `host_part`: what it selects and attends is in no graph."""
    dense = LAYERS if method == "full" else DENSE
    attended = (dense * length + (LAYERS - dense) * BUDGET) * TOKEN
    scanned = SCANNED.get(method, 0) * length * KV_HEADS * (LAYERS - dense)
    floor, scan = (1e3 * read / BANDWIDTH for read in (weight_bytes() + attended, scanned))
    others = sum(launches[part] for part in ("append", "select", "executor"))
    inside = launches["model"] + (0 if host_part else others)
    device = floor + scan + 1e-3 * IN_A_GRAPH * (LAYERS * inside + launches["once"])
    host = 1e-3 * LAYERS * FROM_PYTHON * others if host_part else 0.0
    return Step(floor, scan, device, host)


def table() -> Iterator[str]:
    """Lines of the table, by preset of the goals."""
    from test_captured import HOST

    counts = json.loads((ROOT / "tests" / "goldens" / "launches.json").read_text())
    yield (
        "| preset | launches a layer | in a graph | 36k: floor | predicted | over it"
        " | 131k: floor | predicted | over it | goal |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    for method, goal in GOALS.items():
        launches = counts[method]
        layer = sum(launches[part] for part in ("model", "append", "select", "executor"))
        captured = "in pieces" if method in HOST else "yes"
        search = " + search" if method in ON_HOST else ""
        cells = []
        for length in LENGTHS:
            step = predicted(method, length, launches, method in HOST)
            ratio = f"{step.whole / step.floor:.2f}"
            cells += [f"{step.floor:.1f}", f"{step.whole:.1f}{search}", ratio]
        line = [f"`{method}`", f"{layer:.0f}", captured, *cells, f"{goal:g}"]
        yield "| " + " | ".join(line) + " |"


def main() -> None:
    """Write the table into the page, and print it."""
    command_line(__doc__).parse_args()
    lines, page = "\n".join(table()), PAGE.read_text()
    if MARK not in page:
        raise SystemExit(f"{PAGE}: no line {MARK}")
    # the lines of the old table, after the mark and an empty line
    PAGE.write_text(re.sub(f"(?<={re.escape(MARK)}\n\n)(.+\n)*", f"{lines}\n", page))
    print(lines)


if __name__ == "__main__":
    main()
