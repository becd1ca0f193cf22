"""A page for each claim: its criteria, what was measured, the verdict, and the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvbench.report.claims.claim import Criterion, beds
from kvbench.report.claims.page import Judged, Part
from kvbench.report.claims.power import lacks
from kvbench.report.claims.sampled import arms_of, is_time, runs_of
from kvbench.report.claims.verdict import Finding, Missing, Verdict
from kvbench.report.site.claimed import LOOKS, concerns_method, counted, incomplete, listed, shown
from kvbench.report.site.markup import File, ids_of, linked, page, small, table_of
from kvbench.report.site.rows import Site
from kvbench.report.tables.formats import NONE

COLUMNS = ("number", "verdict", "measured", "from", "to", "wanted", "samples")
LABELS = ("number", "wanted", "verdict")  # those that hold words


def claim_pages(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The pages, and one that leads to them by verdict."""
    lists = []
    for verdict in Verdict:
        if some := [judged for judged in site.judged if judged.verdict is verdict]:
            title = f"{verdict.value[0].upper()}{verdict.value[1:]}"
            lists.append(
                f"<section><h2>{title}{small(str(len(some)))}</h2>{listed(some, '../')}</section>"
            )
        for judged in some:
            name = judged.claim.claim[0].upper() + judged.claim.claim[1:]
            yield page(f"claims/{judged.claim.id}.html", name, site, sections, _body(site, judged))
    body = (
        f"<p>{len(site.judged)} claims of the papers, judged by these runs, or by those that"
        f" kvbench ships where they measure more: {counted(site.judged)}. A claim holds if the"
        " whole interval meets its criterion, and does not hold if none of it does; otherwise, or"
        " with fewer samples than its criterion asks for, it is undecided. Criteria were set"
        " before the runs; those of an older rule are kept on a claim's page. A claim that needs a"
        " larger model or a GPU is judged by a smaller test, and marked as one that a stand-in"
        " decided. Of ParisKV's paper a summary by others and its authors' rebuttal were read.</p>"
        + incomplete(site)
        + "".join(lists)
    )
    yield page("claims/index.html", "Do the papers' claims hold?", site, sections, body)


def _body(site: Site, judged: Judged) -> str:
    claim = judged.claim
    methods = " ".join(
        linked(method, "../", "#claims")
        for method in site.methods
        if concerns_method(claim, method)
    )
    lacking = {"Why a stand-in": claim.original, "What the evidence lacks": claim.weaker}
    sections = {
        "Measured": _findings(judged, judged.criteria),
        "What would decide it": _lacking(judged),
        "Runs": _runs(judged),
        "Make it again": _commands(judged),
        **{title: f"<p>{escape(words)}.</p>" for title, words in lacking.items() if words},
        "What decided it before": _superseded(judged),
        "Methods": f"<p>{methods}</p>" if methods else "",
    }
    return "\n".join(
        [
            f'<p class="name">{escape(claim.id)}: {escape(claim.source)}; {escape(claim.kind)}</p>',
            f'<p class="verdict">{shown(judged)}</p>',
            *(
                f"<section><h2>{title}</h2>{body}</section>"
                for title, body in sections.items()
                if body
            ),
        ]
    )


def _lacking(judged: Judged) -> str:
    """The samples that each undecided criterion needs, if no other decides the claim."""
    if judged.verdict is not Verdict.UNDECIDED:
        return ""
    words = {
        criterion.description: lacks(criterion, finding, judged.runs)
        for criterion, finding, _ in judged.criteria
    }
    lines = (
        f"<li>{escape(description)}: {escape(text)}</li>"
        for description, text in words.items()
        if text
    )
    return f"<ul>{''.join(lines)}</ul>"


def _superseded(judged: Judged) -> str:
    """The criteria that no longer decide, with what they found, and why."""
    why = judged.claim.superseded.why
    return (
        f"<p>{escape(why[0].upper() + why[1:])}.</p>{_findings(judged, judged.superseded)}"
        if why
        else ""
    )


def _findings(judged: Judged, parts: Sequence[Part]) -> str:
    head = "".join(f"<th{' class=label' if name in LABELS else ''}>{name}</th>" for name in COLUMNS)
    lines = []
    decides = parts is judged.criteria
    for place, (criterion, finding, verdict) in enumerate(parts):
        bounds_cell = f'<td class="label">{escape(criterion.bounds_text)}</td>'
        if isinstance(finding, Missing):
            why = finding.why.partition("; ")[0]
            cells = f'<td class="label" colspan="3">{escape(why)}</td>{bounds_cell}<td></td>'
        else:
            part = "part" if decides else "superseded"
            source = _source(
                judged, criterion, f'data-claim="{judged.claim.id}" data-{part}="{place}"'
            )
            numbers = {"value": finding.value, "low": finding.low, "high": finding.high}
            cells = (
                "".join(_number(name, number, source) for name, number in numbers.items())
                + bounds_cell
            )
            cells += _number(
                "n", finding.n, source, f" of {criterion.n}" if finding.n < criterion.n else ""
            )
        look = LOOKS.get(verdict, "open") if decides else "open"
        decided = f'<td class="label"><b class="{look}">{verdict.value}</b></td>'
        lines.append(
            f'<tr><th scope="row">{escape(criterion.description)}</th>{decided}{cells}</tr>'
        )
    notes = [
        finding.note for _, finding, _ in parts if isinstance(finding, Finding) and finding.note
    ]
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return table_of(head, lines, "claim") + (f"<ul class=notes>{items}</ul>" if items else "")


def _number(name: str, number: float | None, source: str, more: str = "") -> str:
    if number is None:
        return f'<td data-name="{name}" class="none">{NONE}</td>'
    return (
        f'<td data-name="{name}" data-value="{float(number)!r}"'
        f" {source}>{number:.3g}{small(more)}</td>"
    )


def _source(judged: Judged, criterion: Criterion, place: str) -> str:
    """Where a number is from, as attributes: ids of runs by role, a file, or a paper's tables."""
    if criterion.kind == "file":
        return f'{place} data-file="{escape(criterion.spec["file"])}"'
    if criterion.kind == "printed":
        return f'{place} data-paper="{" ".join(_printed_tables(criterion))}"'
    for role, arms in arms_of(criterion.spec).items():
        folders = [_folder_names(judged, criterion, arm) for arm in arms]
        names = [name for some in folders if not isinstance(some, Missing) for name in some]
        place += f' data-{role}="{ids_of(names)}"'
    return place


def _folder_names(judged: Judged, criterion: Criterion, arm: str) -> list[str] | Missing:
    """The names of the folders of an arm's runs."""
    runs = runs_of(judged.runs, criterion.spec["bed"], arm, times=is_time(criterion.spec["value"]))
    return runs if isinstance(runs, Missing) else [run.arm["path"].name for run in runs]


def _runs(judged: Judged) -> str:
    """The arms that its numbers are of, with their runs; what did not run says so."""
    lines = {}
    for criterion in (criterion for criterion, *_ in judged.criteria if criterion.kind == "runs"):
        shared = " ".join(beds()[criterion.spec["bed"]].words)
        for arm in (arm for arms in arms_of(criterion.spec).values() for arm in arms):
            folders = _folder_names(judged, criterion, arm)
            if isinstance(folders, Missing):
                ran = escape(folders.why.partition("; ")[0])
            else:
                ran = " ".join(f"<code>{escape(name)}</code>" for name in folders)
            words = f"<code>{escape(arm)}</code><br><small><code>{escape(shared)}</code></small>"
            lines[shared, arm] = (
                f'<tr><td class="label">{words}</td><td class="label">{ran}</td></tr>'
            )
    return (
        table_of("<th class=label>arm</th><th class=label>runs</th>", lines.values(), "runs")
        if lines
        else ""
    )


def _commands(judged: Judged) -> str:
    """What makes the evidence, and what prints the verdict."""
    commands = [_command(criterion) for criterion, *_ in judged.criteria]
    lines = "\n".join(dict.fromkeys([*commands, "kvbench report --claims"]))
    return f"<pre><code>{escape(lines)}</code></pre>"


def _command(criterion: Criterion) -> str:
    if criterion.kind == "runs":
        return beds()[criterion.spec["bed"]].command
    if criterion.kind == "file":
        return f"{criterion.spec['command']} | tail -1 > results/{criterion.spec['file']}"
    return "\n".join(f"kvbench report --paper {name}" for name in _printed_tables(criterion))


def _printed_tables(criterion: Criterion) -> Sequence[str]:
    (rule,) = criterion.spec.values()
    tables: Sequence[str] = rule.get("tables") or [rule["table"]]
    return tables
