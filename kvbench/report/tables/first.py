"""What a console shows first of many runs: ten methods that can be compared, the best first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.report.data.run import CELL, OF_SPARSE, Run, Runs, TimedCell, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import PROTOCOL_KEYS, labels_of, last_word, scored, select
from kvbench.report.data.table import Table, quantity_of
from kvbench.report.tables.cells import BRIEF_SCORE, SAME_TOP, Cell, ReportTable
from kvbench.report.tables.runs import (
    OF_NEAR,
    axes_for,
    overview,
    summary,
    table_of,
    with_method_time,
)

SCREEN = 24  # runs of which a console has room for all
MOST = 10  # rows where there are more, beside full attention's
VALUES = (
    *("score", "attended_share", "device_kv_bytes", "index_bytes", "moved_bytes_per_step"),
    *("tpot_ms_mean", "recall"),
)
SCORE = {name: BRIEF_SCORE[name] for name in ("brief_score", "brief_against_full")}
TIMES = ("tpot_ms_p50", "floor_ratio", "ttft_s", "memory_bytes", "moved_bytes_per_step", "n")


def first(runs: Runs, where: Sequence[str] = ()) -> list[ReportTable]:
    """As `overview`, or of more runs than a screen shows the ten best of one selection.

    It is of one task, protocol and budget, of which most arms ran on the same samples, full
    attention among them, which rank methods; of several the one with most samples.

    Raises
    ------
    ConfigError
        as `select`.
    """
    selected = select(runs, where)
    table = Table(*over_seeds(runs, selected))
    if all(run.is_timed for run in selected):
        return _fastest(table)
    chosen = scored([run for run in table.arms.values() if not run.is_timed])
    selections = _selections(chosen)
    if len(selected) <= SCREEN or not selections:
        return overview(runs, where)
    arms = max(selections, key=_worth)
    best = sorted(arms, key=lambda run: run.nearness)[:MOST]
    rows = [*filter(None, [_full(best[0])]), *best]
    near = not missing(best[0].arm["kl_mean"])
    names = with_method_time(OF_NEAR if near else VALUES, rows)
    words = ["budget", *(key for key in PROTOCOL_KEYS if len(labels_of(chosen, key)) > 1)]
    title = (
        f"{'Nearest' if near else 'Best'} {len(best)} of {len(arms)} arms with"
        f" {', '.join(f'{last_word(key)}={best[0].label(key)}' for key in words)} (most share its"
        f" {best[0].arm['n']} samples); --all: {len(selected)} runs"
    )
    axes = axes_for(rows, ["model", "task", "method"])
    score = SAME_TOP if near else SCORE
    made = table_of(table, rows, axes, [], names, "first", title, {}, score, shared=2)
    return [made.by_arm(rows).brief()]


def _selections(chosen: Iterable[Run]) -> list[list[Run]]:
    """The arms of each task, protocol and budget that have the same samples, one a method."""
    selections: dict[tuple[object, ...], dict[tuple[str, str], Run]] = {}
    for run in chosen:
        if not run.is_full and not run.is_unbounded:
            alike = frozenset(run.scores.keys), *map(run.label, ("budget", *OF_SPARSE))
            arms = selections.setdefault((run.kind, *alike), {})
            arms.setdefault((run.arm["method"], run.label("kv")), run)
    return [[*arms.values()] for arms in selections.values()]


def _worth(arms: Sequence[Run]) -> tuple[bool, int, int, bool]:
    """What of several selections the first is chosen by."""
    run = arms[0]
    ranked = _full(run) is not None and not run.ranks_none
    return ranked, min(len(arms), MOST), int(run.arm["n"]), run.label("budget") == "256"


def _full(run: Run) -> Run | None:
    """The run of full attention on the same samples, if there is one."""
    full = run.full()
    return full if full is not None and {*full.scores.keys} == {*run.scores.keys} else None


def _fastest(table: Table) -> list[ReportTable]:
    """The fastest arms of the length, batch and machine at which most were timed.

    Of as many the longest. Where no more than `MOST` were, all of their tables.
    """
    by_place: dict[TimedCell, dict[Run, float]] = {}
    for run in table.arms.values():
        for cell in run.cells:
            if time := table.number(run.index, "tpot_ms_p50", str(cell)):
                by_place.setdefault(cell, {})[run] = time.value
    if sum(map(len, by_place.values())) <= MOST:
        return summary(table.runs.only(table.arms.values()))
    place = max(by_place, key=lambda cell: (min(len(by_place[cell]), MOST), cell))
    times = by_place[place]
    rows = sorted(times, key=lambda run: times[run])[:MOST]
    title = (
        f"The fastest {len(rows)} of {len(times)} arms timed at {place.tokens} tokens, batch"
        f" {place.batch}, on {place.machine}; --all: every length"
    )
    axes = [key for key in axes_for(rows, ["model", "method", "budget"]) if key not in CELL]
    labels = [tuple(map(run.label, axes)) for run in rows]
    cells = {(row, 0): Cell.of(table, [run], TIMES, str(place)) for row, run in enumerate(rows)}
    lines = {name: quantity_of(name) for name in TIMES}
    made = ReportTable("first", title, tuple(axes), labels, [""], cells, lines, [], shared=1)
    return [made.noted(axes).brief()]
