"""Heat maps, one for each arm, of the figures `passkey` and `lost`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.data.run import Run, Runs
from kvbench.report.figures.charts import fold_words, thousands, tiled, with_legend
from kvbench.report.figures.panels import (
    MOST_MAPS,
    Panel,
    panels_of,
    refuse_crowd,
    rows_of,
    series_of,
    words_below,
)

Map = tuple[str, Run, pd.DataFrame]  # a title, the run, and its cells, rows by columns


def maps_of(
    runs: Runs, name: str, arms: pd.DataFrame, read: Callable[[list[Any]], pd.DataFrame]
) -> tuple[list[Map], list[Panel]]:
    """The maps of these arms for the figure of a name, but for empty ones, and their panels.

    Each under the arm's name, with that of its panel where there are several.

    Parameters
    ----------
    read
        makes the cells of a run's samples.

    Raises
    ------
    ConfigError
        they are more than it can show.
    """
    panels = panels_of(name, runs, arms)
    named = [
        (series.label(arm.budget) + (f"\n{panel.title}" if len(panels) > 1 else ""), runs[arm.name])
        for panel in panels
        for series in series_of(runs, panel)
        for arm in rows_of(series.arms)
    ]
    refuse_crowd(name, len(named), "arms", MOST_MAPS)
    maps = [(title, run, read(run.samples())) for title, run in named]
    return [entry for entry in maps if entry[2].size], panels


def draw_maps(
    maps: Sequence[Map],
    panels: Sequence[Panel],
    heading: str,
    most: float,
    *,
    colour: str,
    columns: str,
    rows: str,
    notes: Sequence[str] = (),
) -> Figure:
    """The maps of the arms of these panels under one scale.

    Parameters
    ----------
    most
        where the scale ends; it begins at 0.
    colour, columns, rows
        what they are.
    notes
        for below the picture.
    """
    of_panel = f": {panels[0].title}" if len(panels) == 1 else ""
    figure, axes = tiled(len(maps), heading + of_panel, 1.6, 4)
    for axis, (name, _, cells) in zip(axes.flat, maps, strict=False):
        look = {"aspect": "auto", "cmap": "cividis", "interpolation": "nearest"}
        image = axis.imshow(cells, vmin=0, vmax=most, **look)
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
    figure.colorbar(image, ax=axes, label=colour, aspect=40, pad=0.01)
    fold_words(figure, axes, named=False)
    return with_legend(figure, axes, [*notes, *words_below(panels)])
