"""What the figures of a report share: panels, lines, axes and legends.

A figure is drawn as wide as it is printed, a text column or a page, and its letters are of that
size.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from kvbench.config import ConfigError, choices
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.run import YARDSTICK, Run, Runs, missing
from kvbench.report.data.select import fewest_keys, last_word
from kvbench.report.data.stats import Estimate
from kvbench.report.data.style import Style, in_order, style_of, styles_of
from kvbench.runs.quantities import JOINTLY, QUANTITIES, named
from kvbench.runs.stored import DAMAGED, ResultsError, contents, json_of

Drawn = TypeVar("Drawn")

LINES = ("-", "--", ":", "-.")
MOST_LINES, MOST_ARMS = 8, 200  # that one panel can show
MOST_PANELS, MOST_MAPS = 8, 24  # that one picture can show
# Settings in which the arms of a panel may differ; in all others they are alike, or they stand in
# panels of their own. What begins like one of these makes a variant of a method, and is named in
# the legend.
OF_VARIANTS = ("method.", "attention", "kv", "shared_prefill", "decode")
NOT_COMPARED = {"method", "budget", "probe.every", "seed"}

WIDTHS = {"column": 3.4, "page": 7.0}  # inches of a text column, and of a page with two
NARROWEST = 2.2  # inches of a panel
BUDGET = "budget C: tokens, or below 1 a share of the prompt"  # of an axis
HEAD = 0.5  # inches above the panels
SMALL = 6.5  # points of the least letters: what stands below a picture
TO_AN_INCH = 19  # letters of a size of `LOOK`
LOOK = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "figure.titlesize": 8.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": SMALL,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


def of_script(
    files: Sequence[Path], figure: str, script: str, read: Callable[[Any], Drawn]
) -> Drawn:
    """What a figure draws of the one file of JSON that a script printed.

    Parameters
    ----------
    files
        that were named.
    figure, script
        for errors.
    read
        takes it out of the JSON, and raises a `LookupError` where there is none.

    Raises
    ------
    ConfigError
        there are several files, or it is another.
    """
    path, *others = files or [Path("results")]
    try:
        parsed = read(json_of(contents(path)))
    except (OSError, ResultsError, *DAMAGED) as error:
        raise ConfigError(
            f"figure={figure}: {path}: expected one file, what scripts/{script}.py prints last,"
            f" such as results/{script}_cpu.json ({type(error).__name__})"
        ) from error
    if others:
        raise ConfigError(f"figure={figure}: {1 + len(others)} files; expected one")
    return parsed


def printed(size: str) -> Any:
    """A context in which figures are drawn for a text "column" or a "page"."""
    return rc_context({**LOOK, "figure.figsize": (WIDTHS[size], 1)})


class Picture(Figure):
    """A figure that a notebook shows as it is, small enough to be kept in it."""

    def _repr_png_(self) -> bytes:
        whole, small = io.BytesIO(), io.BytesIO()
        with rc_context(LOOK):
            self.savefig(whole, format="png", dpi=110)
        Image.open(whole).quantize(64).save(small, format="png", optimize=True)
        return small.getvalue()


class Panel(NamedTuple):
    """Arms that can be compared.

    Attributes
    ----------
    title
        what they are of.
    arms
        lines of `Runs.arms`.
    styles
        of every method in the picture, by its name.
    notes
        what is not shown, for below the picture.
    left_out
        methods for which there was no room.
    """

    title: str
    arms: pd.DataFrame
    styles: dict[str, Style]
    notes: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


class Series(NamedTuple):
    """Arms that make one line or one group of marks.

    Attributes
    ----------
    style
        label, colour, marker and line.
    variant
        the settings in which these arms differ from others of their method, or "".
    arms
        lines of `Runs.arms`, by budget.
    """

    style: Style
    variant: str
    arms: pd.DataFrame

    def label(self, budget: Any = None) -> str:
        """The method's name, with a budget and the variant."""
        name = f"{self.style.label} {size_text(budget)}".rstrip()
        return f"{name}, {self.variant}" if self.variant else name


# -- which arms ------------------------------------------------------------------------------------


def arms_for(
    runs: Runs,
    name: str,
    probed: bool,
    columns: Sequence[str] = (),
    task: str | None = None,
    scored: bool = False,
) -> pd.DataFrame:
    """The arms a figure can use, without the times that were taken beside other work.

    Parameters
    ----------
    probed
        those with probes; else those without. No probe changes the numbers of task=fidelity: of its
        arms that ran with probes only, these count among those without.
    columns
        of which one has a value, or more; those of times.
    task
        the one that they are of.
    scored
        those that have a score, and are no timed runs.

    Raises
    ------
    ConfigError
        there is none.
    """
    arms = runs.arms
    if len(arms):
        arms = arms[arms["probe_every"] > 0 if probed else _without_probes(runs, arms)]
    if len(arms) and scored:
        arms = arms[arms["floor_ms"].isna()]
    if len(arms) and task:
        arms = arms[arms["task"] == task]
    if len(arms) and columns:
        arms = arms[arms[[*columns]].notna().any(axis=1)]
    if not len(arms):
        kind = f" of task={task}" if task else ""
        kind += " with probes (probe.every=1 makes some)" if probed else ""
        kind += " with timings" if columns and not probed else ""
        without = f" among {len(runs.arms)} runs"
        if columns and (joint := sum(run.shares_decode for run in runs)):
            remedy = "sweep.shared_decode=false takes times"
            without += f", of which {joint} decoded together: {remedy}"
        raise ConfigError(f"figure={name}: no run{kind}{without}")
    return undisturbed(arms)


def undisturbed(arms: pd.DataFrame) -> pd.DataFrame:
    """The arms, without times that were taken beside other work: these are not a method's."""
    quantities = [named(key) for key in arms if key in QUANTITIES or "." in key]
    disturbed = arms["disturbed"].isin([True])
    if not disturbed.any():
        return arms
    of_methods = (quantity for quantity in quantities if quantity.part != "hardware")
    times = [quantity.name for quantity in of_methods if quantity.is_time]
    return arms.assign(**{key: arms[key].mask(disturbed) for key in times})


def untimed(runs: Runs) -> list[str]:
    """What stands below a picture of times of whole tokens, which some of these runs have not."""
    count = sum(run.shares_decode for run in runs)
    words = f"{count} runs that decoded together have no time of a token and are not here"
    return [words] * bool(count)


def _without_probes(runs: Runs, arms: pd.DataFrame) -> pd.Series:
    """Whether an arm ran without probes, or is of `task=fidelity` and ran only with them."""
    bare = arms["probe_every"] == 0
    settings = runs.differing.loc[arms.index].drop(columns="probe.every", errors="ignore")
    others = pd.Series(list(map(tuple, settings.values)), index=arms.index, dtype=object)
    return bare | ((arms["task"] == "fidelity") & ~others.isin(set(others[bare])))


def panels_of(
    name: str,
    runs: Runs,
    arms: pd.DataFrame,
    free: Collection[str] = frozenset(NOT_COMPARED),
    times: bool = False,
    lines: Literal["", "method", "arm"] = "",
) -> list[Panel]:
    """Panels of arms that can be compared, each with a title.

    A panel is of one task, model and protocol, and its arms are alike in all settings that are not
    free to differ.

    Parameters
    ----------
    free
        those keys.
    times
        are drawn, so only arms of one machine can be compared.
    lines
        what a line is of; of more than a picture can show the first methods are taken, in the order
        of `STYLES`.

    Raises
    ------
    ConfigError
        more panels or arms than the figure of this name can show; or there is no arm whose budget
        applied.
    """
    arms, unbounded = _bounded(runs, name, arms)
    settings = runs.differing.loc[arms.index]
    common = settings[
        [key for key in settings if key not in free and not key.startswith(OF_VARIANTS)]
    ]
    if times:
        common = common.assign(machine=arms["device_name"].map(str))
    titles, groups = [], []
    keys = ["task", "model", *(common[key] for key in common)]
    for (task, model, *_), group in arms.groupby(keys, sort=False):
        others = common[(arms["task"] == task) & (arms["model"] == model)]
        titles.append(", ".join([task, model, *_varied(others, group.index[0]), _samples(group)]))
        groups.append(group)
    refuse_crowd(name, len(groups), "tasks, models and protocols", MOST_PANELS)
    refuse_crowd(name, max(map(len, groups), default=0), "arms in a panel", MOST_ARMS)
    few, notes = _few(runs, groups, lines == "arm") if lines and groups else (groups, ())
    styles = styles_of(method for group in few for method in group["method"])
    return [
        Panel(
            title,
            chosen,
            styles,
            (*filter(None, chosen["sample_note"].unique()), *notes, *unbounded),
            frozenset(group["method"]) - frozenset(chosen["method"]),
        )
        for title, group, chosen in zip(titles, groups, few, strict=True)
        if len(chosen)
    ]


def _varied(settings: pd.DataFrame, run: int) -> list[str]:
    """A run's settings that tell it from the others, in words."""
    keys, values = fewest_keys(settings.drop_duplicates().to_dict("records")), settings.loc[run]
    return [
        values[key] if key == "machine" else f"{last_word(key)}={_shortened(values[key])}"
        for key in keys
    ]


def _bounded(runs: Runs, name: str, arms: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The arms whose budget applied, and a note that names the others.

    Those would be drawn where full attention is. A timed run has its times all the same.

    Raises
    ------
    ConfigError
        no arm is left.
    """
    never = [run for run in arms.index if runs[run].is_unbounded and not runs[run].is_timed]
    if not never:
        return arms, ()
    of = arms.loc[never]
    names = [
        f"{style_of(method).label}"
        f" {', '.join(map(size_text, group['budget'].sort_values().unique()))}"
        for method, group in of.groupby("method", sort=False)
    ]
    why = f"{'; '.join(names)}, whose budget never applied: every step attended all tokens"
    if len(never) == len(arms):
        raise ConfigError(f"figure={name}: {why}; choose a smaller budget or longer answers")
    return arms.drop(index=never), (f"without {why}",)


def _samples(arms: pd.DataFrame) -> str:
    """How many samples each of these arms has."""
    least, most = (int(arms["n"].agg(end)) for end in ("min", "max"))
    words = f"n = {most}" if least == most else f"n = {least} to {most}"
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _few(
    runs: Runs, frames: Sequence[pd.DataFrame], by_arm: bool
) -> tuple[Sequence[pd.DataFrame], tuple[str, ...]]:
    """The arms of each panel that fit into it, of the same methods in all; a note on the budget.

    Where each arm is a line, all are of one budget.
    """
    every, notes = pd.concat(frames), tuple[str, ...]()
    if by_arm and max(map(len, frames)) > MOST_LINES and every["budget"].nunique() > 1:
        size = every["budget"].value_counts().sort_index().idxmax()
        frames = [frame[frame["budget"].isna() | (frame["budget"] == size)] for frame in frames]
        notes = (f"C = {size_text(size)} alone: --where budget=... chooses another",)
    shipped = choices("method")
    methods = sorted(
        in_order(every["method"]), key=lambda name: (name != YARDSTICK, name in shipped)
    )
    lines = [
        Counter(frame["method"] if by_arm else [method for method, *_ in _variants(runs, frame)])
        for frame in frames
    ]
    chosen: list[str] = []
    for method in methods:
        if all(sum(count[name] for name in [*chosen, method]) <= MOST_LINES for count in lines):
            chosen.append(method)
    if not chosen:
        return [frame.head(MOST_LINES) for frame in frames], notes
    return [frame[frame["method"].isin(chosen)] for frame in frames], notes


def _left_out(panels: Sequence[Panel]) -> str:
    """How many methods are drawn of those that these panels could show; "" where all are."""
    drawn = {method for panel in panels for method in panel.arms["method"]}
    every = drawn.union(*(panel.left_out for panel in panels))
    if drawn == every:
        return ""
    return f"{len(drawn)} of {len(every)} methods: --where method=... chooses others"


def ranking(runs: Runs, panels: Sequence[Panel]) -> list[Panel]:
    """The panels whose scores can rank methods, or all where none can.

    The notes name the others. Where full attention's own score ranks none (`Run.ranks_none`), or
    all score alike, none is better than another.
    """
    ranked: list[Panel] = []
    others: list[Panel] = []
    for panel in panels:
        mute = panel.arms["score"].nunique() < 2 or runs[panel.arms.index[0]].ranks_none
        (others if mute else ranked).append(panel)
    if not ranked or not others:
        return list(panels)
    note = f"without {'; '.join(panel.title for panel in others)}: scores there rank no method"
    return [panel._replace(notes=(*panel.notes, note)) for panel in ranked]


def fidelity_panels(runs: Runs, name: str, lines: Literal["method", "arm"]) -> list[Panel]:
    """The arms of `task=fidelity` that are not full attention itself, as `panels_of` has them.

    Raises
    ------
    ConfigError
        there is none.
    """
    arms = arms_for(runs, name, probed=False, task="fidelity")
    coded = runs.settings.loc[arms.index, "kv"] != str(NATIVE)
    others = arms[(arms["method"] != YARDSTICK) | coded]
    if not len(others):
        raise ConfigError(f"figure={name}: of the runs of task=fidelity none is sparse")
    return panels_of(name, runs, others, lines=lines)


def _shortened(value: str) -> str:
    """A setting's value, cut where it is a long list."""
    return value if len(value) <= 32 else f"{value[:29]}..."


def refuse_crowd(name: str, count: int, what: str, most: int) -> None:
    """Refuse more than a picture can show.

    Raises
    ------
    ConfigError
        names the figure, and says how many there are of what.
    """
    if count > most:
        raise ConfigError(
            f"figure={name}: {count} {what}, and a picture shows {most} at most; --where chooses"
            " some"
        )


# -- lines -----------------------------------------------------------------------------------------


def series_of(runs: Runs, panel: Panel, without: str = "") -> Iterator[Series]:
    """The arms of each method, in the order of `STYLES`.

    Arms that differ in more than the budget are series of their own.

    Parameters
    ----------
    without
        a setting in which arms of one series may differ.
    """
    lines: dict[str, int] = {}
    for method, variant, arms in _variants(runs, panel.arms, without):
        style, steps = panel.styles[method], lines.setdefault(method, 0)
        lines[method] += 1
        yield Series(replace(style, line=_next_line(style.line, steps)), variant, arms)


def _variants(
    runs: Runs, arms: pd.DataFrame, without: str = ""
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The method of each series, the settings in which it differs, and its arms by budget."""
    of_variants = [key for key in runs.differing if key.startswith(OF_VARIANTS) and key != without]
    for method in in_order(arms["method"]):
        method_arms = arms[arms["method"] == method]
        settings = runs.differing.loc[method_arms.index, of_variants]
        alone = settings[method_arms["decode"] != JOINTLY]  # all others began from a shared prefill
        varied = [
            key
            for key in settings
            if (alone if key == "shared_prefill" else settings)[key].nunique() > 1
        ]
        variants = {
            run: ", ".join(_option(key, runs.settings.at[run, key]) for key in varied)
            for run in method_arms.index
        }
        groups = dict(list(method_arms.groupby(pd.Series(variants))))
        for variant in sorted(groups, key=lambda words: (len(words), words)):
            yield (
                method,
                variant,
                groups[variant].sort_values("budget", key=lambda sizes: sizes.astype(float)),
            )


def _option(key: str, value: Any) -> str:
    """A setting in words, also of a run of a version that had none."""
    if missing(value):
        return f"no {last_word(key)}"
    return f"{last_word(key)}={_shortened(str(value))}"


def curves_of(runs: Runs, panel: Panel) -> Iterator[tuple[str, Style, Run]]:
    """Each run with its label and style; budgets of a method differ in their lines."""
    for series in series_of(runs, panel):
        for index, arm in enumerate(rows_of(series.arms)):
            yield (
                series.label(arm.budget),
                replace(series.style, line=_next_line(series.style.line, index)),
                runs[arm.name],
            )


def _next_line(line: str, steps: int) -> str:
    """The line style that comes so many steps after another."""
    return LINES[(LINES.index(line) + steps) % len(LINES)]


def rows_of(arms: pd.DataFrame) -> list[Any]:
    """The arms one by one, with an attribute and a key for each column."""
    return [line for _, line in arms.iterrows()]


def line_look(style: Style) -> dict[str, Any]:
    """Matplotlib's words for a line with outlined markers in this style."""
    look = {"color": style.colour, "marker": style.marker, "linestyle": style.line}
    return {**look, "markerfacecolor": fill_of(style), "markeredgewidth": 0.9}


def fill_of(style: Style) -> str:
    """What fills a mark: nothing, or its colour where its line is broken.

    So variants of a method can be told apart.
    """
    return style.colour if LINES.index(style.line) % 2 else "none"


# -- axes ------------------------------------------------------------------------------------------


def grid(rows: int, columns: int, title: str, height: float = 2.2) -> tuple[Picture, Any]:
    """A figure and its axes [rows, columns], as wide as it is printed.

    In a text column one axis stands below another.

    Parameters
    ----------
    height
        of a panel, in inches.
    """
    width = rcParams["figure.figsize"][0]
    across = columns if width / columns >= NARROWEST else 1
    down = rows * columns // across
    figure = Picture(figsize=(width, HEAD + height * down), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(0.85 * TO_AN_INCH * width)))
    return figure, figure.subplots(down, across, squeeze=False).reshape(rows, columns)


def tiled(count: int, title: str, height: float, across: int = 2) -> tuple[Picture, Any]:
    """A figure and its axes [rows, columns], so many of them, row by row; those beyond are blank.

    Parameters
    ----------
    height
        of a panel, in inches.
    across
        panels in a row of a page; half of them are in one of a text column.
    """
    room = max(1, round(across * rcParams["figure.figsize"][0] / WIDTHS["page"]))
    columns = min(count, room)
    width, rows = rcParams["figure.figsize"][0], math.ceil(count / columns)
    figure = Picture(figsize=(width, HEAD + height * rows), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(0.85 * TO_AN_INCH * width)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes


def draw_intervals(
    axis: Any, series: Series, places: Iterable[float], estimates: Sequence[Estimate]
) -> None:
    """A line over these places, with the interval of each estimate as a bar.

    What has no place is left out.
    """
    drawn = sorted(
        (place, value)
        for place, value in zip(places, estimates, strict=True)
        if not math.isnan(place)
    )
    x, y = [place for place, _ in drawn], [value.mean for _, value in drawn]
    look = {"elinewidth": 0.8, **line_look(series.style)}
    axis.errorbar(x, y, bars([value for _, value in drawn]), label=series.label(), **look)


def bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """How far the interval of each estimate reaches down, and up."""
    return [
        [0.0 if value.low is None else max(0.0, value.mean - value.low) for value in estimates],
        [0.0 if value.high is None else max(0.0, value.high - value.mean) for value in estimates],
    ]


def draw_by_budget(
    axis: Any, series: Series, places: pd.Series, estimates: Sequence[Estimate]
) -> None:
    """As `draw_intervals`; arms without a budget are a level with the band of their interval."""
    if series.arms["budget"].notna().any():
        draw_intervals(axis, series, places.astype(float), estimates)
        return
    for score in estimates:
        axis.axhline(
            score.mean, color=series.style.colour, linestyle="--", linewidth=1, label=series.label()
        )
        if score.low is not None and score.high is not None:
            axis.axhspan(score.low, score.high, color=series.style.colour, alpha=0.1, linewidth=0)


def fit_scores(axis: Any) -> None:
    """A y axis of scores, 0 to 100, that begins and ends where what is drawn on it does."""
    low, high = axis.dataLim.intervaly
    room = 0.08 * max(high - low, 10)
    axis.set_ylim(max(-4, low - room), min(104, high + room))


def log_y(axis: Any) -> None:
    """A logarithmic y axis with plain numbers at powers of 10.

    Where these are few, at 2 and 5 times them, too.
    """
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def mark_powers(axis: Any, ticks: Iterable[float]) -> None:
    """A logarithmic x axis that is marked at these values, as far as there is room."""
    ticks = sorted(set(ticks))
    room = (ticks[-1] / ticks[0]) ** 0.1
    shown = [
        tick for index, tick in enumerate(ticks) if not index or tick >= room * ticks[index - 1]
    ]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: thousands(value)))
    axis.grid(alpha=0.3)


def mark_octaves(axis: Any, low: float, high: float) -> None:
    """A logarithmic x axis with marks at the powers of 2 around these values."""
    mark_powers(
        axis,
        [
            2.0**octave
            for octave in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ],
    )


def finished(
    figure: Figure,
    axes: Any,
    panels: Sequence[Panel],
    times: bool = False,
    named: bool = False,
    notes: Sequence[str] = (),
) -> Figure:
    """The figure with a legend for all panels, and below it what a reader must know of these arms.

    Parameters
    ----------
    times
        are drawn, so what must be known of them is said, too.
    named
        lines have their names at their ends, and there is no legend.
    notes
        further lines below.
    """
    for axis in axes.flat:
        box = axis.get_subplotspec().get_gridspec()
        across, down = (
            int(TO_AN_INCH * size / count)
            for size, count in zip(figure.get_size_inches(), (box.ncols, box.nrows), strict=True)
        )
        room = across // 2 if named else across - 12
        axis.set_title(textwrap.fill(axis.get_title(), room))
        axis.set_xlabel(textwrap.fill(axis.get_xlabel(), room))
        axis.set_ylabel(textwrap.fill(axis.get_ylabel(), int(0.7 * down)))
    arms = pd.concat([panel.arms for panel in panels])
    panel_notes = dict.fromkeys(note for panel in panels for note in panel.notes)
    below = [
        *notes,
        _left_out(panels),
        *panel_notes,
        " | ".join(filter(None, _caveats(arms, times))),
    ]
    letters = int(1.1 * TO_AN_INCH * figure.get_figwidth())
    words = "\n".join(textwrap.fill(line, letters) for line in below if line)
    if not named:
        return legend(figure, axes, words)
    figure.supxlabel(words, fontsize=SMALL)
    return figure


def legend(figure: Figure, axes: Any, title: str, more: Sequence[Any] = ()) -> Figure:
    """One legend for all axes and for `more` handles, under a title.

    Without any of them there is the title alone.
    """
    lines = {
        name: handle
        for axis in axes.flat
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    lines |= {handle.get_label(): handle for handle in more}
    if not lines:
        figure.supxlabel(title, fontsize=SMALL)
        return figure
    columns = max(
        1, min(len(lines), int(figure.get_figwidth() * TO_AN_INCH / (max(map(len, lines)) + 9)))
    )
    rows = math.ceil(len(lines) / columns) + title.count("\n") + bool(title)
    figure.set_figheight(figure.get_figheight() + 0.16 * rows)
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False, "columnspacing": 1.2}
    figure.legend(lines.values(), lines.keys(), title=title, handlelength=2.5, **look)
    return figure


def _caveats(arms: pd.DataFrame, times: bool) -> list[str]:
    """What a reader must know of the runs in a picture, and of their times if these are drawn."""
    transfers, failed = " ".join(map(str, arms["transfer"])), int(arms["failed"].sum())
    joint_methods = arms["method"][arms["decode"] == JOINTLY]
    disturbed = int(arms["disturbed"].isin([True]).sum())
    seeds = sorted({str(seed) for seed in arms["seed"]}, key=lambda words: (len(words), words))
    caveats = {
        f"without times of {disturbed} arms, taken beside other work": times and disturbed,
        "times of samples elsewhere or beside other work are left out": (
            times and (arms["left_out"].astype(float) > 0).any()
        ),
        "random weights: scores mean nothing": (arms["weights"] == "random").any(),
        "transfers between host and device simulated in memory": "simulated" in transfers,
        "transfers between host and device counted, in no time": "in place" in transfers,
        f"{failed} failed samples, which score 0": failed,
        "with unfinished runs": not arms["finished"].all(),
        f"decoded together, the others alone: {', '.join(sorted(set(joint_methods)))}": (
            0 < len(joint_methods) < len(arms)
        ),
        f"seeds {' or '.join(seeds)}": any("," in seed for seed in seeds),
    }
    machines = "; ".join(sorted({str(name) for name in arms["device_name"].dropna()}))
    return [*(words for words, there in caveats.items() if there), machines]


def size_text(budget: Any) -> str:
    """A budget as text: tokens, or a share of the prompt; "" for none."""
    if missing(budget):
        return ""
    return f"{100 * budget:g} %" if isinstance(budget, float) else str(budget)


def thousands(value: float) -> str:
    """36000 -> "36k", 131072 -> "131k", 4096 -> "4096", 0.1 -> "0.1"."""
    return f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:g}"


def three_digits(value: float) -> str:
    """1321.4 -> "1320", 0.01234 -> "0.0123": a number beside its bar."""
    return f"{float(f'{value:.3g}'):g}"
