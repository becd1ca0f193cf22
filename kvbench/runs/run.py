"""One run: model x method x budget x task -> a run folder.

It wires; every number comes from the parts it calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from omegaconf import DictConfig, OmegaConf

import kvbench
from kvbench.backends.backend import TryOut, backend_of
from kvbench.backends.hf import loading as models
from kvbench.backends.hf import spread
from kvbench.budget import Budget, has_budget
from kvbench.config import ConfigError, bind_methods, build, user_choices
from kvbench.measure import machine
from kvbench.measure.arm import Arm, PromptPrefill, Setup, measure, read
from kvbench.measure.machine import threads
from kvbench.measure.protocol import GREEDY, Protocol
from kvbench.memory.kinds import NATIVE, kv_in, unfit_for
from kvbench.method import Method
from kvbench.models import hub
from kvbench.models.footprint import Footprint, Prompts, free_memory
from kvbench.models.heads import calibration_for
from kvbench.models.prompts import tokenizing, treatment
from kvbench.models.types import Tokenizer
from kvbench.runs.folder import WHOLE, ResultsError, RunFolder, Shard
from kvbench.runs.heartbeat import beating
from kvbench.runs.identity import LOCAL, arm_name, budget_of
from kvbench.runs.kernels import compile_for
from kvbench.runs.progress import progress
from kvbench.runs.summary import machine_name, summarise
from kvbench.runs.table import table
from kvbench.runs.terminal import Console
from kvbench.runs.versions import files_digest, is_ours, versions_of
from kvbench.tasks import Sample, several, take, task_of
from kvbench.tasks.fidelity import Fidelity

Config = dict[str, Any]

# Keys of a config, and of its groups, that change no number or that `identity` holds in another
# form.
NOT_IDENTITY = {
    "results_dir",
    "threads",
    "hydra",
    "sweep",
    "smoke",
    "memory_check",
    "model",
    "device",
    "dtype",
}
NOT_IDENTITY_OF_GROUP = {"about", "valid", "limit", "version"}


def run(cfg: DictConfig, shard: Shard = WHOLE) -> dict[str, Any]:
    """Run one composed config to its end, or from where it was interrupted.

    Parameters
    ----------
    cfg
        composed, and checked.
    shard
        which of its samples to run.

    Returns
    -------
    dict[str, Any]
        The summary; {} where other shards still have samples to run.

    Raises
    ------
    ConfigError
        something is wrong that only the loaded model or the task's data shows.
    ResultsError
        the run folder cannot be used.
    """
    bind_methods()
    config = cast(Config, OmegaConf.to_container(cfg, resolve=True))
    with threads(config["threads"]):
        return _run(config, shard)


def _run(config: Config, shard: Shard) -> dict[str, Any]:
    arm, console = prepare(config), Console()
    with open_folder(arm, shard) as folder, beating([folder]):
        compile_for([arm], console)
        if folder.tear:
            console.print(f"{folder.path}: {folder.tear}", soft_wrap=True)
        work = work_of(arm, config["task"].get("limit"), folder.done, shard)
        folder.expect(work.whole)
        prefill = PromptPrefill()
        with progress(console, work.total, work.done) as report:
            for batch in read(arm, work.samples):
                report.begin()
                records = measure(
                    arm, batch.prompts, report.tokens, prefill=prefill, again=batch.again
                )
                for sample, record in zip(batch.samples, records, strict=True):
                    folder.add(record, report.share + work.share(sample))
                    report.sample(record, work.share(sample))
                    if arm.attends_whole(record):
                        tokens = f"the {record['prompt_tokens']} tokens of {record['id']}"
                        report.once(
                            "whole", f"budget=null: the method attends {tokens} whole (said once)"
                        )
                    if sample.chat and not record["chat"] and arm.protocol.chat == "auto":
                        raw = (
                            "protocol.chat=auto: the tokenizer has no chat template, prompts are"
                            " raw (said once)"
                        )
                        report.once("chat", raw)
        summary = concluded(folder, work, arm)
    if not summary:
        console.print(
            f"shard {shard} is done; others still have samples to run: {folder.path}",
            soft_wrap=True,
        )
        return {}
    title = f"{arm.task.name}, {arm_name(config)} on {arm.loaded.name} in {dtype_of(arm)}"
    console.print(table(title, arm.task.metric, summary))
    if how := hub.weights_origin(arm.loaded.revision):
        console.print(f"weights of {arm.loaded.name}: {how}", soft_wrap=True)
    console.print(f"results: {folder.path}", soft_wrap=True)
    if summary["n"] < len(folder.records):
        limit = config["task"]["limit"]
        console.print(
            f"task.limit={limit}: of the {len(folder.records)} samples there these are the first"
        )
    if summary["failed"]:
        console.print(
            f"{summary['failed']} of {summary['n']} samples failed and scored 0:"
            f" {folder.path / 'samples.jsonl'} says why; the same command tries them again",
            soft_wrap=True,
        )
    return summary


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


def open_folder(arm: Arm, shard: Shard = WHOLE) -> RunFolder:
    """The run folder of an arm, alone or in a sweep, or a shard's part of it."""
    config, run_identity = arm.config, identity(arm)
    facts = {
        "versions": versions(*arm.backend.packages),
        "device_name": device_name(arm.loaded.device, arm.loaded.devices),
        "model_name": arm.loaded.name,
        "metric": arm.task.metric,
        "decode": arm.decode,
        **({} if (folder := user_choices()) is None else {"config_dir": folder}),
    }
    return RunFolder.open(
        config["results_dir"],
        config["task"]["name"],
        arm.loaded.name,
        arm_name(config),
        run_identity,
        {**config, **facts},
        shard,
    )


def prepare(config: Config, loaded: models.Loaded | None = None) -> Arm:
    """Build everything a config names; the model last, if it is not there yet."""
    try:
        protocol, task = Protocol(**config["protocol"]), task_of(config["task"])
        for source in task.sources:
            source.path()
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def try_out(tokenizer: Tokenizer) -> None:
        protocol.check_chat(tokenizer)
        if protocol.question != "with" and not tokenizer.is_fast:
            raise ValueError(
                f"protocol.question={protocol.question}: {type(tokenizer).__name__} is a slow"
                " tokenizer, which does not say at which token a question begins; expected with,"
                " or a model that has a tokenizer.json"
            )
        tried = take(
            task.samples(tokenizer, config["seed"]),
            config["task"].get("limit") if task.stored else 1,
        )
        first = next(iter([*tried]), None)  # reads the files, and tries the lengths
        if first is None or first.error:
            return
        if protocol.temperature and (first.timed or first.forced):
            raise ValueError(
                f"protocol.temperature={protocol.temperature}: task={task.name} draws no tokens;"
                " use 0"
            )
        if protocol.question != "with" and first.question in ("", first.prompt):
            raise ValueError(
                f"protocol.question={protocol.question}: task={task.name} asks none apart; use with"
            )

    return Arm(**vars(set_up(config, largest_prompts(config), loaded, try_out)), task=task)


def set_up(
    config: Config,
    prompts: Prompts,
    loaded: models.Loaded | None = None,
    try_out: TryOut = lambda tokenizer: None,
) -> Setup:
    """Build the method that a config names, and load its model, if it is not there yet.

    Parameters
    ----------
    config
        composed, and checked.
    prompts
        the largest to come: what does not fit into memory is refused.
    loaded
        the model, if it is there.
    try_out
        see `kvbench.backends.backend.Backend.load`.

    Raises
    ------
    ConfigError
        something is wrong that only the method, the model or the machine shows.
    """
    try:
        protocol = Protocol(**config["protocol"])
        method: Method = build(config["method"])
        if not hasattr(method, "needs"):
            target = config["method"]["_target_"]
            raise ConfigError(
                f"_target_={target}: no method; expected a subclass of kvbench.method.Method"
            )
        shown = (
            method.needs.attention_sums
            or method.needs.layer_similarity
            or method.needs.replay is not None
        )
        if config["task"].get("prefill") is False and shown:
            name = config["method"]["name"]
            raise ConfigError(
                f"task.prefill=false: {name} needs what only a prefill shows; expected true"
            )
        budget = Budget.of(
            budget_of(config), config["method"], protocol.accounting, protocol.generated
        )
        method.check_options(budget)
        refuse_no_cut(config, method)
        if reason := next(
            unfit_for(kv_in(config), method, config["method"]["name"], budget.counts_generated),
            None,
        ):
            raise ConfigError(reason)
        if loaded is None:
            if config["memory_check"]:
                refuse_no_room(config, method, prompts)
            loaded = backend_of(config).load(config, prompts, try_out)
        published = config["method"].get("published_dense_layers") or ()
        dense_layers = protocol.dense_layers_of(loaded.dense_layers, published, loaded.card.layers)
        calibration = calibration_for(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Setup(config, protocol, loaded, method, budget, dense_layers, calibration)


def refuse_no_cut(config: Config, method: Method) -> None:
    """Refuse given tokens that end before a method attends less than everything: there is nothing
    to compare.

    Raises
    ------
    ConfigError
        names the steps that it takes.
    """
    task = config["task"]
    if task["name"] != Fidelity.name or not has_budget(config["method"]):
        return
    least = min(map(method.first_cut, task["lengths"]))
    if task["steps"] < least:
        raise ConfigError(
            f"task.steps={task['steps']}: {config['method']['name']} attends all tokens before step"
            f" {least}, so that its numbers would be full attention's; expected {least} or more"
        )


def largest_prompts(config: Config) -> Prompts:
    """The largest prompts of a run, as far as its config says."""
    task = config["task"]
    lengths = task.get("lengths") if task.get("unit", "tokens") == "tokens" else None
    tokens = max(lengths) + (task.get("new_tokens") or 0) if lengths else 0
    rows = task.get("batch")
    most = max(rows) if isinstance(rows, list) else config["batch"]
    return Prompts(tokens, most, config["protocol"]["prefill_chunk"])


def refuse_no_room(config: Config, method: Method, prompts: Prompts) -> None:
    """Refuse a run that takes more memory than is free, before its model is loaded.

    Raises
    ------
    ConfigError
        names the key, the estimate, what is free and what would be right.
    """
    source = hub.source_of(config["model"])
    tokens, _, chunk = prompts
    device_map = config["model"].get("device_map")
    devices = spread.devices_for(device_map) if device_map else [models.device_of(config["device"])]
    device = devices[0]
    home = method.needs.home
    # The device holds the whole prompt as it came, and codes what is left of it when it is over.
    kv = kv_in(config) if home == "host" else NATIVE
    dtype = models.dtype_of(config["dtype"], device)
    required = Footprint.of(hub.card_of(config["model"], source), dtype, prompts, kv)
    if required is None:
        return
    if tokens and home == "device" and has_budget(config["method"]):
        # Of the last chunk a method may drop what one layer has read before the next layer reads
        # it.
        sure = max(0, tokens - (chunk or tokens))
        required = required._replace(cache=required.cache * sure // tokens)
    required.refuse_too_large(device, home, source.name, prompts, free_memory(*devices))


class Work(NamedTuple):
    """The samples that a start has before it.

    Attributes
    ----------
    samples
        in the order to run them.
    ids
        of all samples of the run, finished ones included; complete once `samples` is used up.
    whole
        samples of the run in all.
    total
        those of this shard, finished ones included.
    done
        of these, finished by an earlier start.
    everything
        no limit leaves samples of the task out.
    share
        of a sample in the work of this start; they add up to 1.
    """

    samples: Iterable[Sample]
    ids: list[str]
    whole: int
    total: int
    done: int
    everything: bool
    share: Callable[[Sample], float]


def work_of(arm: Arm, limit: int | None, done: Collection[str], shard: Shard = WHOLE) -> Work:
    """What is left to do: stored samples longest first, so that what does not fit fails early;
    generated ones as made.

    What is wrong with a task's settings or data shows here or at the first sample.
    """
    ids: list[str] = []
    answers = arm.protocol.samples
    pending = _pending(samples(arm, limit), ids, done, shard, answers)
    if not arm.task.stored:
        prompts = min(len(arm.task), limit or len(arm.task))
        whole, total = answers * prompts, answers * shard.share(prompts)
        # Whose a finished sample is shows only when it is made anew: of those there this shard has
        # its share.
        finished = total * min(len(done), whole) // max(1, whole)
        remaining = max(1, total - finished)
        return Work(
            pending,
            ids,
            whole,
            total,
            finished,
            prompts < (limit or math.inf),
            lambda sample: 1 / remaining,
        )
    # by the contexts
    longest_first = sorted(pending, key=lambda sample: len(sample.question) - len(sample.prompt))
    work = sum(map(_length, longest_first))
    total = answers * shard.share(len(ids) // answers)
    return Work(
        longest_first,
        ids,
        len(ids),
        total,
        total - len(longest_first),
        len(ids) // answers < (limit or math.inf),
        lambda sample: _length(sample) / work,
    )


def _length(sample: Sample) -> int:
    """How much there is to read, 1 or more: characters of a prompt, or tokens where all of them are
    given.
    """
    return max(
        1,
        (
            len(sample.forced.prompt) + len(sample.forced.tokens)
            if sample.forced
            else len(sample.prompt)
        ),
    )


def _pending(
    samples: Iterable[Sample], ids: list[str], done: Collection[str], shard: Shard, answers: int
) -> Iterator[Sample]:
    """The samples of a shard that are not done; the ids of all are noted as they come.

    Parameters
    ----------
    answers
        so many of them, one after the other, are answers to one prompt, which one shard has.
    """
    for place, sample in enumerate(samples):
        ids.append(sample.id)
        if shard.has(place // answers) and sample.id not in done:
            yield sample


def samples(arm: Arm, limit: int | None) -> Iterator[Sample]:
    """The samples of this run, as the task orders them, and each answer to one."""
    try:
        with tokenizing(str(arm.loaded.tokenizer.name_or_path)):
            taken = take(arm.task.samples(arm.loaded.tokenizer, arm.config["seed"]), limit)
            yield from several(taken, arm.protocol.samples)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def identity(arm: Arm) -> dict[str, Any]:
    """All that may change a number, and nothing else: its hash is the run id.

    Of the model that is its revision; for random weights their shape too. `device`, `dtype` and the
    dense layers stand as what they came to, whatever word asked for them.
    """
    config = {key: value for key, value in arm.config.items() if key not in NOT_IDENTITY}
    config["budget"] = budget_of(config)
    config["kv"] = kv_in(config).stored()
    written = {key: value for key, value in config["protocol"].items() if key not in GREEDY}
    config["protocol"] = written | arm.protocol.drawn()
    for group in ("backend", "method", "task"):
        # Where kvbench keeps the code of a choice is no part of what it computes.
        excluded = NOT_IDENTITY_OF_GROUP | (
            {"_target_"} if group != "backend" and is_ours(config[group]) else set()
        )
        config[group] = {key: value for key, value in config[group].items() if key not in excluded}
    random_weights = arm.loaded.revision.startswith("dummy-")
    treated = treatment(arm.loaded.tokenizer, arm.protocol.chat != "off")
    data = [source.path() for source in arm.task.sources]
    for key, value in config["task"].items():
        if isinstance(value, str) and any(Path(value) in (path, *path.parents) for path in data):
            config["task"][key] = LOCAL
    if arm.calibration is not None:
        config["method"]["heads"] = arm.calibration.digest
    return {
        "config": config,
        "versions": versions_of(arm.config),
        "protocol": arm.protocol.digest(),
        "dense_layers": list(arm.dense_layers),
        "model_revision": arm.loaded.revision,
        "model_shape": arm.config["model"]["config"] if random_weights else None,
        "data": files_digest(data),
        "notes": dict(arm.task.notes),
        "device": arm.loaded.device.type,
        "dtype": dtype_of(arm),
        **({} if arm.decode == "alone" else {"decode": arm.decode}),
        **({"prompts": treated} if treated else {}),
    }


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
