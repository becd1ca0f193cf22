"""Sweeps whose arms decode together: records as alone but without times, every sample once, and no arm ends another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import kvbench.measure.prompts
import kvbench.runs.sweep
from kvbench.backends.hf.runner import ModelRunner
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine import batch
from kvbench.engine.batch import Admission, Batch
from kvbench.measure.arm import Setup
from kvbench.method import Method
from kvbench.runs.progress import Reporter
from kvbench.runs.run import prepare
from kvbench.runs.sweep import run_arms, run_shared
from kvbench.runs.terminal import Console
from methods.quest import Quest

ARMS = (("full", "null"), ("quest", "64"), ("snapkv", "64"), ("icecache", "64"))
SAME = ("id", "output", "output_ids", "scores", "prompt_tokens", "answers", "error")
OF_A_ROW = ("attended_mean", "attended_max", "budget", "over_rule", "device_kv_bytes", "host_bytes")
WORDS = ("model=dummy-tiny", "dtype=float32", "task.lengths=[300,400]", "task.limit=4")


@pytest.fixture
def configs(tmp_path: Path) -> Callable[..., list[Any]]:
    def make(*words: str, folder: str = "together", arms: Any = ARMS) -> list[Any]:
        base = [*WORDS, f"results_dir={tmp_path / folder}", *words]
        base += ["sweep.shared_decode=false"] if folder == "alone" else []
        return [composed(f"method={method}", f"budget={budget}", *base) for method, budget in arms]

    return make


def records(root: Path) -> dict[str, dict[str, Any]]:
    """Records by arm and sample, each of which there is one of."""
    lines = [
        (path.parent.parent.name, json.loads(line))
        for path in root.glob("runs/*/*/*/*/samples.jsonl")
        for line in path.read_text().splitlines()
    ]
    found = {f"{arm}/{record['id']}": record for arm, record in lines}
    assert len(found) == len(lines)
    return found


def quiet(configs: list[Any]) -> list[dict[str, Any]]:
    return run_shared(configs, Console(quiet=True))


@pytest.mark.parametrize("words", [(), ("batch=3",), ("task.keys=2", "protocol.question=decode")])
def test_a_sample_is_what_it_is_alone_and_has_no_times(configs: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    for folder in ("together", "alone"):
        quiet(configs(*words, folder=folder))
    together, alone = records(tmp_path / "together"), records(tmp_path / "alone")
    assert together.keys() == alone.keys() and len(together) == 16
    for key, record in together.items():
        assert {name: record[name] for name in SAME} == {name: alone[key][name] for name in SAME}
        for name in OF_A_ROW:
            assert record["audit"][name] == pytest.approx(alone[key]["audit"][name])
        assert record["decode"] == "together" and "decode" not in alone[key] and record["shared_prefill"]
        assert not {"tpot_ms", "ttft_s", "tt2t_s", "prefill_ms"} & record.keys()
        assert record["breakdown_ms"]["attention"] > 0 and not {"model", "other"} & record["breakdown_ms"].keys()


def test_how_tokens_were_decoded_is_part_of_what_a_run_is(configs: Any, tmp_path: Path) -> None:
    """And of one that decoded alone nothing is new."""
    for folder in ("together", "alone"):
        quiet(configs(folder=folder, arms=ARMS[:1]))
    found = {}
    for folder in ("together", "alone"):
        (path,) = (tmp_path / folder).glob("runs/*/*/full/*/run.yaml")
        found[folder] = OmegaConf.to_container(OmegaConf.load(path)), path.parent.name
    (together, one), (alone, other) = found["together"], found["alone"]
    assert one != other and (together["config"]["decode"], alone["config"]["decode"]) == ("together", "alone")
    assert together["identity"] == {**alone["identity"], "decode": "together"}


def test_fidelity_compares_with_full_attention_beside_it(configs: Any, tmp_path: Path) -> None:
    words = ("task=fidelity", "task.lengths=[300]", "task.samples=2", "task.steps=6", "~task.limit")
    for folder in ("together", "alone"):
        quiet(configs(*words, folder=folder, arms=ARMS[:3]))
    together, alone = records(tmp_path / "together"), records(tmp_path / "alone")
    assert together.keys() == alone.keys() and len(together) == 6
    for key, record in together.items():
        one, other = record["fidelity"], alone[key]["fidelity"]
        for name in ("kl", "nll", "nll_full"):
            assert one["steps"][name] == pytest.approx(other["steps"][name], abs=1e-4)
        assert (one["kl_mean"] > 1e-4) == (not key.startswith("full/"))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("batch=3",),
        ("task.keys=2", "protocol.question=decode"),
        ("task=fidelity", "task.lengths=[300]", "task.samples=2", "task.steps=6", "~task.limit"),
    ],
)
def test_how_much_is_left_is_known_with_the_first_pass_and_nothing_is_left_at_the_end(
    configs: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    reports, first = list[Reporter](), list[float | None]()
    init, rows = Reporter.__init__, Reporter.rows

    def noted(self: Reporter, count: int, seconds: float) -> None:
        rows(self, count, seconds)
        first.append(self.joint_decode.remaining(1.0))

    monkeypatch.setattr(Reporter, "__init__", lambda self, *all: (reports.append(self), init(self, *all))[1])
    monkeypatch.setattr(Reporter, "rows", noted)
    quiet(configs(*words, arms=ARMS[:3]))
    together = reports[0].joint_decode
    assert first[0] is not None and first[0] > 0
    assert together.read == pytest.approx(1) and together.expected == together.decoded > 0


def test_answers_to_one_prompt_are_drawn_as_alone(configs: Any, tmp_path: Path) -> None:
    words = ("protocol.temperature=0.8", "protocol.samples=3", "task.limit=2", "probe.every=2")
    for folder in ("together", "alone"):
        quiet(configs(*words, folder=folder, arms=ARMS[1:3]))
    together, alone = records(tmp_path / "together"), records(tmp_path / "alone")
    assert together.keys() == alone.keys() and len(together) == 12
    for key, record in together.items():
        assert record["output_ids"] == alone[key]["output_ids"] and record["decode"] == "together"
        assert record["probe"]["mass"] == pytest.approx(alone[key]["probe"]["mass"], abs=1e-4)


@pytest.mark.parametrize("limit", ["rows", "bytes", "nothing"])
def test_samples_wait_until_there_is_room(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """One generation goes on whatever the estimate says; where all fit, all are there at once."""
    rows = list[int]()
    real = Batch.step

    def noted(self: Batch) -> Any:
        rows.append(self.rows)
        return real(self)

    monkeypatch.setattr(Batch, "step", noted)
    if limit == "rows":
        monkeypatch.setattr(batch, "MOST_ROWS", 3)
    elif limit == "bytes":
        monkeypatch.setattr(Setup, "room", 1.0)
    quiet(configs())
    assert len(records(tmp_path / "together")) == 16
    assert max(rows) == {"rows": 3, "bytes": 1, "nothing": 16}[limit]


def test_what_full_attention_says_of_given_tokens_counts_as_memory(
    configs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[tuple[Any, float]]()
    real = Batch.admit

    def noted(self: Batch, begin: Any, rows: int, going: Admission) -> None:
        shared: Any = next(iter(going.memory))
        counted.append((shared, going.memory[shared] - shared.prefilled.nbytes))
        real(self, begin, rows, going)

    monkeypatch.setattr(Batch, "admit", noted)
    quiet(
        configs("task=fidelity", "task.lengths=[100]", "task.steps=6", "task.samples=1", "~task.limit", arms=ARMS[:1])
    )
    assert len(counted) == 2
    for shared, size in counted:
        assert size == sum(one.nbytes for one in shared.reference) > 0


def test_the_estimate_follows_the_rule_of_the_method(configs: Any) -> None:
    arms = [prepare(config) for config in configs()]
    full, quest, snapkv, icecache = (arm.row_bytes([1000], 8, index_share=0.0) for arm in arms)
    assert full < quest == snapkv < icecache
    assert arms[1].row_bytes([1000], 8) > quest, "an index that nobody has seen takes something"


def test_a_prefill_waits_for_the_memory_that_the_last_one_took(configs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values twice, while they are copied, with what methods are shown beside them."""
    required, taken, real = list[float](), list[tuple[int, float]](), kvbench.runs.sweep.SharedPrompts

    def noted(arms: Any, prompts: Any, *progress: Any) -> Any:
        shared = real(arms, prompts, *progress)
        taken.append((len(prompts[0].ids), shared.nbytes))
        return shared

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", noted)
    monkeypatch.setattr(Batch, "clear", lambda self, size, rows: required.append(size))
    quiet(configs("task.lengths=[300]", "task.limit=2", arms=ARMS[:1]))
    (first, size), (second, _) = taken
    assert len(required) == 4 and required[2] == pytest.approx(2 * size * second / first)


def test_a_stopped_sweep_goes_on_with_what_each_arm_lacks(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, real = 0, Batch.step

    def stopping(self: Batch) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        return real(self)

    first = ("task=niah", "task.subsets=[niah_single_1]", "task.samples=4", "task.max_new_tokens=4")
    first = (*first, "task.lengths=[1000]")
    with monkeypatch.context() as patch:
        patch.setattr(batch, "MOST_ROWS", 6)
        patch.setattr(Batch, "step", stopping)
        with pytest.raises(KeyboardInterrupt):
            quiet(configs(*first))
    before = records(tmp_path / "together")
    assert 0 < len(before) < 16
    quiet(configs(*first))
    after = records(tmp_path / "together")
    assert len(after) == 16 and {key: after[key] for key in before} == before
    monkeypatch.setattr(Batch, "step", stopping)
    quiet(configs(*first))
    assert records(tmp_path / "together") == after, "nothing was left to do"


@pytest.mark.parametrize(("error", "ends"), [(FloatingPointError("no number"), False), (RuntimeError("a bug"), True)])
def test_what_goes_wrong_in_an_arm_stays_there(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, ends: bool
) -> None:
    """In the first of its samples: that sample fails, or the arm ends with what it has; all others go on."""
    real, seen = Quest.select, list[str]()

    def failing(self: Quest, layer: int, query: torch.Tensor) -> Any:
        seen.extend(self.context.samples)
        if self.context.samples[0] == seen[0]:
            raise error
        return real(self, layer, query)

    monkeypatch.setattr(Quest, "select", failing)
    outcomes = run_arms(configs(), Console(quiet=True))
    assert [outcome.error for outcome in outcomes] == [None, error if ends else None, None, None]
    found = records(tmp_path / "together")
    failed = [key for key, record in found.items() if record["error"]]
    assert failed == ([] if ends else [f"quest-64/{seen[0]}"])
    assert len([key for key in found if not key.startswith("quest")]) == 12
    monkeypatch.undo()
    assert [one["failed"] for one in quiet(configs())] == [0] * 4, "tried again"


def test_rows_of_a_batch_that_fails_are_tried_one_by_one(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Quest.select, set[str]()

    def failing(self: Quest, layer: int, query: torch.Tensor) -> Any:
        seen.update(self.context.samples)
        if sorted(seen)[0] in self.context.samples:
            raise FloatingPointError("no number")
        return real(self, layer, query)

    monkeypatch.setattr(Quest, "select", failing)
    summaries = quiet(configs("batch=2"))
    assert [(one["n"], one["failed"]) for one in summaries] == [(4, 0), (4, 1), (4, 0), (4, 0)]
    assert sum("batch" in record for record in records(tmp_path / "together").values()) == 4 * 4 - 2


def test_too_little_memory_waits_for_others_to_leave(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the estimate does not know; a generation that is alone and has no room fails its sample."""
    going = 0

    class Crowded(Batch):
        def join(self, *sequence: Any) -> None:
            super().join(*sequence)
            nonlocal going
            going = self.rows

        def step(self) -> Any:
            nonlocal going
            left = super().step()
            going = self.rows
            return left

    def begin(self: Method, *given: Any) -> None:
        if going > 2:
            raise MemoryError("no room")
        real(self, *given)

    real = Method.begin
    monkeypatch.setattr(batch, "Batch", Crowded)
    monkeypatch.setattr(Method, "begin", begin)
    summaries = quiet(configs(arms=ARMS[1:3]))
    assert [(one["n"], one["failed"]) for one in summaries] == [(4, 0)] * 2


def test_a_prefill_that_fails_fails_its_sample_in_every_arm(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvbench.runs.sweep.SharedPrompts

    def failing(arms: Any, prompts: Any, *progress: Any) -> Any:
        if prompts[0].sample.id.endswith("-0-0"):
            raise MemoryError("no room")
        return real(arms, prompts, *progress)

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", failing)
    summaries = quiet(configs())
    assert len({summary["failed"] for summary in summaries}) == 1 and summaries[0]["failed"] >= 1


@pytest.mark.parametrize("folder", ["together", "alone"])
def test_a_prefill_for_all_arms_says_how_far_it_is(configs: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each chunk: a long prompt is read for many minutes."""
    told = list[tuple[int, int]]()
    monkeypatch.setattr(Reporter, "tokens", lambda report, *now: told.append(now))
    quiet(configs("task.lengths=[300]", "task.limit=1", "protocol.prefill_chunk=128", folder=folder, arms=ARMS[:2]))
    (total,) = {total for _, total in told[:3]}
    assert [done for done, _ in told[:2]] == [128, 256] and 256 < told[2][0] < total


def test_a_sample_that_no_protocol_can_run_loses_none_before_it(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvbench.measure.prompts.prompt_of

    def refusing(arm: Any, sample: Any) -> Any:
        if len(seen) == 2:
            raise ConfigError("task: no room for it")
        seen.append(sample.id)
        return real(arm, sample)

    seen: list[str] = []
    monkeypatch.setattr(kvbench.measure.prompts, "prompt_of", refusing)
    with pytest.raises(ConfigError):
        quiet(configs())
    assert {key.partition("/")[2] for key in records(tmp_path / "together")} == set(seen)


def test_what_cannot_go_together_goes_alone_and_says_so(
    configs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelRunner, "alone", lambda runner: "of a reason")
    run_shared(configs("task.limit=1", arms=ARMS[:2]), Console(width=200))
    assert capsys.readouterr().out.count("decodes alone: of a reason") == 2
    assert all(record["tpot_ms"] for record in records(tmp_path / "together").values())


def test_timed_tasks_and_others_who_measure_never_share(configs: Any) -> None:
    def of(*words: str) -> bool:
        return configs(*words, arms=ARMS[:1])[0].decodes_jointly  # type: ignore[arg-type]

    assert of() and not of("sweep.shared_decode=false") and not of("sweep.shared_prefill=false")
    assert not composed("task=latency").decodes_jointly  # type: ignore[arg-type]
