"""Samples through the arms of a sweep, each with a run folder; a run is a sweep of one arm.

Arms differ in method and budget alone: a sample is prefilled once, and each arm begins from that.
Where they decode together (`sweep.shared_decode`) samples go through all arms side by side, as many
as there is room for; they have no times of their own, and logits that differ by rounding from those
of a run alone. Else each gets the bits that a run by itself would give, and only what the one
prefill hides, the time to the first token, is missing there.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError, bind_methods
from kvbench.engine import batch as engine_batch
from kvbench.engine.batch import Admission
from kvbench.measure.arm import INDEX, PREFILLING, Arm
from kvbench.measure.job import PromptJob, SharedPrompts, is_failed_sample
from kvbench.measure.kernels import compile_for
from kvbench.measure.machine import threads
from kvbench.measure.prompts import TokenizedSample, read
from kvbench.measure.work import Work, work_of
from kvbench.models import hub
from kvbench.runs.folder import ResultsError, RunFolder, beating, folders_at_once
from kvbench.runs.identity import MAY_DIFFER, arm_name, starts_alone
from kvbench.runs.progress import Reporter, progress
from kvbench.runs.run import concluded, dtype_of, open_folder, prepare
from kvbench.runs.table import table
from kvbench.runs.terminal import Console
from kvbench.tasks import WHOLE, Shard

Records = list[dict[str, Any]]


@dataclass
class Outcome:
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


def run(config: RunConfig, shard: Shard = WHOLE) -> dict[str, Any]:
    """Run one config to its end, alone and with a clock, or from where it was interrupted.

    Parameters
    ----------
    config
        checked.
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
    with threads(config.threads):
        arm, console = prepare(config), Console()
        with open_folder(arm, shard) as folder:
            sweep = Sweep({0: (arm, folder)}, console, shard, by_itself=True)
            summary = concluded(folder, sweep.run(), arm)
        _say(arm, folder, summary, console, shard)
    return summary


def _say(
    arm: Arm, folder: RunFolder, summary: dict[str, Any], console: Console, shard: Shard
) -> None:
    """Print what a run has come to."""
    say = partial(console.print, soft_wrap=True)
    if not summary:
        say(f"shard {shard} is done; others still have samples to run: {folder.path}")
        return
    title = f"{arm.task.name}, {arm_name(arm.config)} on {arm.loaded.name} in {dtype_of(arm)}"
    console.print(table(title, arm.task.metric, summary))
    if how := hub.weights_origin(arm.loaded.revision):
        say(f"weights of {arm.loaded.name}: {how}")
    say(f"results: {folder.path}")
    if summary["n"] < len(folder.records):
        limit = arm.config.task.limit
        console.print(
            f"task.limit={limit}: of the {len(folder.records)} samples there these are the first"
        )
    if summary["failed"]:
        say(
            f"{summary['failed']} of {summary['n']} samples failed and scored 0:"
            f" {folder.path / 'samples.jsonl'} says why; the same command tries them again"
        )


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
            at_once = configs[start : start + size]
            outcomes += [Outcome(arm_name(config)) for config in at_once]
            loaded = _at_once(at_once, outcomes[start:], console, shard, loaded)
    return outcomes


def _at_once(
    configs: Sequence[RunConfig],
    outcomes: Sequence[Outcome],
    console: Console,
    shard: Shard,
    loaded: Any,
) -> Any:
    """Run as many arms as can hold their folders at once, from one prefill of each sample; returns
    their model, to run others with.
    """
    with ExitStack() as open_folders:
        running: dict[int, tuple[Arm, RunFolder]] = {}
        for index, (config, outcome) in enumerate(zip(configs, outcomes, strict=True)):
            try:
                arm = _decoding(prepare(config, loaded), console)
                loaded = arm.loaded
                running[index] = arm, open_folders.enter_context(open_folder(arm, shard))
                outcome.path = running[index][1].path
            except (ConfigError, ResultsError) as error:
                outcome.error = error
        if not running:
            return loaded
        sweep = Sweep(running, console, shard)
        work = sweep.run()
        for index, (arm, folder) in running.items():
            outcome = outcomes[index]
            outcome.error = sweep.ended.get(index)
            try:
                outcome.summary = None if outcome.error else concluded(folder, work, arm)
            except ResultsError as error:
                outcome.error = error
    return loaded


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
    reason = ModelRunner(arm.loaded.model).alone()
    if reason is not None:
        console.print(f"{arm_name(arm.config)} decodes alone: {reason}", soft_wrap=True)
        return arm
    return replace(arm, decode="together")


@dataclass
class BatchProgress:
    """A batch on its way through the arms.

    Attributes
    ----------
    prompts
        the batch's.
    waiting
        the arms that lack it, by their number.
    counts
        its end is progress; not of a part that is tried again in one arm.
    """

    prompts: Sequence[TokenizedSample]
    waiting: dict[int, Arm]
    counts: bool = True

    def __post_init__(self) -> None:
        self.to_come = len(self.waiting)  # arms in which it has not ended
        self.ready = [prompt for prompt in self.prompts if prompt.can_run]

    @property
    def done(self) -> float:
        """The share of its arms in which it has ended; 0 once it has in all."""
        return 1 - self.to_come / len(self.waiting) if self.to_come else 0.0

    @property
    def lengths(self) -> list[int]:
        """Tokens of the prompts that can run."""
        return [len(prompt.ids) for prompt in self.ready]

    @property
    def columns(self) -> int:
        """Tokens of the prompts that can run, padding included."""
        return len(self.ready) * max(self.lengths)

    def one_by_one(self, waiting: dict[int, Arm], counts: bool) -> Iterator[list[BatchProgress]]:
        """Its prompts, each by itself, for some arms."""
        for prompt in self.prompts:
            yield [BatchProgress([prompt], waiting, counts)]


class Sweep:
    """Arms that run: brings batches of samples to them, and records to their folders.

    Where memory runs out or logits are NaN a batch fails: each of its samples is tried again by
    itself, and a sample by itself scores 0. Other errors end the arm.

    Parameters
    ----------
    running
        the arms and their folders, by their number; all decode together, or none does.
    console
        where progress is drawn.
    shard
        which of the samples to run.
    by_itself
        it is a run's: of one arm, which reads its prompts itself, and whose errors are the run's.

    Attributes
    ----------
    ended
        what ended an arm.
    """

    report: Reporter
    _work: Work

    def __init__(
        self,
        running: Mapping[int, tuple[Arm, RunFolder]],
        console: Console,
        shard: Shard = WHOLE,
        by_itself: bool = False,
    ) -> None:
        self._running, self.ended = running, dict[int, Exception]()
        self._console, self._by_itself = console, by_itself
        self._first, _ = next(iter(running.values()))  # samples are the same for all
        self._shard, self._together = shard, self._first.decode == "together"
        self._again = deque[list[BatchProgress]]()
        self._index: dict[int, float] = {}  # what an arm's index took of a prompt's keys and values
        # what the last prefill took a token, for these arms
        self._token_bytes = defaultdict[tuple[int, ...], float](lambda: math.inf)

    def run(self) -> Work:
        """Every sample through every arm that lacks it.

        Returns
        -------
        Work
            What was to do.

        Raises
        ------
        ConfigError
            a sample cannot run as the protocol asks; those that were brought before it have ended.
        """
        first, folders = self._first, [folder for _, folder in self._running.values()]
        with beating(folders):
            compile_for([arm for arm, _ in self._running.values()], self._console)
            done = set.intersection(*(set(folder.done) for folder in folders))
            self._work = work = work_of(first, first.config.task.limit, done, self._shard)
            for folder in folders:
                if folder.tear:
                    self._console.print(f"{folder.path}: {folder.tear}", soft_wrap=True)
                folder.expect(work.whole)
            with progress(self._console, work.total, work.done) as self.report:
                if self._together:
                    runner = ModelRunner(first.loaded.model)
                    self._batch = engine_batch.Batch(runner, first.room, self.report.rows)
                self._bring_all(read(first, work.samples))
        return work

    def _bring_all(self, groups: Iterator[list[list[TokenizedSample]]]) -> None:
        while len(self.ended) < len(self._running):
            try:
                if self._again:
                    self._bring(self._again.popleft())
                elif (group := next(groups, None)) is not None:
                    self._bring([BatchProgress(batch, self._lacking(batch)) for batch in group])
                elif self._together and self._batch.rows:
                    self._batch.step()
                else:
                    break
            except ConfigError:
                if self._together:
                    self._batch.clear()
                raise

    def _lacking(self, prompts: Sequence[TokenizedSample]) -> dict[int, Arm]:
        """The arms that go on and have not done all samples of a batch."""
        return {
            index: arm
            for index, (arm, folder) in self._running.items()
            if index not in self.ended
            and any(prompt.sample.id not in folder.done for prompt in prompts)
        }

    def _bring(self, group: list[BatchProgress]) -> None:
        """Take batches that one prefill can serve to the arms that lack them."""
        arms = {index: arm for batch in group for index, arm in batch.waiting.items()}
        if self._together:
            self._clear(group[0], arms)
        shared, failed = self._prefill(group, arms)
        if failed and self._together and self._batch.rows:
            # for want of memory, it may be, that others have until they leave
            self._batch.clear()
            self._again.append(group)
            return
        if failed and any(len(batch.prompts) > 1 for batch in group):
            for batch in group:
                self._again.extend(batch.one_by_one(batch.waiting, batch.counts))
            return
        if self._together and shared is not None and group[0].ready[0].sample.forced:
            self._start_reference(group[0], shared)
        for index, arm in arms.items():
            self._start(group, index, arm, shared, failed)
        for batch in group:
            if not batch.waiting:
                self._advance(batch)
            if batch.counts and self._together:
                self.report.joint_decode.read += self._share(batch)

    def _share(self, batch: BatchProgress) -> float:
        """The share of a batch in the work of this start."""
        return sum(self._work.share(prompt.sample) for prompt in batch.prompts)

    # -- prefills ----------------------------------------------------------------------------------

    def _clear(self, batch: BatchProgress, arms: Mapping[int, Arm]) -> None:
        """Wait until there is room for the prefill of a batch, by what the last one for these arms
        took; before the first, until nothing else goes on.
        """
        if batch.ready and arms:
            size = PREFILLING * self._token_bytes[tuple(arms)] * batch.columns
            self._batch.clear(size, len(batch.ready))

    def _prefill(
        self, group: list[BatchProgress], arms: Mapping[int, Arm]
    ) -> tuple[SharedPrompts | None, str]:
        """The prefill from which all arms begin, or why that failed.

        Of a run by itself each generation has its own, whose time is part of that to the first
        token, unless more is asked of the prefill, or it is full attention's, too.
        """
        first = group[0]
        served = [arm for arm in arms.values() if arm.backend.has_engine]
        self.report.begin()
        if not (served and first.ready):
            return None, ""
        if self._by_itself and len(group) == 1 and not first.ready[0].sample.forced:
            return None, ""
        longest = max(batch.ready[0].new_tokens for batch in group)
        try:
            shared = SharedPrompts(served, first.ready, self.report.tokens, longest)
        except Exception as error:
            if not is_failed_sample(error):
                raise
            return None, f"{type(error).__name__}: {error}"
        self._token_bytes[tuple(arms)] = shared.nbytes / first.columns
        return shared, ""

    def _start_reference(self, batch: BatchProgress, shared: SharedPrompts) -> None:
        """Have what forced tokens are compared with join, ahead of those that compare."""
        begin = partial(shared.begin_reference, self._first.loaded, batch.ready[0])
        admission = Admission(lambda *_: None, memory={shared: shared.nbytes})
        self._batch.admit(partial(self._expected, begin), 1, admission)

    # -- generations -------------------------------------------------------------------------------

    def _start(
        self,
        group: list[BatchProgress],
        index: int,
        arm: Arm,
        shared: SharedPrompts | None,
        failed: str,
    ) -> None:
        """Have batches go through an arm, or fail there, after a prefill or why that failed."""
        lacking = [batch for batch in group if index in batch.waiting]
        for batch, job in zip(lacking, self._jobs(lacking, arm, shared), strict=True):
            if failed and not self._has_room_alone(batch, arm):
                metric = arm.task.metric
                failures = [prompt.failure(metric, failed) for prompt in batch.prompts]
                self._end(batch, index, partial(list, failures))
            elif self._together and shared is not None and index not in self.ended:
                self._join(batch, index, job, shared)
            else:
                self.report.part = sum(self._share(other) * other.done for other in group)
                if not self._by_itself:
                    self.report.name(arm_name(arm.config))
                self.report.begin(max(batch.lengths) if shared else 0)
                self._end(batch, index, job.run)

    def _jobs(
        self, batches: Iterable[BatchProgress], arm: Arm, shared: SharedPrompts | None
    ) -> list[PromptJob]:
        """A job for each batch, which goes on from the one before."""
        jobs: list[PromptJob] = []
        for batch in batches:
            before = jobs[-1] if jobs else None
            jobs.append(PromptJob(arm, batch.prompts, shared, self.report.tokens, before))
        return jobs

    def _has_room_alone(self, batch: BatchProgress, arm: Arm) -> bool:
        """Whether an arm may have room where a shared prefill has none, which holds all keys and
        values on the device.
        """
        home, forced = arm.method.needs.home, batch.ready[0].sample.forced
        return not (self._together or home == "device" or forced)

    def _join(
        self, batch: BatchProgress, index: int, job: PromptJob, shared: SharedPrompts
    ) -> None:
        """Have an arm's generation join those that decode together."""
        arm, rows, lengths = job.arm, len(job.prompts), batch.lengths
        size = arm.row_bytes(lengths, job.room, self._index.get(index, INDEX))
        size += shared.prefilled.copy_bytes
        if job.copies:  # what is kept, and a copy, share no page with the prompt
            size = 2 * (size + shared.prefilled.nbytes)

        def ended(sequence: engine_batch.Sequence | None, error: Exception | None) -> None:
            if sequence is not None:  # which may have ended early
                self.report.joint_decode.expected -= rows * sequence.to_come

            def records() -> Records:
                if sequence is None:
                    raise error or AssertionError("a generation ends with an error, or is over")
                scored = job.records(sequence)
                index_bytes = scored[-1]["audit"].get("index_bytes", 0)
                share = index_bytes / (batch.columns * arm.token_bytes)
                self._index[index] = max(share, self._index.get(index, 0.0))
                return scored

            self._end(batch, index, records)
            if index in self.ended:
                self._batch.drop(index)

        admission = Admission(ended, index, {shared: shared.nbytes, job: size})
        self._batch.admit(partial(self._expected, job.begin), rows, admission)

    def _expected(self, begin: Callable[[], engine_batch.Sequence]) -> engine_batch.Sequence:
        """Begin a generation, whose tokens are work to come from here on."""
        sequence = begin()
        self.report.joint_decode.expected += len(sequence.generated) * sequence.to_come
        return sequence

    # -- what was measured -------------------------------------------------------------------------

    def _end(self, batch: BatchProgress, index: int, records: Callable[[], Records]) -> None:
        """A batch has ended in an arm: make its records and keep them; what goes wrong ends this
        arm alone.
        """
        arm, folder = self._running[index]
        try:
            for record in [] if index in self.ended else self._made(batch, index, arm, records):
                if record["id"] not in folder.done:
                    folder.add(record, self.report.share + self._share(batch))
                    self.report.failed(record)
                    if self._by_itself:
                        self._remark(arm, record, batch)
        except Exception as error:
            if self._by_itself:
                raise
            self.ended[index] = error
            with suppress(ResultsError):  # where nothing can be written, that is the error
                folder.leave(interrupted=True)
            self._console.print(f"{arm_name(arm.config)} ends: {type(error).__name__}: {error}")
        batch.to_come -= 1
        self._advance(batch)

    def _made(
        self, batch: BatchProgress, index: int, arm: Arm, records: Callable[[], Records]
    ) -> Records:
        """The records of a batch; where it fails its samples are tried again, or the only one
        scores 0.
        """
        try:
            return records()
        except Exception as error:
            if not is_failed_sample(error):
                raise
            if len(batch.prompts) > 1:
                self._again.extend(batch.one_by_one({index: arm}, counts=False))
                return []
            failed = f"{type(error).__name__}: {error}"
            return [batch.prompts[0].failure(arm.task.metric, failed)]

    def _advance(self, batch: BatchProgress) -> None:
        """Progress, where a batch has ended in all arms."""
        if batch.counts and not batch.to_come:
            for prompt in batch.prompts:
                self.report.advance(self._work.share(prompt.sample))

    def _remark(self, arm: Arm, record: dict[str, Any], batch: BatchProgress) -> None:
        """Say of a run by itself, once, what its first samples show of its settings."""
        tokens = f"the {record['prompt_tokens']} tokens of {record['id']}"
        self.report.covered(record)
        if arm.attends_whole(record):
            self.report.once("whole", f"budget=null: the method attends {tokens} whole (said once)")
        chat = any(p.sample.chat for p in batch.prompts if p.sample.id == record["id"])
        if chat and not record["chat"] and arm.protocol.chat == "auto":
            raw = "protocol.chat=auto: the tokenizer has no chat template, prompts are raw"
            self.report.once("chat", f"{raw} (said once)")
