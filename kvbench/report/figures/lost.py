"""The figure `lost`: where a selection misses attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.figures.maps import draw_maps, maps_of
from kvbench.report.figures.panels import arms_for


def lost(runs: Runs) -> Figure:
    """Attention mass that a selection misses, by layer and query head; a panel for each arm."""
    arms = arms_for(runs, "lost", probed=True)
    maps, panels = maps_of(runs, "lost", arms[arms["method"] != YARDSTICK], lost_cells)
    maps = [(f"{title}: {cells.to_numpy().mean():.1f} %", run, cells) for title, run, cells in maps]
    if not maps:
        raise ConfigError(
            "figure=lost: of the runs with probes none is sparse and has the mass of each layer and"
            " head"
        )
    return draw_maps(
        maps,
        panels,
        "attention mass lost by layer and query head, and its mean",
        max(cells.to_numpy().max() for *_, cells in maps),
        colour="lost (%)",
        columns="query head",
        rows="layer",
    )


def lost_cells(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Percent of the attention on keys that were not selected, layers by query heads.

    It is the mean over samples.
    """
    layers = [(sample.get("probe") or {}).get("layers") or {} for sample in samples]
    frames = [
        pd.DataFrame({int(layer): numbers["mass"] for layer, numbers in by_layer.items()}).T
        for by_layer in layers
        if by_layer
    ]
    if not frames:
        return pd.DataFrame()
    return 100 * (1 - pd.concat(frames).groupby(level=0).mean().sort_index())
