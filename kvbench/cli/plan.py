"""How the arms of a sweep fall into jobs, and why.

No torch, and no launcher: those run what is planned here.

Arms that differ in method, budget, kv and probe alone share each prefill, or an engine of vLLM, so
they become one job; an arm for which vLLM frees memory starts one of its own. Where more jobs are
asked for, such a group is split: by its samples (`sweep.shards`), which computes nothing twice, or
by its arms (`hydra.launcher.jobs`), each of whose jobs prefills for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvbench.backends.run_config import RunConfig
from kvbench.config import ConfigError
from kvbench.runs.identity import MAY_DIFFER, starts_alone
from kvbench.tasks import Shard

OF_NO_RUN = {"threads", "sweep", "memory_check", "cuda_graphs"}  # keys that change no number
MOST_SHOWN = 20  # groups that get a line of their own


class Group(NamedTuple):
    """Arms that one prefill can serve.

    Attributes
    ----------
    arms
        their indices.
    name
        the words that only they have, "" where there is no other group.
    why
        what makes the group what it is.
    shards
        jobs that share out the samples.
    pieces
        jobs that share out the arms.
    """

    arms: list[int]
    name: str
    why: str
    shards: int
    pieces: int = 1

    @property
    def jobs(self) -> int:
        """How many jobs it makes."""
        return self.shards * self.pieces


class PlannedJob(NamedTuple):
    """A job to be: arms by their indices, which samples of them, and what to call it."""

    arms: list[int]
    shard: Shard
    title: str


def planned(arms: Sequence[RunConfig], words: Sequence[str], most: int) -> list[Group]:
    """The groups of a sweep, split into at least `most` jobs as far as there are arms to split.

    Parameters
    ----------
    arms
        distinct configs.
    words
        of each of them, those that not all have.
    most
        jobs that there is room for.
    """
    common = grouped(arms)
    groups = []
    for numbers in common:
        first = arms[numbers[0]]
        unique = [
            word
            for word in words[numbers[0]].split()
            if all(word in words[other].split() for other in numbers)
        ]
        name = " ".join(unique) if len(common) > 1 else ""
        groups.append(Group(numbers, name, _why(first, len(numbers)), first.sweep.shards))
    return _split(groups, most)


def counted(number: int, what: str) -> str:
    """The number with its noun."""
    return f"{number} {what}" + "s" * (number != 1)


def _why(config: RunConfig, arms: int) -> str:
    if arms > 1:
        shared = "each prefill" if config.backend.name == "hf" else "one engine"
        return f"{arms} arms share {shared}" + " and decode together" * config.decodes_jointly
    if starts_alone(config):
        return "1 arm, whose engine frees what its method drops"
    if config.task.own_prefill:
        return f"1 arm, as task={config.task.name} times a prefill of its own"
    if not config.sweep.shared_prefill:
        return "1 arm, as sweep.shared_prefill=false"
    samples = ", its samples decode together" * config.decodes_jointly
    return f"1 arm, which no other shares a prefill with{samples}"


def _split(groups: list[Group], most: int) -> list[Group]:
    """The groups with the most arms in a job are split until there are `most` jobs."""
    groups = list(groups)
    while groups and sum(group.jobs for group in groups) < most:
        widest = max(
            range(len(groups)), key=lambda number: len(groups[number].arms) / groups[number].pieces
        )
        group = groups[widest]
        if group.pieces == len(group.arms):
            break
        groups[widest] = group._replace(pieces=group.pieces + 1)
    return groups


def parts(groups: Sequence[Group]) -> list[PlannedJob]:
    """The jobs of all groups.

    A slow method's budgets stand side by side, so pieces take every n-th arm.
    """
    jobs = []
    for group in groups:
        for piece in range(group.pieces):
            arms = group.arms[piece :: group.pieces]
            for number in range(group.shards):
                shard = Shard(number, group.shards)
                words = [group.name] if group.name else []
                words += [f"piece {piece + 1} of {group.pieces}"] if group.pieces > 1 else []
                words += [f"shard {shard}"] if group.shards > 1 else []
                jobs.append(PlannedJob(arms, shard, ", ".join(words)))
    return jobs


def described(groups: Sequence[Group]) -> Iterator[str]:
    """A line for each group: what it is, and how it falls into jobs."""
    arms, jobs = sum(len(group.arms) for group in groups), sum(group.jobs for group in groups)
    yield f"{counted(arms, 'arm')} in {counted(jobs, 'job')}:"
    for group in groups[:MOST_SHOWN]:
        reasons = [group.why]
        if group.pieces > 1:
            reasons.append(
                f"in {group.pieces} pieces, each with prefills of its own (hydra.launcher.jobs)"
            )
        if group.shards > 1:
            reasons.append(f"samples in {group.shards} shards (sweep.shards)")
        name = f"{group.name}: " if group.name else ""
        yield f"  {name}{', '.join(reasons)}: {counted(group.jobs, 'job')}"
    if len(groups) > MOST_SHOWN:
        yield f"  and {len(groups) - MOST_SHOWN} groups more"


def distinct(jobs: Sequence[RunConfig]) -> dict[int, RunConfig]:
    """Jobs by their index, without those that repeat an earlier one: full attention under another
    budget, say, and a sweep's models are one model under `smoke`.
    """
    same = _group_by_key(
        jobs, lambda config, _: {**config.resolved, "budget": config.requested_budget}
    )
    return {first: jobs[first] for first, *_ in same}


def refuse_repeated_runs(jobs: Sequence[RunConfig], words: Sequence[str]) -> None:
    """Refuse distinct jobs that are one run all the same, of which the first would do what the
    others ask for.

    Parameters
    ----------
    words
        of each, those that not all have.

    Raises
    ------
    ConfigError
        names them.
    """

    def run_settings(config: RunConfig, _: int) -> dict[str, Any]:
        derived = {"budget": config.requested_budget, "decode": config.decodes_jointly}
        resolved = config.resolved
        return {key: resolved[key] for key in resolved.keys() - OF_NO_RUN} | derived

    for first, *others in _group_by_key(jobs, run_settings):
        if others:
            raise ConfigError(
                f"{words[first]} | {words[others[0]]}: both are one run, which keeps the times that"
                " it measured first; expected commands of their own, each with another results_dir"
            )


def grouped(jobs: Sequence[RunConfig]) -> list[list[int]]:
    """Indices of the jobs that one prefill can serve, in the order of their first; a task may want
    each arm its own.
    """

    def common(config: RunConfig, index: int) -> list[Any]:
        shared = config.sweep.shared_prefill and not config.task.own_prefill
        if config.backend.name != "hf":  # which share the engine, and prefill for themselves
            shared = not starts_alone(config)
        return [
            {
                key: value
                for key, value in config.resolved.items()
                if not shared or key not in MAY_DIFFER
            },
            None if shared else index,
        ]

    return _group_by_key(jobs, common)


def _group_by_key(
    jobs: Sequence[RunConfig], key: Callable[[RunConfig, int], Any]
) -> list[list[int]]:
    """Indices of the jobs whose key, of the config and its index, is the same; in the order of
    their first.
    """
    groups: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(json.dumps(key(job, index), sort_keys=True), []).append(index)
    return list(groups.values())


def differing(words: Sequence[Sequence[str]]) -> list[str]:
    """Of the words of each arm, those that not all have; of one arm alone all."""
    common = set.intersection(*map(set, words)) if len(words) > 1 else set()
    return [" ".join(word for word in arm_words if word not in common) for arm_words in words]
