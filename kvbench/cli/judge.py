"""`kvbench judge RUN`: questions for a judge about a run's outputs, and what its replies come to.

Some questions of a benchmark need another model as a judge: whether a diary's week has the birthday
that it should (LongGenBench). No judge runs here. `--questions FILE` writes one JSON object a line
with `sample`, `name` and `prompt`; the user's judge adds `reply` to each; `--replies FILE` counts
those with a "yes", as LongGenBench's eval.py does, and keeps the result as judged.json in the run's
folder. Exit codes: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.config import ConfigError, first_line
from kvbench.runs.folder import check_format, write_whole, writing
from kvbench.runs.stored import ResultsError, printable, read_samples, runs_in, stored_task, using
from kvbench.tasks import Sample
from kvbench.tasks.known import add_config_dir, stored_task_of
from kvbench.tasks.sources import read_jsonl

FIELDS = {"sample": str, "name": str, "prompt": str, "reply": str}


@dataclass(frozen=True)
class JudgeQuestion:
    """A question about an output.

    Attributes
    ----------
    sample
        the sample's id.
    name
        the question's, its kind before a slash.
    prompt
        what the judge reads; "": the output has nothing to ask about.
    """

    sample: str
    name: str
    prompt: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        folder, *others = runs_in([Path(flags.run)])
        if others:
            raise ConfigError(f"{flags.run}: holds {1 + len(others)} runs; name one")
        checks = list(questions(folder, flags.config_dir))
        if flags.questions:
            _write(flags.questions, checks)
            return 0
        scores = judged(checks, _replies(flags.replies))
        with writing(folder):
            write_whole(folder / "judged.json", json.dumps(scores, indent=2) + "\n")
    except (ConfigError, ResultsError, OSError) as error:
        print(f"kvbench judge: {printable(first_line(error))}", file=sys.stderr)
        return 2
    print(json.dumps(scores, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvbench judge", description="Questions for a judge of your own, and its replies."
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    add_config_dir(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="write the questions there, one JSON object a line",
    )
    what.add_argument(
        "--replies", type=Path, metavar="FILE", help="read them from there, each with its reply"
    )
    return parser


def questions(folder: Path, config_dir: Path | None = None) -> Iterator[JudgeQuestion]:
    """All questions about a run's outputs; a failed sample's parts are not there.

    Raises
    ------
    ConfigError
        the run's task has none, or is not known.
    ResultsError
        what is stored is damaged or of another format.
    """
    with using(folder):
        check_format(folder)
        task = stored_task_of(folder, *stored_task(folder), config_dir)
        records, _ = read_samples(folder / "samples.jsonl")
        all_questions = [
            JudgeQuestion(id, name, prompt)
            for id, record in records.items()
            if record.get("meta")
            for name, prompt in task.questions(
                Sample(id, "", (), 0, meta=record["meta"]), record["output"]
            ).items()
        ]
    if not all_questions:
        raise ConfigError(
            f"{folder}: {task.name} has no questions for a judge, or the run no samples"
        )
    yield from all_questions


def judged(
    checks: Sequence[JudgeQuestion], replies: Mapping[tuple[str, str], tuple[str, str]]
) -> dict[str, float | int]:
    """What the replies come to, shares 0..1.

    Of each kind, and as `stic_1` of all, the share of "yes" among the questions that could be
    asked; `mean` is the plain mean of the kinds, `stic_2` the share among all, where a missing part
    counts as no. `judged` and `checks` are their numbers.

    Raises
    ------
    ConfigError
        a question without its reply, or a reply to another output's.
    """
    kinds: dict[str, list[bool]] = {}
    for question in checks:
        answers = kinds.setdefault(question.name.partition("/")[0], [])
        if not question.prompt:
            continue
        prompt, reply = replies.get((question.sample, question.name), (None, ""))
        if prompt != question.prompt:
            reason = "no reply to" if prompt is None else "a reply about another output to"
            raise ConfigError(
                f"--replies: {reason} {question.sample}, {question.name}; ask with --questions"
                " again"
            )
        answers.append("yes" in reply.lower())
    shares = {
        kind: sum(answers) / len(answers) if answers else 0.0 for kind, answers in kinds.items()
    }
    yes, count = sum(map(sum, kinds.values())), sum(map(len, kinds.values()))
    return {
        **shares,
        "mean": sum(shares.values()) / len(shares),
        "stic_1": yes / count if count else 0.0,
        "stic_2": yes / len(checks),
        "judged": count,
        "checks": len(checks),
    }


def _write(path: Path, checks: Sequence[JudgeQuestion]) -> None:
    lines = [
        json.dumps(vars(question), ensure_ascii=False) for question in checks if question.prompt
    ]
    write_whole(path, "".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} questions about {len(checks)} checks in {path}")


def _replies(path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Prompts and replies by sample and name."""
    with path.open("rb") as lines:
        rows = list(read_jsonl(str(path), lines, FIELDS))
    if bad := next((row.error for row in rows if row.error), ""):
        raise ConfigError(bad)
    return {
        (row.data["sample"], row.data["name"]): (row.data["prompt"], row.data["reply"])
        for row in rows
    }
