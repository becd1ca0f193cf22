"""Arguments of the operators that search an index: of all group sizes, head dims and ragged lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from operator_cases import Call, integers

from methods import clusterkv, pqcache
from methods.lychee import search
from methods.pariskv import vectorised
from methods.pariskv.codebook import Quotas, quotas, random_signs


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# -- ParisKV: both sides give the same bits ----------------------------------------------------------------------------


def coded(head_dim: int, group: int, lengths: list[int], of: list[Quotas | None], room: int, kind: str) -> Any:
    """Zones of some length each, of which `room` is reserved, and what each row asks for."""
    batch, heads, signs = len(lengths), 1 + (group == 4), random_signs(head_dim, 0)
    keys, queries = normal(batch, heads, room, head_dim), normal(batch, heads, group, head_dim, seed=1)
    if kind == "repeated":
        keys = keys[:, :, torch.arange(room) // 7]
    elif kind == "halves":
        keys, queries = keys.bfloat16(), queries.bfloat16()
    elif kind == "zero":
        keys[:, :, ::3] = 0
        queries[0] = 0
    elif kind == "nan":
        queries[0, 0] = torch.nan
    codes = vectorised.encode(keys, signs)
    counts = torch.stack([vectorised.count_ids(codes.ids[row, :, :length]) for row, length in enumerate(lengths)])
    tiers = max(len(asked.tiers) for asked in of if asked)
    asks = [
        [length, 3 + row, asked.candidates, asked.retrieved, *asked.tiers] if asked else [0] * (4 + tiers)
        for row, (length, asked) in enumerate(zip(lengths, of, strict=True))
    ]
    most = [max(getattr(asked, name) for asked in of if asked) for name in ("candidates", "retrieved")]
    return queries, signs, *codes, counts, torch.tensor(asks).T.contiguous(), *most


def pariskv() -> Iterator[Call]:
    """Zones that end in the middle of a block, rows that do not ask, more wanted than there is."""
    kinds = ["normal", "repeated", "halves", "zero", "nan"]
    for group in range(1, 9):
        dim, kind = [64, 96, 128, 256][group % 4], kinds[group % 5]
        lengths = [100 + 37 * group, 64 - group][: 2 if group < 5 else 1]
        asked: list[Quotas | None] = [quotas(length, 20, tiers=[6, 1][group % 2]) for length in lengths]
        asked = [asked[0], None] if group == 3 else asked
        yield Call(
            vectorised.search_codes,
            f"{group}-{dim}-{kind}",
            lambda a=dim, b=group, c=lengths, d=asked, e=kind: coded(a, b, c, d, 448, e),
        )
    for length, k, beta in ((1, 5, None), (2048, 300, 1.0), (1023, 1, 0.001), (1025, 2000, None)):
        asked = [quotas(length, k, beta)]
        yield Call(
            vectorised.search_codes,
            f"{length}-{k}-{beta}",
            lambda a=[length], b=asked: coded(32, 2, a, b, 2112, "repeated"),
        )
    yield Call(
        vectorised.search_codes,
        "131072-704",
        lambda: coded(128, 4, [130_000], [quotas(130_000, 704)], 131_072, "normal"),
        large=True,
    )


SHAPES = tuple((group, (64, 96, 128, 256)[group % 4]) for group in range(1, 9))

# -- clusters and codes ------------------------------------------------------------------------------------------------


def clusters() -> Iterator[Call]:
    """Some empty, many with equal products, fewer tokens than wanted."""
    for group, dim in SHAPES:
        count, tokens = 5 + 3 * group, 90
        room = (40, 120)[group % 2]

        def arguments(a: int = group, b: int = dim, c: int = count, d: int = tokens, e: int = room) -> Any:
            ends = integers(2, c - 1, low=0, high=d + 1, seed=a, dtype=torch.int64).sort(dim=1).values
            edges = torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=d)
            starts, sizes = edges[:, :-1], edges.diff(dim=1)
            members = torch.stack([torch.randperm(d, generator=torch.Generator().manual_seed(a)) for _ in range(2)])
            query, means = integers(2 * a, b, dtype=torch.bfloat16), integers(2, c, b, seed=1)
            means[0, c // 2] = torch.inf
            return query, means, starts, sizes, members, e

        yield Call(clusterkv.cluster_tokens, f"{group}-{dim}-{room}", arguments)
    large = torch.zeros(8, 1600, dtype=torch.int64)
    yield Call(
        clusterkv.cluster_tokens,
        "1600-1024",
        lambda: (normal(32, 128), normal(8, 1600, 128), large, large, torch.zeros(8, 131072, dtype=torch.int64), 1024),
        large=True,
    )


def codes() -> Iterator[Call]:
    """Equal codes, a row in the middle, memory that nobody has filled, more wanted than there is."""
    for group, dim in SHAPES:
        parts, bits = (2, 4, 1)[group % 3], (6, 3, 8)[group % 3]
        retrieved = (17, 100)[group % 2]

        def arguments(a: int = group, b: int = dim, c: int = parts, d: int = bits, e: int = retrieved) -> Any:
            query, table = integers(2, a, c, b // c), integers(2, c, 1 << d, b // c, seed=1)
            of = integers(2, 2, c, 150, low=0, high=1 << d, seed=2, dtype=torch.uint8)
            return query, table, of, torch.tensor([140, 100 - a]), a % 2, 4, 20, e, 0.01, (None, 0.5)[a % 2]

        name = f"{group}-{dim}-{parts}-{bits}"
        yield Call(pqcache.coded_tokens, name, arguments)
        key = integers(2, 2, 1, dim, seed=3, dtype=torch.bfloat16)
        yield Call(pqcache.code_newest, name, lambda a=arguments, b=key: (b, *a()[1:5]))
    yield Call(
        pqcache.coded_tokens,
        "131072-512",
        lambda: (
            normal(8, 4, 2, 64),
            normal(8, 2, 64, 64),
            torch.zeros(1, 8, 2, 131072, dtype=torch.uint8),
            torch.tensor([131000]),
            *(0, 32, 512, 512),
            *(0.1, None),
        ),
        large=True,
    )


def chunks() -> Iterator[Call]:
    """Units of equal bounds, empty ones and empty clusters, chunks that do not fit any more."""
    for group, dim in SHAPES:
        for mean in (True, False)[: 2 if group in (1, 2, 3, 6) else 1]:
            name = f"{group}-{dim}-{mean}"
            fixed = (torch.tensor(1300 - 20 * group), 1260, 50, 7) if group % 2 else (None, 0, 0, 0)
            yield Call(
                search.best_tokens, name, lambda a=group, b=dim, c=mean, d=fixed: (*indexed(a, b, c, 6, 40, 90, 60), *d)
            )
    yield Call(
        search.best_tokens,
        "11000-1008",
        lambda: (*indexed(4, 128, True, 64, 5500, 11000, 1008), torch.tensor(90000), 88600, 128, 16),
        large=True,
    )


def indexed(group: int, dim: int, mean: bool, units: int, clusters: int, count: int, room: int) -> Any:
    def cut(parts: int, whole: int, seed: int) -> torch.Tensor:
        """Where parts of a whole begin, and the last one ends: some are empty."""
        ends = integers(2, parts - 1, low=0, high=whole + 1, seed=seed, dtype=torch.int64).sort(dim=1).values
        return torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=whole).int()

    lengths = integers(count, low=4, high=9, seed=group, dtype=torch.int64)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + 3
    starts, unit_starts = cut(clusters, count, 5), cut(units, clusters, 6)
    members = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(group)) for _ in range(2)])
    held = torch.nn.functional.pad(lengths[members].cumsum(dim=1), (1, 0))
    unit_tokens = held.gather(1, starts.gather(1, unit_starts.long()).long()).diff(dim=1).int()
    queries = integers(2, group, dim)
    tensors = (
        integers(2, units, dim, seed=1, dtype=torch.bfloat16),
        integers(2, units, low=0, high=3, seed=2),
        unit_tokens,
        unit_starts,
        integers(2, clusters, dim, seed=3, dtype=torch.bfloat16),
        integers(2, clusters, low=0, high=3, seed=4),
        starts,
        members.int(),
        integers(2, count + 5, dim, low=-2, high=3, seed=7, dtype=torch.int8) if group % 3 == 0 else None,
        bounds,
    )
    return queries, mean, *tensors, 2, 1, room // 4 + 2, room


def calls() -> Iterator[Call]:
    """All of them."""
    yield from pariskv()
    yield from clusters()
    yield from codes()
    yield from chunks()
