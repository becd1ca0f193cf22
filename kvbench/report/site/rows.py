"""The runs of a site as rows: every arm with its numbers, its panel, and full attention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.config import choices
from kvbench.models.hub import weights_origin
from kvbench.report.claims.page import Judged, judged
from kvbench.report.data.run import YARDSTICK, Run, Runs, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import by_protocol, fewest_keys, last_word, order_of
from kvbench.report.data.shared import by_length, on_shared_samples
from kvbench.report.data.stats import FEWEST, Estimate, ranks
from kvbench.report.data.style import STYLES
from kvbench.report.data.table import NONE, Table
from kvbench.report.site.pages import PageNumber, grouped, label, words_of
from kvbench.report.submissions.checked import Submission
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.formats import text
from kvbench.report.tables.runs import summary

VALUES = (
    "score",
    "kl_mean",
    "device_kv_bytes",
    "index_bytes",
    "moved_bytes_per_step",
    "tpot_ms_p50",
    "recall",
    "n",
)
ORACLE = "topk"  # scores every key exactly: what selection can come to, and no method to take
FAR_OVER = 3.0  # attended / C from which an arm no longer counts as one of its budget
AXES = ("model", "task", "method", "budget")


class Row(NamedTuple):
    """An arm: the settings that name it, its numbers, and the table that they are from.

    Attributes
    ----------
    run
        of `Site.joined`.
    panel
        name of the arms that it can be compared with, of the same samples under the same protocol.
    words
        the settings beside `AXES` that label it in its table, such as "page_size=8".
    cell, table
        its numbers, and how they are shown.
    full
        the run of full attention on the same samples, or None.
    unranked
        why no score on these samples ranks methods, or "" (`Run.ranks_none`).
    variant
        the settings in which it differs from others of the same method, budget and panel, or "".
    length
        of the prompts that its numbers are of; None: of all of them.
    whole
        the panel of its run with all lengths.
    of
        the submission that it is from; None for one of the board's own.
    """

    run: Run
    model: str
    task: str
    method: str
    budget: str
    panel: str
    words: tuple[str, ...]
    cell: Cell
    table: ReportTable
    full: Run | None
    unranked: str
    variant: str = ""
    length: int | None = None
    whole: str = ""
    of: Submission | None = None

    @property
    def is_choice(self) -> bool:
        """Whether it may be named among the best.

        It is not full attention or the oracle, keeps within a budget that applied, and its samples
        rank methods.
        """
        within = (
            self.cell.numbers.get("attended_share", 0.0) < FAR_OVER and not self.run.is_unbounded
        )
        return within and not self.run.is_full and not self.unranked and self.method != ORACLE

    @property
    def whose(self) -> str:
        """Who made the run, for a filter."""
        return "others" if self.of else "kvbench"

    @property
    def name(self) -> str:
        """The arm in words, among those of its panel."""
        return label(self.method) + self.arm

    @property
    def arm(self) -> str:
        """What follows its method's name in words: " 256, kv=int8"."""
        budget = "" if self.budget == NONE else f" {self.budget}"
        return budget + (f", {self.variant}" if self.variant else "")

    @property
    def has_kl(self) -> bool:
        """Whether KL, and not the score, says how near it is."""
        return "kl_mean" in self.cell.numbers

    @property
    def tokens(self) -> str:
        """The length of its prompts in words, where the task has one."""
        lengths = self.run.settings.get("task.lengths")
        if self.length is None and missing(lengths):
            return ""
        return f"{self.length or words_of(str(lengths))} tokens"

    @property
    def question(self) -> str:
        """When the question is read: "with" the context, or "after" it was compressed."""
        return str(self.run.settings["protocol.question"])

    @property
    def runs(self) -> str:
        """The ids of its runs, those with probes among them."""
        return " ".join(Path(path).name for path in self.cell.run.split("; "))

    def number(self, name: str) -> PageNumber | None:
        """One of its numbers as tables show it; None where it has none."""
        if name not in self.cell.numbers:
            return None
        shown, _, more = text(self.table, self.cell, name, 0).partition(" ")
        more = re.sub(r"\d+\)$", ")", more).replace(" ()", "").replace("()", "")
        if name == "score" and "score_low" in self.cell.numbers:
            more = f"{text(self.table, self.cell, 'interval', 0)} {more}".strip()
        return PageNumber(name, self.cell.numbers[name], shown, more)

    def time(self, name: str, machine: str) -> PageNumber | None:
        """A time that was taken on this machine, and beside no other work; else None."""
        number, marks = self.number(name), self.cell.marks.get(name, "")
        if number is None or self.cell.machine != machine or "n" in marks:
            return None
        return number._replace(more="")

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """What arms of a panel are ordered by: KL or else the score, then device memory.

        Those whose budget never applied come last.
        """
        numbers = self.cell.numbers
        nearness = numbers.get("kl_mean", -numbers["score"])
        memory = numbers.get("device_kv_bytes", 0.0)
        return (self.run.is_unbounded, not self.has_kl, nearness, memory)

    def share(self, indexed: bool) -> float | None:
        """Per cent of the keys and values that full attention held on the device.

        For the same samples, and in the layers that the method selects in: none that it leaves
        dense, none with a window. None without full attention's bytes, where samples failed, and
        where dense layers hold codes of unknown size.

        Parameters
        ----------
        indexed
            with the bytes of the method's index, wherever it lies.
        """
        run, dense = self.run, _number(self.run.arm, "dense_share")
        same_kv_run = run.full(run.settings["kv"]) if dense else self.full
        if self.full is None or same_kv_run is None:
            return None
        full, same_kv = self.full.on_samples_of(run), same_kv_run.on_samples_of(run)
        if any(
            missing(arm["device_kv_bytes"]) or arm["failed"] for arm in (run.arm, full, same_kv)
        ):
            return None
        windowed = _number(run.arm, "windowed_kv_bytes")
        unwindowed = run.acted_share
        # of the layers without a window
        dense = dense / unwindowed if unwindowed > 0 else 1.0
        whole = (full["device_kv_bytes"] - windowed) * (1 - dense)
        dense_bytes = (same_kv["device_kv_bytes"] - windowed) * dense
        sparse_bytes = run.arm["device_kv_bytes"] - windowed - dense_bytes
        index = _number(run.arm, "index_bytes") if indexed else 0.0
        return float(100 * (sparse_bytes + index) / whole) if whole else None


@dataclass(frozen=True)
class Site:
    """The runs that a site is made of.

    Attributes
    ----------
    runs
        as collected.
    folders
        that they are from, in words.
    submitted
        what others gave: the runs that are theirs, and what was found wrong.
    """

    runs: Runs
    folders: str
    submitted: Sequence[Submission] = ()

    @cached_property
    def theirs(self) -> dict[str, Submission]:
        """The submission of each run that is not the board's own, by the run's folder."""
        return {
            str(run.arm["path"]): submission
            for submission in self.submitted
            for run in submission.rows
        }

    def without_submissions(self, runs: Runs) -> Runs:
        """Those of these runs that are the board's own.

        Claims, pictures and papers are held against no others.
        """
        board_runs = (run for run in runs if str(run.arm["path"]) not in self.theirs)
        return runs.only(board_runs) if self.theirs else runs

    @cached_property
    def joined(self) -> Runs:
        """The runs, one for all that differ in their seed alone."""
        return over_seeds(self.runs, self.runs)[0]

    @cached_property
    def judged(self) -> list[Judged]:
        """The papers' claims, with the verdicts by these runs and what kvbench ships."""
        return judged(self.without_submissions(self.runs), [])

    @cached_property
    def tables(self) -> list[ReportTable]:
        """A table of arms for each protocol; timed runs are in none."""
        return summary(self.joined.only(self._untimed), values=VALUES)

    @cached_property
    def rows(self) -> list[Row]:
        """Every arm.

        A task's panels are in order of their number of arms, the arms of a panel by nearness to
        full attention or by score, the best first.
        """
        protocols = [what for _, what in by_protocol(self._untimed)]
        plain = [
            row
            for table, protocol in zip(self.tables, protocols, strict=True)
            for row in self._rows_of(table, protocol)
        ]
        named = []
        for group in grouped(
            _in_panels(plain), lambda row: (row.panel, row.method, row.budget)
        ).values():
            shared = set.intersection(*(set(row.words) for row in group))
            for row in group:
                of = self.theirs.get(str(row.run.arm["path"]))
                words = [word for word in row.words if word not in shared]
                variant = ", ".join([*words, *([of.by] if of else [])])
                named.append(row._replace(variant=variant, of=of))
        size = Counter(row.panel for row in named)
        return sorted(named, key=lambda row: (row.task, -size[row.panel], row.panel, row.rank))

    def _rows_of(self, table: ReportTable, protocol: str) -> Iterator[Row]:
        """The rows of a table, whose panel is a task, a model and a protocol."""
        run_of = {run.folders: run for run in self.joined}
        for (place, _), cell in table.cells.items():
            labels = dict(zip(table.axes, table.rows[place], strict=True))
            words = [f"{last_word(key)}={labels[key]}" for key in labels if key not in AXES]
            run = run_of[cell.run]
            yield Row(
                run=run,
                model=labels["model"],
                task=labels["task"],
                method=labels["method"],
                budget=labels["budget"],
                panel=", ".join(filter(None, [labels["task"], labels["model"], protocol])),
                words=tuple(words),
                cell=cell,
                table=table,
                full=run.full(),
                unranked=run.ranks_none,
            )

    @cached_property
    def by_panel(self) -> dict[str, list[Row]]:
        """The rows of each panel."""
        return by_panel(self.rows)

    @cached_property
    def facts(self) -> dict[str, list[str]]:
        """What is to be known of the samples of each panel, and of how they ran."""
        return {panel: list(_facts(rows)) for panel, rows in self.by_panel.items()}

    def rivals(self, row: Row) -> list[Row]:
        """The arms of other sparse methods in its panel and budget, the best first.

        Full attention has none.
        """
        return [
            other
            for other in self.by_panel[row.panel]
            if other.budget == row.budget
            and len({other.method, row.method, YARDSTICK}) == 3
            and other.is_choice
        ]

    @cached_property
    def by_length(self) -> list[Row]:
        """The rows at each length of prompts.

        An arm with prompts of several lengths has a row for each, in a panel of that length.
        """
        return self._rows_at(by_length(self.runs))

    @cached_property
    def alike(self) -> list[Row]:
        """As `by_length`, of the samples alone that all arms of a panel share."""
        parts = by_length(self.runs).items()
        joined = {length: over_seeds(part, part)[0] for length, part in parts}
        return self._rows_at({length: on_shared_samples(part) for length, part in joined.items()})

    def _rows_at(self, parts: Mapping[int | None, Runs]) -> list[Row]:
        named, length_rows = {row.run.folders: row for row in self.rows}, []
        for length, part in parts.items():
            for row in Site(part, self.folders).rows:
                if (whole := named.get(row.run.folders)) is None:
                    continue  # has probes, which stand in the line of the run without
                panel = whole.panel if length is None else f"{whole.panel}, {length} tokens"
                length_rows.append(
                    row._replace(
                        panel=panel,
                        variant=whole.variant,
                        length=length,
                        whole=whole.panel,
                        of=whole.of,
                    )
                )
        panels = list(dict.fromkeys(row.panel for row in self.rows))
        place = {row.run.folders: panels.index(row.panel) for row in self.rows}
        return sorted(length_rows, key=lambda row: (place[row.run.folders], row.length or 0))

    @cached_property
    def table(self) -> Table:
        """The numbers of all arms."""
        return Table(self.joined)

    def ahead(self, first: Row, other: Row) -> Estimate | None:
        """How far an arm of `rows` is ahead of another of its panel, paired by sample.

        In nats of KL where both have some, else in points of score; None where there are too few
        samples to test anything.
        """
        arms = first.run, other.run
        if min(len(run.scores.ids) for run in arms) < FEWEST:
            return None
        kl = first.has_kl and other.has_kl
        quantity = "kl_mean" if kl else "score"
        lead = self.table.lead(first.run.index, other.run.index, quantity)
        return lead and (lead.estimate.turned if kl else lead.estimate)

    def place(self, row: Row) -> str:
        """Its place among sparse methods of its budget, such as "1 to 3 of 9".

        From the best to the worst that paired tests leave it; "" where too few samples rank it
        among any.
        """
        rivals = self.rivals(row) if row.is_choice else []
        leads = [lead for other in rivals if (lead := self.ahead(row, other)) is not None]
        if not any(ranks(lead.n, lead.low, lead.high) for lead in leads):
            return ""
        sure = [lead.mean > 0 for lead in leads if lead.differs]
        best, worst = 1 + len(sure) - sum(sure), 1 + len(rivals) - sum(sure)
        places = " to ".join(map(str, dict.fromkeys((best, worst))))
        return f"{places} of {1 + len(rivals)}"

    @cached_property
    def methods(self) -> list[str]:
        """The methods that ran and all that kvbench ships, in the order in which they are drawn."""
        order = {name: place for place, name in enumerate(STYLES)}
        return sorted(
            {*choices("method"), *self.ran}, key=lambda name: (order.get(name, len(order)), name)
        )

    @cached_property
    def ran(self) -> set[str]:
        """The methods that have an arm."""
        return {row.method for row in self.rows}

    @property
    def timed(self) -> int:
        """The number of timed runs, of which no page is made."""
        return len(self.joined.arms) - len(self._untimed)

    @cached_property
    def _untimed(self) -> list[Run]:
        return [run for run in self.joined if not run.is_timed]


def _in_panels(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, with panels whose names say in what their samples differ from others."""
    for panel_rows in grouped(rows, lambda row: row.panel).values():
        settings = [dict(word.split("=", 1) for word in row.run.kind[:-1]) for row in panel_rows]
        keys = fewest_keys(settings)
        named = [
            (row, tuple(f"{last_word(key)}={setting[key]}" for key in keys if key in setting))
            for row, setting in zip(panel_rows, settings, strict=True)
        ]
        for names, same_samples in grouped(named, lambda pair: pair[1]).items():
            # data, in which no setting differs
            several = len({row.run.kind[-1] for row, _ in same_samples}) > 1
            for row, _ in same_samples:
                data = [f"data {row.run.kind[-1]}"] if several else []
                yield row._replace(panel=", ".join([row.panel, *names, *data]))


def by_panel(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each panel.

    Panels in which the question comes after are the first, then scores, then those of many samples
    and arms.
    """

    def order(panel_rows: list[Row]) -> tuple[Any, ...]:
        first = panel_rows[0]
        enough = min(int(row.cell.numbers["n"]) for row in panel_rows) >= FEWEST
        return first.has_kl, order_of(first.question), not enough, -len(panel_rows)

    panels = grouped(rows, lambda row: row.panel)
    return dict(sorted(panels.items(), key=lambda item: order(item[1])))


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    settings = rows[0].run.settings
    arms = [row.run.arm for row in rows]
    counts = sorted({int(arm["n"]) for arm in arms})
    lengths = settings.get("task.lengths")
    several = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    of = "" if missing(lengths) else f" of {words_of(str(lengths))} tokens"
    yield f"{several} samples{of}"
    yield str(settings["dtype"])
    if words := weights_origin(str(settings["model.revision"])):
        yield f"weights {words}"
    dense = {row.run.settings["dense_layers"] for row in rows} - {"[]"}
    if len(dense) == 1:
        yield f"layers {words_of(min(dense))} dense"
    if (share := rows[0].run.acted_share) < 1:
        yield f"{share:.0%} of the layers have full attention, and with it a budget"
    if settings["batch"] > 1:
        yield f"up to {settings['batch']} together, whose bytes and times these are"
    if counts[-1] < FEWEST:
        yield f"too few to rank methods, which takes {FEWEST} or more"
    marks = [row.cell.marks.get(name, "") for row in rows for name in ("score", "kl_mean")]
    if any("r" in letters for letters in marks):
        yield "beside a number stands the range of so few"
    for why in dict.fromkeys(row.unranked for row in rows if row.unranked):
        yield f"{why}, so no method is named best and none has a place"


def _number(arm: Mapping[str, Any], name: str) -> float:
    """A number of an audit, 0 where it says nothing."""
    return 0.0 if missing(arm[name]) else float(arm[name])
