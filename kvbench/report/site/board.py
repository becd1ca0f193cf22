"""The leaderboard: a section for the arms of the same samples, the best first, and all as CSV.

Times of a section are those of one machine, as others say nothing beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd

from kvbench.report.data.select import order_of
from kvbench.report.data.table import NONE, csv_of
from kvbench.report.site.pages import File, Page, PageNumber, grouped, several
from kvbench.report.site.rows import FAR_OVER, Row, Site, by_panel

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
SHARE_COLUMNS = ("device_share", "index_share")
# What the table is filtered by.
CHOICES = {"task": "Task", "question": "Question", "model": "Model", "budget": "Budget C"}
CHOICES |= {"whose": "Whose runs"}


def board(site: Site) -> Iterator[File | Page]:
    """The leaderboard, and its CSV."""
    sections = [
        _section(site, rows)
        for panel in by_panel(site.by_length).values()
        # the most arms first: no other is ranked beside them
        for rows in sorted(
            grouped(panel, lambda row: frozenset(row.run.scores.keys)).values(),
            key=len,
            reverse=True,
        )
    ]
    letters = dict.fromkeys(
        note for table in site.tables for note in table.notes if note[1:2] == ":"
    )
    values = {
        key: sorted({getattr(row, key) for row in site.by_length} - {NONE}, key=order_of)
        for key in CHOICES
    }
    yield File("leaderboard.csv", _csv(sections))
    data = {
        "tasks": grouped(sections, lambda section: (section.task, section.model)),
        "columns": COLUMNS,
        "letters": [note for note in letters if not note[0].isdigit()],
        "choices": several({key: (CHOICES[key], some) for key, some in values.items()}),
        "shares": SHARES,
        "far_over": FAR_OVER,
        "skipped": [f"{path.name}: {why}" for path, why in site.runs.skipped],
        "timed": site.timed,
    }
    yield Page("leaderboard.html", "Leaderboard", "leaderboard.html", data)


def _section(site: Site, rows: Sequence[Row]) -> Any:
    """The arms of the same samples, with their numbers by column: those that any of them has.

    `machine` is that of its times, `elsewhere` the number of arms with times of another.
    """
    first, machine = rows[0], machine_of(rows)
    numbers = [(row, numbers_of(row, machine)) for row in rows]
    there = [
        name
        for name in COLUMNS
        if any(
            (number := of_row[name]) and (number.value or name == "score") for _, of_row in numbers
        )
    ]
    return SimpleNamespace(
        # what distinguishes the samples beside the task and the model
        title=", ".join([*first.panel.split(", ")[2:], f"n = {first.cell.numbers['n']:.0f}"]),
        facts=site.facts[first.whole],
        machine=machine,
        elsewhere=sum(row.cell.machine not in ("", machine) for row in rows),
        columns=there,
        rows=numbers,
        task=first.task,
        model=first.model,
        question=first.question,
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
    shares = {name: row.share(name == "index_share") for name in SHARE_COLUMNS}
    numbers = {
        name: row.time(name, machine) if name in TIMES else row.number(name) for name in COLUMNS
    }
    return numbers | {
        name: None if share is None else PageNumber(name, share, f"{share:.1f}")
        for name, share in shares.items()
    }


def _csv(sections: Sequence[Any]) -> str:
    """All numbers, of all machines: a line for each arm and length."""
    keys = ("task", "model", "question", "method", "budget", "variant", "whose")
    names = [name for name in COLUMNS if name not in SHARE_COLUMNS]
    names += [f"{name}_{end}" for name in ("score", "kl_mean") for end in ("low", "high")]
    lines = []
    for row, shown in (both for section in sections for both in section.rows):
        marks = dict.fromkeys("".join(row.cell.marks.values()))
        lines.append(
            {
                "samples": row.panel,
                **{key: getattr(row, key) for key in keys},
                **{name: row.cell.numbers.get(name) for name in names},
                **{name: number.value for name in SHARE_COLUMNS if (number := shown[name])},
                "machine": row.cell.machine,
                "marks": "".join(filter(str.isalpha, marks)),
                "runs": row.runs,
            }
        )
    return csv_of(pd.DataFrame(lines))
