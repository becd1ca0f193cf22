"""Two arms against each other, paired by sample, and what they answered.

There is a page for the arms of the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.report.data.frame import content_of
from kvbench.report.data.run import Run
from kvbench.report.data.stats import COVERAGE, FEWEST, Estimate
from kvbench.report.html import score_of
from kvbench.report.site.pages import Page
from kvbench.report.site.rows import Row, Site

KL = {"name": "KL", "unit": "nats", "digits": 4}
SCORE = {"name": "score", "unit": "points", "digits": 1}
MOST_LETTERS = 400  # of an answer
MOST_SAMPLES = 24  # of a page: those on which the arms differ most


def samples(site: Site) -> Iterator[Page]:
    """A page for each panel, and one that leads to them."""
    links: dict[bool, list[tuple[str, str, int]]] = {True: [], False: []}
    for number, (title, rows) in enumerate(site.by_panel.items(), 1):
        data = _panel(site, rows)
        links[data["outputs"]].append((f"{number}.html", title, len(rows)))
        yield Page(
            f"samples/{number}.html",
            f"Two arms: {title}",
            "samples.html",
            {
                "data": data,
                "shown": len(data["samples"]),
                "count": data.pop("count"),
                "tests": sum(pair is not None for pairs in data["pairs"] for pair in pairs),
                "coverage": COVERAGE,
                "fewest": FEWEST,
            },
        )
    yield Page("samples/index.html", "Two arms", "samples_index.html", {"links": links})


def _panel(site: Site, rows: Sequence[Row]) -> dict[str, Any]:
    """What a page has for its script."""
    rows = sorted(rows, key=lambda row: not row.run.is_full)
    entries, count = _entries(rows)
    return {
        "arms": [{"name": row.name, "run": " ".join(row.run.folder_names)} for row in rows],
        "samples": entries,
        "count": count,
        "outputs": any(
            answer and answer[1] is not None for entry in entries for answer in entry["arms"]
        ),
        "measure": KL if any(row.has_kl for row in rows) else SCORE,
        "pairs": _pairs(site, rows),
    }


def _entries(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], int]:
    """The samples on which arms differ most, with each arm's answer; the number of all samples."""
    seeds = {seed for row in rows for seed in row.run.scores.seeds}
    stored = [_records(row.run, len(seeds) > 1) for row in rows]
    answers = {
        id: [records.get(id) for records in stored]
        for id in dict.fromkeys(id for records in stored for id in records)
    }
    spread = {
        id: _spread([record["score"] for record in records if record])
        for id, records in answers.items()
    }
    entries = []
    for id in sorted(answers, key=lambda id: -spread[id])[:MOST_SAMPLES]:
        first = next(record for record in answers[id] if record)
        facts = {key: first[key] for key in ("group", "expected", "prompt")}
        arms = [record and [record["score"], record["output"]] for record in answers[id]]
        entries.append({"id": id, **facts, "arms": arms})
    return entries, len(answers)


def _pairs(site: Site, rows: Sequence[Row]) -> list[list[list[Any] | None]]:
    """How far each arm is ahead of each after it: mean, ends, samples, and a word."""
    if max(len(row.run.scores.ids) for row in rows) < FEWEST:
        return [[] for _ in rows]
    pairs: list[list[list[Any] | None]] = []
    for number, row in enumerate(rows):
        leads = [site.ahead(row, other) for other in rows[number + 1 :]]
        pairs.append([lead and [*_ends(lead), lead.n, _says(lead)] for lead in leads])
    return pairs


def _ends(lead: Estimate) -> list[float]:
    return [float(f"{end or 0.0:.4g}") for end in lead[:3]]


def _says(lead: Estimate) -> str:
    if lead.differs:
        return "better" if lead.mean > 0 else "worse"
    return "not shown" if lead.n >= FEWEST else "not tested"


def _records(run: Run, seeded: bool) -> dict[str, dict[str, Any]]:
    """What a run stored of each sample: its score 0-100, group, prompt, answers and output.

    None stands for what was not stored. By the sample's id; among runs of several seeds with the
    word for its content, as seeds share ids.
    """
    stored = {}
    for record in run.samples():
        score = score_of(record, run.arm["metric"])
        answers = record.get("answers") or [
            key for key in [(record.get("meta") or {}).get("key")] if key is not None
        ]
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


def _spread(scores: Sequence[float | None]) -> float:
    valid = [score for score in scores if score is not None]
    return statistics.pstdev(valid) if valid else 0.0
