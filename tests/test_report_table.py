"""Claims about the long table that all reports are views of."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvbench.report.data.frame import collect
from kvbench.report.data.table import COLUMNS, Table

SHIPPED = Path(__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def table():
    return Table.of(collect([SHIPPED / "reference_tiny.tar.xz"]), ["probe.every=0"])


def test_a_line_has_what_the_run_says_of_its_samples(table):
    long = table.numbers(["score", "against_full", "device_kv_bytes"])
    assert [*long] == [*COLUMNS]
    for line in long.itertuples():
        run = table.runs[line.arm]
        if line.quantity == "score":
            assert (line.value, line.low, line.high, line.n) == run.score()[:4]
        elif line.quantity == "against_full":
            assert (line.value, line.low, line.high, line.n) == run.against_full()[:4]
            assert table.runs[line.paired].is_full
        else:
            assert line.value == run.arm["device_kv_bytes"]


def test_a_score_of_groups_is_the_mean_of_theirs(table):
    arm = next(arm for arm in table.arms if len(table.strata(arm)) > 2)
    first, second = table.strata(arm)[1:3]
    both = table.number(arm, "score", f"{first} + {second}")
    means = [table.number(arm, "score", group).value for group in (first, second)]
    assert both.value == pytest.approx(sum(means) / 2)


def test_a_lead_is_turned_with_its_arms(table):
    leads = table.leads(list(table.arms)[:4])
    turned = leads.set_index(["arm", "paired"])
    for line in leads.itertuples():
        back = turned.loc[(line.paired, line.arm)]
        assert (line.value, line.low) == (-back["value"], -back["high"])


def test_an_export_is_the_table_with_what_its_arms_are(table, tmp_path):
    table.to_parquet(tmp_path / "long.parquet")
    table.to_csv(tmp_path / "long.csv")
    parquet, csv = pd.read_parquet(tmp_path / "long.parquet"), pd.read_csv(tmp_path / "long.csv")
    assert len(parquet) == len(csv) == len(table.frame)
    assert parquet["value"].tolist() == csv["value"].tolist() == table.frame["value"].tolist()
    assert {*COLUMNS, "method", "budget", "task", "run"} <= {*parquet}


def test_wide_has_a_line_an_arm(table):
    wide = table.wide(["score", "kl_mean"])
    assert wide.index.tolist() == list(table.arms)
    arm = wide.index[0]
    assert wide.at[arm, "score.low"] == table.number(arm, "score").low
    assert wide.at[arm, "method"] == table.runs[arm].label("method")
