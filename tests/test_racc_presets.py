"""RACC's presets against a cache written down as a list of tokens, from the description of the published code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from driver import Stream, drive, stream

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods

bind_methods()

from methods.racc.ratio import share  # noqa: E402

EVERY, WINDOW, LAG, ALPHA = 20, 5, 10, 0.6
CYCLE: dict[str, Any] = {"scenario": "silo", "every": EVERY, "window": WINDOW}
LILO: dict[str, Any] = {**CYCLE, "scenario": "lilo", "capacity": 24, "prompt_window": 8, "lag": LAG, "beta": 0.1}
STEPS = 130


class Cache:
    """One KV head's cache: the prompt, then generated tokens in the order of memory; and what is on the host.

    Every EVERY steps the last WINDOW queries have voted for the tokens between prompt and window, a softmax over those
    alone (or over all of the cache, or the logits). The votes are smoothed, and the ALPHA share with most stays.

    Args:
        own: the query head of the group whose cache it is; None: the group's.
    """

    def __init__(
        self,
        fixed: Stream,
        row: int,
        head: int,
        kernel: int,
        order: str,
        shifted: bool,
        beta: float,
        vote: str = "softmax_l2",
        own: int | None = None,
    ) -> None:
        self.prompt = fixed.lengths[row]
        group = fixed.queries.shape[2] // fixed.keys.shape[2]
        self.keys = fixed.keys[0, row, head].double().numpy()
        self.queries = fixed.queries[0, row, head * group : (head + 1) * group].double().numpy()
        self.voters = self.queries if own is None else self.queries[own : own + 1]
        self.scaling, self.kernel, self.order, self.shifted = fixed.scaling, kernel, order, shifted
        self.beta, self.vote = beta, vote
        self.generated: list[int] = []  # in the order of the cache
        self.host: list[int] = []
        self.lost: list[int] = []
        self.after: list[set[int]] = []  # generated tokens on the device after each compression

    def run(self, steps: int) -> Cache:
        run([self], steps)
        return self

    def nearest(self, newest: int) -> list[int]:
        """The evicted keys with the largest cosine with the group's mean query."""
        query = self.queries[:, newest].mean(axis=0)
        cosines = {token: self.keys[token] @ query / np.linalg.norm(self.keys[token]) for token in self.host}
        return sorted(cosines, key=lambda token: -cosines[token])[: share(self.beta, newest + 1)]

    def compress(self, found: list[int]) -> None:
        older, window = self.generated[:-WINDOW], self.generated[-WINDOW:]
        if self.order == "token":
            older = sorted(older)
        votes = self.smoothed(self.votes(older, window))
        best = sorted(range(len(older)), key=lambda at: -votes[at])[: share(ALPHA, len(older))]
        kept = [older[at] for at in sorted(best)]
        if self.shifted:
            kept = [older[at - 1] for at in sorted(best) if at > 0]  # before the first is the prompt's last token
            self.lost.append(older[-1])
        gone = set(older) - set(kept) - set(self.lost)
        self.host = sorted((set(self.host) | gone) - set(found))
        self.generated = found + kept + window
        self.after.append(set(self.generated))

    def votes(self, older: list[int], window: list[int]) -> list[float]:
        sums = [0.0] * len(older)
        for position in window:
            resident = [*range(self.prompt), *(token for token in self.generated if token <= position)]
            over = older if self.vote == "softmax_l2" else resident
            for query in self.voters[:, position]:
                logits = [float(query @ self.keys[token]) * self.scaling for token in older]
                total = sum(math.exp(float(query @ self.keys[token]) * self.scaling) for token in over)
                for at, logit in enumerate(logits):
                    sums[at] += logit if self.vote == "raw" else math.exp(logit) / total
        return sums

    def smoothed(self, votes: list[float]) -> list[float]:
        half = self.kernel // 2
        return [sum(votes[max(0, at - half) : at + half + 1]) / self.kernel for at in range(len(votes))]


def run(group: list[Cache], steps: int) -> None:
    """Caches of the query heads of a KV head, or its one; a search is the group's, of what none of them holds."""
    found: list[int] = []
    for step in range(1, steps + 1):
        newest = group[0].prompt + step - 1
        searches = len(group[0].after) >= 2
        if (step + LAG) % EVERY == 0 and searches:
            found = group[0].nearest(newest)
        for cache in group:
            cache.generated.append(newest)
            if step % EVERY == 0:
                cache.compress(found if searches else [])
        held = {token for cache in group for token in cache.generated}
        host = sorted({token for cache in group for token in cache.host} - held)
        for cache in group:
            cache.host = host


def lists(fixed: Stream, *arguments: Any, **options: Any) -> list[list[list[set[int]]]]:
    """`Cache.after` of all heads, [number][row][KV head]."""
    rows = [[Cache(fixed, row, head, *arguments, **options).run(STEPS).after for head in (0, 1)] for row in (0, 1)]
    return [[[head[number] for head in row] for row in rows] for number in range(len(rows[0][0]))]


def compressed(fixed: Stream, method: Any) -> list[list[list[set[int]]]]:
    """Generated tokens on the device after each compression, [number][row][KV head]."""
    after = []
    end_step = method.end_step

    def noted() -> None:
        end_step()
        if method.steps % EVERY == 0:
            ids = method.view._stores[0].device.token_ids().tolist()
            rows = zip(fixed.lengths, ids, strict=True)
            after.append([[{one for one in head if one >= length} for head in row] for length, row in rows])

    method.end_step = noted
    drive(fixed, method, None)
    return after


OPTIONS = [
    {"vote_kernel": 5, "vote_order": "token", "shifted": False},
    {"vote_kernel": 5, "vote_order": "cache", "shifted": False},
    {"vote_kernel": 5, "vote_order": "token", "shifted": True},
    {"vote_kernel": 5, "vote_order": "cache", "shifted": True},
    {"vote_kernel": 1, "vote_order": "token", "shifted": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_each_way_to_compress_keeps_what_the_list_keeps(options: dict[str, Any]) -> None:
    fixed = stream(60, 33, steps=STEPS, layers=1)
    method = method_named("racc", **CYCLE, lag=LAG, beta=0.1, **options)
    after = compressed(fixed, method)
    lost = 0
    for row in (0, 1):
        for head in (0, 1):
            cache = Cache(fixed, row, head, options["vote_kernel"], options["vote_order"], options["shifted"], 0.1)
            cache.run(STEPS)
            assert [number[row][head] for number in after] == cache.after
            assert set(method.residents[0].evicted()[row][head]) == set(cache.host)
            lost += len(cache.lost)
    assert lost == (4 * 6 if options["shifted"] else 0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("vote", ["softmax_l2", "softmax_all", "raw"])
def test_each_query_head_has_a_cache_of_its_own(vote: str, beta: float) -> None:
    """It attends that cache alone; the union over its group is on the device, and a search is the group's."""
    fixed = stream(60, 33, steps=STEPS, layers=1)
    options: dict[str, Any] = {**CYCLE, "lag": LAG, "beta": beta, "vote": vote, "granularity": "query_head"}
    method = method_named("racc", **options)
    driven = drive(fixed, method, None)
    held = [[{one for one in ids if one >= 0} for ids in row] for row in method.view.resident(0).tolist()]
    apart = 0
    for row, length in enumerate(fixed.lengths):
        for head in (0, 1):
            group = [Cache(fixed, row, head, 5, "token", False, beta, vote, own) for own in (0, 1)]
            run(group, STEPS)
            caches = [set(range(length)) | set(cache.generated) for cache in group]
            assert driven.seen[-1].sets(row)[2 * head : 2 * head + 2] == caches
            assert held[row][head] == caches[0] | caches[1]
            assert beta == 0 or set(method.residents[0].evicted()[row][head]) == set(group[0].host)
            apart += len(caches[0] ^ caches[1])
    assert apart > 100, "two heads of a group choose alike"
    assert not driven.audit["over_rule"]


def test_the_ways_to_compress_differ() -> None:
    """The lists above could not tell them apart if they chose alike."""
    fixed = stream(60, 33, steps=STEPS, layers=1)
    found = [lists(fixed, *options.values(), beta=0.1) for options in OPTIONS]
    assert all(one != other for number, one in enumerate(found) for other in found[:number])


PRESETS = {
    "racc": (5, "token", False, True),
    "racc_code": (5, "cache", True, False),
    "racc_paper": (1, "token", False, True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_options(name: str) -> None:
    options = method_named(name).requested_options
    assert (options.vote_kernel, options.vote_order, options.shifted, options.search_prompt) == PRESETS[name]


def test_the_preset_of_the_code_keeps_what_the_list_keeps() -> None:
    fixed = stream(60, 33, steps=STEPS, layers=1)
    after = compressed(fixed, method_named("racc_code", **CYCLE, lag=LAG, beta=0.1))
    assert after == lists(fixed, 5, "cache", True, 0.1)


def test_the_preset_of_the_paper_keeps_the_largest_logits_without_their_neighbours() -> None:
    """Equations 5 and 6; what is found stays on the host, so that the cache is that of compression alone."""
    fixed = stream(60, 33, steps=STEPS, layers=1)
    after = compressed(fixed, method_named("racc_paper", **CYCLE))
    assert after == lists(fixed, 1, "token", False, 0.0, vote="raw")


def attended_of_prompt(fixed: Stream, method: Any, resident_after_prefill: int, budget: int | None) -> int:
    """Tokens of the prompt, summed over steps and heads, that are attended beyond those the compressor kept."""
    counted = 0
    for at in drive(fixed, method, budget).seen:
        for row, length in enumerate(fixed.lengths):
            counted += sum(len({one for one in ids if one < length}) - resident_after_prefill for ids in at.sets(row))
    return counted


@pytest.mark.parametrize("scenario", ["liso", "lilo"])
def test_evicted_prompt_tokens_are_found_only_where_they_are_searched(scenario: str) -> None:
    """C = 24 of a prompt of 90: the code's prefill discards the rest, and a search finds generated tokens alone."""
    fixed = stream(90, 90, steps=STEPS, layers=1)
    options: dict[str, Any] = {
        **CYCLE,
        "scenario": scenario,
        "capacity": 24,
        "prompt_window": 8,
        "lag": LAG,
        "beta": 0.1,
    }
    budget = 24 if scenario == "liso" else None
    assert attended_of_prompt(fixed, method_named("racc_code", **options), 24, budget) == 0
    assert attended_of_prompt(fixed, method_named("racc", **options), 24, budget) > 100
    only = method_named("racc", **options, search_prompt=False)
    assert attended_of_prompt(fixed, only, 24, budget) == 0, "it is the option that does it"


def test_the_code_still_finds_generated_tokens_behind_a_discarded_prompt() -> None:
    fixed = stream(90, 90, steps=STEPS, layers=1)
    method = method_named("racc_code", **LILO)
    driven = drive(fixed, method, None)
    assert driven.audit["searches"] == 5 and driven.audit["moved_bytes_per_step"] > 0
    for row in (0, 1):
        for head in method.residents[0].evicted()[row]:
            assert len(head) and min(head) >= 90


def test_the_code_compresses_a_prompt_of_its_capacity_or_more_and_no_other() -> None:
    """scenario=lilo without a budget is the code's own rule: a shorter prompt stays whole."""
    fixed = stream(60, 33, steps=STEPS, layers=1)
    lilo = drive(fixed, method_named("racc_code", **LILO | {"capacity": 60}), None)
    silo = drive(fixed, method_named("racc_code", **LILO | {"scenario": "silo"}), None)
    assert [at.sets(row) for at in silo.seen for row in (0, 1)] == [at.sets(row) for at in lilo.seen for row in (0, 1)]
