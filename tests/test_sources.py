"""Claims about data files: what is said before a download, without a network, and of a bad line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from kvbench.models import hub
from kvbench.tasks.gsm8k import Gsm8k
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.longgenbench import LongGenBench, ManyProblems
from kvbench.tasks.longproc import LongProc
from kvbench.tasks.maths import Aime, Math500
from kvbench.tasks.sources import HubFile, LocalFile, read_jsonl, rows_of, say_rows

DATA = Path(__file__).parents[2] / "shared" / "data"
FILE = HubFile("owner/set", "data.zip", 114, key="task.data_dir")
FIELDS = {"text": str, "answers": list, "classes": (list, type(None))}


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(hub, "out_of_reach", lambda: "the hub does not answer")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names, **options: None)


def test_without_a_network_the_key_of_a_local_copy_is_named_at_once(no_network, monkeypatch):
    """The hub's library, which would try for long, is not asked."""
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names, **options: pytest.fail("asked"))
    for ask in (FILE.check, FILE.path):
        with pytest.raises(ValueError, match=r"task\.data_dir: owner/set/data\.zip .*local copy"):
            ask()


def test_a_file_in_the_cache_needs_no_network(tmp_path, monkeypatch, no_network):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names, **options: str(tmp_path / "data.zip"))
    FILE.check()
    assert FILE.path() == tmp_path / "data.zip"


def test_what_is_fetched_is_said_with_its_size(tmp_path, monkeypatch, capsys, no_network):
    monkeypatch.setattr(hub, "out_of_reach", lambda: None)

    def download(repo, name, repo_type):
        assert "114 MB" in capsys.readouterr().err  # said before, not after
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert FILE.path() == tmp_path / "data.zip"


def test_a_download_that_fails_is_one_line(monkeypatch, no_network):
    monkeypatch.setattr(hub, "out_of_reach", lambda: None)

    def download(*names, **options):
        raise OSError("connection reset\nand much more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ValueError, match=r"^task\.data_dir: .* could not be fetched \(connection reset\)$"):
        FILE.path()


def test_a_local_file_that_is_not_there_names_its_key(tmp_path):
    (tmp_path / "there.txt").write_text("a")
    assert LocalFile(tmp_path / "there.txt", "task.haystack").path() == tmp_path / "there.txt"
    with pytest.raises(ValueError, match=r"^task\.haystack: .*/not\.txt: no such file$"):
        LocalFile(tmp_path / "not.txt", "task.haystack").check()
    with pytest.raises(ValueError, match="no such folder"):
        LocalFile(tmp_path / "none" / "not.txt", "task.haystack").check()
    (tmp_path / "there.txt").write_text("")
    with pytest.raises(ValueError, match=r"^task\.haystack: .*/there\.txt: empty$"):
        LocalFile(tmp_path / "there.txt", "task.haystack").path()


def test_a_bad_line_names_file_line_and_field_and_costs_no_other():
    good = {"text": "é" * 10, "answers": [], "classes": None}
    lines = [
        json.dumps(good).encode(),
        b"",
        b"{broken",
        json.dumps({**good, "answers": "one"}).encode(),
        json.dumps({"text": "a"}).encode(),
        b"[1]",
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b'{"text": "\\ud800", "answers": [], "classes": null}',
        b"\xef\xbb\xbf" + json.dumps(good, ensure_ascii=False).encode() + b"\r\n",
    ]
    rows = list(read_jsonl("set.jsonl", lines, FIELDS))
    assert [row.line for row in rows] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert rows[0].data == rows[-1].data == good and not rows[0].error and not rows[-1].error
    said = [row.error for row in rows[1:-1]]
    assert said[0].startswith("set.jsonl, line 3: not JSON (")
    assert said[1:5] == [
        "set.jsonl, line 4: field answers: expected list, not str",
        "set.jsonl, line 5: field answers: missing",
        "set.jsonl, line 6: expected an object with the fields text, answers, classes",
        "set.jsonl, line 7: not UTF-8",
    ]
    assert said[5].startswith("set.jsonl, line 8: not JSON (")
    assert said[6] == "set.jsonl, line 9: holds half a character (a lone surrogate)"


def test_half_a_character_is_refused_wherever_a_row_has_it():
    [row] = read_jsonl("set.jsonl", [b'{"text": "a", "answers": ["a\\ud800"], "classes": null}'], FIELDS)
    assert row.error and not row.data


def test_cells_of_a_csv_are_the_texts_that_stand_there(tmp_path):
    (tmp_path / "a.csv").write_text("word,number,empty\nNone,.50,\nNA,0.00000000001234,\n")
    rows = rows_of(LocalFile(tmp_path / "a.csv", "task.data_dir"), {"word": str})
    assert [row.data for row in rows] == [
        {"word": "None", "number": ".50", "empty": None},
        {"word": "NA", "number": "0.00000000001234", "empty": None},
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "nested too deep"),
        ('[{"text": ' + "[" * 100_000 + "]" * 100_000 + "}]", "nested too deep"),
        ('[{"text": ' + "9" * 5001 + "}]", "digits"),
        ('[{"text": NaN}]', "NaN: no value of JSON"),
        ('[{"text": -Infinity}]', "-Infinity: no value of JSON"),
        ('{"text": "a"}', "expected a list"),
        ("[]", "nothing in it"),
    ],
    ids=["open", "closed", "digits", "nan", "infinity", "mapping", "empty"],
)
def test_a_json_file_that_is_none_is_one_line(tmp_path, content, reason):
    (tmp_path / "set.json").write_text(content)
    with pytest.raises(ValueError, match=reason) as caught:
        rows_of(LocalFile(tmp_path / "set.json", "task.data_dir"), {"text": str})
    assert str(caught.value).startswith(f"task.data_dir: {tmp_path}/set.json: ") and "\n" not in str(caught.value)


def test_a_line_with_what_json_has_not_costs_no_other(tmp_path):
    lines = ['{"text": "a"}', '{"text": "b", "score": NaN}', '{"text": ' + "9" * 5001 + "}", '{"text": "c"}']
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    rows = rows_of(LocalFile(tmp_path / "set.jsonl", "task.data_dir"), {"text": str})
    assert [row.data.get("text") for row in rows] == ["a", None, None, "c"]
    assert "line 2: not JSON (NaN" in rows[1].error and "line 3: not JSON (" in rows[2].error


def test_a_pipe_a_device_or_a_folder_is_no_data_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, kind in ((tmp_path / "pipe.jsonl", "pipe"), (Path("/dev/null"), "device"), (tmp_path, "folder")):
        with pytest.raises(ValueError, match=rf"^task\.data_dir: {path}: .*{kind}"):
            rows_of(LocalFile(path, "task.data_dir"), {"text": str})


def test_a_line_of_a_megabyte_is_read():
    text = "words " * 200_000
    (row,) = read_jsonl("set.jsonl", [json.dumps({"text": text}).encode()], {"text": str})
    assert row.data == {"text": text}


def test_a_row_that_has_a_key_twice_is_none_and_costs_no_other(tmp_path):
    lines = [
        '{"text": "a"}',
        '{"text": "b", "text": "c"}',
        '{"text": "d", "more": [{"n": 1, "n": 2}]}',
        '{"text": "e"}',
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    rows = rows_of(LocalFile(tmp_path / "set.jsonl", "task.data_dir"), {"text": str})
    assert [row.data.get("text") for row in rows] == ["a", None, None, "e"]
    assert "line 2" in rows[1].error and "field text: twice" in rows[1].error and "field n: twice" in rows[2].error


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", '[{"text": "a", "text": "b"}]'), ("a.csv", "text,text\na,b\n")]
)
def test_a_table_with_two_fields_of_one_name_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^task\.data_dir: .*/{name}: .*field text: twice"):
        rows_of(LocalFile(tmp_path / name, "task.data_dir"), {"text": str})


def test_how_many_rows_there_are_is_said_where_as_many_were_not_published(tmp_path, capsys):
    say_rows.cache_clear()
    (tmp_path / "set.jsonl").write_text('{"text": "a"}\n' * 1200)
    for published, said in ((1319, "set.jsonl: 1,200 rows; 1,319 were published\n"), (None, "set.jsonl: 1,200 rows\n")):
        source = LocalFile(tmp_path / "set.jsonl", "task.data_dir", published=published)
        rows_of(source, {"text": str})
        rows_of(source, {"text": str})  # another arm's
        assert capsys.readouterr().err == said
    rows_of(LocalFile(tmp_path / "set.jsonl", "task.data_dir", published=1200), {"text": str})
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the sample data folder")
def test_nothing_is_said_of_published_files_as_they_are(capsys):
    say_rows.cache_clear()
    for task in (
        Math500(data_dir=str(DATA / "math500")),
        Aime([2024, 2025], data_dir=str(DATA / "aime")),
        Gsm8k(data_dir=str(DATA / "gsm8k")),
        LongBench(["multi_news"], data_dir=str(DATA / "longbench")),
        LongProc(["countdown_0.5k", "tom_tracking_0.5k", "path_traversal_0.5k"], data_dir=str(DATA / "longproc")),
        LongGenBench("long", data_dir=str(DATA / "longgenbench")),
        ManyProblems(30, data_dir=str(DATA / "longgenbench_other")),
    ):
        assert len(task) and capsys.readouterr().err == ""
    assert len(LongBench(["qasper"], data_dir=str(DATA / "longbench_mini"))) == 9
    assert capsys.readouterr().err == "qasper.jsonl: 9 rows; 200 were published\n"
