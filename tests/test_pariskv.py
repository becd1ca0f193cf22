"""ParisKV as a method: its zones, what it attends and moves, its budgets, and what it does with bad input."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CLOSE, Stream, drive, rotate, slow, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.cli.compose import composed
from kvbench.config import bind_methods
from kvbench.runs.sweep import run

bind_methods()

from methods.pariskv import ParisKV  # noqa: E402
from methods.pariskv.codebook import quotas, random_signs  # noqa: E402
from methods.pariskv.index import Index, VectorIndex  # noqa: E402

# Zones so small that a few hundred tokens fill them, without a budget.
SMALL: dict[str, Any] = {"sinks": 3, "local": 10, "update": 8, "k": 12, "dense_below": 0}

quick = settings(max_examples=15)


def small(**options: Any) -> ParisKV:
    return method_named("pariskv", **{**SMALL, **options})


def in_dtype(fixed: Stream, dtype: torch.dtype) -> Stream:
    return replace(fixed, queries=fixed.queries.to(dtype), keys=fixed.keys.to(dtype), values=fixed.values.to(dtype))


def selected(fixed: Stream, budget: int | None = None, **options: Any) -> list[list[set[int]]]:
    driven = drive(fixed, small(**options), budget)
    return [at.sets(row) for at in driven.seen for row in range(len(fixed.lengths))]


# -- zones -------------------------------------------------------------------------------------------------------------


def codes_of(index: Index, row: int) -> list[torch.Tensor]:
    """Of the tokens in a row's zone, whichever way it computes."""
    parts = index.codes if isinstance(index, VectorIndex) else [index.codes]
    return [part[row, :, : index.lengths[row]] for part in parts]


@pytest.mark.parametrize("options", [{}, {"local": 0}, {"sinks": 0, "update": 1}, {"compute": "torch"}], ids=str)
def test_every_past_token_is_in_exactly_one_of_the_four_zones(options: dict[str, Any]) -> None:
    """In every layer, the current token included, for rows that begin above, at and below the fixed zones."""
    method, checked = small(**options), 0
    select, fixed = method.select, stream(60, 14, 2, steps=40, layers=3)

    def checked_select(layer: int, query: torch.Tensor) -> Any:
        nonlocal checked
        index = method.index[layer]
        for row, length in enumerate(method.view.lengths(layer)):
            zones, zone = method.zones[row], index.lengths[row]
            encoded = method._new_index(layer)
            encoded.extend(0, fixed.keys[layer, row, :, zones.sinks : zones.sinks + zone])
            assert all(map(torch.equal, codes_of(encoded, 0), codes_of(index, row))), "the zone's own tokens"
            assert torch.equal(encoded.counts[0], index.counts[row]) and index.lengths[row] == zone
            buffer = length - zones.sinks - zone - zones.local
            assert buffer < zones.update and (buffer >= 0 or zone == 0)
            checked += 1
        return select(layer, query)

    method.select = checked_select  # type: ignore[method-assign]
    drive(fixed, method, None)
    assert checked == 40 * 3 * 3


@pytest.mark.parametrize("options", [{}, {"tiers": 1}, {"beta": 0.05, "rho": 1.0}, {"compute": "torch"}], ids=str)
def test_attended_are_sinks_recent_tokens_and_the_best_of_the_zone(options: dict[str, Any]) -> None:
    """The zone ends where the last full buffer ended; of it stands what an index of just these keys finds."""
    fixed, compared = stream(120, 90, 25, steps=30), 0
    for at in drive(fixed, small(**options), None).seen:
        for row, length in enumerate(at.lengths):
            prompt = fixed.lengths[row]
            zone = max(prompt - 13, 0)
            while length - 13 - zone >= 8:
                zone += 8
            if length < 3 + 10 + 24 or zone <= 12:
                assert at.sets(row) == [set(range(length))] * 2
                continue
            index = VectorIndex(1, 2, random_signs(16, 0))
            index.extend(0, fixed.keys[at.layer, row, :, 3 : 3 + zone])
            query = fixed.queries[at.layer, row, :, length - 1].view(1, 2, 2, 16)
            asked = {name: value for name, value in options.items() if name != "compute"}
            retrieved = 3 + index.search(query, {0: quotas(zone, 12, **asked)})[0]
            recent = range(length - 1, 2 + zone, -1)
            for head in range(2):
                assert at.index[row, head].tolist()[: len(recent) + 15] == [*recent, 0, 1, 2, *retrieved[head].tolist()]
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("compute", ["compiled", *slow("torch")])
@pytest.mark.parametrize(("theta", "k_min", "k"), [(0.85, 3, 30), (0.6, 1, 12), (0.7, 3, 40)])
def test_k_is_the_least_that_holds_theta_of_the_attention(theta: float, k_min: int, k: int, compute: str) -> None:
    """By sums over plain lists; all of k_min, k and what lies between are met."""
    fixed = stream(150, 90, steps=30, seed=2)
    fixed = replace(fixed, queries=fixed.queries / 2)  # flatter attention, which needs more tokens
    options: dict[str, Any] = {"theta": theta, "k_min": k_min, "k": k, "beta": 0.6, "compute": compute}
    counts = []
    for at in drive(fixed, small(**options), None).seen:
        for row, length in enumerate(at.lengths):
            zone = fixed.lengths[row] - 13
            while length - 13 - zone >= 8:
                zone += 8
            if length < 3 + 10 + 2 * k or zone <= k:
                assert at.sets(row) == [set(range(length))] * 2
                continue
            index = VectorIndex(1, 2, random_signs(16, 0))
            index.extend(0, fixed.keys[at.layer, row, :, 3 : 3 + zone])
            group = fixed.queries[at.layer, row, :, length - 1].view(1, 2, 2, 16)
            asked = quotas(zone, k, 0.6)
            tokens, estimates = index.ranked(group, {0: replace(asked, retrieved=asked.candidates)})[0]
            always = [*range(3), *range(3 + zone, length)]
            for head, sets in enumerate(at.sets(row)):
                key, value = fixed.keys[at.layer, row, head].double(), fixed.values[at.layer, row, head].double()
                mean = group[0, head].double().mean(dim=0)
                sure = sum(exp(float(key[token] @ mean) / 4) * float(value[token].norm()) for token in always)
                benefit = {
                    3 + token: exp(estimate / 4) * float(value[3 + token].norm())
                    for token, estimate in zip(tokens[head].tolist(), estimates[head].tolist(), strict=True)
                }
                best = sorted(benefit, key=lambda token: -benefit[token])
                enough = next(
                    count
                    for count in range(1, len(best) + 1)
                    if sure + sum(benefit[token] for token in best[:count]) >= theta * (sure + sum(benefit.values()))
                )
                counts.append(min(max(enough, k_min), k))
                assert sets == {*always, *best[: counts[-1]]}
    assert len(counts) > 100 and len(set(counts)) > 3


def test_k_adapts_where_nothing_is_always_attended() -> None:
    audit = drive(stream(60, steps=3), small(sinks=0, local=0, update=1, theta=0.5, k_min=1), None).audit
    assert 1 <= audit["retrieved"] <= 12 and not audit["over_rule"]


@quick
@given(st.integers(40, 200), st.integers(1, 30), st.sampled_from(["compiled", "torch"]))
def test_all_candidates_and_k_of_the_whole_zone_is_full_attention(length: int, steps: int, compute: str) -> None:
    fixed = stream(length, steps=steps, layers=1)
    whole = drive(fixed, method_named("full"), None).outputs
    ours = drive(fixed, small(beta=1.0, k=length + steps, compute=compute), None).outputs
    torch.testing.assert_close(ours, whole, rtol=0, atol=CLOSE)


def test_with_k_one_short_of_the_zone_one_token_is_missing() -> None:
    """The test above could not fail if k changed nothing."""
    (at,) = drive(stream(100, steps=1, layers=1), small(beta=1.0), 99).seen
    assert [len(ids) for ids in at.sets(0)] == [100, 100], "of 101"


def test_both_ways_to_compute_attend_the_same() -> None:
    fixed = stream(300, 150, steps=30)
    for options in ({}, {"tiers": 1}, {"beta": 0.1}):
        assert selected(fixed, compute="torch", **options) == selected(fixed, compute="compiled", **options)


def test_options_change_what_is_attended() -> None:
    fixed = stream(500, steps=4)
    options: list[dict[str, Any]] = [
        {},
        {"k": 13},
        {"tiers": 1},
        {"beta": 0.05},
        {"beta": 0.05, "rho": 0.05},
        {"sinks": 0},
        {"local": 11},
        {"dense_below": 1000},
    ]
    found = [selected(fixed, **one) for one in options]
    assert all(found[a] != found[b] for a in range(len(found)) for b in range(a))
    assert selected(stream(500, steps=9), update=1) != selected(stream(500, steps=9))


def test_the_rotation_is_the_run_s_seed_s_and_no_layer_s() -> None:
    method = small()
    drive(stream(60, layers=3), method, None)
    assert len({id(index.signs) for index in method.index.values()}) == 1
    assert torch.equal(method.signs[0], random_signs(16, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["compiled", "torch"])
def test_half_precision_keys_are_read_as_they_are(dtype: torch.dtype, compute: str) -> None:
    halves = in_dtype(stream(150, 60, steps=10), dtype)
    assert selected(halves, compute=compute) == selected(in_dtype(halves, torch.float32))


@pytest.mark.parametrize("head_dim", [4, 24, 96])
def test_head_dims_that_are_no_power_of_two_are_padded(head_dim: int) -> None:
    fixed = stream(200, steps=12, layers=1, query_heads=2, head_dim=head_dim)
    method = small(beta=1.0)
    whole = drive(fixed, method_named("topk", granularity="kv_head"), 12)
    shares = []
    for at, exact in zip(drive(fixed, method, None).seen, whole.seen, strict=True):
        shares += [len(ids & best) / 12 for ids, best in zip(at.sets(0), exact.sets(0), strict=True)]
    assert sum(shares) / len(shares) > 0.75, "the best tokens of the exact scan are among those attended"
    assert len(method.signs[0]) == {4: 32, 24: 32, 96: 128}[head_dim]


# -- the host ----------------------------------------------------------------------------------------------------------


def test_only_rows_that_were_not_there_are_moved() -> None:
    """A step moves what it attends, less the current token and what the last step attended."""
    fixed = stream(140, 60, steps=30)
    driven = drive(fixed, small(), None)
    moved, last = 0, {}
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            for head, wanted in enumerate(at.sets(row)):
                moved += len(wanted - last.get((at.layer, row, head), set()) - {length - 1})
                last[at.layer, row, head] = wanted
    assert driven.audit["moved_bytes_per_step"] * fixed.steps == moved * 2 * 16 * 4
    assert driven.audit["device_kv_bytes"] <= 2 * 2 * 2 * (3 + 10 + 7 + 12) * 2 * 16 * 4
    # two rows encode three times (steps 8, 16 and 24), 8 keys of 2 heads in 2 layers
    assert driven.audit["read_bytes_per_step"] * fixed.steps == 2 * 3 * 8 * 2 * 2 * 16 * 4


def test_long_generation_through_growing_memory_changes_nothing() -> None:
    """Under left padding the store's final length is unknown, and it grows twice."""
    fixed = stream(100, 60, steps=400, layers=1)
    known, grown = drive(fixed, small(), None), drive(fixed, small(), None, left=True)
    assert [at.sets(row) for at in known.seen for row in (0, 1)] == [
        at.sets(row) for at in grown.seen for row in (0, 1)
    ]
    assert "query" in known.engine.spans.seconds


@pytest.mark.parametrize(("compute", "most"), [("compiled", 112), ("torch", 96)])
def test_the_index_counts_as_the_method_s_memory(compute: str, most: int) -> None:
    """So many bytes a token and KV head at D = 128, and what does not grow with the prompt."""
    held = {}
    for length in (3000, 6000):
        method = method_named("pariskv", compute=compute)
        held[length] = drive(stream(length, steps=1, layers=1, head_dim=128), method, None).audit["index_bytes"]
    a_token = (held[6000] - held[3000]) / 3000 / 2
    assert most <= a_token <= most * 17 / 16 + 8, "one part in 16 is spare; beside it stand votes and candidates"


def test_candidates_and_retrieved_are_reported_apart_from_what_is_attended() -> None:
    """Of a zone of 137 and later 145 tokens; a row that is attended whole is no search."""
    audit = drive(stream(150, 20, steps=16), small(beta=0.5), None).audit
    assert audit["retrieved"] == 12
    assert audit["candidates"] == pytest.approx((7 * 69 + 8 * 73 + 77) / 16)
    assert "candidates" not in drive(stream(20), small(), None).audit


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "sinks", "local", "update", "k"),
    [
        (16, 1, 4, 4, 11),
        (256, 16, 64, 64, 176),
        (419, 26, 104, 104, 289),
        (420, 64, 256, 512, 100),
        (2048, 64, 256, 512, 1728),
    ],
)
def test_budget_sets_sinks_window_and_k_and_leaves_the_buffer_out(
    budget: int, sinks: int, local: int, update: int, k: int
) -> None:
    method = method_named("pariskv")
    drive(stream(40, steps=1, layers=1), method, budget)
    (zones,) = method.zones
    assert (zones.sinks, zones.local, zones.update, zones.k, zones.dense) == (sinks, local, update, k, budget)
    assert sinks + local + k == budget
    assert method.rule(0, 40, 1) == budget + update - 1


@pytest.mark.parametrize("budget", [16, 48, 256, 420, 2048])
@pytest.mark.parametrize("counted", [{"accounting": "unified"}, {"generated": "counted"}], ids=str)
def test_budget_that_counts_generated_tokens_holds_the_buffer(budget: int, counted: dict[str, Any]) -> None:
    method = method_named("pariskv")
    drive(stream(40, steps=1, layers=1), method, budget)
    method.budget = Budget(budget, **counted)
    zones = method._zones(40)
    assert (zones.sinks, zones.local, zones.update) == (budget // 16, budget // 4, budget // 4)
    assert zones.sinks + zones.local + zones.update + zones.k == budget
    assert method.rule(0, 40, 1) == budget


@pytest.mark.parametrize(("accounting", "most"), [("paper", 48 + 11), ("unified", 47)])
def test_attended_reach_the_rule_and_no_further(accounting: str, most: int) -> None:
    audit = drive(stream(150, steps=40), method_named("pariskv"), 48, accounting=accounting).audit
    assert audit["attended_max"] == most
    assert not audit["over_rule"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("pariskv", (4, 512, 512, 100, 1999)),
        ("pariskv_aligned", (64, 256, 512, 100, 1999)),
        ("pariskv_adaptive", (64, 256, 512, 800, 1999)),
    ],
)
def test_presets_have_the_published_sizes(name: str, sizes: tuple[int, ...]) -> None:
    method = method_named(name)
    drive(stream(40, steps=1, layers=1), method, None)
    (zones,) = method.zones
    assert (zones.sinks, zones.local, zones.update, zones.k, zones.dense) == sizes


def test_without_a_budget_short_sequences_are_attended_whole() -> None:
    """Up to dense_below, or sinks + window + 2 k; then the sizes hold."""
    for options, dense in (({"dense_below": 90}, 90), ({"k": 30}, 3 + 10 + 60)):
        for at in drive(stream(60, steps=50, layers=1), small(**options), None).seen:
            (length,) = at.lengths
            assert (at.sets(0)[0] == set(range(length))) == (length < dense)
            assert length < dense or len(at.sets(0)[0]) <= 3 + 10 + 7 + small(**options).options.k


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_head_dim_whose_votes_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=512"):
        drive(stream(30, head_dim=512), small(), None)


@pytest.mark.parametrize("kind", ["zero", "some zero", "equal"])
@pytest.mark.parametrize("compute", ["compiled", "torch"])
def test_keys_that_cannot_be_told_apart_fill_k(kind: str, compute: str) -> None:
    fixed = stream(150, 90, steps=10)
    if kind == "equal":
        fixed.keys[:] = fixed.keys[..., :1, :]
    else:
        fixed.keys[..., :: 1 if kind == "zero" else 3, :] = 0
    driven = drive(fixed, small(compute=compute), None)
    assert bool(driven.outputs.isfinite().all())
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            buffer = (length - fixed.lengths[row]) % 8
            assert [len(ids) for ids in at.sets(row)] == [3 + 10 + buffer + 12] * 2


@pytest.mark.parametrize("length", [1, 7, 20])
def test_a_prompt_shorter_than_the_fixed_zones_grows_into_the_zone(length: int) -> None:
    for at in drive(stream(length, steps=90, layers=1), small(), None).seen:
        (now,) = at.lengths
        assert {*range(min(3, now)), *range(max(0, now - 10), now)} <= at.sets(0)[0]
        assert len(at.sets(0)[0]) == min(now, len(at.sets(0)[0])) <= max(36, 3 + 10 + 7 + 12)
    assert len(at.sets(0)[0]) < now


@pytest.mark.parametrize(
    ("words", "said"),
    [(["method=pariskv"], 1), (["method=pariskv", "method.dense_below=0", "method.local=9"], 0), (["method=full"], 0)],
)
def test_a_run_says_once_that_short_prompts_are_attended_whole(
    words: list[str], said: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a budget, whose own message would say it."""
    short = ["model=dummy-tiny", "task=passkey", "task.lengths=[300]", "task.limit=2", "budget=null"]
    run(composed(*short, f"results_dir={tmp_path}", *words))
    assert capsys.readouterr().out.count("budget=null: the method attends the") == said


# -- as a model's cache ------------------------------------------------------------------------------------------------


def test_keys_that_drift_while_generating_are_found() -> None:
    """Nothing is learned from the prompt: the code of a key depends on that key alone."""
    steps, prompt = 600, 300
    fixed = stream(prompt, steps=steps, layers=1, query_heads=1, kv_heads=1, head_dim=64)
    angle = torch.linspace(0, 300, prompt + steps).expand(1, 1, 1, -1)
    fixed = replace(fixed, queries=rotate(fixed.queries, angle), keys=rotate(fixed.keys, angle))
    found = []
    for at in drive(fixed, small(k=40), None).seen:
        (now,) = at.lengths
        logits = fixed.keys[0, 0, 0, :now] @ fixed.queries[0, 0, 0, now - 1]
        best = set(logits[3 : now - 17].topk(20).indices.add(3).tolist())
        found.append(len(best & at.sets(0)[0]) / 20)
    early, late = sum(found[:200]) / 200, sum(found[-200:]) / 200
    assert late > 0.8 and late > early - 0.1
