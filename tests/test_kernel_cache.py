"""Compiled kernels: kept under what they are made of, compiled once by who comes first, side by side, and listed."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import typeof
from rich.console import Console

from kvbench.cli.warm import main as warm
from kvbench.config import choices
from kvbench.kernels import compiled, private
from kvbench.kernels.build import Job, _Queue, build, described
from kvbench.kernels.listed import listed
from kvbench.measure import kernels
from methods.icecache.kernels.arrays import NODE, Tree

CHECKOUT = Path(__file__).parents[1]
# A package with a kernel that calls another module's function, and takes a while to compile where it is asked to.
CALLED = "from numba import njit\nadd = njit(lambda a: a + {})\n"
CALLER = """
import sys, time
from numba.core import event
from kvbench.kernels.compiled import kernel
from called import add

@kernel()
def sum(numbers):
    total = 0
    for number in numbers:
        total += add(number)
    return total

class Slow(event.Listener):
    def on_start(self, event):
        print("compiles", event.data["dispatcher"].py_func.__name__, flush=True)
        time.sleep(float(sys.argv[1]) * (event.data["dispatcher"] is sum))
    def on_end(self, event):
        pass

if __name__ == "__main__":
    import caller, numpy
    event.register("numba:compile", Slow())
    print(caller.sum(numpy.arange(4)))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The folder of such a package; what it compiles is kept there."""
    (tmp_path / "caller.py").write_text(CALLER.replace("is sum", "is caller.sum"))
    (tmp_path / "called.py").write_text(CALLED.format(1))
    return tmp_path


def start(
    folder: Path, argument: float | str = 0, stderr: int | None = None, **environment: str
) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(folder), str(CHECKOUT)])
    command = [sys.executable, str(folder / "caller.py"), str(argument)]
    return subprocess.Popen(
        command,
        # Python takes a changed file for the old one where its size is the same, and its second.
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def printed(run: subprocess.Popen[str]) -> list[str]:
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    return out.split("\n")[:-1]


@pytest.mark.slow
def test_a_kernel_is_compiled_anew_where_a_module_that_it_calls_has_changed_and_kept_where_it_comes_back(
    sources: Path,
) -> None:
    assert printed(start(sources))[-1] == "10"
    (sources / "called.py").write_text(CALLED.format(2))
    assert printed(start(sources)) == ["compiles sum", "compiles <lambda>", "14"]
    (sources / "called.py").write_text(CALLED.format(1))
    assert printed(start(sources)) == ["10"]


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_another_version_of_the_compiler_looks_under_another_name(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = compiled.digest.__wrapped__
    own = digest("kvbench.kernels.lists")
    monkeypatch.setattr(f"{package}.__version__", "0.0")
    assert digest("kvbench.kernels.lists") != own


def test_two_processes_at_once_compile_a_kernel_once(sources: Path) -> None:
    lines = [printed(run) for run in [start(sources, 1), start(sources, 1)]]
    assert sorted(map(len, lines)) == [1, 3] and {line[-1] for line in lines} == {"10"}


# Two kernels that call functions of one name, which call themselves and so are inlined nowhere.
NAMESAKES = """
import sys
from numba import njit
from kvbench.kernels.compiled import kernel

def times(factor):
    @njit
    def helper(number):
        return factor + helper(number - 1) if number > 0 else 0
    return helper

two, three = times(2), times(3)

@kernel()
def double(number):
    return two(number)

@kernel()
def triple(number):
    return three(number)

if __name__ == "__main__":
    import caller
    plain = njit(lambda number: caller.two(number))  # no kernel, of a function that one has
    print([getattr(caller, name)(5) for name in sys.argv[1].split(",")], plain(5))
"""


@pytest.mark.slow
def test_functions_of_one_name_that_different_processes_compiled_stay_apart(sources: Path) -> None:
    (sources / "caller.py").write_text(NAMESAKES)
    assert printed(start(sources, "double")) == ["[10] 10"]
    assert printed(start(sources, "triple")) == ["[15] 10"]
    assert printed(start(sources, "double,triple")) == ["[10, 15] 10"]


@pytest.mark.slow
def test_a_compilation_that_is_killed_leaves_nothing_locked_or_broken(sources: Path) -> None:
    first = start(sources, 60)
    assert first.stdout is not None and first.stdout.readline() == "compiles sum\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    assert printed(start(sources))[-1] == "10"
    assert printed(start(sources)) == ["10"]


def test_kernels_run_where_nothing_can_be_written(sources: Path) -> None:
    (sources / "__pycache__").write_text("no folder")
    assert printed(start(sources, XDG_CACHE_HOME="/proc/none"))[-1] == "10"
    assert not [*Path(os.environ.get("TMPDIR", "/tmp")).glob("kvbench-kernels-*/*/caller*")]


@pytest.mark.slow
def test_what_nobody_compiled_for_long_goes_when_its_successor_comes(sources: Path) -> None:
    printed(start(sources))
    old, young = sources / "__pycache__/caller.sum-0.py311.nbi", sources / "__pycache__/caller.sum-1.py311.nbi"
    for path in (old, young):
        path.touch()
    month = time.time() - 86400 * (compiled.UNUSED_DAYS + 1)
    os.utime(old, (month, month))
    (sources / "called.py").write_text(CALLED.format(2))
    printed(start(sources))
    assert young.exists() and not old.exists()


DAMAGES = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "30 bytes": lambda content: content[:30],
    "half": lambda content: content[: len(content) // 2],
    "all but one": lambda content: content[:-1],
    "one more": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    "text": lambda content: b"garbage\n" * 20,
    "another pickle": lambda content: pickle.dumps([1]),
    "one bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
}


@pytest.mark.parametrize("suffix", ["nbi", "1.nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_as_good_as_none_and_said_once(
    suffix: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read() -> Any:
        files = compiled._Files(tmp_path, "one", is_private=True)
        return files.load("types")

    files, file = compiled._Files(tmp_path, "one", is_private=True), tmp_path / f"one.{suffix}"
    files.save("types", list(range(100)))
    assert read() == list(range(100))
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert read() is None and read() is None
    [line] = capsys.readouterr().err.splitlines()
    assert str(file) in line and "compiled anew" in line
    files.save("types", [7])
    assert read() == [7] and capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link"])
def test_what_is_no_file_is_not_read_and_does_not_wait(kind: str, tmp_path: Path) -> None:
    files, file = compiled._Files(tmp_path, "one", is_private=True), tmp_path / "one.nbi"
    files.save("types", 1)
    other = file.rename(tmp_path / "other")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    assert files.load("types") is None


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_kernel_is_compiled_anew_in_one_line_and_once(sources: Path, suffix: str) -> None:
    printed(start(sources))
    [file] = (sources / "__pycache__").glob(f"caller.sum*.{suffix}")
    os.truncate(file, 30)
    again = start(sources, stderr=subprocess.PIPE)
    out, said = again.communicate(timeout=120)
    assert out.split("\n")[0] == "compiles sum" and [str(file) in line for line in said.splitlines()] == [True]
    assert printed(start(sources)) == ["10"]


@dataclass
class Opened:
    """A folder `cache` in a folder `above`, and how both are."""

    above: int = 0o755
    cache: int = 0o700
    owner: int | None = None
    group: int | None = None


@pytest.mark.parametrize(
    ("opened", "which"),
    [
        (Opened(), None),
        (Opened(cache=0o755), None),
        (Opened(above=0o1777), None),
        (Opened(cache=0o777), "cache"),
        (Opened(cache=0o1777), "cache"),
        (Opened(above=0o777), "above"),
        (Opened(cache=0o770), None),
        (Opened(cache=0o770, group=65534), "cache"),
        (Opened(owner=65534), "cache"),
        (Opened(cache=0o500, owner=65534), "cache"),
    ],
)
def test_a_folder_that_another_user_can_write_to_is_no_place_for_kernels(
    opened: Opened, which: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (opened.owner or opened.group) and os.geteuid():
        pytest.skip("only root gives files away")
    monkeypatch.setattr(private, "_is_of_one", lambda group: group == tmp_path.stat().st_gid)
    cache = tmp_path / "above" / "cache"
    cache.mkdir(parents=True)
    os.chown(cache, -1 if opened.owner is None else opened.owner, -1 if opened.group is None else opened.group)
    cache.chmod(opened.cache)
    cache.parent.chmod(opened.above)
    first = private.open_to_others(cache)
    assert (None if first is None else first.name) == which
    if opened.cache == 0o1777:  # as /tmp: what this user makes in it nobody else takes away
        assert private.open_to_others(cache / "kernels") is None


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("is_link", [False, True])
def test_no_kernel_is_read_from_where_another_user_can_write_and_that_is_said(
    variable: str, is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, own, sources = tmp_path / "shared", tmp_path / "own", tmp_path / "sources"
    for folder in (shared, own, sources):
        folder.mkdir()
    shared.chmod(0o777)
    if is_link:
        (tmp_path / "link").symlink_to(shared)
    (sources / "__pycache__").write_text("no folder")
    told = tmp_path / "link" if is_link else shared
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(told) if variable == "NUMBA_CACHE_DIR" else "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own if variable == "NUMBA_CACHE_DIR" else told))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    folder = compiled._folder.__wrapped__(sources)
    assert shared not in folder.parents and private.open_to_others(folder) is None
    assert str(shared) in capsys.readouterr().err
    assert variable == "XDG_CACHE_HOME" or own in folder.parents


@pytest.mark.parametrize("is_root", [False, True])
def test_a_file_that_another_user_can_have_written_is_not_unpickled(is_root: bool, tmp_path: Path) -> None:
    if is_root and os.geteuid():
        pytest.skip("only root gives files away")
    files, ran = compiled._Files(tmp_path, "one", is_private=True), tmp_path / "ran"

    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    for name in ("one.nbi", "one.1.nbc"):
        private.write_intact(tmp_path / name, pickle.dumps(Harmful()))
        if is_root:
            os.chown(tmp_path / name, 65534, 65534)
        else:
            (tmp_path / name).chmod(0o666)
    assert files._load_index() == {} and files._load_data("one.1.nbc") is None and not ran.exists()


def test_a_lock_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "kernels.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        compiled._locks.__wrapped__(str(tmp_path))
    assert not victim.exists()


def test_types_are_read_as_they_were_written() -> None:
    row = np.zeros((2, 2), np.uint16)
    tree = Tree(row, *[np.zeros(1, NODE)] * 14)
    given = 1, 1.0, np.float32(1), True, None, row, np.zeros(1, NODE), (1, 2), (1, (row, 2.0)), tree
    job = Job("", [described(typeof(one)) for one in given], 0, ())
    assert job.signature() == tuple(map(typeof, given))


def test_every_listed_kernel_is_there_and_stands_after_those_that_it_calls() -> None:
    jobs, used = listed()
    for number, job in enumerate(jobs):
        assert len(job.signature()) == job.dispatcher().py_func.__code__.co_argcount
        assert all(called < number for called in job.calls)
    assert set(used) == {"float32", "bfloat16"}
    for of in used.values():
        assert {*choices("method")} <= {*of}


def test_what_other_kernels_call_is_compiled_before_them_and_the_rest_longest_first() -> None:
    done: list[int] = []

    class One(Job):
        def compile(self) -> None:
            done.append(int(self.kernel))

    jobs = [One("0", [], 1, ()), One("1", [], 2, ()), One("2", [], 0.5, (0,)), One("3", [], 1, (2,))]
    said: list[tuple[int, float]] = []
    build(jobs, [0, 2, 1, 3], lambda ready, left: said.append((ready, left)))
    assert done == [0, 1, 2, 3] and [ready for ready, _ in said] == [0, 1, 2, 3, 4] and said[-1][1] == 0


def test_what_is_left_follows_what_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 kernels of 2 s in two processes, on a machine that takes ten times as long."""
    now, said = 0.0, list[tuple[int, float]]()
    monkeypatch.setattr("kvbench.kernels.build.time.monotonic", lambda: now)
    jobs = [Job(str(number), [], 2.0, ()) for number in range(12)]
    queue = _Queue(jobs, range(12), 2, lambda ready, left: said.append((ready, left)))
    queue.tell()
    assert said[-1] == (0, 12)
    taken = [queue.take(), queue.take()]
    for now in (1.0, 10.0, 19.0):  # noqa: B007  # the clock above
        queue.tell()
    assert said[-1][1] > said[-2][1] > said[-3][1] > 9
    now = 20.0
    for number in taken:
        assert number is not None
        queue.done(number)
    assert said[-1] == (2, 100)
    while (number := queue.take()) is not None:
        queue.done(number)
    assert said[-1] == (12, 0)


def test_a_slow_compilation_is_told_of_though_no_kernel_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Job):
        def compile(self) -> None:
            until = time.monotonic() + 10
            while len(said) < 4 and time.monotonic() < until:
                time.sleep(0.01)

    said = list[int]()
    monkeypatch.setattr("kvbench.kernels.build.TELL_SECONDS", 0.01)
    build([Slow("0", [], 1, ())], [0], lambda ready, left: said.append(ready))
    assert said[:4] == [0] * 4 and said[-1] == 1


def test_off_a_terminal_kernels_have_a_line_at_intervals_with_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = 100.0, io.StringIO()

    def compile_them(numbers: list[int], say: Callable[[int, float], None]) -> None:
        nonlocal now
        for ready, left in ((0, 6), (0, 5), (1, 200), (1, 180), (2, 0)):
            say(ready, left)
            now += kernels.LINE_SECONDS / 2

    monkeypatch.setattr("kvbench.measure.kernels.time.monotonic", lambda: now)
    monkeypatch.setattr(kernels, "missing", lambda numbers: [*numbers])
    monkeypatch.setattr(kernels, "compile_listed", compile_them)
    assert kernels.compile_kernels([3, 4], Console(file=out, width=100)) == 2
    lines = out.getvalue().splitlines()
    assert [line.partition("once: ")[2] for line in lines] == [
        "0 done, some 6 s left",
        "1 done, some 200 s left",
        "2 done, some 0 s left",
    ]


def test_a_list_that_is_older_than_the_sources_ends_no_run() -> None:
    gone = [Job("kvbench.kernels.lists:gone", [], 1, ()), Job("kvbench.kernels.gone:kernel", [], 1, ())]
    changed = Job("kvbench.kernels.lists:plan_lists", ["int64"], 1, ())
    assert not any(job.missing() for job in gone) and changed.missing()
    said: list[int] = []
    build([changed], [0], lambda ready, left: said.append(ready))
    assert said == [0, 1]


def test_a_run_whose_kernels_are_compiled_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.compile_kernels([], Console())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("word", ["method=kwest", "kv=int9", "dtype=float31", "quest", "budget=3", "method="])
def test_warm_refuses_in_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm([word]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbench warm: ") and word in line
