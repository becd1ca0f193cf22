"""The Triton kernels give what the operators' references in torch give: on a GPU, or in Triton's interpreter, which
`tests/test_operators.py` starts."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 must be set before Triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="comes with kvbench[triton], and on a GPU with torch")

from operator_cases import Call, calls

CALLS = list(calls())
FIRST = {call.operator.name: call for call in reversed(CALLS)}  # those of the quick tests
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            call,
            id=f"{call.operator.name}-{call.id}",
            marks=[pytest.mark.slow] * (call is not FIRST[call.operator.name]),
        )
        for call in CALLS
    ],
)
def test_a_kernel_gives_what_its_reference_gives(call: Call) -> None:
    if call.large and DEVICE == "cpu":
        pytest.skip("too much for the interpreter")
    here, there = (call.arguments() for _ in range(2))
    there = tree_map(lambda part: part.to(DEVICE) if isinstance(part, torch.Tensor) else part, there)
    expected, got = call.operator.reference(*here), call.operator.launch(*there)
    # what is given, and all that may have been written in place
    for ours, theirs in zip(tree_leaves((expected, here)), tree_leaves((got, there)), strict=True):
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(theirs.cpu(), ours, rtol=call.close, atol=call.close, equal_nan=True)
        else:
            assert ours == theirs
