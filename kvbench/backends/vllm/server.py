"""vLLM's OpenAI-compatible server with a method, for `kvbench serve`, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvbench.backends.vllm import bodies, metrics
from kvbench.backends.vllm.limits import freed_by, refuse_to_start, room_for_blocks, shape_of
from kvbench.backends.vllm.plan import Plan
from kvbench.config import ConfigError, first_line
from kvbench.models.footprint import GIB, free_memory

MEMORY = 4 * GIB  # bytes for keys and values; vLLM's own rule takes most of the machine's
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # in the environment: that many GiB

# What kvbench gives vLLM, and how one asks kvbench for it.
OURS = {
    "--model": "model=",
    "--worker-cls": "method=",
    "--additional-config": "method=",
    "--dtype": "dtype=",
    "--tensor-parallel-size": "backend.tensor_parallel=",
    "--host": "--host, before --",
    "--port": "--port, before --",
}


class _ServerParser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        """Refuse an argument in one line, where argparse would print its usage and exit."""
        raise ConfigError(f"after --, {message}")


def serve(plan: Plan, ours: Sequence[str], more: Sequence[str]) -> None:
    """Serve until a signal ends it.

    Parameters
    ----------
    plan
        of every request.
    ours
        arguments of vLLM's server that kvbench knows: those of `OURS`, and more.
    more
        those of the user.

    Raises
    ------
    ConfigError
        vLLM refuses an argument, or the engine could not run the method, before it starts.
    """
    for word in more:
        if expected := OURS.get(word.partition("=")[0].replace("_", "-")):
            raise ConfigError(f"{word}: kvbench says that to vLLM; expected {expected}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # which it would send to its makers
    cli_env_setup()
    options = plan.engine_options()
    arguments = [*ours, "--worker-cls", options["worker_cls"]]
    arguments += ["--additional-config", json.dumps(options["additional_config"])]
    try:
        args = make_arg_parser(_ServerParser()).parse_args([*_defaults(plan), *more, *arguments])
        if args.kv_cache_memory_bytes is None and not os.environ.get(SPACE):
            args.kv_cache_memory_bytes = MEMORY
        validate_parsed_serve_args(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses this: {_reason(error)}") from error
    _refuse_to_start(config, plan)
    configure_logging_from_args(args)
    uvloop.run(run_server(args))


def _defaults(plan: Plan) -> list[str]:
    """Arguments that the user's come after."""
    words = [
        "--middleware",
        metrics.MIDDLEWARE,
        "--middleware",
        bodies.MIDDLEWARE,
        "--enforce-eager",
    ]
    if plan.frees or plan.build().needs.query_window:
        words.append("--no-enable-prefix-caching")
    return words


def _reason(error: Exception) -> str:
    """What vLLM says; of what pydantic says, the line that says why."""
    lines = [line.strip() for line in str(error).splitlines()]
    reason_line = next(
        (line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))), None
    )
    return (
        first_line(error)
        if reason_line is None
        else reason_line.partition(", ")[2].partition(" [type=")[0]
    )


def _refuse_to_start(config: Any, plan: Plan) -> None:
    """Refuse what an engine could not run, or would have no memory for.

    Raises
    ------
    ConfigError
        names the setting.
    """
    refuse_to_start(config, plan)
    reserved, free = (
        config.cache_config.kv_cache_memory_bytes,
        free_memory(torch.device("cpu")).get("host"),
    )
    key = f"kv_cache_memory_bytes={reserved}"
    if free is not None and reserved > free:
        raise ConfigError(
            f"{key}: {free / GIB:.1f} GiB are free; expected fewer (-- --kv-cache-memory-bytes)"
        )
    room, length = (
        room_for_blocks(config, freed_by(config, plan), reserved),
        config.model_config.max_model_len,
    )
    shape, block = shape_of(config, plan), config.cache_config.block_size
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    if (longest := -(-length // block) * block * row) > room:
        raise ConfigError(
            f"{key}: a request of max_model_len={length} tokens takes {longest / 2**20:.0f} MiB,"
            f" and blocks have {room / 2**20:.0f}; expected more (-- --kv-cache-memory-bytes) or"
            " shorter ones (-- --max-model-len)"
        )
