"""Heat maps, one for each arm: passkeys found by depth and length, attention mass lost by layer and head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.frame import YARDSTICK, Runs
from kvbench.report.figures.panels import (
    MOST_MAPS,
    arms_for,
    finished,
    grid,
    panels_of,
    refuse_crowd,
    rows_of,
    series_of,
    thousands,
)


class _Map(NamedTuple):
    """The cells of an arm, rows by columns, with what stands above them."""

    title: str
    cells: pd.DataFrame


def passkey(runs: Runs) -> Figure:
    """Share of the passkeys found, by depth and prompt length; a panel for each arm (IceCache, Fig. 6)."""
    arms = arms_for(runs, "passkey", probed=False, task="passkey")
    named, below = _arms(runs, "passkey", arms)
    units = " or ".join(sorted({str(unit) for unit in runs.settings.loc[arms.index, "task.unit"]}))
    found = [_Map(title, passkey_cells(runs.samples(arm))) for title, arm in named]
    title = f"passkeys found by depth and length{below}"
    return _draw(found, arms, title, ("found (%)", f"prompt length ({units})", "depth (%)"), 100)


def passkey_cells(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
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


def lost(runs: Runs) -> Figure:
    """Attention mass that a selection misses, by layer and query head; a panel for each arm."""
    arms = arms_for(runs, "lost", probed=True)
    arms = arms[arms["method"] != YARDSTICK]
    named, below = _arms(runs, "lost", arms) if len(arms) else ([], "")
    cells = [(title, lost_cells(runs.samples(arm))) for title, arm in named]
    found = [_Map(f"{title}: {own.to_numpy().mean():.1f} %", own) for title, own in cells if own.size]
    if not found:
        raise ConfigError("figure=lost: of the runs with probes none is sparse and has the mass of each layer and head")
    most = max(own.to_numpy().max() for _, own in found)
    title = f"attention mass lost by layer and query head, and its mean{below}"
    return _draw(found, arms, title, ("lost (%)", "query head", "layer"), most)


def lost_cells(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Percent of the attention on keys that were not selected, layers by query heads: the mean over samples."""
    layers = [(sample.get("probe") or {}).get("layers") or {} for sample in samples]
    frames = [pd.DataFrame({int(layer): own["mass"] for layer, own in one.items()}).T for one in layers if one]
    if not frames:
        return pd.DataFrame()
    return 100 * (1 - pd.concat(frames).groupby(level=0).mean().sort_index())


def _arms(runs: Runs, name: str, arms: pd.DataFrame) -> tuple[list[tuple[str, Any]], str]:
    """Each arm under its name, with that of its panel where there are several; else that stands in the title."""
    panels = panels_of(name, runs, arms)
    found = [
        (one.label(arm.budget) if len(panels) == 1 else f"{one.label(arm.budget)}\n{title}", arm)
        for title, own in panels
        for one in series_of(runs, own)
        for arm in rows_of(one.arms)
    ]
    refuse_crowd(name, len(found), "arms", MOST_MAPS)
    return found, f": {panels[0][0]}" if len(panels) == 1 else ""


def _draw(maps: Sequence[_Map], arms: pd.DataFrame, title: str, words: tuple[str, str, str], most: float) -> Figure:
    """The maps of these arms under one scale.

    Args:
        words: what the colour, the columns and the rows are.
        most: where the scale ends; it begins at 0.
    """
    across = min(4, len(maps))
    shown, columns, rows = words
    figure, axes = grid(math.ceil(len(maps) / across), across, title, (3.1, 2.6))
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
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
