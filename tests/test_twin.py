"""What the twin of a CUDA device promises: CUDA's refusals, every host sync seen, every hazard caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from twin import Twin, device

from kvbench.backends.hf.loading import load
from kvbench.config import shipped

CUDA = torch.device("cuda:0")


@pytest.fixture
def cuda() -> Iterator[Twin]:
    with device() as cuda:
        yield cuda


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def pinned(content: torch.Tensor) -> torch.Tensor:
    return torch.empty(content.shape, dtype=content.dtype, pin_memory=True).copy_(content)


# -- a device ----------------------------------------------------------------------------------------------------------


def test_outside_nothing_is_patched() -> None:
    before = dict(vars(torch.cuda)), torch.Generator, ThreadPoolExecutor.submit
    with pytest.raises(ZeroDivisionError), device():
        assert torch.cuda.is_available()
        raise ZeroDivisionError
    assert (dict(vars(torch.cuda)), torch.Generator, ThreadPoolExecutor.submit) == before
    assert torch.zeros(1).device.type == "cpu"


def test_torch_sees_one_device(cuda: Twin) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name(CUDA) == "twin"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="cuda"),
        lambda: torch.full((2, 3), 7, device="cuda:0"),
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: torch.as_tensor([1, 2], device=CUDA),
        lambda: normal(4).cuda(),
        lambda: normal(4).to("cuda"),
        lambda: normal(4).to(CUDA, torch.bfloat16),
        lambda: normal(4).to(torch.zeros(1, device=CUDA)),
        lambda: torch.zeros(4, device=CUDA).new_ones(3),
        lambda: torch.empty_like(torch.zeros(4, device=CUDA)),
        lambda: normal(4).cuda()[1:].view(3, 1).expand(3, 5),
        lambda: torch.cat([normal(2).cuda(), normal(3).cuda()]),
        lambda: normal(4).cuda().topk(2).indices,
        lambda: next(iter(normal(4).cuda())),
        lambda: torch.nn.Parameter(normal(4).cuda()),
        lambda: torch.nn.Linear(2, 2).to(CUDA).bias,
    ],
)
def test_what_is_made_on_the_device_is_there(cuda: Twin, make: Callable[[], torch.Tensor]) -> None:
    there = make()
    assert (there.device, there.is_cuda, there.is_cpu, there.get_device()) == (CUDA, True, False, 0)
    assert there.cpu().device.type == "cpu" and not there.cpu().is_cuda


def test_a_copy_to_the_other_side_shares_no_memory(cuda: Twin) -> None:
    here = normal(4)
    there = here.to(CUDA)
    as_given = torch.as_tensor(here, device=CUDA)
    back, again = there.cpu(), torch.tensor(there)
    there.zero_()
    assert here.all() and as_given.cpu().all() and back.all() and again.cpu().all()
    assert there.to(CUDA) is there and here.cpu() is here
    assert there.to(torch.float64).device == CUDA and torch.zeros_like(there, device="cpu").device.type == "cpu"


def test_numbers_are_those_of_the_cpu(cuda: Twin) -> None:
    def work(x: torch.Tensor) -> list[torch.Tensor]:
        where = x.device
        query, table = x[:, :, :1], torch.arange(6, device=where).repeat(2, 3, 1)
        in_place = x.clone()
        in_place[:, 0] += 1
        in_place[1, :, 2] = 5
        in_place[:, torch.arange(2, device=where)] = in_place[:, :1]
        in_place.scatter_(2, table[..., :2, None].expand(2, 3, 2, 4), 0.5)
        in_place.index_put_((torch.zeros(1, dtype=torch.int64, device=where),), x[:1])
        out = torch.empty(2, 3, 4, device=where)
        torch.amax(x, 2, out=out)
        mask = torch.ones(6, 6, device=where, dtype=torch.bool).triu(1)
        return [
            *(
                in_place,
                out,
                x.sort(dim=2, descending=True, stable=True).indices,
                x.topk(3, 2).values,
                x.to(torch.bfloat16),
            ),
            scaled_dot_product_attention(query, x, x),
            scaled_dot_product_attention(x, x, x, is_causal=True),
            (x @ x.transpose(2, 3)).masked_fill(mask, -torch.inf).softmax(3),
            torch.searchsorted(table, table.flip(2).contiguous()),
            x.gather(2, table[..., None].expand(2, 3, 6, 4)).index_select(2, table[0, 0]),
            pad(x.amin(2), (1, 2), value=torch.inf)[..., ::2].contiguous().cumsum(1),
            *(x[0, [0, 2]], x[x > 0], x.expand(2, 2, 3, 6, 4).double().mean((0, 1))),
        ]

    with torch.inference_mode():
        here = work(normal(2, 3, 6, 4))
        there = work(normal(2, 3, 6, 4).to(CUDA))
    assert all(one.device == CUDA for one in there)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, here, strict=True))
    assert all(one.stride() == other.stride() for one, other in zip(there, here, strict=True))


def test_a_llama_computes_the_same(cuda: Twin) -> None:
    config = shipped("model", "dummy-tiny")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        there = load(config, device="cuda", dtype="float32").model
        assert there.device == CUDA
        assert all(one.is_cuda for one in (*there.parameters(), *there.buffers()))
        logits = there(ids.to(CUDA)).logits
        assert logits.device == CUDA
        assert torch.equal(logits.cpu(), load(config, device="cpu", dtype="float32").model(ids).logits)


def test_worker_threads_have_the_device_too(cuda: Twin) -> None:
    there = normal(4).cuda()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (there + 1).device).result() == CUDA
        with pytest.raises(RuntimeError, match="same device"):
            pool.submit(lambda: there + normal(4)).result()


# -- what CUDA refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: there + here,
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.stack([there[0], here[0]]),
        lambda here, there: torch.where(here > 0, there, 0),
        lambda here, there: there.gather(0, torch.zeros(1, dtype=torch.int64)),
        lambda here, there: there.add_(here),
        lambda here, there: torch.add(there, 1, out=here),
        lambda here, there: there.index_put_((torch.arange(2, device=CUDA),), here[:2]),
        lambda here, there: here[torch.arange(2, device=CUDA)],
        lambda here, there: there.__setitem__(torch.arange(2, device=CUDA), here[:2]),
        lambda here, there: torch.nn.functional.linear(there, here[None]),
    ],
)
def test_devices_do_not_mix(cuda: Twin, mix: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="cuda:0 and cpu|on the same device as the indexed tensor"):
        mix(normal(4), normal(4).cuda())


def test_scalars_and_host_indices_mix(cuda: Twin) -> None:
    there = normal(4).cuda()
    with cuda.no_sync():
        assert (there * torch.tensor(2.0)).device == torch.where(there > 0, there, torch.tensor(0.0)).device == CUDA
        there[0] = 3
        there[1:] = there[:1]
    assert not cuda.syncs[1:]
    assert there[torch.tensor([0, 1])].device == CUDA
    assert [name for name, _ in cuda.syncs[1:]] == ["indexing from the host"]


def test_numpy_is_of_the_host(cuda: Twin) -> None:
    there = normal(4).cuda()
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        memoryview(there.__array__())
    assert not torch.from_numpy(there.cpu().numpy()).is_cuda


# -- host syncs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.empty(4).copy_(x),
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
        lambda x: x.copy_(normal(4)),
        lambda x: x.copy_(normal(4), non_blocking=True),
        lambda x: x.copy_(normal(4).pin_memory()),
        lambda x: x.__setitem__(slice(2), normal(2)),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: x.new_tensor([1, 2]),
        lambda x: torch.as_tensor([1, 2], device="cuda"),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1),
        lambda x: x.index_put_((x > 0,), x[0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.view(2, 2).unique(dim=0),
        lambda x: x.unique_consecutive(),
        lambda x: torch.isin(x, x[:2]),
        lambda x: torch.allclose(x, x),
        lambda x: x.long().abs().bincount(),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda")),
        lambda x: torch.equal(x, x),
        lambda x: range(3)[x[0].long() * 0],
        lambda x: x[: x[0].long() * 0],
        lambda x: torch.arange(x[0].long() * 0 + 1, device="cuda"),
        lambda x: 1.0 in x,
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
)
def test_a_sync_is_counted_once_with_its_line(cuda: Twin, wait: Callable[[torch.Tensor], object]) -> None:
    there = normal(4).cuda()
    cuda.syncs.clear()
    wait(there)
    assert len(cuda.syncs) == 1
    name, where = cuda.syncs[0]
    assert name and where.startswith("test_twin.py:")
    with pytest.raises(RuntimeError, match="the host waits"), cuda.no_sync():
        wait(there)


def test_kernels_are_no_sync(cuda: Twin) -> None:
    there, index = normal(4, 4).cuda(), torch.arange(4, device="cuda")
    upload = normal(4, 4).pin_memory()
    with cuda.no_sync():
        torch._assert_async((index >= 0).all())
        torch.full((2, 2), 3.0, device="cuda"), torch.arange(1, 5, device="cuda"), torch.zeros(2, device="cuda")
        there[0, 0] = 1
        there.masked_fill_(there > 0, torch.tensor(2.0))
        there.index_fill_(0, index[:1], 2.0).masked_fill_(there > 0, -torch.inf)
        there[index], there.repeat_interleave(2, dim=1), there.sort(), there.unbind(), list(there)
        index.repeat_interleave(torch.ones_like(index), output_size=4)
        there.copy_(upload, non_blocking=True)
        upload.to("cuda", non_blocking=True), there.to("cpu", non_blocking=True)
        torch.cuda.current_stream().record_event().query()
        torch.tensor([], device="cuda"), there.to(torch.float64), there.clone(), there.shape, there.stride()


# -- streams and copies ------------------------------------------------------------------------------------------------


def test_pinned_memory_says_so(cuda: Twin) -> None:
    block = torch.zeros(4, 4, pin_memory=True)
    assert block.is_pinned() and block[1:].view(-1).is_pinned() and normal(3).pin_memory().is_pinned()
    assert block.device.type == "cpu" and not normal(3).is_pinned() and not block.clone().is_pinned()
    plain = torch.zeros(8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(plain.data_ptr(), plain.nbytes, 0))
    assert plain[2:].is_pinned()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(plain.data_ptr()))
    assert not plain.is_pinned()


def test_what_is_expanded_cannot_be_pinned(cuda: Twin) -> None:
    with pytest.raises(RuntimeError, match="more than one element"):
        normal(3, 1).expand(3, 4).pin_memory()


@pytest.mark.parametrize(
    "wait",
    [
        lambda cuda, event: event.synchronize(),
        lambda cuda, event: torch.cuda.synchronize(),
        lambda cuda, event: torch.cuda.current_stream().synchronize(),
        lambda cuda, event: torch.zeros(1, device="cuda").item(),
        lambda cuda, event: cuda.finish(),
    ],
)
def test_a_copy_down_arrives_when_the_host_waits(cuda: Twin, wait: Callable[[Twin, torch.cuda.Event], None]) -> None:
    there, ids = normal(4).cuda(), torch.arange(4, device="cuda")
    before, below = torch.cuda.current_stream().record_event(), torch.zeros(4, pin_memory=True)
    below.copy_(there, non_blocking=True)
    numbers = ids.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    there.zero_()  # a later kernel of the stream
    before.synchronize()  # an event of before the copy
    assert below.isnan().all() and (numbers < 0).all() and not event.query()
    wait(cuda, event)
    assert torch.equal(below, normal(4)) and numbers.tolist() == [0, 1, 2, 3] and event.query()


def test_a_host_that_overwrites_pinned_memory_too_early_is_caught(cuda: Twin) -> None:
    block, there = pinned(normal(4)), torch.empty(4, device="cuda")

    def upload(stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            there.copy_(block, non_blocking=True)
            return stream.record_event()

    stream = torch.cuda.current_stream()
    upload(stream).synchronize()
    block.zero_()  # in time
    upload(stream)
    block.fill_(1)
    with pytest.raises(AssertionError, match="pinned memory was overwritten"):
        torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(stream)
    event = upload(side)
    stream.synchronize()  # waits for the other stream only
    event.wait()  # the device waits; the host does not
    assert (there + 1).is_cuda
    block.fill_(2)
    with pytest.raises(AssertionError, match="pinned memory was overwritten"):
        stream.synchronize()


def test_what_nobody_waited_for_is_checked_at_the_end() -> None:
    with pytest.raises(AssertionError, match="pinned memory was overwritten"), device():
        block = pinned(normal(4))
        block.to("cuda", non_blocking=True)
        block.zero_()


@pytest.mark.parametrize(
    "order",
    [
        lambda main, side, event: main.wait_stream(side),
        lambda main, side, event: main.wait_event(event),
        lambda main, side, event: event.wait(main),
        lambda main, side, event: None,
    ],
    ids=["wait_stream", "wait_event", "event.wait", "no wait"],
)
@pytest.mark.parametrize("use", ["read", "write"])
def test_streams_meet_in_a_tensor_only_after_a_wait(cuda: Twin, order: Callable[..., None], use: str) -> None:
    main, side, block = torch.cuda.current_stream(), torch.cuda.Stream(), pinned(normal(4))
    there = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        with pytest.raises(RuntimeError, match="without a wait"):
            there.copy_(block, non_blocking=True)  # the zeros of the main stream may come later
        side.wait_stream(main)
        there.copy_(block, non_blocking=True) if use == "read" else there.sum()
    event = side.record_event()
    order(main, side, event)

    def meet() -> torch.Tensor:
        return there + 1 if use == "read" else there.add_(1)

    waited = side in main.clock
    if waited:
        assert torch.equal(meet().cpu(), (normal(4) if use == "read" else torch.zeros(4)) + 1)
    else:
        with pytest.raises(RuntimeError, match="without a wait"):
            meet()
        event.synchronize()  # the host's wait is not the stream's, but what is issued after it comes later
        meet()


def test_streams_that_only_read_need_no_wait(cuda: Twin) -> None:
    there, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.sum()
    assert there.view(2, 2).sum().item() == 4


@pytest.mark.parametrize("saved", ["record_stream", "wait", "nothing"])
def test_freed_memory_is_not_handed_out_while_another_stream_uses_it(cuda: Twin, saved: str) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    there = torch.zeros(4, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        there.sum()
    if saved == "record_stream":
        there.record_stream(side)
    del there
    if saved == "wait":
        main.wait_stream(side)
    if saved == "nothing":
        with pytest.raises(RuntimeError, match="handed out again"):
            torch.zeros(4, device="cuda")
    else:
        torch.zeros(4, device="cuda")


def test_events_tell_the_time_once_they_are_complete(cuda: Twin) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 1000
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_a_kernel_of_our_own_reads_pinned_memory_after_a_wait(cuda: Twin) -> None:
    main, side, block = torch.cuda.current_stream(), torch.cuda.Stream(), torch.zeros(4, pin_memory=True)
    there, index = normal(4).cuda(), torch.arange(2, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        block.copy_(there, non_blocking=True)
    read = cuda.kernel(torch.index_select)
    early = read(block, 0, index)
    main.wait_stream(side)
    late = read(block, 0, index)
    assert early.is_cuda and early.isnan().all() and torch.equal(late.cpu(), normal(4)[:2])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_counts_living_storages_once(cuda: Twin) -> None:
    before = torch.cuda.memory_allocated()
    block = torch.zeros(256, device="cuda")
    rows, host = block.view(16, 16)[2:], torch.zeros(256)
    assert torch.cuda.memory_allocated() - before == 1024
    del block
    assert torch.cuda.memory_allocated() - before == 1024
    (rows + 1).sum()
    assert torch.cuda.max_memory_allocated() - before == 1024 + rows.nbytes + 4
    del rows, host
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


# -- two devices -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[Twin]:
    with device(2) as cuda:
        yield cuda


def test_two_devices_do_not_mix(two: Twin) -> None:
    first, second = normal(4).cuda(), normal(4).to("cuda:1")
    assert (first + 1).device == CUDA and (second + 1).device == torch.device("cuda:1") == second.clone().device
    for mix in (
        lambda: first + second,
        lambda: torch.cat([first, second]),
        lambda: first * second.sum(),  # of the devices not even a scalar
        lambda: first[torch.zeros(1, dtype=torch.int64, device="cuda:1")],
    ):
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            mix()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")
    with pytest.raises(RuntimeError, match="a kernel is launched on cuda:0"):
        two.kernel(torch.neg)(second)
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == two.kernel(torch.neg)(second).device == second.device


def test_a_copy_between_devices_makes_their_streams_wait_and_not_the_host(two: Twin) -> None:
    first = normal(4).cuda()
    two.syncs.clear()
    with two.no_sync():
        there = first.to("cuda:1")
        first.copy_(there + 1)
    assert torch.equal(first.cpu(), normal(4) + 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(0))
    end.record(torch.cuda.current_stream(1))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="events of two devices"):
        begin.elapsed_time(end)
