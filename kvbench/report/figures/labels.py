"""Names in figures: drawn as they are written, and put beside the ends of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation
from scipy.optimize import isotonic_regression

from kvbench.report.data.style import Style

SIZE = 7  # of the words, in points
GAP = 1.3 * SIZE / 72  # inches from name to name, at least
SHRUNK = {"shrinkA": 0, "shrinkB": 4}  # of a thin line, in points
HOLLOW = {"markerfacecolor": "none", "markersize": 4, "linestyle": ""}
TALL = 2.2  # inches of an axis with names beside it, at least


class End(NamedTuple):
    """Where a line ends, in data coordinates, and what it is called."""

    name: str
    style: Style
    x: float
    y: float


def height_for(names: int) -> float:
    """Height of an axis that has room for so many names beside it, in inches."""
    return max(TALL, GAP * names)


def as_written(figure: Figure) -> None:
    """Have all words drawn as they are: a name with $ in it is no formula.

    Numbers along axes stay what they are, 10^3.

    Call it when all words are there.
    """
    numbers = set()
    for axis in figure.findobj(Axis):
        for ticks, formatter in (
            (axis.get_major_ticks(), axis.get_major_formatter()),
            (axis.get_minor_ticks(), axis.get_minor_formatter()),
        ):
            # which has the labels that a figure sets by itself
            if not isinstance(formatter, FuncFormatter):
                numbers |= {label for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)


def name_ends(axis: Any, ends: Sequence[End], tall: float) -> None:
    """Write names right of an axis, each with its marker and a thin line from its line's end.

    Call it when the limits and scales are final.

    Parameters
    ----------
    axis
        matplotlib's.
    ends
        one for each line.
    tall
        height of the axis in inches.
    """
    # Markers and words stand so many points right of the axis, however wide that is.
    points = axis.get_figure().dpi_scale_trans
    beside = {shift: axis.transAxes + ScaledTranslation(shift / 72, 0, points) for shift in (9, 15)}
    to_axis = axis.transData + axis.transAxes.inverted()

    def target(end: End) -> float:
        return float(to_axis.transform((end.x, end.y))[1])

    placed = sorted(ends, key=target)
    heights = with_gaps(list(map(target, placed)), GAP / tall)
    for height, end in zip(heights, placed, strict=True):
        colour = end.style.colour
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.4, **SHRUNK}
        at = {"xycoords": "data", "textcoords": "axes fraction", "annotation_clip": False}
        axis.annotate("", (end.x, end.y), (1.02, height), arrowprops=line, **at)
        mark = {"marker": end.style.marker, "color": colour, **HOLLOW}
        axis.plot(1, height, transform=beside[9], clip_on=False, **mark)
        look = {"fontsize": SIZE, "color": colour, "va": "center"}
        axis.text(1, height, end.name, transform=beside[15], **look)


def with_gaps(targets: Sequence[float], gap: float) -> list[float]:
    """Heights nearest to those wanted (least squares), of which no two are nearer than a gap.

    Parameters
    ----------
    targets
        in their order, 0..1; the result is moved into that range if it fits there.
    """
    gaps = gap * np.arange(len(targets))
    room = max(0.0, 1 - gap * (len(targets) - 1))
    lows = isotonic_regression(np.array(targets) - gaps).x.clip(0.0, room)
    return [float(height) for height in lows + gaps]
