"""What becomes of a command whose output nobody reads, has no room, or was closed; `kvbench.cli.output`."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli import main as cli
from kvbench.cli.commands import COMMANDS
from kvbench.cli.output import printing
from kvbench.config import ASSETS
from kvbench.runs.folder import RunFolder, read_samples
from kvbench.runs.state import state_of

ROOT = Path(__file__).resolve().parents[1]
FULL = "/dev/full"


def shell(line, **more):
    """What a line of bash does, `python` being this one."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line.replace("python", sys.executable)], capture_output=True, text=True, env=env, **more
    )


def unread():
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.parametrize("command", ["", "report", "score", "status", "fetch"])
def test_a_device_without_room_is_one_line(command, tmp_path):
    done = shell(f"python -m kvbench {command} --help > {FULL}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("kvbench: standard output: No space left") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_who_reads_no_further_ends_every_command_without_a_word(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", unread())
    assert cli.main([name, "--help"]) == 141
    assert capsys.readouterr().err == ""


def test_a_reader_who_leaves_is_told_nothing_at_exit_either(tmp_path):
    done = shell("python -m kvbench report --list | head -n 1; exit ${PIPESTATUS[0]}", cwd=tmp_path)
    assert done.stdout == "published tables (--paper):\n" and done.stderr == ""
    assert done.returncode in (0, 141)  # the pipe may take all of it before head is gone


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_one_that_nobody_wants(closed, tmp_path):
    done = shell(f"python -m kvbench fetch --list {closed}; python -m kvbench fetch gone {closed}", cwd=tmp_path)
    assert done.returncode == 2
    assert ("smollm2" in done.stdout, "gone: no such model" in done.stderr) == (closed == "2>&-", closed == ">&-")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b"])
def test_the_line_that_a_run_begins_with_names_the_model_that_was_given(model, monkeypatch, tmp_path, capsys):
    (mine := tmp_path / "mine").symlink_to(ASSETS / "tiny")
    monkeypatch.setattr("kvbench.runs.sweep.run", lambda config: {})
    for words, named in ([], "tiny"), ([f"model={model}", f"model.path={mine}"], mine):
        assert cli.main(["task=passkey", "method=full", *words]) == 0
        assert f"passkey, full on {named}: loading" in capsys.readouterr().out


def test_tables_may_be_made_for_a_closed_stream(tmp_path):
    done = shell("python -m kvbench report --paper racc_table1 >&-", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count("\n") == 1  # there are no runs


def test_the_next_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    code = "import os, sys; from kvbench.cli.output import printing; "
    code += f"printing(lambda: (print('lost', flush=True), os.write(1, b'lost'), open({str(tmp_path / 'kept')!r}, 'w'))"
    shell(f'python -c "{code} and 0)" >&- 2>&-', cwd=tmp_path)
    assert (tmp_path / "kept").read_text() == ""


def test_an_error_that_cannot_be_told_keeps_its_exit_code(tmp_path):
    assert shell(f"python -m kvbench metod=x 2> {FULL}", cwd=tmp_path).returncode == 2


def test_a_character_that_the_encoding_lacks_comes_as_others_that_mean_it(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert printing(lambda: print("1 ± 2") or 3) == 3
    assert raw.getvalue() == b"1 +- 2\n"


def test_a_run_whose_reader_has_gone_keeps_its_samples_and_is_stopped(tmp_path, monkeypatch, capsys):
    folders = []

    def command():
        with RunFolder.open(tmp_path, "task", "model", "full", {"config": {}}, {}) as folder:
            folders.append(folder.path)
            folder.add({"id": "a"})
            try:
                print("1/2 samples", flush=True)
            except Exception:
                pytest.fail("taken for the failure of an arm or a sample")
            folder.add({"id": "b"})
        return 0

    monkeypatch.setattr(sys, "stdout", unread())
    assert printing(command) == 141
    assert state_of(folders[0]).state == "stopped" and list(read_samples(folders[0] / "samples.jsonl")[0]) == ["a"]
    assert capsys.readouterr().err == ""


def test_what_a_command_raises_is_raised_and_what_it_printed_is_there(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    before = sys.stdout
    with pytest.raises(ZeroDivisionError):
        printing(lambda: print("this") or 1 // 0)
    assert raw.getvalue() == b"this\n" and sys.stdout is before
