"""Keys and values in fewer bits: whatever method reads them, from whichever tier."""

import math
from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, Case, Driven, drive, each_method, same_attended, slow, stream
from integrity import check

from kvbench.backends.hf.cache import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.config import ConfigError
from kvbench.engine.audit import attended_bytes
from kvbench.memory.codecs import Codecs
from kvbench.memory.grouped import GroupedTier
from kvbench.memory.kinds import KV, NATIVE, ROWS, kv_of
from kvbench.memory.store import LayerStore

INT8, FP8 = KV("int8", "int8"), KV("fp8", "fp8")
FIXED, WIDE = stream(150, 97, steps=6), stream(150, 97, steps=6, head_dim=32)
D = FIXED.keys.shape[-1]
ROW = 2 * (D + 4)  # bytes of a token's key and value in one KV head: codes, and a scale each
TURNED = KV("turboquant_3bit", "turboquant_3bit")  # keys and values of unequal width, keys turned
REST = [
    *(KV(kind, kind) for kind in ROWS if kind not in ("native", "int8", "turboquant_3bit")),
    KV("int4", "int4", key="int8", rotate="hadamard"),
    KV(value="turboquant_4bit"),
]


def rounded(part: torch.Tensor) -> torch.Tensor:
    """Numbers [..., D] as symmetric 8-bit integers with a scale a row give them back, by the formula."""
    scale = part.abs().amax(dim=-1, keepdim=True) / 127
    return (part / scale).round() * scale


@each_method
@pytest.mark.parametrize("kv", [INT8, *slow((TURNED,))], ids=str)  # kernels of their own, compiled for a test
def test_every_method_attends_what_the_codes_say(case: Case, kv: KV) -> None:
    """In every tier: against the oracle, which reads each token from where it lies."""
    oracle = drive(WIDE, case.build(), SMALL, kv=kv, executor="reference")
    for name in ("torch", "cpu"):
        fast = drive(WIDE, case.build(), SMALL, kv=kv, executor=name)
        check_equal(fast, oracle)
        check_bytes(fast, kv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "topk", "snapkv", "pqcache", "shadowkv", "racc", "think"])
@pytest.mark.parametrize("kv", REST, ids=str)
def test_any_kind_is_attended_as_its_codes_say(name: str, kv: KV) -> None:
    """As `auto` does: in place, but for kinds that no kernel reads; by methods whose tokens live in each way."""
    fast = drive(WIDE, method_named(name), SMALL, kv=kv)
    check_equal(fast, drive(WIDE, method_named(name), SMALL, kv=kv, executor="reference"))
    check_bytes(fast, kv)
    assert fast.audit["executor"] == ("torch" if "prod" in str(kv) else "cpu")


def check_equal(fast: Driven, oracle: Driven) -> None:
    assert same_attended(fast.seen, oracle.seen)
    torch.testing.assert_close(fast.outputs, oracle.outputs, rtol=0, atol=CLOSE)
    for store in fast.engine.stores.values():
        check(store)


def check_bytes(driven: Driven, kv: KV) -> None:
    """What is allocated, held and moved is the coded rows and nothing else."""
    audit, stores = driven.audit, driven.engine.stores.values()
    key, value = (codec.nbytes for codec in Codecs.of(kv, "device", 32, torch.float32))
    assert audit["device_kv_bytes"] % (key + value) == 0
    for store in stores:
        slots = len(store.device.pool.key)
        assert sum(part.untyped_storage().nbytes() for part in store.device.pool) == slots * (key + value)
        if store.host is not None:
            coded = store.host.key.untyped_storage().nbytes() + store.host.value.untyped_storage().nbytes()
            assert coded == store.host.present.numel() * (key + value)
    of_native = attended_bytes(driven.engine.shape, audit["attended_mean"], WIDE.steps)
    assert audit["attended_bytes_per_step"] == pytest.approx(of_native * (key + value) / (2 * 32 * 4))
    values_only = any(store.rebuilds_keys for store in stores)
    assert driven.engine.audit.moved_bytes % (value if values_only else key + value) == 0


def test_first_and_last_layers_stay_native_and_are_counted_so() -> None:
    kv, deep = kv_of("turboquant_3bit"), stream(60, steps=3, layers=6, head_dim=32)
    driven = drive(deep, method_named("full"), None, kv=kv)
    coded = Codecs.of(kv, "device", 32, torch.float32).nbytes
    each = [coded if layer in (2, 3) else 2 * 32 * 4 for layer in range(6)]
    assert [store.entry_bytes for store in driven.engine.stores.values()] == each
    assert driven.audit["device_kv_bytes"] == 63 * 2 * sum(each)
    check_equal(driven, drive(deep, method_named("full"), None, kv=kv, executor="reference"))
    assert [kv.of_layer(layer, 3, 0) != NATIVE for layer in range(3)] == [False, True, False]
    assert all(kv.of_layer(layer, 6, 1) == kv for layer in range(6)), "none, where layers have a window"


@pytest.mark.parametrize("kv", [INT8, FP8, KV("int8", "native"), KV("native", "fp8")], ids=str)
@pytest.mark.parametrize("name", ["full", "topk", "snapkv", "icecache", "pariskv", "racc"])
def test_a_method_with_room_for_everything_is_as_near_as_its_numbers(name: str, kv: KV) -> None:
    """To full attention in full precision; where no tier that it uses is coded, the same."""
    budget = None if name == "full" else 500
    expected = drive(FIXED, method_named("full"), None, executor="torch").outputs
    found = drive(FIXED, method_named(name), budget, kv=kv, executor="torch")
    home = found.engine.method.needs.home
    error = (found.outputs - expected).abs().max()
    step = {"native": 0, "int8": 4 / 127 / 2, "fp8": 4 / 16}[getattr(kv, home)]  # half of the largest step of a row
    assert error <= max(CLOSE, 3 * step)
    assert (error > CLOSE) == (step > 0)


def test_full_attention_over_int8_is_that_over_rounded_numbers() -> None:
    """Written from the formula, for prompt tokens and generated ones; the newest one is coded, too."""
    driven = drive(FIXED, method_named("full"), None, kv=INT8, executor="torch")
    for row, length in enumerate(FIXED.lengths):
        for step in range(FIXED.steps):
            seen = slice(0, length + step + 1)
            key, value = (rounded(part[1, row, :, seen]) for part in (FIXED.keys, FIXED.values))
            query = FIXED.queries[1, row, :, length + step].unflatten(0, (2, 2))
            weights = (query @ key.transpose(1, 2) / math.sqrt(D)).softmax(dim=2)
            torch.testing.assert_close(driven.outputs[step, 1, row], (weights @ value).flatten(0, 1))


def test_what_moves_between_tiers_of_one_kind_is_not_coded_again() -> None:
    """A token that leaves the device and comes back has the bytes that it had, however often."""
    store = LayerStore(1, 2, 16, 40, torch.bfloat16, torch.device("cpu"), on_drop="offload", kv=INT8)
    key, value = torch.randn(2, 1, 2, 30, 16).bfloat16()
    store.write_prompt(key, value, 0, [0])
    store.seal_prompt([30])
    store.encode()
    everyone = torch.arange(30).expand(1, 2, 30)
    first = store.device.pool.at(store.device.find(everyone)[0] + store.device.first[..., None])
    for turn in range(3):
        store.keep(everyone[..., turn::2])
        store.keep(everyone)
    check(store)
    again = store.device.pool.at(store.device.find(everyone)[0] + store.device.first[..., None])
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_moved_bytes_are_of_coded_rows() -> None:
    """As many tokens move as without codes, and each takes fewer bytes; keys that an index reads are held twice."""
    coded = drive(FIXED, method_named("pqcache"), SMALL, kv=INT8, executor="torch")
    engine = coded.engine
    assert engine.audit.moved_bytes == engine.audit.cache_misses * ROW > 0
    held = sum(store.host.present.sum() for store in engine.stores.values() if store.host is not None)
    assert coded.audit["host_bytes"] == held * ROW
    assert not any(part.dtype == torch.float32 for store in engine.stores.values() for part in store.tensors())
    indexed = drive(FIXED, method_named("icecache"), SMALL, kv=INT8, executor="torch")
    assert indexed.audit["host_bytes"] == held * (ROW + D * 4), "IceCache's trees read the keys where they lie"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"kv": "int3"}, "kv=int3: expected native | fp8 | int8 | int4 | "),
        ({"kv": {"disk": "int8"}}, "kv.disk=int8: no such key; one of device, host, key, value, "),
        ({"kv": {"host": "kivi2"}}, "kv.host=kivi2: expected native | fp8 | int8"),
        ({"kv": {"value": "int3"}}, "kv.value=int3: expected native | fp8 | int8"),
        ({"kv": {"value": "kivi4"}}, "kv.value=kivi4: codes values with their keys"),
        ({"kv": {"rotate": "hadamard"}}, "kv.rotate=hadamard: turns rows before they are coded"),
        (
            {"kv": {"device": "turboquant_3bit", "rotate": "hadamard"}},
            "kv.rotate=hadamard: turboquant_3bit turns",
        ),
        (
            {"kv": {"device": "int8", "native_layers": 3}},
            "kv.native_layers=3: no layer of the model's 4",
        ),
        ({"kv": {"device": "int8", "native_layers": -1}}, "kv.native_layers=-1: expected a whole number"),
        ({"kv": "kivi2", "method": "icecache", "budget": 64}, "kv=kivi2: IceCache keeps tokens on the host"),
        ({"kv": "kivi4", "method": "h2o", "budget": 64}, "kv=kivi4: H2O drops tokens out of their groups"),
        ({"kv": "kivi4", "method": "snapkv", "budget": 64, "accounting": "unified"}, "kv=kivi4: SnapKV drops tokens"),
        ({"kv": "int8", "attention": "flashinfer"}, "attention=flashinfer: reads no keys and values held as kv=int8; "),
    ],
)
def test_what_cannot_be_held_so_is_refused_in_a_line(tiny: Loaded, asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cache = KVCache(tiny.model, **{"method": "full", **asked})
        tiny.model.generate(torch.tensor([[5, 6, 7, 8]]), past_key_values=cache, max_new_tokens=1)
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)


def test_heads_that_fill_no_packed_row_or_cannot_be_turned_are_refused() -> None:
    assert [*INT8.unfit(6), *KV("int4").unfit(96), *KV("int4").unfit(None), *KV().unfit(6)] == []
    (why,) = KV("native", "int4").unfit(48)
    assert why.startswith("kv=native-int4: ") and "have 48" in why
    (why,) = KV("int8", rotate="hadamard").unfit(96)
    assert why.startswith("kv=int8-native-hadamard: ") and "96 channels" in why


@pytest.mark.parametrize(
    ("kv", "name"),
    [
        (kv_of("int8"), "int8"),
        (kv_of("kivi2"), "kivi2"),
        (KV("native", "int8"), "native-int8"),
        (KV("int8", "int8", value="int4"), "int8+int4"),
        (KV("kivi4", value="int8"), "kivi4+int8"),
        (kv_of("turboquant_4bit"), "turboquant_4bit"),
        (kv_of("turboquant_4bit")._replace(native_layers=0), "turboquant_4bit-ends0"),
        (KV("int4", "int4", rotate="hadamard", native_layers=1), "int4-hadamard-ends1"),
    ],
)
def test_a_name_says_all_in_which_kinds_differ(kv: KV, name: str) -> None:
    assert str(kv) == name and KV(**kv.stored()) == kv


def test_a_cache_of_codes_goes_through_generate_and_later_turns(tiny: Loaded) -> None:
    """The second turn attends decoded tokens of both tiers; the bytes are those of a native cache, but for the rows."""
    found = {}
    for kv in ("native", "int8"):
        cache = KVCache(tiny.model, method="pqcache", budget=32, dense_layers=(), kv=kv)
        out = tiny.model.generate(torch.arange(80)[None], past_key_values=cache, max_new_tokens=4, do_sample=False)
        out = torch.cat([out, torch.arange(5)[None]], dim=1)
        tiny.model.generate(out, past_key_values=cache, max_new_tokens=3, do_sample=False)
        found[kv] = cache.audit()
    assert found["int8"]["kv"] == "int8" and found["native"]["kv"] == "native"
    assert found["int8"]["executor"] == "cpu"
    native, coded = (found[kv]["host_bytes"] / found[kv]["turn_moved_bytes"] for kv in found)
    assert native == coded
    head_dim = tiny.model.config.head_dim
    assert found["int8"]["host_bytes"] * head_dim * 4 == found["native"]["host_bytes"] * (head_dim + 4)


KIVI = stream(260, 170, steps=40, head_dim=32)


def kivi(numbers: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """What KIVI makes of groups along `dim`, by the paper's formula."""
    least, most = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    scale = (most - least) / (2**bits - 1)
    return ((numbers - least) / scale).clamp(0, 2**bits - 1).round() * scale + least


def with_window(key: torch.Tensor, value: torch.Tensor, bits: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, n, D] of which the oldest are coded: groups of 32 go as the window would exceed 128."""
    coded, key, value = 0, key.clone(), value.clone()
    for tokens in range(prompt, key.shape[1] + 1):
        while tokens - coded > 128:
            group = slice(coded, coded + 32)
            key[:, group] = kivi(key[:, group], 1, bits)  # a channel of 32 tokens
            value[:, group] = kivi(value[:, group].unflatten(2, (-1, 32)), 3, bits).flatten(2)  # 32 channels of a token
            coded += 32
    return key, value


@pytest.mark.parametrize("bits", [2, 4])
def test_full_attention_over_kivi_is_that_over_the_papers_groups(bits: int) -> None:
    """Step by step, as groups leave the window; the prompt's own attention was in full precision."""
    driven = drive(KIVI, method_named("full"), None, kv=KV(f"kivi{bits}"), executor="torch")
    exact = drive(KIVI, method_named("full"), None, executor="torch")
    assert float((driven.outputs - exact.outputs).abs().max()) > 0.1 / 2**bits
    for row, length in enumerate(KIVI.lengths):
        for step in range(KIVI.steps):
            seen = slice(0, length + step + 1)
            key, value = with_window(*(part[1, row, :, seen] for part in (KIVI.keys, KIVI.values)), bits, length)
            query = KIVI.queries[1, row, :, length + step].unflatten(0, (2, 2))
            weights = (query @ key.transpose(1, 2) / math.sqrt(32)).softmax(dim=2)
            torch.testing.assert_close(driven.outputs[step, 1, row], (weights @ value).flatten(0, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "left"), [("adakv_snapkv", True), ("quest", False), *slow(("full", True), ("snapkv", False))]
)
def test_executors_agree_over_groups_of_what_a_method_keeps(name: str, left: bool) -> None:
    """What it drops at the prompt's end is in no group; memory of unknown length grows; bytes are the packed ones."""
    fixed = stream(400, 170, steps=36, head_dim=32)
    oracle, *others = (
        drive(fixed, method_named(name), 180, kv=KV("kivi2"), executor=to, left=left)
        for to in ("reference", "torch", "cpu")
    )
    for fast in others:
        assert same_attended(fast.seen, oracle.seen)
        torch.testing.assert_close(fast.outputs, oracle.outputs, rtol=0, atol=CLOSE)
    for store in others[-1].engine.stores.values():
        check(store)
        tier = store.device
        assert isinstance(tier, GroupedTier)
        room = len(tier.pool.key)
        codes, parameters = 2 * 32 * 2 // 8, 4 * 2  # of a key and a value; a scale and a minimum in float32
        packed = room * (codes + parameters) + room // 32 * 32 * parameters
        window = tier.used.numel() * 128 * 2 * 32 * 4
        assert store.allocated_bytes() == packed + window
        coded, whole = int(tier.coded.sum()), int((tier.used - tier.coded).sum())
        assert coded > 0
        assert store.resident_bytes() == coded * (codes + 2 * parameters) + whole * 2 * 32 * 4
