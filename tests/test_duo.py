"""DuoAttention: which heads keep everything, and what the others attend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CLOSE, Driven, Stream, drive, head_scores, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.method import HeadScores
from kvbench.models import heads
from kvbench.runs.run import identity, prepare

LAYERS = 3


def ranked(kv_heads: int) -> list[tuple[int, int]]:
    """As `head_scores` has them: the last heads of the last layer are best."""
    return [(layer, head) for layer in reversed(range(LAYERS)) for head in reversed(range(kv_heads))]


def attended(budget: int, length: int, now: int, unified: bool, kv_heads: int) -> tuple[int, list[int], list[int]]:
    """Heads that keep everything, what they attend, and what a streaming head does."""
    heads, sinks, recent = LAYERS * kv_heads, min(64, budget // 16), min(256, budget // 4)
    whole = heads
    while whole and whole * max(length, sinks + recent) + (heads - whole) * (sinks + recent) > heads * budget:
        whole -= 1
    own = list(range(now))
    if unified and whole:
        room = (heads * budget - (heads - whole) * (sinks + recent)) // whole
        own = own if now <= room else [*range(sinks), *range(now - room + sinks, now)]
    streamed = [at for at in range(now) if at < sinks or at >= now - recent]
    return whole, own, streamed


def output(fixed: Stream, layer: int, row: int, head: int, now: int, ids: list[int]) -> torch.Tensor:
    own = head * fixed.keys.shape[2] // fixed.queries.shape[2]
    keys, values = fixed.keys[layer, row, own, ids].double(), fixed.values[layer, row, own, ids].double()
    query = fixed.queries[layer, row, head, now - 1].double()
    return ((keys @ query * fixed.scaling).softmax(dim=0) @ values).float()


def check(driven: Driven, fixed: Stream, budget: int, unified: bool) -> None:
    kv_heads, query_heads = fixed.keys.shape[2], fixed.queries.shape[2]
    for at in driven.seen:
        for row, length in enumerate(fixed.lengths):
            now = at.lengths[row]
            whole, own, streamed = attended(budget, length, now, unified, kv_heads)
            keeping = ranked(kv_heads)[:whole]
            for head in range(kv_heads):
                assert at.sets(row)[head] == set(own if (at.layer, head) in keeping else streamed)
            for head in range(query_heads):
                ids = own if (at.layer, head * kv_heads // query_heads) in keeping else streamed
                right = output(fixed, at.layer, row, head, now, ids)
                torch.testing.assert_close(driven.outputs[at.step - 1, at.layer, row, head], right, rtol=0, atol=CLOSE)


@settings(max_examples=10)
@given(
    budget=st.integers(16, 90),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    unified=st.booleans(),
    heads=st.sampled_from([(2, 1), (2, 3), (1, 7)]),
)
def test_every_head_attends_what_a_plain_reading_says(
    budget: int, lengths: list[int], unified: bool, heads: tuple[int, int]
) -> None:
    fixed = stream(*lengths, steps=4, layers=LAYERS, query_heads=heads[0] * heads[1], kv_heads=heads[0])
    driven = drive(fixed, method_named("duo"), budget, accounting="unified" if unified else "paper")
    check(driven, fixed, budget, unified)
    assert not driven.audit["over_rule"]


@pytest.mark.parametrize(("budget", "whole"), [(128, 1), (256, 2), (512, 4), (1024, 8), (4096, 48)])
def test_a_budget_says_how_many_heads_keep_a_long_prompt(budget: int, whole: int) -> None:
    """Of 24 layers of two KV heads and 4,096 tokens; published sizes from 1,024 on."""
    shape = replace(stream(1, layers=24, query_heads=2).shape(), lengths=(4096,))
    method: Any = method_named("duo")
    Engine(shape, method, Budget(budget), head_scores=head_scores(24, 2))
    assert method.report() == {"retrieval_heads": whole}
    assert method.streamed(4096) == min(320, budget // 16 + budget // 4)


def test_without_a_budget_a_share_of_the_heads_streams() -> None:
    fixed = stream(90, steps=3, layers=LAYERS)
    driven = drive(fixed, method_named("duo", share=0.4, sinks=3, recent=10), None)
    streaming = [(at.layer, head) for at in driven.seen[:LAYERS] for head in range(2) if len(at.sets(0)[head]) == 13]
    assert streaming == [(0, 0), (0, 1)] and driven.audit["retrieval_heads"] == 4
    assert driven.seen[-1].sets(0)[0] == set(range(93)) and not driven.audit["over_rule"]


@pytest.mark.slow
def test_four_thousand_generated_tokens_take_no_more_memory_on_streaming_heads() -> None:
    fixed = stream(400, steps=4000, layers=1, head_dim=4)
    audit = drive(fixed, method_named("duo", share=1), None).audit
    assert audit["attended_max"] == 320 and not audit["over_rule"]
    assert audit["device_kv_bytes"] <= (320 + 32) * 2 * 2 * 4 * 4
    assert audit["device_kv_allocated_bytes"] <= 1.5 * audit["device_kv_bytes"]


# -- which heads they are ----------------------------------------------------------------------------------------------


def test_a_table_is_read_and_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    table = tmp_path / "heads.tsv"
    table.write_text("0.2\t0.5\n1.25\t-0.5\n0.5\t0.5\n0\t1\n")
    scores = heads.read(table).scores
    assert scores == HeadScores(rows := ((0.2, 0.5), (1.0, 0.0), (0.5, 0.5), (0.0, 1.0)), rows)
    method: Any = method_named("duo")
    best = method.rank(scores)
    assert best == [(1, 0), (3, 1), (0, 1), (2, 0), (2, 1), (0, 0), (1, 1), (3, 0)]
    words = ["method=duo", f"method.heads={table}", "model=dummy-tiny", "task=passkey", "task.lengths=[256]"]
    arm = prepare(composed(*words, f"results_dir={tmp_path}"))
    assert identity(arm)["config"]["method"]["heads"] == heads.read(table).digest
    table.write_text("0.2\t0.5\n1\n")
    with pytest.raises(ConfigError, match=r"heads.tsv: no head scores: .* not a number for each layer.*\(.tsv\)"):
        composed(*words)
    table.write_text("")
    with pytest.raises(ConfigError, match="heads.tsv: no head scores: "):
        composed(*words)
    with pytest.raises(ConfigError, match="scores of 2 layers of 2 KV heads, and the model has 3 of 2"):
        drive(stream(40, layers=3), method_named("duo"), 20, scores=head_scores(2, 2))
