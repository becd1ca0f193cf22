"""How transformers and kvbench meet: cache layers that count, and the attention function that reads
their notes.

A layer of full attention only counts: the cache's `update()` leaves a note of (cache, layer) for
the attention function, which runs next in the same thread, and hands back the NEW keys and values.
The attention function gives them to the cache. Every other layer is transformers' own object, which
keeps its window or its state, and leaves no note: its attention is computed as ever. So is that of
a model with "kvbench" attention that is run with another cache, or none.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvbench.backends.hf.latent import absorbed_of
from kvbench.config import ConfigError

NAME = "kvbench"


class Call(NamedTuple):
    """A call of a layer's attention: what its cache layer was just given, and what comes with the
    query.

    Attributes
    ----------
    cache, layer
        of which cache, and of its layers which.
    key, value
        [B, Hkv, q, D], of the new tokens.
    source
        the layer that has stored them, which this one reuses; None: itself.
    module
        the attention module.
    scaling, softcap
        of the logits, see `kvbench.method.Shape`.
    sinks
        [Hq], see `kvbench.attention.sinks`; None: the model has none.
    inputs
        [B, q, E], what the module reads; None: nobody asked for it.
    """

    cache: CountingCache
    layer: int
    key: torch.Tensor
    value: torch.Tensor
    source: int | None = None
    module: Any = None
    scaling: float = 1.0
    sinks: torch.Tensor | None = None
    inputs: torch.Tensor | None = None
    softcap: float | None = None


class _Stored(NamedTuple):
    """A layer whose keys later ones reuse, as long as the pass holds them."""

    cache: weakref.ref[CountingCache]
    layer: int
    key: weakref.ref[torch.Tensor]

    def of_reader(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Call | None:
        """The call of a layer that attends these keys; None: they are others."""
        cache = self.cache()
        if cache is None or self.key() is not key:
            return None
        return Call(cache, layer, key, value, source=self.layer)


class _Mailbox(threading.local):
    """Hand-over between the hooks of one forward pass; every note is taken once."""

    call: Call | None = None
    stored: _Stored | None = None
    residual: tuple[CountingCache, torch.Tensor] | None = None
    inputs: torch.Tensor | None = None
    masking = False
    input_ids: torch.Tensor | None = None
    passing: Any = None  # see `kvbench.backends.hf.watch`


mailbox = _Mailbox()


class CountingLayer(CacheLayerMixin):
    """Counts the tokens a layer has SEEN, which positions and masks follow, whatever was kept."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.is_initialized = 0, True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to allocate here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.counted += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return self.counted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        mailbox.masking = True
        return self.counted + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.counted = 0


class CountingStateLayer(CountingLayer, LinearAttentionAndFullAttentionLayer):
    """A layer of full attention that holds a state, too, as transformers keeps it."""

    def __init__(self, number_of_states: int = 1) -> None:
        CountingLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *_: Any, **states: Any) -> None:
        """Room for the states."""
        LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        CountingLayer.reset(self)


def updated(
    layer: Any, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer attends once new keys and values [B, Hkv, q, D] are in it."""
    states: tuple[torch.Tensor, torch.Tensor] = layer.update(keys, values)
    for name in ("keys", "values"):
        part = getattr(layer, name)
        spare = 0 if part is None else part.untyped_storage().nbytes() - part.nbytes
        if spare and keys.shape[-2] > 1:  # a part of a prompt would stay in memory whole
            setattr(layer, name, part.clone())
    return states


class CountingCache(Cache):
    """A cache of counting layers, and of transformers' own for what has no full attention.

    Subclasses say what a pass means.

    Parameters
    ----------
    layers
        how many the model has.
    kept
        those that transformers keeps a part of, by index; see `kvbench.backends.hf.kept`.

    Attributes
    ----------
    logits
        scaling and soft cap that every attention call must ask for; None: not known yet.
    """

    logits: tuple[float, float | None] | None = None
    engine: Any = None

    def __init__(self, layers: int, kept: Mapping[int, Any]) -> None:
        made = {layer: part.layer for layer, part in kept.items()}
        super().__init__(layers=[made.get(layer) or CountingLayer() for layer in range(layers)])
        counting = (isinstance(layer, CountingLayer) for layer in self.layers)
        self.first = [*counting].index(True)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a layer attends; of full attention the new ones, with a note."""
        layer = self.layers[layer_idx]
        if isinstance(layer, CountingLayer):
            # notes that kvbench's own functions would have taken
            if mailbox.masking or mailbox.call is not None:
                self.refuse_strange_model()
            if layer_idx == self.first:
                self.begin_pass()
            mailbox.call = Call(self, layer_idx, key_states, value_states)
        return updated(layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of a layer's mask, and the first of them."""
        mailbox.masking = False  # a counting layer says it is ours
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused.

        Raises
        ------
        ValueError
            always.
        """
        raise ValueError(
            "kvbench caches do not support beam search: an index belongs to one sequence"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused.

        Raises
        ------
        ValueError
            always.
        """
        raise ValueError(
            "kvbench caches do not support contrastive search: an index belongs to one sequence"
        )

    batch_select_indices = batch_repeat_interleave

    @property
    def columns(self) -> int:
        """Columns of all passes so far, as a layer with full attention has counted them."""
        return int(self.layers[self.first].get_seq_length())

    def count(self, tokens: int) -> None:
        """So many tokens of every row are there without a pass through this cache; fewer than none:
        taken back.
        """
        for layer in self.layers:
            if isinstance(layer, CountingLayer):
                layer.counted += tokens

    def begin_pass(self) -> None:
        """A forward pass begins; nothing of it is counted yet."""

    def belongs_to(self, module: torch.nn.Module) -> bool:
        """Whether the attention module is of the model that this cache was made for."""
        return True

    def refuse_strange_model(self) -> NoReturn:
        """The model that runs this cache does not attend through kvbench.

        Raises
        ------
        ValueError
            always.
        """
        mailbox.call, mailbox.masking = None, False
        raise ValueError(
            "the model does not attend through kvbench: this cache was made for another model, or a"
            " part of its model is called by itself; expected a new KVCache(model), handed to that"
            " model"
        )

    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Attention [B, Hq, q, D] of the query [B, Hq, q, D] in a layer.

        Parameters
        ----------
        padding
            the 2D mask of the forward pass; None: no padding.
        """
        raise NotImplementedError

    def show_inputs(self, call: Call) -> None:
        """What a layer's attention reads, see `Engine.take_inputs`; of a prefill alone."""
        if call.inputs is not None:
            self.engine.take_inputs(call.layer, call.inputs)

    def residual(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """What a layer's attention has made of the hidden states, see `Engine.residual`; of a
        prefill alone.
        """
        if self.engine is None:  # a layer with a window, before the first one that begins a prompt
            return
        if self.engine.method.needs.layer_similarity and not self.engine.prefilled:
            self.engine.residual(layer, before, after)


# -- which models attend through kvbench -----------------------------------------------------------


class _Switched:
    """A config whose model attends through kvbench: what it says by itself, and in how many passes
    it does.
    """

    def __init__(self, name: str) -> None:
        self.name, self.passes = name, 0


# what a config says of attention, as its models look at it
_ATTENTION = "_attn_implementation_internal"
_switched: dict[int, _Switched] = {}  # by the id of a config
_switching = threading.Lock()
_configs: weakref.WeakKeyDictionary[PreTrainedModel, list[Any]] = weakref.WeakKeyDictionary()


def begin_attending(model: PreTrainedModel) -> None:
    """Until `end_attending` a model attends through kvbench in passes with its caches, and as ever
    in those of other threads.
    """
    with _switching:
        # by their dictionaries: to set an attribute takes them longer than all else
        for config in _configs_of(model):
            _switched.setdefault(id(config), _Switched(vars(config)[_ATTENTION])).passes += 1
            vars(config)[_ATTENTION] = NAME


def end_attending(model: PreTrainedModel) -> None:
    """Undo one `begin_attending`."""
    with _switching:
        for config in _configs_of(model):
            switched = _switched[id(config)]
            switched.passes -= 1
            if not switched.passes:
                vars(config)[_ATTENTION] = _switched.pop(id(config)).name


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """The configs, of a model and its parts, by which it is switched to another attention; found
    out once.
    """
    if model not in _configs:
        parts = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        every = {id(config): config for part in parts for config in _with_parts(part)}
        before = {key: vars(config)[_ATTENTION] for key, config in every.items()}
        model.set_attn_implementation(NAME)
        _configs[model] = [
            config for config in every.values() if config._attn_implementation == NAME
        ]
        for key, config in every.items():
            vars(config)[_ATTENTION] = before[key]
    return _configs[model]


def _with_parts(config: Any) -> Iterator[Any]:
    """A config, and those that it holds."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name)) is not None:
            yield from _with_parts(part)


def _switched_name(config: Any) -> str | None:
    """The attention that a switched config asks for by itself; None: kvbench's, or none is
    switched.
    """
    switched = _switched.get(id(config))
    return None if switched is None or switched.name == NAME else switched.name


def _model_attention(module: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """What computes a call that no cache of kvbench's has a part in."""
    name = _switched_name(getattr(module, "config", None))
    if name is not None:
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            name, module_function(module, "eager_attention_forward")
        )
    plain = arguments.get("s_aux") is None and arguments.get("softcap") is None
    return sdpa_attention_forward if plain else _eager_attention


# -- a layer's attention and its mask --------------------------------------------------------------


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    note, mailbox.call = mailbox.call, None
    inputs, mailbox.inputs = mailbox.inputs, None
    if note is not None and _is_stored(module, note.layer):
        mailbox.stored = _Stored(weakref.ref(note.cache), note.layer, weakref.ref(note.key))
    elif note is None and mailbox.stored is not None:
        note = mailbox.stored.of_reader(module.layer_idx, key, value)
    if note is None:
        return _model_attention(module, kwargs)(module, query, key, value, attention_mask, **kwargs)
    cache = note.cache
    if not cache.belongs_to(module):
        cache.refuse_strange_model()
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)  # None: as in sdpa
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    call = note._replace(
        module=module, scaling=scaling, sinks=sinks, softcap=softcap, inputs=inputs
    )
    absorbed = absorbed_of(module, (note.key, note.value), key, value)
    if absorbed is not None:
        query, value = absorbed.queries(query), note.key
        key = torch.cat([note.key, note.value], dim=3)
        call = call._replace(key=key, value=value)
    reason = next(_unfit(module, query, key, value, attention_mask, call, kwargs), None)
    if reason is not None:
        raise ConfigError(f"{type(module).__name__}: {reason}")
    if attention_mask is not None:
        attention_mask = attention_mask.as_subclass(torch.Tensor)[:, 0, 0]
    out = cache.attend(call, query, attention_mask)
    if absorbed is not None:
        out = absorbed.outputs(out)
    return out.transpose(1, 2).contiguous(), None


class _Padding(torch.Tensor):
    """The padding mask of a pass, as [B, 1, 1, n], of which models may leave out queries."""


def _is_stored(module: Any, layer: int) -> bool:
    """Whether a later layer may attend what this one stores."""
    modes = getattr(getattr(module, "config", None), "kv_sharing_modes", None)
    return modes is not None and modes[layer] == "store"


def _unfit(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    note: Call,
    arguments: Mapping[str, Any],
) -> Iterator[str]:
    """Why kvbench would compute a call of a layer's attention wrong."""
    shared = module.layer_idx is None or module.layer_idx < 0  # by layers that say who they are
    if not shared and note.layer != module.layer_idx:
        yield f"it is layer {module.layer_idx} and stores its keys as layer {note.layer}"
    if arguments.get("dropout"):
        yield (
            f"its attention leaves weights out at random (dropout={arguments['dropout']}); expected"
            " model.eval()"
        )
    if arguments.get("position_bias") is not None:
        yield "its attention has a position_bias, which kvbench does not compute"
    # `_mask` gives none, or the padding, or `_HIDES`
    if mask is not None and not isinstance(mask, _Padding):
        yield (
            "it gives its attention a mask of its own, or of a window that its config does not tell"
        )
    # what the call says goes before what the module says, as in sdpa
    causal = arguments.get("is_causal")
    if (
        not getattr(module, "is_causal", True)
        if causal is None
        else not causal and query.shape[2] > 1
    ):
        yield "its attention looks ahead (is_causal=False)"
    if not (_same(key, note.key) and _same(value, note.value)):
        yield "it attends other keys and values than it stores"
    latent = getattr(type(module), "expand_kv", None) is not None  # values are parts of their keys
    if (
        not (latent or key.shape == value.shape)
        or query.shape[3] != key.shape[3]
        or query.shape[1] % key.shape[1]
    ):
        sizes = ", ".join(f"{list(part.shape[1::2])}" for part in (query, key, value))
        yield (
            f"its queries, keys and values have [heads, head_dim] {sizes}; expected one head_dim,"
            " heads shared out"
        )
    scaling, softcap = note.cache.logits or (note.scaling, note.softcap)
    if note.scaling != scaling:
        yield (
            f"its attention is scaled by {note.scaling:.6g} in layer {note.layer}, by"
            f" {scaling:.6g} elsewhere"
        )
    if note.softcap != softcap:
        yield f"its soft cap is {note.softcap} in layer {note.layer}, {softcap} elsewhere"


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same; of most models they are one."""
    return first.shape == second.shape and (
        first.data_ptr() == second.data_ptr() or torch.equal(first, second)
    )


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The model's own attention, which knows its sinks and its cap, under sdpa's mask: True where a
    query sees a key.
    """
    if mask is None and query.shape[2] > 1:  # sdpa's way to say causal
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    return (
        module_function(module, "eager_attention_forward")(
            module, query, key, value, mask, **kwargs
        )[0],
        None,
    )


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """For our caches the 2D padding mask as it is (None without padding); for any other, that of
    the model, or sdpa's.

    Raises
    ------
    ConfigError
        ours, and it is not causal.
    """
    ours, mailbox.masking = mailbox.masking, False
    if not ours:
        switched_name = _switched_name(kwargs.get("config"))
        if switched_name is None:
            return sdpa_mask(attention_mask=attention_mask, **kwargs)
        masks = ALL_MASK_ATTENTION_FUNCTIONS
        return (
            masks[switched_name](attention_mask=attention_mask, **kwargs)
            if switched_name in masks
            else None
        )
    if (window := kwargs.get("local_size")) is not None and window < kwargs["kv_length"]:
        return _HIDES  # some models make one that no layer is given
    if not _is_causal(attention_mask, **kwargs):
        name = getattr(kwargs.get("config"), "model_type", "this model")
        raise ConfigError(
            f"{name}: in layers with full attention its mask is not causal: some tokens of this"
            " input see later ones, as those of an image or of a prefix, or not all that came"
            " before; expected an input, such as text alone, of which each token sees itself and"
            " all before it"
        )
    if attention_mask is None:
        return None
    return attention_mask[:, None, None].as_subclass(_Padding)


# a mask that hides what came before, which no layer with full attention may be given
_HIDES = torch.empty(0, 0, 0)


def _is_causal(attention_mask: torch.Tensor | None, **kwargs: Any) -> bool:
    """Whether a mask that transformers asks for shows each token itself and all before it, but for
    padding.
    """
    if kwargs.get("allow_is_causal_skip") or kwargs.get("mask_function") is causal_mask_function:
        return True  # nothing was added to it: what is, forbids to leave it out
    full = {
        "attention_mask": attention_mask,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
    }
    mask = sdpa_mask(**kwargs | full)
    return torch.equal(
        mask,
        sdpa_mask(**kwargs | full | {"mask_function": causal_mask_function, "use_vmap": False}),
    )


def module_function(module: torch.nn.Module, name: str) -> Any:
    """A function of the file that has the module's class, or the one of which that is a kind; None:
    they have none.
    """
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
