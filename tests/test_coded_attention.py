"""The CPU's kernels over rows in fewer bits: what plain torch makes of the same rows, decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import CLOSE

from kvbench.attention import cpu
from kvbench.attention import executor as attention
from kvbench.memory.codec import KiviKeys, KiviValues, Native
from kvbench.memory.kinds import KV
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

CPU = torch.device("cpu")
HEADS, GROUP, TOKENS = 3, 2, 330
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ROWS = pytest.mark.parametrize("kind", ["int8", "fp8"])


def random(*size: int, seed: int = 0, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(query: torch.Tensor, rows: Any, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hq, D] and probabilities [Hq, n] of queries [Hq, D] over keys and values [n, D] for each KV head."""
    found = []
    for head, (key, value) in enumerate(rows):
        for q in range(head * GROUP, (head + 1) * GROUP):
            logits = key.double() @ query[q].double()
            logits = logits if weight is None else logits + weight[q]
            found.append((logits.softmax(0) @ value.double(), logits.softmax(0)))
    longest = max(len(one) for _, one in found)
    padded = [torch.nn.functional.pad(one, (0, longest - len(one))) for _, one in found]
    return torch.stack([out for out, _ in found]).float(), torch.stack(padded).float()


def agrees(found: Any, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    near = CLOSE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.reshape(theirs.shape).float(), theirs, rtol=0, atol=near)


def store_of(kv: KV, head_dim: int, dtype: torch.dtype, keep: torch.Tensor | None = None, **options: Any) -> LayerStore:
    """Random tokens, of which the device keeps what a method keeps at the prompt's end, and one after it."""
    store = LayerStore(1, HEADS, head_dim, TOKENS + 2, dtype, CPU, kv=kv, **options)
    store.write_prompt(*random(2, 1, HEADS, TOKENS, head_dim, dtype=dtype), 0, [0])
    store.seal_prompt([TOKENS])
    store.leave_device()
    if keep is not None:
        store.keep(keep)
    store.encode()
    store.append(*random(2, 1, HEADS, 1, head_dim, seed=1, dtype=dtype))
    return store


RAGGED = torch.arange(TOKENS).where(random(HEADS, TOKENS) < torch.tensor([[1.0], [0.0], [-1.0]]), -1)[None]


@DTYPES
@ROWS
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_tokens_of_unequal_heads_are_attended_as_a_whole(kind: str, head_dim: int, dtype: torch.dtype) -> None:
    store = store_of(KV(kind, kind), head_dim, dtype, RAGGED)
    query = random(HEADS * GROUP, head_dim, seed=2, dtype=dtype)
    found = cpu.attend(query.view(1, -1, 1, head_dim), store, None, 0.25, probabilities=True)
    agrees(found, attended(0.25 * query, [store.device.tokens(0, head)[1:] for head in range(HEADS)]), dtype)


@DTYPES
@ROWS
@pytest.mark.parametrize("tiers", ["device", "host", "both"])
def test_lists_name_tokens_of_any_tier(kind: str, tiers: str, dtype: torch.dtype) -> None:
    """With places that name none, with weights, and entries beside the tokens."""
    check_lists(store_in(tiers, KV(kind, kind), dtype), dtype)


def test_values_in_fewer_bits_go_with_keys_that_a_method_gives() -> None:
    check_lists(store_in("host", KV("int8", "int8"), torch.float32), torch.float32, own_keys=True)


@pytest.mark.parametrize("kv", [KV("native", "int8"), KV("int8", "native"), KV("fp8", "int8")], ids=str)
@pytest.mark.parametrize("tiers", ["device", "host", "both"])
def test_tiers_may_hold_tokens_each_in_its_way(kv: KV, tiers: str) -> None:
    check_lists(store_in(tiers, kv, torch.float32), torch.float32)


def store_in(tiers: str, kv: KV, dtype: torch.dtype) -> LayerStore:
    if tiers == "both":
        return store_of(kv, 36, dtype, RAGGED, on_drop="offload")
    return store_of(kv, 36, dtype, home=tiers)


def check_lists(store: LayerStore, dtype: torch.dtype, own_keys: bool = False) -> None:
    index = random(HEADS, TOKENS + 1, seed=7).argsort()[:, :300]
    index[random(*index.shape, seed=8) < -1] = -1
    query, weight = random(HEADS * GROUP, 36, seed=2, dtype=dtype), random(HEADS * GROUP, 300, seed=3)
    own = random(1, HEADS, 300, 36, seed=4, dtype=dtype) if own_keys else None
    extra = Extra(*random(2, 1, HEADS, 5, 36, seed=5, dtype=dtype), random(1, HEADS * GROUP, 5, seed=6))
    selection = Selection(index[None], log_weight=weight[None], keys=own, extra=extra)
    rows = []
    for head in range(HEADS):
        ids, key, value = store.everything(0, head)
        place = torch.searchsorted(ids, index[head].clamp(min=0))
        key, value = key[place] if own is None else own[0, head], value[place]
        rows.append([torch.cat([key, extra.key[0, head]]), torch.cat([value, extra.value[0, head]])])
    absent = (index < 0).repeat_interleave(GROUP, 0)
    both = torch.cat([weight.masked_fill(absent, -torch.inf), extra.log_weight[0]], 1)
    found = cpu.attend(query.view(1, -1, 1, 36), store, selection, 0.25, probabilities=True)
    agrees(found, attended(0.25 * query, rows, both), dtype)


@ROWS
def test_every_code_is_read_exactly(kind: str) -> None:
    """As the value of the one token there is; times a scale of 1."""
    store = LayerStore(1, 1, 256, 1, torch.float32, CPU, kv=KV(kind, kind))
    store.write_prompt(*torch.ones(2, 1, 1, 1, 256), 0, [0])
    store.seal_prompt([1])
    store.encode()
    codes = torch.arange(256).to(torch.uint8)
    expected = codes.view({"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]).float()
    codes[expected.isnan()], expected[expected.isnan()] = 0, 0
    store.device.pool.value[0, :256], store.device.pool.value[0, 256:] = codes, torch.ones(1).view(torch.uint8)
    for selection in (None, Selection(torch.zeros(1, 1, 1, dtype=torch.int64))):
        assert torch.equal(cpu.attend(torch.ones(1, 1, 1, 256), store, selection, 1.0)[0].flatten(), expected)


def test_a_token_in_neither_of_two_unlike_tiers_is_named() -> None:
    store = store_of(KV("native", "int8"), 36, torch.float32, RAGGED, on_drop="offload")
    index = torch.tensor([[[3, TOKENS + 1, 20]]])
    with pytest.raises(LookupError, match=f"token {TOKENS + 1} is not in the store"):
        cpu.attend(random(1, HEADS * GROUP, 1, 36), store, Selection(index), 0.25)


def test_auto_reads_codes_in_place_on_a_cpu() -> None:
    shape = Shape(1, 4, 2, 16, (10,), torch.float32, CPU, 0.25, (0,))
    assert attention.executor("auto", shape, KV("int8", "fp8")).name == "cpu"


# -- KIVI --------------------------------------------------------------------------------------------------------------

# Both numbers of bits, and parameters of both dtypes; a kernel is compiled for each of the pairs.
KINDS = pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (2, torch.bfloat16)], ids=str)
CODED, NEWEST = torch.tensor([[160, 32, 96]]), torch.tensor([[40, 7, 128]])  # slots of each head: in groups, after them
ROOM = torch.tensor([[192, 64, 96]])


class Kivi:
    """Keys and values of unequal heads in groups, the newest as they are; and all of them decoded."""

    def __init__(self, bits: int, head_dim: int, dtype: torch.dtype) -> None:
        codecs = KiviKeys(head_dim, dtype, bits), KiviValues(head_dim, dtype, bits)
        plain = Native(head_dim, dtype), Native(head_dim, dtype)
        key, value = random(2, int(ROOM.sum()), head_dim, dtype=dtype)
        codes, parameters = codecs[0].encode(key.unflatten(0, (-1, 32)))
        self.coded = cpu.Rows(codes.flatten(0, 1), codecs[1].encode(value), codecs, parameters)
        self.newest = cpu.Rows(*random(2, int(NEWEST.sum()), head_dim, seed=1, dtype=dtype), plain)
        key = codecs[0].decode(self.coded.key, parameters.repeat_interleave(32, 0))
        value = codecs[1].decode(self.coded.value)
        self.first, self.after = (room.view(-1).cumsum(0).view_as(room) - room for room in (ROOM, NEWEST))
        self.rows = [
            [
                torch.cat([old[a : a + n], new[b : b + m]])
                for old, new in ((key, self.newest.key), (value, self.newest.value))
            ]
            for a, n, b, m in zip(*(each[0].tolist() for each in (self.first, CODED, self.after, NEWEST)), strict=True)
        ]


@KINDS
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_groups_and_the_newest_tokens_are_attended_together(bits: int, head_dim: int, dtype: torch.dtype) -> None:
    kivi = Kivi(bits, head_dim, dtype)
    query = random(HEADS * GROUP, head_dim, seed=2)
    parts = [
        cpu.Slots(kivi.coded, CODED, kivi.first, torch.zeros_like(CODED)),
        cpu.Slots(kivi.newest, NEWEST, kivi.after, CODED),
    ]
    agrees(cpu.attend_slots(query.view(1, -1, 1, head_dim), parts, True), attended(query, kivi.rows), dtype)


@KINDS
@pytest.mark.parametrize("dropped", [False, True], ids=["all", "kept"])
def test_lists_name_tokens_of_groups_and_of_the_newest(bits: int, dropped: bool, dtype: torch.dtype) -> None:
    """The token of a slot is its number, or what a method has kept there."""
    kivi = Kivi(bits, 64, dtype)
    used = CODED + NEWEST
    ids = 3 * torch.arange(int(used.max())).expand(1, HEADS, -1) if dropped else None
    index = random(1, HEADS, 39, seed=7).argsort()[..., :30]
    index[0, 2, :20] = random(int(used[0, 2]), seed=8).argsort()[:20]
    index[0, :, 7] = -1
    extra = Extra(*random(2, 1, HEADS, 5, 64, seed=5, dtype=dtype), random(1, HEADS * GROUP, 5, seed=6))
    near = cpu.device_tier(kivi.coded, used, kivi.first, ids, end=CODED)
    newest = cpu.device_tier(kivi.newest, used, kivi.after - CODED, ids, begin=CODED)
    parts = [cpu.Lists(kivi.coded.codecs, near, cpu.NO_HOST), cpu.Lists(kivi.newest.codecs, newest, cpu.NO_HOST)]
    tokens = torch.where(index < 0, -1, 3 * index) if dropped else index
    query, none = random(HEADS * GROUP, 64, seed=2), (index[0] < 0).repeat_interleave(GROUP, 0)
    found = cpu.attend_lists(query.view(1, -1, 1, 64), parts, Selection(tokens, extra=extra), HEADS, True)
    rows = [
        [
            torch.cat([side[place.clamp(min=0)], more[0, head]])
            for side, more in zip(both, (extra.key, extra.value), strict=True)
        ]
        for head, (place, both) in enumerate(zip(index[0], kivi.rows, strict=True))
    ]
    weight = torch.cat([torch.zeros(none.shape).masked_fill(none, -torch.inf), extra.log_weight[0]], 1)
    agrees(found, attended(query, rows, weight), dtype)
    missing = cpu.attend_lists(query.view(1, -1, 1, 64), parts, Selection(tokens + 3000), HEADS, False)
    assert missing is None, "a token that is nowhere"
