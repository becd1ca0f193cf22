"""One run: model x method x budget x task -> a run folder.

It wires; every number comes from the parts it calls.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvbench
from kvbench.backends.backend import TryOut, backend_of
from kvbench.backends.hf import loading as models
from kvbench.backends.hf import spread
from kvbench.backends.protocol import GREEDY
from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError, plugins, user_choices
from kvbench.measure import machine
from kvbench.measure.arm import Arm, Setup
from kvbench.measure.work import Work
from kvbench.memory.kinds import NATIVE
from kvbench.method import Method
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Footprint, Prompts, free_memory
from kvbench.models.heads import calibration_for
from kvbench.models.prompts import treatment
from kvbench.models.types import Tokenizer
from kvbench.runs.folder import ResultsError, RunFolder
from kvbench.runs.identity import LOCAL, arm_name
from kvbench.runs.quantities import machine_name
from kvbench.runs.summary import summarise
from kvbench.runs.versions import files_digest, is_ours, versions_of
from kvbench.tasks import WHOLE, Shard, Task, take, task_of
from kvbench.tasks.fidelity import Fidelity

# Keys of a config, and of its groups, that change no number or that `identity` holds in another
# form.
NOT_IDENTITY = {
    "results_dir",
    "threads",
    "sweep",
    "smoke",
    "memory_check",
    "cuda_graphs",
    "model",
    "device",
    "dtype",
}
NOT_IDENTITY_OF_GROUP = {"about", "valid", "limit", "version"}


def prepare(config: RunConfig, loaded: models.Loaded | None = None) -> Arm:
    """Build all that a config names; the model last, if it is not there yet.

    Raises
    ------
    ConfigError
        something is wrong that only the method, the task's data, the model or the machine shows.
    """
    try:
        task = task_of(config.task)
        for source in task.sources:
            source.path()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    method = build_method(config)
    if loaded is None:
        try_out = partial(refuse_unfit_task, config, task)
        loaded = load_model(config, method, largest_prompts(config), try_out)
    return Arm(**vars(set_up(config, method, loaded)), task=task)


def build_method(config: RunConfig) -> Method:
    """The method of a run, which can keep to its budget and do what the task asks.

    Raises
    ------
    ConfigError
        it cannot, or is none.
    """
    name, method = config.method.name, config.method.build()
    if not hasattr(method, "needs"):
        raise ConfigError(
            f"_target_={config.method.target}: no method; expected a subclass of"
            " kvbench.method.Method"
        )
    needs = method.needs
    reads_prefill = (
        needs.attention_sums or needs.layer_similarity or needs.inputs or needs.replay is not None
    )
    if config.task.options.get("prefill") is False and reads_prefill:
        raise ConfigError(
            f"task.prefill=false: {name} needs what only a prefill shows; expected true"
        )
    try:
        method.check_options(config.sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    refuse_no_cut(config, method)
    latent_dim, counted = config.model.card().latent_dim, config.sizes.counts_generated
    if reason := next(config.kv.unfit_for(method, name, counted, latent_dim), None):
        raise ConfigError(reason)
    return method


def load_model(
    config: RunConfig, method: Method, prompts: Prompts, try_out: TryOut = lambda tokenizer: None
) -> models.Loaded:
    """The model of a run.

    Parameters
    ----------
    prompts
        the largest to come: what does not fit into memory beside the model is refused.
    try_out
        see `kvbench.backends.backend.Backend.load`.

    Raises
    ------
    ConfigError
        there is no room for it, or something is wrong that only its files show.
    """
    try:
        if config.memory_check:
            refuse_no_room(config, method, prompts)
        return backend_of(config).load(config, prompts, try_out)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def set_up(config: RunConfig, method: Method, loaded: models.Loaded) -> Setup:
    """A run's method and model, with what follows from both.

    Raises
    ------
    ConfigError
        the model has no such layers, or lacks the calibration that the method needs.
    """
    dense_layers = config.protocol.dense_layers_of(
        loaded.dense_layers, config.method.published_dense_layers or (), loaded.card.layers
    )
    heads = calibration_for(config.model, config.method, config.seed)
    return Setup(config, config.protocol, loaded, method, config.sizes, dense_layers, heads)


def refuse_unfit_task(config: RunConfig, task: Task, tokenizer: Tokenizer) -> None:
    """Refuse a task whose samples cannot be read as the protocol says, by its first one.

    Raises
    ------
    ValueError
        names the key of the protocol, or is the task's own.
    """
    protocol = config.protocol
    protocol.check_chat(tokenizer)
    if protocol.question != "with" and not tokenizer.is_fast:
        raise ValueError(
            f"protocol.question={protocol.question}: {type(tokenizer).__name__} is a slow"
            " tokenizer, which does not say at which token a question begins; expected with, or a"
            " model that has a tokenizer.json"
        )
    limit = config.task.limit if task.stored else 1
    tried = [*take(task.samples(tokenizer, config.seed), limit)]  # which reads the files
    if not tried or tried[0].error:
        return
    first = tried[0]
    if protocol.temperature and (first.timed or first.forced):
        raise ValueError(
            f"protocol.temperature={protocol.temperature}: task={task.name} draws no tokens; use 0"
        )
    if protocol.question != "with" and first.question in ("", first.prompt):
        raise ValueError(
            f"protocol.question={protocol.question}: task={task.name} asks none apart; use with"
        )


def refuse_no_cut(config: RunConfig, method: Method) -> None:
    """Refuse given tokens that end before a method attends less than everything: there is nothing
    to compare.

    Raises
    ------
    ConfigError
        names the steps that it takes.
    """
    if config.task.name != Fidelity.name or not config.method.has_budget:
        return
    steps = config.task.options["steps"]
    least = min(map(method.first_cut, config.task.options["lengths"]))
    if steps < least:
        raise ConfigError(
            f"task.steps={steps}: {config.method.name} attends all tokens before step {least}, so"
            f" that its numbers would be full attention's; expected {least} or more"
        )


def largest_prompts(config: RunConfig) -> Prompts:
    """The largest prompts of a run, as far as its config says."""
    lengths = config.task.token_lengths
    tokens = max(lengths) + (config.task.new_tokens or 0) if lengths else 0
    rows = config.task.options.get("batch")
    most = max(rows) if isinstance(rows, list) else config.batch
    return Prompts(tokens, most, config.protocol.prefill_chunk)


def refuse_no_room(config: RunConfig, method: Method, prompts: Prompts) -> None:
    """Refuse a run that takes more memory than is free, before its model is loaded.

    Raises
    ------
    ConfigError
        names the key, the estimate, what is free and what would be right.
    """
    source, home = config.model.source, method.needs.home
    device_map = config.model.device_map
    devices = spread.devices_for(device_map) if device_map else [models.device_of(config.device)]
    device = devices[0]
    # The device holds the whole prompt as it came, and codes what is left of it when it is over.
    kv = config.kv if home == "host" else NATIVE
    dtype = models.dtype_of(config.dtype, device)
    required = Footprint.of(config.model.card(ModelCard.of_class), dtype, prompts, kv)
    if required is None:
        return
    tokens = prompts.tokens
    read_at_once = prompts.chunk or tokens
    if config.task.options.get("prefill") is False:  # stores are filled, one layer after the other
        read_at_once, required = tokens, required._replace(activations=0)
    if tokens and home == "device" and config.method.has_budget:
        # Of the last chunk a method may drop what one layer has read before the next layer reads
        # it.
        sure = max(0, tokens - read_at_once)
        required = required._replace(cache=required.cache * sure // tokens)
    required.refuse_too_large(device, home, source.name, prompts, free_memory(*devices))


def open_folder(arm: Arm, shard: Shard = WHOLE) -> RunFolder:
    """The run folder of an arm, alone or in a sweep, or a shard's part of it."""
    facts = {
        "versions": versions(*arm.backend.packages),
        "device_name": device_name(arm.loaded.device, arm.loaded.devices),
        "model_name": arm.loaded.name,
        "metric": arm.task.metric,
        "decode": arm.decode,
        **({} if arm.loaded.device.type == "cpu" else {"unfused": arm.loaded.unfused}),
        **({} if (folder := user_choices()) is None else {"config_dir": folder}),
        **({"packages": packages} if (packages := _packages(arm.config)) else {}),
    }
    return RunFolder.open(
        arm.config.results_dir,
        arm.config.task.name,
        arm.loaded.name,
        arm_name(arm.config),
        identity(arm),
        {**arm.config.resolved, **facts},
        shard,
    )


def _packages(config: RunConfig) -> list[str]:
    """The installed packages that a run's method and task are of, where they are not kvbench's."""
    chosen = {"method": config.method, "task": config.task}
    found = {group: plugins(group).get(choice.name) for group, choice in chosen.items()}
    return sorted(
        {
            plugin.package
            for group, plugin in found.items()
            if plugin is not None and not is_ours(chosen[group])
        }
    )


def identity(arm: Arm) -> dict[str, Any]:
    """All that may change a number, and nothing else: its hash is the run id.

    Of the model that is its revision; for random weights their shape too. `device`, `dtype` and the
    dense layers stand as what they came to, whatever word asked for them.
    """
    config, loaded = arm.config, arm.loaded
    random_weights = loaded.revision.startswith("dummy-")
    treated = treatment(loaded.tokenizer, arm.protocol.chat != "off")
    data = [source.path() for source in arm.task.sources]
    return {
        "config": _identity_config(arm, data),
        "versions": versions_of(config),
        "protocol": arm.protocol.digest(),
        "dense_layers": list(arm.dense_layers),
        "model_revision": loaded.revision,
        "model_shape": config.model.config if random_weights else None,
        "data": files_digest(data),
        "notes": dict(arm.task.notes),
        "device": loaded.device.type,
        "dtype": dtype_of(arm),
        **({} if arm.decode == "alone" else {"decode": arm.decode}),
        **({} if loaded.unfused else {"fused": "flashinfer"}),
        **({"prompts": treated} if treated else {}),
    }


def _identity_config(arm: Arm, data: list[Path]) -> dict[str, Any]:
    """The keys of a config that may change a number; not where its code and its data lie."""
    config, protocol = arm.config, arm.protocol
    kept = {key: value for key, value in config.resolved.items() if key not in NOT_IDENTITY}
    kept["budget"] = config.requested_budget
    kept["kv"] = config.kv.stored()
    kept["protocol"] = {k: v for k, v in kept["protocol"].items() if k not in GREEDY}
    kept["protocol"] |= protocol.drawn()
    ours = [group for group in ("method", "task") if is_ours(getattr(config, group))]
    for group in ("backend", "method", "task"):
        excluded = NOT_IDENTITY_OF_GROUP | ({"_target_"} if group in ours else set())
        kept[group] = {key: value for key, value in kept[group].items() if key not in excluded}
    for key, value in kept["task"].items():
        if isinstance(value, str) and any(Path(value) in (path, *path.parents) for path in data):
            kept["task"][key] = LOCAL
    if arm.calibration is not None:
        kept["method"][arm.method.needs.measures] = arm.calibration.digest
    return kept


def dtype_of(arm: Arm) -> str:
    """What `dtype=auto` came to, or what was asked for."""
    return str(arm.loaded.dtype).removeprefix("torch.")


def versions(*more: str) -> dict[str, str]:
    """Versions of what a number depends on besides our own source: of these packages, too."""
    libraries = {
        name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy", *more)
    }
    return {"kvbench": kvbench.__version__, **libraries}


def device_name(device: torch.device, count: int = 1) -> str:
    """What computes: the card's or the CPU's name, and the threads.

    Of a sample, its own record says so.
    """
    return machine_name(
        {"device": machine.name_of(device, count), "threads": torch.get_num_threads()}
    )


def concluded(folder: RunFolder, work: Work, arm: Arm) -> dict[str, Any]:
    """The summary of the samples that a start was for; a folder that holds more keeps one of all of
    them.

    A longer run that was stopped stays stopped: its samples may have run longest first. {} where
    other shards still have samples to run.

    Raises
    ------
    ResultsError
        there are lines of no sample of the task, which the summary and every report would count; or
        fewer samples than the run had once, and this start was not for all of those.
    """
    ids = set(work.ids)
    if not folder.gathered(ids):
        return {}
    if work.everything and (strays := sorted(folder.records.keys() - ids)):
        raise ResultsError(
            f"{folder.path / 'samples.jsonl'}: {len(strays)} lines are of no sample of this task,"
            f" the first of {strays[0]}; delete them"
        )
    if len(folder.records) < folder.had:
        raise ResultsError(f"{folder.path}: {folder.tear}")
    records = [record for key, record in folder.records.items() if key in ids]
    summary = summarise(records, arm.task.metric)
    if len(records) == len(folder.records):
        folder.finish(summary)
    elif folder.finished:
        folder.finish(summarise(folder.records.values(), arm.task.metric))
    return summary
