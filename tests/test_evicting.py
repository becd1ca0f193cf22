"""Methods that evict while they decode, against references in plain lists, each written down from its paper's rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from driver import Driven, Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, bind_methods, method_config
from kvbench.method import Method, Prompt

bind_methods()

from methods.rkv import importance, redundancy  # noqa: E402

few = settings(max_examples=12)
CLEAR = 1e-5  # scores that differ by less may stand in either order in float32


def dot(one: Iterable[float], other: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@dataclass
class Head:
    """What one list of a layer sees: a KV head's keys, and the queries of its group, or of one head of it."""

    keys: list[list[float]]
    queries: list[list[list[float]]]
    scaling: float

    def attention(self, position: int, ids: Sequence[int]) -> list[float]:
        """Probability of each id for the query at a position, the mean over the query heads."""
        each = []
        for query in self.queries:
            logits = [self.scaling * dot(query[position], self.keys[token]) for token in ids]
            most = max(logits)
            weights = [math.exp(logit - most) for logit in logits]
            each.append([weight / sum(weights) for weight in weights])
        return [sum(heads) / len(heads) for heads in zip(*each, strict=True)]

    def received(self, length: int) -> list[float]:
        """Attention that each prompt token receives from all prompt queries."""
        sums = [0.0] * length
        for position in range(length):
            for token, weight in enumerate(self.attention(position, range(position + 1))):
                sums[token] += weight
        return sums


def heads(fixed: Stream, layer: int, row: int, granularity: str = "kv_head") -> list[Head]:
    """The lists of a row."""
    keys, queries = fixed.keys[layer, row].tolist(), fixed.queries[layer, row].tolist()
    group = len(queries) // len(keys)
    if granularity == "query_head":
        return [Head(keys[head // group], [own], fixed.scaling) for head, own in enumerate(queries)]
    return [Head(own, queries[at * group : (at + 1) * group], fixed.scaling) for at, own in enumerate(keys)]


def worst(scores: dict[int, float]) -> int:
    """The id with the least score, which is clearly the least."""
    first, *others = sorted(scores, key=lambda token: (scores[token], token))
    assume(not others or scores[others[0]] - scores[first] > CLEAR or scores[others[0]] == scores[first])
    return first


def attended(driven: Driven, layer: int, row: int) -> list[list[set[int]]]:
    """[steps][lists] ids."""
    return [at.sets(row) for at in driven.seen if at.layer == layer]


@st.composite
def streams(draw: st.DrawFn, steps: int = 12) -> Stream:
    """Rows of different lengths, groups of different sizes."""
    lengths = draw(st.lists(st.integers(1, 26), min_size=1, max_size=2))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    sizes = {"layers": 1, "query_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 4}
    return stream(*lengths, steps=steps, seed=draw(st.integers(0, 10**6)), **sizes)


# -- H2O ---------------------------------------------------------------------------------------------------------------


def h2o(head: Head, length: int, steps: int, heavy: int, recent: int) -> list[set[int]]:
    """Algorithm 1: what is attended at each step, if `heavy + recent` tokens stay after each."""
    sums = dict(enumerate(head.received(length)))
    ever = []
    for position in range(length, length + steps + 1):
        while len(sums) > heavy + recent:
            late = sorted(sums)[len(sums) - recent :] if recent else []
            del sums[worst({token: sums[token] for token in sums if token not in late})]
        if position == length + steps:
            return ever
        sums[position] = 0.0
        ever.append(set(sums))
        for token, weight in zip(sums, head.attention(position, list(sums)), strict=True):
            sums[token] += weight
    return ever


@few
@given(
    streams(),
    st.integers(2, 30),
    st.sampled_from([0.1, 0.5, 0.8]),
    st.sampled_from(["paper", "unified"]),
    st.sampled_from(["kv_head", "query_head"]),
)
def test_h2o_holds_the_heavy_hitters_and_the_recent(
    fixed: Stream, budget: int, share: float, accounting: str, granularity: str
) -> None:
    driven = drive(fixed, method_named("h2o", recent=share, granularity=granularity), budget, accounting=accounting)
    recent = min(max(1, int(share * budget)), budget - 1)
    coming = accounting == "unified"  # the current token is one of the C, and one of the recent
    lists = "kv_head" if coming else granularity
    for row, length in enumerate(fixed.lengths):
        seen = attended(driven, 0, row)
        for number, head in enumerate(heads(fixed, 0, row, lists)):
            expected = h2o(head, length, fixed.steps, budget - recent, recent - coming)
            assert [step[number] for step in seen] == expected
    assert not driven.audit["over_rule"]
    if coming:
        assert driven.audit["attended_max"] <= budget


def golden(steps: int = 1) -> Stream:
    """2 sin(c + 1.7 h + .9 t + 2.3 d + .37 t d + .11 h t), a prompt of 40 tokens."""

    def waves(c: float, count: int) -> torch.Tensor:
        h, t, d = (torch.arange(n, dtype=torch.float64) for n in (count, 40 + steps, 8))
        h, t = h[:, None, None], t[:, None]
        return 2 * torch.sin(c + 1.7 * h + 0.9 * t + 2.3 * d + 0.37 * t * d + 0.11 * h * t)

    queries = waves(0.5, 4) * (torch.arange(4)[:, None, None] + 1) / 2
    keys = waves(1.0, 2)
    queries, keys = queries.float()[None, None], keys.float()[None, None]
    return Stream((40,), steps, queries, keys, keys, torch.zeros(1, 40 + steps, dtype=torch.int64))


def scores_of(method: Method) -> list[torch.Tensor]:
    """The scores that a scorer gives, noted as it does."""
    noted: list[torch.Tensor] = []
    score = method.score  # type: ignore[attr-defined]

    def watched(layer: int, prompt: Prompt) -> torch.Tensor:
        noted.append(score(layer, prompt).clone())
        return noted[-1]

    method.score = watched  # type: ignore[attr-defined]
    return noted


BEST = {
    "mean": [[0, 1, 3, 4, 8, 5, 2, 7, 9, 6], [2, 5, 0, 6, 4, 1, 8, 7, 16, 9]],
    "max": [[0, 1, 4, 5, 3, 8, 7, 2, 6, 11], [5, 2, 1, 0, 6, 4, 8, 9, 16, 11]],
}


@pytest.mark.parametrize("group", BEST)
def test_the_heavy_hitters_of_a_prompt_are_those_that_the_public_code_finds(group: str) -> None:
    method = method_named("h2o_prompt", window=4, group=group)
    scores = scores_of(method)
    seen = drive(golden(), method, 14).seen[0]
    assert scores[0][0, :, :36].topk(10).indices.tolist() == BEST[group]
    assert seen.sets(0) == [{*best, 36, 37, 38, 39, 40} for best in BEST[group]]


def test_the_attention_of_a_query_head_is_that_of_the_public_code() -> None:
    method = method_named("h2o_prompt", window=4, granularity="query_head")
    scores = scores_of(method)
    drive(golden(), method, 14)
    torch.testing.assert_close(scores[0][0, 0, :2], torch.tensor([2.595641, 2.647817]), rtol=0, atol=1e-6)


# -- RaaS --------------------------------------------------------------------------------------------------------------


def votes(head: Head, length: int, window: int, last: int | None = None, kernel: int = 7) -> dict[int, float]:
    """SnapKV's votes for the prompt's tokens; of the last ones, else the window, they are infinite."""
    last = window if last is None else last
    received = [0.0] * length
    for position in range(max(0, length - window), length):
        for token, weight in enumerate(head.attention(position, range(position + 1))):
            received[token] += weight if token < length - last else 0.0
    half = kernel // 2
    return {
        token: max(received[max(0, token - half) : token + half + 1]) if token < length - last else math.inf
        for token in range(length)
    }


def raas(head: Head, length: int, steps: int, most: int, alpha: float, page_size: int, pinned: bool) -> list[set[int]]:
    """Tokens attended at each step. Of what is not pinned `most` are; a stamp is a step, or votes before the first."""
    prompt = votes(head, length, 32, min(32, most // 4))
    stamps: dict[int, tuple[float, float]] = {}  # of pages, by number; the first generated token begins page 0
    held: dict[int, list[int]] = {}
    if not pinned:
        kept = sorted(prompt, key=lambda token: (-prompt[token], token))[:most]
        for token in sorted(kept):
            page = (token - length) // page_size
            held.setdefault(page, []).append(token)
            stamps[page] = max(stamps.get(page, (0, 0)), (0, prompt[token]))
    ever = []
    for step in range(1, steps + 1):
        position = length + step - 1
        if sum(map(len, held.values())) == most:
            oldest = min(held, key=lambda page: (stamps[page], page))
            near = [page for page in held if page != oldest and stamps[page][0] == stamps[oldest][0] == 0]
            assume(all(abs(stamps[page][1] - stamps[oldest][1]) > CLEAR for page in near) or step > 1)
            del held[oldest]
        page = (step - 1) // page_size
        held.setdefault(page, []).append(position)
        stamps[page] = (step, 0)
        ids = [*range(length if pinned else 0), *(token for page in sorted(held) for token in held[page])]
        received = dict(zip(ids, head.attention(position, ids), strict=True))
        assume(all(abs(weight - alpha) > CLEAR for weight in received.values()))
        for page, tokens in held.items():
            if max(received[token] for token in tokens) > alpha:
                stamps[page] = (step, 0)
        ever.append(set(ids))
    return ever


@few
@given(
    streams(steps=25),
    st.integers(6, 20),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([0.02, 0.05]),
    st.sampled_from([("paper", True), ("paper", False), ("unified", True)]),
    st.sampled_from(["kv_head", "query_head"]),
)
def test_raas_holds_the_prompt_and_the_pages_looked_at_last(
    fixed: Stream, budget: int, page_size: int, alpha: float, way: tuple[str, bool], granularity: str
) -> None:
    accounting, pin_prompt = way
    options = {"alpha": alpha, "page_size": page_size, "pin_prompt": pin_prompt, "granularity": granularity}
    driven = drive(fixed, method_named("raas", **options), budget, accounting=accounting)
    lists, pinned = ("kv_head", False) if accounting == "unified" else (granularity, pin_prompt)
    for row, length in enumerate(fixed.lengths):
        seen = attended(driven, 0, row)
        for number, head in enumerate(heads(fixed, 0, row, lists)):
            expected = raas(head, length, fixed.steps, budget, alpha, page_size, pinned)
            assert [step[number] for step in seen] == expected
    assert not driven.audit["over_rule"]


# -- SCOPE -------------------------------------------------------------------------------------------------------------


def scope(
    head: Head, prompt: dict[int, float], length: int, steps: int, strategy: str, window: int, recent: int, delta: int
) -> list[set[int]]:
    """What is attended at each step, as the public code's counters have it."""
    generated: list[int] = []
    skipped, ever = 0, []
    for step in range(steps):
        generated.append(length + step)
        ids = [*prompt, *generated]
        ever.append(set(ids))
        received = dict(zip(ids, head.attention(length + step, ids), strict=True))
        size = window if strategy == "slide" else recent + step // delta
        if len(generated) < size:
            continue
        if strategy == "discontinuous" and skipped < delta:
            skipped += 1
            continue
        skipped = 0
        older = generated[: len(generated) - recent]
        while len(older) > size - recent:
            older.remove(worst({token: received[token] for token in older}))
        generated = older + generated[len(generated) - recent :]
    return ever


def scope_unified(
    head: Head, prompt: dict[int, float], length: int, steps: int, budget: int, window: int, recent: int
) -> list[set[int]]:
    """The same for a window that slides in what the prompt leaves of the budget; it gives way to a quarter of that."""
    prompt, part = dict(prompt), budget // 4
    generated: list[int] = []
    ever = []
    for step in range(steps):
        if len(prompt) + len(generated) == budget:
            del prompt[min(prompt, key=lambda token: (prompt[token], token))]
        generated.append(length + step)
        ids = [*prompt, *generated]
        ever.append(set(ids))
        received = dict(zip(ids, head.attention(length + step, ids), strict=True))
        if len(generated) > min(max(part - 1, budget - 1 - len(prompt)), window):
            late = min(recent, part // 2)
            older = generated[: len(generated) - late]
            generated.remove(worst({token: received[token] for token in older}))
    return ever


@few
@given(
    streams(steps=25),
    st.integers(8, 30),
    st.sampled_from(["slide", "adaptive", "discontinuous"]),
    st.sampled_from([(2, 1), (6, 2), (9, 5)]),
    st.integers(1, 4),
    st.sampled_from([("paper", "kv_head"), ("paper", "query_head"), ("unified", "kv_head")]),
)
def test_scope_holds_the_prompt_and_a_window(
    fixed: Stream, budget: int, strategy: str, sizes: tuple[int, int], delta: int, way: tuple[str, str]
) -> None:
    (window, recent), (accounting, granularity) = sizes, way
    if accounting == "unified":
        strategy = "slide"
    options = {"strategy": strategy, "window": window, "recent": recent, "delta": delta, "granularity": granularity}
    driven = drive(fixed, method_named("scope", prompt_window=3, **options), budget, accounting=accounting)
    for row, length in enumerate(fixed.lengths):
        seen = attended(driven, 0, row)
        for number, head in enumerate(heads(fixed, 0, row, granularity)):
            voted = votes(head, length, 3)
            kept = sorted(voted, key=lambda token: (-voted[token], token))[:budget]
            prompt = {token: voted[token] for token in sorted(kept)}
            if accounting == "paper":
                expected = scope(head, prompt, length, fixed.steps, strategy, window, recent, delta)
            else:
                expected = scope_unified(head, prompt, length, fixed.steps, budget, window, recent)
            assert [step[number] for step in seen] == expected
    assert not driven.audit["over_rule"]


# -- R-KV --------------------------------------------------------------------------------------------------------------


def cosine(one: list[float], other: list[float]) -> float:
    return dot(one, other) / math.sqrt(dot(one, one) * dot(other, other))


def rkv_scores(head: Head, cache: list[int], window: int, kernel: int, weight: float) -> list[float]:
    """Z of each token of a cache before its window, the paper's (1) to (5) with the public code's softmax."""
    early, late = cache[: len(cache) - window], cache[len(cache) - window :]
    received = [0.0] * len(early)
    for position in late:
        logits = [max(head.scaling * dot(q[position], head.keys[token]) for q in head.queries) for token in early]
        total = sum(math.exp(logit) for logit in logits)
        received = [sum_ + math.exp(logit) / total / window for sum_, logit in zip(received, logits, strict=True)]
    half = kernel // 2
    pooled = [max(received[max(0, at - half) : at + half + 1]) for at in range(len(early))]
    means = [0.0] * len(cache)
    for at, token in enumerate(cache):
        row = [0.0 if other == at else cosine(head.keys[token], head.keys[cache[other]]) for other in range(len(cache))]
        assume(all(abs(value - 0.5) > CLEAR for value in row))
        row[max((other for other, value in enumerate(row) if value > 0.5), default=0)] = 0.0
        means = [mean + value / len(cache) for mean, value in zip(means, row, strict=True)]
    total = sum(map(math.exp, means))
    return [weight * i - (1 - weight) * math.exp(m) / total for i, m in zip(pooled, means[: len(early)], strict=True)]


def rkv(
    head: Head, length: int, steps: int, kept: int, limit: int, full: int, window: int, weight: float, order: str
) -> list[list[int]]:
    """The cache at each step, in its order. It is cut to `kept`, a prompt of `full` tokens, later at `limit`."""

    def cut(cache: list[int]) -> list[int]:
        scores = rkv_scores(head, cache, window, 3, weight)
        best = sorted(range(len(scores)), key=lambda at: -scores[at])
        if len(best) > kept - window > 0:
            assume(scores[best[kept - window - 1]] - scores[best[kept - window]] > 1e-7)
        chosen = [*best[: kept - window], *range(len(scores), len(cache))]
        return [cache[at] for at in (chosen if order == "score" else sorted(chosen))]

    cache = list(range(length))
    if length >= full:
        cache = cut(cache)
    ever = []
    for position in range(length, length + steps):
        cache.append(position)
        ever.append(list(cache))
        if len(cache) == limit:
            cache = cut(cache)
    return ever


@few
@given(
    streams(steps=25),
    st.integers(16, 24),
    st.integers(1, 4),
    st.sampled_from([4, 9]),
    st.sampled_from([0.07, 0.5, 1.0]),
    st.sampled_from(["score", "time"]),
    st.sampled_from(["paper", "unified"]),
)
def test_rkv_keeps_what_is_attended_and_not_redundant(
    fixed: Stream, budget: int, window: int, buffer: int, weight: float, order: str, accounting: str
) -> None:
    options = {"window": window, "buffer": buffer, "mix_lambda": weight, "order": order, "kernel": 3}
    driven = drive(fixed, method_named("rkv", **options), budget, accounting=accounting)
    kept, limit = budget, budget + buffer
    if accounting == "unified":
        kept, limit, window = budget - min(buffer, budget // 4), budget, min(window, budget // 8)
    for row, length in enumerate(fixed.lengths):
        seen = attended(driven, 0, row)
        for number, head in enumerate(heads(fixed, 0, row)):
            expected = rkv(head, length, fixed.steps, kept, limit, budget, window, weight, order)
            assert [step[number] for step in seen] == [set(cache) for cache in expected]
    assert not driven.audit["over_rule"]


@pytest.mark.parametrize(
    ("weight", "first"), [(0.07, [34, 32, 2, 1, 0, 33, 20, 19, 21, 22]), (0.1, [2, 1, 34, 0, 32, 33, 20, 19, 21, 22])]
)
def test_rkv_keeps_the_tokens_of_the_public_code_in_its_order(weight: float, first: list[int]) -> None:
    method = method_named("rkv", window=4, kernel=3, mix_lambda=weight)
    drive(golden(), method, 14)
    heads_ = method.cache[0][0].tolist()
    assert heads_[0] == [*first, 36, 37, 38, 39]
    if weight == 0.07:
        assert heads_[1] == [2, 3, 1, 35, 0, 34, 17, 16, 15, 33, 36, 37, 38, 39]


def test_importance_and_redundancy_are_the_public_code_s() -> None:
    fixed = golden()
    keys, queries = fixed.keys[0, 0, :, :40], fixed.queries[0, 0, :, 36:40].unflatten(0, (2, 2))
    expected = torch.tensor([0.0255528, 0.0255070, 0.0254539])
    torch.testing.assert_close(redundancy(keys)[0, :3], expected, rtol=0, atol=1e-7)
    assert float(importance(queries, keys, fixed.shape(), 3)[0, 0]) == pytest.approx(0.1343, abs=5e-5)


# -- memory, and bad input ---------------------------------------------------------------------------------------------

LONG: list[
    tuple[str, dict[str, Any], int]
] = [  # with what a list may hold besides the prompt's part, the current token in
    ("h2o", {}, 1),
    ("lru", {}, 1),
    ("tova", {"protect": 0.1}, 1),
    ("random", {"evict": "always"}, 1),
    ("raas", {"page_size": 8, "pin_prompt": False}, 0),
    ("scope", {"window": 24, "recent": 12}, 25),
    ("rkv", {"buffer": 32}, 32),
]


@pytest.mark.parametrize(("name", "options", "more"), LONG, ids=[name for name, *_ in LONG])
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_memory_does_not_grow_with_the_answer(name: str, options: dict[str, Any], more: int, accounting: str) -> None:
    """Held and allocated alike: what is attended, what waits to be freed together, and whole pages."""
    fixed = stream(150, steps=120)
    audits = [
        drive(replace(fixed, steps=n), method_named(name, **options), 48, accounting=accounting).audit
        for n in (72, 120)
    ]
    most = 48 + (more if accounting == "paper" else 0)
    token = 2 * 16 * 4
    for audit in audits:
        assert audit["attended_max"] == most
        assert audit["device_kv_bytes"] <= 2 * 2 * (most + 32) * token
        assert audit["device_kv_allocated_bytes"] <= 2 * 2 * (most + 32 + 15) * token
    sizes = ("device_kv_bytes", "device_kv_allocated_bytes", "index_bytes")
    assert [audits[0][size] for size in sizes] == [audits[1][size] for size in sizes]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("h2o", {"recent": 1.0}, "recent=1.0: expected a share of the budget above 0 and below 1"),
        ("scope", {"recent": 512}, "recent=512: expected fewer tokens than the decoding window has, window=512"),
        ("scope", {"delta": 0}, "delta=0: expected steps, 1 or more, or null"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        method_config(name, **options).build()
    assert "\n" not in str(error.value)


def test_a_window_that_grows_with_the_answer_must_know_its_length() -> None:
    method = method_named("scope", strategy="adaptive")
    with pytest.raises(ConfigError, match="delta=null: strategy=adaptive"):
        drive(stream(60), method, 48, left=True)
    drive(stream(60), method_named("scope", strategy="adaptive", delta=15), 48, left=True)


def test_scope_s_lists_of_query_heads_have_c_each_where_generated_tokens_count() -> None:
    method = method_named("scope", granularity="query_head")
    driven = drive(stream(1, 85, steps=12, kv_heads=1, query_heads=3), method, 56, generated="counted")
    assert not driven.audit["over_rule"], driven.engine.audit.broken()
