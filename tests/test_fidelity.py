"""`task=fidelity`: a method and full attention read the same given tokens, and are compared at every step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from rich.console import Console

from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.cli.compose import composed
from kvbench.cli.score import rescore
from kvbench.config import ConfigError
from kvbench.measure.work import work_of
from kvbench.runs.run import prepare
from kvbench.runs.sweep import run, run_shared
from kvbench.tasks.fidelity import Fidelity

WORDS = ["model=dummy-tiny", "task=fidelity", "dtype=float32", "task.lengths=[200]", "task.steps=12", "task.samples=2"]


def configured(tmp_path: Path, *words: str) -> Any:
    return composed(*WORDS, f"results_dir={tmp_path}", *words)


def records(tmp_path: Path, arm: str) -> list[dict[str, Any]]:
    (file,) = tmp_path.glob(f"runs/fidelity/*/{arm}/*/samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("words", [["method=full"], ["method=topk", "budget=300"], ["method=quest", "budget=256"]])
def test_what_attends_everything_is_full_attention(tmp_path: Path, words: list[str]) -> None:
    summary = run(configured(tmp_path, *words))
    assert summary["score"] == 100.0
    assert summary["fidelity"]["kl_max"] < 1e-6
    assert summary["fidelity"]["nll"] == pytest.approx(summary["fidelity"]["nll_full"], abs=1e-6)


def test_samples_of_given_tokens_have_a_share_in_the_work_by_their_length(tmp_path: Path) -> None:
    config: Any = configured(tmp_path, "task.lengths=[100,200]")
    work = work_of(prepare(config), None, ())
    shares = {sample.id: work.share(sample) for sample in work.samples}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["fidelity-200-0"] / shares["fidelity-100-0"] == pytest.approx((200 + 13) / (100 + 13))


def test_every_step_has_its_divergence_and_the_likelihood_of_the_text(tmp_path: Path) -> None:
    summary = run(configured(tmp_path, "method=streaming_llm", "budget=16"))
    found = summary["fidelity"]
    assert 0 < found["kl_mean"] <= found["kl_p95"] <= found["kl_max"]
    one, other = (record["fidelity"]["kl_mean"] for record in records(tmp_path, "streaming_llm-16"))
    assert found["kl_stderr"] == pytest.approx(abs(one - other) / 2)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["perplexity_full"] == pytest.approx(math.exp(found["nll_full"]))
    for record in records(tmp_path, "streaming_llm-16"):
        steps = record["fidelity"]["steps"]
        assert [len(steps[name]) for name in ("kl", "nll", "nll_full")] == [12] * 3
        assert len(record["output"].split()) == len(record["answers"][0].split()) == 12


def test_the_reference_is_the_model_read_in_one_piece(tmp_path: Path) -> None:
    """Full attention's likelihood of the given tokens, against one forward pass over prompt and tokens by sdpa."""
    from kvbench.backends.hf.loading import load

    config = configured(tmp_path, "method=snapkv", "budget=64", "task.samples=1")
    run(config)
    loaded = load(config.model, "cpu", "float32")
    (sample,) = Fidelity([200], steps=12, samples=1).samples(loaded.tokenizer, 0)
    assert sample.forced is not None
    prompt, given = list(sample.forced.prompt), list(sample.forced.tokens)
    assert (len(prompt), len(given)) == (200, 13)
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*prompt, *given]])).logits[0].float()
    expected = -logits.log_softmax(dim=-1)[len(prompt) : -1].gather(1, torch.tensor(given[1:])[:, None])[:, 0]
    (record,) = records(tmp_path, "snapkv-64")
    assert record["fidelity"]["steps"]["nll_full"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_one_thread_and_two_find_the_same(tmp_path: Path) -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            words = ["method=icecache", "budget=64", f"threads={count}", f"results_dir={tmp_path / str(count)}"]
            found.append(run(configured(tmp_path, *words))["fidelity"])
    finally:
        torch.set_num_threads(threads)
    one, two = found
    assert one.keys() == two.keys()
    # Logits agree to 1e-5; a perplexity is e to the power of their logarithm.
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_shared_prefill_gives_what_an_own_one_gives(tmp_path: Path) -> None:
    arms = [["method=full"], ["method=icecache", "budget=64"], ["method=snapkv", "budget=64"]]
    shared = [configured(tmp_path / "shared", *arm, "sweep.shared_decode=false") for arm in arms]
    run_shared(shared, Console(quiet=True))
    for arm, name in zip(arms, ("full", "icecache-64", "snapkv-64"), strict=True):
        run(configured(tmp_path / "own", *arm))
        pairs = zip(records(tmp_path / "shared", name), records(tmp_path / "own", name), strict=True)
        assert all(one["fidelity"] == other["fidelity"] and one["output"] == other["output"] for one, other in pairs)


def test_stored_outputs_score_the_same_without_a_model(tmp_path: Path) -> None:
    run(configured(tmp_path, "method=streaming_llm", "budget=16"))
    (folder,) = tmp_path.glob("runs/fidelity/*/*/*")
    assert rescore(folder).changed == []


def test_a_stretch_never_goes_on_into_another_text(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 300)
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"context": letter * 250}) + "\n" for letter in "bc"))
    (tmp_path / "short.txt").write_text("d" * 30)
    task = Fidelity([100], steps=20, samples=6, texts=str(tmp_path))
    samples = list(task.samples(byte_tokenizer(), seed=1))
    assert len(samples) == len(task) == 6
    seen = set()
    for sample in samples:
        assert sample.forced is not None and len(sample.forced.prompt) == 100 and len(sample.forced.tokens) == 21
        (letter,) = set(sample.forced.prompt[1:]) | set(sample.forced.tokens)
        seen.add(chr(letter))
    assert seen == {"a", "b", "c"}


def test_texts_of_a_file_of_lines_may_hold_what_else_ends_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"context": text}, ensure_ascii=False) for text in ("one\u2028two\x85three", "four")]
    (tmp_path / "books.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert Fidelity([1], texts=str(tmp_path)).texts == {"books-1": "one\u2028two\x85three", "books-3": "four"}
    (tmp_path / "books.jsonl").write_text('{"content": "one"}\n')
    with pytest.raises(ValueError, match=r"books\.jsonl, line 1: field context: missing"):
        _ = Fidelity([1], texts=str(tmp_path)).texts


def test_a_longer_run_begins_with_the_shorter_ones_samples() -> None:
    few, many = (list(Fidelity([300], 8, count).samples(byte_tokenizer(), 0)) for count in (2, 5))
    assert [sample.forced for sample in many[:2]] == [sample.forced for sample in few]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.steps=0"], "task.steps=0: expected a whole number, 1 or more"),
        (["task.texts=nowhere.txt"], "task.texts: nowhere.txt: no such file"),
        (["task.texts=EMPTY"], "no .txt or .jsonl file in this folder"),
        (["task.lengths=[0]"], r"task.lengths=\[0\]: expected different whole numbers"),
    ],
)
def test_bad_input_is_one_line_before_a_model_loads(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, *(word.replace("EMPTY", str(tmp_path / "empty")) for word in words))


def test_a_text_shorter_than_asked_for_says_how_long_it_is(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match=r"200 tokens and 12 steps"):
        run(configured(tmp_path / "results", f"task.texts={tmp_path / 'short.txt'}"))


@pytest.mark.slow
def test_the_figures_draw_what_the_runs_hold(tmp_path: Path) -> None:
    from kvbench.report.data.frame import collect
    from kvbench.report.figures import all as figures

    run(configured(tmp_path, "method=full"))
    with pytest.raises(ConfigError, match="figure=drift: .*task=fidelity"):
        figures.draw("drift", collect([tmp_path]))
    more = "task.samples=3"  # of fewer texts no line is drawn over steps
    run(configured(tmp_path, "method=full", more))
    arms = [configured(tmp_path, "method=snapkv", f"budget={size}", more) for size in (48, 96)]
    found = {arm.budget: run(arm)["fidelity"]["kl_mean"] for arm in arms}
    runs = collect([tmp_path])
    (against_budget, *_) = figures.draw("fidelity", runs).axes
    line, _front = against_budget.lines
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(found)
    (over_steps,) = figures.draw("drift", runs).axes
    for name in ("fidelity", "drift"):
        figures.write(figures.draw(name, runs), tmp_path / f"{name}.png")
        pixels = image.imread(tmp_path / f"{name}.png")
        assert pixels.shape[1] >= 1400 and pixels.std() > 0.05, "blank"
    steps = [record["fidelity"]["steps"]["kl"] for record in records(tmp_path, "snapkv-48")]
    first = sum(sum(own[:8]) for own in steps) / (8 * len(steps))
    assert over_steps.lines[0].get_ydata()[0] == pytest.approx(first)
