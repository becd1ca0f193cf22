"""Heat maps, one for each arm, of the figures `passkey` and `lost`."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.data.run import Run, Runs
from kvbench.report.figures.panels import (
    MOST_MAPS,
    finished,
    panels_of,
    refuse_crowd,
    rows_of,
    series_of,
    thousands,
    tiled,
)


def named_arms(runs: Runs, name: str, arms: pd.DataFrame) -> tuple[list[tuple[str, Run]], str]:
    """Each arm under its name, with that of its panel where there are several; else that stands in the title."""
    panels = panels_of(name, runs, arms)
    found = [
        (one.label(arm.budget) if len(panels) == 1 else f"{one.label(arm.budget)}\n{title}", runs[arm.name])
        for title, own in panels
        for one in series_of(runs, own)
        for arm in rows_of(one.arms)
    ]
    refuse_crowd(name, len(found), "arms", MOST_MAPS)
    return found, f": {panels[0][0]}" if len(panels) == 1 else ""


def draw_maps(
    maps: Sequence[tuple[str, pd.DataFrame]], arms: pd.DataFrame, title: str, words: tuple[str, str, str], most: float
) -> Figure:
    """The maps of these arms under one scale.

    Args:
        maps: the title and the cells of each, rows by columns.
        words: what the colour, the columns and the rows are.
        most: where the scale ends; it begins at 0.
    """
    across = min(4, len(maps))
    shown, columns, rows = words
    figure, axes = tiled(len(maps), across, title, (3.1, 2.6))
    for axis, (name, cells) in zip(axes.flat, maps, strict=False):
        image = axis.imshow(cells, aspect="auto", cmap="cividis", vmin=0, vmax=most, interpolation="nearest")
        ticks = range(0, cells.shape[1], max(1, cells.shape[1] // 8))
        labels = [thousands(cells.columns[place]) for place in ticks]
        axis.set_xticks(ticks, labels, rotation=45 if max(map(len, labels)) > 2 else 0)
        ticks = range(0, cells.shape[0], max(1, cells.shape[0] // 5))
        axis.set_yticks(ticks, [f"{cells.index[place]:g}" for place in ticks])
        axis.set_title(name, fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel(rows)
    for axis in axes.flat[max(0, len(maps) - across) : len(maps)]:
        axis.set_xlabel(columns)
    figure.colorbar(image, ax=axes, label=shown, aspect=40, pad=0.01)
    return finished(figure, axes, [arms])
