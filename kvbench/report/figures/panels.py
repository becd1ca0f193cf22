"""Which runs stand in a figure, which of them on the same axes, and which make one line.

Arms share a panel where they can be compared: the same task, model, protocol and samples; times are
of one machine. What is left out is counted, for below the picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pandas as pd

from kvbench.config import ConfigError, choices
from kvbench.report.data.run import YARDSTICK, Runs, missing
from kvbench.report.data.select import fewest_keys, last_word
from kvbench.report.data.style import Style, in_order, style_of, styles_of
from kvbench.runs.quantities import JOINTLY, QUANTITIES, named

LINES = ("-", "--", ":", "-.")
MOST_LINES, MOST_ARMS = 8, 200  # that one panel can show
MOST_PANELS, MOST_MAPS = 8, 24  # that one picture can show
# Settings in which the arms of a panel may differ; in all others they are alike, or they stand in
# panels of their own. What begins like one of these makes a variant of a method, and is named in
# the legend.
OF_VARIANTS = ("method.", "attention", "kv", "shared_prefill", "decode")
NOT_COMPARED = frozenset({"method", "budget", "probe.every", "seed"})


class Panel(NamedTuple):
    """Arms that can be compared.

    Attributes
    ----------
    title
        what they are of.
    arms
        lines of `Runs.arms`.
    styles
        of every method in the picture, by its name.
    notes
        what is not shown, for below the picture.
    left_out
        methods for which there was no room.
    """

    title: str
    arms: pd.DataFrame
    styles: dict[str, Style]
    notes: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


class Series(NamedTuple):
    """Arms that make one line or one group of marks.

    Attributes
    ----------
    style
        label, colour, marker and line.
    variant
        the settings in which these arms differ from others of their method, or "".
    arms
        lines of `Runs.arms`, by budget.
    """

    style: Style
    variant: str
    arms: pd.DataFrame

    def label(self, budget: Any = None) -> str:
        """The method's name, with a budget and the variant."""
        name = f"{self.style.label} {size_text(budget)}".rstrip()
        return f"{name}, {self.variant}" if self.variant else name


# -- which arms ------------------------------------------------------------------------------------


def arms_for(
    runs: Runs,
    name: str,
    probed: bool,
    columns: Sequence[str] = (),
    task: str | None = None,
    scored: bool = False,
) -> pd.DataFrame:
    """The arms a figure can use, without the times that were taken beside other work.

    Parameters
    ----------
    probed
        those with probes; else those without. No probe changes the numbers of task=fidelity: of its
        arms that ran with probes only, these count among those without.
    columns
        of which one has a value, or more; those of times.
    task
        the one that they are of.
    scored
        those that have a score, and are no timed runs.

    Raises
    ------
    ConfigError
        there is none.
    """
    arms = runs.arms
    if len(arms):
        arms = arms[arms["probe_every"] > 0 if probed else _without_probes(runs, arms)]
    if len(arms) and scored:
        arms = arms[arms["floor_ms"].isna()]
    if len(arms) and task:
        arms = arms[arms["task"] == task]
    if len(arms) and columns:
        arms = arms[arms[[*columns]].notna().any(axis=1)]
    if not len(arms):
        kind = f" of task={task}" if task else ""
        kind += " with probes (probe.every=1 makes some)" if probed else ""
        kind += " with timings" if columns and not probed else ""
        without = f" among {len(runs.arms)} runs"
        if columns and (joint := sum(run.shares_decode for run in runs)):
            remedy = "sweep.shared_decode=false takes times"
            without += f", of which {joint} decoded together: {remedy}"
        raise ConfigError(f"figure={name}: no run{kind}{without}")
    return undisturbed(arms)


def undisturbed(arms: pd.DataFrame) -> pd.DataFrame:
    """The arms, without times that were taken beside other work: these are not a method's."""
    quantities = [named(key) for key in arms if key in QUANTITIES or "." in key]
    disturbed = arms["disturbed"].isin([True])
    if not disturbed.any():
        return arms
    of_methods = (quantity for quantity in quantities if quantity.part != "hardware")
    times = [quantity.name for quantity in of_methods if quantity.is_time]
    return arms.assign(**{key: arms[key].mask(disturbed) for key in times})


def untimed(runs: Runs) -> list[str]:
    """What stands below a picture of times of whole tokens, which some of these runs have not."""
    count = sum(run.shares_decode for run in runs)
    words = f"{count} runs that decoded together have no time of a token and are not here"
    return [words] * bool(count)


def _without_probes(runs: Runs, arms: pd.DataFrame) -> pd.Series:
    """Whether an arm ran without probes, or is of `task=fidelity` and ran only with them."""
    bare = arms["probe_every"] == 0
    settings = runs.differing.loc[arms.index].drop(columns="probe.every", errors="ignore")
    others = pd.Series(list(map(tuple, settings.values)), index=arms.index, dtype=object)
    return bare | ((arms["task"] == "fidelity") & ~others.isin(set(others[bare])))


def panels_of(
    name: str,
    runs: Runs,
    arms: pd.DataFrame,
    free: Collection[str] = NOT_COMPARED,
    times: bool = False,
    lines: Literal["", "method", "arm"] = "",
) -> list[Panel]:
    """Panels of arms that can be compared, each with a title.

    A panel is of one task, model and protocol and of the same samples, and its arms are alike in
    all settings that are not free to differ. Timed runs are compared by length and batch, whatever
    their number of repeats.

    Parameters
    ----------
    free
        those keys.
    times
        are drawn, so only arms of one machine can be compared.
    lines
        what a line is of; of more than a picture can show the first methods are taken, in the order
        of `STYLES`.

    Raises
    ------
    ConfigError
        more panels or arms than the figure of this name can show; or there is no arm whose budget
        applied.
    """
    arms, unbounded = _bounded(runs, name, arms)
    settings = runs.differing.loc[arms.index]
    common = settings[
        [key for key in settings if key not in free and not key.startswith(OF_VARIANTS)]
    ]
    if times:
        common = common.assign(machine=arms["device_name"].map(str))
    across = any(key.startswith("protocol.") for key in free)
    samples = [  # all timed runs share one; prompts are those of a protocol
        "" if run.is_timed else ("" if across else run.arm["data"], frozenset(run.scores.keys))
        for run in map(runs.__getitem__, arms.index)
    ]
    titles, groups = [], []
    keys = [
        "task",
        "model",
        *(common[key] for key in common),
        pd.Series(samples, arms.index, dtype=object),
    ]
    for (task, model, *_), group in arms.groupby(keys, sort=False):
        others = common[(arms["task"] == task) & (arms["model"] == model)]
        title = ", ".join([task, model, *_varied(others, group.index[0]), _samples(group)])
        titles.append(f"{title}, other samples" if title in titles else title)
        groups.append(group)
    refuse_crowd(name, max(map(len, groups), default=0), "arms in a panel", MOST_ARMS)
    few, notes = _few(runs, groups, lines == "arm") if lines and groups else (groups, ())
    styles = styles_of(method for group in few for method in group["method"])
    return [
        Panel(
            title,
            chosen,
            styles,
            (*filter(None, chosen["sample_note"].unique()), *notes, *unbounded),
            frozenset(group["method"]) - frozenset(chosen["method"]),
        )
        for title, group, chosen in zip(titles, groups, few, strict=True)
        if len(chosen)
    ]


def _varied(settings: pd.DataFrame, run: int) -> list[str]:
    """A run's settings that tell it from the others, in words."""
    keys, values = fewest_keys(settings.drop_duplicates().to_dict("records")), settings.loc[run]
    return [
        values[key] if key == "machine" else f"{last_word(key)}={_shortened(values[key])}"
        for key in keys
    ]


def _bounded(runs: Runs, name: str, arms: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The arms whose budget applied, and a note that names the others.

    Those would be drawn where full attention is. A timed run has its times all the same.

    Raises
    ------
    ConfigError
        no arm is left.
    """
    never = [run for run in arms.index if runs[run].is_unbounded and not runs[run].is_timed]
    if not never:
        return arms, ()
    of = arms.loc[never]
    names = [
        f"{style_of(method).label}"
        f" {', '.join(map(size_text, group['budget'].sort_values().unique()))}"
        for method, group in of.groupby("method", sort=False)
    ]
    why = f"{'; '.join(names)}, whose budget never applied: every step attended all tokens"
    if len(never) == len(arms):
        raise ConfigError(f"figure={name}: {why}; choose a smaller budget or longer answers")
    return arms.drop(index=never), (f"without {why}",)


def _samples(arms: pd.DataFrame) -> str:
    """How many samples each of these arms has."""
    least, most = (int(arms["n"].agg(end)) for end in ("min", "max"))
    words = f"n = {most}" if least == most else f"n = {least} to {most}"
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _few(
    runs: Runs, frames: Sequence[pd.DataFrame], by_arm: bool
) -> tuple[Sequence[pd.DataFrame], tuple[str, ...]]:
    """The arms of each panel that fit into it, of the same methods in all; a note on the budget.

    Where each arm is a line, all are of one budget.
    """
    notes = tuple[str, ...]()
    if by_arm and max(map(len, frames)) > MOST_LINES:
        frames, notes = of_usual_budget(frames)
    shipped = choices("method")
    methods = in_order(pd.concat(frames)["method"])
    methods.sort(key=lambda name: (name != YARDSTICK, name in shipped))
    lines = [
        Counter(frame["method"] if by_arm else [method for method, *_ in _variants(runs, frame)])
        for frame in frames
    ]
    chosen: list[str] = []
    for method in methods:
        if all(sum(count[name] for name in [*chosen, method]) <= MOST_LINES for count in lines):
            chosen.append(method)
    if not chosen:
        return [frame.head(MOST_LINES) for frame in frames], notes
    return [frame[frame["method"].isin(chosen)] for frame in frames], notes


def of_usual_budget(
    frames: Sequence[pd.DataFrame],
) -> tuple[list[pd.DataFrame], tuple[str, ...]]:
    """The arms of the budget that most have, with those that have none, and a note that says so."""
    sizes = pd.concat(frames)["budget"].value_counts().sort_index()
    if len(sizes) < 2:
        return list(frames), ()
    size = sizes.idxmax()
    chosen = [frame[frame["budget"].isna() | (frame["budget"] == size)] for frame in frames]
    return chosen, (f"C = {size_text(size)} alone: --where budget=... chooses another",)


def ranking(runs: Runs, panels: Sequence[Panel]) -> list[Panel]:
    """The panels whose scores can rank methods, or all where none can.

    The notes name the others. Where full attention's own score ranks none (`Run.ranks_none`), or
    all score alike, none is better than another.
    """
    ranked: list[Panel] = []
    others: list[Panel] = []
    for panel in panels:
        mute = panel.arms["score"].nunique() < 2 or runs[panel.arms.index[0]].ranks_none
        (others if mute else ranked).append(panel)
    if not ranked or not others:
        return list(panels)
    note = f"without {'; '.join(panel.title for panel in others)}: scores there rank no method"
    return [panel._replace(notes=(*panel.notes, note)) for panel in ranked]


def _shortened(value: str) -> str:
    """A setting's value, cut where it is a long list."""
    return value if len(value) <= 32 else f"{value[:29]}..."


def refuse_crowd(name: str, count: int, what: str, most: int) -> None:
    """Refuse more than a picture can show.

    Raises
    ------
    ConfigError
        names the figure, and says how many there are of what.
    """
    if count > most:
        raise ConfigError(
            f"figure={name}: {count} {what}, and a picture shows {most} at most; --where chooses"
            " some"
        )


# -- lines -----------------------------------------------------------------------------------------


def series_of(
    runs: Runs, panel: Panel, without: str = "", by_budget: bool = False
) -> Iterator[Series]:
    """The arms of each method, in the order of `STYLES`.

    Arms that differ in more than the budget are series of their own.

    Parameters
    ----------
    without
        a setting in which arms of one series may differ.
    by_budget
        each budget is a series. Runs that differ in what their panel leaves free, as the lengths
        that they time, are one arm.
    """
    steps = Counter[str]()
    for method, variant, arms in _variants(runs, panel.arms, without):
        style = panel.styles[method]
        first = LINES.index(style.line) + steps[method]
        steps[method] += 1
        sizes = arms["budget"].map(size_text, na_action=None)
        parts = [part for _, part in arms.groupby(sizes, sort=False)] if by_budget else [arms]
        for place, part in enumerate(parts, first):
            yield Series(replace(style, line=LINES[place % len(LINES)]), variant, part)


def _variants(
    runs: Runs, arms: pd.DataFrame, without: str = ""
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The method of each series, the settings in which it differs, and its arms by budget."""
    of_variants = [key for key in runs.differing if key.startswith(OF_VARIANTS) and key != without]
    for method in in_order(arms["method"]):
        method_arms = arms[arms["method"] == method]
        settings = runs.differing.loc[method_arms.index, of_variants]
        alone = settings[method_arms["decode"] != JOINTLY]  # all others began from a shared prefill
        varied = [
            key
            for key in settings
            if (alone if key == "shared_prefill" else settings)[key].nunique() > 1
        ]
        variants = {
            run: ", ".join(_option(key, runs.settings.at[run, key]) for key in varied)
            for run in method_arms.index
        }
        groups = dict(list(method_arms.groupby(pd.Series(variants))))
        for variant in sorted(groups, key=lambda words: (len(words), words)):
            yield (
                method,
                variant,
                groups[variant].sort_values("budget", key=lambda sizes: sizes.astype(float)),
            )


def _option(key: str, value: Any) -> str:
    """A setting in words, also of a run of a version that had none."""
    if missing(value):
        return f"no {last_word(key)}"
    return f"{last_word(key)}={_shortened(str(value))}"


def rows_of(arms: pd.DataFrame) -> list[Any]:
    """The arms one by one, with an attribute and a key for each column."""
    return [line for _, line in arms.iterrows()]


# -- what stands below ----------------------------------------------------------------------------


def words_below(
    panels: Sequence[Panel],
    times: bool = False,
    drawn: Collection[str] | None = None,
    others: str = "--where method=... chooses others",
) -> list[str]:
    """What a reader must know of the arms of these panels, in lines for below the picture.

    Parameters
    ----------
    times
        are drawn, so what must be known of them is said, too.
    drawn
        the methods that are; None: all that the panels have.
    others
        what is said of the others.
    """
    arms = pd.concat([panel.arms for panel in panels])
    drawn = set(arms["method"]) if drawn is None else set(drawn)
    every = set(arms["method"]).union(*(panel.left_out for panel in panels))
    counted = f"{len(drawn)} of {len(every)} methods: {others}"
    return [
        *([counted] if every - drawn else []),
        *dict.fromkeys(note for panel in panels for note in panel.notes),
        " | ".join(filter(None, _caveats(arms[arms["method"].isin(drawn)], times))),
    ]


def _caveats(arms: pd.DataFrame, times: bool) -> list[str]:
    """What a reader must know of the runs in a picture, and of their times if these are drawn."""
    transfers, failed = " ".join(map(str, arms["transfer"])), int(arms["failed"].sum())
    joint_methods = arms["method"][arms["decode"] == JOINTLY]
    disturbed = int(arms["disturbed"].isin([True]).sum())
    seeds = sorted({str(seed) for seed in arms["seed"]}, key=lambda words: (len(words), words))
    caveats = {
        f"without times of {disturbed} arms, taken beside other work": times and disturbed,
        "times of samples elsewhere or beside other work are left out": (
            times and (arms["left_out"].astype(float) > 0).any()
        ),
        "random weights: scores mean nothing": (arms["weights"] == "random").any(),
        "transfers between host and device simulated in memory": "simulated" in transfers,
        "transfers between host and device counted, in no time": "in place" in transfers,
        f"{failed} failed samples, which score 0": failed,
        "with unfinished runs": not arms["finished"].all(),
        f"decoded together, the others alone: {', '.join(sorted(set(joint_methods)))}": (
            0 < len(joint_methods) < len(arms)
        ),
        f"seeds {' or '.join(seeds)}": any("," in seed for seed in seeds),
    }
    machines = "; ".join(sorted({str(name) for name in arms["device_name"].dropna()}))
    return [*(words for words, there in caveats.items() if there), machines]


def of_budget(budget: Any) -> str:
    """What stands in the title of a panel of one budget, without a gap where a line may break."""
    return f"C = {size_text(budget)}".replace(" ", "\N{NO-BREAK SPACE}")


def size_text(budget: Any) -> str:
    """A budget as text: tokens, or a share of the prompt; "" for none."""
    if missing(budget):
        return ""
    return f"{100 * budget:g} %" if isinstance(budget, float) else str(budget)
