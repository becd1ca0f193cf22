"""The figure `passkey`: passkeys found by depth and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.figures.maps import draw_maps, maps_of
from kvbench.report.figures.panels import arms_for


def passkey(runs: Runs) -> Figure:
    """Share of the passkeys found, by depth and prompt length; a panel for each arm.

    (IceCache, Fig. 6.)
    """
    arms = arms_for(runs, "passkey", probed=False, task="passkey")
    maps, panels = maps_of(runs, "passkey", arms, passkey_cells)
    units = " or ".join(sorted({str(unit) for unit in runs.settings.loc[arms.index, "task.unit"]}))
    single = sum(len(run.scores.ids) <= cells.size for _, run, cells in maps)
    note = f"in {single} of {len(maps)} maps a cell is one sample: found or not"
    return draw_maps(
        maps,
        panels,
        "passkeys found by depth and length",
        100,
        colour="found (%)",
        columns=f"prompt length ({units})",
        rows="depth (%)",
        notes=[note] * bool(single),
    )


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
