"""KVzap: the maps that guess KVzip+'s scores, how they are made, and what stays by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import PROMPT, TEMPLATE, Stream, drive, head_scores, run_loop, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.cli import calibrate
from kvbench.cli.compose import composed
from kvbench.config import ASSETS, ConfigError, bind_methods, shipped
from kvbench.engine.replay import Template
from kvbench.measure import calibration
from kvbench.method import HeadScores
from kvbench.models import heads
from kvbench.runs.run import identity, prepare

bind_methods()

from methods.kvzap import RIDGE, Regression, _explained, _ridge  # noqa: E402

# -- what stays --------------------------------------------------------------------------------------------------------


def guessed(fixed: Stream, scores: HeadScores, row: int, layer: int, before: int) -> list[list[float]]:
    """[Hkv][n], a token at a time; what attention reads are all keys of a token, in these tests."""
    length = fixed.lengths[row]
    states = fixed.keys[layer, row, :, :length].transpose(0, 1).flatten(1).double().numpy()
    maps = np.array(scores.surrogate[layer])
    worth = states @ maps[:, :-1].T + maps[:, -1]
    worth[:before] = math.inf
    return list(map(list, worth.T))


@settings(max_examples=12)
@given(st.data())
def test_what_the_maps_score_best_stays_of_all_layers_and_heads(data: st.DataObject) -> None:
    """Any groups, ragged rows, windows; a budget, or a threshold below one."""
    group, kv_heads = data.draw(st.sampled_from([1, 2, 3, 5, 7]), "group"), data.draw(st.integers(1, 2), "KV heads")
    head_dim, layers = data.draw(st.sampled_from([16, 20, 64]), "head_dim"), data.draw(st.integers(1, 3), "layers")
    before, window = data.draw(st.integers(0, 3), "before"), data.draw(st.sampled_from([0, 5]), "window")
    lengths = data.draw(st.lists(st.integers(12, 40), min_size=1, max_size=2), "lengths")
    budget = data.draw(st.integers(10, 24), "budget")
    threshold = data.draw(st.sampled_from([None, -2.0, 1.0]), "threshold")
    sizes = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": layers}
    fixed = stream(*lengths, steps=2, seed=data.draw(st.integers(0, 99), "seed"), **sizes)
    fixed.tokens[:, :before] = torch.arange(before)
    scores = head_scores(layers, kv_heads, group * kv_heads, head_dim)
    template = Template(TEMPLATE.encode, tuple(range(before)), (3, 4))
    method = method_named("kvzap", window=window, threshold=threshold)
    driven = drive(fixed, method, budget, template=template, scores=scores)
    for row, length in enumerate(lengths):
        pairs = [(layer, head, token) for layer in range(layers) for head in range(kv_heads) for token in range(length)]
        worth = {layer: guessed(fixed, scores, row, layer, before) for layer in range(layers)}
        last = range(length - window, length)

        def of(pair: tuple[int, int, int], worth: Any = worth, last: range = last) -> float:
            return math.inf if pair[2] in last else worth[pair[0]][pair[1]][pair[2]]

        best = sorted(pairs, key=lambda pair: -of(pair))[: min(budget, length) * layers * kv_heads]
        kept = {pair for pair in best if threshold is None or of(pair) >= threshold}
        for at in driven.seen:
            new = {*range(length, length + at.step)}
            expected = [
                {token for layer, own, token in kept if (layer, own) == (at.layer, head)} | new
                for head in range(kv_heads)
            ]
            assert at.sets(row) == expected
    assert not driven.audit["over_rule"]


def test_the_published_form_keeps_what_scores_the_threshold_and_the_window() -> None:
    fixed = stream(300, steps=1)
    scores = head_scores(2, 2, 4)
    method = method_named("kvzap_threshold", threshold=2.0)
    driven = drive(fixed, method, 1.0, scores=scores, template=Template(TEMPLATE.encode, (999,)))
    for at in driven.seen:
        worth = guessed(fixed, scores, 0, at.layer, 0)
        for head, tokens in enumerate(at.sets(0)):
            assert tokens == {token for token in range(301) if token >= 172 or worth[head][token] >= 2}


# -- how the maps are made ---------------------------------------------------------------------------------------------


def test_sums_give_the_weights_and_the_share_that_they_explain() -> None:
    rng = np.random.default_rng(0)
    states, noise = rng.normal(size=(400, 6)), rng.normal(size=(400, 2))
    scores = states @ rng.normal(size=(6, 2)) + 3 + 0.5 * noise
    rows = np.concatenate([states, np.ones((400, 1)), scores], axis=1)
    sums = torch.tensor(rows.T @ rows)
    weights = _ridge(sums, 2).numpy()
    centred = states - states.mean(axis=0)
    slopes = np.linalg.solve(centred.T @ centred + RIDGE * np.eye(6), centred.T @ (scores - scores.mean(axis=0)))
    np.testing.assert_allclose(weights[:-1], slopes, atol=1e-9)
    left = scores - states @ weights[:-1] - weights[-1]
    r2 = 1 - (left**2).sum(axis=0) / ((scores - scores.mean(axis=0)) ** 2).sum(axis=0)
    assert _explained(sums, torch.tensor(weights)) == pytest.approx(r2.mean(), abs=1e-4)


def test_a_model_is_calibrated_once_and_scored_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A map of random weights says something of texts that it has not seen; and who has none says how to make it."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "PROSE_TOKENS", 80)
    words = ["method=kvzap", "model=dummy-qwen3", "task=passkey", "task.lengths=[256]", f"results_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="^method.surrogate=auto: .* calibrate method=kvzap model=dummy-qwen3"):
        composed(*words)
    assert calibrate.main(["method=kvzap", "model=dummy-qwen3", "dtype=float32"]) == 0
    file = tmp_path / "surrogate" / "dummy-qwen3.json"
    assert capsys.readouterr().out.strip() == str(file)
    arm = prepare(composed(*words, "dtype=float32"))
    assert arm.calibration is not None and arm.calibration == heads.read(file, "surrogate")
    assert identity(arm)["config"]["method"]["surrogate"] == arm.calibration.digest
    assert max(arm.calibration.procedure["r2"]) > 0.1
    other = ASSETS / "heads" / "dummy-tiny.json"
    with pytest.raises(ConfigError, match="^method.surrogate=.*dummy-tiny.json: no head scores: 'surrogate'"):
        composed(*words, f"method.surrogate={other}")


def test_the_shipped_maps_are_of_the_shipped_models() -> None:
    for file in (ASSETS / "surrogate").glob("*.json"):
        found, model = heads.read(file, "surrogate"), shipped("model", file.stem)
        assert model is not None and found.model == file.stem
        config, maps = model["config"], found.scores.surrogate
        sizes = config["num_hidden_layers"], config["num_key_value_heads"], config["hidden_size"] + 1
        assert (len(maps), len(maps[0]), len(maps[0][0])) == sizes and len(found.procedure["r2"]) == sizes[0]


def test_the_target_is_the_logarithm_of_what_kvzip_plus_gives(tiny: Loaded) -> None:
    """The last columns of the sums, against KVzip+'s own scores of the same prompt."""
    fit = Regression(plus=True)
    teacher = method_named("kvzip_plus")
    noted: dict[int, torch.Tensor] = {}
    score = teacher.score  # type: ignore[attr-defined]
    teacher.score = lambda layer, prompt: noted.setdefault(layer, score(layer, prompt))  # type: ignore[attr-defined]
    for method in (fit, teacher):
        run_loop(tiny, [PROMPT], method, 1.0, steps=1)
    kv_heads = fit.shape.kv_heads
    for layer, sums in fit.sums.items():
        scores = noted[layer][0][:, noted[layer][0, 0].isfinite()]
        torch.testing.assert_close(sums[-kv_heads - 1, -kv_heads:], scores.log().sum(dim=1).double(), rtol=1e-4, atol=0)
        assert sums[-kv_heads - 1, -kv_heads - 1] == scores.shape[1]


def test_maps_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="^method.surrogate: maps of 40 numbers, and hidden states have 32"):
        drive(stream(60), method_named("kvzap"), 20, scores=head_scores(2, 2, 4, hidden=40))
