"""A model's layers in bfloat16 on a CPU, reading their weights at the speed of memory.

A decode step is little else than this reading, and the steps of Python from one tensor to the next;
so what stands between two weights is computed with them. Beside transformers' own layers, results
differ by the order of a sum's terms and in that numbers are not rounded between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)

from kvbench.kernels import layers as kernels
from kvbench.kernels.library import why_missing
from kvbench.memory.transfer import move_weights

FEW = 8  # rows up to which the kernels are no slower
# outputs whose weights are widened at once: they are multiplied while a cache holds them
BLOCK = 1024


def _few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels, which know addresses alone, take x [..., inputs] for a weight.

    What they do not take is torch's, to compute or to refuse.
    """
    fits = x.dtype == weight.dtype == torch.bfloat16 and x.shape[-1] == weight.shape[-1]
    return fits and x.shape[:-1].numel() <= FEW


@functools.cache
def slow_in_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices one number after another: on x86 without AVX512.

    A prompt then takes four times as long as in float32. Arm, for which torch has other names, is
    not measured.
    """
    return torch.cpu.get_capabilities().get("avx512_bw") is False


def _widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer of bfloat16 computed in float32, some outputs at a time.

    A copy of all weights would be written to memory and read from it.
    """
    wide, out = x.float(), x.new_empty(*x.shape[:-1], len(weight))
    for first in range(0, len(weight), BLOCK):
        part = slice(first, first + BLOCK)
        out[..., part] = F.linear(
            wide, weight[part].float(), None if bias is None else bias[part].float()
        )
    return out


class StreamedLinear(nn.Linear):
    """y = x . weight^T + bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features]."""
        weight, bias = self.weight, self.bias
        if not _few(x, weight):
            if x.dtype == weight.dtype == torch.bfloat16 and slow_in_bfloat16():
                return _widened(x, weight, bias)
            return super().forward(x)
        x, out = x.contiguous(), x.new_empty(*x.shape[:-1], len(weight))
        kernels.products(x, weight, bias, out)
        return out


class StreamedNorm(LlamaRMSNorm):
    """Vectors over their root mean square, times a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] of x [..., width]."""
        weight = self.weight
        if not _few(x, weight):
            return super().forward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.normed(x, weight, self.variance_epsilon, out)
        return out


class StreamedMLP(LlamaMLP):
    """The feed-forward part, of SiLU and without biases."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] of x [..., width]."""
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        if not _few(x, weights[0]):
            return super().forward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.gated(x, weights, out)
        return out


class StreamedAttention(LlamaAttention):
    """Projections without biases, rotary positions, and attention as the model's settings say."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers'."""
        if not _few(hidden_states, self.q_proj.weight):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
        query, key, value = self._projected(hidden_states.contiguous(), position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def _projected(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Queries, keys and values, [B, heads, q, D] each, of x [B, q, inputs].

        Angles are [1 or B, q, D].
        """
        batch, many = x.shape[:2]
        head_dim = self.head_dim
        weights = [part.weight for part in (self.q_proj, self.k_proj, self.v_proj)]
        outs = [x.new_empty(batch, many, len(weight) // head_dim, head_dim) for weight in weights]
        turns = [part.expand(batch, -1, -1).contiguous() for part in angles]
        kernels.rotated(x, weights, turns, outs)
        return [out.transpose(1, 2) for out in outs]


STREAMED: dict[type, type] = {
    nn.Linear: StreamedLinear,
    LlamaRMSNorm: StreamedNorm,
    LlamaMLP: StreamedMLP,
    LlamaAttention: StreamedAttention,
}


def _is_plain(module: nn.Module) -> bool:
    """Whether the kernels compute what a module does: without biases between its parts, by SiLU."""
    parts = [part for part in module.children() if isinstance(part, nn.Linear)]
    silu = isinstance(getattr(module, "act_fn", None), SiLUActivation | None)
    contiguous = all(weight.is_contiguous() for weight in module.parameters())
    return silu and contiguous and all(part.bias is None for part in parts)


def stream(model: PreTrainedModel) -> None:
    """Have a model that is to run read its weights so, where that is quicker; nothing elsewhere.

    All linear layers do, and what lies between them in the models of Llama's kind; the weights move
    into large pages.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or why_missing() is not None:
        return
    for module in model.modules():
        if type(module) in STREAMED and _is_plain(module):
            module.__class__ = STREAMED[type(module)]
    move_weights(model.parameters())
