"""The leaderboard: a section for the arms of the same samples, the best first, and all as CSV.

Times of a section are those of one machine, as others say nothing beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from kvbench.report.data.select import order_of
from kvbench.report.data.table import NONE, csv_of
from kvbench.report.site.pages import File, Page, PageNumber, grouped
from kvbench.report.site.rows import FAR_OVER, Row, Site, by_panel
from kvbench.report.site.submitted import anchor

SHARES = (2, 5, 10, 25, 50)  # per cent of full attention's device memory
# heading and meaning of each column; the index counts in `index_share`
COLUMNS = {
    "score": (
        "score",
        "the task's own, 0 to 100; of fidelity the next tokens that are full attention's, %",
    ),
    "against_full": (
        "than full",
        "points, paired on the same samples under full attention, with the interval",
    ),
    "kl_mean": (
        "KL, nats",
        "KL divergence of the next token from full attention's, mean over tokens and texts",
    ),
    "device_kv_bytes": ("KV, MiB", "keys and values on the device, all layers, longest prompt"),
    "index_bytes": ("index, MiB", "what the method keeps to choose by, wherever it lies"),
    "device_share": (
        "KV, %",
        "of full attention's keys and values, on the device, in layers that are not left dense",
    ),
    "index_share": ("with index, %", "the same with the index"),
    "attended_share": (
        "attended / C",
        "entries that a head attends in a step, over the budget C",
    ),
    "moved_bytes_per_step": ("moved, KiB", "brought from the host to the device in a step"),
    "tpot_ms_p50": ("step, ms", "median time of a decoded token"),
    "own_ms": ("own, ms", "attention, search and transfers of it, without the model"),
    "recall": ("recall", "of the tokens with the most attention, the share that was attended"),
    "n": ("n", "samples"),
}
TIMES = ("tpot_ms_p50", "own_ms")


class Section(NamedTuple):
    """The arms of the same samples.

    Attributes
    ----------
    title
        what distinguishes the samples beside the task and the model.
    facts
        what is to be known of them.
    machine
        that its times are of; "" without any.
    elsewhere
        how many arms have times of another machine, which are in the CSV alone.
    columns
        those in which any of the arms has a number.
    rows
        the arms with their numbers by column.
    task, model, question
        of all its arms, to filter by.
    """

    title: str
    facts: list[str]
    machine: str
    elsewhere: int
    columns: list[str]
    rows: list[tuple[Row, dict[str, PageNumber | None]]]
    task: str
    model: str
    question: str


def board(site: Site) -> Iterator[File | Page]:
    """The leaderboard, and its CSV."""
    sections = [
        _section(site, rows)
        for panel in by_panel(site.by_length).values()
        for rows in _same_samples(panel)
    ]
    letters = dict.fromkeys(
        note for table in site.tables for note in table.notes if note[1:2] == ":"
    )
    yield File("leaderboard.csv", _csv(sections))
    yield Page(
        "leaderboard.html",
        "Leaderboard",
        "leaderboard.html",
        {
            "tasks": grouped(sections, lambda section: (section.task, section.model)),
            "columns": COLUMNS,
            "letters": [note for note in letters if not note[0].isdigit()],
            "choices": _choices(site.by_length),
            "shares": SHARES,
            "far_over": FAR_OVER,
            "skipped": [f"{path.name}: {why}" for path, why in site.runs.skipped],
            "timed": site.timed,
            "anchor": anchor,
        },
    )


def _same_samples(panel: Sequence[Row]) -> list[list[Row]]:
    """The arms of each set of samples, the most arms first: no other is ranked beside them."""
    sets = grouped(panel, lambda row: frozenset(row.run.scores.keys)).values()
    return sorted(sets, key=len, reverse=True)


def _section(site: Site, rows: Sequence[Row]) -> Section:
    machine = machine_of(rows)
    numbers = [(row, numbers_of(row, machine)) for row in rows]
    there = [
        name
        for name in COLUMNS
        if any(
            (number := of_row[name]) and (number.value or name == "score") for _, of_row in numbers
        )
    ]
    return Section(
        title=", ".join([*rows[0].panel.split(", ")[2:], f"n = {rows[0].cell.numbers['n']:.0f}"]),
        facts=site.facts[rows[0].whole],
        machine=machine,
        elsewhere=sum(row.cell.machine not in ("", machine) for row in rows),
        columns=there,
        rows=numbers,
        task=rows[0].task,
        model=rows[0].model,
        question=rows[0].question,
    )


def machine_of(rows: Sequence[Row]) -> str:
    """The machine that most of these have times of, full attention's where as many; or ""."""
    counts = Counter[str]()
    for row in rows:
        if row.cell.machine:
            counts[row.cell.machine] += sum(name in row.cell.numbers for name in TIMES) * 10
            counts[row.cell.machine] += row.run.is_full
    return max(counts, key=lambda name: counts[name], default="")


def numbers_of(row: Row, machine: str) -> dict[str, PageNumber | None]:
    """What the columns show of an arm, with the times of this machine alone."""
    shares = {"device_share": row.share(False), "index_share": row.share(True)}
    numbers = {
        name: row.time(name, machine) if name in TIMES else row.number(name) for name in COLUMNS
    }
    return numbers | {
        name: None if share is None else PageNumber(name, share, f"{share:.1f}")
        for name, share in shares.items()
    }


def _choices(rows: Sequence[Row]) -> dict[str, tuple[str, list[str]]]:
    """What the table is filtered by: a heading, and the values where there are several."""
    headings = {
        "task": "Task",
        "question": "Question",
        "model": "Model",
        "budget": "Budget C",
        "whose": "Whose runs",
    }
    values = {
        key: sorted({getattr(row, key) for row in rows} - {NONE}, key=order_of) for key in headings
    }
    return {key: (headings[key], some) for key, some in values.items() if len(some) > 1}


def _csv(sections: Sequence[Section]) -> str:
    """All numbers, of all machines: a line for each arm and length."""
    keys = ("task", "model", "question", "method", "budget", "variant", "whose")
    shares = ("device_share", "index_share")
    names = [name for name in COLUMNS if name not in shares]
    ends = [f"{name}_{end}" for name in ("score", "kl_mean") for end in ("low", "high")]
    lines = []
    for row, shown in (both for section in sections for both in section.rows):
        marks = dict.fromkeys("".join(row.cell.marks.values()))
        lines.append(
            {
                "samples": row.panel,
                **{key: getattr(row, key) for key in keys},
                **{name: row.cell.numbers.get(name) for name in (*names, *ends)},
                **{name: number.value for name in shares if (number := shown[name])},
                "machine": row.cell.machine,
                "marks": "".join(filter(str.isalpha, marks)),
                "runs": row.runs,
            }
        )
    return csv_of(pd.DataFrame(lines))
