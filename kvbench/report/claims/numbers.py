"""Numbers of claims that need no run: printed by papers, or measured by the scripts in scripts/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.claims.sampled import quarter_of
from kvbench.report.claims.verdict import Finding, Missing, estimated, exactly, ranged
from kvbench.report.data import papers as published
from kvbench.report.data.stats import COVERAGE, difference, estimate
from kvbench.runs.quantities import is_number
from kvbench.runs.stored import DAMAGED, ResultsError, contents

# -- printed ---------------------------------------------------------------------------------------


def printed(spec: Mapping[str, Any]) -> Finding:
    """A count of printed cells, or a difference of two, by one of `RULES`."""
    (name,) = set(RULES) & set(spec)
    return RULES[name](**spec[name])


def _averages(tables: Sequence[str], column: str, within: float) -> Finding:
    """Rows whose printed average is not the mean of their cells."""
    off = []
    for frame in map(_frame, tables):
        for row, cells in frame.groupby("row", sort=False):
            cells = cells.set_index("column")["value"]
            if abs(gap := cells.drop(column).mean() - cells[column]) > within:
                off.append(f"{row} {gap:+.1f}")
    return exactly(len(off), "; ".join(off))


def _below(table: str, column: str, rows: Sequence[str], floor: float) -> Finding:
    """Cells below a floor."""
    cells = _frame(table).set_index(["row", "column"])["value"]
    under = [f"{row} {cells[row, column]:g}" for row in rows if cells[row, column] < floor]
    return exactly(len(under), "; ".join(under))


def _losses(table: str, columns: Sequence[str], of: str, less: str, above: float) -> Finding:
    """Cells of one row that lie more than so many points below those of another, by model."""
    cells = _cells(table)
    lost = {
        f"{model} {column}": cells[f"{model}, {less}", column] - cells[f"{model}, {of}", column]
        for model in _models(table)
        for column in columns
    }
    large = [f"{name} {points:.1f}" for name, points in lost.items() if points > above]
    return exactly(len(large), f"of {len(lost)}: {'; '.join(large)}")


def _behind(table: str, columns: Sequence[str], of: str, rivals: Sequence[str]) -> Finding:
    """Cells of one row that a rival's exceeds, in the rows of each model."""
    cells = _cells(table)
    behind = []
    for model in _models(table):
        for column in columns:
            ours = cells[f"{model}, {of}", column]
            best = max(rivals, key=lambda rival: cells[f"{model}, {rival}", column])
            if (theirs := cells[f"{model}, {best}", column]) > ours:
                behind.append(f"{model} {column} {ours:g}, {best} {theirs:g}")
    return exactly(len(behind), "; ".join(behind))


def _gain(table: str, column: str, of: str, less: str) -> Finding:
    """A cell less another of its column."""
    cells = _cells(table)
    return exactly(
        cells[of, column] - cells[less, column],
        f"{cells[of, column]:g} and {cells[less, column]:g}",
    )


RULES: dict[str, Callable[..., Finding]] = {
    "averages": _averages,
    "below": _below,
    "losses": _losses,
    "behind": _behind,
    "gain": _gain,
}


def _frame(table: str) -> pd.DataFrame:
    return published.table(table).frame


def _cells(table: str) -> dict[tuple[str, str], float]:
    frame = _frame(table)
    return {
        (row, column): value
        for row, column, value in frame[["row", "column", "value"]].itertuples(index=False)
    }


def _models(table: str) -> list[str]:
    """The models that a table's rows begin with."""
    return list(dict.fromkeys(row.partition(", ")[0] for row in _frame(table)["row"]))


# -- files of measurements -------------------------------------------------------------------------


def filed(
    folders: Sequence[Path], spec: Mapping[str, Any], coverage: float = COVERAGE
) -> Finding | Missing:
    """A number of a script's JSON, with its interval of this coverage.

    Parameters
    ----------
    folders
        where the file may lie; the first counts.
    spec
        `file`, its name; `value`, the path in it, in which * is every element, some* every one that
        begins so, and @last a list's last quarter; `less`, another path, taken from it; `slope`,
        another path: the log-log slope over it, one number, or one for each value at the path
        `each`; `where`, keys of the value's own record with the values wanted; `interval`,
        "mean" of the elements, "score" of differences of scores, in points, else their range;
        `command`, which writes the file.
    """
    anew = f"{spec['command']} | tail -1 > results/{spec['file']}"
    there = (path for folder in folders if (path := folder / spec["file"]).is_file())
    path = next(there, None)
    if path is None:
        return Missing(f"no {spec['file']}; {anew}")
    paths = [spec[key] for key in ("value", "less", "slope", "each") if key in spec]
    try:
        whole = json.loads(contents(path))
        by_path = [
            dict(_at(whole, value_path, spec.get("where", {}), value_path == spec.get("each")))
            for value_path in paths
        ]
    except (OSError, ResultsError, *DAMAGED) as error:
        return Missing(f"{path} is not what the script writes ({type(error).__name__}); {anew}")
    # records that all paths have
    places = [place for place in by_path[0] if all(place in other for other in by_path)]
    if not places:
        return Missing(f"{path} has no {' with '.join(paths)}; {anew}")
    columns = {
        key: np.array([numbers[place] for place in places])
        for key, numbers in zip(paths, by_path, strict=True)
    }
    note = path.name
    values = columns[spec["value"]] - (columns[spec["less"]] if "less" in spec else 0.0)
    if "slope" in spec:
        sizes = columns[spec["slope"]]
        values = _slopes(values, sizes, columns[spec["each"]] if "each" in spec else 0 * sizes)
        if not len(values):
            return Missing(f"{path} has no two {spec['slope']}; {anew}")
        note = f"of {len(np.unique(sizes))} lengths, {path.name}"
    if spec.get("interval") == "mean":
        return estimated(estimate([values], coverage))._replace(note=note)
    if spec.get("interval") == "score":
        return estimated(difference([values], coverage))._replace(note=note)
    return ranged(values, note)


def _slopes(values: np.ndarray, sizes: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The log-log slope of values over sizes in each group of two or more."""
    masks = (groups == group for group in np.unique(groups))
    logs = [(np.log(sizes[mask]), np.log(values[mask])) for mask in masks if mask.sum() > 1]
    return np.array([np.polyfit(x, y, 1)[0] for x, y in logs])


def _at(
    value: Any,
    path: str,
    where: Mapping[str, Sequence[Any]],
    words: bool = False,
    place: tuple[int, ...] = (),
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The numbers at a path, each with the indices of the elements on the way.

    Words, too, where they are asked for. Records count if their keys have one of the values in
    `where`.
    """
    if isinstance(value, Mapping) and any(
        key in value and value[key] not in some for key, some in where.items()
    ):
        return
    key, *rest = path.split(".", 1)
    name, *quarter = key.split("@")
    elements: list[Any] = []
    if isinstance(value, Mapping) and (several := key.endswith("*")):
        elements = [element for name, element in value.items() if name.startswith(key[:-1])]
    elif several := key == "*":
        elements = list(value)
    elif isinstance(value, Mapping) and name in value:
        elements = [quarter_of(value[name], *quarter) if quarter else value[name]]
    for index, element in enumerate(elements):
        indices = (*place, index) if several else place
        if rest:
            if isinstance(element, Mapping | list):
                yield from _at(element, rest[0], where, words, indices)
        elif is_number(element) or (words and isinstance(element, str)):
            yield indices, element
