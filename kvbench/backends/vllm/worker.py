"""The worker of a vLLM engine with a method: vLLM's, which shows kvbench every forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.cpu_worker import CPUWorker

from kvbench.backends.vllm.backend import WorkerPass
from kvbench.backends.vllm.blocks import freed
from kvbench.backends.vllm.limits import (
    Freed,
    freed_by,
    refuse,
    refuse_to_start,
    room_for_blocks,
    shape_of,
)
from kvbench.backends.vllm.plan import KEY, Plan, check_installed, plan_of
from kvbench.backends.vllm.plugin import register
from kvbench.backends.vllm.requests import Requests
from kvbench.backends.vllm.rotary import rotary_of
from kvbench.backends.vllm.side import Side
from kvbench.config import ConfigError
from kvbench.method import Shape


class Worker(CPUWorker):  # type: ignore[misc]
    """Runs the method that `additional_config` names; without one, a plain CPU worker."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        check_installed()
        self._plan = plan_of(vllm_config.additional_config)
        if self._plan is not None:
            refuse_to_start(vllm_config, self._plan)
        register()  # where kvbench is not installed, but on the path
        self._requests: Requests | None = None
        self._freed: Freed | None = None
        super().__init__(vllm_config, *arguments, **named)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """See vLLM's; layers whose prompts are freed have a kind of their own."""
        specs: dict[str, Any] = super().get_kv_cache_spec()
        self._freed = None if self._plan is None else freed_by(self.vllm_config, self._plan)
        if self._freed is None:
            return specs
        sparse = self._freed.layers
        return {
            name: freed(spec) if extract_layer_index(name) in sparse else spec
            for name, spec in specs.items()
        }

    def determine_available_memory(self) -> int:
        """See vLLM's; what is kept of freed prompts is a part of it.

        Raises
        ------
        ConfigError
            that is all of it.
        """
        return room_for_blocks(self.vllm_config, self._freed, super().determine_available_memory())

    # also of what the methods do after the model, to tensors that they have made within it
    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's."""
        if self._plan is None:
            return super().execute_model(scheduler_output)
        requests = self._requests = self._requests or self._begun(self._plan)
        requests.forget(scheduler_output.finished_req_ids)
        requests.forget(scheduler_output.preempted_req_ids or ())
        requests.forget(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        with WorkerPass(self.model_runner, requests):
            return super().execute_model(scheduler_output)

    def _begun(self, plan: Plan) -> Requests:
        """No request yet, of the model that was loaded."""
        shape, side = self._shape(plan), None
        if self._freed is not None:
            seats = self.vllm_config.scheduler_config.max_num_seqs
            side = Side(
                seats, self._freed.rows, shape.head_dim, shape.dtype, len(shape.sparse_layers)
            )
        return Requests(plan, shape, side, **self._settings(plan))

    def _shape(self, plan: Plan) -> Shape:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        [scaling] = {layer.impl.scale for layer in layers}
        return shape_of(self.vllm_config, plan, scaling)

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

    def kvbench_run(self, settings: Mapping[str, Any] | None) -> None:
        """Requests from now on run this method, as in `additional_config`; None: vLLM's attention.

        No request may be under way; audits of those that were are forgotten. What a prefix cache
        holds was made under the method before: see `LLM.reset_prefix_cache`.

        Raises
        ------
        ConfigError
            as of a new engine with this method.
        """
        plan = plan_of({KEY: settings})
        if plan is not None:
            refuse(self.vllm_config, plan)
        freed = None if plan is None else freed_by(self.vllm_config, plan)
        if self._freed is not None:
            if freed is None or freed.layers != self._freed.layers or freed.rows > self._freed.rows:
                raise ConfigError(
                    f"method={'null' if plan is None else plan.method}: this engine frees what"
                    f" {self._freed.method} drops of prompts; expected a method that drops as much"
                    " in the same layers, or another engine"
                )
        elif plan is not None and plan.writes and freed is not None:
            raise ConfigError(
                f"method={plan.method}: it writes keys or values anew, and this engine frees no"
                " prompts; expected one that was started with it"
            )
        self._plan, self._requests = plan, None

    def kvbench_reports(self) -> dict[str, dict[str, Any]]:
        """The audits of requests, by their ids; see `LLM.collective_rpc`."""
        return {} if self._requests is None else self._requests.audits()

    def kvbench_counts(self) -> dict[str, float]:
        """Numbers of all requests together, see `Requests.counts`; {} where no method runs."""
        if self._plan is None:
            return {}
        self._requests = self._requests or self._begun(self._plan)
        return self._requests.counts()
