"""A run's model inside vLLM: prompts in, generations with their audits out.

vLLM itself is imported when it starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from kvbench.backends.hf import loading as models
from kvbench.backends.run_config import RunConfig
from kvbench.backends.vllm.plan import Plan, plan_of_run
from kvbench.config import ConfigError, first_line
from kvbench.engine.batch import Generation
from kvbench.engine.request import Progress, Stops
from kvbench.models import hub
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Footprint, Prompts

EXTRA = 512  # tokens beside those of `task.lengths`: of a chat template, and what ends a prompt
BLOCK = 128  # tokens of a block of vLLM's memory, or a multiple of them
# times the budget, and EXTRA tokens: room for what is kept of a prompt, blocks and windows outside
# C too
ROOM = 2

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
        dtype: torch.dtype = self.model.llm_engine.model_config.dtype  # type: ignore[operator, union-attr]
        return dtype

    def generate(
        self,
        plan: Plan,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stops: Stops = Stops(),  # noqa: B008 (frozen)
        progress: Progress | None = None,
    ) -> tuple[Generation, list[dict[str, Any]]]:
        """Generate for a batch of prompts, greedily; see `kvbench.engine.batch.generate`.

        Times are of the engine's steps, as they are seen from outside: the first token is there
        when every prompt has its own, and decode steps are those after it.

        Parameters
        ----------
        plan
            what runs.
        stops
            where rows end; no row may begin with a token of `not_first`, some of `stop_ids`.

        Returns
        -------
        tuple[Generation, list[dict[str, Any]]]
            The generation, and each prompt's audit.

        Raises
        ------
        ConfigError
            vLLM refuses a prompt.
        FloatingPointError
            NaN or inf in the logits of one of them.
        """
        llm: Any = self.model
        llm.collective_rpc("kvbench_run", args=(asdict(plan),))
        read, start = max(map(len, prompts)), time.perf_counter()
        generation, names = Generation([[] for _ in prompts], 0.0), []
        how = _sampling(max_new_tokens, stops)
        try:
            names = [
                llm.llm_engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, how)
                for row, prompt in enumerate(prompts)
            ]
            for took in _steps(llm.llm_engine, generation.tokens, stops):
                if generation.ttft_s:
                    generation.step_ms.append(took * 1e3)
                elif all(generation.tokens):
                    generation.ttft_s = time.perf_counter() - start
                if progress and all(generation.tokens):
                    progress(read + max(map(len, generation.tokens)), read + max_new_tokens)
        except ValueError as error:
            raise ConfigError(f"backend=vllm: {first_line(error)}") from error
        finally:  # none, but after an error
            llm.llm_engine.abort_request([str(row) for row in range(len(prompts))])
        reports = llm.collective_rpc("kvbench_reports")[0]
        if any(reports[name].pop("not_finite", False) for name in names):
            raise FloatingPointError("the model's logits are NaN or infinite")
        generation.audit = reports[names[0]]
        if generation.step_ms:
            generation.tt2t_s = generation.ttft_s + generation.step_ms[0] / 1e3
        return generation, [reports[name] for name in names]


def _sampling(max_new_tokens: int, stops: Stops) -> Any:
    """What vLLM does with each prompt: the likeliest tokens, until one ends it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    assert set(stops.not_first) <= set(stops.stop_ids)
    return SamplingParams(
        temperature=0,
        max_tokens=max_new_tokens,
        min_tokens=1 if stops.not_first else 0,
        stop_token_ids=sorted(stops.stop_ids),
        ignore_eos=True,  # what ends a row is among `stop_ids`, or is not to end it
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _steps(engine: Any, tokens: list[list[int]], stops: Stops) -> Iterator[float]:
    """Run vLLM's engine until every request has ended, whose new tokens go to `tokens`.

    Yields seconds of each step.
    """
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - began
        for output in outputs:
            row = int(output.request_id)
            tokens[row] += output.outputs[0].token_ids
            if not output.finished and stops.ends(tokens[row]):
                engine.abort_request([output.request_id])
        yield took


def _memory(
    card: ModelCard, dtype: torch.dtype, prompts: Prompts, plan: Plan
) -> tuple[int | None, dict[str, int]]:
    """The longest text that a run may have, in tokens, and what vLLM shall reserve for it.

    None, {}: not known.
    """
    most = card.context_length
    if prompts.tokens:
        most = min(prompts.tokens + EXTRA, most or prompts.tokens + EXTRA)
    if not most:
        return None, {}
    tokens = BLOCK * (most // BLOCK + 2)
    if plan.frees:
        tokens += _extra_tokens(plan, tokens, card.layers)
    required = Footprint.of(card, dtype, Prompts(tokens, prompts.rows))
    return most, {} if required is None else {
        "max_model_len": most,
        "kv_cache_memory_bytes": required.cache,
    }


def _extra_tokens(plan: Plan, tokens: int, layers: int) -> int:
    """What an engine that frees prompts takes beside them, in tokens of all layers, at most.

    What is kept of a prompt; and vLLM shares out its blocks among groups of as many layers as there
    are dense ones, or sparse ones, whichever are fewer, of which the last may be short of layers.
    """
    budget = plan.sizes().size
    fewer = min(len(plan.dense_layers), layers - len(plan.dense_layers))
    short = -layers % fewer if fewer > 0 else 0
    return min(ROOM * int(budget or 0) + EXTRA, tokens) + tokens * short // layers


def _dense_layers(run: RunConfig, source: hub.ModelSource) -> Sequence[int]:
    """What `protocol.dense_layers` of a run names, before the model is there to be counted."""
    named = {
        "auto": source.dense_layers,
        "method": run.method.published_dense_layers or (),
    }
    requested = run.protocol.dense_layers
    return named[requested] if isinstance(requested, str) else requested


def load(
    run: RunConfig,
    prompts: Prompts,
    try_out: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
) -> Served:
    """Start vLLM with the model that a run asks for.

    Another that this process has started before ends.

    Where the run's method frees prompts the engine is started with it, for this arm alone; else
    arms share it.

    Parameters
    ----------
    run
        its config, checked.
    prompts
        the largest to come.
    try_out
        as of `kvbench.backends.hf.loading.load`.

    Raises
    ------
    ConfigError
        no such model, no vLLM, or vLLM refuses what it is asked for.
    """
    source = run.model.source
    assert source.path is not None and source.gguf is None, (
        "check has let a model through that vLLM cannot run"
    )
    dtype = models.dtype_of(run.dtype, torch.device("cpu"))
    described = models.describe(source, try_out)
    llm = _start(
        described,
        dtype,
        prompts,
        plan_of_run(run, _dense_layers(run, source)),
        run.backend.tensor_parallel,
    )
    try:
        generation = GenerationConfig.from_pretrained(described.where_from, **described.settings)
    except OSError:
        generation = None
    return Served(
        model=llm,
        tokenizer=described.tokenizer,
        name=source.name,
        revision=described.revision,
        card=described.card,
        stop_ids=models.stop_ids_of(generation, described.config, described.tokenizer),
        dense_layers=source.dense_layers,
    )


def _start(
    described: models.Described,
    dtype: torch.dtype,
    prompts: Prompts,
    plan: Plan,
    tensor_parallel: int,
) -> Any:
    """vLLM's `LLM`, the one of this process, which frees prompts if the plan does.

    Raises
    ------
    ConfigError
        there is no vLLM, or it refuses what it is asked for.
    """
    options = (plan if plan.frees else Plan("full", None)).engine_options()
    most, memory = _memory(described.card, dtype, prompts, plan)
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
            tensor_parallel_size=tensor_parallel,
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
        raise ConfigError(f"backend=vllm: {first_line(error)}") from error
    _running.append(llm)
    return llm
