"""The launcher of sweeps: arms that differ in method, budget and probe alone become one job, with one prefill a sample.

It wraps the launcher that runs the jobs, which gets a job for each group of arms. With `sweep.shared_prefill=false`
every arm is a job of its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.table import Table

from kvbench.config import ConfigError, first_line
from kvbench.results import ResultsError

# What arms that share a prefill may have each its own of.
OWN = ("method", "budget", "probe")


class SweepError(RuntimeError):
    """Arms of a sweep did not finish; all others did. A line for each, and one for all."""


class Ended(NamedTuple):
    """How an arm of a sweep ended.

    Attributes:
        summary: of a finished arm.
        error: what ended it before its last sample, "" for nothing.
    """

    summary: dict[str, Any]
    error: str = ""


def ended_by(error: BaseException) -> Ended:
    """The end of an arm that an error ended; what is no bad input shows its traceback."""
    if isinstance(error, (ConfigError, ResultsError)):
        return Ended({}, first_line(error))
    traceback.print_exception(error)
    return Ended({}, f"{type(error).__name__}: {first_line(error)}")


class SharedPrefill(Launcher):
    """Groups the jobs of a sweep by what they have in common, and launches the groups.

    Args:
        inner: config of the launcher that runs them.
    """

    def __init__(self, inner: DictConfig) -> None:
        self._inner = inner

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """What Hydra hands over: where configs are composed, what runs one, and the sweep's own config."""
        self._context, self._run, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs, then say what became of each.

        Raises:
            SweepError: some did not finish.
        """
        loader = self._context.config_loader
        jobs = [_own(loader.load_sweep_config(self._config, list(words))) for words in job_overrides]
        groups = grouped(jobs)
        config = self._config.copy()
        with open_dict(config):
            config.hydra.launcher = self._inner
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self._context,
            task_function=Group([[jobs[place] for place in group] for group in groups], initial_job_idx, self._run),
            config=config,
        )
        returns = launcher.launch([job_overrides[group[0]] for group in groups], initial_job_idx)
        ends: dict[int, Ended] = {}
        for group, job in zip(groups, returns, strict=True):
            done = job.status == JobStatus.COMPLETED
            ends |= zip(group, job.return_value if done else [ended_by(job._return_value)] * len(group), strict=True)
        tell([(words, ends[place]) for place, words in enumerate(told_apart(job_overrides))])
        return returns


class Group:
    """What a job of the inner launcher does: run the arms of its group; one alone has a prefill of its own.

    Args:
        groups: the arms' configs of every job.
        first: number of the first job.
        run: what runs a single config.
    """

    def __init__(self, groups: Sequence[Sequence[DictConfig]], first: int, run: TaskFunction) -> None:
        self._groups, self._first, self._run = groups, first, run

    def __call__(self, config: DictConfig) -> list[Ended]:
        """How each arm of the job ended."""
        configs = self._groups[HydraConfig.get().job.num - self._first]
        try:
            if len(configs) == 1:
                return [Ended(self._run(config) or {})]
            from kvbench.shared import run_arms

            outcomes = run_arms(configs)
        except Exception as error:
            return [ended_by(error)] * len(configs)
        return [
            Ended(outcome.summary or {}) if outcome.error is None else ended_by(outcome.error) for outcome in outcomes
        ]


def grouped(jobs: Sequence[DictConfig]) -> list[list[int]]:
    """Places of the jobs that one prefill can serve, in the order of their first."""
    groups: dict[str, list[int]] = {}
    for place, job in enumerate(jobs):
        config = cast(dict[str, Any], OmegaConf.to_container(job, resolve=True))
        shared = config["sweep"]["shared_prefill"]
        common = {key: value for key, value in config.items() if not shared or key not in OWN}
        groups.setdefault(json.dumps([common, None if shared else place], sort_keys=True), []).append(place)
    return list(groups.values())


def told_apart(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each job the words that not all have; of one job alone all."""
    common = set.intersection(*map(set, job_overrides)) if len(job_overrides) > 1 else set()
    return [" ".join(word for word in words if word not in common) for words in job_overrides]


def tell(ends: Sequence[tuple[str, Ended]], console: Console | None = None) -> None:
    """A table of how all arms ended, each by the words that make it.

    Raises:
        SweepError: some did not finish.
    """
    table = Table()
    table.add_column("arm", overflow="fold", min_width=min(40, max(len(words) for words, _ in ends)))
    for name in ("score", "samples", "failed", "attended / C", "KV on device, MiB", "ms / token"):
        table.add_column(name, justify="right")
    for words, (summary, error) in ends:
        if error:
            table.add_row(words, "did not finish")
            continue
        audit, score, stderr = summary.get("audit") or {}, summary.get("score"), summary.get("stderr")
        attended, budget, held = audit.get("attended_mean"), audit.get("budget"), audit.get("device_kv_bytes")
        step = (summary.get("latency") or {}).get("tpot_ms_mean")
        table.add_row(
            words,
            "" if score is None else f"{score:.1f}" + ("" if stderr is None else f" ± {stderr:.1f}"),
            str(summary.get("n", "")),
            str(summary.get("failed", "")),
            f"{attended / budget:.2f}" if attended and budget else "",
            "" if held is None else f"{held / 2**20:.2f}",
            "" if step is None else f"{step:.2f}",
        )
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
    console.print(table)
    unfinished = [f"{words}: {error}" for words, (_, error) in ends if error]
    if unfinished:
        last = f"{len(unfinished)} of {len(ends)} arms did not finish; the same command goes on with them"
        raise SweepError("\n".join([*unfinished, last]))


def _own(config: DictConfig) -> DictConfig:
    """A config without Hydra's part."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def register() -> None:
    """Make the launcher known to Hydra as `hydra_plugins.kvbench.SharedPrefill`: it takes no plugin of another package.

    The class keeps its own module, so that a job sent to another process finds it.
    """
    plugins, here = Plugins.instance(), sys.modules[__name__]
    plugins.register(SharedPrefill)
    plugins.class_name_to_class["hydra_plugins.kvbench.SharedPrefill"] = SharedPrefill
    package = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    package.kvbench = sys.modules["hydra_plugins.kvbench"] = here  # type: ignore[attr-defined]
