"""A model's layers on a GPU in few launches: FlashInfer's operators between products of weights.

In transformers a layer of Llama's kind takes some forty launches beside its attention, here eight:
a norm is one, with the addition before it; so are queries, keys and values, their turn by the
positions, gate and up, SiLU with its product, and the last product with its addition. An operator
computes in float32 and rounds once, where transformers rounds in between.

Whether a model has such layers is seen from its modules and then tried: of one token each layer
must give attention the queries, keys and values that it gave, and return what it returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.attention import flashinfer
from kvbench.backends.hf import rotary
from kvbench.backends.hf.hooks import mailbox
from kvbench.backends.hf.layers import card_of, kept_layers, read_token
from kvbench.backends.hf.spread import devices_under
from kvbench.config import ConfigError, first_line
from kvbench.method import Shape

PROJECTIONS = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
GATED = [f"mlp.{name}_proj" for name in ("gate", "up")]
LINEAR = {*PROJECTIONS, *GATED, "self_attn.o_proj", "mlp.down_proj"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
HEAD_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]
UNIT = 8  # numbers that the operators read at once, 16 bytes
POSITION = 100  # of the token that is tried; most channels of a key are turned far by then
# How far what a layer computes may be from transformers', over its size. Rounding in bfloat16,
# which the two do in other places, makes up to .04 of it in SmolLM2-135M and Qwen2.5-Coder-0.5B;
# another formula, most of it.
NEAR = 0.2


class Product(NamedTuple):
    """Linear layers of the same input as one product.

    Attributes
    ----------
    weight, bias
        [outputs of all, inputs], and [outputs of all] or None.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def merging(cls, layers: Sequence[nn.Linear]) -> Product:
        """Of some layers, whose weights are views of it from here on."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(_merged([layer.weight for layer in layers]), _merged(biases) if biases else None)


def _merged(tensors: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, whole.split(list(map(len, tensors))), strict=True):
        tensor.data = part
    return whole


class RopeTable(NamedTuple):
    """Angles as FlashInfer reads them, made once in a pass.

    Attributes
    ----------
    angles
        [n, R] float32, of each token half of its cosines, then half of its sines; the other halves
        are the same.
    rows
        [n], the row of each token.
    """

    angles: Tensor
    rows: Tensor

    @classmethod
    def of(cls, embeddings: tuple[Tensor, Tensor], batch: int) -> RopeTable:
        """Of the model's own cosines and sines [1 or B, q, R], however it scales positions."""
        table: RopeTable | None = _tables.get(embeddings[0])
        if table is None:
            half = embeddings[0].shape[-1] // 2
            joined = torch.cat([part[..., :half] for part in embeddings], dim=-1)
            angles = joined.expand(batch, -1, -1).reshape(-1, 2 * half).float()
            rows = torch.arange(len(angles), dtype=torch.int32, device=angles.device)
            table = _tables[embeddings[0]] = cls(angles, rows)
        return table


_tables = WeakIdKeyDictionary()  # by the cosines


class FusedNorm:
    """An RMS norm, and the forward pass of its module."""

    def __init__(self, norm: Any) -> None:
        from flashinfer import rmsnorm

        self._rmsnorm, self._norm = rmsnorm, norm

    def __call__(self, x: Tensor) -> Tensor:
        """Vectors x [..., width] over their root mean square, times the weight."""
        return self.of(x.reshape(-1, x.shape[-1])).view(x.shape)

    def of(self, x: Tensor) -> Tensor:
        """Those of x [n, width], or [n, heads, D] of few channels."""
        norm = self._norm
        out: Tensor = self._rmsnorm(x, norm.weight, norm.variance_epsilon, enable_pdl=False)
        return out


class FusedLayer:
    """The forward pass of a decoder layer, or transformers' where hooks watch a part of it.

    Parameters
    ----------
    layer
        one that `fits`; its weights are merged.
    """

    def __init__(self, layer: Any) -> None:
        import flashinfer

        self.layer, self._package = layer, flashinfer
        self.attention = layer.self_attn
        projections = [layer.get_submodule(name) for name in PROJECTIONS]
        self._widths = [projection.out_features for projection in projections]
        self._projections = Product.merging(projections)
        self._gated = Product.merging([layer.get_submodule(name) for name in GATED])
        self._norm, self._parts = FusedNorm(layer.input_layernorm), list(layer.modules())
        parts = dict(layer.named_modules())
        self._head_norms = [FusedNorm(parts[name]) for name in HEAD_NORMS if name in parts]

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[B, q, width] as transformers'; the input is overwritten, but the first layer's."""
        layer, package = self.layer, self._package
        if any(part._forward_pre_hooks or part._forward_hooks for part in self._parts):
            return self.as_before(hidden_states, **kwargs)
        if self.attention.layer_idx == 0:
            hidden_states = hidden_states.clone()  # it may be theirs who call the model
        shape, norm = hidden_states.shape, layer.post_attention_layernorm
        hidden = hidden_states.reshape(-1, shape[-1])
        attended = self._attended(self._norm.of(hidden), shape, **kwargs)
        x = self.attention.o_proj(attended.reshape(len(hidden), -1))
        # hidden += x, and x becomes that, normed
        package.fused_add_rmsnorm(x, hidden, norm.weight, norm.variance_epsilon, enable_pdl=False)
        x, down = (
            package.silu_and_mul(F.linear(x, *self._gated), enable_pdl=False),
            layer.mlp.down_proj,
        )
        hidden.addmm_(x, down.weight.T)  # the product is added as it is stored
        return (hidden if down.bias is None else hidden + down.bias).view(shape)

    def as_before(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """What transformers' own layer makes of it."""
        out: Tensor = type(self.layer).forward(self.layer, hidden_states, **kwargs)
        return out

    def _attended(
        self,
        x: Tensor,
        shape: torch.Size,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention [B, q, Hq, D] of normed x [B * q, width]; `shape` is [B, q, width]."""
        attention, head_dim = self.attention, self.attention.head_dim
        parts = F.linear(x, *self._projections).split(self._widths, dim=1)
        heads = [part.view(len(x), -1, head_dim) for part in parts]  # queries, keys, values
        for at, norm in enumerate(self._head_norms):
            heads[at] = norm.of(heads[at])
        table = RopeTable.of(position_embeddings, shape[0])
        turned = self._package.apply_rope_with_cos_sin_cache(
            table.rows, heads[0].flatten(1), heads[1].flatten(1), head_dim, table.angles
        )
        states = [
            part.view(*shape[:2], -1, head_dim).transpose(1, 2) for part in (*turned, heads[2])
        ]
        if past_key_values is not None:
            states[1:] = past_key_values.update(*states[1:], attention.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        settings = {"dropout": 0.0, "scaling": attention.scaling, **kwargs}
        out: Tensor = attend(attention, *states, attention_mask, **settings)[0]
        return out


class _Trial:
    """The forward pass of a layer as it was, which tries the fused one beside it.

    Attributes
    ----------
    reason
        why it is not to be fused, if the trial has shown that.
    """

    def __init__(self, fused: FusedLayer) -> None:
        self._fused = fused
        self.reason: str | None = None

    def __call__(self, hidden_states: Tensor, past_key_values: Any, **kwargs: Any) -> Tensor:
        kwargs["past_key_values"] = past_key_values
        index, before = self._fused.attention.layer_idx, hidden_states.clone()
        out = self._fused.as_before(hidden_states, **kwargs)
        expected = past_key_values.states(index)
        try:
            fused = self._fused(before.clone(), **kwargs)
        except Exception as error:  # of a compiler, a driver or a GPU too old: whatever it is
            mailbox.call = None
            self.reason = f"FlashInfer's operators do not run here ({first_line(error)})"
            return out
        rounding = torch.finfo(out.dtype).eps * out.norm()  # of the sum with what came in
        near = (fused - out).norm() <= NEAR * (out - before).norm() + rounding
        for part, other in zip(past_key_values.states(index), expected, strict=True):
            near &= (part - other).norm() <= NEAR * other.norm()
        if not near:
            self.reason = "its layers compute something else than their parts say"
        return out


def fuse(model: PreTrainedModel, fused: str = "auto") -> str | None:
    """Have a model that is to run compute its layers so, where that can be.

    Parameters
    ----------
    model
        with "kvbench" attention, on its device, where it stays.
    fused
        "none"; "auto"; or "flashinfer", where what keeps a model from it is an error.

    Returns
    -------
    str | None
        Why its layers are as before; None: they are fused.

    Raises
    ------
    ConfigError
        "flashinfer", and they cannot be.
    """
    reason = "model.fused=none" if fused == "none" else _unfit(model) or _fuse(model)
    if reason and fused == "flashinfer":
        raise ConfigError(
            f"model.fused=flashinfer: {type(model).__name__}: {reason}; model.fused=auto takes what"
            " runs"
        )
    return reason


def _unfit(model: PreTrainedModel) -> str | None:
    """Why a model's layers cannot be fused, as far as its modules and the device say."""
    if model.device.type != "cuda":
        return f"{model.device.type} is not a CUDA device"
    if devices_under(model) > 1:
        return "its layers lie on several devices"
    if any(kept.has_states for kept in kept_layers(model).values()):
        return "some of its layers have a state"
    layers = _decoder_layers(model)
    if len(layers) != card_of(model).layers or not all(map(fits, layers)):
        return (
            "its layers are not attention and an MLP gated by SiLU, each after an RMS norm and of"
            " plain weights"
        )
    head_dim, dtype = layers[0].self_attn.head_dim, layers[0].self_attn.q_proj.weight.dtype
    return flashinfer.unfit(Shape(1, 1, 1, head_dim, (1,), dtype, model.device, 1.0, ()))


def _decoder_layers(model: PreTrainedModel) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "self_attn")]


def fits(layer: nn.Module) -> bool:
    """Whether a decoder layer has the parts that `FusedLayer` computes, and no others."""
    parts, weights = dict(layer.named_modules()), dict(layer.named_parameters())
    norms = NORMS | set(HEAD_NORMS) & parts.keys()
    if parts.keys() != LINEAR | norms | {"", "self_attn", "mlp", "mlp.act_fn"}:
        return False
    biased = {name for name in LINEAR if f"{name}.bias" in weights}
    expected = {f"{name}.weight" for name in LINEAR | norms} | {f"{name}.bias" for name in biased}
    return (
        weights.keys() == expected
        and all(type(parts[name]) is nn.Linear for name in LINEAR)
        and all(hasattr(parts[name], "variance_epsilon") for name in norms)
        and isinstance(parts["mlp.act_fn"], SiLUActivation | nn.SiLU)
        and all(biased >= set(group) or not biased & set(group) for group in (PROJECTIONS, GATED))
        and len({weight.dtype for weight in weights.values()}) == 1
        and not any(size % UNIT for weight in weights.values() for size in weight.shape)
    )


@torch.no_grad()
def _fuse(model: PreTrainedModel) -> str | None:
    """Fuse the layers of a model that is fit, and its last norm; why not, where a trial fails."""
    layers = _decoder_layers(model)
    fused = [FusedLayer(layer) for layer in layers]
    torch.cuda.empty_cache()  # of weights that were merged
    trials = [_Trial(layer) for layer in fused]
    try:
        for layer, trial in zip(layers, trials, strict=True):
            layer.forward = trial
        with rotary.angles_of([POSITION + 1]):  # what follows the length keeps none of this one's
            read_token(model, POSITION, windows=False)
    finally:
        for layer in layers:
            del layer.forward
    if reason := next((trial.reason for trial in trials if trial.reason), None):
        return reason
    for layer, forward in zip(layers, fused, strict=True):
        layer.forward = forward
    kind = type(layers[0].input_layernorm)
    for part in model.base_model.children():
        if type(part) is kind:
            part.forward = FusedNorm(part)
    return None
