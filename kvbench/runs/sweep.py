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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError, bind_methods
from kvbench.engine import batch as engine_batch
from kvbench.engine.batch import Admission
from kvbench.measure.arm import INDEX, PREFILLING, Arm
from kvbench.measure.job import PromptJob, SharedPrompts, is_failed_sample
from kvbench.measure.kernels import load_kernels
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


@dataclass(eq=False)
class ArmRun:
    """An arm of a sweep, and what has come of it.

    Attributes
    ----------
    arm, folder
        what it runs and where to, once that is prepared.
    summary
        of a finished arm; {} where other shards still have samples to run.
    error
        what ended it before its last sample; what it had done until then stays in its folder.
    index_share
        what its index has taken of a prompt's keys and values, at most; None: no index was seen.
    """

    config: RunConfig
    arm: Arm = field(init=False)
    folder: RunFolder = field(init=False)
    summary: dict[str, Any] | None = None
    error: Exception | None = None
    index_share: float | None = None

    def lacks(self, prompts: Iterable[TokenizedSample]) -> bool:
        """Whether it goes on, and has not done all samples of a batch."""
        done = self.folder.done
        return self.error is None and any(prompt.sample.id not in done for prompt in prompts)


def run(config: RunConfig, shard: Shard = WHOLE) -> dict[str, Any]:
    """Run the samples of a shard through a checked config to their end, alone and with a clock, or
    from where it was interrupted.

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
        single, console = ArmRun(config), Console()
        single.arm = arm = prepare(config)
        with open_folder(arm, shard) as folder:
            single.folder = folder
            work = Sweep([single], console, shard, by_itself=True).run()
            summary = concluded(folder, work, arm)
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
    runs = run_arms(configs, console)
    for run in runs:
        if run.error is not None:
            raise run.error
    return [run.summary for run in runs if run.summary is not None]


def run_arms(
    configs: Sequence[RunConfig], console: Console | None = None, shard: Shard = WHOLE
) -> list[ArmRun]:
    """Run the samples of a shard through configs, alike but for method, budget, kv and probe, to
    their end or from where they were interrupted.

    An arm that fails, or whose folder another process holds, ends alone and the others go on.

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
    runs = [ArmRun(config) for config in configs]
    with threads(configs[0].threads):
        for start in range(0, len(runs), size):
            loaded = _at_once(runs[start : start + size], console, shard, loaded)
    return runs


def _at_once(runs: Sequence[ArmRun], console: Console, shard: Shard, loaded: Any) -> Any:
    """Run as many arms as can hold their folders at once, from one prefill of each sample; returns
    their model, to run others with.
    """
    with ExitStack() as open_folders:
        for run in runs:
            try:
                run.arm = _decoding(prepare(run.config, loaded), console)
                loaded = run.arm.loaded
                run.folder = open_folders.enter_context(open_folder(run.arm, shard))
            except (ConfigError, ResultsError) as error:
                run.error = error
        running = [run for run in runs if run.error is None]
        if running:
            work = Sweep(running, console, shard).run()
        for run in running:
            try:
                run.summary = None if run.error else concluded(run.folder, work, run.arm)
            except ResultsError as error:
                run.error = error
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
    """The prompts of a batch on their way through the arms that lack it; its end counts as
    progress, unless it is a part that one arm tries again.
    """

    prompts: Sequence[TokenizedSample]
    waiting: Sequence[ArmRun]
    counts: bool = True

    def __post_init__(self) -> None:
        self.to_come = len(self.waiting)  # arms in which it has not ended
        self.ready = [prompt for prompt in self.prompts if prompt.can_run]
        self.lengths = [len(prompt.ids) for prompt in self.ready]
        self.columns = len(self.ready) * max(self.lengths, default=0)  # tokens, padding included

    @property
    def done(self) -> float:
        """The share of its arms in which it has ended, of one that goes on."""
        return 1 - self.to_come / len(self.waiting) if self.to_come else 0.0

    def one_by_one(self, waiting: Sequence[ArmRun], counts: bool) -> Iterator[list[BatchProgress]]:
        """Its prompts, each by itself, for some arms."""
        for prompt in self.prompts:
            yield [BatchProgress([prompt], waiting, counts)]


class Sweep:
    """Brings batches of samples to arms, and records to their folders.

    Where memory runs out or logits are NaN a batch fails: each of its samples is tried again by
    itself, and a sample by itself scores 0. Other errors end the arm.

    Parameters
    ----------
    running
        the arms; all decode together, or none does.
    console, shard
        where progress is drawn, and which of the samples to run.
    by_itself
        it is a run's: of one arm, which reads its prompts itself, and whose errors are the run's.
    """

    report: Reporter
    _work: Work

    def __init__(
        self,
        running: Sequence[ArmRun],
        console: Console,
        shard: Shard = WHOLE,
        by_itself: bool = False,
    ) -> None:
        self._running, self._console = running, console
        self._shard, self._by_itself = shard, by_itself
        self._first = running[0].arm  # samples are the same for all
        self._together = self._first.decode == "together"
        self._again = deque[list[BatchProgress]]()
        # what the last prefill took a token, for these arms
        self._token_bytes = defaultdict[tuple[ArmRun, ...], float](lambda: math.inf)

    def run(self) -> Work:
        """Every sample through every arm that lacks it; returns what was to do.

        Raises
        ------
        ConfigError
            a sample cannot run as the protocol asks; those that were brought before it have ended.
        """
        first, folders = self._first, [run.folder for run in self._running]
        with beating(folders):
            load_kernels(self._console)
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
        while any(run.error is None for run in self._running):
            try:
                if self._again:
                    self._bring(self._again.popleft())
                elif (group := next(groups, None)) is not None:
                    self._bring(
                        [
                            BatchProgress(batch, [run for run in self._running if run.lacks(batch)])
                            for batch in group
                        ]
                    )
                elif self._together and self._batch.rows:
                    self._batch.step()
                else:
                    break
            except ConfigError:
                if self._together:
                    self._batch.clear()
                raise

    def _bring(self, group: list[BatchProgress]) -> None:
        """Take batches that one prefill can serve to the arms that lack them."""
        runs = [run for run in self._running if any(run in batch.waiting for batch in group)]
        shared, failed = self._prefill(group, runs)
        if failed and self._together and self._batch.rows:
            # for want of memory, it may be, that others have until they leave
            self._batch.clear()
            self._again.append(group)
            return
        if failed and len(group[0].prompts) > 1:
            for batch in group:
                self._again.extend(batch.one_by_one(batch.waiting, batch.counts))
            return
        for run in runs:
            self._start([batch for batch in group if run in batch.waiting], run, shared, failed)
        for batch in group:
            if not batch.waiting:
                self._advance(batch)
            if batch.counts and self._together:
                self.report.joint_decode.read += self._share(batch)

    def _share(self, batch: BatchProgress) -> float:
        """The share of a batch in the work of this start."""
        return sum(self._work.share(prompt.sample) for prompt in batch.prompts)

    def _prefill(
        self, group: Sequence[BatchProgress], runs: Sequence[ArmRun]
    ) -> tuple[SharedPrompts | None, str]:
        """The prefill from which all arms begin, or why that failed.

        Of a run by itself each generation has its own, whose time is part of that to the first
        token, unless more is asked of the prefill, or it is full attention's, too. Among others it
        waits until there is room, by what the last one for these arms took; the first one until
        nothing else goes on.
        """
        first, key = group[0], tuple(runs)
        served = [run.arm for run in runs if run.arm.backend.has_engine]
        self.report.begin()
        if not (served and first.ready):
            return None, ""
        forced = first.ready[0].sample.forced
        if self._by_itself and len(group) == 1 and not forced:
            return None, ""
        if self._together:
            self._batch.clear(PREFILLING * self._token_bytes[key] * first.columns, len(first.ready))
        longest = max(batch.ready[0].new_tokens for batch in group)
        try:
            shared = SharedPrompts(served, first.ready, self.report.tokens, longest)
        except Exception as error:
            if not is_failed_sample(error):
                raise
            return None, f"{type(error).__name__}: {error}"
        self._token_bytes[key] = shared.nbytes / first.columns
        if self._together and forced:  # what is compared goes on ahead of those that compare
            admission = Admission(lambda *_: None, memory={shared: shared.nbytes})
            self._batch.admit(partial(self._expected, shared.begin_reference), 1, admission)
        return shared, ""

    def _start(
        self,
        batches: Sequence[BatchProgress],
        run: ArmRun,
        shared: SharedPrompts | None,
        failed: str,
    ) -> None:
        """Have batches go through an arm, each from what it has made of the prompts for the one
        before, or fail there, where their prefill has.
        """
        arm, jobs = run.arm, list[PromptJob]()
        for batch in batches:
            before = jobs[-1] if jobs else None
            jobs.append(PromptJob(arm, batch.prompts, shared, self.report.tokens, before))
        for batch, job in zip(batches, jobs, strict=True):
            if failed and (self._together or not job.has_room_alone):
                failures = [prompt.failure(arm.task.metric, failed) for prompt in batch.prompts]
                self._end(batch, run, partial(list, failures))
            elif self._together and shared is not None and run.error is None:
                self._join(batch, run, job, shared)
            else:
                if not self._by_itself:
                    self.report.name(arm_name(arm.config))
                    self.report.part = sum(self._share(part) * part.done for part in batches)
                self.report.begin(max(batch.lengths) if shared else 0)
                self._end(batch, run, job.run)

    def _join(
        self, batch: BatchProgress, run: ArmRun, job: PromptJob, shared: SharedPrompts
    ) -> None:
        """Have a generation join those that decode together."""
        rows = len(job.prompts)

        def ended(sequence: engine_batch.Sequence | None, error: Exception | None) -> None:
            if sequence is not None:  # which may have ended early
                self.report.joint_decode.expected -= rows * sequence.to_come

            def records() -> Records:
                if sequence is None:
                    raise error or AssertionError("a generation ends with an error, or is over")
                scored = job.records(sequence)
                index_bytes = scored[-1]["audit"].get("index_bytes", 0)
                share = index_bytes / (batch.columns * run.arm.token_bytes)
                run.index_share = max(share, run.index_share or 0.0)
                return scored

            self._end(batch, run, records)
            if run.error is not None:
                self._batch.drop(run)

        size = job.memory(INDEX if run.index_share is None else run.index_share)
        admission = Admission(ended, run, {shared: shared.nbytes, job: size})
        self._batch.admit(partial(self._expected, job.begin), rows, admission)

    def _expected(self, begin: Callable[[], engine_batch.Sequence]) -> engine_batch.Sequence:
        """Begin a generation, whose tokens are work to come from here on."""
        sequence = begin()
        self.report.joint_decode.expected += len(sequence.generated) * sequence.to_come
        return sequence

    def _end(self, batch: BatchProgress, run: ArmRun, records: Callable[[], Records]) -> None:
        """A batch has ended in an arm: make its records and keep them; what goes wrong ends this
        arm alone.
        """
        try:
            for record in self._made(batch, run, records) if run.error is None else []:
                if record["id"] not in run.folder.done:
                    run.folder.add(record, self.report.share + self._share(batch))
                    self.report.failed(record)
                    if self._by_itself:
                        self._remark(run.arm, record, batch)
        except Exception as error:
            if self._by_itself:
                raise
            run.error = error
            with suppress(ResultsError):  # where nothing can be written, that is the error
                run.folder.leave(interrupted=True)
            self._console.print(f"{arm_name(run.config)} ends: {type(error).__name__}: {error}")
        batch.to_come -= 1
        self._advance(batch)

    def _made(self, batch: BatchProgress, run: ArmRun, records: Callable[[], Records]) -> Records:
        """The records of a batch; where it fails its samples are tried again, or the only one
        scores 0.
        """
        try:
            return records()
        except Exception as error:
            if not is_failed_sample(error):
                raise
            if len(batch.prompts) > 1:
                self._again.extend(batch.one_by_one([run], counts=False))
                return []
            failed = f"{type(error).__name__}: {error}"
            return [batch.prompts[0].failure(run.arm.task.metric, failed)]

    def _advance(self, batch: BatchProgress) -> None:
        """Progress, where a batch has ended in all arms."""
        for prompt in batch.prompts if batch.counts and not batch.to_come else ():
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
