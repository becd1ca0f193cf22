"""What the report says of one folder of runs in every format, as it was reviewed: `tests/snapshots/` has it.

`python tests/test_report_snapshots.py` writes it anew: look at what differs before it is committed.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from report_runs import record, records, stored, timed, together

from kvbench.cli.report import main

SNAPSHOTS = Path(__file__).with_name("snapshots")
SCORES = {"1024": [1.0, 0.0, 1.0, 1.0, 0.5], "512": [1.0, 1.0, 0.0, 1.0, 1.0]}
COMMANDS = {
    "overview.txt": "--where task=passkey",
    "overview.md": "--where task=passkey --format markdown",
    "summary.csv": "--where task=passkey --format csv",
    "long.csv": "--where method=quest --where budget=64 --where task=passkey --format long --out OUT",
    "groups.txt": "--rows method,budget --columns group --where task=passkey",
    "groups.tex": "--rows method,budget --columns group --where task=passkey --format latex",
    "values.md": "--rows method --values tpot_ms_mean,ttft_s,gain,breakdown_ms.attention,brief_score --sort"
    " --where budget=64 --where task=passkey --format markdown",
    "page.html": "--rows method,budget --columns task --where task=passkey --format html",
    "times.txt": "--where task=latency",
    "near.txt": "--where task=fidelity",
    "paper.txt": "--paper racc_table4 --paper lychee_table6 --where task=ruler",
    "paper.csv": "--paper lychee_table6 --where task=ruler --format csv",
}


def made(folder: Path) -> Path:
    """Runs with all that weakens a number: failures, few samples, other work, texts of kvbench's own."""
    stored(folder, "full", None, {"1024": [1.0] * 5, "512": [1.0] * 5})
    for budget in (64, 128, 0.1):
        stored(folder, "quest", budget, SCORES)
    stored(folder, "random", 64, {"1024": [0.0] * 5, "512": [0.0, 1.0] * 2 + [0.0]})
    audit = {**record("", "", 1.0)["audit"], "transfer": "simulated", "moved_bytes_per_step": 2048.0}
    stored(folder, "icecache", 64, records(SCORES, audit=audit))
    lost = records(SCORES)
    lost[0] = {**lost[0], "error": "out of memory"}
    stored(folder, "snapkv", 64, lost)
    stored(folder, "tova", 64, together({"1024": [0.0] * 5, "512": [1.0] * 5}, select=0.5))
    for place, (method, size) in enumerate((("full", None), ("quest", 64))):
        times = [timed(length, 4.0 + place + length / 1024) for length in (1024, 2048)]
        stored(folder, method, size, times, task="latency", options={"lengths": [1024, 2048], "keys": "model"})
        near = {"kl_mean": 0.1 * place, "nll": 2.0, "nll_full": 2.0}
        stored(folder, method, size, records([1.0, 1.0 - place / 10], fidelity=near), task="fidelity")
    texts = {"haystack": "generated", "squad": "generated", "hotpotqa": "generated", "lengths": [4096]}
    groups = ("niah_single_1", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "vt", "fwe", "qa_1", "qa_2")
    samples = {f"{group}/4096": [1.0, 0.0] for group in groups}
    stored(folder, "lychee", 1024, samples, task="ruler", model="llama3.1-8b-instruct", options=texts)
    return folder


def told(folder: Path, words: str) -> str:
    """What the command prints, or writes to OUT, without what names this machine's folders."""
    out, printed = folder / "out.csv", io.StringIO()
    with redirect_stdout(printed):
        assert main([str(folder), *words.replace("OUT", str(out)).split()]) == 0
    text = out.read_text() if "OUT" in words else printed.getvalue()
    return re.sub(r"\b[0-9a-f]{12,}\b", "ID", text.replace(str(folder), "RUNS"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_report_is_as_it_was_reviewed(folder: Path, name: str) -> None:
    assert told(folder, COMMANDS[name]) == (SNAPSHOTS / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        runs = made(Path(place))
        for name, words in COMMANDS.items():
            (SNAPSHOTS / name).write_text(told(runs, words), encoding="utf-8")
    sys.stdout.write(f"{len(COMMANDS)} files in {SNAPSHOTS}\n")
