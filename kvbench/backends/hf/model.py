"""A model of transformers made ready for kvbench, and engines for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.attention.executor import executor
from kvbench.backends.hf import rotary
from kvbench.backends.hf.continued import try_states
from kvbench.backends.hf.hooks import NAME
from kvbench.backends.hf.latent import absorbed_in
from kvbench.backends.hf.layers import (
    attention_modules,
    card_of,
    kept_layers,
    new_card,
    reading_of,
    shape_of,
)
from kvbench.backends.hf.rotary import RotaryOf
from kvbench.budget import Budget
from kvbench.config import ConfigError, MethodConfig, method_config, show
from kvbench.engine.engine import Engine
from kvbench.engine.replay import Template
from kvbench.memory.kinds import KV, NATIVE
from kvbench.method import HeadScores, Method, Shape
from kvbench.models import heads, hub


def use_kvbench_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to "kvbench" attention for good, see `make_ready`."""
    make_ready(model)
    model.set_attn_implementation(NAME)


def inner_model(model: Any) -> PreTrainedModel:
    """The model of transformers that peft has put adapters into; another one as it is.

    Raises
    ------
    ConfigError
        the adapter is no part of the model, but fills its cache.
    """
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in model.peft_config.items():
        if config.peft_type.value in ("PREFIX_TUNING", "CARTRIDGE"):
            raise ConfigError(
                f"{type(model).__name__}: its adapter {name} is {config.peft_type.value}, which"
                " fills a cache of its own with keys and values of no token; expected adapters in"
                " the model's weights, such as LoRA"
            )
    return model.get_base_model()


def make_ready(model: PreTrainedModel) -> None:
    """Learn what kvbench needs to know of a model, and refuse by name what it would run wrong.

    Raises
    ------
    ConfigError
        it is no model, or not one that kvbench runs.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"model={str(model)[:80]!r}: a loaded model, as"
            " AutoModelForCausalLM.from_pretrained(...) gives one"
        )
    name = type(model).__name__
    refuse_compiled(model)
    refuse_compiled_layers(model)
    refuse_training(model)
    new_card(model).refuse_unsupported(name)
    refuse_custom_attention(type(model), name)
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1 and (away := sorted(devices & {"cpu", "disk"})):
        raise ConfigError(
            f"{name}: some of its layers wait on {' and '.join(away)} (hf_device_map); expected all"
            " of them on GPUs"
        )
    reading_of(model)
    try_states(model)
    rotary.watch_length(model)


def refuse_compiled(model: torch.nn.Module) -> None:
    """Refuse a model that torch.compile has made, or is making, of another.

    Raises
    ------
    ConfigError
        names the model.
    """
    compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    if (
        compiled
        or hasattr(model.forward, "_torchdynamo_orig_callable")
        or torch.compiler.is_compiling()
    ):
        _say_compiled(type(getattr(model, "_orig_mod", model)).__name__)


@torch.compiler.disable
def _say_compiled(name: str) -> NoReturn:
    raise ConfigError(
        f"model={name}: compiled by torch.compile; expected the model as it was before, not"
        " compiled"
    )


def refuse_compiled_layers(model: torch.nn.Module) -> None:
    """Refuse a model of which layers that attend were compiled; others may be.

    Raises
    ------
    ConfigError
        names the model.
    """
    for part in model.modules():
        compiled = hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        if compiled and any(hasattr(inner, "layer_idx") for inner in part.modules()):
            _say_compiled(
                f"{type(model).__name__}, its {type(getattr(part, '_orig_mod', part)).__name__}"
            )


def refuse_training(model: torch.nn.Module) -> None:
    """Refuse gradient checkpointing in training: transformers gives layers no cache then.

    Raises
    ------
    ConfigError
        names the model.
    """
    if model.training and any(
        getattr(part, "gradient_checkpointing", False) for part in model.modules()
    ):
        raise ConfigError(
            f"{type(model).__name__}: trains with gradient checkpointing, where transformers reads"
            " without a cache; expected model.eval(), or gradient_checkpointing_disable()"
        )


def refuse_custom_attention(kind: type[PreTrainedModel], name: str) -> None:
    """Refuse a class of models that computes attention in a way of its own.

    Raises
    ------
    ConfigError
        names the model.
    """
    if not kind._can_set_attn_implementation():
        raise ConfigError(
            f"{name}: {kind.__name__} computes attention in a way of its own; kvbench runs models"
            " that use transformers' attention interface"
        )


@dataclass(frozen=True)
class EnginePlan:
    """What a `KVCache` begins each of its prompts with.

    Attributes
    ----------
    shape
        of a prompt of one token.
    settings
        of its engines, see `kvbench.engine.engine.Settings`.
    """

    model: PreTrainedModel
    method: Method
    budget: Budget
    tokenizer: PreTrainedTokenizerBase | None
    shape: Shape
    dense_layers: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        method: Method,
        budget: Budget,
        dense_layers: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
        settings: Mapping[str, Any],
    ) -> EnginePlan:
        """Checked, and the model made ready.

        Raises
        ------
        ConfigError
            the method needs what this model cannot give, or the model is none that kvbench runs.
        """
        make_ready(model)
        dense = _layer_indices(dense_layers, card_of(model).layers)
        shape, kv = shape_of(model, [1], dense, model.dtype, model.device), settings["kv"]
        more = engine_requirements(model, shape, method, budget, kv, tokenizer) | {
            "head_scores": head_scores_of(model, method)
        }
        executor(settings["attention"], shape, kv)
        return cls(model, method, budget, tokenizer, shape, dense, {**settings, **more})

    @property
    def shared(self) -> tuple[Any, ...]:
        """What copies of a cache have in common."""
        return self.model, self.tokenizer, self.settings

    def engine(self, lengths: Sequence[int], offsets: Sequence[int], columns: int) -> Engine:
        """An engine for prompts of these lengths; `offsets`, `columns`: as of `Engine`."""
        arguments = self.model, lengths, self.method, self.budget, self.dense_layers, self.tokenizer
        return engine_for(*arguments, offsets=offsets, columns=columns, **self.settings)

    def refuse_assisted(self, question: str) -> None:
        """Refuse assisted decoding where tokens cannot be taken back, or logits are missing.

        Raises
        ------
        ValueError
            names what it is, and what would be right.
        """
        kv, kept = self.settings["kv"], len(kept_layers(self.model))
        if not self.method.needs.crops or question != "after" or kept or kv.grouped:
            raise ValueError(
                f"assisted decoding with {type(self.method).__name__}, question={question},"
                f" kv={kv}, {kept} layers with a window or a state: it reads several tokens at once"
                " and takes some back; expected a method whose needs say crops=True,"
                " question=after, tokens coded one by one, and full attention in every layer"
            )


def _layer_indices(layers: Collection[int], count: int) -> tuple[int, ...]:
    """Indices of layers, checked against how many there are."""
    right = not isinstance(layers, str) and isinstance(layers, Collection)
    if not right or any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise ConfigError(
            f"dense_layers={layers!r}: indices of the model's layers, 0 to {count - 1}; () for none"
        )
    return tuple(sorted(set(layers)))


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
    """An engine that runs `method` on prompts of these lengths; `settings` as for `Engine`.

    Raises
    ------
    ConfigError
        the method needs what this model cannot give.
    """
    shape = shape_of(model, lengths, dense_layers, model.dtype, model.device)
    if "rotary" not in settings:
        settings |= engine_requirements(
            model, shape, method, budget, settings.get("kv", NATIVE), tokenizer
        )
    rotary.refuse_recomputed(model, lengths, settings.get("new_tokens") or 0)
    if rotary.stretches(model):  # its angles are another number of the host's in every step
        settings["cuda_graphs"] = False
    if method.needs.token_text:
        settings["pieces"] = vocabulary_text(tokenizer)
    if method.needs.head_scores and settings.get("head_scores") is None:
        raise ConfigError(
            f"head_scores=None: {type(method).__name__} needs those that kvbench calibrate makes"
        )
    kept = kept_layers(model)
    if kept:  # windows count columns, and states take them in: padding stands on the left
        settings.setdefault("offsets", [max(lengths) - length for length in lengths])
    # a function, which a copied engine shares: of a `partial` it would copy the model
    engine = kind(
        shape, method, budget, output=lambda layer: output_weight(model, layer), **settings
    )
    engine.windowed = kept
    return engine


def output_weight(model: PreTrainedModel, layer: int) -> torch.Tensor:
    """The weight [Hq, D, hidden size] that takes a layer's heads into the hidden states.

    Raises
    ------
    ConfigError
        its attention has none by a name that is known, or holds it in other than plain numbers.
    """
    module = attention_modules(model)[layer]
    names = [name for name in ("o_proj", "dense", "out_proj") if hasattr(module, name)]
    weight = getattr(getattr(module, names[0]), "weight", None) if names else None
    absorbed = absorbed_in(module)
    head_dim = reading_of(model).calls[layer].key.shape[3]
    head_dim = head_dim if absorbed is None else absorbed.value.shape[2]
    if (
        not isinstance(weight, torch.Tensor)
        or not weight.is_floating_point()
        or weight.shape[1] % head_dim
    ):
        raise ConfigError(
            f"{type(module).__name__}: no output weight found; expected o_proj of plain numbers"
        )
    output = weight.T.unflatten(0, (-1, head_dim))
    return output if absorbed is None else absorbed.value @ output


def engine_requirements(
    model: PreTrainedModel,
    shape: Shape,
    method: Method,
    budget: Budget,
    kv: KV,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """What of a model a method needs, as a setting of an engine, whatever the prompt.

    Raises
    ------
    ConfigError
        it is not there, or its keys and values cannot be held as asked; or no layer is left to the
        method.
    """
    needs, name = method.needs, type(method).__name__
    if not shape.sparse_layers and not (method.evicts == "never" and method.at_rest):
        raise ConfigError(
            f"dense_layers={list(shape.full_layers)}: all that have full attention, which leaves"
            f" none to {name}; expected fewer, or method=full"
        )
    sizes = shape.head_dim, shape.layers, len(shape.windows), shape.latent_dim
    of_method = method, name, budget.counts_generated, shape.latent_dim
    for reason in (*kv.unfit(*sizes), *kv.unfit_for(*of_method)):
        raise ConfigError(reason)
    if needs.token_text and tokenizer is None:
        raise ConfigError(f"tokenizer=None: {name} reads the text of tokens; pass the tokenizer")
    requirements: dict[str, Any] = {
        "rotary": None,
        "template": Template.of(tokenizer, name) if needs.prefix else None,
    }
    if needs.positions == "cache" or needs.rotation:
        instead = "positions=original" if needs.positions == "cache" else "another method"
        requirements["rotary"] = RotaryOf(model, shape.sparse_layers, instead)
    return requirements


def vocabulary_text(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every token id, spaces as in running text.

    Bytes that are no whole character become U+FFFD.
    """
    if len(_texts.get(tokenizer, ())) != len(tokenizer):
        pieces, words = (
            tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
            tokenizer.convert_tokens_to_string,
        )
        # SentencePiece writes a space as U+2581 and would strip it from a piece that stands alone
        _texts[tokenizer] = [
            p.replace("\u2581", " ") if "\u2581" in p else words([p]) for p in pieces
        ]
    return _texts[tokenizer]


# Of each tokenizer, for all engines: it takes a tenth of a second.
_texts: WeakKeyDictionary[PreTrainedTokenizerBase, list[str]] = WeakKeyDictionary()


def method_named(name: str, **options: Any) -> Method:
    """The method called `name` in conf/method, built with its defaults and `options`."""
    method: Method = method_config(name, **options).build()
    return method


def head_scores_of(model: PreTrainedModel, method: Method) -> HeadScores | None:
    """The scores of a model's heads that a method asks for; None: for none.

    Raises
    ------
    ConfigError
        there are none, or those of the file are of another model.
    """
    source, path = method.needs.head_scores, model.config._name_or_path
    if source is None:
        return None
    if path:
        calibration = heads.calibration_of(
            hub.ModelSource(Path(path).name, path, ()),
            source,
            f"model.path={path}",
            kind=method.needs.measures,
        )
    elif source == heads.AUTO:  # made of a config, and not read from files
        calibration = None
    else:
        calibration = heads.read(Path(source).expanduser(), method.needs.measures)
    if calibration is None:
        raise ConfigError(
            f"{method.needs.measures}=auto: the model is not from a file; give"
            f" {method.needs.measures}=FILE of kvbench calibrate"
        )
    return calibration.scores


def method_of(method: Any, options: dict[str, Any]) -> tuple[Method, MethodConfig, str]:
    """A method, what its YAML says, and its name.

    Raises
    ------
    ConfigError
        there is none of this name, or what is given is none.
    """
    if isinstance(method, str):
        config = method_config(method, **options)
        return config.build(), config, method
    if not isinstance(method, Method):
        raise ConfigError(
            f"method={show(method)}: expected the name of a method, such as 'quest', or a Method"
            " object"
        )
    if options:
        raise ConfigError(
            f"{', '.join(options)}: no such argument; give a Method object its options yourself"
        )
    return method, MethodConfig(), type(method).__name__
