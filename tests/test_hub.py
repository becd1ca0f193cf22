"""What a model group means, and whether its hub id is within reach: told in about a second, and without torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvbench.config import ConfigError
from kvbench.models import hub

PROXIES = [f"{kind}_proxy" for kind in ("http", "https", "all", "no")]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, no proxy, and nothing known of the network yet."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.out_of_reach.cache_clear()
    yield
    hub.out_of_reach.cache_clear()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make a port of this machine the hub's address."""
    return lambda port: monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def cached(tmp_path: Path, hub_id: str, *files: str) -> Path:
    """A cache folder as the hub's library lays it out."""
    commit = "0" * 40
    repository = tmp_path / "cache" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_a_hub_that_answers_is_within_reach(endpoint: Callable[[int], None], listener: socket.socket) -> None:
    endpoint(listener.getsockname()[1])
    assert hub.out_of_reach() is None
    hub.refuse_out_of_reach("org/name")


def test_a_hub_that_refuses_is_out_of_reach_at_once(
    endpoint: Callable[[int], None], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting, which would take an hour here."""
    monkeypatch.setattr(hub, "PATIENCE", 3600.0)
    endpoint(listener.getsockname()[1])
    listener.close()
    with pytest.raises(ConfigError, match=r"model.path=org/name: .*model.path=FOLDER$"):
        hub.refuse_out_of_reach("org/name")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> float:
    """Far less of it; a connection that nobody accepts would hang for minutes otherwise, and one looked up for ever."""
    assert hub.PATIENCE == 1
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    return hub.PATIENCE


def test_a_hub_that_never_answers_is_given_up_after_a_second(
    endpoint: Callable[[int], None], listener: socket.socket, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    connect = socket.create_connection

    def noted(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(timeout)
        return connect(address, timeout=timeout)

    monkeypatch.setattr(hub.socket, "create_connection", noted)
    endpoint(port := listener.getsockname()[1])
    with ExitStack() as waiting:
        for _ in range(4):  # fill the queue of connections that nobody accepts: the next hangs, as behind a firewall
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert hub.out_of_reach() == "127.0.0.1 does not answer"
        assert hub.out_of_reach() and asked == [patience], "asked once"


def test_a_name_that_is_looked_up_for_ever_is_given_up_too(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def lookup(*_: object, **__: object) -> None:
        given_up.wait()
        raise OSError

    monkeypatch.setattr(hub.socket, "create_connection", lookup)
    assert hub.out_of_reach() is not None
    given_up.set()


def test_offline_by_setting_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.socket, "create_connection", pytest.fail)
    assert hub.out_of_reach() == "HF_HUB_OFFLINE is set"


def test_behind_a_proxy_nothing_can_be_said_against_the_hub(
    monkeypatch: pytest.MonkeyPatch, endpoint: Callable[[int], None], listener: socket.socket
) -> None:
    endpoint(listener.getsockname()[1])
    listener.close()
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert hub.out_of_reach() is None
    hub.out_of_reach.cache_clear()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert hub.out_of_reach() is not None


def test_what_is_cached_with_its_weights_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = cached(tmp_path, "org/name", "config.json", "model-00001-of-00002.safetensors")
    assert hub.cached_folder("org/name") == folder
    hub.refuse_out_of_reach("org/name")
    cached(tmp_path, "org/half", "config.json", "tokenizer.json")
    assert hub.cached_folder("org/half") is not None
    with pytest.raises(ConfigError, match="model.path=org/half: not in the local cache"):
        hub.refuse_out_of_reach("org/half")


def test_what_cannot_be_a_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.path=org/two--dashes: no such folder, and no hub id"):
        hub.cached_folder("org/two--dashes")


def test_a_model_group_means_random_weights_a_folder_or_a_hub_id(tmp_path: Path) -> None:
    tiny = {"name": "dummy-tiny", "path": None, "weights": "dummy", "dense_layers": []}
    real = {"name": "qwen3-8b", "path": "Qwen/Qwen3-8B", "weights": "pretrained", "dense_layers": [0, 1]}
    own = {"name": "mine", "path": "org/mine", "weights": "pretrained", "dense_layers": [3]}
    assert hub.ModelConfig.of(tiny).source == ("dummy-tiny", None, ())
    assert hub.ModelConfig.of({**tiny, "path": "org/name"}).source == ("name", "org/name", (0, 1))
    assert hub.ModelConfig.of(real).source == ("qwen3-8b", "Qwen/Qwen3-8B", (0, 1))
    assert hub.ModelConfig.of({**real, "weights": "dummy", "path": "elsewhere/8b"}).source == ("qwen3-8b", None, (0, 1))
    assert hub.ModelConfig.of(own).source == ("mine", "org/mine", (3,))
    assert hub.ModelConfig.of({**own, "weights": "dummy"}).source == ("mine", None, (3,))
    assert hub.ModelConfig.of({**real, "path": str(tmp_path)}).source.folder == tmp_path
    assert hub.ModelConfig.of(real).source.folder is None


def test_none_of_this_imports_torch(tmp_path: Path) -> None:
    cached(tmp_path, "org/name", "config.json")
    code = (
        "import sys; from kvbench.models import hub; from huggingface_hub import constants;"
        f"constants.HF_HUB_CACHE = {str(tmp_path / 'cache')!r};"
        "print(hub.config_in(hub.cached_folder('org/name'), ''), {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [json.dumps({}), "set()"]
