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
from kvbench.runs.quantities import QUANTITIES, measured
from kvbench.runs.table import add_numbers, wide_console, with_error

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
SET_BY_DEMO = ("method", "budget", "task", "task.lengths", "probe.every")
LENGTHS = (2048, 4096)
# Two of RULER's eight needle tasks: an arm that does not find its needle writes on to the last of 128 tokens.
NEEDLES = "task.subsets=[niah_single_2,niah_multikey_1]"
TASKS = {"passkey": ["task.positions=20"], "niah": [NEEDLES, "task.samples=20"]}
# Recall is measured apart, on fewer samples: probes cost time.
PROBED = {"passkey": ["task.positions=2"], "niah": [NEEDLES, "task.samples=1"]}
# What an arm costs and finds, under headings that leave room for four scores.
COSTS = {
    "share": QUANTITIES["attended_share"]._replace(label="attended/C"),
    "kv_bytes": QUANTITIES["device_kv_bytes"]._replace(label="KV MiB"),
    "moved_bytes": QUANTITIES["moved_bytes_per_step"]._replace(label="moved KiB/step"),
    "step_ms": QUANTITIES["tpot_ms_mean"]._replace(label="ms/token", digits=1),
    "recall": QUANTITIES["recall"],
}


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

    @property
    def share(self) -> float | None:
        """Of its budget that the method attended; None for full attention."""
        return None if self.budget is None else self.attended / self.budget


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code, as `python -m kvbench` does."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    console = wide_console()
    try:
        refuse_set(words)
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


def refuse_set(words: Sequence[str]) -> None:
    """Refuse a setting that would make the table's own columns wrong.

    Raises:
        ConfigError: names it.
    """
    for word in words:
        if word.partition("=")[0] in SET_BY_DEMO:
            raise ConfigError(f"{word}: the demo sets {', '.join(SET_BY_DEMO)} itself; python -m kvbench takes them")


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
    return [row(index, found) for index in range(len(ARMS))]


def row(index: int, found: dict[tuple[str, bool], list[dict[str, Any]]]) -> Row:
    """The arm of that index in `ARMS`, from the summaries of its runs."""
    method, budget = ARMS[index]
    timed = [found[task, False][index] for task in TASKS]
    cells: dict[str, tuple[float, float | None]] = {}
    for task in TASKS:
        for length in LENGTHS:
            groups = found[task, False][index]["groups"].items()
            own = [group for name, group in groups if name.rpartition("/")[2] == str(length)]
            errors = [group["stderr"] or 0.0 for group in own]
            score = sum(group["score"] for group in own) / len(own)
            cells[f"{task} {length}"] = (score, math.hypot(*errors) / len(own))

    def mean(name: str) -> float:
        values = [(measured(summary).get(name) or 0.0, summary["n"]) for summary in timed]
        return sum(value * count for value, count in values) / sum(count for _, count in values)

    recalls = [found[task, True][index].get("probe", {}).get("recall") for task in PROBED]
    known = [value for value in recalls if value is not None]
    return Row(
        method,
        budget,
        cells,
        score=sum(score for score, _ in cells.values()) / len(cells),
        attended=mean("attended_mean"),
        kv_bytes=mean("device_kv_bytes"),
        moved_bytes=mean("moved_bytes_per_step"),
        step_ms=mean("tpot_ms_mean"),
        recall=sum(known) / len(known) if known and budget is not None else None,
    )


def table(rows: Sequence[Row]) -> Table:
    """All arms, a line each."""
    drawn = Table(title="score ± standard error on each task and length, and what it cost", title_justify="left")
    drawn.caption = "moved: from host to device, on a CPU from memory to memory"
    drawn.add_column("method")
    add_numbers(drawn, ["C", *rows[0].cells, *(cost.heading for cost in COSTS.values())])
    for one in rows:
        scores = [with_error(score, error or 0, digits=0) for score, error in one.cells.values()]
        costs = [cost.number(getattr(one, name)) for name, cost in COSTS.items()]
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
