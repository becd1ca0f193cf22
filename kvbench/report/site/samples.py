"""Two arms against each other, paired by sample, and what they answered.

There is a page for the arms of the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.report.data.frame import content_of
from kvbench.report.data.run import Run
from kvbench.report.data.stats import COVERAGE, FEWEST
from kvbench.report.html import score_of
from kvbench.report.site.pages import Page
from kvbench.report.site.paired import word_of
from kvbench.report.site.rows import Row, Site

KL = {"name": "KL", "unit": "nats", "digits": 4}
SCORE = {"name": "score", "unit": "points", "digits": 1}
MOST_LETTERS = 400  # of an answer
MOST_SAMPLES = 24  # of a page: those on which the arms differ most


def samples(site: Site) -> Iterator[Page]:
    """A page for each panel, and one that leads to them."""
    links: dict[bool, list[tuple[str, str, int]]] = {True: [], False: []}
    for number, (title, panel) in enumerate(site.by_panel.items(), 1):
        rows = sorted(panel, key=lambda row: not row.run.is_full)
        entries, count = _entries(rows)
        answers = (answer for entry in entries for answer in entry["arms"] if answer)
        data: dict[str, Any] = {
            "arms": [{"name": row.name, "run": " ".join(row.run.folder_names)} for row in rows],
            "samples": entries,
            "outputs": any(output is not None for _, output in answers),
            "measure": KL if any(row.has_kl for row in rows) else SCORE,
            "pairs": list(_pairs(site, rows)),
        }
        words = {"data": data, "shown": len(entries), "count": count, "coverage": COVERAGE}
        words["tests"] = sum(pair is not None for pairs in data["pairs"] for pair in pairs)
        words["fewest"] = FEWEST
        links[data["outputs"]].append((f"{number}.html", title, len(rows)))
        yield Page(f"samples/{number}.html", f"Two arms: {title}", "samples.html", words)
    yield Page("samples/index.html", "Two arms", "samples_index.html", {"links": links})


def _entries(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], int]:
    """The samples on which arms differ most, with each arm's answer; the number of all samples."""
    seeds = {seed for row in rows for seed in row.run.scores.seeds}
    stored = [_records(row.run, len(seeds) > 1) for row in rows]
    answers = {
        id: [records.get(id) for records in stored]
        for id in dict.fromkeys(id for records in stored for id in records)
    }

    def spread(id: str) -> float:
        scores = [record["score"] for record in answers[id] if record]
        valid = [score for score in scores if score is not None]
        return statistics.pstdev(valid) if valid else 0.0

    entries = []
    for id in sorted(answers, key=spread, reverse=True)[:MOST_SAMPLES]:
        first = next(record for record in answers[id] if record)
        facts = {key: first[key] for key in ("group", "expected", "prompt")}
        arms = [record and [record["score"], record["output"]] for record in answers[id]]
        entries.append({"id": id, **facts, "arms": arms})
    return entries, len(answers)


def _pairs(site: Site, rows: Sequence[Row]) -> Iterator[list[list[Any] | None]]:
    """How far each arm is ahead of each after it: mean, ends, samples, and a word."""
    tested = max(len(row.run.scores.ids) for row in rows) >= FEWEST
    for number, row in enumerate(rows):
        leads = [site.ahead(row, other) for other in rows[number + 1 :] if tested]
        yield [
            lead and [*(float(f"{end or 0.0:.4g}") for end in lead[:3]), lead.n, word_of(lead)]
            for lead in leads
        ]


def _records(run: Run, seeded: bool) -> dict[str, dict[str, Any]]:
    """What a run stored of each sample: its score 0-100, group, prompt, answers and output.

    None stands for what was not stored. By the sample's id; among runs of several seeds with the
    word for its content, as seeds share ids.
    """
    stored = {}
    for record in run.samples():
        score = score_of(record, run.arm["metric"])
        key = (record.get("meta") or {}).get("key")
        answers = record.get("answers") or ([] if key is None else [key])
        output = record.get("error") or record.get("output")
        which = f" ({record.get('content') or content_of(record)})" if seeded else ""
        stored[f"{record['id']}{which}"] = {
            "score": None if score is None else 100 * score,
            "group": str(record.get("group") or ""),
            "expected": " | ".join(map(str, answers))[:MOST_LETTERS] if answers else None,
            "prompt": str(record.get("excerpt") or ""),
            "output": None if output is None else str(output)[:MOST_LETTERS],
        }
    return stored
