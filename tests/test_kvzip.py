"""KVzip and KVzip+: what a token is worth when the context is repeated, and one ranking over layers and heads."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from driver import TEMPLATE, Stream, drive, output_weight, repeated, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from waves import waves

from kvbench.backends.hf.model import method_named
from kvbench.budget import Budget
from kvbench.config import ConfigError, bind_methods
from kvbench.engine.replay import Template
from kvbench.method import Context, Prompt, Replayed, Shape

bind_methods()

from methods.kvzip import KVzip  # noqa: E402

quick = settings(deadline=None, derandomize=True)

# -- golden numbers, of the official code and of kvpress ---------------------------------------------------------------

TOKENS, END, HEADS, KV_HEADS, DIM = 40, 52, 4, 2, 8
LAYERS = ((0.5, 1.0, 2.0), (0.8, 1.3, 2.3))  # of queries, keys and values
KVPRESS = {
    (0, 0): {*range(4), 7, 8, 11, 17, 26, *range(28, 33)},
    (0, 1): {*range(4), 11, 13, 14, 15, 23, 24, 32, 33, 34, 39},
    (1, 0): {*range(4), 11, 14, 16, 17, 28, 31, 32, 39},
    (1, 1): {*range(4), 11, 14, 15, *range(21, 26), 32, 33, 34, 38},
}


def golden(budget: int, before: int, **options: Any) -> tuple[list[torch.Tensor], dict[tuple[int, int], set[int]]]:
    """Scores of each layer, and what its heads keep; tokens 4 and 5 are in no chunk, as 6 come before the context."""
    method, kept = KVzip(**options), dict[int, torch.Tensor]()
    view: Any = SimpleNamespace(keep=lambda layer, ids, room: kept.update({layer: ids}))
    context = Context(0, ("",), None, None, output=lambda layer: output_weight(HEADS, DIM))  # type: ignore[arg-type]
    sizes = (2, HEADS, KV_HEADS, DIM, (TOKENS,), torch.float32, torch.device("cpu"), DIM**-0.5, (0, 1))
    method.begin(Shape(*sizes), Budget(budget), view, context)
    scores = []
    for layer, (of_query, of_key, of_value) in enumerate(LAYERS):
        queries = waves(of_query, HEADS, END).float() * ((torch.arange(HEADS) + 1) / 2)[:, None, None]
        keys, values = (waves(phase, KV_HEADS, END).float() for phase in (of_key, of_value))
        asked = queries[:, TOKENS:]
        shown = Replayed(0, 6, TOKENS, asked, keys[:, TOKENS:], asked.transpose(0, 1).flatten(1).norm(dim=1))
        parts = (part[None, :, :TOKENS] for part in (keys, values, queries))
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        prompt = Prompt((TOKENS,), ids, *parts, prefixes=(before,), replayed=(shown,))
        scores.append(method.score(layer, prompt)[0])
        method.prefill(layer, prompt)
    method.end_prefill()
    return scores, {
        (layer, head): {token for token in own if token >= 0}
        for layer, ids in kept.items()
        for head, own in enumerate(ids[0].tolist())
    }


def test_kvpress_keeps_the_same() -> None:
    scores, kept = golden(14, before=4)
    assert scores[0][0, 6:9].tolist() == pytest.approx([0.139885, 0.261827, 0.329312], abs=1e-5)
    assert kept == KVPRESS


def test_kvpress_with_the_plus_keeps_the_same() -> None:
    scores, kept = golden(14, before=4, plus=True)
    assert scores[0][0, 6:9].tolist() == pytest.approx([0.241093, 0.448057, 0.427152], abs=1e-5)
    swapped = {(0, 0): {30, 16}, (1, 0): {11, 15}}
    assert kept == {head: own ^ swapped.get(head, set()) for head, own in KVPRESS.items()}


def test_the_official_code_keeps_the_same() -> None:
    """39 of the context's pairs, above the 40th score."""
    scores, kept = golden(16, before=6)
    assert scores[0][0, 6:9].tolist() == pytest.approx([0.139821, 0.261539, 0.328217], abs=1e-5)
    context = torch.stack(scores)[:, :, 6:]
    threshold = context.flatten().sort(descending=True).values[39]
    assert float(threshold) == pytest.approx(0.247047, abs=1e-5)
    above = {(at, head): {*(context[at, head] > threshold).nonzero()[:, 0].add(6).tolist()} for at, head in kept}
    assert above == {head: own - {*range(4)} - ({39} if head == (1, 0) else set()) for head, own in KVPRESS.items()}
    assert {head: own - {*range(6)} for head, own in kept.items()} == above | {(1, 0): above[1, 0] | {15}}


# -- an independent reading --------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def read(fixed: Stream, shown: list[Replayed], layer: int, before: int, plus: bool) -> list[list[float]]:
    """Scores [Hkv][N] of one row's layer, one query after the other."""
    keys, values = (part[layer, 0].double().numpy() for part in (fixed.keys, fixed.values))
    query_heads, kv_heads, length = fixed.queries.shape[2], len(keys), fixed.lengths[0]
    scores = [[math.inf] * before + [0.0] * (length - before) for _ in range(kv_heads)]
    outputs = output_weight(query_heads, keys.shape[2]).double().numpy()
    for one in shown:
        for query_head in range(query_heads):
            head = query_head // (query_heads // kv_heads)
            stored = [*range(before), *range(one.start, one.stop)]
            for at, query in enumerate(one.queries[query_head].double().numpy()):
                own = one.keys[head, : at + 1].double().numpy()
                share = softmax(np.concatenate([keys[head, stored], own]) @ query * fixed.scaling)
                for place, token in enumerate(stored[before:], before):
                    worth = share[place]
                    if plus:
                        worth *= np.linalg.norm(values[head, token] @ outputs[query_head]) / float(one.norms[at])
                    scores[head][token] = max(scores[head][token], worth)
    return scores


@pytest.mark.slow
@settings(quick, max_examples=25)
@given(st.data())
def test_the_best_pairs_of_all_layers_and_heads_stay(data: st.DataObject) -> None:
    """Any shape, groups, ragged rows, chunks, budgets, both accountings; with and without tokens before a context."""
    accounting = data.draw(st.sampled_from(["paper", "unified"]), "accounting")
    group, kv_heads = data.draw(st.sampled_from([1, 2, 3, 7]), "group"), data.draw(st.integers(1, 2), "KV heads")
    layers, before = data.draw(st.integers(1, 3), "layers"), data.draw(st.integers(0, 3), "before")
    lengths = data.draw(st.lists(st.integers(before + 1, 40), min_size=1, max_size=2), "lengths")
    budget = data.draw(st.integers(max(8, before + before // 2 + 2), 24), "budget")
    options = {"plus": data.draw(st.booleans(), "plus"), "layerwise": data.draw(st.booleans(), "layerwise")}
    method = KVzip(chunk=data.draw(st.integers(1, 45), "chunk"), **options)

    sizes = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 8, "layers": layers}
    fixed = stream(*lengths, steps=34, seed=data.draw(st.integers(0, 99), "seed"), **sizes)
    fixed.tokens[:, :before] = torch.arange(before)
    template = Template(TEMPLATE.encode, tuple(range(before)), (3, 4))
    driven = drive(fixed, method, budget, accounting=accounting, template=template)
    window = min(32, budget // 4) if accounting == "unified" else 0
    for row, length in enumerate(lengths):
        one = fixed.row(row)
        shown = repeated(one, SimpleNamespace(method=method, template=template))  # type: ignore[arg-type]
        scores = [read(one, list(shown[layer]), layer, before, options["plus"]) for layer in range(layers)]
        recent, ranked = range(max(length - window, 0), length), []
        for layer in range(layers):
            own = [(layer, head, token) for head in range(kv_heads) for token in range(recent.start)]
            ranked += [own] if options["layerwise"] or not ranked else []
            if ranked[-1] is not own:
                ranked[-1] += own
        kept: set[tuple[int, int, int]] = set()
        for pairs in ranked:
            count = (min(budget, length) - len(recent)) * len(pairs) // max(recent.start, 1)
            kept |= {*sorted(pairs, key=lambda pair, own=scores: -own[pair[0]][pair[1]][pair[2]])[:count]}
        for at in driven.seen:
            last = length + at.step
            first = (
                length
                if accounting == "paper"
                else max(recent.start, last - budget + min(budget, length) - len(recent))
            )
            expected = [
                {token for layer, own, token in kept if (layer, own) == (at.layer, head)} | {*range(first, last)}
                for head in range(kv_heads)
            ]
            assert at.sets(row) == expected, (row, at.step, at.layer)
    assert not driven.audit["over_rule"]


# -- memory, and bad input ---------------------------------------------------------------------------------------------


def test_memory_holds_what_is_kept_and_nothing_of_the_replay() -> None:
    fixed = stream(300, steps=1)
    driven = drive(fixed, KVzip(chunk=100), 30)
    entry = 2 * fixed.keys.shape[-1] * 4
    assert driven.audit["device_kv_bytes"] == 2 * 2 * 31 * entry
    assert driven.audit["replay_tokens"] == 300 + 3 * 4 + 2 * 8 and driven.engine.method.scores == {}


def test_no_context_and_no_room_for_it_are_refused() -> None:
    fixed = replace(stream(20), tokens=torch.arange(24)[None] % 12)
    for count, budget, message in (
        (20, 8, "prompt of 20 tokens: 20 come before the context"),
        (8, 8, "budget=8: the 8 tokens before the context stay; expected 9"),
    ):
        template = Template(TEMPLATE.encode, tuple((torch.arange(count) % 12).tolist()))
        for name in ("kvzip", "attention_matching"):
            with pytest.raises(ConfigError, match=f"^{message}"):
                drive(fixed, method_named(name), budget, template=template)
