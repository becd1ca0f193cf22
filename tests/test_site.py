"""The static site: every number on it is one of a run's, and in a browser it sorts, filters and compares."""

from __future__ import annotations

import csv
import functools
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from report_runs import record, stored

import kvbench.report.site as site_package
from kvbench.cli.report import main
from kvbench.config import choices
from kvbench.report.claims.claim import claims
from kvbench.report.data.frame import collect
from kvbench.report.data.papers import FOLDER
from kvbench.report.figures.style import style_of
from kvbench.report.site.board import board
from kvbench.report.site.claim_pages import claim_pages
from kvbench.report.site.drawing import OF_EACH_KIND, legible
from kvbench.report.site.front import front
from kvbench.report.site.parts import Site, share_of
from kvbench.report.site.results import results as list_of_results
from kvbench.report.site.samples import samples
from kvbench.runs.summary import is_disturbed

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsed = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

# (method, budget) -> scores of two groups, MiB on the device, ms a token
DENSE, INDEX = 0.02, 2**20  # share of the layers, bytes of every arm
ARMS: dict[tuple[str, int | None], tuple[list[float], list[float], float, float]] = {
    ("full", None): ([1, 1, 1], [1, 1, 1], 40.0, 9.0),
    ("quest", 64): ([1, 1, 0], [0, 1, 0], 40.0, 5.0),
    ("quest", 128): ([1, 1, 1], [0, 1, 1], 40.0, 6.0),
    ("snapkv", 64): ([1, 0, 0], [0, 0, 0], 1.0, 3.0),
    ("pariskv", 64): ([1, 1, 0], [1, 1, 1], 1.5, 12.0),
}


def answers(method: str, budget: int | None) -> list[dict[str, Any]]:
    short, long, size, time = ARMS[method, budget]
    audit = {"attended_mean": 80.0, "attended_max": 96, "budget": budget, "moved_bytes_per_step": 512.0}
    audit |= {"dense_share": DENSE, "index_bytes": INDEX}
    more = {
        "audit": {**audit, "device_kv_bytes": int(size * 2**20)},
        "tpot_ms": {"mean": 2 * time, "p50": time},
        "answers": ["</script>"],
    }
    return [
        record(f"{group}-{number}", group, score, output=f"{method} says <b>{number}</b><!-- <script src=a>", **more)
        for group, scores in (("short", short), ("long", long))
        for number, score in enumerate(scores)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method, budget in ARMS:
        stored(folder, method, budget, answers(method, budget))
    return folder


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(results, tmp_path_factory.mktemp("sites") / "site")


def made(results: Path, out: Path) -> Path:
    assert main([str(results), "--out", str(out)]) == 0
    return out


# -- numbers -----------------------------------------------------------------------------------------------------------


class Cells(HTMLParser):
    """The cells of a page with their words."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str], str]] = []
        self.open = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "td":
            self.found.append((dict(attrs), ""))
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open &= tag != "td"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def cells_of(page: str) -> list[tuple[dict[str, str], str]]:
    parser = Cells()
    parser.feed(page)
    return parser.found


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


def expected(known: dict[str, dict[str, Any]], cell: dict[str, str]) -> float:
    """The number that a cell should hold, by the files of its run."""
    run, name = known[cell["data-run"]], cell["data-name"]
    if "data-group" in cell:
        return run["groups"][cell["data-group"]]
    if name in ("device_share", "index_share"):
        whole = max(known[full]["device_kv_bytes"] for full in cell["data-full"].split())
        dense = run["dense_share"]
        index = run["index_bytes"] if name == "index_share" else 0.0
        return 100 * (run["device_kv_bytes"] + index - dense * whole) / (whole - dense * whole)
    if name == "against_full":
        return against_full(known, cell["data-run"])
    if name == "recall" and run["recall"] is None:  # of the run with probes, beside that which has the score
        return next(one["recall"] for one in known.values() if one["arm"] == run["arm"] and one["recall"] is not None)
    return run[name]


def claimed(known: dict[str, dict[str, Any]], cell: dict[str, str]) -> float | None:
    """A claim's number by the samples of the runs that its cell names; None for the few kinds not reckoned here."""
    part = next(one for one in claims() if one.id == cell["data-claim"]).parts[int(cell["data-part"])]
    asked = part.asked
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
    if "@" in above or (below and asked.get("interval") != "range"):
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
    if asked.get("interval") == "range":
        return median(own[id] / other[id] if other else own[id] for id in own)
    return mean(own) / mean(other) if other else mean(own)


def check_claims(site: Path, *results: Path) -> int:
    """Every number of the claims' pages is its runs'; how many were reckoned anew."""
    known, count = {run: found for folder in results for run, found in in_runs(folder).items()}, 0
    for page in (site / "claims").glob("*-*.html"):
        for cell, words in cells_of(page.read_text()):
            if "data-claim" not in cell:
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
            if (
                "label" in cell.get("class", "").split()
                or "data-place" in cell
                or "data-claim" in cell
                or not re.search(r"\d", words)
            ):
                continue
            value = float(cell["data-value"])
            shown = words.split()[0]
            digits = len(shown.partition(".")[2])
            assert abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9, (page, cell, words)
            if cell["data-name"] == "published":
                assert (cell["data-paper"], value) in printed, (page, cell)
            else:  # of several seeds between theirs
                each = [expected(known, {**cell, "data-run": run}) for run in cell["data-run"].split()]
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


def test_every_number_of_the_site_is_one_of_a_run_or_of_a_paper(site: Path, results: Path) -> None:
    assert check_numbers(site, results) > 100


def test_a_claim_s_page_has_its_numbers_and_the_runs_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that are paired, found among full attention's, and measured on texts."""
    monkeypatch.setattr("kvbench.report.claims.page.SHIPPED", tmp_path / "none")
    needles = {"task": "niah", "options": {"lengths": [4096]}}
    scores = {"one": [1.0, 0.0, 1.0], "two": [1.0, 1.0]}
    stored(tmp_path, "full", None, scores, **needles)
    stored(tmp_path, "icecache", 256, {"one": [1.0, 0.0, 0.0], "two": [0.0, 1.0]}, **needles)
    keys = {"task": "passkey", "options": {"lengths": [2048, 4096, 8192]}}
    stored(tmp_path, "full", None, scores, **keys)
    stored(tmp_path, "icecache", 64, {"one": [1.0, 1.0, 0.0], "two": [1.0, 1.0]}, **keys)
    options = {"lengths": [4096], "steps": 64, "texts": "prose"}
    texts = {"task": "fidelity", "model": "smollm2-135m-instruct", "options": options}
    for method, kl in (("icecache", 0.3), ("topk", 0.2)):
        lines = [
            record(str(number), "", 0.5, fidelity={"kl_mean": kl * (number + 1), "nll": 1.0, "nll_full": 1.0})
            for number in range(3)
        ]
        more = {"method": {"name": method, "granularity": "kv_head"}}
        stored(tmp_path, method, 256, lines, **texts, protocol={"accounting": "unified"}, config=more)
    site = tmp_path / "site"
    for path, content in claim_pages(Site(collect([tmp_path]), ""), {}):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(str(content))
    assert check_claims(site, tmp_path) == 3
    listed = (site / "claims/index.html").read_text()
    assert listed.index("ice-9.html") < listed.index("ice-1.html") < listed.index("racc-6.html")
    assert "does not hold" in (site / "claims/ice-9.html").read_text()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_memory_is_a_share_of_full_attention_s_in_the_layers_that_a_method_selects_in(
    coded: bool, beside: bool, tmp_path: Path
) -> None:
    """Of ten layers two have a window, two are dense, and six hold a twentieth of what full attention holds there."""

    def arm(method: str, device: int, kv: str) -> None:
        audit = {"device_kv_bytes": device, "windowed_kv_bytes": 20, "windowed_share": 0.2, "attended_mean": 8.0}
        audit |= {"dense_share": 0.2 if method == "quest" else 0.8, "attended_max": 8, "index_bytes": 12}
        stored(tmp_path, method, None, [record("one", "", 1.0, audit=audit)], config={"kv": {"device": kv, "host": kv}})

    arm("full", 8 * 100 + 20, "native")
    arm("quest", 6 * 5 + 2 * (50 if coded else 100) + 20, "int8" if coded else "native")
    if beside:
        arm("full", 8 * 50 + 20, "int8")
    site = Site(collect([tmp_path]), "")
    (row,) = (row for row in site.rows if row.method == "quest")
    shares = share_of(site, row), share_of(site, row, indexed=True)
    assert shares == ((None, None) if coded and not beside else (pytest.approx(5), pytest.approx(7)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "reference_tiny", "claims"])
def test_the_site_of_the_runs_that_come_with_kvbench_is_true_and_small(name: str, tmp_path: Path) -> None:
    for one in {name, "claims"}:
        (tmp_path / one).mkdir()
        subprocess.run(["tar", "-xf", ROOT / f"results/{one}.tar.xz", "-C", tmp_path / one], check=True)
    made(ROOT / f"results/{name}.tar.xz", tmp_path / "site")
    assert (tmp_path / "site/read.svg").is_file(), "drawn of a method of each kind where all are too many"
    assert check_numbers(tmp_path / "site", tmp_path / name) > (100 if name == "claims" else 500)
    assert check_claims(tmp_path / "site", tmp_path / name, tmp_path / "claims") > 30
    assert max(path.stat().st_size for path in (tmp_path / "site").rglob("*")) < 3e6


def test_places_are_counted_among_sparse_methods_of_one_budget(site: Path) -> None:
    found = {}
    for name in ("quest", "snapkv", "pariskv", "full"):
        there = [cell for cell, _ in cells_of((site / f"methods/{name}.html").read_text()) if "data-of" in cell]
        found[name] = [(cell["data-place"], cell["data-of"]) for cell in there]
    assert found == {"quest": [("2", "3")], "snapkv": [("3", "3")], "pariskv": [("1", "3")], "full": []}


def test_what_attends_far_more_than_its_budget_has_no_place_in_it(tmp_path: Path) -> None:
    for method, score, attended in (("raas", 1.0, 1100.0), ("quest", 0.75, 100.0), ("snapkv", 0.5, 64.0)):
        audit = {"attended_mean": attended, "attended_max": attended, "budget": 64, "device_kv_bytes": 1000}
        stored(tmp_path, method, 64, [record("one", "", score, audit=audit)])
    site = Site(collect([tmp_path]), "")
    told = {row.method: list_of_results(site, [row]) for row in site.rows}
    assert "data-place" not in told["raas"]
    assert 'data-place="1" data-of="2"' in told["quest"] and 'data-place="2" data-of="2"' in told["snapkv"]
    assert "raas.html" not in told["quest"] + told["snapkv"]


def test_where_full_attention_may_score_0_no_method_is_named_best(tmp_path: Path) -> None:
    """Of six questions it answers one, in part: a method that answers two was lucky."""
    for task, full in (("longbench", [0, 0, 0.1, 0, 0, 0]), ("passkey", [1, 1, 1, 1, 0, 1])):
        stored(tmp_path, "full", None, {str(group): [score] for group, score in enumerate(full)}, task=task)
        for method in ("quest", "snapkv"):
            stored(tmp_path, method, 64, {str(group): [float(group > 3)] for group in range(6)}, task=task)
    site = Site(collect([tmp_path]), "")
    for row in site.rows:
        assert row.is_choice == (row.task == "passkey" and row.method != "full")
        assert ("data-place" in list_of_results(site, [row])) == row.is_choice
    *_, start = front(site, {"Leaderboard": "leaderboard.html"})
    (told,) = re.findall("<li>(.*may be 0.*)</li>", str(start.content))
    assert "longbench" in told
    assert 'scope="row">passkey' in str(start.content) and 'scope="row">longbench' not in str(start.content)


def test_arms_of_other_samples_are_not_compared(tmp_path: Path) -> None:
    for method, length in (("quest", 1024), ("snapkv", 4096), ("pariskv", 4096)):
        stored(tmp_path, method, 64, options={"lengths": [length]}, data=f"of {length}")
    rows = Site(collect([tmp_path]), "").rows
    panels = {row.method: row.panel for row in rows}
    assert panels["quest"] == "passkey, tiny, lengths=[1024]"
    assert panels["snapkv"] == panels["pariskv"] == "passkey, tiny, lengths=[4096]"


def test_other_data_under_one_setting_are_told_apart_beside_other_settings(tmp_path: Path) -> None:
    for method, length, data in (("quest", 2048, "a"), ("snapkv", 2048, "b"), ("pariskv", 4096, "a")):
        stored(tmp_path, method, 64, options={"lengths": [length]}, data=data)
    panels = {row.method: row.panel for row in Site(collect([tmp_path]), "").rows}
    assert panels["quest"] == "passkey, tiny, lengths=[2048], data a"
    assert panels["snapkv"] == "passkey, tiny, lengths=[2048], data b"
    assert panels["pariskv"] == "passkey, tiny, lengths=[4096]"


def test_panels_are_named_by_the_fewest_settings_and_arms_by_what_is_theirs(tmp_path: Path) -> None:
    short, long = {"lengths": [2048, 4096], "steps": 64, "samples": 4}, {"lengths": [2048], "steps": 2048, "samples": 2}
    for options in (short, long):
        stored(tmp_path, "quest", 64, options=options)
    stored(tmp_path, "snapkv", 64, options=long)
    stored(tmp_path, "snapkv", 64, options=long, config={"attention": "torch"})
    stored(tmp_path, "quest", 64, task="gsm8k")
    found = sorted((row.panel, row.method, row.variant) for row in Site(collect([tmp_path]), "").rows)
    assert found == [
        ("gsm8k, tiny", "quest", ""),
        ("passkey, tiny, steps=2048", "quest", ""),
        ("passkey, tiny, steps=2048", "snapkv", "attention=auto"),
        ("passkey, tiny, steps=2048", "snapkv", "attention=torch"),
        ("passkey, tiny, steps=64", "quest", ""),
    ]


def test_variants_are_told_apart_by_whole_settings_of_which_some_hold_commas(tmp_path: Path) -> None:
    for granularity, seeds in (("kv_head", (1, 2)), ("query_head", (1, 2, 3))):
        method = {"name": "topk", "granularity": granularity}
        for seed in seeds:
            stored(tmp_path, "topk", 64, config={"method": method, "seed": seed})
    assert sorted(row.variant for row in Site(collect([tmp_path]), "").rows) == [
        "seed=1, 2, 3, granularity=query_head",
        "seed=1, 2, granularity=kv_head",
    ]


def test_one_question_that_full_attention_does_not_answer_names_no_method_best(tmp_path: Path) -> None:
    stored(tmp_path, "full", None, [0.0])
    stored(tmp_path, "quest", 64, [0.3])
    assert not any(row.is_choice for row in Site(collect([tmp_path]), "").rows)


def test_a_folder_s_name_is_text_on_every_page(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.report.claims.page.SHIPPED", tmp_path / "none")
    monkeypatch.delitem(site_package.PAGES, "Pictures")  # which name no folder, and take longest
    shutil.copytree(results, tmp_path / "runs")
    for path in [path.parent for path in (tmp_path / "runs").rglob("run.yaml")]:
        path.rename(path.with_name(f'{path.name}"><img src=x onerror=alert(1)>'))
    site = made(tmp_path / "runs", tmp_path / "site")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40 and not any("<img src=x" in page.read_text() for page in pages)


def test_a_claim_s_page_says_why_runs_that_are_there_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.report.claims.page.SHIPPED", tmp_path / "none")
    for dtype in ("float32", "bfloat16"):
        stored(tmp_path, "full", None, task="niah", options={"lengths": [4096]}, dtype=dtype)
    pages = {file.path: str(file.content) for file in claim_pages(Site(collect([tmp_path]), ""), {})}
    runs = pages["claims/ice-1.html"].partition("<h2>Runs</h2>")[2]
    assert "several runs of method=full, which differ in dtype" in runs and "no run of method=icecache" in runs


def test_full_attention_over_coded_keys_and_values_is_a_choice_with_its_name(tmp_path: Path) -> None:
    def lines(size: int) -> list[dict[str, Any]]:
        return [record("one", "", 1.0, audit={"device_kv_bytes": size}), record("two", "", 1.0)]

    stored(tmp_path, "full", None, lines(10 * 2**20))
    stored(tmp_path, "full", None, lines(3 * 2**20), config={"kv": {"device": "kivi4", "host": "kivi4"}})
    stored(tmp_path, "topk", 64, lines(2**20))  # an oracle: no choice
    site = Site(collect([tmp_path]), "")
    *_, start = front(site, {"Leaderboard": "leaderboard.html"})
    named = [(cell["data-method"], words) for cell, words in cells_of(str(start.content)) if "data-method" in cell]
    assert named and all(method == "full" and "kv=kivi4" in words for method, words in named)
    assert sorted((row.is_yardstick, row.is_choice) for row in site.rows) == [
        (False, False),
        (False, True),
        (True, False),
    ]


def test_an_arm_with_failed_samples_has_no_share_and_without_kl_the_last_place(tmp_path: Path) -> None:
    def line(kl: float | None, size: int, **more: Any) -> dict[str, Any]:
        near = {} if kl is None else {"fidelity": {"kl_mean": kl, "nll": 1.0, "nll_full": 1.0}}
        return record("one", "", 1.0, audit={"device_kv_bytes": size}, **near, **more)

    stored(tmp_path, "full", None, [line(0.0, 2**22)], task="fidelity")
    stored(tmp_path, "quest", 64, [line(0.3, 2**20)], task="fidelity")
    stored(tmp_path, "snapkv", 64, [line(None, 2**20, error="no memory")], task="fidelity")
    site = Site(collect([tmp_path]), "")
    assert [(row.method, share_of(site, row)) for row in site.rows] == [("full", 100), ("quest", 25), ("snapkv", None)]


def test_another_score_in_a_run_is_another_number_on_the_site(results: Path, tmp_path: Path) -> None:
    (old,) = (results / "runs/passkey/tiny/snapkv-64").iterdir()
    new = tmp_path / old.name
    shutil.copytree(old, new)
    lines = (new / "samples.jsonl").read_text()
    (new / "samples.jsonl").write_text(re.sub(r'"accuracy": ?0', '"accuracy": 1', lines, count=1))

    def score(folder: Path) -> str:
        (page,) = board(Site(collect([folder]), ""), {})
        return next(cell["data-value"] for cell, _ in cells_of(str(page.content)) if cell.get("data-name") == "score")

    assert [float(score(old)), float(score(new))] == pytest.approx([100 / 6, 200 / 6])


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_lead_to_one_another_and_nowhere_else(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, part = target.partition("#")
            other = page.parent / path if path else page
            assert target == "data:," or other.is_file(), (page, target)
            assert not part or "=" in part or f'id="{part}"' in other.read_text(), (page, target)
    assert "://" not in (site / "site.css").read_text() + (site / "site.js").read_text()


def test_the_front_door_answers_which_method_fits_a_share_of_the_memory(site: Path) -> None:
    text = (site / "index.html").read_text()
    cells = [(cell.get("data-method"), words) for cell, words in cells_of(text.partition('class="best"')[2])]
    shares = [2, 5, 10, 25, 50]
    assert re.findall(r'href="leaderboard.html#share=(\d+)"', text) == list(map(str, shares))
    dense = DENSE * ARMS["full", None][2]
    full = ARMS["full", None][2] - dense
    asked = [(share, index) for index in (0.0, INDEX / 2**20) for share in shares]
    for (share, index), (method, words) in zip(asked, cells[: len(asked)], strict=True):
        fits = [
            (arm, fmean(short + long))
            for arm, (short, long, size, _) in ARMS.items()
            if 100 * (size - dense + index) <= share * full
        ]
        fits = sorted((one for one in fits if one[0][0] != "full"), key=lambda one: -one[1])
        assert (method is None) == (not fits) and (not fits or words.startswith(style_of(method).label))
        if fits:
            assert method == fits[0][0][0] and f"score {100 * fits[0][1]:.1f}" in words
            assert "in its interval" not in words, "1 of 6 is not in that of 5 of 6"


def test_the_front_door_says_how_many_are_as_good(tmp_path: Path) -> None:
    sizes = {"full": 2**24, "quest": 2**20, "snapkv": 2**20}
    for method, size in sizes.items():
        lines = [record(f"s{score}", "", score, audit={"device_kv_bytes": size}) for score in (0.0, 1.0)]
        stored(tmp_path, method, None if method == "full" else 64, lines)
    *_, start = front(Site(collect([tmp_path]), ""), {"Leaderboard": "leaderboard.html"})
    cells = [words for cell, words in cells_of(str(start.content)) if "data-method" in cell]
    assert cells == ["Quest 64score 50.0, 1 more in its interval"] * 3 * 2, "with and without an index, which is none"


def test_a_method_has_a_page_of_what_it_is_finds_and_should_find(site: Path) -> None:
    page = (site / "methods/quest.html").read_text()
    for part in ("results", "by-group", "pictures", "claims", "published-beside-ours", "settings"):
        assert f'<section id="{part}">' in page
    assert "largest upper bound on q.k" in page and "page_size: 16" in page and "quest-budget.svg" in page
    assert "44 published numbers in 8 tables, of which none has a run here that matches" in page
    assert "A budget is page slots of a KV head" in (site / "methods/icecache.html").read_text()
    assert "It did not run here." in (site / "methods/h2o.html").read_text()


def test_a_site_is_written_over_an_older_one_and_over_nothing_else(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in ("Claims", "Methods", "Pictures"):
        monkeypatch.delitem(site_package.PAGES, slow)
    out = made(results, tmp_path / "site")
    first = {path: path.read_bytes() for path in out.rglob("*.*")}
    made(results, out)
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == first
    (out / "index.html").write_text("<h1>My page</h1>")
    assert main([str(results), "--out", str(out)]) == 2
    assert "holds other files than a site's" in capsys.readouterr().err


def test_pictures_are_of_the_site_s_runs_or_say_that_they_are_of_others(site: Path) -> None:
    page = (site / "pictures/index.html").read_text()
    captions = dict(re.findall(r'<section id="(\w+)">.*?<figcaption>(.*?)</figcaption>', page, re.DOTALL))
    whose = {name: "runs that kvbench ships" in caption for name, caption in captions.items()}
    assert whose == {
        **dict.fromkeys(["attended", "frontier"], False),
        **dict.fromkeys(["lost", "drift", "written", "breakeven", "search"], True),
    }
    assert "IceCache" in (site / "pictures/breakeven.svg").read_text()
    assert "SnapKV" in (site / "pictures/attended.svg").read_text()


def test_of_many_methods_a_picture_has_one_of_each_kind_and_a_user_s_own(tmp_path: Path) -> None:
    for method in ["mine", *choices("method")]:
        stored(tmp_path, method, 64)
    runs = legible(collect([tmp_path]))
    assert {arm["method"] for arm in runs.arm.values()} == {"mine", *OF_EACH_KIND}


def test_runs_without_outputs_say_so(results: Path, tmp_path: Path) -> None:
    bare = [{key: value for key, value in one.items() if key != "output"} for one in answers("quest", 64)]
    stored(tmp_path, "quest", 64, bare)
    told = "No outputs are stored"
    pages = {folder: next(samples(Site(collect([folder]), ""), {})).content for folder in (tmp_path, results)}
    assert told in pages[tmp_path] and told not in pages[results]


def test_samples_of_several_seeds_stand_beside_the_same_prompts_alone(tmp_path: Path) -> None:
    for method, budget, seeds in (("full", None, (1, 2)), ("quest", 64, (2, 3))):
        for seed in seeds:
            lines = [record("key-0", "", 1.0, answers=[f"key of {seed}"], output=f"{method} says {seed}")]
            stored(tmp_path, method, budget, lines, config={"seed": seed})
    page = str(next(samples(Site(collect([tmp_path]), ""), {})).content)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    found = [(one["expected"], [arm and arm[1] for arm in one["arms"]]) for one in data["samples"]]
    assert sorted(found, key=str) == [
        ("key of 1", ["full says 1", None]),
        ("key of 2", ["full says 2", "quest says 2"]),
        ("key of 3", [None, "quest says 3"]),
    ]


# -- in a browser ------------------------------------------------------------------------------------------------------


def browse(page: Path, script: str, tmp_path: Path, part: str = "", wide: int = 1200) -> Any:
    """What a script returns in a page, or a part of it, that a browser so wide has opened; its console stays empty."""
    copy = page.with_name(f"selftest-{page.name}")
    ending = f"<script>document.title = JSON.stringify((() => {{ {script} }})());</script></body>"
    copy.write_text(page.read_text().replace("</body>", ending))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
        "--enable-logging=stderr", f"--window-size={wide},900", "--dump-dom", copy.as_uri() + part,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        copy.unlink()
    assert "CONSOLE" not in done.stderr, done.stderr
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    return json.loads(unescape(title))


HELPERS = """
const visible = () => [...document.querySelectorAll("#board tbody tr")].filter(row => !row.hidden)
  .map(row => `${row.dataset.method} ${row.dataset.budget}`);
const set = (form, name, value) => {
  const field = document.getElementById(form).elements[name];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
"""


@browsed
def test_the_leaderboard_sorts_filters_and_names_the_best_that_fits(site: Path, tmp_path: Path) -> None:
    script = """
    const found = { all: visible() }, head = document.querySelector('th[data-name=tpot_ms_p50] button');
    head.click(); found.quick = visible(); head.click(); found.slow = visible();
    set("filters", "share", "5"); found.small = visible();
    const best = document.querySelector("#best li");
    found.best = [best.textContent, best.querySelector("a").getAttribute("href"), location.hash];
    set("filters", "share", "2"); const bare = visible();
    set("filters", "index", true); found.indexed = [bare, visible(), location.hash];
    set("filters", "index", false); set("filters", "share", "5");
    set("filters", "time", "4"); found.both = visible();
    set("filters", "method", "quest"); found.none = [visible().length, document.querySelector("#best h2").textContent];
    return found;
    """
    found = browse(site / "leaderboard.html", HELPERS + script, tmp_path)
    assert found["all"] == ["full -", "pariskv 64", "quest 128", "quest 64", "snapkv 64"]
    assert found["quick"] == ["snapkv 64", "quest 64", "quest 128", "full -", "pariskv 64"]
    assert found["slow"] == found["quick"][::-1]
    assert found["small"] == ["pariskv 64", "snapkv 64"]
    words, page, kept = found["best"]
    assert words.startswith("passkey, tiny: ParisKV C = 64; score 83.3; 1.50 MiB on the device; 1.8 % of full")
    assert page == "methods/pariskv.html" and kept == "#share=5"
    assert found["indexed"] == [["pariskv 64", "snapkv 64"], [], "#share=2&index=on"]
    assert found["both"] == ["snapkv 64"] and found["none"] == [0, "Nothing fits"]


@browsed
def test_both_questions_are_answered_within_three_clicks(site: Path, tmp_path: Path) -> None:
    """On a phone; a click is a link's address, which the next page is opened with."""
    script = """
    const link = words => [...document.querySelectorAll("main a")].find(one => one.textContent.trim() === words);
    return [...["5 %", "Quest"].map(word => link(word).getAttribute("href")), document.body.scrollWidth <= innerWidth];
    """
    small, claims, narrow = browse(site / "index.html", HELPERS + script, tmp_path, wide=390)
    assert narrow and claims == "methods/quest.html#claims"
    page, _, part = small.partition("#")
    script = """
    const first = document.querySelector("#best a").getAttribute("href");
    return [visible(), first, document.body.scrollWidth <= innerWidth];
    """
    rows, best, narrow = browse(site / page, HELPERS + script, tmp_path, f"#{part}", wide=390)
    assert rows == ["pariskv 64", "snapkv 64"] and best == "methods/pariskv.html" and narrow
    script = """
    const first = document.querySelector("#claims a");
    return [first.getAttribute("href"), document.body.scrollWidth <= innerWidth];
    """
    assert browse(site / "methods/quest.html", script, tmp_path, "#claims", wide=390) == [
        "../claims/quest-1.html",
        True,
    ]
    script = """
    const words = name => document.querySelector(name).innerText;
    return [words(".verdict b"), words(".notes"), document.body.scrollWidth <= innerWidth];
    """
    verdict, whose, narrow = browse(site / "claims/quest-1.html", script, tmp_path, wide=390)
    assert verdict.startswith("not testable here; stand-in: ") and whose == "runs that kvbench ships" and narrow


@browsed
def test_two_arms_answers_stand_side_by_side(site: Path, tmp_path: Path) -> None:
    script = """
    const names = [...document.querySelector("[name=right]").options].map(option => option.text);
    set("compare", "right", names.indexOf("SnapKV 64"));
    const texts = pair => [...pair.children].map(one => one.innerText);
    const sides = () => [...document.querySelectorAll(".pair")].map(texts);
    const found = { names, whole: sides().length };
    set("compare", "differ", true); found.differ = sides();
    return found;
    """
    found = browse(site / "samples/1.html", HELPERS + script, tmp_path)
    assert found["names"][0] == "Full" and found["whole"] == 6 and len(found["differ"]) == 5
    for left, right in found["differ"]:
        assert " ".join(left.split()).startswith("Full score 100.0 full says <b>")
        assert " ".join(right.split()).startswith("SnapKV 64 score 0.0 snapkv says <b>")


@browsed
def test_a_method_s_page_opens_what_is_published(site: Path, tmp_path: Path) -> None:
    script = """
    location.hash = document.querySelector(".toc a[href*=published]").getAttribute("href");
    const tables = [...document.querySelectorAll("#published-beside-ours details")];
    tables[0].querySelector("summary").click();
    return [document.querySelector("h1").textContent, tables.length, tables[0].open];
    """
    assert browse(site / "methods/quest.html", HELPERS + script, tmp_path) == ["Quest", 8, True]
