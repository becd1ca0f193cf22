"""What attention reads of a prompt, which a method may ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import CLOSE, PROMPT, RAGGED, run_loop

from kvbench import KVCache
from kvbench.backends.hf.layers import attention_modules
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.method import Method, Needs, Prompt


class Seeing(Method):
    """Notes the prompts."""

    needs = Needs(inputs=True)

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.prompts: dict[int, Prompt] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.prompts[layer] = prompt


def read_by_attention(loaded: Loaded, row: list[int]) -> dict[int, torch.Tensor]:
    """[n, E] of each layer, by hooks of this test."""
    noted: dict[int, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, given, at=layer: noted.update({at: (args or [given["hidden_states"]])[0][0]}),
            with_kwargs=True,
        )
        for layer, module in attention_modules(loaded.model).items()
    ]
    with torch.inference_mode():
        loaded.model(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    return noted


def check(seen: Seeing, loaded: Loaded, rows: list[list[int]], dense: tuple[int, ...] = ()) -> None:
    assert {*seen.prompts} == {*range(len(attention_modules(loaded.model)))} - {*dense}
    for row, ids in enumerate(rows):
        expected = read_by_attention(loaded, ids)
        for layer, prompt in seen.prompts.items():
            assert prompt.inputs is not None
            torch.testing.assert_close(prompt.inputs[row, : len(ids)], expected[layer], rtol=0, atol=10 * CLOSE)


@pytest.mark.parametrize("chunk", [None, 37])
def test_a_method_sees_what_attention_reads_of_every_row_and_chunk(loaded: Loaded, chunk: int | None) -> None:
    method = Seeing()
    run_loop(loaded, RAGGED, method, None, steps=1, dense_layers=(0,), prefill_chunk=chunk)
    check(method, loaded, RAGGED, dense=(0,))


def test_under_generate_too_and_from_a_prefill_that_is_shared(tiny: Loaded) -> None:
    loaded, method = tiny, Seeing()
    longest = max(map(len, RAGGED))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in RAGGED])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in RAGGED])
    cache = KVCache(loaded.model, method, dense_layers=())
    loaded.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3, do_sample=False)
    check(method, loaded, RAGGED)
    shared = prefill_once(loaded.model, [PROMPT], [Needs(), Seeing.needs], max_new_tokens=4)
    run_loop(loaded, [PROMPT], method, None, steps=1, prefilled=shared)
    check(method, loaded, [PROMPT])
    shared = prefill_once(loaded.model, [PROMPT], [Needs()], max_new_tokens=4)
    with pytest.raises(ValueError, match="recorded less"):
        run_loop(loaded, [PROMPT], method, None, steps=1, prefilled=shared)
