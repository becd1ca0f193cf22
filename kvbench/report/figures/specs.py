"""The figures that are lines over a cost, a length or steps: a table of what each shows.

A row of `SPECS` says which runs a figure is of, what stands on its axes and what a line is;
`curves.py` draws it. A figure that is not here has a file of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from kvbench.config import ConfigError
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.crossing import crossing
from kvbench.report.data.run import CELL, YARDSTICK, Runs
from kvbench.report.data.shared import on_shared_samples
from kvbench.report.data.style import BLACK
from kvbench.report.figures.charts import (
    FRONT,
    Chart,
    Curve,
    Rule,
    thousands,
)
from kvbench.report.figures.panels import (
    MOST_PANELS,
    NOT_COMPARED,
    Panel,
    arms_for,
    of_budget,
)
from kvbench.report.figures.points import (
    QUESTION,
    Points,
    at_cost,
    over_batches,
    over_lengths,
    over_steps,
)
from kvbench.tasks.fidelity import Fidelity

FEW = 3  # samples: means of fewer are not drawn where they stand without an interval
SIZES = ("method.cluster_size", "method.page_size")  # how many things a cluster holds
TIME, OWN_TIME = "tpot_ms_mean", "own_ms"


@dataclass(frozen=True)
class Spec:
    """What a figure shows.

    Attributes
    ----------
    about
        a line of `kvbench report --list`.
    heading
        of the picture; "{intervals}" becomes what they are.
    x, y
        what stands on the axes, a chart for each pair: names that `points.py` knows.
        "nearness" is KL where it is known, else the score; "time or index" a time where there is
        one, else memory with the index.
    nothing
        why no chart can be drawn, where none is left.
    points
        the marks of a run.
    line
        what a line is of: a method, over budgets, or an arm.
    task, probed, scored, timed
        which runs (`arms_for`).
    sparse
        without full attention.
    ranked
        without the panels whose scores rank no method.
    free
        settings in which the arms of a panel may differ.
    prepare
        further choice of runs.
    split
        each panel into several.
    finish
        the charts of a panel, with what else is drawn; none: they are left out.
    least
        samples of an arm.
    values
        different x of a chart, at least; of each line where `joined`.
    front, sized, named
        as of `Chart`.
    rules
        lines across each chart.
    """

    about: str
    heading: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    nothing: str = "no run that it can be drawn of"
    points: Points = at_cost
    line: Literal["method", "arm"] = "method"
    task: str | None = None
    probed: bool = False
    scored: bool = False
    timed: tuple[str, ...] = ()
    sparse: bool = False
    ranked: bool = False
    free: frozenset[str] = NOT_COMPARED
    prepare: Callable[[Runs], Runs] = lambda runs: runs
    split: Callable[[Panel], list[Panel]] = lambda panel: [panel]
    finish: Callable[[list[Chart]], list[Chart]] = lambda charts: charts
    least: int = 1
    values: int = 1
    joined: bool = False
    front: bool = False
    sized: bool = False
    named: bool = False
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    height: float = 2.2
    most: int = MOST_PANELS

    def is_worth(self, panel: Panel) -> bool:
        """Whether a panel has enough samples, and where columns say it different x, to be read."""
        varied = [panel.arms[x].nunique() if x in panel.arms else self.values for x in self.x]
        return bool(panel.arms["n"].min() >= self.least and max(varied) >= self.values)


# -- figures with something more -------------------------------------------------------------------


def _paired(runs: Runs) -> Runs:
    """The arms that ran under several protocols of the question, and differ in nothing else.

    Each on the samples alone that all of them have, under every protocol.
    """
    arms = arms_for(runs, "question", probed=False, scored=True)
    free = (QUESTION, "seed", "shared_prefill", "decode")
    alike = [key for key in runs.differing if key not in free]
    settings = pd.Series(
        list(map(tuple, runs.differing.loc[arms.index, alike].values)), arms.index, dtype=object
    )
    questions = runs.settings.loc[arms.index, QUESTION].map(str)
    paired = arms[questions.groupby(settings).transform("nunique") > 1]
    if not len(paired):
        raise ConfigError(
            f"figure=question: no runs here differ in {QUESTION} alone; -m {QUESTION}=with,after"
            " makes such"
        )
    return on_shared_samples(runs.only(map(runs.__getitem__, paired.index)), ignoring={QUESTION})


def _answered(runs: Runs) -> Runs:
    """The runs whose outputs are their own: under task=fidelity all tokens are given."""
    return runs.only(run for run in runs if run.arm["task"] != Fidelity.name)


def _by_budget(panel: Panel) -> list[Panel]:
    """A panel of the arms of each budget, with those that have none."""
    none = panel.arms[panel.arms["budget"].isna()]
    return [
        panel._replace(
            title=f"{panel.title}, {of_budget(size)}",
            arms=pd.concat([none, group]),
        )
        for size, group in panel.arms.groupby("budget")
    ]


def _with_crossings(charts: list[Chart]) -> list[Chart]:
    """The charts that have full attention and others, with marks where these become faster."""
    crossed = []
    for chart in charts:
        fulls = [curve for curve in chart.curves if curve.method == YARDSTICK]
        coded = [
            curve for curve in fulls if "kv=" in curve.label and NATIVE_WORDS not in curve.label
        ]
        natives = [curve for curve in fulls if curve not in coded] or fulls
        if len(chart.curves) > len(fulls) and natives:
            curves = [_from_where(curve, natives) for curve in chart.curves]
            crossed.append(replace(chart, curves=curves))
    return crossed


def _cut(charts: list[Chart]) -> list[Chart]:
    """Charts up to the last step that half of their curves reach.

    One answer that loops makes no axis longer; the label says where the curves were cut.
    """
    shortened = []
    for chart in charts:
        lasts = sorted(curve.marks[-1].x for curve in chart.curves)
        end = lasts[len(lasts) // 2]
        if lasts[-1] > end:
            label = f"{chart.x.label}; beyond {end:g} fewer than half of the arms go on"
            curves = [
                curve._replace(marks=[mark for mark in curve.marks if mark.x <= end])
                for curve in chart.curves
            ]
            chart = replace(chart, x=chart.x._replace(label=label), curves=curves)
        shortened.append(chart)
    return shortened


def _from_where(curve: Curve, fulls: Sequence[Curve]) -> Curve:
    """A line with the length in its name from which on it is faster than full attention.

    Of several lines of full attention that counts whose name has the most in common with it.
    """
    if curve in fulls:
        return curve
    words = set(curve.label.split(", "))
    full = max(fulls, key=lambda other: len(words & set(other.label.split(", "))))
    times, full_times = ({mark.x: mark.y for mark in line.marks} for line in (curve, full))
    start = crossing(times, full_times)  # type: ignore[arg-type]
    if start is None or start <= min(times):
        return curve
    return curve._replace(label=f"{curve.label}: faster from {thousands(round(start))}")


NATIVE_WORDS = f"kv={NATIVE}"
FULL_LINE = {"color": BLACK, "linestyle": ":", "linewidth": 0.8}
BY_LENGTH = NOT_COMPARED | CELL
PROBED = "of the runs with probes none is sparse and has values of each step"

# -- the table -------------------------------------------------------------------------------------

SPECS = {
    "budget": Spec(
        about="score against budget, and against what was attended",
        heading="score against budget, and against what was attended, with {intervals}",
        x=("budget", "attended_mean"),
        y=("score",),
        scored=True,
        ranked=True,
        front=True,
    ),
    "attended": Spec(
        about="nominal against measured budget: attended / C",
        heading="measured over nominal budget",
        x=("budget_tokens",),
        y=("attended_share",),
        scored=True,
        sparse=True,
        named=True,
        rules=(Rule(1, "", FRONT, is_upright=False),),
        nothing="no run with a budget",
    ),
    "read": Spec(
        about="KL from full attention (or score) against the bytes of KV that a step reads",
        heading="nearness over bytes read, with {intervals}",
        x=("read",),
        y=("nearness",),
        scored=True,
        ranked=True,
        front=True,
        named=True,
        notes=(
            "KV read: attended in all layers, and scanned to choose; thin lines: with all of the"
            " index; dashed: the front",
        ),
        nothing="no run of a sparse method whose audit has attended_bytes_per_step",
    ),
    "frontier": Spec(
        about="KL (or score) against the share of full attention's bytes held, over methods,"
        " budgets and kv",
        heading="where a bit buys more than a token; with {intervals}",
        x=("share",),
        y=("nearness",),
        scored=True,
        ranked=True,
        front=True,
        named=True,
        rules=(Rule(100, "", FULL_LINE),),
        notes=(
            "held: keys and values in both tiers, and the index; dotted: full attention's; dashed:"
            " the front of all methods of a task, the same in each of its charts",
        ),
        nothing="no run with an audit that counts bytes, beside one of method=full on the same"
        " samples",
        most=12,
    ),
    "tradeoff": Spec(
        about="KL (or score) against device memory and time per token (IceCache, Fig. 1)",
        heading="nearness against memory, and against a time or memory with the index, with"
        " {intervals}",
        x=("device_kv_bytes", "time or index"),
        y=("nearness",),
        scored=True,
        ranked=True,
        timed=(TIME, OWN_TIME),
        front=True,
        sized=True,
    ),
    "fidelity": Spec(
        about="KL from full attention against budget, attended entries and memory, from"
        " task=fidelity",
        heading="KL from full attention, with {intervals}: lower is nearer",
        x=("budget", "attended_mean", "device_kv_bytes"),
        y=("kl_mean",),
        task="fidelity",
        sparse=True,
        front=True,
    ),
    "written": Spec(
        about="new tokens of an answer, and how many end in a loop, against the budget",
        heading="what the model writes, with {intervals}; level lines: without a budget",
        x=("budget",),
        y=("new_tokens", "looped"),
        prepare=_answered,
        scored=True,
        least=FEW,
        values=2,
        nothing="no outputs of two budgets or more on the same samples",
    ),
    "question": Spec(
        about="score by when the question is read: with the context, or after that was compressed",
        heading="score by when the question is read, with {intervals}",
        x=(QUESTION,),
        y=("score",),
        scored=True,
        ranked=True,
        prepare=_paired,
        split=_by_budget,
        free=NOT_COMPARED | {QUESTION},
        named=True,
        values=2,
        nothing="no budget with runs under two protocols of the question",
    ),
    "recall": Spec(
        about="recall over decode steps, from runs with probe.every (ParisKV, Fig. 1)",
        heading="recall of the exact top tokens, over decode steps: means over samples",
        x=("step",),
        y=("recall",),
        points=over_steps,
        finish=_cut,
        line="arm",
        probed=True,
        sparse=True,
        nothing=PROBED,
    ),
    "stability": Spec(
        about="stability of selections over decode steps, from runs with probe.every"
        " (LycheeCluster, Fig. 9)",
        heading="how much of a selection was selected before, over decode steps: means over"
        " samples",
        x=("step",),
        y=("jaccard", "seen"),
        points=over_steps,
        finish=_cut,
        line="arm",
        probed=True,
        sparse=True,
        nothing=PROBED,
    ),
    "drift": Spec(
        about="KL from full attention over decode steps, from task=fidelity",
        heading="KL from full attention, over decode steps: means over texts",
        x=("step",),
        y=("kl_mean",),
        points=over_steps,
        line="arm",
        task="fidelity",
        sparse=True,
        least=FEW,
        values=2,
        nothing=f"no run of {FEW} texts or more with the KL of each step",
        height=2.6,
    ),
    "clusters": Spec(
        about="recall against cluster or page size, from runs with probe.every, which none of the"
        " shipped archives has (LycheeCluster, Fig. 10)",
        heading="recall of the exact top tokens against cluster size",
        x=SIZES,
        y=("recall",),
        line="arm",
        probed=True,
        values=2,
        joined=True,
        nothing=f"no two runs with probes differ in {' or '.join(SIZES)} alone; a sweep over one"
        " makes some",
    ),
    "length": Spec(
        about="time per token against context length (IceCache, Fig. 8; LycheeCluster, Fig. 4)",
        heading="time per token against context length; bars: the least and the largest time",
        x=("length",),
        y=(TIME,),
        points=over_lengths,
        line="arm",
        timed=(TIME,),
        free=BY_LENGTH,
        values=2,
        joined=True,
        height=2.6,
        nothing="no task of these runs has prompts of several lengths; task.lengths sets them",
    ),
    "breakeven": Spec(
        about="from which length a method is faster than full attention, from task=latency",
        heading="time per token against context length: from where a method is faster than full"
        " attention; bars: the least and the largest time",
        x=("length",),
        y=(TIME,),
        points=over_lengths,
        line="arm",
        task="latency",
        timed=("floor_ms",),
        free=BY_LENGTH,
        finish=_with_crossings,
        values=2,
        joined=True,
        named=True,
        notes=("a line without a length in its name is faster, or slower, at all lengths",),
        nothing="no method and method=full at several lengths among these runs; task.lengths sets"
        " them",
        height=2.6,
    ),
    "capacity": Spec(
        about="tokens a second against the memory for keys and values, from task=latency with"
        " several batches, or scripts/bench_capacity.py",
        heading="tokens a second against memory for keys and values; up is better",
        x=("device_kv_bytes",),
        y=("tokens_per_s",),
        points=over_batches,
        finish=lambda charts: [
            chart for chart in charts if max(len(curve.marks) for curve in chart.curves) > 1
        ],
        line="arm",
        task="latency",
        timed=("floor_ms",),
        free=BY_LENGTH,
        named=True,
        values=2,
        notes=("numbers: requests at once",),
        nothing="no length with two points: task.batch=[1,16] times several requests at once",
        height=2.6,
    ),
}
