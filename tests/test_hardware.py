"""The floor by hand, bandwidths that are there, and how long a device was busy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

from kvbench.backends.hf.loading import Loaded, load
from kvbench.engine.audit import attended_bytes
from kvbench.measure import hardware
from kvbench.measure.hardware import bandwidth, floor_seconds, union_length
from kvbench.method import Shape

CPU = torch.device("cpu")


def shape(lengths: tuple[int, ...] = (100, 100), layers: int = 4, dense: int = 1) -> Shape:
    return Shape(layers, 8, 2, 16, lengths, torch.bfloat16, CPU, 0.25, tuple(range(dense, layers)))


def test_attended_bytes_by_hand() -> None:
    """2 rows of 100 tokens, 2 KV heads of 16 numbers in 2 bytes: an entry is 64 bytes. 9 steps see 105 tokens."""
    assert attended_bytes(shape(), 10.0, steps=9) == 2 * 2 * 64 * (3 * 10 + 1 * 105)
    assert attended_bytes(shape(dense=0), 10.0, steps=9) == 2 * 2 * 64 * 4 * 10
    assert attended_bytes(shape(dense=4), 0.0, steps=1) == 2 * 2 * 64 * 4 * 101, "a first step attends itself too"
    coded = {0: 20.0, 1: 36.5, 2: 36.5, 3: 36.0}
    assert attended_bytes(shape(), 10.0, 9, coded) == 2 * 2 * ((36.5 + 36.5 + 36) * 10 + 20 * 105), "by layer"
    assert attended_bytes(shape(lengths=(50, 150)), 10.0, steps=9) == attended_bytes(shape(), 10.0, steps=9)


def test_all_kv_by_hand() -> None:
    assert hardware.whole_kv_bytes(shape(lengths=(50, 150)), steps=9) == (50 + 150 + 2 * 9) * 4 * 2 * 64


def test_the_floor_by_hand() -> None:
    """16 GB of weights and 128 MB of KV at 3.2 TB/s: 5.04 ms."""
    assert floor_seconds(16e9, 0.128e9, 3.2e12) == pytest.approx(5.04e-3)


def test_weights_that_a_step_reads(dummies: Callable[[str], Loaded]) -> None:
    """An embedding that is the head too is read whole; of another one row a token."""
    plain = {
        "name": "small",
        "path": None,
        "weights": "dummy",
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 300,
            "max_position_embeddings": 64,
        },
    }
    # q, k, v, o; gate, up, down; three norms
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 32
    for tied, read in ((True, layer + 300 * 32), (False, layer + 300 * 32 + 3 * 32)):
        plain["config"]["tie_word_embeddings"] = tied  # type: ignore[index]
        model = load(plain, "cpu", "float32").model
        assert hardware.weight_bytes(model) == 4 * (layer + (1 if tied else 2) * 300 * 32)
        assert hardware.read_weight_bytes(model, rows=3) == 4 * read


def test_of_experts_a_step_reads_those_of_one_token_at_least() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 100, "tie_word_embeddings": True}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2))
    expert = 4 * 3 * 32 * 48
    for rows in (1, 3):
        assert hardware.weight_bytes(model) - hardware.read_weight_bytes(model, rows) == 2 * (8 - 2) * expert


def test_bandwidth_is_measured_once() -> None:
    first = bandwidth(CPU)
    assert 1e8 < first.copy < 1e13 and first.upload is None
    assert bandwidth(CPU) is first


def test_without_a_gpu_nothing_is_told_of_its_memory_and_its_work() -> None:
    hardware.restart_peak(CPU)
    assert hardware.peak_bytes(CPU) is None and not hardware.can_watch(CPU)


def test_streams_that_run_side_by_side_are_busy_once() -> None:
    assert union_length([]) == 0
    assert union_length([(5, 7), (0, 2)]) == 4
    assert union_length([(0, 10), (2, 3), (8, 12)]) == 12
    assert union_length([(0, 1), (1, 2)]) == 2


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_the_union_is_what_any_interval_covers(found: list[tuple[int, int]]) -> None:
    ranges = [(float(start), float(start + size)) for start, size in found]
    covered = {point for start, size in found for point in range(start, start + size)}
    assert union_length(ranges) == len(covered)
