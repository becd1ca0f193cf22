"""What a run is: the name of its arm, and the hash of all that may change one of its numbers.

No torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.budget import has_budget
from kvbench.memory.kinds import kv_in


def arm_name(config: Mapping[str, Any]) -> str:
    """The folder of a run's method and budget, for people: "quest-256", "full" of a method without
    a budget, "quest-256-int8" where keys and values are coded, and "quest-256-vllm" in vLLM.
    """
    budget = f"-{_size(config)}" if has_budget(config["method"]) else ""
    return f"{config['method']['name']}{budget}{_accounting(config)}{_kv(config)}{_backend(config)}"


def backend_name(config: Mapping[str, Any]) -> str:
    """What runs the model, "hf" or "vllm"."""
    return str(config["backend"]["name"])


def _size(config: Mapping[str, Any]) -> Any:
    return "preset" if config["budget"] is None else config["budget"]


def _accounting(config: Mapping[str, Any]) -> str:
    return "-unified" if config["protocol"]["accounting"] == "unified" else ""


def _kv(config: Mapping[str, Any]) -> str:
    kv = kv_in(config)
    return f"-{kv}" if kv.coded else ""


def _backend(config: Mapping[str, Any]) -> str:
    return "" if backend_name(config) == "hf" else f"-{backend_name(config)}"


def budget_of(config: Mapping[str, Any]) -> Any:
    """The budget that a run was asked for; None where its method has none: whatever was asked for
    is one run.
    """
    return config["budget"] if has_budget(config["method"]) else None


LOCAL = "local"  # an identity's word for a path to data: what it leads to counts, not where it lies

# What arms that share a prefill may differ in.
MAY_DIFFER = ("method", "budget", "kv", "probe")


def decodes_jointly(config: Mapping[str, Any]) -> bool:
    """Whether an arm of a sweep is to be decoded beside others, as far as its config says."""
    sweep, separate = config["sweep"], config["task"].get("own_prefill")
    return bool(
        sweep["shared_prefill"]
        and sweep["shared_decode"]
        and not separate
        and backend_name(config) == "hf"
    )


def starts_alone(config: Mapping[str, Any]) -> bool:
    """Whether an arm is served by an engine that serves no other arm: vLLM's, where it frees what
    the method drops.
    """
    if backend_name(config) == "hf":
        return False
    from kvbench.backends.vllm.plan import plan_of_run

    return plan_of_run(config).frees


def run_id(identity: Mapping[str, Any]) -> str:
    """12 hex digits naming `identity` (JSON values, finite numbers); key order does not matter, 1
    and 1.0 differ.
    """
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@functools.cache
def _earlier() -> dict[str, list[str]]:
    return json.loads(Path(__file__).with_name("earlier_ids.json").read_text())


def earlier_ids(run_id: str) -> list[str]:
    """Ids that runs of this identity have which kvbench shipped before ids were made of versions;
    the newest first.
    """
    return _earlier().get(run_id, [])
