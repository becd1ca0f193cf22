"""Coded keys and values against slow references written from the papers' formulas, number by number."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvbench.memory.codecs import Codecs
from kvbench.memory.codecs.codec import looked_up, packed, steps
from kvbench.memory.codecs.kivi import GROUP, Channels, Tokens, quantised
from kvbench.memory.codecs.rotated import haar, hadamard
from kvbench.memory.codecs.scaled import Fp8, Int8
from kvbench.memory.codecs.turboquant import _projection, table
from kvbench.memory.kinds import KV, PAPERS, PUBLISHED, ROTATIONS, kv_of

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "kivi2", "turboquant_3bit", "turboquant_mse4"])
def test_the_kernel_codes_a_new_token_as_torch_does_to_the_bit(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Codecs.of(kv_of(kind), "device", 64, dtype).value
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 20, 50)[:, None]
    rows[0], rows[1], rows[2, :5] = 0, 3, -0.0
    rows[3:20] = rows[3:20] / rows[3:20].abs().amax() * 7.5 // 0.5 * 0.5  # halfway between codes
    for source in (torch.float32, torch.bfloat16):
        ours = codec.encode(rows.to(source))
        with monkeypatch.context() as patch:
            patch.setattr("kvbench.kernels.codes.FEW", -1)
            assert torch.equal(ours, codec.encode(rows.to(source)))


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
    codes, scale, least = quantised(keys, -2, bits, torch.float32)
    own = packed(codes.flatten(0, 1).T.contiguous(), bits).numpy().view("<u4").ravel()
    assert own.tolist() == words
    if bits == 2:
        assert float(scale[0, 0, 0]) == pytest.approx(0.984091, abs=1e-6)
        assert float(least[0, 0, 0]) == pytest.approx(-1.059672, abs=1e-6)


def test_kivi_value_codes_are_those_of_the_published_code() -> None:
    """Packed along channels, here 8 to a group."""
    codes, _, _ = quantised(_golden(2, 16, 2).unflatten(-1, (-1, 8)), -1, 2, torch.float32)
    assert packed(codes.flatten(-2), 2).numpy().view("<u4").ravel().tolist() == [684924067, 634169142]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kivi_rows_hold_codes_scales_and_minima_where_a_kernel_looks_for_them(bits: int, dtype: torch.dtype) -> None:
    """Each number is read from the bytes by itself."""
    torch.manual_seed(0)
    rows = torch.randn(GROUP, 2 * GROUP).to(dtype)
    values, keys = Channels(2 * GROUP, dtype, bits), Tokens(2 * GROUP, dtype, bits)
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
    codec = Channels(64, torch.float32, bits)
    groups = rows.unflatten(-1, (-1, GROUP))
    step = (groups.amax(dim=-1) - groups.amin(dim=-1)) / (2**bits - 1)
    error = (codec.decode(codec.encode(rows)) - rows).abs().unflatten(-1, (-1, GROUP)).amax(dim=-1)
    assert bool((error <= step * 0.501 + rows.abs().max() * 1e-6 + torch.finfo(torch.float32).tiny).all())


D = 64
KEYS, VALUES = (_golden(2, D, phase) for phase in (1, 2))


@pytest.mark.parametrize(
    ("kind", "codes", "first", "second"),
    [
        ("turboquant_4bit", (120, 152, 5, 45, 136, 135, 105, 184), (1.666813, 0.024795, -0.861377, 1.717016), True),
        ("turboquant_3bit", (28, 41, 56, 228, 200, 177, 228, 88), (1.501836, -0.385535, -0.223355, 1.7733), False),
        ("turboquant_k8v4", (61, 170, 186, 64), (1.625, -0.3125, -1.25, 2.0), False),
    ],
)
def test_turboquant_keys_are_those_of_the_published_code(
    kind: str, codes: tuple[int, ...], first: tuple[float, ...], second: bool
) -> None:
    """Whose decoded numbers are float16."""
    codec = Codecs.of(kv_of(kind), "device", D, torch.float32).key
    held = codec.encode(KEYS)
    assert tuple(held[0, : len(codes)].tolist()) == codes
    decoded = codec.decode(held)
    assert decoded[0, :4].tolist() == pytest.approx(first, abs=1.1e-3)
    if second:
        assert decoded[1, :4].tolist() == pytest.approx((1.800326, -1.915411, 1.428566, -0.428635), abs=1.1e-3)
    if kind != "turboquant_k8v4":
        assert struct.unpack("<e", bytes(held[0, -2:].numpy())) == (11.3515625,)


@pytest.mark.parametrize(
    ("kind", "codes", "step", "decoded"),
    [
        ("turboquant_k3v4", (30, 186, 224, 39, 63, 230), 0.26611328, (1.731445, -1.728027, 0.666992, 0.933105)),
        ("turboquant_3bit", (71, 11, 47, 207, 140, 22), 0.5703125, (1.998047, -1.994141, 0.857422, 0.857422)),
    ],
)
def test_turboquant_values_are_those_of_the_published_code(
    kind: str, codes: tuple[int, ...], step: float, decoded: tuple[float, ...]
) -> None:
    codec = Codecs.of(kv_of(kind), "device", D, torch.float32).value
    held = codec.encode(VALUES)
    assert tuple(held[0, :6].tolist()) == codes
    assert struct.unpack("<ee", bytes(held[0, -4:].numpy())) == pytest.approx((step, -1.99414063))
    assert codec.decode(held)[0, :4].tolist() == pytest.approx(decoded, abs=1e-6)


@pytest.mark.parametrize(("head_dim", "sizes"), [(64, (100, 70, 62, 54)), (128, (196, 134, 118, 102))])
def test_turboquant_takes_as_many_bytes_as_published(head_dim: int, sizes: tuple[int, ...]) -> None:
    codecs = [Codecs.of(kv_of(kind), "device", head_dim, torch.bfloat16) for kind in PUBLISHED]
    row = torch.zeros(1, head_dim)
    assert tuple(codec.nbytes for codec in codecs) == sizes
    assert tuple(sum(part.numel() for part in codec.encode(row, row)) for codec in codecs) == sizes


def _slow_lloyd(row: np.ndarray, bits: int, rotation: np.ndarray, signs: np.ndarray | None) -> np.ndarray:
    """Algorithms 1 and 2 of the paper for one row: the nearest number of each turned channel, and turned back."""
    numbers = np.array(table(bits, len(row)))
    norm = np.linalg.norm(row)
    turned = row @ rotation / norm
    near = np.array([numbers[np.argmin([abs(channel - number) for number in numbers])] for channel in turned])
    if signs is not None:
        left = turned - near
        projected = np.array([1.0 if direction @ left >= 0 else -1.0 for direction in signs])
        near = near + np.sqrt(np.pi / 2) / len(row) * np.linalg.norm(left) * sum(
            sign * direction for sign, direction in zip(projected, signs, strict=True)
        )
    return near @ rotation.T * norm


@pytest.mark.parametrize("kind", PAPERS)
def test_the_papers_turboquant_is_its_algorithms_row_by_row(kind: str) -> None:
    """Up to the float16 of two norms."""
    torch.manual_seed(0)
    rows, codecs = 3 * torch.randn(20, D), Codecs.of(kv_of(kind), "device", D, torch.float32)
    rotation, bits = haar(D).double().numpy(), int(kind[-1])
    assert np.allclose(rotation @ rotation.T, np.eye(D), atol=1e-6)
    projection = _projection(D).double().numpy() if "prod" in kind else None
    for codec, less, signs in zip(codecs, (projection is not None, 0), (projection, None), strict=True):
        expected = [_slow_lloyd(row, bits - less, rotation, signs) for row in rows.double().numpy()]
        np.testing.assert_allclose(codec.decode(codec.encode(rows)), np.array(expected), atol=6e-3)


def test_signs_of_the_residual_take_the_bias_from_products() -> None:
    """Theorem 2: the mean over many keys of a product over the true one's is 1; the table alone gives less."""
    torch.manual_seed(0)
    keys = torch.randn(4000, D)
    queries = keys + torch.randn(4000, D)
    slopes = {}
    for kind in ("turboquant_mse3", "turboquant_prod3"):
        codec = Codecs.of(kv_of(kind), "device", D, torch.float32).key
        slopes[kind] = float((queries * codec.decode(codec.encode(keys))).sum() / (queries * keys).sum())
    assert slopes["turboquant_mse3"] < 0.975 and slopes["turboquant_prod3"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@given(numbers=arrays.arrays(np.uint8, (3, 32), elements=st.integers(0, 15)))
def test_packed_codes_come_back(numbers: np.ndarray, bits: int) -> None:
    codes = torch.from_numpy(numbers) % 2**bits
    held = packed(codes, bits)
    assert held.shape == (3, 4 * bits) and looked_up(held, bits, steps(bits)).tolist() == codes.tolist()


@pytest.mark.parametrize("kind", ["int4", "kivi2"])
def test_rotated_rows_are_those_of_the_inner_codec_turned_back(kind: str) -> None:
    """A channel that stands out spoils an even step for all others; turned, it does not."""
    torch.manual_seed(0)
    rows = torch.randn(GROUP, D)
    rows[:, 5] *= 50
    both = [Codecs.of(KV(kind, rotate=rotate), "device", D, torch.float32) for rotate in ROTATIONS]
    assert both[0].nbytes == both[1].nbytes
    plain, turned = (codecs.value for codecs in both)
    matrix = hadamard(D)
    assert torch.allclose(matrix @ matrix, torch.eye(D), atol=1e-6)
    expected = plain.decode(plain.encode(rows @ matrix)) @ matrix
    torch.testing.assert_close(turned.decode(turned.encode(rows)), expected, rtol=0, atol=1e-4)  # of numbers up to 50
