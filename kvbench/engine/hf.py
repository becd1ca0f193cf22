"""The only file that knows transformers' cache and attention interfaces.

A cache layer here only counts: `update()` leaves a note of (cache, layer) for the attention function, which runs next
in the same thread, and hands back the NEW keys and values. The attention function gives them to an `Engine`. A layer
with a sliding window leaves no note: transformers keeps its window, and computes its attention as ever. So does a model
switched to "kvbench" attention but run with another cache, or none.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvbench import hub
from kvbench.budget import Accounting, Budget
from kvbench.config import ConfigError, build, method_config
from kvbench.engine import heads
from kvbench.engine.engine import Engine, worker_pool
from kvbench.engine.positions import Angles
from kvbench.engine.support import refuse_unsupported, windows
from kvbench.engine.turn import Transcript, take_back
from kvbench.memory.kinds import GROUPED, NATIVE, kv_of, unfit, unfit_for
from kvbench.method import HeadScores, Method, Needs, Shape

NAME = "kvbench"
FULL = "full_attention"  # as transformers calls these layers
Question = Literal["dense", "method"]
AUDIT_EVERY = 8  # a user's own generate() shall not pay for a count of every union at every step


class _Call(NamedTuple):
    """What a cache layer was just given."""

    cache: _CountingCache
    layer: int
    key: torch.Tensor
    value: torch.Tensor


class _Mailbox(threading.local):
    """Hand-over between the hooks of one forward pass; every note is taken once."""

    call: _Call | None = None
    residual: tuple[_CountingCache, torch.Tensor] | None = None
    masking = False
    input_ids: torch.Tensor | None = None


_mailbox = _Mailbox()


class _CountingLayer(CacheLayerMixin):
    """Counts the tokens a layer has SEEN, which positions and masks follow, whatever was kept."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: _CountingCache, layer: int) -> None:
        super().__init__()
        self.owner, self.layer, self.seen = owner, layer, 0
        self.is_initialized = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to allocate here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _mailbox.masking or _mailbox.call is not None:  # notes that kvbench's own functions would have taken
            self.owner.refuse_strange_model()
        if self.layer == self.owner.first:
            self.owner.begin_pass()
        self.seen += key_states.shape[-2]
        _mailbox.call = _Call(self.owner, self.layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        _mailbox.masking = True
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ValueError("kvbench caches do not support beam search: an index belongs to one sequence")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("kvbench caches do not support contrastive search: an index belongs to one sequence")

    batch_select_indices = batch_repeat_interleave


class _WindowedLayer(DynamicSlidingWindowLayer):
    """The window of a layer, as transformers keeps it: of W tokens those that the next one may attend, W - 1."""

    is_croppable = False
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if key_states.shape[-2] > 1:  # a part of a prompt would stay in memory whole
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        _mailbox.masking = False
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)
        return sizes

    def begin_from(self, other: _WindowedLayer) -> None:
        """Hold what another layer holds: an update writes to no tensor that is there, so both may go on."""
        self.__dict__.update(other.__dict__)

    def resident_bytes(self) -> int:
        """Bytes of the keys and values that the next token may attend."""
        return sum(part.nbytes for part in (self.keys, self.values) if part is not None)

    def allocated_bytes(self) -> int:
        """Bytes that they take on the device: a step's one token more, of which they are a part."""
        return sum(part.untyped_storage().nbytes() for part in (self.keys, self.values) if part is not None)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _CountingLayer.reorder_cache(self, beam_idx)


class _CountingCache(Cache):
    """A cache of counting layers, and of windows for the layers that have one. Subclasses say what a pass means."""

    def __init__(self, layers: int, windowed: Mapping[int, Any]) -> None:
        super().__init__(layers=[windowed.get(layer) or _CountingLayer(self, layer) for layer in range(layers)])
        self.first = min(layer for layer in range(layers) if layer not in windowed)

    def begin_pass(self) -> None:
        """A forward pass begins; nothing of it is counted yet."""

    def belongs_to(self, module: torch.nn.Module) -> bool:
        """Whether the attention module is of the model that this cache was made for."""
        return True

    def refuse_strange_model(self) -> NoReturn:
        """The model that runs this cache does not attend through kvbench.

        Raises:
            ValueError: always.
        """
        _mailbox.call, _mailbox.masking = None, False
        raise ValueError(
            "the model does not attend through kvbench: its attention was changed since this cache was made, or the "
            "cache was made for another model; make a new KVCache(model) after set_attn_implementation"
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        raise NotImplementedError

    def residual(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """What a layer's attention has made of the hidden states, see `Engine.residual`; of a prefill alone."""
        engine: Engine = self.engine  # type: ignore[attr-defined]
        if engine.method.needs.layer_similarity and not engine.prefilled:
            engine.residual(layer, before, after)


class EngineCache(_CountingCache):
    """The measured loop's cache: that loop itself says which phase each forward pass belongs to."""

    def __init__(self, engine: Engine) -> None:
        engine.windowed = engine.windowed or _windowed(engine.shape.windows)  # of the generation that goes on here
        super().__init__(engine.shape.layers, engine.windowed)
        self.engine = engine

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer by the engine, in the phase that the loop is in; see `Engine.attend`."""
        return self.engine.attend(layer, query, key, value, sinks)


class KVCache(_CountingCache):
    """A KV-cache method inside plain `model.generate(past_key_values=KVCache(model, ...))`.

    The first forward pass is the prompt (left padding allowed) and is dense; a later one of a single token is a decode
    step. One of several tokens is a later turn of the conversation: `generate`, given the whole conversation and the
    same cache again, passes what the cache has not read. All rows of a batch take a turn of one length.

    Args:
        model: a transformers causal language model; switched to "kvbench" attention.
        method: a method's name (with its options as keywords), or a Method object, which serves one cache.
        budget: tokens (int), a fraction of the prompt (float in (0, 1]), or None: the method's own sizes.
        accounting: "paper" or "unified" (what counts inside the budget).
        dense_layers: true indices of layers that always attend everything; one with a sliding window is none, and stays
            as it is.
        question: how the tokens of a later turn are read: "dense", at once, attending all that the method has not
            dropped, or "method", one by one, as decode steps (the logits are then the last token's alone).
        prompt_length: columns of the prompt, padding included, where it is prefilled in several forward passes.
        attention: the executor, "auto", "cpu", "torch", "reference" or "flashinfer".
        kv: what keys and values are held in, "native", "int8", "fp8", "kivi4", "kivi2", or {"device": .., "host": ..}.
        tokenizer: for methods that read the text of tokens.
        seed: what the method's randomness derives from.

    Raises:
        ConfigError: an unknown method or option, a bad budget, a model that kvbench does not support.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "quest",
        budget: int | float | None = 256,
        *,
        accounting: Accounting = "paper",
        dense_layers: Collection[int] = (0, 1),
        question: Question = "dense",
        prompt_length: int | None = None,
        attention: str = "auto",
        kv: str | Mapping[str, str] = "native",
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        harness: dict[str, Any] = {}
        if isinstance(method, str):
            config = method_config(method, **options)
            self._method: Method = build(config)
            harness = config.harness
        elif options:
            raise ConfigError(f"{', '.join(options)}: no such argument; give a Method object its options yourself")
        else:
            self._method = method
        if question not in get_args(Question):
            raise ConfigError(f"question={question!r}: one of {', '.join(get_args(Question))}")
        self._budget = Budget.of(budget, harness, accounting)
        use_kvbench_attention(model)
        config = model.config.get_text_config()
        self._dense_layers = _layer_indices(dense_layers, config.num_hidden_layers)
        self._windowed = _windowed(windows(config.to_dict()))
        self._full_layers = [layer for layer in range(config.num_hidden_layers) if layer not in self._windowed]
        self._head_scores = _head_scores(model, self._method)
        super().__init__(config.num_hidden_layers, self._windowed)
        self._model, self._question, self._prompt_length = model, question, prompt_length
        self._attention, self._kv, self._tokenizer, self._seed = attention, kv_of(kv), tokenizer, seed
        self.engine: Engine | None = None
        self._transcript = Transcript()
        self._offsets: list[int] = []
        self._passing = False  # a forward pass has begun and not ended
        self._unsettled = False  # a step was decoded and is not counted yet
        self._modules = frozenset(map(id, _attention_modules(model)))
        _watch(model)
        self._watched = ExitStack()
        self._watch_prompt()

    @property
    def batch_size(self) -> int:
        """Rows of the generation; -1 before the first prompt."""
        return -1 if self.engine is None else self.engine.shape.batch

    def reset(self) -> None:
        """Forget everything; the next forward pass is a new prompt."""
        super().reset()
        self.engine, self._transcript = None, Transcript()
        self._passing = self._unsettled = False
        self._watch_prompt()

    def _watch_prompt(self) -> None:
        self._watched.close()
        self._watched.enter_context(residuals_watched(self._model, self._method.needs))

    def audit(self) -> dict[str, Any]:
        """What was attended and held so far; keys as in `summary.json`, and those of later turns."""
        if self.engine is None:
            raise ValueError("nothing to audit: no prompt was read yet")
        self._settle(self.engine)
        return self.engine.report()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        memo.update({id(shared): shared for shared in (self._model, self._tokenizer, worker_pool())})
        memo[id(self._watched)] = ExitStack()
        if self.engine is not None:
            self._settle(self.engine)  # what is noted to be counted is of this cache's own stores
        copy.deepcopy(self.engine, memo)  # it knows what else is shared
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        if twin.engine is None or not twin.engine.prefilled:
            twin._watch_prompt()
        return twin

    def copy(self) -> KVCache:
        """A cache that goes on from here by itself, as `copy.deepcopy` gives one; it takes as much memory again."""
        return copy.deepcopy(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -`tokens_to_remove` tokens of every row back, as assisted decoding does.

        Raises:
            ValueError: a positive number, as in transformers, or more than there are; or a method that cannot.
        """
        count = -tokens_to_remove
        if count and self._windowed:
            raise ValueError(f"crop({tokens_to_remove}): layers with a window have forgotten what came before it")
        if not 0 <= count < max(1, self._shortest):
            raise ValueError(f"crop({tokens_to_remove}): minus the tokens to remove, of a row of {self._shortest}")
        if count:
            assert self.engine is not None
            self._settle(self.engine)
            take_back(self._method, self.engine.stores, self.engine.shape.sparse_layers, count)
            self._transcript.cut(count)
            for layer in self.layers:
                assert isinstance(layer, _CountingLayer)
                layer.seen -= count

    def activate_past_recording(self) -> None:
        """Assisted decoding begins.

        Raises:
            ValueError: it takes tokens back, which the method cannot; or needs all logits of what is read.
        """
        grouped = self._kv.device in GROUPED
        if not self._method.needs.crops or self._question != "dense" or self._windowed or grouped:
            raise ValueError(
                f"assisted decoding with {type(self._method).__name__}, question={self._question}, kv={self._kv}, "
                f"{len(self._windowed)} layers with a window: it reads several tokens at once and takes some back; "
                "expected a method whose needs say crops=True, question=dense, tokens coded one by one, and full "
                "attention in every layer"
            )

    @property
    def _shortest(self) -> int:
        """Tokens of the shortest row."""
        return 0 if self.engine is None else min(self.engine.lengths)

    # -- before a forward pass -------------------------------------------------------------------------------------

    def take_chunk(self) -> None:
        """Look at a chunk of what `generate` prefills in chunks.

        Raises:
            ValueError: it is of a prompt whose length nobody told.
        """
        started = self.engine is not None and not self.engine.audit.generated and not self._unsettled
        if started and self._prompt_length is None:
            raise ValueError("a prompt prefilled in chunks: give the KVCache its columns, prompt_length=")

    def continue_with(self, input_ids: torch.Tensor) -> None:
        """Look at the whole conversation [B, n], as `generate` begins; it leaves out what was read.

        Raises:
            ValueError: it does not go on from what was read.
        """
        if self.engine is not None:
            self._check_rows(len(input_ids))
            self._transcript.check(input_ids)

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        """Look at what a forward pass of the model is given; returns what it shall be given.

        Raises:
            ValueError: what it is given does not fit what was read.
        """
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        width, seen, mask = given[name].shape[1], self.get_seq_length(), given.get("attention_mask")
        self._check_rows(given[name].shape[0])
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != seen + width):
            raise ValueError(
                f"attention_mask={list(mask.shape)}: this KVCache has read {seen} tokens and is given {width}, so "
                f"expected [{len(mask)}, {seen + width}]; a KVCache serves one conversation at a time"
            )
        turn = self.engine is not None and self.engine.prefilled and width > 1
        if (
            turn
            and mask is not None
            and not all(bool(row[offset:].all()) for row, offset in zip(mask, self._offsets, strict=True))
        ):
            raise ValueError("a later turn was padded: give all rows turns of one length, or each row its own KVCache")
        if not turn or self._question == "dense":
            return given
        for at in range(width - 1):
            self._model(**_columns(given, name, at, seen), past_key_values=self, use_cache=True, logits_to_keep=1)
        return given | _columns(given, name, width - 1, seen)

    def _check_rows(self, rows: int) -> None:
        if self.engine is not None and rows != self.batch_size:
            raise ValueError(f"this KVCache holds {self.batch_size} rows and is given {rows}: take a new one")

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward pass begins.

        Raises:
            ValueError: the last one has not ended.
        """
        if self._passing:
            raise ValueError(
                "the last forward pass through this KVCache did not end: it failed, or another thread generates with "
                "it; a KVCache serves one generation at a time, and after an error reset() or a new one"
            )
        self._passing = True

    def belongs_to(self, module: torch.nn.Module) -> bool:
        """Whether the attention module is of the model that this cache was made for."""
        return id(module) in self._modules

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer, see `Engine.attend`; the first layer with full attention opens the forward pass."""
        if layer == self._full_layers[0]:
            self._start_forward(query, padding)
        assert self.engine is not None
        out = self.engine.attend(layer, query, key, value, sinks)
        if layer == self._full_layers[-1]:
            self._passing = False
        return out

    def _settle(self, engine: Engine) -> None:
        """Count the step before this one: the last layers of the model, with a window, may come after all others."""
        if self._unsettled:
            engine.settle()
        self._unsettled = False

    def _start_forward(self, query: torch.Tensor, padding: torch.Tensor | None) -> None:
        batch, _, width, _ = query.shape
        ids, _mailbox.input_ids = _mailbox.input_ids, None
        if ids is None or ids.shape != (batch, width):
            ids = torch.full((batch, width), -1, device=query.device)  # prompt given as embeddings
        if self.engine is None:
            columns = self._prompt_length or width
            lengths, self._offsets = _left_padded(padding, batch, columns)
            self.engine = engine_for(
                self._model,
                lengths,
                self._method,
                self._budget,
                self._dense_layers,
                self._tokenizer,
                offsets=self._offsets,
                columns=columns,
                attention=self._attention,
                kv=self._kv,
                seed=self._seed,
                audit_every=AUDIT_EVERY,
                head_scores=self._head_scores,
            )
            self.engine.windowed = self._windowed
        if self._method.view is not self.engine.view:
            raise ValueError("the Method object of this KVCache has begun another generation: give each cache its own")
        self._settle(self.engine)
        if self.engine.prefilled:
            self._watched.close()  # of the prompt all is known
        if not self.engine.prefilled:
            ids = ids if padding is None else ids.masked_fill(padding[:, -width:].to(ids.device) == 0, -1)
            self.engine.start_chunk(ids)
        elif width == 1:
            self._unsettled = True
            self.engine.start_step(ids[:, 0].cpu())
        else:
            self.engine.start_turn(ids)
        self._transcript.add(ids)


def method_named(name: str, **options: Any) -> Method:
    """The method called `name` in conf/method, built with its defaults and `options`."""
    method: Method = build(method_config(name, **options))
    return method


def use_kvbench_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to "kvbench" attention; refuses by name what kvbench would run wrong.

    Raises:
        ConfigError: it is no model, or not one that kvbench runs.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"model={str(model)[:80]!r}: a loaded model, as AutoModelForCausalLM.from_pretrained(...) gives one"
        )
    name = type(model).__name__
    refuse_unsupported(model.config.to_dict(), name)
    refuse_own_attention(type(model), name)
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1 and (away := sorted(devices & {"cpu", "disk"})):
        raise ConfigError(
            f"{name}: some of its layers wait on {' and '.join(away)} (hf_device_map); expected all of them on GPUs"
        )
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def refuse_own_attention(kind: type[PreTrainedModel], name: str) -> None:
    """Refuse a class of models that computes attention in a way of its own.

    Raises:
        ConfigError: names the model.
    """
    if not kind._can_set_attn_implementation():
        raise ConfigError(
            f"{name}: {kind.__name__} computes attention in a way of its own; kvbench runs models that use "
            "transformers' attention interface"
        )


def shape_of(
    model: PreTrainedModel,
    lengths: Sequence[int],
    dense_layers: Collection[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Shape:
    """The Shape of a generation on `model` for prompts of these lengths."""
    config = model.config.get_text_config()
    windowed, modules = windows(config.to_dict()), _attention_modules(model)
    full = [module for layer, module in enumerate(modules) if layer not in windowed]
    sizes = {(_head_dim(module), float(module.scaling)) for module in full}
    if len(sizes) > 1:
        raise ConfigError(
            f"model={type(model).__name__}: its layers differ in head_dim or scaling; expected one of each"
        )
    [(head_dim, scaling)] = sizes
    return Shape(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        lengths=tuple(lengths),
        dtype=dtype,
        device=device,
        scaling=scaling,
        sparse_layers=tuple(
            layer for layer in range(config.num_hidden_layers) if layer not in {*dense_layers, *windowed}
        ),
        windows=windowed,
        elsewhere=_elsewhere(modules, device),
    )


def _elsewhere(modules: Iterable[torch.nn.Module], device: torch.device) -> dict[int, torch.device]:
    """The layers of a spread model that are not on its first device, and where each is."""
    places = (next(module.parameters()).device for module in modules)
    return {layer: place for layer, place in enumerate(places) if place != device}


def _windowed(sizes: Mapping[int, int]) -> dict[int, _WindowedLayer]:
    return {layer: _WindowedLayer(size) for layer, size in sizes.items()}


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention module of each layer."""
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    return sorted(found, key=lambda module: module.layer_idx)


@contextmanager
def residuals_watched(model: PreTrainedModel, needs: Needs) -> Iterator[None]:
    """Meanwhile tell the cache of a forward pass each layer's hidden states before and after attention, if needed.

    Raises:
        ConfigError: the model's layers do not add attention to the hidden states before they go on with them.
    """
    handles = []
    try:
        for block in model.modules() if needs.layer_similarity else ():
            layer = getattr(getattr(block, "self_attn", None), "layer_idx", None)
            if layer is not None:
                after = _reads_residual(block).register_forward_pre_hook(partial(_tell_residual, layer))
                handles += [block.register_forward_pre_hook(_note_residual, with_kwargs=True), after]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reads_residual(block: torch.nn.Module) -> torch.nn.Module:
    """The part of a decoder layer that reads the hidden states once its attention is added to them."""
    names = ["pre_feedforward_layernorm", "post_attention_layernorm"]
    if hasattr(block, "post_feedforward_layernorm"):  # the norms stand behind attention and MLP
        names[1] = "mlp"
    part = next((getattr(block, name) for name in names if hasattr(block, name)), None)
    if part is None:
        raise ConfigError(
            f"{type(block).__name__}: adds attention and MLP at once; the method compares what is between"
        )
    return part


def _note_residual(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    _mailbox.residual = None
    if isinstance(cache, _CountingCache):
        _mailbox.residual = cache, args[0] if args else kwargs["hidden_states"]


def _tell_residual(layer: int, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
    note, _mailbox.residual = _mailbox.residual, None
    if note is not None:
        cache, before = note
        cache.residual(layer, before, args[0])


def engine_for(
    model: PreTrainedModel,
    lengths: Sequence[int],
    method: Method,
    budget: Budget,
    dense_layers: Collection[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: type[Engine] = Engine,
    **settings: Any,
) -> Engine:
    """An engine of a kind that runs `method` on prompts of these lengths; `settings` as for `Engine`.

    Raises:
        ConfigError: the method needs what this model cannot give.
    """
    shape = shape_of(model, lengths, dense_layers, model.dtype, model.device)
    kv, name = settings.get("kv", NATIVE), type(method).__name__
    for reason in (*unfit(kv, shape.head_dim), *unfit_for(kv, method, name, budget.counts_generated)):
        raise ConfigError(reason)
    if method.needs.positions == "cache" or method.needs.rotation:
        instead = "positions=original" if method.needs.positions == "cache" else "another method"
        settings["rotary"] = RotaryOf(model, shape.sparse_layers, instead)
    if method.needs.token_text:
        if tokenizer is None:
            raise ConfigError(f"tokenizer=None: {type(method).__name__} reads the text of tokens; pass the tokenizer")
        settings["pieces"] = vocabulary_text(tokenizer)
    if method.needs.head_scores and settings.get("head_scores") is None:
        raise ConfigError(f"head_scores=None: {type(method).__name__} needs those that kvbench.calibrate makes")
    return kind(shape, method, budget, **settings)


def _head_scores(model: PreTrainedModel, method: Method) -> HeadScores | None:
    """The scores of a model's heads that a method asks for; None: for none.

    Raises:
        ConfigError: there are none, or those of the file are of another model.
    """
    asked, path = method.needs.head_scores, model.config._name_or_path
    if asked is None:
        return None
    if path:
        found = heads.calibration_of(hub.ModelSource(Path(path).name, path, ()), asked, f"model.path={path}")
    else:  # made of a config, and not read from files
        found = None if asked == heads.AUTO else heads.read(Path(asked).expanduser())
    if found is None:
        raise ConfigError("heads=auto: the model is not from a file; give heads=FILE of python -m kvbench.calibrate")
    return found.scores


def vocabulary_text(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every token id, spaces as in running text; bytes that are no whole character become U+FFFD."""
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # SentencePiece writes a space as U+2581 and would strip it from a piece that stands alone
    return [p.replace("\u2581", " ") if "\u2581" in p else tokenizer.convert_tokens_to_string([p]) for p in pieces]


def _beside(module: torch.nn.Module, name: str) -> Any:
    """A function of the file that has the module's class, or the one of which that is a kind."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))


def _head_dim(attention: Any) -> int:
    return int(getattr(attention, "head_dim", 0) or attention.head_size)  # GPT-NeoX's word


class RotaryOf:
    """The model's own rotary positions, see `kvbench.engine.positions.Rotary`.

    Args:
        layers: true indices of the layers whose keys will be turned, all of them with full attention.
        instead: what an error advises.

    Raises:
        ConfigError: keys of these layers have no rotary positions, or angles that depend on the length, so that a
            stored key cannot be turned to another position.
    """

    def __init__(self, model: PreTrainedModel, layers: Iterable[int], instead: str = "positions=original") -> None:
        parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        self._kind: tuple[str, ...] = ()  # of layer, where layers with a window have other angles
        if FULL in parameters:
            self._kind, parameters = (FULL,), parameters[FULL] or {}
        rotary = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
        modules = _attention_modules(model)
        kind, reason = parameters.get("rope_type", "default"), ""
        if kind in ("dynamic", "longrope"):
            reason = f"its {kind} RoPE changes with the length"
        elif not rotary or not all(_turns(modules[layer], rotary[0], self._kind) for layer in layers):
            reason = "it has layers without rotary positions"
        if reason:
            raise ConfigError(
                f"model={type(model).__name__}: {reason}, so stored keys cannot be turned to other positions; use "
                f"{instead}"
            )
        self._rotary = rotary[0]
        self._scaling = getattr(self._rotary, "_".join([*self._kind, "attention_scaling"]))
        self._apply = _beside(modules[0], "apply_rotary_pos_emb")

    def angles(self, by: torch.Tensor) -> Angles:
        """cos and sin [B, L, n, D] of a turn by [B, L, n] positions."""
        flat = by.flatten(0, 1)
        parts = self._rotary(torch.empty(0, device=by.device), flat, *self._kind)  # read for its dtype and device
        cos, sin = (part.to(by.device).unflatten(0, by.shape[:2]) / self._scaling for part in parts)
        return cos, sin

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D] of any dtype, turned in float32."""
        lists = vectors.float().reshape(-1, vectors.shape[1] // angles[0].shape[1], *vectors.shape[2:])
        cos, sin = (part.flatten(0, 1) for part in angles)
        turned: torch.Tensor = self._apply(lists, lists[:, :0], cos, sin)[0]
        return turned.view_as(vectors).to(vectors.dtype)


class _FirstKey(Exception):
    """Ends a forward pass of an attention module where it would store a key; as its cache."""

    def update(self, key: torch.Tensor, *_: Any, **__: Any) -> None:
        """Keep the key."""
        self.key = key
        raise self


@torch.inference_mode()
def _turns(attention: Any, rotary: Any, kind: tuple[str, ...]) -> bool:
    """Whether a layer's keys depend on their position; models tell it in many ways, so it is tried."""
    weight = next(attention.parameters())
    hidden = torch.ones(1, 1, attention.config.hidden_size, dtype=weight.dtype, device=weight.device)
    keys = []
    for position in (0, 1):
        angles = rotary(hidden, torch.tensor([[position]], device=hidden.device), *kind)
        angles = tuple(part.to(hidden.device) for part in angles)
        try:
            attention(hidden, position_embeddings=angles, attention_mask=None, past_key_values=_FirstKey())
        except _FirstKey as stored:
            keys.append(stored.key)
    return not torch.equal(*keys)


def _left_padded(padding: torch.Tensor | None, batch: int, columns: int) -> tuple[list[int], list[int]]:
    """Lengths and offsets of a left-padded prompt from its 2D mask [B, >= first chunk]."""
    if padding is None:
        return [columns] * batch, [0] * batch
    if not bool(padding.any(dim=1).all()):
        raise ValueError("the first prefill chunk holds only padding of some row; raise prefill_chunk_size")
    offsets = padding.int().argmax(dim=1).tolist()
    if any(not bool(row[offset:].all()) for row, offset in zip(padding, offsets, strict=True)):
        raise ValueError("kvbench needs the padding on the left: tokenizer.padding_side = 'left'")
    return [columns - offset for offset in offsets], offsets


def _layer_indices(layers: Collection[int], count: int) -> tuple[int, ...]:
    """Indices of layers, checked against how many there are."""
    right = not isinstance(layers, str) and isinstance(layers, Collection)
    if not right or any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise ConfigError(f"dense_layers={layers!r}: indices of the model's layers, 0 to {count - 1}; () for none")
    return tuple(sorted(set(layers)))


def _columns(given: dict[str, Any], name: str, at: int, seen: int) -> dict[str, Any]:
    """What a forward pass was given of its token `at` alone, after `seen` tokens read before it."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    return {
        name: given[name][:, at : at + 1],
        "attention_mask": None if mask is None else mask[:, : seen + at + 1],
        "position_ids": None if positions is None else positions[..., at : at + 1],
    }


def _watch(model: PreTrainedModel) -> None:
    """Attention sees neither token ids nor what `generate` was given; look at both as they come to the model."""
    if getattr(model, "_kvbench_watches", False):
        return

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            args, kwargs = args[1:], {"input_ids": args[0], **kwargs}
        _mailbox.call, _mailbox.masking = None, False  # what a pass that failed has left
        cache = kwargs.get("past_key_values")
        if isinstance(cache, KVCache):
            kwargs = cache.before(kwargs)
        _mailbox.input_ids = kwargs.get("input_ids")
        return args, kwargs

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.prepare_inputs_for_generation = types.MethodType(_prepare_inputs_for_generation, model)
    model._kvbench_watches = True  # type: ignore[assignment]


def _prepare_inputs_for_generation(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The model's own; but that `generate`, as it begins, gives a KVCache only what goes on from what was read."""
    cache = kwargs.get("past_key_values")
    if kwargs.get("is_first_iteration") and isinstance(cache, KVCache):
        if "next_sequence_length" not in kwargs:
            cache.take_chunk()
        elif kwargs["next_sequence_length"] is not None and kwargs.get("inputs_embeds") is None:
            cache.continue_with(input_ids)  # the whole conversation, of which what was read is left out
    prepared: dict[str, Any] = type(model).prepare_inputs_for_generation(model, input_ids, *args, **kwargs)
    return prepared


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    call, _mailbox.call = _mailbox.call, None
    sinks = kwargs.get("s_aux")
    if call is None:
        own = sdpa_attention_forward if sinks is None else _eager_attention
        return own(module, query, key, value, attention_mask, **kwargs)
    if not call.cache.belongs_to(module):
        call.cache.refuse_strange_model()
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"{type(module).__name__}: its attention has a {name}, which kvbench does not compute")
    assert call.layer == module.layer_idx, "a cache layer was updated out of order"
    if not (_same(key, call.key) and _same(value, call.value)):
        raise ConfigError(f"{type(module).__name__}: it attends other keys and values than it stores")
    out = call.cache.attend(call.layer, query, key, value, attention_mask, sinks)
    return out.transpose(1, 2).contiguous(), None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same; of most models they are one."""
    return one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The model's own attention, which knows its sinks, under sdpa's mask: True where a query sees a key."""
    if mask is None and query.shape[2] > 1:  # sdpa's way to say causal
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    return _beside(module, "eager_attention_forward")(module, query, key, value, mask, **kwargs)[0], None


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """For our caches the 2D padding mask as it is (None without padding); for any other, sdpa's."""
    ours, _mailbox.masking = _mailbox.masking, False
    if not ours:
        return sdpa_mask(attention_mask=attention_mask, **kwargs)
    return attention_mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

__all__ = ["NAME", "ConfigError", "EngineCache", "KVCache", "method_named", "shape_of", "use_kvbench_attention"]
