"""LongProc's scores but for countdown's: rows of a table, a route, a trace of beliefs.

Each number is 0..1.

As the official evaluators count, quirks included: a route gets credit for its first wrong line,
too, and a table whose columns are others, or without a row, gets nothing.
"""

from __future__ import annotations

import csv
import re
import string

ARTICLES = re.compile(r"\b(a|an|the)\b")
SMALL_WORDS = re.compile(
    r"\b(a|an|the|on|in|at|the|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tagged(output: str, tag: str) -> str | None:
    """What stands between a tag and its end, or None."""
    start, end = output.find(f"<{tag}>"), output.find(f"</{tag}>")
    return None if -1 in (start, end) else output[start + len(tag) + 2 : end].strip()


def html_to_tsv(output: str, reference: str) -> dict[str, float]:
    """Precision, recall and F1 of a table's rows, in any order."""
    fenced = re.search(r"```tsv([\s\S]*)```", output)
    table = fenced[1] if fenced else output.split("```tsv")[1] if "```tsv" in output else output
    rows, right = rows_in(table), rows_in(reference)
    nothing = {"f1": 0.0, "precision": 0.0, "recall": 0.0, "extraction_rate": 0.0}
    if not rows or not right or len(rows[0]) != len(right[0]):
        return nothing
    expected, there = set(right), set(rows)
    precision = sum(row in expected for row in rows) / len(rows)
    recall = sum(row in there for row in right) / len(right)
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "extraction_rate": 1.0}


def rows_in(table: str) -> list[tuple[str, ...]]:
    """The rows of a TSV table after its header, in plain letters; [] of what is none.

    A last row of another length is left out, one before it is a row of "N/A".
    """
    try:
        header, *rows = csv.reader(table.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    if len(set(header)) < len(header):
        return []
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    fitting = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [
        tuple("".join(ARTICLES.sub(" ", _plain(cell)).split()) for cell in row) for row in fitting
    ]


def _plain(text: str) -> str:
    """In small letters, without punctuation."""
    return text.lower().translate(_PUNCTUATION)


def path_traversal(output: str, reference: str) -> dict[str, float]:
    """Whether the route is the one, and the share of its lines up to the first wrong one."""
    route = tagged(output, "Route")
    if route is None:
        return _accuracy(0.0, 0.0, extracted=False)
    if route == reference.strip():
        return _accuracy(1.0, 1.0)
    right, lines = reference.strip().split("\n"), route.split("\n")
    pairs = list(zip(right, lines, strict=False))
    wrong = next(
        (place for place, (expected, other) in enumerate(pairs) if expected != other),
        len(pairs) - 1,
    )
    return _accuracy(0.0, (wrong + 1) / len(right))


def tom_tracking(output: str, reference: str) -> dict[str, float]:
    """Whether each line of the trace says the same, and the share of those before an error."""
    trace, right = beliefs(output), beliefs(reference)
    if trace == right:
        return _accuracy(1.0, 1.0)
    pairs = list(zip(trace, right, strict=False))
    same = next(
        (place for place, (belief, other) in enumerate(pairs) if belief != other), len(pairs)
    )
    return _accuracy(0.0, same / len(right))


def beliefs(text: str) -> list[str]:
    """What the lines that begin with a hyphen say, without small words."""
    lines = (
        "\n".join(line for line in text.splitlines() if line.strip().startswith("-"))
        .strip()
        .split("\n")
    )
    statements = [
        _plain(line[1:].strip()).replace("’", "") for line in lines if line.startswith("-")
    ]
    return [
        words
        for statement in statements
        if (words := " ".join(SMALL_WORDS.sub(" ", statement).split()))
    ]


def _accuracy(right: float, partly: float, extracted: bool = True) -> dict[str, float]:
    return {"accuracy": right, "partial_accuracy": partly, "extraction_rate": float(extracted)}
