"""Shows methods hidden states: what attention reads (`Needs.inputs`), and what it makes of them
(`Needs.layer_similarity`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.backends.hf.hooks import CountingCache, mailbox
from kvbench.backends.hf.layers import attention_modules
from kvbench.config import ConfigError
from kvbench.method import Needs


@contextmanager
def residuals_watched(model: PreTrainedModel, needs: Needs) -> Iterator[None]:
    """Show a cache each layer's hidden states before and after attention, or what attention reads,
    if a method needs them.

    Raises
    ------
    ConfigError
        the model's layers do not add attention to the hidden states before they go on with them.
    """
    handles = []
    try:
        for block in model.modules() if needs.layer_similarity else ():
            layer = getattr(getattr(block, "self_attn", None), "layer_idx", None)
            if layer is not None:
                after = _reads_residual(block).register_forward_pre_hook(
                    partial(_tell_residual, layer)
                )
                handles += [
                    block.register_forward_pre_hook(_note_residual, with_kwargs=True),
                    after,
                ]
        if needs.layer_similarity and not handles:
            raise ConfigError(
                f"{type(model).__name__}: no decoder layers with self_attn; the method compares"
                " hidden states around it"
            )
        with inputs_noted(model) if needs.inputs else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def inputs_noted(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile a call of a layer's attention has what its module reads, see `hooks.Call`."""
    handles = [
        module.register_forward_pre_hook(_note_inputs, with_kwargs=True)
        for module in attention_modules(model).values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_inputs(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mailbox.inputs = args[0] if args else kwargs["hidden_states"]


def _reads_residual(block: torch.nn.Module) -> torch.nn.Module:
    """The part of a decoder layer that reads the hidden states once attention is added to them."""
    names = ["pre_feedforward_layernorm", "post_attention_layernorm"]
    if hasattr(block, "post_feedforward_layernorm"):  # the norms come after attention and MLP
        names[1] = "mlp"
    part = next((getattr(block, name) for name in names if hasattr(block, name)), None)
    if part is None:
        raise ConfigError(
            f"{type(block).__name__}: adds attention and MLP at once; the method compares what is"
            " between"
        )
    return part


def _note_residual(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    mailbox.residual = None
    if isinstance(cache, CountingCache):
        mailbox.residual = cache, args[0] if args else kwargs["hidden_states"]


def _tell_residual(layer: int, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
    note, mailbox.residual = mailbox.residual, None
    if note is not None:
        cache, before = note
        cache.residual(layer, before, args[0])
