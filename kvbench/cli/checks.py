"""One composed config, checked before anything heavy loads: every key and value that can be wrong
without a model.

`check` sees each run of a sweep before the first one starts, and once more on the machine that it
runs on, where that is another. What needs the tokenizer or the model itself is checked where those
are met. Imports no torch.
"""

from __future__ import annotations

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

from kvbench.attention.limits import (
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    FLASHINFER_LATENT,
    FLASHINFER_MISSING,
)
from kvbench.backends.backend import backend_of
from kvbench.backends.run_config import RunConfig, TaskConfig
from kvbench.config import (
    FACTS,
    ConfigError,
    MethodConfig,
    check_types,
    first_line,
    groups,
    nearest_key,
    root_keys,
    shipped,
    show,
)
from kvbench.models import hub
from kvbench.models.card import ModelCard
from kvbench.models.folder import refuse_no_tokenizer
from kvbench.models.heads import calibration_for
from kvbench.runs.folder import arm_folder, refuse_other_formats
from kvbench.runs.identity import arm_name
from kvbench.tasks import task_of

REQUIRED = ("model.name", "method.name", "method._target_", "task.name", "task._target_")

SMALL_FILES = 2**16  # bytes: what a run writes beside its samples

# What torch calls CUDA has one of these on Linux: NVIDIA's driver, its embedded boards, under
# Windows, or AMD's driver.
DEVICE_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def check(cfg: DictConfig, here: bool = True) -> RunConfig:
    """The config of a run that was composed.

    Parameters
    ----------
    cfg
        composed, without Hydra's own part.
    here
        it will run on this machine, so this one's device and network are asked for too.

    Raises
    ------
    ConfigError
        it cannot run: one line that names the first bad key, its value and what would be right.
    ResultsError
        the results there are of another format.
    """
    config = read_config(cfg)
    check_run(config, here)
    return config


def read_config(cfg: DictConfig) -> RunConfig:
    """The config that was composed: its keys are known, its values right by themselves.

    Raises
    ------
    ConfigError
        as `check`.
    """
    _check_keys(OmegaConf.to_container(cfg))
    try:
        resolved: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    return RunConfig.of(resolved)


def check_run(config: RunConfig, here: bool = True) -> None:
    """Refuse a run that this machine, or its model, task or results show to be impossible.

    Raises
    ------
    ConfigError, ResultsError
        as `check`.
    """
    source, card = check_setup(config, here)
    _check_lengths(config, card, source)
    if not isinstance(config.results_dir, str) or re.match("~|$", config.results_dir):
        raise ConfigError(
            f"results_dir={show(config.results_dir)}: expected a folder, with no ~ in front"
        )
    folder = arm_folder(config.results_dir, config.task.name, source.name, arm_name(config))
    _check_writable(folder, config.results_dir)
    refuse_other_formats(folder)
    if here:
        _check_task(config.task)


def check_setup(config: RunConfig, here: bool = True) -> tuple[hub.ModelSource, ModelCard]:
    """Refuse a config whose model, method, budget or protocol cannot run, whatever its task is.

    Returns
    -------
    tuple[hub.ModelSource, ModelCard]
        Where its model comes from, and the model's shape as far as it is known.

    Raises
    ------
    ConfigError
        as `check`.
    """
    _check_method(config.method)
    source = config.model.source
    card = _model_card(config.model, source)
    if card.layers:
        published = config.method.published_dense_layers or []
        config.protocol.dense_layers_of(source.dense_layers, published, card.layers)
    for key, value in (("attention", config.attention), ("model.fused", config.model.fused)):
        if value == "flashinfer" and (reason := next(_no_flashinfer(config, card, here), None)):
            raise ConfigError(f"{key}=flashinfer: {reason}; {key}=auto takes what runs")
    _check_kv(config, card)
    backend_of(config).refuse(config, source, here)
    if here:
        calibration_for(config.model, config.method, config.seed)
        _check_device(config)
        if source.path is not None and source.gguf is None and source.folder is None:
            hub.refuse_out_of_reach(source.path)
    return source, card


def _check_keys(run: Any) -> None:
    """Every key is known, none that all runs need is missing, and values have the type of their
    defaults.
    """
    values = dict(leaves(run))
    required = {key for key, _ in leaves(root_keys())}
    for key in sorted((required | set(REQUIRED)) - values.keys()):
        if isinstance(run.get(key), Mapping):
            raise ConfigError(f"{key}={show(run[key])}: expected one value, and no mapping")
        raise ConfigError(f"{key}: missing; every run needs it")
    valid_keys = required.union(
        *(_valid_keys(group, run[group]) for group in groups() if group in run)
    )
    for key in sorted(values.keys() - valid_keys):
        raise ConfigError(
            f"{key}={show(values[key])}: no such key;"
            f" {nearest_key(key, valid_keys | set(groups()))}"
        )
    for key, default in leaves(root_keys()):
        value = values[key]
        if type(default) in (int, float, bool) and isinstance(value, list):
            several = ",".join(map(show, value))
            raise ConfigError(
                f"{key}={show(value)}: expected one value; several are a sweep, {key}={several}"
                " with -m"
            )
    for group in ("method", "task", "backend"):
        original = shipped(group, str(run[group]["name"])) or {}
        check_types(group, run[group], original)
        for key in sorted(FACTS & original.keys()):
            if run[group].get(key) != original[key]:
                raise ConfigError(
                    f"{group}.{key}={show(run[group].get(key))}: a fact of {original['name']}, not"
                    " a setting"
                )


def leaves(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys of the two levels a config has; what lies deeper (a model's transformers config)
    is a value.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", value[inner]) for inner in value)
        else:
            yield key, value


def _valid_keys(group: str, chosen: Mapping[str, Any]) -> set[str]:
    """The keys of a choice: those of the file that kvbench ships, and whatever a user's own file
    has.
    """
    original = shipped(group, str(chosen["name"]))
    is_users = original is None or original.get("_target_") != chosen.get("_target_")
    return {f"{group}.{key}" for key in (chosen if original is None or is_users else original)}


def _check_method(method: MethodConfig) -> None:
    """The module of a method of one's own is there."""
    module = method.target.rpartition(".")[0]
    try:
        there = not module or find_spec(module.partition(".")[0]) is not None
    except ValueError:  # a module without a spec, such as __main__
        there = True
    if not there:
        raise ConfigError(
            f"method._target_={method.target}: no module {module}; expected one that Python"
            " finds, or a file in the folder of --config-dir"
        )


def _check_kv(config: RunConfig, card: ModelCard) -> None:
    kv = config.kv
    sizes = card.head_dim or None, card.layers or None, len(card.windows), card.latent_dim
    if reason := next(kv.unfit(*sizes), None):
        raise ConfigError(reason)
    if kv.coded and config.attention == "flashinfer":
        raise ConfigError(
            f"attention=flashinfer: reads no keys and values held as kv={kv}; attention=auto takes"
            " what runs"
        )


def _model_card(model: hub.ModelConfig, source: hub.ModelSource) -> ModelCard:
    """The card of the model, as far as it can be known here.

    Raises
    ------
    ConfigError
        no such folder, not a model folder, or a model that kvbench would run wrong.
    """
    named = shipped("model", model.name)
    if source.path is not None and named is not None and model.config != named.get("config"):
        raise ConfigError(
            f"model.config: sets the shape of random weights; those of {source.name} have their own"
        )
    card = model.card()
    card.refuse_unsupported(source.label)
    if source.path is not None and source.folder is not None:
        refuse_no_tokenizer(source.folder, source.path)
    return card


def _check_device(config: RunConfig) -> None:
    """Refuse CUDA where there is plainly none; `engine.models` asks torch itself, which takes long
    to import.
    """
    device, device_map = config.device, config.model.device_map
    if device.startswith("cuda") and (reason := _no_cuda()):
        raise ConfigError(f"device={device}: {reason}; use device=cpu or device=auto")
    if device_map is not None and (reason := _no_cuda()):
        raise ConfigError(f"model.device_map={device_map}: {reason}; expected null")


def _no_cuda() -> str | None:
    """Why there is plainly no CUDA on this machine; None where there may be."""
    if version("torch").endswith("+cpu"):
        return f"torch {version('torch')} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every device"
    if sys.platform != "linux" or not any(map(glob, DEVICE_NODES)):
        return "there is no CUDA device here"
    return None


def _no_flashinfer(config: RunConfig, card: ModelCard, here: bool) -> Iterator[str]:
    """What keeps FlashInfer from this run, as far as it shows without torch."""
    head_dim = card.head_dim
    if card.latent_dim:
        yield FLASHINFER_LATENT
    if head_dim and head_dim not in FLASHINFER_HEAD_DIMS:
        yield f"head dim {head_dim} is not one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
    if config.dtype not in ("auto", *FLASHINFER_DTYPES):
        yield f"dtype {config.dtype} is not one of {', '.join(FLASHINFER_DTYPES)}"
    if config.device == "cpu":
        yield "cpu is not a CUDA device"
    if here and (reason := _no_cuda()):
        yield reason
    if here and find_spec("flashinfer") is None:
        yield FLASHINFER_MISSING


def _check_task(task: TaskConfig) -> None:
    """The task's own checks of its options, and whether its data can be had; tasks import nothing
    heavy.
    """
    for source in task_of(task).sources:
        try:
            source.check()
        except ValueError as error:
            raise ConfigError(first_line(error)) from error


def _check_lengths(config: RunConfig, card: ModelCard, source: hub.ModelSource) -> None:
    """Prompts of the lengths that the task names have room in the model, and for the budget."""
    options, limit = config.task.options, card.context_length
    lengths = options.get("lengths", [1]) or []
    right = lengths and all(type(length) is int and length > 0 for length in lengths)
    if not right or len(set(lengths)) < len(lengths):
        raise ConfigError(
            f"task.lengths={show(lengths)}: expected different whole numbers, 1 or more, such as"
            " [1024,4096]"
        )
    lengths = config.task.token_lengths
    stretched = hub.how_to_stretch(source.path is None)
    new_tokens = config.task.new_tokens or 0
    if limit is not None and lengths and max(lengths) + new_tokens > limit:
        raise ConfigError(
            f"task.lengths={show(lengths)}: {max(lengths)} tokens and {new_tokens} new ones do not"
            f" fit the window of {source.name}, {limit} tokens{stretched}"
        )
    most = options.get("max_new_tokens")
    # what is no number the task itself refuses
    if limit is not None and type(most) is int and most >= limit:
        raise ConfigError(
            f"task.max_new_tokens={most}: no room for a prompt in the window of {source.name},"
            f" {limit} tokens{stretched}"
        )
    if lengths:
        config.sizes.check_prompt(min(lengths))


def _check_writable(folder: Path, results_dir: str) -> None:
    """Try to write where the results of an arm will go, as much as a run's small files, and leave
    nothing there.
    """
    folder = folder.absolute()
    try:
        existing = next(
            parent for parent in [folder, *folder.parents] if parent.exists() or parent.is_symlink()
        )
    except OSError as error:
        raise ConfigError(
            f"results_dir={results_dir}: {error.strerror}; expected a folder to write to"
        ) from error
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(SMALL_FILES))
    except OSError as error:
        reason = error.strerror
        if not existing.is_dir():
            reason = (
                "it is a file"
                if existing.exists()
                else f"a link to {existing.readlink()}, which is not there"
            )
        raise ConfigError(
            f"results_dir={results_dir}: cannot write in {existing} ({reason}); expected a folder"
            " to write to"
        ) from error
