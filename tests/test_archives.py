"""Runs in an archive: read as their folders are, packed as the same bytes, and never written to."""

from __future__ import annotations

import json
import lzma
import random
import re
import subprocess
import tarfile
from pathlib import Path

import hostile
import pandas as pd
import pytest
from report_runs import archived, stored

from kvbench.cli import judge, score, status
from kvbench.cli.report import main as report
from kvbench.report.claims import page
from kvbench.report.data.frame import collect
from kvbench.runs.archive import packed, unpacked
from kvbench.runs.stored import archive_of, runs_in

PASSKEY = {"metric": "accuracy", "task": hostile.shipped("task", "passkey")}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with runs in a folder of its own, and a copy of them in an archive."""
    for method, scores in (("full", [1.0, 1.0]), ("quest", [1.0, 0.0])):
        stored(tmp_path / "mine", method, samples=scores, config=PASSKEY)
    archived(tmp_path / "mine", tmp_path / "mine.tar.xz")
    return tmp_path


def test_an_archive_is_collected_as_its_folder_is(results: Path) -> None:
    folder, read = collect([results / "mine"]), collect([results / "mine.tar.xz"])
    for name in ("arms", "settings"):
        there, found = (getattr(runs, name).drop(columns=["path", "paths"], errors="ignore") for runs in (folder, read))
        pd.testing.assert_frame_equal(there, found)
    for run, path in read.arms["path"].items():
        assert path.relative_to(results / "mine.tar.xz") == folder.arms["path"][run].relative_to(results / "mine")
        assert read[run].samples() == folder[run].samples()


@pytest.mark.parametrize(
    ("place", "methods"),
    [
        ("mine.tar.xz/runs/passkey", {"full", "quest"}),
        ("mine.tar.xz/runs/passkey/tiny/quest-64", {"quest"}),
        ("", {"full", "quest", "topk"}),
    ],
)
def test_a_folder_in_an_archive_and_one_with_archives_in_it_are_read(
    results: Path, place: str, methods: set[str]
) -> None:
    (results / "mine").rename(results / "elsewhere")
    stored(results / "more", "topk")
    assert set(collect([results / place]).arms["method"]) == methods


def test_a_run_in_an_archive_is_named_by_its_place_there(results: Path) -> None:
    archive = results / "mine.tar.xz"
    folders = list(runs_in([archive]))
    assert [folder.parts[-4:-1] for folder in folders] == [
        ("passkey", "tiny", f"{name}-64") for name in ("full", "quest")
    ]
    assert {archive_of(folder) for folder in folders} == {archive} and archive_of(results / "mine") is None


def test_commands_print_of_an_archive_what_they_print_of_its_folder(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SHIPPED", results)  # else claims read all that is shipped
    for main, words in [
        (report, []),
        (report, ["--rows", "method", "--columns", "group", "--format", "csv"]),
        (report, ["--claims", "--format", "markdown"]),
        (score.main, []),
        (status.main, ["--all"]),
    ]:
        shown = []
        for name in ("mine", "mine.tar.xz"):
            assert main([str(results / name), *words]) == 0
            printed = capsys.readouterr().out.replace(str(results / name), "RUNS")
            shown.append(re.sub(r"\d:\d\d:\d\d", "AGO", printed))  # the last sign is of either's own file
        assert shown[0] == shown[1], words


def test_an_archive_is_not_written_to(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile.of_a_judge(results / "diary")
    asked = archived(results / "diary", results / "diary.tar.xz")
    assert judge.main([str(asked), "--questions", str(results / "asked.jsonl")]) == 0
    lines = (results / "asked.jsonl").read_text().splitlines()
    replies = "".join(json.dumps({**json.loads(line), "reply": "yes"}) + "\n" for line in lines)
    (results / "replies.jsonl").write_text(replies)
    before = hostile.listing(results)
    capsys.readouterr()
    for main, words in (
        (score.main, [str(results / "mine.tar.xz"), "--write"]),
        (judge.main, [str(asked), "--replies", str(results / "replies.jsonl")]),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"tar -xf {words[0]}" in line
    assert hostile.listing(results) == before


def test_the_same_files_make_the_same_bytes_which_tar_unpacks(tmp_path: Path) -> None:
    files = {f"runs/{name}/samples.jsonl": name.encode() * 999 for name in ("b", "a", "ä" * 40)}
    data = packed(files)
    assert data == packed(dict(reversed(files.items())))
    assert {name: bytes(found) for name, found in unpacked(data).items()} == files
    (tmp_path / "it.tar.xz").write_bytes(data)
    subprocess.run(["tar", "-xf", "it.tar.xz"], cwd=tmp_path, check=True)
    assert all((tmp_path / name).read_bytes() == found for name, found in files.items())


def test_a_name_that_no_plain_archive_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        packed({"x" * 300: b""})


def test_whatever_is_changed_in_a_header_an_archive_is_read_or_refused() -> None:
    """Every member has a header of one block and data of two."""
    tar = lzma.decompress(packed({f"runs/{name}/run.yaml": bytes(range(256)) * 4 for name in "abc"}))
    refused = 0
    for seed in range(300):
        chance, changed = random.Random(seed), bytearray(tar)
        for _ in range(chance.randint(1, 3)):
            start = 3 * tarfile.BLOCKSIZE * chance.randrange(3)
            changed[start + chance.randrange(tarfile.BLOCKSIZE)] = chance.randrange(256)
            end = start + tarfile.BLOCKSIZE
            changed[start:end] = hostile.checked(bytes(changed[start:end]))
        try:
            assert sum(map(len, unpacked(lzma.compress(changed, preset=0)).values())) < len(tar)
        except ValueError:
            refused += 1
    assert 10 < refused < 300
