"""RazorAttention: which heads retrieve, what each head attends, and what its compensation token stands for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CLOSE, Driven, Stream, drive, head_scores, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench import KVCache
from kvbench.backends.hf.loading import Loaded, load
from kvbench.backends.hf.model import method_named
from kvbench.cli import calibrate
from kvbench.cli.compose import composed
from kvbench.config import ASSETS, ConfigError, shipped
from kvbench.measure import calibration
from kvbench.models import heads
from kvbench.runs.run import identity, prepare

LAYERS, KV_HEADS, SINKS = 3, 2, 4
MANY = 0.5  # share of the heads that retrieve in these tests: the last three of six, as `head_scores` ranks them
RANKED = [(2, 1), (2, 0), (1, 1)]


# -- what is attended, by a plain reading ------------------------------------------------------------------------------


def sizes(budget: int | None, length: int, now: int, grows: bool) -> tuple[int, int, int]:
    """Retrieval heads, their entries and those of another head, for `now` tokens after a prompt of `length`."""
    heads, free = LAYERS * KV_HEADS, 0 if grows else now - length
    if budget is None:
        return 3, now, SINKS + max(20, length // 5) + 1 + free
    least, retrieving = budget // 2, 3
    while retrieving and retrieving * length + (heads - retrieving) * least > heads * budget:
        retrieving -= 1
    seen = now if grows else length
    other = max((heads * budget - retrieving * seen) // (heads - retrieving), least)
    own = (heads * budget - (heads - retrieving) * other) // retrieving if retrieving else 0
    return retrieving, own + free, other + free


def attended(held: int, now: int) -> tuple[list[int], list[int]]:
    """Token ids that a head of `held` entries attends, and those that its compensation token stands for."""
    if now <= held:
        return list(range(now)), []
    first = now - (held - SINKS - 1)
    return [*range(SINKS), *range(first, now)], list(range(SINKS, first))


def expected(fixed: Stream, layer: int, row: int, head: int, now: int, ids: list[int], gone: list[int]) -> torch.Tensor:
    """A query head's output [D]: exp(q.k) for each token, N_d exp(q.k') for the mean of the N_d that are gone."""
    kv_head = head // 2
    query = fixed.queries[layer, row, head, now - 1].double()
    keys, values = fixed.keys[layer, row, kv_head].double(), fixed.values[layer, row, kv_head].double()
    weights = [math.exp(fixed.scaling * float(query @ keys[token])) for token in ids]
    total = sum(weight * values[token] for weight, token in zip(weights, ids, strict=True))
    if gone:
        weights.append(len(gone) * math.exp(fixed.scaling * float(query @ keys[gone].mean(dim=0))))
        total = total + weights[-1] * values[gone].mean(dim=0)
    return (total / sum(weights)).float()


def check(driven: Driven, fixed: Stream, budget: int | None, grows: bool) -> None:
    for at in driven.seen:
        for row, length in enumerate(fixed.lengths):
            now = at.lengths[row]
            retrieving, own, other = sizes(budget, length, now, grows)
            for kv_head in range(KV_HEADS):
                retrieves = (at.layer, kv_head) in RANKED[:retrieving]
                ids, gone = attended(own if retrieves else other, now)
                assert at.sets(row)[kv_head] == set(ids)
                for head in (2 * kv_head, 2 * kv_head + 1):
                    out = driven.outputs[at.step - 1, at.layer, row, head]
                    right = expected(fixed, at.layer, row, head, now, ids, gone)
                    torch.testing.assert_close(out, right, rtol=0, atol=CLOSE)


@settings(deadline=None, max_examples=25)
@given(
    budget=st.integers(12, 60),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    unified=st.booleans(),
    steps=st.integers(1, 5),
)
def test_every_head_attends_what_a_plain_reading_says(
    budget: int, lengths: list[int], unified: bool, steps: int
) -> None:
    fixed = stream(*lengths, steps=steps, layers=LAYERS)
    method = method_named("razor", induction=MANY)
    driven = drive(fixed, method, budget, accounting="unified" if unified else "paper")
    check(driven, fixed, budget, unified)
    assert not driven.audit["over_rule"]


def test_the_heads_share_the_budget_through_evictions() -> None:
    """The mean over heads is never above C, and over rolling retrieval heads no entry short of it."""
    fixed = stream(100, 30, steps=70, layers=LAYERS)
    driven = drive(fixed, method_named("razor", induction=MANY), 60, accounting="unified")
    check(driven, fixed, 60, grows=True)
    for step in range(1, 71):
        now = [at for at in driven.seen if at.step == step]
        entries = sum(len(ids) for at in now for ids in at.sets(0)) + sum(int(at.extra[0].sum()) for at in now)
        assert 6 * 60 - 5 <= entries <= 6 * 60
    assert driven.audit["attended_mean"] <= 60 and not driven.audit["over_rule"]
    assert driven.audit["retrieval_heads"] == (2 + 3) / 2


def test_without_a_budget_the_sizes_are_the_paper_s() -> None:
    fixed = stream(150, 90, steps=3, layers=LAYERS)
    driven = drive(fixed, method_named("razor", induction=MANY, window=20), None)
    check(driven, fixed, None, grows=False)


def test_only_what_is_kept_takes_memory() -> None:
    """Two retrieval heads of six hold the prompt, each other head its share; the blocks are as wide as the widest."""
    fixed = stream(200, steps=4, layers=LAYERS)
    audit = drive(fixed, method_named("razor", induction=MANY), 100).audit
    retrieving, own, other = sizes(100, 200, 200, grows=False)
    assert (retrieving, own) == (2, 200)
    token = 2 * 16 * 4
    assert audit["device_kv_bytes"] == (2 * (200 + 4) + 4 * (other - 1 + 4)) * token
    assert audit["device_kv_allocated_bytes"] >= audit["device_kv_bytes"]
    assert audit["attended_mean"] == pytest.approx((2 * 200 + 4 * other) / 6 + 2.5)


# -- which heads retrieve ----------------------------------------------------------------------------------------------


def slow_scores(model: Any, prompt: list[int], tokens: int) -> tuple[list[list[float]], list[list[float]]]:
    """Echo and induction of each KV head, from whole attention matrices by transformers' eager attention."""
    model.set_attn_implementation("eager")
    matrices = model(torch.tensor([prompt]), output_attentions=True).attentions
    first = len(prompt) - 4 * tokens
    echo, induction = [], []
    for matrix in matrices:
        sums = []
        for head in matrix[0].double():
            both = [0.0, 0.0]
            for i in range(first + tokens, len(prompt)):
                for j in range(first, i):
                    if prompt[j] == prompt[i]:
                        both[0] += float(head[i, j])
                        both[1] += float(head[i, j + 1])
            sums.append([total / (3 * tokens) for total in both])
        group = len(sums) // model.config.num_key_value_heads
        best = [[max(one) for one in zip(*sums[at : at + group], strict=True)] for at in range(0, len(sums), group)]
        echo.append([pair[0] for pair in best])
        induction.append([pair[1] for pair in best])
    return echo, induction


def test_scores_are_those_of_whole_attention_matrices(tiny: Loaded, sdpa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOKENS", 24)
    monkeypatch.setattr(calibration, "PROSE_TOKENS", 16)
    monkeypatch.setattr(calibration, "BLOCK", 7)  # in blocks that divide nothing
    scores, procedure = calibration.calibrate(tiny, seed=3)
    tokens, bos = calibration.random_tokens(tiny.tokenizer, 259, None, 3)
    assert procedure["tokens"] == 24 and len(set(tokens)) == 24 and bos == [256]
    model = sdpa(tiny)
    try:
        echo, induction = slow_scores(model, bos + tokens * 4, 24)
    finally:
        model.set_attn_implementation("sdpa")
    assert sum(map(sum, induction)) > 0.01
    torch.testing.assert_close(torch.tensor(scores["echo"]), torch.tensor(echo), rtol=0, atol=CLOSE)
    torch.testing.assert_close(torch.tensor(scores["induction"]), torch.tensor(induction), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("window", "tokens"), [(None, 256), (16384, 256), (401, 99), (402, 100), (66, 16)], ids=str)
def test_small_windows_and_vocabularies_take_fewer_tokens(tiny: Loaded, window: int | None, tokens: int) -> None:
    """Four copies, the first token and a new one fit."""
    found, bos = calibration.random_tokens(tiny.tokenizer, 259, window, 0)
    assert len(found) == tokens and (window is None or len(bos) + 4 * tokens + 1 <= window)
    assert not {*found} & {*tiny.tokenizer.all_special_ids}


def test_a_window_without_room_for_copies_is_refused(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match="room for 15, its vocabulary has 256"):
        calibration.random_tokens(tiny.tokenizer, 259, 65, 0)


def test_the_best_of_each_score_retrieve_the_strongest_first() -> None:
    from methods.razor import retrieval_heads

    scores = head_scores(10, 2)
    both = type(scores)(echo=scores.echo[::-1], induction=scores.induction)
    assert retrieval_heads(both, 0.05, 0.15) == [(0, 1), (9, 1), (9, 0), (8, 1)]
    assert retrieval_heads(both, 0.02, 0.02) == []


# -- where they are found ----------------------------------------------------------------------------------------------


def test_the_shipped_scores_are_of_the_shipped_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))  # a user may have calibrated these models
    found = {file.stem: heads.read(file) for file in (ASSETS / "heads").glob("*.json")}
    assert {name: one.model for name, one in found.items()} == {name: name for name in found}
    for name, one in found.items():
        model = shipped("model", name)
        assert model is not None
        sizes = (model["config"]["num_hidden_layers"], model["config"]["num_key_value_heads"])
        scores = one.scores
        assert (len(scores.echo), len(scores.echo[0])) == sizes
        heads_of = (sizes[0], model["config"]["num_attention_heads"])
        assert {(len(part), len(part[0])) for part in (scores.query_means, scores.query_sizes)} == {heads_of}
        assert len(scores.query_means[0][0]) == 2 * len(scores.query_sizes[0][0])
    for name in ("tiny", "dummy-tiny"):
        source = composed("method=full", f"model={name}").model.source
        assert heads.calibration_of(source, "auto", "") == found[name]


def test_a_user_s_own_model_is_calibrated_once_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "TOKENS", 16)
    monkeypatch.setattr(calibration, "PROSE_TOKENS", 16)
    words = ["method=razor", "model=dummy-qwen3", "task=passkey", "task.lengths=[256]", f"results_dir={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    line = str(caught.value)
    assert line.startswith("method.heads=auto: dummy-qwen3 is not calibrated; kvbench calibrate model=dummy-qwen3")
    assert calibrate.main(["method=quest", "model=dummy-qwen3"]) == 2
    assert "method=quest: " in capsys.readouterr().err
    assert calibrate.main(["method=razor", "model=dummy-qwen3", "dtype=float32"]) == 0
    file = tmp_path / "heads" / "dummy-qwen3.json"
    assert capsys.readouterr().out.strip() == str(file)
    arm = prepare(composed(*words, "dtype=float32"))
    assert arm.calibration == heads.read(file)
    assert identity(arm)["config"]["method"]["heads"] == arm.calibration.digest


def test_heads_of_another_model_and_no_heads_are_refused_in_one_line(tmp_path: Path, tiny: Loaded) -> None:
    damaged = tmp_path / "damaged.json"
    uneven = {"echo": [[1, 2], [3]], "induction": [[1, 2], [3]], "query_means": [], "query_sizes": []}
    damaged.write_text(json.dumps(uneven | {"model": "one", "weights": None, "procedure": {}}))
    other = ASSETS / "heads" / "dummy-tiny.json"
    for file, words in (
        (other, "made of dummy-tiny .dummy-tiny-dummy-0., and the model is tiny .weights-"),
        (tmp_path / "none.json", "no such file; expected one of kvbench calibrate"),
        (damaged, "no head scores: echo and induction are not a number for each layer"),
    ):
        with pytest.raises(ConfigError, match=f"^method.heads=.*{file.name}: {words}") as caught:
            composed("method=razor", f"method.heads={file}")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="heads=auto: .*heads=FILE"):
        KVCache(tiny.model, "razor")
    with pytest.raises(ConfigError, match="3 layers of 2 KV heads.* 2 of 2"):
        drive(stream(40), method_named("razor"), 20, scores=head_scores(3, 2))


def test_kvcache_finds_the_heads_of_a_model_read_from_a_folder() -> None:
    loaded = load(composed("method=full").model, "cpu", "float32")
    cache = KVCache(loaded.model, "razor", 64, dense_layers=())
    prompt = torch.arange(10, 170)[None]
    loaded.model.generate(prompt, past_key_values=cache, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert cache.audit()["retrieval_heads"] == 2 and not cache.audit()["over_rule"]
