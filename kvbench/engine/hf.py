"""The only file that knows transformers' cache and attention interfaces.

A cache layer here only counts: `update()` leaves a note of (cache, layer) for the attention function, which runs next
in the same thread, and hands back the NEW keys and values. The attention function gives them to an `Engine`. A layer
with a sliding window leaves no note: transformers keeps its window, and computes its attention as ever. So does a model
switched to "kvbench" attention but run with another cache, or none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvbench.budget import Accounting, Budget
from kvbench.config import ConfigError, build, method_config
from kvbench.engine.engine import Engine
from kvbench.engine.positions import Angles
from kvbench.engine.support import refuse_unsupported, windows
from kvbench.method import Method, Shape

NAME = "kvbench"
FULL = "full_attention"  # as transformers calls these layers
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

    The first forward pass is the prompt (left padding allowed) and is dense; each later one is a decode step. One
    KVCache serves one call of `generate`.

    Args:
        model: a transformers causal language model; switched to "kvbench" attention.
        method: a method's name (with its options as keywords), or a Method object.
        budget: tokens (int), a fraction of the prompt (float in (0, 1]), or None: the method's own sizes.
        accounting: "paper" or "unified" (what counts inside the budget).
        dense_layers: true indices of layers that always attend everything; one with a sliding window is none, and stays
            as it is.
        prompt_length: columns of the prompt, padding included, where it is prefilled in several forward passes.
        attention: the executor, "auto", "cpu", "torch", "reference" or "flashinfer".
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
        dense_layers: tuple[int, ...] = (0, 1),
        prompt_length: int | None = None,
        attention: str = "auto",
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
        self._budget = Budget.of(budget, harness, accounting)
        use_kvbench_attention(model)
        config = model.config.get_text_config()
        self._windowed = _windowed(windows(config.to_dict()))
        super().__init__(config.num_hidden_layers, self._windowed)
        self._full_layers = [layer for layer in range(config.num_hidden_layers) if layer not in self._windowed]
        self._model = model
        self._dense_layers, self._prompt_length = dense_layers, prompt_length
        self._attention, self._tokenizer, self._seed = attention, tokenizer, seed
        self.engine: Engine | None = None
        self._unsettled = False  # a step was decoded and is not counted yet
        _remember_input_ids(model)

    @property
    def batch_size(self) -> int:
        """Rows of the generation; -1 before the first prompt."""
        return -1 if self.engine is None else self.engine.shape.batch

    def reset(self) -> None:
        """Forget everything; the next forward pass is a new prompt."""
        super().reset()
        self.engine = None

    def audit(self) -> dict[str, Any]:
        """What was attended and held so far; keys as in `summary.json`."""
        if self.engine is None:
            raise ValueError("nothing to audit: no prompt was read yet")
        self._settle(self.engine)
        return self.engine.report()

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
        return self.engine.attend(layer, query, key, value, sinks)

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
            lengths, offsets = _left_padded(padding, batch, columns)
            self.engine = engine_for(
                self._model,
                lengths,
                self._method,
                self._budget,
                self._dense_layers,
                self._tokenizer,
                offsets=offsets,
                columns=columns,
                attention=self._attention,
                seed=self._seed,
                audit_every=AUDIT_EVERY,
            )
            self.engine.windowed = self._windowed
        self._settle(self.engine)
        if not self.engine.prefilled:
            self.engine.start_chunk(ids)
        elif width == 1:
            self._unsettled = True
            self.engine.start_step(ids[:, 0].cpu())
        else:
            raise ValueError(
                f"KVCache was given {width} tokens at once after its prompt: a decode step is one token. For a prompt "
                "prefilled in chunks pass prompt_length=; for a new prompt make a new KVCache"
            )


def method_named(name: str, **options: Any) -> Method:
    """The method called `name` in conf/method, built with its defaults and `options`."""
    method: Method = build(method_config(name, **options))
    return method


def use_kvbench_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to "kvbench" attention; refuses by name what kvbench would run wrong."""
    name = type(model).__name__
    refuse_unsupported(model.config.get_text_config().to_dict(), name)
    refuse_own_attention(type(model), name)
    devices = sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()})
    if len(devices) > 1:
        raise ConfigError(
            f"{name}: its layers lie on devices {', '.join(devices)} (hf_device_map); kvbench runs a model on one"
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
    windowed = windows(config.to_dict())
    full = [module for layer, module in enumerate(_attention_modules(model)) if layer not in windowed]
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
    )


def _windowed(sizes: Mapping[int, int]) -> dict[int, _WindowedLayer]:
    return {layer: _WindowedLayer(size) for layer, size in sizes.items()}


def _attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention module of each layer."""
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    return sorted(found, key=lambda module: module.layer_idx)


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
    if method.needs.positions == "cache":
        settings["rotary"] = RotaryOf(model, shape.sparse_layers)
    if method.needs.token_text:
        if tokenizer is None:
            raise ConfigError(f"tokenizer=None: {type(method).__name__} reads the text of tokens; pass the tokenizer")
        settings["pieces"] = vocabulary_text(tokenizer)
    return kind(shape, method, budget, **settings)


def vocabulary_text(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every token id, spaces as in running text; bytes that are no whole character become U+FFFD."""
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # SentencePiece writes a space as U+2581 and would strip it from a piece that stands alone
    return [p.replace("\u2581", " ") if "\u2581" in p else tokenizer.convert_tokens_to_string([p]) for p in pieces]


def _head_dim(attention: Any) -> int:
    return int(getattr(attention, "head_dim", 0) or attention.head_size)  # GPT-NeoX's word


class RotaryOf:
    """The model's own rotary positions, see `kvbench.engine.positions.Rotary`.

    Args:
        layers: true indices of the layers whose keys will be turned, all of them with full attention.

    Raises:
        ConfigError: keys of these layers have no rotary positions, or angles that depend on the length, so that a
            stored key cannot be turned to another position.
    """

    def __init__(self, model: PreTrainedModel, layers: Iterable[int]) -> None:
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
                f"model={type(model).__name__}: {reason}, so positions inside the cache cannot be given; use "
                "positions=original"
            )
        self._rotary = rotary[0]
        self._scaling = getattr(self._rotary, "_".join([*self._kind, "attention_scaling"]))
        self._apply = sys.modules[type(modules[0]).__module__].apply_rotary_pos_emb

    def angles(self, by: torch.Tensor) -> Angles:
        """cos and sin [B, L, n, D] of a turn by [B, L, n] positions."""
        flat = by.flatten(0, 1)
        parts = self._rotary(torch.empty(0, device=by.device), flat, *self._kind)  # read for its dtype and device
        cos, sin = (part.unflatten(0, by.shape[:2]) / self._scaling for part in parts)
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


def _remember_input_ids(model: PreTrainedModel) -> None:
    """Attention never sees token ids; note them as the model's forward pass begins."""
    if getattr(model, "_kvbench_remembers", False):
        return

    def remember(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _mailbox.input_ids = kwargs.get("input_ids", args[0] if args else None)

    model.register_forward_pre_hook(remember, with_kwargs=True)
    model._kvbench_remembers = True  # type: ignore[assignment]


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
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, mask, **kwargs)[0], None


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """For our caches the 2D padding mask as it is (None without padding); for any other, sdpa's."""
    ours, _mailbox.masking = _mailbox.masking, False
    if not ours:
        return sdpa_mask(attention_mask=attention_mask, **kwargs)
    return attention_mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

__all__ = ["NAME", "ConfigError", "EngineCache", "KVCache", "method_named", "shape_of", "use_kvbench_attention"]
