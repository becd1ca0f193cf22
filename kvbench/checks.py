"""One composed config, checked before anything heavy loads: every key and value that can be wrong without a model.

`check` sees each job of a sweep before the first one starts, and again when its turn comes. What needs the tokenizer or
the model itself is checked where those are met. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import hub, smoke
from kvbench.config import (
    FACTS,
    ConfigError,
    build,
    check_types,
    check_valid,
    conf_dir,
    first_line,
    groups,
    nearest_key,
    root_keys,
    shipped,
    show,
)
from kvbench.protocol import Protocol
from kvbench.results import refuse_other_formats

__all__ = ["ConfigError", "arm_name", "check", "check_budget", "composed", "leaves", "refuse_unsupported", "window"]

REQUIRED = ("model.name", "method.name", "method._target_", "task.name", "task._target_")

ONE_OF = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "reference", "torch", "flashinfer"),
    "model.weights": ("pretrained", "dummy"),
}

# The lowest value of each whole number, and whether null will do.
LOWEST = {"seed": (0, False), "probe.every": (0, False), "threads": (1, True), "task.limit": (1, True)}

# Keys of a transformers config that only models with other layers than attention have.
OTHER_LAYERS = re.compile(r"mamba_|ssm_|attn_layer_|layers_block_type$|block_types$|state_size$")

# What FlashInfer's kernels are compiled for, and what to do where it is not installed.
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = ("bfloat16", "float16")
FLASHINFER_MISSING = "the package is not installed, pip install 'kvbench[flashinfer]'"

# What torch calls CUDA has one of these on Linux: NVIDIA's driver, its embedded boards, under Windows, or AMD's driver.
DEVICE_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def check(cfg: DictConfig, here: bool = True) -> None:
    """Refuse a composed config that cannot run.

    Args:
        cfg: the config, without Hydra's own part.
        here: it will run on this machine, so this one's device and network are asked for too.

    Raises:
        ConfigError: one line that names the first bad key, its value and what would be right.
        ResultsError: the results there are of another format.
    """
    _check_keys(OmegaConf.to_container(cfg))
    try:
        run: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    _check_values(run)
    source = hub.source_of(run["model"])
    shape = _model_shape(run["model"], source)
    _check_protocol(run, shape, source)
    if run["attention"] == "flashinfer" and (reason := next(_no_flashinfer(run, shape, here), None)):
        raise ConfigError(f"attention=flashinfer: {reason}; attention=auto takes what runs")
    lengths = _token_lengths(run["task"])
    _check_window(run, shape, source, lengths)
    _check_budget_of(run, lengths)
    _check_results_dir(run["results_dir"])
    refuse_other_formats(run["results_dir"], run["task"]["name"], source.name, arm_name(run))
    if here:
        _check_task(run["task"])
        _check_device(run["device"])
        if source.path is not None and source.folder is None:
            hub.refuse_out_of_reach(source.path)


def composed(*words: str) -> DictConfig:
    """The checked config that these words make on the command line, for scripts and notebooks.

    Raises:
        ConfigError: as the command line would say it.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = smoke.applied(compose("config", list(words)))
    except HydraException as error:
        raise ConfigError(first_line(error)) from error
    check(config)
    return config


def _check_keys(run: Any) -> None:
    """Every key is known, none that all runs need is missing, and values have the type of their defaults."""
    given = dict(leaves(run))
    needed = {key for key, _ in leaves(root_keys())}
    for key in sorted((needed | set(REQUIRED)) - given.keys()):
        raise ConfigError(f"{key}: missing; every run needs it")
    known = needed.union(*(_known(group, run[group]) for group in groups() if group in run))
    for key in sorted(given.keys() - known):
        raise ConfigError(f"{key}={show(given[key])}: no such key; {nearest_key(key, known | set(groups()))}")
    for group in ("method", "task"):
        original = shipped(group, str(run[group]["name"])) or {}
        check_types(group, run[group], original)
        for key in sorted(FACTS & original.keys()):
            if run[group].get(key) != original[key]:
                raise ConfigError(
                    f"{group}.{key}={show(run[group].get(key))}: a fact of {original['name']}, not a setting"
                )


def leaves(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys of the two levels a config has; what lies deeper (a model's transformers config) is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", value[inner]) for inner in value)
        else:
            yield key, value


def _known(group: str, chosen: Mapping[str, Any]) -> set[str]:
    """The keys of a choice: those of the file that kvbench ships, and whatever a user's own file has."""
    original = shipped(group, str(chosen["name"]))
    own = original is None or original.get("_target_") != chosen.get("_target_")
    return {f"{group}.{key}" for key in (chosen if original is None or own else original)}


def _check_values(run: Any) -> None:
    given = dict(leaves(run))
    for key, allowed in ONE_OF.items():
        if given.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key}={show(given[key])}: expected {' | '.join(allowed)}")
    for key, (lowest, null) in LOWEST.items():
        value = given.get(key, lowest)
        if not (value is None and null) and (type(value) is not int or value < lowest):
            expected = f"a whole number, {lowest} or more" + (", or null" if null else "")
            raise ConfigError(f"{key}={show(value)}: expected {expected}")
    if type(run["smoke"]) is not bool:
        raise ConfigError(f"smoke={show(run['smoke'])}: expected true | false")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(run["device"])):
        raise ConfigError(f"device={show(run['device'])}: expected auto | cpu | cuda | cuda:N")
    for group in ("method", "task"):
        check_valid(group, run[group], run[group].get("valid") or {})


def _check_protocol(run: Any, shape: Mapping[str, Any], source: hub.Source) -> None:
    """The protocol's own checks, and its dense layers against a model whose depth is known."""
    try:
        protocol = Protocol(**run["protocol"])
        if "num_hidden_layers" in shape:
            published = run["method"].get("published_dense_layers") or []
            protocol.dense_layers_of(source.dense_layers, published, shape["num_hidden_layers"])
    except ValueError as error:
        raise ConfigError(first_line(error)) from error


def _model_shape(model: Mapping[str, Any], source: hub.Source) -> Mapping[str, Any]:
    """The transformers config of the model, as far as it can be known here: nothing of a hub id never loaded before.

    Raises:
        ConfigError: no such folder, not a model folder, or a model that kvbench would run wrong.
    """
    label = f"model={source.name}" if source.path is None else f"model.path={source.path}"
    if source.path is None:
        shape = model.get("config") or {}
    elif source.folder is not None:
        shape = hub.config_in(source.folder, source.path)
        hub.refuse_no_weights(source.folder, source.path)
    elif (cached := hub.cached_folder(source.path)) is not None:
        shape = hub.config_in(cached, source.path)
    else:
        original = shipped("model", str(model["name"])) or model
        shape = model.get("config") or {} if original["path"] == source.path else {}
    refuse_unsupported(shape, label)
    return _text(shape)


def _check_device(device: str) -> None:
    """Refuse CUDA where there is plainly none; `kvbench.models` asks torch itself, which takes seconds to import."""
    if device.startswith("cuda") and (reason := _no_cuda()):
        raise ConfigError(f"device={device}: {reason}; use device=cpu or device=auto")


def _no_cuda() -> str | None:
    """Why there is plainly no CUDA on this machine; None where there may be."""
    if version("torch").endswith("+cpu"):
        return f"torch {version('torch')} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every device"
    if sys.platform != "linux" or not any(map(glob, DEVICE_NODES)):
        return "there is no CUDA device here"
    return None


def _no_flashinfer(run: Any, shape: Mapping[str, Any], here: bool) -> Iterator[str]:
    """What keeps FlashInfer from this run, as far as it shows without torch."""
    head_dim = _head_dim(shape)
    if head_dim is not None and head_dim not in FLASHINFER_HEAD_DIMS:
        yield f"head dim {head_dim} is not one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
    if run["dtype"] not in ("auto", *FLASHINFER_DTYPES):
        yield f"dtype {run['dtype']} is not one of {', '.join(FLASHINFER_DTYPES)}"
    if run["device"] == "cpu":
        yield "cpu is not a CUDA device"
    if here and (reason := _no_cuda()):
        yield reason
    if here and find_spec("flashinfer") is None:
        yield FLASHINFER_MISSING


def _head_dim(shape: Mapping[str, Any]) -> int | None:
    """Size of an attention head by a transformers config; None where it does not say."""
    width, heads = shape.get("hidden_size"), shape.get("num_attention_heads")
    return shape.get("head_dim") or (width // heads if width and heads else None)


def refuse_unsupported(model_config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose attention kvbench would compute wrong: sliding-window, soft-capped, latent, hybrid.

    Args:
        model_config: a transformers config as a mapping, from `config.json` or `to_dict()`.
        name: what the message calls the model.

    Raises:
        ConfigError: names the model and the key that says so.
    """
    config = _text(model_config)
    reason = next(_unsupported(config), None)
    if reason is not None:
        kind = config.get("model_type", "this architecture")
        raise ConfigError(f"{name}: {kind} has {reason}; kvbench runs models with full attention in every layer")


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        yield f"layers of other kinds (layer_types: {', '.join(others)})"
    # layer_types says which layers use the window; without it the window holds for all, or as from max_window_layers.
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    first, layers = config.get("max_window_layers") or 0, config.get("num_hidden_layers", math.inf)
    if window is not None and not config.get("layer_types") and first < layers:
        yield f"sliding-window attention (sliding_window={window})"
    if config.get("attn_logit_softcapping") is not None:
        yield f"soft-capped attention (attn_logit_softcapping={config['attn_logit_softcapping']})"
    if config.get("attention_chunk_size") is not None:
        yield f"chunked attention (attention_chunk_size={config['attention_chunk_size']})"
    if config.get("kv_lora_rank") is not None:
        yield f"latent attention (kv_lora_rank={config['kv_lora_rank']})"
    for key, value in config.items():
        if value is not None and OTHER_LAYERS.match(key):
            yield f"layers other than attention ({key})"


def _text(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that may hold others beside it."""
    part = model_config.get("text_config")
    return part if isinstance(part, Mapping) else model_config


def _token_lengths(task: Mapping[str, Any]) -> list[int]:
    """Prompt lengths in tokens; empty where the task has none, or counts them in another unit."""
    if "lengths" not in task:
        return []
    lengths = task["lengths"] or []
    right = lengths and all(type(length) is int and length > 0 for length in lengths)
    if not right or len(set(lengths)) < len(lengths):
        raise ConfigError(
            f"task.lengths={show(lengths)}: expected different whole numbers, 1 or more, such as [1024,4096]"
        )
    return list(lengths) if task.get("unit", "tokens") == "tokens" else []


def window(model_config: Mapping[str, Any]) -> int | None:
    """Tokens that the positions of a model reach, by its transformers config; None where that does not say."""
    config = _text(model_config)
    limit = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if limit is None or rope.get("rope_type", rope.get("type")) != "yarn":
        return limit
    # YaRN as its authors write it leaves max_position_embeddings at the length before stretching.
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int((rope.get("factor") or 1) * original))


def _check_task(task: Mapping[str, Any]) -> None:
    """The task's own checks of its options, and whether its data can be had; tasks import nothing heavy."""
    for source in getattr(build(task), "sources", ()):
        try:
            source.check()
        except ValueError as error:
            raise ConfigError(first_line(error)) from error


def _check_window(run: Any, shape: Mapping[str, Any], source: hub.Source, lengths: list[int]) -> None:
    limit, new_tokens = window(shape), run["task"].get("new_tokens") or 0
    if limit is not None and lengths and max(lengths) + new_tokens > limit:
        raise ConfigError(
            f"task.lengths={show(lengths)}: {max(lengths)} tokens and {new_tokens} new ones do not fit "
            f"the window of {source.name}, {limit} tokens" + hub.how_to_stretch(source.path is None)
        )


def _check_budget_of(run: Any, lengths: list[int]) -> None:
    method, accounting = run["method"], run["protocol"]["accounting"]
    check_budget(run["budget"], method["name"], method.get("minimum"), accounting, method.get("preset"))
    least = (method.get("minimum") or {}).get(accounting)
    if isinstance(run["budget"], float) and lengths and least is not None:
        # As Budget.tokens rounds: 0.1 of 30 is 3, though it is 3.0000000000000004 in binary.
        tokens = math.ceil(round(run["budget"] * min(lengths), 9))
        if tokens < least:
            raise ConfigError(
                f"budget={run['budget']}: {tokens} of {min(lengths)} tokens, "
                f"below the minimum of {method['name']}, {least} tokens (protocol.accounting={accounting})"
            )


def check_budget(
    budget: Any, method: str, minimum: Mapping[str, int | None] | None, accounting: str, preset: int | None = None
) -> None:
    """Refuse a budget that is none, or that a method cannot keep to.

    Args:
        budget: tokens (int), a fraction of the prompt (float), or None: the preset.
        method: its name, for the message.
        minimum: smallest budget in tokens for each accounting, null for any; None: nothing is known of it.
        accounting: the accounting in force.
        preset: the method's own size in tokens, None where it has several.

    Raises:
        ConfigError: not a number, out of range, below the minimum, or an accounting that the method has no rule for.
    """
    right = "tokens (256), a fraction of the prompt in (0, 1] (0.1), or null for the method's preset"
    if isinstance(budget, bool) or not isinstance(budget, (int, float, type(None))):
        raise ConfigError(f"budget={show(budget)}: not a number; expected {right}")
    if isinstance(budget, float) and not 0 < budget <= 1 or isinstance(budget, int) and budget < 1:
        raise ConfigError(f"budget={budget}: out of range; expected {right}")
    if minimum is None:
        return
    if accounting not in minimum:
        raise ConfigError(
            f"protocol.accounting={accounting}: {method} has no rule for it; expected {' | '.join(minimum)}"
        )
    least, tokens = minimum[accounting], preset if budget is None else budget
    if least is not None and isinstance(tokens, int) and tokens < least:
        where = f"budget=null: the preset, {tokens} tokens, is" if budget is None else f"budget={budget}:"
        raise ConfigError(f"{where} below the minimum of {method}, {least} tokens (protocol.accounting={accounting})")


def arm_name(config: Mapping[str, Any]) -> str:
    """The folder of a run's method and budget, for people: "quest-256"."""
    budget = "preset" if config["budget"] is None else config["budget"]
    unified = "-unified" if config["protocol"]["accounting"] == "unified" else ""
    return f"{config['method']['name']}-{budget}{unified}"


def _check_results_dir(results_dir: Any) -> None:
    """Try to write where the results will go, and leave nothing there."""
    if not isinstance(results_dir, str) or not results_dir or results_dir.startswith("~"):
        raise ConfigError(f"results_dir={show(results_dir)}: expected a folder, with no ~ in front")
    folder = Path(results_dir).absolute()
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror if existing.is_dir() else "it is a file"
        raise ConfigError(
            f"results_dir={results_dir}: cannot write in {existing} ({reason}); expected a folder to write to"
        ) from error
