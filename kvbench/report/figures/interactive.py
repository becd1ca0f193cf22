"""Score or KL against the share of full attention's bytes, as one page that answers to the mouse.

It is a Vega-Lite chart; the page has Vega inside and fetches nothing. vl-convert makes it (`pip
install 'kvbench[interactive]'`); the site calls `interactive`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from kvbench.config import ConfigError
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.shared import on_shared_samples
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    MOST_PANELS,
    arms_for,
    panels_of,
    ranking,
    series_of,
)
from kvbench.runs.quantities import QUANTITIES

NAME = "interactive"
SHARE = "held: % of full attention's native bytes, device, host and index"
# Vega's shape for each marker of matplotlib; a path where Vega has none of that name.
SHAPES = {"o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "P": "cross"}
SHAPES |= {"<": "triangle-left", ">": "triangle-right", "D": "diamond", "d": "diamond"}


def interactive(runs: Runs) -> str:
    """An HTML page of some 0.9 MB: a chart for each task, model and protocol, a mark for each arm.

    Of many it shows those with the most arms, and says of how many.

    Pointing at a mark shows the arm, its interval, its number of samples and its run id; a click on
    a method of the legend leaves that method alone. Arms are compared as `draw` compares them, on
    the samples that they share, but all methods are there.

    Returns
    -------
    str
        The page; "" where vl-convert is not installed.

    Raises
    ------
    ConfigError
        no arm has counted bytes beside full attention's.
    """
    if not find_spec("vl_convert"):
        return ""
    import vl_convert

    page: str = vl_convert.vegalite_to_html(chart(runs), bundle=True)
    return page


def chart(runs: Runs) -> dict[str, Any]:
    """The Vega-Lite description of `interactive`'s page."""
    runs = on_shared_samples(over_seeds(runs, runs)[0])
    arms = arms_for(runs, NAME, probed=False, scored=True)
    arms = arms.assign(share=[runs[run].share_of_full for run in arms.index])
    arms = arms.dropna(subset=["share"])
    if not len(arms):
        raise ConfigError(f"figure={NAME}: no audit that counts bytes, beside full attention's")
    charts, looks = [], dict[str, tuple[str, str]]()  # the charts of a page share one legend
    for panel in ranking(runs, panels_of(NAME, runs, arms)):
        marks = [
            _mark(runs[run], series.label(arm["budget"]), series.style, arm)
            for series in series_of(runs, panel)
            for run, arm in series.arms.iterrows()
        ]
        if marks := list(filter(None, marks)):
            looks |= {mark["method"]: (mark.pop("colour"), mark.pop("shape")) for mark in marks}
            charts.append((panel.title, marks))
    most = sorted(charts, key=lambda one: -len(one[1]))[:MOST_PANELS]
    shown = [_chart(title, marks, looks) for title, marks in most]
    page = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "vconcat": shown}
    if len(shown) < len(charts):
        page["title"] = f"{len(shown)} of {len(charts)} tasks, models and protocols: most arms"
    return page


def _mark(run: Run, label: str, style: Style, arm: Any) -> dict[str, Any]:
    """An arm as Vega draws it; {} where it is full attention, which has no place on KL's axis."""
    near = run.kl()
    if near is not None and near.mean <= 0:
        return {}
    value = near or run.score()
    low, high = (value.mean if end is None else end for end in (value.low, value.high))
    return {
        "measure": "kl_mean" if near else "score",
        "method": style.label,
        "colour": style.colour,
        "shape": SHAPES.get(style.marker, "circle"),
        "arm": label,
        "share": round(arm["share"], 2),
        "value": float(f"{value.mean:.4g}"),
        "low": float(f"{low:.4g}"),
        "high": float(f"{high:.4g}"),
        "n": value.n,
        "run": ", ".join(run.folder_names),
    }


def _chart(
    title: str, marks: list[dict[str, Any]], looks: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Marks with their intervals over the share of bytes; a dotted line at full attention's."""
    measure = marks[0]["measure"]
    log = measure != "score"
    colours = {"domain": [*looks], "range": [colour for colour, _ in looks.values()]}
    shapes = {"domain": [*looks], "range": [shape for _, shape in looks.values()]}
    y = {
        "type": "quantitative",
        "title": QUANTITIES[measure].axis,
        "scale": {"type": "log" if log else "linear", "zero": False},
    }
    shared = {
        "x": {"field": "share", "type": "quantitative", "title": SHARE, "scale": {"type": "log"}},
        "color": {"field": "method", "type": "nominal", "scale": colours, "title": None},
        "shape": {"field": "method", "type": "nominal", "scale": shapes, "title": None},
        "opacity": {"condition": {"param": "picked", "value": 1}, "value": 0.07},
        "tooltip": [
            {"field": name} for name in ("arm", "share", "value", "low", "high", "n", "run")
        ],
    }
    bars = {name: shared[name] for name in ("x", "color", "opacity")}
    picked = {"type": "point", "fields": ["method"]}
    return {
        "title": title,
        "width": 620,
        "height": 380,
        "data": {"values": marks},
        "layer": [
            {
                "mark": "rule",
                "encoding": {**bars, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "size": 80, "strokeWidth": 2},
                "params": [{"name": "picked", "select": picked, "bind": "legend"}],
                "encoding": {**shared, "y": {**y, "field": "value"}},
            },
        ],
    }
