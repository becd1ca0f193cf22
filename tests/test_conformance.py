"""What every method must satisfy on every model, whatever it selects."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver import (
    CLOSE,
    CLOSE_IN_HALF,
    FAST,
    HALF,
    METHODS,
    PROMPT,
    RAGGED,
    SMALL,
    Attended,
    Case,
    Driven,
    Stream,
    attended_per_kv_head,
    drive,
    each_method,
    each_method_in_turn,
    run_loop,
    same_attended,
    stream,
    watch,
)

from kvbench.attention import executor as attention
from kvbench.backends.hf.loading import Loaded
from kvbench.budget import Budget
from kvbench.config import ConfigError, choices
from kvbench.engine.engine import Engine
from kvbench.engine.request import Stops
from kvbench.memory.view import StoreView
from kvbench.method import Method, Prompt

STEPS = 5


def test_every_shipped_method_is_in_the_list() -> None:
    assert {case.name for case in METHODS if not case.file} == set(choices("method"))
    assert len({case.id for case in METHODS}) == len(METHODS)


# -- equal to full attention -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def full_attention(sdpa: Callable[[Loaded], torch.nn.Module]) -> Callable[[Loaded], tuple[list[int], torch.Tensor]]:
    """Greedy tokens of transformers' own generate after `PROMPT`, and the logits [STEPS + 1, V] behind them."""
    known: dict[str, tuple[list[int], torch.Tensor]] = {}

    def get(loaded: Loaded) -> tuple[list[int], torch.Tensor]:
        if loaded.name not in known:
            out = sdpa(loaded).generate(
                torch.tensor([PROMPT]),
                max_new_tokens=STEPS + 1,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            known[loaded.name] = out.sequences[0, len(PROMPT) :].tolist(), torch.cat(out.logits)
        return known[loaded.name]

    return get


@pytest.fixture
def logits() -> Iterator[Callable[[Loaded], list[torch.Tensor]]]:
    """Note the logits [B, vocabulary] of each later forward pass of a model."""
    hooks = []

    def note(loaded: Loaded) -> list[torch.Tensor]:
        noted: list[torch.Tensor] = []
        hooks.append(loaded.model.lm_head.register_forward_hook(lambda _, __, out: noted.append(out[:, -1].clone())))
        return noted

    yield note
    for hook in hooks:
        hook.remove()


@each_method_in_turn
def test_budget_of_whole_sequence_equals_full_attention(
    any_model: Loaded, case: Case, accounting: str, full_attention: Any, logits: Any
) -> None:
    expected_tokens, expected = full_attention(any_model)
    noted = logits(any_model)
    generation, _ = run_loop(any_model, [PROMPT], case.build(), len(PROMPT) + STEPS, accounting=accounting, steps=STEPS)
    assert generation.tokens == [expected_tokens]
    torch.testing.assert_close(torch.cat(noted), expected, rtol=0, atol=CLOSE)


@each_method_in_turn
def test_budget_beyond_the_sequence_attends_every_token(case: Case, accounting: str) -> None:
    seen = drive(stream(70, 40), case.build(), 500, accounting=accounting).seen
    assert seen
    for at in seen:
        for row, length in enumerate(at.lengths):
            assert all(ids == set(range(length)) for ids in at.sets(row))


@each_method_in_turn
def test_a_prompt_shorter_than_the_least_budget_may_be_asked_for_whole(
    tiny: Loaded, case: Case, accounting: str
) -> None:
    """Of itself, as a fraction: the budget is then the least that the method can keep to, and tokens come until it."""
    budget = Budget.of(1.0, case.config, accounting)
    generation, engine = run_loop(tiny, [PROMPT[:length] for length in (1, 7, 20, 40)], case.build(), budget, steps=45)
    assert len(generation.step_ms) == 45 and engine.audit.broken() is None


@each_method
def test_small_budget_differs_from_full_attention(case: Case, tiny: Loaded, full_attention: Any, logits: Any) -> None:
    """The test above could not fail if a budget changed nothing."""
    _, expected = full_attention(tiny)
    noted = logits(tiny)
    run_loop(tiny, [PROMPT], case.build(), SMALL, steps=STEPS)
    differs = (torch.cat(noted)[1] - expected[1]).abs().max() > 100 * CLOSE
    whole = case.id in ("full", "raas") or case.name.endswith("_decode")  # these begin with the whole prompt
    assert differs != whole


@each_method_in_turn
def test_odd_groups_and_budgets_keep_to_the_rule(case: Case, accounting: str) -> None:
    """Budgets that no page divides, and around the prompts' lengths; those below the least are refused."""
    kept = 0
    for (kv_heads, group), budget in itertools.product([(2, 3), (1, 5), (1, 7)], [1, 2, 3, 17, 49, 70, 71, 72]):
        try:
            Budget.of(budget, case.config, accounting)
        except ConfigError as error:
            assert "below the minimum" in str(error)
            continue
        fixed = stream(71, 40, 17, steps=2, kv_heads=kv_heads, query_heads=kv_heads * group, seed=budget)
        driven = drive(fixed, case.build(), budget, accounting=accounting)
        assert driven.engine.audit.broken() is None, f"{budget=} {group=}"
        if accounting == "unified" and case.config.has_budget:
            assert all(limit <= budget for limit in limits(driven)), f"{budget=} {group=}"
        kept += 1
    assert kept >= 3


@each_method_in_turn
def test_an_engine_refuses_less_than_the_least(case: Case, accounting: str) -> None:
    """Whoever makes it: compiled code relies on the room that the least budget leaves."""
    least = (case.config.minimum or {}).get(accounting) or 1
    if least > 1:
        with pytest.raises(ConfigError, match=f"budget={least - 1}: below the minimum of .*, {least} tokens"):
            drive(stream(60, steps=1), case.as_configured(), least - 1, accounting=accounting, any_budget=False)


def limits(driven: Driven) -> Iterator[float]:
    """What the method says that it attends at most: the mean over layers and heads, or of each head."""
    method = driven.engine.method
    for at in driven.seen:
        for length in driven.engine.shape.lengths:
            mean, own = method.mean_rule(length, at.step), method.rule(at.layer, length, at.step)
            yield from (limit for limit in (own if mean is None else mean,) if limit is not None)


# -- numbers that are none ---------------------------------------------------------------------------------------------

BAD = (torch.nan, torch.inf, -torch.inf)
TOKENS = (7, 89, 91)  # in the prompt, at its end, and in a decode step


def spoiled(part: str, token: int, bad: float) -> Stream:
    """A stream with one number of `part` that is none, in the last head of layer 1."""
    fixed = stream(90, 64, steps=3)
    getattr(fixed, part)[1, 0, -1, token, 5] = bad
    return fixed


@each_method_in_turn
def test_keys_and_queries_that_are_no_numbers_are_refused(case: Case, accounting: str) -> None:
    """No method has to rank them: some would choose ids that are none, or drop a key that spoils all attention."""
    for bad, token, part in itertools.product(BAD, TOKENS, ("keys", "queries")):
        head, name = ("KV head 1", "key") if part == "keys" else ("query head 3", "query")
        with pytest.raises(FloatingPointError, match=f"^layer 1, {head}: a {name} is not finite$"):
            drive(spoiled(part, token, bad), case.build(), SMALL, accounting=accounting)


@each_method_in_turn
def test_of_values_that_are_no_numbers_tokens_are_still_chosen(case: Case, accounting: str) -> None:
    """The outputs say so, and with them the next layer's keys, or the logits."""
    for bad, token in itertools.product(BAD, TOKENS):
        seen = drive(spoiled("values", token, bad), case.build(), SMALL, accounting=accounting).seen
        for at in seen:
            for row, length in enumerate(at.lengths):
                for ids in at.index[row].tolist():
                    chosen = [one for one in ids if one != -1]
                    assert len({*chosen}) == len(chosen) and {*chosen} <= {*range(length)}


# -- executors ---------------------------------------------------------------------------------------------------------


@each_method_in_turn
def test_executors_agree(any_model: Loaded, case: Case, accounting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def all_of_them(_: attention.Plain, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal compared
        expected, _ = attention.reference.attend(*arguments, **options)
        for attend in FAST.values():
            out, weights = attend(*arguments, **options)
            torch.testing.assert_close(out, expected, rtol=0, atol=CLOSE)
        compared += 1
        return out, weights

    monkeypatch.setattr(attention.Plain, "__call__", all_of_them)
    run_loop(any_model, RAGGED[:2], case.build(), SMALL, accounting=accounting, steps=2)
    assert compared == 2 * any_model.model.config.num_hidden_layers


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


@each_method_in_turn
def test_budget_beyond_the_sequence_equals_full_attention_in_bfloat16(case: Case, accounting: str) -> None:
    fixed = stream(70, 40, dtype=HALF)
    found = drive(fixed, case.build(), 500, accounting=accounting)
    expected = drive(fixed, Method(), None, executor="reference")
    assert found.outputs.dtype == HALF
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=0, atol=CLOSE_IN_HALF)
    for at in found.seen:
        for row, length in enumerate(at.lengths):
            assert all(ids == set(range(length)) for ids in at.sets(row))


@each_method_in_turn
def test_executors_agree_in_bfloat16(case: Case, accounting: str) -> None:
    fixed = stream(150, 97, steps=STEPS, dtype=HALF)
    options: dict[str, Any] = {"accounting": accounting}
    slow = drive(fixed, case.build(), SMALL, executor="reference", **options)
    for name in FAST:
        fast = drive(fixed, case.build(), SMALL, executor=name, **options)
        assert same_attended(fast.seen, slow.seen)
        torch.testing.assert_close(fast.outputs, slow.outputs, rtol=0, atol=CLOSE_IN_HALF)


@each_method_in_turn
def test_ragged_batch_in_bfloat16_selects_what_its_rows_select_alone(case: Case, accounting: str) -> None:
    fixed = stream(130, 77, 20, dtype=HALF)
    batch = drive(fixed, case.build(), SMALL, accounting=accounting, chunk=50)
    for row in range(3):
        alone = drive(fixed.row(row), case.build(), SMALL, accounting=accounting)
        assert [at.sets(row) for at in batch.seen] == [at.sets(0) for at in alone.seen]
        torch.testing.assert_close(batch.outputs[:, :, row], alone.outputs[:, :, 0], rtol=0, atol=CLOSE_IN_HALF)


@each_method_in_turn
def test_choices_in_bfloat16_are_those_of_its_rounded_keys_in_float32(case: Case, accounting: str) -> None:
    """Beyond the keys that a model hands over, bfloat16 costs a choice next to nothing.

    Not one token differs, but where sums or means are held in the model's dtype: RACC's sums, as in its official code,
    and LycheeCluster's centroids.
    """
    rounded = stream(150, 97, dtype=HALF)
    exact = replace(rounded, **{part: getattr(rounded, part).float() for part in ("queries", "keys", "values")})
    half = drive(rounded, case.build(), SMALL, accounting=accounting)
    single = drive(exact, case.build(), SMALL, accounting=accounting)
    same = total = 0
    for ours, theirs in zip(half.seen, single.seen, strict=True):
        for row in range(2):
            for one, other in zip(ours.sets(row), theirs.sets(row), strict=True):
                same, total = same + len(one & other), total + len(other)
    assert same >= (0.97 if "racc" in case.id or "lychee" in case.id else 1) * total


# -- what is selected --------------------------------------------------------------------------------------------------


@each_method_in_turn
def test_selected_ids_are_past_unique_and_packed(any_model: Loaded, case: Case, accounting: str) -> None:
    method = case.build()
    seen = watch(method)
    run_loop(any_model, RAGGED, method, SMALL, accounting=accounting, steps=STEPS)
    shape = method.shape
    assert len(seen) == STEPS * shape.layers
    for at in seen:
        assert at.index.dtype == torch.int64
        assert at.index.shape[1] in (1, shape.kv_heads, shape.query_heads)
        for row, length in enumerate(at.lengths):
            assert length == len(RAGGED[row]) + at.step
            for head in at.index[row].tolist():
                ids = [token for token in head if token >= 0]
                assert ids, "a head attends nothing"
                # A paged kernel attends the first entries of a list, as many as there are tokens in it.
                assert head == ids + [-1] * (len(head) - len(ids)), "-1 only at the end"
                assert len(set(ids)) == len(ids)
                assert max(ids) < length


@each_method_in_turn
def test_same_input_and_seed_select_the_same_for_any_thread_count(case: Case, accounting: str) -> None:
    fixed = stream(1000, 700, steps=2, layers=1, query_heads=8, head_dim=64)
    threads = torch.get_num_threads()
    found: list[list[Attended]] = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(drive(fixed, case.build(), 256, accounting=accounting).seen)
    finally:
        torch.set_num_threads(threads)
    assert same_attended(*found)


# -- slots that hold no token ------------------------------------------------------------------------------------------

POISON = 1e4


def poison_stores(engine: Engine) -> None:
    """Fill every slot that holds no token, of the home tier."""
    for store in engine.stores.values():
        if store.host is None:
            key, value = store.device.pool
            unused = torch.ones(len(key), dtype=torch.bool)
            for first, used in zip(store.device.first.view(-1), store.device.used.view(-1), strict=True):
                unused[first : first + used] = False
        else:
            unused = torch.ones_like(store.host.present).scatter(2, store.host.slot_of, ~store.host.present)
            key, value = store.host.key, store.host.value
        assert bool(unused.any()), "nothing to poison"
        key[unused] = POISON
        value[unused] = -POISON


@each_method
@pytest.mark.parametrize(
    ("lengths", "accounting"), [((90,), "paper"), ((90, 61, 20), "unified")], ids=["one-paper", "ragged-unified"]
)
def test_poisoned_unused_slots_change_nothing(case: Case, accounting: str, lengths: tuple[int, ...]) -> None:
    fixed = stream(*lengths, steps=STEPS)
    clean = drive(fixed, case.build(), SMALL, accounting=accounting)
    method = case.build()
    prefill = method.prefill

    def poisoned_prefill(layer: int, prompt: Prompt) -> None:
        for row, length in enumerate(prompt.lengths):
            prompt.keys[row, :, length:] = POISON
            prompt.values[row, :, length:] = -POISON
            prompt.queries[row, :, : max(0, prompt.queries.shape[2] - length)] = POISON
        prefill(layer, prompt)

    method.prefill = poisoned_prefill  # type: ignore[method-assign]
    dirty = drive(fixed, method, SMALL, accounting=accounting, after_prefill=poison_stores)
    assert same_attended(clean.seen, dirty.seen)
    assert torch.equal(clean.outputs, dirty.outputs)


# -- chunks and batches ------------------------------------------------------------------------------------------------


@each_method_in_turn
@pytest.mark.parametrize("chunk", [7, 149])
def test_chunked_prefill_selects_what_whole_prefill_selects(case: Case, accounting: str, chunk: int) -> None:
    """In many chunks that divide no length and no page, or in two of which the second is one token."""
    fixed = stream(150, 99, 20)
    whole = drive(fixed, case.build(), SMALL, accounting=accounting)
    chunked = drive(fixed, case.build(), SMALL, accounting=accounting, chunk=chunk)
    assert same_attended(whole.seen, chunked.seen)
    torch.testing.assert_close(chunked.outputs, whole.outputs, rtol=0, atol=CLOSE)


@pytest.mark.slow
@each_method
def test_chunked_prefill_generates_what_whole_prefill_generates(any_model: Loaded, case: Case) -> None:
    def tokens(chunk: int | None) -> list[list[int]]:
        options = {"accounting": "unified", "prefill_chunk": chunk, "steps": STEPS}
        return run_loop(any_model, RAGGED, case.build(), SMALL, **options)[0].tokens

    assert tokens(40) == tokens(None)


@each_method
@pytest.mark.parametrize(("padding", "accounting"), [("right", "paper"), ("left", "unified")])
def test_ragged_batch_selects_what_its_rows_select_alone(case: Case, accounting: str, padding: str) -> None:
    fixed = stream(130, 77, 20)
    batch = drive(fixed, case.build(), SMALL, accounting=accounting, left=padding == "left")
    for row in range(3):
        alone = drive(fixed.row(row), case.build(), SMALL, accounting=accounting)
        assert [at.sets(row) for at in batch.seen] == [at.sets(0) for at in alone.seen]
        torch.testing.assert_close(batch.outputs[:, :, row], alone.outputs[:, :, 0], rtol=0, atol=CLOSE)


@pytest.mark.slow
@each_method
def test_ragged_batch_generates_what_its_rows_generate_alone(any_model: Loaded, case: Case) -> None:
    options: dict[str, Any] = {"accounting": "unified", "steps": STEPS}
    batch, _ = run_loop(any_model, RAGGED, case.build(), SMALL, **options)
    assert batch.tokens == [run_loop(any_model, [row], case.build(), SMALL, **options)[0].tokens[0] for row in RAGGED]


@each_method
def test_method_object_forgets_the_last_generation(case: Case) -> None:
    fixed, other = stream(130, 77), stream(60, 90, 33, seed=1)
    used = case.build()
    drive(other, used, SMALL, accounting="unified")
    fresh = drive(fixed, case.build(), SMALL)
    again = drive(fixed, used, SMALL)
    assert same_attended(fresh.seen, again.seen[-len(fresh.seen) :])


# -- the audit ---------------------------------------------------------------------------------------------------------


@each_method_in_turn
def test_what_reading_the_prompt_takes_is_no_decode_step_s(tiny: Loaded, case: Case, accounting: str) -> None:
    _, engine = run_loop(tiny, RAGGED, case.build(), SMALL, accounting=accounting, steps=0)
    assert (engine.audit.steps, engine.audit.moved_bytes, engine.audit.read_bytes) == (0, 0, 0)
    told = engine.report()
    assert not {"attended_mean", "attended_max", "moved_bytes_per_step", "read_bytes_per_step"} & told.keys()


@each_method_in_turn
def test_audit_equals_a_recount(tiny: Loaded, case: Case, accounting: str) -> None:
    """Ragged rows that stop at different steps, one dense layer, and enough steps for a method to evict once more."""
    steps, dense_layers = 26, (1,)
    method = case.build()
    free, _ = run_loop(tiny, RAGGED, case.build(), SMALL, accounting=accounting, steps=9, dense_layers=dense_layers)
    stop = free.tokens[1][9]  # ends row 1 at the tenth token or before
    seen = watch(method)
    active: list[list[bool]] = []
    held: list[int] = []
    step, end_step = method.step, method.end_step

    def note_rows(tokens: torch.Tensor, positions: torch.Tensor, running: torch.Tensor) -> None:
        active.append(running.tolist())
        step(tokens, positions, running)

    def count_bytes() -> None:
        end_step()
        shape, layers = method.shape, method.shape.sparse_layers
        sparse = sum(int((method.view.resident(layer) >= 0).sum()) for layer in layers)
        dense = (shape.layers - len(layers)) * shape.kv_heads * sum(method.view.lengths(layers[0]))
        held.append((sparse + dense) * 2 * shape.head_dim * 4)

    method.step, method.end_step = note_rows, count_bytes  # type: ignore[method-assign]
    generation, _ = run_loop(
        tiny,
        RAGGED,
        method,
        SMALL,
        accounting=accounting,
        steps=steps,
        dense_layers=dense_layers,
        stops=Stops([stop]),
    )
    assert {at.layer for at in seen} == {0, 2, 3}
    assert not all(map(all, active)), "no row stopped early"
    counts = [
        count
        for at in seen
        for row in range(len(RAGGED))
        if active[at.step - 1][row]
        for count in attended_per_kv_head(at, method.shape.kv_heads, row)
    ]
    audit = generation.audit
    assert audit["attended_mean"] == pytest.approx(sum(counts) / len(counts), rel=1e-12)
    assert audit["attended_std"] == pytest.approx(statistics.pstdev(counts), rel=1e-6)
    assert audit["attended_max"] == max(counts)
    assert audit["device_kv_bytes"] == max(held)
    assert audit["dense_share"] == 1 / 4
    assert audit["budget"] == SMALL
    assert not audit["over_rule"]


@each_method_in_turn
def test_audit_is_the_same_whether_tokens_are_copied_or_attended_in_place(case: Case, accounting: str) -> None:
    fixed = stream(150, 97, 40, steps=12, layers=4)
    copied, in_place = (
        drive(fixed, case.build(), SMALL, accounting=accounting, executor=name, dense_layers=(1,))
        for name in ("torch", "cpu")
    )
    assert same_attended(copied.seen, in_place.seen)
    words = {"executor": "cpu"} | ({"transfer": "in place"} if "transfer" in copied.audit else {})
    assert in_place.audit == copied.audit | words


@each_method_in_turn
def test_a_method_at_rest_need_not_be_asked(case: Case, accounting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = stream(150, 97, 40, steps=40, layers=4)
    asked = drive(fixed, case.build(), SMALL, accounting=accounting, dense_layers=(1,))
    if not asked.engine.method.at_rest:
        assert not (case.id == "snapkv" and accounting == "paper"), "what drops once and attends all of it is at rest"
        return
    unasked = case.build()
    unasked.append = unasked.select = lambda *_: None  # type: ignore[method-assign, assignment]
    unasked.step = lambda *_: monkeypatch.setattr(StoreView, "keep", None)  # type: ignore[method-assign]
    alone = drive(fixed, unasked, SMALL, accounting=accounting, dense_layers=(1,))
    assert all(at.in_place for at in asked.seen)
    assert same_attended(asked.seen, alone.seen) and asked.audit == alone.audit


@each_method_in_turn
def test_who_writes_keys_or_values_anew_says_so(case: Case, accounting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], StoreView.write
    monkeypatch.setattr(StoreView, "write", lambda view, *given, **named: written.append(write(view, *given, **named)))
    drive(stream(150, 97, 40, steps=4, layers=2), method := case.build(), SMALL, accounting=accounting)
    assert bool(written) == method.needs.writes


# Around each other and around whole pages; the steps run over page and budget edges.
LENGTHS = [20, 48, 65, 100, 127]
BUDGETS = [48, 55, 63, 64, 65, 99, 100, 127, 134]


def shared_by_heads(method: Method) -> bool:
    """C is the mean of a layer's heads, by the method's two rules, so that one head may attend more."""
    rules = ((method.mean_rule(length, 1), method.rule(0, length, 1)) for length in method.shape.lengths)
    return any(mean is not None and most is not None and most > mean for mean, most in rules)


def bounded(method: Method) -> bool:
    """Not full attention, nor a layer that its method attends whole under either accounting."""
    return method.rule(0, LENGTHS[-1], 1) is not None


@each_method_in_turn
def test_no_method_breaks_its_own_rule(case: Case, accounting: str) -> None:
    for budget in BUDGETS:
        fixed = stream(*LENGTHS, steps=18, layers=1, head_dim=4, seed=budget)
        driven = drive(fixed, method := case.build(), budget, accounting=accounting)
        assert driven.engine.audit.broken() is None, budget
        if accounting == "unified" and bounded(method):
            assert driven.audit["attended_mean"] <= budget, "C is the mean of heads that share it out"
            assert driven.audit["attended_max"] <= budget or shared_by_heads(method)


@each_method_in_turn
def test_no_method_breaks_its_own_rule_with_a_fraction(case: Case, accounting: str) -> None:
    for fraction in (0.4, 0.5, 0.999, 1.0):
        fixed = stream(127, 128, 201, steps=6, layers=1, head_dim=4, seed=1)
        driven = drive(fixed, method := case.build(), fraction, accounting=accounting)
        assert driven.engine.audit.broken() is None, fraction
        if accounting == "unified" and bounded(method):
            for row, length in enumerate(fixed.lengths):
                shared = shared_by_heads(method)
                heads = [attended_per_kv_head(at, 2, row) for at in driven.seen]
                most = max(sum(counts) / 2 if shared else max(counts) for counts in heads)
                assert most <= Budget(fraction).tokens(length), (fraction, length)


# -- memory ------------------------------------------------------------------------------------------------------------
