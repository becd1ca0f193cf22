"""The static site: every number on it is one of a run's, and in a browser it sorts, filters and compares."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from report_runs import record, stored
from site_numbers import check_claims, check_numbers
from site_runs import ARMS, DENSE, INDEX, answers, cells_of, made, stored_arms

import kvbench.report.site as site_package
from kvbench.cli.report import main
from kvbench.config import choices
from kvbench.report.claims.page import DECIDING
from kvbench.report.claims.verdict import Verdict
from kvbench.report.data.frame import collect
from kvbench.report.data.style import style_of
from kvbench.report.site.board import board
from kvbench.report.site.claim_pages import claim_pages
from kvbench.report.site.claimed import AGAINST, ITS_PAPER, by_side, shown
from kvbench.report.site.drawing import REPRESENTATIVES, legible
from kvbench.report.site.front import front
from kvbench.report.site.pictures import SHOWN
from kvbench.report.site.results import results as list_of_results
from kvbench.report.site.rows import Site
from kvbench.report.site.samples import samples

ROOT = Path(__file__).resolve().parents[1]
OF_ARCHIVES = ("lost", "drift", "written", "question", "breakeven")  # pictures that read what is shipped, for seconds
own = pytest.mark.usefixtures("nothing_shipped")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_arms(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every page, and of the pictures some of each kind: the slow test has all."""
    with pytest.MonkeyPatch.context() as patch:
        for long in OF_ARCHIVES:
            patch.delitem(SHOWN, long)
        return made(results, tmp_path_factory.mktemp("sites") / "site")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_places_are_counted_among_sparse_methods_of_one_budget(site: Path) -> None:
    found = {}
    for name in ("quest", "snapkv", "pariskv", "full"):
        there = [cell for cell, _ in cells_of((site / f"methods/{name}.html").read_text()) if "data-of" in cell]
        found[name] = [(cell["data-place"], cell["data-of"]) for cell in there]
    assert found == {"quest": [("2", "3")], "snapkv": [("3", "3")], "pariskv": [("1", "3")], "full": []}


def test_places_are_as_wide_as_paired_tests_leave_them_and_few_samples_have_none(tmp_path: Path) -> None:
    right = {"quest": [1, 1, 1, 0] * 4, "snapkv": [1, 1, 0, 1] * 4, "pariskv": [0, 0, 0, 0] * 4}
    for count, places in ((16, {("quest", (1, 2)), ("snapkv", (1, 2)), ("pariskv", (3, 3))}), (7, set())):
        for method, scores in right.items():
            stored(tmp_path / str(count), method, 64, list(map(float, scores[:count])))
        site = Site(collect([tmp_path / str(count)]), "")
        found = {(row.method, site.place(row, [one for one in site.rows if one is not row])) for row in site.rows}
        assert {one for one in found if one[1]} == places


@own
def test_share_and_nearness_are_of_the_same_samples(tmp_path: Path) -> None:
    """Of two methods one is small at the long prompt alone, where it is far; the other is near there."""
    mib = {"full": (100, 200), "quest": (20, 18), "snapkv": (9, 30)}
    near = {"full": (0.0, 0.0), "quest": (0.1, 0.9), "snapkv": (0.5, 0.2)}
    for method, sizes in mib.items():
        lines = []
        for length, size, kl in zip((1024, 2048), sizes, near[method], strict=True):
            more = {"meta": {"length": length}, "fidelity": {"kl_mean": kl, "nll": 1.0, "nll_full": 1.0}}
            lines.append(record(str(length), str(length), 1.0, audit={"device_kv_bytes": size * 2**20}, **more))
        options = {"lengths": [1024, 2048]}
        stored(tmp_path, method, None if method == "full" else 64, lines, task="fidelity", options=options)
    site = Site(collect([tmp_path]), "")
    found = {
        (row.method, row.length): (row.share(indexed=False), row.cell.numbers["kl_mean"]) for row in site.by_length
    }
    assert found["quest", 1024] == (20, 0.1) and found["quest", 2048] == (9, 0.9) and found["snapkv", 2048] == (15, 0.2)
    *_, start = front(site, {"Leaderboard": "leaderboard.html"})
    cells = [words for cell, words in cells_of(str(start.content)) if "data-method" in cell]
    assert [words.partition("KL")[2] for words in cells if words.startswith("10")] == [" 0.5000"] * 2 + [" 0.9000"] * 2
    assert "1 sample, too few to rank" in str(start.content) and "no different" not in "".join(cells)


def test_what_attends_far_more_than_its_budget_has_no_place_in_it(tmp_path: Path) -> None:
    for method, score, attended in (("raas", 1.0, 1100.0), ("quest", 0.75, 100.0), ("snapkv", 0.5, 64.0)):
        audit = {"attended_mean": attended, "attended_max": attended, "budget": 64, "device_kv_bytes": 1000}
        stored(tmp_path, method, 64, [record(f"{n}", "", score * (1 - n / 100), audit=audit) for n in range(8)])
    site = Site(collect([tmp_path]), "")
    told = {row.method: list_of_results(site, [row]) for row in site.rows}
    assert "data-place" not in told["raas"]
    assert 'data-place="1" data-of="2"' in told["quest"] and 'data-place="2" data-of="2"' in told["snapkv"]
    assert "raas.html" not in told["quest"] + told["snapkv"]


@own
def test_where_full_attention_may_score_0_no_method_is_named_best(tmp_path: Path) -> None:
    """Of six questions it answers one, in part: a method that answers two was lucky."""
    for task, full in (("longbench", [0, 0, 0.1, 0, 0, 0]), ("passkey", [1, 1, 1, 1, 0, 1])):
        stored(tmp_path, "full", None, {str(group): [score] for group, score in enumerate(full)}, task=task)
        for method in ("quest", "snapkv"):
            stored(tmp_path, method, 64, {str(group): [float(group > 3)] for group in range(6)}, task=task)
    site = Site(collect([tmp_path]), "")
    for row in site.rows:
        assert row.is_choice == (row.task == "passkey" and row.method != "full")
        assert "data-place" not in list_of_results(site, [row])
    *_, start = front(site, {"Leaderboard": "leaderboard.html"})
    (told,) = re.findall("<li>(.*perhaps 0.*)</li>", str(start.content))
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
        samples = [record("-0", "", 1.0, prompt_tokens=1000 + ord(data))]
        stored(tmp_path, method, 64, samples, options={"lengths": [length]}, data=data)
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


@own
def test_a_folder_s_name_is_text_on_every_page(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(site_package.PAGES, "Pictures")  # which name no folder, and take longest
    shutil.copytree(results, tmp_path / "runs")
    for path in [path.parent for path in (tmp_path / "runs").rglob("run.yaml")]:
        odd = f'{path.name}"><img src=x onerror=alert(1)>'
        (path / "run.yaml").write_text((path / "run.yaml").read_text().replace(path.name, f"'{odd}'"))
        path.rename(path.with_name(odd))
    site = made(tmp_path / "runs", tmp_path / "site")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40 and not any("<img src=x" in page.read_text() for page in pages)


@own
def test_a_claim_s_page_says_why_runs_that_are_there_do_not_count(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        stored(tmp_path, "full", None, task="niah", options={"lengths": [4096]}, dtype=dtype)
    pages = {file.path: str(file.content) for file in claim_pages(Site(collect([tmp_path]), ""), {})}
    runs = pages["claims/ice-1.html"].partition("<h2>Runs</h2>")[2]
    assert "several runs of method=full, which differ in dtype" in runs and "no run of method=icecache" in runs


@own
def test_full_attention_over_coded_keys_and_values_is_a_choice_with_its_name(tmp_path: Path) -> None:
    def lines(size: int) -> list[dict[str, Any]]:
        return [record("one", "", 1.0, audit={"device_kv_bytes": size}), record("two", "", 1.0)]

    stored(tmp_path, "full", None, lines(10 * 2**20))
    stored(tmp_path, "full", None, lines(3 * 2**20), config={"kv": {"device": "kivi4", "host": "native"}})
    stored(tmp_path, "topk", 64, lines(2**20))  # an oracle: no choice
    site = Site(collect([tmp_path]), "")
    *_, start = front(site, {"Leaderboard": "leaderboard.html"})
    named = [(cell["data-method"], words) for cell, words in cells_of(str(start.content)) if "data-method" in cell]
    assert named and all(method == "full" and "kv=kivi4" in words for method, words in named)
    assert sorted((row.run.is_full, row.is_choice) for row in site.rows) == [
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
    assert [(row.method, row.share(indexed=False)) for row in site.rows] == [
        ("full", 100),
        ("quest", 25),
        ("snapkv", None),
    ]


def test_another_score_in_a_run_is_another_number_on_the_site(results: Path, tmp_path: Path) -> None:
    (old,) = (results / "runs/passkey/tiny/snapkv-64").iterdir()
    new = tmp_path / old.name
    shutil.copytree(old, new)
    lines = (new / "samples.jsonl").read_text()
    (new / "samples.jsonl").write_text(re.sub(r'"accuracy": ?0', '"accuracy": 1', lines, count=1))

    def score(folder: Path) -> str:
        (page,) = board(Site(collect([folder]), ""), {})
        return next(cell["data-value"] for cell, _ in cells_of(str(page.content)) if cell.get("data-name") == "score")

    assert [float(score(old)), float(score(new))] == pytest.approx([100 / 6, 100 / 6 + 100 / 24])


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
    assert re.findall(r'label><a href="leaderboard.html#share=(\d+)"', text) == list(map(str, shares))
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
        assert (method is None) == (not fits) and (not fits or words.startswith(f"{share} %{style_of(method).label}"))
        if fits:
            assert method == fits[0][0][0] and f"score {100 * fits[0][1]:.1f}" in words
            assert len(fits) == 1 or ", 0 of " in words, "each a paired test tells apart"


@own
def test_the_front_door_says_how_many_are_as_good(tmp_path: Path) -> None:
    sizes = {"full": 2**24, "quest": 2**20, "snapkv": 2**20}
    for method, size in sizes.items():
        lines = [
            record(f"s{n}", "", float(n % 2 or method == "full"), audit={"device_kv_bytes": size}) for n in range(8)
        ]
        stored(tmp_path, method, None if method == "full" else 64, lines)
    *_, start = front(Site(collect([tmp_path]), ""), {"Leaderboard": "leaderboard.html"})
    cells = [words for cell, words in cells_of(str(start.content)) if "data-method" in cell]
    assert [words.partition("%")[2] for words in cells] == [
        "Quest 64score 50.0, 1 of 1 others no different (SnapKV 64)"
    ] * 6


def named_on_the_front(folder: Path) -> list[tuple[str | None, str]]:
    """The method and the words of each cell of the front door's first table, but for limits that nothing fits."""
    *_, start = front(Site(collect([folder]), ""), {"Leaderboard": "leaderboard.html"})
    cells = [(cell, words) for cell, words in cells_of(str(start.content)) if "label" in cell.get("class", "")]
    return [(cell.get("data-method"), words) for cell, words in cells if "%" in words and not words.endswith("-")]


def arm(folder: Path, method: str, scores: list[float], ids: str = "s", **more: Any) -> None:
    size = 2**24 if method == "full" and not more else 2**20
    lines = [record(f"{ids}{n}", "", score, audit={"device_kv_bytes": size}) for n, score in enumerate(scores)]
    stored(folder, method, None if method == "full" else 64, lines, **more)


@own
def test_an_arm_that_lacks_samples_of_the_others_is_not_beside_them_and_counted(tmp_path: Path) -> None:
    arm(tmp_path, "full", [1.0] * 16)
    arm(tmp_path, "quest", [1.0, 0.0] * 8)
    arm(tmp_path, "snapkv", [0.0, 1.0] * 8)
    arm(tmp_path, "pariskv", [0.0, 0.0, 1.0] * 2)  # six of the samples
    assert {words.partition("%")[2] for _, words in named_on_the_front(tmp_path)} == {
        "Quest 64score 50.0, 1 of 1 others no different (SnapKV 64)"
    }
    *_, start = front(Site(collect([tmp_path]), ""), {"Leaderboard": "leaderboard.html"})
    assert "16 samples alone that all runs here have; without 1 run" in str(start.content)


@own
def test_what_just_misses_a_limit_and_is_better_is_named(tmp_path: Path) -> None:
    for method, size, score in (("full", 2**24, 1.0), ("quest", 2**20, 0.5), ("snapkv", int(2**20 * 1.7), 1.0)):
        lines = [record(f"s{n}", "", score, audit={"device_kv_bytes": size}) for n in range(8)]
        stored(tmp_path, method, None if method == "full" else 64, lines)
    named = {words.partition("%")[0].strip(): words for _, words in named_on_the_front(tmp_path)}
    assert "just over: SnapKV 64, 10.6 %" in named["10"] and "over" not in named["25"]


@own
def test_the_best_of_those_that_have_lost_is_not_recommended(tmp_path: Path) -> None:
    arm(tmp_path, "full", [1.0] * 24)
    arm(tmp_path, "quest", [1.0] + [0.0] * 23)
    arm(tmp_path, "snapkv", [0.0] * 24)
    found = named_on_the_front(tmp_path)
    assert found and all(method is None and "the best, of 2: score 4.2" in words for method, words in found)


@own
def test_full_attention_in_fewer_bits_is_named_apart_from_its_setting(tmp_path: Path) -> None:
    arm(tmp_path, "full", [1.0] * 16)
    arm(tmp_path, "full", [1.0, 1.0, 0.0, 1.0] * 4, config={"kv": {"device": "kivi4", "host": "kivi4"}})
    arm(tmp_path, "quest", [0.0, 1.0] * 8)
    found = {words.partition("%")[2].partition("score")[0] for _, words in named_on_the_front(tmp_path)}
    assert len(found) == 1 and found.pop().startswith("Full, kv=kivi4")


def test_a_method_has_a_page_of_what_it_is_finds_and_should_find(site: Path) -> None:
    page = (site / "methods/quest.html").read_text()
    for part in ("results", "by-group", "pictures", "claims", "published-beside-ours", "settings"):
        assert f'<section id="{part}">' in page
    assert "largest upper bound on q.k" in page and "page_size: 16" in page and "quest-budget.svg" in page
    assert "44 published numbers in 8 tables" in page
    assert "page slots" in (site / "methods/icecache.html").read_text()
    assert "It did not run here." in (site / "methods/h2o.html").read_text()


@own
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
    assert whose == {"attended": False, "frontier": False, "search": True}
    assert "SnapKV" in (site / "pictures/attended.svg").read_text()


def test_of_many_methods_a_picture_has_one_of_each_kind_and_a_user_s_own(tmp_path: Path) -> None:
    for method in ["mine", *choices("method")]:
        stored(tmp_path, method, 64)
    runs = legible(collect([tmp_path]))
    assert {run.arm["method"] for run in runs} == {"mine", *REPRESENTATIVES}


def test_runs_without_outputs_say_so(results: Path, tmp_path: Path) -> None:
    bare = [{key: value for key, value in one.items() if key != "output"} for one in answers("quest", 64)]
    stored(tmp_path, "quest", 64, bare)
    told = "No outputs are stored"
    pages = {folder: next(samples(Site(collect([folder]), ""), {})).content for folder in (tmp_path, results)}
    assert told in pages[tmp_path] and told not in pages[results]


def test_samples_of_several_seeds_stand_beside_the_same_prompts_alone(tmp_path: Path) -> None:
    for method, budget, seeds in (("full", None, (1, 2)), ("quest", 64, (2, 3))):
        for seed in seeds:
            lines = [
                record("key-0", "", 1.0, answers=[f"key of {seed}"], output=f"{method} says {seed}", excerpt="ask")
            ]
            stored(tmp_path, method, budget, lines, config={"seed": seed})
    page = str(next(samples(Site(collect([tmp_path]), ""), {})).content)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert {one["prompt"] for one in data["samples"]} == {"ask"}
    found = [(one["expected"], [arm and arm[1] for arm in one["arms"]]) for one in data["samples"]]
    assert sorted(found, key=str) == [
        ("key of 1", ["full says 1", None]),
        ("key of 2", ["full says 2", "quest says 2"]),
        ("key of 3", [None, "quest says 3"]),
    ]


def test_two_arms_are_compared_by_their_paired_difference(tmp_path: Path) -> None:
    for method, scores in (("quest", [1, 1, 1, 0] * 4), ("snapkv", [0, 0, 1, 0] * 4)):
        stored(tmp_path, method, 64, list(map(float, scores)))
    page = str(next(samples(Site(collect([tmp_path]), ""), {})).content)
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    (((mean, low, high, n, is_range, says),), rest) = data["pairs"]
    assert (mean, n, is_range, says, rest) == (50, 16, False, "ahead", []) and 0 < low < 50 < high
    assert "Of the 1 pairs here" in page and data["measure"]["name"] == "score"


def test_a_claim_that_holds_against_a_method_does_not_look_like_one_for_it(tmp_path: Path) -> None:
    stored(tmp_path, "quest")
    site = Site(collect([tmp_path]), "")
    sides = by_side(site, "quest")
    assert {one.claim.id for one in sides[ITS_PAPER]} == {"quest-1", "quest-2"}
    (held,) = (one for one in sides[AGAINST] if one.claim.id == "base-1")
    assert shown(held._replace(verdict=Verdict.HOLDS), turned=True).startswith('<b class="behind"')


# -- in a browser ------------------------------------------------------------------------------------------------------


def test_every_number_of_the_site_is_one_of_a_run_or_of_a_paper(site: Path, results: Path) -> None:
    assert check_numbers(site, results) > 100


@own
def test_a_claim_s_page_has_its_numbers_and_the_runs_behind_them(tmp_path: Path) -> None:
    """Scores that are paired, found among full attention's, and measured on texts."""
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
    assert listed.index("ice-9.html") < listed.index("racc-6.html") < listed.index("ice-1.html"), (
        "what no run can decide, then what none has"
    )
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
    shares = row.share(indexed=False), row.share(indexed=True)
    assert shares == ((None, None) if coded and not beside else (pytest.approx(5), pytest.approx(7)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "claims"])
def test_the_site_of_the_runs_that_come_with_kvbench_is_true_and_small(name: str, tmp_path: Path) -> None:
    judges = [archive.removesuffix(".tar.xz") for archive in DECIDING]
    for one in {name, *judges}:
        (tmp_path / one).mkdir()
        subprocess.run(["tar", "-xf", ROOT / f"results/{one}.tar.xz", "-C", tmp_path / one], check=True)
    made(ROOT / f"results/{name}.tar.xz", tmp_path / "site")
    assert {*OF_ARCHIVES} < {path.stem for path in (tmp_path / "site/pictures").glob("*.svg")}
    assert "IceCache" in (tmp_path / "site/pictures/breakeven.svg").read_text()
    assert (tmp_path / "site/read.svg").is_file(), "drawn of a method of each kind where all are too many"
    assert check_numbers(tmp_path / "site", tmp_path / name) > (100 if name == "claims" else 500)
    assert check_claims(tmp_path / "site", tmp_path / name, *(tmp_path / one for one in judges)) > 30
    assert max(path.stat().st_size for path in (tmp_path / "site").rglob("*")) < 3e6
