"""In a browser the static site answers, sorts, filters and compares."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from site_runs import made, stored_arms

from kvbench.report.site import PAGES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored_arms(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without pictures, and of nothing that is shipped."""
    folder = tmp_path_factory.mktemp("sites")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.report.claims.page.SHIPPED", folder / "none")
        patch.delitem(PAGES, "Pictures")
        return made(results, folder / "site")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


browsed = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


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
    title, *_ = re.findall(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    return json.loads(unescape(title))


HELPERS = """
const visible = name => [...document.querySelectorAll(name)].filter(row => row.checkVisibility());
const arms = () => visible(".board tbody tr").map(row => `${row.dataset.method} ${row.dataset.budget}`);
const set = (form, name, value) => {
  const field = document.getElementById(form).elements[name];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
"""


@browsed
def test_the_first_page_answers_without_a_click_and_filters_by_memory(site: Path, tmp_path: Path) -> None:
    script = """
    const named = row => row.querySelector("a.method")?.textContent ?? "none";
    const rows = () => visible("#answers tr[data-share]").map(row => `${row.dataset.share} ${named(row)}`);
    const found = { first: rows(), answer: document.querySelector(".answer").getBoundingClientRect().bottom };
    set("filters", "share", "2"); found.small = rows(); found.hash = location.hash;
    document.querySelector("#filters button").click();
    return found;
    """
    found = browse(site / "index.html", HELPERS + script, tmp_path)
    assert found["first"] == ["10 ParisKV"] and found["answer"] < 900
    assert found["small"] == ["2 none"] and found["hash"] == "#share=2"


@browsed
def test_the_leaderboard_sorts_and_filters(site: Path, tmp_path: Path) -> None:
    script = """
    const found = { all: arms() }, head = document.querySelector('th[data-name=tpot_ms_p50] button');
    head.click(); found.quick = arms(); head.click(); found.slow = arms();
    set("filters", "share", "5"); found.small = [arms(), location.hash];
    set("filters", "share", "2"); found.bare = arms(); set("filters", "index", true); found.indexed = arms();
    set("filters", "index", false); set("filters", "method", "snap"); found.named = arms();
    return found;
    """
    found = browse(site / "leaderboard.html", HELPERS + script, tmp_path)
    assert found["all"] == ["full -", "pariskv 64", "quest 128", "quest 64", "snapkv 64"]
    assert found["quick"] == ["snapkv 64", "quest 64", "quest 128", "full -", "pariskv 64"]
    assert found["slow"] == found["quick"][::-1]
    assert found["small"] == [["pariskv 64", "snapkv 64"], "#share=5"]
    assert (found["bare"], found["indexed"], found["named"]) == (["pariskv 64", "snapkv 64"], [], ["snapkv 64"])


@browsed
@pytest.mark.parametrize("page", ["index.html", "leaderboard.html", "methods/quest.html", "claims/quest-1.html"])
def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path, page: str) -> None:
    script = """
    document.body.style.width = "390px";  // a window may be no narrower than 500
    const wide = [...document.querySelectorAll("main > *")].filter(part => part.getBoundingClientRect().right > 391);
    return wide.map(part => part.outerHTML.slice(0, 60));
    """
    assert browse(site / page, script, tmp_path, wide=500) == []


@browsed
def test_two_arms_answers_stand_side_by_side(site: Path, tmp_path: Path) -> None:
    script = """
    const names = [...document.querySelector("[name=right]").options].map(option => option.text);
    set("compare", "right", names.indexOf("SnapKV 64"));
    const texts = pair => [...pair.children].map(side => side.innerText);
    const sides = () => [...document.querySelectorAll(".pair")].map(texts);
    const found = { names, whole: sides().length };
    found.pair = document.getElementById("pair").textContent;
    set("compare", "differ", true); found.differ = sides();
    return found;
    """
    found = browse(site / "samples/1.html", HELPERS + script, tmp_path)
    assert found["pair"].startswith("Full against SnapKV 64, by score: 83.3 points ahead (95 % interval ")
    assert found["names"][0] == "Full" and found["whole"] == 24 and len(found["differ"]) == 20
    for left, right in found["differ"]:
        assert " ".join(left.split()).startswith("Full score 100.0 full says <b>")
        assert " ".join(right.split()).startswith("SnapKV 64 score 0.0 snapkv says <b>")


@browsed
def test_a_link_to_what_is_folded_opens_it(site: Path, tmp_path: Path) -> None:
    script = """
    const folded = [...document.querySelectorAll("#published-beside-ours details")].find(one => !one.open);
    folded.querySelector("table").id = "target"; location.hash = "#target"; dispatchEvent(new Event("hashchange"));
    return folded.open;
    """
    assert browse(site / "methods/quest.html", script, tmp_path) is True
