"""What arms answered, two side by side: a page for the arms of the same samples, full attention first."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kvbench.report.data.frame import content_of
from kvbench.report.html import MOST_LETTERS, score_of
from kvbench.report.site.parts import File, Row, Site, page
from kvbench.runs.stored import read_samples

MOST_SAMPLES = 24  # of a page: those on which the arms differ most


def samples(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """A page for each panel, and one that leads to them."""
    panels: dict[str, list[Row]] = {}
    for row in site.rows:
        panels.setdefault(row.panel, []).append(row)
    links: dict[bool, list[str]] = {True: [], False: []}
    for number, (title, rows) in enumerate(panels.items(), 1):
        path = f"samples/{number}.html"
        whole, outputs = _panel(site, rows)
        links[outputs].append(f'<li><a href="{number}.html">{escape(title)}</a>: {len(rows)} arms</li>')
        yield page(path, f"Samples: {title}", site, sections, whole)
    lists = {True: "What two arms answered to the same prompt, side by side:", False: "Of these the scores alone:"}
    body = "".join(f"<p>{lists[outputs]}</p><ul>{''.join(some)}</ul>" for outputs, some in links.items() if some)
    yield page("samples/index.html", "Samples", site, sections, body)


def _panel(site: Site, rows: Sequence[Row]) -> tuple[str, bool]:
    """The body of a page, and whether there are outputs on it."""
    rows = sorted(rows, key=lambda row: not row.is_yardstick)
    seeds = {seed for row in rows for seed in site.joined.scores[row.run].seeds}
    found = [_records(site, row, len(seeds) > 1) for row in rows]
    ids = list(dict.fromkeys(id for records in found for id in records))
    ids = sorted(ids, key=lambda id: -_spread([records[id]["score"] for records in found if id in records]))
    shown = ids[:MOST_SAMPLES]
    arms = [{"name": row.name, "run": " ".join(site.folder_names(row.run))} for row in rows]
    first = {id: next(records[id] for records in found if id in records) for id in shown}
    entries = [
        {
            "id": id,
            "group": first[id]["group"],
            "expected": first[id]["expected"],
            "arms": [[records[id]["score"], records[id]["output"]] if id in records else None for records in found],
        }
        for id in shown
    ]
    dropped = not any(one and one[1] is not None for entry in entries for one in entry["arms"])
    whole = {"arms": arms, "samples": entries, "outputs": not dropped}
    data = json.dumps(whole, ensure_ascii=False).replace("<", "\\u003c")
    few = f" The {len(shown)} of {len(ids)} on which arms differ most." if len(shown) < len(ids) else ""
    told = (
        "<p class=notes>No outputs are stored in these runs: the task generates none, or they were left out of a copy "
        "of the runs. Scores are there.</p>"
        if dropped
        else ""
    )
    body = f"""<p>One prompt, two arms.{few}</p>{told}
<form id="compare"><label>Left<select name="left"></select></label><label>Right<select name="right"></select></label>
<label class="check"><input type="checkbox" name="differ"> only where their scores differ</label></form>
<div id="samples"></div><script type="application/json" id="data">{data}</script>"""
    return body, not dropped


def _records(site: Site, row: Row, seeded: bool) -> dict[str, dict[str, Any]]:
    """What an arm stored of each sample: score 0-100, group, what was expected, output; None: not stored.

    By the sample's id, and among runs of several seeds by what it is: the same prompt is asked for under many of them.
    """
    arm = site.joined.arm[row.run]
    metric = arm["metric"]
    found = {}
    for record in (one for path in arm["paths"] for one in read_samples(path / "samples.jsonl")[0].values()):
        score = score_of(record, metric)
        answers = record.get("answers")
        output = record.get("error") or record.get("output")
        which = f" ({record.get('content') or content_of(record)})" if seeded else ""
        found[f"{record['id']}{which}"] = {
            "score": None if score is None else 100 * score,
            "group": str(record.get("group") or ""),
            "expected": " | ".join(map(str, answers))[:MOST_LETTERS] if answers else None,
            "output": None if output is None else str(output)[:MOST_LETTERS],
        }
    return found


def _spread(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return statistics.pstdev(known) if known else 0.0
