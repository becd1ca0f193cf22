"""The table of methods/README.md that says what every method comes to at a budget of 256 tokens, from results/.

Writes it into the page; a test holds the page to it. Run it when the runs in results/fidelity, results/fidelity_budgets
or results/reference have changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvbench.config import choices
from kvbench.report.audited import bytes_read
from kvbench.report.evidence import Evidence
from kvbench.report.frame import YARDSTICK, Runs, collect, missing
from kvbench.report.stats import estimate
from kvbench.runs.quantities import MIB

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "methods" / "README.md"
TEXTS, NEEDLES = ("fidelity", "fidelity_budgets"), ("reference",)
BUDGET = 256
HEAD = "| method | KL, nats | KV held, MiB | KV read a step, MiB | needles % |"


def written() -> str:
    """The table, the nearest first, on the texts that all have read; what did not run is a dash."""
    texts, needles = (Evidence(collect([ROOT / "results" / name for name in folders])) for folders in (TEXTS, NEEDLES))
    near = {method: _run(texts.runs, "fidelity", method) for method in choices("method")}
    ids = set.intersection(*(set(texts.runs.scores[run].ids) for run in near.values() if run is not None))
    lines = []
    for method, run in near.items():
        found = _run(needles.runs, "niah", method)
        score = "-" if found is None else f"{needles.score(found).mean:.0f}"
        if run is not None:
            rank, kl = _kl(texts.runs, run, ids)
            lines.append((rank, f"| `{method}` | {kl} | {_bytes(texts, run)} | {score} |"))
        elif found is not None:
            lines.append((float("inf"), f"| `{method}` | - | - | - | {score} |"))
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *(line for _, line in sorted(lines))])


def _run(runs: Runs, task: str, method: str) -> int | None:
    """The run of a method with the budget on most samples, without probes where there is one; None without any."""
    fitting = [
        run
        for run, arm in runs.arm.items()
        if (arm["task"], arm["method"]) == (task, method) and (method == YARDSTICK or arm["budget"] == BUDGET)
    ]
    return max(fitting, key=lambda run: (runs.arm[run]["n"], not runs.arm[run]["probe_every"]), default=None)


def _kl(runs: Runs, run: int, ids: set[str]) -> tuple[float, str]:
    """The mean KL over these samples, and as a cell with its interval."""
    scores = runs.scores[run]
    mean, low, high, _ = estimate([scores.kl[np.isin(scores.ids, list(ids))]])
    return mean, f"{mean:.4f}" + (f" [{low:.4f}, {high:.4f}]" if high else "")


def _bytes(evidence: Evidence, run: int) -> str:
    """Keys and values held on the device, and read in a step, as two cells."""
    held, read = evidence.runs.arm[run]["device_kv_bytes"], bytes_read(evidence, run)
    return " | ".join("-" if missing(value) else f"{MIB.scale * value:.1f}" for value in (held, read))


def main() -> None:
    """Write the table into the page, in place of the one there."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{written()}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
