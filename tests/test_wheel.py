"""What the wheel carries: both packages, the configuration, pages of methods and the runs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("kvbench-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def sources(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_carries_every_module_and_its_data(members: list[str]) -> None:
    assert sources("kvbench") | sources("methods") <= set(members)


def test_wheel_carries_the_configuration_inside_the_package(members: list[str]) -> None:
    expected = {f"kvbench/{path}" for path in sources("conf")}
    assert "kvbench/conf/config.yaml" in expected
    assert expected <= set(members)


def test_wheel_carries_what_a_site_shows_of_methods_and_the_runs_that_kvbench_ships(members: list[str]) -> None:
    expected = {f"kvbench/{path}" for path in sources("docs/methods")} | {
        f"kvbench/results/{path.name}" for path in (ROOT / "results").iterdir() if path.suffix in (".json", ".xz")
    }
    assert expected <= set(members)
    assert not [name for name in members if name.endswith(".png")]


def test_wheel_puts_nothing_else_into_site_packages(members: list[str]) -> None:
    assert {name.split("/")[0] for name in members if ".dist-info/" not in name} == {"kvbench", "methods"}
    assert not [name for name in members if "__pycache__" in name or name.endswith((".pyc", ".nbi", ".nbc"))]
