"""Rows of any kind, read in place: what plain loops make of their bytes, one number after the other."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from driver import slow
from numpy.typing import NDArray

from kvbench.attention import cpu
from kvbench.kernels import attend as kernels
from kvbench.kernels.coded import GROUP, Coded
from kvbench.memory.codecs import Codecs

LISTS, TOKENS = 2, 96
USED = np.array([TOKENS, 71])
TABLE = {bits: tuple(np.sort(np.random.default_rng(bits).normal(size=2**bits)).tolist()) for bits in (2, 3, 4)}
PAIRS = [("unit3", "row3"), *slow(("native", "row4"), ("int8", "native"), ("fp8", "table4"), ("e4m3", "row4"))]
PAIRS += slow(("channels4", "channels4"), ("row3", "table3"), ("row4", "e4m3"), ("tokens4", "channels2"))
PAIRS += slow(("tokens2", "int8"), ("channels2", "fp8"), ("unit4", "row4"), ("table4", "table4"), ("table3", "table2"))


def coded(name: str, model: str) -> Coded | None:
    """What a name above means for a model in float32 or bfloat16; None: its numbers."""
    kind, bits = name[:-1], int(name[-1]) if name[-1].isdecimal() else 0
    match kind:
        case "int":
            return Coded(8, "signed", parameters="scale")
        case "fp":
            return Coded(8, "e4m3", parameters="scale")
        case "e4m":
            return Coded(8, "e4m3")
        case "row":
            return Coded(bits, "unsigned", parameters="range", parameter="float16")
        case "channels" | "tokens":
            return Coded(bits, "unsigned", parameters="range", granularity=kind, parameter=model)
        case "unit" | "table":
            return Coded(bits, TABLE[bits], unit=kind == "unit", parameters="scale", parameter="float16")
    return None


class Guarded:
    """Bytes after which comes a page that cannot be read."""

    def __init__(self, held: NDArray[np.uint8]) -> None:
        size = -(-held.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size + mmap.PAGESIZE)
        end = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + size
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
        self.address = end - held.nbytes
        ctypes.memmove(self.address, held.ctypes.data, held.nbytes)


class Rows:
    """Random rows of `LISTS` KV heads, and the numbers [LISTS, TOKENS, D] that they hold."""

    def __init__(self, coded: Coded | None, head_dim: int, model: str, seed: int) -> None:
        self._rng, count, groups = np.random.default_rng(seed), LISTS * TOKENS, np.zeros((0, 0), np.uint8)
        if coded is None:
            held = self._bytes((count, head_dim), model)
            numbers = [as_numbers(row, model) for row in held]
            name, codes, table = model, held[:, :0], 0
        else:
            codes = self._rng.integers(0, 256, (count, head_dim * coded.bits // 8), dtype=np.uint8)
            if coded.numbers == "e4m3":
                codes[codes & 127 == 127] = 0  # NaN
            many = {"none": 0, "scale": 1, "range": 2}[coded.parameters]
            many *= {"row": 1, "channels": head_dim // GROUP, "tokens": head_dim}[coded.granularity]
            beside = self._bytes((count, many), coded.parameter)
            held = np.concatenate([codes, beside], axis=1)
            if coded.granularity == "tokens":
                held, groups = codes, beside[::GROUP]
                beside = groups.repeat(GROUP, axis=0)
            numbers = [decoded(*row, coded, head_dim) for row in zip(codes, beside, strict=True)]
            name, table = coded.name, coded.table
        self.held = name, held.shape[1], codes.shape[1], table
        self.numbers = np.stack(numbers).reshape(LISTS, TOKENS, head_dim)
        self.rows, self.groups = Guarded(held), Guarded(np.ascontiguousarray(groups))

    def kind(self, of_values: bool) -> kernels.Kind:
        name, *rest = self.held
        number = kernels.format_number(name, of_values)
        assert number is not None, name
        return kernels.Kind(number, *rest)

    def _bytes(self, size: tuple[int, int], kind: str) -> NDArray[np.uint8]:
        numbers = torch.from_numpy(self._rng.normal(size=size)).to(getattr(torch, kind))
        return numbers.view(torch.uint8).numpy() if size[1] else np.zeros(size, np.uint8)


def as_numbers(held: NDArray[np.uint8], kind: str) -> NDArray[np.float64]:
    return torch.from_numpy(held.copy()).view(getattr(torch, kind)).double().numpy()


def decoded(codes: NDArray[np.uint8], beside: NDArray[np.uint8], coded: Coded, head_dim: int) -> NDArray[np.float64]:
    """The numbers of a row of codes."""
    whole, numbers = int.from_bytes(codes.tobytes(), "little"), np.empty(head_dim)
    for channel in range(head_dim):
        code = whole >> channel * coded.bits & (2**coded.bits - 1)
        if coded.numbers == "signed":
            numbers[channel] = code - 256 * (code > 127)
        elif coded.numbers == "e4m3":
            exponent, mantissa = code >> 3 & 15, code & 7
            size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            numbers[channel] = -size if code > 127 else size
        else:
            numbers[channel] = code if coded.numbers == "unsigned" else coded.numbers[code]
    if coded.unit:
        numbers /= np.sqrt((numbers**2).sum() + 1e-16)
    if coded.parameters == "none":
        return numbers
    scale, least = as_numbers(beside, coded.parameter), np.zeros(1)
    if coded.parameters == "range":
        scale, least = np.split(scale, 2)
    each = head_dim // len(scale)
    return numbers * scale.repeat(each) + least.repeat(head_dim // len(least))


@pytest.mark.parametrize("model", ["float32", *slow("bfloat16")])
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_rows_are_what_is_known_of_them(key: str, value: str, model: str) -> None:
    sides = coded(key, model), coded(value, model)
    sizes = [(32, 1), (64, 3), (96, 7), (128, 4), (256, 2)]
    if all(side is None or side.bits == 8 for side in sides):
        sizes += [(20, 3), (80, 5)]
    for head_dim, many in sizes:
        check(sides, head_dim, many, model)


def check(sides: tuple[Coded | None, Coded | None], head_dim: int, many: int, model: str) -> None:
    """Attention of `many` queries for each KV head, over all slots and over lists of some."""
    keys, values = (Rows(side, head_dim, model, seed) for seed, side in enumerate(sides))
    query = torch.randn(1, LISTS * many, 1, head_dim, generator=torch.Generator().manual_seed(2))
    query = query.to(getattr(torch, model))
    logits = query.double().view(LISTS, many, head_dim).numpy() @ keys.numbers.swapaxes(1, 2)
    scaling = 3 / np.abs(logits).max()
    kinds = kernels.Kinds(keys.kind(False), values.kind(True), 2 * head_dim * query.itemsize)
    first, none = torch.arange(LISTS) * TOKENS, torch.zeros(LISTS, dtype=torch.int64)
    used = torch.tensor(USED)
    held = keys.rows.address, values.rows.address, keys.groups.address
    counts = first.data_ptr(), none.data_ptr(), used.data_ptr()
    resident = kernels.ResidentRows(counts[2], counts[0], counts[1], *held, kinds)
    every = np.where(np.arange(TOKENS) < USED[:, None], np.arange(TOKENS), -1)
    some = np.random.default_rng(3).permuted(every, axis=1)[:, :70]
    near = kernels.NearRows(*held, 0, counts[0], counts[2], counts[1], counts[2], LISTS, 0)
    tier = cpu.Held(Codecs.native(head_dim, query.dtype), kernels.Lists(near=near, kinds=kinds), None)
    listed = cpu.lists_part(torch.tensor(some)[None], None, tier, None, True)
    for part, lists in ((cpu.Part(0, resident, None), every), (listed, some)):
        out, weights, _ = cpu.run(query, scaling, LISTS, [part], lists.shape[1])
        for head, tokens in enumerate(lists):
            weight = np.exp(np.where(tokens < 0, -np.inf, scaling * logits[head][:, tokens]))
            weight /= weight.sum(axis=1, keepdims=True)
            agrees(weights.view(LISTS, many, -1)[head], weight, 2e-6)
            near = 1e-6 if model == "float32" else torch.finfo(torch.bfloat16).eps
            agrees(out.view(LISTS, many, -1)[head], weight @ values.numbers[head, tokens], near)


def agrees(ours: torch.Tensor, theirs: Any, near: float) -> None:
    np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=0, atol=near * np.abs(theirs).max())


@pytest.mark.parametrize(("bits", "numbers"), [(8, (0.0,) * 256), (3, (0.0,) * 16)])
def test_a_table_has_a_number_for_each_code(bits: int, numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(numbers)} numbers for codes of {bits} bits"):
        Coded(bits, numbers)
