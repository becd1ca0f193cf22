"""Pictures of run folders, as the papers draw them: scores against budgets, costs, and what a selection finds.

Each figure of `FIGURES` is a function of `Runs` and says what it has nothing to draw from. A method looks the same in
all of them (`kvbench.report.style`), and what a reader must know of the runs (random weights, simulated transfers,
failed samples) stands below the picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, FuncFormatter, MaxNLocator, NullLocator

from kvbench.config import ConfigError, nearest
from kvbench.report.frame import CELL, YARDSTICK, Runs, framed
from kvbench.report.style import STYLES, Style, style_of

# Parts of a decode step in the order they are stacked, each with a colour and a hatch for print without colour. Parts
# that only a method has a name for (IceCache's query, insert) take those of OWN_PARTS.
PARTS = {
    "index_build": ("#332288", "xx"),
    "index_update": ("#56B4E9", "//"),
    "select": ("#0072B2", ""),
    "transfer": ("#D55E00", ".."),
    "attention": ("#E69F00", ""),
    "model": ("#999999", "\\\\"),
    "other": ("#FFFFFF", ""),
}
OWN_PARTS = (("#009E73", ""), ("#CC79A7", "--"), ("#F0E442", ""), ("#882255", "||"))
# Options that say how many things lie together.
SIZES = {"method.cluster_size": "chunks per cluster", "method.page_size": "tokens per page"}
LINES = ("-", "--", ":", "-.")
POINTS = 100  # of a curve over decode steps, at most
MOST_PANELS, MOST_ARMS, MOST_MAPS = 8, 60, 24  # that one picture can show
# Settings in which the arms of a panel may differ; in all others they are alike, or they stand in panels of their own.
OWN = ("method.", "attention", "shared_prefill")
FREE = {"method", "budget", "probe.every"}


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
        name = f"{self.style.label} {_size(budget)}".rstrip()
        return f"{name}, {self.variant}" if self.variant else name


def draw(name: str, runs: Runs) -> Figure:
    """The figure of a name of `FIGURES`.

    Raises:
        ConfigError: no such figure (names the nearest), or no run to draw it from.
    """
    if name not in FIGURES:
        raise ConfigError(f"figure={name}: no such figure; {nearest(name, FIGURES)}")
    return FIGURES[name][0](runs)


def write(figure: Figure, path: Path) -> None:
    """Save a figure as PNG or as PDF, as the file's ending says.

    Raises:
        ConfigError: another ending.
    """
    from matplotlib import rc_context

    if path.suffix not in (".png", ".pdf"):
        raise ConfigError(f"out={path}: expected a file that ends in .png or .pdf")
    with rc_context({"pdf.fonttype": 42}):  # fonts that journals take
        figure.savefig(path, dpi=200)


# -- scores and costs --------------------------------------------------------------------------------------------------


def budget(runs: Runs) -> Figure:
    """Score against the budget, and against what was attended; a row for each task and model."""
    panels = _panels("budget", runs, _arms(runs, "budget", probed=False, scored=True))
    figure, axes = _grid(len(panels), 2, "score against budget, and against what was attended")
    for (title, arms), row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            for one in _series(runs, arms):
                if one.arms["budget"].isna().all():
                    _level(axis, one)
                    continue
                drawn = one.arms.assign(x=one.arms[x].astype(float)).sort_values("x")
                axis.errorbar(
                    drawn["x"], drawn["score"], drawn["stderr"].astype(float), label=one.label(), **_line(one.style)
                )
            axis.set(ylim=(-5, 105), title=title)
        row[0].set(ylabel="score", xlabel="budget C: tokens, or below 1 a share of the prompt")
        row[1].set_xlabel("entries attended per KV head and layer, mean")
        attended = arms.loc[arms["budget"].notna(), "attended_mean"].astype(float).dropna()
        if len(attended):
            _powers(row[0], arms["budget"].dropna().astype(float))
            low, high = math.log2(attended.min()), math.log2(attended.max())
            _powers(row[1], [2.0**octave for octave in range(math.floor(low), math.ceil(high) + 1)])
    return _finished(figure, axes, [arms for _, arms in panels])


def tradeoff(runs: Runs) -> Figure:
    """Score against device memory and against the time per token; a row for each task and model (IceCache, Fig. 1)."""
    panels = _panels("tradeoff", runs, _arms(runs, "tradeoff", probed=False, column="tpot_ms_mean", scored=True))
    figure, axes = _grid(len(panels), 2, "score against memory and time; numbers are budgets, up and left is better")
    for (title, arms), row in zip(panels, axes, strict=True):
        points = pd.concat([one.arms.assign(label=one.label()) for one in _series(runs, arms)])
        draw_tradeoff(row, points)
        row[0].set(ylabel="score", title=title)
        row[1].set_title(title)
    return _finished(figure, axes, [arms for _, arms in panels])


def draw_tradeoff(axes: Sequence[Any], points: pd.DataFrame) -> None:
    """Mark arms on two axes: score against KV bytes on the device, and against the time per token.

    Args:
        axes: two of matplotlib's.
        points: a line an arm with method, label, budget (None: no budget), score (0-100), device_kv_bytes,
            tpot_ms_mean.
    """
    panels = (
        ("KV on the device (MiB)", "device_kv_bytes", 2**-20, "log"),
        ("time per token (ms)", "tpot_ms_mean", 1, "linear"),
    )
    for axis, (label, column, scale, kind) in zip(axes, panels, strict=True):
        for one in points.itertuples():
            # Arms that score alike at like cost lie on one another: outlines leave both to be seen.
            place = getattr(one, column) * scale
            bare, style = _no_budget(one.budget), style_of(one.method)
            shape = {"marker": style.marker, "s": 190 if bare else 80, "facecolor": "none", "linewidth": 2}
            named = one.label if one.label not in axis.get_legend_handles_labels()[1] else None
            axis.scatter(place, one.score, edgecolor=style.colour, label=named, zorder=3, **shape)
            if not bare:
                below = {"va": "top", "ha": "center", "textcoords": "offset points", "fontsize": 8}
                axis.annotate(_size(one.budget), (place, one.score), (0, -8), **below)
        axis.set(xlabel=label, xscale=kind, ylim=(-9, 108))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.margins(x=0.1)
        axis.grid(alpha=0.3)


def passkey(runs: Runs) -> Figure:
    """Share of the passkeys found, by depth and prompt length; a panel for each arm (IceCache, Fig. 6)."""
    arms = _arms(runs, "passkey", probed=False, task="passkey")
    panels = _panels("passkey", runs, arms)
    found = [
        (one.label(arm.budget) if len(panels) == 1 else f"{one.label(arm.budget)}\n{title}", arm)
        for title, own in panels
        for one in _series(runs, own)
        for arm in _rows(one.arms)
    ]
    _refuse_crowd("passkey", len(found), "arms", MOST_MAPS)
    columns = min(4, len(found))
    title = "passkeys found by depth and length" + (f": {panels[0][0]}" if len(panels) == 1 else "")
    figure, axes = _grid(math.ceil(len(found) / columns), columns, title, (3.1, 2.6))
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, (title, arm) in zip(axes.flat, found, strict=False):
        cells = _passkey_cells(runs.samples(arm))
        image = axis.imshow(cells, aspect="auto", cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
        axis.set_xticks(range(cells.shape[1]), [_thousands(length) for length in cells.columns], rotation=45)
        step = max(1, cells.shape[0] // 5)
        axis.set_yticks(range(0, cells.shape[0], step), [f"{depth:g}" for depth in cells.index[::step]])
        axis.set_title(title, fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth (%)")
    units = " or ".join(sorted({str(unit) for unit in runs.settings.loc[arms.index, "task.unit"]}))
    for axis in axes.flat[max(0, len(found) - columns) : len(found)]:
        axis.set_xlabel(f"prompt length ({units})")
    figure.colorbar(image, ax=axes, label="found (%)", aspect=40, pad=0.01)
    return _finished(figure, axes, [arms])


def _passkey_cells(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Percent found, depths by lengths; a failed sample found nothing."""
    lines = [
        {
            "depth": sample["meta"]["depth"],
            "length": sample["meta"]["length"],
            "found": 0.0 if sample.get("error") else 100 * sample["scores"]["accuracy"],
        }
        for sample in samples
    ]
    return pd.DataFrame(lines).pivot_table("found", "depth", "length")


def latency(runs: Runs) -> Figure:
    """Time to the second token, time per token, and its parts (IceCache, Fig. 7; LycheeCluster, Fig. 5).

    Runs that shared their prefill have no time to the second token; where all did, it is left out. Runs that are there
    to be timed have a panel for each length and batch, the floor of each step, and on a GPU how long it is busy.
    """
    panels = _latency_panels(runs, _arms(runs, "latency", probed=False, column="tpot_ms_mean"))
    heights = [1.0 + 0.28 * len(arms) for _, arms in panels]
    figure = Figure(figsize=(11, 1.2 + sum(heights)), layout="constrained")
    second = any(arms.tt2t_s.notna().any() for _, arms in panels)
    times = [("tt2t_s", "second token after (s)")] * second + [("tpot_ms_mean", "time per token (ms)")]
    axes = np.array(figure.subplots(len(panels), len(times) + 1, squeeze=False, sharey="row", height_ratios=heights))
    figure.suptitle(("time to the second token, " if second else "") + "time per token and its parts")
    for (title, arms), row in zip(panels, axes, strict=True):
        bars = [(one, arm) for one in _series(runs, arms) for arm in _rows(one.arms)]
        row[0].set_yticks(range(len(bars)), [one.label(arm.budget) for one, arm in bars])
        row[0].set_ylim(len(bars) - 0.4, -0.6)
        row[0].set_title(title, loc="left")
        for axis, (column, label) in zip(row, times, strict=False):
            for place, (one, arm) in enumerate(bars):
                value = arm[column]
                if value is None or math.isnan(value):
                    axis.annotate(" not measured", (0, place), va="center", fontsize=8, color="#666666")
                    continue
                axis.barh(place, value, color=one.style.colour, edgecolor="black", linewidth=0.6, height=0.7)
                axis.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8)
            axis.set_xlabel(label)
            axis.margins(x=0.15)
            axis.locator_params(axis="x", nbins=5)
            axis.grid(axis="x", alpha=0.3)
        _stack(row[-1], pd.DataFrame([arm for _, arm in bars]))
        _limits(row[-2:], [arm for _, arm in bars])
    return _finished(figure, axes[:, -1], [arms for _, arms in panels])


def _latency_panels(runs: Runs, arms: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """As `_panels`; what timed runs measured at each length and batch has a panel of its own."""
    timed = arms["floor_ms"].notna()
    panels = _panels("latency", runs, arms[~timed]) if not timed.all() else []
    for title, own in _panels("latency", runs, arms[timed], FREE | CELL) if timed.any() else []:
        lines: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        for run in own.index:
            for cell, line in runs.cells(run).items():
                lines.setdefault(cell, {})[run] = line
        keys = runs.settings.at[own.index[0], "task.keys"]
        for (tokens, batch), of_cell in sorted(lines.items()):
            frame = framed(list(of_cell.values())).set_axis(list(of_cell))
            told = f"{title}: {tokens} tokens, batch {batch}, keys of {keys}"
            panels.append((told, frame[frame["tpot_ms_mean"].notna()]))
    _refuse_crowd("latency", len(panels), "tasks, models, protocols, lengths and batches", MOST_PANELS)
    return [(title, own) for title, own in panels if len(own)]


def _limits(axes: Iterable[Any], arms: Sequence[Any]) -> None:
    """Beside the bar of each arm the floor of a step, and how long of it the device is busy."""
    times = pd.DataFrame(arms)[["floor_ms", "tpot_ms_mean", "python_ms"]].astype(float).reset_index(drop=True)
    marks = {"floor": (times["floor_ms"], "-"), "device busy": (times["tpot_ms_mean"] - times["python_ms"], ":")}
    for axis, (label, (values, line)) in itertools.product(axes, marks.items()):
        values = values.dropna()
        if len(values):
            ends = (values.index - 0.42, values.index + 0.42)
            axis.vlines(values, *ends, colors="#CC0000", linestyles=line, linewidth=2, label=label, zorder=3)


def _stack(axis: Any, arms: pd.DataFrame) -> None:
    """The parts of a decode step of each arm, one on another."""
    times = arms.filter(like="breakdown_ms.").rename(columns=lambda key: key.removeprefix("breakdown_ms."))
    times = times.fillna(0.0).loc[:, (times > 0).any()]
    own = dict(zip(sorted(set(times) - PARTS.keys()), itertools.cycle(OWN_PARTS)))
    left = np.zeros(len(arms))
    for part, (colour, hatch) in {**own, **PARTS}.items():
        if part not in times:
            continue
        widths = times[part].to_numpy(float)
        look = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6, "height": 0.7}
        axis.barh(range(len(arms)), widths, left=left, label=part.replace("_", " "), **look)
        left += widths
    axis.set_xlabel("parts of a step (ms)")
    axis.grid(axis="x", alpha=0.3)


def length(runs: Runs) -> Figure:
    """Time per token against the length of the context (IceCache, Fig. 8; LycheeCluster, Fig. 4)."""
    panels = _panels("length", runs, _arms(runs, "length", probed=False, column="tpot_ms_mean"))
    curves = [(title, arms, _length_curves(runs, arms)) for title, arms in panels]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        raise ConfigError("figure=length: no task of these runs has prompts of several lengths; task.lengths sets them")
    columns = min(2, len(curves))
    figure, axes = _grid(math.ceil(len(curves) / columns), columns, "time per token against context length")
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (title, _, drawn) in zip(axes.flat, curves, strict=False):
        for label, style, times in drawn:
            axis.plot(times.index, times, label=label, **_line(style))
        axis.set(title=title, xlabel="prompt tokens", ylabel="time per token (ms)")
        axis.set_ylim(bottom=0)
        _powers(axis, [tokens for _, _, times in drawn for tokens in times.index])
    return _finished(figure, axes, [arms for _, arms, _ in curves])


def _length_curves(runs: Runs, arms: pd.DataFrame) -> list[tuple[str, Style, pd.Series]]:
    """Of each arm its label, style, and the median time per token by prompt tokens; none where there is one length."""
    found = []
    for label, style, arm in _curves_of(runs, arms):
        samples = [sample for sample in runs.samples(arm) if sample.get("tpot_ms") and "length" in sample["meta"]]
        times = pd.DataFrame(
            {
                "length": [sample["meta"]["length"] for sample in samples],
                "tokens": [sample["prompt_tokens"] for sample in samples],
                "ms": [sample["tpot_ms"]["mean"] for sample in samples],
            }
        )
        if times["length"].nunique() > 1:
            found.append((label, style, times.groupby("length").median().set_index("tokens")["ms"]))
    return found


# -- what a selection finds --------------------------------------------------------------------------------------------


def recall(runs: Runs) -> Figure:
    """Recall of the exact top tokens over decode steps (ParisKV, Fig. 1)."""
    return _over_steps(runs, "recall", {"recall": "recall of the exact top tokens"})


def stability(runs: Runs) -> Figure:
    """How much of a selection was selected before, over decode steps (LycheeCluster, Fig. 9)."""
    names = {"jaccard": "Jaccard with the step before", "seen": "share selected in the last 32 steps"}
    return _over_steps(runs, "stability", names)


def _over_steps(runs: Runs, figure_name: str, measures: Mapping[str, str]) -> Figure:
    """A column for each measure, a row for each task and model, a curve for each arm: the mean over samples."""
    arms = _arms(runs, figure_name, probed=True)
    drawn = []
    for title, own in _panels(figure_name, runs, arms[arms["method"] != YARDSTICK]):
        curves = [(label, style, _curves(runs.samples(arm))) for label, style, arm in _curves_of(runs, own)]
        if any(len(curve) for _, _, curve in curves):
            drawn.append((title, own, curves))
    if not drawn:
        raise ConfigError(f"figure={figure_name}: of the runs with probes none is sparse and has values of each step")
    figure, axes = _grid(len(drawn), len(measures), f"{' and '.join(measures.values())}, over decode steps")
    for (title, _, curves), row in zip(drawn, axes, strict=True):
        for label, style, of_arm in curves:
            for axis, name in zip(row, measures, strict=True):
                if name in of_arm and of_arm[name].notna().any():
                    curve = _thinned(of_arm[name].dropna())
                    look = _line(style) | {"markevery": max(1, len(curve) // 8)}
                    axis.plot(curve.index, curve, label=label, **look)
        for axis, label in zip(row, measures.values(), strict=True):
            axis.set(title=title, xlabel="decode step", ylabel=label, ylim=(-0.03, 1.03))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    return _finished(figure, axes, [own for _, own, _ in drawn])


def _curves(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The mean over samples of each measure by decode step, as far as half of the samples go."""
    steps = [(sample.get("probe") or {}).get("steps") for sample in samples]
    frames = [pd.DataFrame(one, dtype=float) for one in steps if one]
    if not frames:
        return pd.DataFrame()
    by_step = pd.concat(frames).groupby("step")
    return by_step.mean()[by_step.size() >= len(frames) / 2]


def _thinned(curve: pd.Series) -> pd.Series:
    """The mean of neighbouring steps where there are more than a picture can show."""
    blocks = np.arange(len(curve)) * min(POINTS, len(curve)) // len(curve)
    return pd.Series(curve.groupby(blocks).mean().to_numpy(), curve.index.to_series().groupby(blocks).mean().to_numpy())


def clusters(runs: Runs) -> Figure:
    """Recall against how many things lie in a cluster or page (LycheeCluster, Fig. 10)."""
    arms = _arms(runs, "clusters", probed=True)
    panels = []
    for title, own in _panels("clusters", runs, arms):
        for option in SIZES:
            sizes = runs.settings.get(option, pd.Series(index=runs.arms.index, dtype=object))[own.index]
            varied = sizes.groupby([own["method"], own["budget"]]).transform("nunique") > 1
            if varied.any():
                panels.append((title, option, own[varied].assign(size=sizes[varied].astype(float))))
    if not panels:
        keys = " or ".join(SIZES)
        raise ConfigError(
            f"figure=clusters: no two runs with probes differ in {keys} alone; a sweep over one makes some"
        )
    figure, axes = _grid(1, len(panels), "recall of the exact top tokens against cluster size")
    for axis, (title, option, own) in zip(axes.flat, panels, strict=True):
        for one in _series(runs, own, without=option):
            for budget in one.arms["budget"].drop_duplicates():
                line = one.arms[one.arms["budget"] == budget].sort_values("size")
                axis.plot(line["size"], line["recall"], label=one.label(budget), **_line(one.style))
        axis.set(
            title=title,
            xlabel=SIZES[option],
            ylabel="recall of the exact top tokens",
            ylim=(-0.03, 1.03),
        )
        _powers(axis, own["size"])
    return _finished(figure, axes, [own for _, _, own in panels])


FIGURES: dict[str, tuple[Callable[[Runs], Figure], str]] = {
    "budget": (budget, "score against budget, and against what was attended"),
    "tradeoff": (tradeoff, "score against device memory and time per token (IceCache, Fig. 1)"),
    "passkey": (passkey, "passkeys found by depth and length (IceCache, Fig. 6)"),
    "latency": (latency, "second token, time per token and its parts (IceCache, Fig. 7; LycheeCluster, Fig. 5)"),
    "length": (length, "time per token against context length (IceCache, Fig. 8; LycheeCluster, Fig. 4)"),
    "recall": (recall, "recall over decode steps, from runs with probe.every (ParisKV, Fig. 1)"),
    "stability": (
        stability,
        "stability of selections over decode steps, from runs with probe.every (LycheeCluster, Fig. 9)",
    ),
    "clusters": (clusters, "recall against cluster or page size, from runs with probe.every (LycheeCluster, Fig. 10)"),
}


# -- what the figures share --------------------------------------------------------------------------------------------


def _arms(
    runs: Runs, name: str, probed: bool, column: str | None = None, task: str | None = None, scored: bool = False
) -> pd.DataFrame:
    """The arms a figure can use; `scored`: those that have a score, and are not there to be timed alone.

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


def _panels(
    name: str, runs: Runs, arms: pd.DataFrame, free: Collection[str] = frozenset(FREE)
) -> list[tuple[str, pd.DataFrame]]:
    """The arms that can be compared, of one task, model and protocol, alike in all but what is free to differ, and a
    title that says which.

    Raises:
        ConfigError: more than the figure of this name can show.
    """
    settings = runs.settings.loc[arms.index].map(str)
    common = settings[[key for key in settings if key not in free and not key.startswith(OWN)]]
    panels = []
    for _, own in arms.groupby([common[key] for key in common], sort=False):
        task, model = own[["task", "model"]].iloc[0]
        others = common[(common["task"] == task) & (common["model"] == model)]
        varied = [key for key in others if others[key].nunique() > 1]
        apart = [f"{key.rpartition('.')[2]}={_shortened(common.at[own.index[0], key])}" for key in varied]
        panels.append((", ".join([task, model, *apart]), own))
    _refuse_crowd(name, len(panels), "tasks, models and protocols", MOST_PANELS)
    _refuse_crowd(name, max((len(own) for _, own in panels), default=0), "arms in a panel", MOST_ARMS)
    return panels


def _shortened(value: str) -> str:
    """A setting's value, cut where it is a long list."""
    return value if len(value) <= 32 else f"{value[:29]}..."


def _refuse_crowd(name: str, count: int, what: str, most: int) -> None:
    if count > most:
        raise ConfigError(f"figure={name}: {count} {what}, and a picture shows {most} at most; --where chooses some")


def _series(runs: Runs, arms: pd.DataFrame, without: str = "") -> Iterator[Series]:
    """The arms of each method, apart where they differ in more than the budget; in the order of `STYLES`.

    Args:
        without: a setting that tells no series from another.
    """
    known = {method: place for place, method in enumerate(STYLES)}
    for method in sorted(arms["method"].unique(), key=lambda name: (known.get(name, len(known)), name)):
        own = arms[arms["method"] == method]
        settings = runs.settings.loc[own.index].map(str)
        varied = [key for key in settings if key.startswith(OWN) and key != without and settings[key].nunique() > 1]
        short = {key: key.rpartition(".")[2] for key in varied}
        variants = {
            run: ", ".join(f"{short[key]}={_shortened(settings.at[run, key])}" for key in varied) for run in own.index
        }
        style = style_of(method)
        groups = dict(list(own.groupby(pd.Series(variants))))
        for place, variant in enumerate(sorted(groups, key=lambda words: (len(words), words))):
            line = LINES[(LINES.index(style.line) + place) % len(LINES)]
            by_budget = groups[variant].sort_values("budget", key=lambda sizes: sizes.astype(float))
            yield Series(replace(style, line=line), variant, by_budget)


def _curves_of(runs: Runs, arms: pd.DataFrame) -> Iterator[tuple[str, Style, Any]]:
    """Each arm with its label and style; budgets of a method differ in their lines."""
    for one in _series(runs, arms):
        for place, arm in enumerate(_rows(one.arms)):
            line = one.style.line if place == 0 else LINES[(LINES.index(one.style.line) + place) % len(LINES)]
            yield one.label(arm.budget), replace(one.style, line=line), arm


def _rows(arms: pd.DataFrame) -> list[Any]:
    return [line for _, line in arms.iterrows()]


def _grid(rows: int, columns: int, title: str, size: tuple[float, float] = (5.5, 3.6)) -> tuple[Figure, Any]:
    """A figure and its axes [rows, columns]."""
    figure = Figure(figsize=(max(7.0, size[0] * columns), 1.2 + size[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(title)
    return figure, axes


def _line(style: Style) -> dict[str, Any]:
    look = {"color": style.colour, "marker": style.marker, "linestyle": style.line, "linewidth": 1.6}
    return {**look, "markersize": 6, "markerfacecolor": "none"}


def _level(axis: Any, one: Series) -> None:
    """Arms without a budget, full attention: a level with the band of its standard error."""
    for arm in _rows(one.arms):
        axis.axhline(arm["score"], color=one.style.colour, linestyle="--", linewidth=1.2, label=one.label())
        error = _number(arm["stderr"])
        axis.axhspan(arm["score"] - error, arm["score"] + error, color=one.style.colour, alpha=0.1, linewidth=0)


def _powers(axis: Any, ticks: Iterable[float]) -> None:
    """A logarithmic x axis that is marked at these values, as far as there is room."""
    ticks = sorted(set(ticks))
    room = (ticks[-1] / ticks[0]) ** 0.1
    kept = [tick for place, tick in enumerate(ticks) if not place or tick >= room * ticks[place - 1]]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(kept))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, place: _thousands(value)))
    axis.grid(alpha=0.3)


def _finished(figure: Figure, axes: Any, arms: Sequence[pd.DataFrame]) -> Figure:
    """One legend for all panels, and with it what a reader must know of the runs."""
    told = _told(pd.concat(arms))
    named = {name: handle for axis in axes.flat for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if not named:
        figure.supxlabel(told, fontsize=8)
        return figure
    columns = int(figure.get_figwidth() * 11 / (max(map(len, named)) + 6))
    look = {"loc": "outside lower center", "ncols": max(1, min(len(named), columns)), "frameon": False}
    figure.legend(named.values(), named.keys(), title=told, title_fontsize=8, handlelength=3, **look)
    return figure


def _told(arms: pd.DataFrame) -> str:
    """What a reader must know of the runs in a picture."""
    told = []
    if (arms["weights"] == "random").any():
        told.append("random weights: scores mean nothing")
    if arms["transfer"].map(lambda found: "simulated" in str(found)).any():
        told.append("transfers between host and device simulated in memory")
    if arms["failed"].sum():
        told.append(f"{int(arms['failed'].sum())} failed samples, which score 0")
    if not arms["finished"].all():
        told.append("with unfinished runs")
    told.append("; ".join(sorted({str(name) for name in arms["device_name"].dropna()})))
    return " | ".join(filter(None, told))


def _size(budget: Any) -> str:
    """A budget as text: tokens, or a share of the prompt; "" for none."""
    if _no_budget(budget):
        return ""
    return f"{100 * budget:g} %" if isinstance(budget, float) else str(budget)


def _no_budget(budget: Any) -> bool:
    return budget is None or (isinstance(budget, float) and math.isnan(budget))


def _number(value: Any) -> float:
    """A number, 0 for what was not measured."""
    return 0.0 if value is None or pd.isna(value) else float(value)


def _thousands(value: float) -> str:
    """10000 -> "10k", 4096 -> "4096", 0.1 -> "0.1"."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 1000 == 0 else f"{value:g}"
