"""A method of one's own, from `kvbench new-method` to `kvbench check-method`, and the commands beside a run."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from words import configs

from kvbench.cli import main as cli
from kvbench.cli import own_method
from kvbench.cli.commands import COMMANDS
from kvbench.cli.compose import composed
from kvbench.config import (
    FACTS,
    HARNESS_KEYS,
    INHERITED,
    ConfigError,
    TargetConfig,
    choices,
    conf_dir,
    locate,
    method_config,
    plugins,
    read_choice,
)
from kvbench.method import Method

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def kvbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Any]:
    """The command line in this process and an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))

    def run(*words: str) -> SimpleNamespace:
        code = cli.main(words)
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


def test_a_new_method_is_two_files_that_build_and_say_what_they_are(kvbench: Any, tmp_path: Path) -> None:
    done = kvbench("new-method", "near_sink", "--folder", "mine")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:2] == ["mine/near_sink.py", "mine/method/near_sink.yaml"]
    next_ones = [shlex.split(line, comments=True)[1:] for line in done.out.splitlines()[3:]]
    assert [words[0] for words in next_ones] == ["--config-dir", "check-method", "--config-dir"]
    assert [config.method.name for words in next_ones[::2] for config in configs(*words)].count("near_sink") == 2
    node = OmegaConf.load(tmp_path / "mine" / "method" / "near_sink.yaml")
    assert node.name == "near_sink" and node.minimum == {"paper": 9, "unified": 4}
    assert {"about", "minimum", "valid", "published_dense_layers"} <= node.keys() & FACTS & HARNESS_KEYS
    sys.path.append(str(tmp_path / "mine"))
    assert TargetConfig.of(node).build().window == 8 and locate("near_sink.NearSink").__doc__


def a_package(site: Path, name: str, points: str) -> None:
    """What pip leaves of a package: its metadata, in a folder that Python looks in."""
    (folder := site / f"kvbench_{name}-0.1.dist-info").mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvbench-{name}\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text(points)


@pytest.fixture
def packaged(kvbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same command line where a package of new-method's is installed, with more entry points than it has files."""
    done = kvbench("new-method", "near_key", "--package", "--folder", "made")
    root = tmp_path / "made" / "kvbench-near_key"
    written = [str(path.relative_to(tmp_path)) for path in root.rglob("*") if path.is_file()]
    assert sorted(written) == sorted(done.out.splitlines()[:5])
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["kvbench.methods"]
    assert declared == {"near_key": "kvbench_near_key"}
    points = "\n".join(f"{name} = {module}" for name, module in declared.items())
    more = "\nquest = kvbench_near_key\nlost = kvbench_near_key\ngone = no_such_module\n"
    a_package(tmp_path / "site", "near_key", f"[kvbench.methods]\n{points}{more}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(root))
    plugins.cache_clear()
    yield kvbench
    plugins.cache_clear()
    sys.modules.pop("kvbench_near_key", None)


def test_a_method_of_an_installed_package_is_found_by_its_name(packaged: Any, tmp_path: Path) -> None:
    listed = cli.help_text().partition("methods of installed packages")[2].partition("\n\n")[0]
    assert re.findall(r"method=(\w+) +(kvbench-near_key 0.1)(:?)", listed) == [
        (name, "kvbench-near_key 0.1", why)
        for name, why in [("gone", ":"), ("lost", ":"), ("near_key", ""), ("quest", ":")]
    ]
    assert method_config("near_key", window=4).build().window == 4
    assert method_config("quest").target == "methods.quest.Quest", "kvbench's own names stay its own"
    run = packaged("method=near_key", "budget=64", "task.limit=1", "task.lengths=[256]", f"results_dir={tmp_path}/r")
    assert run.code == 0
    (written,) = (OmegaConf.load(path) for path in (tmp_path / "r").rglob("run.yaml"))
    assert written.config.packages == ["kvbench-near_key 0.1"] and len(written.identity.versions.method) == 12


def test_a_package_is_refused_for_what_it_lacks_alone(packaged: Any) -> None:
    for name in ("lost", "gone"):
        for command in (["check-method", name], [f"method={name}"]):
            err = packaged(*command).err
            assert err.count("\n") == 1 and name in err, err
        with pytest.raises(ConfigError, match=f"method={name}: .*kvbench-near_key 0.1"):
            method_config(name)
    assert packaged("new-method", "near_key").err.endswith("kvbench-near_key 0.1 has one; choose another\n")
    assert "did you mean near_key" in packaged("method=near_kye").err


@pytest.mark.slow
def test_what_new_package_writes_holds_what_every_method_must(packaged: Any, tmp_path: Path) -> None:
    places = [tmp_path / "site", tmp_path / "made" / "kvbench-near_key", ROOT]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-m", "kvbench", "check-method", "near_key"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "claims hold for near_key" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", choices("method"))
def test_a_method_s_file_has_the_options_of_its_class_and_their_defaults(name: str) -> None:
    """A preset has all of them, too, with other values."""
    chosen = method_config(name)
    method, options = locate(chosen.target), dict(chosen.options)
    parameters = inspect.signature(getattr(method, "options_type", None) or method).parameters
    inherited = {key: options.pop(key) for key in INHERITED & options.keys()}
    assert options.keys() == parameters.keys()
    made = method_config(name).build()
    assert all(getattr(made, key) == getattr(type(made), key) == value for key, value in inherited.items())
    if "defaults" not in read_choice(conf_dir() / "method" / f"{name}.yaml"):
        defaults = [parameters[key].default for key in options]
        assert [*options.values()] == [list(one) if isinstance(one, tuple) else one for one in defaults]


@pytest.mark.parametrize(
    ("option", "line"),
    [("size", "_target_=.*: .*unexpected keyword argument 'size'.*; given: size"), ("pages", "mine: pages=-1: .*")],
)
def test_options_of_a_dataclass_are_refused_as_those_of_a_constructor(
    option: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Options:
        pages: int = 2

        def __post_init__(self) -> None:
            if self.pages < 1:
                raise ValueError(f"pages={self.pages}: expected 1 or more")

    class Mine(Method):
        options_type = Options

        def __init__(self, options: Options) -> None:
            self.options = options

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Mine=Mine))  # type: ignore[arg-type]
    assert TargetConfig.of({"name": "mine", "_target_": "mine.Mine", "pages": 3}).build().options == Options(3)
    with pytest.raises(ConfigError, match=f"^{line}$"):
        TargetConfig.of({"name": "mine", "_target_": "mine.Mine", option: -1}).build()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["new-method", "Near-Sink"], "new-method Near-Sink: expected small letters, digits and _, such as key_norm"),
        (["new-method", "quest"], "new-method quest: kvbench has a method of that name; choose another"),
        (["new-method", "json"], "new-method json: Python has a module of that name already; choose another"),
        (["new-method", "here"], "new-method here: here.py is there already; choose another name or --folder"),
        (["check-method", "qest"], "check-method qest: no such method; did you mean quest? "),
        (["check-method", "quest", "--config-dir", "gone"], "--config-dir=gone: no such folder"),
        (["reprot"], "reprot: no such command; did you mean report? (valid: "),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(
    kvbench: Any, tmp_path: Path, words: list[str], line: str
) -> None:
    (tmp_path / "here.py").touch()
    done = kvbench(*words)
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"kvbench: {line}") and done.err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["here.py"]


def test_without_pytest_a_check_says_how_to_get_it(kvbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_method, "find_spec", lambda name: None)
    assert kvbench("check-method", "quest").err == (
        "kvbench: check-method: needs pytest and hypothesis; pip install pytest hypothesis\n"
    )


def test_every_command_is_there_and_in_the_help() -> None:
    for name, (target, about) in COMMANDS.items():
        assert callable(locate(target.replace(":", ".")))
        assert f"  {name:<12}  {about}" in cli.help_text()


def test_run_is_the_command_of_bare_words(kvbench: Any) -> None:
    for words in (["budget=0"], ["run", "budget=0"]):
        assert kvbench(*words).err.startswith("kvbench: budget=0: out of range; expected tokens (256), ")


def test_a_method_beside_its_yaml_is_found_by_its_folder(kvbench: Any, tmp_path: Path) -> None:
    kvbench("new-method", "beside", "--folder", "mine")
    done = kvbench("--config-dir", "mine", "method=beside", "budget=8")
    assert "budget=8: below the minimum of beside, 9 tokens" in done.err
    assert str(tmp_path / "mine") in os.environ["PYTHONPATH"], "for the jobs of a launcher"
    with pytest.raises(Exception, match="beside"):
        composed("method=beside")  # it stays the user's own


def test_a_check_has_a_line_for_each_claim_and_says_which_fails_and_why(
    kvbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_conformance.py").write_text(
        "import types, pytest\n"
        "each = pytest.mark.parametrize('case', [types.SimpleNamespace(name=name) for name in ('quest', 'full')])\n"
        "@each\n@pytest.mark.parametrize('at', ['paper', 'unified'])\n"
        "def test_it_keeps_its_rule(case, at):\n    assert at == 'paper', 'two lines\\nof why'\n"
        "@each\ndef test_it_s_whole(case):\n    pass\n"
        "def test_of_no_method():\n    assert False\n"
    )
    monkeypatch.setattr(own_method, "claims", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "test_conformance", None)  # as it was afterwards: the real one may be there
    del sys.modules["test_conformance"]
    monkeypatch.setattr(own_method, "LINE_SECONDS", 0.0)
    lines = filter(None, (done := kvbench("check-method", "quest")).out.splitlines())
    _, count, *lines = lines
    assert count.startswith("3 cases of 2 claims")
    far = [line for line in lines if re.fullmatch(r"\d of 3 cases, some [\d:]+ left", line)]
    assert len(far) == 2 and far[0].startswith("1 of 3 cases")
    failing, holding, outcome = [line for line in lines if line not in far]
    assert failing.startswith("fails  it keeps its rule (unified-") and "two lines of why" in failing
    assert holding == "holds  it's whole" and done.code == 1
    assert "1 of 2 claims" in outcome and "-k it_keeps_its_rule " in outcome
    assert kvbench("check-method", "quest", "-k", "whole").out.splitlines()[-1] == "all 1 claims hold for quest"
    assert "chooses no claim" in kvbench("check-method", "quest", "-k", "nothing").err


@pytest.mark.parametrize("command", ["check-method near", "method=near"])
@pytest.mark.parametrize("folder", ["mine", "mine/method"])
def test_a_missing_yaml_says_where_it_was_looked_for(kvbench: Any, command: str, folder: str) -> None:
    kvbench("new-method", "other", "--folder", "mine")
    alone, own = kvbench(*command.split()).err, kvbench(*command.split(), "--config-dir", folder).err
    assert "--config-dir FOLDER adds FOLDER/method" in alone and str(conf_dir() / "method") in alone
    assert f" and {folder}/method" in own and ("not there" in own) == (folder != "mine")


@pytest.mark.slow
def test_a_wheel_checks_a_new_method_whose_claims_hold(tmp_path: Path) -> None:
    build_wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build_wheel, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert b"kvbench = kvbench.cli.main:main" in archive.read(scripts)

    def kvbench(*words: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        command = [sys.executable, "-m", "kvbench", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    assert kvbench("new-method", "mine").returncode == 0
    done = kvbench("check-method", "mine", "--config-dir", ".")
    assert done.returncode == 0 and "claims hold for mine" in done.stdout, done.stdout + done.stderr
