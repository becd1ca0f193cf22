"""Arms that differ in method and budget alone, side by side: a sample is prefilled once, and each arm begins from that.

Every arm has its own run folder and gets the bits that a run of its own would give; only what the one prefill hides,
the time to the first token, is missing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from kvbench.checks import arm_name
from kvbench.config import ConfigError, bind_methods
from kvbench.measure import Arm, failure, is_failed_sample, measure, prefill_shared, prompt_of
from kvbench.progress import progress
from kvbench.results import RunFolder, summarise
from kvbench.run import open_folder, prepare, work_of

# What arms that share a prefill may have each its own of.
OWN = ("method", "budget", "probe")


def run_shared(configs: Sequence[DictConfig], console: Console | None = None) -> list[dict[str, Any]]:
    """Run composed configs together to their end, or from where they were interrupted; returns each one's summary.

    Args:
        configs: alike but for method, budget and probe.
        console: where progress is drawn.

    Raises:
        ConfigError: they differ in more, or what only the loaded model or the task's data can tell is wrong.
        ResultsError: a run folder cannot be used.
    """
    bind_methods()
    plain = [cast(dict[str, Any], OmegaConf.to_container(config, resolve=True)) for config in configs]
    refuse_different(plain)
    if plain[0]["threads"]:
        torch.set_num_threads(plain[0]["threads"])
    arms = [prepare(plain[0])]
    arms += [prepare(config, arms[0].loaded) for config in plain[1:]]
    with ExitStack() as held:
        folders = [held.enter_context(open_folder(arm, shared_prefill=True)) for arm in arms]
        _run(arms, folders, console or Console())
        summaries = [
            summarise(folder.records.values(), arm.task.metric) for arm, folder in zip(arms, folders, strict=True)
        ]
        for folder, summary in zip(folders, summaries, strict=True):
            folder.finish(summary)
    return summaries


def refuse_different(configs: Sequence[dict[str, Any]]) -> None:
    """Refuse configs that no common prefill can serve.

    Raises:
        ConfigError: names a key in which two differ.
    """
    first, *others = ({key: value for key, value in config.items() if key not in OWN} for config in configs)
    for other in others:
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise ConfigError(f"{key}: arms that share a prefill differ in {', '.join(OWN)} alone")


def _run(arms: Sequence[Arm], folders: Sequence[RunFolder], console: Console) -> None:
    done = set.intersection(*(set(folder.done) for folder in folders))
    work = work_of(arms[0], arms[0].config["task"].get("limit"), done)
    with progress(console, work.total, len(done)) as report:
        for sample in work.samples:
            prompt = prompt_of(arms[0], sample)
            waiting = [(arm, folder) for arm, folder in zip(arms, folders, strict=True) if sample.id not in folder.done]
            prefilled, failed = None, prompt.record["error"]
            if not failed:
                try:
                    prefilled = prefill_shared([arm for arm, _ in waiting], prompt)
                except Exception as error:
                    if not is_failed_sample(error):
                        raise
                    failed = f"{type(error).__name__}: {error}"
            for arm, folder in waiting:
                report.name(arm_name(arm.config))
                record = failure(arm, prompt, failed) if failed else measure(arm, prompt, report.tokens, prefilled)
                folder.add(record)
                report.failed(record)
            report.advance(work.share(sample))
