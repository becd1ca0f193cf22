"""Linear layers that read their weight once, at the speed of memory, where a few tokens meet it: bfloat16 on a CPU.

A decode step is little else than this reading. SmolLM2 on 2 cores: 269 MB in 16 ms, where oneDNN takes 28, or 17 with
weights that it has packed, and a token of a run in 32 ms instead of 43. What is computed is the same but for the order
of a sum's terms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench.attention import kernels

FEW = 8  # rows up to which the kernel is no slower
_BFLOAT16 = np.uint16(0)  # as the kernel takes it: NumPy has none


class StreamedLinear(nn.Module):
    """`linear`, of whose weight and bias it is another owner; it has no gradients.

    Args:
        linear: bfloat16 on the CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        assert linear.weight.is_contiguous(), "the kernel finds a row by its number alone"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features], bfloat16."""
        rows = x.shape[:-1].numel()
        fits = x.dtype == self.weight.dtype == torch.bfloat16 and x.shape[-1] == self.in_features
        if rows > FEW or not fits:  # which torch computes, or refuses: the kernel knows addresses alone
            return nn.functional.linear(x, self.weight, self.bias)
        x, out = x.contiguous(), x.new_empty(*x.shape[:-1], self.out_features)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        threads = min(torch.get_num_threads(), kernels.pieces_of(self.out_features, kernels.OUTPUTS_PIECE))
        addresses = x.data_ptr(), self.weight.data_ptr(), bias, out.data_ptr()
        sizes = rows, self.in_features, self.out_features, x.element_size()
        kernels.products(threads, *addresses, *sizes, _BFLOAT16)
        return out

    def extra_repr(self) -> str:
        """As `nn.Linear` describes itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def stream(model: PreTrainedModel) -> None:
    """Replace every `nn.Linear` of a model that is to run, where streamed ones are quicker; nothing elsewhere."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Linear:
                setattr(parent, name, StreamedLinear(layer))
    StreamedLinear(nn.Linear(1, 1, dtype=torch.bfloat16))(torch.zeros(1, 1, dtype=torch.bfloat16))  # compiled now
