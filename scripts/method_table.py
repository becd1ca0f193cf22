"""What every method comes to at a budget of 256 tokens: the tables of docs/methods/at_256.md and of
methods/README.md, which has a row for each page of docs/methods.

Writes them into these; a test holds both to them. Run it when the runs in `REFERENCE` have changed,
or a method is new.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvbench.config import choices
from kvbench.report.data.frame import collect
from kvbench.report.data.run import YARDSTICK, Run, Runs, missing
from kvbench.report.data.stats import estimate
from kvbench.runs.quantities import MIB

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "methods"
PAGE, FRONT = PAGES / "at_256.md", ROOT / "methods" / "README.md"
REFERENCE = ROOT / "results" / "reference.tar.xz"
BUDGET = 256
TASKS = ("passkey", "ruler")  # the columns of scores
HEAD = "| method | KL, nats | KV held, MiB | KV read a step, MiB | passkeys % | RULER % |"
PRESET = re.compile(r"(?<=\n\n)`(\w+)` ")  # a paragraph that begins with a method's name
FRONT_HEAD = "| `method=` | KL | passkeys, % | MiB | what the first does | page |"


class MethodRow(NamedTuple):
    """What a method comes to; what did not run is None.

    Attributes
    ----------
    kl
        mean KL divergence from full attention with the ends of its interval, nats.
    held, read
        bytes of keys and values, on the device and in a step.
    scores
        of `TASKS`, per cent.
    unbounded
        the budget never applied on the texts, so that it has no place among the others.
    """

    kl: tuple[float, float | None, float | None] | None
    stored_bytes: float | None
    read: float | None
    scores: dict[str, float]
    unbounded: bool = False

    def kl_cell(self) -> str:
        if self.kl is None:
            return "-"
        mean, low, high = self.kl
        return (
            f"{mean:.4f}" + (f" [{low:.4f}, {high:.4f}]" if high else "") + " (x)" * self.unbounded
        )


def found() -> dict[str, MethodRow]:
    """Every method, on the texts that all have read."""
    runs = collect([REFERENCE])
    near = {method: _run(runs, "fidelity", method) for method in choices("method")}
    scores = [run.scores for run in near.values() if run is not None]
    ids = set.intersection(
        *({id for id, kl in zip(score.ids, score.kl, strict=True) if kl == kl} for score in scores)
    )
    return {method: _method_row(method, run, ids, runs) for method, run in near.items()}


def _method_row(method: str, run: Run | None, ids: set[str], runs: Runs) -> MethodRow:
    by_task = {task: _run(runs, task, method) for task in TASKS}
    scores = {
        task: task_run.score().mean for task, task_run in by_task.items() if task_run is not None
    }
    if run is None:
        return MethodRow(None, None, None, scores)
    kl = estimate([run.scores.kl[np.isin(run.scores.ids, list(ids))]])
    stored_bytes, read = run.arm["device_kv_bytes"], run.bytes_read
    amounts = (None if missing(amount) else amount for amount in (stored_bytes, read))
    return MethodRow(kl[:3], *amounts, scores, run.is_unbounded)


def written(methods: dict[str, MethodRow]) -> str:
    """All methods that ran, the nearest first, and last those whose budget never applied."""
    ran = [(method, row) for method, row in methods.items() if row.kl or row.scores]
    ran.sort(key=lambda pair: (pair[1].unbounded, pair[1].kl[0] if pair[1].kl else float("inf")))
    lines = [
        f"| `{method}` | {row.kl_cell()} | {_mib(row.stored_bytes)} | {_mib(row.read)} | "
        + " | ".join(_whole(row.scores.get(task)) for task in TASKS)
        + " |"
        for method, row in ran
    ]
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *lines])


def front(methods: dict[str, MethodRow]) -> str:
    """A row for each page: its methods, what the first of them came to and does, and a link.

    The nearest first; last those that did not run.
    """
    lines = []
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        names = [*dict.fromkeys(name for name in PRESET.findall(text) if name in methods)]
        if names:
            row, about = methods[names[0]], choices("method")[names[0]]
            listed = ", ".join(f"`{name}`" for name in names)
            nearness = f"{row.kl[0]:.3f}".lstrip("0") + " (x)" * row.unbounded if row.kl else "-"
            passkeys = _whole(row.scores.get("passkey"))
            link = f"[{text.splitlines()[0].removeprefix('# ')}](../docs/methods/{page.name})"
            cells = [listed, nearness, passkeys, _mib(row.stored_bytes), about, link]
            place = (row.kl is None, row.unbounded, row.kl or (), page.name)
            lines.append((*place, f"| {' | '.join(cells)} |"))
    rule = "|---" * (FRONT_HEAD.count("|") - 1) + "|"
    return "\n".join([FRONT_HEAD, rule, *(line for *_, line in sorted(lines))])


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{MIB.scale * value:.1f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _run(runs: Runs, task: str, method: str) -> Run | None:
    """The run of a method with the budget on most samples, without probes where there is one.

    None without any.
    """
    fitting = [
        run
        for run in runs
        if (run.arm["task"], run.arm["method"]) == (task, method)
        and (method == YARDSTICK or run.arm["budget"] == BUDGET)
    ]
    return max(fitting, key=lambda run: (run.arm["n"], not run.arm["probe_every"]), default=None)


def main() -> None:
    """Write both into their pages, in place of what is there."""
    methods = found()
    for path, head, made in ((PAGE, HEAD, written(methods)), (FRONT, FRONT_HEAD, front(methods))):
        page = path.read_text(encoding="utf-8")
        begin = page.index(head)
        path.write_text(page[:begin] + made + page[page.index("\n\n", begin) :], encoding="utf-8")


if __name__ == "__main__":
    main()
