"""Probes against a plain recount, one query head at a time."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import driver
import pytest
import torch
from driver import SMALL, Driven, Stream, drive, numbers, run_loop, stream

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.engine.batch import generate
from kvbench.engine.engine import Engine
from kvbench.measure.job import measured
from kvbench.method import Method, Needs, Selection
from kvbench.runs.sweep import run

# The probe computes in fp32, the recount in fp64; every measure is of the order of 1.
NEAR = 1e-5


class Wanderer(Method):
    """Attends the current token and some others, about half of them those of the step before.

    Args:
        heads: lists of tokens a layer makes, 1, Hkv or Hq.
    """

    def __init__(self, heads: int, home: str = "device") -> None:
        self.heads, self.needs = heads, Needs(home=home)  # type: ignore[arg-type]

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.last: dict[tuple[int, int, int], list[int]] = defaultdict(list)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        index = torch.full((self.shape.batch, self.heads, 9), -1)
        for row, length in enumerate(self.view.lengths(layer)):
            for head in range(self.heads):
                rng = random.Random(f"{layer}/{row}/{head}/{length}")
                chosen = {length - 1, *self.last[layer, row, head][::2], *rng.sample(range(length), k=3 + row)}
                self.last[layer, row, head] = ids = sorted(chosen)[:9]
                index[row, head, : len(ids)] = torch.tensor(ids)
        return Selection(index)

    def rule(self, layer: int, length: int, generated: int) -> None:
        return None


def probed(monkeypatch: pytest.MonkeyPatch, every: int, fixed: Stream, method: Method, *arguments: Any) -> Driven:
    """A driven engine that probes every n-th step."""
    with monkeypatch.context() as patch:
        patch.setattr(driver, "Engine", partial(Engine, probe_every=every))
        return drive(fixed, method, *arguments)


def recount(fixed: Stream, driven: Driven, every: int) -> dict[str, list[list[float]]]:
    """Every measure as [layers][query heads], means over rows and measured steps."""
    layers, batch, query_heads, _, _ = fixed.queries.shape
    kv_heads = fixed.keys.shape[2]
    values: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    history: dict[tuple[int, int, int], list[set[int]]] = defaultdict(list)
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            lists = at.sets(row)
            for head in range(query_heads):
                kv_head = head * kv_heads // query_heads
                chosen = lists[{1: 0, kv_heads: kv_head, query_heads: head}[len(lists)]]
                earlier = history[at.layer, row, head]
                if (at.step - 1) % every == 0:
                    key, value = (part[at.layer, row, kv_head, :length].double() for part in (fixed.keys, fixed.values))
                    query = fixed.queries[at.layer, row, head, length - 1].double()
                    weights = (key @ query * fixed.scaling).softmax(0)
                    best = set(weights.argsort(descending=True)[: len(chosen)].tolist())
                    full, out = weights @ value, driven.outputs[at.step - 1, at.layer, row, head].double()

                    def note(name: str, number: float, place: tuple[int, int] = (at.layer, head)) -> None:
                        values[name, *place].append(number)

                    note("recall", len(chosen & best) / len(chosen))
                    note("mass", float(weights[sorted(chosen)].sum()))
                    note("error", float((out - full).norm() / full.norm()))
                    if earlier:
                        note("jaccard", len(chosen & earlier[-1]) / len(chosen | earlier[-1]))
                        note("seen", len(chosen & set().union(*earlier[-32:])) / len(chosen))
                earlier.append(chosen)
    names = {name for name, _, _ in values}

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / len(numbers)

    return {
        name: [[mean(values[name, layer, head]) for head in range(query_heads)] for layer in range(layers)]
        for name in names
    }


def check(report: dict[str, Any], expected: dict[str, list[list[float]]]) -> None:
    assert set(report) == {*expected, "layers", "steps"}
    for name, layers in expected.items():
        for layer, heads in enumerate(layers):
            assert report["layers"][str(layer)][name] == pytest.approx(heads, abs=NEAR), name
        flat = [number for heads in layers for number in heads]
        assert report[name] == pytest.approx(sum(flat) / len(flat), abs=NEAR), name


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("every", "home"), [(1, "device"), (3, "device"), (1, "host")])
def test_probe_equals_a_recount(monkeypatch: pytest.MonkeyPatch, heads: int, every: int, home: str) -> None:
    """Forty steps: `seen` looks back 32 of them."""
    fixed = stream(60, 41, steps=40, head_dim=8)
    driven = probed(monkeypatch, every, fixed, Wanderer(heads, home), None)
    assert driven.engine.probe is not None
    expected = recount(fixed, driven, every)
    check(driven.engine.probe.report(), expected)
    assert len({round(number, 3) for layers in expected.values() for row in layers for number in row}) > 20


@pytest.mark.parametrize("name", ["snapkv", "quest", "topk", "streaming_llm"])
def test_probe_of_a_method_equals_a_recount(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Evicted tokens count as not selected: the probe has its own copy of all keys."""
    options = {"positions": "original"} if name == "streaming_llm" else {}  # driven engines have no RoPE
    fixed = stream(150, 97, steps=6)
    driven = probed(monkeypatch, 2, fixed, method_named(name, **options), SMALL)
    assert driven.engine.probe is not None
    report = driven.engine.probe.report()
    check(report, recount(fixed, driven, 2))
    assert report["recall"] == pytest.approx(1) if name == "topk" else report["recall"] < 0.9


def test_full_attention_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = probed(monkeypatch, 1, stream(60, 41), method_named("full"), None)
    assert driven.engine.probe is not None
    report = driven.engine.probe.report()
    assert report["recall"] == 1
    assert report["mass"] == pytest.approx(1, abs=NEAR)
    assert report["error"] < NEAR


def test_probe_measures_every_nth_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One measured step of five has no step before it, so it knows nothing of stability."""
    fixed = stream(60, steps=5)
    driven = probed(monkeypatch, 5, fixed, Wanderer(2), None)
    assert driven.engine.probe is not None
    report = driven.engine.probe.report()
    assert set(report) == {"recall", "mass", "error", "layers", "steps"}
    check(report, recount(fixed, driven, 5))


def test_each_measured_step_has_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = stream(60, 41, steps=8)
    driven = probed(monkeypatch, 3, fixed, Wanderer(2), None)
    assert driven.engine.probe is not None
    report = driven.engine.probe.report()
    steps = report["steps"]
    assert steps["step"] == [1, 4, 7]
    assert set(steps) == {"step", "recall", "mass", "error", "jaccard", "seen"}
    assert len(set(steps["recall"])) > 1
    for name in ("recall", "mass", "error"):
        assert sum(steps[name]) / 3 == pytest.approx(report[name], abs=1e-4), "rounded to four decimals"
    for name in ("jaccard", "seen"):
        assert steps[name][0] is None
        assert sum(steps[name][1:]) / 2 == pytest.approx(report[name], abs=1e-4)
    # One step alone, as a run that measures no other sees it.
    last = probed(monkeypatch, 6, fixed, Wanderer(2), None).engine.probe
    assert last is not None and last.report()["steps"]["recall"][1] == steps["recall"][2]


def test_dense_layers_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(driver, "Engine", partial(Engine, probe_every=1))
        driven = drive(stream(60), Wanderer(1), None, dense_layers=(0,))
    assert driven.engine.probe is not None
    assert set(driven.engine.probe.report()["layers"]) == {"1"}


RAGGED = [numbers(150, seed=1), numbers(97, seed=2)]


@pytest.mark.parametrize("name", ["full", "snapkv", "quest", "streaming_llm"])
def test_probe_changes_neither_tokens_nor_audit(tiny: Loaded, name: str) -> None:
    plain, _ = run_loop(tiny, RAGGED, method_named(name), SMALL, steps=7)
    probing = probing_run(tiny, method_named(name))
    assert plain.probe == {}
    assert probing.probe["layers"].keys() == {"0", "1", "2", "3"}
    assert probing.tokens == plain.tokens
    assert probing.audit == plain.audit


def probing_run(loaded: Loaded, method: Method) -> Any:
    lengths = list(map(len, RAGGED))
    engine = engine_for(loaded.model, lengths, method, Budget(SMALL), (), new_tokens=8, probe_every=2)
    return generate(ModelRunner(loaded.model), RAGGED, engine, max_new_tokens=8)


def test_probed_run_publishes_no_timings(tiny: Loaded) -> None:
    timed, _ = run_loop(tiny, RAGGED, method_named("quest"), SMALL, steps=7)
    with_times = measured(timed, probed=False)
    assert {"ttft_s", "tpot_ms", "breakdown_ms"} <= set(with_times)
    assert "probe" not in with_times
    probing = measured(probing_run(tiny, method_named("quest")), probed=True)
    assert set(probing) == {"probe"}
    assert 0 < probing["probe"]["recall"] < 1


def test_a_question_read_at_once_is_part_of_what_is_compared(tmp_path: Path) -> None:
    words = ["model=dummy-tiny", "task=passkey", "task.lengths=[300]", "task.limit=1", "protocol.question=after"]
    summary = run(composed(*words, "method=full", "probe.every=1", f"results_dir={tmp_path}"))
    assert (summary["n"], summary["failed"]) == (1, 0)
    assert summary["probe"]["recall"] == 1 and summary["probe"]["mass"] == pytest.approx(1, abs=NEAR)
