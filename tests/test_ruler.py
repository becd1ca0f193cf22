"""Claims about RULER's niah family: the published strings and settings, the length fit, and the scoring."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from kvbench import config
from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.config import TargetConfig, choices
from kvbench.tasks import Sample
from kvbench.tasks.ruler import prose
from kvbench.tasks.ruler.task import DEPTHS, NEW_TOKENS, Niah

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KINDS = {"numbers": r"[1-9]\d{6}", "uuids": UUID}
NEEDLE = r"One of the special magic (numbers|uuids) for ([^:\n]+?) is: ([0-9a-f-]+)\."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Keys hidden, values of each, keys asked for, haystack, kind of value: RULER's synthetic.yaml.
SETTINGS = {
    "niah_single_1": (1, 1, 1, "noise", "numbers"),
    "niah_single_2": (1, 1, 1, "generated", "numbers"),
    "niah_single_3": (1, 1, 1, "generated", "uuids"),
    "niah_multikey_1": (4, 1, 1, "generated", "numbers"),
    "niah_multikey_2": (1, 1, 1, "needle", "numbers"),
    "niah_multikey_3": (1, 1, 1, "needle", "uuids"),
    "niah_multivalue": (1, 4, 1, "generated", "numbers"),
    "niah_multiquery": (4, 1, 4, "generated", "numbers"),
}

each_subset = pytest.mark.parametrize("subset", SETTINGS)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def words_as_tokens(text, **options):
    """Stands in for a tokenizer with large tokens: a word or a mark is one."""
    return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}


def made(subset, tokenizer=words_as_tokens, length=2048, samples=5, seed=0, **options) -> list[Sample]:
    return list(Niah([subset], [length], samples, **options).samples(tokenizer, seed))


def parts(sample: Sample) -> tuple[str, str, str]:
    """Instruction, context and question."""
    head, _, rest = sample.prompt.partition("\n")
    assert rest.endswith("\n" + sample.question)
    return head, rest[: -len(sample.question) - 1], sample.question


def tokens(sample: Sample, tokenizer) -> int:
    return len(tokenizer(sample.prompt + sample.answer_prefix)["input_ids"]) + sample.max_new_tokens


# -- strings and settings ----------------------------------------------------------------------------------------------


def test_one_value_asked_for_is_put_in_the_singular():
    [sample, *_] = made("niah_single_3")
    head, _, question = parts(sample)
    assert head == (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "uuid afterwards."
    )
    key = re.search(r"magic uuid for (\w+-\w+) mentioned", question)[1]
    assert question == f"What is the special magic uuid for {key} mentioned in the provided text?"
    assert sample.answer_prefix == f" The special magic uuid for {key} mentioned in the provided text is"


def test_the_singular_leaves_the_haystack_as_it_was(tmp_path):
    file = tmp_path / "essay.txt"
    file.write_text("Some are here and are all there. ")
    [sample] = made("niah_single_2", samples=1, haystack=str(file))
    assert "are all" in parts(sample)[1] and "is all" not in parts(sample)[1]


def test_several_queries_are_listed_in_the_plural():
    [sample, *_] = made("niah_multiquery")
    head, _, question = parts(sample)
    assert head == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards."
    )
    word = r"\w+-\w+"
    query = re.search(rf"{word}, {word}, {word}, and {word}", question)[0]
    assert question == f"What are all the special magic numbers for {query} mentioned in the provided text?"
    assert sample.answer_prefix == f" The special magic numbers for {query} mentioned in the provided text are"


@each_subset
def test_every_answer_stands_in_its_needle_and_nowhere_else(subset):
    keys, values, queries, haystack, kind = SETTINGS[subset]
    for sample in made(subset):
        _, context, question = parts(sample)
        needles = re.findall(NEEDLE, context)
        assert len(sample.answers) == queries * values == len(set(sample.answers))
        assert len(needles) == keys * values + (sample.meta["size"] if haystack == "needle" else 0)
        assert {found for found, _, _ in needles} == {kind}
        key_of = {value: key for _, key, value in needles}
        assert len(key_of) == len(needles) and len(set(key_of.values())) == len(needles) / values
        for answer in sample.answers:
            assert re.fullmatch(KINDS[kind], answer)
            assert sample.prompt.count(answer) == 1 and key_of[answer] in question
        assert sample.meta["haystack"] == haystack
        assert sample.max_new_tokens == NEW_TOKENS == 128


@each_subset
def test_queries_are_answered_in_the_order_asked(subset):
    for sample in made(subset):
        _, context, question = parts(sample)
        key_of = {value: key for _, key, value in re.findall(NEEDLE, context)}
        places = [question.index(key_of[answer]) for answer in sample.answers]
        assert places == sorted(places)


@each_subset
def test_the_haystack_is_what_its_name_says(subset):
    for sample in made(subset):
        _, context, _ = parts(sample)
        rest = re.sub(NEEDLE, "", context)
        if sample.meta["haystack"] == "noise":
            assert [line for line in rest.split("\n") if line] == [NOISE] * sample.meta["size"]
        elif sample.meta["haystack"] == "needle":
            assert not rest.strip()
        else:
            name = f"0/{subset}/2048/{sample.id.rpartition('-')[2]}"
            assert rest.split() == prose.words(name, sample.meta["size"])


def sentences_in(context: str) -> int:
    """Sentences of an essay without its needles; the last may be cut."""
    essay = " ".join(re.sub(NEEDLE, "", context).split())
    return len(re.split(r"(?<=\.) ", essay)) if essay else 0


def test_needles_in_an_essay_stand_between_sentences_at_distinct_even_depths():
    assert (len(DEPTHS), DEPTHS[:3], DEPTHS[-1]) == (40, (0, 3, 5), 100)
    seen = set()
    for sample in made("niah_multiquery", samples=40):
        _, context, _ = parts(sample)
        for answer, depth in zip(sample.answers, sample.meta["depths"], strict=True):
            before, needle, _ = re.split(rf"(One of the special magic numbers for [^:\n]+? is: {answer}\.)", context)
            assert re.fullmatch(NEEDLE, needle) and depth in DEPTHS
            assert sentences_in(before) == int(sentences_in(context) * (depth / 100))
        assert len(set(sample.meta["depths"])) == 4
        seen |= set(sample.meta["depths"])
    assert len(seen) > 35


def test_the_needle_in_lines_is_at_its_depth():
    for sample in made("niah_multikey_2", samples=20):
        _, context, _ = parts(sample)
        lines = context.split("\n")
        place = next(place for place, line in enumerate(lines) if sample.answers[0] in line)
        assert sample.meta["depths"] == [round(100 * place / sample.meta["size"], 2)]
        assert len(lines) == sample.meta["size"] + 1


# -- the length fit ----------------------------------------------------------------------------------------------------


@each_subset
def test_the_first_haystack_is_the_largest_that_fits(subset, tokenizer):
    [sample] = made(subset, tokenizer, length=3000, samples=1)
    writer, size = Niah([subset], [3000]).writers[subset], sample.meta["size"]
    texts = [writer.write(f"0/{subset}/3000/0", 0, size).text for size in (size, size + 1)]
    counts = [len(tokenizer(text)["input_ids"]) + NEW_TOKENS for text in texts]
    assert texts[0] == sample.prompt + sample.answer_prefix and counts[0] <= 3000 < counts[1]


def test_a_sample_too_long_gives_up_whole_units():
    # However few there are: 25 lines are a third of the last one's.
    cells = [
        ("niah_multikey_1", 16_000, 500, 200),
        ("niah_multikey_2", 16_000, 25, 200),
        ("niah_multikey_3", 4096, 25, 1),
    ]
    for subset, length, unit, letters in cells:
        found = made(subset, counted_in_letters(letters), length=length, samples=20, seed=1)
        sizes = [sample.meta["size"] for sample in found]
        assert {(sizes[0] - size) % unit for size in sizes} == {0}
        assert len(set(sizes)) > 1


def counted_in_letters(letters):
    """A stand-in tokenizer whose counts depend on which letters a text holds, so that samples differ in length."""

    def count(text, **options):
        return {"input_ids": range(len(text) // 6 + sum(map(text.count, "1379a")) // letters)}

    return count


def test_few_tokenisations_are_needed():
    calls = []

    def counting(text, **options):
        calls.append(len(text))
        return words_as_tokens(text)

    made("niah_single_2", counting, length=20_000, samples=20)
    fitting = len(calls) - 20
    assert fitting <= 12 + 20  # about a dozen to find the size, and at most one more for most samples


def test_the_shortest_length_is_checked_before_the_first_sample(tokenizer):
    with pytest.raises(ValueError, match="niah_multiquery needs at least"):
        next(iter(Niah(["niah_single_2", "niah_multiquery"], [4096, 900]).samples(tokenizer, 0)))


def test_more_keys_than_words_are_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match=r"task\.lengths: \d+ different words"):
        made("niah_multikey_2", lambda text, **options: {"input_ids": range(len(text) // 1000)}, length=10**6)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_every_prefix_is_fair_to_subsets_and_lengths():
    task = Niah(["niah_single_1", "niah_multikey_1"], [1024, 2048], samples=3)
    found = list(task.samples(words_as_tokens, 0))
    assert len(found) == len(task) == 12 == len({sample.id for sample in found})
    groups = ["niah_single_1/1024", "niah_multikey_1/1024", "niah_single_1/2048", "niah_multikey_1/2048"]
    assert [sample.group for sample in found] == groups * 3
    assert found[0].id == "niah_single_1-1024-0"


def test_a_text_file_serves_as_essays_from_its_start_and_again_where_short(tmp_path):
    file = tmp_path / "essay.txt"
    file.write_text("One day  came.\nThen another day?\n\nIt went! ")
    for sample in made("niah_single_2", haystack=str(file)):
        _, context, _ = parts(sample)
        essay = " ".join(["One day came. Then another day? It went!"] * 500)
        assert re.sub(NEEDLE, "", context).split() == essay.split()[: sample.meta["size"]]
        assert re.fullmatch(r"essay\.txt@[0-9a-f]{8}", sample.meta["haystack"])


def test_samples_name_the_word_lists_of_their_keys():
    assert made("niah_single_1")[0].meta["words"] == "wonderwords-3.0.1"
    assert "words" not in made("niah_multikey_3")[0].meta


@pytest.mark.parametrize(
    "options, key",
    [
        ({"subsets": []}, "task.subsets"),
        ({"subsets": ["niah_single_9"]}, "task.subsets"),
        ({"subsets": ["niah_single_1"] * 2}, "task.subsets"),
        ({"lengths": []}, "task.lengths"),
        ({"lengths": [0]}, "task.lengths"),
        ({"lengths": [4096, 4096]}, "task.lengths"),
        ({"samples": 0}, "task.samples"),
        ({"fit": "loose"}, "task.fit"),
        ({"subsets": ["vt"]}, "task.subsets"),
    ],
)
def test_a_bad_option_names_its_key(options, key):
    with pytest.raises(ValueError, match=re.escape(key)):
        Niah(**{"subsets": ["niah_single_1"], "lengths": [4096], **options})


def test_a_missing_haystack_is_refused_before_anything_is_made():
    [source] = Niah(["niah_single_2"], [4096], haystack="no/such/file.txt").sources
    with pytest.raises(ValueError, match=r"task\.haystack: no/such/file\.txt: no such folder"):
        source.check()


def test_a_haystack_that_no_subset_reads_is_no_source(tmp_path):
    assert not Niah(["niah_single_1"], [4096], haystack=str(tmp_path / "essay.txt")).sources


def test_a_haystack_without_words_or_without_text_is_refused(tmp_path):
    file = tmp_path / "essay.txt"
    for content in (b" \n", b"\xff\xfe\x00"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"task\.haystack="):
            made("niah_single_2", haystack=str(file))


def test_the_configuration_builds_the_task():
    assert "niah" in choices("task")
    task = TargetConfig.of(config.shipped("task", "niah")).build()
    assert (task.name, task.metric, task.sources, task.stored) == ("niah", "string_match_all", [], False)
    assert len(list(islice(task.samples(byte_tokenizer(), 0), 3))) == 3


@each_subset
def test_shorter_answers_have_the_same_prompts(subset):
    official, short, long = (made(subset, max_new_tokens=most) for most in (None, 5, 1000))
    assert {sample.max_new_tokens for sample in short} == {5}
    assert [sample.prompt for sample in short] == [sample.prompt for sample in official]
    assert long == official, "RULER's own is the most"


def test_answers_of_no_tokens_are_refused():
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        made("niah_single_1", max_new_tokens=0)
