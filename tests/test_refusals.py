"""Input that no check of its own kind meets: each is one line of the command line, with exit code 2."""

from __future__ import annotations

import pytest

from kvbench.cli.main import main

SWEEP = ["-m", "method=full,quest"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-m", "hydra.sweeper.arms=[quest]"], "hydra.sweeper.arms=[quest]: expected a list of mappings"),
        (["-m", "hydra.sweeper.arms=5"], "hydra.sweeper.arms=5: expected a list of mappings"),
        (["-m", "hydra.sweeper.params=abc"], "hydra.sweeper.params=abc: expected a mapping"),
        ([*SWEEP, "hydra.sweep.dir="], "hydra.sweep.dir=: expected a folder"),
        (["--cfg", "job", "--resolve", "method=quest", "method.page_size=${foo}"], "--resolve: "),
        (["backend.name=foo"], "backend.name=foo: "),
        (["method=pariskv", "budget=null", "method.preset=abc"], "method.preset=abc: "),
        (["method=icecache", "method.fov_share=nan"], "method.fov_share=nan: "),
        ([f"results_dir=/{'x' * 300}"], f"results_dir=/{'x' * 300}: File name too long; expected"),
    ],
    ids=lambda value: value[-1][:30] if isinstance(value, list) else "",
)
def test_it_is_refused_in_a_line_that_names_it(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvbench: {line}") and said.count("\n") == 1
