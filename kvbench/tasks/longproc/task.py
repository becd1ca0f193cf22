"""LongProc (Ye et al. 2025): outputs of 500 to 8,000 tokens that follow a procedure.

Data and prompts are read from the folder `data` of the repository princeton-pli/LongProc; all is
asked in a chat and scored by rules. Not here: its travel planning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from kvbench.tasks import Sample, Task
from kvbench.tasks.longproc import countdown, cpp, scores
from kvbench.tasks.rows import check_subsets, in_turn
from kvbench.tasks.sources import DataRow, LocalFile, rows_of

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

NEW_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}
LEVELS = {
    "html_to_tsv": ("0.5k", "2k", "8k"),
    "pseudo_to_code": ("0.5k", "2k"),
    "path_traversal": ("0.5k", "2k", "8k"),
    "tom_tracking": ("0.5k", "2k", "8k"),
    "countdown": ("0.5k", "2k", "8k"),
}
SUBSETS = tuple(f"{kind}_{level}" for kind, levels in LEVELS.items() for level in levels)
PUBLISHED = {  # rows of the files that lie in the repository
    "html_to_tsv_0.5k": 100,
    "html_to_tsv_2k": 189,
    "html_to_tsv_8k": 120,
    "pseudo_to_code_0.5k": 199,
    **dict.fromkeys(
        ("pseudo_to_code_2k", "path_traversal_0.5k", "tom_tracking_0.5k", "tom_tracking_2k"), 200
    ),
    **dict.fromkeys(("countdown_0.5k", "countdown_2k", "countdown_8k"), 200),
}
RUN = "pseudo_to_code"  # scored by running what was written
READ = tuple(name for name in SUBSETS if not name.startswith(RUN))

FIELDS: dict[str, dict[str, type]] = {
    "html_to_tsv": dict.fromkeys(
        (
            "html_path",
            "task_topic",
            "task_description",
            "filtering_instruction",
            "tsv_header",
            "gt",
        ),
        str,
    ),
    "pseudo_to_code": {"pseudocode_lines": list, "code_lines": list, "testcases": list},
    "path_traversal": {"context_nl": str, "question_repr": list, "answer_nl": str},
    "tom_tracking": {"story_components": str, "story": str, "question": str, "solution": str},
    "countdown": {"nums": list, "target": int},
}
# The place in a prompt after which the question stands; pseudo_to_code has none.
CONTEXT = {
    "html_to_tsv": "{html_str}",
    "path_traversal": "{city_context}",
    "tom_tracking": "{story}",
    "countdown": "{demonstration}",
}
SCORES: dict[str, Callable[[str, str], dict[str, float]]] = {
    "html_to_tsv": scores.html_to_tsv,
    "path_traversal": scores.path_traversal,
    "tom_tracking": scores.tom_tracking,
}


class Problem(NamedTuple):
    """A row as its prompt, its reference and its score need it.

    Attributes
    ----------
    slots
        what the prompt's places are filled with.
    meta
        what scoring needs besides the reference.
    """

    slots: dict[str, Any]
    reference: str
    meta: dict[str, Any]


class LongProc(Task):
    """All samples of some subsets, a group each.

    The score is the F1 of html_to_tsv, and accuracy else.

    Attributes
    ----------
    sources
        the files of the subsets, and their prompts. The web pages of html_to_tsv are none of them.
    """

    name = "longproc"
    metric = "score"
    stored = True
    permissions = ("execute",)

    def __init__(
        self,
        subsets: Sequence[str] = READ,
        execute: bool = False,
        max_new_tokens: int | None = None,
        data_dir: str | None = None,
    ) -> None:
        """Check the options.

        Parameters
        ----------
        subsets
            names, of `SUBSETS`.
        execute
            programs that a model wrote may be run here.
        max_new_tokens
            tokens to generate at most; None: the level's own.
        data_dir
            the repository's folder data.
        """
        check_subsets(subsets, SUBSETS)
        for name in subsets:
            if name.startswith(RUN) and not execute:
                raise ValueError(
                    f"task.execute=false: {name} is scored by running the programs that the model"
                    " writes; use true where nothing is secret, or leave it out"
                )
        if execute and cpp.compiler() is None:
            raise ValueError("task.execute=true: no g++ on the path; install it, or use false")
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise ValueError(
                f"task.max_new_tokens={max_new_tokens}: a whole number, 1 or more, or null"
            )
        if data_dir is None:
            raise ValueError(
                "task.data_dir=null: needs the folder data of the repository princeton-pli/LongProc"
            )
        self.subsets = tuple(subsets)
        self.max_new_tokens = max_new_tokens
        self.execute = execute
        self.data_dir = Path(str(data_dir)).expanduser()
        files = {name: self._file(name) for name in self.subsets}
        prompts = {kind_of(name): self._prompts(kind_of(name)) for name in self.subsets}
        self.sources = (*files.values(), *prompts.values())

    def __len__(self) -> int:
        return sum(len(self._rows(name)) for name in self.subsets)

    def samples(self, tokenizer: Tokenizer | None, seed: int) -> Iterator[Sample]:
        """One sample of every subset, then the next.

        In each subset shuffled by the seed, whatever the others are.

        Raises
        ------
        ValueError
            a file cannot be had or read as what it should be.
        """
        templates = {name: self._template(kind_of(name)) for name in self.subsets}
        groups = {
            name: [self._sample(name, row, templates[name]) for row in self._rows(name)]
            for name in self.subsets
        }
        return in_turn(self.name, seed, groups)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The subset's own numbers, and the first of them as "score".

        Raises
        ------
        ValueError
            a program would have to run, and none may.
        """
        kind, (reference, *_) = kind_of(sample.group), sample.answers
        if kind == "countdown":
            values = _countdown(output, reference, sample.meta["nums"], sample.meta["target"])
        elif kind == RUN:
            if not self.execute:  # a stored sample may be of another subset than the options name
                raise ValueError(
                    f"task.execute=false: {sample.id} is scored by running a program; use true"
                )
            program = cpp.program_in(output)
            right = float(program is not None and cpp.passes(program, sample.meta["testcases"]))
            values = {
                "accuracy": right,
                "partial_accuracy": right,
                "extraction_rate": float(program is not None),
            }
        else:
            values = SCORES[kind](output, reference)
        return {"score": next(iter(values.values())), **values}

    def _file(self, name: str) -> LocalFile:
        kind = kind_of(name)
        others = tuple(f"{kind}_{level}" for level in LEVELS[kind])
        return LocalFile(
            self.data_dir / kind / f"{name}.json", "task.data_dir", others, PUBLISHED.get(name)
        )

    def _prompts(self, kind: str) -> LocalFile:
        return LocalFile(self.data_dir / kind / "prompts.yaml", "task.data_dir")

    @functools.cache  # noqa: B019 - a task lives as long as its run
    def _rows(self, name: str) -> list[DataRow]:
        return rows_of(self._file(name), FIELDS[kind_of(name)])

    def _template(self, kind: str) -> str:
        path = self._prompts(kind).path()
        try:
            return str(yaml.safe_load(path.read_text(encoding="utf-8"))["USER_PROMPT"])
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ValueError(
                f"task.data_dir: {path}: no prompt by the name USER_PROMPT in it"
            ) from error

    def _sample(self, name: str, row: DataRow, template: str) -> Sample:
        id, kind = f"{name}-{row.line - 1}", kind_of(name)
        new_tokens = self.max_new_tokens or NEW_TOKENS[name.rpartition("_")[2]]
        try:
            if row.error:
                return Sample(id, "", (), new_tokens, group=name, error=row.error)
            problem = self._problem(kind, row.data)
            prompt = template.format(**problem.slots)
            after = template.partition(CONTEXT.get(kind, template))[2].format(**problem.slots)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{name}.json, line {row.line}: {type(error).__name__}: {error}"
            return Sample(id, "", (), new_tokens, group=name, error=reason)
        return Sample(
            id,
            prompt,
            (problem.reference,),
            new_tokens,
            after,
            group=name,
            meta=problem.meta,
            chat=True,
        )

    def _problem(self, kind: str, data: dict[str, Any]) -> Problem:
        """What a row asks, checked."""
        if kind == "html_to_tsv":
            page = self.data_dir / kind / data["html_path"]
            if not page.resolve().is_relative_to(self.data_dir.resolve()):
                raise ValueError(
                    f"html_path={data['html_path']}: out of the folder; expected one of its pages"
                )
            if not scores.rows_in(data["gt"]):
                raise ValueError("field gt: no row below a header")
            return Problem({**data, "html_str": page.read_text(encoding="utf-8")}, data["gt"], {})
        if kind == "pseudo_to_code":
            cases = data["testcases"][: cpp.MOST_CASES]
            if not cases or not all(map(cpp.is_case, cases)):
                raise ValueError(
                    "field testcases: expected one or more, each the lines of an input and of its"
                    " output"
                )
            pseudocode = {"pseudocode": "\n".join(data["pseudocode_lines"])}
            return Problem(pseudocode, "\n".join(data["code_lines"]), {"testcases": cases})
        if kind == "path_traversal":
            start, end = data["question_repr"]
            if not data["answer_nl"].strip():
                raise ValueError("field answer_nl: blank")
            route = {"city_context": data["context_nl"], "src_city": start, "dst_city": end}
            return Problem(route, data["answer_nl"], {})
        if kind == "tom_tracking":
            if not scores.beliefs(data["solution"]):
                raise ValueError("field solution: no line that begins with a hyphen")
            return Problem(data, data["solution"], {})
        numbers = {"nums": data["nums"], "target": data["target"]}
        slots = {"demonstration": countdown.examples(), **numbers}
        return Problem(slots, countdown.demonstration(data["nums"], data["target"]), numbers)


def kind_of(subset: str) -> str:
    """A subset's kind, which is its name without the level."""
    return subset.rpartition("_")[0]


def _countdown(
    output: str, reference: str, numbers: Sequence[int], target: int
) -> dict[str, float]:
    """A right solution has everything; without one the search counts."""
    solution = scores.tagged(output, "Solution")
    if solution is not None and countdown.is_solution(numbers, target, solution):
        return {"accuracy": 1.0, "partial_accuracy": 1.0, "extraction_rate": 1.0}
    partly = countdown.share_of_search(output, reference) if countdown.TITLE in output else 0.0
    return {
        "accuracy": 0.0,
        "partial_accuracy": partly,
        "extraction_rate": float(solution is not None),
    }
