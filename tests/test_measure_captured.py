"""What scripts/measure_captured.py says of keys and queries is what a slow reading of the papers says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return runpy.run_path(str(SCRIPTS / "measure_captured.py"))


def test_windows_share_the_prompt_tokens_that_their_steps_attend_most(script: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    prompt, steps = 200, 300
    keys = torch.randn(prompt + steps, 16, generator=rng)
    queries = torch.randn(2, steps, 16, generator=rng) + 2 * torch.randn(1, 1, 16, generator=rng)
    found = script["windows"](keys, queries, prompt)
    best: list[list[set[int]]] = []
    for head in queries:
        sums = [torch.zeros(prompt) for _ in range(3)]
        for step, query in enumerate(head):
            weight = torch.softmax(keys[: prompt + step + 1] @ query / 4, dim=0)
            sums[step // 100] += weight[:prompt]
        best.append([set(one.topk(10).indices.tolist()) for one in sums])
    for name, other in (("adjacent", 1), ("distant", 2)):
        assert found[name] == pytest.approx(sum(len(own[0] & own[other]) / 10 for own in best) / 2)
    assert 0 < found["distant"] < 1


def test_a_unit_s_bound_is_held_against_the_chunks_that_are_in_it(script: Any) -> None:
    """Where keys lie in two directions, a unit's centroid is far from its chunks and its ball spans none of them."""
    rng = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(2, 600, 8, generator=rng), torch.randn(2, 40, 8, generator=rng)
    found = script["bounds"](keys, queries, 64)
    layout = script["Layout"](radii="paper", move_units=True)
    chunks = script["Chunks"](torch.arange(0, 601, 12))
    points = script["pooled"](keys, chunks.bounds, "mean")
    index = script["ClusterIndex"](points, chunks.lengths, layout, keys.dtype, torch.Generator().manual_seed(0))
    above = []
    for head in range(2):
        for unit in range(index.unit_centroids.shape[1]):
            clusters = range(int(index.unit_starts[head, unit]), int(index.unit_starts[head, unit + 1]))
            inside = [index.members[head, index.starts[head, c] : index.starts[head, c + 1]] for c in clusters]
            for chunk in torch.cat(inside).long() if inside else []:
                for query in queries[head]:
                    bound = query @ index.unit_centroids[head, unit] + query.norm() * index.unit_radii[head, unit]
                    above.append(float(query @ points[head, chunk]) > float(bound))
    assert len(above) == 2 * 50 * 40 and found["above"] == pytest.approx(np.mean(above)) and 0 < np.mean(above) < 0.5
    assert 0 < found["bound"] <= 1 and 0 < found["centroid"] <= 1


def test_learned_centroids_find_all_where_every_key_has_its_own(script: Any) -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 32)).astype(np.float32)
    query = rng.standard_normal(32).astype(np.float32)
    spans = (30, 60, 120)
    retrieved, votes = script["Learned"](keys).search(query, script["Quotas"](spans, 256, 10))
    assert list(retrieved) == list(np.argsort(-(keys @ query))[:10])
    own = np.zeros(256, int)
    for part in range(0, 32, 8):
        product = keys[:, part : part + 8] @ query[part : part + 8]
        own += [sum((product > other).sum() < span for span in spans) for other in product]
    assert list(votes) == list(own)
