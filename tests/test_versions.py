"""Which code a run id is made of: versions of kvbench's own, the files of a user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import stored

from kvbench.cli.compose import composed
from kvbench.config import PACKAGE, TargetConfig, shipped
from kvbench.report.data.frame import collect
from kvbench.runs import identity, versions
from kvbench.runs.folder import RunFolder
from kvbench.runs.versions import files_digest, files_of, version_of, versions_in

FILES = {
    "mine/__init__.py": "raise RuntimeError('imported')",
    "mine/method.py": "import torch\nfrom mine.blocks import votes\nfrom . import pages\n",
    "mine/blocks/__init__.py": "",
    "mine/blocks/votes.py": "import json",
    "mine/pages.py": "",
    "mine/unused.py": "",
    "alone.py": "import helper\nfrom methods.quest import Quest\n",
    "helper.py": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's package and module, which cannot be imported, only read."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def names(target: str, folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in files_of(target)}


def test_files_of_users_code_are_its_module_and_what_that_imports_beside_it(folder: Path) -> None:
    package = {"mine/method.py", "mine/blocks/__init__.py", "mine/blocks/votes.py", "mine/pages.py", "mine/__init__.py"}
    assert names("mine.method.Mine", folder) == package
    assert names("alone.Alone", folder) == {"alone.py", "helper.py"}
    assert not {"mine", "alone"} & sys.modules.keys()


def test_an_installed_package_counts_without_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = folder / "site-packages"
    libraries.mkdir()
    (libraries / "plugin.py").write_text("import other")
    (libraries / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(libraries))
    assert [path.name for path in files_of("plugin.Mine")] == ["plugin.py"]


@pytest.mark.parametrize("edited", ["mine/method.py", "mine/blocks/votes.py"])
def test_an_edit_of_users_code_is_another_version(folder: Path, edited: str) -> None:
    choice = TargetConfig("mine", "mine.method.Mine", version=1)
    before = version_of(choice)
    (folder / edited).write_text(FILES[edited] + "\nLIMIT = 3\n")
    assert version_of(choice) != before != 1


def test_kvbenchs_code_is_known_by_its_version_wherever_it_stands() -> None:
    quest = shipped("method", "quest") or {}
    assert (
        version_of(TargetConfig.of(quest))
        == version_of(TargetConfig.of({**quest, "_target_": "methods.elsewhere.Quest"}))
        == quest["version"]
    )
    unversioned = {key: value for key, value in quest.items() if key != "version"}
    assert version_of(TargetConfig.of(unversioned)) == files_digest(files_of(quest["_target_"]))


def test_code_that_is_nowhere_is_named() -> None:
    for target in ("methods.nothing", "nothing_at_all"):
        with pytest.raises(ModuleNotFoundError, match=target):
            files_of(f"{target}.Here")


def test_a_digest_of_files_is_of_their_names_and_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text("1")
    before = files_digest(files)
    assert files_digest(reversed(files)) == before and files_digest([]) == ""
    files[0].write_text("2")
    assert files_digest(files) != before


def test_runs_of_before_there_were_versions_have_the_first() -> None:
    def stored(target: str) -> dict[str, Any]:
        return {"config": {"method": {"_target_": target}}, "source": "abc", "harness": "def"}

    assert set(versions_in(stored("methods.quest.Quest")).values()) == {1}
    assert versions_in(stored("mine.method.Mine"))["method"] == "abc"


def test_a_run_goes_on_in_the_folder_that_it_had_under_an_earlier_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = identity.run_id({"seed": 0})
    monkeypatch.setattr(identity, "_earlier", lambda: {own: ["newest", "oldest"]})

    def opened() -> str:
        with RunFolder.open(tmp_path, "task", "model", "arm", {"seed": 0}, {}) as folder:
            return folder.path.name

    arm = tmp_path / "runs" / "task" / "model" / "arm"
    for name in ("oldest", "newest"):
        (arm / name).mkdir(parents=True)
        assert opened() == name
    (arm / own).mkdir()
    assert opened() == own


def test_versions_are_known_without_torch() -> None:
    rooms = "kvbench.runs.folder, kvbench.runs.versions, kvbench.runs.summary"
    program = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize(("version", "count"), [(1, 1), (2, 2)])
def test_coded_runs_are_paired_with_full_attention_whatever_their_version(
    tmp_path: Path, version: int, count: int
) -> None:
    first = {"harness": 1, "backend": 1, "method": 1, "task": 1}
    int8 = {"kv": {"device": "int8", "host": "int8"}}
    stored(tmp_path, "full", None, versions=first)
    stored(tmp_path, "quest", config=int8)
    stored(tmp_path, "quest", config=int8, versions={**first, "kv": {"int8": version}})
    runs = collect([tmp_path])
    coded = [run for run in runs if run.arm["method"] == "quest"]
    assert len(coded) == count and all(run.full() is not None for run in coded)


def test_a_raised_harness_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("method=quest", "kv=int8")
    before = versions.versions_of(config)
    assert before["kv"] == {"int8": 1}
    monkeypatch.setattr(versions, "HARNESS", versions.HARNESS + 1)
    assert versions.versions_of(config) != before
