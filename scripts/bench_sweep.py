"""What a sweep gains where its arms decode together: tokens a second, over those of arms alone.

Both ways are sweeps as the command line runs them (`sweep.shared_decode=true` and `false`), one
after the other on the same prompts, each with an empty results folder. The tokens are given
(`task=fidelity`), so that no arm ends early and both decode as many; full attention, with which
they are compared, decodes them once more in both.

    python scripts/bench_sweep.py --lengths 2048 4096      # SmolLM2, the demo's methods and all
    python scripts/bench_sweep.py --path FOLDER --lengths 4096 --samples 4 --methods all
    python scripts/bench_sweep.py --no-speed --logits --answers 500    # are they the same numbers?

Prints one JSON object as its last line; by model, length and set of methods
  together, alone            tokens decoded; decode_s, seconds inside decode steps; all_s, of the
                             whole sweep but for loading the model; decode_tokens_per_s,
                             tokens_per_s
  decode_ratio, ratio        of these two, together over alone
  rows                       of a pass, at most and on average
  arms, left_out             how many ran, and why others did not
by model, with --logits of the first length, in float32
  logits.largest             by arm the largest difference of a logit, together against alone
  logits.same_again          whether all logits are the same bits where the same arms decode
                             together twice
and with --answers N
  answers.equal, answers.of  how many of N answers are the same tokens both ways
  answers.gaps               of the others, how far the best two logits lie apart where they part:
                             0 is a tie
and cpu, threads, settings.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

from bench import command_line, print_result, say

from kvbench.cli.threads import wait_briefly

wait_briefly()  # as a run does, before torch is loaded

import argparse  # noqa: E402

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from kvbench.cli.compose import composed  # noqa: E402
from kvbench.cli.demo import METHODS  # noqa: E402
from kvbench.cli.fetch import DEFAULT  # noqa: E402
from kvbench.config import ConfigError, choices, nearest  # noqa: E402
from kvbench.engine.batch import Batch  # noqa: E402
from kvbench.engine.batch import Sequence as Decoded  # noqa: E402
from kvbench.engine.engine import Engine  # noqa: E402
from kvbench.measure.arm import Setup  # noqa: E402
from kvbench.runs import sweep  # noqa: E402
from kvbench.runs.identity import arm_name  # noqa: E402
from kvbench.runs.stored import read_samples  # noqa: E402
from kvbench.tasks.ruler.needles import SUBSETS  # noqa: E402

WARM_LENGTH = 512  # of the prompt by which both ways are warmed up
# answers
SHORT = [
    "task=niah",
    f"task.subsets=[{','.join(SUBSETS)}]",
    "task.lengths=[1024]",
    "task.max_new_tokens=16",
]

Answer = tuple[str, str]  # an arm and a sample
StepRecords = dict[Answer, list[Any]]  # what is kept of each step of it


class Ran(NamedTuple):
    """What a sweep did.

    Attributes
    ----------
    answers
        new tokens by arm and sample.
    decode_s, all_s
        seconds inside decode steps, and of all but loading the model.
    rows
        of each pass where arms decoded together; [] where they did not.
    left_out
        why arms did not run.
    """

    answers: dict[Answer, list[int]]
    decode_s: float
    all_s: float
    rows: list[int]
    skipped: dict[str, str]

    def report(self) -> dict[str, float]:
        """What the module's docstring names."""
        # the prefill gives the first
        tokens = sum(len(outputs) - 1 for outputs in self.answers.values())
        rates = {"decode_tokens_per_s": tokens / self.decode_s, "tokens_per_s": tokens / self.all_s}
        return {"tokens": tokens, "decode_s": self.decode_s, "all_s": self.all_s, **rates}


class Watch:
    """What decoding does, either way, while it is watched.

    Parameters
    ----------
    keep
        what to keep of the logits [1, vocabulary] of each step; None: nothing.

    Attributes
    ----------
    seconds
        inside decode steps, counting what was attended and comparing logits included.
    rows
        see `Ran`.
    kept
        by arm and sample.
    """

    def __init__(self, keep: Callable[[torch.Tensor], Any] | None) -> None:
        self.seconds = 0.0
        self._keep = keep
        self.rows: list[int] = []
        self.records: StepRecords = {}
        self._of = WeakKeyDictionary[Engine, Answer]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the places of the functions that decode."""
        engine = Setup.engine
        settle, decode = Decoded.settle, Batch._decode

        def watched_engine(
            setup: Setup,
            rows: Any,
            new_tokens: int,
            samples: Sequence[str] = ("",),
            *more: Any,
            **of: Any,
        ) -> Any:
            new_engine = engine(setup, rows, new_tokens, samples, *more, **of)
            self._of[new_engine] = arm_name(setup.config), samples[0]
            return new_engine

        def settled(decoded: Decoded, logits: torch.Tensor, seconds: float) -> None:
            if self._keep is not None and (answer := self._of.get(decoded.engine)):
                self.records.setdefault(answer, []).append(self._keep(logits))
            settle(decoded, logits, seconds)

        def timed(batch: Batch) -> Any:
            self.rows.append(batch.rows)
            began = time.perf_counter()
            try:
                return decode(batch)
            finally:
                self.seconds += time.perf_counter() - began

        with ExitStack() as placed:
            placed.enter_context(patch.object(Setup, "engine", watched_engine))
            placed.enter_context(patch.object(Decoded, "settle", settled))
            placed.enter_context(patch.object(Batch, "_decode", timed))
            yield


class Sweeps:
    """Sweeps over one model, which is loaded once.

    Parameters
    ----------
    words
        that all arms share, as on the command line.
    budget
        of all methods but full attention.
    """

    def __init__(self, words: Sequence[str], budget: int) -> None:
        self._words = words
        self._budget = budget
        self._loaded = None
        self._prepare = sweep.prepare

    def run(
        self,
        methods: Sequence[str],
        together: bool,
        words: Sequence[str],
        keep: Callable[[torch.Tensor], Any] | None = None,
    ) -> tuple[Ran, StepRecords]:
        """Run these methods on the task that `words` ask for; see `Watch` for what is kept."""
        watch = Watch(keep)
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(sweep, "prepare", self._prepared),
        ):
            ways = [f"sweep.shared_decode={str(together).lower()}", f"results_dir={folder}"]
            configs, skipped = self._configs(methods, [*words, *ways])
            with watch.watching():
                began = time.perf_counter()
                outcomes = sweep.run_arms(configs, Console(quiet=True))
                all_s = time.perf_counter() - began
            answers: dict[Answer, list[int]] = {}
            for outcome in outcomes:
                arm = arm_name(outcome.config)
                if outcome.error is not None:
                    skipped[arm] = str(outcome.error)
                    continue
                samples = outcome.folder.path / "samples.jsonl"
                for id, record in read_samples(samples)[0].items():
                    if record["error"]:
                        skipped[arm] = f"{id}: {record['error']}"
                    else:
                        answers[arm, id] = record["output_ids"]
        return Ran(answers, watch.seconds, all_s, watch.rows, skipped), watch.records

    def _configs(
        self, methods: Sequence[str], words: Sequence[str]
    ) -> tuple[list[Any], dict[str, str]]:
        """The arms' configs, and why some cannot be had."""
        configs, skipped = [], {}
        for method in methods:
            size = "null" if method == "full" else self._budget
            try:
                configs.append(composed(f"method={method}", f"budget={size}", *self._words, *words))
            except ConfigError as error:
                skipped[method] = str(error)
        return configs, skipped

    def _prepared(self, config: Any, loaded: Any = None) -> Any:
        arm = self._prepare(config, loaded or self._loaded)
        self._loaded = arm.loaded
        return arm

    def speed(self, methods: Sequence[str], task: Sequence[str]) -> dict[str, Any]:
        """Both ways one after the other; what the module's docstring names."""
        sides = {}
        for way in ("together", "alone"):
            sides[way], _ = self.run(methods, way == "together", task)
            say(f"{way}: {sides[way].report()}")
        shared, alone = (side.report() for side in sides.values())
        rows = sides["together"].rows
        return {
            "together": shared,
            "alone": alone,
            "decode_ratio": shared["decode_tokens_per_s"] / alone["decode_tokens_per_s"],
            "ratio": shared["tokens_per_s"] / alone["tokens_per_s"],
            "rows": {"most": max(rows, default=0), "mean": sum(rows) / max(1, len(rows))},
            "arms": len({arm for arm, _ in sides["together"].answers}),
            "left_out": {**sides["alone"].skipped, **sides["together"].skipped},
        }

    def logits(self, methods: Sequence[str], task: Sequence[str]) -> dict[str, Any]:
        """How far the logits of each step lie apart, together against alone.

        And whether they come out the same again.
        """
        ran, first = self.run(methods, True, task, torch.clone)
        again = self.run(methods, True, task, torch.clone)[1]
        alone = self.run(methods, False, task, torch.clone)[1]
        largest: dict[str, float] = {}
        for (arm, id), steps in alone.items():
            pairs = zip(first[arm, id], steps, strict=True)
            largest[arm] = max(
                largest.get(arm, 0.0), *(float((row - other).abs().max()) for row, other in pairs)
            )
        same = all(
            torch.equal(*pair)
            for answer, steps in first.items()
            for pair in zip(steps, again[answer], strict=True)
        )
        return {
            "largest": largest,
            "same_again": same and first.keys() == again.keys(),
            "left_out": ran.skipped,
        }

    def answers(self, methods: Sequence[str], count: int) -> dict[str, Any]:
        """How many short answers are the same both ways, and how near the others were to a tie."""
        per_method = math.ceil(count / len(methods))
        task = [
            *SHORT,
            f"task.samples={math.ceil(per_method / len(SUBSETS))}",
            f"task.limit={per_method}",
        ]
        (shared, _), (other, gaps) = (self.run(methods, way, task, _gap) for way in (True, False))
        differing = {}
        for answer in shared.answers.keys() & other.answers.keys():
            pair = shared.answers[answer], other.answers[answer]
            if pair[0] != pair[1]:  # the first token is the prefill's, which is one
                place = next(
                    at
                    for at, tokens in enumerate(zip(*pair, strict=False))
                    if tokens[0] != tokens[1]
                )
                differing[answer] = gaps[answer][place - 1]
        of = len(shared.answers.keys() & other.answers.keys())
        named_gaps = {f"{arm} {id}": gap for (arm, id), gap in sorted(differing.items())}
        skipped = {**shared.skipped, **other.skipped}
        return {"equal": of - len(differing), "of": of, "gaps": named_gaps, "left_out": skipped}

    def compared(
        self, method_sets: dict[str, list[str]], options: argparse.Namespace
    ) -> dict[str, Any]:
        """Both ways on one model: times, and with --logits and --answers what they compute."""
        every = max(method_sets.values(), key=len)
        for together in (True, False):
            self.run(every, together, fixed_task(WARM_LENGTH, 1, 2))
        result: dict[str, Any] = {}
        tasks = {
            length: fixed_task(length, options.samples, options.new_tokens - 1)
            for length in options.lengths
        }
        for length in options.lengths if options.speed else []:
            for name, methods in method_sets.items():
                say(f"{length} tokens, {name}: {len(methods)} methods")
                result.setdefault(str(length), {})[name] = self.speed(methods, tasks[length])
        if options.logits:
            result["logits"] = self.logits(every, tasks[options.lengths[0]])
        if options.answers:
            result["answers"] = self.answers(every, options.answers)
        return result


def fixed_task(length: int, samples: int, tokens: int) -> list[str]:
    """The task whose tokens are given: so many after the first, of each of these texts."""
    return [
        "task=fidelity",
        f"task.lengths=[{length}]",
        f"task.samples={samples}",
        f"task.steps={tokens}",
    ]


def _gap(logits: torch.Tensor) -> float:
    best = logits.topk(2).values[0]
    return float(best[0] - best[1])


def main() -> None:
    """Measure and print."""
    parser = command_line(
        __doc__,
        lengths=([2048], "prompt tokens"),
        methods=(["demo", "all"], "demo, all, or a set of names (one set)"),
        samples=(1, "texts of each length"),
        new_tokens=(16, "of each arm and text, one of them the prefill's"),
        budget=256,
        logits=(False, "compare them, of the first length"),
        answers=(0, "compare so many short answers"),
    )
    parser.add_argument(
        "--model", nargs="*", default=[], choices=choices("model"), help=f"(default: {DEFAULT})"
    )
    parser.add_argument("--path", nargs="*", default=[], help="folders of further models")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="settings for every arm, as for a run"
    )
    options = parser.parse_intermixed_args()
    try:
        method_sets = sets_of(options.methods)
    except ConfigError as error:
        parser.error(str(error))
    names = options.model or ([] if options.path else [DEFAULT])
    models = {name: f"model={name}" for name in names}
    models |= {Path(path).name: f"model.path={path}" for path in options.path}
    result: dict[str, Any] = {}
    for name, word in models.items():
        say(name)
        sweeps = Sweeps([word, "dtype=float32", *options.words], options.budget)
        result[name] = sweeps.compared(method_sets, options)
        del sweeps  # a model's memory before the next one's
    result |= {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    print_result({**result, "settings": vars(options)})


def sets_of(names: Sequence[str]) -> dict[str, list[str]]:
    """The sets of methods that --methods asks for, by name.

    Raises
    ------
    ConfigError
        there is no such method.
    """
    sets = {"demo": list(METHODS), "all": ["full", *sorted(choices("method").keys() - {"full"})]}
    valid_names = {*sets, *choices("method")}
    for name in names:
        if name not in valid_names:
            raise ConfigError(f"--methods {name}: no such method; {nearest(name, valid_names)}")
    methods = [name for name in names if name not in sets]
    return {name: sets[name] for name in names if name in sets} | (
        {"named": methods} if methods else {}
    )


if __name__ == "__main__":
    main()
