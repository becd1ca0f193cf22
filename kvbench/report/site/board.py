"""The leaderboard: every arm in one table that sorts and filters, and above it the best that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from kvbench.report.frame import YARDSTICK
from kvbench.report.select import order_of
from kvbench.report.site.front import SHARES
from kvbench.report.site.parts import File, Row, Site, cell_of, linked, page, share_of, small

# Column -> (heading, whether a small screen has no room for it).
COLUMNS = {
    "score": ("score", False),
    "kl_mean": ("KL, nats", False),
    "device_kv_bytes": ("KV on the device, MiB", False),
    "device_share": ("of full's, %", False),
    "attended_share": ("attended / C", True),
    "moved_bytes_per_step": ("moved KiB a step", True),
    "tpot_ms_mean": ("ms / token", False),
    "recall": ("recall", True),
}


def board(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The leaderboard."""
    rows = site.rows
    columns = [name for name in COLUMNS if name == "device_share" or any(name in row.cell.numbers for row in rows)]
    heads = "".join(
        f'<th scope="col" data-name="{name}"{" class=wide" if COLUMNS[name][1] else ""}>'
        f'<button type="button">{COLUMNS[name][0]}</button></th>'
        for name in columns
    )
    words = ["budget", *(name for name in ("task", "model") if len({getattr(row, name) for row in rows}) > 1)]
    named = "".join(
        f'<th scope="col" class="label" data-name="{name}"><button type="button">{name}</button></th>'
        for name in ("method", *words)
    )
    told = " and ".join(sorted({escape(row.model) for row in rows}))
    body = "\n".join(_line(site, row, words, columns) for row in rows)
    said = dict.fromkeys(note for table in site.tables for note in table.notes)
    notes = "".join(f"<li>{escape(note)}</li>" for note in said)
    timed = f"<li>{site.timed} timed runs are not here: --format html shows them.</li>" if site.timed else ""
    left_out = "".join(f"<li>{escape(f'{path.name}: {why}')}</li>" for path, why in site.runs.left_out)
    yield page(
        "leaderboard.html",
        "Which method, at which cost?",
        site,
        sections,
        f"""<p>Every arm that ran on {told}. Choose what it may cost; what fits is ordered by nearness to full
attention (KL) or by score.</p>
{_filters(rows)}
<section id="best" aria-live="polite"></section>
<div class="scroll"><table id="board" class="sortable"><thead><tr>{named}{heads}</tr></thead><tbody>
{body}
</tbody></table></div>
<details><summary>How to read these numbers</summary><ul class="notes">{notes}{timed}</ul></details>
{f"<details><summary>Runs left out</summary><ul class=notes>{left_out}</ul></details>" if left_out else ""}""",
    )


def _line(site: Site, row: Row, words: Iterable[str], columns: Iterable[str]) -> str:
    cells = "".join(_share(site, row) if name == "device_share" else cell_of(row, name) for name in columns)
    keys = {"method": row.method, "budget": row.budget, "task": row.task, "model": row.model, "panel": row.panel}
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in keys.items())
    bare = ' class="yardstick"' if row.method == YARDSTICK else ""
    labels = "".join(f'<td class="label" data-name="{name}">{escape(keys[name])}</td>' for name in words)
    samples = [word for word in row.panel.split(", ")[2:] if word not in row.variant]
    apart = ", ".join(filter(None, [row.variant, *samples]))
    head = f'<th scope="row" data-name="method">{linked(row.method, "")}{small(apart)}</th>'
    return f"<tr{bare}{data}>{head}{labels}{cells}</tr>"


def _share(site: Site, row: Row) -> str:
    """Its KV on the device as a share of what full attention held there for the same samples."""
    share = share_of(site, row)
    if share is None:
        return '<td data-name="device_share" class="none">-</td>'
    assert row.full is not None
    runs = f'data-run="{site.run_ids(row.run)}" data-full="{site.run_ids(row.full)}"'
    return f'<td data-name="device_share" data-value="{share!r}" {runs}>{share:.1f}</td>'


def _filters(rows: Sequence[Row]) -> str:
    """The form above the table; a choice of one is none."""

    def select(name: str, about: str, every: str, values: Sequence[str], shown: Callable[[str], str] = str) -> str:
        if len(values) < 2:
            return ""
        options = "".join(f'<option value="{escape(value)}">{escape(shown(value))}</option>' for value in values)
        return f'<label>{about}<select name="{name}"><option value="">{every}</option>{options}</select></label>'

    def there(key: str) -> list[str]:
        return sorted({getattr(row, key) for row in rows} - {"-"}, key=order_of)

    number = 'type="number" min="0" step="any" inputmode="decimal" placeholder="any"'
    return f"""<form id="filters">
{select("share", "Device memory at most", "any", list(map(str, SHARES)), "{} % of full attention's".format)}
{select("task", "Task", "all", there("task"))}
{select("budget", "Budget C", "any", there("budget"))}
{select("model", "Model", "all", there("model"))}
<label>KV, MiB at most<input name="memory" {number}></label>
<label>ms / token at most<input name="time" {number}></label>
<label>Method<input name="method" type="search" placeholder="all" autocomplete="off"></label>
<button type="reset">Reset</button>
</form>"""
