"""A method of one's own: `kvbench new-method` writes its two files, `kvbench check-method` puts a method through what
every method must satisfy. The claims are the tests that kvbench's own methods pass; a wheel carries them along.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.config import ASSETS, PACKAGE, ConfigError, bind_methods, choices, find_modules_in, nearest

TEMPLATES = ASSETS / "method"
NEEDED = ("pytest", "hypothesis")  # to check, not to run


def new_method(arguments: Sequence[str]) -> int:
    """Write FOLDER/NAME.py and FOLDER/method/NAME.yaml, a method that runs as it is; returns the exit code."""
    parser = argparse.ArgumentParser("kvbench new-method", description="Write the two files of a method of your own.")
    parser.add_argument("name", metavar="NAME", help="its name, as in method=NAME")
    parser.add_argument("--folder", type=Path, default=Path(), help="where they go; default: here")
    given = parser.parse_args(arguments)
    files = {given.folder / f"{given.name}.py": "py", given.folder / "method" / f"{given.name}.yaml": "yaml"}
    _refuse_name(given.name, files)
    words = {"@NAME@": given.name, "@CLASS@": "".join(part.capitalize() for part in given.name.split("_"))}
    try:
        for file, kind in files.items():
            text = (TEMPLATES / f"method.{kind}.txt").read_text(encoding="utf-8")
            for mark, word in words.items():
                text = text.replace(mark, word)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--folder={given.folder}: cannot write there ({error.strerror})") from error
    print(*files, sep="\n")
    folder = shlex.quote(str(given.folder))
    print(f"kvbench --config-dir {folder} method={given.name} budget=256    runs it")
    print(f"kvbench check-method {given.name} --config-dir {folder}    checks it")
    return 0


def _refuse_name(name: str, files: Iterable[Path]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"new-method {name}: expected small letters, digits and _, such as key_norm")
    if name in choices("method"):
        raise ConfigError(f"new-method {name}: kvbench has a method of that name; choose another")
    for file in files:
        if file.exists():
            raise ConfigError(f"new-method {name}: {file} is there already; choose another name or --folder")
    if find_spec(name) is not None:
        raise ConfigError(f"new-method {name}: Python has a module of that name already; choose another")


def check_method(arguments: Sequence[str]) -> int:
    """Run the claims about every method for one; returns the exit code, 1 where one does not hold."""
    parser = argparse.ArgumentParser(
        "kvbench check-method", description="Put a method through what every method must satisfy."
    )
    parser.add_argument("name", metavar="NAME", help="of conf/method, or of FOLDER/method")
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="with your own FOLDER/method/NAME.yaml")
    given, more = parser.parse_known_args(arguments)
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(f"check-method: needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    if given.config_dir is not None:
        if not given.config_dir.is_dir():
            raise ConfigError(f"--config-dir={given.config_dir}: no such folder")
        find_modules_in(given.config_dir)
        os.environ["KVBENCH_CONF"] = str(given.config_dir.absolute())  # read by the claims' list of methods
    own = {file.stem for file in (given.config_dir or Path(os.devnull)).glob("method/*.yaml")}
    if given.name not in own | choices("method").keys():
        raise ConfigError(
            f"check-method {given.name}: no such method; {nearest(given.name, [*own, *choices('method')])}"
        )
    bind_methods()
    import pytest

    # Neither the settings nor the cache of a project that the command is given in.
    settings = ["-q", "-c", os.devnull, "--rootdir", str(claims()), "-p", "no:cacheprovider", "-W", "ignore"]
    code = pytest.main([str(claims() / "test_conformance.py"), *settings, *more], plugins=[OnlyOf(given.name)])
    return 1 if code == pytest.ExitCode.TESTS_FAILED else int(code != pytest.ExitCode.OK) * 2


def claims() -> Path:
    """The folder of the claims: `kvbench/conformance` in a wheel, the checkout's `tests/` otherwise."""
    packaged = PACKAGE / "conformance"
    return packaged if packaged.is_dir() else PACKAGE.parent / "tests"


class OnlyOf:
    """Of the claims those about one method; a plugin of pytest's."""

    def __init__(self, method: str) -> None:
        self.method = method

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out what is about other methods, or about none."""
        cases = {item: getattr(item, "callspec", None) and item.callspec.params.get("case") for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not self._about(cases[item])])
        items[:] = [item for item in items if self._about(cases[item])]

    def _about(self, case: Any) -> bool:
        return case is not None and case.name == self.method
