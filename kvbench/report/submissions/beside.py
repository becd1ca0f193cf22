"""What a run of others must share with a board: protocol, prompts, a free name, its own times.

The board's full attention is the yardstick: a run belongs beside it if it has the same model, task,
prompts and protocol. Nothing of a submission stands in for a run of the board's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.config import choices, method_config, show
from kvbench.report.data.run import OF_SPARSE, Run, Runs, is_shared, missing
from kvbench.report.submissions.whole import times_of
from kvbench.runs.archive import rounded
from kvbench.runs.plausible import NEAR
from kvbench.runs.quantities import is_number
from kvbench.runs.stored import read_run_yaml
from kvbench.runs.versions import HARNESS, versions_in

ORDER = ("task", "model", "model.revision", "dtype")  # of settings that are named first
# What a run may have otherwise and still be the same arm: how it was computed, and what one run of
# several is.
NOT_OF_ARM = {"seed", "decode", "shared_prefill", "attention", "fused", "probe.every"}
NAME = r"[a-z][a-z0-9_]{0,39}"
SLACK = 0.05  # of bytes: a later turn and an answer's length move their mean by up to 2 %
FEWEST_BITS = 2 / 32  # of coded keys and values over plain ones
LOOKS = str.maketrans("0135i", "olesl", "_")
PAIRS = {"rn": "m", "vv": "w"}  # letters that together look like another

# What each check is about, for readers.
BOARD_CHECKS = {
    "protocol": (
        "the board has full attention of this model, revision, dtype, task and seed; sparse arms"
        " count alike"
    ),
    "samples": (
        "the board's prompts, all and no others, by group, length and facts; scores and KL of the"
        " task's kind"
    ),
    "memory": (
        "no less than the dense layers and what is attended take; as many dense layers as the"
        " board's arms leave"
    ),
    "name": "a shipped method's name is of that method, and no other name looks like one",
    "times": "no sample has the times of another arm's, of the board or of the submission",
}


def protocol_of(run: Run) -> dict[str, Any]:
    """The settings that runs beside each other share."""
    return {
        key: value for key, value in run.settings.items() if is_shared(key) and not missing(value)
    }


def arm_of(run: Run) -> str:
    """A word for an arm: two runs with one are repeats of each other."""
    settings = {
        key: value
        for key, value in run.settings.items()
        if key not in NOT_OF_ARM and not missing(value)
    }
    if run.is_full:
        settings = {
            "full": True,
            **{key: value for key, value in protocol_of(run).items() if key not in NOT_OF_ARM},
        }
    return json.dumps(settings, sort_keys=True, default=str)


class Board:
    """The runs that a submission is held against.

    Parameters
    ----------
    runs
        of the board, which are trusted.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.arms = {arm_of(run): run for run in runs if not run.arm["probe_every"]}
        self._full = [
            run for run in runs if run.is_full and not run.is_timed and not run.arm["probe_every"]
        ]

    @functools.cached_property
    def _timed(self) -> dict[tuple[float, ...], Run]:
        """The run of which a sample took these times."""
        return {
            times: run
            for run in self.runs
            for record in run.samples()
            if (times := times_of(record))
        }

    def yardstick(self, run: Run) -> tuple[Run | None, list[str]]:
        """The nearest run of full attention, and the settings in which it differs."""
        ours = protocol_of(run)
        candidates = []
        for full in self._full:
            theirs = protocol_of(full)
            keys = [key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)]
            candidates.append((run.scored_as != full.scored_as, len(keys), full, keys))
        if not candidates:
            return None, []
        *_, nearest, differing = min(candidates, key=lambda candidate: candidate[:2])
        ranked = {key: place for place, key in enumerate(ORDER)}
        return nearest, sorted(differing, key=lambda key: (ranked.get(key, 9), key))

    def faults(self, run: Run, submission_runs: Iterable[Run]) -> list[str]:
        """What keeps a run off the board, a clause each.

        Parameters
        ----------
        run
            whole by itself.
        submission_runs
            the runs of its submission.
        """
        return [*self._protocol(run, submission_runs), *_name(run), *self._times(run)]

    def _protocol(self, run: Run, submission_runs: Iterable[Run]) -> Iterator[str]:
        full, differing = self.yardstick(run)
        if full is None:
            yield "the board has no full attention to stand beside"
            return
        if differing == ["device"]:
            if not any(
                other.is_full and protocol_of(other) == protocol_of(run)
                for other in submission_runs
            ):
                yield (
                    f"device={run.label('device')}: the board has {full.label('device')}; add your"
                    " method=full"
                )
        elif differing:
            more = (
                f"; {len(differing) - 1} more settings differ: {', '.join(differing[1:4])}"
                if len(differing) > 1
                else ""
            )
            key = differing[0]
            yield f"{key}={_shown(run, key)}: the board has {_shown(full, key)}{more}"
            return
        if run.arm["metric"] != full.arm["metric"]:
            yield f"scored by {run.arm['metric']}; the board's metric is {full.arm['metric']}"
        yield from _samples(run, full, run.scored_as in self.runs.graded)
        if not run.is_full:
            alike = (other for other in self.runs if protocol_of(other) == protocol_of(full))
            yield from _of_sparse(run, full, [other for other in alike if not other.is_full])

    def _times(self, run: Run) -> Iterator[str]:
        matches = [
            self._timed[times]
            for record in run.samples()
            if (times := times_of(record)) in self._timed
        ]
        if other := next((twin for twin in matches if arm_of(twin) != arm_of(run)), None):
            run_of = f"{other.label('method')}'s run {other.folder_names[0]}"
            yield f"{len(matches)} samples have the times of {run_of}, to the last digit"

    def is_copy(self, run: Run) -> bool:
        """Whether it has the times of a run that is there."""
        return any(times_of(record) in self._timed for record in run.samples())

    def add(self, runs: Iterable[Run]) -> None:
        """Take runs in: who repeats or copies one later is found."""
        for run in runs:
            self.arms[arm_of(run)] = run
            self._timed.update(
                {times: run for record in run.samples() if (times := times_of(record))}
            )


def _shown(run: Run, key: str) -> str:
    return show(run.settings.get(key))[:60] if not missing(run.settings.get(key)) else "none"


def _samples(run: Run, full: Run, graded: bool) -> Iterator[str]:
    prompts, theirs = _prompts(run), _prompts(full)
    if lacks := sorted(theirs.keys() - prompts.keys()):
        yield f"lacks {len(lacks)} of the board's {len(theirs)} samples, such as {lacks[0]}"
    if more := sorted(prompts.keys() - theirs.keys()):
        yield (
            f"has {len(more)} samples that the board has not, such as {more[0]};"
            f" task.limit={len(theirs)}"
        )
    if other := sorted(id for id in prompts.keys() & theirs.keys() if prompts[id] != theirs[id]):
        yield f"{len(other)} prompts are not the board's, such as that of {other[0]}"
    if not graded and set(run.scores.values) - {0.0, 100.0}:
        yield f"scores between 0 and 1, where {run.label('task')} gives 0 or 1"


def _prompts(run: Run) -> dict[str, Any]:
    """What is known of the prompt of each answer.

    Its name and group, its length, how much of it was cut, and the facts that its task notes; and
    of how many steps a KL was taken there.
    """
    facts = ("sample", "group", "prompt_tokens", "cut_tokens", "meta")
    return {
        record["id"]: rounded([*(record.get(name) or None for name in facts), steps])
        for record in run.samples()
        for near in [record.get("fidelity")]
        for steps in [len((near.get("steps") or {}).get("kl") or ()) if near else None]
    }


def _of_sparse(run: Run, full: Run, sparse: list[Run]) -> Iterator[str]:
    """Whether entries are counted as of the board's sparse arms, and as many layers are dense."""
    for key in OF_SPARSE if sparse else ():
        values = sorted({_shown(other, key) for other in sparse})
        if _shown(run, key) not in values:
            yield f"{key}={_shown(run, key)}: the board has {' or '.join(values)}"
            return
    share = run.arm["dense_share"]
    shares = {
        other.arm["dense_share"]
        for other in sparse
        if _shown(other, "dense_layers") == _shown(run, "dense_layers")
    }
    if shares and not any(missing(other) or abs(other - share) < NEAR for other in shares):
        yield f"its audit has {share:.3g} of the layers dense, and the board's {max(shares):.3g}"
    if missing(full.arm["windowed_share"]):
        yield from _too_little(run, full)


def _too_little(run: Run, full: Run) -> Iterator[str]:
    """What a sample holds or attends less than the model's shape demands.

    Dense layers attend the whole prompt, the others what the audit says. What an entry takes is
    full attention's bytes over its entries, of the same sample and all layers.
    """
    least = 1.0 if run.settings["kv"] == full.settings["kv"] else FEWEST_BITS
    theirs = {record["id"]: record.get("audit") or {} for record in full.samples()}
    of_full = {"device_kv_bytes": "attended_max", "attended_bytes_per_step": "attended_mean"}
    for record in run.samples():
        audit, whole = record.get("audit") or {}, theirs.get(record["id"], {})
        dense, attended = audit.get("dense_share", 0.0), audit.get("attended_mean", 0.0)
        entries = dense * record["prompt_tokens"] + (1 - dense) * attended
        for name, counted in of_full.items():
            if not (whole.get(name) and whole.get(counted) and is_number(audit.get(name))):
                continue
            floor = least * whole[name] / whole[counted] * entries
            if audit[name] < floor * (1 - SLACK):
                reason = (
                    f"its dense layers, and {attended:g} attended entries in the others, take"
                    f" {floor:.0f} or more"
                )
                yield f"sample {record['id']}: {name}={audit[name]:.0f}; {reason}"
                return


# -- names and code --------------------------------------------------------------------------------


def target_of(run: Run) -> str:
    """The class of a run's method, a word that nothing looks up."""
    written = read_run_yaml(Path(run.arm["path"]))
    named = (
        part["method"].get("_target_")
        for part in (written["identity"]["config"], written["config"])
    )
    return str(next(filter(None, named), ""))


def _name(run: Run) -> Iterator[str]:
    name, target = run.arm["method"], target_of(run)
    methods = choices("method")
    if name in methods:
        if target != (right := method_config(name).target):
            yield (
                f"is called {name}, kvbench's {right}, and is {target or 'nothing'}; name it"
                " otherwise"
            )
    elif not re.fullmatch(NAME, name):
        yield f"method {name[:60]}: expected a name of small letters, digits and _, of at most 40"
    elif twin := next((method for method in methods if _looks(method) == _looks(name)), ""):
        yield f"method {name} looks like kvbench's {twin}; name it otherwise"


def _looks(name: str) -> str:
    """One word for names that look alike."""
    for pair, letter in PAIRS.items():
        name = name.replace(pair, letter)
    return name.translate(LOOKS)


def code_of(run: Run) -> str:
    """Whose code a run says that it ran: this kvbench's, another version's, or a user's method."""
    versions = versions_in(read_run_yaml(Path(run.arm["path"]))["identity"])
    harness = (
        "this kvbench's harness"
        if versions["harness"] == HARNESS
        else "a harness of another version"
    )
    if run.arm["method"] not in choices("method"):
        return f"a method of its own, {show(versions['method'])[:12]}; {harness}"
    same = versions["method"] == method_config(run.arm["method"]).version
    return f"{'the method of this kvbench' if same else 'a method of another version'}; {harness}"


def main_numbers(run: Run, other: Run) -> str:
    """The main number of a run and of the one that it repeats."""
    numbers: list[Mapping[str, Any]] = [run.arm, other.arm]
    if not any(missing(arm["kl_mean"]) for arm in numbers):
        return " beside ".join(f"KL {arm['kl_mean']:.4f}" for arm in numbers)
    return " beside ".join(f"score {arm['score']:.1f}" for arm in numbers)
