"""What runs the jobs of a sweep: this process in turn, processes of this machine side by side, or a
SLURM job array.

`hydra/launcher` chooses one, and each is built from its file in `conf/hydra/launcher`;
`kvbench.cli.sweep` makes the jobs. A job that fails, or is killed, stops no other. Imports no
Hydra: a job's process gets its configs composed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from kvbench.backends.run_config import RunConfig
from kvbench.cli.checks import check_run
from kvbench.cli.plan import counted
from kvbench.cli.stopping import Terminated, stopped_by
from kvbench.config import ConfigError, first_line, show
from kvbench.runs.folder import ResultsError, writing
from kvbench.runs.table import Ended
from kvbench.runs.terminal import Console, fit_streams
from kvbench.tasks import WHOLE, Shard

POLL_SECONDS = 1.0


def ended_by(error: BaseException) -> Ended:
    """The end of an arm that an error ended; what is no bad input shows its traceback."""
    if isinstance(error, (ConfigError, ResultsError)):
        return Ended({}, first_line(error))
    traceback.print_exception(error)
    return Ended({}, f"{type(error).__name__}: {first_line(error)}")


class SweepJob:
    """The arms of a job, composed; called, it runs them and says how each ended.

    One that nothing is shared with runs as it would by itself.

    Attributes
    ----------
    configs
        of the arms.
    shard
        which of their samples it runs.
    title
        its name among the sweep's jobs.
    checked
        false: the machine that it runs on has yet to check the configs.
    """

    def __init__(
        self,
        configs: Sequence[RunConfig],
        shard: Shard = WHOLE,
        title: str = "",
        checked: bool = False,
    ) -> None:
        self.configs = configs
        self.shard = shard
        self.title = title
        self.checked = checked

    def __call__(self) -> list[Ended]:
        fit_streams()  # of the process that it runs in
        if self.title:
            print(self.title, flush=True)
        try:
            for config in [] if self.checked else self.configs:
                check_run(config)
            if len(self.configs) == 1 and not self.configs[0].decodes_jointly:
                from kvbench.runs.sweep import run

                return [Ended(run(self.configs[0], self.shard) or {})]
            from kvbench.runs.sweep import run_arms

            return [
                Ended(outcome.summary or {}) if outcome.error is None else ended_by(outcome.error)
                for outcome in run_arms(self.configs, shard=self.shard)
            ]
        except Exception as error:
            return [ended_by(error)] * len(self.configs)


class JobProcess:
    """A job in a process of its own.

    Parameters
    ----------
    job
        what runs.
    linger
        seconds to wait, when SIGTERM has stopped the job, for whoever sent it. SLURM ends a
        cancelled job and queues a preempted one again, but counts one that leaves by itself as
        done.
    """

    def __init__(self, job: SweepJob, linger: float = 0.0) -> None:
        self.job, self.linger = job, linger

    def __call__(self) -> list[Ended]:
        try:
            # A shell's background jobs ignore Ctrl-C, and so would what they start.
            with stopped_by(signal.SIGTERM, signal.SIGINT):
                return self.job()
        except Terminated:
            time.sleep(self.linger)
            raise

    def checkpoint(self) -> Any:
        """What submitit queues again when the job's time is over or the job is preempted: the same;
        it resumes.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class InTurn:
    """One job after the other, in this process.

    Attributes
    ----------
    here
        jobs run on this machine, whose device and network they need.
    """

    here = True

    def most(self) -> int:
        """Jobs that groups of arms are split into, where there are fewer."""
        return 1

    def run(self, jobs: Sequence[SweepJob], folder: Path) -> Iterator[tuple[int, list[Ended]]]:
        """Run jobs, whose logs may lie in the folder; gives the number of each that ended, and how
        its arms did.
        """
        for number, job in enumerate(jobs):
            yield number, job()


class SubmititLauncher(InTurn):
    """Jobs in processes of their own, through submitit, whose logs lie in `hydra.sweep.dir`/jobs.

    Attributes
    ----------
    linger
        see `JobProcess`.
    """

    linger = 0.0

    def run(self, jobs: Sequence[SweepJob], folder: Path) -> Iterator[tuple[int, list[Ended]]]:
        """Submit jobs as room gets free, and collect each as it ends, in whatever way."""
        try:
            import submitit
        except ImportError as error:
            raise ConfigError(
                "hydra/launcher: this one needs submitit; pip install 'kvbench[slurm]'"
            ) from error
        logs = (folder / "jobs").absolute()
        executor = self.executor(submitit, logs)
        console = Console(stderr=True)
        console.print(
            f"{counted(len(jobs), 'job')}; logs in {logs}", soft_wrap=True, highlight=False
        )
        waiting, running = list(enumerate(jobs)), dict[int, Any]()
        try:
            while waiting or running:
                for number, handle in [
                    (number, handle) for number, handle in running.items() if handle.done()
                ]:
                    del running[number]
                    name = (
                        f"{handle.job_id} ({jobs[number].title})"
                        if jobs[number].title
                        else handle.job_id
                    )
                    console.print(
                        f"job {name} ended, {len(running) + len(waiting)} to go", highlight=False
                    )
                    yield number, _collected(handle, len(jobs[number].configs))
                now = [
                    waiting.pop(0)
                    for _ in range(min(len(waiting), self.room(executor, set(running))))
                ]
                if now:
                    # A shell's background jobs ignore Ctrl-C; what they start would, too, and could
                    # not be stopped.
                    with stopped_by(signal.SIGINT), writing(logs), executor.batch():
                        submitted = [
                            executor.submit(JobProcess(job, self.linger)) for _, job in now
                        ]
                    running |= {
                        number: handle for (number, _), handle in zip(now, submitted, strict=True)
                    }
                time.sleep(POLL_SECONDS if running else 0)
        except submitit.core.utils.FailedJobError as error:
            # sbatch refuses what hydra.launcher asks for
            raise ConfigError(
                f"hydra.launcher: {first_line(error)}{self.remedy(str(error))}"
            ) from error
        except BaseException:  # Ctrl-C, or nobody reads on, or there is no room for the jobs' files
            self.stop(list(running.values()), console)
            raise

    def executor(self, submitit: Any, folder: Path) -> Any:
        """What submits the jobs."""
        raise NotImplementedError

    def remedy(self, refused: str) -> str:
        """What to do where a job is refused with these words, as the end of a message; "" where
        that is not known.
        """
        return ""

    def room(self, executor: Any, running: set[int]) -> int:
        """How many jobs may be submitted now; may prepare the executor for the next."""
        raise NotImplementedError

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """The sweep ends early: see to the jobs that run."""
        raise NotImplementedError


class Local(SubmititLauncher):
    """As many jobs at once as fit, in processes of this machine.

    Parameters
    ----------
    jobs
        at once, and groups of arms are split to make so many; None: one for each GPU or, where
        there is none, for every two cores.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def most(self) -> int:
        """As many as run at once."""
        import torch

        self.gpus, self.placed = _gpus(torch.cuda.device_count()), dict[int, int]()
        self.jobs = _jobs(self.jobs) or len(self.gpus) or max(1, (os.cpu_count() or 1) // 2)
        return self.jobs

    def executor(self, submitit: Any, folder: Path) -> Any:
        """A process for each job."""
        assert self.jobs is not None
        cores = os.cpu_count() or 1
        # torch would start a thread for each core in every job, and they would wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.jobs)))
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=365 * 24 * 60)
        return executor

    def room(self, executor: Any, running: set[int]) -> int:
        """One at a time, in the order of their numbers, each to a GPU that the fewest
        jobs run on.
        """
        assert self.jobs is not None
        if len(running) >= self.jobs:
            return 0
        if self.gpus:
            busy = [self.placed[number] for number in running]
            self.placed[len(self.placed)] = gpu = min(self.gpus, key=busy.count)
            executor.update_parameters(visible_gpus=[gpu], gpus_per_node=1)
        return 1

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """They are stopped as by Ctrl-C."""
        for job in running:
            job.cancel()
        for job in running:
            job.wait()


class Slurm(SubmititLauncher):
    """A SLURM job array.

    Parameters
    ----------
    requeues
        times that a job whose time is over, or that was preempted, is queued again; it resumes.
    jobs
        groups of arms are split to make so many; None: a group is a job.
    parameters
        of `submitit.SlurmExecutor`: job_name, partition, time (minutes), array_parallelism, ...
    """

    here = False
    linger = 600.0

    def __init__(self, requeues: int = 3, jobs: int | None = None, **parameters: Any) -> None:
        self.requeues = requeues
        self.jobs = jobs
        self.parameters = parameters

    def most(self) -> int:
        """As many as were asked for."""
        return _jobs(self.jobs) or 1

    def executor(self, submitit: Any, folder: Path) -> Any:
        """The array's executor."""
        if missing := [program for program in ("sbatch", "srun") if shutil.which(program) is None]:
            raise ConfigError(
                f"hydra/launcher=slurm: there is no {missing[0]} here; start it where jobs can be"
                " submitted"
            )
        executor = submitit.SlurmExecutor(folder, max_num_timeout=self.requeues)
        options = {
            key: value for key, value in self.parameters.items() if value not in (None, {}, [])
        }
        if options.get("gpus_per_node") == 0:  # not to be named where there are no GPUs
            del options["gpus_per_node"]
        try:
            executor.update_parameters(**options)
        except ValueError as error:
            raise ConfigError(f"hydra.launcher: {first_line(error)}") from error
        return executor

    def remedy(self, refused: str) -> str:
        """A cluster without GPUs has none to give."""
        gpus = self.parameters.get("gpus_per_node")
        if gpus and re.search(r"generic resource|\bgres\b|gpus?-per-node", refused, re.IGNORECASE):
            return (
                f"; hydra.launcher.gpus_per_node={gpus} asks for GPUs: where there are none,"
                " expected 0"
            )
        return ""

    def room(self, executor: Any, running: set[int]) -> int:
        """All at once: SLURM keeps the queue."""
        return sys.maxsize

    def stop(self, running: Sequence[Any], console: Console) -> None:
        """They are SLURM's and go on."""
        ids = sorted({job.job_id.partition("_")[0] for job in running})
        console.print(f"the jobs go on; scancel {' '.join(ids)} stops them", highlight=False)


def _gpus(count: int) -> list[int]:
    """The numbers of the GPUs that this process sees, as those see them that it starts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count or not visible:
        return list(range(count))
    names = visible.split(",")[:count]
    if not all(name.strip().isdecimal() for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible}: hydra/launcher=local takes numbers, as in 0,1"
        )
    return list(map(int, names))


def _jobs(jobs: int | None) -> int | None:
    """`hydra.launcher.jobs`, checked."""
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ConfigError(
            f"hydra.launcher.jobs={show(jobs)}: expected a whole number, 1 or more, or null"
        )
    return jobs


def _collected(job: Any, arms: int) -> list[Ended]:
    """How the arms of a submitit job ended; of one that was killed, that."""
    try:
        return cast(list[Ended], job.result())
    except Exception as error:
        reason = first_line(error).rstrip(":")
        return [
            Ended({}, f"job {job.job_id} was lost ({reason}); its log: {job.paths.stderr}")
        ] * arms
