"""Samples generated together: each is what it is alone, fails alone, and goes on alone."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import slow
from omegaconf import DictConfig

from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.batch import Sequence as Decoded
from kvbench.measure.job import PromptJob
from kvbench.measure.prompts import batches, prompt_of
from kvbench.measure.work import samples
from kvbench.memory.store import LayerStore
from kvbench.runs.run import largest_prompts, prepare
from kvbench.runs.sweep import run, run_shared
from kvbench.tasks import Sample, Timed

LENGTHS = "task.lengths=[260,330,400]"  # rows of unequal length
SAME = ("id", "prompt_tokens", "output", "output_ids", "scores", "error", "answers", "meta")
OF_A_ROW = ("attended_mean", "attended_max", "budget", "over_rule")


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., DictConfig]:
    def make(method: str, batch: int, *words: str) -> DictConfig:
        own = [f"method={method}", "budget=64", f"batch={batch}", f"results_dir={tmp_path / str(batch)}"]
        return composed("model=dummy-tiny", "dtype=float32", LENGTHS, "task.limit=6", "task.keys=2", *own, *words)

    return make


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by arm and sample, of which no other line tells."""
    files = list(folder.glob("runs/*/*/*/*/samples.jsonl"))
    lines = [(file.parts[-3], json.loads(line)) for file in files for line in file.read_text().splitlines()]
    found = {f"{arm}/{record['id']}": record for arm, record in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize(
    "method", ["quest", "icecache", *slow("full", "snapkv", "pariskv", "lychee", "clusterkv", "pqcache")]
)
def test_a_sample_of_a_batch_is_what_it_is_alone(configured: Any, tmp_path: Path, method: str) -> None:
    for batch in (1, 4):
        run(configured(method, batch))
    alone, together = records(tmp_path / "1"), records(tmp_path / "4")
    assert alone.keys() == together.keys() and len({record["prompt_tokens"] for record in alone.values()}) > 2
    for key, record in together.items():
        assert {name: record[name] for name in SAME} == {name: alone[key][name] for name in SAME}
        for name in OF_A_ROW:
            assert record["audit"][name] == pytest.approx(alone[key]["audit"][name])
        assert record["batch"] in (4, 2) and "batch" not in alone[key]
        held, held_alone = (
            one["audit"]["device_kv_bytes"] + one["audit"]["host_bytes"] for one in (record, alone[key])
        )
        assert held > 1.5 * held_alone, "bytes are the batch's"


def test_arms_that_share_a_prefill_share_it_of_batches_too(configured: Any, tmp_path: Path) -> None:
    for batch in (1, 4):
        run_shared([configured(method, batch) for method in ("full", "snapkv")])
    alone, together = records(tmp_path / "1"), records(tmp_path / "4")
    assert len(together) == 12 and all(record["shared_prefill"] for record in together.values())
    for key, record in together.items():
        assert {name: record[name] for name in SAME} == {name: alone[key][name] for name in SAME}
    run_shared([configured(method, 4, "task.limit=7") for method in ("full", "snapkv", "streaming_llm")])
    assert len(records(tmp_path / "4")) == 3 * 7, "one sample more of two arms, and all of the third"


def test_a_row_that_fails_takes_no_other_with_it_and_is_tried_again(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(configured("snapkv", 1))
    alone = records(tmp_path / "1")
    second = list(alone.values())[1]["id"]
    sizes, decode = list[int](), Decoded.decode

    def failing(sequence: Decoded) -> Decoded:
        sizes.append(len(sequence.generated))
        if second in sequence.engine.method.context.samples:
            raise FloatingPointError("the model's logits are NaN or infinite")
        return decode(sequence)

    with monkeypatch.context() as patch:
        patch.setattr(Decoded, "decode", failing)
        summary = run(configured("snapkv", 3))
    assert (summary["n"], summary["failed"], sizes) == (6, 1, [3, 1, 1, 1, 3])
    for key, record in records(tmp_path / "3").items():
        if record["id"] == second:
            assert record["error"].startswith("FloatingPointError") and set(record["scores"].values()) == {0.0}
        else:
            assert record["output_ids"] == alone[key]["output_ids"]
    assert run(configured("snapkv", 3))["failed"] == 0


def test_an_arm_keeps_no_keys_and_values_of_its_last_sample(configured: Any) -> None:
    def stores() -> int:
        gc.collect()
        return sum(isinstance(thing, LayerStore) for thing in gc.get_objects())

    arm, before = prepare(configured("quest", 1)), stores()
    (record,) = PromptJob(arm, [prompt_of(arm, next(samples(arm, 1)))]).run()
    assert not record["error"] and record["audit"]["device_kv_bytes"] and stores() == before


def test_memory_is_estimated_for_the_whole_batch(configured: Any) -> None:
    alone, together = (largest_prompts(configured("full", batch)) for batch in (1, 4))
    assert (alone.rows, together.rows) == (1, 4) and alone.tokens == together.tokens > 400


def test_only_samples_that_are_as_long_and_end_alike_are_put_together() -> None:
    def sample(name: str, tokens: int, prompt: str = "", **more: Any) -> Sample:
        return Sample(id=name, prompt=prompt, answers=(), max_new_tokens=tokens, **more)

    mixed = [sample("a", 8), sample("b", 9), sample("c", 8), sample("d", 8), sample("e", 8, stop=("\n",))]
    assert [[one.id for one in batch] for batch in batches(mixed, 2)] == [["a", "c"], ["b"], ["d"], ["e"]]
    assert [len(batch) for batch in batches(iter(mixed), 1)] == [1] * 5
    lengths = [sample(str(length), 8, "x" * length) for length in (40, 90, 50, 100, 63, 64)]
    assert [[one.id for one in batch] for batch in batches(lengths, 2)] == [["40", "50"], ["90", "100"], ["63"], ["64"]]
    with pytest.raises(ConfigError, match="batch=2: "):
        list(batches([sample("t", 8, timed=Timed([[1]]))], 2))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("task=fidelity", "task=fidelity measures each sample by itself"),
        ("task=latency", "task=latency measures each sample by itself"),
        ("probe.every=4", "probe.every=4 compares each sample by itself"),
    ],
)
def test_what_cannot_be_batched_is_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^batch=2: {reason}; expected 1$"):
        composed("model=dummy-tiny", "batch=2", word)
