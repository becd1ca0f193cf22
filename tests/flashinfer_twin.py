"""FlashInfer without a GPU: the calls that kvbench makes, with their signatures, in torch and as strict as the kernels.

`install(monkeypatch)` puts it in the place of the package. Signatures and behaviour are those of flashinfer-python
0.6.18: plan() reads indptr on the host and cuts the lists into chunks by their pages alone; run() reads indptr, indices
and last_page_len from the buffers, attends chunk by chunk and merges. What the kernels would read out of bounds, wrap
around or leave out in silence is an error here, and what they never load is never looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from twin_graphs import one_operation

from kvbench.attention.executor import flashinfer

HEAD_DIMS = {64, 128, 256}
DTYPES = {torch.float16, torch.bfloat16}  # a test that compares exactly adds float32, which the kernels do not have
PROCESSORS = 132  # streaming multiprocessors, of an H200
INF = 5e4  # the kernels' infinity (math.cuh)

planned: list[dict[str, Any]] = []  # every plan() since `install`, with its sizes


class Kernel:
    """The compiled part behind a wrapper with tensor cores: its plan works on the host, its run on the device.

    Attributes:
        tensor_cores: False: cut the lists as the kernel without them does.
    """

    tensor_cores = True

    def __init__(
        self, backend: str, query: torch.dtype, key: torch.dtype, out: torch.dtype, indices: torch.dtype, *rest: Any
    ) -> None:
        head_dim, value_dim, position, windowed, capped, half_reduction = rest
        assert backend == "fa2" and query == key == out and query in DTYPES, f"no kernel for {query}"
        assert head_dim == value_dim and head_dim in HEAD_DIMS, f"no kernel for head dim {head_dim}"
        assert indices == torch.int32 and not (position or windowed or half_reduction), "not in this twin"
        self._capped = capped

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: Any,
        pinned_workspace: Any,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        lengths: torch.Tensor,
        rows: int,
        requests: int,
        heads: int,
        kv_heads: int,
        page: int,
        cuda_graph: bool,
        head_dim: int,
        *rest: Any,
    ) -> dict[str, Any]:
        """scheduler.cuh, PrefillPlanImpl, with cuda graphs and one query a request; `lengths` are not looked at."""
        assert indptr.device.type == qo_indptr.device.type == "cpu" and rows == requests and cuda_graph
        assert rest[1:] == (False, -1, -1, False, 0, 0), "not in this twin"
        pages = (indptr[1:] - indptr[:-1]).tolist()
        group = heads // kv_heads
        tile = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
        tiles, grid = math.ceil(group / tile), 2 * PROCESSORS // kv_heads
        low, high = max(128 // page, 1), max(pages)
        while low < high:
            middle = (low + high) // 2
            if sum(tiles * math.ceil(max(count, 1) / middle) for count in pages) > grid:
                low = middle + 1
            else:
                high = middle
        chunks = [math.ceil(max(count, 1) / low) for count in pages]
        padded = max(grid, math.ceil(requests * group / tile) + requests - 1)
        assert tiles * sum(chunks) <= padded, "new batch size should not exceed padded batch size"
        needed = heads * padded * tile * (head_dim + 1) * 4
        assert needed <= float_workspace.numel(), "Buffer overflow when allocating memory for batch_prefill_tmp_v"
        sizes = {"requests": requests, "group": group, "pages": pages, "page": page}
        planned.append(sizes)
        return {**sizes, "kv_heads": kv_heads, "head_dim": head_dim, "chunks": chunks, "chunk": low * page}

    @one_operation
    def paged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: Any,
        plan: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        qo_indptr: Any,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *rest: Any,
    ) -> None:
        """prefill.cuh, BatchPrefillWithPagedKVCacheDevice, for every chunk, and cascade.cuh's merge of them."""
        cap, scale = rest[6:8]
        assert self._capped == bool(cap), "the kernel was made with a cap, or without"
        assert enable_pdl is False, "with it last_page_len is read while the kernel that writes it may still run"
        assert (mask_mode, layout, window_left) == (0, 1, -1), "not in this twin"
        requests, heads = plan["requests"], plan["group"] * plan["kv_heads"]
        assert query.shape == out.shape == (requests, heads, plan["head_dim"])
        assert key.shape == value.shape == (len(key), plan["kv_heads"], plan["page"], plan["head_dim"]), "other pages"
        for tensor in (query, key, value, indptr, indices, last_page_len, out, float_workspace):
            assert tensor.device == query.device and tensor.stride(-1) == 1
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32, "it is read as int32, whatever it is"
        with torch._C.DisableTorchFunction():  # what is read on the device, no host waits for
            for request in range(requests):
                first, end = indptr[request : request + 2].tolist()
                assert end - first == plan["pages"][request], "indptr was changed after plan()"
                tokens = self._list(request, first, end, int(last_page_len[request]), plan)
                state = torch.zeros(heads, plan["head_dim"]), torch.full((heads,), -INF)
                for places in tokens:
                    pages = indices[places // plan["page"]].long()
                    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < len(key):
                        raise IndexError(f"list {request} has a page that is not one of {len(key)}")
                    part = (pool[pages, :, places % plan["page"]].float().transpose(0, 1) for pool in (key, value))
                    state = _merged(*state, *_attend(query[request].float(), *part, cap, scale))
                out[request] = state[0]
                if lse is not None:
                    lse[request] = state[1]

    def _list(self, request: int, first: int, end: int, last: int, plan: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The places of a list's tokens, chunk by chunk: page * page size + token in the page."""
        page, chunk = plan["page"], plan["chunk"]
        length = 0 if end == first else (end - first - 1) * page + last  # page.cuh, get_length
        if length < 0:
            raise IndexError(f"list {request} is {length} tokens long, {length % 2**32} as the kernel reads it")
        if length > (end - first) * page:
            raise IndexError(f"list {request} is {length} tokens long, {(end - first) * page} were planned")
        for number in range(plan["chunks"][request]):
            if not self.tensor_cores and number * chunk > length:
                raise IndexError(f"chunk {number} of list {request} starts behind its end: decode.cuh would run on")
            yield first * page + torch.arange(min(number * chunk, length), min((number + 1) * chunk, length))


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert use_cuda_graph, "without it run() reads other buffers than those given here"
        assert kv_layout == "HND" and backend == "auto" and jit_args is None, "not in this twin"
        assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        for buffer in buffers:
            assert buffer.dtype == torch.int32, "the kernel reads its buffers as int32, whatever they are"
            assert buffer.is_contiguous() and buffer.device == float_workspace_buffer.device
        if len(buffers[0]) != len(buffers[2]) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        assert use_tensor_cores, "not in this twin"
        self._workspace = float_workspace_buffer
        self._indptr, self._indices, self._last_page_len = buffers

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args, "deprecated"
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan_impl(indptr, indices, last_page_len, *sizes, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        requests = len(last_page_len)
        if requests != len(self._last_page_len):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self._indices):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        assert indptr.dtype == torch.int32, "its type chooses the kernel's index type"
        self._indptr.copy_(indptr, non_blocking=non_blocking)
        self._last_page_len.copy_(last_page_len, non_blocking=non_blocking)
        self._indices[: len(indices)].copy_(indices, non_blocking=non_blocking)
        on_host = indptr.to("cpu")
        assert int(on_host[-1]) == len(indices), "indptr and indices disagree"
        types = (q_data_type, kv_data_type, o_data_type or q_data_type, indptr.dtype)
        self._kernel = Kernel("fa2", *types, head_dim, head_dim, 0, window_left != -1, bool(logits_soft_cap), False)
        self._dtype, self._scale = q_data_type, head_dim**-0.5 if sm_scale is None else sm_scale
        self._cap = logits_soft_cap or 0.0
        sizes = (requests, requests, num_qo_heads, num_kv_heads, page_size, True, head_dim, head_dim)
        queries, lengths = torch.arange(requests + 1), (on_host[1:] - on_host[:-1]) * page_size
        more = (False, window_left, fixed_split_size or -1, disable_split_kv, 0, 0)
        self._plan = self._kernel.plan(self._workspace, None, None, queries, on_host, lengths, *sizes, *more)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(paged_kv_cache, tuple), "one tensor for both: not in this twin"
        key, value = paged_kv_cache
        if not q.dtype == key.dtype == value.dtype == self._dtype:
            raise ValueError(f"The dtype of q or k does not match the {self._dtype} specified in plan function.")
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        buffers = (self._indptr, self._indices, self._last_page_len)
        rest = (0, 1, -1, enable_pdl, None, None, None, None, None, None, self._cap, self._scale)
        self._kernel.paged_run(self._workspace, None, self._plan, q, key, value, None, *buffers, out, lse, *rest)
        return (out, lse) if return_lse else out


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    assert causal, "not in this twin"
    assert kv_layout == "NHD", "Hopper's kernel reads sizes of HND wrong (single_prefill_sm90.cu)"
    assert q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and q.shape[2] in HEAD_DIMS
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and k.shape == v.shape
    width, heads, head_dim = q.shape
    length = k.shape[0]
    assert width, "Hopper's kernel refuses a chunk without queries: invalid argument"
    assert width <= length, "kv_len must be greater than or equal to qo_len"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(width, heads, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    with torch._C.DisableTorchFunction():
        for place in range(width):
            seen = length - width + place + 1
            key, value = (part[:seen].transpose(0, 1).float() for part in (k, v))
            out[place], lse[place] = _attend(q[place].float(), key, value, logits_soft_cap or 0.0, scale)
    return (out, lse) if return_lse else out


# -- a model's layers --------------------------------------------------------------------------------------------------


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """norm.cuh, RMSNormKernel, and QKRMSNormKernel of the vectors of heads."""
    assert out is None and enable_pdl is False, "not in this twin"
    assert input.dim() in (2, 3) and input.shape[-1:] == weight.shape
    _readable(input, weight)
    out = torch.empty_like(input)
    _rmsnorm(input, weight, eps, out)
    return out


@one_operation
def _rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        out.copy_(_normed(input.float(), weight, eps))


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """norm.cuh, FusedAddRMSNormKernel: the sum is rounded where it is stored, and normed as it was."""
    assert enable_pdl is False, "not in this twin"
    assert input.dim() == 2 and input.shape == residual.shape and input.shape[-1:] == weight.shape
    _readable(input, residual, weight)
    _fused_add_rmsnorm(input, residual, weight, eps)


@one_operation
def _fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    with torch._C.DisableTorchFunction():
        both = input.float() + residual.float()
        residual.copy_(both)
        input.copy_(_normed(both, weight, eps))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """activation.cuh, act_and_mul_kernel: rows lie one behind the other, whatever their strides."""
    assert out is None and enable_pdl is False, "not in this twin"
    assert input.is_contiguous() and input.shape[-1] % 16 == 0, "16 bytes are read at once, of each half"
    _readable(input)
    out = torch.empty(input.shape[:-1] + (input.shape[-1] // 2,), device=input.device, dtype=input.dtype)
    _silu_and_mul(input, out)
    return out


@one_operation
def _silu_and_mul(input: torch.Tensor, out: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        gate, up = input.float().chunk(2, dim=-1)
        out.copy_(gate / (1 + torch.exp(-gate)) * up)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """pos_enc.cuh, BatchQKApplyRotaryPosIdsCosSinCacheKernel, which reads the half before or behind as it lies."""
    assert is_neox and head_size in HEAD_DIMS, "not in this twin"
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous() and positions.dim() == 1
    assert cos_sin_cache.dim() == 2 and cos_sin_cache.is_contiguous() and cos_sin_cache.shape[1] <= head_size
    assert len(positions) == len(query) == len(key) and positions.device == cos_sin_cache.device == query.device
    _readable(query, key)
    parts = [query, key]
    outs = [torch.empty_like(part) for part in parts]
    heads = [part.view(len(part), -1, head_size) for part in parts]
    _turned(positions, *heads, cos_sin_cache, *(out.view(len(out), -1, head_size) for out in outs))
    return outs[0], outs[1]


@one_operation
def _turned(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
) -> None:
    with torch._C.DisableTorchFunction():
        if not 0 <= int(positions.min()) <= int(positions.max()) < len(cos_sin_cache):
            raise IndexError(f"a position is none of the {len(cos_sin_cache)} that have angles")
        width = cos_sin_cache.shape[1]
        cos, sin = (part[:, None].repeat(1, 1, 2) for part in cos_sin_cache[positions].chunk(2, dim=-1))
        for part, out in ((query, query_out), (key, key_out)):
            turned = part[..., :width].float()
            first, second = turned.chunk(2, dim=-1)
            out.copy_(part)
            out[..., :width] = turned * cos + torch.cat([-second, first], dim=-1) * sin


def _readable(*tensors: torch.Tensor) -> None:
    """What the kernels take for granted: one type and device, and neighbours in the last dimension, in 16 bytes."""
    for tensor in tensors:
        assert tensor.dtype == tensors[0].dtype and tensor.dtype in DTYPES, f"no kernel for {tensor.dtype}"
        assert tensor.device == tensors[0].device and tensor.stride(-1) == 1
        assert all(size % 8 == 0 for size in (*tensor.stride()[:-1], tensor.shape[-1], tensor.storage_offset()))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [H, D], key and value [Hkv, n, D]: output [H, D], and the log2 of the sum of 2^logits [H]."""
    if not key.shape[1]:
        return torch.zeros_like(query), torch.full(query.shape[:1], -INF)
    group = query.shape[0] // key.shape[0]
    logits = torch.einsum("hd,hnd->hn", query, key.repeat_interleave(group, 0)) * scale
    if cap:  # variants.cuh, LogitsTransform
        logits = cap * torch.tanh(logits / cap)
    out = torch.einsum("hn,hnd->hd", logits.softmax(1), value.repeat_interleave(group, 0))
    return out, logits.logsumexp(1) * math.log2(math.e)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, its_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """state.cuh, state_t::merge of two parts of one attention."""
    top = torch.maximum(lse, its_lse)
    one, two = torch.exp2(lse - top), torch.exp2(its_lse - top)
    both = one + two
    return (out * one[:, None] + more * two[:, None]) / both[:, None], top + both.log2()


OPERATORS = (rmsnorm, fused_add_rmsnorm, silu_and_mul, apply_rope_with_cos_sin_cache)


def take_small_models(monkeypatch: Any) -> None:
    """Until the test ends it is given heads of the dummies' sizes, and float32, which the kernels do not have."""
    for module, name, value in (
        (sys.modules[__name__], "HEAD_DIMS", {16, 32, 64}),
        (sys.modules[__name__], "DTYPES", {torch.float32, torch.bfloat16}),
        (flashinfer, "FLASHINFER_HEAD_DIMS", (16, 32, 64)),
        (flashinfer, "FLASHINFER_DTYPES", ("float32", "bfloat16")),
    ):
        monkeypatch.setattr(module, name, value)


def install(monkeypatch: Any) -> None:
    """`import flashinfer` gives this twin, until the test ends; nothing that is cached meanwhile stays."""
    package = ModuleType("flashinfer")
    for call in (BatchDecodeWithPagedKVCacheWrapper, single_prefill_with_kv_cache, *OPERATORS):
        setattr(package, call.__name__, call)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name in ("workspace", "_failure"):
        monkeypatch.setattr(flashinfer, name, cache(getattr(flashinfer, name).__wrapped__))
    planned.clear()
