"""Claims about what names a model: every byte of its files does, and each is read once for as long as it stays."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from kvbench.models import digests, hub
from kvbench.models.digests import digests_of, fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are large from a kilobyte on, and settled at once."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LARGE", 1000)
    monkeypatch.setattr(digests, "SETTLED", 0)
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(5000))
    return path


def overwrite(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\1")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the large files that are read."""
    read, names = digests._read, []
    monkeypatch.setattr(digests, "_read", lambda file, said: names.append(file.name) or read(file, said))
    return names


@pytest.mark.parametrize("at", [0, 17, 2500, 4999])
def test_any_byte_overwritten_in_place_makes_another_revision(folder: Path, at: int) -> None:
    weights = folder / "model.safetensors"
    before = hub.revision_of(folder), hub.ModelSource("model", str(folder), ()).weights()
    overwrite(weights, at)
    after = hub.revision_of(folder), hub.ModelSource("model", str(folder), ()).weights()
    assert before[0] != after[0] and before[1] != after[1]
    os.utime(weights, (1, 1))  # its times say nothing of its content
    assert hub.revision_of(folder) == after[0]


def test_a_gguf_file_and_the_answers_kept_of_a_folder_follow_every_byte(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3000))
    for path, changed in ((file, file), (folder, folder / "model.safetensors"), (folder, folder / "config.json")):
        source = hub.ModelSource("model", str(path), ())
        before = source.content()
        overwrite(changed, changed.stat().st_size // 2)
        assert source.content() != before


def test_a_small_file_is_named_as_before_and_a_large_one_by_its_hash(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(5))
    old = hashlib.sha256(b"config.json\x002\0{}" + b"model.safetensors\x005\0" + bytes(5)).hexdigest()[:16]
    assert fingerprint(folder.iterdir(), "folder") == f"folder-{old}" == hub.revision_of(folder)


def test_a_file_is_read_once_for_as_long_as_it_stays(folder: Path, reads: list[str]) -> None:
    file = folder / "model.safetensors"
    first = digests_of([file])
    assert digests_of([file]) == first and len(reads) == 1
    overwrite(file, 3)
    os.utime(file, ns=(0, 0))
    assert digests_of([file]) != first and len(reads) == 2


def test_what_was_changed_a_moment_ago_is_not_remembered(folder: Path, reads: list[str], monkeypatch) -> None:
    monkeypatch.setattr(digests, "SETTLED", 10**11)
    for _ in range(2):
        digests_of([folder / "model.safetensors"])
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"[" * 10**5, b'{"a": 5}', b"\xff", b'{"a": ' + b" " * (1 << 20), b"null"]
)
def test_what_is_remembered_is_data_and_made_anew_where_it_is_damaged(
    folder: Path, home: Path, reads: list[str], damage: bytes
) -> None:
    first = digests_of([folder / "model.safetensors"])
    (home / "digests.json").write_bytes(damage)
    assert digests_of([folder / "model.safetensors"]) == first == digests_of([folder / "model.safetensors"])
    assert len(reads) == 2


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_remembered_is_read_from_a_file_of_ones_own_alone(
    folder: Path, home: Path, tmp_path: Path, kind: str
) -> None:
    first = digests_of([folder / "model.safetensors"])
    kept = json.loads((home / "digests.json").read_text())
    (home / "digests.json").unlink()
    if kind == "pipe":
        os.mkfifo(home / "digests.json")
    elif kind == "folder":
        (home / "digests.json").mkdir()
    else:
        (tmp_path / "theirs.json").write_text(json.dumps(dict.fromkeys(kept, "0" * 64)))
        (home / "digests.json").symlink_to(tmp_path / "theirs.json")
    assert digests_of([folder / "model.safetensors"]) == first


def test_where_nothing_can_be_kept_files_are_read_again(folder: Path, monkeypatch, reads: list[str]) -> None:
    monkeypatch.setenv("KVBENCH_HOME", "/dev/null/home")
    assert digests_of([folder / "model.safetensors"]) == digests_of([folder / "model.safetensors"]) and len(reads) == 2


def test_a_long_read_says_how_long_it_takes_yet(folder: Path, capsys, monkeypatch) -> None:
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr(digests.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(digests, "BLOCK", 1000)
    digests_of([folder / "model.safetensors"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].endswith("some 8 s left")


# What a fetched folder says of itself


def test_a_fetched_folder_is_what_it_states_until_a_byte_of_it_changes(folder: Path) -> None:
    hub.state_revision(folder, "fetched-1")
    assert hub.stated_revision(folder) == hub.revision_of(folder) == "fetched-1"
    overwrite(folder / "model.safetensors", 2500)
    assert hub.stated_revision(folder) is None and hub.revision_of(folder).startswith("folder-")


def test_a_folder_fetched_before_its_files_were_noted_is_what_it_states_while_none_is_newer(
    folder: Path, monkeypatch
) -> None:
    (folder / "kvbench.json").write_text('{"revision": "fetched-1"}')
    for number, name in enumerate(("config.json", "model.safetensors", "kvbench.json")):
        os.utime(folder / name, (number, number))
    assert hub.revision_of(folder) == "fetched-1"
    overwrite(folder / "model.safetensors", 2500)
    assert hub.revision_of(folder).startswith("folder-")
    os.utime(folder / "model.safetensors", (1, 1))  # as older weights that were moved here
    monkeypatch.setattr(hub, "MOMENT", -1.0)
    assert hub.revision_of(folder).startswith("folder-")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_commit_in_the_hubs_cache_is_itself_until_a_byte_of_it_changes(folder: Path, tmp_path: Path, name) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("c" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    text = (folder / "config.json").read_bytes()
    for file, blob in (
        ("config.json", hashlib.sha1(b"blob 2\0" + text).hexdigest()),
        ("model.safetensors", hashlib.sha256(bytes(5000)).hexdigest()),
    ):
        (folder / file).rename(blobs / blob)
        (snapshot / file).symlink_to(blobs / blob)
    assert hub.is_as_downloaded(snapshot)
    overwrite(snapshot / name, 1)
    assert not hub.is_as_downloaded(snapshot)
