"""The FlashInfer executor: paged attention on a GPU, a list of its own for each KV head, nothing
gathered or copied.

Each (row, KV head) is one request with one KV head and its G query heads, or G requests with one
query head each where query heads choose for themselves. A store's pool [T, D] is T / page pages as
it lies. Lists have fixed parts of fixed buffers; which tokens stand there, and how many of them
count, is written on the device, so that no call waits for the GPU.

What the comments here say of FlashInfer is from the source of flashinfer-python 0.6.18.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from kvbench.attention.limits import (
    FLASHINFER_DTYPES,
    FLASHINFER_HEAD_DIMS,
    FLASHINFER_LATENT,
    FLASHINFER_MISSING,
)
from kvbench.attention.torch import attend, is_list, prefill
from kvbench.config import first_line
from kvbench.kernels.operators import operator
from kvbench.memory.device import PAGE, DeviceTier, Pool, list_tokens
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape, capped

WORKSPACE = 128 << 20  # bytes for the partial results of one call, FlashInfer's own advice
PLANS = 8  # plans kept of a device; each holds 8 MiB on the device and as much pinned host memory
SHORTEST = 64  # a list of tokens is planned for this many or more


class FlashInfer:
    """See `kvbench.attention.executor.Executor`; of one generation, since it keeps plans for its
    shapes.

    A selection with a `log_weight` or `keys`, and a call that asks for probabilities, is the torch
    executor's.

    Parameters
    ----------
    shape
        of the generation; `unfit` says whether FlashInfer can run it.
    dense
        who computes prefill: "sdpa", or "flashinfer" (a call for each row).
    """

    name = "flashinfer"
    note: str | None = None
    in_place = False

    def __init__(self, shape: Shape, dense: str = "sdpa") -> None:
        self._shape, self._dense = shape, dense
        self._plans: dict[tuple[torch.device, int, int, int, int, float], AttentionPlan] = {}
        self._used: set[str] = set()

    def __call__(
        self,
        query: torch.Tensor,
        store: LayerStore,
        selection: Selection | None,
        scaling: float,
        probabilities: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One decode step's attention in one layer; see `kvbench.attention.executor.Executor`."""
        extra = None if selection is None else selection.extra
        if probabilities or (selection is not None and not is_list(replace(selection, extra=None))):
            self._used.add("torch")
            softcap = self._shape.softcap
            return attend(query, store, selection, scaling, probabilities, softcap)
        self._used.add(self.name)
        if selection is None:
            return self._resident(query, store, scaling)[0], None
        out, sums = self._selected(query, store, selection.index, scaling)
        if extra is not None:
            entries = extra.key, extra.value, extra.log_weight
            out = with_extra(out, sums, query, *entries, scaling, self._shape.softcap)
        return out, None

    def used(self) -> str:
        """The executors that have computed decode steps so far: "flashinfer", "torch" or
        "flashinfer, torch".
        """
        return ", ".join(sorted(self._used)) or self.name

    def _resident(self, query: torch.Tensor, store: LayerStore, scaling: float) -> ListAttention:
        """Attend all slots filled, in pages of 16 slots in their order."""
        if not store.device.capacity:
            store.resident()  # says why there is nothing to attend
        device = store.device
        plan = self._plan(
            query.device,
            device.used.numel(),
            self._shape.group,
            device.capacity // PAGE,
            PAGE,
            scaling,
        )
        plan.list_pages(device)
        return plan.attend(query, device.pool)

    def _selected(
        self, query: torch.Tensor, store: LayerStore, index: torch.Tensor, scaling: float
    ) -> ListAttention:
        """Attend the tokens of index [B, Hs, M], as lists of pages of one token."""
        heads, count = index.shape[1:]
        batch, kv_heads = len(index), self._shape.kv_heads
        if heads in (1, kv_heads):
            index, heads = index.expand(batch, kv_heads, count), kv_heads
        plan = self._plan(
            query.device,
            batch * heads,
            self._shape.query_heads // heads,
            planned(count),
            1,
            scaling,
        )
        if index.is_cuda and store.stage is None:
            plan.list_tokens(index, store.device)
            return plan.attend(query, store.device.pool)
        here = store.locate(index.reshape(batch, kv_heads, -1))
        present = None if here.present is None else here.present.reshape(batch * heads, count)
        plan.list_slots(here.slots.reshape(batch * heads, count), present)
        return plan.attend(query, here.pool)

    def _plan(
        self, device: torch.device, requests: int, group: int, pages: int, page: int, scaling: float
    ) -> AttentionPlan:
        """The plan for these sizes, made where there is none yet; the longest unused one goes when
        there are many.
        """
        sizes = (requests, group, pages, page, scaling)
        plan = self._plans.pop((device, *sizes), None) or AttentionPlan(
            replace(self._shape, device=device), *sizes
        )
        self._plans[device, *sizes] = plan
        if len(self._plans) > PLANS * (1 + len(set(self._shape.elsewhere.values()))):
            del self._plans[next(iter(self._plans))]
        return plan

    def prefill(
        self,
        query: torch.Tensor,
        store: LayerStore,
        column: int,
        offsets: Sequence[int],
        scaling: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `kvbench.attention.torch.prefill`."""
        if self._dense == "sdpa" or sinks is not None:
            cap = self._shape.softcap
            return prefill(query, store, column, offsets, scaling, sinks, softcap=cap)
        import flashinfer

        out = torch.zeros_like(query)
        end = column + query.shape[2]
        for row, offset in enumerate(offsets):
            skip = max(0, offset - column)  # columns of padding
            if skip >= query.shape[2]:
                continue
            # Query i of q attends key j of n where j + q <= n + i (prefill.cuh, logits_mask):
            # aligned at the end. q, k and v are read by their strides (single_prefill.cu), so none
            # is copied. With "HND" Hopper's kernel takes the length for the number of KV heads
            # (single_prefill_sm90.cu): a division by zero ends the process.
            blocks = store.device.key, store.device.value
            key, value = (block[row, :, : end - offset].transpose(0, 1) for block in blocks)
            attended = flashinfer.single_prefill_with_kv_cache(
                query[row, :, skip:].transpose(0, 1),
                key,
                value,
                causal=True,
                kv_layout="NHD",
                sm_scale=scaling,
                logits_soft_cap=self._shape.softcap,
            )
            out[row, :, skip:] = attended.transpose(0, 1)
        return out


class ListAttention(NamedTuple):
    """Attention of a query to its list, [B, Hq, 1, D], and [B, Hq] float32 log2(sum of e^logit)."""

    out: torch.Tensor
    sums: torch.Tensor


class AttentionPlan:
    """Fixed lists of `pages` pages for each of `requests` requests, of which any first part can be
    attended.

    The wrapper's plan() reads indptr on the host and schedules by the number of pages alone
    (scheduler.cuh, PrefillSplitQOKVIndptr). run() reads indptr, indices and last_page_len from the
    buffers that the constructor was given, so what is written there in between holds for the next
    run.

    A list is (indptr[r + 1] - indptr[r] - 1) * page + last_page_len[r] tokens long, in 32 bits that
    wrap (page.cuh, get_length): a last_page_len below 1 takes whole pages away. That is the only
    use of last_page_len. The kernel with tensor cores (prefill.cuh) then gives the chunks planned
    after the end no tokens: nothing is loaded, and their part of the result has the weight 0; a
    list without tokens gives zeros. The kernel without them (decode.cuh) takes the start of a chunk
    from the length unchecked, and would run on far beyond it.

    A plan serves all layers of a device, and the workspace all its plans: on one stream a run has
    ended before its buffers are written again.

    Parameters
    ----------
    shape
        of the generation, for device, dtype, head dim and soft cap.
    requests, group
        requests, and query heads of each.
    pages, page
        pages of a list, and tokens of a page.
    scaling
        factor on the logits.
    """

    def __init__(
        self, shape: Shape, requests: int, group: int, pages: int, page: int, scaling: float
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        device = shape.device
        self._sizes = (requests, group, shape.head_dim)
        self._pages, self._page = pages, page
        self._indices = torch.zeros(requests * pages, dtype=torch.int32, device=device)
        self._last_page_len = torch.empty(requests, dtype=torch.int32, device=device)
        # With use_cuda_graph the wrapper keeps to these buffers, and its run() needs nothing of the
        # host.
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            workspace(device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty(requests + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
        )
        # From the host, where plan() wants them: nothing comes down from the device. Types choose a
        # compiled kernel.
        self._wrapper.plan(
            torch.arange(requests + 1, dtype=torch.int32) * pages,
            self._indices,
            torch.full((requests,), page, dtype=torch.int32),
            group,
            1,
            shape.head_dim,
            page,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=scaling,
            logits_soft_cap=shape.softcap,
        )

    def list_slots(self, slots: torch.Tensor, present: torch.Tensor | None) -> None:
        """List slots [requests, M] of a pool, in pages of one; `present` as in `list_slots`."""
        list_slots(slots, present, self._indices.view(-1, self._pages), self._last_page_len)

    def list_pages(self, tier: DeviceTier) -> None:
        """List all that a tier holds."""
        listed, pages = self._indices.view(-1, self._pages), len(tier.pool.key) // self._page
        list_pages(tier.first, tier.filled, listed, self._last_page_len, self._page, pages)

    def list_tokens(self, index: torch.Tensor, tier: DeviceTier) -> None:
        """List the tokens of index [B, Hs, M], in pages of one, and how many there are."""
        written = self._indices.view(-1, self._pages), self._last_page_len
        list_tokens(index, tier.ids, tier.filled, tier.first, *written)

    def attend(self, query: torch.Tensor, pool: Pool) -> ListAttention:
        """Attention of query [B, Hq, 1, D] to what is listed, pages of this pool."""
        pools = tuple(part.view(-1, 1, self._page, part.shape[1]) for part in pool)
        # enable_pdl would let the kernel start before the one that writes last_page_len has ended,
        # and it reads that before it waits (prefill.cuh, griddepcontrol.wait).
        asked = query.reshape(self._sizes)
        out, sums = self._wrapper.run(asked, pools, return_lse=True, enable_pdl=False)
        return ListAttention(out.view_as(query), sums.view(query.shape[:2]))


@operator("kvbench.attention.gpu", writes=("listed", "last"))
def list_pages(
    first: torch.Tensor,
    filled: torch.Tensor,
    listed: torch.Tensor,
    last: torch.Tensor,
    page: int,
    pages: int,
) -> None:
    """Write lists of the pages of a pool that has so many, each from the start of its room on.

    Parameters
    ----------
    first, filled
        [B, Hkv], where the room of each begins, and tokens in it.
    listed
        [B * Hkv, n] int32; a shorter list's last are not attended.
    last
        [B * Hkv] int32, as `kvbench.memory.device.list_tokens` writes it.
    """
    numbers = first.view(-1, 1) // page + torch.arange(listed.shape[1], device=first.device)
    listed.copy_(numbers.clamp(max=pages - 1))
    torch.sub(filled.reshape(-1), (listed.shape[1] - 1) * page, out=last)


@operator("kvbench.attention.gpu", writes=("listed", "last"))
def list_slots(
    slots: torch.Tensor, present: torch.Tensor | None, listed: torch.Tensor, last: torch.Tensor
) -> None:
    """Write lists of a pool's slots [n, M], as `kvbench.memory.device.list_tokens` does; `present`
    [n, M] says where one is, trailing others, None: everywhere.
    """
    listed[:, : slots.shape[1]] = slots
    before = listed.shape[1] - 1  # tokens of all pages but the last
    if present is None:
        last.fill_(slots.shape[1] - before)
    else:
        torch.sub(present.sum(dim=1), before, out=last)


@operator("kvbench.attention.gpu")
def with_extra(
    out: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_weights: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention `out` of query [B, Hq, 1, D], its `sums` as of `ListAttention`, with more entries.

    Parameters
    ----------
    keys, values
        [B, Hkv, E, D].
    log_weights
        [B, Hq, E]; -inf where there is none.
    """
    grouped = query.float().view(*keys.shape[:2], -1, keys.shape[3])
    logits = capped((grouped @ keys.float().transpose(2, 3)) * scaling, softcap)
    logits = logits + log_weights.float().view_as(logits)
    before = sums.view(*logits.shape[:3], 1) * math.log(2)
    weights = torch.cat([before, logits], dim=3).softmax(dim=3)
    more = weights[..., 1:] @ values.float()
    return (out.view_as(grouped) * weights[..., :1] + more).view_as(out).to(out.dtype)


def planned(count: int) -> int:
    """Length to plan lists of `count` tokens for: at most a quarter above, so that growing lists
    need few plans.
    """
    unit = max(SHORTEST, 1 << max(0, count.bit_length() - 3))
    return max(1, -(-count // unit)) * unit


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """The one workspace of a device; zeros, as FlashInfer asks of its first use."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def unfit(shape: Shape) -> str | None:
    """Why FlashInfer cannot run here, in words that follow "flashinfer: "; None: it can."""
    if shape.device.type != "cuda":
        return f"{shape.device.type} is not a CUDA device"
    if shape.latent_dim:
        return FLASHINFER_LATENT
    if shape.head_dim not in FLASHINFER_HEAD_DIMS:
        return (
            f"head dim {shape.head_dim} is not one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
        )
    dtype = str(shape.dtype).removeprefix("torch.")
    if dtype not in FLASHINFER_DTYPES:
        return f"dtype {dtype} is not one of {', '.join(FLASHINFER_DTYPES)}"
    return _failure(shape.device, shape.dtype, shape.head_dim)


@cache
def _failure(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a first call fails.

    It compiles the kernel where there is no compiled one, so it is tried once, early.
    """
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "flashinfer"
        return FLASHINFER_MISSING if missing else f"cannot be imported ({first_line(error)})"
    shape = Shape(1, 1, 1, head_dim, (1,), dtype, device, 1.0, ())
    key = torch.zeros(1, 1, PAGE, head_dim, dtype=dtype, device=device)
    try:
        plan = AttentionPlan(shape, 1, 1, 1, PAGE, 1.0)
        plan.list_slots(torch.zeros(1, 1, dtype=torch.int32, device=device), None)
        plan.attend(key[:, :, :1], Pool.of(key, key)).out.cpu()
    except Exception as error:
        # of a compiler, a driver or a GPU too old: whatever it is, it is no error of a run
        return f"does not run here ({first_line(error)})"
    return None
