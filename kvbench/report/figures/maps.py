"""Heat maps, one for each arm, of the figures `passkey` and `lost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class NamedArms(NamedTuple):
    """The arms of a picture of maps.

    Attributes
    ----------
    runs
        each under its name, with that of its panel where there are several.
    panels
        that they are of.
    title
        what follows in the picture's title.
    """

    runs: list[tuple[str, Run]]
    panels: list[Panel]
    title: str


def named_arms(runs: Runs, name: str, arms: pd.DataFrame) -> NamedArms:
    """These arms for the figure of a name.

    Raises
    ------
    ConfigError
        they are more than it can show.
    """
    panels = panels_of(name, runs, arms)
    named = []
    for panel in panels:
        below = f"\n{panel.title}" if len(panels) > 1 else ""
        for series in series_of(runs, panel):
            for arm in rows_of(series.arms):
                named.append((f"{series.label(arm.budget)}{below}", runs[arm.name]))
    refuse_crowd(name, len(named), "arms", MOST_MAPS)
    return NamedArms(named, panels, f": {panels[0].title}" if len(panels) == 1 else "")


def draw_maps(
    maps: Sequence[tuple[str, pd.DataFrame]],
    panels: Sequence[Panel],
    title: str,
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
    maps
        the title and the cells of each, rows by columns.
    most
        where the scale ends; it begins at 0.
    colour, columns, rows
        what they are.
    notes
        for below the picture.
    """
    figure, axes = tiled(len(maps), title, 1.6, 4)
    for axis, (name, cells) in zip(axes.flat, maps, strict=False):
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
