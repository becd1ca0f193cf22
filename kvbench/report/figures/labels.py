"""Names in figures: drawn as they are written, and put beside the ends of lines, so that no legend
is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation

from kvbench.report.data.style import Style

SIZE = 7  # of the words, in points
GAP = 1.3 * SIZE / 72  # inches from name to name, at least
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
    """Write the names to the right of an axis with their markers, each with a thin line from where
    its line ends.

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
    transforms = {
        shift: axis.transAxes + ScaledTranslation(shift / 72, 0, axis.get_figure().dpi_scale_trans)
        for shift in (9, 15)
    }
    to_axis = axis.transData + axis.transAxes.inverted()
    placed = sorted(
        ((float(to_axis.transform((end.x, end.y))[1]), end) for end in ends),
        key=lambda entry: entry[0],
    )
    for height, (_, end) in zip(
        with_gaps([target for target, _ in placed], GAP / tall), placed, strict=True
    ):
        colour = end.style.colour
        line = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.6,
            "alpha": 0.4,
            "shrinkA": 0,
            "shrinkB": 4,
        }
        at = {"xycoords": "data", "textcoords": "axes fraction", "annotation_clip": False}
        axis.annotate("", (end.x, end.y), (1.02, height), arrowprops=line, **at)
        mark = {
            "marker": end.style.marker,
            "color": colour,
            "markerfacecolor": "none",
            "markersize": 4,
        }
        axis.plot(1, height, transform=transforms[9], clip_on=False, linestyle="", **mark)
        axis.text(
            1, height, end.name, transform=transforms[15], fontsize=SIZE, color=colour, va="center"
        )


def with_gaps(targets: Sequence[float], gap: float) -> list[float]:
    """Heights as near to those wanted as can be (least squares) of which no two are nearer than a
    gap.

    Parameters
    ----------
    targets
        in their order, 0..1; the result is moved into that range if it fits there.
    """
    # neighbours that touch: for each the height of their lowest that it would like
    blocks: list[list[float]] = []
    for place, height in enumerate(targets):
        blocks.append([height - gap * place])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    room = max(0.0, 1 - gap * (len(targets) - 1))
    lows = [min(max(_mean(block), 0.0), room) for block in blocks for _ in block]
    return [low + gap * place for place, low in enumerate(lows)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
