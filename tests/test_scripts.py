"""Every script runs at its smallest size and prints its ratios; those of papers measure what a slow reading says.

gpu_check.py, gpu_cells.py, predict_gpu.py, compact_runs.py, method_table.py, fill_tables.py and slurm_local.sh have
tests of their own; bench_serving.py needs vLLM, and so does half of bench_capacity.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_capacity
import capture_trace
import drift_pariskv
import measure_captured
import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.backends.vllm.plan import Plan
from kvbench.config import ASSETS, ConfigError

SCRIPTS = Path(__file__).parents[1] / "scripts"
TRACED = ["model=dummy-tiny", "task=passkey", "task.lengths=[300]", "dtype=float32"]

slow = pytest.mark.slow

# Words that make a script quick, and the numbers by which its result is quoted: keys of the printed object, * for all.
CHECKED = {
    "bench_chat": ("--methods full quest --budget 64 --context 200 --turns 2 --turn 8 --answer 3", ["ratio.*"]),
    "bench_faiss": (
        "--n 2000 --dim 32 --queries 3 --k 10 --arms IVFPQ-code HNSW-code",
        [f"runs.0.arms.*.{column}" for column in ("build", "search", "memory", "accuracy")],
    ),
    "bench_index": (
        "--kinds clustered --lengths 2100 --groups 2 --k 10 --pages 2 --dim 32",
        ["runs.0.build_speedup", "runs.0.groups.*.recall_at_15", "runs.0.pages.*.mass", "runs.0.presets.*.recall"],
    ),
    "bench_lychee": (
        "--lengths 512 --heads 2 --dim 32 --queries 2 --budget 64 --repeats 1 --model-lengths 512 --steps 3 --samples 1"
        " --document 300",
        [
            *(f"index.0.{name}" for name in ("build_ratio", "search_over_scan", "bytes_over_kv.*", "recall.*")),
            *("model.0.build_share.full", *(f"model.0.{name}_share" for name in ("retrieval", "selection", "update"))),
            "structure.*.gain.quest.scores.*",
        ],
    ),
    "bench_overhead": (
        "--model dummy-tiny --contexts 1024 --bursts 1 --steps 2",
        ["time_ratio_1k", "mem_ratio", "same_tokens"],
    ),
    "bench_sweep": (
        "--model tiny --lengths 300 --methods full quest --budget 64 --new-tokens 4 --answers 4 --logits",
        [
            *(f"tiny.300.named.{name}" for name in ("ratio", "decode_ratio", "rows.mean", "together.tokens")),
            *("tiny.logits.largest.*", "tiny.answers.equal"),
        ],
    ),
    "drift_pariskv": (
        "--steps 8 --every 4 --prompt 3200 --dim 16 --parts {parts} model=dummy-tiny task.lengths=[3200]",
        ["captured.late_over_early.*", "drifting.late_over_early.*", "captured.drift"],
    ),
    "measure_captured": (
        "--model dummy-tiny --texts 1 --length 600 --further 1100 --queries 2",
        [*(f"texts.0.{name}.*" for name in ("pages", "recall", "windows", "bounds"))],
    ),
    "measure_racc": (
        "--samples 1 --arms lilo lilo_racc lilo_racc_free --length 400 --needles 2 --tokens 30",
        ["gain.lilo_racc", "time_ratio.lilo_racc_free", "arms.*.attended"],
    ),
}

QUICK = ("bench_faiss",)


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts own their process: threads, what they compile, and how files are written."""
    monkeypatch.setattr(os, "fsync", os.fsync)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ran(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The object that a script printed last, run here."""
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    script.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def at(result: Any, path: str) -> list[float]:
    """The numbers at a path of keys and indices."""
    here = [result]
    for key in path.split("."):
        items = [(of.items() if isinstance(of, dict) else enumerate(of)) for of in here]
        here = [value for of in items for name, value in of if key in ("*", str(name))]
    return here


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] * (name not in QUICK)) for name in CHECKED])
def test_a_script_prints_the_numbers_that_pages_quote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, paths = CHECKED[name]
    result = ran(name, words.format(parts=tmp_path).split(), monkeypatch, capsys)
    for path in paths:
        numbers = at(result, path)
        assert numbers and all(math.isfinite(number) and number >= -100 for number in numbers), path


@slow
def test_steps_are_timed_with_what_lies_in_compiled_code() -> None:
    """In a process of its own, in which it wraps compiled functions."""
    words = "--model dummy-tiny --cells 300:64 --methods quest --dtypes float32 --steps 3 --compiled --kv native int8"
    command = [sys.executable, SCRIPTS / "bench_decode.py", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (cell,) = json.loads(done.stdout.splitlines()[-1])["float32"].values()
    for kv in ("native", "int8"):
        report = cell["quest"][kv]
        assert report["full"]["rest_over_full"] > 0 and 0 < report["compiled_share"] < 1
        assert report["rest_over_must_read"] > 0 and math.isfinite(report["tpot_over_first"])


def test_json_texts_are_as_long_as_asked_and_hold_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--model", "tiny", "--texts", "2", "--tokens", "300"])
    importlib.import_module("json_texts").main()
    texts = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert texts.keys() == {"objects-0.txt", "lines-0.txt"}
    assert all(sum("note" in record for record in records) == 4 for records in texts.values())


@slow
def test_the_small_model_s_card_is_written_from_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("measure_tiny_model")
    shutil.copytree(ASSETS / "tiny", tmp_path / "tiny")
    for name, value in {"LENGTHS": (400,), "ABLATED": 400, "METHODS": [("quest", 64)]}.items():
        monkeypatch.setattr(script, name, value)
    found = ran("measure_tiny_model", [str(tmp_path / "tiny"), "--samples", "1", "--threads", "1"], monkeypatch, capsys)
    card = (tmp_path / "tiny" / "README.md").read_text()
    assert f"| passkey | {found['accuracy']['passkey/400']['score']:.0f} ± " in card and "| quest 64 |" in card
    assert len(found["mass"]) == 6 and all(0 < mass <= 1 for mass in found["mass"].values())


@slow
def test_notebooks_are_kept_with_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("run_notebooks")
    path = tmp_path / "notebooks" / "sum.ipynb"
    path.parent.mkdir()
    cells = [nbformat.v4.new_code_cell("import sys; print('noise', file=sys.stderr); 20 + 3")]
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=about), path)
    monkeypatch.setattr(script, "FOLDER", path.parent)
    monkeypatch.setattr(sys, "argv", ["run_notebooks.py"])
    script.main()
    (cell,) = nbformat.read(path, as_version=4).cells
    assert [output.get("data", {}).get("text/plain") for output in cell.outputs] == ["23"]


def test_a_served_method_s_numbers_are_over_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")  # which the script sets as it is loaded
    bench_serving = importlib.import_module("bench_serving")
    turns = [{"tokens_per_s": 10.0, "ttft_s": [1.0, 3.0], "tpot_ms": [20.0, 40.0]}]
    method, own = bench_serving.summary(turns), bench_serving.summary([{**turns[0], "tokens_per_s": 40.0}])
    assert (method["ttft_s_p50"], method["tpot_ms_p50"]) == (2, 30)
    assert bench_serving.over(method, own) == {"tokens_per_s_ratio": 0.25, "ttft_ratio": 1, "tpot_ratio": 1}
    assert sorted(map(len, bench_serving.requests_of(3, 100, 300))) == [100, 200, 300]


# -- requests at once in equal memory ----------------------------------------------------------------------------------

PART = bench_capacity.Part(
    "vllm", "tiny", 512, 8, "snapkv", 0, "float32", 64, answer=16, requests=40, clients=9, lengths="equal", chunk=256
)  # fmt: skip


def test_requests_are_all_as_long_or_as_in_the_trace() -> None:
    equal = PART.drawn_requests()
    assert {(len(one.prompt), one.answer) for one in equal} == {(512, 16)} and len(equal) == 40
    drawn = dataclasses.replace(PART, lengths="conversation").drawn_requests()
    for own, quantiles, longest in (
        ([len(one.prompt) for one in drawn], bench_capacity.PROMPTS, 512),
        ([one.answer for one in drawn], bench_capacity.ANSWERS, 16),
    ):
        wanted = [size * longest // quantiles[-1] for size in quantiles]
        assert max(own) == longest and sorted(own) == sorted(2 * [max(2, size) for size in wanted])


class Counter:
    """Serves requests a token at a time, as many as it has seats for."""

    def __init__(self, seats: int) -> None:
        self.seats, self.most = seats, 0
        self.waiting: list[str] = []
        self.running: dict[str, int] = {}

    def send(self, name: str, request: Any) -> None:
        self.waiting.append(name)
        self.most = max(self.most, len(self.waiting) + len(self.running))

    def step(self, requests: Any) -> tuple[Any, list[str]]:
        while self.waiting and len(self.running) < self.seats:
            name = self.waiting.pop(0)
            self.running[name] = requests[name].answer
        rows = len(self.running)
        for name in self.running:
            self.running[name] -= 1
            requests[name].came(1, 0.0)
        ended = [name for name, left in self.running.items() if not left]
        for name in ended:
            del self.running[name]
        return bench_capacity.Step(0.5, rows, rows, True, rows, 0), ended


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_a_client_asks_again_when_it_is_answered_until_all_is(answers: list[int], clients: int, seats: int) -> None:
    requests, served = [bench_capacity.Request([1], answer) for answer in answers], Counter(seats)
    steps = bench_capacity.closed_loop(served, requests, clients)
    assert [one.tokens for one in requests] == answers
    assert served.most == min(clients, len(answers)), "no client waits without having asked, or asks twice"
    found = bench_capacity.over_time(steps)
    assert found["tokens"] == sum(answers) and found["tokens_per_s"] == pytest.approx(2 * found["at_once_mean"])


def test_rates_of_passes_without_prompts_stand_apart() -> None:
    read, alone = bench_capacity.Step(3.0, 4, 2, False, 9, 1), bench_capacity.Step(1.0, 2, 2, True, 5, 0)
    found = bench_capacity.over_time([read, alone])
    assert (found["tokens_per_s"], found["decode_tokens_per_s"]) == (1, 2)
    assert (found["at_once_mean"], found["decode_at_once"], found["at_once_peak"]) == (3.5, 2, 4)
    assert found["decode_share"] == 0.25


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm"])
def test_seats_are_as_many_as_fit_while_one_prompt_is_read(method: str) -> None:
    """Of the small model, all of whose layers are sparse: 640 tokens while one is read, 128 and what is kept after."""
    row, requests = 2 * 6 * 2 * 64 * 4, PART.drawn_requests()  # a token of 6 layers with 2 heads, float32
    plan = Plan(method, PART.budget, dense_layers=())

    def seats(memory: int, plan: Plan | None) -> int:
        return dataclasses.replace(PART, memory=memory).seats(requests, plan)

    for memory in (6, 8, 9, 10):
        freed, full = seats(memory, plan), seats(memory, None)
        rows = memory * 2**20 / row - 128  # a block is empty
        assert full * 640 <= rows < (full + 1) * 640
        assert freed == seats_by_hand(rows) > full
    assert seats(5, plan) == seats(5, None) == 1 and seats(100, plan) == PART.clients
    assert seats(8, Plan("quest", PART.budget)) == seats(8, None), "which frees nothing"


def seats_by_hand(rows: float) -> int:
    return max(count for count in range(1, PART.clients + 1) if 640 + count * 64 + (count - 1) * 128 <= rows)


def test_a_memory_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="--memory 4: one request of tiny with 528 tokens takes 5 MiB"):
        dataclasses.replace(PART, memory=4).check()
    PART.check()


def test_ratios_are_of_the_same_round_and_arms_cross_between_two_memories() -> None:
    def kept(memory: int, method: str, turn: int, rate: float) -> dict[str, Any]:
        part = {**dataclasses.asdict(PART), "memory": memory, "method": method, "round": turn}
        found = {"tokens_per_s": rate, "decode_tokens_per_s": 1.0, "at_once_mean": memory / 2, "memory_bytes": {}}
        return {"part": part, "found": found}

    small = [kept(4, "full", 0, 1.0), kept(4, "snapkv", 0, 4.0), kept(4, "full", 1, 3.0), kept(4, "snapkv", 1, 4.0)]
    found = bench_capacity.merged([*small, kept(16, "full", 0, 8.0), kept(16, "snapkv", 0, 4.0)])
    first, second = (cell["arms"] for cell in found["cells"])
    assert first["snapkv"]["tokens_per_s_ratio"] == pytest.approx((4 + 4 / 3) / 2) and first["full"]["rounds"] == 2
    assert second["snapkv"]["tokens_per_s_ratio"] == 0.5 and "tokens_per_s_ratio" not in second["full"]
    crossed = {one["by"]: one for one in found["crossings"]}
    assert crossed["tokens_per_s"]["memory_mib"] == pytest.approx(8) and crossed["tokens_per_s"]["at_once"] == 4
    assert crossed["decode_tokens_per_s"]["memory_mib"] is None, "as fast is not slower"


@slow
def test_more_fits_of_what_is_freed_and_what_was_measured_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--engine hf --model tiny --tokens 512 --memory 8 --answer 4 --budget 64 --dtype float32 --parts"
    words = [*asked.split(), str(tmp_path)]
    first = ran("bench_capacity", words, monkeypatch, capsys)
    monkeypatch.setattr(subprocess, "run", None)
    assert ran("bench_capacity", words, monkeypatch, capsys)["cells"] == first["cells"]
    (cell,) = first["cells"]
    full, snapkv = cell["arms"]["full"], cell["arms"]["snapkv"]
    assert 1 <= full["at_once_peak"] < snapkv["at_once_peak"] <= 16
    for arm in (full, snapkv):
        assert arm["memory_bytes"]["all"] <= 8 * 2**20
    assert snapkv["decode_ratio"] == pytest.approx(snapkv["decode_tokens_per_s"] / full["decode_tokens_per_s"], 1e-3)
    with pytest.raises(SystemExit, match="--budget 65: .* was run with 64"):
        ran("bench_capacity", [*words, "--budget", "65"], monkeypatch, capsys)


# -- ParisKV -----------------------------------------------------------------------------------------------------------


@slow
def test_pariskv_s_benchmark_prints_ratios_and_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kinds", "clustered", "--lengths", "3000", "--sweep-length", "600", "--queries", "4", "--dim", "128"]
    result = ran("bench_pariskv", words, monkeypatch, capsys)
    assert result["bytes"] == {
        "ids": 16, "codes": 64, "weights": 32, "all": 112, "without_ids": 96, "over_kv": 112 / 512
    }  # fmt: skip
    (run,) = result["runs"]
    us = run["us"]
    assert run["ratio"] == pytest.approx(
        (us["tables"] + us["vote"] + us["rerank"]) / us["scan"], rel=1e-3
    )  # five digits are printed
    assert 0.8 < run["final"] <= run["coarse"] <= 1
    points = {(at["tiers"], at["rho"], at["beta"]): at for at in result["sweep"][0]["points"]}
    assert all(at["final"] <= at["coarse"] for at in points.values())
    assert points[6, 0.2, 1.0]["coarse"] == 1 > points[6, 0.2, 0.2]["coarse"]
    assert points[6, 0.2, 1.0]["final"] == points[1, 0.05, 1.0]["final"], "with beta = 1 only the codes decide"


@slow
def test_learned_centroids_lose_where_codes_do_not() -> None:
    """In the end no topic of the prompt is left among the new keys."""
    stream = drift_pariskv.drifting(3000, 5000, 64)[0]
    found = drift_pariskv.report([stream], drift_pariskv.Sizes(4, 64, 500, 50, 100))
    assert found["steps"] == list(range(100, 5001, 100))
    assert found["zone"][0] == 3000 - 68 and found["zone"][-1] == 3000 - 68 + 5000
    assert all(len(own) == len(found["steps"]) for own in found["recall"].values())
    late, drift = found["late_over_early"], found["drift"]
    assert drift > 1.3
    assert late["pariskv"] > 0.9 and late["exact"] > 0.98
    assert late["pq_dx8"] < late["pq_dx8_anew"]
    assert np.mean(found["recall"]["pariskv"]) > np.mean(found["recall"]["pq_2x6"])


def test_a_stream_s_queries_are_those_of_its_generated_tokens() -> None:
    """Asked for one key, the exact arm finds it in the place where it stands."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3000, 32)).astype(np.float32)
    wanted = rng.integers(10, 2800, 40)
    stream = drift_pariskv.Stream(2960, keys, 9 * keys[wanted])
    sizes = drift_pariskv.Sizes(4, 64, 16, 1, 1)
    exact = [recall["exact"] for _, _, recall in stream.recalls(sizes)]
    assert exact == [1.0] * 40


# -- what a model's keys and queries decide ----------------------------------------------------------------------------


def test_windows_share_the_prompt_tokens_that_their_steps_attend_most() -> None:
    rng = torch.Generator().manual_seed(0)
    prompt, steps = 200, 300
    keys = torch.randn(prompt + steps, 16, generator=rng)
    queries = torch.randn(2, steps, 16, generator=rng) + 2 * torch.randn(1, 1, 16, generator=rng)
    found = measure_captured.windows(keys, queries, prompt)
    best: list[list[set[int]]] = []
    for head in queries:
        sums = [torch.zeros(prompt) for _ in range(3)]
        for step, query in enumerate(head):
            weight = torch.softmax(keys[: prompt + step + 1] @ query / 4, dim=0)
            sums[step // 100] += weight[:prompt]
        best.append([set(one.topk(10).indices.tolist()) for one in sums])
    for name, other in (("adjacent", 1), ("distant", 2)):
        assert found[name] == pytest.approx(sum(len(own[0] & own[other]) / 10 for own in best) / 2)
    assert 0 < found["distant"] < 1


def test_a_unit_s_bound_is_held_against_the_chunks_that_are_in_it() -> None:
    """Where keys lie in two directions, a unit's centroid is far from its chunks and its ball spans none of them."""
    rng = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(2, 600, 8, generator=rng), torch.randn(2, 40, 8, generator=rng)
    found = measure_captured.bounds(keys, queries, 64)
    layout = measure_captured.ClusterLayout(radii="paper", move_units=True)
    chunks = measure_captured.Chunks(torch.arange(0, 601, 12))
    points = measure_captured.pooled(keys, chunks.bounds, "mean")
    index = measure_captured.ClusterIndex(points, chunks.lengths, layout, keys.dtype, torch.Generator().manual_seed(0))
    above = []
    for head in range(2):
        for unit in range(index.unit_centroids.shape[1]):
            clusters = range(int(index.unit_starts[head, unit]), int(index.unit_starts[head, unit + 1]))
            inside = [index.members[head, index.starts[head, c] : index.starts[head, c + 1]] for c in clusters]
            for chunk in torch.cat(inside).long() if inside else []:
                for query in queries[head]:
                    bound = query @ index.unit_centroids[head, unit] + query.norm() * index.unit_radii[head, unit]
                    above.append(float(query @ points[head, chunk]) > float(bound))
    assert len(above) == 2 * 50 * 40 and found["above"] == pytest.approx(np.mean(above)) and 0 < np.mean(above) < 0.5
    assert 0 < found["bound"] <= 1 and 0 < found["centroid"] <= 1


def test_learned_centroids_find_all_where_every_key_has_its_own() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 32)).astype(np.float32)
    query = rng.standard_normal(32).astype(np.float32)
    spans = (30, 60, 120)
    retrieved, votes = measure_captured.Learned(keys).search(query, measure_captured.Quotas(spans, 256, 10))
    assert list(retrieved) == list(np.argsort(-(keys @ query))[:10])
    own = np.zeros(256, int)
    for part in range(0, 32, 8):
        product = keys[:, part : part + 8] @ query[part : part + 8]
        own += [sum((product > other).sum() < span for span in spans) for other in product]
    assert list(votes) == list(own)


# -- captured traces ---------------------------------------------------------------------------------------------------


def test_a_trace_recomputes_what_attention_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of a layer's output projection, over the window and the generated tokens."""
    outputs: list[torch.Tensor] = []
    prepare = capture_trace.prepare

    def watched(config: Any) -> Any:
        arm = prepare(config)
        projection = arm.loaded.model.model.layers[1].self_attn.o_proj
        projection.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0].clone()))
        return arm

    monkeypatch.setattr(capture_trace, "prepare", watched)
    arrays = capture_trace.capture(TRACED, [1], 32, 5, 0)
    about = json.loads(str(arrays["about"]))
    keys, values, queries = (torch.from_numpy(arrays[f"{part}.1"]) for part in ("keys", "values", "queries"))
    count = about["prompt_tokens"] + 5
    assert keys.shape[1] == values.shape[1] == count and queries.shape[1] == 32 + 5
    group = queries.shape[0] // keys.shape[0]
    keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
    unseen = torch.arange(count) > torch.arange(count - 37, count)[:, None]
    logits = (queries @ keys.mT / queries.shape[2] ** 0.5).masked_fill(unseen, -torch.inf)
    expected = torch.cat(outputs)[-37:]
    got = (logits.softmax(-1) @ values).transpose(0, 1).flatten(1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@slow
def test_a_file_holds_the_chosen_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.npz"
    options = ["--layers", "1,0", "--window", "16", "--generate", "3"]
    monkeypatch.setattr(sys, "argv", ["capture_trace.py", str(file), *options, *TRACED])
    capture_trace.main()
    traces = capture_trace.load(file)
    assert [trace.layer for trace in traces] == [0, 1]
    for trace in traces:
        assert trace.keys.shape == trace.values.shape and trace.keys.dtype == np.float32
        assert trace.queries.shape[1] == 16 + 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "9"], "--layers 9: dummy-tiny has layers 0 to"),
        (["--sample", "999"], "--sample 999: the task has 20 samples"),
        (["--window", "0"], "--window 0: expected 1 or more"),
        (["task.lengths=[-3]"], "task.lengths"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["capture_trace.py", str(tmp_path / "x.npz"), *TRACED[:2], *options])
    with pytest.raises(SystemExit, match="2"):
        capture_trace.main()
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x.npz").exists()
