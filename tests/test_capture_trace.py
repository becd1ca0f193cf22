"""The captured queries, keys and values are those that attention computes with."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "capture_trace.py"
WORDS = ["model=dummy-tiny", "task=passkey", "task.lengths=[300]", "dtype=float32"]


def test_a_trace_recomputes_what_attention_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of a layer's output projection, over the window and the generated tokens."""
    script = runpy.run_path(str(SCRIPT))
    outputs: list[torch.Tensor] = []
    prepare = script["prepare"]

    def watched(config: Any) -> Any:
        arm = prepare(config)
        projection = arm.loaded.model.model.layers[1].self_attn.o_proj
        projection.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0].clone()))
        return arm

    monkeypatch.setitem(script["capture"].__globals__, "prepare", watched)
    arrays = script["capture"](WORDS, [1], 32, 5, 0)
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


@pytest.mark.slow
def test_a_file_holds_the_chosen_layers(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    options = ["--layers", "1,0", "--window", "16", "--generate", "3"]
    subprocess.run([sys.executable, SCRIPT, file, *options, *WORDS], check=True, capture_output=True)
    traces = runpy.run_path(str(SCRIPT))["load"](file)
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
    monkeypatch.setattr(sys, "argv", ["capture_trace.py", str(tmp_path / "x.npz"), *WORDS[:2], *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x.npz").exists()
