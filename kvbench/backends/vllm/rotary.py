"""A vLLM model's rotary positions, see `kvbench.engine.positions.Rotary`."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.config import ConfigError
from kvbench.engine.positions import Angles

# Classes of vLLM whose angles follow from the position alone, whatever the length
FIXED = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


class VLLMRotary:
    """Turns as one of vLLM's rotary modules makes them, in float32.

    Parameters
    ----------
    module
        a `RotaryEmbedding` of vLLM.
    """

    def __init__(self, module: Any) -> None:
        table = module._compute_cos_sin_cache().float()
        # a factor on the attention stays in the keys
        size = table[:1].norm() / table.shape[1] ** 0.5 * 2**0.5
        self._cos, self._sin = (table / size).chunk(2, dim=1)
        self._neighbours = not module.is_neox_style

    def angles(self, by: torch.Tensor) -> Angles:
        """cos and sin [B, L, n, R] of a turn by [B, L, n] positions.

        R of D dimensions are turned.
        """
        cos, sin = self._cos[by], self._sin[by]
        if self._neighbours:
            return cos.repeat_interleave(2, dim=3), sin.repeat_interleave(2, dim=3)
        return torch.cat([cos, cos], dim=3), torch.cat([sin, sin], dim=3)

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D] of any dtype, turned in float32."""
        cos, sin = (
            part.repeat_interleave(vectors.shape[1] // part.shape[1], dim=1) for part in angles
        )
        turned, rest = vectors.float().split([cos.shape[3], vectors.shape[3] - cos.shape[3]], dim=3)
        if self._neighbours:
            across = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=4).flatten(3)
        else:
            first, second = turned.chunk(2, dim=3)
            across = torch.cat([-second, first], dim=3)
        return torch.cat([turned * cos + across * sin, rest], dim=3).to(vectors.dtype)


def rotary_of(model: torch.nn.Module) -> VLLMRotary:
    """The rotary positions of a model.

    Raises
    ------
    ConfigError
        it has none, several, or some that change with the length.
    """
    modules = {id(module): module for module in model.modules() if hasattr(module, "cos_sin_cache")}
    kinds = sorted({type(module).__name__ for module in modules.values()})
    if len(modules) != 1 or kinds[0] not in FIXED:
        raise ConfigError(
            f"the model turns keys by {', '.join(kinds) or 'nothing'}; use positions=original"
        )
    return VLLMRotary(*modules.values())
