"""A sweep: its arms are composed and checked, put into jobs by `kvbench.cli.plan`, and run by a
launcher.

At the end a table says how every arm ended. Run folders hold what was done, so the same command
goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from kvbench.cli.checks import check
from kvbench.cli.compose import RunRequest, combinations
from kvbench.cli.launchers import InTurn, SweepJob
from kvbench.cli.plan import (
    counted,
    described,
    differing,
    distinct,
    parts,
    planned,
    refuse_repeated_runs,
)
from kvbench.config import ConfigError, TargetConfig, choices
from kvbench.runs.table import Ended, print_ends


def run_sweep(request: RunRequest) -> None:
    """Compose and check all arms, run them, then print how each ended.

    Raises
    ------
    ConfigError
        an arm cannot run; none has been started.
    ResultsError
        the jobs' own files cannot be written.
    SweepError
        some did not finish.
    """
    launcher, folder = _launcher(request.config), request.config.hydra.sweep.dir
    if not folder:
        raise ConfigError("hydra.sweep.dir=: expected a folder for the jobs' own files")
    arm_words = combinations(request.arms or [])
    configs = [check(request.arm_config(words), launcher.here) for words in arm_words]
    arms = distinct(configs)
    names, chosen = differing([arm_words[index] for index in arms]), list(arms.values())
    refuse_repeated_runs(chosen, names)
    print(f"a sweep of {counted(len(arms), 'arm')}", flush=True)
    groups = planned(chosen, names, launcher.most())
    jobs = parts(groups)
    if len(chosen) > 1 or len(jobs) > 1:
        print("\n".join(described(groups)), flush=True)
    ends: list[list[Ended]] = [[] for _ in chosen]
    sweep_jobs = [
        SweepJob([chosen[arm] for arm in job.arms], job.shard, job.title, checked=launcher.here)
        for job in jobs
    ]
    for number, ended in launcher.run(sweep_jobs, Path(folder)):
        for index, end in zip(jobs[number].arms, ended, strict=True):
            ends[index].append(end)
    print_ends(list(zip(names, map(_arm_end, ends), strict=True)))


def _launcher(config: DictConfig) -> InTurn:
    """What `hydra/launcher` names.

    Raises
    ------
    ConfigError
        no launcher of kvbench's, or a key has a wrong value.
    """
    launcher = TargetConfig.of(config.hydra.launcher).build()
    if not isinstance(launcher, InTurn):
        chosen = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(
            f"hydra/launcher={chosen}: Hydra's own; expected"
            f" {' | '.join(choices('hydra/launcher'))}"
        )
    return launcher


def _arm_end(ends: Sequence[Ended]) -> Ended:
    """How an arm ended, from what each of its shards says: the last one to end has the summary."""
    if len(ends) == 1:
        return ends[0]
    errors = [end for end in ends if end.error]
    if errors:
        return errors[0]
    return next((end for end in ends if end.summary), Ended({}, "its shards are not gathered"))
