"""The replay: what a model reads again, what of it a method is shown, and that it leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver import RAGGED, numbers, slow
from test_protocol import TEMPLATE, byte_level
from zoo import random_model

from kvbench import KVCache
from kvbench.backends.hf.layers import attention_modules
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for, method_named, output_weight, use_kvbench_attention
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.vllm.plan import Plan
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.batch import Generation, generate
from kvbench.engine.engine import Engine
from kvbench.engine.replay import Pass, Template
from kvbench.engine.request import QuestionTokens
from kvbench.measure.render import render
from kvbench.method import Method, Needs, Prompt, Replay, Replayed
from kvbench.tasks import Sample

REPLAY = Replay(40, "Again.", "And on, from", 3)
NEEDS = Needs(prefix=True, replay=REPLAY)
CLOSE = 1e-4  # of queries and keys of the order of 10, summed up in another order


class Seeing(Method):
    """Keeps all prompts that it is shown."""

    def __init__(self, needs: Needs = NEEDS) -> None:
        self.needs = needs
        self.prompts: dict[int, Prompt] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.prompts[layer] = prompt


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_context_is_cut_into_chunks_that_are_asked_for_by_what_came_before_them() -> None:
    template = Template(lambda text: list(text.encode()), (1, 2), (3,), bos=9)
    replay = Replay(4, "A", "B", overlap=3)
    rows = [[1, 2, *range(10, 16)], [9, *range(20, 23)], [30]]
    assert list(template.passes(rows, replay)) == [
        Pass(0, 2, 6, [65, 3, 10, 11, 12, 13]),
        Pass(0, 6, 8, [66, 11, 12, 13, 3, 14, 15]),
        Pass(1, 1, 4, [65, 10, 20, 21, 22]),
        Pass(2, 0, 1, [65, 10, 30]),
    ]
    assert [one[:3] for one in template.passes(rows[:1], Replay(None, "A"))] == [(0, 2, 8)]
    longer = replace(template, header=(1, 2, 4))
    assert [longer.prefix(ids) for ids in ([1, 2, 4, 5], [1, 2, 5], [1, 5], [9, 1, 2])] == [3, 2, 0, 1]


@pytest.mark.parametrize("bos", [False, True])
def test_a_template_is_what_is_around_a_users_text(bos: bool) -> None:
    tokenizer, sample = byte_level(bos, TEMPLATE), Sample(id="one", prompt="Sky: blue.", answers=(), max_new_tokens=1)
    template = Template.of(tokenizer, "x")
    assert tokenizer.decode(template.header) == "<s><|user|>"
    assert tokenizer.decode(template.suffix) == "\n[26 Jul 2024]<|assistant|>"
    wrapped, raw = (render(sample, tokenizer, chat).ids for chat in (True, False))
    assert template.prefix(wrapped) == len(template.header) and template.prefix(raw) == bos
    without = Template.of(byte_level(bos), "x")
    assert (without.header, without.suffix, without.prefix(raw)) == ((), (), bos)


# -- what is shown -----------------------------------------------------------------------------------------------------


def looped(loaded: Any, rows: Sequence[Sequence[int]], method: Method, **options: Any) -> tuple[Generation, Engine]:
    lengths = list(map(len, rows))
    engine = engine_for(loaded.model, lengths, method, Budget(None), (), loaded.tokenizer, new_tokens=9)
    return generate(ModelRunner(loaded.model), rows, engine, max_new_tokens=3, **options), engine


def check(loaded: Any, rows: Sequence[Sequence[int]], layers: dict[int, Prompt]) -> None:
    """Queries, keys and norms are those of one pass over the prompt and what is read after it."""
    passes = list(Template.of(loaded.tokenizer, "x").passes(rows, REPLAY))
    assert len(passes) > len(rows)
    for number, (row, start, stop, ids) in enumerate(passes):
        norms: list[torch.Tensor] = []
        module = attention_modules(loaded.model)[min(layers)]
        note = module.register_forward_pre_hook(
            lambda _, args, given, noted=norms: noted.append((args or [given["hidden_states"]])[0]), with_kwargs=True
        )
        whole = Seeing(Needs(query_window=10**6))
        looped(loaded, [[*rows[row], *ids]], whole)
        note.remove()
        for layer, prompt in layers.items():
            shown, at = prompt.replayed[number], slice(len(rows[row]), None)
            assert (shown.row, shown.start, shown.stop) == (row, start, stop)
            torch.testing.assert_close(shown.queries, whole.prompts[layer].queries[0, :, at], rtol=0, atol=CLOSE)
            torch.testing.assert_close(shown.keys, whole.prompts[layer].keys[0, :, at], rtol=0, atol=CLOSE)
        expected = norms[0][0, at].norm(dim=1)
        torch.testing.assert_close(layers[min(layers)].replayed[number].norms, expected, rtol=1e-4, atol=0)


class Of:
    """A random model, as if it was loaded."""

    def __init__(self, family: str, tokenizer: Any) -> None:
        self.model, self.tokenizer = random_model(family), tokenizer
        use_kvbench_attention(self.model)


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text", "gpt_oss", "qwen3", "olmo2", "deepseek_v3")])
def test_a_replay_shows_what_the_model_does_when_it_reads_on(family: str, tiny: Loaded) -> None:
    """Rows of unequal length, read in chunks; with windows and sinks."""
    loaded, seeing = Of(family, tiny.tokenizer), Seeing()
    rows = RAGGED[1:]
    _, engine = looped(loaded, rows, seeing, prefill_chunk=50)
    assert list(seeing.prompts) == list(engine.shape.sparse_layers)
    check(loaded, rows, seeing.prompts)


def test_it_counts_as_prefill_and_leaves_nothing(tiny: Loaded) -> None:
    seeing = Seeing()
    generation, engine = looped(tiny, RAGGED, seeing)
    plain, other = looped(tiny, RAGGED, Method())
    assert generation.tokens == plain.tokens and len(generation.step_ms) == len(plain.step_ms)
    assert 0 < generation.prefill_ms["replay"] < generation.ttft_s * 1e3
    read = sum(one.queries.shape[1] for one in seeing.prompts[0].replayed)
    assert generation.audit["replay_tokens"] == read / len(RAGGED) and "replay_tokens" not in plain.audit
    for mine, theirs in zip(engine.stores.values(), other.stores.values(), strict=True):
        assert mine.lengths == theirs.lengths
        assert all(map(torch.equal, mine.device.resident()[:2], theirs.device.resident()[:2]))


def same(one: Replayed, other: Replayed) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("queries", "keys", "norms"))


def test_of_a_shared_prefill_each_replay_is_made_once(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Needs(prefix=True, replay=Replay(None, "Once more."))
    needs = [Needs(), NEEDS, other, NEEDS]
    passes: list[Any] = []
    monkeypatch.setattr(tiny.model.base_model, "forward", _counted(tiny.model.base_model.forward, passes))
    shared = prefill_once(tiny.model, RAGGED, needs, max_new_tokens=9, tokenizer=tiny.tokenizer)
    assert len(passes) == 1 + (4 + 3 + 2) + 3
    monkeypatch.undo()
    for own in (NEEDS, other):
        lent, alone = Seeing(own), Seeing(own)
        generation, _ = looped(tiny, RAGGED, lent, prefilled=shared)
        assert generation.audit == looped(tiny, RAGGED, alone)[0].audit
        for layer, prompt in alone.prompts.items():
            assert prompt.prefixes == lent.prompts[layer].prefixes
            assert all(map(same, prompt.replayed, lent.prompts[layer].replayed))
    unknown = Seeing(Needs(prefix=True, replay=Replay(30, "Again.")))
    with pytest.raises(ValueError, match="recorded less"):
        looped(tiny, RAGGED, unknown, prefilled=shared)


def _counted(forward: Any, calls: list[Any]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    return counted


def test_of_a_question_that_comes_after_it_nothing_is_repeated(tiny: Loaded) -> None:
    seeing, question = Seeing(), numbers(7, seed=9)
    looped(tiny, RAGGED[1:2], seeing, question=QuestionTokens([question], at_once=True))
    check(tiny, RAGGED[1:2], seeing.prompts)
    assert seeing.prompts[0].replayed[-1].stop == len(RAGGED[1])


@pytest.mark.parametrize("chunk", [None, *slow(40)])
def test_generate_of_transformers_replays_too(tiny: Loaded, chunk: int | None) -> None:
    rows = RAGGED[1:]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    options |= {} if chunk is None else {"prefill_chunk_size": chunk}
    made = []
    for method in (seeing := Seeing(), Method()):
        cache = KVCache(tiny.model, method, None, dense_layers=(), tokenizer=tiny.tokenizer, prompt_length=width)
        made.append(tiny.model.generate(ids, past_key_values=cache, **options))
        assert cache.copy().audit().get("replay_tokens", 0) == (0 if type(method) is Method else 109.5)
    assert torch.equal(*made)
    check(tiny, rows, seeing.prompts)


# -- output weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox", *slow("gemma3_text", "phi3")])
def test_output_weights_are_what_a_head_adds_to_the_hidden_states(family: str, tiny: Loaded) -> None:
    model = Of(family, tiny.tokenizer).model
    weight, module = output_weight(model, 1), attention_modules(model)[1]
    heads = torch.randn(weight.shape[:2], generator=torch.Generator().manual_seed(0))
    expected = (getattr(module, "o_proj", None) or module.dense)(heads.flatten())
    bias = (getattr(module, "o_proj", None) or module.dense).bias
    found = torch.einsum("hd,hde->e", heads, weight) + (0 if bias is None else bias)
    torch.testing.assert_close(found, expected)


def test_attention_without_known_output_weights_is_refused(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match="GPT2Attention: no output weight"):
        output_weight(Of("gpt2", tiny.tokenizer).model, 0)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_again_is_refused(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match="tokenizer=None: Seeing needs"):
        KVCache(tiny.model, Seeing(), None)
    with pytest.raises(ConfigError, match="tokenizer=None: a replay needs"):
        prefill_once(tiny.model, RAGGED, [NEEDS], max_new_tokens=2)
    cache = KVCache(tiny.model, Seeing(), None, tokenizer=tiny.tokenizer)
    with pytest.raises(ConfigError, match="inputs_embeds: Seeing"):
        tiny.model(inputs_embeds=torch.zeros(1, 9, tiny.model.config.hidden_size), past_key_values=cache)
    with pytest.raises(ConfigError, match="method=kvzip: .*vLLM"):
        Plan("kvzip")
    with pytest.raises(ValueError, match="prefix=True"):
        Needs(replay=REPLAY)
    with pytest.raises(ValueError, match="chunk=0"):
        Replay(0, "")
    with pytest.raises(ConfigError, match=r"^method.chunk=0"):
        method_named("kvzip", chunk=0)
