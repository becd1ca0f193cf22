"""The figure `clusters`: what a cluster or page costs in recall by its size."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import Runs
from kvbench.report.figures.panels import (
    arms_for,
    finished,
    grid,
    line_look,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.runs.quantities import QUANTITIES

# Options that set how many things a cluster holds.
SIZES = {"method.cluster_size": "chunks per cluster", "method.page_size": "tokens per page"}


def clusters(runs: Runs) -> Figure:
    """Recall against how many things lie in a cluster or page (LycheeCluster, Fig. 10)."""
    arms = arms_for(runs, "clusters", probed=True)
    panels = [
        (option, panel._replace(arms=varied))
        for panel in panels_of("clusters", runs, arms)
        for option in SIZES
        if len(varied := _varied(runs, panel.arms, option))
    ]
    if not panels:
        keys = " or ".join(SIZES)
        raise ConfigError(
            f"figure=clusters: no two runs with probes differ in {keys} alone; a sweep over one"
            " makes some"
        )
    figure, axes = grid(1, len(panels), f"{QUANTITIES['recall'].title} against cluster size")
    for axis, (option, panel) in zip(axes.flat, panels, strict=True):
        for series in series_of(runs, panel, without=option):
            for budget in series.arms["budget"].drop_duplicates():
                line = series.arms[series.arms["budget"] == budget].sort_values("size")
                look = line_look(series.style)
                axis.plot(line["size"], line["recall"], label=series.label(budget), **look)
        axis.set(title=panel.title, xlabel=SIZES[option], ylabel=QUANTITIES["recall"].axis)
        axis.set_ylim(-0.03, 1.03)
        mark_powers(axis, panel.arms["size"])
    return finished(figure, axes, [panel for _, panel in panels])


def _varied(runs: Runs, arms: pd.DataFrame, option: str) -> pd.DataFrame:
    """The arms that differ from others of their method and budget in an option, as `size`."""
    if option not in runs.settings:
        return arms.head(0)
    sizes = runs.settings.loc[arms.index, option]
    varied = sizes.groupby([arms["method"], arms["budget"]]).transform("nunique") > 1
    return arms[varied].assign(size=sizes[varied].astype(float))
