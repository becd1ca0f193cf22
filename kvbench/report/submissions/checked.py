"""Submissions held against a board: which rows each gives, what it repeats, and by what it fails.

A submission fails as a whole: who changed one run may have changed others. Its files are read in
memory as data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.report.data.frame import collect, gathered
from kvbench.report.data.run import Run, Runs
from kvbench.report.submissions.beside import BOARD_CHECKS, Board, arm_of, code_of, main_numbers
from kvbench.report.submissions.manifest import Manifest, read
from kvbench.report.submissions.whole import ALONE, faults, named, times_of
from kvbench.runs.archive import SUFFIX
from kvbench.runs.stored import DAMAGED, ResultsError, contents, printable, what_of

CHECKS = {"files": "those of the manifest, by SHA-256, in a plain archive", **ALONE, **BOARD_CHECKS}
NOBODY = Manifest("", "", "")


@dataclass(eq=False)
class Submission:
    """A submission as it was found.

    Attributes
    ----------
    name
        of its file.
    manifest
        what it says of itself; of a damaged one nothing.
    reasons
        why it gives no rows; [] for one that does, or only repeats what is there.
    rows
        the runs that stand on the board.
    repeats
        what it repeats of the board, or of an earlier submission, with both numbers.
    code
        whose code each row's run says that it ran.
    unread
        rows without the outputs of their samples: nobody can score these anew.
    machines
        that its times are of.
    """

    name: str
    manifest: Manifest = NOBODY
    reasons: list[str] = field(default_factory=list)
    rows: list[Run] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    unread: list[Run] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)

    @property
    def taken_on_trust(self) -> str:
        """Which scores no check can make anew, in words; "" for none."""
        if not self.unread:
            return ""
        return (
            f"scores of {len(self.unread)} rows as {self.manifest.who} gives them: no outputs are"
            " packed to check"
        )

    def take(self, runs: Runs, board: Board, owners: Mapping[str, Submission]) -> None:
        """Hold each run against the board. There are rows if none of them fails.

        Parameters
        ----------
        owners
            the submission that was the first to have a method, by its name.
        """
        self.reasons += [f"{path.name}: {why}" for path, why in runs.skipped]
        self.machines = sorted({printable(str(run.arm["device_name"])) for run in runs})
        self.reasons += _copied(runs)
        for run in runs:
            reasons = faults(run) or board.faults(run, runs)
            reasons = [*reasons, *self._name_faults(run, owners)]
            self.reasons += [f"{named(run)}: {reason}" for reason in reasons]
        if self.reasons:
            return
        rows, repeats = list[Run](), list[str]()
        for run in runs:
            if other := board.arms.get(arm_of(run)) or _first(run, rows):
                copy = ", and its times: a copy" if board.is_copy(run) else ""
                numbers = f"{other.folder_names[0]}: {main_numbers(run, other)}"
                repeats.append(f"{named(run)} has the arm of {numbers}{copy}")
            else:
                run.arm["submitted"] = True
                rows.append(run)
        self.code = list(map(code_of, rows))
        self.unread = [
            run for run in rows if any(record.get("output") is None for record in run.samples())
        ]
        self.rows, self.repeats = rows, repeats

    def _name_faults(self, run: Run, owners: Mapping[str, Submission]) -> list[str]:
        """Whether a method of one's own has the name of an earlier submission's."""
        method = run.arm["method"]
        owner = owners.get(method)
        if owner is None or owner.manifest.who == self.manifest.who:
            return []
        theirs = next(row for row in owner.rows if row.arm["method"] == method)
        code = code_of(run)
        if not code.startswith("a method of its own") or code_of(theirs) == code:
            return []
        return [f"method {method} is {owner.manifest.who}'s, of other code; name it otherwise"]

    @property
    def by(self) -> str:
        """Whose its rows are, as beside a row."""
        return f"by {self.manifest.who}"


def checked(archives: Sequence[Path], shipped: Runs) -> tuple[list[Submission], Runs]:
    """What these submissions come to beside a board, and the board with their rows.

    Parameters
    ----------
    archives
        in the order in which they came: the first to have an arm has its row.
    shipped
        the board's own runs.
    """
    board, submissions = Board(shipped), list[Submission]()
    owners, names_by_digest = dict[str, Submission](), dict[str, str]()
    for archive in archives:
        submission = Submission(printable(archive.name.removesuffix(SUFFIX)))
        try:
            submission.manifest = read(archive)
            digest = hashlib.sha256(contents(archive)).hexdigest()
            if first := names_by_digest.get(digest):
                raise ResultsError(f"the same file as {first}")
            names_by_digest[digest] = submission.name
            submission.take(collect([archive], unfinished=True), board, owners)
        except (ResultsError, OSError) as error:
            submission.reasons = [printable(str(error))]
        except DAMAGED as error:
            submission.reasons = [f"not as kvbench writes it ({what_of(error)})"]
        board.add(submission.rows)
        owners = {row.arm["method"]: submission for row in submission.rows} | owners
        submissions.append(submission)
    rows = (row for submission in submissions for row in submission.rows)
    return submissions, gathered([*shipped, *rows], shipped.skipped)


def _copied(runs: Runs) -> Iterator[str]:
    """Runs that are copies of another arm's of their submission."""
    first = dict[tuple[float, ...], Run]()
    for run in runs:
        sources = [
            first.setdefault(times, run) for record in run.samples() if (times := times_of(record))
        ]
        if other := next((source for source in sources if arm_of(source) != arm_of(run)), None):
            yield f"{named(run)}: samples have the times of {named(other)}, to the last digit"


def _first(run: Run, rows: Iterable[Run]) -> Run | None:
    """The run of the same arm and seed that its submission has already."""
    return next(
        (row for row in rows if arm_of(row) == arm_of(run) and row.arm["seed"] == run.arm["seed"]),
        None,
    )
