"""Arms that differ in method and budget alone, side by side: a sample is prefilled once, and each arm begins from that.

Every arm has its own run folder and gets the bits that a run of its own would give; only what the one prefill hides,
the time to the first token, is missing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from kvbench.backends.hf.prefilled import Prefilled
from kvbench.config import ConfigError, bind_methods
from kvbench.measure.arm import (
    Arm,
    PromptPrefill,
    TokenizedSample,
    batches,
    failure,
    is_failed_sample,
    measure,
    prompt_of,
)
from kvbench.measure.machine import threads
from kvbench.runs.folder import WHOLE, ResultsError, RunFolder, Shard
from kvbench.runs.handles import folders_at_once
from kvbench.runs.heartbeat import beating
from kvbench.runs.identity import APART, arm_name
from kvbench.runs.kernels import compile_for
from kvbench.runs.progress import Reporter, progress
from kvbench.runs.run import Work, concluded, open_folder, prepare, work_of
from kvbench.runs.terminal import Console


class Outcome(NamedTuple):
    """How an arm ended.

    Attributes:
        arm: method and budget, "quest-64".
        path: its run folder, if it got one.
        summary: of a finished arm; {} where other shards still have samples to run.
        error: what ended the arm before its last sample; what it had done until then stays in its folder.
    """

    arm: str
    path: Path | None = None
    summary: dict[str, Any] | None = None
    error: Exception | None = None


def run_shared(configs: Sequence[DictConfig], console: Console | None = None) -> list[dict[str, Any]]:
    """As `run_arms`, for who wants all arms or none; returns each one's summary.

    Raises:
        Exception: what ended an arm; the others have finished.
    """
    outcomes = run_arms(configs, console)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.summary for outcome in outcomes if outcome.summary is not None]


def run_arms(configs: Sequence[DictConfig], console: Console | None = None, shard: Shard = WHOLE) -> list[Outcome]:
    """Run composed configs together to their end, or from where they were interrupted.

    An arm that fails, or whose folder another process holds, ends alone and the others go on.

    Args:
        configs: alike but for method, budget, kv and probe.
        console: where progress is drawn.
        shard: which of the samples to run.

    Raises:
        ConfigError: they differ in more, or something is wrong that only the task's data shows.
        ResultsError: the system allows too few open files for a single one.
    """
    bind_methods()
    plain = [cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)) for config in configs]
    refuse_different(plain)
    size = folders_at_once(len(plain), shard)
    console, loaded = console or Console(), None
    if size < len(plain):
        console.print(f"{len(plain)} arms, {size} at a time: no more files can be open (ulimit -n)", soft_wrap=True)
    outcomes: list[Outcome] = []
    with threads(plain[0]["threads"]):
        for start in range(0, len(plain), size):
            found, loaded = _together(plain[start : start + size], console, shard, loaded)
            outcomes += found
    return outcomes


def _together(
    plain: Sequence[dict[str, Any]], console: Console, shard: Shard, loaded: Any
) -> tuple[list[Outcome], Any]:
    """As many arms as can hold their folders at once, from one prefill of each sample; and the model that they ran."""
    outcomes = [Outcome(arm_name(config)) for config in plain]
    with ExitStack() as held:
        running: dict[int, tuple[Arm, RunFolder]] = {}
        for index, config in enumerate(plain):
            try:
                arm = prepare(config, loaded)
                loaded = arm.loaded
                running[index] = arm, held.enter_context(open_folder(arm, shard))
                outcomes[index] = outcomes[index]._replace(path=running[index][1].path)
            except (ConfigError, ResultsError) as error:
                outcomes[index] = outcomes[index]._replace(error=error)
        if running:
            compile_for([arm for arm, _ in running.values()], console)
            with beating([folder for _, folder in running.values()]):
                ended, work = _run(running, console, shard)
            for index, (arm, folder) in running.items():
                if index in ended:
                    outcomes[index] = outcomes[index]._replace(error=ended[index])
                    continue
                try:
                    outcomes[index] = outcomes[index]._replace(summary=concluded(folder, work, arm))
                except ResultsError as error:
                    outcomes[index] = outcomes[index]._replace(error=error)
    return outcomes, loaded


def refuse_different(configs: Sequence[dict[str, Any]]) -> None:
    """Refuse configs that no common prefill can serve.

    Raises:
        ConfigError: names a key in which two differ.
    """
    first, *others = ({key: value for key, value in config.items() if key not in APART} for config in configs)
    for other in others:
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise ConfigError(f"{key}: arms that share a prefill differ in {', '.join(APART)} alone")


def _run(
    running: Mapping[int, tuple[Arm, RunFolder]], console: Console, shard: Shard
) -> tuple[dict[int, Exception], Work]:
    """Every sample through every arm that lacks it; returns what ended arms, and what was to do."""
    ended: dict[int, Exception] = {}
    first, _ = next(iter(running.values()))
    done = set.intersection(*(set(folder.done) for _, folder in running.values()))
    work = work_of(first, first.config["task"].get("limit"), done, shard)
    for _, folder in running.values():
        if folder.tear:
            console.print(f"{folder.path}: {folder.tear}", soft_wrap=True)
        folder.expect(work.whole)
    prefill = PromptPrefill()
    with progress(console, work.total, work.done) as report:
        for batch in batches(work.samples, first.config["batch"]):
            waiting = {
                index: (arm, folder)
                for index, (arm, folder) in running.items()
                if index not in ended and any(sample.id not in folder.done for sample in batch)
            }
            if len(ended) == len(running):
                break
            prompts = [prompt_of(first, sample) for sample in batch]
            # An arm that waits for no answer now may wait for the next one to this prompt.
            begun = running if batch[0].of else waiting
            served = [arm for arm, _ in begun.values() if arm.backend.own_engine] if waiting else []
            for part, prefilled, failed in _prefilled(served, prompts, report, prefill):
                read = max(len(prompt.ids) for prompt in part)
                for index, (arm, folder) in waiting.items():
                    if index in ended:
                        continue
                    report.name(arm_name(arm.config))
                    report.begin(read if prefilled else 0)
                    try:
                        for record in _measured(arm, part, report, prefilled, failed):
                            if record["id"] not in folder.done:
                                folder.add(record, report.share + sum(map(work.share, batch)))
                                report.failed(record)
                    except Exception as error:
                        ended[index] = error
                        with suppress(ResultsError):  # where nothing can be written, that is the error
                            folder.leave(interrupted=True)
                        report.bars.console.print(f"{arm_name(arm.config)} ends: {type(error).__name__}: {error}")
            prefilled = None  # its memory, before the next takes as much
            for sample in batch:
                report.advance(work.share(sample))
    return ended, work


def _prefilled(
    arms: Sequence[Arm], prompts: Sequence[TokenizedSample], report: Reporter, prefill: PromptPrefill
) -> Iterator[tuple[Sequence[TokenizedSample], Prefilled | None, str]]:
    """A batch with its prefill, or why that failed; a failed batch of several falls into its samples."""
    running = [prompt for prompt in prompts if not prompt.record["error"]]
    prefilled, failed = None, ""
    report.begin()
    if arms and running:
        try:
            prefilled = prefill(arms, running)
            read = max(len(prompt.ids) for prompt in running)
            if prefill.fresh:
                report.tokens(read, read + running[0].sample.max_new_tokens)
        except Exception as error:
            if not is_failed_sample(error):
                raise
            failed = f"{type(error).__name__}: {error}"
    if failed and len(prompts) > 1:
        for prompt in prompts:
            yield from _prefilled(arms, [prompt], report, prefill)
    else:
        yield prompts, prefilled, failed


def _measured(
    arm: Arm, prompts: Sequence[TokenizedSample], report: Reporter, prefilled: Prefilled | None, failed: str
) -> list[dict[str, Any]]:
    """The records of a batch, whose prefill has failed for a reason, or not.

    A shared prefill holds all keys and values on the device: an arm whose tokens go to the host may have room alone.
    """
    if failed and arm.method.needs.home == "device":
        return [failure(arm, prompt, failed) for prompt in prompts]
    return measure(arm, prompts, report.tokens, prefilled)
