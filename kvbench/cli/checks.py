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
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.attention.limits import FLASHINFER_DTYPES, FLASHINFER_HEAD_DIMS, FLASHINFER_MISSING
from kvbench.backends.backend import backend_of
from kvbench.budget import Accounting, Budget
from kvbench.config import (
    FACTS,
    ConfigError,
    check_rules,
    check_types,
    check_valid,
    first_line,
    groups,
    nearest_key,
    root_keys,
    shipped,
    show,
)
from kvbench.measure.protocol import Protocol
from kvbench.memory.kinds import KV, kv_of, unfit
from kvbench.models import hub
from kvbench.models.card import ModelCard
from kvbench.models.folder import refuse_no_tokenizer
from kvbench.models.heads import calibration_for
from kvbench.runs.folder import arm_folder, refuse_other_formats
from kvbench.runs.identity import arm_name
from kvbench.tasks import task_of

REQUIRED = ("model.name", "method.name", "method._target_", "task.name", "task._target_")

ALLOWED = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "reference", "torch", "cpu", "flashinfer"),
    "model.weights": ("pretrained", "dummy"),
    "backend.name": ("hf", "vllm"),
}

# The lowest value of each whole number, and whether null will do.
LOWEST = {
    "seed": (0, False),
    "batch": (1, False),
    "probe.every": (0, False),
    "threads": (1, True),
    "task.limit": (1, True),
    "sweep.shards": (1, False),
    "backend.tensor_parallel": (1, False),
}
MOST = {"seed": 2**63 - 1, "threads": 1024}
SWITCHES = ("smoke", "memory_check", "sweep.shared_prefill", "sweep.shared_decode")

SMALL_FILES = 2**16  # bytes: what a run writes beside its samples

# What torch calls CUDA has one of these on Linux: NVIDIA's driver, its embedded boards, under
# Windows, or AMD's driver.
DEVICE_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def check(cfg: DictConfig, here: bool = True) -> None:
    """Refuse a composed config that cannot run.

    Parameters
    ----------
    cfg
        the config, without Hydra's own part.
    here
        it will run on this machine, so this one's device and network are asked for too.

    Raises
    ------
    ConfigError
        one line that names the first bad key, its value and what would be right.
    ResultsError
        the results there are of another format.
    """
    run, source, card = check_setup(cfg, here)
    lengths = _token_lengths(run["task"])
    _check_window(run, card, source, lengths)
    if lengths:
        _budget(run).check_prompt(min(lengths))
    _check_results_dir(run["results_dir"])
    folder = arm_folder(run["results_dir"], run["task"]["name"], source.name, arm_name(run))
    _check_writable(folder, run["results_dir"])
    refuse_other_formats(folder)
    if here:
        _check_task(run["task"])


def check_setup(
    cfg: DictConfig, here: bool = True
) -> tuple[dict[str, Any], hub.ModelSource, ModelCard]:
    """Refuse a composed config whose model, method, budget or protocol cannot run, whatever its
    task is.

    Parameters
    ----------
    cfg, here
        as for `check`.

    Returns
    -------
    tuple[dict[str, Any], hub.ModelSource, ModelCard]
        The config, resolved, where its model comes from, and the model's shape as far as it is
        known.

    Raises
    ------
    ConfigError
        as `check`.
    """
    _check_keys(OmegaConf.to_container(cfg))
    try:
        run: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    _check_values(run)
    _check_method(run["method"])
    source = hub.source_of(run["model"])
    card = _model_card(run["model"], source)
    _check_protocol(run, card, source)
    if run["attention"] == "flashinfer" and (reason := next(_no_flashinfer(run, card, here), None)):
        raise ConfigError(f"attention=flashinfer: {reason}; attention=auto takes what runs")
    _check_kv(run, card)
    _budget(run)
    backend_of(run).refuse(run, source, here)
    if here:
        calibration_for(run)
        _check_device(run)
        if source.path is not None and source.gguf is None and source.folder is None:
            hub.refuse_out_of_reach(source.path)
    return run, source, card


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


def _check_values(run: Any) -> None:
    values = dict(leaves(run))
    for key in ("model.name", "method.name", "task.name"):
        if not isinstance(values[key], str) or not values[key].strip():
            raise ConfigError(
                f"{key}={show(values[key])}: expected a name, which results are kept under"
            )
    layers = run["model"].get("dense_layers")
    if not isinstance(layers, list | None) or not all(type(layer) is int for layer in layers or ()):
        raise ConfigError(
            f"model.dense_layers={show(layers)}: expected a list of layers, such as [0,1]"
        )
    for key, allowed in ALLOWED.items():
        if values.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key}={show(values[key])}: expected {' | '.join(allowed)}")
    for key, (lowest, null) in LOWEST.items():
        value = values.get(key, lowest)
        if not (value is None and null) and (type(value) is not int or value < lowest):
            expected = f"a whole number, {lowest} or more" + (", or null" if null else "")
            raise ConfigError(f"{key}={show(value)}: expected {expected}")
        if value is not None and value > MOST.get(key, value):
            raise ConfigError(f"{key}={value}: expected at most {MOST[key]}")
    for key in SWITCHES:
        if type(values[key]) is not bool:
            raise ConfigError(f"{key}={show(values[key])}: expected true | false")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(run["device"])):
        raise ConfigError(f"device={show(run['device'])}: expected auto | cpu | cuda | cuda:N")
    _check_device_map(run)
    if run["batch"] > 1 and (reason := next(_no_batch(run), None)):
        raise ConfigError(f"batch={run['batch']}: {reason}; expected 1")
    for group in ("method", "task"):
        check_rules(group, run[group])
        check_valid(group, run[group], run[group].get("valid") or {})


def _check_device_map(run: Any) -> None:
    device_map, device = run["model"]["device_map"], run["device"]
    if device_map not in (None, "balanced", "auto"):
        raise ConfigError(f"model.device_map={show(device_map)}: expected null | balanced | auto")
    if device_map is not None and device not in ("auto", "cuda"):
        raise ConfigError(
            f"device={device}: model.device_map={device_map} is about all GPUs; expected auto |"
            " cuda"
        )
    if device_map is not None and run["task"].get("own_prefill"):
        raise ConfigError(
            f"model.device_map={device_map}: task={run['task']['name']} measures one device;"
            " expected null"
        )


def _no_batch(run: Any) -> Iterator[str]:
    """What keeps the samples of a run from being generated together."""
    if run["task"].get("one_by_one"):
        yield f"task={run['task']['name']} measures each sample by itself"
    if run["probe"]["every"]:
        yield f"probe.every={run['probe']['every']} compares each sample by itself"
    answers = run["protocol"]["samples"]
    if type(answers) is int and answers > 1:  # what is no number, the protocol refuses
        yield f"protocol.samples={answers} has each prompt answered by itself, from one prefill"


def _check_method(method: Mapping[str, Any]) -> None:
    """What the file of a method of one's own can have wrong: its minimum, and the module that it
    names.
    """
    minimum = method.get("minimum")
    right = isinstance(minimum, Mapping) and all(
        least is None or type(least) is int for least in minimum.values()
    )
    if minimum is not None and not (right and minimum.keys() <= set(get_args(Accounting))):
        raise ConfigError(
            f"method.minimum={show(minimum)}: expected tokens by accounting, such as {{paper: 1,"
            " unified: 1}"
        )
    module = str(method["_target_"]).rpartition(".")[0]
    try:
        there = not module or find_spec(module.partition(".")[0]) is not None
    except ValueError:  # a module without a spec, such as __main__
        there = True
    if not there:
        raise ConfigError(
            f"method._target_={method['_target_']}: no module {module}; expected one that Python"
            " finds, or a file in the folder of --config-dir"
        )


def _check_protocol(run: Any, card: ModelCard, source: hub.ModelSource) -> None:
    """The protocol's own checks, and its dense layers against a model whose depth is known."""
    try:
        protocol = Protocol(**run["protocol"])
        if card.layers:
            published = run["method"].get("published_dense_layers") or []
            protocol.dense_layers_of(source.dense_layers, published, card.layers)
    except ValueError as error:
        raise ConfigError(first_line(error)) from error
    if protocol.question != "with" and run["task"].get("one_by_one"):
        raise ConfigError(
            f"protocol.question={protocol.question}: task={run['task']['name']} asks none; expected"
            " with"
        )


def _check_kv(run: Any, card: ModelCard) -> None:
    kv = kv_of({key: value for key, value in run["kv"].items() if key in KV._fields})
    if reason := next(
        unfit(kv, card.head_dim or None, card.layers or None, len(card.windows)), None
    ):
        raise ConfigError(reason)
    if kv.coded and run["attention"] == "flashinfer":
        raise ConfigError(
            f"attention=flashinfer: reads no keys and values held as kv={kv}; attention=auto takes"
            " what runs"
        )


def _model_card(model: Mapping[str, Any], source: hub.ModelSource) -> ModelCard:
    """The card of the model, as far as it can be known here.

    Raises
    ------
    ConfigError
        no such folder, not a model folder, or a model that kvbench would run wrong.
    """
    named = shipped("model", str(model["name"]))
    if source.path is not None and named is not None and model.get("config") != named.get("config"):
        raise ConfigError(
            f"model.config: sets the shape of random weights; those of {source.name} have their own"
        )
    card = hub.card_of(model, source)
    card.refuse_unsupported(source.label)
    if source.path is not None and source.folder is not None:
        refuse_no_tokenizer(source.folder, source.path)
    return card


def _check_device(run: Any) -> None:
    """Refuse CUDA where there is plainly none; `engine.models` asks torch itself, which takes long
    to import.
    """
    device, device_map = run["device"], run["model"]["device_map"]
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


def _no_flashinfer(run: Any, card: ModelCard, here: bool) -> Iterator[str]:
    """What keeps FlashInfer from this run, as far as it shows without torch."""
    head_dim = card.head_dim
    if head_dim and head_dim not in FLASHINFER_HEAD_DIMS:
        yield f"head dim {head_dim} is not one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
    if run["dtype"] not in ("auto", *FLASHINFER_DTYPES):
        yield f"dtype {run['dtype']} is not one of {', '.join(FLASHINFER_DTYPES)}"
    if run["device"] == "cpu":
        yield "cpu is not a CUDA device"
    if here and (reason := _no_cuda()):
        yield reason
    if here and find_spec("flashinfer") is None:
        yield FLASHINFER_MISSING


def _token_lengths(task: Mapping[str, Any]) -> list[int]:
    """Prompt lengths in tokens; empty where the task has none, or counts them in another unit."""
    if "lengths" not in task:
        return []
    lengths = task["lengths"] or []
    right = lengths and all(type(length) is int and length > 0 for length in lengths)
    if not right or len(set(lengths)) < len(lengths):
        raise ConfigError(
            f"task.lengths={show(lengths)}: expected different whole numbers, 1 or more, such as"
            " [1024,4096]"
        )
    return list(lengths) if task.get("unit", "tokens") == "tokens" else []


def _check_task(task: Mapping[str, Any]) -> None:
    """The task's own checks of its options, and whether its data can be had; tasks import nothing
    heavy.
    """
    for source in task_of(task).sources:
        try:
            source.check()
        except ValueError as error:
            raise ConfigError(first_line(error)) from error


def _check_window(run: Any, card: ModelCard, source: hub.ModelSource, lengths: list[int]) -> None:
    limit, new_tokens = card.context_length, run["task"].get("new_tokens") or 0
    if limit is not None and lengths and max(lengths) + new_tokens > limit:
        raise ConfigError(
            f"task.lengths={show(lengths)}: {max(lengths)} tokens and {new_tokens} new ones do not"
            f" fit the window of {source.name}, {limit} tokens"
            + hub.how_to_stretch(source.path is None)
        )
    most = run["task"].get("max_new_tokens")
    # what is no number the task itself refuses
    if limit is not None and type(most) is int and most >= limit:
        raise ConfigError(
            f"task.max_new_tokens={most}: no room for a prompt in the window of {source.name},"
            f" {limit} tokens" + hub.how_to_stretch(source.path is None)
        )


def _budget(run: Any) -> Budget:
    protocol = run["protocol"]
    return Budget.of(run["budget"], run["method"], protocol["accounting"], protocol["generated"])


def _check_results_dir(results_dir: Any) -> None:
    if not isinstance(results_dir, str) or not results_dir or results_dir.startswith("~"):
        raise ConfigError(f"results_dir={show(results_dir)}: expected a folder, with no ~ in front")


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
