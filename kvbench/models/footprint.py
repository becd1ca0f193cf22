"""What a run takes of memory at least, by its model's card, and what is free.

The estimates are lower bounds, so that nothing is refused that might run: weights, keys and values
of the longest prompt, and the widest tensors of one chunk of its prefill. What cannot be known here
(indexes, buffers, what a library keeps) comes on top.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from kvbench.config import ConfigError
from kvbench.memory.codecs import Codecs
from kvbench.memory.kinds import KV, NATIVE
from kvbench.models.card import ModelCard

GIB = 2**30


class Prompts(NamedTuple):
    """The largest prompts of a run.

    Attributes
    ----------
    tokens
        of a row, the generated ones included; 0 where they are not known before the tokenizer is.
    rows
        that are generated together.
    chunk
        tokens of a forward pass; None: all.
    """

    tokens: int
    rows: int = 1
    chunk: int | None = None


class Footprint(NamedTuple):
    """Bytes that a run takes at least.

    Attributes
    ----------
    weights
        of the model.
    cache
        keys and values of all layers.
    activations
        of one forward pass of the prefill.
    """

    weights: int
    cache: int
    activations: int

    @classmethod
    def of(
        cls, card: ModelCard, dtype: torch.dtype, prompts: Prompts, kv: KV = NATIVE
    ) -> Footprint | None:
        """The bytes of a model and its prompts, keys and values as the host holds them.

        None: the card does not say.
        """
        if not card.parameters:
            return None
        at_once = min(prompts.tokens, prompts.chunk or prompts.tokens) * prompts.rows
        codecs = Codecs.of(kv, "host", card.head_dim, dtype, card.latent_dim)
        entry = codecs.nbytes * card.kv_heads
        # Beside the hidden states the inner ones of the MLP, of a gated one twice, and their
        # product.
        wide = 2 * card.hidden_size + card.mlp_width
        return cls(
            weights=card.parameters * dtype.itemsize,
            cache=entry * card.entries(prompts.tokens) * prompts.rows,
            activations=wide * at_once * dtype.itemsize,
        )

    def refuse_too_large(
        self,
        device: torch.device,
        home: str,
        model: str,
        prompts: Prompts,
        free: Mapping[str, int],
    ) -> None:
        """Refuse a run that cannot fit.

        Parameters
        ----------
        device
            that computes.
        home
            of keys and values, as in `Needs.home`; "by_layer" leaves open what of them either tier
            takes.
        model
            what messages call the model.
        prompts
            those that these bytes are of.
        free
            bytes free, by "device" and "host"; what is not known is absent.

        Raises
        ------
        ConfigError
            names the key that takes most, the estimate, what is free and what would be right.
        """
        for tier, parts in self._by_tier(device, home).items():
            total = sum(parts.values())
            if total <= free.get(tier, total):
                continue
            listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
            key = f"task.lengths: {prompts.tokens} tokens x {prompts.rows}"
            right = "shorter prompts, fewer rows or a smaller model"
            if parts.get("weights", 0) > free[tier]:
                key, right = f"model={model}", "a smaller model"
            raise ConfigError(
                f"{key}: takes {total / GIB:.1f} GiB of {tier} memory at least ({listed}), and"
                f" {free[tier] / GIB:.1f} are free; choose {right} (memory_check=false tries all"
                " the same)"
            )

    def _by_tier(self, device: torch.device, home: str) -> dict[str, dict[str, int]]:
        """The parts that lie in each memory."""
        resting = {"weights": self.weights, "activations": self.activations}
        cache = {"KV cache": self.cache}
        if device.type == "cpu":
            return {"host": resting | cache}
        if home == "device":
            return {"device": resting | cache}
        return {"device": resting} | ({"host": cache} if home == "host" else {})


def free_memory(*devices: torch.device) -> dict[str, int]:
    """Bytes free on the host and on devices with a memory of their own, where that is known."""
    free = {"host": host} if (host := _free_on_host()) is not None else {}
    if devices[0].type == "cuda":
        gc.collect()  # caches and engines refer to each other
        free["device"] = sum(_free_on(device) for device in devices)
    return free


def _free_on(device: torch.device) -> int:
    """What nobody has of a GPU, and what torch reserves without a tensor in it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _free_on_host() -> int | None:
    """What Linux says is available, or what a container's limit leaves of it; None elsewhere."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # files it has read make room
        return min(available, limit - used + int(usage["inactive_file"]))
    except (OSError, ValueError, LookupError):  # "max" is no number: there is no limit
        return available
