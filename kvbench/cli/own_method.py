"""A method of one's own: `kvbench new-method` writes its two files, or a package that pip installs;
`kvbench check-method` puts a method through what every method must satisfy. The claims are the
tests that kvbench's own methods pass; a wheel carries them along.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.config import (
    ASSETS,
    LISTING,
    PACKAGE,
    ConfigError,
    bind_methods,
    choices,
    choose_from,
    installed,
    nearest,
    plugins,
    searched,
)
from kvbench.kernels.often import LINE_SECONDS

TEMPLATES = ASSETS / "method"
# Of a package: where each template goes, below the folder of the whole.
PACKAGE_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "kvbench_@NAME@/__init__.py": "method.py.txt",
    "kvbench_@NAME@/method/@NAME@.yaml": "method.yaml.txt",
    "tests/test_@NAME@.py": "test.py.txt",
}
REQUIRED_PACKAGES = ("pytest", "hypothesis")  # to check, not to run


def new_method(arguments: Sequence[str]) -> int:
    """Write FOLDER/NAME.py and FOLDER/method/NAME.yaml, a method that runs as it is, or a package
    of it; returns the exit code.
    """
    parser = argparse.ArgumentParser(
        "kvbench new-method", description="Write the two files of a method of your own."
    )
    parser.add_argument("name", metavar="NAME", help="its name, as in method=NAME")
    parser.add_argument("--folder", type=Path, default=Path(), help="where they go; default: here")
    parser.add_argument(
        "--package",
        action="store_true",
        help="FOLDER/kvbench-NAME instead, a package with a test and a page, for others to install",
    )
    flags = parser.parse_args(arguments)
    words = {
        "@NAME@": flags.name,
        "@CLASS@": "".join(part.capitalize() for part in flags.name.split("_")),
        "@MODULE@": f"kvbench_{flags.name}" if flags.package else flags.name,
    }
    whole = flags.folder / f"kvbench-{flags.name}"
    files = {
        flags.folder / f"{flags.name}.py": "method.py.txt",
        flags.folder / "method" / f"{flags.name}.yaml": "method.yaml.txt",
    }
    if flags.package:
        files = {whole / _filled(path, words): name for path, name in PACKAGE_FILES.items()}
    _refuse_name(flags.name, words["@MODULE@"], files)
    try:
        for file, name in files.items():
            text = _filled((TEMPLATES / name).read_text(encoding="utf-8"), words)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--folder={flags.folder}: cannot write there ({error.strerror})"
        ) from error
    print(*files, sep="\n")
    option = "" if flags.package else f" --config-dir {shlex.quote(str(flags.folder))}"
    install = {
        f"pip install -e {shlex.quote(str(whole))}": "kvbench finds it by its name from here"
    }
    commands = (install if flags.package else {}) | {
        f"kvbench{option} method={flags.name} budget=256": "runs it",
        f"kvbench check-method {flags.name}{option}": (
            "says which of the claims about every method hold"
        ),
        f"kvbench{option} -m method=full,snapkv,{flags.name} budget=256": "compares it",
    }
    width = max(map(len, commands))
    print("", *(f"{command:<{width}}  # {what}" for command, what in commands.items()), sep="\n")
    return 0


def _filled(text: str, words: Mapping[str, str]) -> str:
    """A template with its words."""
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def _refuse_name(name: str, module: str, files: Iterable[Path]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"new-method {name}: expected small letters, digits and _, such as key_norm"
        )
    if name in choices("method"):
        raise ConfigError(f"new-method {name}: kvbench has a method of that name; choose another")
    if name in plugins("method"):
        package = plugins("method")[name].package
        raise ConfigError(f"new-method {name}: the package {package} has one; choose another")
    for file in files:
        if file.exists():
            raise ConfigError(
                f"new-method {name}: {file} is there already; choose another name or --folder"
            )
    if find_spec(module) is not None:
        raise ConfigError(
            f"new-method {name}: Python has a module of that name already; choose another"
        )


def check_method(arguments: Sequence[str]) -> int:
    """Run the claims about every method for one; returns the exit code, 1 where one does
    not hold.
    """
    parser = argparse.ArgumentParser(
        "kvbench check-method", description="Put a method through what every method must satisfy."
    )
    parser.add_argument("name", metavar="NAME", help="of conf/method, FOLDER/method or a package")
    parser.add_argument(
        "--config-dir", type=Path, metavar="FOLDER", help="with your own FOLDER/method/NAME.yaml"
    )
    flags, more = parser.parse_known_args(arguments)
    missing = [package for package in REQUIRED_PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"check-method: needs {' and '.join(missing)}; pip install {' '.join(missing)}"
        )
    if flags.config_dir is not None and not flags.config_dir.is_dir():
        raise ConfigError(f"--config-dir={flags.config_dir}: no such folder")
    choose_from(flags.config_dir)
    user_methods = {
        file.stem for file in (flags.config_dir or Path(os.devnull)).glob("method/*.yaml")
    }
    known = {*user_methods, *choices("method"), *plugins("method")}
    if flags.name not in known:
        near = nearest(flags.name, known, LISTING)
        raise ConfigError(f"check-method {flags.name}: no such method; {near}{searched('method')}")
    if flags.name not in user_methods | choices("method").keys():
        installed("method", flags.name)  # refuses a package that has no file of it
        file = plugins("method")[flags.name].file
        assert file is not None
        choose_from(file.parents[1])
    bind_methods()
    import pytest

    print("collecting the claims", flush=True)
    # Neither the settings nor the cache of a project that the command is given in, and of pytest's
    # words none.
    settings = [
        "-c",
        os.devnull,
        "--rootdir",
        str(claims()),
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    quiet = ["-qq", "--tb=no", "-rN", "-o", "console_output_style=classic"]
    plugin = Claims(flags.name)
    code = pytest.main(
        [str(claims() / "test_conformance.py"), *settings, *quiet, *more], plugins=[plugin]
    )
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(
            f"check-method {shlex.join(arguments)}: chooses no claim; -k takes words of their names"
        )
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(plugin.outcome())
    return 1 if code == pytest.ExitCode.TESTS_FAILED else int(code != pytest.ExitCode.OK) * 2


def claims() -> Path:
    """The folder of the claims: `kvbench/conformance` in a wheel, the checkout's `tests/`
    otherwise.
    """
    packaged = PACKAGE / "conformance"
    return packaged if packaged.is_dir() else PACKAGE.parent / "tests"


class Claims:
    """A plugin of pytest's: of the claims those about one method, a line for each that holds or
    does not, and now and then how far it is.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self._cases: Counter[str] = Counter()  # of each claim, those still to come
        self._failed: dict[str, None] = {}
        self._all = 0
        self._began = self._line_at = time.monotonic()

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out what is about other methods, or about none."""
        cases = {
            item: getattr(item, "callspec", None) and item.callspec.params.get("case")
            for item in items
        }
        config.hook.pytest_deselected(
            items=[item for item in items if not self._concerns(cases[item])]
        )
        items[:] = [item for item in items if self._concerns(cases[item])]

    def _concerns(self, case: Any) -> bool:
        return case is not None and case.name == self.method

    def pytest_collection_finish(self, session: Any) -> None:
        """Count the cases of each claim, when all plugins have chosen."""
        self._cases.update(_claim(item.nodeid) for item in session.items)
        self._all, self._began = len(session.items), time.monotonic()
        if self._all:
            print(
                f"{self._all} cases of {len(self._cases)} claims; kernels are compiled as they"
                " are met",
                flush=True,
            )

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        """No dot for a case that has run."""
        return "", "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Say at once what does not hold, in which case, and why."""
        if report.failed:
            claim, case = _claim(report.nodeid), report.nodeid.partition("[")[2].rstrip("]")
            why = getattr(
                getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext
            )
            self._failed[claim] = None
            print(f"fails  {_words(claim)} ({case}): {' '.join(why.split())[:200]}", flush=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Say what holds, when all its cases have."""
        claim = _claim(nodeid)
        self._cases[claim] -= 1
        if not self._cases[claim] and claim not in self._failed:
            print(f"holds  {_words(claim)}", flush=True)
        now, to_come = time.monotonic(), self._cases.total()
        if to_come and now - self._line_at >= LINE_SECONDS:
            self._line_at, done = now, self._all - to_come
            remaining = timedelta(seconds=round((now - self._began) * to_come / done))
            print(f"{done} of {self._all} cases, some {remaining} left", flush=True)

    def outcome(self) -> str:
        """How many claims hold, and how to look at one that does not."""
        if not self._failed:
            return f"all {len(self._cases)} claims hold for {self.method}"
        count, first = (
            f"{len(self._failed)} of {len(self._cases)}",
            next(iter(self._failed)).removeprefix("test_"),
        )
        return (
            f"{count} claims do not hold for {self.method}; -k {first} --tb=short shows where the"
            " first fails"
        )


def _claim(nodeid: str) -> str:
    return nodeid.rpartition("::")[2].partition("[")[0]


def _words(claim: str) -> str:
    return re.sub(r"_s(?=_|$)", "'s", claim.removeprefix("test_")).replace("_", " ")
