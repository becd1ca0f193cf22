"""The demo: methods win and lose on the embedded model, in minutes and without a GPU or a network.

    python -m kvbench.demo                             results in results/, table.json and tradeoff.png in results/demo/
    python -m kvbench.demo threads=1 results_dir=out   settings for every arm, as `python -m kvbench` takes them

Its runs are runs as any other: a second start goes on where the first was stopped, and reports read them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.runs.folder import ResultsError

ARMS = (
    ("full", None),
    ("topk", 64),
    ("icecache", 64),
    ("icecache", 128),
    ("quest", 64),
    ("quest", 128),
    ("snapkv", 64),
    ("streaming_llm", 128),
)
OWN = ("method", "budget", "task", "task.lengths", "probe.every")  # what the demo itself sets
LENGTHS = (2048, 4096)
# Two of RULER's eight needle tasks: an arm that does not find its needle writes on to the last of 128 tokens.
NEEDLES = "task.subsets=[niah_single_2,niah_multikey_1]"
TASKS = {"passkey": ["task.positions=20"], "niah": [NEEDLES, "task.samples=20"]}
# Recall is measured apart, on fewer samples: probes cost time.
PROBED = {"passkey": ["task.positions=2"], "niah": [NEEDLES, "task.samples=1"]}


class Row(NamedTuple):
    """What the demo found for a method and a budget.

    Attributes:
        cells: score and standard error, 0-100, by "task length".
        score: the mean of the cells.
        attended: mean attended entries of a KV head in a layer.
        kv_bytes: on the device.
        moved_bytes: from host to device in a step.
        step_ms: a decode step.
        recall: of the exact top tokens, 0..1; None for full attention.
    """

    method: str
    budget: int | None
    cells: dict[str, tuple[float, float | None]]
    score: float
    attended: float
    kv_bytes: float
    moved_bytes: float
    step_ms: float
    recall: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code, as `python -m kvbench` does."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    try:
        refuse_own(words)
        rows = demo(words, console)
        folder = Path(config(words, "passkey", *ARMS[0])["results_dir"], "demo")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.json").write_text(json.dumps([one._asdict() for one in rows], indent=1) + "\n")
        picture = folder / "tradeoff.png"
        draw(rows, picture)
    except (ConfigError, ResultsError) as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvbench: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    console.print(table(rows))
    console.print(f"picture: {picture}", soft_wrap=True)
    return 0


def refuse_own(words: Sequence[str]) -> None:
    """Refuse a setting that would make the table's own columns wrong.

    Raises:
        ConfigError: names it.
    """
    for word in words:
        if word.partition("=")[0] in OWN:
            raise ConfigError(f"{word}: the demo sets {', '.join(OWN)} itself; python -m kvbench takes them")


def config(words: Sequence[str], task: str, method: str, budget: int | None, *more: str) -> DictConfig:
    """The config of an arm; `words` have the last word."""
    size = "null" if budget is None else str(budget)
    return composed(
        f"task={task}", f"method={method}", f"budget={size}", f"task.lengths={list(LENGTHS)}", *more, *words
    )


def demo(words: Sequence[str], console: Console) -> list[Row]:
    """Run all arms on both tasks, and again with probes on a few samples."""
    jobs = {
        (task, probed): [config(words, task, *arm, *sizes, f"probe.every={every}") for arm in ARMS]
        for tasks, probed, every in ((TASKS, False, 0), (PROBED, True, 2))
        for task, sizes in tasks.items()
    }
    from kvbench.runs.shared import run_shared

    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for (task, probed), configs in jobs.items():
        what = "recall of the exact top tokens" if probed else f"{len(ARMS)} arms"
        console.print(f"{task} at {' and '.join(map(str, LENGTHS))} tokens: {what}")
        found[task, probed] = run_shared(configs, console)
    return [row(place, found) for place in range(len(ARMS))]


def row(place: int, found: dict[tuple[str, bool], list[dict[str, Any]]]) -> Row:
    """The arm at a place of `ARMS`, from the summaries of its runs."""
    method, budget = ARMS[place]
    timed = [found[task, False][place] for task in TASKS]
    cells: dict[str, tuple[float, float | None]] = {}
    for task in TASKS:
        for length in LENGTHS:
            groups = found[task, False][place]["groups"].items()
            own = [group for name, group in groups if name.rpartition("/")[2] == str(length)]
            errors = [group["stderr"] or 0.0 for group in own]
            score = sum(group["score"] for group in own) / len(own)
            cells[f"{task} {length}"] = (score, math.hypot(*errors) / len(own))

    def mean(part: str, name: str) -> float:
        values = [(summary[part].get(name) or 0.0, summary["n"]) for summary in timed]
        return sum(value * count for value, count in values) / sum(count for _, count in values)

    recalls = [found[task, True][place].get("probe", {}).get("recall") for task in PROBED]
    known = [value for value in recalls if value is not None]
    return Row(
        method,
        budget,
        cells,
        score=sum(score for score, _ in cells.values()) / len(cells),
        attended=mean("audit", "attended_mean"),
        kv_bytes=mean("audit", "device_kv_bytes"),
        moved_bytes=mean("audit", "moved_bytes_per_step"),
        step_ms=mean("latency", "tpot_ms_mean"),
        recall=sum(known) / len(known) if known and budget is not None else None,
    )


def table(rows: Sequence[Row]) -> Table:
    """All arms, a line each."""
    cells = list(rows[0].cells)
    drawn = Table(title="score ± standard error on each task and length, and what it cost", title_justify="left")
    drawn.caption = "moved: from host to device, on a CPU from memory to memory"
    drawn.add_column("method")
    for name in ("C", *cells, "attended/C", "KV MiB", "moved KiB/step", "ms/token", "recall"):
        drawn.add_column(name, justify="right")
    for one in rows:
        scores = [f"{score:.0f} ± {error or 0:.0f}" for score, error in one.cells.values()]
        share = "-" if one.budget is None else f"{one.attended / one.budget:.2f}"
        recall = "-" if one.recall is None else f"{one.recall:.2f}"
        costs = [share, f"{one.kv_bytes / 2**20:.2f}", f"{one.moved_bytes / 2**10:.1f}", f"{one.step_ms:.1f}", recall]
        drawn.add_row(one.method, "-" if one.budget is None else str(one.budget), *scores, *costs)
    return drawn


def draw(rows: Sequence[Row], path: Path) -> None:
    """The trade-off as a picture: mean score against device memory, and against the time per token."""
    import pandas
    from matplotlib.figure import Figure

    from kvbench.report.figures import draw_tradeoff

    renamed = {"kv_bytes": "device_kv_bytes", "step_ms": "tpot_ms_mean"}
    points = pandas.DataFrame(rows, dtype=object).rename(columns=renamed).assign(label=[one.method for one in rows])
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    draw_tradeoff(axes, points)
    axes[0].set_ylabel("score, mean over tasks and lengths")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    lengths = " and ".join(map(str, LENGTHS))
    tasks = " and ".join(TASKS)
    figure.suptitle(f"{tasks} at {lengths} tokens on the embedded model; numbers are budgets; up and left is better")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
