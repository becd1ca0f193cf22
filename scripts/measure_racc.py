"""What retrieval gives a compressed cache in a long generation, on the small model.

A prompt hides many needles in prose. After it come questions, one after another, each needle asked
for again and again: the tokens of a question are given, those of its answer are generated, and all
are decode steps that pass through the method. Every arm answers a question before the next one is
asked, so that a noisy machine disturbs all alike. A compressor alone keeps a share of the tokens;
RACC keeps the same share and brings back what its searches find.

  full        everything
  snapkv      the prompt compressed once (liso); snapkv_racc: with retrieval, joined one step
              after each request; snapkv_racc_free: with the latest finished answer
  lilo        prompt and generated tokens compressed, nothing retrieved; lilo_racc,
              lilo_racc_free: with retrieval
  lag_0, ...  lilo_racc whose search uses the query of the same step, of the one before (as
              lilo_racc), or of 200 before

Prints one JSON object as its last line; scores are shares of right answers in percent:
  questions, tokens     asked in all; decode steps of each generation
  arms                  for each arm: score and its standard error, scores of the prompts,
                        attended (mean entries per KV head), ms (median of a step), and of RACC
                        ratio_end, ratio_mean, ratio_peak, searches_late, searches_failed,
                        staleness_mean
  gain                  points of snapkv_racc over snapkv and of lilo_racc over lilo, and of the
                        free ones; gain_stderr: of the paired differences
  time_ratio            ms of snapkv_racc_free over snapkv, and of lilo_racc_free over lilo
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bench import command_line, print_result, say

from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.engine.engine import Engine
from kvbench.engine.passes import DecodePasses
from kvbench.tasks.ruler import prose
from kvbench.tasks.ruler.needles import Needles, draw

LILO = {"scenario": "lilo", "vote_kernel": 5}
LAGS: dict[str, tuple[str, dict[str, Any]]] = {
    f"lag_{lag}": ("racc_paper", LILO | {"lag": lag}) for lag in (0, 1, 200)
}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "snapkv": ("snapkv", {}),
    "snapkv_racc": ("snapkv_racc", {}),
    "snapkv_racc_free": ("snapkv_racc", {"mode": "free"}),
    "lilo": ("racc_paper", LILO | {"beta": 0.0}),
    "lilo_racc": ("racc_paper", LILO),
    "lilo_racc_free": ("racc_paper", LILO | {"mode": "free"}),
    **LAGS,
}
PAIRS = {
    "snapkv_racc": "snapkv",
    "snapkv_racc_free": "snapkv",
    "lilo_racc": "lilo",
    "lilo_racc_free": "lilo",
}
OF_RACC = (
    "ratio_end",
    "ratio_mean",
    "ratio_peak",
    "searches_late",
    "searches_failed",
    "staleness_mean",
)


@dataclass
class NeedleText:
    """A prompt and the questions after it, as token ids; answers as text."""

    prompt: list[int]
    questions: list[list[int]]
    answers: list[str]


@dataclass
class RaccArm:
    """A method in the middle of its generation."""

    engine: Engine
    passes: DecodePasses
    right: list[bool] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def ask(self, question: Sequence[int], count: int) -> list[int]:
        """Read a question through the method, and go on greedily for `count` tokens."""
        token = torch.tensor([question[0]])
        output: list[int] = []
        for place in range(1, len(question) + count + 1):
            start = time.perf_counter()
            following = self.passes.next_tokens(token)
            self.step_ms.append(1e3 * (time.perf_counter() - start))
            self.engine.settle()
            if place >= len(question):
                output.append(int(following))
            token = torch.tensor([question[place]]) if place < len(question) else following
        return output[:count]


def text_of(
    tokenizer: Any, length: int, needles: int, tokens: int, rng: random.Random
) -> NeedleText:
    """Needles in `length` tokens of prose, and questions for `tokens` decode steps with answers."""
    writer = Needles("essay", "words", "numbers", 1, 1, 1, prose.words)
    keys, values = (draw(kind, needles, rng) for kind in ("words", "numbers"))
    texts = [writer.needle(key, value) for key, value in zip(keys, values, strict=True)]
    hidden = [tokenizer.encode(" " + needle, add_special_tokens=False) for needle in texts]
    frame, _ = writer.asking([keys[0]])
    head = tokenizer.encode(frame.partition("{context}")[0])
    room = length - len(head) - sum(map(len, hidden))
    filler: list[list[int]] = []
    for sentence in prose.sentences(rng.random().hex()):
        filler.append(tokenizer.encode(" " + sentence, add_special_tokens=False))
        if sum(map(len, filler)) >= room:
            break
    for needle in hidden:
        filler.insert(rng.randint(0, len(filler)), needle)
    questions, answers = [], []
    steps = 0
    while steps < tokens:
        place = rng.randrange(needles)
        question_ids = tokenizer.encode(
            "\n" + writer.asking([keys[place]])[1], add_special_tokens=False
        )
        questions.append(question_ids)
        answers.append(values[place])
        steps += len(question_ids) + len(
            tokenizer.encode(f" {values[place]}.", add_special_tokens=False)
        )
    return NeedleText(
        head + [token for sentence in filler for token in sentence], questions, answers
    )


def begun(loaded: Loaded, name: str, text: NeedleText, ratio: float, steps: int) -> RaccArm:
    """An arm that has read the prompt."""
    method, options = ARMS[name]
    budget = Budget(None if method == "full" else ratio)
    engine = engine_for(
        loaded.model,
        [len(text.prompt)],
        method_named(method, **options),
        budget,
        (),
        new_tokens=steps,
    )
    runner = ModelRunner(loaded.model)
    runner.prefill(engine, [text.prompt])
    return RaccArm(engine, runner.passes(engine))


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All samples through all arms."""
    loaded = load(composed("model=tiny").model, device="cpu")
    tokenizer: Any = loaded.tokenizer
    ran: dict[str, list[RaccArm]] = {name: [] for name in arguments.arms}
    steps = 0
    sizes = arguments.length, arguments.needles, arguments.tokens
    for sample in range(arguments.samples):
        text = text_of(tokenizer, *sizes, random.Random(sample))
        replies = [f" {answer}." for answer in text.answers]
        counts = [len(tokenizer.encode(reply, add_special_tokens=False)) for reply in replies]
        steps = sum(map(len, text.questions)) + sum(counts)
        for name in arguments.arms:
            ran[name].append(begun(loaded, name, text, arguments.ratio, steps))
        turns = zip(text.questions, text.answers, counts, strict=True)
        for number, (question, answer, count) in enumerate(turns):
            for arms in ran.values():
                reply = tokenizer.decode(arms[-1].ask(question, count))
                arms[-1].right.append(reply.strip().startswith(answer))
            say(f"sample {sample}, question {number + 1} of {len(text.questions)}")
    summaries = {name: summary(arms) for name, arms in ran.items()}
    return {
        "questions": sum(len(arm.right) for arm in next(iter(ran.values()))),
        "tokens": steps,
        "arms": summaries,
        **gains(ran, summaries),
    }


def gains(ran: dict[str, list[RaccArm]], summaries: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What retrieval is worth: points over the compressor alone, and what its steps cost."""
    result: dict[str, dict[str, float]] = {}
    for name, alone in PAIRS.items():
        if {name, alone} <= ran.keys():
            pairs = zip(ran[name], ran[alone], strict=True)
            both = [
                pair for arm, other in pairs for pair in zip(arm.right, other.right, strict=True)
            ]
            gain, error = mean([int(first) - int(second) for first, second in both])
            result.setdefault("gain", {})[name] = gain
            result.setdefault("gain_stderr", {})[name] = error
            if name.endswith("free"):
                ratio = summaries[name]["ms"] / summaries[alone]["ms"]
                result.setdefault("time_ratio", {})[name] = ratio
    return result


def summary(arms: Sequence[RaccArm]) -> dict[str, Any]:
    """One arm's numbers over its samples."""
    score, error = mean([entry for arm in arms for entry in arm.right])
    reports = [arm.engine.report() for arm in arms]
    audits = {"attended": "attended_mean"} | {key: key for key in OF_RACC if key in reports[0]}
    ms = statistics.median(time for arm in arms for time in arm.step_ms)
    numbers = {
        "score": score,
        "stderr": error,
        "scores": [mean(arm.right)[0] for arm in arms],
        "ms": ms,
    }
    return numbers | {
        label: statistics.fmean(entry[key] for entry in reports) for label, key in audits.items()
    }


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, in percent."""
    return 100 * statistics.fmean(values), 100 * statistics.pstdev(values) / math.sqrt(len(values))


def main() -> None:
    """Measure, and print."""
    parser = command_line(
        __doc__,
        arms=([name for name in ARMS if name not in LAGS], "", ARMS),
        samples=(2, "prompts"),
        length=(2048, "tokens of a prompt"),
        needles=(30, "in each prompt"),
        tokens=(2000, "decode steps after each prompt, at least"),
        ratio=(0.15, "share of the tokens that stays on the device"),
    )
    arguments = parser.parse_args()
    print_result(measure(arguments))


if __name__ == "__main__":
    main()
