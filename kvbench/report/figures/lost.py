"""The figure `lost`: where a selection misses attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.figures.maps import draw_maps, named_arms
from kvbench.report.figures.panels import arms_for


def lost(runs: Runs) -> Figure:
    """Attention mass that a selection misses, by layer and query head; a panel for each arm."""
    arms = arms_for(runs, "lost", probed=True)
    named = named_arms(runs, "lost", arms[arms["method"] != YARDSTICK])
    cells = [(title, lost_cells(run.samples())) for title, run in named.runs]
    maps = [
        (f"{title}: {losses.to_numpy().mean():.1f} %", losses)
        for title, losses in cells
        if losses.size
    ]
    if not maps:
        raise ConfigError(
            "figure=lost: of the runs with probes none is sparse and has the mass of each layer and"
            " head"
        )
    most = max(losses.to_numpy().max() for _, losses in maps)
    title = f"attention mass lost by layer and query head, and its mean{named.title}"
    words = {"colour": "lost (%)", "columns": "query head", "rows": "layer"}
    return draw_maps(maps, named.panels, title, most, **words)


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
