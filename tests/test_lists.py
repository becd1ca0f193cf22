"""Lists in compiled code: products, ranks, ranges and pages are those of a plain reading, in any number of threads."""

from __future__ import annotations

import math

import pytest
import torch
from driver import CLOSE
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.config import bind_methods

bind_methods()

from methods.blocks.held import largest_of_pages  # noqa: E402
from methods.blocks.kernels import KERNELS  # noqa: E402
from methods.blocks.products import products  # noqa: E402
from methods.blocks.ragged import entries  # noqa: E402
from methods.blocks.recent import sinks_and_recent  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "count"), [(1, 16, 1), (3, 20, 65), (5, 64, 700)])
def test_products_are_those_of_every_query_head_with_its_keys(
    dtype: torch.dtype, group: int, head_dim: int, count: int
) -> None:
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, count + 7, head_dim, generator=rng).to(dtype)[:, :, 2 : count + 2]  # with room around them
    query = torch.randn(2, 3 * group, 1, head_dim, generator=rng).to(dtype)
    found = products(query, keys)
    expected = torch.einsum("bhgd,bhnd->bhgn", query.double().view(2, 3, group, head_dim), keys.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=10 * CLOSE)
    in_torch = products(query, keys.transpose(2, 3).contiguous().transpose(2, 3))  # a layout that no kernel reads
    torch.testing.assert_close(found, in_torch, rtol=0, atol=10 * CLOSE)


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 1e-42, math.inf, -math.inf, math.nan])


@settings(max_examples=60)
@given(
    scores=st.lists(st.lists(NUMBERS, min_size=12, max_size=12), min_size=1, max_size=3),
    most=st.integers(1, 12),
    threads=st.integers(1, 2),
    data=st.data(),
)
def test_the_best_are_those_of_a_stable_sort_without_what_is_no_number(
    scores: list[list[float]], most: int, threads: int, data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(0, 14)) for _ in scores]
    found = torch.empty(1, len(scores), most, dtype=torch.int64)
    KERNELS.best_lists(threads, torch.tensor([scores]), torch.tensor([counts]), found)
    for own, count, ids in zip(scores, counts, found[0].tolist(), strict=True):
        ranked = sorted((at for at in range(12) if own[at] > -math.inf), key=lambda at: (-own[at], at))
        expected = ranked[: min(count, most)]
        assert ids == expected + [-1] * (most - len(expected))


@given(ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1), most=st.integers(1, 20))
def test_ranges_are_cut_where_the_list_is_full(ranges: list[tuple[int, int]], most: int) -> None:
    numbers, source = entries(*torch.tensor([ranges]).permute(2, 0, 1), most)
    whole = [(first + at, which) for which, (first, count) in enumerate(ranges) for at in range(count)][:most]
    assert [*zip(numbers[0].tolist(), source[0].tolist(), strict=True)] == whole


@given(
    ids=st.sets(st.integers(0, 30), max_size=12),
    absent=st.integers(0, 3),
    size=st.integers(1, 8),
    first=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_a_token_has_the_largest_number_of_its_page(
    ids: set[int], absent: int, size: int, first: int, seed: int
) -> None:
    listed = [*sorted(ids), *[-1] * absent]
    each = torch.rand(1, 1, len(listed), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[listed]], dtype=torch.int64)
    found = largest_of_pages(ids, torch.tensor([first]), size, each)
    for token, number in zip(listed, found[0, 0].tolist(), strict=True):
        page = (token - first) // size
        others = [at for at, other in enumerate(listed) if other >= 0 and (other - first) // size == page]
        assert token < 0 or number == max(each[0, 0, at].item() for at in others)


@given(seen=st.integers(1, 40), counts=st.lists(st.integers(4, 30), min_size=1, max_size=3), sinks=st.integers(0, 3))
def test_recent_tokens_come_newest_first_and_sinks_last(seen: int, counts: list[int], sinks: int) -> None:
    most = min(seen, max(counts))
    found = sinks_and_recent(torch.tensor([seen]), torch.tensor([counts]), sinks, most)
    for count, ids in zip(counts, found[0].tolist(), strict=True):
        text = [*range(seen)]
        expected = text if seen <= count else text[:sinks] + text[seen - count + sinks :]
        assert ids == expected[::-1] + [-1] * (most - len(expected))
