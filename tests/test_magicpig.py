"""MagicPIG: samples and weights equal to the paper's, an estimate without bias, and budgets that are met."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from driver import CLOSE, Attended, Stream, drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods

bind_methods()

from methods.magicpig.tables import Tables  # noqa: E402


def met(query: torch.Tensor, key: torch.Tensor, bits: int) -> float:
    """How likely a query and a centred key are to have the same signs in so many random directions."""
    lengths = float(query.double().norm() * key.double().norm())
    cosine = float(query.double() @ key.double()) / lengths if lengths else 0  # a single key is its own mean
    return (1 - math.acos(cosine) / math.pi) ** bits


def likelihood(p: float, tables: int) -> float:
    return 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)


def shared_codes(query: torch.Tensor, key: torch.Tensor, directions: torch.Tensor) -> list[bool]:
    """In which of the tables, directions [L, K, D], a query and a centred key have the same code."""
    signs = [[float(vector.double() @ one.double()) > 0 for vector in (query, key)] for one in directions.flatten(0, 1)]
    bits = directions.shape[1]
    return [all(a == b for a, b in signs[first : first + bits]) for first in range(0, len(signs), bits)]


def sampled(
    queries: torch.Tensor, keys: torch.Tensor, tokens: range, stop: int, room: float, directions: torch.Tensor
) -> list[dict[int, float]]:
    """What each of the queries [G, D] of a KV head with keys [n, D] samples of `tokens` before `stop`, and how likely.

    By the paper's words and in plain numbers; from the most tables with which they find no more than `room` together.
    """
    mean = keys[tokens.start : tokens.stop].double().mean(dim=0)
    centred = {token: keys[token].double() - mean for token in tokens if token < stop}
    shared = [{token: shared_codes(query, key, directions) for token, key in centred.items()} for query in queries]
    for tables in range(len(directions), -1, -1):
        found = [{token for token, codes in own.items() if sum(codes[:tables]) >= 2} for own in shared]
        if len(set().union(*found)) <= room:
            break
    return [
        {token: likelihood(met(query, centred[token], directions.shape[1]), tables) for token in own}
        for query, own in zip(queries, found, strict=True)
    ]


def output(
    fixed: Stream, at: Attended, row: int, head: int, likely: dict[int, float], always: set[int]
) -> torch.Tensor:
    """Attention [D] of one query head over the tokens always attended and those sampled, in one softmax."""
    kv_head, token = head // (fixed.queries.shape[2] // fixed.keys.shape[2]), at.lengths[row] - 1
    ids = sorted(always | set(likely))
    logits = [
        fixed.scaling * float(fixed.queries[at.layer, row, head, token] @ fixed.keys[at.layer, row, kv_head, other])
        - (math.log(likely[other] + 1e-4) if other in likely else 0)
        for other in ids
    ]
    return torch.tensor(logits).softmax(dim=0) @ fixed.values[at.layer, row, kv_head, ids]


@pytest.mark.slow  # entry by entry, in Python
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    heads=st.sampled_from([(4, 2), (3, 3), (3, 1)]),
    sizes=st.tuples(st.integers(1, 4), st.integers(2, 12)),
    budget=st.sampled_from([None, 16, 24]),
    accounting=st.sampled_from(["paper", "unified"]),
    seed=st.integers(0, 100),
)
def test_samples_and_outputs_are_those_of_the_paper(
    lengths: list[int], heads: tuple[int, int], sizes: tuple[int, int], budget: int | None, accounting: str, seed: int
) -> None:
    accounting = "paper" if budget is None else accounting
    fixed = stream(*lengths, steps=2, query_heads=heads[0], kv_heads=heads[1], head_dim=8, seed=seed)
    method: Any = method_named("magicpig", bits=sizes[0], tables=sizes[1], sinks=2, local=5)
    driven = drive(fixed, method, budget, accounting=accounting)
    group, capacity = heads[0] // heads[1], budget or math.inf
    sinks, local = (2, 5) if budget is None else (1, min(5, budget // 4))
    for at in driven.seen:
        for row, (length, seen) in enumerate(zip(lengths, at.lengths, strict=True)):
            unified = accounting == "unified"
            tokens = range(sinks, length if unified else length - local)
            start = max((seen if unified else length) - local, sinks)
            whole = not tokens or budget is not None and (seen if unified else length) <= budget
            always = set(range(seen)) if whole else {*range(sinks), *range(start, seen)}
            for head, found in enumerate(at.sets(row)):
                likely: dict[int, float] = {}
                if not whole:
                    tables, first = method.hashed[at.layer][row], head // group * group
                    room = capacity - len(always) if unified else math.inf
                    queries = fixed.queries[at.layer, row, first : first + group, seen - 1]
                    directions = method.directions[row][: tables.tables, : tables.bits]
                    keys = fixed.keys[at.layer, row, head // group]
                    likely = sampled(queries, keys, tokens, start, room, directions)[head - first]
                assert found == always | set(likely)
                expected = output(fixed, at, row, head, likely, always)
                outcome = driven.outputs[at.step - 1, at.layer, row, head]
                torch.testing.assert_close(outcome, expected, rtol=0, atol=CLOSE)


def test_the_estimate_is_full_attention_on_average() -> None:
    """The sum of all weights before they are normalised, over many draws of the directions."""
    rng = torch.Generator().manual_seed(0)
    keys, query = torch.randn(1, 300, 16, generator=rng) + 1, torch.randn(1, 16, generator=rng)
    logits, sums = keys[0] @ query[0] / 4, []
    for draw in range(400):
        directions = torch.randn(30, 5, 16, generator=torch.Generator().manual_seed(draw))
        ids, weights, _ = Tables(keys, 0, directions, 5).sample(query, keys, (0, 300, 300), None)
        sums.append(float((logits[ids[0]] + weights[0]).exp().sum()))
    error = torch.tensor(sums).std() / len(sums) ** 0.5
    exact = logits.exp().sum()
    assert abs(torch.tensor(sums).mean() - exact) < 4 * error < 0.1 * exact


@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_a_budget_takes_the_most_bits_and_fewest_tables_that_sample_enough(accounting: str) -> None:
    fixed = stream(300, steps=30, layers=1, seed=3)
    method: Any = method_named("magicpig", bits=8, tables=40)
    driven = drive(fixed, method, 80, accounting=accounting)
    (tables,) = method.hashed[0]
    keys = fixed.keys[0, 0, :, 4 : 300 if accounting == "unified" else 280]
    centred = keys - keys.mean(dim=1, keepdim=True)

    def mean(bits: int, count: int) -> float:
        """Keys sampled by a query head, or by any of a group, of the prompt's last eight queries."""
        total = 0.0
        for kv_head in range(2):
            for query in fixed.queries[0, 0, 2 * kv_head : 2 * kv_head + 2, 292:300].transpose(0, 1):
                for key in centred[kv_head]:
                    own = [likelihood(met(head, key, bits), count) for head in query]
                    total += 1 - math.prod(1 - each for each in own) if accounting == "unified" else sum(own) / 2
        return total / (2 * 8)

    assert 1 < tables.bits < 8 and 2 < tables.tables <= 40
    assert mean(tables.bits, tables.tables) >= 80 - 4 - 20 > mean(tables.bits, tables.tables - 1)
    assert mean(tables.bits + 1, 40) < 80 - 4 - 20
    found = driven.audit
    assert found["query_head_deviation"] > 1
    if accounting == "paper":
        assert found["query_head_mean"] == pytest.approx(80, rel=0.1) and found["attended_max"] > 80 + 30
    else:
        assert 60 < found["attended_mean"] <= found["attended_max"] <= 80


def test_bytes_are_those_of_the_tables_and_of_the_keys_that_were_weighed() -> None:
    lengths, steps = (120, 95), 3
    driven = drive(stream(*lengths, steps=steps), method_named("magicpig", bits=3, tables=10, local=16), None)
    index = len(lengths) * 10 * 3 * 16 * 4  # the directions, once for all layers
    for hashed in (length - 4 - 16 for length in lengths):
        index += 2 * 2 * 4 * (10 * (2**3 + 1) + 10 * hashed + hashed + 16)
    assert driven.audit["index_bytes"] == index
    everything = 2 * 2 * sum(length + steps for length in lengths)  # layers, KV heads
    assert driven.audit["host_bytes"] == everything * 2 * 16 * 4
    weighed = sum(
        len(ids) - 4 - 16 - at.step for at in driven.seen for row in range(2) for ids in at.sets(row)
    )  # by each query head
    assert driven.audit["read_bytes_per_step"] * steps == pytest.approx(weighed * 16 * 4) and weighed > 100


def test_a_prompt_of_sinks_alone_gives_way_to_later_tokens_where_these_count() -> None:
    driven = drive(stream(3, 70, steps=60), method_named("magicpig"), 48, accounting="unified")
    assert not driven.audit["over_rule"]
    assert {max(map(len, at.sets(0))) for at in driven.seen if at.step > 50} == {3 + 12}  # sinks, and a quarter of C


def test_everything_counts_only_inside_a_budget() -> None:
    with pytest.raises(ValueError, match="budget=null: .*protocol.accounting=unified"):
        drive(stream(40, steps=1), method_named("magicpig"), None, accounting="unified")


def test_a_code_has_sixteen_bits_at_most() -> None:
    with pytest.raises(ValueError, match=r"bits=17: .*; expected 16 at most$"):
        method_named("magicpig", bits=17)
