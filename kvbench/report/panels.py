"""What the figures of a report share: which arms stand in which panel and make which line, axes, and a legend."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from kvbench.config import ConfigError
from kvbench.report.frame import Runs
from kvbench.report.style import STYLES, Style, style_of

LINES = ("-", "--", ":", "-.")
MOST_PANELS, MOST_ARMS, MOST_MAPS = 8, 60, 24  # that one picture can show
# Settings in which the arms of a panel may differ; in all others they are alike, or they stand in panels of their own.
# What begins like one of these makes a variant of a method, and is named in the legend.
OF_VARIANTS = ("method.", "attention", "shared_prefill")
NOT_COMPARED = {"method", "budget", "probe.every"}


class Picture(Figure):
    """A figure that a notebook shows as it is, small enough to be kept in it."""

    def _repr_png_(self) -> bytes:
        whole, small = io.BytesIO(), io.BytesIO()
        self.savefig(whole, format="png", dpi=80)
        Image.open(whole).quantize(64).save(small, format="png", optimize=True)
        return small.getvalue()


class Series(NamedTuple):
    """Arms that make one line or one group of marks.

    Attributes:
        style: label, colour, marker and line.
        variant: what sets these arms apart from others of their method, or "".
        arms: lines of `Runs.arms`, by budget.
    """

    style: Style
    variant: str
    arms: pd.DataFrame

    def label(self, budget: Any = None) -> str:
        """The method's name, with a budget and what sets these arms apart."""
        name = f"{self.style.label} {size_text(budget)}".rstrip()
        return f"{name}, {self.variant}" if self.variant else name


def arms_for(
    runs: Runs, name: str, probed: bool, column: str | None = None, task: str | None = None, scored: bool = False
) -> pd.DataFrame:
    """The arms a figure can use; `scored`: those that have a score, and are no timed runs.

    Raises:
        ConfigError: there is none.
    """
    arms = runs.arms
    if len(arms):
        arms = arms[(arms["probe_every"] > 0) == probed]
    if len(arms) and scored:
        arms = arms[arms["floor_ms"].isna()]
    if len(arms) and task:
        arms = arms[arms["task"] == task]
    if len(arms) and column:
        arms = arms[arms[column].notna()]
    if not len(arms):
        kind = " with probes (probe.every=1 makes some)" if probed else " with timings" if column else ""
        raise ConfigError(
            f"figure={name}: no run{f' of task={task}' if task else ''}{kind} among {len(runs.arms)} runs"
        )
    return arms


def panels_of(
    name: str, runs: Runs, arms: pd.DataFrame, free: Collection[str] = frozenset(NOT_COMPARED)
) -> list[tuple[str, pd.DataFrame]]:
    """The arms that can be compared, of one task, model and protocol, alike in all but what is free to differ, and a
    title that says which.

    Raises:
        ConfigError: more than the figure of this name can show.
    """
    settings = runs.settings.loc[arms.index].map(str)
    common = settings[[key for key in settings if key not in free and not key.startswith(OF_VARIANTS)]]
    panels = []
    for _, own in arms.groupby([common[key] for key in common], sort=False):
        task, model = own[["task", "model"]].iloc[0]
        others = common[(common["task"] == task) & (common["model"] == model)]
        varied = [key for key in others if others[key].nunique() > 1]
        apart = [f"{key.rpartition('.')[2]}={_shortened(common.at[own.index[0], key])}" for key in varied]
        panels.append((", ".join([task, model, *apart]), own))
    refuse_crowd(name, len(panels), "tasks, models and protocols", MOST_PANELS)
    refuse_crowd(name, max((len(own) for _, own in panels), default=0), "arms in a panel", MOST_ARMS)
    return panels


def _shortened(value: str) -> str:
    """A setting's value, cut where it is a long list."""
    return value if len(value) <= 32 else f"{value[:29]}..."


def refuse_crowd(name: str, count: int, what: str, most: int) -> None:
    """Refuse more than a picture can show.

    Raises:
        ConfigError: names the figure, and says how many there are of what.
    """
    if count > most:
        raise ConfigError(f"figure={name}: {count} {what}, and a picture shows {most} at most; --where chooses some")


def series_of(runs: Runs, arms: pd.DataFrame, without: str = "") -> Iterator[Series]:
    """The arms of each method, apart where they differ in more than the budget; in the order of `STYLES`.

    Args:
        without: a setting that tells no series from another.
    """
    known = {method: index for index, method in enumerate(STYLES)}
    for method in sorted(arms["method"].unique(), key=lambda name: (known.get(name, len(known)), name)):
        own = arms[arms["method"] == method]
        settings = runs.settings.loc[own.index].map(str)
        varied = [
            key for key in settings if key.startswith(OF_VARIANTS) and key != without and settings[key].nunique() > 1
        ]
        short = {key: key.rpartition(".")[2] for key in varied}
        variants = {
            run: ", ".join(f"{short[key]}={_shortened(settings.at[run, key])}" for key in varied) for run in own.index
        }
        style = style_of(method)
        groups = dict(list(own.groupby(pd.Series(variants))))
        for index, variant in enumerate(sorted(groups, key=lambda words: (len(words), words))):
            line = _next_line(style.line, index)
            by_budget = groups[variant].sort_values("budget", key=lambda sizes: sizes.astype(float))
            yield Series(replace(style, line=line), variant, by_budget)


def curves_of(runs: Runs, arms: pd.DataFrame) -> Iterator[tuple[str, Style, Any]]:
    """Each arm with its label and style; budgets of a method differ in their lines."""
    for one in series_of(runs, arms):
        for index, arm in enumerate(rows_of(one.arms)):
            yield one.label(arm.budget), replace(one.style, line=_next_line(one.style.line, index)), arm


def _next_line(line: str, steps: int) -> str:
    """The line style that comes so many steps after another."""
    return LINES[(LINES.index(line) + steps) % len(LINES)]


def rows_of(arms: pd.DataFrame) -> list[Any]:
    """The arms one by one, with an attribute and a key for each column."""
    return [line for _, line in arms.iterrows()]


def grid(rows: int, columns: int, title: str, size: tuple[float, float] = (5.5, 3.6)) -> tuple[Picture, Any]:
    """A figure and its axes [rows, columns]."""
    figure = Picture(figsize=(max(7.0, size[0] * columns), 1.2 + size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(title)
    return figure, axes


def line_look(style: Style) -> dict[str, Any]:
    """Matplotlib's words for a line with outlined markers in this style."""
    look = {"color": style.colour, "marker": style.marker, "linestyle": style.line, "linewidth": 1.6}
    return {**look, "markersize": 6, "markerfacecolor": "none"}


def draw_level(axis: Any, one: Series) -> None:
    """Arms without a budget, full attention: a level with the band of its standard error."""
    for arm in rows_of(one.arms):
        axis.axhline(arm["score"], color=one.style.colour, linestyle="--", linewidth=1.2, label=one.label())
        error = _number(arm["stderr"])
        axis.axhspan(arm["score"] - error, arm["score"] + error, color=one.style.colour, alpha=0.1, linewidth=0)


def mark_powers(axis: Any, ticks: Iterable[float]) -> None:
    """A logarithmic x axis that is marked at these values, as far as there is room."""
    ticks = sorted(set(ticks))
    room = (ticks[-1] / ticks[0]) ** 0.1
    kept = [tick for index, tick in enumerate(ticks) if not index or tick >= room * ticks[index - 1]]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(kept))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: thousands(value)))
    axis.grid(alpha=0.3)


def finished(figure: Figure, axes: Any, arms: Sequence[pd.DataFrame]) -> Figure:
    """One legend for all panels, and with it what a reader must know of the runs."""
    caveats = _caveats(pd.concat(arms))
    named = {name: handle for axis in axes.flat for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if not named:
        figure.supxlabel(caveats, fontsize=8)
        return figure
    columns = max(1, min(len(named), int(figure.get_figwidth() * 11 / (max(map(len, named)) + 6))))
    figure.set_figheight(figure.get_figheight() + 0.24 * max(0, math.ceil(len(named) / columns) - 3))
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(named.values(), named.keys(), title=caveats, title_fontsize=8, handlelength=3, **look)
    return figure


def _caveats(arms: pd.DataFrame) -> str:
    """What a reader must know of the runs in a picture."""
    found = []
    if (arms["weights"] == "random").any():
        found.append("random weights: scores mean nothing")
    if arms["transfer"].map(lambda transfer: "simulated" in str(transfer)).any():
        found.append("transfers between host and device simulated in memory")
    if arms["transfer"].map(lambda transfer: "in place" in str(transfer)).any():
        found.append("transfers between host and device counted, in no time")
    if arms["failed"].sum():
        found.append(f"{int(arms['failed'].sum())} failed samples, which score 0")
    if not arms["finished"].all():
        found.append("with unfinished runs")
    found.append("; ".join(sorted({str(name) for name in arms["device_name"].dropna()})))
    return " | ".join(filter(None, found))


def size_text(budget: Any) -> str:
    """A budget as text: tokens, or a share of the prompt; "" for none."""
    if no_budget(budget):
        return ""
    return f"{100 * budget:g} %" if isinstance(budget, float) else str(budget)


def no_budget(budget: Any) -> bool:
    """Whether a budget in a frame is there for want of one: None or NaN."""
    return budget is None or (isinstance(budget, float) and math.isnan(budget))


def _number(value: Any) -> float:
    """A number, 0 for what was not measured."""
    return 0.0 if value is None or pd.isna(value) else float(value)


def thousands(value: float) -> str:
    """10000 -> "10k", 4096 -> "4096", 0.1 -> "0.1"."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 1000 == 0 else f"{value:g}"
