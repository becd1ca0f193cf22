"""How runs are doing: from the folder alone, whole or in shards, alive or dead; and what a log file gets to read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvbench.cli import status
from kvbench.kernels import often
from kvbench.runs import folder as folders
from kvbench.runs import progress as bars
from kvbench.runs.folder import ResultsError, RunFolder
from kvbench.runs.state import state_of
from kvbench.runs.stored import DEAD_SECONDS
from kvbench.tasks import Shard

IDS = ["a", "b", "c", "d", "e"]


def opened(results_dir: Path, shard: Shard = Shard(), arm: str = "quest-64") -> RunFolder:  # noqa: B008
    return RunFolder.open(results_dir, "passkey", "tiny", arm, {"arm": arm}, {"budget": 64}, shard=shard)


def run_shard(results_dir: Path, shard: Shard, ids: list[str] = IDS) -> bool:
    """Run what a shard has to; whether it gathered the run."""
    with opened(results_dir, shard) as folder:
        folder.expect(len(ids))
        for place, key in enumerate(ids):
            if shard.has(place) and key not in folder.done:
                folder.add({"id": key, "by": str(shard)})
        gathered = folder.gathered(ids)
        if gathered:
            folder.finish({"n": len(folder.records)})
        return gathered


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


# -- shards -----------------------------------------------------------------------------------------------------------


def test_shards_leave_one_folder_with_every_sample_once(tmp_path: Path) -> None:
    ended = [run_shard(tmp_path, Shard(number, 3)) for number in (2, 0, 1)]
    assert ended == [False, False, True]
    with opened(tmp_path) as folder:
        found = lines(folder.path)
        assert sorted(record["id"] for record in found) == IDS
        assert {record["id"]: record["by"] for record in found}["b"] == "2 of 3"
        assert json.loads((folder.path / "summary.json").read_text()) == {"n": 5}
        assert not (folder.path / "shards").exists()


def test_the_last_of_shards_that_run_at_once_gathers(tmp_path: Path) -> None:
    both = [opened(tmp_path, Shard(number, 2)) for number in (0, 1)]
    for folder, own in zip(both, (IDS[::2], IDS[1::2]), strict=True):
        for key in own:
            folder.add({"id": key})
    assert [folder.gathered(IDS) for folder in both] == [False, True]
    assert set(both[1].records) == set(IDS)
    for folder in both:
        folder.__exit__(None)


def test_what_a_killed_shard_had_is_kept_and_another_number_of_shards_goes_on(tmp_path: Path) -> None:
    killed = opened(tmp_path, Shard(0, 2))
    killed.add({"id": "a"})
    killed.add({"id": "c", "error": "NaN logits"})
    killed._mine.close()  # as the kernel does for a killed process
    killed._run_lock.close()
    assert not run_shard(tmp_path, Shard(1, 3))
    with opened(tmp_path, Shard(2, 3)) as third:
        assert third.done.keys() == {"a", "b", "e"} and third.records["c"]["error"]
    with opened(tmp_path) as whole:
        assert whole.done.keys() == {"a", "b", "e"}, "a run without shards takes in what they left"
        assert len(lines(whole.path)) == 4


def test_a_run_and_its_shards_and_other_shards_keep_out_of_each_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.runs.folder.MERGE_SECONDS", 0.0)
    with opened(tmp_path), pytest.raises(ResultsError, match="in use by process"):
        opened(tmp_path, Shard(0, 2))
    with opened(tmp_path, Shard(0, 2)):
        for other in (Shard(), Shard(0, 2), Shard(0, 3)):
            with pytest.raises(ResultsError, match="in use by process"):
                opened(tmp_path, other)


def test_a_shard_makes_nothing_before_those_that_merge_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, there = folders.take_lock, []

    def noted(folder: Path, shared: bool = False) -> int:
        there.append((folder / "shards").exists())
        return take(folder, shared)

    monkeypatch.setattr(folders, "take_lock", noted)
    with opened(tmp_path, Shard(0, 2)):
        assert there == [False, False], "the run's lock, then its own"


def test_a_merge_that_is_killed_half_way_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("kvbench.runs.folder.shutil.rmtree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_shard(tmp_path, Shard(0, 1000), IDS[:1])
    with opened(tmp_path) as folder:
        assert [record["id"] for record in lines(folder.path)] == ["a"]


def test_samples_that_are_a_link_are_named_and_shards_merged_into_no_other_file(tmp_path: Path) -> None:
    killed = opened(tmp_path / "results", Shard(0, 2))
    killed.add({"id": "a"})
    killed._mine.close()
    killed._run_lock.close()
    samples, victim = killed.path / "samples.jsonl", tmp_path / "victim"
    samples.symlink_to(victim)
    with pytest.raises(ResultsError, match=r"samples\.jsonl.*link"):
        opened(tmp_path / "results")
    assert not victim.exists() and samples.is_symlink()


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_state_tells_how_far_a_run_is_and_how_long_it_has_left(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.expect(5)
        folder.add({"id": "a"}, share=0.2)
        folder.add({"id": "b", "error": "NaN logits"}, share=0.4)
        file = folder.path / "status.json"
        written = json.loads(file.read_text())
        file.write_text(json.dumps(written | {"began": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:01:00Z"}))
        one = state_of(folder.path)
    assert (one.state, one.done, one.failed, one.total) == ("running", 1, 1, 5)
    assert one.rate == pytest.approx(2) and one.left_s == pytest.approx(90)


def test_who_gives_no_sign_of_life_is_dead_until_the_next_beat(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        file = folder.path / "status.json"
        long_ago = time.time() - 2 * DEAD_SECONDS
        os.utime(file, (long_ago, long_ago))
        assert state_of(folder.path).state == "dead"
        folder.beat()
        assert state_of(folder.path).state == "running"


@pytest.mark.parametrize("skew", [-3600, 3600])
@pytest.mark.parametrize("lives", [True, False])
def test_a_run_of_a_machine_with_another_clock_lives_where_its_file_gets_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, skew: int, lives: bool
) -> None:
    with opened(tmp_path) as folder:
        file = folder.path / "status.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "elsewhere"}))

        def beat(seconds: float = 0.0) -> None:
            there = time.time() + skew + seconds
            os.utime(file, (there, there))

        beat()
        monkeypatch.setattr(status.time, "sleep", lambda seconds: beat(seconds) if lives else None)
        assert status.main([str(tmp_path), "--json"]) == 0
        out, err = capsys.readouterr()
        [one] = json.loads(out)
        assert one["state"] == ("running" if lives else "dead") and "clocks" in err
        assert not lives or one["silent_s"] == 0


def test_what_needs_no_watching_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of this machine, one of long ago, and one that has just given a sign of life."""
    monkeypatch.setattr(status.time, "sleep", lambda seconds: pytest.fail("waits"))
    for host, age in ((None, 3600), ("elsewhere", 5 * 86400), ("elsewhere", 3)):
        with opened(tmp_path / f"{host}-{age}") as folder:
            file = folder.path / "status.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | ({"host": host} if host else {})))
            os.utime(file, (time.time() - age,) * 2)
            assert status.main([str(tmp_path)]) == 0


def test_a_process_that_is_gone_from_this_machine_is_dead_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with opened(tmp_path) as folder:
        file = folder.path / "status.json"
        written = json.loads(file.read_text())
        for host, pid, state in (
            (written["host"], gone.pid, "dead"),
            (written["host"], 2**40, "dead"),  # no process has such a number
            ("elsewhere", gone.pid, "running"),
            (written["host"], -1, "running"),  # as nobody writes it
        ):
            file.write_text(json.dumps(written | {"host": host, "pid": pid}))
            assert state_of(folder.path).state == state


def test_the_pace_of_a_run_counts_from_its_first_sample_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as folder:  # kernels are compiled now
        monkeypatch.setattr(folders, "_now", lambda: "2126-01-01T00:00:00+00:00")
        folder.expect(5)
        assert json.loads((folder.path / "status.json").read_text())["began"] == folders._now()


def test_a_heart_beats_while_a_sample_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.01)
    with opened(tmp_path) as folder:
        os.utime(folder.path / "status.json", (0, 0))
        with folders.beating([folder]):
            until = time.monotonic() + 20
            while state_of(folder.path).state == "dead" and time.monotonic() < until:
                time.sleep(0.01)
        assert state_of(folder.path).state == "running"


def test_shards_are_told_together(tmp_path: Path) -> None:
    run_shard(tmp_path, Shard(2, 3))
    with opened(tmp_path, Shard(0, 3)) as first, opened(tmp_path, Shard(1, 3)) as second:
        for folder, key in ((first, "a"), (second, "b")):
            folder.expect(5)
            folder.add({"id": key})
        one = state_of(first.path)
        assert (one.state, one.done, one.total, one.running, one.shards) == ("running", 3, 5, 2, 3)
        os.utime(second._job_dir / "status.json", (0, 0))
        assert state_of(first.path).running == 1


def test_the_command_lists_runs_and_counts_states(tmp_path: Path, capsys: Any) -> None:
    with opened(tmp_path) as folder:
        folder.add({"id": "a"})
        folder.finish({})
    with pytest.raises(KeyboardInterrupt), opened(tmp_path, arm="full"):
        raise KeyboardInterrupt
    assert status.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "passkey/tiny/full/" in out and "quest-64" not in out, "what is finished needs no look"
    assert out.splitlines()[-1] == "2 runs: 1 stopped, 1 finished"
    assert status.main([str(tmp_path), "--json"]) == 0
    assert {one["state"] for one in json.loads(capsys.readouterr().out)} == {"stopped", "finished"}
    assert status.main([str(tmp_path / "none")]) == 2 and "no such folder" in capsys.readouterr().err


# -- progress ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock whose `now` a test sets."""
    clock = SimpleNamespace(now=100.0)
    with monkeypatch.context() as patched:
        patched.setattr(bars.time, "monotonic", lambda: clock.now)
        yield clock


def test_a_line_has_the_pace_of_the_last_half_minute_and_what_runs(clock: SimpleNamespace) -> None:
    out = io.StringIO()
    with bars.progress(Console(file=out, width=100), total=4, done=0) as report:
        report.begin()
        report.line()
        clock.now += bars.LINE_SECONDS
        report.tokens(500, 510)
        report.line()
        report.tokens(510, 510)
        report.advance(0.25)
        report.begin(at=300)
        clock.now += bars.LINE_SECONDS
        report.tokens(390, 400)
        report.line()
        clock.now += 3 * bars.LINE_SECONDS
        report.tokens(399, 400)
        report.line()
    assert out.getvalue().splitlines()[:4] == [
        "0/4 samples, 0:00:00; reading a prompt",
        "0/4 samples, 17 tokens/s, 0:00:30; of this one 500 of 510 tokens",
        "1/4 samples, 3 tokens/s, 0:03:00 left; of this one 390 of 400 tokens",
        "1/4 samples, 0 tokens/s, 0:07:30 left; of this one 399 of 400 tokens",
    ]


def test_off_a_terminal_lines_come_at_intervals_though_nothing_calls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.01)
    out = io.StringIO()
    with bars.progress(Console(file=out, width=100), total=4, done=0):
        until = time.monotonic() + 10
        while out.getvalue().count("\n") < 3 and time.monotonic() < until:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 4 and {line[:11] for line in lines} == {"0/4 samples"}


def test_where_nobody_reads_the_lines_the_block_is_stopped() -> None:
    def lost() -> None:
        raise SystemExit  # no Exception, as OutputLost

    with pytest.raises(KeyboardInterrupt), often.every(0.01, lost):
        for _ in range(1000):
            time.sleep(0.01)


def test_arms_that_decode_together_have_a_time_left_before_a_sample_is_done(clock: SimpleNamespace) -> None:
    out = io.StringIO()
    with bars.progress(Console(file=out, width=160), total=10, done=0) as report:
        together = report.joint_decode
        for _ in range(5):  # prompts, each 20 s to read, of two arms with 100 tokens
            clock.now += 20
            together.read += 0.1
            together.expected += 2 * 100
        assert report.remaining() == "", "no token is decoded"
        for _ in range(10):
            clock.now += 3
            report.rows(10, 3.0)
        report.line()
        # 5 prompts to read at 20 s; 100 of 2,000 tokens are decoded in 30 s
        assert report.remaining() == f"{timedelta(seconds=5 * 20 + 30 * 19)} left"
        together.expected -= 2 * 90  # one ended early
        assert report.remaining() == f"{timedelta(seconds=round(5 * 20 + 30 * (1640 / 100 - 1)))} left"
    assert "10 rows decode together, 100 of 1,000 tokens" in out.getvalue() and "50%" in out.getvalue()


def test_the_bar_of_tokens_ends_full_where_a_stop_token_came_early() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with bars.progress(console, total=1, done=0) as report:
        report.tokens(503, 510)
        report.advance(1.0)
    assert "510/510" in console.file.getvalue()  # type: ignore[attr-defined]
