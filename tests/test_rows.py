"""Rows of any kind, read in place: what plain loops make of their bytes, one number after the other."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from driver import slow
from numpy.typing import NDArray

from kvbench.attention import cpu
from kvbench.kernels import attend as kernels
from kvbench.kernels.coded import GROUP, Coded

LISTS, TOKENS, USED = 2, 96, (96, 71)
TABLE = {bits: tuple(np.sort(np.random.default_rng(bits).normal(size=2**bits)).tolist()) for bits in (2, 3, 4)}
KINDS: dict[str, Coded | None] = {
    "native": None,
    "int8": Coded(8, "signed", "scale"),
    "fp8": Coded(8, "e4m3", "scale"),
    "e4m3": Coded(8, "e4m3"),
    "int4": Coded(4, "unsigned", "range", "channels", "model"),
    "int3": Coded(3, "unsigned", "range", "row", "float16"),
    "row4": Coded(4, "unsigned", "range", "row", "float16"),
    "tokens4": Coded(4, "unsigned", "range", "tokens", "model"),
    "tokens2": Coded(2, "unsigned", "range", "tokens", "model"),
    "channels2": Coded(2, "unsigned", "range", "channels", "model"),
    "unit4": Coded(4, TABLE[4], "scale", "row", "float16", unit=True),
    "unit3": Coded(3, TABLE[3], "scale", "row", "float16", unit=True),
    "table4": Coded(4, TABLE[4], "scale", "row", "float16"),
    "table3": Coded(3, TABLE[3], "scale", "row", "float16"),
    "table2": Coded(2, TABLE[2], "scale", "row", "float16"),
}
PAIRS = [("unit3", "int3"), *slow(("native", "row4"), ("int8", "native"), ("fp8", "table4"), ("e4m3", "row4"))]
PAIRS += slow(("int4", "int4"), ("int3", "table3"), ("row4", "e4m3"), ("tokens4", "channels2"), ("tokens2", "int8"))
PAIRS += slow(("channels2", "fp8"), ("unit4", "row4"), ("table4", "table4"), ("table3", "table2"), ("table2", "native"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)], ids=str)


class Guarded:
    """Bytes that end where a page begins that must not be read."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        size = -(-rows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size + mmap.PAGESIZE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + size), mmap.PAGESIZE, 0) == 0
        self.address = base + size - rows.nbytes
        ctypes.memmove(self.address, rows.ctypes.data, rows.nbytes)


def as_numbers(held: NDArray[np.uint8], kind: str, dtype: torch.dtype) -> NDArray[np.float64]:
    """Bytes as numbers of one of the types that facts name."""
    of = {"float32": torch.float32, "float16": torch.float16, "model": dtype}[kind]
    return torch.from_numpy(held.copy()).view(of).double().numpy()


def random_bytes(rng: np.random.Generator, size: tuple[int, ...], kind: str, dtype: torch.dtype) -> NDArray[np.uint8]:
    """Random numbers of such a type."""
    if not size[1]:
        return np.zeros(size, np.uint8)
    of = {"float32": torch.float32, "float16": torch.float16, "model": dtype}[kind]
    return torch.from_numpy(0.1 * rng.normal(size=size)).to(of).view(torch.uint8).numpy()


def rows_of(
    coded: Coded | None, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float64]]:
    """Random rows [LISTS * TOKENS, width], parameters by groups of them, and the numbers [.., D] that they hold."""
    rng, count = np.random.default_rng(seed), LISTS * TOKENS
    nothing = np.zeros(0, np.uint8)
    if coded is None:
        held = random_bytes(rng, (count, head_dim), "model", dtype)
        return held, nothing, np.stack([as_numbers(row, "model", dtype) for row in held])
    codes = rng.integers(0, 256, (count, head_dim * coded.bits // 8), dtype=np.uint8)
    if coded.numbers == "e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    many = {"none": 0, "scale": 1, "range": 2}[coded.parameters]
    each = {"row": 1, "channels": head_dim // GROUP, "tokens": head_dim}[coded.each]
    beside = random_bytes(rng, (count, many * each), coded.parameter, dtype)
    if coded.each == "tokens":
        groups = beside[: count // GROUP].copy()
        return (
            codes,
            groups,
            np.stack(
                [
                    decoded(codes[i], as_numbers(groups[i // GROUP], coded.parameter, dtype), coded, head_dim)
                    for i in range(count)
                ]
            ),
        )
    numbers = [
        decoded(code, as_numbers(own, coded.parameter, dtype) if many else np.zeros(0), coded, head_dim)
        for code, own in zip(codes, beside, strict=True)
    ]
    return np.concatenate([codes, beside], axis=1), nothing, np.stack(numbers)


def decoded(codes: NDArray[np.uint8], parameters: NDArray[np.float64], coded: Coded, head_dim: int) -> Any:
    bits = int.from_bytes(codes.tobytes(), "little")
    found = []
    for channel in range(head_dim):
        code = bits >> channel * coded.bits & (2**coded.bits - 1)
        if coded.numbers == "signed":
            found.append(code - 256 * (code > 127))
        elif coded.numbers == "e4m3":
            exponent, mantissa = code >> 3 & 15, code & 7
            size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            found.append(-size if code > 127 else size)
        else:
            found.append(code if coded.numbers == "unsigned" else coded.numbers[code])
    numbers = np.array(found, np.float64)
    if coded.unit:
        numbers /= np.sqrt((numbers**2).sum() + 1e-16)
    if coded.parameters != "none":
        each = len(parameters) // (2 if coded.parameters == "range" else 1)
        place = np.arange(head_dim) * each // head_dim
        numbers = numbers * parameters[place]
        if coded.parameters == "range":
            numbers += parameters[each + place]
    return numbers


def cases(*pair: str) -> Iterator[tuple[int, int]]:
    """Head sizes, and queries of a list."""
    yield from zip((32, 64, 96, 128, 256), (3, 7, 1, 4, 2), strict=True)
    if all(coded is None or coded.bits == 8 for coded in map(KINDS.get, pair)):
        yield from ((20, 3), (80, 1))


@DTYPES
@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_rows_are_what_their_facts_say(key: str, value: str, dtype: torch.dtype) -> None:
    number = cpu.STORED[dtype]
    for head_dim, many in cases(key, value):
        (keys, groups, k), (values, _, v) = (
            rows_of(KINDS[kind], head_dim, dtype, n) for n, kind in enumerate((key, value))
        )
        pools = Guarded(keys), Guarded(values), Guarded(groups)
        sides = [(coded, part.shape[1]) for coded, part in zip((KINDS[key], KINDS[value]), (keys, values), strict=True)]
        kinds = [number if coded is None else coded.held(number) for coded, _ in sides]
        sizes = [(width, 0 if coded is None else head_dim * coded.bits // 8) for coded, width in sides]
        stored = *kinds, *sizes, 2 * head_dim * number.itemsize
        query = torch.randn(1, LISTS * many, 1, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
        used, first = np.array(USED), TOKENS * np.arange(LISTS)
        held = tuple(pool.address for pool in pools)
        logits = query.double().view(LISTS, many, head_dim).numpy() @ k.reshape(LISTS, TOKENS, -1).swapaxes(1, 2)
        scaling = 2 / np.abs(logits).max()
        near = {"rtol": 0, "atol": 4e-7 * np.abs(v).max() if dtype == torch.float32 else 4e-3 * np.abs(v).max()}
        index = np.random.default_rng(3).permuted(np.tile(np.arange(TOKENS), (1, LISTS, 1)), axis=2)[..., :70]
        index[index >= np.array(USED)[:, None]] = -1
        whole = np.stack([np.where(np.arange(TOKENS) < count, np.arange(TOKENS), -1) for count in USED])
        tier = *held, first, np.empty((LISTS, 0), np.int64), used, 0 * used, used
        listed = index, cpu.NO_BIAS, tier, cpu.NO_HOST, (0, 0, True), cpu.NO_EXTRA, stored
        for kernel, given, tokens in (
            (kernels.attend_resident, (used, first, 0 * used, held, stored), whole),
            (kernels.attend_lists, listed, index[0]),
        ):
            part = cpu.Part(kernel, 0, given)
            out, weights, _ = cpu.run(query, scaling, LISTS, [part], tokens.shape[1])
            for head in range(LISTS):
                asked = np.where(tokens[head] < 0, -np.inf, scaling * logits[head][:, tokens[head]])
                expected = np.exp(asked - asked.max(1, keepdims=True))
                expected /= expected.sum(1, keepdims=True)
                ours = weights.view(LISTS, many, -1)[head].double().numpy()
                np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
                ours = out.view(LISTS, many, -1)[head].double().numpy()
                np.testing.assert_allclose(ours, expected @ v[head * TOKENS + tokens[head]], **near)


@pytest.mark.parametrize(("bits", "numbers"), [(8, (0.0,) * 256), (3, (0.0,) * 16)])
def test_a_table_has_a_number_for_each_code(bits: int, numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(numbers)} numbers for codes of {bits} bits"):
        Coded(bits, numbers)
