"""Heat maps, one for each arm, of the figures `passkey` and `lost`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.data.run import Run, Runs
from kvbench.report.figures.panels import (
    MOST_MAPS,
    Panel,
    finished,
    panels_of,
    refuse_crowd,
    rows_of,
    series_of,
    thousands,
    tiled,
)


def named_arms(
    runs: Runs, name: str, arms: pd.DataFrame
) -> tuple[list[tuple[str, Run]], list[Panel], str]:
    """Each arm under its name, with that of its panel where there are several; the panels; and what
    stands in the title.
    """
    panels = panels_of(name, runs, arms)
    named = [
        (
            series.label(arm.budget)
            if len(panels) == 1
            else f"{series.label(arm.budget)}\n{panel.title}",
            runs[arm.name],
        )
        for panel in panels
        for series in series_of(runs, panel)
        for arm in rows_of(series.arms)
    ]
    refuse_crowd(name, len(named), "arms", MOST_MAPS)
    return named, panels, f": {panels[0].title}" if len(panels) == 1 else ""


def draw_maps(
    maps: Sequence[tuple[str, pd.DataFrame]],
    panels: Sequence[Panel],
    title: str,
    words: tuple[str, str, str],
    most: float,
) -> Figure:
    """The maps of the arms of these panels under one scale.

    Parameters
    ----------
    maps
        the title and the cells of each, rows by columns.
    words
        what the colour, the columns and the rows are.
    most
        where the scale ends; it begins at 0.
    """
    across = 4
    shown, columns, rows = words
    figure, axes = tiled(len(maps), title, 1.6, across)
    for axis, (name, cells) in zip(axes.flat, maps, strict=False):
        image = axis.imshow(
            cells, aspect="auto", cmap="cividis", vmin=0, vmax=most, interpolation="nearest"
        )
        ticks = range(0, cells.shape[1], max(1, cells.shape[1] // 8))
        labels = [thousands(cells.columns[place]) for place in ticks]
        axis.set_xticks(ticks, labels, rotation=45 if max(map(len, labels)) > 2 else 0)
        ticks = range(0, cells.shape[0], max(1, cells.shape[0] // 5))
        axis.set_yticks(ticks, [f"{cells.index[place]:g}" for place in ticks])
        axis.set_title(name)
    for axis in axes[:, 0]:
        axis.set_ylabel(rows)
    for axis in axes.flat[max(0, len(maps) - axes.shape[1]) : len(maps)]:
        axis.set_xlabel(columns)
    figure.colorbar(image, ax=axes, label=shown, aspect=40, pad=0.01)
    return finished(figure, axes, panels)
