"""`kvbench score RUN [RUN ...]`: scores anew from stored outputs, without a model and without
torch.

A RUN is a run folder or any folder above some. Each one's task is built from its own run.yaml, and
every record without an error is scored by the code that is there now; failed ones stay at 0.
Nothing is changed without `--write`. With `--predictions` folders of other projects' predictions
are scored instead. Exit codes: 0 done, 2 something could not be scored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from kvbench.cli.report import user_folders
from kvbench.cli.words import refuse_twice
from kvbench.config import (
    ConfigError,
    TargetConfig,
    check_rules,
    check_types,
    check_valid,
    first_line,
    locate,
    nearest,
    shipped,
    show,
)
from kvbench.runs.archive import rounded
from kvbench.runs.folder import (
    append_records,
    check_format,
    lost_samples,
    run_lock,
    stored_state,
    write_whole,
    writing,
)
from kvbench.runs.plausible import refuse_impossible
from kvbench.runs.quantities import PASSED
from kvbench.runs.stored import (
    DAMAGED,
    Record,
    ResultsError,
    printable,
    read_run_yaml,
    read_samples,
    refuse_archive,
    runs_in,
    stored_task,
    using,
    what_of,
)
from kvbench.runs.summary import summarise
from kvbench.runs.terminal import Console
from kvbench.runs.versions import version_of
from kvbench.tasks import Sample, Task, predictions, task_of
from kvbench.tasks.known import add_config_dir, refuse_unknown

USAGE = """kvbench score RUN [RUN ...] [task.key=value ...] [--write] [--config-dir FOLDER] [--json]
       kvbench score --predictions longbench|ruler DIR [DIR ...] [--json]"""

# Of a summary, what follows from scores.
SCORES = (
    "score",
    "stderr",
    "score_ok",
    "scores",
    "n",
    "failed",
    "groups",
    "macro",
    "prompts",
    *PASSED,
)


class NoAnswers(ResultsError):
    """A run's samples are stored without what their outputs are held against."""


@dataclass(frozen=True)
class Rescored:
    """A run's records, scored anew.

    Attributes
    ----------
    folder
        the run's.
    metric
        the main score's name.
    before
        summary of the records as stored; empty where none holds the main score.
    after
        summary of the records with their new scores.
    changed
        the new records that differ from the stored ones.
    end
        size in bytes of the stored samples up to the last whole line.
    """

    folder: Path
    metric: str
    before: dict[str, Any]
    after: dict[str, Any]
    changed: list[Record]
    end: int

    def as_json(self, written: bool) -> dict[str, Any]:
        """What `--json` prints of a run; `before` is null where the main score was not stored."""
        return {
            "run": str(self.folder),
            "metric": self.metric,
            "before": _only_scores(self.before) or None,
            "after": _only_scores(self.after),
            "changed": len(self.changed),
            "written": written,
        }

    def table(self) -> Table:
        """Scores before and after, 0-100: groups, their mean, all samples, the other scores."""
        drawn = Table(
            title=printable(" / ".join(self.folder.resolve().parts[-4:])), title_justify="left"
        )
        for heading in (self.metric, "samples", "failed", "before", "now"):
            drawn.add_column(heading, justify="left" if heading == self.metric else "right")
        before, after = self.before, self.after
        for name, group in after.get("groups", {}).items():
            row = _pair(before.get("groups", {}).get(name), group)
            drawn.add_row(printable(name), str(group["n"]), str(group["failed"]), *row)
        if "macro" in after:
            drawn.add_row(
                f"mean of {len(after['groups'])} groups",
                "",
                "",
                *_pair(before.get("macro"), after["macro"]),
            )
        drawn.add_section()
        drawn.add_row("all samples", str(after["n"]), str(after["failed"]), *_pair(before, after))
        for name, score in after["scores"].items():
            if name != self.metric:
                old = before.get("scores", {}).get(name)
                drawn.add_row(printable(name), "", "", *_pair({"score": old}, {"score": score}))
        return drawn

    def outcome(self, written: bool) -> str:
        """What became of a run, in a line."""
        count = len(self.changed)
        if not count:
            return f"{self.folder}: no score changed, {self.metric} {_with_error(self.after)}"
        changed = f"{count} of {self.after['n']} scores changed"
        if not written:
            return f"{self.folder}: {changed}; nothing is written"
        finished = (
            "" if (self.folder / "summary.json").exists() else "; unfinished, so without a summary"
        )
        return f"{self.folder}: {changed} and written{finished}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 130 after Ctrl-C."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print(
            "kvbench score: stopped; what was written is whole, and the same command does the rest",
            file=sys.stderr,
        )
        return 130


def _main(arguments: Sequence[str] | None) -> int:
    flags = _parser().parse_intermixed_args(arguments)
    if flags.predictions:
        return _predicted(flags)
    changes = [word for word in flags.words if word.startswith("task.") and "=" in word]
    try:
        refuse_twice(changes)
        options = options_of(changes)
        folders = list(runs_in(_named([Path(word) for word in flags.words if word not in changes])))
        for folder in folders if flags.write else ():
            refuse_archive(folder)
    except (ConfigError, ResultsError) as error:
        return _refused(error)
    console = Console(highlight=False)
    entries, compact = [], []
    unchanged, code = [], 0
    for folder in folders:
        try:
            make = rewrite if flags.write else rescore
            rescored = make(folder, options, flags.config_dir)
        except NoAnswers:
            compact.append(folder)
            continue
        except (ConfigError, ResultsError) as error:
            code = _refused(error, folder)
            continue
        if flags.json:
            entries.append(rescored.as_json(flags.write))
        elif rescored.changed:
            console.print(rescored.table())
            console.print(printable(rescored.outcome(flags.write)), soft_wrap=True)
        else:
            unchanged.append(rescored)
    if unchanged:
        line = (
            f"no score of {len(unchanged)} runs changed"
            if len(unchanged) > 1
            else unchanged[0].outcome(flags.write)
        )
        console.print(printable(line), soft_wrap=True)
    if flags.json:
        print(json.dumps(entries, indent=2, allow_nan=False))
    if compact:
        more = f", and so are {len(compact) - 1} others" if len(compact) > 1 else ""
        return _refused(
            ResultsError(
                f"{compact[0]} is stored without answers, as compact_runs.py leaves it{more}"
            )
        )
    return code


def _named(paths: Sequence[Path]) -> list[Path]:
    """The folders to look for runs in; what kvbench ships is scored where it is named itself, and
    else left out.

    Raises
    ------
    ResultsError
        there is nothing else.
    """
    named: list[Path] = []
    for path in paths:
        folders, shipped = user_folders(path, "score")
        named += folders
        if shipped:
            print(
                f"kvbench score: {path}: without {shipped} archives that kvbench ships; name one",
                file=sys.stderr,
            )
    return named


def _predicted(flags: argparse.Namespace) -> int:
    """Score folders of other projects' predictions; returns the exit code."""
    if flags.write:
        return _refused(
            ConfigError("--write: not with --predictions, whose folders are left as they are")
        )
    # Names may hold brackets; a file takes the whole width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    entries, code = [], 0
    for word in flags.words:
        try:
            predicted = predictions.read(flags.predictions, Path(word))
        except ConfigError as error:
            code = _refused(error)
            continue
        if flags.json:
            entries.append(predictions_as_json(predicted))
        else:
            console.print(predictions_table(predicted))
            for line in remarks(predicted):
                console.print(line, soft_wrap=True)
    if flags.json:
        print(json.dumps(entries, indent=2, allow_nan=False))
    return code


def _parser() -> argparse.ArgumentParser:
    description = (
        "Scores anew from stored outputs, without a model. Nothing is changed without --write."
    )
    parser = argparse.ArgumentParser("kvbench score", USAGE, description)
    parser.add_argument(
        "words", nargs="+", metavar="RUN", help="a run folder, or a folder above some"
    )
    formats = list(predictions.BENCHMARKS)
    parser.add_argument(
        "--predictions", choices=formats, help="each RUN is a folder of its scripts' <subset>.jsonl"
    )
    add_config_dir(parser)
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the new scores, in samples.jsonl and summary.json",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, scores before and after, and no tables"
    )
    return parser


def _refused(error: Exception, run: Path | None = None) -> int:
    """Print why something could not be scored, and which run it was."""
    message = str(error) if run is None or str(run) in str(error) else f"{run}: {error}"
    print(f"kvbench score: {printable(message)}", file=sys.stderr)
    return 2


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """The task options that `task.key=value` words name.

    Raises
    ------
    ConfigError
        a word that is no such thing.
    """
    try:
        node: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{' '.join(words)}: {first_line(error)}") from error
    options: dict[str, Any] = node.get("task", {})
    return options


def rescore(
    folder: Path, options: Mapping[str, Any] | None = None, config_dir: Path | None = None
) -> Rescored:
    """Score the stored outputs of a run, which may go on meanwhile, and change nothing.

    Parameters
    ----------
    folder
        the run's.
    options
        of its task, where they shall differ from the run's own, and what scoring is allowed to do.
    config_dir
        a folder with the user's own tasks.

    Raises
    ------
    ConfigError
        the task is not known, cannot be built, has no such options, or lacks a permission.
    ResultsError
        what is stored is damaged, of another format, or without answers.
    """
    with using(folder):
        check_format(folder)
        config, choices_folder = stored_task(folder)
        refuse_unknown(folder, config, choices_folder, config_dir)
        return _rescored(folder, _task_of(folder, config, options or {}), _version(config))


def _rescored(folder: Path, task: Task, version: int | str) -> Rescored:
    records, end = read_samples(folder / "samples.jsonl")
    if lost := lost_samples(folder, len(records)):
        raise ResultsError(f"{folder}: {lost}")
    refuse_impossible(folder, read_run_yaml(folder), records.values())
    stored = list(records.values())
    mark = {"task": version, "notes": dict(task.notes)}
    scored = [_scored(folder, record, task, mark) for record in stored]
    before = summarise(stored, task.metric)
    has_metric = any(
        task.metric in (record.get("scores") or {}) for record in stored if not record.get("error")
    )
    after = summarise(scored, task.metric)
    if again := sum("rescored" in record for record in scored):
        after["rescored"] = again
    changed = [new for old, new in zip(stored, scored, strict=True) if new is not old]
    return Rescored(folder, task.metric, before if has_metric else {}, after, changed, end)


def rewrite(
    folder: Path, options: Mapping[str, Any] | None = None, config_dir: Path | None = None
) -> Rescored:
    """Score the stored outputs of a run and keep the new scores.

    Changed records are appended to samples.jsonl, where the newest line of an id wins, so the old
    ones stay there too. summary.json is made anew if the run was finished; of an unfinished one the
    run itself makes it.

    Parameters
    ----------
    folder
        the run's.
    options
        as `rescore`, of those that the run was made with.
    config_dir
        as `rescore`.

    Raises
    ------
    ConfigError, ResultsError
        as `rescore`; other options than the run's; another process holds the folder; it cannot be
        written.
    """
    with run_lock(folder):
        with using(folder):
            check_format(folder)
            stored, _ = stored_task(folder)
        if other := next(
            (key for key, value in (options or {}).items() if stored.get(key) != value), ""
        ):
            option = f"task.{other}={show((options or {})[other])}"
            raise ConfigError(
                f"--write: not with {option}, {folder} was made with other options; leave one out"
            )
        rescored = rescore(folder, options, config_dir)
        finished = (folder / "summary.json").exists() or stored_state(folder) == "finished"
        with writing(folder):
            if rescored.changed:
                # A summary is there only while it covers every line.
                (folder / "summary.json").unlink(missing_ok=True)
                append_records(folder / "samples.jsonl", rescored.changed, rescored.end)
            if finished:
                text = json.dumps(rescored.after, indent=2, allow_nan=False) + "\n"
                write_whole(folder / "summary.json", text, durable=True)
    return rescored


def _task_of(folder: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
    """The task of a stored run, with these options in place of its own.

    Raises
    ------
    ConfigError
        as `rescore`.
    """
    stored = TargetConfig.of(config)
    for key, value in options.items():
        if key not in stored.options:
            raise ConfigError(
                f"{folder}: task.{key}={show(value)}: no such option of"
                f" {stored.name or stored.target}; {nearest(key, stored.options)}"
            )
    check_types("task", options, stored.options)
    check_rules("task", config)
    check_valid("task", options, stored.valid or {})
    for key in getattr(locate(stored.target), "permissions", ()):
        if stored.options.get(key) and key not in options:
            setting = f"task.{key}={show(stored.options[key])}"
            raise ConfigError(
                f"{folder}: config.{setting}: a file is no permission; where nothing is secret,"
                f" give {setting} on the command line"
            )
    return task_of(replace(stored, options={**stored.options, **options}))


def _scored(folder: Path, record: Record, task: Task, mark: Mapping[str, Any]) -> Record:
    """The record with its scores of now; itself where they are the same to the digits that it has,
    or it failed.
    """
    if record.get("error"):
        return record
    key = record["id"]
    answers, output = record.get("answers"), record.get("output")
    if answers is None:
        raise NoAnswers(f"{folder}: {key} is stored without its answers")
    if output is None:
        raise ResultsError(
            f"{folder / 'samples.jsonl'}: the newest line of {key} is damaged: no output"
        )
    sample_id, group = record.get("sample") or key, record.get("group") or ""
    sample = Sample(sample_id, "", tuple(answers), 0, group=group, meta=record.get("meta") or {})
    try:
        scores = task.score(sample, output)
    except DAMAGED as error:
        raise ResultsError(
            f"{folder}: {printable(key)} cannot be scored as {task.name} ({what_of(error)}); was it"
            " another one?"
        ) from error
    same = record.get("scores") in (scores, rounded(scores))
    return record if same else {**record, "scores": scores, "rescored": mark}


def _version(config: Mapping[str, Any]) -> int | str:
    """That of the task that scores now, whatever a stored run had."""
    return version_of(
        TargetConfig.of({**config, **(shipped("task", str(config.get("name"))) or {})})
    )


def _only_scores(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in SCORES if key in summary}


def predictions_table(predicted: predictions.Predictions) -> Table:
    """Scores of predictions, each 0-100: every subset by every metric it has, and the plain mean
    over subsets.
    """
    bins = [
        name
        for name in predictions.BINS
        if any(name in subset.by_length for subset in predicted.subsets)
    ]
    drawn = Table(title=str(predicted.folder), title_justify="left")
    for heading in ("subset", "metric"):
        drawn.add_column(heading, overflow="fold")
    for heading in ("samples", "empty", "score", *bins):
        drawn.add_column(heading, justify="right")
    for subset in predicted.subsets:
        summary = _summary(subset)
        lengths = [_with_error({"score": subset.by_length.get(name)}) for name in bins]
        main, *others = subset.metrics
        drawn.add_row(
            subset.name, main, str(summary["n"]), str(subset.empty), _with_error(summary), *lengths
        )
        for name in others:
            drawn.add_row("", name, "", "", _with_error({"score": summary["scores"][name]}))
    for name in predicted.others:
        drawn.add_row(f"{name}, not scored", "-", "-", "-", "-")
    drawn.add_section()
    for name, mean in predicted.means().items():
        metric = "" if name == "score" else f"with {name}"
        drawn.add_row(
            f"mean of {len(predicted.subsets)} subsets",
            metric,
            "",
            "",
            _with_error({"score": mean}),
        )
    return drawn


def remarks(predicted: predictions.Predictions) -> list[str]:
    """What a reader of the table must know: files that are no subset, and subsets that are missing
    from the mean.
    """
    lines = []
    if predicted.others:
        files = ", ".join(f"{name}.jsonl" for name in predicted.others)
        lines.append(
            f"{predicted.folder}: not scored: {files}; none of {predicted.benchmark.title}"
        )
    if predicted.missing:
        lines.append(
            f"{predicted.folder}: of {predicted.benchmark.title} without"
            f" {', '.join(predicted.missing)}"
        )
    return lines


def predictions_as_json(predicted: predictions.Predictions) -> dict[str, Any]:
    """What `--json` prints of a folder of predictions."""
    return {
        "predictions": str(predicted.folder),
        "subsets": {
            subset.name: {
                **_only_scores(_summary(subset)),
                "empty": subset.empty,
                "by_length": subset.by_length,
            }
            for subset in predicted.subsets
        },
        "means": predicted.means(),
        "missing": predicted.missing,
        "not_scored": predicted.others,
    }


def _summary(subset: predictions.ScoredSubset) -> dict[str, Any]:
    return summarise([{"scores": scores} for scores in subset.scores], "score")


def _pair(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> tuple[str, str]:
    return _with_error(before or {}), _with_error(after)


def _with_error(summary: Mapping[str, Any]) -> str:
    """A score and its standard error, or a dash."""
    score, error = summary.get("score"), summary.get("stderr")
    if score is None:
        return "-"
    return f"{score:.2f}" + (f" ± {error:.2f}" if error is not None else "")
