"""How wide LaTeX prints a tabular, by the letters of Computer Modern, without a LaTeX.

Other fonts of papers, such as Times, are narrower. The tables for LaTeX ask, which must fit a page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# In ems; a letter that is not here is as wide as the widest.
EMS = {
    ".,:;'!|ijl[]": 0.28,
    " -": 0.34,
    "frst()/I": 0.4,
    "ceagkovxyz0123456789*?$_qJ": 0.53,
    "bdhnpu": 0.56,
    "LFSTEPBCR": 0.74,
}
EMS |= {"wADGHKNOQUVXYZ+=<>&": 0.79, "%m": 0.84}
WIDEST = 1.03
OF_LETTER = {letter: width for letters, width in EMS.items() for letter in letters} | dict.fromkeys(
    "0123456789", 0.5
)
SCRIPT = 0.88  # of a letter, as sub- or superscript, with the room behind it
BOLD = 1.16  # letters are as much wider


def tabular_width(lines: Sequence[str], em: float, gap: float) -> float:
    """How wide a tabular is at most, in points.

    Parameters
    ----------
    lines
        its rows; rules and other commands of a line of their own count nothing.
    em
        size of the letters, in points.
    gap
        between two columns, as much stands left of the first and right of the last in halves.
    """
    rows = [_spans(line.removesuffix(r"\\")) for line in lines if line.endswith(r"\\")]
    # where each column ends at least
    ends = [0.0] * (1 + max(end for row in rows for _, end, _ in row))
    for end in range(1, len(ends)):
        here = (
            ends[start] + em * ems + gap for row in rows for start, last, ems in row if last == end
        )
        ends[end] = max(here, default=ends[end - 1])
    return ends[-1]


def _spans(line: str) -> list[tuple[int, int, float]]:
    """The cells of a row: the columns before each, those up to its end, and its width in ems."""
    spans, start = [], 0
    for cell in line.split(" & "):
        spanning = re.match(r"\s*\\multicolumn\{(\d+)\}\{.*?l?c?\}(?=\{)", cell)
        end = start + int(spanning[1] if spanning else 1)
        spans.append((start, end, _ems(cell[spanning.end() :] if spanning else cell)))
        start = end
    return spans


def _ems(cell: str) -> float:
    """The width of a cell.

    What stands in \\rlap takes no room, and of a \\shortstack the widest line counts.
    """
    shown = re.sub(r"\\rlap\{.*|\\shortstack\[.\]", "", cell.strip())
    return max(map(_line_ems, shown.split(r"\\")))


def _line_ems(line: str) -> float:
    scripts = [
        max(map(_line_ems, pair)) * SCRIPT
        for pair in re.findall(r"\$\^\{(.*?)\}_\{(.*?)\}\$", line)
    ]
    line = re.sub(r"\$\^\{.*?\}_\{.*?\}\$", "", line)
    bold = BOLD if r"\textbf{" in line else 1.0
    # special characters, none of them wider
    plain = re.sub(r"\\text[a-z]+\{\}|\\pm|\\[&%$#_{}]", "%", line)
    letters = re.sub(r"\\[a-z]+|[\\{}$^]", "", plain)
    return bold * sum(OF_LETTER.get(letter, WIDEST) for letter in letters) + sum(scripts)
