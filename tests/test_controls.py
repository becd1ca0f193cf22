"""What a clever score has to beat: random tokens, key norms, LRU and TOVA; both ends of the prompt, given to all."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from driver import ACCOUNTINGS, METHODS, Case, Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_evicting import CLEAR, Head, attended, golden, heads

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.config import ConfigError, bind_methods, choices, method_config
from kvbench.method import Prompt

bind_methods()

from methods.blocks.scorer import Scorer  # noqa: E402

few = settings(max_examples=15)
fewer = settings(max_examples=8)  # of what takes attention in plain lists


@st.composite
def streams(draw: st.DrawFn, steps: int = 12, layers: int = 2, longest: int = 40) -> Stream:
    """Rows of different lengths; groups of 1, 3 and 7 too."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 3), (1, 7)]))
    sizes = {"layers": layers, "query_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 4}
    return stream(*lengths, steps=steps, seed=draw(st.integers(0, 10**6)), **sizes)


def ends(length: int, n: int) -> set[int]:
    """The first and the last n of a prompt."""
    return {*range(min(n, length)), *range(max(0, length - n), length)}


# -- what is kept of a prompt ------------------------------------------------------------------------------------------


def kept_and_after(
    scores: list[float], steps: int, budget: int, n: int, accounting: str, window: int = 0
) -> list[set[int]]:
    """What is attended at each step by the rule of methods that cut a prompt once, with n tokens of either end."""
    length = len(scores)
    ranked = sorted(range(length), key=lambda token: (-scores[token], token))
    safe = ends(length, n)
    if accounting == "paper":
        held = safe | {*range(max(0, length - window), length)}
        held |= {*[token for token in ranked if token not in held][: max(0, budget - len(held))]}
        return [held | {*range(length, length + step)} for step in range(1, steps + 1)]
    recent = min(32, budget // 4)
    others = [token for token in range(length) if token not in safe]
    newest = others[max(0, len(others) - recent) :]  # of the others
    room = max(0, min(budget, length) - len(safe) - len(newest))
    stays = safe | {*[token for token in ranked if token not in safe and token not in newest][:room]}
    ever = []
    for step in range(steps):
        newest.append(length + step)
        newest = newest[max(0, len(newest) - (budget - len(stays))) :]
        ever.append(stays | {*newest})
    return ever


@few
@given(streams(), st.integers(4, 50), st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from(ACCOUNTINGS))
def test_knorm_keeps_the_shortest_keys(fixed: Stream, budget: int, protect: float, accounting: str) -> None:
    n = int(protect * budget + 1e-9)
    driven = drive(fixed, method_named("knorm", protect=protect), budget, accounting=accounting)
    for layer in range(2):
        for row, length in enumerate(fixed.lengths):
            seen = attended(driven, layer, row)
            for head, keys in enumerate(fixed.keys[layer, row].double()):
                scores = [-float(key.square().sum()) for key in keys[:length]]
                expected = kept_and_after(scores, fixed.steps, budget, n, accounting)
                assert [step[head if len(step) > 1 else 0] for step in seen] == expected
    assert not driven.audit["over_rule"]


def uniform(layer: int, row: int, heads_: int, count: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a row alone, those of its prompt and those of each later token."""
    digest = hashlib.sha256(f"0/{row}/{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    prompt = torch.rand(heads_, count, generator=generator)
    return prompt, torch.cat([torch.rand(heads_, 1, generator=generator) for _ in range(steps)], dim=1)


def evicting(scores: list[list[float]], length: int, budget: int, n: int, accounting: str) -> list[set[int]]:
    """What a method attends that lets the token with the least score go: scores[s] are those after step s, by id."""
    stays = budget - (accounting == "unified")

    def cut(held: set[int], most: int, worth: list[float]) -> set[int]:
        order = sorted(held - ends(length, n), key=lambda token: (worth[token], token))
        over = order[: max(0, len(held) - most)]
        if over and len(order) > len(over):
            last, first = worth[over[-1]], worth[order[len(over)]]
            assume(first == last or first - last > CLEAR)
        return held - {*over}

    held, ever = cut({*range(length)}, budget, scores[0]), []
    held = cut(held, stays, scores[0])
    for position, worth in enumerate(scores[1:], start=length):
        held = held | {position}
        ever.append(held)
        held = cut(held, stays, worth)
    return ever


@few
@given(streams(), st.integers(4, 50), st.sampled_from([0.0, 0.2]), st.sampled_from(ACCOUNTINGS), st.booleans())
def test_random_tokens_are_those_of_a_row_alone(
    fixed: Stream, budget: int, protect: float, accounting: str, always: bool
) -> None:
    """Each row has the seed of its sample, whatever stands beside it, and each layer and KV head numbers of its own."""
    n, count = int(protect * budget + 1e-9), fixed.keys.shape[2]
    method = method_named("random", protect=protect, evict="always" if always else "once")
    driven = drive(fixed, method, budget, accounting=accounting)
    samples = driven.engine.method.context.samples
    for layer in range(2):
        for row, length in enumerate(fixed.lengths):
            prompt, later = uniform(layer, samples[row if len(samples) > 1 else 0], count, length, fixed.steps)
            numbers = torch.cat([prompt, later], dim=1).tolist()
            for head in range(count):
                if always:
                    expected = evicting([numbers[head]] * (fixed.steps + 1), length, budget, n, accounting)
                else:
                    expected = kept_and_after(numbers[head][:length], fixed.steps, budget, n, accounting)
                assert [step[head if len(step) > 1 else 0] for step in attended(driven, layer, row)] == expected
    assert not driven.audit["over_rule"]


def test_random_tokens_differ_by_layer_and_head() -> None:
    seen = drive(stream(150, layers=3), method_named("random"), 48).seen
    sets = [frozenset(one) for at in seen if at.step == 1 for one in at.sets(0)]
    assert len({*sets}) == len(sets) == 6


def test_a_copy_draws_the_same_numbers_by_itself() -> None:
    """As each of several questions about a prompt does."""
    copies: list[Any] = []
    fixed, method = stream(20, layers=1), method_named("random", evict="always")
    driven = drive(fixed, method, 8, after_prefill=lambda engine: copies.append(copy.deepcopy(engine)))
    twin, own = (engine.method.scorer.generators[0][0] for engine in (copies[0], driven.engine))
    assert not torch.equal(twin.get_state(), own.get_state())
    for _ in range(fixed.steps):
        torch.rand(2, 1, generator=twin)
    assert torch.equal(twin.get_state(), own.get_state())


# -- LRU and TOVA ------------------------------------------------------------------------------------------------------


def lru(received: Any, length: int, steps: int, budget: int, n: int, accounting: str) -> list[set[int]]:
    """Stamps are positions, of the step in which a token came or was last attended with more than 1 / C."""
    stamps = {token: token for token in range(length)}
    safe, ever = ends(length, n), []

    def cut(most: int) -> None:
        while len(stamps) > most:
            del stamps[min((token for token in stamps if token not in safe), key=lambda token: (stamps[token], token))]

    cut(budget)
    for position in range(length, length + steps):
        cut(budget - (accounting == "unified"))
        stamps[position] = position
        ever.append({*stamps})
        for token, weight in zip(sorted(stamps), received(position, sorted(stamps)), strict=True):
            assume(abs(weight - 1 / budget) > CLEAR)
            if weight > 1 / budget:
                stamps[token] = position
    return ever


def tova(received: Any, length: int, steps: int, budget: int, n: int, accounting: str) -> list[set[int]]:
    """After each forward pass those stay that its last query attends most."""
    safe, ever = ends(length, n), []

    def cut(held: set[int], position: int, most: int) -> set[int]:
        worth = dict(zip(sorted(held), received(position, sorted(held)), strict=True))
        order = sorted(held - safe, key=lambda token: (worth[token], token))
        over = max(0, len(held) - most)
        assume(not 0 < over < len(order) or worth[order[over]] - worth[order[over - 1]] > CLEAR)
        return held - {*order[:over]}

    held = cut({*range(length)}, length - 1, budget - (accounting == "unified"))
    for position in range(length, length + steps):
        held = held | {position}
        ever.append(held)
        held = cut(held, position, budget - (accounting == "unified"))
    return ever


@fewer
@given(streams(8, 1, 24), st.integers(2, 20), st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from(ACCOUNTINGS))
def test_lru_lets_the_token_go_that_was_needed_longest_ago(
    fixed: Stream, budget: int, protect: float, accounting: str
) -> None:
    driven = drive(fixed, method_named("lru", protect=protect), budget, accounting=accounting)
    for row, length in enumerate(fixed.lengths):
        for number, head in enumerate(heads(fixed, 0, row)):
            expected = lru(head.attention, length, fixed.steps, budget, int(protect * budget + 1e-9), accounting)
            assert [step[number] for step in attended(driven, 0, row)] == expected
    assert not driven.audit["over_rule"]


@fewer
@given(streams(8, 1, 24), st.integers(1, 20), st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from(ACCOUNTINGS))
def test_tova_has_one_list_for_all_heads(fixed: Stream, budget: int, protect: float, accounting: str) -> None:
    driven = drive(fixed, method_named("tova", protect=protect), budget, accounting=accounting)
    for row, length in enumerate(fixed.lengths):
        each = heads(fixed, 0, row, "query_head")

        def mean(position: int, ids: list[int], each: list[Head] = each) -> list[float]:
            return [
                sum(heads_) / len(each)
                for heads_ in zip(*(head.attention(position, ids) for head in each), strict=True)
            ]

        expected = tova(mean, length, fixed.steps, budget, int(protect * budget + 1e-9), accounting)
        assert attended(driven, 0, row) == [[ids] for ids in expected]
    assert not driven.audit["over_rule"]


# -- numbers of the public codes ---------------------------------------------------------------------------------------

KNORM = {
    0.0: [
        {2, 5, 6, 10, 12, 13, 16, 23, 24, 30, 31, 33, 34, 37},
        {0, 1, 3, 6, 7, 13, 19, 21, 22, 26, 28, 29, 35, 37},
    ],
    0.1: [
        {0, 2, 5, 6, 10, 13, 16, 23, 24, 30, 31, 34, 37, 39},
        {0, 1, 3, 6, 7, 13, 19, 21, 22, 26, 28, 35, 37, 39},
    ],
}


@pytest.mark.parametrize("protect", KNORM)
def test_the_shortest_keys_are_those_of_the_public_code(protect: float) -> None:
    seen = drive(golden(), method_named("knorm", protect=protect), 14).seen[0]
    assert seen.sets(0) == [{*kept, 40} for kept in KNORM[protect]]


def evicted(name: str, steps: int) -> list[list[int]]:
    """Of each list what goes from step to step."""
    sets = [at.sets(0) for at in drive(golden(steps + 1), method_named(name), 14).seen]
    return [[min(one[head] - other[head]) for one, other in pairwise(sets)] for head in range(len(sets[0]))]


def test_tova_keeps_and_evicts_what_the_public_code_does() -> None:
    first = drive(golden(), method_named("tova"), 14).seen[0]
    assert first.sets(0) == [{3, 4, 5, 6, 10, 15, 16, 17, 19, 21, 23, 33, 34, 39, 40}]
    assert evicted("tova", 4) == [[23, 33, 39, 40]]


def test_lru_evicts_by_the_latest_need() -> None:
    assert evicted("lru", 6) == [[26, 27, 28, 33, 34, 35], [26, 27, 28, 29, 30, 31]]


# -- protected ends ----------------------------------------------------------------------------------------------------

PROTECTING = [case for case in METHODS if not case.file and "protect" in case.config.options]


def test_every_method_that_drops_tokens_by_scores_protects_ends() -> None:
    names = {"random", "knorm", "lru", "tova", "snapkv", "pyramidkv", "adakv_snapkv", "cake", "h2o", "h2o_prompt"}
    assert names | {"raas", "scope", "rkv"} <= {case.name for case in PROTECTING}


def protected(case: Case, protect: float) -> Any:
    options = {**case.options, "protect": protect}
    for key, value in (("window", 4), ("prompt_window", 2), ("recent", 0.3)):  # leave room for ends
        if key in case.config.options and (case.name == "scope") == (key == "prompt_window"):
            options[key] = value
    return method_named(case.name, **options)


@pytest.mark.parametrize("case", PROTECTING, ids=lambda case: case.id)
@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_ends_are_never_dropped(case: Case, accounting: str) -> None:
    """Rows that are cut, that fill as they go, and that are all end; steps that push everything else out."""
    fixed = stream(90, 44, 11, steps=56, head_dim=4, query_heads=6)
    if (case.id, accounting) == ("scope-adaptive", "unified"):
        pytest.skip("a thin layer of its pyramid has no room, see below")
    for protect, n in ((0.1, 4), (0.3, 12)):
        driven = drive(fixed, protected(case, protect), 40, accounting=accounting)
        for at in driven.seen:
            for row, length in enumerate(fixed.lengths):
                assert all(ends(length, n) <= ids for ids in at.sets(row)), (protect, at.step, row)
        assert not driven.audit["over_rule"]
        if accounting == "unified":
            assert driven.audit["attended_mean"] <= 40
    plain = drive(fixed, protected(case, 0.0), 40, accounting=accounting)
    pinned = case.id == "raas" and accounting == "paper"
    assert pinned or [at.sets(0) for at in driven.seen] != [at.sets(0) for at in plain.seen]


class Given(Scorer):
    """Scores given beforehand, for all heads alike."""

    def __init__(self, scores: list[float], window: int) -> None:
        self.scores, self.window = scores, window

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        return torch.tensor(self.scores[: prompt.keys.shape[2]]).expand(*prompt.keys.shape[:2], -1)


@few
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=40, max_size=40),
    st.integers(8, 30),
    st.sampled_from([0.0, 0.05, 0.1, 0.25]),
    st.sampled_from([0, 1, 5]),
    st.sampled_from(ACCOUNTINGS),
)
def test_the_best_scores_stay_beside_ends_and_window(
    lengths: list[int], scores: list[int], budget: int, protect: float, window: int, accounting: str
) -> None:
    method = Given([float(score) for score in scores], window)
    method.protect = protect
    n = int(protect * budget + 1e-9)
    assume(not n or 2 * n < budget - (window if accounting == "paper" else budget // 4))  # else it is refused
    driven = drive(stream(*lengths, steps=40, layers=1, head_dim=4), method, budget, accounting=accounting)
    for row, length in enumerate(lengths):
        expected = kept_and_after(method.scores[:length], 40, budget, n, accounting, window)
        assert [step[0] for step in attended(driven, 0, row)] == expected
    if accounting == "unified":
        assert driven.audit["attended_max"] <= budget


@pytest.mark.parametrize(
    ("name", "protect", "budget", "accounting", "words"),
    [
        ("random", 0.5, 48, "paper", "twice 24 tokens leave nothing to choose of 48"),
        ("snapkv", 0.2, 48, "paper", "twice 9 tokens leave nothing to choose of 48, 32 of them taken"),
        ("knorm", 0.4, 48, "unified", "twice 19 tokens leave nothing to choose of 48, 12 of them taken"),
        ("h2o", 0.25, 48, "paper", "24 of them taken"),
        ("rkv", 0.38, 48, "unified", "18 of them taken"),
    ],
)
def test_a_share_that_leaves_nothing_to_choose_is_refused(
    name: str, protect: float, budget: int, accounting: Any, words: str
) -> None:
    """Where the budget is in tokens before a model is there."""
    with pytest.raises(ValueError, match=f"^protect={protect}: .*{words}"):
        method_named(name, protect=protect).check_options(Budget(budget, accounting))
    with pytest.raises(ConfigError, match=f"^protect={protect}: .*{words}"):
        drive(stream(90), method_named(name, protect=protect), budget, accounting=accounting)


def test_a_share_of_a_fraction_is_refused_once_the_prompt_is_known() -> None:
    method = method_named("snapkv", protect=0.2)
    method.check_options(Budget(0.5))
    with pytest.raises(ConfigError, match=r"^protect=0.2: .* of 45, 32 of them taken"):
        drive(stream(90), method, 0.5)


def test_scope_refuses_ends_that_a_thin_layer_has_no_room_for() -> None:
    method = method_named("scope", compressor="pyramidkv", prompt_window=2, protect=0.3)
    with pytest.raises(ConfigError, match=r"^protect=0.3: "):
        drive(stream(150, layers=4), method, 40, accounting="unified")


@pytest.mark.parametrize("protect", [-0.1, 0.6, "half", float("nan")])
def test_a_share_that_is_none_is_refused(protect: Any) -> None:
    with pytest.raises(ConfigError, match=r"protect="):
        method_config("random", protect=protect)


@pytest.mark.parametrize("name", sorted({*choices("method")} - {case.name for case in PROTECTING}))
def test_methods_that_drop_nothing_by_scores_refuse_it_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^protect: no such option of method {name};"):
        method_config(name, protect=0.1)


# -- long answers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "accounting"),
    [
        *((name, {}, accounting) for name in ("lru", "tova") for accounting in ACCOUNTINGS),
        *(("random", {"evict": "always"}, accounting) for accounting in ACCOUNTINGS),
        ("knorm", {}, "unified"),
    ],
    ids=str,
)
def test_four_thousand_tokens_take_no_more_memory(name: str, options: dict[str, Any], accounting: str) -> None:
    fixed = stream(150, steps=4000, layers=1, head_dim=4)
    audits = [
        drive(replace(fixed, steps=steps), method_named(name, protect=0.1, **options), 64, accounting=accounting)
        for steps in (200, 4000)
    ]
    short, long = (driven.audit for driven in audits)
    sizes = ("device_kv_bytes", "device_kv_allocated_bytes", "index_bytes", "attended_max")
    assert [long[size] for size in sizes] == [short[size] for size in sizes]
    assert not long["over_rule"]
