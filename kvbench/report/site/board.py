"""The leaderboard: every arm in one table that sorts and filters, above it the best that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from kvbench.report.data.run import Run
from kvbench.report.data.select import order_of
from kvbench.report.data.stats import LEAST, ranks
from kvbench.report.site.front import SHARES
from kvbench.report.site.markup import (
    File,
    cell_of,
    definitions,
    ids_of,
    items,
    linked,
    page,
    protocols,
    small,
)
from kvbench.report.site.rows import FAR_OVER, Row, Site, by_panel
from kvbench.report.site.submitted import anchor
from kvbench.report.tables.formats import NONE


class Column(NamedTuple):
    """A column of numbers.

    Attributes
    ----------
    heading
        what stands above it.
    meaning
        what it says, a clause.
    wide
        whether a small screen has no room for it.
    """

    heading: str
    meaning: str
    wide: bool = False


COLUMNS = {
    "score": Column(
        "score",
        "the task's own, 0 to 100; of fidelity the next tokens that are full attention's, %",
    ),
    "kl_mean": Column(
        "KL, nats",
        "KL divergence of the next token from full attention's, mean over tokens and texts",
    ),
    "device_kv_bytes": Column(
        "KV, MiB", "keys and values on the device, all layers, at the longest prompt", True
    ),
    "index_bytes": Column(
        "index, MiB", "what the method keeps to choose by, wherever it lies", True
    ),
    "device_share": Column(
        "KV, %",
        "of full attention's keys and values, those on the device, in the layers that are not left"
        " dense",
    ),
    "index_share": Column("with index, %", "the same with the index", True),
    "attended_share": Column(
        "attended / C", "entries that a head attends in a step, over the budget C", True
    ),
    "moved_bytes_per_step": Column(
        "moved, KiB", "brought from the host to the device in a step", True
    ),
    "tpot_ms_p50": Column(
        "ms / token", "median time of a decoded token: it ranks machines as well as methods"
    ),
    "own_ms": Column(
        "own ms / token",
        "attention, search and transfers of it, known of what decoded together, too",
        True,
    ),
    "recall": Column(
        "recall", "of the tokens with the most attention, the share that was attended", True
    ),
    "n": Column("n", "samples", True),
}
SHARED = {"device_share": False, "index_share": True}  # column -> whether the index counts


def board(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The leaderboard."""
    rows = site.by_length
    columns = [
        name for name in COLUMNS if name in SHARED or any(name in row.cell.numbers for row in rows)
    ]
    labels = ["task", "model"]
    labels = ["budget", *(key for key in labels if len({getattr(row, key) for row in rows}) > 1)]
    pairs = _pairs(site)
    body = "\n".join(_line(row, labels, columns, pairs[row.run]) for row in rows)
    skipped = items(f"{path.name}: {why}" for path, why in site.runs.skipped)
    if skipped:
        skipped = (
            f"<details><summary>Runs left out</summary><ul class=notes>{skipped}</ul></details>"
        )
    yield page(
        "leaderboard.html",
        "Which method, at which cost?",
        site,
        sections,
        f"""<p>Every arm that ran: a method with a budget of C tokens for each head. Choose what it
may cost; what fits is ordered by nearness to full attention (KL) or by score.</p>
{protocols(site)}
{_legend(site, columns)}
{_filters(rows)}
<section id="best" aria-live="polite" data-least="{LEAST}"></section>
<p><small>An arm with prompts of several lengths has a line for each: what it costs and how near it
stays are of the same samples. Named above is no oracle (Top-k scores every key exactly), nothing
that attends {FAR_OVER:g} times its C or more, nothing on samples that rank no methods, as the list
above says, and none where the best scores under {LEAST}.</small></p>
<div class="scroll tall"><table id="board" class="sortable"><thead><tr>
{_heads(labels, columns)}</tr></thead><tbody>
{body}
</tbody></table></div>
{skipped}""",
    )


def _heads(labels: Sequence[str], columns: Sequence[str]) -> str:
    """The headings of labels and numbers, each a button that sorts."""
    of_labels = (
        f'<th scope="col" class="label{" wide" * (name != "method")}" data-name="{name}">'
        f'<button type="button">{"C" if name == "budget" else name}</button></th>'
        for name in ("method", *labels)
    )
    of_numbers = (
        f'<th scope="col" data-name="{name}" title="{COLUMNS[name].meaning}"'
        f' class="{"wide" * COLUMNS[name].wide}"><button type="button">'
        f"{COLUMNS[name].heading}</button></th>"
        for name in columns
    )
    return "".join([*of_labels, *of_numbers])


def _legend(site: Site, columns: Sequence[str]) -> str:
    """What the columns say, and the notes of all tables."""
    meanings = definitions({COLUMNS[name].heading: COLUMNS[name].meaning for name in columns})
    notes = list(dict.fromkeys(note for table in site.tables for note in table.notes))
    if site.timed:
        notes.append(f"{site.timed} timed runs are not here: --format html shows them.")
    return (
        f"<details><summary>How to read these numbers</summary><dl>{meanings}</dl>"
        f'<ul class="notes">{items(notes)}</ul></details>'
    )


def _pairs(site: Site) -> dict[Run, str]:
    """For each arm a letter for every arm of its panel.

    +: it is ahead, -: it is behind, =: neither by a paired test, ?: they share too few samples for
    one. "" where too few samples rank it at all.
    """
    return {
        row.run: (
            "".join(_letter(site, row, other) for other in panel_rows)
            if row.is_choice and site.place(row, panel_rows)
            else ""
        )
        for panel_rows in by_panel(site.by_length).values()
        for row in panel_rows
    }


def _letter(site: Site, row: Row, other: Row) -> str:
    lead = site.ahead(row, other)
    if lead is None or not ranks(lead.n, lead.low, lead.high):
        return "?"
    return "=" if not lead.differs else "+" if lead.mean > 0 else "-"


def _line(row: Row, labels: Iterable[str], columns: Iterable[str], pairs: str) -> str:
    cells = "".join(_share(row, name) if name in SHARED else _cell(row, name) for name in columns)
    keys = {key: getattr(row, key) for key in ("method", "budget", "task", "model", "panel")}
    keys |= {"variant": row.variant} if row.variant else {}
    keys |= {"whose": row.whose}
    keys |= {"choice": ""} if row.is_choice else {}
    keys |= {"pairs": pairs} if pairs else {}
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in keys.items())
    looks = " ".join(["yardstick"] * row.run.is_full + ["theirs"] * (row.of is not None))
    bare = f' class="{looks}"' if looks else ""
    named = "".join(
        f'<td class="label wide" data-name="{name}">{escape(keys[name])}</td>' for name in labels
    )
    details = ", ".join(filter(None, [row.variant, *row.panel.split(", ")[2:]]))
    size = "" if row.budget == NONE else f"C = {row.budget}"
    phone = ", ".join(filter(None, [row.task if "task" in labels else "", size]))
    of = f' <small><a href="{anchor(row.of)}">checked</a></small>' if row.of else ""
    head = (
        f'{linked(row.method, "")}<small class="phone">{escape(phone)}</small>{small(details)}{of}'
    )
    return f'<tr{bare}{data}><th scope="row" data-name="method">{head}</th>{named}{cells}</tr>'


def _cell(row: Row, name: str) -> str:
    return cell_of(row, name, "wide" if COLUMNS[name].wide else "")


def _share(row: Row, name: str) -> str:
    """Its memory as a share of what full attention held on the device for the same samples."""
    share, look = row.share(SHARED[name]), " wide" if COLUMNS[name].wide else ""
    if share is None:
        return f'<td data-name="{name}" class="none{look}">-</td>'
    assert row.full is not None
    runs = f'data-run="{ids_of(row.run.folder_names)}" data-full="{ids_of(row.full.folder_names)}"'
    runs += f' data-length="{row.length}"' if row.length else ""
    return (
        f'<td data-name="{name}" class="{look.strip()}" data-value="{share!r}"'
        f" {runs}>{share:.1f}</td>"
    )


def _filters(rows: Sequence[Row]) -> str:
    """The form above the table."""
    shares = {str(share): f"{share} % of full attention's" for share in SHARES}
    there = {
        key: {word: word for word in sorted({getattr(row, key) for row in rows}, key=order_of)}
        for key in ("task", "budget", "model", "whose")
    }
    there["budget"].pop(NONE, None)
    number = 'type="number" min="0" step="any" inputmode="decimal" placeholder="any"'
    return f"""<form id="filters">
{_select("share", "Device memory at most", "any", shares)}
<label class="check"><input type="checkbox" name="index"> count the index</label>
{_select("task", "Task", "all", there["task"])}
{_select("budget", "Budget C", "any", there["budget"])}
{_select("model", "Model", "all", there["model"])}
{_select("whose", "Whose runs", "all", there["whose"])}
<label>KV, MiB at most<input name="memory" {number}></label>
<label>ms / token at most<input name="time" {number}></label>
<label>Method<input name="method" type="search" placeholder="all" autocomplete="off"></label>
<button type="reset">Reset</button>
</form>"""


def _select(name: str, label: str, every: str, values: Mapping[str, str]) -> str:
    """A choice among values, each in words; of one value there is none."""
    if len(values) < 2:
        return ""
    options = "".join(
        f'<option value="{escape(value)}">{escape(words)}</option>'
        for value, words in values.items()
    )
    return (
        f'<label>{label}<select name="{name}"><option value="">{every}</option>{options}</select>'
        "</label>"
    )
