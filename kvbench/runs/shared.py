"""Arms that differ in method and budget alone: a sample is prefilled once, and each arm begins from
that.

Every arm has its own run folder. Where arms decode together (`sweep.shared_decode`) they have no
times of their own, and logits that differ by rounding from those of a run alone; else each gets the
bits that a run of its own would give, and only what the one prefill hides, the time to the first
token, is missing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.backends.hf import together
from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError, bind_methods
from kvbench.measure.arm import Arm, read
from kvbench.measure.machine import threads
from kvbench.runs.arms import Arms, in_turn
from kvbench.runs.folder import WHOLE, ResultsError, RunFolder, Shard
from kvbench.runs.handles import folders_at_once
from kvbench.runs.heartbeat import beating
from kvbench.runs.identity import MAY_DIFFER, arm_name, starts_alone
from kvbench.runs.kernels import compile_for
from kvbench.runs.progress import progress
from kvbench.runs.run import concluded, open_folder, prepare
from kvbench.runs.side_by_side import SideBySide
from kvbench.runs.terminal import Console
from kvbench.runs.work import Work, work_of


class Outcome(NamedTuple):
    """How an arm ended.

    Attributes
    ----------
    arm
        method and budget, "quest-64".
    path
        its run folder, if it got one.
    summary
        of a finished arm; {} where other shards still have samples to run.
    error
        what ended the arm before its last sample; what it had done until then stays in its folder.
    """

    arm: str
    path: Path | None = None
    summary: dict[str, Any] | None = None
    error: Exception | None = None


def run_shared(
    configs: Sequence[RunConfig], console: Console | None = None
) -> list[dict[str, Any]]:
    """As `run_arms`, for who wants all arms or none; returns each one's summary.

    Raises
    ------
    Exception
        what ended an arm; the others have finished.
    """
    outcomes = run_arms(configs, console)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.summary for outcome in outcomes if outcome.summary is not None]


def run_arms(
    configs: Sequence[RunConfig], console: Console | None = None, shard: Shard = WHOLE
) -> list[Outcome]:
    """Run configs together to their end, or from where they were interrupted.

    An arm that fails, or whose folder another process holds, ends alone and the others go on.

    Parameters
    ----------
    configs
        alike but for method, budget, kv and probe.
    console
        where progress is drawn.
    shard
        which of the samples to run.

    Raises
    ------
    ConfigError
        they differ in more, or something is wrong that only the task's data shows.
    ResultsError
        the system allows too few open files for a single one.
    """
    bind_methods()
    refuse_different(configs)
    size = folders_at_once(len(configs), shard)
    console, loaded = console or Console(), None
    if size < len(configs):
        console.print(
            f"{len(configs)} arms, {size} at a time: no more files can be open (ulimit -n)",
            soft_wrap=True,
        )
    outcomes: list[Outcome] = []
    with threads(configs[0].threads):
        for start in range(0, len(configs), size):
            new_outcomes, loaded = _at_once(configs[start : start + size], console, shard, loaded)
            outcomes += new_outcomes
    return outcomes


def _at_once(
    configs: Sequence[RunConfig], console: Console, shard: Shard, loaded: Any
) -> tuple[list[Outcome], Any]:
    """As many arms as can hold their folders at once, from one prefill of each sample; and the
    model that they ran.
    """
    outcomes = [Outcome(arm_name(config)) for config in configs]
    with ExitStack() as open_folders:
        running: dict[int, tuple[Arm, RunFolder]] = {}
        for index, config in enumerate(configs):
            try:
                arm = _decoding(prepare(config, loaded), console)
                loaded = arm.loaded
                running[index] = arm, open_folders.enter_context(open_folder(arm, shard))
                outcomes[index] = outcomes[index]._replace(path=running[index][1].path)
            except (ConfigError, ResultsError) as error:
                outcomes[index] = outcomes[index]._replace(error=error)
        if running:
            with beating([folder for _, folder in running.values()]):
                compile_for([arm for arm, _ in running.values()], console)
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


def refuse_different(configs: Sequence[RunConfig]) -> None:
    """Refuse configs that no common prefill can serve.

    Raises
    ------
    ConfigError
        names a key in which two differ, or an arm whose engine no other arm can use.
    """
    for config in configs if len(configs) > 1 else ():
        if starts_alone(config):
            raise ConfigError(
                f"method={config.method.name}: vLLM frees what it drops, in an engine for"
                " this arm alone; expected a run of its own"
            )
    first, *others = (
        {key: value for key, value in config.resolved.items() if key not in MAY_DIFFER}
        for config in configs
    )
    for other in others:
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"{key}: arms that share a prefill differ in {', '.join(MAY_DIFFER)} alone"
                )


def _decoding(arm: Arm, console: Console) -> Arm:
    """An arm that decodes together with others where that is asked for and can be; what cannot is
    said.
    """
    if not arm.config.decodes_jointly:
        return arm
    reason = together.unfit(arm.loaded.model)
    if reason is not None:
        console.print(f"{arm_name(arm.config)} decodes alone: {reason}", soft_wrap=True)
        return arm
    return replace(arm, decode="together")


def _run(
    running: Mapping[int, tuple[Arm, RunFolder]], console: Console, shard: Shard
) -> tuple[dict[int, Exception], Work]:
    """Every sample through every arm that lacks it; returns what ended arms, and what was to do."""
    first, _ = next(iter(running.values()))
    done = set.intersection(*(set(folder.done) for _, folder in running.values()))
    work = work_of(first, first.config.task.limit, done, shard)
    for _, folder in running.values():
        if folder.tear:
            console.print(f"{folder.path}: {folder.tear}", soft_wrap=True)
        folder.expect(work.whole)
    with progress(console, work.total, work.done) as report:
        arms, batches = Arms(running, work, report), read(first, work.samples)
        if first.decode == "together":
            SideBySide(arms).run(batches)
        else:
            in_turn(arms, batches)
    return arms.ended, work
