"""What a method asks of a vLLM engine, and what is refused before a model is read.

`kvbench serve` and the engine's worker ask.

Settings are read of vLLM's config, of which nothing is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvbench.backends.vllm.plan import KEY, RUNNER, Plan
from kvbench.backends.vllm.side import Side, rows_per_seat
from kvbench.config import ConfigError, first_line
from kvbench.engine.engine import Settings
from kvbench.memory.view import StoreView
from kvbench.method import Shape
from kvbench.spans import Spans


class Freed(NamedTuple):
    """What an engine frees.

    Attributes
    ----------
    method
        for which it was started.
    rows
        that stay of a prompt, see `Side`.
    layers
        true indices of those whose prompts are freed.
    """

    method: str
    rows: int
    layers: tuple[int, ...]


def shape_of(
    vllm_config: Any, plan: Plan, scaling: float = 1.0, length: int | None = None
) -> Shape:
    """The shape of an engine's model.

    Parameters
    ----------
    vllm_config
        of the engine.
    plan
        which layers are dense.
    scaling
        of the logits, which only a model that was loaded shows.
    length
        of a prompt; None: there is none.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = config.get_num_layers(parallel)
    return Shape(
        layers=layers,
        query_heads=config.get_num_attention_heads(parallel),
        kv_heads=config.get_num_kv_heads(parallel),
        head_dim=config.get_head_size(),
        lengths=() if length is None else (length,),
        dtype=config.dtype,
        device=torch.device("cpu"),
        scaling=scaling,
        sparse_layers=tuple(layer for layer in range(layers) if layer not in plan.dense_layers),
    )


def freed_by(vllm_config: Any, plan: Plan) -> Freed | None:
    """What of prompts an engine may free that is started with this plan; None: nothing.

    Raises
    ------
    ConfigError
        the method cannot run on a model of this shape.
    """
    if not plan.frees:
        return None
    longest, method = (
        shape_of(vllm_config, plan, length=vllm_config.model_config.max_model_len),
        plan.build(),
    )
    context = Settings(seed=plan.seed).context(longest, Spans(longest.device))
    try:
        method.begin(longest, plan.sizes(), StoreView({}, lambda size: None), context)
    except ValueError as error:
        raise ConfigError(first_line(error)) from error
    rows = rows_per_seat(method, longest)
    return None if rows is None else Freed(plan.method, rows, longest.sparse_layers)


def room_for_blocks(vllm_config: Any, freed: Freed | None, available: int) -> int:
    """Bytes for vLLM's blocks: those for keys and values, without what is kept of freed prompts.

    Raises
    ------
    ConfigError
        that takes all of it.
    """
    if freed is None:
        return available
    seats, config = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config
    taken = Side.nbytes(seats, freed.rows, config.get_head_size(), config.dtype)
    if taken >= available:
        raise ConfigError(
            f"max_num_seqs={seats}: what is kept of so many prompts takes {taken / 2**20:.0f} MiB,"
            f" and keys and values have {available / 2**20:.0f}; expected fewer requests, more"
            " memory or a smaller budget"
        )
    return available - taken


def refuse(vllm_config: Any, plan: Plan) -> None:
    """Refuse settings of an engine that the method cannot run under.

    Raises
    ------
    ConfigError
        names the setting.
    """
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_num_layers(parallel)
    if any(layer >= layers for layer in plan.dense_layers):
        raise ConfigError(
            f"additional_config.{KEY}.dense_layers={list(plan.dense_layers)}: the model's layers"
            f" are 0 to {layers - 1}"
        )
    if vllm_config.use_v2_model_runner:
        raise ConfigError(
            f"{RUNNER}=1, or unset: kvbench reads the batches of vLLM's first runner; expected"
            f" {RUNNER}=0"
        )
    if str(stored := vllm_config.cache_config.cache_dtype).startswith("fp8"):
        raise ConfigError(
            f"kv_cache_dtype={stored}: kvbench reads them as the model makes them; expected auto"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative_config: kvbench decodes token by token; leave it out")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: a method sees all layers;"
            " expected 1"
        )
    if vllm_config.cache_config.enable_prefix_caching and plan.build().needs.query_window:
        raise ConfigError(
            f"enable_prefix_caching=True: {plan.method} reads the prompt's last queries, which a"
            " prompt found in the cache does not have; expected False"
        )


def refuse_to_start(vllm_config: Any, plan: Plan) -> None:
    """As `refuse`, of an engine that starts with this plan: what is dropped of prompts is freed.

    Raises
    ------
    ConfigError
        names the setting.
    """
    refuse(vllm_config, plan)
    if plan.frees:
        _refuse_to_free(vllm_config, plan.method)


def _refuse_to_free(vllm_config: Any, method: str) -> None:
    """Refuse settings of an engine under which prompts cannot be freed.

    Raises
    ------
    ConfigError
        names the setting.
    """
    workers = vllm_config.parallel_config.tensor_parallel_size
    if vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching=True: {method} drops tokens of the prompt, whose blocks are"
            " freed; expected False"
        )
    if workers > 1:
        raise ConfigError(
            f"tensor_parallel_size={workers}: {method} frees blocks of prompts; expected 1"
        )
