"""The worker of a vLLM engine that runs a method: vLLM's own, which shows kvbench every forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.cpu_worker import CPUWorker

from kvbench.backends.vllm.backend import Pass
from kvbench.backends.vllm.blocks import freed
from kvbench.backends.vllm.plan import KEY, RUNNER, Plan, check_installed, plan_of
from kvbench.backends.vllm.plugin import register
from kvbench.backends.vllm.requests import RequestEngine, Requests
from kvbench.backends.vllm.rotary import rotary_of
from kvbench.backends.vllm.side import Side, rows_kept
from kvbench.config import ConfigError
from kvbench.method import Shape


class Freed(NamedTuple):
    """What an engine frees.

    Attributes:
        method: for which it was started.
        rows: that stay of a prompt, see `Side`.
        layers: true indices of those whose prompts are freed.
    """

    method: str
    rows: int
    layers: tuple[int, ...]


class Worker(CPUWorker):  # type: ignore[misc]
    """Runs the method that `additional_config` names; without one, a plain CPU worker."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        check_installed()
        self._plan = plan_of(vllm_config.additional_config)
        if self._plan is not None:
            _refuse(vllm_config, self._plan)
            if self._plan.frees:
                _refuse_to_free(vllm_config, self._plan.method)
        register()  # where kvbench is not installed, but on the path
        self._requests: Requests | None = None
        self._freed: Freed | None = None
        super().__init__(vllm_config, *arguments, **named)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """See vLLM's; layers whose prompts are freed have a kind of their own."""
        specs: dict[str, Any] = super().get_kv_cache_spec()
        self._freed = None if self._plan is None else self._frees(self._plan)
        if self._freed is None:
            return specs
        sparse = self._freed.layers
        return {name: freed(spec) if extract_layer_index(name) in sparse else spec for name, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """See vLLM's; what is kept of freed prompts is a part of it.

        Raises:
            ConfigError: that is all of it.
        """
        available: int = super().determine_available_memory()
        taken, seats = self.kvbench_beside(), self.vllm_config.scheduler_config.max_num_seqs
        if taken >= available:
            raise ConfigError(
                f"max_num_seqs={seats}: what is kept of so many prompts takes {taken / 2**20:.0f} MiB, and keys and "
                f"values have {available / 2**20:.0f}; expected fewer requests, more memory or a smaller budget"
            )
        return available - taken

    def kvbench_beside(self) -> int:
        """Bytes beside vLLM's blocks: of what is kept of freed prompts."""
        if self._freed is None:
            return 0
        config, seats = self.vllm_config.model_config, self.vllm_config.scheduler_config.max_num_seqs
        return Side.nbytes(seats, self._freed.rows, config.get_head_size(), config.dtype)

    def _frees(self, plan: Plan) -> Freed | None:
        """What of prompts may be freed with this plan; None: nothing."""
        if not plan.frees:
            return None
        config, shape = self.vllm_config.model_config, self._shape(plan)
        longest = replace(shape, lengths=(config.max_model_len,))
        engine = RequestEngine({}, longest, plan.build(), plan.sizes(), **self._settings(plan))
        rows = rows_kept(engine.method, longest)
        return None if rows is None else Freed(plan.method, rows, shape.sparse_layers)

    @torch.inference_mode()  # also of what the methods do after the model, to tensors that they have made within it
    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's."""
        if self._plan is None:
            return super().execute_model(scheduler_output)
        requests = self._requests = self._requests or self._begun(self._plan)
        requests.forget(scheduler_output.finished_req_ids)
        requests.forget(scheduler_output.preempted_req_ids or ())
        requests.forget(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        with Pass(self.model_runner, requests):
            return super().execute_model(scheduler_output)

    def _begun(self, plan: Plan) -> Requests:
        """No request yet, of the model that was loaded."""
        shape, side = self._shape(plan), None
        if self._freed is not None:
            seats = self.vllm_config.scheduler_config.max_num_seqs
            side = Side(seats, self._freed.rows, shape.head_dim, shape.dtype, len(shape.sparse_layers))
        return Requests(plan, shape, side, **self._settings(plan))

    def _shape(self, plan: Plan) -> Shape:
        config, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        layers = config.get_num_layers(parallel)
        [scaling] = {layer.impl.scale for layer in self.vllm_config.compilation_config.static_forward_context.values()}
        return Shape(
            layers=layers,
            query_heads=config.get_num_attention_heads(parallel),
            kv_heads=config.get_num_kv_heads(parallel),
            head_dim=config.get_head_size(),
            lengths=(),
            dtype=config.dtype,
            device=torch.device("cpu"),
            scaling=scaling,
            sparse_layers=tuple(layer for layer in range(layers) if layer not in plan.dense_layers),
        )

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """Of every engine of a request; see `kvbench.engine.engine.Settings`."""
        needs, settings = plan.build().needs, dict[str, Any]()
        if needs.positions == "cache":
            settings["rotary"] = rotary_of(self.model_runner.model)
        if needs.token_text:
            from transformers import AutoTokenizer

            from kvbench.backends.hf.model import vocabulary_text

            pieces = AutoTokenizer.from_pretrained(self.vllm_config.model_config.tokenizer)
            settings["pieces"] = vocabulary_text(pieces)
        return settings

    def kvbench_run(self, given: Mapping[str, Any] | None) -> None:
        """Requests from now on run this method, given as in `additional_config`, or None: vLLM's own attention.

        No request may be under way; audits of those that were are forgotten. What a prefix cache holds was made under
        the method before: see `LLM.reset_prefix_cache`.

        Raises:
            ConfigError: as of a new engine with this method.
        """
        plan = plan_of({KEY: given})
        if plan is not None:
            _refuse(self.vllm_config, plan)
        if self._freed is not None:
            own = None if plan is None else self._frees(plan)
            if own is None or own.layers != self._freed.layers or own.rows > self._freed.rows:
                raise ConfigError(
                    f"method={'null' if plan is None else plan.method}: this engine frees what {self._freed.method} "
                    "drops of prompts; expected a method that drops as much in the same layers, or another engine"
                )
        self._plan, self._requests = plan, None

    def kvbench_reports(self) -> dict[str, dict[str, Any]]:
        """The audits of requests, by their ids; see `LLM.collective_rpc`."""
        return {} if self._requests is None else self._requests.audits()


def _refuse(vllm_config: Any, plan: Plan) -> None:
    """Refuse settings of the engine that the method cannot run under.

    Raises:
        ConfigError: names the setting.
    """
    model, parallel, where = vllm_config.model_config, vllm_config.parallel_config, f"additional_config.{KEY}"
    layers = model.get_num_layers(parallel)
    if any(layer >= layers for layer in plan.dense_layers):
        raise ConfigError(f"{where}.dense_layers={list(plan.dense_layers)}: the model's layers are 0 to {layers - 1}")
    if vllm_config.use_v2_model_runner:
        raise ConfigError(
            f"{RUNNER}=1, or unset: kvbench reads the batches of vLLM's first runner; expected {RUNNER}=0"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative_config: kvbench decodes token by token; leave it out")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: a method sees all layers; expected 1"
        )
    if vllm_config.cache_config.enable_prefix_caching and plan.build().needs.query_window:
        raise ConfigError(
            f"enable_prefix_caching=True: {plan.method} reads the prompt's last queries, which a prompt found in the "
            "cache does not have; expected False"
        )


def _refuse_to_free(vllm_config: Any, method: str) -> None:
    """Refuse settings of an engine under which prompts cannot be freed.

    Raises:
        ConfigError: names the setting.
    """
    workers = vllm_config.parallel_config.tensor_parallel_size
    if vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching=True: {method} drops tokens of the prompt, whose blocks are freed; expected False"
        )
    if workers > 1:
        raise ConfigError(f"tensor_parallel_size={workers}: {method} frees blocks of prompts; expected 1")
