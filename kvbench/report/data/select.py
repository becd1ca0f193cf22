"""Words of the command line become runs: which are chosen, and which share a row or a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvbench.config import ConfigError, nearest, show
from kvbench.report import LISTING
from kvbench.report.data.run import NOT_OF_FULL, OF_ARMS, PROTOCOL, YARDSTICK, Run, Runs
from kvbench.runs.quantities import NUMBERS

PROTOCOL_KEYS = tuple(f"protocol.{name}" for name in PROTOCOL)


def select(runs: Runs, where: Sequence[str] = ()) -> list[Run]:
    """The runs that match all of these words.

    Such as "method=quest", "budget=64,128" or "task.lengths=[1024]".

    Raises
    ------
    ConfigError
        no such key, or no run has the value.
    """
    chosen = list(runs)
    texts: dict[str, str] = {}
    for word in where:
        name, *values = word.split("=", 1)
        if not values:
            raise ConfigError(f"--where {word}: expected key=value, such as method=quest")
        key, text = key_of(runs, name), values[0]
        if (first := texts.setdefault(key, text)) != text:
            raise ConfigError(
                f"--where {name}={first} --where {name}={text}: one key with two values; several"
                f" are written {name}={first},{text}"
            )
        requested = {text} if text.startswith("[") else set(text.split(","))
        # A share of the prompt is shown as 10 % and given as 0.1.
        labels_by_run = {run: {run.label(key), show(run.settings.get(key))} for run in chosen}
        if unknown := sorted(
            requested - {label for labels in labels_by_run.values() for label in labels}
        ):
            there = set(labels_of(chosen, key))
            raise ConfigError(f"--where {name}={unknown[0]}: no run has it; {nearest(text, there)}")
        chosen = [run for run in chosen if labels_by_run[run] & requested]
    return chosen


# -- words -----------------------------------------------------------------------------------------


def key_of(runs: Runs, name: str) -> str:
    """The setting that a word means: itself, or the one key that ends with it.

    Raises
    ------
    ConfigError
        no such key, or several.
    """
    keys = [*runs.settings.columns, *OF_ARMS, "group"]
    ending = Counter(map(last_word, keys))
    words = [last_word(key) if ending[last_word(key)] == 1 else key for key in keys]
    return _match(name, keys, words, f"{name}: no such key of a run")


def values_of(runs: Runs, name: str) -> list[str]:
    """The recorded numbers that a word means.

    "fidelity" means all of its own; another word itself, or a number that is not listed and ends
    with it. An error is not one of all where it stands beside its number; beside KL's stands an
    interval.

    Raises
    ------
    ConfigError
        no such number, or several.
    """
    if name == "fidelity":
        columns = [column for column, quantity in NUMBERS.items() if quantity.part == name]
        return [
            column
            for column in columns
            if column == "kl_mean_error" or not column.endswith("_error")
        ]
    unlisted = [column for column in runs.arms.columns if "." in column]
    all_columns = [*NUMBERS, *unlisted]
    return [_match(name, all_columns, all_columns, f"--values {name}: no such value")]


def last_word(key: str) -> str:
    """A setting's name without its section."""
    return key.rpartition(".")[2]


def _match(name: str, valid_names: Sequence[str], words: Iterable[str], unknown: str) -> str:
    """The one of these that a word means; of an unknown word the nearest of `words`."""
    if name in valid_names:
        return name
    ending = [key for key in valid_names if key.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(f"{name}: {' or '.join(ending)}?")
    raise ConfigError(f"{unknown}; {nearest(name, words, LISTING)}")


# -- settings as labels ----------------------------------------------------------------------------


def labels_of(chosen: Iterable[Run], key: str) -> list[str]:
    """All values of a setting among these runs, in the order of a table."""
    return sorted({run.label(key) for run in chosen}, key=order_of)


def order_of(label: str) -> tuple[bool, bool, float, str]:
    """What labels are sorted by: full attention first, then nothing, numbers by size, words."""
    try:
        number = float(label.removesuffix(" %")) / (100 if label.endswith("%") else 1)
    except ValueError:
        return (label != YARDSTICK, label != "-", float("inf"), label)
    return (True, True, number, label)


def fewest_keys(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest keys that show all differences of these settings.

    The number of samples is the first to be left out.
    """

    def count_distinct(keys: Sequence[str]) -> int:
        return len({tuple(arm.get(key) for key in keys) for arm in settings})

    keys = [
        key
        for key in dict.fromkeys(key for arm in settings for key in arm)
        if count_distinct([key]) > 1
    ]
    for key in sorted(keys, key=lambda key: key != "task.samples"):
        rest = [other for other in keys if other != key]
        keys = rest if count_distinct(rest) == count_distinct(keys) else keys
    return keys


# -- runs with the same labels ---------------------------------------------------------------------


def by_labels(chosen: Iterable[Run], axes: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """The runs of each row and column of a table, groups aside."""
    cells: dict[tuple[str, ...], list[Run]] = {}
    for run in chosen:
        cells.setdefault(tuple(run.label(key) for key in axes if key != "group"), []).append(run)
    return cells


def scored(cell_runs: Sequence[Run]) -> list[Run]:
    """The runs of a cell whose scores and times count.

    A run with probes counts only where there is no other.
    """
    return [run for run in cell_runs if not run.arm["probe_every"]] or list(cell_runs)


def probed(cell_runs: Sequence[Run]) -> list[Run]:
    """Of runs in one cell those whose probes count."""
    return [run for run in cell_runs if run.arm["probe_every"]]


def differing_keys(cells: Iterable[Sequence[Run]]) -> list[str]:
    """The settings in which runs of one cell differ, in the order of the settings.

    All that decoded together began from a shared prefill: only the others differ in that.
    """
    differs_by_key: dict[str, bool] = {}
    for cell_runs in cells:
        for rivals in (scored(cell_runs), probed(cell_runs)):
            for key in rivals[0].settings if rivals else ():
                compared = [
                    run for run in rivals if key != "shared_prefill" or not run.shares_decode
                ]
                differs_by_key[key] = (
                    differs_by_key.get(key, False) or len({run.label(key) for run in compared}) > 1
                )
    return [key for key, differs in differs_by_key.items() if differs]


def refuse_several(cell_runs: Sequence[Run], where: str, advice: str = "") -> None:
    """Refuse runs that count alike in one cell.

    Raises
    ------
    ConfigError
        says in what they differ, and with which --where to choose.
    """
    if keys := differing_keys([cell_runs]):
        difference = "; ".join(f"{key}={' | '.join(labels_of(cell_runs, key))}" for key in keys)
        first = labels_of(cell_runs, keys[0])[0]
        raise ConfigError(
            f"{where}: several runs, which differ in {difference}; {advice}choose with --where"
            f" {keys[0]}={first}"
        )


# -- protocols -------------------------------------------------------------------------------------


def by_protocol(chosen: Iterable[Run]) -> list[tuple[list[Run], str]]:
    """The runs of each protocol, and in what it differs from the others ("" where there is one)."""
    kinds = by_labels(chosen, PROTOCOL_KEYS)
    differing = [
        index for index in range(len(PROTOCOL_KEYS)) if len({kind[index] for kind in kinds}) > 1
    ]
    return [
        (members, ", ".join(f"{PROTOCOL_KEYS[index]}={kind[index]}" for index in differing))
        for kind, members in kinds.items()
    ]


def marks_of_mixed(chosen: Iterable[Run], axes: Sequence[str], allowed: bool) -> dict[Run, str]:
    """The mark of each run under another protocol than most of these.

    Raises
    ------
    ConfigError
        there are such runs, and they are not allowed.
    """
    kinds = {}
    for run in chosen:
        free = NOT_OF_FULL if run.arm["method"] == YARDSTICK else set()
        kinds[run] = {
            key: run.label(key) for key in PROTOCOL_KEYS if key not in axes and key not in free
        }
    counts_by_key = {
        key: Counter(kind[key] for kind in kinds.values() if key in kind) for key in PROTOCOL_KEYS
    }
    differing = {key: counts for key, counts in counts_by_key.items() if len(counts) > 1}
    if not differing:
        return {}
    if not allowed:
        key, counts = next(iter(differing.items()))
        counts_text = ", ".join(f"{value}: {count} runs" for value, count in counts.most_common())
        raise ConfigError(
            f"{key}: {counts_text}; one table mixes no protocols: choose with --where"
            f" {key}={counts.most_common(1)[0][0]}, make it a row or column, or mark them with"
            " --allow-mixed"
        )
    usual = {key: counts.most_common(1)[0][0] for key, counts in differing.items()}
    return {
        run: "m"
        for run, kind in kinds.items()
        if any(kind.get(key, usual[key]) != usual[key] for key in usual)
    }


def marks_of_decoding(chosen: Sequence[Run], axes: Sequence[str] = ()) -> dict[Run, str]:
    """The marks of runs that decoded together where others decoded alone.

    There are none if an axis of the table says so.
    """
    shared = [run for run in chosen if run.shares_decode]
    return dict.fromkeys(shared if len(shared) < len(chosen) and "decode" not in axes else (), "p")


def same_decode_mode(candidates: Sequence[Run]) -> list[Run]:
    """The runs that decoded in one way, where only one way can count.

    Alone, unless the others have more samples.
    """
    kinds = [[run for run in candidates if run.shares_decode == shared] for shared in (False, True)]
    return max(kinds, key=lambda members: sum(run.arm["n"] for run in members))
