"""The statistics of `task=fidelity`: llama.cpp's numbers, a slow reference, and where they are shown."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import torch
from report_runs import csv_lines, record, stored

from kvbench.cli.report import main as report
from kvbench.measure.fidelity import Comparison
from kvbench.report.data.frame import collect
from kvbench.runs.quantities import QUANTITIES
from kvbench.runs.stored import json_in
from kvbench.runs.summary import summarise

# What llama.cpp's `perplexity --kl-divergence` prints of the input below, probabilities as shares of 1.
PRINTED = """
perplexity 57.653031, perplexity_error 10.350071, perplexity_full 57.133300, ln_perplexity_ratio .009056,
ln_perplexity_ratio_error .012546, nll_correlation .9976, kl_mean .008407, kl_mean_error .000286, kl_max .017647,
kl_p99 .016695, kl_p50 .008785, delta_p_mean -.00047, delta_p_mean_error .00123, delta_p_rms .01383,
delta_p_rms_error .00132, delta_p_p95 .02716, delta_p_p5 -.02571, same_top .63281, same_top_error .04277
"""


def test_the_numbers_are_those_that_llama_cpp_prints() -> None:
    i, j = torch.arange(128.0, dtype=torch.float64)[:, None], torch.arange(16.0, dtype=torch.float64)
    full = 3 * torch.sin(1 + 0.7 * i + 1.3 * j + 0.17 * i * j)
    ours = full + 0.2 * torch.sin(2 + 0.9 * i + 0.31 * j + 0.05 * i * j)
    reference = full.float().log_softmax(dim=-1)
    least, most = reference.amin(dim=-1, keepdim=True), reference.amax(dim=-1, keepdim=True)
    step = (most - least) / 65535  # its file of full attention's log-probabilities has 16 bits of each
    targets = [(7 * k + 3) % 16 for k in range(128)]
    comparison = Comparison([*(least + step * ((reference - least) / step).round())], targets)
    for logits in ours.float():
        comparison(logits[None])
    found = near_of(comparison.record())
    for name, printed in (line.split() for line in PRINTED.split(",")):
        last = 10.0 ** -len(printed.partition(".")[2])
        assert found[name] == pytest.approx(float(printed), abs=0.6 * last, rel=1e-7), name


def near_of(*parts: dict[str, Any]) -> dict[str, float]:
    """The `fidelity` of the summary of samples of which these are `Comparison.record`."""
    samples = []
    for number, part in enumerate(parts):
        pairs = [*zip(part["answers"][0].split(), part["output"].split(), strict=True)]
        samples.append({"id": str(number), "scores": {"agreement": fmean(a == b for a, b in pairs)}, **part})
    found: dict[str, float] = summarise(samples, "agreement")["fidelity"]
    return found


def stretch(n: int, seed: int) -> tuple[dict[str, Any], list[tuple[float, float, float]], int]:
    """What a sample of n steps stores without answers and output, its kl, nll and nll_full by step, and equal tops."""
    draw = random.Random(seed)
    steps = [(draw.expovariate(9), own := draw.expovariate(1), own * draw.uniform(0.5, 1.6)) for _ in range(n)]
    same = draw.randint(n // 2, n)
    by_name = dict(zip(("kl", "nll", "nll_full"), map(list, zip(*steps, strict=True)), strict=True))
    means = {"kl_mean": fmean(by_name["kl"]), "nll": fmean(by_name["nll"]), "nll_full": fmean(by_name["nll_full"])}
    return record(str(seed), "", same / n, fidelity={**means, "steps": by_name}), steps, same


def test_every_statistic_is_that_of_a_slow_reference_over_the_tokens_of_all_samples() -> None:
    (one, first, some), (two, second, more) = stretch(500, 1), stretch(500, 2)
    found = summarise([one, two], "accuracy")["fidelity"]
    tokens, n = first + second, 1000

    def error(values: list[float]) -> float:
        return math.sqrt((sum(value * value for value in values) / n - fmean(values) ** 2) / (n - 1))

    def percentile(values: list[float], p: float) -> float:
        low, part = divmod(p / 100 * (n - 1), 1)
        ordered = [*sorted(values), math.inf]
        return ordered[int(low)] + (part * (ordered[int(low) + 1] - ordered[int(low)]) if part else 0)

    kl, nll, base = map(list, zip(*tokens, strict=True))
    moved = [math.exp(-a) - math.exp(-b) for a, b in zip(nll, base, strict=True)]
    apart = [a - b for a, b in zip(nll, base, strict=True)]
    squares, same = [value**2 for value in moved], (some + more) / n
    rms, covariance = math.sqrt(fmean(squares)), fmean(a * b for a, b in zip(nll, base, strict=True))
    covariance = (covariance - fmean(nll) * fmean(base)) / (n - 1)
    expected = {
        "kl_mean": fmean(kl),
        "kl_mean_error": error(kl),
        "kl_p50": median(kl),
        "kl_max": max(kl),
        "tokens": n,
        "nll": fmean(nll),
        "nll_full": fmean(base),
        "nll_correlation": covariance / (error(nll) * error(base)),
        "perplexity": math.exp(fmean(nll)),
        "perplexity_error": math.exp(fmean(nll)) * error(nll),
        "perplexity_full": math.exp(fmean(base)),
        "perplexity_full_error": math.exp(fmean(base)) * error(base),
        "ln_perplexity_ratio": fmean(apart),
        "ln_perplexity_ratio_error": error(apart),
        "perplexity_ratio": math.exp(fmean(nll)) / math.exp(fmean(base)),
        "perplexity_ratio_error": math.exp(fmean(apart)) * error(apart),
        "delta_p_mean": fmean(moved),
        "delta_p_mean_error": error(moved),
        "delta_p_rms": rms,
        "delta_p_rms_error": error(squares) / (2 * rms),
        "same_top": same,
        "same_top_error": math.sqrt(same * (1 - same) / (n - 1)),
        **{f"kl_p{p}".replace(".", "_"): percentile(kl, p) for p in (90, 95, 99, 99.9)},
        **{
            f"delta_p_p{p}".replace(".", "_"): percentile(moved, p)
            for p in (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
        },
        **{f"kl_q{q}": fmean(kl[125 * q - 125 : 125 * q] + kl[375 + 125 * q : 500 + 125 * q]) for q in (1, 2, 3, 4)},
        "kl_stderr": abs(fmean(kl[:500]) - fmean(kl[500:])) / 2,
        "ln_perplexity_ratio_stderr": abs(fmean(apart[:500]) - fmean(apart[500:])) / 2,
    }
    assert found == pytest.approx(expected, rel=1e-9)
    assert expected.keys() == {name for name, line in QUANTITIES.items() if line.part == "fidelity"}


def test_few_tokens_have_no_errors_and_no_percentiles_beyond_them() -> None:
    few, some = (summarise([stretch(n, 3)[0]], "accuracy")["fidelity"] for n in (10, 99))
    assert not [name for name in few if name.endswith(("_error", "_stderr"))]
    assert "kl_q1" in some and "kl_q1" not in few
    assert "kl_p90" in few and "kl_p95" not in few and "kl_p50" in few
    assert "kl_p95" in some and "kl_p99" not in some and "delta_p_p1" not in some and "delta_p_mean_error" in some


def test_reports_show_a_selection_with_errors_and_all_that_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    folder = stored(tmp_path, samples=[stretch(60, seed)[0] for seed in range(2)], task="fidelity")
    near = json_in(folder / "summary.json")["fidelity"]
    assert collect([tmp_path]).arms["delta_p_p99"].item() == pytest.approx(near["delta_p_p99"])
    ratio, rms = (
        f"{scale * near[name]:.{digits}f} ± {scale * near[f'{name}_error']:.{digits}f}"
        for name, scale, digits in (("perplexity_ratio", 1, 4), ("delta_p_rms", 100, 2))
    )
    for form, sign in (("console", "±"), ("markdown", "±"), ("latex", r"$\pm$")):
        assert report([str(tmp_path), "--format", form]) == 0
        shown = capsys.readouterr().out
        assert ratio.replace("±", sign) in shown and rms.replace("±", sign) in shown
    (line,) = csv_lines(capsys, tmp_path, "--rows", "budget", "--values", "fidelity")
    assert float(line["delta_p_rms_error"]) == pytest.approx(near["delta_p_rms_error"])
    absent = {"kl_p99_9", "delta_p_p0_1", "delta_p_p99_9"}
    assert near.keys() - {"kl_stderr"} <= line.keys() and not absent & line.keys()
