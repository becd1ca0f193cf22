"""What the figures of a report share: which arms stand in which panel and make which line, axes, and a legend."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from kvbench.config import ConfigError
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.run import YARDSTICK, Run, Runs, missing
from kvbench.report.data.select import fewest_keys, last_word
from kvbench.report.data.stats import Estimate
from kvbench.report.data.style import STYLES, Style, style_of
from kvbench.runs.quantities import TOGETHER

LINES = ("-", "--", ":", "-.")
MOST_PANELS, MOST_ARMS, MOST_MAPS = 8, 80, 24  # that one picture can show
LETTERS = 15  # to an inch, of the words below a picture
# Settings in which the arms of a panel may differ; in all others they are alike, or they stand in panels of their own.
# What begins like one of these makes a variant of a method, and is named in the legend.
OF_VARIANTS = ("method.", "attention", "kv", "shared_prefill", "decode")
NOT_COMPARED = {"method", "budget", "probe.every", "seed"}


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
        variant: the settings in which these arms differ from others of their method, or "".
        arms: lines of `Runs.arms`, by budget.
    """

    style: Style
    variant: str
    arms: pd.DataFrame

    def label(self, budget: Any = None) -> str:
        """The method's name, with a budget and the variant."""
        name = f"{self.style.label} {size_text(budget)}".rstrip()
        return f"{name}, {self.variant}" if self.variant else name


def arms_for(
    runs: Runs, name: str, probed: bool, columns: Sequence[str] = (), task: str | None = None, scored: bool = False
) -> pd.DataFrame:
    """The arms a figure can use.

    Args:
        probed: those with probes; else those without. No probe changes the numbers of task=fidelity: of its arms that
            ran with probes only, these count among those without.
        columns: of which one has a value, or more; those of times.
        task: the one that they are of.
        scored: those that have a score, and are no timed runs.

    Raises:
        ConfigError: there is none.
    """
    arms = runs.arms
    if len(arms):
        arms = arms[(arms["probe_every"] > 0) == probed] if probed else arms[_without_probes(runs, arms)]
    if len(arms) and scored:
        arms = arms[arms["floor_ms"].isna()]
    if len(arms) and task:
        arms = arms[arms["task"] == task]
    if len(arms) and columns:
        arms = arms[arms[[*columns]].notna().any(axis=1)]
    if not len(arms):
        kind = " with probes (probe.every=1 makes some)" if probed else " with timings" if columns else ""
        together = sum(run.is_together for run in runs) if columns else 0
        without = f", of which {together} decoded together: sweep.shared_decode=false takes times" if together else ""
        raise ConfigError(
            f"figure={name}: no run{f' of task={task}' if task else ''}{kind} among {len(runs.arms)} runs{without}"
        )
    return arms


def untimed(runs: Runs) -> list[str]:
    """What stands below a picture of times of whole tokens, which some of these runs have not."""
    count = sum(run.is_together for run in runs)
    return [f"{count} runs that decoded together have no time of a token and are not here"] if count else []


def _without_probes(runs: Runs, arms: pd.DataFrame) -> pd.Series:
    """Whether an arm ran without probes, or is of `task=fidelity` and did not run without them as well."""
    bare = arms["probe_every"] == 0
    others = runs.settings.loc[arms.index].drop(columns="probe.every", errors="ignore").map(str).apply(tuple, axis=1)
    return bare | ((arms["task"] == "fidelity") & ~others.isin(set(others[bare])))


def panels_of(
    name: str,
    runs: Runs,
    arms: pd.DataFrame,
    free: Collection[str] = frozenset(NOT_COMPARED),
    times: bool = False,
) -> list[tuple[str, pd.DataFrame]]:
    """Panels of arms that can be compared, each with a title: of one task, model and protocol, alike in all settings
    that are not free to differ.

    Args:
        free: those keys.
        times: are drawn, so only arms of one machine can be compared.

    Raises:
        ConfigError: more than the figure of this name can show.
    """
    settings = runs.settings.loc[arms.index].map(str)
    common = settings[[key for key in settings if key not in free and not key.startswith(OF_VARIANTS)]]
    if times:
        common = common.assign(machine=arms["device_name"].map(str))
    panels = []
    for _, own in arms.groupby([common[key] for key in common], sort=False):
        task, model = own[["task", "model"]].iloc[0]
        others = common[(common["task"] == task) & (common["model"] == model)]
        varied = fewest_keys(others.drop_duplicates().to_dict("records"))
        first = common.loc[own.index[0]]
        apart = [first[key] if key == "machine" else f"{last_word(key)}={_shortened(first[key])}" for key in varied]
        panels.append((", ".join([task, model, *apart]), own))
    refuse_crowd(name, len(panels), "tasks, models and protocols", MOST_PANELS)
    refuse_crowd(name, max((len(own) for _, own in panels), default=0), "arms in a panel", MOST_ARMS)
    return panels


def fidelity_panels(runs: Runs, name: str) -> list[tuple[str, pd.DataFrame]]:
    """The arms of `task=fidelity` that are not full attention itself, as `panels_of` has them.

    Raises:
        ConfigError: there is none.
    """
    arms = arms_for(runs, name, probed=False, task="fidelity")
    coded = runs.settings.loc[arms.index, "kv"] != str(NATIVE)
    others = arms[(arms["method"] != YARDSTICK) | coded]
    if not len(others):
        raise ConfigError(f"figure={name}: of the runs of task=fidelity none is sparse")
    return panels_of(name, runs, others)


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
        without: a setting in which arms of one series may differ.
    """
    known = {method: index for index, method in enumerate(STYLES)}
    of_variants = [key for key in runs.settings if key.startswith(OF_VARIANTS)]
    for method in sorted(arms["method"].unique(), key=lambda name: (known.get(name, len(known)), name)):
        own = arms[arms["method"] == method]
        settings = runs.settings.loc[own.index, [key for key in of_variants if key != without]].map(str)
        alone = settings[own["decode"] != TOGETHER]  # all others began from a shared prefill
        varied = [key for key in settings if (alone if key == "shared_prefill" else settings)[key].nunique() > 1]
        variants = {
            run: ", ".join(f"{last_word(key)}={_shortened(settings.at[run, key])}" for key in varied)
            for run in own.index
        }
        style = style_of(method)
        groups = dict(list(own.groupby(pd.Series(variants))))
        for index, variant in enumerate(sorted(groups, key=lambda words: (len(words), words))):
            line = _next_line(style.line, index)
            by_budget = groups[variant].sort_values("budget", key=lambda sizes: sizes.astype(float))
            yield Series(replace(style, line=line), variant, by_budget)


def curves_of(runs: Runs, arms: pd.DataFrame) -> Iterator[tuple[str, Style, Run]]:
    """Each run with its label and style; budgets of a method differ in their lines."""
    for one in series_of(runs, arms):
        for index, arm in enumerate(rows_of(one.arms)):
            yield one.label(arm.budget), replace(one.style, line=_next_line(one.style.line, index)), runs[arm.name]


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


def tiled(count: int, columns: int, title: str, size: tuple[float, float] = (5.5, 3.6)) -> tuple[Picture, Any]:
    """A figure and its axes [rows, columns], so many of them, row by row; those beyond are blank."""
    figure, axes = grid(math.ceil(count / columns), columns, title, size)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes


def line_look(style: Style) -> dict[str, Any]:
    """Matplotlib's words for a line with outlined markers in this style."""
    look = {"color": style.colour, "marker": style.marker, "linestyle": style.line, "linewidth": 1.6}
    return {**look, "markersize": 6, "markerfacecolor": "none"}


def draw_intervals(axis: Any, one: Series, places: Iterable[float], found: Sequence[Estimate]) -> None:
    """A line over these places, with the interval of each estimate as a bar; what has no place is left out."""
    drawn = sorted((place, value) for place, value in zip(places, found, strict=True) if not math.isnan(place))
    x, y = [place for place, _ in drawn], [value.mean for _, value in drawn]
    below = [0.0 if value.low is None else max(0.0, value.mean - value.low) for _, value in drawn]
    above = [0.0 if value.high is None else max(0.0, value.high - value.mean) for _, value in drawn]
    axis.errorbar(x, y, [below, above], label=one.label(), **line_look(one.style))


def draw_by_budget(axis: Any, one: Series, places: pd.Series, found: Sequence[Estimate]) -> None:
    """As `draw_intervals`; arms without a budget, full attention, are a level with the band of its interval."""
    if one.arms["budget"].notna().any():
        draw_intervals(axis, one, places.astype(float), found)
        return
    for score in found:
        axis.axhline(score.mean, color=one.style.colour, linestyle="--", linewidth=1.2, label=one.label())
        if score.low is not None and score.high is not None:
            axis.axhspan(score.low, score.high, color=one.style.colour, alpha=0.1, linewidth=0)


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


def mark_octaves(axis: Any, low: float, high: float) -> None:
    """A logarithmic x axis that is marked at the powers of 2 from below the least value to above the largest."""
    mark_powers(axis, [2.0**octave for octave in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)])


def finished(
    figure: Figure,
    axes: Any,
    arms: Sequence[pd.DataFrame],
    times: bool = False,
    named: bool = False,
    notes: Sequence[str] = (),
) -> Figure:
    """The figure with a legend for all panels, and below it what a reader must know of these arms.

    Args:
        times: are drawn, so what must be known of them is said, too.
        named: lines have their names at their ends, and there is no legend.
        notes: further lines below.
    """
    caveats = " | ".join(filter(None, _caveats(pd.concat(arms), times)))
    letters = int(LETTERS * figure.get_figwidth())
    below = "\n".join(textwrap.fill(words, letters) for words in [*notes, caveats])
    if named:
        figure.supxlabel(below, fontsize=8)
        return figure
    return legend(figure, axes, below)


def legend(figure: Figure, axes: Any, title: str, more: Sequence[Any] = ()) -> Figure:
    """One legend for all axes and for `more` handles, under a title; where there is none of them the title alone."""
    lines = {name: handle for axis in axes.flat for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    lines |= {handle.get_label(): handle for handle in more}
    if not lines:
        figure.supxlabel(title, fontsize=8)
        return figure
    columns = max(1, min(len(lines), int(figure.get_figwidth() * 11 / (max(map(len, lines)) + 6))))
    rows = math.ceil(len(lines) / columns) + title.count("\n")
    figure.set_figheight(figure.get_figheight() + 0.24 * max(0, rows - 3))
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(lines.values(), lines.keys(), title=title, title_fontsize=8, handlelength=3, **look)
    return figure


def _caveats(arms: pd.DataFrame, times: bool) -> list[str]:
    """What a reader must know of the runs in a picture, and of their times where these are drawn."""
    transfers, failed = " ".join(map(str, arms["transfer"])), int(arms["failed"].sum())
    together = arms["method"][arms["decode"] == TOGETHER]
    seeds = sorted({str(seed) for seed in arms["seed"]}, key=len)
    found = {
        "with times disturbed by other work": times and arms["disturbed"].isin([True]).any(),
        "times of samples elsewhere or disturbed are left out": times and (arms["left_out"].astype(float) > 0).any(),
        "random weights: scores mean nothing": (arms["weights"] == "random").any(),
        "transfers between host and device simulated in memory": "simulated" in transfers,
        "transfers between host and device counted, in no time": "in place" in transfers,
        f"{failed} failed samples, which score 0": failed,
        "with unfinished runs": not arms["finished"].all(),
        f"decoded together, the others alone: {', '.join(sorted(set(together)))}": 0 < len(together) < len(arms),
        f"seeds {' or '.join(seeds)}": any("," in seed for seed in seeds),
    }
    machines = "; ".join(sorted({str(name) for name in arms["device_name"].dropna()}))
    return [*(words for words, there in found.items() if there), machines]


def size_text(budget: Any) -> str:
    """A budget as text: tokens, or a share of the prompt; "" for none."""
    if missing(budget):
        return ""
    return f"{100 * budget:g} %" if isinstance(budget, float) else str(budget)


def thousands(value: float) -> str:
    """10000 -> "10k", 4096 -> "4096", 0.1 -> "0.1"."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 1000 == 0 else f"{value:g}"
