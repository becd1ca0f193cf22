"""What the papers print: tables, and figures whose numbers can be had, with our runs that match.

The numbers lie in `published/<paper>.csv`, one line a cell, as printed; `tables.yaml` says what
each table is and which groups of our summaries its columns are, `names.yaml` what its models and
methods are called here. A cell of a model, method or column that kvbench does not have is published
only. Nothing here reads a run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.config import ConfigError, choices, nearest
from kvbench.report import LISTING
from kvbench.runs.quantities import PASSED

if TYPE_CHECKING:
    import pandas

FOLDER = Path(__file__).with_name("published")
KINDS = ("columns", "seconds")  # of a column that ours stand beside: a score, or a time


@dataclass(frozen=True, eq=False)
class PaperTable:
    """One published table.

    Attributes
    ----------
    id
        "icecache_table1".
    title
        one line.
    source
        paper and table.
    timed
        its cells are seconds, not scores.
    stand_in
        a model whose runs stand beside the cells where none of the published model's is there,
        marked.
    frame
        one line a cell. As published: `row`, `column`, `value` (NaN where nothing could be
        measured) and `note` (why, where a number was read off a picture, or where an average is not
        the mean of its columns). How we would run it: `model`, `method`, `budget` (int tokens,
        float share of the prompt; None: the method has none, or the preset), `task`, `settings`
        (further words of the command line, a tuple), `group` and `metric`. `metric` is "score", of
        the group or, where group is "", of the task; or "macro", the plain mean over all groups; or
        a pass@k, "pass_at_8"; or "": published only. A group such as "a + b" stands for the plain
        mean of groups a and b. Of a table of times, in seconds, `metric` names what we measured
        instead, such as "tpot_ms_mean"; of "a + b" the sum. `model` and `method` are None where
        kvbench has none to compare.
    """

    id: str
    title: str
    source: str
    frame: pandas.DataFrame
    timed: bool = False
    stand_in: str | None = None


def ids() -> dict[str, str]:
    """The title of every table by its id, paper after paper."""
    return {id: entry["title"] for id, entry in _read("tables").items()}


@functools.cache
def table(id: str) -> PaperTable:
    """One published table.

    Raises
    ------
    ConfigError
        no such table; names the nearest.
    """
    entries = _read("tables")
    if id not in entries:
        raise ConfigError(f"paper={id}: no such published table; {nearest(id, entries, LISTING)}")
    entry, names = entries[id], _read("names")
    cells = _cells(id.partition("_")[0])
    cells = cells[cells["table"] == id]
    frame = cells[["row", "column"]].reset_index(drop=True)
    frame["value"] = [float(value) if value else float("nan") for value in cells["value"]]
    frame["note"] = cells["note"].to_list()
    methods = {name: names["methods"][name] for name in entry.get("methods", names["methods"])}
    frame["model"] = _ours(cells["model"], names["models"], choices("model"))
    frame["method"] = _ours(cells["method"], methods, choices("method"))
    frame["budget"] = _objects(map(_budget, cells["budget"]))
    runs = [_run_of(column, entry.get("runs", [entry])) for column in cells["column"]]
    mapped = list(map(_mapped, runs, cells["column"], cells["length"]))
    frame["task"] = [run.get("task", "") for run in runs]
    frame["group"] = [group for group, _ in mapped]
    frame["metric"] = [metric for _, metric in mapped]
    frame["settings"] = _objects(
        _settings((*run.get("settings", ()), *names["settings"].get(name, ())))
        for run, name in zip(runs, cells["method"], strict=True)
    )
    timed, stand_in = "seconds" in entry, entry.get("stand_in")
    return PaperTable(id, entry["title"], entry["source"], frame, timed, stand_in)


@functools.cache
def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return document


@functools.cache
def _cells(paper: str) -> pandas.DataFrame:
    """All cells of a paper, as text."""
    import pandas

    return pandas.read_csv(FOLDER / f"{paper}.csv", dtype=str, keep_default_na=False)


def _ours(published: Any, names: dict[str, str], there: dict[str, str]) -> Any:
    """Our names for published ones, None for those that conf/ does not have."""
    ours = (names.get(name) for name in published)
    return _objects(name if name in there else None for name in ours)


def _settings(words: Iterable[str]) -> tuple[str, ...]:
    """Words of the command line; of a key that comes twice, the last."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


def _objects(values: Any) -> Any:
    """A column that keeps None and int as they are: pandas would make both of them floats."""
    import pandas

    return pandas.Series(list(values), dtype=object)


def _budget(text: str) -> int | float | None:
    if not text:
        return None
    return float(text) if "." in text else int(text)


def _run_of(column: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `tables.yaml` says of our runs for a column; {}: published only."""
    return next((run for run in runs for kind in KINDS if column in run.get(kind, ())), {})


def _mapped(run: dict[str, Any], column: str, length: str) -> tuple[str, str]:
    """The group and the metric of a cell in a column that is of such runs.

    `length` is in tokens or words.
    """
    if not run:
        return "", ""
    if "seconds" in run:
        return f"{length} x 1", run["seconds"][column]
    group_or_metric: str = run["columns"][column]
    if group_or_metric in ("score", "macro", *PASSED):
        return "", group_or_metric
    return group_or_metric.format(length=length), "score"
