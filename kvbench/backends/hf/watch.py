"""Watches a model for the passes that a `KVCache` is handed to; others stay as they were.

Attention sees neither token ids nor what `generate` was given: hooks show both to the cache as they
come to the model, which attends through kvbench from the one hook to the other and no longer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import PreTrainedModel

from kvbench.backends.hf import rotary
from kvbench.backends.hf.given import check_length
from kvbench.backends.hf.hooks import CountingCache, begin_attending, end_attending, mailbox
from kvbench.backends.hf.layers import card_of
from kvbench.backends.hf.model import refuse_compiled, refuse_compiled_layers, refuse_training
from kvbench.backends.hf.runner import read_again
from kvbench.config import ConfigError


class WatchedCache(CountingCache):
    """A cache that is told of its model's passes.

    Attributes
    ----------
    model
        it was made for.
    prompt_length
        columns of a prompt that several passes read; None: one reads it.
    expected
        tokens of a row once the pass that has begun is over.
    """

    model: PreTrainedModel
    prompt_length: int | None = None
    expected = 0

    def before(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Look at what a forward pass of the model is given; returns what it shall be given."""
        raise NotImplementedError

    def after(self) -> None:
        """A forward pass of the model has ended.

        Raises
        ------
        ConfigError
            it went without this cache.
        """
        if self.get_seq_length() != self.expected:
            _refuse_dropped(self.model, self.get_seq_length())
        if self.engine is not None and self.engine.waiting:
            read_again(self.model, self.engine)

    def take_chunk(self) -> None:
        """Look at a chunk of what `generate` prefills in chunks."""
        raise NotImplementedError

    def continue_with(self, input_ids: torch.Tensor) -> None:
        """Look at the whole conversation [B, n], as `generate` begins.

        It leaves out what was read.
        """
        raise NotImplementedError


class _Pass(NamedTuple):
    """A pass that goes on: into which cache, and begun by which module."""

    cache: WatchedCache
    module: torch.nn.Module


def watch(model: PreTrainedModel) -> None:
    """Have a model, and its part without the head, tell caches of the passes they are in."""
    for part in {model, model.base_model}:
        if not getattr(part, "_kvbench_watches", False):
            part.register_forward_pre_hook(_before, with_kwargs=True)
            part.register_forward_hook(_after, with_kwargs=True, always_call=True)
            part._kvbench_watches = True
    if not isinstance(model.prepare_inputs_for_generation, _Prepare):
        model.prepare_inputs_for_generation = _Prepare(model)


def _before(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    if not any(isinstance(value, WatchedCache) for value in (*args, *kwargs.values())):
        return None
    arguments = kwargs
    if args:
        arguments = {
            **dict(zip(inspect.signature(module.forward).parameters, args, strict=False)),
            **kwargs,
        }
    cache = arguments.get("past_key_values")
    if not isinstance(cache, WatchedCache) or (
        mailbox.passing is not None and mailbox.passing.cache is cache
    ):
        return None  # the pass of a model, in which its part without the head is called
    _end_pass()  # one that was broken off
    _refuse(module, cache, arguments)
    arguments = cache.before(arguments)
    mailbox.input_ids, mailbox.passing = arguments.get("input_ids"), _Pass(cache, module)
    begin_attending(cache.model)
    return (), arguments


def _after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not isinstance(kwargs.get("past_key_values"), WatchedCache):
        return
    if mailbox.passing is None or mailbox.passing.module is not module:
        return
    try:
        if output is not None:  # None: it has failed
            mailbox.passing.cache.after()
    finally:
        _end_pass()


def _end_pass() -> None:
    """Leave nothing of a pass to the next one."""
    mailbox.call, mailbox.masking = None, False
    rotary.note(None)
    if mailbox.passing is not None:
        end_attending(mailbox.passing.cache.model)
        mailbox.passing = None


def _refuse(model: Any, cache: WatchedCache, arguments: dict[str, Any]) -> None:
    """Refuse what no KVCache can do.

    Raises
    ------
    ConfigError
        names it.
    """
    refuse_compiled(model)
    if not cache.get_seq_length():
        refuse_compiled_layers(model)
    refuse_training(model)
    if arguments.get("use_cache") is False:
        raise ConfigError(
            "use_cache=False: a KVCache is kept from one step to the next; expected use_cache=True"
        )
    requested = arguments.get("output_attentions")
    if model.config.output_attentions if requested is None else requested:
        raise ConfigError(
            "output_attentions=True: a method attends some of the keys, in kernels that give no"
            " weights; expected output_attentions=False, or a pass without a KVCache"
        )


class _Prepare:
    """A model's `prepare_inputs_for_generation` that gives a KVCache what it has not read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._replaced = model, vars(model).get("prepare_inputs_for_generation")

    @property
    def _original(self) -> Callable[..., dict[str, Any]]:
        """What would be called without this one: the class's, unless this model had another."""
        return self._replaced or MethodType(
            type(self._model).prepare_inputs_for_generation, self._model
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original)  # by which `generate` learns what a model takes

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, WatchedCache):
            return self._original(input_ids, *args, **kwargs)
        if kwargs.get("is_first_iteration"):
            if "next_sequence_length" not in kwargs:
                cache.take_chunk()
            elif kwargs["next_sequence_length"] is not None and kwargs.get("inputs_embeds") is None:
                # the whole conversation, of which what was read is left out
                cache.continue_with(input_ids)
        elif cache.engine is not None and not cache.engine.prefilled:
            check_length(cache.prompt_length, cache.get_seq_length(), ended=True)
        prepared = self._original(input_ids, *args, **kwargs)
        if prepared.get("past_key_values") is None and not cache.get_seq_length():
            # it holds nothing that could be wrong, and all is read now
            prepared["past_key_values"] = cache
        if prepared.get("past_key_values") is not cache:
            _refuse_dropped(self._model, cache.get_seq_length())
        return prepared


def _refuse_dropped(model: PreTrainedModel, read: int) -> NoReturn:
    """The model's class goes on without the KVCache that it was given.

    Raises
    ------
    ConfigError
        always.
    """
    name, key = type(model).__name__, "original_max_position_embeddings"
    limit, stretched = card_of(model).original_length, rotary.stretches(model)
    why, right = "", "a model whose class keeps the cache that generate is given"
    if limit is not None and limit >= read:
        why = f", to compute all keys again beyond {key}={limit}"
        right = f"prompt and new tokens within {limit}, or a longer prompt read at once"
        if stretched:
            why += f" with other angles (rope_type={stretched[0].rope_type})"
        else:
            right += (
                f"; as its angles do not follow the length, a larger model.config.{key} serves as"
                " well"
            )
    raise ConfigError(
        f"{name}: its class drops the KVCache after {read} tokens{why}; expected {right}"
    )
