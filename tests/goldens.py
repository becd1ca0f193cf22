"""What versions stand for: the numbers of each method, task and codec on small inputs, as `goldens/` holds them.

`python tests/goldens.py` writes the files anew for whatever has a version that they do not hold yet. Whoever changes
the inputs here deletes the files of that kind first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from driver import METHODS, SMALL, Case, drive, run_loop, stream
from test_questions import with_folder

from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.sampling import Sampler
from kvbench.config import ASSETS, choices, shipped
from kvbench.engine.request import QuestionTokens
from kvbench.memory.kinds import EVERY, NATIVE, VERSIONS, kv_of
from kvbench.runs.versions import HARNESS
from kvbench.tasks import Sample, Task

FOLDER = Path(__file__).with_name("goldens")
PROMPT, STEPS = 280, 26  # tokens of a text; more steps than any method of `METHODS` waits for before it evicts

# Logits of another CPU differ in the last bits, and so may one of the tokens that follow from them (CAKE's order of the
# cache does); a changed formula moves these more.
SMOOTH = {"kl", "error", "likelihood", "output"}
NEAR = 0.02


# -- methods ----------------------------------------------------------------------------------------------------------


@functools.cache
def small_model() -> Loaded:
    """The model that kvbench ships."""
    config = shipped("model", "tiny")
    assert config is not None
    return load({**config, "path": str(ASSETS / "tiny")}, device="cpu", dtype="float32")


@functools.cache
def text() -> tuple[list[int], list[int]]:
    """A prompt, and the tokens that follow it."""
    prose = (ASSETS / "prose" / "1946-truman.txt").read_text()
    ids = small_model().tokenizer(prose[: 8 * (PROMPT + STEPS)])["input_ids"]
    return ids[:PROMPT], ids[PROMPT : PROMPT + STEPS]


def log_probabilities(case: Case) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The model's after each given token, [vocabulary] each, with this method, and the audit."""
    prompt, given = text()
    steps: list[torch.Tensor] = []
    options: dict[str, Any] = {
        "forced_tokens": [given],
        "watch": lambda logits: steps.append(logits[0].float().log_softmax(dim=-1)),
    }
    _, engine = run_loop(small_model(), [prompt], case.build(), SMALL, steps=STEPS - 1, **options)
    return steps, engine.report()


@functools.cache
def reference() -> list[torch.Tensor]:
    """What full attention says."""
    return log_probabilities(Case("full", "full"))[0]


AUDITED = ("attended_mean", "attended_max", "device_kv_bytes", "index_bytes", "host_bytes", "moved_bytes_per_step")


def numbers_of_method(case: Case) -> dict[str, Any]:
    """KL from full attention and what the audit counts on a text; what is attended where many keys are equal."""
    steps, audit = log_probabilities(case)
    kl = [float((full.exp() * (full - own)).sum()) for full, own in zip(reference(), steps, strict=True)]
    return {
        "kl": f"{max(0.0, sum(kl) / len(kl)):.5g}",
        **{name: f"{audit[name]:.8g}" for name in AUDITED},
        **among_equals(case),
    }


def among_equals(case: Case) -> dict[str, Any]:
    """What is attended in a stream of few distinct small numbers.

    Sums of such products are exact on every CPU, so that equal keys have equal scores.

    Returns:
        "ids" of each head of the last layer at the last step; a digest of "all_ids", of all steps and layers; the size
        of the "output".
    """
    fixed = stream(200, steps=STEPS)
    copies = fixed.keys.round().clamp(-1, 1)[..., torch.arange(fixed.keys.shape[3]) % 23, :]
    queries = fixed.queries.round().clamp(-3, 3)
    coarse = replace(fixed, queries=queries, keys=copies, values=fixed.values.round())
    driven = drive(coarse, case.build(), SMALL, accounting="unified")
    every = [[ranges(head) for head in at.sets(0)] for at in driven.seen]
    return {
        "ids": every[-1],
        "all_ids": hashlib.sha256(repr(every).encode()).hexdigest()[:12],
        "output": f"{float(driven.outputs.norm()):.6g}",
    }


def ranges(ids: set[int]) -> str:
    """Such as "0-3 7 9-12"."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in parts)


# -- codecs -----------------------------------------------------------------------------------------------------------


def numbers_of_codec(kind: str) -> dict[str, str]:
    """How far attention over coded keys and values is from attention over those that came, and the bytes held."""
    fixed = stream(150, steps=4, head_dim=64)
    native, coded = (
        drive(fixed, Case("full", "full").build(), None, kv=kv, executor="torch")
        for kv in (NATIVE, kv_of(kind)._replace(native_layers=0))
    )
    error = (coded.outputs - native.outputs).norm() / native.outputs.norm()
    return {"error": f"{float(error):.5g}", "device_kv_bytes": f"{coded.audit['device_kv_bytes']:.8g}"}


# -- tasks ------------------------------------------------------------------------------------------------------------


def numbers_of_task(name: str) -> dict[str, Any]:
    """By group: a digest of the first prompts and their answers, and how this task scores replies to them."""
    groups: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory() as folder:
        task = with_folder(name, Path(folder))
        for sample in task.samples(small_model().tokenizer, 0):
            groups.setdefault(sample.group, []).append(sample)
    numbers = {}
    for group, samples in groups.items():
        first = samples[:3]
        asked = [
            (one.prompt, one.question, one.answers, one.answer_prefix, one.max_new_tokens, one.stop) for one in first
        ]
        numbers[group] = {
            "prompts": hashlib.sha256(repr(asked).encode()).hexdigest()[:12],
            "scores": [" ".join(scores_of_replies(task, one)) for one in first],
        }
    return numbers


def replies_to(sample: Sample) -> list[str]:
    """Replies that say an answer in several ways, some of it, or something else."""
    answer = " ".join(sample.answers[:3])
    return [
        answer,
        f"The correct answer is ({answer}).",
        f"So it is \\boxed{{{answer}}}.",
        f"#### {answer}\n\nAnd then 5 more, **B**.",
        f"Half is $\\frac{{1}}{{2}}$. The final answer is {answer}.",
        answer.upper(),
        answer[: len(answer) // 2],
        f"{answer[::-1]} 12",
        "",
        '#*# Floor 1: a hall\n- no\n- *yes*, never?\n\n* * *\n\n{"a": [1]} P.S. AND so',
        '"One" and "two"\n-\tÉTÉ - a [1]\n```JSON\n{"b": 2}\n```\n\n**P.S.** and then three',
    ]


def scores_of_replies(task: Task, sample: Sample) -> Iterator[str]:
    """Main scores; "-" for a reply that is none of this task's."""
    for reply in replies_to(sample):
        try:
            yield f"{task.score(sample, reply)[task.metric]:.4g}"
        except (KeyError, ValueError, IndexError):
            yield "-"


# -- the harness ------------------------------------------------------------------------------------------------------


def numbers_of_harness() -> dict[str, Any]:
    """What the small model answers with full attention, greedily and drawn, and where the question comes after."""
    prompt, given = text()
    likely = [float(step[token]) for step, token in zip(reference(), given[1:], strict=False)]
    full, snapkv = Case("full", "full"), Case("snapkv", "snapkv")

    def answer(case: Case, **options: Any) -> str:
        generation, _ = run_loop(small_model(), [prompt], case.build(), SMALL, steps=7, **options)
        return " ".join(map(str, generation.tokens[0]))

    drawn = Sampler(0.8, ["golden"])
    return {
        "likelihood": f"{sum(likely):.5g}",
        "greedy": answer(full),
        "drawn": answer(full, draw=drawn),
        "after": answer(snapkv, question=QuestionTokens([given[:9]], at_once=True)),
    }


# -- what is held, and what is there now ------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What has versions: `numbers` of a name are of its `version`, which stands at `where`."""

    names: list[str]
    version: Callable[[str], int]
    numbers: Callable[[str], Any]
    where: str


def _version_in(group: str, name: str) -> int:
    return int((shipped(group, name) or {})["version"])


CASES = {case.id: case for case in METHODS if case.file is None}
KINDS = {
    "methods": Kind(
        [*CASES],
        lambda id: _version_in("method", CASES[id].name),
        lambda id: numbers_of_method(CASES[id]),
        "version of conf/method/{}.yaml",
    ),
    "tasks": Kind(
        [*choices("task")],
        lambda name: _version_in("task", name),
        numbers_of_task,
        "version of conf/task/{}.yaml",
    ),
    "codecs": Kind(
        [kind for kind in EVERY if kind != "native"],
        VERSIONS.__getitem__,
        numbers_of_codec,
        "VERSIONS[{!r}] of kvbench/memory/kinds.py",
    ),
    "harness": Kind(
        ["harness"], lambda name: HARNESS, lambda name: numbers_of_harness(), "HARNESS of kvbench/runs/versions.py"
    ),
}


def held(kind: str) -> dict[str, Any]:
    """The goldens of a kind by name, each with its `version`, that of the `harness`, and its `numbers`."""
    file = FOLDER / f"{kind}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def golden(kind: str, name: str) -> dict[str, Any]:
    """As one is held, of the code that is there now."""
    of = KINDS[kind]
    return {"version": of.version(name), "harness": HARNESS, "numbers": of.numbers(name)}


def fault(kind: str, name: str, now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """What is wrong with a golden of now beside the one that is held; "" for nothing."""
    where = KINDS[kind].where.format(CASES[name].name if kind == "methods" else name)
    if before is None:
        return f"{kind} {name}: no golden is held; python tests/goldens.py writes it"
    changed = not alike(now["numbers"], before["numbers"])
    raised = now["version"] != before["version"]
    if changed and not raised and now["harness"] == before["harness"]:
        return f"{kind} {name}: its numbers changed: raise {where}, or HARNESS where the harness changed"
    if raised and not changed:
        return f"{kind} {name}: its numbers are those of version {before['version']}: leave {where} as it was"
    if {**now, "numbers": 0} != {**before, "numbers": 0}:
        return f"{kind} {name}: its version was raised; python tests/goldens.py writes its golden"
    return ""


def alike(one: Any, other: Any) -> bool:
    """Whether numbers are the same but for the last bits of a KL and its kind."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            abs(float(one[key]) - float(other[key])) <= NEAR * abs(float(other[key]))
            if key in SMOOTH
            else alike(one[key], other[key])
            for key in one
        )
    return bool(one == other)


def write() -> int:
    """Write what has a version that is not held; refuse what has another fault."""
    refused = 0
    for kind, of in KINDS.items():
        before = held(kind)
        after = {name: golden(kind, name) for name in of.names}
        for name, now in after.items():
            problem = fault(kind, name, now, before.get(name))
            if problem and "goldens.py" not in problem:
                refused += 1
                after[name] = before[name]
                print(problem, file=sys.stderr)
            elif not problem:
                after[name] = before[name]
        FOLDER.mkdir(exist_ok=True)
        lines = [f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in after.items()]
        (FOLDER / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if refused else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write())
