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

from kvbench.backends.run_config import RunConfig


def arm_name(config: RunConfig) -> str:
    """The folder of a run's method and budget, for people: "quest-256", "full" of a method without
    a budget, "quest-256-int8" where keys and values are coded, and "quest-256-vllm" in vLLM.
    """
    name, kv = config.method.name, f"-{config.kv}" if config.kv.coded else ""
    size = "preset" if config.budget is None else config.budget
    budget = f"-{size}" if config.method.has_budget else ""
    accounting = "-unified" if config.protocol.accounting == "unified" else ""
    backend = "" if config.backend.name == "hf" else f"-{config.backend.name}"
    return f"{name}{budget}{accounting}{kv}{backend}"


LOCAL = "local"  # an identity's word for a path to data: what it leads to counts, not where it lies

# What arms that share a prefill may differ in.
MAY_DIFFER = ("method", "budget", "kv", "probe")


def starts_alone(config: RunConfig) -> bool:
    """Whether an arm is served by an engine that serves no other arm: vLLM's, where it frees what
    the method drops.
    """
    if config.backend.name == "hf":
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
