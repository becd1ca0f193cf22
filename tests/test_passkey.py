"""Claims about the passkey task: the published strings, exact lengths, and samples that depend on their cell alone."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.measure.prompts import MARGIN, excerpt
from kvbench.tasks import Sample
from kvbench.tasks.passkey import DESCRIPTION, FILLER, INFORMATION, QUESTION, Passkey, prompt


def trained(bos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with word-like tokens; with `bos`, one special token is added to every prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([DESCRIPTION, FILLER, INFORMATION, QUESTION] * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module", params=[False, True], ids=["no-bos", "bos"])
def tokenizer(request):
    return trained(request.param)


VARIANTS = ("quest", "arkvale")


def one_token_a_digit(text, **options):
    return {"input_ids": [int(letter) for letter in text]}


def samples(task: Passkey, tokenizer=None, seed: int = 0) -> list[Sample]:
    return list(task.samples(tokenizer, seed))


def filler_of(sample: Sample) -> tuple[str, str]:
    """The filler before and after the key, read back from the prompt."""
    description, prefix, information, suffix, question = sample.prompt.split("\n")
    assert (description, question) == (DESCRIPTION, QUESTION)
    assert information == INFORMATION.format(key=sample.answers[0])
    return prefix, suffix


def test_the_strings_are_the_published_ones():
    assert (len(FILLER), len(FILLER.split())) == (89, 19)
    assert prompt("a", 7, "b") == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\na\nThe pass key is 7. Remember it. 7 is the pass key.\nb\n"
        "What is the pass key? The pass key is"
    )


@pytest.mark.parametrize("length", [247, 248, 500, 5000, 38_000])
def test_a_length_in_characters_is_exact(length):
    assert {len(sample.prompt) for sample in samples(Passkey([length], "characters"))} == {length}


@pytest.mark.parametrize("length", [47, 48, 100, 5000])
def test_a_length_in_words_is_exact_and_cuts_between_words(length):
    for sample in samples(Passkey([length], "words")):
        assert len(sample.prompt.split()) == length
        assert set("\n".join(filler_of(sample)).split()) <= set(FILLER.split())


@pytest.mark.parametrize("length", [150, 512, 2000])
def test_a_length_in_tokens_counts_special_tokens_and_is_never_exceeded(length, tokenizer):
    counts = [len(tokenizer(sample.prompt)["input_ids"]) for sample in samples(Passkey([length], keys=2), tokenizer)]
    assert max(counts) == length
    assert min(counts) >= length - 4  # a cut in mid-word may change how its neighbours merge


def test_the_first_prompt_in_tokens_is_the_longest_that_fits(tokenizer):
    """One character of filler more is one token too many, at depth 0 with a key as long as the largest."""
    found = samples(Passkey([700], positions=1, keys=9), tokenizer)
    sample = next(sample for sample in found if sample.meta["key"] > 9999)
    prefix, suffix = filler_of(sample)
    assert prefix == ""
    longer = " ".join([FILLER] * 100)[: len(suffix) + 1]
    assert len(tokenizer(sample.prompt)["input_ids"]) <= 700
    assert len(tokenizer(prompt("", sample.meta["key"], longer))["input_ids"]) > 700


def test_fitting_a_length_in_tokens_takes_few_tokenisations(tokenizer):
    calls = []

    def counting(text, **options):
        calls.append(len(text))
        return tokenizer(text, **options)

    next(iter(Passkey([20_000]).samples(counting, seed=0)))
    assert sum(size > 10_000 for size in calls) <= 9
    assert len(calls) <= 12


def test_filler_before_the_key_is_the_depth_and_restarts_after_it():
    for sample in samples(Passkey([3000], "characters")):
        prefix, suffix = filler_of(sample)
        assert len(prefix) == (len(prefix) + len(suffix)) * int(sample.meta["depth"]) // 100
        assert all(part == (FILLER + " " + part)[: len(part)] for part in (prefix, suffix))
        assert suffix.startswith("The grass is green.")


def test_depths_are_0_to_95_percent_in_steps_of_5():
    depths = {sample.meta["depth"] for sample in samples(Passkey([400], "characters"))}
    assert depths == set(range(0, 100, 5))


def test_every_cell_appears_once_per_key_and_ids_are_unique():
    task = Passkey([400, 500], "characters", keys=3, positions=5)
    found = samples(task)
    assert len(found) == len(task) == 2 * 3 * 5
    assert len({sample.id for sample in found}) == len(task)
    assert found[0].id == "passkey-400-0-0" and found[0].group == "400"
    assert "passkey-500-80-2" in {sample.id for sample in found}


def test_every_prefix_is_spread_over_lengths_and_depths():
    task = Passkey([400, 500], "characters", keys=2)
    first = list(islice(task.samples(None, seed=0), 8))
    assert [sample.meta["length"] for sample in first] == [400, 500] * 4
    depths = [sample.meta["depth"] for sample in first[::2]]
    assert depths[0] == 0 and {int(depth // 25) for depth in depths} == {0, 1, 2, 3}
    assert {sample.id.rpartition("-")[2] for sample in samples(task)[: len(task) // 2]} == {"0"}


def test_a_sample_depends_on_its_cell_and_the_seed_and_on_nothing_else():
    all_of_them = {sample.id: sample for sample in samples(Passkey([400, 500], "characters", keys=2))}
    for sample in samples(Passkey([500], "characters", positions=10)):
        assert sample == all_of_them[sample.id]
    others = samples(Passkey([400, 500], "characters", keys=2), seed=1)
    changed = sum(sample.answers != all_of_them[sample.id].answers for sample in others)
    assert changed >= len(others) - 1


def test_samples_do_not_touch_the_global_random_state():
    random.seed(5)
    before = random.getstate()
    samples(Passkey([400], "characters"))
    assert random.getstate() == before


def test_keys_are_spread_over_1_to_50000():
    keys = [sample.meta["key"] for sample in samples(Passkey([400], "characters", keys=50))]
    assert min(keys) >= 1 and max(keys) <= 50_000
    # Mean of 1000 uniform draws: 25000 with a standard error of 456; four of them either way.
    assert abs(sum(keys) / len(keys) - 25_000) < 1825


@pytest.mark.parametrize(
    "output, right",
    [
        (" 123. Remember it.", True),
        ("\n\n00123", True),
        (" 1234", False),
        (" 12 123", False),
        (" one", False),
        ("", False),
    ],
)
def test_the_first_number_in_the_output_decides(output, right):
    sample = Sample(id="x", prompt="", answers=("123",), max_new_tokens=10)
    assert Passkey([400]).score(sample, output) == {"accuracy": float(right)}


def test_ten_new_tokens_and_the_question_ends_the_prompt():
    for sample in samples(Passkey([400], "characters")):
        assert sample.max_new_tokens == 10
        assert sample.question == QUESTION and sample.prompt.endswith(f"\n{QUESTION}")
        assert re.search(r"\d+", sample.prompt)[0] == sample.answers[0]


# -- as ArkVale has it -------------------------------------------------------------------------------------------------


def test_arkvales_question_stands_right_after_the_filler():
    quest, arkvale = (samples(Passkey([500], "characters", variant=name), one_token_a_digit) for name in VARIANTS)
    for theirs, ours in zip(arkvale, quest, strict=True):
        before, _, after = theirs.prompt.rpartition(QUESTION)
        assert not before.endswith("\n") and not after and theirs.question == QUESTION
        assert len(theirs.prompt) == len(ours.prompt) == 500
        assert theirs.id == ours.id and theirs.answers == ours.answers


@pytest.mark.parametrize("length", [47, 48, 49, 100, 5000])
def test_arkvales_length_in_words_is_exact_too(length):
    """The filler's last word and the question's first are one, with nothing between them."""
    for sample in samples(Passkey([length], "words", variant="arkvale"), one_token_a_digit):
        assert len(sample.prompt.split()) == length


def test_arkvales_length_in_tokens_is_never_exceeded(tokenizer):
    found = samples(Passkey([512], variant="arkvale"), tokenizer)
    counts = [len(tokenizer(sample.prompt)["input_ids"]) for sample in found]
    assert max(counts) == 512 and min(counts) >= 508


def test_arkvale_generates_as_many_tokens_as_the_key_has_and_one(tokenizer):
    for sample in samples(Passkey([512], variant="arkvale"), tokenizer):
        ids = tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"]
        assert sample.meta["key_ids"] == ids and sample.max_new_tokens == len(ids) + 1
        assert tokenizer.decode(ids) == sample.answers[0] and sample.keep_ids


@pytest.mark.parametrize(
    "ids, right",
    [
        ([9, 1, 2, 3], True),
        ([1, 2, 3, 9], False),  # the right number, one token early: Quest counts it
        ([9, 12, 3], False),  # the right number, in other tokens
        ([1, 2, 3], True),
        ([2, 3], False),
        ([], False),
    ],
)
def test_arkvale_compares_the_last_ids_with_the_keys(ids, right):
    meta = {"key_ids": [1, 2, 3], "output_ids": ids}
    sample = Sample(id="x", prompt="", answers=("123",), max_new_tokens=4, meta=meta)
    assert Passkey([400], variant="arkvale").score(sample, " 123") == {"accuracy": float(right)}
    assert Passkey([400]).score(sample, " 123") == {"accuracy": 1.0}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit, minimum", [("characters", 247), ("words", 47)])
def test_a_length_too_short_for_the_frame_names_the_key_and_the_minimum(unit, minimum):
    with pytest.raises(ValueError, match=rf"task\.lengths: {minimum - 1} {unit} are too few.* at least {minimum}$"):
        samples(Passkey([minimum - 1], unit))


def test_the_minimum_in_tokens_is_enough_for_any_key(tokenizer):
    with pytest.raises(ValueError, match=r"task\.lengths: 9 tokens are too few") as caught:
        samples(Passkey([9]), tokenizer)
    minimum = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert len(samples(Passkey([minimum]), tokenizer)) == 20
    with pytest.raises(ValueError, match=f"at least {minimum}"):
        samples(Passkey([minimum - 1]), tokenizer)


@pytest.mark.parametrize(
    "options, key",
    [
        ({"lengths": []}, "task.lengths"),
        ({"lengths": [0]}, "task.lengths"),
        ({"lengths": [400, 400]}, "task.lengths"),
        ({"lengths": [400], "unit": "bytes"}, "task.unit"),
        ({"lengths": [400], "keys": 0}, "task.keys"),
        ({"lengths": [400], "positions": 0}, "task.positions"),
        ({"lengths": [400], "variant": "ice"}, "task.variant"),
    ],
)
def test_a_bad_option_names_its_key(options, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        Passkey(**options)


def test_an_excerpt_shows_the_needle_and_the_question():
    text = prompt(FILLER * 50, 4711, FILLER * 50)
    shown = excerpt(Sample("a", text, ("4711",), 10))
    assert INFORMATION.format(key=4711)[:60] in shown and shown.endswith(QUESTION) and len(shown) < 4 * MARGIN
    assert excerpt(Sample("a", text, ("47",), 10)) == text[-MARGIN:], "a word, not a part of one"
