"""A whole run: what it writes, and how the next start goes on from there."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from driver import slow
from hydra import compose, initialize_config_dir
from words import other

from kvbench.backends.run_config import RunConfig
from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ASSETS, ConfigError, conf_dir, shipped
from kvbench.engine.batch import Sequence as Decoded
from kvbench.models import hub
from kvbench.report.data.frame import collect
from kvbench.runs.command import command_of
from kvbench.runs.folder import ResultsError
from kvbench.runs.run import identity, open_folder, prepare
from kvbench.runs.sweep import run
from kvbench.spans import PARTS
from kvbench.tasks.fidelity import Fidelity

SAMPLES = 3
FIRST = "passkey-512-0-0"
TOKENS = 10  # new tokens of a passkey sample


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., RunConfig]:
    """Compose a small passkey run as the command line does, with some keys changed."""

    def make(*overrides: str) -> RunConfig:
        model = [] if any(word.startswith("model=") for word in overrides) else ["model=dummy-tiny"]
        small = ["task.lengths=[512]", f"task.limit={SAMPLES}", "budget=64", f"results_dir={tmp_path}"]
        words = [*small, *model, *overrides]
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return check(compose("config", words))

    return make


class Generated:
    """Samples that were generated for, in order; those in `broken` fail with their error."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.decode = Decoded.decode

    def __call__(self, sequence: Decoded) -> Decoded:
        sample = sequence.engine.method.context.samples[0]
        self.ids.append(sample)
        if sample in self.broken:
            raise self.broken[sample]
        return self.decode(sequence)

    def since(self) -> list[str]:
        """The ids since the last call."""
        ids, self.ids = self.ids, []
        return ids


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> Generated:
    calls = Generated()
    monkeypatch.setattr(Decoded, "decode", lambda sequence: calls(sequence))
    return calls


def folders(results: Path) -> list[Path]:
    return sorted(path.parent for path in results.glob("runs/**/run.yaml"))


def only_folder(results: Path) -> Path:
    (folder,) = folders(results)
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def state(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


@pytest.mark.usefixtures("ticking")
def test_run_writes_a_record_for_every_sample(tmp_path: Path, configured: Any, capsys: Any) -> None:
    summary = run(configured())
    folder = only_folder(tmp_path)
    assert folder.relative_to(tmp_path).parts[:4] == ("runs", "passkey", "dummy-tiny", "icecache-64")
    found = records(folder)
    assert len({record["id"] for record in found}) == len(found) == SAMPLES
    for record in found:
        assert record["error"] is None
        assert 500 < record["prompt_tokens"] <= 512
        assert record["group"] == "512"
        assert record["scores"]["accuracy"] in (0.0, 1.0)
        assert 1 <= len(record["output_ids"]) <= TOKENS
        assert 0 < record["ttft_s"] < record["tt2t_s"]
        assert 0 < record["tpot_ms"]["p50"] <= record["tpot_ms"]["p95"]
        assert record["tpot_ms"]["mean"] == pytest.approx(sum(record["breakdown_ms"].values()) + 2)
        assert set(PARTS) <= set(record["breakdown_ms"])
        audit = record["audit"]
        assert audit["budget"] == 64
        assert 48 <= audit["attended_mean"] <= audit["attended_max"] <= 64  # page slots, of which some are not full
        assert audit["over_rule"] is False
        assert audit["executor"] == "cpu"
        assert audit["dtype"] in ("float32", "bfloat16")  # dtype=auto
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["n"] == SAMPLES
    assert summary["failed"] == 0
    assert summary["score"] == pytest.approx(100 * sum(r["scores"]["accuracy"] for r in found) / SAMPLES)
    assert summary["audit"]["attended_max"] == max(record["audit"]["attended_max"] for record in found)
    assert summary["latency"]["ttft_s"] == pytest.approx(sum(record["ttft_s"] for record in found) / SAMPLES)
    assert state(folder) == "finished"
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert "accuracy" in printed


def test_a_folder_that_another_process_holds_is_refused_before_kernels_are_compiled(
    configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured()
    monkeypatch.setattr("kvbench.runs.sweep.load_kernels", lambda *_: pytest.fail("compiles"))
    with open_folder(prepare(config)), pytest.raises(ResultsError, match="in use"):
        run(config)


def test_every_stored_sample_is_read_before_the_weights_are(
    configured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is wrong with the last of them is said before a model loads, and of what a limit leaves out nothing."""

    def samples(self: Any, tokenizer: Any, seed: int) -> Any:
        yield from real(self, tokenizer, seed)
        raise ValueError("task.data_dir: the fourth row")

    real = Fidelity.samples
    monkeypatch.setattr(Fidelity, "samples", samples)
    monkeypatch.setattr("kvbench.backends.hf.loading._loaded", lambda *_: pytest.fail("reads weights"))
    words = ("task=fidelity", "task.lengths=[64]", "task.samples=3", "task.steps=4")
    for limit, fails in (("null", True), ("3", False)):
        config: Any = configured(*words, f"task.limit={limit}")
        with pytest.raises(ConfigError if fails else pytest.fail.Exception):
            prepare(config)


def test_run_folder_says_what_ran(tmp_path: Path, configured: Any) -> None:
    run(configured("seed=3"))
    written = yaml.safe_load((only_folder(tmp_path) / "run.yaml").read_text())
    assert written["config"]["seed"] == 3
    assert written["config"]["method"]["page_size"] == 16
    assert written["config"]["versions"].keys() >= {"kvbench", "torch", "transformers"}
    assert (written["config"]["model_name"], written["config"]["metric"]) == ("dummy-tiny", "accuracy")
    identity = written["identity"]
    assert identity["model_revision"] == "dummy-3"
    assert "results_dir" not in identity["config"]
    assert "limit" not in identity["config"]["task"]


def test_second_start_generates_nothing(tmp_path: Path, configured: Any, generated: Generated) -> None:
    first = run(configured())
    ids = generated.since()
    assert len(ids) == SAMPLES
    again = run(configured())
    assert generated.since() == []
    assert again == first
    assert [record["id"] for record in records(only_folder(tmp_path))] == ids


def test_interrupted_run_goes_on_with_the_sample_in_flight(
    tmp_path: Path, configured: Any, generated: Generated
) -> None:
    run(configured())
    ids = generated.since()
    reference = {record["id"]: record["output_ids"] for record in records(only_folder(tmp_path))}

    elsewhere = f"results_dir={tmp_path / 'again'}"
    generated.broken = {ids[1]: KeyboardInterrupt()}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        run(configured(elsewhere))
    folder = only_folder(tmp_path / "again")
    assert state(folder) == "stopped"
    assert not (folder / "summary.json").exists()

    generated.broken = {}
    generated.since()
    run(configured(elsewhere))
    assert generated.since() == ids[1:]
    assert state(folder) == "finished"
    assert {record["id"]: record["output_ids"] for record in records(folder)} == reference


@pytest.mark.parametrize(
    "error", [FloatingPointError("NaN in the logits"), MemoryError("too much"), RuntimeError("can't allocate memory")]
)
def test_failing_sample_is_recorded_and_retried(
    tmp_path: Path, configured: Any, generated: Generated, error: Exception
) -> None:
    generated.broken = {FIRST: error}
    summary = run(configured())
    assert len(generated.since()) == SAMPLES, "the run goes on"
    folder = only_folder(tmp_path)
    record = next(record for record in records(folder) if record["id"] == FIRST)
    assert record["error"] == f"{type(error).__name__}: {error}"
    assert record["scores"] == {"accuracy": 0.0}
    assert summary["failed"] == 1
    assert summary["n"] == SAMPLES
    assert state(folder) == "finished"

    generated.broken = {}
    summary = run(configured())
    assert generated.since() == [FIRST], "only the failed sample runs again"
    assert summary["failed"] == 0
    assert summary["n"] == SAMPLES
    assert records(folder)[-1]["error"] is None


def test_sample_whose_method_breaks_its_own_rule_fails(
    tmp_path: Path, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured()
    monkeypatch.setattr("methods.icecache.IceCache.rule", lambda *_: 1)
    summary = run(config)
    assert summary["failed"] == SAMPLES
    assert summary["audit"]["over_rule"] is True
    for record in records(only_folder(tmp_path)):
        assert record["error"].startswith("over_rule: layer ")
        assert record["scores"] == {"accuracy": 0.0}


def test_question_read_through_the_method_is_no_part_of_the_prefill(
    tmp_path: Path, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, decode = list[tuple[int, int]](), Decoded.decode

    def note(sequence: Decoded) -> Decoded:
        given.append((sequence.engine.lengths[0], sequence.to_come))
        return decode(sequence)

    monkeypatch.setattr(Decoded, "decode", note)
    run(configured("task.limit=1", "protocol.question=decode"))
    (record,) = records(only_folder(tmp_path))
    asked = len("What is the pass key? The pass key is")  # a byte is a token
    assert given == [(record["prompt_tokens"] - asked, asked + len(record["output_ids"]) - 1)]


def test_ids_that_a_score_goes_by_are_stored_and_score_the_same_again(tmp_path: Path, configured: Any) -> None:
    from kvbench.cli.score import rescore

    run(configured("task.limit=2", "task.variant=arkvale"))
    folder = only_folder(tmp_path)
    for record in records(folder):
        meta = record["meta"]  # a byte is a token
        assert bytes(meta["key_ids"]) == record["answers"][0].encode()
        assert len(meta["output_ids"]) == len(meta["key_ids"]) + 1
        assert record["scores"]["accuracy"] == float(meta["output_ids"][1:] == meta["key_ids"])
    assert rescore(folder).changed == []


def test_failed_sample_scores_zero(configured: Any, generated: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tasks.passkey.Passkey.score", lambda *_: {"accuracy": 1.0})
    generated.broken = {FIRST: FloatingPointError("NaN")}
    summary = run(configured("task.limit=2"))
    assert FIRST in generated.since()
    assert summary["score"] == 50
    assert summary["score_ok"] == 100


def test_a_run_says_how_its_models_weights_were_made(
    configured: Any, generated: Generated, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where kvbench fetched weights that others had made smaller; of any others it says nothing."""
    run(configured("task.limit=1"))
    assert "weights of" not in capsys.readouterr().out
    fetched = (shipped("model", "qwen2.5-coder-0.5b-instruct") or {})["fetch"]
    assert "twice" in hub.weights_origin(fetched["revision"]) and hub.weights_origin("another") == ""
    monkeypatch.setattr(hub, "weights_origin", lambda revision: "made small twice" * revision.startswith("dummy-"))
    run(configured("task.limit=2"))
    assert "weights of dummy-tiny: made small twice" in capsys.readouterr().out


def test_error_that_is_not_the_samples_stops_the_run(tmp_path: Path, configured: Any, generated: Generated) -> None:
    generated.broken = {FIRST: RuntimeError("a bug")}
    with pytest.raises(RuntimeError, match="a bug"):
        run(configured())
    assert records(only_folder(tmp_path)) == []
    assert state(only_folder(tmp_path)) == "interrupted"


def test_higher_limit_extends_the_same_run(tmp_path: Path, configured: Any, generated: Generated) -> None:
    run(configured("task.limit=1"))
    first = generated.since()
    summary = run(configured("task.limit=3"))
    second = generated.since()
    assert len(first) == 1
    assert len(second) == 2
    assert summary["n"] == 3
    assert [record["id"] for record in records(only_folder(tmp_path))] == first + second


def test_a_lower_limit_scores_the_first_samples_and_runs_none(
    tmp_path: Path, configured: Any, generated: Generated, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    scores = iter([1.0, 0.0, 0.0])
    monkeypatch.setattr("kvbench.tasks.passkey.Passkey.score", lambda *_: {"accuracy": next(scores)})
    whole = run(configured())
    generated.since()
    summary = run(configured("task.limit=1"))
    assert generated.since() == [] and (summary["n"], summary["score"]) == (1, 100)
    assert "task.limit=1: of the 3 samples" in capsys.readouterr().out
    folder = only_folder(tmp_path)
    assert json.loads((folder / "summary.json").read_text()) == whole and state(folder) == "finished"


def test_a_lower_limit_does_not_finish_a_longer_run_that_was_stopped(
    tmp_path: Path, configured: Any, generated: Generated
) -> None:
    """Those that it has may be its longest."""
    run(configured("task.limit=2"))
    stopped = only_folder(tmp_path)
    (stopped / "summary.json").unlink()
    (stopped / "status.json").write_text('{"state": "interrupted"}')
    generated.since()
    assert run(configured("task.limit=1"))["n"] == 1 and generated.since() == []
    assert len(records(stopped)) == 2
    assert state(stopped) == "interrupted" and not (stopped / "summary.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["method=full", "kv=kivi2"],
        ["method=snapkv", "kv.device=int8", "budget=0.1"],
        ["method=quest", "model=dummy-tiny", "model.config.max_position_embeddings=65536", "method.page_size=8"],
        ["method=quest", "backend=vllm", "backend.tensor_parallel=2"],
    ],
)
def test_the_command_that_makes_a_run_again_makes_the_same_one(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.backends.backend._VLLM.refuse", lambda *_: None)  # it need not be installed here

    def made_by(*words: str) -> dict[str, Any]:
        config = composed(*words)
        return {**config.resolved, "kv": config.kv._asdict()}

    config = made_by(*words, f"results_dir={tmp_path}")
    folder = tmp_path / "runs" / "task" / "model" / "arm" / "id"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"format": 1, "identity": {}, "config": config}, sort_keys=False))
    start, *again = shlex.split(command_of(folder).removeprefix("python -m "))
    assert start == "kvbench" and made_by(*again) == config


@pytest.mark.parametrize("name", ["tiny", "my model"])
def test_the_command_that_makes_a_run_again_names_a_model_s_folder_unless_kvbench_ships_it(
    name: str, tmp_path: Path
) -> None:
    """A folder of the user's may have the shipped one's name."""
    shutil.copytree(ASSETS / "tiny", tmp_path / name)
    folder = tmp_path / "runs" / "task" / "model" / "arm" / "id"
    folder.mkdir(parents=True)
    for words, said in ((["model=tiny"], False), ([f"model.path='{tmp_path / name}'"], True)):
        config = composed(*words, f"results_dir={tmp_path}")
        (folder / "run.yaml").write_text(yaml.safe_dump({"format": 1, "identity": {}, "config": dict(config.resolved)}))
        assert (f"model.path={tmp_path / name}" in shlex.split(command_of(folder))) is said


def test_samples_that_a_finished_run_lost_are_named_and_run_again(
    tmp_path: Path, configured: Any, generated: Generated, capsys: Any
) -> None:
    whole = run(configured())
    folder = only_folder(tmp_path)
    ids = generated.since()
    first, _, _ = (folder / "samples.jsonl").read_text().partition("\n")
    (folder / "samples.jsonl").write_text(first + "\n")
    capsys.readouterr()
    assert run(configured())["scores"] == whole["scores"]
    assert generated.since() == ids[1:] and state(folder) == "finished"
    told = next(line for line in capsys.readouterr().out.splitlines() if "missing" in line)
    assert told.startswith(f"{folder}: 2 of its 3 samples are missing; python -m kvbench model=dummy-tiny method=ice")
    assert told.endswith(f"budget=64 results_dir={tmp_path} runs them again")
    assert "task.lengths=[512]" in told.replace("'", "") and "task.limit=3" in told


def test_a_start_for_fewer_samples_does_not_finish_a_run_that_lost_some(tmp_path: Path, configured: Any) -> None:
    run(configured())
    folder = only_folder(tmp_path)
    first, _, _ = (folder / "samples.jsonl").read_text().partition("\n")
    (folder / "samples.jsonl").write_text(first + "\n")
    with pytest.raises(ResultsError, match="2 of its 3 samples are missing; .*task.limit=3"):
        run(configured("task.limit=1"))
    assert run(configured())["n"] == 3


NUMBERS = ["method.page_size=8", "budget=128", "task.lengths=[513]", "model=dummy-qwen3"]
MORE = slow("seed=1", "protocol.accounting=unified", "protocol.dense_layers=[0]", "method=topk")


@pytest.mark.parametrize("change", ["threads=1", "task.limit=1", *NUMBERS, *MORE])
def test_a_change_is_another_run_where_it_may_change_a_number(
    tmp_path: Path, configured: Any, generated: Generated, change: str
) -> None:
    runs = 1 if change in ("threads=1", "task.limit=1") else 2
    run(configured("task.limit=1"))
    run(configured("task.limit=1", change))
    assert len({folder.name for folder in folders(tmp_path)}) == len(generated.since()) == runs


@pytest.mark.slow
def test_edited_haystack_file_is_another_run(tmp_path: Path, configured: Any) -> None:
    haystack = tmp_path / "essays.txt"
    niah = ["task=niah", "task.subsets=[niah_single_2]", "task.lengths=[900]", f"task.haystack={haystack}"]
    for word in ("grass", "stone"):
        haystack.write_text(f"The {word} is there. " * 200)
        run(configured("task.limit=1", *niah))
    assert len(folders(tmp_path)) == 2


def test_a_length_that_no_prompt_fits_is_refused_before_weights_are_made(
    configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("made weights"))
    with pytest.raises(ConfigError, match="^task.lengths: 1 tokens are too few, a passkey prompt needs at least 248$"):
        run(configured("task.lengths=[1]"))


def test_prompt_beyond_the_window_is_refused_before_it_runs(configured: Any, generated: Generated) -> None:
    config = other(configured(), model={"config": {"max_position_embeddings": 515}})
    with pytest.raises(ConfigError, match="task.lengths"):
        run(config)
    assert generated.since() == []


def test_a_line_of_no_sample_of_the_task_is_named_by_run_and_report_and_counted_by_neither(
    tmp_path: Path, configured: Any
) -> None:
    everything = configured("task.limit=null", "task.lengths=[300]", "task.positions=1")
    run(everything)
    folder = only_folder(tmp_path)
    with open(folder / "samples.jsonl", "a") as file:
        file.write('{"id": "another", "error": null, "scores": {"accuracy": 1.0}}\n')
    with pytest.raises(ResultsError, match="1 lines are of no sample"):
        run(everything)
    (left_out,) = collect([tmp_path]).skipped
    assert left_out.why.startswith("samples.jsonl has 2 samples, and 1 when the run finished")


def test_what_a_file_says_of_itself_is_in_no_identity() -> None:
    made: Any = composed("method=full", "model=dummy-tiny", "task.lengths=[256]")
    arm = prepare(made)
    config = identity(arm)["config"]
    assert [group for group in ("backend", "method", "task") if "about" in config[group]] == []
    assert config["backend"]["name"] == "hf" and arm.config.backend.about
