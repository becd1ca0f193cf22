"""The figures of the table in `specs.py`: their panels, charts and lines, and what stands below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.stats import Estimate, intervals
from kvbench.report.data.style import Style, style_of
from kvbench.report.figures.charts import (
    Chart,
    Curve,
    Mark,
    draw_charts,
    fold_words,
    front,
    thousands,
    with_legend,
)
from kvbench.report.figures.panels import (
    MOST_LINES,
    MOST_PANELS,
    Panel,
    arms_for,
    of_usual_budget,
    panels_of,
    ranking,
    refuse_crowd,
    series_of,
    untimed,
    words_below,
)
from kvbench.report.figures.points import (
    QUESTION,
    SCALES,
    at_cost,
    kv_style,
    over_lengths,
)
from kvbench.report.figures.specs import FEW, OWN_TIME, SPECS, TIME, Spec
from kvbench.runs.quantities import METHOD_TIME, QUANTITIES

HOW_IT_RAN = ("decode=", "shared_prefill=")  # which says nothing of keys and values


def curves(name: str, runs: Runs) -> Figure:
    """The figure of a name of `SPECS`.

    Raises
    ------
    ConfigError
        there is nothing to draw it from, or more than a picture shows.
    """
    spec = SPECS[name]
    runs = spec.prepare(runs)
    every = _panels(name, spec, runs)
    enough = [panel for panel in every if spec.is_worth(panel)]
    compared = [panel for panel in enough if len(panel.arms) > 1]
    panels = compared or enough
    refuse_crowd(name, len(panels), "tasks, models and protocols", spec.most)
    made = [(panel, spec.finish(_charts(spec, runs, panel))) for panel in panels]
    worth = _worth(spec, made)
    if not worth:
        raise ConfigError(f"figure={name}: {spec.nothing}, among {len(runs.arms)} runs")
    refuse_crowd(name, sum(len(row) for _, row in worth), "charts", 3 * MOST_PANELS)
    shallow = f"of fewer than {spec.least} samples or " if spec.least > 1 else ""
    left_out = {
        "of one arm alone": len(enough) - len(panels),
        f"{shallow}without two different points": len(every)
        - len(enough)
        + len(panels)
        - len(worth),
    }
    notes = [f"not drawn: {count} panels {why}" for why, count in left_out.items() if count]
    return _picture(spec, runs, worth, notes)


def _worth(
    spec: Spec, made: Sequence[tuple[Panel, Sequence[Chart]]]
) -> list[tuple[Panel, list[Chart | None]]]:
    """The panels with charts that are drawn, None for others of their row.

    A chart has two marks, and over budgets two of these, if any has; it is of more than full
    attention alone. A column that is empty everywhere is none.
    """
    need = max(spec.values, min(2, max((_width(c) for _, row in made for c in row), default=1)))
    rows = [
        (
            panel,
            [chart if _width(chart) >= max(need, 1) else None for chart in charts],
        )
        for panel, charts in made
    ]
    rows = [(panel, row) for panel, row in rows if any(row)]
    across = len(spec.x) * len(spec.y)
    if any(len(row) != across for _, row in rows):
        return [(panel, [chart for chart in row if chart]) for panel, row in rows]
    columns = [at for at in range(across) if any(row[at] for _, row in rows)]
    return [(panel, [row[at] for at in columns]) for panel, row in rows]


def _width(chart: Chart) -> int:
    """How many marks a chart has, and over budgets and lengths how many of these."""
    if not chart.curves or [curve.method for curve in chart.curves] == [YARDSTICK]:
        return 0
    return len(set(chart.places)) if chart.x.kind == "values" else len(chart.places)


def _picture(
    spec: Spec,
    runs: Runs,
    rows: Sequence[tuple[Panel, Sequence[Chart | None]]],
    notes: Sequence[str],
) -> Figure:
    """The figure of the charts of these panels, with the words below."""
    places = [chart for _, row in rows for chart in row]
    charts = [chart for chart in places if chart]
    marks = [mark for chart in charts for curve in chart.curves for mark in curve.marks]
    estimates = [Estimate(mark.y, mark.low, mark.high, mark.n, mark.n <= FEW) for mark in marks]
    heading = spec.heading.format(intervals=intervals(estimates))
    columns = len(spec.x) * len(spec.y)
    across = min(columns, max(len(row) for _, row in rows)) if columns > 1 else 2
    figure, axes = draw_charts(places, heading, spec.height, across)
    fold_words(figure, axes, spec.named)
    methods = {curve.method for chart in charts for curve in chart.curves}
    own = [METHOD_TIME] * any(QUANTITIES[OWN_TIME].axis == chart.x.label for chart in charts)
    whole = untimed(runs) if TIME in spec.timed and OWN_TIME not in spec.timed else []
    others = (
        {"others": "the others have one point, or no room; --where method=... chooses"}
        if spec.joined
        else {}
    )
    below = words_below([panel for panel, _ in rows], bool(spec.timed), methods, **others)
    lines = [*spec.notes, *own, *notes, *_falling(spec, charts), *whole, *below]
    return with_legend(figure, axes, lines, spec.named)


# -- panels and charts -----------------------------------------------------------------------------


def _panels(name: str, spec: Spec, runs: Runs) -> list[Panel]:
    """The panels of a figure, before any sample is read."""
    arms = arms_for(runs, name, spec.probed, spec.timed, spec.task, spec.scored)
    if spec.sparse:
        coded = runs.settings.loc[arms.index, "kv"] != str(NATIVE)
        arms = arms[(arms["method"] != YARDSTICK) | coded]
    if not len(arms):
        of_task = f" of task={spec.task}" if spec.task else ""
        probes = " with probes" if spec.probed else ""
        raise ConfigError(f"figure={name}: of the runs{of_task}{probes} none is sparse")
    several, notes = _ways(runs, arms) > 1, tuple[str, ...]()
    if several and spec.line == "arm" and not spec.joined:
        (arms,), notes = of_usual_budget([arms])
    by_curve = several or spec.joined  # which are drawn is known of the curves
    panels = panels_of(name, runs, arms, spec.free, lines="" if by_curve else spec.line)
    panels = [panel._replace(notes=(*panel.notes, *notes)) for panel in panels]
    panels = ranking(runs, panels) if spec.ranked else panels
    return [part for panel in panels for part in spec.split(panel)]


def _ways(runs: Runs, arms: pd.DataFrame) -> int:
    """In how many ways these arms hold keys and values."""
    return int(runs.settings.loc[arms.index, "kv"].map(str).nunique())


def _charts(spec: Spec, runs: Runs, panel: Panel) -> list[Chart]:
    """The charts of a panel: for each pair of axes, and where they are times for each machine.

    Where keys and values are held in several ways, each method has charts of its own, with the
    front of all methods.
    """
    parts: dict[tuple[Any, ...], list[Curve]] = {}  # by what a chart is of
    pairs = [(_known(x, runs, panel), _known(y, runs, panel)) for x, y in product(spec.x, spec.y)]
    apart = _ways(runs, panel.arms) > 1 and not spec.joined
    for at, (x, y) in enumerate(pairs):
        for place, curve in _curves(spec, runs, panel, x, y):
            method = curve.method if apart else ""
            parts.setdefault((place, method, at), []).append(curve)
    charts = []
    for place, method, at in sorted(parts, key=lambda part: (part[1], part[2], part[0])):
        x, y = pairs[at]
        rivals = [
            curve
            for (other, _, column), curves in parts.items()
            if (other, column) == (place, at)
            for curve in curves
        ]
        others = list(zip(*{other for other, _, column in parts if column == at}, strict=True))
        varied = [word for word, words in zip(place, others, strict=True) if len({*words}) > 1]
        first = [style_of(method).label] * bool(method)
        chart = Chart(
            title=", ".join([*first, panel.title, *varied]),
            x=SCALES[x],
            y=SCALES[y],
            curves=parts[place, method, at],
            rivals=rivals if spec.front else (),
            better="less" if y == "kl_mean" else "more",
            rules=spec.rules,
            sized=spec.sized,
            named=spec.named,
        )
        charts.append(_with_room(spec, chart))
    return charts


def _with_room(spec: Spec, chart: Chart) -> Chart:
    """A chart with as many lines as there is room for, and their number in its title.

    Of those with two points, where these are joined; nearest to the front, or the first.
    """
    curves = [curve for curve in chart.curves if not spec.joined or len(curve.marks) > 1]
    if len(curves) <= MOST_LINES:
        return replace(chart, curves=curves)
    chosen = _nearest(chart, curves) if spec.front else curves[:MOST_LINES]
    count = f"{MOST_LINES} of {len(curves)} lines".replace(" ", "\N{NO-BREAK SPACE}")
    return replace(chart, curves=chosen, title=f"{chart.title}, {count}")


def _nearest(chart: Chart, curves: Sequence[Curve]) -> list[Curve]:
    """The lines with marks on their front, then on what is the front without those."""
    rest, chosen = list(curves), list[Curve]()
    while rest and len(chosen) < MOST_LINES:
        points = [(mark.x, mark.y) for curve in rest for mark in curve.marks]
        corners = set(front(points, chart.better == "more"))
        on_front = [c for c in rest if any((mark.x, mark.y) in corners for mark in c.marks)]
        chosen += on_front
        rest = [curve for curve in rest if curve not in on_front]
    return [curve for curve in curves if curve in chosen[:MOST_LINES]]


def _known(name: str, runs: Runs, panel: Panel) -> str:
    """The quantity that a name of a spec means in a panel."""
    if name == "nearness":
        near = (runs[run].kl() for run in panel.arms.index)
        return "kl_mean" if any(kl and kl.mean > 0 for kl in near) else "score"
    if name == "time or index":
        timed = panel.arms[TIME].notna().all()
        own = panel.arms[OWN_TIME].notna().any()
        return TIME if timed else OWN_TIME if own else "device_index_bytes"
    return name


def _curves(
    spec: Spec, runs: Runs, panel: Panel, x: str, y: str
) -> Iterator[tuple[tuple[str, ...], Curve]]:
    """The lines of a chart, with the batch, length or machine that they are of."""
    for label, style, method, arms in _lines(spec, runs, panel, x):
        marks: dict[tuple[str, ...], list[Mark]] = {}
        for run, arm in arms.iterrows():
            for place, mark in spec.points(runs[run], arm, x, y):
                marks.setdefault(place, []).append(mark)
        level = x in ("budget", "attended_mean") and arms["budget"].isna().all()
        for place, there in marks.items():
            ordered = list(there if spec.points is at_cost else _pooled(there))
            if spec.line == "arm" or x == QUESTION:
                ordered.sort(key=lambda mark: mark.x)
            yield place, Curve(label, style, ordered, bool(level), method)


def _lines(
    spec: Spec, runs: Runs, panel: Panel, x: str
) -> Iterator[tuple[str, Style, str, pd.DataFrame]]:
    """The label, style, method and arms of each line.

    Where keys and values are held in several ways, these have the colours.
    """
    coded, by_arm = _ways(runs, panel.arms) > 1 and not spec.joined, spec.line == "arm"
    for series in series_of(runs, panel, x, by_arm):
        arms, style = series.arms, series.style
        label = series.label(arms["budget"].iloc[0] if by_arm else None)
        if coded:
            kind = str(runs.settings.at[arms.index[0], "kv"])
            words = label.split(", ")[1:]
            shown = [word for word in words if not word.startswith((*HOW_IT_RAN, "kv="))]
            label, style = ", ".join([kind, *shown]), kv_style(kind)
        yield label, style, str(arms["method"].iloc[0]), arms


def _pooled(marks: Sequence[Mark]) -> Iterator[Mark]:
    """One mark for each x: the median of several runs, and the least and largest time of all."""
    by_x = pd.DataFrame(marks).groupby("x")
    for x, group in by_x:
        low, high = group["low"].min(), group["high"].max()
        words, n = group["words"].iloc[0], int(group["n"].sum())
        yield Mark(float(x), float(group["y"].median()), low, high, words=words, n=n)


def _falling(spec: Spec, charts: Sequence[Chart]) -> list[str]:
    """Which lines of times get faster with length, and by how many repeats that is said."""
    if spec.points is not over_lengths:
        return []
    names = [
        f"{curve.label.partition(':')[0]} ({thousands(first.x)} to {thousands(last.x)} tokens:"
        f" {first.y:.3g} to {last.y:.3g} ms, {first.n} and {last.n} repeats)"
        for chart in charts
        for curve in chart.curves
        for first, last in [(curve.marks[0], curve.marks[-1])]
        if last.y < first.y
    ]
    return [f"faster at the longest length than at the shortest: {'; '.join(names)}"] * bool(names)
