"""ClusterKV: clusters of keys by their cosines, and the tokens of those with the largest products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import drive, each_accounting, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods

bind_methods()

from methods.clusterkv import Clusters, cosine_kmeans  # noqa: E402


@given(seed=st.integers(0, 1000), tokens=st.integers(1, 60), count=st.integers(1, 12), iterations=st.integers(1, 6))
@settings(max_examples=40)
def test_every_key_is_in_the_cluster_nearest_to_it(seed: int, tokens: int, count: int, iterations: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, tokens, 8, generator=rng) * torch.rand(2, tokens, 1, generator=rng)
    found = cosine_kmeans(keys, count, 5, iterations, rng)
    for head in range(2):
        assert sorted(found.members[head].tolist()) == list(range(5, 5 + tokens))
        cosines = torch.cosine_similarity(keys[head][:, None], found.means[head][None], dim=2)
        for cluster, (start, size) in enumerate(
            zip(found.starts[head].tolist(), found.sizes[head].tolist(), strict=True)
        ):
            members = found.members[head, start : start + size] - 5
            assert bool((cosines[members, cluster] >= cosines[members].amax(dim=1) - 1e-6).all())


def test_means_settle_to_those_of_the_members() -> None:
    """Three groups of keys a right angle apart, of unequal lengths: a mean is of the keys, not of their directions."""
    rng = torch.Generator().manual_seed(0)
    lengths = 0.5 + torch.rand(30, 1, generator=rng)
    keys = (torch.eye(3).repeat(10, 1) + 0.01 * torch.randn(30, 3, generator=rng)) * lengths
    found = cosine_kmeans(keys[None], 30, 0, 20, rng)
    for cluster in range(30):
        start, size = int(found.starts[0, cluster]), int(found.sizes[0, cluster])
        if size:
            members = found.members[0, start : start + size]
            torch.testing.assert_close(found.means[0, cluster], keys[members].mean(dim=0))


def reference(clusters: Clusters, head: int, query: torch.Tensor, room: int) -> list[int]:
    """Tokens of a KV head's clusters by falling product of mean and query, cut after `room`, in plain lists."""
    scores = (clusters.means[head] @ query).tolist()
    tokens: list[int] = []
    for cluster in sorted(range(len(scores)), key=lambda cluster: -scores[cluster]):
        start, size = int(clusters.starts[head, cluster]), int(clusters.sizes[head, cluster])
        tokens += clusters.members[head, start : start + size].tolist()
    return tokens[:room]


@pytest.mark.parametrize("options", [{"clusters": 12}, {"cluster_size": 6}])
@pytest.mark.parametrize(("lengths", "group"), [((90, 47), 2), ((33,), 1)])
def test_attended_are_sinks_the_best_clusters_and_what_is_in_none(
    lengths: tuple[int, ...], group: int, options: dict[str, Any]
) -> None:
    steps, buffer, capacity = 7, 3, 32
    fixed = stream(*lengths, steps=steps, query_heads=2 * group)
    method = method_named("clusterkv", buffer=buffer, **options)
    asked: list[tuple[int, int, torch.Tensor, list[Clusters]]] = []
    select = method.select

    def noted(layer: int, query: torch.Tensor) -> Any:
        asked.append((layer, len(asked), query, list(method.rows[layer])))  # type: ignore[attr-defined]
        return select(layer, query)

    method.select = noted  # type: ignore[method-assign]
    driven = drive(fixed, method, capacity)
    for at, (layer, _, query, rows) in zip(driven.seen, asked, strict=True):
        assert at.layer == layer
        for row, length in enumerate(lengths):
            clustered = (at.step - 1) // buffer * buffer
            waiting = set(range(length + clustered, length + at.step))
            for head, ids in enumerate(at.sets(row)):
                best = reference(rows[row], head // group, query[row, head, 0].float(), capacity - 16)
                assert ids == set(range(16)) | set(best) | waiting
            assert sorted(rows[row].members[0].tolist()) == list(range(16, length + clustered))
    assert not driven.audit["over_rule"]
    assert driven.audit["device_kv_bytes"] < driven.audit["host_bytes"]


def test_unified_accounting_fills_c_at_every_step() -> None:
    driven = drive(stream(150, steps=30), method_named("clusterkv", clusters=20), 40, accounting="unified")
    assert driven.audit["attended_mean"] == driven.audit["attended_max"] == 40


def test_long_answers_are_clustered() -> None:
    """Of 60 generated tokens, 48 are in clusters when the last one comes."""
    fixed = stream(40, steps=60, layers=1)
    method = method_named("clusterkv", clusters=10, buffer=12)
    drive(fixed, method, 32)
    clusters = method.rows[0][0]  # type: ignore[attr-defined]
    assert sorted(clusters.members[0].tolist()) == list(range(16, 40 + 48))


def test_sinks_have_room_in_the_least_budget() -> None:
    driven = drive(stream(200, steps=3), method_named("clusterkv", sinks=64, buffer=3), 80)
    assert not driven.audit["over_rule"]


@each_accounting
def test_a_key_whose_products_are_infinite_is_attended_last(accounting: str) -> None:
    """As full attention, which gives it nothing, and all else."""
    fixed = stream(60, steps=2, layers=1)
    fixed.keys[:, :, :, 40] = -1e19
    fixed.queries[:] = fixed.queries.abs() * 1e20
    driven = drive(fixed, method_named("clusterkv", cluster_size=8), 32, accounting=accounting)
    assert driven.outputs.isfinite().all()
    assert not any(40 in attended for at in driven.seen for attended in at.sets(0))
