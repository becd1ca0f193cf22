"""Whether every number on a static site is one of a run's, or printed by a paper."""

from __future__ import annotations

import csv
import functools
import json
import re
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from site_runs import cells_of

from kvbench.report.claims.claim import claims
from kvbench.report.data.papers import FOLDER
from kvbench.runs.summary import is_disturbed


def in_runs(results: Path) -> dict[str, dict[str, Any]]:
    """What the runs' own files say, by run id: their summaries, and for differences to full attention their samples."""
    found: dict[str, dict[str, Any]] = {}
    for path in results.rglob("summary.json"):
        summary = json.loads(path.read_text())
        audit, whole = summary["audit"], summary.get("macro") or summary
        lines = list(map(json.loads, (path.parent / "samples.jsonl").read_text().splitlines()))
        found[path.parent.name] = {
            "arm": path.parent.parent,
            "score": whole["score"],
            "groups": {name: group["score"] for name, group in summary.get("groups", {}).items()},
            "device_kv_bytes": audit["device_kv_bytes"] / 2**20,
            "moved_bytes_per_step": audit["moved_bytes_per_step"] / 2**10,
            "attended_share": audit["attended_mean"] / (audit.get("budget") or 1),
            "index_bytes": audit.get("index_bytes", 0) / 2**20,
            "dense_share": audit.get("dense_share") or 0.0,
            "tpot_ms_p50": summary["latency"]["tpot_ms_p50"],
            "own_ms": sum(
                ms for part, ms in summary["latency"]["breakdown_ms"].items() if part not in ("model", "other")
            ),
            "n": summary["n"],
            "recall": summary.get("probe", {}).get("recall"),
            "kl_mean": summary.get("fidelity", {}).get("kl_mean"),
            "seed": re.search(r"\bseed: (\d+)", (path.parent / "run.yaml").read_text())[1],  # type: ignore[index]
            "steps": re.findall(r"\bsteps: \d+", (path.parent / "run.yaml").read_text()),
            "lines": lines,
            "samples": {line["id"]: (line["group"], 100 * next(iter(line["scores"].values()))) for line in lines},
        }
    return found


def against_full(known: dict[str, dict[str, Any]], run: str) -> float:
    own = known[run]
    full = next(
        other
        for other in known.values()
        if other["arm"].name.partition("-")[0] == "full"
        and other["arm"].parent == own["arm"].parent
        and other["recall"] is None
        and (other["seed"], other["steps"]) == (own["seed"], own["steps"])
        and own["samples"].keys() <= other["samples"].keys()
    )
    differences: dict[str, list[float]] = {}
    for id, (group, score) in own["samples"].items():
        differences.setdefault(group, []).append(score - full["samples"][id][1])
    return fmean(map(fmean, differences.values()))


def of_length(known: dict[str, dict[str, Any]], run: str, length: int) -> dict[str, Any]:
    """What a run's samples of one length say."""
    lines = [line for line in known[run]["lines"] if line["meta"]["length"] == length]
    own: dict[str, list[float]] = {}
    for line in lines:
        own.setdefault(line["group"], []).append(100 * next(iter(line["scores"].values())))
    audits = [line["audit"] for line in lines]
    return {
        "score": fmean(map(fmean, own.values())),
        "kl_mean": fmean(line.get("fidelity", {}).get("kl_mean", 0.0) for line in lines),
        "device_kv_bytes": max(audit["device_kv_bytes"] for audit in audits) / 2**20,
        "moved_bytes_per_step": fmean(audit["moved_bytes_per_step"] for audit in audits) / 2**10,
        "attended_share": fmean(audit["attended_mean"] for audit in audits) / (audits[0].get("budget") or 1),
        "index_bytes": max(audit.get("index_bytes", 0) for audit in audits) / 2**20,
        "dense_share": known[run]["dense_share"],
        "n": len(lines),
    }


def share_of_full(known: dict[str, dict[str, Any]], cell: dict[str, str]) -> float:
    """Per cent of full attention's bytes: of several seeds each has the most that one held."""

    def most(role: str) -> dict[str, float]:
        runs = cell[f"data-{role}"].split()
        parts = [
            of_length(known, run, int(cell["data-length"])) if "data-length" in cell else known[run] for run in runs
        ]
        return {name: max(part[name] for part in parts) for name in ("device_kv_bytes", "index_bytes", "dense_share")}

    own, whole = most("run"), most("full")["device_kv_bytes"]
    held = own["device_kv_bytes"] + (own["index_bytes"] if cell["data-name"] == "index_share" else 0.0)
    dense = own["dense_share"] * whole
    return 100 * (held - dense) / (whole - dense)


def expected(known: dict[str, dict[str, Any]], cell: dict[str, str]) -> float:
    """The number that a cell should hold, by the files of its run."""
    run, name = known[cell["data-run"]], cell["data-name"]
    if "data-length" in cell:  # times, of which disturbed ones are left out, are not reckoned anew
        return of_length(known, cell["data-run"], int(cell["data-length"])).get(name, float(cell["data-value"]))
    if "data-group" in cell:
        return run["groups"][cell["data-group"]]
    if name == "against_full":
        return against_full(known, cell["data-run"])
    if name == "recall" and run["recall"] is None:  # of the run with probes, beside that which has the score
        return next(one["recall"] for one in known.values() if one["arm"] == run["arm"] and one["recall"] is not None)
    return run[name]


def claimed(known: dict[str, dict[str, Any]], cell: dict[str, str]) -> float | None:
    """A claim's number by the samples of the runs that its cell names; None for the few kinds not reckoned here."""
    claim = next(one for one in claims() if one.id == cell["data-claim"])
    if "data-part" in cell:
        part = claim.criteria[int(cell["data-part"])]
    else:
        part = claim.superseded.criteria[int(cell["data-superseded"])]
    asked, of_each = part.spec, {"range": median, "mean": fmean}
    if part.kind != "runs" or "lengths" in asked or not isinstance(asked.get("less", ""), str):
        return None

    def lines_of(role: str) -> dict[str, Any]:
        """The lines of an arm, of each seed; times taken beside other work aside."""
        runs = [known[run] for run in cell[f"data-{role}"].split()]
        timed = asked["value"].startswith(("tpot_ms", "breakdown_ms"))
        lines = ((f"{line['id']} {run['seed']}", line) for run in runs for line in run["lines"])
        return {id: line for id, line in lines if not (timed and is_disturbed(line))}

    def values(role: str, path: str) -> dict[str, float]:
        lines = lines_of(role)
        if path == "score":
            return {id: 100.0 * next(iter(line["scores"].values())) for id, line in lines.items()}
        return {
            id: functools.reduce(lambda inner, key: inner[key], path.split("."), line) for id, line in lines.items()
        }  # type: ignore[misc]

    def mean(found: dict[str, float]) -> float:
        groups = {id: line["group"] for id, line in lines_of("of").items()}
        own = {groups[id]: [found[other] for other in found if groups[other] == groups[id]] for id in found}
        return fmean(map(fmean, own.values()))

    above, _, below = asked["value"].partition(" / ")
    if "@" in above or (below and asked.get("interval") not in of_each):
        return None
    own = values("of", above)
    if "among" in asked:
        own = {id: own[id] for id, score in values("among", "score").items() if score == 100}
    if "less" in asked:
        other = values("less", above)
        own = {id: value for id, value in own.items() if id in other}
        return mean(own) - mean({id: other[id] for id in own})
    other = values("over", above) if "over" in asked else values("of", below) if below else None
    if other:
        own = {id: value for id, value in own.items() if id in other}
        other = {id: other[id] for id in own}
    if "interval" in asked:
        return of_each[asked["interval"]](own[id] / other[id] if other else own[id] for id in own)
    return mean(own) / mean(other) if other else mean(own)


def check_claims(site: Path, *results: Path) -> int:
    """Every number of the claims' pages is its runs'; how many were reckoned anew."""
    known, count = {run: found for folder in results for run, found in in_runs(folder).items()}, 0
    for page in (site / "claims").glob("*-*.html"):
        for cell, words in cells_of(page.read_text()):
            if "data-claim" not in cell or "data-value" not in cell:
                continue
            assert float(words.split()[0]) == pytest.approx(float(cell["data-value"]), rel=5e-3), (page, cell)
            assert "data-of" not in cell or cell["data-of"], (page, cell)
            found = claimed(known, cell) if cell["data-name"] == "value" else None
            if found is not None:
                assert found == pytest.approx(float(cell["data-value"]), rel=2e-4, abs=1e-6), (page, cell)
                count += 1
    return count


def check_numbers(site: Path, results: Path) -> int:
    """Every number in a cell is that of its run, or printed by a paper; how many there are."""
    known, count = in_runs(results), 0
    printed = {
        (line["table"], float(line["value"]))
        for path in FOLDER.glob("*.csv")
        for line in csv.DictReader(path.read_text().splitlines())
        if line["value"]
    }
    for page in site.rglob("*.html"):
        for cell, words in cells_of(page.read_text()):
            if "data-value" not in cell or "data-claim" in cell:
                continue
            value = float(cell["data-value"])
            shown = words.removeprefix("KL").split()[0]
            digits = len(shown.partition(".")[2])
            assert abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9, (page, cell, words)
            if cell["data-name"] == "published":
                assert (cell["data-paper"], value) in printed, (page, cell)
            elif cell["data-name"] == "difference":
                continue
            elif cell.get("class") == "score":  # ours in a published table: of one group, or of all
                here = [known[run] for run in cell["data-run"].split()]
                scores = [score for one in here for score in (one["score"], *one["groups"].values())]
                assert any(abs(score - value) <= 1e-6 + 2e-4 * abs(value) for score in scores), (page, cell)
            else:  # of several seeds between theirs
                each = (
                    [share_of_full(known, cell)]
                    if cell["data-name"] in ("device_share", "index_share")
                    else [expected(known, {**cell, "data-run": run}) for run in cell["data-run"].split()]
                )
                least, most = (sum(each),) * 2 if cell["data-name"] == "n" else (min(each), max(each))
                close = 1e-6 + 2e-4 * abs(value)
                assert least - close <= value <= most + close, (page, cell)
            count += 1
        for line in re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL):
            data = json.loads(line)
            for sample in data["samples"]:
                for arm, answer in zip(data["arms"], sample["arms"], strict=True):
                    there = [known[run]["samples"] for run in arm["run"].split()]
                    scores = [own[id][1] for own in there if (id := sample["id"].partition(" (")[0]) in own]
                    assert answer is None or any(answer[0] == pytest.approx(score) for score in scores)
                    count += 1
    return count
