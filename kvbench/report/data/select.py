"""Which runs stand where: words of the command line become settings, labels, and runs that count side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench.config import ConfigError, nearest, show
from kvbench.report.data.evidence import NOT_OF_FULL
from kvbench.report.data.frame import PROTOCOL, YARDSTICK, Runs, missing
from kvbench.runs.quantities import NUMBERS

OF_ARMS = ("weights", "device_name", "metric", "run_id")  # keys that stand in `Runs.arms` and not in its settings
PROTOCOL_KEYS = tuple(f"protocol.{name}" for name in PROTOCOL)


def select(runs: Runs, where: Sequence[str] = ()) -> list[int]:
    """The runs that match all of these words, such as "method=quest", "budget=64,128" or "task.lengths=[1024]".

    Raises:
        ConfigError: no such key, or no run has the value.
    """
    chosen = list(runs.arms.index)
    texts: dict[str, str] = {}
    for word in where:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--where {word}: expected key=value, such as method=quest")
        key = key_of(runs, name)
        if (first := texts.setdefault(key, text)) != text:
            raise ConfigError(
                f"--where {name}={first} --where {name}={text}: one key with two values; several are written "
                f"{name}={first},{text}"
            )
        wanted = {text} if text.startswith("[") else set(text.split(","))
        there = {run: label_of(runs, run, key) for run in chosen}
        # A share of the prompt is shown as 10 % and given as 0.1.
        given = {run: {label, show(runs.setting[run].get(key))} for run, label in there.items()}
        if unknown := sorted(wanted - {label for labels in given.values() for label in labels}):
            raise ConfigError(f"--where {name}={unknown[0]}: no run has it; {nearest(text, set(there.values()))}")
        chosen = [run for run in chosen if given[run] & wanted]
    return chosen


# -- words -------------------------------------------------------------------------------------------------------------


def key_of(runs: Runs, name: str) -> str:
    """The setting that a word means: itself, or the one key that ends with it.

    Raises:
        ConfigError: no such key, or several.
    """
    known = [*runs.settings.columns, *OF_ARMS, "group"]
    return _one_of(name, known, {*known, *(key.rpartition(".")[2] for key in known)}, f"{name}: no such key of a run")


def value_of(runs: Runs, name: str) -> str:
    """The recorded number that a word means: itself, or the one without a line of its own that ends with it.

    Raises:
        ConfigError: no such number, or several.
    """
    unlisted = [column for column in runs.arms.columns if "." in column]
    known = [*NUMBERS, *unlisted]
    return _one_of(name, known, known, f"--values {name}: no such value")


def _one_of(name: str, known: Sequence[str], words: Iterable[str], unknown: str) -> str:
    """The one of these that a word means; of an unknown word the nearest of `words`."""
    if name in known:
        return name
    ending = [key for key in known if key.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(f"{name}: {' or '.join(ending)}?")
    raise ConfigError(f"{unknown}; {nearest(name, words)}")


# -- settings as labels ------------------------------------------------------------------------------------------------


def label_of(runs: Runs, run: int, key: str) -> str:
    """The value of a run's setting as a table shows it."""
    value = runs.arm[run][key] if key in OF_ARMS else runs.setting[run].get(key)
    if missing(value):
        return "-"
    return f"{100 * value:g} %" if key == "budget" and isinstance(value, float) else show(value)


def labels_of(runs: Runs, chosen: Iterable[int], key: str) -> list[str]:
    """All values of a setting among these runs, in the order of a table."""
    return sorted({label_of(runs, run, key) for run in chosen}, key=order_of)


def order_of(label: str) -> tuple[bool, bool, float, str]:
    """What labels are sorted by: full attention first, then nothing, numbers by size, words."""
    try:
        number = float(label.removesuffix(" %")) / (100 if label.endswith("%") else 1)
    except ValueError:
        return (label != YARDSTICK, label != "-", float("inf"), label)
    return (True, True, number, label)


# -- runs with the same labels -----------------------------------------------------------------------------------------


def by_labels(runs: Runs, chosen: Iterable[int], axes: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """The runs of each row and column of a table, groups aside."""
    found: dict[tuple[str, ...], list[int]] = {}
    for run in chosen:
        labels = tuple(label_of(runs, run, key) for key in axes if key != "group")
        found.setdefault(labels, []).append(run)
    return found


def scored(runs: Runs, alike: Sequence[int]) -> list[int]:
    """Of runs in one cell those whose scores and times count: a probe run stands in only where there is no other."""
    return [run for run in alike if not runs.arm[run]["probe_every"]] or list(alike)


def probed(runs: Runs, alike: Sequence[int]) -> list[int]:
    """Of runs in one cell those whose probes count."""
    return [run for run in alike if runs.arm[run]["probe_every"]]


def differing_keys(runs: Runs, cells: Iterable[Sequence[int]]) -> list[str]:
    """The settings that tell runs in one cell from each other, in the order of the settings."""
    found = set()
    for alike in cells:
        for rivals in (scored(runs, alike), probed(runs, alike)):
            if len(rivals) > 1:
                found |= {key for key in runs.settings.columns if len({label_of(runs, run, key) for run in rivals}) > 1}
    return [key for key in runs.settings.columns if key in found]


def refuse_several(runs: Runs, alike: Sequence[int], where: str, advice: str = "") -> None:
    """Refuse runs that count alike in one cell.

    Raises:
        ConfigError: says in what they differ, and with which --where to choose.
    """
    if keys := differing_keys(runs, [alike]):
        difference = "; ".join(f"{key}={' | '.join(labels_of(runs, alike, key))}" for key in keys)
        first = labels_of(runs, alike, keys[0])[0]
        raise ConfigError(
            f"{where}: several runs, which differ in {difference}; {advice}choose with --where {keys[0]}={first}"
        )


# -- protocols ---------------------------------------------------------------------------------------------------------


def by_protocol(runs: Runs, chosen: Sequence[int]) -> list[tuple[list[int], str]]:
    """The runs of each protocol, and what tells it from the others ("" where there is one)."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for run in chosen:
        kinds.setdefault(tuple(label_of(runs, run, key) for key in PROTOCOL_KEYS), []).append(run)
    differing = [index for index in range(len(PROTOCOL_KEYS)) if len({kind[index] for kind in kinds}) > 1]
    return [
        (members, ", ".join(f"{PROTOCOL_KEYS[index]}={kind[index]}" for index in differing))
        for kind, members in kinds.items()
    ]


def marks_of_mixed(runs: Runs, chosen: Sequence[int], axes: Sequence[str], allowed: bool) -> dict[int, str]:
    """The mark of each run under another protocol than most of these.

    Raises:
        ConfigError: there are such runs, and they are not allowed.
    """
    kinds = {}
    for run in chosen:
        free = NOT_OF_FULL if runs.arm[run]["method"] == YARDSTICK else set()
        kinds[run] = {key: label_of(runs, run, key) for key in PROTOCOL_KEYS if key not in axes and key not in free}
    found = {key: Counter(kind[key] for kind in kinds.values() if key in kind) for key in PROTOCOL_KEYS}
    differing = {key: counts for key, counts in found.items() if len(counts) > 1}
    if not differing:
        return {}
    if not allowed:
        key, counts = next(iter(differing.items()))
        kinds_found = ", ".join(f"{value}: {count} runs" for value, count in counts.most_common())
        raise ConfigError(
            f"{key}: {kinds_found}; one table mixes no protocols: choose with "
            f"--where {key}={counts.most_common(1)[0][0]}, make it a row or column, or mark them with --allow-mixed"
        )
    usual = {key: counts.most_common(1)[0][0] for key, counts in differing.items()}
    return {run: "m" for run, kind in kinds.items() if any(kind.get(key, usual[key]) != usual[key] for key in usual)}
