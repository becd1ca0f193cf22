"""Methods that score the prompt's tokens and keep the best; the example of docs/guide/write_a_method.md."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import drive, stream
from omegaconf import OmegaConf

from kvbench.config import MethodConfig, bind_methods
from kvbench.method import Method, Prompt

bind_methods()

from methods.blocks import scorer  # noqa: E402

PAGE = (Path(scorer.__file__).parents[2] / "docs/guide/write_a_method.md").read_text()


def block(language: str, text: str) -> str:
    """The fenced code block of that page that holds `text`."""
    return next(found for found in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if text in found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files of the example, as a user has them beside the package."""
    here = tmp_path_factory.mktemp("own")
    (here / "valuenorm.py").write_text(block("python", "class ValueNorm"))
    (here / "conf" / "method").mkdir(parents=True)
    config = block("yaml", "valuenorm.ValueNorm").replace("methods.valuenorm", "valuenorm")
    (here / "conf" / "method" / "valuenorm.yaml").write_text(config)
    return here


@pytest.fixture
def valuenorm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Method]:
    """Builds the example from its YAML file."""
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    config = OmegaConf.load(folder / "conf" / "method" / "valuenorm.yaml")

    def made() -> Method:
        method: Method = MethodConfig.of(config).build()
        return method

    return made


# -- the example of the page -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_runs_from_a_folder_of_ones_own(folder: Path) -> None:
    command = "-m kvbench --config-dir conf method=valuenorm budget=32 protocol.accounting=unified"
    words = [*command.split(), "task.lengths=[300]", "task.limit=1"]
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "32.0 ± 0.0 = 1.00 C" in done.stdout


def test_the_example_keeps_the_longest_values(valuenorm: Callable[[], Method]) -> None:
    fixed = stream(120, 75, steps=3)
    for at in drive(fixed, valuenorm(), 20).seen:
        for row, length in enumerate(fixed.lengths):
            for head, kept in enumerate(at.sets(row)):
                norms = fixed.values[at.layer, row, head, :length].norm(dim=-1)
                assert kept == {*norms.topk(20).indices.tolist(), *range(length, at.lengths[row])}


# -- scores, windows and layers of any kind ----------------------------------------------------------------------------


class Given(scorer.Scorer):
    """Scores given beforehand, [N] for all rows and heads alike; NaN at and beyond a row's length."""

    def __init__(self, scores: list[float], window: int = 0, layers: tuple[int, ...] = ()) -> None:
        self.scores, self.window, self.layers = scores, window, layers

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        batch, kv_heads, longest, _ = prompt.keys.shape
        scores = torch.tensor(self.scores[:longest]).expand(batch, kv_heads, -1).clone()
        for row, length in enumerate(prompt.lengths):
            scores[row, :, length:] = torch.nan
        return scores

    def layer_budgets(self, length: int) -> list[int]:
        return list(self.layers) or super().layer_budgets(length)


def kept(method: Method, *lengths: int, budget: Any = 4, accounting: str = "paper") -> list[set[int]]:
    """Prompt tokens that the first KV head attends in the first step: by row, then by layer."""
    first = [at for at in drive(stream(*lengths, steps=2), method, budget, accounting=accounting).seen if at.step == 1]
    return [{id for id in at.sets(row)[0] if id < lengths[row]} for row in range(len(lengths)) for at in first]


def test_the_best_scores_are_kept_and_of_equal_ones_the_earlier() -> None:
    assert kept(Given([1.0, 5, 2, 5, 0, 5, 3, 2]), 8)[0] == {1, 3, 5, 6}
    assert kept(Given([1.0, 1, 1, 2, 1, 1, 1, 1]), 8)[0] == {0, 1, 2, 3}


def test_the_window_is_kept_whatever_its_scores() -> None:
    assert kept(Given([1.0, 5, 2, 5, 0, 5, 3, -9], window=2), 8)[0] == {1, 3, 6, 7}


def test_rows_have_windows_of_their_own_and_nothing_beyond_their_end_counts() -> None:
    rows = kept(Given([1.0, 5, 2, 5, 0, 5, 9, 9], window=1), 8, 5)
    assert (rows[0], rows[2]) == ({1, 6, 7, 3}, {1, 2, 3, 4})


def test_a_prompt_within_its_budget_is_kept_whole_beside_one_that_is_not() -> None:
    rows = kept(Given([float(token) for token in range(12)]), 12, 3)
    assert (rows[0], rows[2]) == ({8, 9, 10, 11}, {0, 1, 2})


def test_layers_keep_their_own_share() -> None:
    layers = kept(Given([float(token) for token in range(8)], layers=(6, 2)), 8)
    assert layers == [{2, 3, 4, 5, 6, 7}, {6, 7}]


def test_where_generated_tokens_count_a_quarter_of_the_budget_is_the_rolling_window() -> None:
    best = [9.0, 9, 9, 9, 9, 9, 0, 0, 0, 0, 0, 0]
    seen = drive(stream(12, steps=40), Given(best, window=3), 8, accounting="unified").seen
    for at in seen:
        length = at.lengths[0]
        assert at.sets(0)[0] == {0, 1, 2, 3, 4, 5, length - 2, length - 1}


def test_a_scorer_without_a_score_says_so() -> None:
    with pytest.raises(NotImplementedError):
        drive(stream(20), scorer.Scorer(), 8)
