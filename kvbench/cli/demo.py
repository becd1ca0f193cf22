"""The demo: how near to full attention methods stay on a real model, and what they find, in minutes
and without a GPU.

    kvbench demo                             table.json and tradeoff.png go to results/demo/
    kvbench demo model=tiny results_dir=out  settings for every arm, as of a run

Its model is SmolLM2-135M, which is fetched at the first start; where that cannot be had, the small
model of the package takes its place, and a line says so. Its runs are runs as any other: a second
start goes on where the first was stopped, and reports read them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from rich.table import Table

from kvbench.backends.run_config import RunConfig
from kvbench.cli.compose import composed
from kvbench.cli.fetch import DEFAULT as MODEL
from kvbench.cli.fetch import fetch
from kvbench.cli.threads import wait_briefly
from kvbench.cli.words import refuse_twice
from kvbench.config import ConfigError
from kvbench.report.data.stats import COVERAGE, mean_score
from kvbench.runs.folder import ResultsError, writing
from kvbench.runs.quantities import METHOD_TIME, QUANTITIES, recorded
from kvbench.runs.table import add_numbers, wide_console, with_error
from kvbench.runs.terminal import Console

METHODS = ("full", "topk", "pariskv", "icecache", "lychee", "snapkv", "streaming_llm", "quest")
BUDGET = 256
LENGTH = 2048
SMALL_MODEL = "tiny"
SET_BY_DEMO = ("method", "budget", "task", "task.lengths", "probe.every")
# A stretch of each of four addresses; two of RULER's eight needle tasks, whose answers take 10
# tokens: an arm that has not answered by 32 would often go on to 128.
FIDELITY, NEEDLES = "fidelity", "niah"
TASKS = {
    FIDELITY: ["task.samples=4", "task.steps=16"],
    NEEDLES: [
        "task.subsets=[niah_single_2,niah_multikey_1]",
        "task.samples=2",
        "task.max_new_tokens=32",
    ],
}
# What an arm costs on running text, under headings that leave room for the rest.
COSTS = {
    "attended_share": QUANTITIES["attended_share"]._replace(label="attended/C"),
    "device_kv_bytes": QUANTITIES["device_kv_bytes"]._replace(label="KV MiB"),
    "moved_bytes_per_step": QUANTITIES["moved_bytes_per_step"]._replace(label="moved KiB/step"),
    "own_ms": QUANTITIES["own_ms"]._replace(label="own ms/token", digits=1),
}
KL = QUANTITIES["kl_mean"]


class DemoRow(NamedTuple):
    """What the demo found for a method.

    Attributes
    ----------
    method
        its name.
    budget
        tokens; None for full attention.
    kl_mean, kl_stderr
        KL divergence of next-token distributions from full attention's in nats, and its standard
        error over the stretches of text.
    agreement
        0-100: steps with full attention's top token, with its standard error over texts.
    needles
        0-100: needles found, with the ends of Wilson's interval.
    attended_share
        attended entries of a KV head over the budget; None for full attention.
    device_kv_bytes
        on the device.
    moved_bytes_per_step
        from host to device.
    own_ms
        of a decode step attention, search and transfers; the model's layers are computed for all
        arms at once.
    disturbed
        other processes took cores meanwhile.
    texts, prompts
        of how many the first numbers are, and the needles.
    """

    method: str
    budget: int | None
    kl_mean: float
    kl_stderr: float | None
    agreement: tuple[float, float | None]
    needles: tuple[float, float, float]
    attended_share: float | None
    device_kv_bytes: float
    moved_bytes_per_step: float
    own_ms: float
    disturbed: bool
    texts: int
    prompts: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code, as `python -m kvbench` does."""
    parser = argparse.ArgumentParser(
        "kvbench demo", description="Eight methods on a real model, a table and a picture."
    )
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="settings for every arm, as for a run"
    )
    words = parser.parse_args(arguments).words
    console = wide_console()
    wait_briefly()
    try:
        refuse_set(words)
        for task in TASKS:
            # what is wrong with the words shows before anything is fetched
            config(words, task, METHODS[0])
        words = [*model_words(words), *words]
        configs = {task: [config(words, task, method) for method in METHODS] for task in TASKS}
        rows = demo(configs, console)
        folder = Path(configs[FIDELITY][0].results_dir, "demo")
        picture = folder / "tradeoff.png"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "table.json").write_text(
                json.dumps([arm._asdict() for arm in rows], indent=1) + "\n"
            )
            draw(rows, model_name(configs), picture)
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
    """Refuse a setting that would make the table's own columns wrong, and one that is given twice.

    Raises
    ------
    ConfigError
        names it.
    """
    refuse_twice(words)
    for word in words:
        if word.partition("=")[0] in SET_BY_DEMO:
            raise ConfigError(
                f"{word}: the demo sets {', '.join(SET_BY_DEMO)} itself; python -m kvbench takes"
                " them"
            )


def model_words(words: Sequence[str]) -> list[str]:
    """The words that choose the model where no word of the user's does: the real one, fetched, or
    the small one.
    """
    if any(word.partition("=")[0] in ("model", "model.path") for word in words):
        return []
    try:
        fetch(MODEL)
    except ConfigError as error:
        print(f"kvbench: {error}; the small model takes its place", file=sys.stderr)
        return [f"model={SMALL_MODEL}"]
    return [f"model={MODEL}"]


def config(words: Sequence[str], task: str, method: str) -> RunConfig:
    """The config of an arm; `words` have the last word."""
    size = "null" if method == "full" else str(BUDGET)
    sizes = [f"task.lengths=[{LENGTH}]", *TASKS[task]]
    return composed(f"task={task}", f"method={method}", f"budget={size}", *sizes, *words)


def demo(configs: dict[str, list[RunConfig]], console: Console) -> list[DemoRow]:
    """Run all arms on both tasks."""
    from kvbench.runs.sweep import run_shared

    summaries = {}
    for task, arms in configs.items():
        console.print(f"{task} at {LENGTH} tokens, {len(arms)} arms, {model_name(configs)}")
        summaries[task] = run_shared(arms, console)
    return [row(*arm) for arm in zip(METHODS, summaries[FIDELITY], summaries[NEEDLES], strict=True)]


def model_name(configs: dict[str, list[RunConfig]]) -> str:
    """What the model of all arms is called."""
    return configs[FIDELITY][0].model.source.name


def row(method: str, fidelity: dict[str, Any], needles: dict[str, Any]) -> DemoRow:
    """The line of a method, from the summaries of its two runs."""
    # a single group has no mean of groups
    numbers, macro = recorded(fidelity), needles.get("macro") or needles
    budget = None if method == "full" else BUDGET
    return DemoRow(
        method,
        budget,
        kl_mean=numbers[KL.name],
        kl_stderr=numbers.get("kl_stderr"),
        agreement=(fidelity["score"], fidelity["stderr"]),
        needles=needle_share(macro["score"], needles["n"]),
        attended_share=numbers["attended_share"] if budget else None,
        device_kv_bytes=numbers["device_kv_bytes"],
        moved_bytes_per_step=numbers["moved_bytes_per_step"],
        own_ms=numbers["own_ms"],
        disturbed=numbers.get("disturbed", False),
        texts=fidelity["n"],
        prompts=needles["n"],
    )


def needle_share(score: float, n: int) -> tuple[float, float, float]:
    """The share of n needles that was found, 0-100, with Wilson's interval: 4 of 4 are no
    certainty.
    """
    hits = round(score * n / 100)
    interval = mean_score([numpy.repeat([100.0, 0.0], [hits, n - hits])])
    return interval[:3]  # type: ignore[return-value]  # Wilson's interval is always there


def table(rows: Sequence[DemoRow]) -> Table:
    """All arms, a line each."""
    drawn = Table(
        title="how near to full attention's next-token distribution, and what it cost",
        title_justify="left",
    )
    full, disturbed = rows[0], any(arm.disturbed for arm in rows)
    drawn.caption, drawn.caption_justify = (
        (
            f"±: standard error over {full.texts} texts, full attention's own 0 and 100 by"
            f" construction; []: {COVERAGE} % interval over {full.prompts} needles,"
            f" Wilson's\nmoved: from host to device, on a CPU counted alone\n{METHOD_TIME}, which"
            f" serves all arms at once{'; taken beside other work' * disturbed}"
        ),
        "left",
    )
    drawn.add_column("method")
    add_numbers(
        drawn,
        [
            "C",
            "KL, nats ±",
            "same token % ±",
            "needles % []",
            *(cost.heading for cost in COSTS.values()),
        ],
    )
    for arm in rows:
        is_full = arm.budget is None
        near = KL.number(arm.kl_mean) + (
            "" if is_full or arm.kl_stderr is None else f" ± {KL.number(arm.kl_stderr)}"
        )
        agreement = with_error(arm.agreement[0], None if is_full else arm.agreement[1], digits=0)
        scores = [agreement, "{:.0f} [{:.0f}, {:.0f}]".format(*arm.needles)]
        costs = [cost.number(getattr(arm, name)) for name, cost in COSTS.items()]
        drawn.add_row(
            arm.method, "-" if arm.budget is None else str(arm.budget), near, *scores, *costs
        )
    return drawn


def draw(rows: Sequence[DemoRow], model: str, path: Path) -> None:
    """The trade-off as a picture: KL against device memory, and against a method's own time of a
    token.
    """
    from kvbench.report.data.style import style_of
    from kvbench.report.figures.charts import (
        Chart,
        Curve,
        Mark,
        Scale,
        draw_charts,
        printed,
        with_legend,
    )

    charts = []
    for cost in (QUANTITIES["device_kv_bytes"], QUANTITIES["own_ms"]):
        costs = {arm: getattr(arm, cost.name) for arm in rows}
        marks = {
            arm.method: Mark(cost.scaled(value), arm.kl_mean)
            for arm, value in costs.items()
            if value is not None
        }
        curves = [Curve(name, style_of(name), [mark]) for name, mark in marks.items()]
        x, y = Scale(cost.axis, "log"), Scale(KL.axis, "log")
        charts.append(Chart("", x, y, curves, rivals=curves, better="less"))
    title = f"{model}, text of {LENGTH} tokens, C = {BUDGET}: down and left is better"
    with printed("page"):
        figure, axes = draw_charts(charts, title, 2.6)
        with_legend(figure, axes, [METHOD_TIME]).savefig(path, dpi=200)
