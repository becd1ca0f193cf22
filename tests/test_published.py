"""The published numbers: their averages against their columns, and the runs of ours that they stand beside."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import yaml

from kvbench.cli.checks import check
from kvbench.config import ConfigError, choices, conf_dir
from kvbench.report.data import papers as published
from kvbench.report.data.papers import FOLDER
from kvbench.tasks.longbench import SUBSETS
from kvbench.tasks.longproc.task import SUBSETS as LEVELS
from kvbench.tasks.ruler.task import ALL_SUBSETS

# Averages, and the weights of the columns they are printed to be of; None: plain, over all others.
LONGBENCH_V2 = {"short": 180, "medium": 215, "long": 108}
AVERAGES = {
    "icecache_table1": ("Avg", None),
    "icecache_table2": ("Avg", None),
    "icecache_table5": ("Avg", None),
    "icecache_longgenbench": ("avg", {"once": 1, "range": 1, "periodic": 1}),
    "pariskv_longbench_v2": ("Overall", {"SE": 59, "SH": 121, "ME": 88, "MH": 127, "LE": 45, "LH": 63}),
    "pariskv_ruler": ("avg", None),
    "lychee_table1": ("overall", LONGBENCH_V2),
    "lychee_table3": ("overall", LONGBENCH_V2),
    "lychee_table6": ("avg", None),
    "kvpress_ruler": ("Avg", None),
}
DECIMALS = {"icecache_longgenbench": 3, "lychee_table1": 2, "lychee_table3": 2}
DECIMALS |= {"pariskv_longbench_v2": 2, "pariskv_ruler": 2, "kvpress_ruler": 2}

# Methods that the tables name and conf/method has no file for yet.
COMING = {"pyramidkv", "pariskv", "lychee", "racc_code", "snapkv_racc", "pyramidkv_racc"}

RUN = ["task", "group", "metric", "settings"]  # of ours that stands beside a cell

each_table = pytest.mark.parametrize("id", published.ids())


@each_table
def test_every_table_is_whole(id):
    table = published.table(id)
    frame = table.frame
    assert list(frame) == ["row", "column", "value", "note", "model", "method", "budget", *RUN]
    assert len(frame) and table.title == published.ids()[id] and table.source
    assert not frame.duplicated(["row", "column"]).any()
    assert (frame["row"] != "").all() and (frame["column"] != "").all()
    assert all(note for value, note in zip(frame["value"], frame["note"], strict=True) if math.isnan(value))
    assert all(budget is None or type(budget) in (int, float) for budget in frame["budget"])


@pytest.mark.parametrize("id", AVERAGES)
def test_a_printed_average_is_the_mean_of_its_columns_or_noted_as_none(id):
    average, weights = AVERAGES[id]
    unit = 10 ** -DECIMALS.get(id, 1)
    checked = 0
    for row, cells in published.table(id).frame.groupby("row"):
        values = cells.set_index("column")["value"]
        of = weights or dict.fromkeys(values.index.drop(average), 1)
        total = sum(of.values())
        mean = sum(values[column] * weight for column, weight in of.items()) / total
        # Half a unit for the average's own rounding, and three standard deviations of what its columns' adds up to.
        spread = unit / math.sqrt(12) * math.hypot(*of.values()) / total
        right = abs(values[average] - mean) <= unit / 2 + 3 * spread
        note = cells.set_index("column")["note"][average]
        told = re.search(r"the mean of its columns is ([\d.]+)", note)
        assert right == (told is None), f"{row}: printed {values[average]}, mean {mean:.3f}, note {note!r}"
        if told:
            assert abs(float(told[1]) - mean) <= unit / 2 + 1e-9, row
        checked += 1
    assert checked


def test_the_known_misprints_and_no_others_are_noted():
    noted = {
        (id, row)
        for id in AVERAGES
        for row, note in published.table(id).frame[["row", "note"]].itertuples(index=False)
        if "mean of its columns" in note
    }
    llama, mistral = "Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.2"
    icecache = {
        *(("icecache_table1", f"{llama}, {method}") for method in ("SnapKV", "MagicPIG", "PQCache")),
        *(("icecache_table1", f"{mistral}, {one}") for one in ("Full", "StreamingLLM", "MagicPIG", "IceCache 64")),
        ("icecache_table2", "Qwen3-32B, IceCache 128"),
        ("icecache_table5", f"{llama}, IceCache reuse 256"),
    }
    ruler = {("pariskv_ruler", method) for method in ("MagicPIG", "ShadowKV", "Twilight")}
    others = {one for one in noted if one[0] == "pariskv_longbench_v2"}
    assert noted - others == icecache | ruler | {("lychee_table1", "RaaS")}
    assert len(others) == 19 and not [row for _, row in others if row.endswith("Full")]


def test_the_tables_with_averages_are_those_that_print_one():
    named = {id for id in published.ids() if {"avg", "overall"} & set(published.table(id).frame["column"].str.lower())}
    assert named == set(AVERAGES)


@pytest.mark.parametrize(
    "id, row, column, value",
    [
        ("icecache_table1", "Llama-3.1-8B-Instruct, IceCache 256", "Avg", 49.0),
        ("icecache_table1", "Mistral-7B-Instruct-v0.2, StreamingLLM", "PRe", 15.6),
        ("icecache_table3", "IceCache", "GSM8K", 47.4),
        ("icecache_fig8", "IceCache reuse", "300k", 153),
        ("pariskv_longbench_v2", "DS-R1-8B, Full", "LE", 11.11),
        ("pariskv_ttft", "ShadowKV", "384K", 309.26),
        ("racc_table2", "Mistral, RACC", "16K range", 48.5),
        ("racc_table4", "Mistral-7B-v0.2, SnapKV + RACC", "qmsum", 25.53),
        ("racc_text", "RACC", "gain over the compressor, %, most", 9.6),
        ("icecache_text", "LongChat-7B-v1.5, IceCache 256", "score, % of full", 99.4),
        ("pariskv_speed", "Llama-3.1-8B, ParisKV", "1M speed-up over PQCache", 44.4),
        ("lychee_pilot", "Quest, structure-aware chunks", "change over pages of 16, JSON", 15.0),
        ("kvcachefactory_gqa", "PyramidKV, a set per KV head", "hotpot", 46.36),
        ("lychee_table6", "LycheeCluster, 8k", "multivalue", 96.4),
        ("lychee_table5", "Code", "max length", 4e6),
        ("kvpress_ruler", "Qwen3-8B, SnapKV, 0.5 dropped", "Avg", 55.71),
        ("kvpress_ruler", "Llama-3.1-8B-Instruct, AdaSnapKV, query-aware, 0.875 dropped", "vt", 72.04),
        ("kvpress_board", "Qwen3-8B, KVzip", "0.875 dropped", 92.24),
    ],
)
def test_numbers_are_as_printed(id, row, column, value):
    frame = published.table(id).frame
    (found,) = frame[(frame["row"] == row) & (frame["column"] == column)]["value"]
    assert found == value


def test_printed_numbers_follow_from_other_printed_numbers():
    """What the papers' texts say of their own tables, within a unit of the last place of either."""

    def cell(id, row, column):
        return published.table(id).frame.set_index(["row", "column"]).loc[(row, column), "value"]

    for model in ("Qwen3-32B", "LongChat-7B-v1.5"):
        full = cell("icecache_table2", f"{model}, Full", "Avg")
        for size in (64, 256):
            share = 100 * cell("icecache_table2", f"{model}, IceCache {size}", "Avg") / full
            told = cell("icecache_text", f"{model}, IceCache {size}", "score, % of full")
            assert told == pytest.approx(share, abs=0.1)
    for rival in ("PQCache", "MagicPIG"):
        times = [cell("pariskv_speed", f"Llama-3.1-8B, {one}", "1M batch 1 ms/token") for one in (rival, "ParisKV")]
        told = cell("pariskv_speed", "Llama-3.1-8B, ParisKV", f"1M speed-up over {rival}")
        assert told == pytest.approx(times[0] / times[1], rel=0.02)
    gains = []
    for model in ("Llama-3.1-8B", "Mistral-7B-v0.2"):
        for method in ("SnapKV", "PyramidKV"):
            for column in ("gov_report", "multi_news", "qmsum"):
                before, gained = (cell("racc_table4", f"{model}, {method}{more}", column) for more in ("", " + RACC"))
                gains.append(100 * (gained / before - 1))
    told = [cell("racc_text", "RACC", f"gain over the compressor, %, {end}") for end in ("least", "most")]
    assert [min(gains), max(gains)] == pytest.approx(told, abs=0.2)


@pytest.mark.parametrize(
    "id, row, budget",
    [
        ("icecache_longgenbench", "PQCache", 256),
        ("pariskv_ruler", "Quest", 2048),
        ("pariskv_ruler", "ShadowKV", 32 + 304 + 2048),
        ("pariskv_ruler", "RetroInfer", 0.013),
        ("pariskv_ruler", "PQCache", 0.2),
        ("pariskv_ruler", "Twilight", None),
        ("pariskv_gpqa", "MagicPIG++", None),
        ("pariskv_longbench_v2", "DS-R1-8B, ShadowKV", 32 + 384 + 104),
        ("pariskv_longbench_v2", "Qwen3-8B, FreeKV", 448),
        ("pariskv_longbench_v2", "Qwen3-8B, ParisKV", 420),
    ],
)
def test_budgets_are_those_of_each_row(id, row, budget):
    frame = published.table(id).frame
    assert set(frame[frame["row"] == row]["budget"]) == {budget}


def test_rows_name_what_was_measured():
    """Quest with other chunks is no LycheeCluster, and the ablated index no ParisKV."""
    assert set(published.table("lychee_pilot").frame["method"]) == {"quest_structure"}
    ablation = published.table("pariskv_ablation").frame
    assert list(ablation["method"]) == [None, None, "pariskv", "pariskv"]
    assert set(published.table("icecache_fig8").frame["model"]) == {"qwen3-4b-instruct-2507"}
    models = {"llama3.1-8b-instruct", "mistral-7b-instruct-v0.2"}
    assert set(published.table("racc_table4").frame["model"]) == models


def test_what_could_not_be_measured_has_no_value_and_a_reason():
    frame = published.table("pariskv_throughput").frame.set_index(["row", "column"])
    assert math.isnan(frame.loc[("Full", "batch 8"), "value"])
    assert frame.loc[("Full", "batch 8"), "note"] == "out of memory"
    assert frame.loc[("MagicPIG", "batch 1"), "note"] == "repeats its latency in ms"


def test_names_are_those_of_conf_or_of_methods_that_are_coming():
    names = yaml.safe_load((FOLDER / "names.yaml").read_text())
    assert set(names["models"].values()) <= set(choices("model"))
    assert set(names["methods"].values()) <= set(choices("method")) | COMING


def test_a_method_that_conf_lacks_is_published_only():
    frame = published.table("icecache_table3").frame.set_index("row")
    assert frame.loc["IceCache", "method"] == "icecache" and frame.loc["IceCache", "budget"] == 0.1
    assert set(published.table("pariskv_ruler").frame.set_index("row").loc["SOCKET", "method"]) == {None}
    assert frame.loc["Full", "budget"] is None


@each_table
def test_mapped_groups_are_groups_of_the_task(id):
    frame = published.table(id).frame
    for task, group, metric in zip(frame["task"], frame["group"], frame["metric"], strict=True):
        for part in filter(None, group.split(" + ")):
            subset, _, length = part.rpartition("/")
            known = {
                "longbench": part in SUBSETS,
                "passkey": part.isdigit(),
                "ruler": subset in ALL_SUBSETS and length.isdigit(),
                "longproc": part in LEVELS,
                "latency": re.fullmatch(r"\d+ x 1", part),
            }
            assert known[task], part
        timed = task == "latency" and metric not in ("score", "macro")
        assert (metric == "") is (task == "") and (metric == "score" or timed or not group), (task, group, metric)


def runs() -> list[tuple[str, ...]]:
    """The command lines of all runs that some published cell stands beside."""
    words = set()
    for id in published.ids():
        frame = published.table(id).frame
        frame = frame[frame["metric"] != ""]
        for model, method, budget, task, settings in zip(
            *(frame[key] for key in ("model", "method", "budget", "task", "settings")), strict=True
        ):
            if model and method:
                size = "null" if budget is None else str(budget)
                words.add((f"model={model}", f"method={method}", f"budget={size}", f"task={task}", *settings))
    return sorted(words)


@pytest.mark.slow
def test_kvbench_accepts_every_run_that_a_published_cell_stands_beside():
    from hydra import compose, initialize_config_dir

    found = runs()
    assert len(found) > 20
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for words in found:
            config = compose("config", list(words))
            check(config, here=False)


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^paper=icecache_tabel1: .*did you mean icecache_"):
        published.table("icecache_tabel1")


def test_the_list_of_tables_needs_no_pandas():
    code = (
        "import sys; from kvbench.report.data import papers; papers.ids(); print({'pandas', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
