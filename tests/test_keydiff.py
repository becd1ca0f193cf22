"""KeyDiff, of the prompt and in blocks, against plain lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from driver import Stream, drive, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from waves import wave_stream, waves

from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError, bind_methods, method_config
from kvbench.memory.device import PAGE

bind_methods()

from methods.keydiff import difference  # noqa: E402

few = settings(max_examples=15)
CLEAR = 1e-5  # scores that differ by less may stand in either order in float32


def scores(keys: Sequence[Sequence[float]]) -> list[float]:
    """Minus the cosine of each key with the mean of all keys' directions."""
    norms = [math.sqrt(sum(x * x for x in key)) for key in keys]
    anchor = [
        sum(key[d] / norm for key, norm in zip(keys, norms, strict=True)) / len(keys) for d in range(len(keys[0]))
    ]
    length = math.sqrt(sum(x * x for x in anchor))
    assume(length > 0.01)
    return [
        -sum(a * b for a, b in zip(key, anchor, strict=True)) / norm / length
        for key, norm in zip(keys, norms, strict=True)
    ]


def best(ids: Sequence[int], keys: Sequence[Sequence[float]], count: int, free: int | None = None) -> list[int]:
    """Of the first `free` ids (all) those with the `count` best scores; no close call."""
    if len(ids) <= count:
        return list(ids)
    each = dict(list(zip(ids, scores([keys[token] for token in ids]), strict=True))[:free])
    ranked = sorted(each, key=lambda token: -each[token])
    assume(count == 0 or each[ranked[count - 1]] - each[ranked[count]] > CLEAR)
    return sorted(ranked[:count])


def blocks(
    keys: Sequence[Sequence[float]], length: int, steps: int, block: int, kept: int, first: int
) -> list[set[int]]:
    """What each step attends if all tokens, the prompt's too, come one by one, and a cut follows each full block."""
    held: list[int] = []
    ever = []
    for token in range(length + steps):
        held.append(token)
        if token >= length:
            ever.append(set(held))
        if token >= first and (token + 1 - first) % block == 0:
            held = best(held, keys, kept)
    return ever


def most_held(length: int, block: int, kept: int, first: int) -> int:
    """The most tokens held while a prompt comes token by token."""
    held = most = 0
    for token in range(length):
        held += 1
        most = max(most, held)
        if token >= first and (token + 1 - first) % block == 0:
            held = min(held, kept)
    return most


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (3, 2)]))
    sizes = {"layers": 1, "query_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 6}
    return stream(*lengths, steps=14, seed=draw(st.integers(0, 10**6)), **sizes)


# -- of the prompt, once -----------------------------------------------------------------------------------------------


def test_the_keys_of_the_public_code_are_kept() -> None:
    seen = drive(wave_stream(), method_named("keydiff"), 14).seen[0]
    assert [sorted(kept - {40}) for kept in seen.sets(0)] == [
        [4, 5, 6, 11, 17, 18, 20, 24, 25, 26, 31, 32, 33, 39],
        [2, 5, 11, 12, 17, 20, 23, 24, 25, 29, 30, 35, 37, 38],
    ]
    expected = torch.tensor([-0.492939, -0.208862, 0.120986])
    torch.testing.assert_close(difference(waves(1.0, 2, 40))[0, :3], expected, rtol=0, atol=1e-6)


@few
@given(streams(), st.integers(4, 20), st.sampled_from(["paper", "unified"]))
def test_the_least_similar_keys_stay(fixed: Stream, budget: int, accounting: str) -> None:
    driven = drive(fixed, method_named("keydiff"), budget, accounting=accounting)
    window = budget // 4 if accounting == "unified" else 0
    for row, length in enumerate(fixed.lengths):
        for at in driven.seen if length > budget else ():
            now = at.lengths[row]
            for head, attended in enumerate(at.sets(row)):
                keys = fixed.keys[0, row, head, :length].tolist()
                scored = best(range(length), keys, budget - window, length - window)
                recent = range(max(length - window, now - window) if window else length, now)
                assert attended == {*scored, *recent}
    assert not driven.audit["over_rule"]


# -- in blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_from_the_first_token_keep_what_was_worked_out_by_hand() -> None:
    driven = drive(wave_stream(), method_named("keydiff_blocks", block=8), 14)
    assert [sorted(kept - {40}) for kept in driven.seen[0].sets(0)] == [
        [7, 9, 10, 11, 12, 13, 16, 26, 27, 29, 30, 34, 35, 36],
        [0, 5, 11, 12, 16, 22, 26, 27, 28, 29, 35, 36, 37, 38],
    ]
    assert driven.audit["block_prefill_tokens_max"] == 14 + 8


def test_blocks_after_the_first_c_tokens_keep_what_the_public_code_keeps() -> None:
    keys, ids = waves(1.0, 2, 40).float(), torch.arange(14).expand(2, -1)
    for start in range(14, 40, 8):
        ids = torch.cat([ids, torch.arange(start, min(start + 8, 40)).expand(2, -1)], dim=1)
        best = difference(keys.gather(1, ids[..., None].expand(-1, -1, 8))).topk(14).indices
        ids = ids.gather(1, best).sort(dim=1).values
    assert ids.tolist() == [
        [5, 7, 11, 15, 18, 22, 24, 32, 33, 34, 35, 36, 38, 39],
        [5, 11, 14, 16, 22, 25, 26, 27, 28, 30, 33, 36, 38, 39],
    ]


@few
@given(streams(), st.integers(8, 24), st.integers(1, 9), st.sampled_from(["paper", "unified"]))
def test_each_full_block_is_followed_by_a_cut(fixed: Stream, budget: int, block: int, accounting: str) -> None:
    driven = drive(fixed, method_named("keydiff_blocks", block=block), budget, accounting=accounting)
    kept, first = budget, 0
    if accounting == "unified":
        block = min(block, budget // 4)
        kept = first = budget - block
        assert driven.audit["attended_max"] <= budget
    for row, length in enumerate(fixed.lengths):
        for head in range(fixed.keys.shape[2]):
            expected = blocks(fixed.keys[0, row, head].tolist(), length, fixed.steps, block, kept, first)
            assert [at.sets(row)[head] for at in driven.seen] == expected
            assert [driven.engine.method.rule(0, length, at.step) for at in driven.seen] == [*map(len, expected)]
    most = max(most_held(length, block, kept, first) for length in fixed.lengths)
    assert driven.audit["block_prefill_tokens_max"] == most
    assert not driven.audit["over_rule"]


def test_a_prefill_in_blocks_ends_before_a_block_is_full() -> None:
    """100 tokens are left of the first 128, and 72 come: 172, not 228 or 200."""
    driven = drive(stream(200, steps=1), method_named("keydiff_blocks", block=128), 100)
    assert driven.audit["block_prefill_tokens_max"] == 172


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_memory_is_flat_over_a_long_answer(accounting: str) -> None:
    fixed = stream(50, 31, steps=4000, layers=1, head_dim=8)
    driven = drive(fixed, method_named("keydiff_blocks", block=32), 64, accounting=accounting)
    most = 64 + (32 if accounting == "paper" else 0)
    entry = 2 * 2 * 8 * 4 * 2  # two rows, keys and values of two KV heads in float32
    assert driven.audit["attended_max"] == most
    assert driven.audit["device_kv_bytes"] <= most * entry
    assert driven.audit["device_kv_allocated_bytes"] <= (most + PAGE) * entry
    assert not driven.audit["over_rule"]


@pytest.mark.parametrize(
    ("options", "words"), [({"block": 0}, r"block=0: expected a whole number, 1 or more"), ({"blocks": 8}, "block")]
)
def test_bad_options_are_named(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_config("keydiff_blocks", **options)
