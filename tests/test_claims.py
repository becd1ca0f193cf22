"""The papers' claims: every rule of a verdict on runs made by hand, every entry complete, printed numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from report_runs import archived, record, stored
from test_experiments import composed

from kvbench.cli.report import main
from kvbench.config import choices, show
from kvbench.memory.kinds import kv_in
from kvbench.report.claims import page, sampled
from kvbench.report.claims.claim import Bed, Criterion, beds, claims
from kvbench.report.claims.numbers import filed, printed
from kvbench.report.claims.page import Judged, judged
from kvbench.report.claims.verdict import Finding, Missing, Setting, Verdict, judge, of_all
from kvbench.report.data.frame import collect, content_of

HOLDS, FAILS, UNDECIDED, NOT_TESTABLE, NOT_MEASURED = Verdict


def part(at_least: float | None = None, at_most: float | None = None, n: int = 4) -> Criterion:
    return Criterion("", "runs", {}, at_least, at_most, n)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Finding(1, 0, 2, 4), HOLDS),
        (Finding(-2, -3, -1, 4), FAILS),
        (Finding(0, -1, 1, 4), UNDECIDED),
        (Finding(1, 0, 2, 3), UNDECIDED),
        (Finding(-2, -3, -1, 3), UNDECIDED),
        (Finding(1, None, None, 4), UNDECIDED),
        (Missing("no run"), NOT_MEASURED),
    ],
)
def test_whole_intervals_of_enough_samples_decide(found: Finding | Missing, verdict: Verdict) -> None:
    assert judge(part(at_least=0), found) is verdict


def test_a_part_that_fails_decides_once_all_are_measured_and_all_must_hold() -> None:
    assert of_all([HOLDS, FAILS, UNDECIDED]) is FAILS
    assert of_all([HOLDS, NOT_MEASURED, FAILS, UNDECIDED]) is NOT_MEASURED
    assert of_all([HOLDS, UNDECIDED, NOT_MEASURED]) is NOT_MEASURED
    assert of_all([HOLDS, UNDECIDED]) is UNDECIDED
    assert of_all([HOLDS, HOLDS]) is HOLDS


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "beds", lambda: {"made": Bed(("task=passkey",), "run it")})


ASKED = {"bed": "made", "value": "score", "of": "method=quest budget=64", "less": "method=full"}


def test_a_difference_is_of_the_same_samples_and_its_verdict_of_the_interval(tmp_path: Path, bed: None) -> None:
    hard = [1.0, 0.0] * 20  # unpaired, such scores would differ by chance alone
    stored(tmp_path, "full", None, hard)
    stored(tmp_path, "quest", 64, hard)
    same = sampled.sampled(collect([tmp_path]), ASKED)
    assert isinstance(same, Finding) and (same.value, same.n) == (0, 40)
    assert (
        same.high is not None and same.low == pytest.approx(-same.high) and 8 < same.high < 9
    )  # Tango: z^2 / (n + z^2)
    stored(tmp_path, "snapkv", 64, [0.0] * 40)
    worse = sampled.sampled(collect([tmp_path]), {**ASKED, "of": "method=snapkv budget=64"})
    assert isinstance(worse, Finding) and worse.value == -50 and worse.high is not None and worse.high < -30
    assert judge(part(at_least=-3, n=40), worse) is FAILS
    rivals = {**ASKED, "of": "method=quest budget=64", "less": ["method=full", "method=snapkv budget=64"]}
    best = sampled.sampled(collect([tmp_path]), rivals)
    assert isinstance(best, Finding) and (best.value, best.n) == (0, 20)  # the other half chose full


def test_what_failed_with_the_arm_beside_is_not_known_and_what_failed_with_its_own_counts_0(
    tmp_path: Path, bed: None
) -> None:
    def arm(method: str, budget: int | None, scores: list[float], fails: list[bool]) -> None:
        lines = [
            record(str(n), "", score, error="out of memory" if fail else None)
            for n, (score, fail) in enumerate(zip(scores, fails, strict=True))
        ]
        stored(tmp_path, method, budget, lines)

    arm("full", None, [1.0, 1.0, 0.0, 0.0, 1.0], [False, False, True, True, False])
    arm("quest", 64, [0.5, 0.5, 0.5, 0.5, 0.0], [False, False, False, False, True])
    found = sampled.sampled(collect([tmp_path]), ASKED)
    assert isinstance(found, Finding) and (found.value, found.n) == (pytest.approx(-200 / 3), 3)


def test_samples_that_were_asked_count_where_only_some_answers_do(tmp_path: Path, bed: None) -> None:
    stored(tmp_path, "full", None, [1.0, 1.0, 1.0, 0.0])
    stored(tmp_path, "quest", 64, [1.0, 1.0, 0.0, 1.0])
    asked = {"bed": "made", "value": "score", "of": "method=quest budget=64", "among": "method=full"}
    found = sampled.sampled(collect([tmp_path]), asked)
    assert isinstance(found, Finding) and (found.value, found.n) == (pytest.approx(200 / 3), 4)
    assert "3 of 4" in found.note and found.used_share == 0.75


def test_what_all_samples_score_has_one_width_whatever_other_runs_scored(tmp_path: Path, bed: None) -> None:
    stored(tmp_path, "full", None, [1.0] * 24)
    asked = {"bed": "made", "value": "score", "of": "method=full"}
    answered = sampled.sampled(collect([tmp_path]), asked)
    stored(tmp_path, "quest", 64, [0.984] * 24)
    beside = sampled.sampled(collect([tmp_path]), asked)
    for found in (answered, beside):
        assert isinstance(found, Finding) and found.low == pytest.approx(86.2, abs=0.1)


def test_texts_of_one_s_own_are_told_apart_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "beds", lambda: {"made": Bed(("task=fidelity", "task.texts=records"), "run it")})
    for name, score in (("records", 1.0), ("novels", 0.0)):
        stored(tmp_path, "full", None, [score] * 3, task="fidelity", paths={"texts": f"/somewhere/{name}"}, data=name)
    runs = collect([tmp_path])
    assert len(runs.arms) == 2 and not runs.skipped
    found = sampled.sampled(runs, {"bed": "made", "value": "score", "of": "method=full"})
    assert isinstance(found, Finding) and (found.value, found.n) == (100, 3)


def test_what_is_missing_is_named_with_its_command(tmp_path: Path, bed: None) -> None:
    stored(tmp_path, "quest", 64, [1.0, 0.0])
    stored(tmp_path, "full", None, [1.0, 0.0], protocol={"accounting": "unified"})
    assert sampled.sampled(collect([tmp_path]), ASKED) == Missing("no run of method=full (task=passkey); run it")
    stored(tmp_path, "full", None, [1.0, 0.0], batch=2)
    stored(tmp_path, "full", None, [1.0, 0.0], dtype="bfloat16")
    found = sampled.sampled(collect([tmp_path]), ASKED)
    assert isinstance(found, Missing) and "differ in dtype" in found.why


@pytest.mark.parametrize(
    ("apart", "told"),
    [
        ({"dtype": "bfloat16"}, "differ in dtype, float32 (method=quest budget=64) and bfloat16 (method=full)"),
        ({"dense_layers": [0, 1]}, "differ in dense_layers"),
        (
            {"data": "others", "samples": [record("-0", "", 1.0), record("-1", "", 0.0, prompt_tokens=2)]},
            "differ in task's data",
        ),
    ],
)
def test_arms_that_differ_in_what_nobody_asked_for_are_not_compared(
    apart: dict[str, Any], told: str, tmp_path: Path, bed: None
) -> None:
    stored(tmp_path, "quest", 64, [1.0, 0.0])
    stored(tmp_path, "full", None, **{"samples": [1.0, 0.0], **apart})
    found = sampled.sampled(collect([tmp_path]), ASKED)
    assert isinstance(found, Missing) and told in found.why and found.why.endswith("run it")


@pytest.mark.parametrize("last", ["now", "later"])
def test_the_code_of_a_task_may_change_between_seeds_and_not_between_arms(last: str, tmp_path: Path, bed: None) -> None:
    made = [("quest", 64, 0, "before"), ("full", None, 1, last), ("full", None, 0, "before"), ("quest", 64, 1, "now")]
    for method, budget, seed, data in made:
        asked = [record(f"-{id}", "", 1.0, prompt_tokens=len(data)) for id in range(2)]
        stored(tmp_path, method, budget, asked, config={"seed": seed}, data=data)
    found = sampled.sampled(collect([tmp_path]), ASKED)
    if last == "now":
        assert isinstance(found, Finding) and found.n == 4
    else:
        assert isinstance(found, Missing) and "now" in found.why and "later" in found.why


def test_times_taken_beside_other_work_do_not_count_and_scores_do(tmp_path: Path, bed: None) -> None:
    def timed(*milliseconds: float) -> list[dict[str, Any]]:
        place = {"device": "a CPU", "threads": 2, "cores": 2}
        return [
            record(str(n), "", 1.0, tpot_ms={"mean": ms}, machine={**place, "others": 0.5 * (ms > 50)})
            for n, ms in enumerate(milliseconds)
        ]

    stored(tmp_path, "full", None, timed(10.0, 99.0, 30.0))
    asked = {"bed": "made", "of": "method=full", "value": "tpot_ms.mean", "interval": "range"}
    assert sampled.sampled(collect([tmp_path]), asked) == Finding(20.0, 10.0, 30.0, 2)
    scores = sampled.sampled(collect([tmp_path]), {**asked, "value": "score"})
    assert isinstance(scores, Finding) and scores.n == 3


def test_the_same_prompts_are_known_again_in_every_process() -> None:
    one = record("a", "", 1.0)
    assert content_of(one) == content_of({**one, "scores": {"accuracy": 0.0}}) == "3816eba53be9bd31"
    others = [{"id": "b"}, {"answers": ["2"]}, {"prompt_tokens": 9}, {"meta": {"length": 1024, "depth": 0.5}}]
    assert len({content_of({**one, **other}) for other in [{}, *others]}) == 5


def test_times_are_ranged_over_repeats_and_ratios_resampled_over_texts(tmp_path: Path, bed: None) -> None:
    def timed(milliseconds: list[float]) -> list[dict[str, object]]:
        return [record(str(number), "", 1.0, tpot_ms={"mean": ms}) for number, ms in enumerate(milliseconds)]

    stored(tmp_path, "full", None, timed([10.0, 20.0, 40.0]))
    stored(tmp_path, "quest", 64, timed([5.0, 5.0, 5.0]))
    stored(tmp_path, "snapkv", 64, timed([5.0, 10.0, 20.0]))
    asked = {**ASKED, "of": "method=full", "over": "method=quest budget=64", "value": "tpot_ms.mean"}
    del asked["less"]
    assert sampled.sampled(collect([tmp_path]), {**asked, "interval": "range"}) == Finding(4.0, 2.0, 8.0, 3)
    ratio = sampled.sampled(collect([tmp_path]), asked)
    assert isinstance(ratio, Finding) and ratio.value == pytest.approx(14 / 3)
    assert ratio.low is not None and ratio.high is not None and 2 <= ratio.low < ratio.value < ratio.high <= 8
    half = sampled.sampled(collect([tmp_path]), {**asked, "over": "method=snapkv budget=64"})
    assert half[:4] == (*[pytest.approx(2.0)] * 3, 3), "one over the other on the same texts, resampled together"


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([("a CPU", 2)] * 4, ""),
        ([("a CPU", 2)] * 3 + [("another CPU", 2)], "differ in machine"),
        ([("a CPU", 2)] * 2 + [("a CPU", 4)] * 2, "differ in machine"),
        ([("a CPU", 2), ("another CPU", 2)] * 2, "several machines"),
    ],
)
def test_times_of_several_machines_or_threads_are_no_repeats(
    places: list[tuple[str, int]], told: str, tmp_path: Path, bed: None
) -> None:
    """Two runs, which differ in their seed, of each of two arms; and no matter which is read first."""
    arms = [("full", None, 1), ("full", None, 2), ("quest", 64, 1), ("quest", 64, 2)]
    for (method, budget, seed), (device, threads) in zip(arms, places, strict=True):
        machine = {"device": device, "threads": threads, "cores": 4}
        records = [record(str(one), "", 1.0, tpot_ms={"mean": 5.0 + seed}, machine=machine) for one in range(2)]
        stored(tmp_path, method, budget, records, config={"seed": seed})
    asked = {"bed": "made", "of": "method=quest budget=64", "over": "method=full", "value": "tpot_ms.mean"}
    for runs in (collect([tmp_path]), [*collect([tmp_path])][::-1]):
        found = sampled.sampled(runs, {**asked, "interval": "mean"})  # type: ignore[arg-type]
        assert (isinstance(found, Missing) and told in found.why) if told else isinstance(found, Finding)
    assert isinstance(sampled.sampled(collect([tmp_path]), {**asked, "value": "score"}), Finding)


def test_what_scores_nothing_divides_nothing(tmp_path: Path, bed: None) -> None:
    asked = {"bed": "made", "value": "score", "of": "method=quest budget=64", "over": "method=full"}
    stored(tmp_path, "quest", 64, [1.0] * 8)
    stored(tmp_path, "full", None, [0.0] * 8)
    found = sampled.sampled(collect([tmp_path]), asked)
    assert isinstance(found, Missing) and found.why.startswith("method=full has 0")
    stored(tmp_path, "full", None, [1.0] + [0.0] * 7, config={"seed": 1})
    stored(tmp_path, "quest", 64, [1.0] * 8, config={"seed": 1})
    found = sampled.sampled(collect([tmp_path]), asked)
    assert isinstance(found, Finding) and found.value == 8 and found.high is not None and found.high > 64


def test_samples_that_choose_a_rival_are_among_those_that_are_asked_for(tmp_path: Path, bed: None) -> None:
    """Of 40 prompts 20 choose and 20 are compared; one more compared sample takes two prompts."""
    scores = {"full": [1.0, 1.0, 0.0, 0.0] * 10, "snapkv": [1.0, 1.0, 1.0, 0.0] * 10, "h2o": [0.0] * 40}
    for method, own in scores.items():
        stored(tmp_path, method, None if method == "full" else 64, own)
    asked = {"bed": "made", "value": "score", "of": "method=full"}
    asked |= {"less": ["method=snapkv budget=64", "method=h2o budget=64"]}  # type: ignore[dict-item]
    found = sampled.sampled(collect([tmp_path]), asked)
    assert isinstance(found, Finding) and (found.n, found.taken, found.used_share) == (20, 2.0, 1.0)


def test_a_time_over_none_is_no_number(tmp_path: Path, bed: None) -> None:
    spent = [{"query": 2.0, "transfer": transfer} for transfer in (0.0, 1.0, 0.5)]
    stored(tmp_path, "full", None, [record(str(n), "", 1.0, breakdown_ms=one) for n, one in enumerate(spent)])
    asked = {**ASKED, "of": "method=full", "value": "breakdown_ms.query / breakdown_ms.transfer", "interval": "range"}
    del asked["less"]
    assert sampled.sampled(collect([tmp_path]), asked) == Finding(3.0, 2.0, 4.0, 2)


def test_a_file_gives_elements_slopes_and_quarters(tmp_path: Path) -> None:
    text = '{"runs": [{"n": 10, "us": 2, "r": [1, 1, 1, 5]}, {"n": 1000, "us": 20, "r": [1, 1, 1, 7]}]}'
    (tmp_path / "one.json").write_text(text)
    asked = {"file": "one.json", "command": "make it"}
    assert filed([tmp_path], {**asked, "value": "runs.*.r@last"}) == Finding(6, 5, 7, 2, "one.json")
    assert filed([tmp_path], {**asked, "value": "runs.*.us", "where": {"n": [10]}}).value == 2  # type: ignore[union-attr]
    slope = filed([tmp_path], {**asked, "value": "runs.*.us", "slope": "runs.*.n"})
    assert isinstance(slope, Finding) and slope.value == pytest.approx(0.5) and slope.n == 1
    for kinds in ((0, 1), ("clustered", "isotropic")):
        powers = zip(kinds, (0.5, 1.0), strict=True)
        lines = [{"n": n, "s": kind, "us": n**power} for kind, power in powers for n in (10, 1000)]
        (tmp_path / "many.json").write_text(json.dumps({"runs": lines}))
        many = {**asked, "file": "many.json", "value": "runs.*.us", "slope": "runs.*.n", "each": "runs.*.s"}
        slopes = filed([tmp_path], many)
        assert isinstance(slopes, Finding) and slopes[:4] == pytest.approx((0.75, 0.5, 1.0, 2))
        assert slopes.note == "of 2 lengths, many.json"
    (tmp_path / "texts.json").write_text(json.dumps({"texts": [*([1] * 30), *([0] * 10)]}))
    shares = filed([tmp_path], {**asked, "file": "texts.json", "value": "texts.*", "interval": "mean"})
    assert isinstance(shares, Finding) and shares.value == 0.75 and shares.low is not None and shares.high is not None
    assert 0.55 < shares.low < 0.68 and 0.82 < shares.high < 0.95
    pairs = [{"a": 10.0, "b": float("nan")}, {"a": 20.0, "b": 19.0}, {"a": float("nan"), "b": 1.0}, {"a": 5.0}]
    (tmp_path / "pairs.json").write_text(json.dumps({"texts": pairs}))
    paired = filed([tmp_path], {**asked, "file": "pairs.json", "value": "texts.*.a", "less": "texts.*.b"})
    assert paired == Finding(1.0, 1.0, 1.0, 1, "pairs.json")
    for name, text in (("empty.json", ""), ("none.json", '{"texts": 3}')):
        (tmp_path / name).write_text(text)
        broken = filed([tmp_path], {**asked, "file": name, "value": "texts.*"})
        assert isinstance(broken, Missing) and name in broken.why and "make it" in broken.why
    gone = filed([tmp_path], {**asked, "file": "gone.json", "value": "runs"})
    assert isinstance(gone, Missing) and "make it" in gone.why


def test_printed_numbers_decide_as_they_do_by_hand() -> None:
    parts = {claim.id: [printed(one.spec) for one in claim.criteria if one.kind == "printed"] for claim in claims()}
    (averages,) = parts["ice-9"]  # Mistral, full attention: 42.7 printed less than its 16 cells' mean by half a point
    assert averages.value == 6 and "Mistral-7B-Instruct-v0.2, Full +0.5" in averages.note
    assert parts["ice-10"][0].value == 2  # .13 and .55 s below 1.7
    losses, behind = parts["racc-1"]
    assert losses.value == 5 and "Mistral 16K single 7.7" in losses.note  # 48.4 of 56.1
    assert (behind.value, behind.note) == (1, "Llama path accuracy 1.73, SCOPE 1.84")
    assert parts["lyc-8"][0].value == pytest.approx(30.82 - 30.02)


def test_every_claim_is_complete_and_decided_as_far_as_its_numbers_go(shipped_verdicts: list[Judged]) -> None:
    all_claims = claims()
    assert len(all_claims) == len({claim.id for claim in all_claims})
    for claim in all_claims:
        assert claim.claim and claim.source and claim.kind and (claim.original or claim.criteria), claim.id
        assert all(one.description for one in claim.criteria)
        assert any(one.decides for one in claim.criteria) == bool(claim.criteria), claim.id
    assert page.unmeasured(shipped_verdicts) == ""  # of what is shipped nothing is missing
    verdicts = {one.claim.id: one.verdict for one in shipped_verdicts}
    assert all(verdicts[id] is FAILS for id in ("ice-9", "ice-10", "racc-1", "lyc-8"))
    settings = {one.claim.id: one.setting for one in shipped_verdicts}
    assert {settings[id] for id in ("ice-9", "par-6", "racc-2", "lyc-7")} == {Setting.HERE}
    assert {settings[id] for id in ("ice-1", "ice-3", "kivi-1")} == {Setting.STAND_IN}
    for id, verdict in verdicts.items():
        assert (settings[id] is Setting.NOWHERE) == (verdict is NOT_TESTABLE)
    assert sum(sum(counts.values()) for counts in page.counted(shipped_verdicts).values()) == len(all_claims)


def test_what_only_stands_for_a_claims_quantity_decides_nothing(shipped_verdicts: list[Judged]) -> None:
    """Agreement and KL are no scores: without bounds they are information, whatever they say."""
    for one in shipped_verdicts:
        names = [str(part.spec.get("value", "")) for part in one.claim.criteria if part.kind == "runs" and part.decides]
        if one.claim.kind == "accuracy" and not one.claim.original:
            assert all(name == "score" for name in names), one.claim.id
    for id in ("ice-1", "par-3", "quest-1", "kivi-1", "tq-1"):
        (judged_claim,) = (one for one in shipped_verdicts if one.claim.id == id)
        told = [line for line in judged_claim.sentences if line.startswith("tokens that agree")]
        assert told and all("decides nothing" in line for line in told)
    times = {one.claim.id for one in shipped_verdicts if one.verdict is NOT_TESTABLE}
    assert times >= {"ice-6", "ice-7", "ice-11", "par-5", "quest-2", "racc-6", "lyc-1", "lyc-2"}


def test_a_time_that_was_taken_on_a_gpu_is_judged_by_runs_on_one_alone(tmp_path: Path, bed: None) -> None:
    """A CPU's number stands beside, and no other number waits for a GPU."""
    spec = {"bed": "made", "of": "method=full", "value": "tpot_ms.mean", "interval": "range"}
    time = Criterion("a time", "runs", spec, at_most=10, device="cuda")
    score = Criterion("a score", "runs", {**spec, "value": "score"}, at_least=50)
    for device, milliseconds in (("cpu", 20.0), ("cuda", 5.0)):
        timed = [record(str(one), "", 1.0, tpot_ms={"mean": milliseconds}) for one in range(3)]
        stored(tmp_path / device, "full", None, timed, device=device)
    number, verdict = page._part(time, collect([tmp_path / "cpu"]), [], "")[1:]
    assert verdict is NOT_TESTABLE and isinstance(number, Finding)
    assert number.value == 20 and "CPU" in number.note
    for runs in (collect([tmp_path / "cuda"]), collect([tmp_path])):
        number, verdict = page._part(time, runs, [], "")[1:]
        assert verdict is HOLDS and isinstance(number, Finding) and number.value == 5
    assert page._part(score, collect([tmp_path / "cpu"]), [], "")[2] is not NOT_TESTABLE
    assert of_all([FAILS, NOT_TESTABLE]) is FAILS
    assert of_all([HOLDS, NOT_TESTABLE, Verdict.UNDECIDED]) is NOT_TESTABLE


def test_claims_that_runs_do_not_measure_are_judged_by_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of IceCache's needles both have as many arms, of its passkeys the shipped alone have some."""
    shipped, own, seed = tmp_path / "results", tmp_path / "own", {"seed": 1}
    for folder, scores in ((shipped, [1.0, 0.0]), (own, [0.0, 0.0])):
        for method, budget in (("full", None), ("icecache", 256)):
            stored(folder, method, budget, scores, task="niah", options={"lengths": [4096]}, config=seed)
    stored(shipped, "icecache", 64, [1.0, 0.0], options={"lengths": [2048, 4096, 8192]}, config=seed)
    stored(shipped, "full", None, [1.0, 0.0], options={"lengths": [2048, 4096, 8192]}, config=seed)
    archived(shipped, shipped / "claims.tar.xz")
    monkeypatch.setattr(page, "SHIPPED", shipped)
    found = {
        one.claim.id: (number.value, number.note)
        for one in judged(collect([own]), [own])
        for part, number, _ in one.criteria
        if isinstance(number, Finding) and part.kind == "runs"
    }
    told = "over the 1 of 2 that method=full answers; runs that kvbench ships"
    assert found == {"ice-1": (0.0, ""), "ice-4": (100.0, told)}


def test_claims_that_runs_measure_on_too_few_samples_are_judged_by_shipped_ones_that_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, own = tmp_path / "results", tmp_path / "own"
    for folder, count in ((shipped, 120), (own, 2)):
        for method, budget in (("full", None), ("quest", 64), ("quest", 1024)):
            options = {"lengths": [4096]}
            stored(folder, method, budget, [float(budget != 64)] * count, task="niah", options=options)
    archived(shipped, shipped / "claims.tar.xz")
    monkeypatch.setattr(page, "SHIPPED", shipped)
    (base,) = (one for one in judged(collect([own]), [own]) if one.claim.id == "base-1")
    assert base.verdict is HOLDS and all(number.n == 120 for _, number, _ in base.criteria)


@pytest.mark.slow
def test_every_arm_of_a_claim_is_a_job_of_the_sweep_that_its_command_names() -> None:
    made: dict[str, list[dict[str, str]]] = {}
    for claim in claims():
        for one in claim.criteria:
            if one.kind != "runs":
                continue
            bed = beds()[one.spec["bed"]]
            command = bed.command.rpartition("python -m kvbench ")[2].partition(";")[0]
            words = tuple(word for word in command.split() if "$" not in word)
            arms = [arm for several in sampled.arms_of(one.spec).values() for arm in several]
            for arm in arms:
                wanted = sampled.USUAL | dict(word.split("=", 1) for word in (*bed.words, *arm.split()))
                assert wanted["method"] in choices("method"), claim.id
                if command not in made:
                    made[command] = [_words_of(job) for job in composed(words)]
                matching = [
                    job
                    for job in made[command]
                    if all(job.get(key, sampled.USUAL.get(key)) == wanted[key] for key in wanted)
                ]
                alike = {tuple(sorted(job.items())) for job in matching}  # of several seeds
                assert len(alike) == 1, (claim.id, wanted)


def _words_of(job: DictConfig) -> dict[str, str]:
    """The settings of a job, as a report has them."""
    plain: Any = OmegaConf.to_container(job, resolve=True)
    sections = ("protocol", "probe", "method", "task")
    words = {f"{section}.{key}": show(value) for section in sections for key, value in plain[section].items()}
    names = {key: plain[key]["name"] for key in ("model", "method", "task")}
    budget = plain["method"].get("preset") if plain["budget"] is None else plain["budget"]
    return {
        **words,
        **names,
        "attention": plain["attention"],
        "kv": str(kv_in(plain)),
        "budget": show(None if names["method"] == "full" else budget),
    }


@pytest.mark.parametrize("name", ["claims.md", "claims.csv", "claims.html"])
def test_claims_are_printed_in_every_format_of_text(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SHIPPED", tmp_path / "none")
    stored(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--claims", "--out", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    assert (
        all(claim.id in text for claim in claims())
        and f"{Setting.STAND_IN.value}" in text
        and NOT_MEASURED.value in text
    )
    assert main([str(tmp_path / "runs"), "--claims", "--format", "latex"]) == 2


def test_without_the_shipped_runs_a_claim_has_no_verdict_and_what_is_missing_is_said(
    tmp_path: Path, nothing_shipped: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from a wheel: a part of the runs decides nothing, in any format."""
    stored(tmp_path, "quest", 64, [0.0] * 8)
    found = judged(collect([tmp_path]), [])
    assert all(
        one.verdict is NOT_MEASURED
        for one in found
        if any(part.decides and verdict is NOT_MEASURED for part, _, verdict in one.criteria)
    )
    assert page.DECIDING[0] in page.unmeasured(found)
    for format in ("console", "markdown", "html"):
        assert main([str(tmp_path), "--claims", "--format", format]) == 0
        told = " ".join(capsys.readouterr().out.replace("\\", "").split())
        assert f"installed without {', '.join(page.DECIDING)}" in told
