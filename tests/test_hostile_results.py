"""Results folders of strangers are data: no traceback, no hang, nothing written outside, nothing run."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import hostile
import pytest
from driver import slow
from hostile import member
from report_runs import archived

from kvbench.cli import judge, score, status
from kvbench.cli.report import main as report
from kvbench.config import ConfigError
from kvbench.report.data.frame import collect
from kvbench.report.site import PAGES, write
from kvbench.report.site.files import MARK, write_files
from kvbench.report.site.pages import File
from kvbench.report.site.rows import Site

SEEDS = int(os.environ.get("KVBENCH_FUZZ_SEEDS", "24"))  # 300 take ten minutes, and an hour with their sites
SECONDS = 180  # for a command on a handful of small runs, on a slow machine beside other work
pytestmark = pytest.mark.usefixtures("nothing_shipped")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.base(tmp_path_factory.mktemp("base") / "results")


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a program is started, or where something takes too long."""

    def refuse(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"a program was to be started: {args}")

    def late(*_: Any) -> None:
        raise AssertionError("no end in sight")

    for name in ("system", "popen", "execv", "posix_spawn", "fork"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def commands(runs: Path, out: Path) -> list[tuple[Any, list[str]]]:
    """What reads a folder of results, but for a site: that takes most of the time."""
    one = next((path.parent for path in sorted(runs.glob("runs/longgenbench/**/run.yaml"))), runs)
    return [
        (status.main, [str(runs), "--all"]),
        (status.main, [str(runs), "--json"]),
        (score.main, [str(runs)]),
        (score.main, [str(runs), "--json"]),
        (score.main, [str(runs), "--write"]),
        (judge.main, [str(one), "--questions", str(out / "questions.jsonl")]),
        *((report, [str(runs), "--unfinished", "--format", kind]) for kind in ("console", "markdown", "latex", "csv")),
        (report, [str(runs), "--rows", "method", "--columns", "group"]),
        (report, [str(runs), "--claims"]),
        (report, [str(runs), "--figure", "tradeoff", "--out", str(out / "tradeoff.svg")]),
    ]


def attacked(base: Path, folder: Path, seed: int) -> Path:
    runs = hostile.copy(base, folder / "results")
    hostile.mutate(runs, seed)
    return runs


@pytest.mark.parametrize("seed", [0, *slow(*range(1, SEEDS))])
def test_no_results_folder_breaks_a_command(
    seed: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out, others = attacked(base, tmp_path, seed), tmp_path / "out", tmp_path / "others"
    out.mkdir()
    others.mkdir()
    (others / "thesis.tex").write_text("years of work")
    before = hostile.listing(base), hostile.listing(others)
    with watched(monkeypatch):
        for main, words in commands(runs, out):
            assert main(words) in (0, 2), words
            shown = capsys.readouterr()
            assert "\x1b[31m" not in shown.out + shown.err
            assert "Traceback" not in shown.err
    assert (hostile.listing(base), hostile.listing(others)) == before
    assert {path.name for path in tmp_path.iterdir()} == {"results", "out", "others"}
    assert {path.name for path in out.iterdir()} <= {"questions.jsonl", "tradeoff.svg"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS // 6))
def test_no_results_folder_breaks_a_site(
    seed: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = attacked(base, tmp_path, seed), tmp_path / "site"
    with watched(monkeypatch):
        for target in (out, tmp_path / "one.html"):
            assert report([str(runs), "--unfinished", "--out", str(target)]) in (0, 2)
    assert {path.name for path in tmp_path.iterdir()} <= {"results", "site", "one.html"}
    for page in out.rglob("*.html"):
        text = page.read_text()
        assert text.count("<script") == text.count("</script>") <= 3
        assert "<script>alert" not in text and "<b onload" not in text


BAD_FILES: dict[str, tuple[str, Any]] = {
    "aliases that stand for a huge text": ("run.yaml", hostile.alias_bomb()),
    "a pipe for run.yaml": ("run.yaml", os.mkfifo),
    "a pipe for the samples": ("samples.jsonl", os.mkfifo),
    "a pipe for the status": ("status.json", os.mkfifo),
    "a folder": ("samples.jsonl", Path.mkdir),
    "an endless device": ("samples.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "a nested record": ("samples.jsonl", '{"id": "a-0", "meta": ' + "[" * 10**5 + "]" * 10**5 + "}\n" * 2),
    "a number of 400 digits": ("samples.jsonl", '{"id": "a-0", "scores": {"accuracy": 1' + "0" * 400 + "}}\n" * 2),
    "scores that are a text": ("samples.jsonl", '{"id": "a-0", "scores": "all right"}\n' * 2),
    "audits that are a number": ("samples.jsonl", '{"id": "a-0", "scores": {}, "audit": 3}\n' * 2),
    "a name that is a list": ("run.yaml", "format: 1\nidentity: {config: {}}\nconfig: {method: {name: [x]}}\n"),
    "a name that commands a terminal": ("run.yaml", 'format: 1\nidentity: {}\nconfig: {task: {name: "\\e[2J"}}\n'),
    "a number to the base of 60": ("run.yaml", "format: 1\nconfig: {}\nidentity: 1" + ":1" * 10**6),
    "a hexadecimal key": ("run.yaml", f"format: 1\nconfig: {{0x{'f' * 9000}: 1}}\nidentity: {{}}\n"),
    "a format of 5000 digits": ("run.yaml", f"format: {'1' * 5000}\n"),
    "a link to itself": ("run.yaml", lambda path: path.symlink_to(path)),
    "millions of lists": ("samples.jsonl", '{"id": "a-0", "x": [' + "[]," * 2**22 + "[]]}\n"),
    "a text without an end": ("samples.jsonl", '{"id": "a-0", "x": [' + "[]," * 2**22 + '\\"' * 2**20 + "\n"),
    "a score of its own in each of thousands of samples": (
        "samples.jsonl",
        "".join(f'{{"id": "{n}", "scores": {{"accuracy": 1, "own-{n}": 1}}}}\n' for n in range(2000)),
    ),
    "half a character": ("samples.jsonl", '{"id": "a-0", "scores": {"accuracy": 1}, "output": "\\ud800"}\n' * 2),
    "another encoding": ("samples.jsonl", '{"id": "a-0", "scores": {"accuracy": NaN}}\n\n'.encode("utf-16")),
    "Python objects": ("run.yaml", "format: 1\nconfig: !!python/object/apply:os.system [id]\n"),
}


def test_texts_full_of_brackets_are_read(tmp_path: Path) -> None:
    texts = [{**record(1.0), "output": "{[" * 2**22 + '\\"'}]
    hostile.stored(
        tmp_path, "quest", samples=texts, config={"metric": "accuracy", "task": hostile.shipped("task", "passkey")}
    )
    assert [len(run.samples()) for run in collect([tmp_path])] == [1]


@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_bad_file_costs_its_own_run_alone(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = {"metric": "accuracy", "task": hostile.shipped("task", "passkey")}
    hostile.stored(tmp_path, "snapkv", samples=[record(1.0)], config=scored)
    name, content = BAD_FILES[bad]
    file = hostile.stored(tmp_path, "quest", samples=[record(1.0)], config=scored) / name
    file.unlink()
    if callable(content):
        content(file)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with watched(monkeypatch):
        runs = collect([tmp_path])
        assert {run.arm["method"] for run in runs} >= {"snapkv"}
        assert bad == "a pipe for the status" or [one.path for one in runs.skipped] == [file.parent]
        assert score.main([str(tmp_path), "--json"]) == (0 if name == "status.json" else 2)
        told = capsys.readouterr()
        assert len(json.loads(told.out)) == 2 - len(told.err.splitlines())
        assert status.main([str(tmp_path)]) == 0
        if file.is_file() and not file.is_symlink():  # the same in an archive
            packed = archived(tmp_path, tmp_path / "packed.tar.xz")
            runs = collect([packed])
            assert [one.path for one in runs.skipped] == [packed / file.parent.relative_to(tmp_path)]
            assert [run.arm["method"] for run in runs] == ["snapkv"]


WHOLE = lzma.compress(member(data=b"format: 1\n") + bytes(1024))
BAD_MEMBERS = {
    "a link": member(kind=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": member(kind=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": member(kind=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a pipe": member(kind=tarfile.FIFOTYPE),
    "a sparse file of many bytes": member(kind=tarfile.GNUTYPE_SPARSE, size=2**60),
    "a header about later ones": member(kind=tarfile.XHDTYPE, data=b"30 path=/etc/passwd\n"),
    "a header about all later ones": member(kind=tarfile.XGLTYPE, data=b"20 size=-99999\n"),
    "a name in a member of its own": member(kind=tarfile.GNUTYPE_LONGNAME, data=b"x" * 5000),
    "an absolute name": member("/tmp/runs/x/run.yaml"),
    "a name that leads out": member("runs/../../run.yaml"),
    "a name that is there": member() + member("./runs//x/run.yaml"),
    "a name that is no text": hostile.checked(b"\xff\xfe" + member()[2:512]),
    "a size that is not there": member(size=10**6),
    "a huge size": member(size=2**70),
    "a size below zero": member(size=-(2**30)),
    "a checksum that is wrong": b"x" + member()[1:],
    "too many files": b"".join(member(f"{number}") for number in range(11)),
    "too many folders": b"".join(member(f"{number}", tarfile.DIRTYPE) for number in range(11)),
    "too many values": b"".join(member(f"runs/{number}/run.yaml", data=b"[[],[],[],[]]") for number in range(9)),
    "too many bytes": member(data=bytes(2**20)),
}
BAD_ARCHIVES = {name: lzma.compress(tar + bytes(1024), preset=0) for name, tar in BAD_MEMBERS.items()} | {
    "nothing": b"",
    "no xz data": b"run.yaml" * 99,
    "half": WHOLE[: len(WHOLE) // 2],
    "all but a byte": WHOLE[:-1],
    "a byte that is another": WHOLE[:40] + bytes([WHOLE[40] ^ 1]) + WHOLE[41:],
    "more after its end": WHOLE + b"x",
    "a huge dictionary": hostile.with_dictionary(WHOLE),
}


@pytest.mark.parametrize("bad", BAD_ARCHIVES)
def test_a_bad_archive_costs_its_own_runs_alone(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvbench.runs.archive.MOST_MEMBERS", 10)
    monkeypatch.setattr("kvbench.runs.archive.MOST_BYTES", 2**20)
    monkeypatch.setattr("kvbench.runs.stored.MOST_ARCHIVED_NODES", 50)
    scored = {"metric": "accuracy", "task": hostile.shipped("task", "passkey")}
    hostile.stored(tmp_path, "snapkv", samples=[record(1.0)], config=scored)
    archive = tmp_path / "bad.tar.xz"
    archive.write_bytes(BAD_ARCHIVES[bad])
    before = hostile.listing(tmp_path)
    with watched(monkeypatch):
        runs = collect([tmp_path])
        assert [run.arm["method"] for run in runs] == ["snapkv"]
        assert [(one.path, one.why[:10]) for one in runs.skipped] == [(archive, "bad.tar.xz")]
        assert score.main([str(tmp_path), "--json"]) == 2
        told = capsys.readouterr()
        assert len(json.loads(told.out)) == len(told.err.splitlines()) == 1
        assert status.main([str(tmp_path), "--all"]) == 0
        for main in (report, score.main):
            assert main([str(archive)]) == 2 and "bad.tar.xz" in capsys.readouterr().err
    assert hostile.listing(tmp_path) == before


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_only_is_called_as_an_archive_is_passed_by(make: Any, tmp_path: Path) -> None:
    hostile.stored(tmp_path, "snapkv", samples=[record(1.0)])
    make(tmp_path / "bad.tar.xz")
    runs = collect([tmp_path])
    assert len(list(runs)) == 1 and not runs.skipped


def test_reports_and_status_build_nothing_that_a_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hostile.stored(tmp_path, "quest", samples=[record(1.0)])
    text = re.sub(r"_target_: .*", "_target_: os.system", (folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(text if "_target_" in text else f"{text}\n_target_: os.system\n")
    monkeypatch.setattr("kvbench.config.locate", pytest.fail)
    monkeypatch.setattr("kvbench.config.TargetConfig.build", pytest.fail)
    with watched(monkeypatch):
        for main, words in [
            (status.main, ["--all"]),
            (report, []),
            (report, ["--format", "html"]),
            (report, ["--claims"]),
        ]:
            assert main([str(tmp_path), *words]) == 0
    assert "quest" in capsys.readouterr().out


def record(value: float) -> dict[str, Any]:
    return hostile.record("a-0", "a", value)


NAMES = ["../../victim/x", "/etc/x", "index", "..", ".", "a/b", "a\\b", "ü", "x" * 200, "con: ?", "a-b", "a b"]


@pytest.mark.slow
def test_a_site_stays_in_its_folder_whatever_methods_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for long in ("Start", "Claims", "Pictures"):
        monkeypatch.delitem(PAGES, long)
    monkeypatch.setattr(Site, "judged", [])
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    for name in NAMES:
        hostile.stored(tmp_path / "results", name, 64, [record(0.0)])
    out = tmp_path / "site"
    for _ in range(2):
        (out / "index.html").parent.mkdir(exist_ok=True)
        (out / "index.html").write_text(MARK)
        write(collect([tmp_path / "results"]), "results", out)
    assert hostile.listing(victim) == {str(victim / "thesis.tex"): b"years of work"}
    assert {path.name for path in tmp_path.iterdir()} == {"results", "site", "victim"}
    board = (out / "leaderboard.html").read_text()
    named = set(re.findall(r'<a class="method" href="([^"]+)"', board))
    pages = [(out / path).read_text() for path in named]
    assert all(sum(f"<h1>{escape(name)}</h1>" in page for page in pages) == 1 for name in NAMES)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's folder with a page of ours, one of the user's, and a list that a stranger has changed."""
    out = tmp_path / "site"
    write_files(out, [File("index.html", MARK), File("methods/ours.html", "ours")])
    listed = json.loads((out / "site.json").read_text())["files"]
    (out / "site.json").write_text(json.dumps({"files": [*listed, "../other.html", "methods", 3, "\0", "x" * 999]}))
    (out / "methods" / "thesis.html").write_text("years of work")
    (tmp_path / "other.html").write_text("years of work")
    return out


def test_a_site_deletes_what_it_has_written_and_nothing_else(site: Path) -> None:
    write_files(site, [File("index.html", MARK)])
    assert not (site / "methods" / "ours.html").exists()
    assert (site / "methods" / "thesis.html").exists() and (site.parent / "other.html").exists()


def test_a_list_of_files_deletes_no_run(site: Path) -> None:
    run = hostile.stored(site / "results", "quest", samples=[record(1.0)])
    files = [str(path.relative_to(site)) for path in run.iterdir()]
    (site / "site.json").write_text(json.dumps({"files": files}))
    before = hostile.listing(site / "results")
    write_files(site, [File("index.html", MARK)])
    assert hostile.listing(site / "results") == before
    with pytest.raises(ConfigError, match="--out"):
        write(collect([site / "results"]), "results", site)


def test_a_site_replaces_what_is_no_file(site: Path) -> None:
    (site / "index.html").unlink()
    os.mkfifo(site / "index.html")
    write_files(site, [File("index.html", MARK)])
    assert (site / "index.html").read_text() == MARK


def test_a_pipe_in_place_of_a_temporary_file_blocks_nothing(tmp_path: Path) -> None:
    scored = {"metric": "accuracy", "task": hostile.shipped("task", "passkey")}
    folder = hostile.stored(tmp_path, "quest", samples=[record(0.5)], config=scored)
    os.mkfifo(folder / ".summary.json.new")
    assert score.main([str(folder), "--write"]) == 0


@pytest.mark.slow
def test_scores_of_a_failed_sample_and_odd_settings_break_no_page(tmp_path: Path) -> None:
    failed = {**record(0.0), "error": "out of memory", "scores": {"accuracy": "x"}}
    whole = {**record(1.0), "id": "a-1", "audit": {**record(1.0)["audit"], "windowed_share": 1.0, "dense_share": 1.0}}
    for method in ("full", "quest"):
        hostile.stored(tmp_path / "results", method, 64, [failed, whole])
    odd = hostile.stored(tmp_path / "results", "topk", 64, [whole])
    (odd / "run.yaml").write_text((odd / "run.yaml").read_text().replace("seed: 0", "seed: 0\n    batch: x", 1))
    found = collect([tmp_path / "results"])
    assert [one.path for one in found.skipped] == [odd]
    for out in ("one.html", "site"):
        assert report([str(tmp_path / "results"), "--out", str(tmp_path / out)]) == 0


def test_no_command_of_a_terminal_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored = {"metric": "accuracy", "task": hostile.shipped("task", "passkey")}
    samples = [{**record(0.0), "id": f"a-{group}", "group": f"\x1b[2J{group}"} for group in "ab"]
    hostile.stored(tmp_path / "\x1b[31m" / "[/x]", "quest", samples=samples, config=scored)
    for main, words in [(score.main, []), (score.main, ["--write"]), (status.main, ["--all"]), (report, [])]:
        main([str(tmp_path), *words])
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err and "[2Ja" in told.out


@pytest.mark.parametrize("link", ["methods", "index.html", "site.json"])
def test_a_site_is_not_written_through_a_link(site: Path, tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    shutil.move(site / link, victim)
    (site / link).symlink_to(victim)
    before = hostile.listing(tmp_path)
    with pytest.raises(ConfigError, match=link):
        write_files(site, [File("index.html", "new"), File("methods/ours.html", "new")])
    assert hostile.listing(tmp_path) == before


@pytest.mark.parametrize("path", ["../x.html", "/tmp/x.html", "methods/../../x.html"])
def test_no_page_lies_outside_a_site(site: Path, tmp_path: Path, path: str) -> None:
    before = hostile.listing(tmp_path)
    with pytest.raises(ConfigError, match="--out"):
        write_files(site, [File("index.html", "new"), File(path, "new")])
    assert hostile.listing(tmp_path) == before
