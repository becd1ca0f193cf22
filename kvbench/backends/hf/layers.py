"""What is known of a loaded model: its card, and what its layers hand to their attention."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from kvbench.backends.hf.hooks import Call, CountingCache, begin_attending, end_attending, mailbox
from kvbench.backends.hf.kept import KeptLayer, new_layers
from kvbench.config import ConfigError, first_line
from kvbench.method import Shape
from kvbench.models.card import ModelCard
from kvbench.models.rope import FULL

_cards: weakref.WeakKeyDictionary[PreTrainedModel, ModelCard] = weakref.WeakKeyDictionary()


def card_of(model: PreTrainedModel) -> ModelCard:
    """The card of a loaded model, as it was when it was last made ready."""
    return _cards.get(model) or new_card(model)


def new_card(model: PreTrainedModel) -> ModelCard:
    """The card of a loaded model by its config as it is now, which holds from here on.

    Raises
    ------
    ConfigError
        rope parameters that no model can have.
    """
    _cards[model] = ModelCard.of_config(model.config, f"{type(model).__name__}: ")
    return _cards[model]


def kept_layers(model: PreTrainedModel) -> dict[int, KeptLayer]:
    """The layers of a new cache that transformers keeps all or a part of, by index."""
    return new_layers(model.config, card_of(model).layer_kinds)


class _Reading(CountingCache):
    """The cache of a forward pass of one token, which notes the calls of full attention."""

    def __init__(self, layers: int, kept: Mapping[int, KeptLayer]) -> None:
        super().__init__(layers, kept)
        self.calls: dict[int, Call] = {}
        self.reuses: dict[int, int] = {}  # layers that attend what another one stores, and which
        self.modules: list[Any] = []  # of attention
        self.queries: dict[int, torch.Tensor] = {}

    def refuse_strange_model(self) -> NoReturn:
        """The model does not use transformers' interfaces as others do.

        Raises
        ------
        ConfigError
            always.
        """
        raise ConfigError(
            "it makes its masks, or biases of its attention, by functions of its own; kvbench runs"
            " models that use transformers' attention and mask interfaces"
        )

    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """What one token attends: itself."""
        self.queries[call.layer] = query
        self.modules.append(call.module)
        if call.source is None:
            self.calls[call.layer] = call
        else:
            self.reuses[call.layer] = call.source
        return call.value.repeat_interleave(query.shape[1] // call.value.shape[1], dim=1)

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value [1, heads, 1, D] of the last call of a layer's attention."""
        return self.queries[layer], self.calls[layer].key, self.calls[layer].value


@torch.no_grad()
def read_token(
    model: PreTrainedModel, position: int | None = None, windows: bool = True
) -> _Reading:
    """The calls of all layers with full attention as the model reads a token.

    Parameters
    ----------
    position
        of the token; None: it is the first.
    windows
        leave those to transformers; else, in a model without states, all layers are read.

    Raises
    ------
    ConfigError
        the model hands its attention what kvbench would compute wrong.
    """
    card, name = card_of(model), type(model).__name__
    reading = _Reading(card.layers, kept_layers(model) if windows else {})
    # whose embedding may be zero
    token = next(token for token in (3, 4) if token != card.padding_id)
    ids = torch.full((1, 1), min(token, card.vocabulary - 1), device=model.device)
    arguments = {} if position is None else {"position_ids": torch.full_like(ids, position)}
    begin_attending(model)
    try:
        # neither the model itself, as what is hooked to it is not for this pass, nor its head,
        # which is not asked
        model.base_model.forward(
            input_ids=ids, past_key_values=reading, use_cache=True, **arguments
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}" if name not in str(error) else str(error)) from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: reading a token through kvbench's attention fails, {type(error).__name__}:"
            f" {first_line(error)}; kvbench runs models that attend through transformers' attention"
            " interface what they store"
        ) from error
    finally:
        mailbox.call, mailbox.masking = None, False
        end_attending(model)
    full = set(range(card.layers)) - (card.windows.keys() if windows else set())
    if reading.calls.keys() != full:
        raise ConfigError(
            f"{name}: of its {len(full)} layers with full attention {len(reading.calls)} store and"
            " attend keys through transformers' attention interface; expected all of them"
        )
    if reading.reuses.keys() != (expected := _readers(model)):
        raise ConfigError(
            f"{name}: of its {len(expected)} layers that reuse the keys of others with full"
            f" attention {len(reading.reuses)} attend these as they were stored; expected all, on"
            " one device"
        )
    return reading


def _readers(model: PreTrainedModel) -> set[int]:
    """The layers that attend what other ones with full attention have stored, by the config."""
    config = model.config.get_text_config(decoder=True)
    modes = getattr(config, "kv_sharing_modes", None) or ()
    kinds = getattr(config, "layer_types", None) or ()
    shared = enumerate(zip(modes, kinds, strict=False))
    return {layer for layer, pair in shared if pair == ("reuse", FULL)}


_read: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[int], _Reading]] = (
    weakref.WeakKeyDictionary()
)


def reading_of(model: PreTrainedModel) -> _Reading:
    """`read_token`, once for each model as long as it has the same modules.

    Raises
    ------
    ConfigError
        as there.
    """
    modules = [id(module) for module in model.modules()]
    cached_modules, reading = _read.get(model, ([], None))
    if reading is None or cached_modules != modules:
        reading = read_token(model)
        _read[model] = modules, reading
    return reading


def attention_modules(model: PreTrainedModel) -> dict[int, Any]:
    """The attention modules of the layers with full attention, by index."""
    return {layer: call.module for layer, call in reading_of(model).calls.items()}


def _device_of(module: torch.nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module's weights lie; `otherwise`: no weight says so, as where they are packed."""
    return next((weight.device for weight in module.parameters()), otherwise)


def shape_of(
    model: PreTrainedModel,
    lengths: Sequence[int],
    dense_layers: Collection[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Shape:
    """The Shape of a generation on `model` for prompts of these lengths.

    Raises
    ------
    ConfigError
        its layers differ in something that a method knows once for all.
    """
    reading, card = reading_of(model), card_of(model)
    full = reading.calls.values()
    sizes = {
        (*call.key.shape[1::2], call.value.shape[3], call.scaling, call.softcap) for call in full
    }
    query_heads = {query.shape[1] for query in reading.queries.values()}
    if len(sizes) > 1 or len(query_heads) > 1:
        raise ConfigError(
            f"model={type(model).__name__}: its layers differ in heads, head_dim, scaling or"
            " softcap; expected one of each"
        )
    [(kv_heads, head_dim, value_dim, scaling, softcap)] = sizes
    modules = attention_modules(model)
    places = {layer: _device_of(module, device) for layer, module in modules.items()}
    return Shape(
        layers=card.layers,
        query_heads=query_heads.pop(),
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent_dim=0 if value_dim == head_dim else value_dim,
        lengths=tuple(lengths),
        dtype=dtype,
        device=device,
        scaling=scaling,
        sparse_layers=tuple(layer for layer in sorted(modules) if layer not in dense_layers),
        windows=card.windows,
        elsewhere={layer: place for layer, place in places.items() if place != device},
        softcap=softcap,
        reuses=reading.reuses,
    )
