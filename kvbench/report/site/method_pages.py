"""A page for each method: what it is, its results, and what the papers print of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvbench.config import choices, conf_dir, method_config, show
from kvbench.report.data.run import missing
from kvbench.report.data.select import last_word
from kvbench.report.site.claimed import claims_section
from kvbench.report.site.markup import File, figure, label_of, linked, page, slug, swatch, table_of
from kvbench.report.site.printed import Printed, all_printed, published
from kvbench.report.site.prose import choices_taken, readme_entry
from kvbench.report.site.results import FIGURES, by_group, pictures, results
from kvbench.report.site.rows import Row, Site


def method_pages(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The pages, their figures, and one page that leads to them."""
    tables, shipped = all_printed(site.without_submissions(site.joined)), choices("method")
    lines = []
    for method in site.methods:
        rows = [row for row in site.rows if row.method == method]
        drawn = dict(pictures(site, rows)) if rows else {}
        for name, picture in drawn.items():
            yield File(f"methods/{slug(method)}-{name}.svg", picture)
        body = _body(site, method, rows, list(drawn), tables)
        yield page(f"methods/{slug(method)}.html", label_of(method), site, sections, body)
        words = (
            f"<code>{escape(method)}</code>",
            escape(shipped.get(method, "")),
            "ran" if rows else "no run here",
        )
        labels = "".join(f'<td class="label">{word}</td>' for word in words)
        lines.append(f'<tr><th scope="row">{linked(method, "../")}</th>{labels}</tr>')
    yield page("methods/index.html", "Methods", site, sections, table_of("", lines, "methods"))


def _body(
    site: Site, method: str, rows: Sequence[Row], drawn: Sequence[str], tables: Sequence[Printed]
) -> str:
    shipped = choices("method")
    figures = (figure(f"{slug(method)}-{name}.svg", FIGURES[name]) for name in drawn)
    blocks = {
        "Results": results(site, rows) if rows else "<p>It did not run here.</p>",
        "By group": by_group(site, rows),
        "Pictures": "".join(figures),
        "Claims": claims_section(site, method),
        "Published beside ours": published(method, tables),
        "Where its paper leaves a choice": choices_taken(method_config(method).target)
        if method in shipped
        else "",
        "Settings": _settings(method) if method in shipped else _options(rows),
    }
    blocks = {title: body for title, body in blocks.items() if body}
    ids = {title: title.lower().replace(" ", "-") for title in blocks}
    links = "".join(f'<a href="#{id}">{title}</a>' for title, id in ids.items())
    return "\n".join(
        [
            f'<p class="name">{swatch(method)}<code>method={escape(method)}</code></p>',
            readme_entry(method) or f"<p>{escape(shipped.get(method) or _whose(rows))}</p>",
            f'<nav class="toc">{links}</nav>',
            *(
                f'<section id="{ids[title]}"><h2>{title}</h2>{body}</section>'
                for title, body in blocks.items()
            ),
        ]
    )


def _whose(rows: Sequence[Row]) -> str:
    """Whose a method is that kvbench does not ship."""
    people = " and ".join(dict.fromkeys(row.of.manifest.who for row in rows if row.of))
    return (
        f"A method of {people}, of which nothing but its runs is known."
        if people
        else "A method of your own."
    )


def _options(rows: Sequence[Row]) -> str:
    """The options that runs of such a method say that they had."""
    lines = dict.fromkeys(
        f"<dt>{escape(last_word(key))}</dt><dd><code>{escape(row.run.label(key))}</code></dd>"
        for row in rows
        for key, value in row.run.settings.items()
        if key.startswith("method.") and not missing(value)
    )
    return f"<dl>{''.join(lines)}</dl>" if lines else ""


def _settings(method: str) -> str:
    """The least budget, the preset, and the method's file as it is."""
    config = method_config(method)
    least = config.minimum or {}
    facts = {
        "least C, as published": least.get("paper"),
        "least C, everything counted": least.get("unified"),
        "C where none is given": config.preset,
        "layers that its paper leaves dense": config.published_dense_layers,
    }
    listed = "".join(
        f"<dt>{name}</dt><dd><code>{escape(show(value))}</code></dd>"
        for name, value in facts.items()
    )
    source = (conf_dir() / "method" / f"{method}.yaml").read_text(encoding="utf-8")
    return f"<dl>{listed}</dl><pre><code>{escape(source)}</code></pre>"
