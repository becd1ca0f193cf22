"""Coded keys and values against slow references written from the papers' formulas, number by number."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvbench.memory.codec import GROUP, Fp8, Int8, KiviKeys, KiviValues, packed, quantised

ROWS = arrays.arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32))


def _golden(tokens: int, channels: int, phase: float) -> torch.Tensor:
    """X(0, t, d; phase) of the published code's golden run, [tokens, channels]."""
    t, d = np.arange(tokens)[:, None], np.arange(channels)
    return torch.from_numpy((2 * np.sin(phase + 0.9 * t + 2.3 * d + 0.37 * t * d)).astype(np.float32))


def _slow_group(numbers: list[float], bits: int) -> tuple[list[int], float, float]:
    """KIVI's formula for one group."""
    least, most = min(numbers), max(numbers)
    scale = (most - least) / (2**bits - 1)
    codes = [round(min(max((x - least) / scale, 0), 2**bits - 1)) if scale else 0 for x in numbers]
    return codes, scale, least


@pytest.mark.parametrize(
    ("bits", "tokens", "words"),
    [
        (2, 16, [4162576431, 1008682961, 505228588, 3475796419]),
        (4, 8, [4179626494, 1349514503, 183831794, 2131095583]),
    ],
)
def test_kivi_key_codes_are_those_of_the_published_code(bits: int, tokens: int, words: list[int]) -> None:
    """It packs along tokens, here 4 to a group; the codes are the same."""
    keys = _golden(tokens, 4, 1).unflatten(0, (-1, 4))
    codes, scale, least = quantised(keys, -2, bits)
    own = packed(codes.flatten(0, 1).T.contiguous(), bits).numpy().view("<u4").ravel()
    assert own.tolist() == words
    if bits == 2:
        assert float(scale[0, 0, 0]) == pytest.approx(0.984091, abs=1e-6)
        assert float(least[0, 0, 0]) == pytest.approx(-1.059672, abs=1e-6)


def test_kivi_value_codes_are_those_of_the_published_code() -> None:
    """Packed along channels, here 8 to a group."""
    codes, _, _ = quantised(_golden(2, 16, 2).unflatten(-1, (-1, 8)), -1, 2)
    assert packed(codes.flatten(-2), 2).numpy().view("<u4").ravel().tolist() == [684924067, 634169142]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kivi_rows_hold_codes_scales_and_minima_where_a_kernel_looks_for_them(bits: int, dtype: torch.dtype) -> None:
    """Each number is read from the bytes by itself."""
    torch.manual_seed(0)
    rows = torch.randn(GROUP, 2 * GROUP).to(dtype)
    values, keys = KiviValues(2 * GROUP, dtype, bits), KiviKeys(2 * GROUP, dtype, bits)
    held = values.encode(rows)
    codes, parameters = keys.encode(rows)
    assert held.shape == (GROUP, values.width) and codes.shape == (GROUP, keys.width)
    assert values.width % 4 == keys.width % 4 == 0
    decoded, key = values.decode(held).float(), keys.decode(codes, parameters.expand(GROUP, 2, 2 * GROUP)).float()
    size, first, per_word = dtype.itemsize, 2 * GROUP * bits // 8, 32 // bits
    near = 1e-6 if dtype == torch.float32 else 2**-8

    def code_of(row: bytes, channel: int) -> int:
        word = struct.unpack_from("<I", row, 4 * (channel // per_word))[0]
        return int(word >> bits * (channel % per_word) & (2**bits - 1))

    def number(row: bytes, at: int) -> float:
        raw = row[at * size : (at + 1) * size].rjust(4, b"\0")
        return float(struct.unpack("<f", raw)[0])

    for token in range(0, GROUP, 7):
        row, key_row = bytes(held[token].numpy()), bytes(codes[token].numpy())
        for channel in (0, 1, 31, 32, 50, 63):
            own, group = rows.float(), channel // GROUP
            of_group = own[token, group * GROUP : (group + 1) * GROUP].tolist()
            _, scale, least = _slow_group(of_group, bits)
            assert number(row[first:], group) == pytest.approx(scale, rel=near)
            assert number(row[first:], 2 + group) == least
            x = code_of(row, channel) * number(row[first:], group) + least
            assert float(decoded[token, channel]) == pytest.approx(x, abs=4 * near)
            assert abs(float(own[token, channel]) - x) <= scale / 2 + 8 * near
            wanted, scale, least = _slow_group(own[:, channel].tolist(), bits)
            if dtype == torch.float32:
                assert code_of(key_row, channel) == wanted[token]
            x = code_of(key_row, channel) * scale + least
            assert float(key[token, channel]) == pytest.approx(x, abs=16 * near)


@given(ROWS)
def test_int8_is_within_half_a_step_of_its_row(numbers: np.ndarray) -> None:
    """Whatever the numbers; a row of zeros stays one."""
    rows = torch.from_numpy(numbers)
    codec = Int8(64, torch.float32)
    held = codec.encode(rows)
    assert held.shape == (3, 68)
    step = rows.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((codec.decode(held) - rows).abs() <= step * 0.501 + 1e-30).all())
    assert torch.equal(held[:, 64:].contiguous().view(torch.float32), step)


@given(ROWS)
def test_fp8_is_what_torch_casts_to(numbers: np.ndarray) -> None:
    """Of the row over its largest number, which becomes 448."""
    rows = torch.from_numpy(numbers)
    scale = rows.abs().amax(dim=1, keepdim=True) / 448
    wanted = torch.where(scale > 0, (rows / scale).to(torch.float8_e4m3fn).float() * scale, 0)
    decoded = Fp8(64, torch.float32).decode(Fp8(64, torch.float32).encode(rows))
    normal = scale[:, 0] > 1e-37
    assert torch.equal(decoded[normal], wanted[normal]) and bool(decoded.isfinite().all())


@given(ROWS, st.sampled_from([2, 4]))
def test_kivi_is_within_half_a_step_of_its_group(numbers: np.ndarray, bits: int) -> None:
    """A group of equal numbers is kept exactly, and steps below the least normal number are none."""
    rows = torch.from_numpy(numbers)
    codec = KiviValues(64, torch.float32, bits)
    groups = rows.unflatten(-1, (-1, GROUP))
    step = (groups.amax(dim=-1) - groups.amin(dim=-1)) / (2**bits - 1)
    error = (codec.decode(codec.encode(rows)) - rows).abs().unflatten(-1, (-1, GROUP)).amax(dim=-1)
    assert bool((error <= step * 0.501 + rows.abs().max() * 1e-6 + torch.finfo(torch.float32).tiny).all())
