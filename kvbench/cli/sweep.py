"""Sweeps: what runs in one, and its launchers: here in turn, here side by side, or as a SLURM job array.

Arms that differ in method, budget and probe alone become one job, with one prefill a sample; with
`sweep.shared_prefill=false` every arm is a job of its own. A job that fails, or is killed, stops no other, and at the
end a table says how every arm ended. Run folders hold what was done, so the same command goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvbench.cli import smoke
from kvbench.cli.checks import check
from kvbench.cli.compose import without_hydra
from kvbench.config import ConfigError, first_line, sweep_words
from kvbench.runs.folder import ResultsError
from kvbench.runs.identity import APART, budget_of
from kvbench.runs.table import Ended, tell

# Hydra imports its own plugins anew when it first looks for them, and a class must not descend from an earlier copy.
Plugins.instance()

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

POLL_SECONDS = 1.0


def ended_by(error: BaseException) -> Ended:
    """The end of an arm that an error ended; what is no bad input shows its traceback."""
    if isinstance(error, (ConfigError, ResultsError)):
        return Ended({}, first_line(error))
    traceback.print_exception(error)
    return Ended({}, f"{type(error).__name__}: {first_line(error)}")


class Job:
    """The arms of a job, composed; called, it runs them and says how each ended. One alone prefills for itself."""

    def __init__(self, configs: Sequence[DictConfig]) -> None:
        self.configs = configs

    def __call__(self) -> list[Ended]:
        try:
            for config in self.configs:
                check(config)
            if len(self.configs) == 1:
                from kvbench.runs.run import run

                return [Ended(run(self.configs[0]) or {})]
            from kvbench.runs.shared import run_arms

            return [
                Ended(outcome.summary or {}) if outcome.error is None else ended_by(outcome.error)
                for outcome in run_arms(self.configs)
            ]
        except Exception as error:
            return [ended_by(error)] * len(self.configs)

    def checkpoint(self) -> Any:
        """What submitit queues again when the job's time is over or the job is preempted: the same; it resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Arms(BasicSweeper):
    """Hydra's own sweeper, but for `arms`: a table's rows are seldom all methods with all budgets.

    Args:
        max_batch_size, params: as Hydra's.
        arms: keys and values that are swept together, beside those of `params`; the sweep is all arms.
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(max_batch_size, {})
        self._words = sweep_words(params, arms)

    def split_arguments(  # type: ignore[override]  # Hydra's is static, and called as this one is
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The words of each job, in batches; those of the command line come last and stand above an arm's."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        split = BasicSweeper.split_arguments
        jobs = [job for words in self._words for job in split([*parser.parse_overrides(words), *overrides], None)[0]]
        return list(self.split_overrides_to_chunks(jobs, max_batch_size))


class InTurn(Launcher):
    """One job after the other, in this process.

    Attributes:
        here: jobs run on this machine, whose device and network they need.
    """

    here = True

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """What Hydra hands over: where configs are composed, what runs one, and the sweep's own config."""
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check all arms, run them, then say what became of each.

        Raises:
            ConfigError: an arm cannot run; none has been started.
            SweepError: some did not finish.
        """
        configs = [without_hydra(self._loader.load_sweep_config(self._config, list(words))) for words in job_overrides]
        arms = distinct([smoke.applied(config) for config in configs])
        for arm in arms.values():
            check(arm, self.here)
        groups = [[list(arms)[number] for number in group] for group in grouped(list(arms.values()))]
        ends: dict[int, Ended] = {}
        for number, ended in self.run([Job([arms[index] for index in group]) for group in groups]):
            ends |= zip(groups[number], ended, strict=True)
        words = told_apart([job_overrides[index] for index in arms])
        tell(list(zip(words, (ends[index] for index in arms), strict=True)))
        return [JobReturn(_return_value=ends[index], status=JobStatus.COMPLETED) for index in arms]

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, list[Ended]]]:
        """Run jobs; gives the number of each that ended, and how its arms did."""
        for number, job in enumerate(jobs):
            yield number, job()


class Submitted(InTurn):
    """Jobs in processes of their own, through submitit, whose logs lie in `hydra.sweep.dir`/jobs."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, list[Ended]]]:
        """Submit jobs as room gets free, and collect each as it ends, in whatever way."""
        try:
            import submitit
        except ImportError as error:
            raise ConfigError("hydra/launcher: this one needs submitit; pip install 'kvbench[slurm]'") from error
        folder = Path(self._config.hydra.sweep.dir, "jobs").absolute()
        executor = self.executor(submitit, folder)
        console = Console(stderr=True)
        console.print(f"{len(jobs)} jobs; logs in {folder}", soft_wrap=True, highlight=False)
        waiting, running = list(enumerate(jobs)), dict[int, Any]()
        try:
            while waiting or running:
                for number, one in [(number, one) for number, one in running.items() if one.done()]:
                    del running[number]
                    console.print(f"job {one.job_id} ended, {len(running) + len(waiting)} to go", highlight=False)
                    yield number, _collected(one, len(jobs[number].configs))
                now = [waiting.pop(0) for _ in range(min(len(waiting), self.room(executor, set(running))))]
                if now:
                    with executor.batch():
                        submitted = [executor.submit(job) for _, job in now]
                    running |= {number: one for (number, _), one in zip(now, submitted, strict=True)}
                time.sleep(POLL_SECONDS if running else 0)
        except KeyboardInterrupt:
            self.stop(list(running.values()), console)
            raise

    def executor(self, submitit: Any, folder: Path) -> Any:
        """What submits the jobs."""
        raise NotImplementedError

    def room(self, executor: Any, running: set[int]) -> int:
        """How many jobs may be submitted now; may prepare the executor for the next."""
        raise NotImplementedError

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """Ctrl-C came: see to the jobs that run."""
        raise NotImplementedError


class Local(Submitted):
    """As many jobs at once as fit, in processes of this machine.

    Args:
        jobs: at once; None: one for each GPU or, where there is none, for every two cores.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def executor(self, submitit: Any, folder: Path) -> Any:
        """A process for each job."""
        import torch

        self.gpus, self.submitted = torch.cuda.device_count(), 0
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"hydra.launcher.jobs={self.jobs}: expected a whole number, 1 or more, or null")
        cores = os.cpu_count() or 1
        self.jobs = self.jobs or self.gpus or max(1, cores // 2)
        # torch would start a thread for each core in every job, and they would wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.jobs)))
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=365 * 24 * 60)
        return executor

    def room(self, executor: Any, running: set[int]) -> int:
        """One at a time, each to the next GPU."""
        assert self.jobs is not None
        if len(running) >= self.jobs:
            return 0
        if self.gpus:
            executor.update_parameters(visible_gpus=[self.submitted % self.gpus], gpus_per_node=1)
        self.submitted += 1
        return 1

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """They are stopped as by Ctrl-C."""
        for one in running:
            one.cancel()
        for one in running:
            one.wait()


class Slurm(Submitted):
    """A SLURM job array.

    Args:
        requeues: times that a job whose time is over, or that was preempted, is queued again; it resumes.
        parameters: of `submitit.SlurmExecutor`: partition, time (minutes), gpus_per_node, array_parallelism, ...
    """

    here = False

    def __init__(self, requeues: int = 3, **parameters: Any) -> None:
        self.requeues, self.parameters = requeues, parameters

    def executor(self, submitit: Any, folder: Path) -> Any:
        """The array's executor."""
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher=slurm: there is no sbatch here; start it where jobs can be submitted")
        executor = submitit.SlurmExecutor(folder, max_num_timeout=self.requeues)
        plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(self.parameters), resolve=True))
        executor.update_parameters(**{key: value for key, value in plain.items() if value not in (None, {}, [])})
        return executor

    def room(self, executor: Any, running: set[int]) -> int:
        """All at once: SLURM keeps the queue."""
        return sys.maxsize

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """They are SLURM's and go on."""
        ids = sorted({one.job_id.partition("_")[0] for one in running})
        console.print(f"the jobs go on; scancel {' '.join(ids)} stops them", highlight=False)


def _collected(job: Any, arms: int) -> list[Ended]:
    """How the arms of a submitit job ended; of one that was killed, that."""
    try:
        return cast(list[Ended], job.result())
    except Exception as error:
        reason = first_line(error).rstrip(":")
        return [Ended({}, f"job {job.job_id} was lost ({reason}); its log: {job.paths.stderr}")] * arms


def distinct(jobs: Sequence[DictConfig]) -> dict[int, DictConfig]:
    """Jobs by their index, without those that repeat an earlier one: full attention under another budget, say, and a
    sweep's models are one model under `smoke`.
    """
    first: dict[str, int] = {}
    for index, job in enumerate(jobs):
        config = cast(dict[str, Any], OmegaConf.to_container(job, resolve=True))
        first.setdefault(json.dumps({**config, "budget": budget_of(config)}, sort_keys=True), index)
    return {index: jobs[index] for index in first.values()}


def grouped(jobs: Sequence[DictConfig]) -> list[list[int]]:
    """Indices of the jobs that one prefill can serve, in the order of their first; a task may want each arm its own."""
    groups: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        config = cast(dict[str, Any], OmegaConf.to_container(job, resolve=True))
        shared = config["sweep"]["shared_prefill"] and not config["task"].get("own_prefill")
        common = {key: value for key, value in config.items() if not shared or key not in APART}
        groups.setdefault(json.dumps([common, None if shared else index], sort_keys=True), []).append(index)
    return list(groups.values())


def told_apart(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each job the words that not all have; of one job alone all."""
    common = set.intersection(*map(set, job_overrides)) if len(job_overrides) > 1 else set()
    return [" ".join(word for word in words if word not in common) for words in job_overrides]


def register() -> None:
    """Make sweeper and launchers known to Hydra as `hydra_plugins.kvbench.*`: it takes no plugin of another package.

    The classes keep their own module, so that a job sent to another process finds them.
    """
    plugins, here = Plugins.instance(), sys.modules[__name__]
    for plugin in (Arms, InTurn, Local, Slurm):
        plugins.register(plugin)
        plugins.class_name_to_class[f"hydra_plugins.kvbench.{plugin.__name__}"] = plugin
    package = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    package.kvbench = sys.modules["hydra_plugins.kvbench"] = here  # type: ignore[attr-defined]
