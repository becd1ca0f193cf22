"""Synthetic keys and queries: reproducible, alike in any chunks and batch, and with structure that an index finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.engine.engine import Engine
from kvbench.measure.synthetic import BLOCK, RUN, SINKS, Filled, SyntheticAttention, SyntheticEngine, _chance
from kvbench.method import Method, Prompt, Selection, Shape

LENGTH = BLOCK + 300
SHAPE = Shape(2, 4, 2, 32, (LENGTH, LENGTH), torch.float32, torch.device("cpu"), 32**-0.5, (0, 1))


@pytest.fixture(scope="module")
def made() -> SyntheticAttention:
    return SyntheticAttention(SHAPE, seed=1)


@pytest.mark.parametrize("kind", ["keys", "queries", "values"])
def test_chunks_cut_where_they_like(made: SyntheticAttention, kind: str) -> None:
    make = getattr(made, kind)
    whole = make(0, 0, LENGTH, 1)
    assert whole.shape == (4 if kind == "queries" else 2, LENGTH, 32) and whole.dtype == SHAPE.dtype
    cuts = [0, 3, BLOCK - 1, BLOCK + 1, LENGTH]
    parts = [make(0, start, stop, 1) for start, stop in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("kind", ["keys", "queries", "values"])
def test_rows_layers_and_seeds_differ_and_come_again(made: SyntheticAttention, kind: str) -> None:
    one = getattr(made, kind)(0, 0, 50, 0)
    again = SyntheticAttention(replace(SHAPE, lengths=(LENGTH,)), seed=1)
    assert torch.equal(getattr(again, kind)(0, 0, 50, 0), one), "whatever the batch"
    assert not torch.equal(getattr(made, kind)(0, 0, 50, 1), one)
    assert not torch.equal(getattr(made, kind)(1, 0, 50, 0), one)
    assert not torch.equal(getattr(SyntheticAttention(SHAPE, seed=2), kind)(0, 0, 50, 0), one)


def test_chances_are_uniform_below_one_and_do_not_follow_each_other() -> None:
    chance = _chance(0, 0, "own", torch.arange(100_000))
    assert chance.min() >= 0 and chance.max() < 1
    counts = torch.histc(chance, bins=50, min=0, max=1)
    assert (counts - 2000).abs().max() < 250, "five deviations and a half of a count of 2,000"
    assert abs(float(torch.corrcoef(torch.stack([chance[1:], chance[:-1]]))[0, 1])) < 0.015


def test_keys_have_the_statistics_that_are_promised(made: SyntheticAttention) -> None:
    keys = made.keys(0, 0, LENGTH, 0)
    key = keys[0, SINKS:]
    variance = (key - key.mean(dim=0)).var(dim=0).sort(descending=True).values
    assert variance[:4].mean() > 4 * variance[-4:].mean(), "anisotropic"
    assert 0.5 < key.mean(dim=0).norm() / key.std(dim=0).norm() < 2, "a mean as long as the deviations"
    near = torch.nn.functional.normalize(key - key.mean(dim=0), dim=1)
    alike = near @ near.T
    same = torch.arange(LENGTH - SINKS) // RUN
    inside = (same[:, None] == same) & ~torch.eye(len(same), dtype=torch.bool)
    assert alike[inside].mean() > alike[~inside].mean() + 0.1, "a run of tokens has a topic"
    assert torch.equal(keys[0, 0], keys[0, SINKS - 1]) and not torch.equal(keys[0, 0], keys[0, SINKS])


def test_attention_is_concentrated_sinks_included(made: SyntheticAttention) -> None:
    query, keys = made.queries(0, LENGTH, LENGTH + 64, 0), made.keys(0, 0, LENGTH, 0)
    weights = (query @ keys.repeat_interleave(2, dim=0).transpose(1, 2) * SHAPE.scaling).softmax(dim=2)
    tenth = weights.topk(LENGTH // 10, dim=2).values.sum(dim=2)
    assert 0.75 < tenth.mean() < 0.999
    assert 0.01 < weights[..., :SINKS].sum(dim=2).mean() < 0.5


LONG = replace(SHAPE, layers=1, head_dim=64, scaling=0.125, lengths=(4096,), sparse_layers=(0,))


def probed(kind: type[Engine], name: str) -> dict[str, float]:
    """Recall and mass of a method over 4 steps, on what an engine of this kind stores of normal keys and queries."""
    engine = kind(LONG, method_named(name), Budget(128), new_tokens=4, probe_every=1)
    rng = torch.Generator().manual_seed(0)

    def attend(count: int) -> None:
        query, key, value = (torch.randn(1, heads, count, LONG.head_dim, generator=rng) for heads in (4, 2, 2))
        engine.attend(0, 2 * query, key, value)

    ids = torch.zeros(1, *LONG.lengths, dtype=torch.int64)
    engine.start_chunk(ids)
    attend(*LONG.lengths)
    for _ in range(4):
        engine.start_step(ids[:, 0])
        attend(1)
        engine.settle()
    assert engine.probe is not None
    return {key: engine.probe.report()[key] for key in ("recall", "mass")}


@pytest.mark.parametrize("name", ["quest", "icecache", "pariskv"])
def test_an_index_finds_far_more_in_synthetic_keys_than_in_normal_ones(name: str) -> None:
    made, normal = probed(SyntheticEngine, name), probed(Engine, name)
    assert made["recall"] > 1.8 * normal["recall"] and made["mass"] > 3 * normal["mass"] and made["mass"] > 0.3


class Noting(Method):
    """Notes what the harness hands over."""

    def begin(self, *arguments: object) -> None:
        super().begin(*arguments)  # type: ignore[arg-type]
        self.prompts: dict[int, Prompt] = {}
        self.asked: dict[int, list[torch.Tensor]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.prompts[layer] = replace(prompt, keys=prompt.keys.clone(), values=prompt.values.clone())

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.asked.setdefault(layer, []).append(key)

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        self.asked[layer].append(query)
        return None


def test_every_layer_stores_and_asks_what_is_made_and_the_models_values(made: SyntheticAttention) -> None:
    method = Noting()
    engine = SyntheticEngine(SHAPE, method, Budget(None), new_tokens=2, seed=1)
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    value = torch.randn(2, 2, LENGTH + 2, 32)
    nothing = torch.full((2, 4, LENGTH, 32), torch.nan)
    for start, stop in ((0, 700), (700, LENGTH)):
        engine.start_chunk(ids[:, start:stop])
        for layer in range(2):
            here = slice(start, stop)
            engine.attend(layer, nothing[:, :, here], nothing[:, :2, here], value[:, :, here])
    for step in range(2):
        engine.start_step(ids[:, 0])
        now = slice(LENGTH + step, LENGTH + step + 1)
        outs = [engine.attend(layer, nothing[:, :, :1], nothing[:, :2, :1], value[:, :, now]) for layer in range(2)]
        engine.settle()
    assert all(bool(out.isfinite().all()) for out in outs), "none of the model's keys and queries is looked at"
    for layer in range(2):
        for row in range(2):
            assert torch.equal(method.prompts[layer].keys[row], made.keys(layer, 0, LENGTH, row))
            assert torch.equal(method.prompts[layer].values[row], value[row, :, :LENGTH])
            asked = [one[row, :, 0] for one in method.asked[layer]]
            keys, queries = (make(layer, LENGTH, LENGTH + 2, row) for make in (made.keys, made.queries))
            assert torch.equal(torch.stack(asked[::2], 1), keys) and torch.equal(torch.stack(asked[1::2], 1), queries)


@pytest.mark.parametrize("name", ["snapkv", "icecache", "full"])
def test_a_filled_prompt_is_the_one_that_a_prefill_would_store(name: str, made: SyntheticAttention) -> None:
    """Of one seed, with the same values: the same selections and outputs."""
    rows = [[token % 7 for token in range(LENGTH)] for _ in range(2)]
    value = torch.stack([torch.stack([made.values(layer, 0, LENGTH, row) for row in range(2)]) for layer in range(2)])
    outs = []
    for filled in (False, True):
        engine = SyntheticEngine(SHAPE, method_named(name), Budget(128), new_tokens=2, seed=1)
        nothing = torch.zeros(2, 4, LENGTH, 32)
        if filled:
            Filled(engine, rows).lend(engine)
        else:
            engine.start_chunk(torch.tensor(rows))
            for layer in range(2):
                engine.attend(layer, nothing, nothing[:, :2], value[layer])
        engine.start_step(torch.zeros(2, dtype=torch.int64))
        one = nothing[:, :, :1]
        outs.append(torch.stack([engine.attend(layer, one, one[:, :2], one[:, :2]) for layer in range(2)]))
    assert torch.equal(*outs) and outs[0].abs().max() > 0
