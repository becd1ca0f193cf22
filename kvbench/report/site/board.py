"""The leaderboard: every arm in one table that sorts and filters, and above it the best
that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from kvbench.report.data.run import Run
from kvbench.report.data.select import order_of
from kvbench.report.data.stats import LEAST, ranks
from kvbench.report.site.front import SHARES
from kvbench.report.site.markup import File, cell_of, ids_of, linked, page, protocols, small
from kvbench.report.site.rows import FAR_OVER, Row, Site, share_of
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
    heads = "".join(
        f'<th scope="col" data-name="{name}" title="{COLUMNS[name].meaning}"'
        f' class="{"wide" * COLUMNS[name].wide}"><button'
        f' type="button">{COLUMNS[name].heading}</button></th>'
        for name in columns
    )
    words = [
        "budget",
        *(name for name in ("task", "model") if len({getattr(row, name) for row in rows}) > 1),
    ]
    named = (
        '<th scope="col" class="label" data-name="method"><button'
        ' type="button">method</button></th>'
        + "".join(
            f'<th scope="col" class="label wide" data-name="{name}"><button type="button">'
            f"{'C' if name == 'budget' else name}</button></th>"
            for name in words
        )
    )
    pairs = _pairs(site)
    body = "\n".join(_line(row, words, columns, pairs[row.run]) for row in rows)
    table_notes = dict.fromkeys(note for table in site.tables for note in table.notes)
    legend = "".join(
        f"<dt>{COLUMNS[name].heading}</dt><dd>{COLUMNS[name].meaning}</dd>" for name in columns
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in table_notes)
    timed = (
        f"<li>{site.timed} timed runs are not here: --format html shows them.</li>"
        if site.timed
        else ""
    )
    skipped = "".join(
        f"<li>{escape(f'{path.name}: {why}')}</li>" for path, why in site.runs.skipped
    )
    yield page(
        "leaderboard.html",
        "Which method, at which cost?",
        site,
        sections,
        f"""<p>Every arm that ran: a method with a budget of C tokens for each head. Choose what it may cost; what fits
is ordered by nearness to full attention (KL) or by score.</p>
{protocols(site)}
<details><summary>How to read these numbers</summary><dl>{legend}</dl><ul class="notes">{notes}{timed}</ul></details>
{_filters(rows)}
<section id="best" aria-live="polite" data-least="{LEAST}"></section>
<p><small>An arm with prompts of several lengths has a line for each: what it costs and how near it stays are of the
same samples. Named above is no oracle (Top-k scores every key exactly), nothing that attends {FAR_OVER:g} times its C
or more, nothing on samples that rank no methods, as the list above says, and none where the best scores under
{LEAST}.</small></p>
<div class="scroll tall"><table id="board" class="sortable"><thead><tr>{named}{heads}</tr></thead><tbody>
{body}
</tbody></table></div>
{f"<details><summary>Runs left out</summary><ul class=notes>{skipped}</ul></details>" if skipped else ""}""",
    )


def _pairs(site: Site) -> dict[Run, str]:
    """By arm a letter for each arm of its panel: + it is ahead of that, - it is behind, = neither
    by a paired test, ? where they share too few samples for one; "" where too few rank it among
    any.
    """
    panels: dict[str, list[Row]] = {}
    for row in site.by_length:
        panels.setdefault(row.panel, []).append(row)
    return {
        row.run: (
            "".join(_letter(site, row, other) for other in panel_rows)
            if row.is_choice and site.place(row, panel_rows)
            else ""
        )
        for panel_rows in panels.values()
        for row in panel_rows
    }


def _letter(site: Site, row: Row, other: Row) -> str:
    lead = site.ahead(row, other)
    if lead is None or not ranks(lead.n, lead.low, lead.high):
        return "?"
    return "=" if not lead.differs else "+" if lead.mean > 0 else "-"


def _line(row: Row, words: Iterable[str], columns: Iterable[str], pairs: str) -> str:
    cells = "".join(_share(row, name) if name in SHARED else _cell(row, name) for name in columns)
    keys = {
        "method": row.method,
        "budget": row.budget,
        "task": row.task,
        "model": row.model,
        "panel": row.panel,
    }
    keys |= {"variant": row.variant} if row.variant else {}
    keys |= {"whose": row.whose}
    keys |= {"choice": ""} if row.is_choice else {}
    keys |= {"pairs": pairs} if pairs else {}
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in keys.items())
    looks = " ".join(["yardstick"] * row.run.is_full + ["theirs"] * (row.of is not None))
    bare = f' class="{looks}"' if looks else ""
    labels = "".join(
        f'<td class="label wide" data-name="{name}">{escape(keys[name])}</td>' for name in words
    )
    details = ", ".join(filter(None, [row.variant, *row.panel.split(", ")[2:]]))
    phone = ", ".join(
        filter(
            None,
            [
                row.task if "task" in words else "",
                "" if row.budget == NONE else f"C = {row.budget}",
            ],
        )
    )
    of = f' <small><a href="{anchor(row.of)}">checked</a></small>' if row.of else ""
    head = (
        f'{linked(row.method, "")}<small class="phone">{escape(phone)}</small>{small(details)}{of}'
    )
    return f'<tr{bare}{data}><th scope="row" data-name="method">{head}</th>{labels}{cells}</tr>'


def _cell(row: Row, name: str) -> str:
    return cell_of(row, name, "wide" if COLUMNS[name].wide else "")


def _share(row: Row, name: str) -> str:
    """Its memory as a share of what full attention held on the device for the same samples."""
    share, look = share_of(row, SHARED[name]), " wide" if COLUMNS[name].wide else ""
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
    """The form above the table; a choice of one is none."""

    def select(
        name: str, label: str, every: str, values: Sequence[str], shown: Callable[[str], str] = str
    ) -> str:
        if len(values) < 2:
            return ""
        options = "".join(
            f'<option value="{escape(value)}">{escape(shown(value))}</option>' for value in values
        )
        return (
            f'<label>{label}<select name="{name}"><option'
            f' value="">{every}</option>{options}</select></label>'
        )

    def there(key: str) -> list[str]:
        return sorted({getattr(row, key) for row in rows} - {"-"}, key=order_of)

    number = 'type="number" min="0" step="any" inputmode="decimal" placeholder="any"'
    return f"""<form id="filters">
{select("share", "Device memory at most", "any", list(map(str, SHARES)), "{} % of full attention's".format)}
<label class="check"><input type="checkbox" name="index"> count the index</label>
{select("task", "Task", "all", there("task"))}
{select("budget", "Budget C", "any", there("budget"))}
{select("model", "Model", "all", there("model"))}
{select("whose", "Whose runs", "all", sorted({row.whose for row in rows}))}
<label>KV, MiB at most<input name="memory" {number}></label>
<label>ms / token at most<input name="time" {number}></label>
<label>Method<input name="method" type="search" placeholder="all" autocomplete="off"></label>
<button type="reset">Reset</button>
</form>"""
