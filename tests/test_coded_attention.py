"""The CPU's kernels over rows in fewer bits: what plain torch makes of the same rows, decoded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from driver import CLOSE, slow
from integrity import DROPPED, everything, tiers_of

from kvbench.attention import cpu
from kvbench.attention import executor as attention
from kvbench.memory.kinds import KV, kv_of
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

CPU = torch.device("cpu")
HEADS, GROUP, TOKENS = 3, 2, 330
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)], ids=str)  # kernels of its own
TURNED = KV("int8", "int8", rotate="hadamard")
SLOW = "fp8", "turboquant_k8v4", "turboquant_3bit", "turboquant_mse4"
CODED = pytest.mark.parametrize("kv", [kv_of("int8"), TURNED, *slow(*((kv_of(kind),) for kind in SLOW))], ids=str)


def random(*size: int, seed: int = 0, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(
    query: torch.Tensor, rows: Any, weight: torch.Tensor | None = None, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hq, D] and probabilities [Hq, n] of queries [Hq, D] over keys and values [n, D] for each KV head."""
    found = []
    for head, (key, value) in enumerate(rows):
        for q in range(head * GROUP, (head + 1) * GROUP):
            logits = key.double() @ query[q].double()
            logits = logits if softcap is None else softcap * (logits / softcap).tanh()
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
    """Random tokens, of which the device keeps what a method keeps at the prompt's end, and four after it."""
    store = LayerStore(1, HEADS, head_dim, TOKENS + 5, dtype, CPU, kv=kv, **options)
    store.write_prompt(*random(2, 1, HEADS, TOKENS, head_dim, dtype=dtype), 0, [0])
    store.seal_prompt([TOKENS])
    store.leave_device()
    if keep is not None:
        store.keep(keep)
    store.encode()
    for step in range(4):
        store.append(*random(2, 1, HEADS, 1, head_dim, seed=1 + step, dtype=dtype))
    return store


RAGGED = torch.arange(TOKENS).where(random(HEADS, TOKENS) < torch.tensor([[1.0], [0.0], [-1.0]]), -1)[None]


@DTYPES
@pytest.mark.parametrize(
    ("kv", "head_dim"),
    [
        *itertools.product([kv_of("int8")], [20, 64, 128]),
        *itertools.product([TURNED], [64]),
        *slow(*itertools.product([kv_of("kivi2")], [32, 96])),
        *slow(*itertools.product([kv_of("fp8")], [20, 64, 128]), *itertools.product([kv_of("kivi4")], [32, 96])),
        *slow(*itertools.product(map(kv_of, ("turboquant_3bit", "turboquant_mse4")), [64, 128])),
    ],
    ids=str,
)
def test_tokens_of_unequal_heads_are_attended_as_a_whole(kv: KV, head_dim: int, dtype: torch.dtype) -> None:
    store = store_of(kv, head_dim, dtype, RAGGED)
    query = random(HEADS * GROUP, head_dim, seed=2, dtype=dtype)
    found = cpu.attend(query.view(1, -1, 1, head_dim), store, None, 0.25, probabilities=True)
    agrees(found, attended(0.25 * query, [everything(store, 0, head)[1:] for head in range(HEADS)]), dtype)


@DTYPES
@CODED
@pytest.mark.parametrize("tiers", ["device", "host", "both"])
def test_lists_name_tokens_of_any_tier(kv: KV, tiers: str, dtype: torch.dtype) -> None:
    """With places that name none, with weights, and entries beside the tokens."""
    check_lists(store_in(tiers, kv, dtype), dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["kivi2", *slow("kivi4")])
@pytest.mark.parametrize("keep", [None, RAGGED], ids=["all", "kept"])
def test_lists_name_tokens_of_groups_and_of_the_window(
    kind: str, keep: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """The window goes round: its newest tokens stand in rows before those of older ones."""
    store = store_of(kv_of(kind), 64, dtype, keep)
    assert len(store.device.spans()) == 3
    check_lists(store, dtype)


@CODED
def test_values_in_fewer_bits_go_with_keys_that_a_method_gives(kv: KV) -> None:
    check_lists(store_in("host", kv, torch.float32), torch.float32, own_keys=True)


@pytest.mark.parametrize(
    "kv",
    [KV("native", "int8"), KV("int8", rotate="hadamard"), *slow((KV("int8", "native"),), (KV("fp8", "int8"),))],
    ids=str,
)
@pytest.mark.parametrize("tiers", ["device", "host", "both"])
def test_tiers_may_hold_tokens_each_in_its_way(kv: KV, tiers: str) -> None:
    check_lists(store_in(tiers, kv, torch.float32), torch.float32)


def store_in(tiers: str, kv: KV, dtype: torch.dtype) -> LayerStore:
    head_dim = 36 if kv.named <= {"native", "int8", "fp8"} and kv.rotate == "none" else 64
    if tiers == "both":
        return store_of(kv, head_dim, dtype, RAGGED, on_drop="offload")
    return store_of(kv, head_dim, dtype, home=tiers)


def check_lists(store: LayerStore, dtype: torch.dtype, own_keys: bool = False) -> None:
    head_dim = store.device.codecs.key.head_dim
    index = random(HEADS, TOKENS + 4, seed=7).argsort()[:, :300]
    index[random(*index.shape, seed=8) < -1] = -1
    if store.host is None and store.device.ids is not None:  # what was dropped is not named
        index[(tiers_of(store)[0].gather(1, index.clamp(min=0)) == DROPPED)] = -1
    query, weight = random(HEADS * GROUP, head_dim, seed=2, dtype=dtype), random(HEADS * GROUP, 300, seed=3)
    own = random(1, HEADS, 300, head_dim, seed=4, dtype=dtype) if own_keys else None
    extra = Extra(*random(2, 1, HEADS, 5, head_dim, seed=5, dtype=dtype), random(1, HEADS * GROUP, 5, seed=6))
    selection = Selection(index[None], log_weight=weight[None], keys=own, extra=extra)
    rows = []
    for head in range(HEADS):
        ids, key, value = everything(store, 0, head)
        place = torch.searchsorted(ids, index[head].clamp(min=0))
        key, value = key[place] if own is None else own[0, head], value[place]
        rows.append([torch.cat([key, extra.key[0, head]]), torch.cat([value, extra.value[0, head]])])
    absent = (index < 0).repeat_interleave(GROUP, 0)
    both = torch.cat([weight.masked_fill(absent, -torch.inf), extra.log_weight[0]], 1)
    for cap in (None, 0.8):
        found = cpu.attend(query.view(1, -1, 1, head_dim), store, selection, 0.25, probabilities=True, softcap=cap)
        agrees(found, attended(0.25 * query, rows, both, cap), dtype)


@pytest.mark.parametrize("kind", ["int8", *slow("fp8")])
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
    index = torch.tensor([[[3, TOKENS + 4, 20]]])
    with pytest.raises(LookupError, match=f"token {TOKENS + 4} is not in the store"):
        cpu.attend(random(1, HEADS * GROUP, 1, 36), store, Selection(index), 0.25)


def test_auto_reads_codes_in_place_on_a_cpu() -> None:
    shape = Shape(1, 4, 2, 32, (10,), torch.float32, CPU, 0.25, (0,))
    assert attention.executor("auto", shape, kv_of("int8")).name == "cpu"
    unread = attention.executor("auto", shape, kv_of("turboquant_prod4"))
    assert unread.name == "torch"
    assert "kv=turboquant_prod4" in str(unread.note)
