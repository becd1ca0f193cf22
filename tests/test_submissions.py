"""Runs of others: what is not whole is not packed, and what a cheat or a mistake looks like gives no row of a board."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import yaml
from report_runs import record, stored
from words import configs

from kvbench.cli.board import main as board
from kvbench.cli.report import SHIPPED
from kvbench.cli.submit import main as submit
from kvbench.config import FACTS, HARNESS_KEYS, method_config, shipped
from kvbench.report.data.frame import collect
from kvbench.report.data.run import missing
from kvbench.report.site.rows import Site
from kvbench.report.submissions.checked import Submission, checked
from kvbench.report.submissions.manifest import NAME, signed, with_manifest
from kvbench.runs.archive import packed, unpacked
from kvbench.runs.identity import run_id
from kvbench.runs.stored import read_run_yaml, runs_in
from kvbench.runs.summary import summarise

ROOT = Path(__file__).parents[1]
NOT_OF_ARM = HARNESS_KEYS | FACTS | {"preset"}
Files = dict[str, bytes]
NAN = float("nan")
SCORES = (1.0, 0.0, 1.0, 1.0)
NEAR = {"nll": 2.0, "nll_full": 1.9, "steps": {"kl": [0.5, 0.7], "nll": [2.0, 2.0], "nll_full": [1.9, 1.9]}}


def arm(folder: Path, method: str = "mine", budget: float | None = 64, scores: Any = SCORES, **more: Any) -> Path:
    """A finished run of four samples, with times of its own."""
    target = more.pop("target", None) or {"mine": "mine.Mine"}.get(method) or method_config(method).target
    minimum = dict.fromkeys(("paper", "unified"), None if method == "full" else 16)
    config = {
        "method": {"name": method, "_target_": target, "minimum": minimum, "preset": 256},
        **more.pop("config", {}),
    }
    first = hash_of(method, budget, more.pop("times", ""))
    audit_of = more.pop("audit", {})
    audit = {**record("", "", 1.0)["audit"], "budget": budget, "dense_share": 0.1, **audit_of}
    whole = {"device_kv_bytes": 2**23, "attended_mean": 1024.0, "attended_max": 1024}
    audit |= whole if method == "full" else {"device_kv_bytes": 2**21, **audit_of}
    given = more.pop("record", {})
    samples = [
        record(f"{n}", "", score, **{"ttft_s": first + n, "audit": audit, **given}) for n, score in enumerate(scores)
    ]
    return stored(folder, method, budget, samples, config=config, **more)


def hash_of(*words: Any) -> float:
    return float(sum(place * ord(letter) for place, letter in enumerate("-".join(map(str, words)), 7)))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The board's runs."""
    for method, budget in (("full", None), ("quest", 64), ("snapkv", 64)):
        arm(tmp_path / "board", method, budget)
    return tmp_path / "board"


def given(tmp_path: Path, name: str = "theirs", who: str = "Ann, https://ann.example", **more: Any) -> Path:
    """A submission of one run."""
    arm(tmp_path / f"runs-{name}", **more)
    assert submit([str(tmp_path / f"runs-{name}"), "--out", str(tmp_path / f"{name}.tar.xz"), "--as", who]) == 0
    return tmp_path / f"{name}.tar.xz"


def held(own: Path, *archives: Path) -> list[Submission]:
    return checked(archives, collect([own]))[0]


def changed(archive: Path, change: Callable[[Files], Files | None], signed: bool = True) -> Path:
    """A submission in which something was changed, with a new manifest if whoever did it knows how."""
    files = {name: bytes(data) for name, data in unpacked(archive.read_bytes()).items()}
    files = change(files) or files
    if signed:
        said = json.loads(files.pop(NAME))
        files = with_manifest(files, said["who"], said["link"])
    archive.write_bytes(packed(files))
    return archive


def of(kind: str, files: Files) -> str:
    return next(name for name in files if name.endswith(kind))


def each_sample(change: Callable[[dict[str, Any]], Any], summed: bool = True) -> Callable[[Files], None]:
    """A change of every sample by somebody who makes the summary that goes with it."""

    def act(files: Files) -> None:
        name = of("samples.jsonl", files)
        lines = [json.loads(line) for line in files[name].splitlines()]
        for line in lines:
            change(line)
        files[name] = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if summed:
            files[of("summary.json", files)] = json.dumps(summarise(lines, "accuracy")).encode()

    return act


def summary(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files], None]:
    def act(files: Files) -> None:
        name = of("summary.json", files)
        said = json.loads(files[name])
        change(said)
        files[name] = json.dumps(said).encode()

    return act


def settings(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files], Files]:
    """A change of run.yaml by somebody who gives it the run id that goes with it."""

    def act(files: Files) -> Files:
        written = yaml.safe_load(files[of("run.yaml", files)])
        change(written)
        old, written["run_id"] = written["run_id"], run_id(written["identity"])
        files[of("run.yaml", files)] = yaml.safe_dump(written).encode()
        return {name.replace(old, written["run_id"]): data for name, data in files.items()}

    return act


def in_yaml(old: bytes, new: bytes) -> Callable[[Files], None]:
    """A change of run.yaml by somebody who leaves the run id as it is."""

    def act(files: Files) -> None:
        name = of("run.yaml", files)
        files[name] = files[name].replace(old, new)

    return act


def in_turn(*changes: Callable[[Files], Files | None]) -> Callable[[Files], Files]:
    def act(files: Files) -> Files:
        for change in changes:
            files = change(files) or files
        return files

    return act


# -- what is packed ----------------------------------------------------------------------------------------------------


def test_a_submission_has_no_text_and_gives_a_row_that_says_whose_it_is(own: Path, tmp_path: Path) -> None:
    archive = given(tmp_path)
    files = unpacked(archive.read_bytes())
    assert not any(word in bytes(data) for data in files.values() for word in (b'"output"', b'"answers"', b'"excerpt"'))
    found, runs = checked([archive], collect([own]))
    assert found[0].reasons == [] and [run.arm["method"] for run in found[0].rows] == ["mine"]
    rows = {row.method: row for row in Site(runs, "", found).rows}
    assert rows["mine"].variant == "by Ann" and rows["quest"].variant == "" and len(rows) == 4
    assert rows["mine"].full is not None and len({row.panel for row in rows.values()}) == 1


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "unfinished": ({"finished": False}, "unfinished, 4 samples so far"),
    "a failed sample": ({"record": {"error": "out of memory"}}, "4 of 4 samples failed (out of memory)"),
    "a broken budget": ({"audit": {"over_rule": True}}, "broke its method's own budget rule"),
    "no audit": ({"record": {"audit": None}}, "has no audit"),
    "probes": ({"config": {"probe": {"every": 4}}}, "probe.every=4"),
    "a smoke run": ({"config": {"smoke": True}}, "smoke=true"),
    "random weights": ({"model_revision": "dummy-0"}, "random weights"),
    "another C": ({"audit": {"budget": 128}}, "audit.budget=128: expected the 64 tokens"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_not_whole_is_named_and_nothing_is_packed(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, said = WHOLE[case]
    arm(tmp_path / "runs")
    run = arm(tmp_path / "runs", "snapkv", **more)
    assert submit([str(tmp_path / "runs"), "--out", str(tmp_path / "mine.tar.xz")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(run.name in line for line in lines) and said in lines[0]
    assert not list(tmp_path.glob("*.tar.xz"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--as", "kvbench"], "your own name"),
        (["--as", "Ann, http://ann.example"], "a link https://"),
        (["--as", 'Ann, https://a"onload='], "a link https://"),
        (["--out", "mine.zip"], "NAME.tar.xz"),
        (["--out", "there.tar.xz"], "is there already"),
    ],
)
def test_bad_words_are_refused_in_a_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arm(tmp_path / "runs")
    (tmp_path / "there.tar.xz").write_bytes(b"")
    assert submit(["runs", *words]) == 2
    assert said in capsys.readouterr().err


# -- what a cheat or a mistake looks like ------------------------------------------------------------------------------

CHANGED: dict[str, tuple[Callable[[Files], Files | None], str]] = {
    "a better summary": (summary(lambda said: said.update(score=100.0)), "score is 100, and 75 of the samples"),
    "a summary of less memory": (summary(lambda said: said["audit"].update(device_kv_bytes=9)), "device_kv_bytes"),
    "a wrong n": (summary(lambda said: said.update(n=3)), "samples.jsonl has 4 samples, and 3"),
    "better scores": (each_sample(lambda one: one["scores"].update(accuracy=1.0), False), "score is 75, and 100"),
    "a score above 1": (
        each_sample(lambda one: one["scores"].update(accuracy=2.0)),
        "scores.accuracy=2.0: expected",
    ),
    "a score between 0 and 1": (each_sample(lambda one: one["scores"].update(accuracy=0.5)), "passkey gives 0 or 1"),
    "a score that is not finite": (
        each_sample(lambda one: one["scores"].update(accuracy=float("nan")), False),
        "damaged",
    ),
    "a KL that its steps have not": (
        each_sample(lambda one: one.update(fidelity={**NEAR, "kl_mean": 0.1})),
        "fidelity.kl_mean=0.1: expected the mean of its steps, 0.6",
    ),
    "negative bytes": (each_sample(lambda one: one["audit"].update(index_bytes=-5)), "audit.index_bytes=-5"),
    "less than its dense layers": (each_sample(lambda one: one["audit"].update(device_kv_bytes=9)), "dense layers"),
    "a byte": (
        each_sample(lambda one: one["audit"].update(device_kv_bytes=1, attended_bytes_per_step=1.0, dense_share=0.1)),
        "80 attended entries in the others, take 1428685 or more",
    ),
    "less than what it attends": (
        each_sample(lambda one: one["audit"].update(device_kv_bytes=2**20)),
        "device_kv_bytes=1048576",
    ),
    "more dense layers": (each_sample(lambda one: one["audit"].update(dense_share=0.5)), "of the layers dense"),
    "other prompts": (each_sample(lambda one: one.update(prompt_tokens=1000)), "4 prompts are not the board's"),
    "other samples": (each_sample(lambda one: one.update(id=f"x{one['id']}")), "lacks 4 of the board's 4 samples"),
    "a KL where none is asked": (
        each_sample(lambda one: one.update(fidelity={"kl_mean": 0.0, "nll": 2.0, "nll_full": 2.0})),
        "4 prompts are not the board's",
    ),
    "groups that weigh the right ones more": (
        each_sample(lambda one: one.update(group=f"x{one['id']}" if one["scores"]["accuracy"] else "bad")),
        "4 prompts are not the board's",
    ),
    "no facts": (each_sample(lambda one: one.pop("meta")), "4 prompts are not the board's"),
    "another budget in run.yaml": (
        lambda files: files.update(
            {of("run.yaml", files): files[of("run.yaml", files)].replace(b"budget: 64", b"budget: 32")}
        ),
        "audit.budget=64: expected the 32 tokens",
    ),
    "another page in run.yaml": (
        lambda files: files.update(
            {of("run.yaml", files): files[of("run.yaml", files)].replace(b"preset: 256", b"preset: 128")}
        ),
        "run.yaml was changed",
    ),
    "another accounting": (
        in_turn(
            settings(lambda run: run["identity"]["config"]["protocol"].update(accounting="unified")),
            each_sample(lambda one: one["audit"].update(attended_mean=60.0)),
        ),
        "protocol.accounting=unified: the board has paper",
    ),
    "layers that were not dense": (
        settings(lambda run: run["identity"].update(dense_layers=[0, 1])),
        "dense_layers=[0,1]: the board has []",
    ),
    "another dtype": (settings(lambda run: run["identity"].update(dtype="bfloat16")), "dtype=bfloat16: the board has"),
    "another revision": (settings(lambda run: run["identity"].update(model_revision="folder-2")), "model.revision="),
    "another seed": (settings(lambda run: run["identity"]["config"].update(seed=1)), "seed=1: the board has 0"),
    "another task": (settings(lambda run: run["identity"]["config"]["task"].update(name="niah")), "task=niah"),
    "another metric": (settings(lambda run: run["config"].update(metric="accuracy2")), "no number as its accuracy2"),
    "another machine without full attention": (
        settings(lambda run: run["identity"].update(device="cuda")),
        "device=cuda: the board has cpu; add your method=full",
    ),
    "a shipped method's name": (
        settings(lambda run: run["identity"]["config"]["method"].update(name="icecache")),
        "is called icecache, kvbench's methods.icecache.IceCache, and is mine.Mine",
    ),
    "a name that looks like one": (
        settings(lambda run: run["identity"]["config"]["method"].update(name="snap_kv")),
        "looks like kvbench's snapkv",
    ),
    "a name in other letters": (
        settings(lambda run: run["identity"]["config"]["method"].update(name="sn\u0430pkv")),
        "small letters, digits and _",
    ),
    "a name of markup": (
        settings(lambda run: run["identity"]["config"]["method"].update(name="<img src=x onerror=alert(1)>")),
        "small letters, digits and _",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_submission_fails_and_gives_no_row(case: str, own: Path, tmp_path: Path) -> None:
    change, said = CHANGED[case]
    found = held(own, changed(given(tmp_path), change))[0]
    assert not found.rows and any(said in reason for reason in found.reasons), found.reasons


def test_dropped_samples_are_missed(own: Path, tmp_path: Path) -> None:
    found = held(own, given(tmp_path, scores=SCORES[:3]))[0]
    assert not found.rows and any("lacks 1 of the board's 4 samples, such as 3" in one for one in found.reasons)


def test_the_better_of_several_answers_is_no_prompt_s_score(tmp_path: Path) -> None:
    """Of two answers to each prompt the board has both."""
    for method in ("full", "quest"):
        each = [{"sample": f"{n // 2}", "id": f"{n // 2}-{n % 2}"} for n in range(8)]
        own = arm(tmp_path / "board", method, None if method == "full" else 64, (1.0, 0.0) * 4)
        written = (own / "samples.jsonl").read_text().splitlines()
        lines = [json.loads(line) | more for line, more in zip(written, each, strict=True)]
        (own / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    archive = given(tmp_path, scores=(1.0,) * 4)
    better = each_sample(lambda one: one.update(sample=one["id"], id=f"{one['id']}-0"))
    found = held(tmp_path / "board", changed(archive, better))[0]
    assert not found.rows and any("lacks 4 of the board's 8 samples" in reason for reason in found.reasons)


def test_a_kl_of_chosen_texts_alone_gives_no_row(tmp_path: Path) -> None:
    near = {"fidelity": {**NEAR, "kl_mean": 0.6}}
    for method in ("full", "quest"):
        arm(tmp_path / "board", method, None if method == "full" else 64, record=near)
    archive = given(tmp_path, record=near)
    assert held(tmp_path / "board", archive)[0].rows
    found = held(tmp_path / "board", changed(archive, each_sample(lambda one: one["id"] > "1" and one.pop("fidelity"))))
    assert not found[0].rows and any("2 prompts are not the board's" in reason for reason in found[0].reasons)


def test_an_arm_that_is_there_twice_under_another_option_is_known_by_its_times(own: Path, tmp_path: Path) -> None:
    def twice(files: Files) -> Files:
        other = settings(lambda run: run["identity"]["config"]["method"].update(page=7))({**files})
        return files | {name: data for name, data in other.items() if name != NAME}

    found = held(own, changed(given(tmp_path), twice))[0]
    assert not found.rows and any("samples have the times of" in reason for reason in found.reasons)


def test_a_sample_that_was_tried_again_is_packed_once(own: Path, tmp_path: Path) -> None:
    folder = arm(tmp_path / "runs")
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    failed = json.dumps({**json.loads(lines[0]), "error": "out of memory"}) + "\n"
    (folder / "samples.jsonl").write_text("".join([failed, *lines]))
    assert submit([str(tmp_path / "runs"), "--out", str(tmp_path / "mine.tar.xz")]) == 0
    assert held(own, tmp_path / "mine.tar.xz")[0].rows
    scored = {"scores": {"accuracy": 0.0}}
    again = {
        "scored anew": ({**scored, "rescored": {}}, 0),
        "another score": (scored, 1),
        "another answer": ({"output": "2"}, 1),
    }
    for case, (more, code) in again.items():
        (folder / "samples.jsonl").write_text("".join([*lines, json.dumps({**json.loads(lines[0]), **more}) + "\n"]))
        stored = [json.loads(lines[0]) | more, *map(json.loads, lines[1:])]
        (folder / "summary.json").write_text(json.dumps(summarise(stored, "accuracy")))
        assert submit([str(tmp_path / "runs"), "--out", str(tmp_path / f"{case}.tar.xz")]) == code, case


def test_a_share_is_of_the_context_that_was_compressed(own: Path, tmp_path: Path) -> None:
    """What is read after it, the question, is none of it."""
    asked = {"record": {"prompt_tokens": 891, "question_tokens": 38}, "audit": {"budget": 171}}
    protocol = {"protocol": {"question": "after"}}
    for name, budget, code in (("right", 0.2, 0), ("wrong", 0.25, 1)):
        arm(tmp_path / name, budget=budget, **asked, **protocol)
        assert submit([str(tmp_path / name), "--out", str(tmp_path / f"{name}.tar.xz")]) == code


def test_a_folder_of_a_long_name_is_named(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = arm(tmp_path / "runs")
    away = tmp_path / ("x" * 160) / ("y" * 160) / folder.name
    away.parent.mkdir(parents=True)
    folder.rename(away)
    assert submit([str(tmp_path / ("x" * 160)), "--out", str(tmp_path / "mine.tar.xz")]) == 2
    assert str(away) in capsys.readouterr().err and not (tmp_path / "mine.tar.xz").exists()


def test_the_worst_run_of_others_makes_no_method_of_the_board_rank(tmp_path: Path) -> None:
    """Full attention's interval is wider than the board's scores lie apart, and not than with the submission's."""
    for method, right in (("full", 20), ("quest", 22), ("snapkv", 21)):
        arm(tmp_path / "board", method, None if method == "full" else 64, [1.0] * right + [0.0] * (40 - right))
    archive = given(tmp_path, scores=[0.0] * 40)
    found, runs = checked([archive], collect([tmp_path / "board"]))
    assert len(found[0].rows) == 1 and all("wider" in run.ranks_none for run in runs)


@pytest.mark.parametrize("name", ["rnagicpig", "iychee", "kvz1p", "snapkv_", "omn1kv", "que5t"])
def test_a_name_that_looks_like_a_shipped_one_gives_no_row(name: str, own: Path, tmp_path: Path) -> None:
    rename = settings(lambda run: run["identity"]["config"]["method"].update(name=name))
    found = held(own, changed(given(tmp_path), rename))[0]
    assert not found.rows and any("looks like kvbench's" in reason for reason in found.reasons), found.reasons


@pytest.mark.parametrize(
    "who",
    [
        *("kvb\u0435nch", "KV-Bench", "k v b e n c h", "\uff4b\uff56\uff42\uff45\uff4e\uff43\uff48"),
        *(
            "kvb\u0451nch",
            "\U0001d4c0\U0001d4cb\U0001d4b7\u212f\U0001d4c3\U0001d4b8\U0001d4bd",
            "\u043av\u042cen\u0441h",
        ),
        *("\u0410nn", "P\u0435ter"),
    ],
)
def test_nobody_signs_as_kvbench_or_in_letters_that_look_like_another_s(who: str) -> None:
    with pytest.raises(ValueError, match="your own name|one script"):
        signed(who)


@pytest.mark.parametrize(
    "who",
    ["\u0410\u043d\u043d\u0430 M", "\u674e\u96f7", "Ann M\u00fcller", "\u0391\u03b8\u03b7\u03bd\u03ac", "J\u00f6rg-3"],
)
def test_names_of_every_script_sign(who: str) -> None:
    assert signed(who) == (who, "")


def test_scores_that_nobody_can_make_anew_are_said_to_be_taken_on_trust(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = given(tmp_path)
    assert held(own, archive)[0].taken_on_trust.startswith("scores of 1 rows as Ann gives them: no outputs")
    with_outputs = changed(archive, each_sample(lambda one: one.update(output="1", answers=["1"])))
    assert held(own, with_outputs)[0].taken_on_trust == ""
    assert board([str(given(tmp_path, "again")), "--beside", str(own)]) == 0
    assert "no outputs are packed" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["another byte", "a file more", "a file less"])
def test_a_file_that_was_not_packed_is_found_by_the_manifest(change: str, own: Path, tmp_path: Path) -> None:
    def act(files: Files) -> None:
        name = of("status.json", files)
        if change == "a file less":
            del files[name]
        else:
            files["more" if change == "a file more" else name] = b"{}"

    found = held(own, changed(given(tmp_path), act, signed=False))[0]
    assert not found.rows and len(found.reasons) == 1 and re.search("manifest|SHA-256", found.reasons[0])


@pytest.mark.parametrize(
    "data",
    [
        b"no archive",
        packed({"runs/x/run.yaml": b"format: 1"}),
        packed({NAME: b"[]"}),
        packed({NAME: b'{"format": 9, "who": "A", "link": "", "kvbench": "1", "files": {}}'}),
        packed({NAME: b'{"format": 1, "who": 7, "link": "", "kvbench": "1", "files": {}}'}),
        packed({NAME: b'{"format": 1, "who": "A\\u202e", "link": "", "kvbench": "1", "files": {}}'}),
        packed({NAME: b'{"format": 1, "who": "A", "link": "javascript:alert(1)", "kvbench": "1", "files": {}}'}),
        packed({NAME: b'{"format": 1, "who": "A", "link": "", "kvbench": "1", "files": {}}'}),
    ],
)
def test_what_is_no_submission_is_listed_with_the_reason(data: bytes, own: Path, tmp_path: Path) -> None:
    (tmp_path / "x.tar.xz").write_bytes(data)
    found = held(own, tmp_path / "x.tar.xz")[0]
    assert len(found.reasons) == 1 and not found.rows


# -- whose row it is ---------------------------------------------------------------------------------------------------


def test_an_arm_of_the_board_is_a_repeat_and_replaces_nothing(own: Path, tmp_path: Path) -> None:
    archive = given(tmp_path, method="snapkv", scores=(1.0, 1.0, 1.0, 1.0), times="another machine")
    found, runs = checked([archive], collect([own]))
    assert not found[0].reasons and not found[0].rows
    assert len(found[0].repeats) == 1 and "score 100.0 beside score 75.0" in found[0].repeats[0]
    assert {run.arm["method"]: run.arm["score"] for run in runs}["snapkv"] == 75


def test_full_attention_of_others_is_no_yardstick(own: Path, tmp_path: Path) -> None:
    """A worse one would make every method look good."""
    archive = given(tmp_path, method="full", budget=None, scores=(0.0,) * 4, times="another machine")
    found, runs = checked([archive], collect([own]))
    assert not found[0].rows and "score 0.0 beside score 75.0" in found[0].repeats[0]
    assert {run.full().arm["score"] for run in runs} == {75}  # type: ignore[union-attr]


def test_the_first_to_have_an_arm_has_its_row(own: Path, tmp_path: Path) -> None:
    first, second = given(tmp_path, "first"), given(tmp_path, "second", "Bo", times="of Bo's")
    found, runs = checked([first, second], collect([own]))
    assert [len(one.rows) for one in found] == [1, 0] and len(found[1].repeats) == 1
    assert "a copy" not in found[1].repeats[0] and len(runs.arms) == 4


def test_two_submissions_of_one_run_are_a_copy(own: Path, tmp_path: Path) -> None:
    first, second = given(tmp_path, "first"), given(tmp_path, "second", "Bo")
    assert "a copy" in held(own, first, second)[1].repeats[0]
    twice = tmp_path / "third.tar.xz"
    twice.write_bytes(first.read_bytes())
    assert held(own, first, twice)[1].reasons == ["the same file as first"]


def test_a_run_of_another_arm_under_a_new_name_is_known_by_its_times(own: Path, tmp_path: Path) -> None:
    rename = settings(lambda run: run["identity"]["config"]["method"].update(name="mine", _target_="mine.Mine"))
    found = held(own, changed(given(tmp_path, method="quest"), rename))[0]
    assert not found.rows and any("have the times of quest's run" in reason for reason in found.reasons)


def test_a_name_is_the_first_one_s_unless_the_code_is_the_same(own: Path, tmp_path: Path) -> None:
    first = given(tmp_path, "first", source="a")
    other = given(tmp_path, "other", "Bo", budget=32, audit={"budget": 32}, source="b")
    same = given(tmp_path, "same", "Cy", budget=128, audit={"budget": 128}, source="a")
    found = held(own, first, other, same)
    assert "method mine is Ann's, of other code" in found[1].reasons[0]
    assert [len(one.rows) for one in found] == [1, 0, 1]


def test_another_device_is_a_panel_of_its_own_with_its_own_full_attention(own: Path, tmp_path: Path) -> None:
    for method, budget in (("full", None), ("mine", 64)):
        arm(tmp_path / "runs", method, budget, device="cuda", times="cuda")
    assert submit([str(tmp_path / "runs"), "--out", str(tmp_path / "gpu.tar.xz")]) == 0
    found, runs = checked([tmp_path / "gpu.tar.xz"], collect([own]))
    assert not found[0].reasons and len(found[0].rows) == 2
    rows = Site(runs, "", found).rows
    assert len({row.panel for row in rows if row.of}) == 1 and len({row.panel for row in rows}) == 2


# -- the board ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_shipped")
def test_the_site_marks_what_is_of_others_and_lists_what_fails(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = given(tmp_path, "good", "Ann & <b>Co</b>, https://ann.example/?a=1&b=2")
    bad = changed(given(tmp_path, "bad", "Bo", budget=32, audit={"budget": 32}), CHANGED["a better summary"][0])
    before = hostile.listing(own)
    words = [str(good), str(bad), "--beside", str(own), "--out", str(tmp_path / "site")]
    assert board(words) == 1
    assert hostile.listing(own) == before
    out = capsys.readouterr().out
    assert "bad: fails, no rows" in out and "good: 1 rows" in out
    page, table = ((tmp_path / "site" / name).read_text() for name in ("submissions.html", "leaderboard.html"))
    assert "summary.json does not say" in page and 'href="https://ann.example/?a=1&amp;b=2"' in page
    assert "by Ann &amp; &lt;b&gt;Co&lt;/b&gt;" in table and table.count('data-whose="others"') == 1
    for html in (tmp_path / "site").rglob("*.html"):
        assert "<b>Co" not in html.read_text()
    assert "Taken on trust: scores of 1 rows as Ann" in page
    assert "of which nothing but its runs is known" in (tmp_path / "site/methods/mine.html").read_text()
    assert "by Bo" not in table and "add.html" in table


def test_without_a_folder_submissions_are_only_checked(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = given(tmp_path)
    files = set(tmp_path.rglob("*"))
    assert board([str(archive), "--beside", str(own)]) == 0
    assert "row      passkey, mine-64" in capsys.readouterr().out and set(tmp_path.rglob("*")) == files
    assert board([str(tmp_path / "nowhere.tar.xz"), "--beside", str(own)]) == 2


def test_the_runs_of_the_page_on_own_methods_are_those_of_the_board() -> None:
    page = (ROOT / "docs/tutorials/own_method.md").read_text().replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in page.splitlines() if line.startswith("kvbench --config-dir")]
    board_runs = [run for name in ("reference", "reference_tiny") for run in full_runs(ROOT / f"results/{name}.tar.xz")]
    asked = [words[3:] for words in lines if any(word.startswith("model=") for word in words)]
    assert len(asked) == 3
    for words in asked:
        (config,) = configs(*(word.replace("method=mine", "method=snapkv") for word in words))
        task = config["task"]
        own = (config["model"]["name"], task["name"], list(task["lengths"]), task.get("samples"))
        assert own in board_runs, words


def full_runs(archive: Path) -> list[tuple[Any, ...]]:
    """Model, task, lengths and samples of each run of full attention."""
    found = []
    for path in runs_in([archive]):
        if path.parent.name == "full":
            config = read_run_yaml(path)["config"]
            task = config["task"]
            found.append((config["model_name"], task["name"], task.get("lengths"), task.get("samples")))
    return found


def test_every_shipped_run_has_the_settings_that_runs_of_its_task_have_now() -> None:
    """A key that came later is filled with what it was before, so that a run of now stands beside runs of then."""
    for archive in filter(Path.is_file, SHIPPED):
        first = {path.parts[-4]: path for path in runs_in([archive])}  # a run of each task
        for run in collect([*first.values()], unfinished=True):
            asked = shipped("task", run.label("task")) or {}
            known = {f"task.{key}" for key, value in asked.items() if value is not None and key not in NOT_OF_ARM}
            assert known <= {key for key, value in run.settings.items() if not missing(value)}, archive
