"""A run's config as objects, made once of what was composed and checked as they are made.

Whatever runs, from here on reads attributes; nothing looks keys up. What a machine or a model's
files must show is checked by `kvbench.cli.checks`. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Self, get_args

from kvbench.backends.protocol import Protocol
from kvbench.budget import Accounting, Budget
from kvbench.config import (
    ConfigError,
    MethodConfig,
    TargetConfig,
    Whole,
    check_fields,
    check_rules,
    check_valid,
    show,
)
from kvbench.memory.kinds import KV, kv_of
from kvbench.models.hub import ModelConfig


@dataclass(frozen=True)
class TaskConfig(TargetConfig):
    """A task with its options, and what its file says of it.

    Attributes
    ----------
    limit
        at most this many samples; None: all.
    new_tokens
        generated for each sample; None: each sample says so.
    own_prefill
        each arm of a sweep reads the prompts by itself.
    one_by_one
        no two samples are generated together.
    """

    limit: Annotated[int | None, Whole(1)] = None
    new_tokens: int | None = None
    own_prefill: bool = False
    one_by_one: bool = False

    @property
    def token_lengths(self) -> list[int]:
        """Prompt lengths in tokens; empty where the task has none, or counts in another unit."""
        lengths = self.options.get("lengths") or []
        return list(lengths) if self.options.get("unit", "tokens") == "tokens" else []


@dataclass(frozen=True)
class BackendConfig:
    """What runs the model.

    Attributes
    ----------
    version
        raised when its numbers change.
    tensor_parallel
        processes of vLLM that share a model's heads.
    """

    name: Literal["hf", "vllm"]
    version: int
    about: str = ""
    tensor_parallel: Annotated[int, Whole(1)] = 1


@dataclass(frozen=True)
class ProbeConfig:
    """Steps that are compared with full attention: every n-th; 0: none."""

    every: Annotated[int, Whole(0)]


@dataclass(frozen=True)
class SweepConfig:
    """What the arms of a sweep share; see `conf/config.yaml`."""

    shards: Annotated[int, Whole(1)]
    shared_prefill: bool
    shared_decode: bool


@dataclass(frozen=True)
class RunConfig:
    """A run: model x method x budget x task, under a protocol.

    Attributes
    ----------
    budget, sizes
        as asked for: tokens, a fraction of the prompt, or None, the method's preset; and as the
        method counts it.
    resolved
        all keys as they were composed: what run.yaml records and run ids are made of.

    All others are described in `conf/config.yaml`.

    Raises
    ------
    ConfigError
        names the key, its value and what would be right.
    """

    model: ModelConfig
    method: MethodConfig
    task: TaskConfig
    kv: KV
    backend: BackendConfig
    protocol: Protocol
    probe: ProbeConfig
    sweep: SweepConfig
    budget: int | float | None
    batch: Annotated[int, Whole(1)]
    seed: Annotated[int, Whole(0, 2**63 - 1)]
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    attention: Literal["auto", "reference", "torch", "cpu", "flashinfer"]
    threads: Annotated[int | None, Whole(1, 1024)]
    results_dir: str
    memory_check: bool
    cuda_graphs: bool
    smoke: bool
    resolved: Mapping[str, Any]
    sizes: Budget = field(init=False)

    @classmethod
    def of(cls, resolved: Mapping[str, Any]) -> Self:
        """The config of these keys, of which none is missing or unknown."""
        for group in ("model", "method", "task"):
            _check_name(group, resolved[group].get("name"))
        for group in ("method", "task"):
            check_rules(group, resolved[group])
        kv = {key: value for key, value in resolved["kv"].items() if key in KV._fields}
        plain = {key.name: resolved[key.name] for key in fields(cls) if key.name in resolved}
        return cls(
            **plain
            | {
                "model": ModelConfig.of(resolved["model"]),
                "method": MethodConfig.of(resolved["method"]),
                "task": TaskConfig.of(resolved["task"]),
                "kv": kv_of(kv),
                "backend": BackendConfig(**resolved["backend"]),
                "protocol": Protocol(**resolved["protocol"]),
                "probe": ProbeConfig(**resolved["probe"]),
                "sweep": SweepConfig(**resolved["sweep"]),
                "resolved": resolved,
            }
        )

    def __post_init__(self) -> None:
        layers = self.model.dense_layers
        if not isinstance(layers, list | None) or any(
            type(layer) is not int for layer in layers or ()
        ):
            raise ConfigError(
                f"model.dense_layers={show(layers)}: expected a list of layers, such as [0,1]"
            )
        check_fields(self)
        for part in ("model", "task", "backend", "probe", "sweep"):
            check_fields(getattr(self, part), f"{part}.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={show(self.device)}: expected auto | cpu | cuda | cuda:N")
        self._check_device_map()
        if self.batch > 1 and (reason := next(self._no_batch(), None)):
            raise ConfigError(f"batch={self.batch}: {reason}; expected 1")
        check_valid("method", self.method.options, self.method.valid or {})
        check_valid("task", self.task.options, self.task.valid or {})
        if self.protocol.question != "with" and self.task.one_by_one:
            raise ConfigError(
                f"protocol.question={self.protocol.question}: task={self.task.name} asks none;"
                " expected with"
            )
        _check_minimum(self.method.minimum)
        object.__setattr__(self, "sizes", self._sizes())

    @property
    def requested_budget(self) -> int | float | None:
        """What was asked for; None where the method has no budget: all are one run."""
        return self.budget if self.method.has_budget else None

    def _sizes(self) -> Budget:
        rule = self.protocol.accounting, self.protocol.generated
        budget = Budget.of(self.budget, self.method, *rule)
        return budget if self.method.has_budget else Budget.of(None, self.method, *rule)

    @property
    def decodes_jointly(self) -> bool:
        """Whether an arm of a sweep decodes beside others, as far as its config says."""
        shares = self.sweep.shared_prefill and self.sweep.shared_decode
        return shares and not self.task.own_prefill and self.backend.name == "hf"

    def _check_device_map(self) -> None:
        device_map = self.model.device_map
        if device_map is not None and self.device not in ("auto", "cuda"):
            raise ConfigError(
                f"device={self.device}: model.device_map={device_map} is about all GPUs; expected"
                " auto | cuda"
            )
        if device_map is not None and self.model.fused == "flashinfer":
            raise ConfigError(
                f"model.fused=flashinfer: the layers of model.device_map={device_map} lie on"
                " several devices; model.fused=auto takes what runs"
            )
        if device_map is not None and self.task.own_prefill:
            raise ConfigError(
                f"model.device_map={device_map}: task={self.task.name} measures one device;"
                " expected null"
            )

    def _no_batch(self) -> Iterator[str]:
        """What keeps samples from being generated together."""
        if self.task.one_by_one:
            yield f"task={self.task.name} measures each sample by itself"
        if self.probe.every:
            yield f"probe.every={self.probe.every} compares each sample by itself"
        if self.protocol.samples > 1:
            answers = f"protocol.samples={self.protocol.samples}"
            yield f"{answers} has each prompt answered by itself, from one prefill"


def _check_name(group: str, name: object) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(
            f"{group}.name={show(name)}: expected a name, which results are kept under"
        )


def _check_minimum(minimum: Any) -> None:
    right = isinstance(minimum, Mapping) and all(
        least is None or type(least) is int for least in minimum.values()
    )
    if minimum is not None and not (right and minimum.keys() <= set(get_args(Accounting))):
        raise ConfigError(
            f"method.minimum={show(minimum)}: expected tokens by accounting, such as {{paper: 1,"
            " unified: 1}"
        )
