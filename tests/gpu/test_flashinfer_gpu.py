"""FlashInfer on a GPU: the executors agree, for every method, and no call waits for the device.

Each test runs twice: on a CUDA device with the package, where both are there, and on the CPU over their twins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import flashinfer_twin
import pytest
import torch
import twin
from driver import SMALL, Case, Stream, drive, each_method, same_attended, stream

from kvbench.attention import executor as attention
from kvbench.attention.flashinfer import FlashInfer
from kvbench.attention.torch import attend, prefill
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape

# Outputs here are of the order of 1, and bfloat16 rounds those, and the weights on the way, to 8 bits.
ROUNDING = 0.03
SCALE = 0.1

NoSync = Callable[[], contextlib.AbstractContextManager[None]]
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[pytest.param("cuda", marks=on_a_gpu), "twin"])
def no_sync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NoSync]:
    """A device with FlashInfer; and a context in which the host must not wait for it."""
    if request.param == "twin":
        flashinfer_twin.install(monkeypatch)
        with twin.device() as cuda:
            yield cuda.no_sync
        return
    pytest.importorskip("flashinfer")

    @contextlib.contextmanager
    def strict() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield strict


def there(fixed: Stream) -> Stream:
    """A stream on the device, in bfloat16; token ids stay where the loop has them."""
    parts = {name: getattr(fixed, name).to("cuda", torch.bfloat16) for name in ("queries", "keys", "values")}
    return replace(fixed, **parts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_sync")
@each_method
def test_executors_agree_for_every_method(case: Case) -> None:
    fixed = there(stream(150, 97, steps=4, head_dim=64))
    ran = {
        name: drive(fixed, case.build(), SMALL, executor=name, dense_layers=[1])
        for name in ("flashinfer", "torch", "reference")
    }
    assert "flashinfer" in ran["flashinfer"].audit["executor"]
    for other in ("torch", "reference"):
        assert same_attended(ran["flashinfer"].seen, ran[other].seen)
        torch.testing.assert_close(
            ran["flashinfer"].outputs.float().cpu(), ran[other].outputs.float().cpu(), rtol=0, atol=ROUNDING
        )


def filled(*lengths: int, steps: int, kv_heads: int = 2, head_dim: int = 128) -> LayerStore:
    """A store on the device with random prompts of these lengths and one more token."""
    store = LayerStore(len(lengths), kv_heads, head_dim, max(lengths) + steps, torch.bfloat16, torch.device("cuda", 0))
    rng = torch.Generator().manual_seed(0)
    store.write_prompt(*random(rng, store, max(lengths)), 0, [0] * len(lengths))
    store.seal_prompt(lengths)
    store.append(*random(rng, store, 1))
    return store


def random(rng: torch.Generator, store: LayerStore, tokens: int, heads: int | None = None) -> list[torch.Tensor]:
    batch, kv_heads, _, head_dim = store.device.key.shape
    size = (batch, heads or kv_heads, tokens, head_dim)
    return [torch.randn(size, generator=rng).to("cuda", torch.bfloat16) for _ in range(2)]


def shape_of(store: LayerStore, query_heads: int) -> Shape:
    key = store.device.key
    _, kv_heads, _, head_dim = key.shape
    lengths = tuple(store.lengths)
    return Shape(1, query_heads, kv_heads, head_dim, lengths, key.dtype, key.device, SCALE, (0,))


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("lengths", [(3000, 1500), (40,)])
def test_long_and_growing_lists_agree_and_wait_for_nothing(
    no_sync: NoSync, lengths: tuple[int, ...], group: int
) -> None:
    store, rng = filled(*lengths, steps=8), torch.Generator().manual_seed(1)
    query_heads = 2 * group
    run = FlashInfer(shape_of(store, query_heads))
    for step in range(8):
        query = random(rng, store, 1, query_heads)[0]
        asked: list[Selection | None] = [None]
        for heads in (1, 2, query_heads):
            order = torch.stack(
                [torch.randperm(min(store.lengths), generator=rng) for _ in range(len(lengths) * heads)]
            )
            index = order[:, : 600 + step].view(len(lengths), heads, -1)
            index[0, 0, index.shape[2] // 3 :] = -1
            asked.append(Selection(index.to("cuda")))
        # Plans are made in the first step.
        with no_sync() if step else contextlib.nullcontext():
            outputs = [run(query, store, selection, SCALE)[0] for selection in asked]
        for out, selection in zip(outputs, asked, strict=True):
            expected = attend(query, store, selection, SCALE)[0]
            torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=ROUNDING)
        if step < 7:
            store.append(*random(rng, store, 1))


@pytest.mark.usefixtures("no_sync")
def test_list_without_tokens_gives_zeros() -> None:
    store = filled(500, steps=1)
    nothing = torch.full((1, 2, 200), -1, device="cuda")
    nothing[0, 1, 0] = 3
    out, _ = FlashInfer(shape_of(store, 4))(random(torch.Generator(), store, 1, 4)[0], store, Selection(nothing), SCALE)
    assert not out[0, :2].any()
    assert torch.equal(out[0, 2:, 0], store.device.value[0, 1, 3].expand(2, -1))


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("chunk", [64, 300])
def test_prefill_agrees(chunk: int, left: bool) -> None:
    lengths, query_heads = (300, 170), 8
    offsets = [300 - length if left else 0 for length in lengths]
    rng = torch.Generator().manual_seed(0)
    store = LayerStore(2, 2, 128, 300, torch.bfloat16, torch.device("cuda", 0))
    key, value = random(rng, store, 300)
    query = random(rng, store, 300, query_heads)[0]
    run = FlashInfer(shape_of(store, query_heads), dense="flashinfer")
    for column in range(0, 300, chunk):
        part = slice(column, column + chunk)
        store.write_prompt(key[:, :, part], value[:, :, part], column, offsets)
        arguments: Any = (query[:, :, part], store, column, offsets, SCALE)
        ours, theirs = run.prefill(*arguments), prefill(*arguments)
        for row, offset in enumerate(offsets):
            real = slice(max(0, offset - column), None)
            torch.testing.assert_close(ours[row, :, real].cpu(), theirs[row, :, real].cpu(), rtol=0, atol=ROUNDING)


@pytest.mark.usefixtures("no_sync")
def test_auto_is_flashinfer() -> None:
    chosen = attention.executor("auto", shape_of(filled(40, steps=1), 4))
    assert (chosen.name, chosen.note) == ("flashinfer", None)
