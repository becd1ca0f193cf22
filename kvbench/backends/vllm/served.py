"""A run's model inside vLLM: prompts in, generations with their audits out. vLLM itself is imported when it starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from kvbench.backends.hf import loading as models
from kvbench.backends.hf.generate import Generation, Progress
from kvbench.backends.vllm.plan import Plan, vllm_options
from kvbench.config import ConfigError, first_line
from kvbench.models import hub
from kvbench.models.footprint import Prompts, footprint
from kvbench.models.support import window

BESIDE = 512  # tokens beside those of `task.lengths`: of a chat template, and what ends a prompt
BLOCK = 128  # tokens of a block of vLLM's memory, or a multiple of them

_running: list[Any] = []  # the one engine of this process


@dataclass(frozen=True)
class Served(models.Loaded):
    """A model that vLLM runs; `model` is its `LLM`."""

    @property
    def device(self) -> torch.device:
        """See `Loaded`."""
        return torch.device("cpu")

    @property
    def devices(self) -> int:
        """See `Loaded`."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """See `Loaded`."""
        dtype: torch.dtype = self._config.dtype
        return dtype

    @property
    def layers(self) -> int:
        """See `Loaded`."""
        count: int = self._config.hf_text_config.num_hidden_layers
        return count

    @property
    def _config(self) -> Any:
        return self.model.llm_engine.model_config  # type: ignore[operator, union-attr]

    def generate(
        self,
        plan: Plan,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        not_first: Collection[int] = (),
        ends: Callable[[Sequence[int]], bool] = lambda tokens: False,
        progress: Progress | None = None,
    ) -> tuple[Generation, list[dict[str, Any]]]:
        """Generate for a batch of prompts, greedily; see `kvbench.backends.hf.generate.generate`.

        Times are of the engine's steps, as they are seen from outside: the first token is there when every prompt has
        its own, and decode steps are those after it.

        Args:
            plan: what runs.
            not_first: none, or some of `stop_ids`: no row may begin with any of these.

        Returns:
            The generation, and each prompt's audit.

        Raises:
            ConfigError: vLLM refuses a prompt.
            FloatingPointError: NaN or inf in the logits of one of them.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert set(not_first) <= set(stop_ids)
        llm: Any = self.model
        llm.collective_rpc("kvbench_run", args=(asdict(plan),))
        how = SamplingParams(
            temperature=0,
            max_tokens=max_new_tokens,
            min_tokens=1 if not_first else 0,
            stop_token_ids=sorted(stop_ids),
            ignore_eos=True,  # what ends a row is among `stop_ids`, or is not to end it
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        read, step_ms, first = max(map(len, prompts)), [], None
        start = began = time.perf_counter()
        try:
            names = [
                llm.llm_engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, how)
                for row, prompt in enumerate(prompts)
            ]
            while llm.llm_engine.has_unfinished_requests():
                made = llm.llm_engine.step()
                now = time.perf_counter()
                for one in made:
                    row = int(one.request_id)
                    tokens[row] += one.outputs[0].token_ids
                    if not one.finished and ends(tokens[row]):
                        llm.llm_engine.abort_request([one.request_id])
                if first is not None:
                    step_ms.append((now - began) * 1e3)
                elif all(tokens):
                    first = now
                if progress and all(tokens):
                    progress(read + max(map(len, tokens)), read + max_new_tokens)
                began = time.perf_counter()
        except ValueError as error:
            raise ConfigError(f"engine=vllm: {first_line(error)}") from error
        finally:  # none, but after an error
            llm.llm_engine.abort_request([str(row) for row in range(len(prompts))])
        assert first is not None
        reports = llm.collective_rpc("kvbench_reports")[0]
        if any(reports[name].pop("not_finite", False) for name in names):
            raise FloatingPointError("the model's logits are NaN or infinite")
        generation = Generation(tokens, first - start, step_ms=step_ms, audit=reports[names[0]])
        if step_ms:
            generation.tt2t_s = generation.ttft_s + step_ms[0] / 1e3
        return generation, [reports[name] for name in names]


def load(
    run: Mapping[str, Any],
    prompts: Prompts,
    try_out: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
) -> Served:
    """Start vLLM with the model that a run asks for; another that this process has started before ends.

    Args:
        run: composed, and checked.
        prompts: the largest to come.
        try_out: as of `kvbench.backends.hf.loading.load`.

    Raises:
        ConfigError: no such model, no vLLM, or vLLM refuses what it is asked for.
    """
    source = hub.source_of(run["model"])
    assert source.path is not None and source.gguf is None, "check has let a model through that vLLM cannot run"
    options = vllm_options("full", None)
    dtype = models.dtype_of(run["dtype"], torch.device("cpu"))
    described = models.describe(source, source.path, try_out)
    most = window(described.config.to_dict())
    if prompts.tokens:
        most = min(prompts.tokens + BESIDE, most or prompts.tokens + BESIDE)
    memory = {}
    if most:
        whole = Prompts(BLOCK * (most // BLOCK + 2), prompts.rows)
        if needed := footprint(described.config.to_dict(), dtype, whole):
            memory = {"max_model_len": most, "kv_cache_memory_bytes": needed.cache}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    while _running:
        _running.pop().llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    try:
        llm = LLM(
            described.where_from,
            revision=described.settings.get("revision"),
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=run["engine"]["tensor_parallel"],
            seed=0,
            generation_config="vllm",
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,  # so that a step's tokens are there when it ends
            max_num_seqs=prompts.rows,
            max_num_batched_tokens=max(prompts.chunk or most or 8192, prompts.rows),
            **memory,
            **options,
        )
    except (ValueError, NotImplementedError) as error:  # a ConfigError of the worker's among them
        raise ConfigError(f"engine=vllm: {first_line(error)}") from error
    _running.append(llm)
    try:
        generation = GenerationConfig.from_pretrained(described.where_from, **described.settings)
    except OSError:
        generation = None
    return Served(
        model=llm,
        tokenizer=described.tokenizer,
        name=source.name,
        revision=described.revision,
        window=window(described.config.to_dict()),
        stop_ids=models.stop_ids_of(generation, described.config, described.tokenizer),
        dense_layers=source.dense_layers,
    )
