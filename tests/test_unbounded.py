"""Runs in which the budget never applied: every step attended all tokens. They are marked, and rank no method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import csv_lines, record, stored

from kvbench.cli.compose import composed
from kvbench.cli.report import main
from kvbench.config import ConfigError
from kvbench.report.claims import sampled
from kvbench.report.claims.claim import Bed
from kvbench.report.claims.verdict import Finding, Missing
from kvbench.report.data.frame import collect
from kvbench.report.figures.all import draw
from kvbench.report.site.rows import Site
from kvbench.runs.summary import is_unbounded, summarise
from kvbench.runs.sweep import run

STEPS = 64


def audited(mean: float, most: int, **more: Any) -> dict[str, Any]:
    return {"budget": 64, "attended_mean": mean, "attended_max": most, "device_kv_bytes": 2**20, **more}


WHOLE = audited(1024 + (STEPS + 1) / 2, 1024 + STEPS)
CUT = audited(80.0, 96)


def samples(audits: list[dict[str, Any]], score: float = 1.0) -> list[dict[str, Any]]:
    return [record(str(n), "", score if n else 0.0, audit=audit) for n, audit in enumerate(audits)]


@pytest.mark.parametrize(
    ("audit", "never", "more"),
    [
        (WHOLE, True, {}),
        (audited(1056.5 - STEPS / 256, 1024 + STEPS), False, {}),  # one head of 256 attends one token less in a step
        (audited(1056.0, 1024 + STEPS), False, {}),
        (audited(1033.0, 1034), False, {}),  # a C of ten tokens more than the prompt, over many steps
        (CUT, False, {}),
        ({**WHOLE, "budget": None}, False, {}),  # full attention has none
        ({}, False, {}),
        (audited(1056, 1088), True, {"question_tokens": 1}),  # the question's last token was a step
        (audited(1056.5, 1088, turn_tokens=9), True, {"question_tokens": 9}),  # read at once: no steps
    ],
)
def test_what_attended_all_tokens_in_every_step_had_no_budget(
    audit: dict[str, Any], never: bool, more: dict[str, Any]
) -> None:
    assert is_unbounded({"prompt_tokens": 1024, "audit": audit, **more}) is never


def test_a_summary_counts_them_where_there_are_any() -> None:
    assert summarise(samples([WHOLE, CUT]), "accuracy")["unbounded_samples"] == 1
    assert "unbounded_samples" not in summarise(samples([CUT, CUT]), "accuracy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Full attention, and three methods: one never cut, one did in half of its samples, one always."""
    stored(tmp_path, "full", None, samples([WHOLE] * 20))  # old audits of full attention name a budget
    stored(tmp_path, "snapkv_decode", 64, samples([WHOLE] * 20))
    stored(tmp_path, "tova_decode", 64, samples([WHOLE, CUT] * 10, 0.5))
    stored(tmp_path, "quest", 64, samples([CUT] * 20, 0.75))
    return tmp_path


def test_tables_mark_them_and_say_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line["method"]: line for line in csv_lines(capsys, folder)}
    assert {name: line["marks"] for name, line in lines.items()} == {
        "full": "",
        "snapkv_decode": "x",
        "tova_decode": "y",
        "quest": "",
    }
    assert lines["snapkv_decode"]["unbounded_samples"] == "20.0" and lines["tova_decode"]["unbounded_samples"] == "10.0"
    for words in ([], ["--format", "markdown"], ["--rows", "method", "--values", "attended_mean"]):
        main([str(folder), *words])
        told = capsys.readouterr().out
        assert "(x)" in told.replace("\\", "") and "x: its budget never applied" in told


def test_they_rank_nobody(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(folder), "--rows", "method", "--format", "latex"])
    lines = {line.partition(" &")[0]: line for line in capsys.readouterr().out.splitlines() if "&" in line}
    assert "textbf" in lines["Quest"] and "textbf" not in lines["SnapKV, decode"]
    main([str(folder), "--rows", "method", "--sort", "--format", "markdown"])
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [name for name in rows if name in ("quest", "snapkv_decode")] == ["quest", "snapkv_decode"]
    rows_of_site = {row.method: row for row in Site(collect([folder]), "").rows}
    assert rows_of_site["quest"].is_choice and not rows_of_site["snapkv_decode"].is_choice


def test_figures_leave_them_out_by_name(folder: Path) -> None:
    told = draw("budget", collect([folder])).legends[0].get_title().get_text()
    assert "SnapKV, decode 64" in told and "budget never applied" in told and "Quest" not in told
    alone = collect([folder])
    alone = alone.only([one for one in alone if one.arm["method"] == "snapkv_decode"])
    with pytest.raises(ConfigError, match="budget never applied"):
        draw("budget", alone)


def test_no_claim_is_decided_by_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "beds", lambda: {"made": Bed(("task=passkey",), "run it")})

    def found(method: str) -> Finding | Missing:
        asked = {"bed": "made", "value": "score", "of": f"method={method} budget=64", "less": "method=full"}
        return sampled.sampled(collect([folder]), asked)

    never, partly, always = map(found, ("snapkv_decode", "tova_decode", "quest"))
    assert isinstance(never, Missing) and "method=snapkv_decode budget=64 never applied" in never.why
    assert isinstance(partly, Finding) and "never applied in 10 of 20" in partly.note
    assert isinstance(always, Finding) and not always.note


def test_given_tokens_that_end_before_the_first_cut_are_refused_by_name(tmp_path: Path) -> None:
    words = ["model=dummy-tiny", "task=fidelity", "task.lengths=[200]", "task.samples=1", f"results_dir={tmp_path}"]
    cases = (("snapkv_decode", "method.interval=8", 9), ("raas", "method.page_size=1", 41))
    for method, option, step in cases:
        own = [*words, f"method={method}", option, "budget=40"]
        with pytest.raises(ConfigError, match=rf"^task.steps={step - 1}: {method} .* step {step}.* {step} or more"):
            run(composed(*own, f"task.steps={step - 1}"))
        summary = run(composed(*own, f"task.steps={step}"))
        assert "unbounded_samples" not in summary
    run(composed(*words, "method=raas", "budget=40", "task.steps=2", "protocol.accounting=unified"))
