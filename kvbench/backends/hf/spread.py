"""A model on several GPUs, consecutive layers on each: `model.device_map=balanced | auto`.

A part of the model brings what it is given to where it is; nothing else of transformers knows that
the model is spread. Keys, values and indexes of a layer lie with the layer (`Shape.device_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench.backends.hf.layers import card_of
from kvbench.config import ConfigError


def devices_for(device_map: str) -> list[torch.device]:
    """The GPUs that a device map is about.

    Raises
    ------
    ConfigError
        there are not several, or `auto` lacks accelerate.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise ConfigError(
            f"model.device_map={device_map}: torch sees {count} CUDA devices here; expected two or"
            " more, or null"
        )
    if device_map == "auto" and find_spec("accelerate") is None:
        raise ConfigError(
            "model.device_map=auto: needs accelerate; pip install 'kvbench[models]', or take"
            " balanced"
        )
    return [torch.device("cuda", index) for index in range(count)]


def places_of(
    model: PreTrainedModel, device_map: str, devices: Sequence[torch.device]
) -> list[torch.device]:
    """The device of each decoder layer.

    Parameters
    ----------
    model
        on the CPU.
    device_map
        "balanced", as many layers on each, or "auto", as accelerate shares out the bytes of all
        parts.
    devices
        those to take.

    Raises
    ------
    ConfigError
        accelerate finds no room on the GPUs for all layers.
    """
    layers = decoder_layers(model)
    if device_map == "balanced":
        return [devices[index * len(devices) // len(layers)] for index in range(len(layers))]
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(model._no_split_modules or ())
    room = get_balanced_memory(model, no_split_module_classes=whole)
    placement = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    names = {id(module): name for name, module in model.named_modules()}
    places = [_entry(placement, names[id(layer)]) for layer in layers]
    if away := [place for place in places if not isinstance(place, int)]:
        raise ConfigError(
            f"model.device_map={device_map}: {len(away)} of {len(layers)} layers have no room on"
            f" {len(devices)} GPUs; expected a smaller model, or more of them"
        )
    return [torch.device("cuda", place) for place in places]


def _entry(device_map: dict[str, Any], name: str) -> Any:
    """The entry of a module in a map of modules: its own, or that of the nearest one around it."""
    enclosing = (key for key in device_map if not key or f"{name}.".startswith(f"{key}."))
    return device_map[max(enclosing, key=len)]


def spread(model: PreTrainedModel, places: Sequence[torch.device]) -> None:
    """Put each decoder layer of a model on its device.

    What comes before the layers goes with the first, what comes after with the last; but an output
    layer whose weight is the embedding's stays with that.
    """
    layers, head = decoder_layers(model), model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    for part, after in _parts(model, layers):
        if part is layers:
            for layer, place in zip(layers, places, strict=True):
                _put(layer, place)
        else:
            _put(part, places[-1] if after and not (part is head and tied) else places[0])


def devices_under(model: PreTrainedModel) -> int:
    """How many devices hold the weights of a model."""
    return len({parameter.device for parameter in model.parameters()})


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    count = card_of(model).layers
    return next(
        part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count
    )


def _parts(module: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[nn.Module, bool]]:
    """The layers, and the largest parts of a module without them.

    With each: whether it has weights and comes after the layers.
    """
    after = False
    for child in module.children():
        if child is layers:
            yield child, False
            after = True
        elif any(part is layers for part in child.modules()):
            yield from _parts(child, layers)
            after = True
        else:
            yield child, after and next(child.parameters(), None) is not None


def _put(part: nn.Module, device: torch.device) -> None:
    part.to(device)
    part.register_forward_pre_hook(partial(_bring, device), with_kwargs=True)


def _bring(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _on(device, args), _on(device, kwargs)


def _on(device: torch.device, value: Any) -> Any:
    """What a module is given, its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _on(device, part) for key, part in value.items()}
    return (
        type(value)(_on(device, part) for part in value) if type(value) in (list, tuple) else value
    )
