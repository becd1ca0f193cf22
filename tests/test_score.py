"""Claims about scoring stored outputs: the same scores as a run's, no model, and nothing that was stored is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import judge, score
from kvbench.cli.score import main
from kvbench.config import shipped
from kvbench.runs.folder import RunFolder
from kvbench.runs.summary import summarise

METHOD = {"name": "quest", "minimum": {"paper": 16}}
IDENTITY = {"config": {"method": METHOD, "budget": 64, "protocol": {"accounting": "paper"}}}


def record(name: str, output: str, scored: float = 0.0, **more: Any) -> dict[str, Any]:
    """A passkey sample whose key is 123, as a run stores it."""
    return {
        "id": name,
        "group": "400",
        "meta": {"depth": 5},
        "answers": ["123"],
        "output": output,
        "scores": {"accuracy": scored},
        "error": None,
        **more,
    }


RIGHT_BUT_STORED_WRONG = [record("a", " 123."), record("b", " 12", 1.0), record("c", "123", 1.0)]


def stored(
    results: Path,
    records: list[dict[str, Any]],
    *,
    finished: bool = True,
    task: Mapping[str, Any] | None = None,
    arm: str = "quest-64",
) -> Path:
    """A run folder with these records; its path."""
    config = {"task": task or shipped("task", "passkey"), "budget": 64}
    with RunFolder.open(results, "passkey", "tiny", arm, IDENTITY, config) as folder:
        for one in records:
            folder.add(one)
        if finished:
            folder.finish(summarise(folder.records.values(), "accuracy"))
    return folder.path


def gsm8k(**options: Any) -> dict[str, Any]:
    return {**(shipped("task", "gsm8k") or {}), **options}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines(folder: Path) -> list[dict[str, Any]]:
    data = (folder / "samples.jsonl").read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    """What --json prints."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line on stderr of a command that ends with 2."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench score: ") and error.count("\n") == 1
    return error


# ---------------------------------------------------------------------------------------------------------------------
# Without --write


def test_scores_are_those_of_the_code_there_is_and_nothing_is_written(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    before = contents(folder)
    (found,) = printed(capsys, folder)
    assert (found["before"]["score"], found["after"]["score"]) == (pytest.approx(200 / 3), pytest.approx(200 / 3))
    assert (found["changed"], found["written"], found["metric"]) == (2, False, "accuracy")
    assert contents(folder) == before


def test_a_failed_sample_stays_at_0_whatever_it_put_out(tmp_path, capsys):
    records = [
        record("a", "123", 1.0),
        record("b", "123", error="over_rule: too many"),
        record("c", "", error="bad line"),
    ]
    (found,) = printed(capsys, stored(tmp_path, records))
    assert (found["after"]["n"], found["after"]["failed"], found["changed"]) == (3, 2, 0)
    assert found["after"]["score"] == pytest.approx(100 / 3) and found["after"]["score_ok"] == 100


def test_groups_have_their_own_mean_error_and_count_and_a_plain_mean(tmp_path, capsys):
    records = [record(f"a{n}", "123" if n < 3 else "4") for n in range(4)] + [record("b", "5", group="500")]
    folder = stored(tmp_path, records)
    (found,) = printed(capsys, folder)
    groups = found["after"]["groups"]
    assert [(name, group["score"], group["n"]) for name, group in groups.items()] == [("400", 75, 4), ("500", 0, 1)]
    # Of 1, 1, 1, 0: standard deviation 1/2, over the root of 4.
    assert groups["400"]["stderr"] == pytest.approx(25)
    assert found["after"]["macro"]["score"] == 37.5 and found["after"]["score"] == 60
    assert main([str(folder)]) == 0
    table = capsys.readouterr().out
    assert "75.00 ± 25.00" in table and "mean of 2 groups" in table and "37.50" in table


def test_all_runs_under_a_folder_are_found_and_none_twice(tmp_path, capsys):
    one, other = (stored(tmp_path, RIGHT_BUT_STORED_WRONG, arm=arm) for arm in ("quest-64", "snapkv-64"))
    found = printed(capsys, tmp_path, one)
    assert [entry["run"] for entry in found] == [str(one), str(other)]


def test_a_run_that_goes_on_can_be_looked_at(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG, finished=False)
    with RunFolder.open(tmp_path, "passkey", "tiny", "quest-64", IDENTITY, {"task": shipped("task", "passkey")}):
        assert printed(capsys, folder)[0]["after"]["n"] == 3


def test_a_line_that_was_torn_off_counts_for_nothing(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    with open(folder / "samples.jsonl", "ab") as file:
        file.write(b'{"id": "d", "output": "12')
    assert printed(capsys, folder)[0]["after"]["n"] == 3
    assert main([str(folder), "--write"]) == 0
    assert [line["id"] for line in lines(folder)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("predictions", [False, True])
def test_it_loads_neither_torch_nor_transformers(tmp_path, predictions):
    (tmp_path / "vt.jsonl").write_text('{"pred": "a", "outputs": ["a"], "length": 1}\n')
    stored_run = str(stored(tmp_path / "results", RIGHT_BUT_STORED_WRONG))
    words = ["--predictions", "ruler", str(tmp_path)] if predictions else [stored_run, "--write"]
    code = (
        "import sys; from kvbench.cli.score import main\n"
        f"assert main({words}) == 0\n"
        "assert not {'torch', 'transformers', 'pandas', 'hydra'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# --write


def test_new_scores_are_appended_and_the_old_lines_stay(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    before = contents(folder)
    assert main([str(folder), "--write"]) == 0
    after = contents(folder)
    assert after["samples.jsonl"].startswith(before["samples.jsonl"])
    new = lines(folder)[3:]
    assert [(line["id"], line["scores"]["accuracy"]) for line in new] == [("a", 1.0), ("b", 0.0)]
    for line, old in zip(new, RIGHT_BUT_STORED_WRONG, strict=False):
        assert {**line, "scores": old["scores"], "rescored": None} == {**old, "rescored": None}
    assert after["run.yaml"] == before["run.yaml"] and after["status.json"] == before["status.json"]
    assert "2 of 3 scores changed and written" in capsys.readouterr().out


def test_the_summary_is_that_of_a_run_with_these_scores(tmp_path):
    folder = stored(tmp_path / "one", [record("a", "123"), record("b", "4"), record("c", "5", error="out of memory")])
    plain = stored(
        tmp_path / "two", [record("a", "123", 1.0), record("b", "4"), record("c", "5", error="out of memory")]
    )
    assert main([str(folder), "--write"]) == 0
    assert summary(folder) == {**summary(plain), "rescored": 1}


def test_a_changed_record_says_which_code_scored_it(tmp_path):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    assert main([str(folder), "--write"]) == 0
    mark = lines(folder)[-1]["rescored"]
    assert mark == {"task": shipped("task", "passkey")["version"], "notes": {}}
    assert "rescored" not in lines(folder)[0]


def test_a_second_time_changes_nothing(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    assert main([str(folder), "--write"]) == 0
    before = contents(folder)
    assert main([str(folder), "--write"]) == 0
    assert contents(folder) == before
    assert "no score changed" in capsys.readouterr().out


def test_the_run_goes_on_from_rescored_records(tmp_path):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    assert main([str(folder), "--write"]) == 0
    with RunFolder.open(tmp_path, "passkey", "tiny", "quest-64", IDENTITY, {}) as again:
        assert {key: one["scores"]["accuracy"] for key, one in again.done.items()} == {"a": 1, "b": 0, "c": 1}


def test_an_unfinished_run_gets_scores_but_no_summary(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG, finished=False)
    assert main([str(folder), "--write"]) == 0
    assert not (folder / "summary.json").exists() and len(lines(folder)) == 5
    assert "unfinished, so without a summary" in capsys.readouterr().out


def test_without_a_status_a_run_with_a_summary_was_finished(tmp_path):
    folder, other = (stored(tmp_path / name, RIGHT_BUT_STORED_WRONG, finished=name == "one") for name in ("one", "two"))
    for path in (folder, other):
        (path / "status.json").unlink()
        assert main([str(path), "--write"]) == 0
    assert summary(folder)["rescored"] == 2 and not (other / "summary.json").exists()


def test_killed_between_scores_and_summary_the_next_one_makes_the_summary(tmp_path, monkeypatch, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(score, "write_whole", killed)
        assert main([str(folder), "--write"]) == 130
    assert capsys.readouterr().err.startswith("kvbench score: stopped; what was written is whole")
    assert len(lines(folder)) == 5 and not (folder / "summary.json").exists()
    assert main([str(folder), "--write"]) == 0
    assert len(lines(folder)) == 5 and summary(folder)["rescored"] == 2


def test_a_full_disk_takes_nothing_away(tmp_path, capsys, monkeypatch):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    before = contents(folder)["samples.jsonl"]

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in refused(capsys, folder, "--write")
    assert contents(folder)["samples.jsonl"] == before
    assert main([str(folder), "--write"]) == 0
    assert summary(folder)["rescored"] == 2


def test_a_run_that_another_process_holds_is_left_alone(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    other = stored(tmp_path, RIGHT_BUT_STORED_WRONG, arm="snapkv-64")
    config = {"task": shipped("task", "passkey")}
    with RunFolder.open(tmp_path, "passkey", "tiny", "quest-64", IDENTITY, config):
        before = contents(folder)
        assert f"{folder} is in use by process" in refused(capsys, tmp_path, "--write")
        assert contents(folder) == before
    assert len(lines(other)) == 5, "a run that is free is written all the same"


# ---------------------------------------------------------------------------------------------------------------------
# Other options of the task


def answered(tmp_path: Path, name: str = "gsm8k") -> Path:
    outputs = [record("a", " The answer is 123.", scores={"flexible": 1.0, "strict": 1.0})]
    return stored(tmp_path, outputs, task=gsm8k(name=name))


def test_other_options_are_shown_and_the_score_before_is_none_where_it_was_not_stored(tmp_path, capsys):
    folder = answered(tmp_path)
    before = contents(folder)
    (found,) = printed(capsys, folder, "task.variant=pqcache", "task.exemplars=x.txt")
    assert (found["metric"], found["before"], found["after"]["score"]) == ("accuracy", None, 100)
    assert main([str(folder), "task.variant=pqcache", "task.exemplars=x.txt"]) == 0
    assert "nothing is written" in capsys.readouterr().out
    assert contents(folder) == before


def test_all_scores_of_a_sample_are_shown(tmp_path, capsys):
    (found,) = printed(capsys, answered(tmp_path))
    assert found["after"]["scores"] == {"flexible": 100, "strict": 100}
    assert found["changed"] == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["task.variant=wei9"], "task.variant=wei9: expected wei8 | pqcache"),
        (["task.varant=wei8"], "no such option of gsm8k; did you mean variant?"),
        (["task.variant=["], "task.variant=[: "),
        (["task.limit=3"], "task.limit=3: no such option of gsm8k"),
        (["task.variant=pqcache"], "gsm8k: task.exemplars=null"),
        (["task.variant=pqcache", "--write"], "--write: not with task.variant=pqcache"),
    ],
)
def test_an_option_that_will_not_do_is_named(tmp_path, capsys, words, message):
    said = refused(capsys, folder := answered(tmp_path), *words)
    assert message in said and (str(folder) in said or "=[" in words[0]), "the run is named, where the words are right"


def test_an_arm_s_name_with_an_equals_sign_is_a_path(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG, arm="quest-64,page_size=8")
    assert printed(capsys, folder)[0]["run"] == str(folder)


def test_what_kvbench_ships_is_scored_where_it_is_named_and_else_left_out_in_a_line(tmp_path, capsys, monkeypatch):
    shipped = tmp_path / "reference.tar.xz"
    stored(tmp_path / "theirs", RIGHT_BUT_STORED_WRONG, arm="full")
    with tarfile.open(shipped, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "theirs" / "runs", "runs")
    shutil.rmtree(tmp_path / "theirs")
    monkeypatch.setattr("kvbench.cli.report.SHIPPED", [shipped])
    assert f"kvbench score {shipped}" in refused(capsys, tmp_path)
    mine = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    assert main([str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [one["run"] for one in json.loads(out)] == [str(mine)] and err.count("\n") == 1 and "ships" in err
    assert len(printed(capsys, shipped)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be scored


def test_no_run_there(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert "no run in it" in refused(capsys, tmp_path / "empty")
    assert "no such folder" in refused(capsys, tmp_path / "missing")
    assert "no run given" in refused(capsys, "task.keys=1")


def test_a_file_is_no_run_and_one_inside_a_run_names_its_folder(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert f"{tmp_path / 'notes.txt'}: a file, and no run; a run is a folder" in refused(capsys, tmp_path / "notes.txt")
    folder = stored(tmp_path / "results", RIGHT_BUT_STORED_WRONG)
    assert f"samples.jsonl: a file; name its folder, {folder}" in refused(capsys, folder / "samples.jsonl")


def test_records_without_answers_are_an_older_kvbench_s(tmp_path, capsys):
    old = {key: value for key, value in record("a", "123").items() if key != "answers"}
    for arm in ("quest-64", "snapkv-64"):
        stored(tmp_path, [old], arm=arm)
    said = refused(capsys, tmp_path)  # one line for both
    assert "quest-64" in said and "without answers" in said and "1 other" in said


def test_another_format_is_refused(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace("format: 1", "format: 9", 1))
    assert "holds results of format 9" in refused(capsys, folder, "--write")


@pytest.mark.parametrize("damage", ["config: 3\n", "config: {task: {name: x}}\n", "config: [\n", "config: '\x00'\n"])
def test_a_damaged_run_yaml_is_named(tmp_path, capsys, damage):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    (folder / "run.yaml").write_text("format: 1\n" + damage)
    assert "run.yaml: damaged" in refused(capsys, folder)


@pytest.mark.parametrize(
    "task, message",
    [
        ({"_target_": "kvbench.tasks.passkey.Gone"}, "_target_=kvbench.tasks.passkey.Gone"),
        ({"_target_": "no_such_module.Task"}, "_target_=no_such_module.Task"),
        ({"old_option": 1}, "unexpected keyword argument 'old_option'"),
        ({"keys": 0}, "task.keys=0"),
    ],
)
def test_a_task_that_cannot_be_built_says_why(tmp_path, capsys, task, message):
    config = {**(shipped("task", "passkey") or {}), **task}
    assert message in refused(capsys, stored(tmp_path, RIGHT_BUT_STORED_WRONG, task=config))


def test_a_damaged_line_is_named_and_nothing_is_written(tmp_path, capsys):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG)
    data = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(data[0] + b"\x00\x00\n" + data[2])
    before = contents(folder)
    assert "samples.jsonl: line 2 is damaged" in refused(capsys, folder, "--write")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"output": None}, "newest line of a is damaged"),
        ({"answers": "123"}, "line 1 is damaged (answers"),
        ({"answers": []}, "a cannot be scored as passkey (IndexError"),
        ({"answers": ["x"]}, "a cannot be scored as passkey (ValueError"),
    ],
)
def test_a_record_that_is_no_such_sample_is_named(tmp_path, capsys, broken, message):
    folder = stored(tmp_path, [record("a", "123")])
    (folder / "samples.jsonl").write_text(json.dumps({**record("a", "123"), **broken}) + "\n")
    assert message in refused(capsys, folder)


def test_one_bad_run_leaves_the_others_their_table(tmp_path, capsys):
    stored(tmp_path, [record("a", "123", answers=None)])
    stored(tmp_path, RIGHT_BUT_STORED_WRONG, arm="snapkv-64")
    assert main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "without answers" in output.err and "snapkv-64" in output.out


def test_help_and_a_missing_run_come_from_the_shell(capsys):
    for words, code in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == code
    assert "kvbench score RUN" in capsys.readouterr().out


# -- files of others ---------------------------------------------------------------------------------------------------


def own_task(folder: Path, mark: Path) -> Path:
    """A user's folder of choices with a task of their own, which leaves a mark where it is imported."""
    (folder / "task").mkdir(parents=True)
    (folder / "task" / "mine.yaml").write_text("name: mine\n_target_: my_task.Mine\nlengths: [400]\n")
    (folder / "my_task.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom kvbench.tasks.passkey import Passkey\n"
        "class Mine(Passkey):\n    name = 'mine'\n"
    )
    return folder


@pytest.mark.parametrize(
    "target", ["os.system", "os.path.exists", "kvbench.config.build", "kvbench.tasks.task_of", "x"]
)
@pytest.mark.parametrize("command", [main, lambda words: judge.main([*words[:1], "--questions", os.devnull])])
def test_a_stored_target_that_is_no_known_task_is_not_imported(tmp_path, capsys, monkeypatch, target, command):
    folder = stored(tmp_path, RIGHT_BUT_STORED_WRONG, task={"name": "passkey", "_target_": target, "command": "id"})
    monkeypatch.setattr("kvbench.config.locate", pytest.fail)
    monkeypatch.setattr("importlib.import_module", pytest.fail)
    assert command([str(folder)]) == 2
    assert f"config.task._target_={target}" in capsys.readouterr().err


def test_a_task_of_ones_own_is_scored_where_the_command_line_names_its_folder(tmp_path, capsys, monkeypatch):
    mark = tmp_path / "imported"
    conf = own_task(tmp_path / "conf", mark)
    monkeypatch.syspath_prepend(str(conf))  # it could be imported
    folder = stored(
        tmp_path / "results", [record("a", "123")], task={"name": "mine", "_target_": "my_task.Mine", "lengths": [400]}
    )
    assert "my_task.Mine" in refused(capsys, folder) and not mark.exists()
    run_yaml = folder / "run.yaml"  # the folder's name is a hint: it is taken from the command line alone
    run_yaml.write_text(run_yaml.read_text().replace("\nconfig:\n", "\nconfig:\n  config_dir: conf\n"))
    monkeypatch.chdir(tmp_path)
    assert "--config-dir conf" in refused(capsys, folder) and not mark.exists()
    assert "my_task.Mine" in refused(capsys, folder, "--config-dir", tmp_path / "results") and not mark.exists()
    assert "no such folder" in refused(capsys, folder, "--config-dir", tmp_path / "nowhere")
    (found,) = printed(capsys, folder, "--config-dir", conf)
    assert found["after"]["score"] == 100.0 and mark.exists()


PROGRAM = "```cpp\nint main(){ return 0; }\n```"


def of_programs(results: Path, **options: Any) -> Path:
    """A run of LongProc whose sample is a program."""
    task = {**(shipped("task", "longproc") or {}), "data_dir": "/nowhere", **options}
    one = record("x-0", PROGRAM, group="pseudo_to_code_0.5k", meta={"testcases": [[["1"], ["1"]]]})
    return stored(results, [one], task=task, arm="full")


def test_a_stored_run_permits_nothing_that_the_command_line_does_not(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr("kvbench.tasks.longproc.cpp.compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr("kvbench.tasks.longproc.cpp.passes", lambda *told: ran.append(told) or True)
    allowed = of_programs(tmp_path / "allowed", subsets=["pseudo_to_code_0.5k"], execute=True)
    smuggled = of_programs(tmp_path / "smuggled")  # whose options name other subsets, and do not execute
    assert "task.execute" in refused(capsys, allowed)
    assert "task.execute" in refused(capsys, allowed, "--write")
    assert "task.execute" in refused(capsys, smuggled)
    assert not ran
    (found,) = printed(capsys, allowed, "task.execute=true")
    assert found["after"]["score"] == 100.0 and len(ran) == 1
    assert printed(capsys, allowed, "--write", "task.execute=true")[0]["written"]


@pytest.mark.parametrize("name", ["lock", "samples.jsonl", "summary.json", ".summary.json.new"])
def test_writing_scores_follows_no_link_out_of_the_run(tmp_path, name):
    outside = tmp_path / "thesis.tex"
    folder = stored(tmp_path / "results", RIGHT_BUT_STORED_WRONG)
    there = folder / name
    outside.write_bytes(there.read_bytes() if there.exists() else b"years of work")
    before = outside.read_bytes()
    there.unlink(missing_ok=True)
    there.symlink_to(outside)
    main([str(folder), "--write"])
    assert outside.read_bytes() == before


def test_the_digits_that_an_archive_leaves_out_are_no_other_score(tmp_path, capsys):
    """A third is stored as .33333 there, which is a third; .3334 is another number."""
    gaps = [record(name, "0 and 1", answers=["1", "2", "3"], group="niah_multivalue") for name in ("a", "b")]
    task = {**(shipped("task", "niah") or {}), "lengths": [400]}
    folder = stored(tmp_path, gaps, task=task)
    (found,) = printed(capsys, folder)
    (metric,) = {found["metric"]}
    for scored, changed in ((0.33333, 0), (0.3334, 2)):
        lines_of = [{**one, "scores": {metric: scored}} for one in gaps]
        (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines_of))
        assert printed(capsys, folder)[0]["changed"] == changed


def test_runs_of_which_no_score_changes_are_one_line_together(tmp_path, capsys):
    for arm in ("quest-64", "snapkv-64", "topk-64"):
        one = stored(tmp_path, [record("a", "123", 1.0)], arm=arm)
    assert main([str(tmp_path)]) == 0
    (shown,) = capsys.readouterr().out.splitlines()
    assert "3 runs" in shown
    assert main([str(one)]) == 0
    assert f"{one}: no score changed, accuracy 100.00" in capsys.readouterr().out
    other = stored(tmp_path, RIGHT_BUT_STORED_WRONG, arm="h2o-64")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f"{other}: 2 of 3 scores changed; nothing is written" in shown and "3 runs" in shown[-1]
