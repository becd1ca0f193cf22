"""PQCache: codes of keys, and the tokens that promise most attention by them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from driver import drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, bind_methods

bind_methods()

from methods.blocks.kernels import KERNELS  # noqa: E402
from methods.blocks.kmeans import kmeans, nearest_point  # noqa: E402


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), count=st.integers(1, 80), clusters=st.integers(1, 12))
def test_k_means_never_grows_its_error(seed: int, count: int, clusters: int) -> None:
    points = torch.randn(2, count, 4, generator=torch.Generator().manual_seed(seed))
    errors = []
    for iterations in range(5):
        means, assigned = kmeans(points, clusters, iterations, torch.Generator().manual_seed(seed), nearest_point)
        distance = (points - means.gather(1, assigned[..., None].expand(-1, -1, 4))).square().sum(dim=2)
        assert bool((distance <= torch.cdist(points, means).square().amin(dim=2) + 1e-5).all())
        errors.append(float(distance.sum()))
    assert all(after <= before * (1 + 1e-5) for before, after in zip(errors, errors[1:], strict=False))


def reference(
    queries: list[list[float]], table: list[list[list[float]]], codes: list[list[int]], k: int, scaling: float
) -> set[int]:
    """Of tokens with codes [m][n] the k with the largest sum over the group of their softmax, in plain lists."""
    tokens, width = len(codes[0]), len(table[0][0])
    summed = [0.0] * tokens
    for query in queries:
        logits = []
        for token in range(tokens):
            coded = [number for part, own in enumerate(codes) for number in table[part][own[token]]]
            assert len(coded) == width * len(codes)
            logits.append(scaling * sum(q * c for q, c in zip(query, coded, strict=True)))
        total = sum(map(math.exp, logits))
        summed = [before + math.exp(logit) / total for before, logit in zip(summed, logits, strict=True)]
    return set(sorted(range(tokens), key=lambda token: -summed[token])[:k])


@pytest.mark.parametrize(("lengths", "group", "subspaces"), [((90, 47), 2, 2), ((60,), 1, 4)])
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_attended_are_sinks_recent_tokens_and_the_best_codes(
    lengths: tuple[int, ...], group: int, subspaces: int, accounting: str
) -> None:
    fixed = stream(*lengths, steps=5, query_heads=2 * group)
    method: Any = method_named("pqcache", subspaces=subspaces, bits=3, sinks=4)
    asked: list[torch.Tensor] = []
    select = method.select
    method.select = lambda layer, query: (asked.append(query), select(layer, query))[1]
    driven = drive(fixed, method, 20, accounting=accounting)
    scaling = method.shape.scaling
    sinks, recent, k = (4, 10, 10) if accounting == "paper" else (2, 8, 9)
    for at, query in zip(driven.seen, asked, strict=True):
        for row, length in enumerate(at.lengths):
            start = length - 1 - recent
            for head, ids in enumerate(at.sets(row)):
                table = method.tables[at.layer][row][head].tolist()
                codes = method.codes[at.layer][row, head, :, sinks:start].tolist()
                own = query[row, head * group : (head + 1) * group, 0].tolist()
                best = {token + sinks for token in reference(own, table, codes, k, scaling)}
                assert ids == set(range(sinks)) | set(range(start, length)) | best
    assert driven.audit["attended_max"] == (25 if accounting == "paper" else 20)
    assert not driven.audit["over_rule"]


def test_what_codes_promise_is_capped_where_the_models_logits_are() -> None:
    """Summed over the query heads of a group, whose shares differ; on a GPU it is `coded_tokens`."""
    rng = torch.Generator().manual_seed(0)
    query, tables = torch.randn(2, 3, 2, 4, generator=rng), torch.randn(2, 2, 16, 4, generator=rng)
    codes = torch.randint(0, 16, (1, 2, 2, 30), generator=rng)
    received, products = torch.empty(2, 30), torch.einsum("hgmw,hmkw->hgmk", query, tables)
    KERNELS.coded_attention(query, tables, codes.to(torch.uint8), 0, 0, 0.9, 0.7, received)
    logits = products.gather(3, codes[0, :, None].expand(-1, 3, -1, -1)).sum(dim=2) * 0.9
    expected = (0.7 * torch.tanh(logits / 0.7)).softmax(dim=2).sum(dim=1)
    torch.testing.assert_close(received, expected, rtol=0, atol=1e-5)


def test_codes_are_those_of_the_nearest_centroids_as_tokens_come() -> None:
    fixed = stream(40, 33, steps=6, layers=1)
    method: Any = method_named("pqcache", bits=4)
    drive(fixed, method, 8)
    for row, length in enumerate(fixed.lengths):
        keys = fixed.keys[0, row, :, : length + 6].unflatten(2, (2, -1))
        distance = (keys[:, :, :, None] - method.tables[0][row][:, None]).square().sum(dim=4)  # [Hkv, n, m, K]
        expected = distance.argmin(dim=3).transpose(1, 2)
        assert torch.equal(method.codes[0][row, :, :, : length + 6].long(), expected)


def test_a_code_of_more_than_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="bits=9: .*8 at most"):
        method_named("pqcache", bits=9)


def test_parts_that_do_not_divide_a_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="subspaces=3: .*16"):
        drive(stream(30), method_named("pqcache", subspaces=3), 8)
