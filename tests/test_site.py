"""The static site: every number on it is one of a run's, like stands beside like, and all of it can be read aloud."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from report_runs import record, stored
from site_numbers import check_claims, check_numbers
from site_runs import ARMS, DENSE, INDEX, Outline, answers, cells_of, made, own_pages, stored_arms

import kvbench.report.site as site_package
from kvbench.cli.report import main
from kvbench.config import choices
from kvbench.report.claims.page import DECIDING
from kvbench.report.claims.verdict import Verdict
from kvbench.report.data.frame import collect
from kvbench.report.site.board import board
from kvbench.report.site.claims import AGAINST, ITS_PAPER, by_side, claim_pages, look
from kvbench.report.site.front import front
from kvbench.report.site.methods import chart_of
from kvbench.report.site.methods import results as results_of
from kvbench.report.site.pages import File, Page
from kvbench.report.site.paired import holm, verdicts
from kvbench.report.site.pictures import REPRESENTATIVES, SHOWN, legible
from kvbench.report.site.rows import Site
from kvbench.report.site.samples import samples

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ("attended", "frontier")  # that a site of made runs has; the slow test has all
own = pytest.mark.usefixtures("nothing_shipped")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_arms(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every page, of nothing that is shipped."""
    folder = tmp_path_factory.mktemp("sites")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.report.claims.page.SHIPPED", folder / "none")
        patch.setattr(import_module("kvbench.report.site.pictures"), "SHIPPED", folder / "none")
        for name in SHOWN.keys() - set(PICTURES):
            patch.delitem(SHOWN, name)
        return made(results, folder / "site")


def site_of(folder: Path) -> Site:
    return Site(collect([folder]), "")


def data_of(pages: Iterator[File | Page], path: str) -> dict[str, Any]:
    """What the template of a page gets."""
    return next(page.data for page in pages if isinstance(page, Page) and page.path == path)


def answers_of(folder: Path) -> dict[int, Any]:
    """The first page's answers by share, on runs of one set of samples."""
    groups = data_of(front(site_of(folder)), "index.html")["groups"]
    return {answer.share: answer for group in groups for answer in group.answers}


def arm(folder: Path, method: str, scores: list[float], size: int = 2**20, ids: str = "s", **more: Any) -> None:
    size = 2**24 if method == "full" and "config" not in more else size
    lines = [record(f"{ids}{n}", "", score, audit={"device_kv_bytes": size}) for n, score in enumerate(scores)]
    stored(folder, method, None if method == "full" else 64, lines, **more)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_every_number_of_the_site_is_one_of_a_run_or_of_a_paper(site: Path, results: Path) -> None:
    assert check_numbers(site, results) > 100


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
    found = {
        (row.method, row.length): (row.share(indexed=False), row.cell.numbers["kl_mean"])
        for row in site_of(tmp_path).by_length
    }
    assert found["quest", 1024] == (20, 0.1) and found["quest", 2048] == (9, 0.9) and found["snapkv", 2048] == (15, 0.2)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_memory_is_a_share_of_full_attention_s_in_the_layers_that_a_method_selects_in(
    coded: bool, beside: bool, tmp_path: Path
) -> None:
    """Of ten layers two have a window, two are dense, and six hold a twentieth of what full attention holds there."""

    def layers(method: str, device: int, kv: str) -> None:
        audit = {"device_kv_bytes": device, "windowed_kv_bytes": 20, "windowed_share": 0.2, "attended_mean": 8.0}
        audit |= {"dense_share": 0.2 if method == "quest" else 0.8, "attended_max": 8, "index_bytes": 12}
        stored(tmp_path, method, None, [record("one", "", 1.0, audit=audit)], config={"kv": {"device": kv, "host": kv}})

    layers("full", 8 * 100 + 20, "native")
    layers("quest", 6 * 5 + 2 * (50 if coded else 100) + 20, "int8" if coded else "native")
    if beside:
        layers("full", 8 * 50 + 20, "int8")
    (row,) = (row for row in site_of(tmp_path).rows if row.method == "quest")
    shares = row.share(indexed=False), row.share(indexed=True)
    assert shares == ((None, None) if coded and not beside else (pytest.approx(5), pytest.approx(7)))


def test_an_arm_with_failed_samples_has_no_share_and_without_kl_the_last_place(tmp_path: Path) -> None:
    def line(kl: float | None, size: int, **more: Any) -> dict[str, Any]:
        near = {} if kl is None else {"fidelity": {"kl_mean": kl, "nll": 1.0, "nll_full": 1.0}}
        return record("one", "", 1.0, audit={"device_kv_bytes": size}, **near, **more)

    stored(tmp_path, "full", None, [line(0.0, 2**22)], task="fidelity")
    stored(tmp_path, "quest", 64, [line(0.3, 2**20)], task="fidelity")
    stored(tmp_path, "snapkv", 64, [line(None, 2**20, error="no memory")], task="fidelity")
    shares = [(row.method, row.share(indexed=False)) for row in site_of(tmp_path).rows]
    assert shares == [("full", 100), ("quest", 25), ("snapkv", None)]


def test_another_score_in_a_run_is_another_number_on_the_site(results: Path, tmp_path: Path) -> None:
    (old,) = (results / "runs/passkey/tiny/snapkv-64").iterdir()
    new = tmp_path / old.name
    shutil.copytree(old, new)
    lines = (new / "samples.jsonl").read_text()
    (new / "samples.jsonl").write_text(re.sub(r'"accuracy": ?0', '"accuracy": 1', lines, count=1))
    scores = [site_of(folder).rows[0].number("score").value for folder in (old, new)]  # type: ignore[union-attr]
    assert scores == pytest.approx([100 / 6, 100 / 6 + 100 / 24])


# -- which arms stand beside each other --------------------------------------------------------------------------------


def test_panels_are_named_by_the_fewest_settings_and_arms_by_what_is_theirs(tmp_path: Path) -> None:
    short, long = {"lengths": [2048, 4096], "steps": 64, "samples": 4}, {"lengths": [2048], "steps": 2048, "samples": 2}
    for options in (short, long):
        stored(tmp_path, "quest", 64, options=options)
    stored(tmp_path, "snapkv", 64, options=long)
    stored(tmp_path, "snapkv", 64, options=long, config={"attention": "torch"})
    stored(tmp_path, "quest", 64, task="gsm8k")
    assert sorted((row.panel, row.method, row.variant) for row in site_of(tmp_path).rows) == [
        ("gsm8k, tiny", "quest", ""),
        ("passkey, tiny, steps=2048", "quest", ""),
        ("passkey, tiny, steps=2048", "snapkv", "attention=auto"),
        ("passkey, tiny, steps=2048", "snapkv", "attention=torch"),
        ("passkey, tiny, steps=64", "quest", ""),
    ]


def test_other_data_under_one_setting_are_told_apart_beside_other_settings(tmp_path: Path) -> None:
    for method, length, data in (("quest", 2048, "a"), ("snapkv", 2048, "b"), ("pariskv", 4096, "a")):
        lines = [record("-0", "", 1.0, prompt_tokens=1000 + ord(data))]
        stored(tmp_path, method, 64, lines, options={"lengths": [length]}, data=data)
    panels = {row.method: row.panel for row in site_of(tmp_path).rows}
    assert panels["quest"] == "passkey, tiny, lengths=[2048], data a"
    assert panels["snapkv"] == "passkey, tiny, lengths=[2048], data b"
    assert panels["pariskv"] == "passkey, tiny, lengths=[4096]"


def test_variants_are_told_apart_by_whole_settings_of_which_some_hold_commas(tmp_path: Path) -> None:
    for granularity, seeds in (("kv_head", (1, 2)), ("query_head", (1, 2, 3))):
        for seed in seeds:
            method = {"name": "topk", "granularity": granularity}
            stored(tmp_path, "topk", 64, config={"method": method, "seed": seed})
    assert sorted(row.variant for row in site_of(tmp_path).rows) == [
        "seed=1, 2, 3, granularity=query_head",
        "seed=1, 2, granularity=kv_head",
    ]


def test_places_are_as_wide_as_paired_tests_leave_them_and_few_samples_have_none(tmp_path: Path) -> None:
    right = {"quest": [1, 1, 1, 0] * 4, "snapkv": [1, 1, 0, 1] * 4, "pariskv": [0, 0, 0, 0] * 4}
    places = {"quest": "1 to 2 of 3", "snapkv": "1 to 2 of 3", "pariskv": "3 of 3"}
    for count, expected in ((16, places), (7, dict.fromkeys(right, ""))):
        for method, scores in right.items():
            stored(tmp_path / str(count), method, 64, list(map(float, scores[:count])))
        site = site_of(tmp_path / str(count))
        assert {row.method: results_of(site, [row])[0].rows[0][1] for row in site.rows} == expected


def test_what_attends_far_more_than_its_budget_has_no_place_in_it(tmp_path: Path) -> None:
    for method, score, attended in (("raas", 1.0, 1100.0), ("quest", 0.75, 100.0), ("snapkv", 0.5, 64.0)):
        audit = {"attended_mean": attended, "attended_max": attended, "budget": 64, "device_kv_bytes": 1000}
        stored(tmp_path, method, 64, [record(f"{n}", "", score * (1 - n / 100), audit=audit) for n in range(8)])
    site = site_of(tmp_path)
    places = {row.method: results_of(site, [row])[0].rows[0][1] for row in site.rows}
    assert places == {"raas": "", "quest": "1 of 2", "snapkv": "2 of 2"}


@own
def test_where_full_attention_may_score_0_no_method_is_named(tmp_path: Path) -> None:
    """Of six questions it answers one, in part: a method that answers two was lucky."""
    for task, full in (("longbench", [0, 0, 0.1, 0, 0, 0]), ("passkey", [1, 1, 1, 1, 0, 1])):
        stored(tmp_path, "full", None, {str(group): [score] for group, score in enumerate(full)}, task=task)
        for method in ("quest", "snapkv"):
            stored(tmp_path, method, 64, {str(group): [float(group > 3)] for group in range(6)}, task=task)
    site = site_of(tmp_path)
    assert all(row.is_choice == (row.task == "passkey" and row.method != "full") for row in site.rows)
    data = data_of(front(site), "index.html")
    assert {answer.panel.task for group in data["groups"] for answer in group.answers} == {"passkey"}
    assert [row.task for row in data["unnamed"]] == ["longbench"]


# -- the first page ----------------------------------------------------------------------------------------------------


@own
def test_the_first_page_answers_which_method_fits_a_share_of_the_memory(results: Path) -> None:
    full = ARMS["full", None][2] * (1 - DENSE)
    for share, answer in answers_of(results).items():
        held = {
            key: 100 * (size - DENSE * ARMS["full", None][2] + INDEX / 2**20) / full
            for key, (_, _, size, _) in ARMS.items()
        }
        fitting = [key for key in ARMS if key[0] != "full" and held[key] <= share]
        best = max(fitting, key=lambda key: sum(ARMS[key][0] + ARMS[key][1]), default=None)
        assert (answer.best and answer.best.method) == (best and best[0]) and answer.fitting == len(fitting)
        assert best is None or answer.held == pytest.approx(held[best])
        assert best is None or set(answer.others) == {"better"} or len(fitting) == 1


@own
@pytest.mark.parametrize(
    "quest, snapkv, against_full, others",
    [
        ([1.0, 0.0] * 4, [1.0, 0.0] * 4, "worse", "not shown"),
        ([1.0] * 16, [0.0] * 8 + [1.0] * 8, "not shown", "better"),
        ([1.0, 0.0] * 3, [0.0, 1.0] * 3, "not tested", "not tested"),
    ],
)
def test_better_not_shown_and_not_tested_are_three_words(
    quest: list[float], snapkv: list[float], against_full: str, others: str, tmp_path: Path
) -> None:
    arm(tmp_path, "full", [1.0] * len(quest))
    arm(tmp_path, "quest", quest)
    arm(tmp_path, "snapkv", snapkv)
    answer = answers_of(tmp_path)[10]
    assert answer.against_full == against_full and answer.others == Counter([others])


@own
def test_the_best_of_those_that_have_lost_is_not_recommended(tmp_path: Path) -> None:
    arm(tmp_path, "full", [1.0] * 24)
    arm(tmp_path, "quest", [1.0] + [0.0] * 23)
    arm(tmp_path, "snapkv", [0.0] * 24)
    answer = answers_of(tmp_path)[10]
    assert answer.fitting == 2 and not answer.recommended


@own
def test_full_attention_over_coded_keys_and_values_is_a_choice_with_its_name(tmp_path: Path) -> None:
    arm(tmp_path, "full", [1.0] * 16)
    arm(tmp_path, "full", [1.0, 1.0, 0.0, 1.0] * 4, config={"kv": {"device": "kivi4", "host": "kivi4"}})
    arm(tmp_path, "quest", [0.0, 1.0] * 8)
    best = answers_of(tmp_path)[10].best
    assert best is not None and best.name.startswith("Full, kv=kivi4")
    assert sum(row.is_full for row in (row.run for row in site_of(tmp_path).rows)) == 1


@own
def test_arms_of_other_samples_machines_and_protocols_are_not_ranked_together(tmp_path: Path) -> None:
    """Through every view: one arm lacks samples, one ran elsewhere, one under another protocol."""
    arm(tmp_path, "full", [1.0] * 16)
    arm(tmp_path, "quest", [1.0, 0.0] * 8)
    arm(tmp_path, "snapkv", [0.0, 1.0] * 8, config={"device_name": "another, 2 threads"})
    arm(tmp_path, "pariskv", [1.0] * 6)  # of six of the samples, and the best there
    arm(tmp_path, "full", [1.0] * 16, protocol={"question": "after"})
    arm(tmp_path, "tova", [1.0, 0.0] * 8, protocol={"question": "after"})
    for budget, count in ((32, 16), (64, 16), (128, 6)):
        stored(tmp_path, "h2o", budget, [1.0] * count, task="niah")
    site = site_of(tmp_path)
    data = data_of(front(site), "index.html")
    shown = {
        answer.panel.question: answer for group in data["groups"] for answer in group.answers if answer.share == 10
    }
    assert list(shown) == ["after", "with"], "the harder question first"
    assert shown["after"].fitting == 1 and shown["after"].best.method == "tova"
    known = shown["with"]
    assert known.best.method == "quest" and known.fitting == 2, "of the samples that most share"
    assert known.full.cell.numbers["n"] == known.best.cell.numbers["n"] == 16
    assert known.times["tpot_ms_p50"].own.value == 4
    (elsewhere,) = (row for row in site.rows if row.method == "snapkv")
    assert elsewhere.time("tpot_ms_p50", "cpu, 1 threads") is None
    sections = data_of(board(site), "leaderboard.html")["tasks"]["passkey", "tiny"]
    sets = [section for section in sections if section.question == "with"]
    assert [{row.method for row, _ in section.rows} for section in sets] == [{"full", "quest", "snapkv"}, {"pariskv"}]
    section = sets[0]
    times = {row.method: numbers["tpot_ms_p50"] for row, numbers in section.rows}
    assert times["snapkv"] is None and times["quest"].text == "4.00" and section.elsewhere == 1
    table = next(str(file.content) for file in board(site) if isinstance(file, File))
    lines = {line["method"]: line for line in csv.DictReader(io.StringIO(table)) if line["question"] == "with"}
    assert float(lines["snapkv"]["tpot_ms_p50"]) == 4 and lines["snapkv"]["machine"] == "another, 2 threads"
    rows = [row for row in site.rows if row.method == "h2o"]
    chart = chart_of("", rows, rows)
    assert chart is not None and [len(line.points) for line in chart.lines] == [2], "a line is of the same samples"


# -- who beats whom ----------------------------------------------------------------------------------------------------


def test_holm_keeps_what_stands_at_5_per_cent_for_all_pairs() -> None:
    assert holm([0.012, 0.3, 0.02]) == [True, False, True]
    assert holm([0.02, 0.02, 0.02]) == [False] * 3 and holm([]) == []
    assert holm([0.02, 1.0, 1.0], [0.002, 0.25, 0.5]) == [True, False, False], "two could not stand at any number"


@own
def test_a_win_matrix_is_of_one_budget_and_each_pair_of_the_same_samples(tmp_path: Path) -> None:
    scores = {"full": [1.0] * 24, "quest": [1.0] * 22 + [0.0] * 2, "snapkv": [0.0] * 22 + [1.0] * 2}
    for method, of_method in scores.items():
        arm(tmp_path, method, of_method)
    stored(tmp_path, "quest", 128, [record(f"s{n}", "", 1.0) for n in range(24)])
    (matrix,) = data_of(front(site_of(tmp_path)), "wins.html")["matrices"]
    assert matrix.budget == "64" and matrix.pairs >= 3
    assert [row.method for row in matrix.rows] == ["full", "quest", "snapkv"]
    assert matrix.words == [["", "not shown", "better"], ["not shown", "", "better"], ["worse", "worse", ""]]


def test_fewer_than_eight_samples_in_common_are_not_tested(tmp_path: Path) -> None:
    for method, ids in (("quest", "abcdefgh"), ("snapkv", "abcdefg")):
        stored(tmp_path, method, 64, [record(id, "", float(method == "quest")) for id in ids])
    first, other = (row.run for row in site_of(tmp_path).rows)
    assert verdicts([(first, other)], kl=False) == ["not tested"]


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_lead_to_one_another_and_nowhere_else(site: Path) -> None:
    ids = {page: set(re.findall(r'id="([^"]+)"', page.read_text())) for page in own_pages(site)}
    for page in ids:
        for target in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            path, _, part = target.partition("#")
            other = page.parent / path if path else page
            assert target == "data:," or other.is_file(), (page, target)
            assert not part or "=" in part or part in ids[other.resolve()], (page, target)
    assert "://" not in (site / "site.css").read_text() + (site / "site.js").read_text()


def test_every_page_can_be_read_aloud_and_used_by_keyboard(site: Path) -> None:
    faults = {page.name: Outline(page.read_text()).faults for page in own_pages(site)}
    assert {name: some for name, some in faults.items() if some} == {}


def test_words_stand_out_from_the_page_in_light_and_dark(site: Path) -> None:
    def luminance(colour: str) -> float:
        full = colour if len(colour) == 6 else "".join(digit * 2 for digit in colour)
        parts = [int(full[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    themes = re.findall(r":root \{([^}]*)\}", (site / "site.css").read_text())
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): #(\w+)", theme))
        for ground in ("paper", "tint"):
            for ink in ("ink", "soft", "link", "good", "bad"):
                low, high = sorted((luminance(colours[ground]), luminance(colours[ink])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, ink)


def test_a_method_s_page_has_what_it_is_its_results_and_what_papers_print(site: Path) -> None:
    page = (site / "methods/quest.html").read_text()
    ids = set(re.findall(r'<section id="([^"]+)"', page))
    assert ids == {"results", "pictures", "claims", "published-beside-ours", "settings"}
    assert "page_size: 16" in page and page.count("<polyline") == 2, "its own and full attention's"
    assert 'id="pictures"' not in (site / "methods/h2o.html").read_text()


@own
def test_a_folder_s_name_is_text_on_every_page(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(site_package.PAGES, "Pictures")  # which name no folder, and take longest
    shutil.copytree(results, tmp_path / "runs")
    for path in [path.parent for path in (tmp_path / "runs").rglob("run.yaml")]:
        odd = f'{path.name}"><img src=x onerror=alert(1)>'
        (path / "run.yaml").write_text((path / "run.yaml").read_text().replace(path.name, f"'{odd}'"))
        path.rename(path.with_name(odd))
    pages = list(made(tmp_path / "runs", tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40 and not any("<img src=x" in page.read_text() for page in pages)


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


def test_of_many_methods_a_picture_has_one_of_each_kind_and_a_user_s_own(tmp_path: Path) -> None:
    for method in ["mine", *choices("method")]:
        stored(tmp_path, method, 64)
    runs = legible(collect([tmp_path]))
    assert {run.arm["method"] for run in runs} == {"mine", *REPRESENTATIVES}


# -- claims ------------------------------------------------------------------------------------------------------------


@own
def test_a_claim_s_page_says_why_runs_that_are_there_do_not_count(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        stored(tmp_path, "full", None, task="niah", options={"lengths": [4096]}, dtype=dtype)
    arms = data_of(claim_pages(site_of(tmp_path)), "claims/ice-1.html")["arms"]
    why = {arm: there["why"] for (bed, arm), there in arms.items() if "task=niah" in bed}
    assert "differ in dtype" in why["method=full"]
    assert any("no run of method=icecache" in words for words in why.values())


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
    shared = {"nav": {}, "version": "", "total": 0, "folders": ""}
    for page in claim_pages(site_of(tmp_path)):
        path, content = page.rendered(**shared)
        (tmp_path / "site" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / path).write_text(str(content))
    assert check_claims(tmp_path / "site", tmp_path) >= 3
    listed = (tmp_path / "site/claims/index.html").read_text()
    order = [listed.index(f"{name}.html") for name in ("ice-9", "racc-6", "ice-1")]
    assert order == sorted(order), "what no run can decide, then what none has"


@own
def test_a_claim_that_holds_against_a_method_does_not_look_like_one_for_it(tmp_path: Path) -> None:
    stored(tmp_path, "quest")
    sides = by_side(site_of(tmp_path), "quest")
    assert {judged.claim.id for judged in sides[ITS_PAPER]} == {"quest-1", "quest-2"}
    (judged,) = (judged for judged in sides[AGAINST] if judged.claim.id == "base-1")
    held = judged._replace(verdict=Verdict.HOLDS)
    assert look(held, AGAINST) == "behind" and look(held) == "ahead"


# -- two arms ----------------------------------------------------------------------------------------------------------


def compared(folder: Path) -> dict[str, Any]:
    return data_of(samples(site_of(folder)), "samples/1.html")["data"]


def test_runs_without_outputs_say_so(results: Path, tmp_path: Path) -> None:
    bare = [{key: value for key, value in line.items() if key != "output"} for line in answers("quest", 64)]
    stored(tmp_path, "quest", 64, bare)
    assert not compared(tmp_path)["outputs"] and compared(results)["outputs"]


def test_samples_of_several_seeds_stand_beside_the_same_prompts_alone(tmp_path: Path) -> None:
    for method, budget, seeds in (("full", None, (1, 2)), ("quest", 64, (2, 3))):
        for seed in seeds:
            more = {"answers": [f"key of {seed}"], "output": f"{method} says {seed}", "excerpt": "ask"}
            stored(tmp_path, method, budget, [record("key-0", "", 1.0, **more)], config={"seed": seed})
    found = [
        (sample["expected"], [answer and answer[1] for answer in sample["arms"]])
        for sample in compared(tmp_path)["samples"]
    ]
    assert sorted(found, key=str) == [
        ("key of 1", ["full says 1", None]),
        ("key of 2", ["full says 2", "quest says 2"]),
        ("key of 3", [None, "quest says 3"]),
    ]


def test_two_arms_are_compared_by_their_paired_difference(tmp_path: Path) -> None:
    for method, scores in (("quest", [1, 1, 1, 0] * 4), ("snapkv", [0, 0, 1, 0] * 4)):
        stored(tmp_path, method, 64, list(map(float, scores)))
    (((mean, low, high, n, says),), rest) = compared(tmp_path)["pairs"]
    assert (mean, n, says, rest) == (50, 16, "better", []) and 0 < low < 50 < high


def test_answers_on_a_page_end_no_script(site: Path) -> None:
    page = (site / "samples/1.html").read_text()
    (data,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert {sample["expected"] for sample in json.loads(data)["samples"]} == {"</script>"}


# -- of what is shipped ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["question", "claims"])
def test_the_site_of_the_runs_that_come_with_kvbench_is_true_and_small(name: str, tmp_path: Path) -> None:
    judges = [archive.removesuffix(".tar.xz") for archive in DECIDING]
    for archive in {name, *judges}:
        (tmp_path / archive).mkdir()
        subprocess.run(["tar", "-xf", ROOT / f"results/{archive}.tar.xz", "-C", tmp_path / archive], check=True)
    site = made(ROOT / f"results/{name}.tar.xz", tmp_path / "site")
    assert check_numbers(site, tmp_path / name) > 100
    assert check_claims(site, tmp_path / name, *(tmp_path / archive for archive in judges)) > 30
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 5e6
    assert not [page for page in own_pages(site) if Outline(page.read_text()).faults]
    assert len(cells_of((site / "leaderboard.html").read_text())) > 100
