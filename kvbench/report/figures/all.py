"""Pictures of run folders, as the papers draw them: scores, costs, and what a selection finds.

A figure stands in the table of `specs.py`, or in the file of its name. Each says what it has
nothing to draw from. A method looks the same in all of them (`style.py`), and what a reader must
know of the runs (random weights, transfers to no device, failed samples) stands below.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from functools import partial
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
from kvbench.report.figures.charts import LOOK, printed
from kvbench.report.figures.curves import curves
from kvbench.report.figures.labels import as_written
from kvbench.report.figures.specs import SPECS
from kvbench.runs.stored import DAMAGED, ResultsError, contents, json_of, what_of

PICTURES = (".png", ".pdf", ".svg")
FIGURES = {
    **{name: spec.about for name, spec in SPECS.items()},
    "passkey": "passkeys found by depth and length (IceCache, Fig. 6)",
    "latency": (
        "second token, time per token and its parts (IceCache, Fig. 7; LycheeCluster, Fig. 5)"
    ),
    "lost": "attention mass lost by layer and query head, from runs with probe.every",
    "gain": "what a method gains over random tokens (method=random), sample by sample",
    "published": (
        "published scores against ours, with what differs; of the shipped archives those with RULER"
        " have full attention's alone"
    ),
}
# Drawn from the JSON that a script printed, `capacity` also from runs.
OF_FILES = {
    "search": (
        "recall against the time of a query, and of reading as much, from scripts/bench_index.py"
    ),
    "capacity": SPECS["capacity"].about,
}
SCRIPTS = {"search": "bench_index", "capacity": "bench_capacity"}


def refuse_unknown(name: str, known: Collection[str] = (*FIGURES, *OF_FILES)) -> None:
    """Refuse a name that none of the known figures has.

    Raises
    ------
    ConfigError
        names the nearest.
    """
    if name not in known:
        raise ConfigError(
            f"figure={name}: no such figure; {nearest(name, FIGURES | OF_FILES, LISTING)}"
        )


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
    refuse_unknown(name, FIGURES)
    make = partial(curves, name) if name in SPECS else _function(name)
    try:
        with printed(size):
            return make(on_shared_samples(over_seeds(runs, runs)[0]))
    except ConfigError:
        raise
    except (ResultsError, *DAMAGED) as error:
        raise ConfigError(f"figure={name}: not from these runs ({what_of(error)})") from error


def draw_file(name: str, files: Sequence[Path], size: str = "page") -> Figure:
    """The figure of a name of `OF_FILES`, of the one file of JSON that its script printed.

    Raises
    ------
    ConfigError
        there are several files, or it is another.
    """
    path, *others = files or [Path("results")]
    if others:
        raise ConfigError(f"figure={name}: {len(files)} files; expected one")
    try:
        with printed(size):
            return _function(name)(json_of(contents(path)))
    except (OSError, ResultsError, *DAMAGED) as error:
        script = SCRIPTS[name]
        raise ConfigError(
            f"figure={name}: {path}: expected one file, what scripts/{script}.py prints last,"
            f" such as results/{script}_cpu.json ({type(error).__name__})"
        ) from error


def is_of_files(name: str, paths: Sequence[Path]) -> bool:
    """Whether a figure is drawn of a script's JSON: always, or as these paths are such files."""
    if name not in OF_FILES:
        return False
    return name not in FIGURES or any(path.suffix == ".json" for path in paths)


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
    undated = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    out = io.BytesIO()
    # fonts that journals take; no random names
    with rc_context({**LOOK, "pdf.fonttype": 42, "svg.hashsalt": "kvbench"}):
        figure.savefig(out, format=kind, dpi=200, metadata=undated)
    return out.getvalue()
