"""The worker of a vLLM engine that runs a method: vLLM's own, which shows kvbench every forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from kvbench.backends.vllm.backend import Pass
from kvbench.backends.vllm.plan import KEY, RUNNER, Plan, check_installed, plan_of
from kvbench.backends.vllm.plugin import register
from kvbench.backends.vllm.requests import Requests
from kvbench.backends.vllm.rotary import rotary_of
from kvbench.config import ConfigError
from kvbench.method import Shape


class Worker(CPUWorker):  # type: ignore[misc]
    """Runs the method that `additional_config` names; without one, a plain CPU worker."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        check_installed()
        self._plan = plan_of(vllm_config.additional_config)
        if self._plan is not None:
            _refuse(vllm_config, self._plan)
        register()  # where kvbench is not installed, but on the path
        self._requests: Requests | None = None
        super().__init__(vllm_config, *arguments, **named)

    @torch.inference_mode()  # also of what the methods do after the model, to tensors that they have made within it
    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's."""
        if self._plan is None:
            return super().execute_model(scheduler_output)
        requests = self._requests = self._requests or self._begun(self._plan)
        requests.forget(scheduler_output.finished_req_ids)
        requests.forget(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        with Pass(self.model_runner, requests):
            return super().execute_model(scheduler_output)

    def _begun(self, plan: Plan) -> Requests:
        """No request yet, of the model that was loaded."""
        config, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        layers = config.get_num_layers(parallel)
        needs = plan.build().needs
        [scaling] = {layer.impl.scale for layer in self.vllm_config.compilation_config.static_forward_context.values()}
        shape = Shape(
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
        settings: dict[str, Any] = {}
        if needs.positions == "cache":
            settings["rotary"] = rotary_of(self.model_runner.model)
        if needs.token_text:
            from transformers import AutoTokenizer

            from kvbench.backends.hf.model import vocabulary_text

            settings["pieces"] = vocabulary_text(AutoTokenizer.from_pretrained(config.tokenizer))
        return Requests(plan, shape, **settings)

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
