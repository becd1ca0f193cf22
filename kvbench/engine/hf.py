"""The only file that knows transformers' cache and attention interfaces.

A cache layer here only counts: `update()` leaves a note of (cache, layer) for the attention function, which runs next
in the same thread, and hands back the NEW keys and values. The attention function gives them to an `Engine`. A model
switched to "kvbench" attention but run with another cache, or none, computes sdpa as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvbench import hub
from kvbench.budget import Accounting, Budget
from kvbench.config import ConfigError, build, method_config
from kvbench.engine import heads
from kvbench.engine.engine import Engine
from kvbench.engine.positions import Angles
from kvbench.engine.support import refuse_unsupported
from kvbench.method import HeadScores, Method, Needs, Shape

NAME = "kvbench"
AUDIT_EVERY = 8  # a user's own generate() shall not pay for a count of every union at every step


class _Mailbox(threading.local):
    """Hand-over between the hooks of one forward pass; every note is taken once."""

    call: tuple[_CountingCache, int] | None = None
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
        self.seen += key_states.shape[-2]
        _mailbox.call = (self.owner, self.layer)
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


class _CountingCache(Cache):
    """A cache of counting layers. Subclasses say what a forward pass means."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_CountingLayer(self, layer) for layer in range(layers)])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None
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
        super().__init__(engine.shape.layers)
        self.engine = engine

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one layer by the engine, in the phase that the loop is in; see `Engine.attend`."""
        return self.engine.attend(layer, query, key, value)


class KVCache(_CountingCache):
    """A KV-cache method inside plain `model.generate(past_key_values=KVCache(model, ...))`.

    The first forward pass is the prompt (left padding allowed) and is dense; each later one is a decode step. One
    KVCache serves one call of `generate`.

    Args:
        model: a transformers causal language model; switched to "kvbench" attention.
        method: a method's name (with its options as keywords), or a Method object.
        budget: tokens (int), a fraction of the prompt (float in (0, 1]), or None: the method's own sizes.
        accounting: "paper" or "unified" (what counts inside the budget).
        dense_layers: true indices of layers that always attend everything.
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
        self._head_scores = _head_scores(model, self._method)
        super().__init__(model.config.get_text_config().num_hidden_layers)
        self._model = model
        self._dense_layers, self._prompt_length = dense_layers, prompt_length
        self._attention, self._tokenizer, self._seed = attention, tokenizer, seed
        self.engine: Engine | None = None
        _remember_input_ids(model)
        self._watched = ExitStack()
        self._watch_prompt()

    @property
    def batch_size(self) -> int:
        """Rows of the generation; -1 before the first prompt."""
        return -1 if self.engine is None else self.engine.shape.batch

    def reset(self) -> None:
        """Forget everything; the next forward pass is a new prompt."""
        super().reset()
        self.engine = None
        self._watch_prompt()

    def _watch_prompt(self) -> None:
        self._watched.close()
        self._watched.enter_context(residuals_watched(self._model, self._method.needs))

    def audit(self) -> dict[str, Any]:
        """What was attended and held so far; keys as in `summary.json`."""
        if self.engine is None:
            raise ValueError("nothing to audit: no prompt was read yet")
        return self.engine.report()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one layer, see `Engine.attend`; layer 0 opens the forward pass, the last one closes a step."""
        if layer == 0:
            self._start_forward(query, padding)
        assert self.engine is not None
        decoding = self.engine.prefilled
        out = self.engine.attend(layer, query, key, value)
        if decoding and layer == self.engine.shape.layers - 1:
            self._watched.close()  # of the prompt all is known
            self.engine.settle()
        return out

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
                head_scores=self._head_scores,
            )
        if not self.engine.prefilled:
            self.engine.start_chunk(ids)
        elif width == 1:
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
    refuse_unsupported(model.config.get_text_config().to_dict(), type(model).__name__)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def shape_of(
    model: PreTrainedModel,
    lengths: Sequence[int],
    dense_layers: Collection[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Shape:
    """The Shape of a generation on `model` for prompts of these lengths."""
    config = model.config.get_text_config()
    attention = _attention_module(model)
    return Shape(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        lengths=tuple(lengths),
        dtype=dtype,
        device=device,
        scaling=float(attention.scaling),
        sparse_layers=tuple(layer for layer in range(config.num_hidden_layers) if layer not in dense_layers),
    )


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


def _attention_module(model: PreTrainedModel) -> Any:
    """The first attention module; all have the same sizes and scaling."""
    return next(module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling"))


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
        settings["rotary"] = RotaryOf(model)
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


class RotaryOf:
    """The model's own rotary positions, see `kvbench.engine.positions.Rotary`.

    Raises:
        ConfigError: the model's angles depend on the length, so a stored key cannot be turned to another position.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ConfigError(
                f"model={type(model).__name__}: its {kind} RoPE changes with the length, so positions inside the cache "
                "cannot be given; use positions=original"
            )
        self._rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
        self._apply = sys.modules[type(_attention_module(model)).__module__].apply_rotary_pos_emb

    def angles(self, by: torch.Tensor) -> Angles:
        """cos and sin [B, L, n, D] of a turn by [B, L, n] positions."""
        flat = by.flatten(0, 1)
        parts = self._rotary(torch.empty(0, device=by.device), flat)  # read for its dtype and device
        cos, sin = (part.unflatten(0, by.shape[:2]) / self._rotary.attention_scaling for part in parts)
        return cos, sin

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D] of any dtype, turned in float32."""
        lists = vectors.float().reshape(-1, vectors.shape[1] // angles[0].shape[1], *vectors.shape[2:])
        cos, sin = (part.flatten(0, 1) for part in angles)
        turned: torch.Tensor = self._apply(lists, lists[:, :0], cos, sin)[0]
        return turned.view_as(vectors).to(vectors.dtype)


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
    if call is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    cache, layer = call
    assert layer == module.layer_idx, "a cache layer was updated out of order"
    return cache.attend(layer, query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """For our caches the 2D padding mask as it is (None without padding); for any other, sdpa's."""
    ours, _mailbox.masking = _mailbox.masking, False
    if not ours:
        return sdpa_mask(attention_mask=attention_mask, **kwargs)
    return attention_mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

__all__ = ["NAME", "ConfigError", "EngineCache", "KVCache", "method_named", "shape_of", "use_kvbench_attention"]
