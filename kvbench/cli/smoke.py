"""`smoke=true`: what a config asks for, made small: the model that kvbench ships, short prompts, a
few samples.

Methods, budgets, protocol and task stay, so that a sweep made for large GPUs is tried out in
minutes on any machine. Applied wherever a config has been composed. Imports no torch.
"""

from __future__ import annotations

import copy
from typing import Any

from omegaconf import DictConfig, ListConfig, open_dict

from kvbench.config import shipped

MODEL = "tiny"
# every task has room in these; the longer comes first, as few samples reach the second
LENGTHS = (2048, 1024)
LIMIT = 4
NEW_TOKENS = 64


def applied(config: DictConfig) -> DictConfig:
    """The config that runs: the given one or, where it says `smoke=true`, a small one in its place.

    Parameters
    ----------
    config
        composed, without Hydra's own part. It is not changed; what is wrong in it is left for the
        check.
    """
    if config.get("smoke") is not True:
        return config
    small = copy.deepcopy(config)
    with open_dict(small):
        small.model = {**(shipped("model", MODEL) or {}), "device_map": None, "fused": "auto"}
        small.device = small.dtype = "auto"
        task = small.task
        task.limit = _at_most(LIMIT, task.get("limit"))
        lengths = task.get("lengths")
        whole = isinstance(lengths, ListConfig) and all(type(length) is int for length in lengths)
        # ready-made samples have the lengths that they have
        if whole and task.get("data_dir") is None:
            task.lengths = [
                min(pair) for pair in zip(sorted(lengths, reverse=True), LENGTHS, strict=False)
            ]
        if "max_length" in task:
            task.max_length = _at_most(LENGTHS[0], task.max_length)
        if "max_new_tokens" in task:
            task.max_new_tokens = _at_most(NEW_TOKENS, task.max_new_tokens)
    return small


def _at_most(most: int, value: Any) -> Any:
    """A whole number or null (no bound) cut to `most`; anything else as it is."""
    if value is None:
        return most
    return min(value, most) if type(value) is int else value
