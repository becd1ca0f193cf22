"""Pictures of run folders, as the papers draw them: scores, costs, and what a selection finds.

The figure of a name is the function of that name in the module of that name, here:
`drift.drift(runs)`. Each says what it has nothing to draw from. In one picture no two methods look
alike (`style.py`), and what a reader must know of the runs (random weights, transfers to no device,
failed samples) stands below it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvbench.config import ConfigError, nearest
from kvbench.report import LISTING
from kvbench.report.data.run import Runs
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.shared import on_shared_samples
from kvbench.report.figures.labels import as_written
from kvbench.report.figures.panels import LOOK, printed
from kvbench.runs.stored import DAMAGED, ResultsError, what_of

PICTURES = (".png", ".pdf", ".svg")
FIGURES = {
    "budget": "score against budget, and against what was attended",
    "attended": "nominal against measured budget: attended / C",
    "read": "score and KL from full attention against the bytes of KV that a step reads",
    "frontier": (
        "KL (or score) against the share of full attention's bytes held, over methods, budgets"
        " and kv"
    ),
    "tradeoff": "score against device memory and time per token (IceCache, Fig. 1)",
    "passkey": "passkeys found by depth and length (IceCache, Fig. 6)",
    "latency": (
        "second token, time per token and its parts (IceCache, Fig. 7; LycheeCluster, Fig. 5)"
    ),
    "breakeven": "from which length a method is faster than full attention, from task=latency",
    "length": "time per token against context length (IceCache, Fig. 8; LycheeCluster, Fig. 4)",
    "recall": "recall over decode steps, from runs with probe.every (ParisKV, Fig. 1)",
    "stability": (
        "stability of selections over decode steps, from runs with probe.every (LycheeCluster,"
        " Fig. 9)"
    ),
    "fidelity": (
        "KL from full attention against budget, attended entries and memory, from task=fidelity"
    ),
    "drift": "KL from full attention over decode steps, from task=fidelity",
    "lost": "attention mass lost by layer and query head, from runs with probe.every",
    "written": "new tokens of an answer, and how many end in a loop, against the budget",
    "question": (
        "score by when the question is read: with the context, or after that was compressed"
    ),
    "gain": "what a method gains over random tokens (method=random), sample by sample",
    "published": "published scores against ours, with what differs",
    "clusters": (
        "recall against cluster or page size, from runs with probe.every (LycheeCluster, Fig. 10)"
    ),
}
# Drawn from the JSON that a script printed, in place of runs.
OF_FILES = {
    "search": (
        "recall against the time of a query, and of reading as much, from scripts/bench_index.py"
    ),
    "capacity": (
        "tokens a second of as many requests as fit into a memory, from scripts/bench_capacity.py"
    ),
}


def draw(name: str, runs: Runs, size: str = "page") -> Figure:
    """The figure of a name of `FIGURES`.

    Parameters
    ----------
    size
        "page", 7 inches wide, or "column", 3.4: as it is printed, so that its letters are of 6.5
        points or more.

    Raises
    ------
    ConfigError
        no such figure (names the nearest), or not of these runs: there is none to draw it from, or
        what they stored is not as kvbench writes it.
    """
    if name not in FIGURES:
        raise ConfigError(
            f"figure={name}: no such figure; {nearest(name, FIGURES | OF_FILES, LISTING)}"
        )
    try:
        with printed(size):
            return _function(name)(on_shared_samples(over_seeds(runs, runs)[0]))
    except ConfigError:
        raise
    except (ResultsError, *DAMAGED) as error:
        raise ConfigError(f"figure={name}: not from these runs ({what_of(error)})") from error


def draw_file(name: str, files: Sequence[Path], size: str = "page") -> Figure:
    """The figure of a name of `OF_FILES`.

    Raises
    ------
    ConfigError
        not from these files.
    """
    with printed(size):
        return _function(name)(files)


def _function(name: str) -> Callable[[Any], Figure]:
    function: Callable[[Any], Figure] = getattr(
        import_module(f"kvbench.report.figures.{name}"), name
    )
    return function


def write(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, PDF or SVG, as the file's ending says.

    The same runs give the same file.

    Raises
    ------
    ConfigError
        another ending.
    """
    if path.suffix not in PICTURES:
        raise ConfigError(f"out={path}: expected a file that ends in {' or '.join(PICTURES)}")
    path.write_bytes(drawn(figure, path.suffix.removeprefix(".")))


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as a file of a kind: "png", "pdf" or "svg"."""
    as_written(figure)
    out, undated = (
        io.BytesIO(),
        {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind],
    )
    with rc_context(
        {**LOOK, "pdf.fonttype": 42, "svg.hashsalt": "kvbench"}
    ):  # fonts that journals take; no random names
        figure.savefig(out, format=kind, dpi=200, metadata=undated)
    return out.getvalue()
