"""Pictures of run folders, as the papers draw them: scores against budgets, costs, and what a selection finds.

Each figure of `FIGURES` is a function of `Runs` and says what it has nothing to draw from. A method looks the same in
all of them (`style.py`), and what a reader must know of the runs (random weights, transfers to no device, failed
samples) stands below the picture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.config import ConfigError, nearest
from kvbench.report.data.evidence import Evidence
from kvbench.report.data.frame import YARDSTICK, Runs
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.stats import COVERAGE
from kvbench.report.figures.attended import attended, read
from kvbench.report.figures.breakeven import breakeven
from kvbench.report.figures.fidelity import drift, fidelity
from kvbench.report.figures.frontier import frontier
from kvbench.report.figures.labels import as_written
from kvbench.report.figures.latency import latency
from kvbench.report.figures.maps import lost, passkey
from kvbench.report.figures.panels import (
    arms_for,
    curves_of,
    draw_intervals,
    draw_level,
    finished,
    grid,
    line_look,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.report.figures.published import published
from kvbench.report.figures.search import search
from kvbench.report.figures.style import Style
from kvbench.report.figures.tradeoff import draw_front, tradeoff
from kvbench.report.figures.written import written
from kvbench.runs.quantities import QUANTITIES
from kvbench.runs.stored import DAMAGED, ResultsError, what_of
from kvbench.runs.summary import timed_alike

# Options that say how many things lie together.
SIZES = {"method.cluster_size": "chunks per cluster", "method.page_size": "tokens per page"}
PICTURES = (".png", ".pdf", ".svg")
POINTS = 100  # of a curve over decode steps, at most


def draw(name: str, runs: Runs) -> Figure:
    """The figure of a name of `FIGURES`.

    Raises:
        ConfigError: no such figure (names the nearest), or not of these runs: there is none to draw it from, or what
            they stored is not as kvbench writes it.
    """
    if name not in FIGURES:
        raise ConfigError(f"figure={name}: no such figure; {nearest(name, FIGURES | OF_FILES)}")
    try:
        return FIGURES[name][0](over_seeds(runs, runs.arms.index)[0])
    except ConfigError:
        raise
    except (ResultsError, *DAMAGED) as error:
        raise ConfigError(f"figure={name}: not from these runs ({what_of(error)})") from error


def write(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, PDF or SVG, as the file's ending says; the same runs give the same file.

    Raises:
        ConfigError: another ending.
    """
    if path.suffix not in PICTURES:
        raise ConfigError(f"out={path}: expected a file that ends in {' or '.join(PICTURES)}")
    path.write_bytes(drawn(figure, path.suffix.removeprefix(".")))


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as a file of a kind: "png", "pdf" or "svg"."""
    from matplotlib import rc_context

    as_written(figure)
    out, undated = io.BytesIO(), {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "kvbench"}):  # fonts that journals take; no random names
        figure.savefig(out, format=kind, dpi=200, metadata=undated)
    return out.getvalue()


# -- scores and costs --------------------------------------------------------------------------------------------------


def budget(runs: Runs) -> Figure:
    """Score against the budget, and against what was attended; a row for each task and model."""
    panels = panels_of("budget", runs, arms_for(runs, "budget", probed=False, scored=True))
    evidence = Evidence(runs)
    bars = f"{COVERAGE} % intervals"
    figure, axes = grid(len(panels), 2, f"score against budget, and against what was attended, with {bars}")
    for (title, arms), row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            for one in series_of(runs, arms):
                scores = [evidence.score(run) for run in one.arms.index]
                if one.arms["budget"].isna().all():
                    draw_level(axis, one, scores)
                    continue
                draw_intervals(axis, one, one.arms[x].astype(float), scores)
            axis.set(ylim=(-5, 105), title=title)
        row[0].set(ylabel=QUANTITIES["score"].axis, xlabel="budget C: tokens, or below 1 a share of the prompt")
        row[1].set_xlabel(QUANTITIES["attended_mean"].axis)
        attended = arms.loc[arms["budget"].notna(), "attended_mean"].astype(float).dropna()
        if len(attended):
            mark_powers(row[0], arms["budget"].dropna().astype(float))
            low, high = math.log2(attended.min()), math.log2(attended.max())
            mark_powers(row[1], [2.0**octave for octave in range(math.floor(low), math.ceil(high) + 1)])
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            known = arms[arms["budget"].notna() & arms[x].notna()]
            draw_front(axis, known[x].astype(float), known["score"].astype(float), more_is_better=True)
    return finished(figure, axes, [arms for _, arms in panels])


def length(runs: Runs) -> Figure:
    """Time per token against the length of the context (IceCache, Fig. 8; LycheeCluster, Fig. 4)."""
    panels = panels_of("length", runs, arms_for(runs, "length", probed=False, column="tpot_ms_mean"), times=True)
    curves = [(title, arms, _length_curves(runs, arms)) for title, arms in panels]
    curves = [curve for curve in curves if curve[2]]
    if not curves:
        raise ConfigError("figure=length: no task of these runs has prompts of several lengths; task.lengths sets them")
    columns = min(2, len(curves))
    figure, axes = grid(math.ceil(len(curves) / columns), columns, "time per token against context length")
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (title, _, drawn) in zip(axes.flat, curves, strict=False):
        for label, style, times in drawn:
            axis.plot(times.index, times, label=label, **line_look(style))
        axis.set(title=title, xlabel="prompt tokens", ylabel=QUANTITIES["tpot_ms_mean"].axis)
        axis.set_ylim(bottom=0)
        mark_powers(axis, [tokens for _, _, times in drawn for tokens in times.index])
    return finished(figure, axes, [arms for _, arms, _ in curves], times=True)


def _length_curves(runs: Runs, arms: pd.DataFrame) -> list[tuple[str, Style, pd.Series]]:
    """Of each arm its label, style, and the median time per token by prompt tokens; none where there is one length."""
    found = []
    for label, style, arm in curves_of(runs, arms):
        by_length: dict[int, list[dict[str, Any]]] = {}
        for one in runs.timed_samples(arm):
            if one.get("tpot_ms") and "length" in one["meta"]:
                by_length.setdefault(one["meta"]["length"], []).append(one)
        samples = [one for alike in by_length.values() for one in timed_alike(alike)]
        times = pd.DataFrame(
            {
                "length": [sample["meta"]["length"] for sample in samples],
                "tokens": [sample["prompt_tokens"] for sample in samples],
                "ms": [sample["tpot_ms"]["mean"] for sample in samples],
            }
        )
        if times["length"].nunique() > 1:
            found.append((label, style, times.groupby("length").median().set_index("tokens")["ms"]))
    return found


# -- what a selection finds --------------------------------------------------------------------------------------------


def recall(runs: Runs) -> Figure:
    """Recall of the exact top tokens over decode steps (ParisKV, Fig. 1)."""
    return _over_steps(runs, "recall", ["recall"])


def stability(runs: Runs) -> Figure:
    """How much of a selection was selected before, over decode steps (LycheeCluster, Fig. 9)."""
    return _over_steps(runs, "stability", ["jaccard", "seen"])


def _over_steps(runs: Runs, figure_name: str, probes: Sequence[str]) -> Figure:
    """A column for each probe, a row for each task and model, a curve for each arm: the mean over samples."""
    arms = arms_for(runs, figure_name, probed=True)
    drawn = []
    for title, own in panels_of(figure_name, runs, arms[arms["method"] != YARDSTICK]):
        curves = [(label, style, _curves(runs.samples(arm))) for label, style, arm in curves_of(runs, own)]
        if any(len(curve) for _, _, curve in curves):
            drawn.append((title, own, curves))
    if not drawn:
        raise ConfigError(f"figure={figure_name}: of the runs with probes none is sparse and has values of each step")
    measures = [QUANTITIES[name].axis for name in probes]
    figure, axes = grid(len(drawn), len(probes), f"{' and '.join(measures)}, over decode steps")
    for (title, _, curves), row in zip(drawn, axes, strict=True):
        for label, style, of_arm in curves:
            for axis, name in zip(row, probes, strict=True):
                if name in of_arm and of_arm[name].notna().any():
                    curve = _thinned(of_arm[name].dropna())
                    look = line_look(style) | {"markevery": max(1, len(curve) // 8)}
                    axis.plot(curve.index, curve, label=label, **look)
        for axis, label in zip(row, measures, strict=True):
            axis.set(title=title, xlabel="decode step", ylabel=label, ylim=(-0.03, 1.03))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    return finished(figure, axes, [own for _, own, _ in drawn])


def _curves(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The mean over samples of each measure by decode step, as far as half of the samples go."""
    steps = [(sample.get("probe") or {}).get("steps") for sample in samples]
    frames = [pd.DataFrame(one, dtype=float) for one in steps if one]
    if not frames:
        return pd.DataFrame()
    by_step = pd.concat(frames).groupby("step")
    return by_step.mean()[by_step.size() >= len(frames) / 2]


def _thinned(curve: pd.Series) -> pd.Series:
    """The mean of neighbouring steps where there are more than a picture can show."""
    blocks = np.arange(len(curve)) * min(POINTS, len(curve)) // len(curve)
    return pd.Series(curve.groupby(blocks).mean().to_numpy(), curve.index.to_series().groupby(blocks).mean().to_numpy())


def clusters(runs: Runs) -> Figure:
    """Recall against how many things lie in a cluster or page (LycheeCluster, Fig. 10)."""
    arms = arms_for(runs, "clusters", probed=True)
    panels = []
    for title, own in panels_of("clusters", runs, arms):
        for option in SIZES:
            sizes = runs.settings.get(option, pd.Series(index=runs.arms.index, dtype=object))[own.index]
            varied = sizes.groupby([own["method"], own["budget"]]).transform("nunique") > 1
            if varied.any():
                panels.append((title, option, own[varied].assign(size=sizes[varied].astype(float))))
    if not panels:
        keys = " or ".join(SIZES)
        raise ConfigError(
            f"figure=clusters: no two runs with probes differ in {keys} alone; a sweep over one makes some"
        )
    figure, axes = grid(1, len(panels), f"{QUANTITIES['recall'].title} against cluster size")
    for axis, (title, option, own) in zip(axes.flat, panels, strict=True):
        for one in series_of(runs, own, without=option):
            for budget in one.arms["budget"].drop_duplicates():
                line = one.arms[one.arms["budget"] == budget].sort_values("size")
                axis.plot(line["size"], line["recall"], label=one.label(budget), **line_look(one.style))
        axis.set(
            title=title,
            xlabel=SIZES[option],
            ylabel=QUANTITIES["recall"].axis,
            ylim=(-0.03, 1.03),
        )
        mark_powers(axis, own["size"])
    return finished(figure, axes, [own for _, _, own in panels])


FIGURES: dict[str, tuple[Callable[[Runs], Figure], str]] = {
    "budget": (budget, "score against budget, and against what was attended"),
    "attended": (attended, "nominal against measured budget: attended / C"),
    "read": (read, "score and KL from full attention against the bytes of KV that a step reads"),
    "frontier": (frontier, "score and KL against bytes held and bytes of a step, over methods, budgets and kv"),
    "tradeoff": (tradeoff, "score against device memory and time per token (IceCache, Fig. 1)"),
    "passkey": (passkey, "passkeys found by depth and length (IceCache, Fig. 6)"),
    "latency": (latency, "second token, time per token and its parts (IceCache, Fig. 7; LycheeCluster, Fig. 5)"),
    "breakeven": (breakeven, "from which length a method is faster than full attention, from task=latency"),
    "length": (length, "time per token against context length (IceCache, Fig. 8; LycheeCluster, Fig. 4)"),
    "recall": (recall, "recall over decode steps, from runs with probe.every (ParisKV, Fig. 1)"),
    "stability": (
        stability,
        "stability of selections over decode steps, from runs with probe.every (LycheeCluster, Fig. 9)",
    ),
    "fidelity": (fidelity, "KL from full attention against budget, attended entries and memory, from task=fidelity"),
    "drift": (drift, "KL from full attention over decode steps, from task=fidelity"),
    "lost": (lost, "attention mass lost by layer and query head, from runs with probe.every"),
    "written": (written, "new tokens of an answer, and how many end in a loop, against the budget"),
    "published": (published, "published scores against ours, with what differs"),
    "clusters": (clusters, "recall against cluster or page size, from runs with probe.every (LycheeCluster, Fig. 10)"),
}
# Drawn from JSON that a script printed, in place of runs.
OF_FILES: dict[str, tuple[Callable[[Sequence[Path]], Figure], str]] = {
    "search": (search, "recall against microseconds a query, with the bandwidth floor, from scripts/bench_index.py"),
}
