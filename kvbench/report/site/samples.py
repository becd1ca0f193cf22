"""Two arms against each other, paired by sample, and what they answered.

There is a page for the arms of the same samples.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kvbench.report.data.frame import content_of
from kvbench.report.data.run import Run
from kvbench.report.data.stats import COVERAGE, FEWEST, Estimate
from kvbench.report.html import MOST_LETTERS, score_of
from kvbench.report.site.markup import File, page
from kvbench.report.site.rows import Row, Site, by_panel

KL = {"name": "KL", "unit": "nats", "digits": 4}
SCORE = {"name": "score", "unit": "points", "digits": 1}
NO_OUTPUTS = (
    "<p class=notes>No outputs are stored in these runs: the task generates none, or they were left"
    " out of a copy of the runs. Scores are there.</p>"
)
MOST_SAMPLES = 24  # of a page: those on which the arms differ most


def samples(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """A page for each panel, and one that leads to them."""
    links: dict[bool, list[str]] = {True: [], False: []}
    for number, (title, rows) in enumerate(by_panel(site.rows).items(), 1):
        path = f"samples/{number}.html"
        whole, outputs = _panel(site, rows)
        links[outputs].append(
            f'<li><a href="{number}.html">{escape(title)}</a>: {len(rows)} arms</li>'
        )
        yield page(path, f"Two arms: {title}", site, sections, whole)
    lists = {
        True: (
            "Two arms against each other, paired by sample, and what they answered, side by side:"
        ),
        False: "Of these without what was answered:",
    }
    body = "".join(
        f"<p>{lists[outputs]}</p><ul>{''.join(some)}</ul>"
        for outputs, some in links.items()
        if some
    )
    yield page("samples/index.html", "Two arms", site, sections, body)


def _panel(site: Site, rows: Sequence[Row]) -> tuple[str, bool]:
    """The body of a page, and whether there are outputs on it."""
    rows = sorted(rows, key=lambda row: not row.run.is_full)
    entries, count = _entries(rows)
    outputs = any(answer and answer[1] is not None for entry in entries for answer in entry["arms"])
    kl = any("kl_mean" in row.cell.numbers for row in rows)
    whole = {
        "arms": [{"name": row.name, "run": " ".join(row.run.folder_names)} for row in rows],
        "samples": entries,
        "outputs": outputs,
        "measure": KL if kl else SCORE,
        "pairs": _pairs(site, rows),
    }
    data = json.dumps(whole, ensure_ascii=False).replace("<", "\\u003c")
    most = f" The {len(entries)} of {count} on which arms differ most."
    tests = len(rows) * (len(rows) - 1) // 2
    body = f"""<p>The difference is over all samples that both have, paired, with its {COVERAGE} %
interval; over fewer than {FEWEST} samples, or where that has no width, neither is called ahead.
Of the {tests} pairs here 1 in 20 would differ by chance alone.</p>
<form id="compare"><label>Left<select name="left"></select></label>
<label>Right<select name="right"></select></label>
<label class="check"><input type="checkbox" name="differ"> only where their scores differ</label>
</form>
<p id="pair" aria-live="polite"></p><h2>Samples</h2>
<p>One prompt, two arms.{most * (len(entries) < count)}</p>{NO_OUTPUTS * (not outputs)}
<div id="samples"></div><script type="application/json" id="data">{data}</script>"""
    return body, outputs


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


def _pairs(site: Site, rows: Sequence[Row]) -> list[list[list[float | int | str] | None]]:
    """How far each arm is ahead of each after it: mean, ends, samples, and a word."""
    pairs: list[list[list[float | int | str] | None]] = []
    for number, row in enumerate(rows):
        ahead = (site.ahead(row, other) for other in rows[number + 1 :])
        pairs.append(
            [
                lead
                and [*(float(f"{end:.5g}") for end in lead[:3]), lead.n, lead.is_range, _says(lead)]
                for lead in ahead
            ]
        )  # type: ignore[arg-type,str-format]
    return pairs


def _says(lead: Estimate) -> str:
    if lead.differs:
        return "ahead" if lead.mean > 0 else "behind"
    return "alike" if lead.n >= FEWEST else "few"


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
