"""A conversation with one `KVCache`: turns, copies, and what is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from driver import (
    CLOSE,
    METHODS,
    SMALL,
    Case,
    Driven,
    drive,
    each_method,
    each_method_in_turn,
    numbers,
    rotate,
    slow,
    stream,
)
from integrity import DROPPED, check, everything, tiers_of
from test_hf import generated, random_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from kvbench import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.config import ASSETS, ConfigError
from kvbench.method import Method, Needs, Selection
from kvbench.tasks.passkey import QUESTION, Passkey

LENGTH, TURN, NEW = 120, 15, 6
LARGE = 500


@pytest.fixture(scope="module")
def sdpa() -> PreTrainedModel:
    return random_model("llama")


@pytest.fixture(scope="module")
def model(sdpa: PreTrainedModel) -> PreTrainedModel:
    """The same weights; of it the caches are made."""
    return copy.deepcopy(sdpa)


@pytest.fixture(scope="module")
def wide() -> PreTrainedModel:
    """Heads of the shape of `HEADS`, which some methods need."""
    return random_model("llama", head_dim=32)


@pytest.fixture(scope="module")
def tokenizer(dummies: Callable[[str], Loaded]) -> Any:
    return dummies("dummy-tiny").tokenizer


def ids_of(*seeds: int, length: int = LENGTH) -> torch.Tensor:
    """A prompt or turn, a row for each seed."""
    return torch.tensor([numbers(length, seed) for seed in seeds])


def say(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None, new: int = NEW, padding: int = 0) -> torch.Tensor:
    """The conversation with the model's answer; the first row begins with `padding` columns of padding."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    asked = {"past_key_values": cache} if cache is not None else {}
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **asked)


def chat(model: PreTrainedModel, cache: Any = None, turns: int = 3, rows: int = 2, padding: int = 0) -> torch.Tensor:
    """A conversation of some turns."""
    ids = ids_of(*range(rows))
    for turn in range(1, turns):
        ids = torch.cat([say(model, ids, cache, padding=padding), ids_of(*range(9, 9 + rows), length=TURN + turn)], 1)
    return say(model, ids, cache, padding=padding)


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["after", *slow("decode")])
@pytest.mark.parametrize(("turns", "padding"), [(2, 0), (3, 37)])
def test_turns_of_full_attention_equal_one_prompt_of_the_whole(
    sdpa: PreTrainedModel, model: PreTrainedModel, turns: int, padding: int, question: Any
) -> None:
    """Greedy tokens to the letter, logits closely: matrices of other widths are summed up in another order."""
    cache = KVCache(model, "full", question=question)
    whole = chat(model, cache, turns, padding=padding)
    assert torch.equal(whole, chat(sdpa, None, turns, padding=padding)), "sdpa reads the whole anew at every turn"
    mask = torch.ones_like(whole)
    mask[0, :padding] = 0
    mask, whole = torch.cat([mask, mask[:, :TURN]], 1), torch.cat([whole, ids_of(50, 51, length=TURN)], 1)
    mask[:, LENGTH:] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    rest = {"input_ids": whole[:, cache.get_seq_length() :], "position_ids": positions[:, cache.get_seq_length() :]}
    ours = model(**rest, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
    theirs = sdpa(whole, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


CHATS = ["quest", "snapkv", "icecache", "pariskv", "lychee", "topk", "streaming_llm", "racc"]
CASES = {case.id: case for case in METHODS}


@pytest.mark.parametrize(
    ("name", "question"),
    [*((n, "after") for n in CHATS[::2]), *slow(*((n, "after") for n in CHATS[1::2]), *((n, "decode") for n in CHATS))],
)
def test_every_method_goes_on_in_a_later_turn(
    sdpa: PreTrainedModel, model: PreTrainedModel, tokenizer: Any, name: str, question: Any
) -> None:
    """With a budget of everything as full attention, and with a small one within its rule."""
    settings = {"question": question, "tokenizer": tokenizer, "dense_layers": ()}
    assert torch.equal(chat(model, KVCache(model, CASES[name].build(), LARGE, **settings)), chat(sdpa))
    method = CASES[name].build()
    cache = KVCache(model, method, SMALL, **settings)
    whole = chat(model, cache)
    audit, after = cache.audit(), whole.shape[1] - 1 - LENGTH
    assert audit["over_rule"] is False, cache.engine.audit.broken()
    assert 0 < audit["attended_max"] <= method.rule(3, LENGTH, after) < whole.shape[1]
    # the last token of an answer is read with the turn after it
    assert audit.get("turn_tokens", 0) == (TURN + 1 + 1 + TURN + 2 + 1 if question == "after" else 0)


def test_dense_layers_that_leave_none_to_a_method_are_refused(sdpa: PreTrainedModel, model: PreTrainedModel) -> None:
    layers = {"dense_layers": (0, 1, 2, 3)}
    for name, budget in (("snapkv", SMALL), ("quest", SMALL), ("racc", None)):
        with pytest.raises(ConfigError, match=r"^dense_layers=\[0, 1, 2, 3\]: all that have full attention"):
            KVCache(model, name, budget, **layers)
    assert torch.equal(say(model, ids_of(1), KVCache(model, "full", None, **layers)), say(sdpa, ids_of(1)))


def begun(fixed: Any, case: Case, budget: int, accounting: str = "paper") -> Driven:
    """A prompt and one decode step."""
    return drive(replace(fixed, steps=1), case.build(), budget, left=True, accounting=accounting)


def tokens_of(fixed: Any, first: int, count: int) -> list[torch.Tensor]:
    """Queries, keys and values [layers, B, H, n, D] of some tokens after each row's prompt."""
    return [
        torch.stack([part[:, row, :, n + first : n + first + count] for row, n in enumerate(fixed.lengths)], 1)
        for part in (fixed.queries, fixed.keys, fixed.values)
    ]


def new_ids(fixed: Any, first: int, count: int) -> torch.Tensor:
    return torch.stack([ids[n + first : n + first + count] for ids, n in zip(fixed.tokens, fixed.lengths, strict=True)])


@each_method
def test_a_turn_attends_all_that_is_stored_and_itself(case: Case) -> None:
    """Against a loop over tokens in float64, with what is in any tier; StreamingLLM at places in the cache."""
    fixed = stream(70, 51, steps=8)
    engine = begun(fixed, case, 49).engine
    kept = {layer: tiers_of(store) != DROPPED for layer, store in engine.stores.items()}
    weights = {layer: engine.method.turn_weights(layer) for layer in kept}
    stores, both = engine.stores, (0, 1)
    held = {(layer, row, head): everything(stores[layer], row, head) for layer in kept for row in both for head in both}
    engine.start_turn(new_ids(fixed, 1, 7))
    queries, keys, values = tokens_of(fixed, 1, 7)
    for layer in kept:
        out = engine.attend(layer, queries[layer], keys[layer], values[layer])
        for row, length in enumerate(fixed.lengths):
            for head in range(4):
                past = kept[layer][row, head // 2].nonzero()[:, 0]
                for at in range(7):
                    ids = torch.cat([past, torch.arange(length + 1, length + 2 + at)])
                    query = fixed.queries[layer, row, head, ids[-1]][None].double()
                    key, value = (part[layer, row, head // 2, ids].double() for part in (fixed.keys, fixed.values))
                    value[: len(past)] = held[layer, row, head // 2][2]  # which a method may have written
                    if case.name == "think":  # and keys
                        key[: len(past)] = held[layer, row, head // 2][1]
                    added = torch.zeros(len(ids), dtype=torch.float64)
                    if weights[layer] is not None:
                        added[: len(past)] = weights[layer][row, head // 2, : len(past)]
                    if engine.method.needs.positions == "cache":
                        place = torch.arange(len(ids))
                        query, key = rotate(query, (place - ids)[-1:]), rotate(key, place - ids)
                    expected = (query @ key.T * fixed.scaling + added).softmax(dim=1) @ value
                    torch.testing.assert_close(out[row, head, at], expected[0].float(), rtol=0, atol=CLOSE)


@each_method_in_turn
def test_a_turn_leaves_a_method_as_its_tokens_one_by_one_do(case: Case, accounting: str) -> None:
    """Keys and queries are the stream's, whatever was attended: so the next steps must select the same."""
    fixed, budget = stream(70, 51, steps=12), max(49, (case.config.minimum or {})[accounting] or 0)
    steps = drive(fixed, case.build(), budget, left=True, accounting=accounting)
    turn = begun(fixed, case, budget, accounting)
    turn.engine.start_turn(new_ids(fixed, 1, 8))
    for layer, part in enumerate(zip(*tokens_of(fixed, 1, 8), strict=True)):
        turn.engine.attend(layer, *part)
    seen = len(turn.seen)
    for at in range(9, 12):
        turn.engine.start_step(new_ids(fixed, at, 1)[:, 0])
        for layer, part in enumerate(zip(*tokens_of(fixed, at, 1), strict=True)):
            out = turn.engine.attend(layer, *part)
            torch.testing.assert_close(out[..., 0, :], steps.outputs[at, layer], rtol=0, atol=CLOSE)
        turn.engine.settle()
    last = [(one.layer, one.lengths, one.index.tolist()) for one in turn.seen[seen:]]
    assert last == [(one.layer, one.lengths, one.index.tolist()) for one in steps.seen[-len(last) :]]
    assert len(last) == 6 and turn.audit["over_rule"] is False
    for mine, theirs in zip(turn.engine.stores.values(), steps.engine.stores.values(), strict=True):
        assert torch.equal(tiers_of(mine), tiers_of(theirs))
        check(mine)


class Observer(Method):
    """Keeps what it is told of the attention."""

    needs = Needs(probabilities=True)

    def __init__(self) -> None:
        self.told: list[torch.Tensor] = []

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.told.append(probabilities)


def test_a_method_that_observes_is_told_of_a_turn_token_by_token() -> None:
    fixed = stream(70, steps=6)
    steps, turn = Observer(), Observer()
    drive(fixed, steps, None)
    engine = drive(replace(fixed, steps=1), turn, None, left=True).engine
    engine.start_turn(new_ids(fixed, 1, 5))
    for layer, part in enumerate(zip(*tokens_of(fixed, 1, 5), strict=True)):
        engine.attend(layer, *part)
    assert len(turn.told) == len(steps.told) == 12
    for mine, theirs in zip(turn.told, steps.told, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def small() -> tuple[PreTrainedModel, Any]:
    """The model that kvbench ships, which finds passkeys."""
    return AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype="float32").eval(), AutoTokenizer.from_pretrained(
        ASSETS / "tiny"
    )


@pytest.mark.parametrize(("question", "needles"), [("after", 1), *slow(("after", 3), ("decode", 2))])
def test_a_second_turn_finds_a_needle_of_the_first(
    small: tuple[PreTrainedModel, Any], question: Any, needles: int
) -> None:
    """The text comes without its question, which is asked later: who drops tokens by then has not seen it."""
    model, tokenizer = small
    found = dict.fromkeys(["full", "topk", "quest", "icecache", "pariskv", "lychee", "streaming_llm"], 0)
    for sample in islice(Passkey(lengths=[600], positions=5).samples(tokenizer, 1), 1, 1 + needles):
        text, _, rest = sample.prompt.rpartition(QUESTION)
        context = tokenizer(text, return_tensors="pt")["input_ids"]
        turn = tokenizer(QUESTION + rest, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for name in found:
            cache = KVCache(model, name, 128, question=question, tokenizer=tokenizer, dense_layers=())
            ids = torch.cat([say(model, context, cache, new=2), turn], dim=1)
            answer = tokenizer.decode(say(model, ids, cache)[0, ids.shape[1] :])
            found[name] += sample.answers[0] in answer
    assert found.pop("streaming_llm") == 0, "the needle is far back"
    assert found == dict.fromkeys(found, needles)


# -- copies, and tokens taken back -------------------------------------------------------------------------------------


def test_a_copy_of_a_cache_that_read_nothing_yet_is_told_what_its_prompt_shows(model: PreTrainedModel) -> None:
    """SqueezeAttention compares the layers as they read it, by hooks that the first cache takes back at its end."""
    first = KVCache(model, "squeeze", SMALL, dense_layers=())
    twin = first.copy()
    expected = say(model, ids_of(3), first, new=4)
    assert torch.equal(say(model, ids_of(3), twin, new=4), expected)
    assert twin.audit() == first.audit() and twin.audit()["device_kv_bytes"] > 0


COPIED = ["quest", "snapkv", "icecache_reuse", "pariskv", "lychee", "streaming_llm", "racc"]


@pytest.mark.parametrize("name", [*COPIED, *slow(*(name for name in CASES if name not in COPIED))])
def test_copies_go_on_by_themselves(wide: PreTrainedModel, tokenizer: Any, name: str) -> None:
    """Two questions about one text, asked of copies token by token in turn, are answered as by two fresh caches."""

    def begin() -> KVCache:
        cache = KVCache(wide, CASES[name].build(), SMALL, tokenizer=tokenizer, dense_layers=())
        say(wide, ids_of(3), cache, new=4)
        return cache

    def ask(cache: KVCache, seed: int) -> Any:
        yield wide(ids_of(seed, length=TURN), past_key_values=cache).logits
        for token in numbers(9, seed):
            yield wide(torch.tensor([[token]]), past_key_values=cache).logits

    expected = [begin(), begin()]
    fresh = [list(ask(cache, seed)) for cache, seed in zip(expected, (1, 2), strict=True)]
    first = begin()
    caches = [first.copy(), copy.deepcopy(first)]
    index = first.audit()["index_bytes"]  # what a library's own memory grows by is not copied to the byte
    assert [cache.audit()["index_bytes"] for cache in caches] == [pytest.approx(index, rel=0.01)] * 2
    del first  # what a copy still took from it would be gone
    torch.empty(10**6).fill_(torch.nan)
    both = zip(*(ask(cache, seed) for cache, seed in zip(caches, (1, 2), strict=True)), strict=True)
    for step, answers in enumerate(both):
        for mine, theirs in zip(answers, fresh, strict=True):
            assert torch.equal(mine, theirs[step]), step
    counted = ("attended_mean", "attended_max", "moved_bytes_per_step", "read_bytes_per_step", "host_bytes")
    counted += ("index_bytes",)
    for cache, alone in zip(caches, expected, strict=True):
        mine, theirs = cache.audit(), alone.audit()
        assert {key: mine[key] for key in counted} == {key: theirs[key] for key in counted}
        assert mine["over_rule"] is False


@pytest.mark.parametrize("name", ["lychee", "pariskv_adaptive", "topk", "tova_decode-12"])
def test_equal_rows_read_as_often_as_there_are_rows(model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    def read(rows: int) -> float:
        cache = KVCache(model, CASES[name].build(), SMALL, tokenizer=tokenizer, dense_layers=())
        say(model, ids_of(*[1] * rows), cache, new=20)
        return float(cache.audit()["read_bytes_per_step"])

    assert read(3) == pytest.approx(3 * read(1)) and read(1) > 0


@pytest.mark.parametrize("name", ["full", "topk", "quest"])
def test_tokens_taken_back_were_never_there(model: PreTrainedModel, name: str) -> None:
    """Across pages of Quest, whose bounds would stay wide."""
    caches = [KVCache(model, name, SMALL, dense_layers=()) for _ in range(2)]
    for cache in caches:
        say(model, ids_of(3, 4), cache)
    model(ids_of(1, 2, length=30), past_key_values=caches[0])
    caches[0].crop(-30)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for token in range(20):
        mine, theirs = (model(torch.tensor([[token], [9]]), past_key_values=cache).logits for cache in caches)
        assert torch.equal(mine, theirs)
    for one, two in zip(*(vars(cache.engine.method).get("low", {}).values() for cache in caches), strict=True):
        assert torch.equal(*(torch.nan_to_num(low[:, :, : one.shape[2]]) for low in (one, two)))


@pytest.mark.parametrize("name", ["full", "quest"])
def test_assisted_decoding_generates_what_plain_decoding_does(
    sdpa: PreTrainedModel, model: PreTrainedModel, name: str
) -> None:
    prompt = ids_of(3).repeat(1, 2)  # whose pieces are proposed again
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    assisted = generated(model, given, KVCache(model, name, LARGE), prompt_lookup_num_tokens=3)
    assert assisted == generated(sdpa, given)


# -- never silently wrong ----------------------------------------------------------------------------------------------


def test_another_conversation_is_refused_with_the_place_where_it_departs(model: PreTrainedModel) -> None:
    cache = KVCache(model, "quest", SMALL)
    whole = say(model, ids_of(1), cache)
    with pytest.raises(ValueError, match=r"read 125 tokens, .* \(column 0 differs\)"):
        say(model, ids_of(2, length=200), cache)
    other = torch.cat([whole, ids_of(1, length=9)], dim=1)
    other[0, 60] += 1
    with pytest.raises(ValueError, match=r"column 60 differs"):
        say(model, other, cache)
    with pytest.raises(ValueError, match=r"it has 120 columns"):
        say(model, ids_of(1), cache)
    other[0, 60] -= 1
    with pytest.raises(ValueError, match="holds 1 rows and is given 2"):
        say(model, other.repeat(2, 1), cache)
    say(model, other, cache)  # none of these has changed anything
    assert cache.audit()["over_rule"] is False


def test_a_cache_serves_one_generation_at_a_time(model: PreTrainedModel) -> None:
    cache, inner = KVCache(model, "quest", SMALL), model.model.layers[2].mlp
    say(model, ids_of(1), cache)
    with pytest.raises(ValueError, match=r"attention_mask=\[1, 90\]: .*\[1, 126\]"):
        model(ids_of(1, length=1), attention_mask=torch.ones(1, 90), past_key_values=cache)
    hook = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids_of(1, length=1), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="did not end"):
        model(ids_of(1, length=1), past_key_values=cache)
    cache.reset()
    say(model, ids_of(1), cache)


def test_a_method_object_serves_one_cache(model: PreTrainedModel) -> None:
    method = CASES["quest"].build()
    caches = [KVCache(model, method, SMALL) for _ in range(2)]
    for cache in caches:
        model(ids_of(1), past_key_values=cache)
    with pytest.raises(ValueError, match="has begun another generation"):
        model(ids_of(1, length=1), past_key_values=caches[0])


def test_padded_turn_is_refused(model: PreTrainedModel) -> None:
    cache = KVCache(model, "quest", SMALL)
    ids = torch.cat([say(model, ids_of(1, 2), cache), ids_of(3, 4, length=9)], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -9:-4] = 0
    with pytest.raises(ValueError, match="later turn was padded"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_chunks_of_a_prompt_are_no_turns(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="prompt_length="):
        generated(model, {"input_ids": ids_of(1)}, KVCache(model, "quest", SMALL), prefill_chunk_size=50)


@pytest.mark.parametrize("length", [LENGTH - 20, LENGTH + 20])
def test_another_length_than_the_prompt_s_is_refused_and_is_no_full_attention(
    model: PreTrainedModel, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"prompt_length={length}: the prompt has {LENGTH} columns"):
        say(model, ids_of(1), KVCache(model, "quest", SMALL, prompt_length=length))


def test_a_later_turn_whose_mask_forgot_the_padding_is_refused(model: PreTrainedModel) -> None:
    cache = KVCache(model, "quest", SMALL)
    ids = torch.cat([say(model, ids_of(1, 2), cache, padding=30), ids_of(3, 4, length=9)], dim=1)
    seen = cache.get_seq_length()
    for mask in (None, torch.ones_like(ids)):
        with pytest.raises(ValueError, match="^attention_mask.*: without the prompt's padding"):
            model(ids[:, seen:], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="^attention_mask.*: without the prompt's padding"):
        say(model, ids, cache)


@pytest.mark.parametrize("watched", [False, True])
def test_cache_of_another_model_is_refused(model: PreTrainedModel, watched: bool) -> None:
    other = random_model("llama")
    if watched:
        KVCache(other)
    with pytest.raises(ValueError, match="does not attend through kvbench"):
        say(other, ids_of(1), KVCache(model, "full"))


def test_a_model_whose_attention_is_changed_goes_on_in_its_cache(sdpa: PreTrainedModel) -> None:
    other = copy.deepcopy(sdpa)
    cache = KVCache(other, "full")
    other.set_attn_implementation("eager")
    assert torch.equal(say(other, ids_of(1), cache), say(sdpa, ids_of(1)))
    assert other.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dense_layers": (0, 9)}, r"dense_layers=\(0, 9\): indices of the model's layers, 0 to 3"),
        ({"dense_layers": (-1,)}, r"dense_layers=\(-1,\)"),
        ({"dense_layers": (True,)}, r"dense_layers=\(True,\)"),
        ({"dense_layers": "auto"}, r"dense_layers='auto'"),
        ({"question": "sparse"}, r"question='sparse': one of after, decode"),
        ({"model": "org/name"}, r"model='org/name': a loaded model"),
        ({"method": None}, "method=null: expected the name"),
        ({"method": Method}, "method=.*: expected the name"),
        ({"attention": "flash"}, "attention=flash: no such executor"),
        ({"kv": 8}, "kv=8: expected native"),
        ({"kv": "kivi2"}, "kv=kivi2: packs 32 channels"),
        ({"method": "h2o", "kv": "kivi2", "accounting": "unified"}, "kv=kivi2: "),
        ({"prompt_length": 0}, "prompt_length=0: expected columns"),
        ({"method": "lychee"}, "tokenizer=None"),
    ],
)
def test_bad_input_gets_one_clear_line(model: PreTrainedModel, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        KVCache(**{"model": model, **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("t5", {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32}),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(family: str, sizes: dict[str, Any]) -> None:
    of_kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    other = of_kind.from_config(AutoConfig.for_model(family, vocab_size=64, **sizes))
    before = other.config._attn_implementation
    with pytest.raises(ConfigError, match=rf"{type(other).__name__}: {family} "):
        KVCache(other)
    assert other.config._attn_implementation == before


def test_decoding_that_takes_tokens_back_is_refused_of_methods_that_cannot(model: PreTrainedModel) -> None:
    given = {"input_ids": ids_of(1), "attention_mask": torch.ones_like(ids_of(1))}
    for cache in (KVCache(model, "snapkv", SMALL), KVCache(model, "full", question="decode")):
        with pytest.raises(ValueError, match="crops=True"):
            generated(model, given, cache, prompt_lookup_num_tokens=3)
    wider = random_model("llama", head_dim=32)  # KIVI's groups are of 32 channels
    with pytest.raises(ValueError, match="Quest, question=after, kv=kivi2"):
        KVCache(wider, "quest", SMALL, kv="kivi2").activate_past_recording()
    cache = KVCache(model, "snapkv", SMALL)
    say(model, ids_of(1), cache)
    with pytest.raises(ValueError, match="SnapKV takes no tokens back"):
        cache.crop(-1)
    for count in (5, None, 1.5, "8"):
        with pytest.raises(ValueError, match=rf"crop\({count}\): .*minus the tokens"):
            cache.crop(count)


# -- what a cache is not for -------------------------------------------------------------------------------------------


def test_a_cache_shows_what_it_holds(model: PreTrainedModel) -> None:
    cache = KVCache(model, "snapkv", SMALL)
    assert repr(cache) == f"KVCache(method=snapkv, budget={SMALL}, tokens=[], bytes=0)"
    say(model, ids_of(1), cache)
    engine = cache.engine
    taken = sum(store.allocated_bytes() + store.host_bytes() for store in engine.stores.values())
    assert f"tokens={engine.lengths}, bytes={taken})" in repr(cache) and taken > 0


def test_a_cache_is_not_written_to_files(model: PreTrainedModel) -> None:
    for write in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO()), copy.copy):
        with pytest.raises(TypeError, match="cache.copy") as refusal:
            write(KVCache(model, "full", None))
        assert "\n" not in str(refusal.value)


def test_generation_without_a_cache_is_refused_with_one(model: PreTrainedModel) -> None:
    """Transformers would give the whole text anew at every step, and the cache would read it as a turn."""
    own = copy.deepcopy(model)
    own.generation_config.use_cache = False  # as a config.json that says so makes it
    given = {"input_ids": ids_of(1), "attention_mask": torch.ones_like(ids_of(1))}
    for asked, options in ((model, {"use_cache": False}), (own, {})):
        with pytest.raises(ConfigError, match="use_cache=False"):
            generated(asked, given, KVCache(asked, "full", None), **options)
    with pytest.raises(ValueError, match="cache_implementation"):
        generated(model, given, KVCache(model, "full", None), cache_implementation="static")


def test_a_compiled_model_is_refused(model: PreTrainedModel) -> None:
    def by_itself(own: PreTrainedModel) -> Any:
        own.compile(backend="eager")
        return own

    def its_forward(own: PreTrainedModel) -> Any:
        own.forward = torch.compile(own.forward, backend="eager")
        return own

    ways = (lambda own: torch.compile(own, backend="eager"), by_itself, its_forward)
    for way in ways:
        own = copy.deepcopy(model)
        with pytest.raises(ConfigError, match="LlamaForCausalLM: compiled by torch.compile"):
            KVCache(way(own))
        cache = KVCache(own := copy.deepcopy(model))
        with pytest.raises(ConfigError, match="LlamaForCausalLM: compiled by torch.compile"):
            way(own)(ids_of(1), past_key_values=cache)
