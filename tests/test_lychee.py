"""LycheeCluster: its bounds after any graft, its lists, what a step attends, and how a text is cut as it grows."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from driver import PIECES, Attended, Stream, drive, numbers, run_loop, slow, stream, watch
from torch.nn.functional import pad

from kvbench.backends.hf.cache import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, bind_methods, method_config

bind_methods()

from methods.blocks.chunking import Chunks, delimiters  # noqa: E402
from methods.lychee import LycheeCluster  # noqa: E402
from methods.lychee.clustering import ClusterLayout, pooled  # noqa: E402
from methods.lychee.index import ChunkSearch, ClusterIndex  # noqa: E402

HEADS, WIDTH = 2, 24


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def representatives(count: int, seed: int = 0) -> torch.Tensor:
    """[HEADS, count, WIDTH] unit vectors around a common mean, as those of keys are."""
    vectors = torch.randn(HEADS, count, WIDTH, generator=seeded(seed)) + torch.linspace(-1, 2, WIDTH)
    return vectors / vectors.norm(dim=2, keepdim=True)


def lengths_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, 17, (count,), generator=seeded(seed))


def index_of(points: torch.Tensor, dtype: torch.dtype = torch.bfloat16, **layout: Any) -> ClusterIndex:
    settled = ClusterLayout(**{"radii": "exact", "move_units": False, **layout})
    return ClusterIndex(points, lengths_of(points.shape[1]), settled, dtype, seeded())


def clusters_of(index: ClusterIndex) -> torch.Tensor:
    """[H, M], the cluster of every chunk, read off the lists; -1 of one that is in none."""
    places = torch.arange(index.count, dtype=torch.int32).expand(HEADS, -1).contiguous()
    of_place = torch.searchsorted(index.starts[:, 1:].contiguous(), places, right=True)
    return torch.full_like(of_place, -1).scatter(1, index.members.long(), of_place)


def units_of(index: ClusterIndex) -> torch.Tensor:
    """[H, M], the unit of every chunk."""
    bounds = index.unit_starts[:, 1:].long().contiguous()
    return torch.searchsorted(bounds, clusters_of(index), right=True)


def slack(points: torch.Tensor, centroids: torch.Tensor, radii: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """By how much the bound exceeds the inner product, for each point's own worst query, in fp64; [H, M].

    No unit query's inner product with the point exceeds that with the centroid by more than one along their
    difference: there the bound is radius - distance too large.
    """
    points, centroids, radii = points.double(), centroids.double(), radii.double()
    centre = centroids.gather(1, of[..., None].expand(-1, -1, points.shape[2]))
    query = torch.nn.functional.normalize(points - centre, dim=2)
    bound = (query * centre).sum(dim=2) + radii.gather(1, of)
    return bound - (query * points).sum(dim=2)


# -- bounds ------------------------------------------------------------------------------------------------------------

GRAFTS = 2000
BUILDS = ["full", "two_level"]


def worst_after_grafts(dtype: torch.dtype, layout: dict[str, Any], every: int) -> tuple[float, float, int]:
    """Least slack of fine clusters and of units over a build and `GRAFTS` grafts, and chunks outside their ball."""
    points = representatives(150 + GRAFTS)
    index = index_of(points[:, :150], dtype, **layout)
    fine, coarse, outside = [], [], 0
    for count in range(150, 150 + GRAFTS + 1):
        if (count - 150) % every == 0:
            here = points[:, :count]
            of, unit = clusters_of(index), units_of(index)
            fine.append(slack(here, index.centroids, index.radii, of))
            coarse.append(slack(here, index.unit_centroids, index.unit_radii, unit))
            outside = int((fine[-1] < 0).sum())
        if count < 150 + GRAFTS:
            index.graft(points[:, count], 12)
    return min(float(at.min()) for at in fine), min(float(at.min()) for at in coarse), outside


@pytest.mark.parametrize(
    ("dtype", "layout", "every"),
    [
        (torch.float32, {"radii": "exact", "build": "two_level"}, 10),
        (torch.float32, {"radii": "strict", "move_units": True}, 50),
        *slow(
            (torch.bfloat16, {"radii": "exact", "move_units": True}, 1),
            (torch.bfloat16, {"radii": "strict", "build": "two_level", "move_units": True}, 1),
            (torch.float32, {"radii": "strict"}, 10),
        ),
    ],
)
def test_every_bound_holds_for_every_descendant_through_two_thousand_grafts(
    dtype: torch.dtype, layout: dict[str, Any], every: int
) -> None:
    """For each chunk the query that asks most of the bound, against centroids as they are held."""
    fine, coarse, outside = worst_after_grafts(dtype, layout, every)
    assert fine >= 0
    assert coarse >= 0
    assert outside == 0


def test_the_published_update_loses_members() -> None:
    """The claim above could not fail if any radius would do: a centroid that moves leaves older members outside."""
    fine, _, outside = worst_after_grafts(torch.bfloat16, {"radii": "paper"}, every=GRAFTS)
    assert fine < 0
    assert 0.001 < outside / (HEADS * (150 + GRAFTS)) < 0.2


@pytest.mark.parametrize("radii", ["strict", "paper"])
def test_radii_only_grow_where_members_are_not_kept(radii: str) -> None:
    points = representatives(400)
    index = index_of(points[:, :100], radii=radii)
    assert index.codes is None
    for chunk in range(100, 400):
        fine, coarse = index.radii.clone(), index.unit_radii.clone()
        index.graft(points[:, chunk], 12)
        assert bool((index.radii >= fine).all()) and bool((index.unit_radii >= coarse).all())
    assert bool((index.radii > 0).any())


def test_radii_from_members_stay_close_to_them() -> None:
    """Bounds that hold are easy if radii may be anything: these are off by the rounding of int8 and no more."""
    points = representatives(600)
    index = index_of(points[:, :200])
    for chunk in range(200, 600):
        index.graft(points[:, chunk], 12)
    of = clusters_of(index)
    least = torch.full_like(index.radii.double(), torch.inf).scatter_reduce(
        1, of, slack(points, index.centroids, index.radii, of), "amin"
    )
    assert float(least[least < torch.inf].max()) <= sqrt(WIDTH) / 127 + 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("build", BUILDS)
def test_few_and_equal_chunks_make_an_index(count: int, build: str) -> None:
    for points in (representatives(count), representatives(1).repeat(1, count, 1), torch.zeros(HEADS, count, WIDTH)):
        index = index_of(points, build=build)
        for _ in range(3):
            index.graft(representatives(1, seed=5)[:, 0], 9)
        assert sorted(index.members[0].tolist()) == list(range(count + 3))
        everything = index.best_chunks(torch.ones(HEADS, 1, WIDTH), torch.ones(HEADS, 1), 10**6, ChunkSearch(1))
        assert everything.sort(dim=2).values.tolist() == [[list(range(count + 3))]] * HEADS


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster_size", [1, 2, 5])
@pytest.mark.parametrize("build", BUILDS)
def test_lists_hold_every_chunk_once_through_grafts(build: str, cluster_size: int) -> None:
    points, lengths = representatives(331), [*lengths_of(301).tolist(), *range(1, 31)]
    index = index_of(points[:, :301], build=build, cluster_size=cluster_size)
    clusters, units = index.centroids.shape[1], index.unit_centroids.shape[1]
    if build == "full":
        assert clusters == ceil(301 / cluster_size)
    else:
        assert 0.9 < clusters * cluster_size / 301 < 1.2
    assert units == ceil(sqrt(ceil(301 / cluster_size)))
    for chunk in range(301, 331):
        index.graft(points[:, chunk], lengths[chunk])
    assert all(sorted(members) == list(range(331)) for members in index.members.tolist())
    assert int(clusters_of(index).max()) < clusters, "every chunk is in a cluster"
    unit = units_of(index)
    assert int(unit.max()) < units, "every chunk is in a unit"
    for head in range(HEADS):
        sums = [sum(lengths[chunk] for chunk in range(331) if unit[head, chunk] == at) for at in range(units)]
        assert index.unit_tokens[head].tolist() == sums


def test_a_graft_joins_the_nearest_cluster_and_moves_its_centroid_to_the_mean() -> None:
    points = representatives(101)
    index = index_of(points[:, :100], torch.float32)
    before, of, sizes = index.centroids.clone(), clusters_of(index), index.starts.diff(dim=1)
    index.graft(points[:, 100], 12)
    for head in range(HEADS):
        cluster = int((before[head] @ points[head, 100]).argmax())
        assert clusters_of(index)[head].tolist() == [*of[head].tolist(), cluster]
        mean = int(sizes[head, cluster]) * before[head, cluster] + points[head, 100]
        torch.testing.assert_close(index.centroids[head, cluster], mean / mean.norm(), rtol=0, atol=1e-6)
        same = torch.arange(before.shape[1]) != cluster
        assert torch.equal(index.centroids[head, same], before[head, same])


# -- search ------------------------------------------------------------------------------------------------------------


def ranked(
    index: ClusterIndex, head: int, query: torch.Tensor, norm: float, room: int, search: ChunkSearch
) -> list[int]:
    """Chunks of the best clusters in the best units, from the top down, of one head and query."""
    members, starts = index.members[head].tolist(), index.starts[head].tolist()

    def bounds(centroids: torch.Tensor, radii: torch.Tensor) -> list[float]:
        return (centroids[head].float() @ query + search.ub_weight * norm * radii[head]).tolist()

    unit_bounds = bounds(index.unit_centroids, index.unit_radii)
    cluster_bounds = bounds(index.centroids, index.radii)
    clusters, held = [], 0
    for rank, unit in enumerate(sorted(range(len(unit_bounds)), key=lambda at: -unit_bounds[at])):
        if rank >= search.units and held >= 2 * room:
            break
        clusters += range(int(index.unit_starts[head, unit]), int(index.unit_starts[head, unit + 1]))
        held += int(index.unit_tokens[head, unit])
    chunks: list[int] = []
    for cluster in sorted(clusters, key=lambda at: -cluster_bounds[at]):
        own = members[starts[cluster] : starts[cluster + 1]]
        if index.codes is not None:
            near = (index.codes[head].float() @ query).tolist()
            own.sort(key=lambda chunk: -near[chunk])
        chunks += own
    return chunks


def fitting(chunks: list[int], lengths: list[int], room: int) -> list[int]:
    """As many chunks as have `room` tokens at most."""
    counts = [at for at in range(len(chunks) + 1) if sum(lengths[chunk] for chunk in chunks[:at]) <= room]
    return chunks[: counts[-1]]


@pytest.mark.parametrize("ub_weight", [1, 0])
@pytest.mark.parametrize("radii", ["exact", "paper"])
@pytest.mark.parametrize(("room", "units"), [(100, 1), (100, 4), (500, 4), (2000, 64), (9000, 1)])
def test_search_takes_the_best_clusters_of_the_best_units(room: int, units: int, radii: str, ub_weight: int) -> None:
    index, lengths = index_of(representatives(400), torch.float32, radii=radii), lengths_of(400).tolist()
    queries = torch.randn(HEADS, 3, WIDTH, generator=seeded(4))
    norms, search = queries.norm(dim=2), ChunkSearch(units, ub_weight)
    chunks = Chunks(torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)]))
    found = chunks.fitting(index.best_chunks(queries, norms, room, search), room)
    for head in range(HEADS):
        for query in range(3):
            asked = queries[head, query], float(norms[head, query])
            expected = fitting(ranked(index, head, *asked, room, search), lengths, room)
            got = found[head, query].tolist()
            assert got == expected + [-1] * (len(got) - len(expected))
    assert len({tuple(row) for row in found.flatten(0, 1).tolist()}) > 1 or room == 9000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("radii", ["exact", "paper"])
def test_compiled_search_and_torch_find_the_same_tokens_in_the_same_order(dtype: torch.dtype, radii: Any) -> None:
    index, chunks = index_of(representatives(120), dtype, radii=radii), Chunks(16 + torch.arange(121) * 9)
    for graft in range(5):
        index.graft(representatives(5, seed=1)[:, graft], 9)
        chunks = chunks.extended(int(chunks.bounds[-1]) + 9)
    queries = 3 * torch.randn(HEADS, 2, representatives(1).shape[2], generator=seeded())
    norms, fixed = queries.norm(dim=2), np.array([3, 1])
    together = queries.mean(dim=1, keepdim=True), norms.mean(dim=1, keepdim=True)
    for room, search in [
        (100, ChunkSearch()),
        (30, ChunkSearch(units=1)),
        (700, ChunkSearch(ub_weight=0)),
        (5, ChunkSearch()),
    ]:
        for mean, asked in ((False, (queries, norms)), (True, together)):
            best = chunks.fitting(index.best_chunks(*asked, room, search), room)
            expected = pad(chunks.tokens(best, room).flatten(0, 1), (2, 0))
            expected[:, :2] = torch.tensor([3, 1])
            found = np.empty((len(expected), room + 4), np.int64)
            longest = index.write_best_tokens(queries.numpy(), mean, chunks, room, search, fixed, found)
            assert longest == expected.shape[1] and (found[:, longest:] == -1).all()
            assert np.array_equal(found[:, :longest], expected)


def test_bounds_rank_otherwise_than_centroids() -> None:
    index, query = index_of(representatives(400)), torch.randn(HEADS, 1, WIDTH, generator=seeded(4))
    one, zero = (index.best_chunks(query, query.norm(dim=2), 100, ChunkSearch(4, weight)) for weight in (1, 0))
    assert one[..., :8].tolist() != zero[..., :8].tolist()


def test_pooled_keys_are_normalised_means_or_maxima() -> None:
    keys, bounds = torch.randn(HEADS, 60, WIDTH, generator=seeded(2)), torch.tensor([5, 14, 22, 37])
    for pooling, reduce in (("mean", lambda part: part.mean(0)), ("max", lambda part: part.amax(0))):
        found = pooled(keys.bfloat16(), bounds, pooling)
        for head in range(HEADS):
            for chunk, (first, end) in enumerate([(5, 14), (14, 22), (22, 37)]):
                expected = reduce(keys.bfloat16()[head, first:end].float())
                torch.testing.assert_close(found[head, chunk], expected / expected.norm(), rtol=0, atol=1e-5)


# -- what is attended --------------------------------------------------------------------------------------------------

ENDS = delimiters(PIECES)
SMALL: dict[str, Any] = {"buffer": 16}


def small(**options: Any) -> LycheeCluster:
    return method_named("lychee_plus", **{**SMALL, **options})


def cut_of(fixed: Stream, row: int, length: int, sinks: int, buffer: int) -> list[list[int]]:
    """The chunks of a row with `length` tokens: cut from the sinks on while more than the buffer's tokens are left."""
    chunks, first = [], sinks
    ends = ENDS.strengths(fixed.tokens[row, :length])
    while length - first > buffer:
        ahead = [int(ends[first + size - 1]) for size in range(8, 17)]
        size = 8 + ahead.index(max(ahead)) if max(ahead) else 16
        chunks.append(list(range(first, first + size)))
        first += size
    return chunks


@pytest.mark.parametrize("selection", ["kv_head", "query_head"])
@pytest.mark.parametrize(
    ("accounting", "sinks", "buffer", "room"), [("paper", 16, 16, 80), ("unified", 6, 24, 66)], ids=["paper", "unified"]
)
def test_attended_are_sinks_buffer_and_the_best_chunks_that_fit(
    accounting: str, sinks: int, buffer: int, room: int, selection: str
) -> None:
    """By a plain reading of text and index; rows that begin with many, few and no chunks to choose from."""
    fixed, method, compared = stream(320, 140, 60, steps=60, seed=1), small(selection=selection, units_searched=2), 0
    select = method.select

    def checked_select(layer: int, query: torch.Tensor) -> Any:
        nonlocal compared
        found = select(layer, query)
        for row, length in enumerate(method.view.lengths(layer)):
            chunks = cut_of(fixed, row, length, sinks, buffer)
            lists: list[list[int]] = [list(range(len(chunks)))] * 4
            index = method.indexes[layer][row]
            assert (index is not None) == (length > 96 and sum(map(len, chunks)) > room)
            if index is not None:
                lists = [order(index, query[row], head, room, selection) for head in range(4)]
                if selection == "query_head" and accounting == "unified":
                    lists = [joined(lists[2 * (head // 2) : 2 * (head // 2) + 2]) for head in range(4)]
                lists = [fitting(one, list(map(len, chunks)), room) for one in lists]
            first = chunks[-1][-1] + 1 if chunks else sinks
            always = {*range(sinks), *range(first, length)}
            for head in range(4):
                expected = always.union(*(chunks[chunk] for chunk in lists[head]))
                if found is not None:
                    got = found.index[row, head * found.index.shape[1] // 4].tolist()
                    assert {token for token in got if token >= 0} == expected
                    compared += 1
                else:
                    assert expected == set(range(length))
        return found

    method.select = checked_select  # type: ignore[method-assign]
    driven = drive(fixed, method, 96, accounting=accounting)
    assert compared > 1000
    assert driven.audit["attended_max"] <= (
        96 if accounting == "unified" else 16 + (1 + (selection != "kv_head")) * 80 + 16
    )


def order(index: ClusterIndex, query: torch.Tensor, head: int, room: int, selection: str) -> list[int]:
    """The chunks that one query head's search ranks, or its group's."""
    own = query[2 * (head // 2) : 2 * (head // 2) + 2, 0] if selection == "kv_head" else query[head : head + 1, 0]
    return ranked(index, head // 2, own.mean(dim=0), float(own.norm(dim=1).mean()), room, ChunkSearch(2))


def joined(lists: list[list[int]]) -> list[int]:
    """Rank 0 of every list, then rank 1, ..., without repeats."""
    ranks = range(max(map(len, lists)))
    return list(dict.fromkeys(one[rank] for rank in ranks for one in lists if rank < len(one)))


def selected(fixed: Stream, budget: int = 64, accounting: str = "paper", **options: Any) -> list[list[set[int]]]:
    seen = drive(fixed, small(**options), budget, accounting=accounting).seen
    return [at.sets(row) for at in seen for row in range(len(fixed.lengths))]


def test_options_change_what_is_attended() -> None:
    fixed = stream(700, steps=30)
    options: list[dict[str, Any]] = [
        {},
        {"ub_weight": 0},
        {"cluster_size": 4},
        {"build": "two_level"},
        {"pooling": "max"},
        {"radii": "strict"},
        {"chunking": "fixed"},
        {"cluster_size": 4, "iterations": 1},
        {"units": 2, "units_searched": 1},
        {"seed_buffer": False},
        {"packing": "buffer"},
        {"sinks": 4},
        {"buffer": 32},
        {"min_chunk": 4},
        {"max_chunk": 12},
    ]
    found = [selected(fixed, **one) for one in options]
    assert all(found[a] != found[b] for a in range(len(found)) for b in range(a))


def test_radii_and_units_of_grafts_change_what_is_attended_later() -> None:
    fixed = stream(300, steps=150, layers=1)
    found = [selected(fixed, radii=radii) for radii in ("exact", "strict", "paper")]
    found.append(selected(fixed, radii="paper", move_units=True, units_searched=1))
    found.append(selected(fixed, radii="paper", units_searched=1))
    assert all(found[a] != found[b] for a in range(len(found)) for b in range(a))


def test_a_sequence_is_indexed_once_there_is_more_than_a_step_attends() -> None:
    """A short prompt and a long answer: all is attended up to C, and more than C never is but for the buffer."""
    method, built = small(), []
    fixed = stream(40, steps=120, layers=1)
    for at in drive(fixed, method, 64).seen:
        built.append(not at.in_place)
        assert all(len(tokens) <= 64 + 16 for tokens in at.sets(0))
        if at.lengths[0] <= 64:
            assert at.in_place
    assert built == sorted(built) and set(built) == {False, True}
    index = method.indexes[0][0]
    assert index is not None and index.count == len(method.rows[0].text.chunks) > 4


def test_index_bytes_stay_below_their_share_of_the_keys_and_values() -> None:
    """8k tokens of chunks of 12 as in prose; the bounds' share is that of one row and layer."""
    fixed = stream(8192, steps=1, layers=1, kv_heads=2, query_heads=2, head_dim=128)
    fixed = replace(fixed, tokens=torch.tensor([PIECES.index(".") if at % 12 == 11 else 0 for at in range(8193)])[None])
    for radii, share in (("strict", 0.025), ("exact", 0.065)):
        held = drive(fixed, method_named("lychee", radii=radii, iterations=1), 1024).audit
        assert 0.02 < held["index_bytes"] / held["device_kv_bytes"] <= share


def test_two_level_build_finds_about_what_the_full_build_finds() -> None:
    """Recall of the best tenth of the chunks, for queries near some of them."""
    points = representatives(1200)
    wanted = torch.randn(HEADS, 40, WIDTH, generator=seeded(3)) + 4 * points[:, ::30]
    best = (wanted @ points.transpose(1, 2)).topk(120, dim=2).indices
    recall = {}
    for way in BUILDS:
        index = index_of(points, build=way)
        found = index.best_chunks(wanted, wanted.norm(dim=2), 120 * 12, ChunkSearch())[..., :120]
        recall[way] = float((best[..., None] == found[:, :, None]).any(dim=3).float().mean())
    assert recall["full"] > 0.25, "a tenth by chance"
    assert abs(recall["two_level"] - recall["full"]) < 0.04


@pytest.mark.parametrize(
    ("options", "accounting", "most"),
    [
        ({}, "paper", 200 + 128),
        ({"selection": "query_head"}, "paper", 16 + 2 * 184 + 128),
        ({"buffer": 16, "sinks": 0}, "paper", 200 + 16),
        ({}, "unified", 200),
        ({"selection": "query_head"}, "unified", 200),
    ],
    ids=str,
)
def test_rule_is_the_methods_line_of_the_budget_table(options: dict[str, Any], accounting: str, most: int) -> None:
    """The audit's yardstick: a rule that is too generous would hide what it is there to find."""
    method = method_named("lychee", **options)
    drive(stream(90, steps=1), method, 200, accounting=accounting)
    assert method.rule(0, 90, 5) == most


# -- in a model --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_long_answers_graft_and_keep_the_rule(tiny: Loaded, accounting: str) -> None:
    method = small()
    seen = watch(method)
    generation, _ = run_loop(tiny, [numbers(200), numbers(90, seed=1)], method, 64, accounting=accounting, steps=80)
    assert not generation.audit["over_rule"]
    assert generation.audit["attended_max"] <= (64 if accounting == "unified" else 64 + 16)
    assert generation.audit["read_bytes_per_step"] > 0, "keys of grafted chunks are read"
    counts = {index.count for indexes in method.indexes.values() for index in indexes if index}
    assert counts == {len(row.text.chunks) for row in method.rows}
    last: Attended = seen[-1]
    assert not last.in_place


def test_plain_generate_needs_the_tokenizer(tiny: Loaded) -> None:
    prompt = torch.tensor([numbers(150)])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ConfigError, match="tokenizer=None: LycheeCluster"):
        tiny.model.generate(prompt, past_key_values=KVCache(tiny.model, "lychee", 64, **SMALL), **options)
    for known in ({"tokenizer": tiny.tokenizer}, {"chunking": "fixed"}):
        cache = KVCache(tiny.model, "lychee", 64, dense_layers=(), **SMALL, **known)
        tiny.model.generate(prompt, past_key_values=cache, **options)
        assert 64 < cache.audit()["attended_max"] <= 80


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "accounting", "least"),
    [
        ({}, "paper", 64),
        ({"sinks": 40}, "paper", 88),
        ({"max_chunk": 24}, "paper", 88),
        ({"max_chunk": 24}, "unified", 96),
    ],
    ids=str,
)
def test_budget_that_holds_no_chunks_says_the_minimum(
    tiny: Loaded, options: dict[str, Any], accounting: Any, least: int
) -> None:
    with pytest.raises(ConfigError, match=f"{least - 1}.*{least} tokens"):
        KVCache(tiny.model, "lychee", least - 1, accounting=accounting, **options)
    KVCache(tiny.model, "lychee", least, accounting=accounting, tokenizer=tiny.tokenizer, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_chunk": 17}, "min_chunk=17: at most max_chunk=16"),
        ({"max_chunk": 4}, "min_chunk=8: at most max_chunk=4"),
        ({"buffer": 15}, "buffer=15: at least max_chunk=16"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        method_config("lychee", **options).build()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = stream(100)
    monkeypatch.setattr("driver.PIECES", None)
    with pytest.raises(ConfigError, match="method.chunking=fixed"):
        drive(fixed, small(), 64)
    with pytest.raises(ConfigError, match=r"or method=quest \(quest_structure\)"):
        drive(fixed, method_named("quest_structure"), 64)


@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_a_budget_without_room_for_a_chunk_is_refused(accounting: str) -> None:
    """Of a method that no YAML made; kernels would write beyond their lists."""
    with pytest.raises(ValueError, match="budget=9: .* leave no chunk"):
        drive(stream(60, steps=1), LycheeCluster(LycheeCluster.options_type()), 9, accounting=accounting)
