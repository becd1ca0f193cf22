"""What a run asks for that vLLM cannot give, found before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError
from kvbench.models import hub


def refuse_unfit(run: RunConfig, source: hub.ModelSource) -> None:
    """Refuse a config that `backend=vllm` cannot run.

    Parameters
    ----------
    run
        its config.
    source
        where its model comes from.

    Raises
    ------
    ConfigError
        names the key, the value and what would be right.
    """
    if reason := next(_unfit(run, source), None):
        raise ConfigError(f"{reason} (backend=vllm)")


def _unfit(run: RunConfig, source: hub.ModelSource) -> Iterator[str]:
    if run.task.one_by_one:
        yield (
            f"task={run.task.name}: its steps are given or timed one by one; expected a task whose"
            " outputs are scored"
        )
    expected = {
        "attention": (run.attention, ("auto",)),
        "kv": (str(run.kv), ("native",)),
        "device": (run.device, ("auto", "cpu")),
        "model.device_map": (run.model.device_map, (None,)),
        "model.fused": (run.model.fused, ("auto", "none")),
        "probe.every": (run.probe.every, (0,)),
        "protocol.question": (run.protocol.question, ("with",)),
        "protocol.temperature": (run.protocol.temperature, (0,)),
    }
    for key, (value, right) in expected.items():
        if value not in right:
            words = " | ".join(
                "null" if option is None else str(option).lower() for option in right
            )
            typed = f"{value:g}" if isinstance(value, float) else str(value).lower()
            yield f"{key}={typed}: vLLM does that by itself, or not at all; expected {words}"
    if run.model.card().latent_dim:
        yield (
            f"model={source.name}: vLLM has a memory of its own for latent attention, which methods"
            " do not reach; expected backend=hf"
        )
    if source.path is None or source.gguf is not None:
        yield (
            f"model={source.name}: vLLM runs trained weights of a folder or the hub, and no others"
        )
