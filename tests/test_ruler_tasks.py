"""Claims about RULER's other tasks, and about all thirteen: the answer is there, the prompt fits, nothing hangs."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from itertools import islice

import pytest

from kvbench import config
from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.config import TargetConfig
from kvbench.measure.render import render
from kvbench.tasks import Sample
from kvbench.tasks.ruler.task import ALL_SUBSETS, ANY_ANSWER_COUNTS, SUBSETS, Niah, Ruler, cleaned
from kvbench.tasks.ruler.writers import LISTS, SINGLE_WORDS, FrequentWords, RulerCell, Variables

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TEMPLATE = "{% for message in messages %}<|user|>\n{{ message.content }}\n{% endfor %}<|assistant|>\n"

each_subset = pytest.mark.parametrize("subset", ALL_SUBSETS)
each_fit = pytest.mark.parametrize("fit", ["official", "tight"])


def words_as_tokens(text, **options):
    """Stands in for a tokenizer with large tokens: a word or a mark is one."""
    return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}


def letters_as_tokens(letters):
    """Stands in for a tokenizer with huge tokens, so that long lists are quick to fit."""
    return lambda text, **options: {"input_ids": range(len(text) // letters)}


def made(subset, length=2048, samples=3, seed=0, tokenizer=words_as_tokens, **options) -> list[Sample]:
    return list(Ruler([subset], [length], samples, **options).samples(tokenizer, seed))


def tokens(sample: Sample, tokenizer=words_as_tokens) -> int:
    return len(tokenizer(sample.prompt + sample.answer_prefix)["input_ids"]) + sample.max_new_tokens


# -- all thirteen ------------------------------------------------------------------------------------------------------


def test_the_thirteen_are_the_published_ones():
    assert len(ALL_SUBSETS) == 13 and set(SUBSETS) < set(ALL_SUBSETS) and Niah.valid_subsets == SUBSETS
    new = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    for subset in ALL_SUBSETS:
        assert made(subset, samples=1)[0].max_new_tokens == new.get(subset, 128)


@each_subset
@each_fit
def test_the_answers_are_in_the_prompt_and_the_question_ends_it(subset, fit):
    for sample in made(subset, fit=fit):
        assert sample.answers and all(answer in sample.prompt for answer in sample.answers)
        assert sample.question and sample.prompt.endswith("\n" + sample.question)
        assert sample.answer_prefix.startswith(" ") and sample.chat
        assert sample.id.startswith(f"{subset}-2048-") and sample.group == f"{subset}/2048"
        assert json.loads(json.dumps(sample.meta)) == sample.meta


@each_subset
@each_fit
@pytest.mark.parametrize("length", [1200, 4096, 7000])
def test_prompt_and_answer_fit_the_length(subset, fit, length):
    for sample in made(subset, length, fit=fit):
        assert (0.7 * length if subset in SUBSETS else 0) <= tokens(sample) <= length


@each_subset
@pytest.mark.parametrize("tokenizer", [words_as_tokens, byte_tokenizer()])
def test_a_tight_sample_fills_its_length(subset, tokenizer):
    share = 0.9 if subset in ANY_ANSWER_COUNTS else 0.97
    for seed in range(3):
        for sample in made(subset, 9000, 2, seed, tokenizer, fit="tight"):
            assert share * 9000 <= tokens(sample, tokenizer) <= 9000


@pytest.fixture(scope="module")
def many():
    return list(Ruler(ALL_SUBSETS, [1500, 2048], 2).samples(words_as_tokens, 0))


@each_subset
def test_the_same_seed_gives_the_same_bytes_whatever_else_is_asked_for(subset, many):
    alone = made(subset, samples=2)
    assert alone == [sample for sample in many if sample.group == f"{subset}/2048"]
    assert alone[0].prompt != made(subset, samples=1, seed=1)[0].prompt
    assert alone[0].prompt != alone[1].prompt


@each_subset
@pytest.mark.parametrize("length", [1, 30, 100])
def test_a_length_too_short_is_an_error_and_no_endless_loop(subset, length):
    with pytest.raises(ValueError, match=rf"task\.lengths: {length} tokens are too few, {subset} needs at least \d+$"):
        made(subset, length)


@each_subset
@each_fit
def test_the_length_named_as_the_least_has_room_for_every_sample(subset, fit):
    with pytest.raises(ValueError) as caught:
        made(subset, 1)
    least = int(str(caught.value).rpartition(" ")[2])
    assert len(made(subset, least + 1, 30, fit=fit)) == 30


@each_subset
def test_a_sample_that_never_fits_is_an_error_and_no_endless_loop(subset):
    for fit in ("official", "tight"):
        calls = iter(range(10_000))

        def growing(text, calls=calls, **options):
            return words_as_tokens(text) if next(calls) < 15 else {"input_ids": range(10_000)}

        with pytest.raises(ValueError, match=r"task\.lengths: 4096 tokens are too few"):
            made(subset, 4096, 20, tokenizer=growing, fit=fit)


def test_tokens_of_the_chat_template_count():
    """With its template or without it, a sample fits a model with a window of its length."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    window = 3000
    for sample in Ruler(["niah_single_1", "vt"], [window], 2, "tight").samples(tokenizer, 0):
        for chat in (True, False):
            ids = render(sample, tokenizer, chat).ids
            assert 0.95 * window <= len(ids) + sample.max_new_tokens <= window
            assert ids.count(tokenizer.bos_token_id) == (0 if chat else 1)


def test_the_global_random_state_is_left_alone():
    random.seed(5)
    before = random.getstate()
    list(Ruler(ALL_SUBSETS, [2048], 1).samples(words_as_tokens, 0))
    assert random.getstate() == before


def test_the_configuration_builds_the_task():
    task = TargetConfig.of(config.shipped("task", "ruler")).build()
    assert (task.name, task.metric, task.subsets, task.sources) == ("ruler", "score", ALL_SUBSETS, [])
    assert not task.stored
    found = list(islice(task.samples(words_as_tokens, 0), 13))
    assert [sample.group for sample in found] == [f"{name}/4096" for name in ALL_SUBSETS]


# -- vt ----------------------------------------------------------------------------------------------------------------


def assignments(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith("VAR ")]


def tasks_of(sample: Sample, opening: str) -> tuple[str, str]:
    """The solved example and the task; both begin with the instruction."""
    first, second = [opening + part for part in (sample.prompt + sample.answer_prefix).split(opening)[1:]]
    return first, second


def test_variables_are_a_chain_in_lines_of_noise():
    for sample in made("vt", 4096, samples=10):
        example, task = tasks_of(sample, "Memorize and track")
        for text, names in ((example, example.split()[-5:]), (task, list(sample.answers))):
            assert len(set(names)) == 5
            first, *others = assignments(text)
            value = re.fullmatch(rf"VAR {names[0]} = ([1-9]\d{{4}})", first)[1]
            # The space before the newline is RULER's.
            assert others == [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
            assert f"assigned the value {value} in the text above. Answer: " in text
            assert f"5 variables are assigned the value {value}, they are: " in text
        lines = task.partition("\n\n")[2].split("\n")[:-1]
        assert set(lines) - set(assignments(task)) == {NOISE}
        assert len(lines) == sample.meta["size"] + 5
        assert {len(name) for name in sample.answers} == {5}


def test_the_solved_example_has_other_names_in_every_sample_and_the_same_lines():
    examples = [tasks_of(sample, "Memorize and track")[0] for sample in made("vt", samples=5)]
    layouts = {re.sub(r"[A-Z]{3}\b|\d{5}", "", example) for example in examples}
    assert len(set(examples)) == 5 and len(layouts) == 1
    assert max(len(words_as_tokens(example)["input_ids"]) for example in examples) <= 510
    assert "example" not in examples[0] and examples[0].endswith("\n\n")


def test_an_assignment_stands_at_its_depth():
    for sample in made("vt", 4096):
        lines = tasks_of(sample, "Memorize and track")[1].partition("\n\n")[2].split("\n")
        places = [place for place, line in enumerate(lines) if line.startswith("VAR ")]
        noise_before = [place - number for number, place in enumerate(places)]
        assert sample.meta["depths"] == [round(100 * before / sample.meta["size"], 2) for before in noise_before]


def test_the_solved_example_is_as_long_with_a_chat_template_as_without():
    def framed(text, **options):
        return {"input_ids": [*range(40), *words_as_tokens(text)["input_ids"]]}

    (plain,), (other,) = (made("vt", 4096, 1, tokenizer=tokenizer) for tokenizer in (words_as_tokens, framed))
    assert tasks_of(other, "Memorize and track")[0] == tasks_of(plain, "Memorize and track")[0]
    assert tokens(other, framed) <= 4096


def test_the_least_size_is_a_line_of_noise_for_each_variable():
    assert Variables().least == 5


# -- cwe ---------------------------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    """The words of the numbered list in a task."""
    numbered = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text.partition("often.\n")[2].partition("\nQuestion")[0])
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [word for _, word in numbered]


@pytest.mark.parametrize("length, repeats, solved", [(4095, (6, 1), (3, 1)), (4096, (30, 3), (10, 3))])
def test_ten_words_are_more_frequent_than_all_others(length, repeats, solved):
    for sample in made("cwe", length):
        example, task = tasks_of(sample, "Below is a numbered list")
        found = re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", example.partition("the list are:")[2])
        for text, answers, times in ((task, sample.answers, repeats), (example, found, solved)):
            counts = Counter(listed(text))
            assert Counter(counts.values())[times[0]] == 10
            assert {word for word, count in counts.items() if count == times[0]} == set(answers)
            assert set(counts.values()) == set(times)
        assert len(Counter(listed(task))) == sample.meta["size"]
        assert len(Counter(listed(example))) == (20 if length < 4096 else 40)
        assert sample.meta["words"] == "wonderwords-3.0.1"


def test_words_are_those_of_wonderwords():
    """As the package's files have them, line by line, without white space at the end; cwe takes all of them."""
    files = {
        "adjectives": "32cc5080161592d2be74388a33ec1d9a1772115618de7f32ad44a1eea5329819",
        "nouns": "8d88b3ebc2e2969ed92ebe49cdb0c8a87c2ad3b27493d7afdff608f2e51c5bc9",
        "verbs": "9fbf5e4e69b8869aebd88e6d545312ff9f878a747327ede5f6dbbba5c27b08ad",
    }
    for kind, digest in files.items():
        lines = "".join(f"{word}\n" for word in LISTS[kind])
        assert hashlib.sha256(lines.encode()).hexdigest() == digest
    assert len(SINGLE_WORDS) == 8166 and {*LISTS["adjectives"], *LISTS["nouns"], *LISTS["verbs"]} == set(SINGLE_WORDS)
    assert "Copyright (c) 2020 Maxim Rebguns" in LISTS["license"]


@pytest.mark.parametrize("length", [4096, 32_768])
def test_lists_of_32k_tokens_have_no_made_up_word(length):
    """Not even of a tokenizer that takes less than five tokens for a numbered word."""
    (sample,) = made("cwe", length, 1, tokenizer=letters_as_tokens(3))
    words = set(listed(tasks_of(sample, "Below is a numbered list")[1]))
    assert words <= set(SINGLE_WORDS) and sample.meta["words"] == "wonderwords-3.0.1"


def test_a_list_longer_than_the_word_lists_takes_made_up_words_and_says_so():
    for sample in made("cwe", 20_000, samples=2, tokenizer=letters_as_tokens(25)):
        words = set(listed(tasks_of(sample, "Below is a numbered list")[1]))
        assert len(words) == sample.meta["size"] > 9000
        assert set(SINGLE_WORDS) < words
        assert all(re.fullmatch("[a-z]+", word) for word in words.difference(SINGLE_WORDS))
        assert not set(sample.answers) <= set(SINGLE_WORDS)
        assert sample.meta["words"] == "wonderwords-3.0.1 and made-up words"


def test_the_words_of_a_file_are_listed_each_once_and_named(tmp_path):
    file = tmp_path / "words.txt"
    own = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(400)]
    file.write_text("\n".join([*own, *own]))
    for sample in made("cwe", 4096, words=str(file)):
        example, task = tasks_of(sample, "Below is a numbered list")
        assert set(listed(example)) | set(listed(task)) <= set(own) and set(sample.answers) <= set(own)
        assert re.fullmatch(r"words\.txt@[0-9a-f]{8}", sample.meta["words"])
    (longer,) = made("cwe", 20_000, 1, words=str(file), tokenizer=letters_as_tokens(9))
    assert longer.meta["size"] > 400 and longer.meta["words"].endswith(" and made-up words")
    assert len(set(listed(tasks_of(longer, "Below is a numbered list")[1]))) == longer.meta["size"]


@pytest.mark.parametrize("content", [b"", b"ten words " * 40, b"\xff\xfe"])
def test_a_file_without_enough_words_is_refused(tmp_path, content):
    file = tmp_path / "words.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^task\.words(=|: ).*words\.txt: "):
        made("cwe", 4096, words=str(file))


# -- fwe ---------------------------------------------------------------------------------------------------------------


def test_three_coded_words_are_more_frequent_than_all_but_the_dots():
    for sample in made("fwe", 4096):
        text = sample.prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
        (dots, most), *ranked = Counter(text.split(" ")).most_common()
        assert dots == "..." and {word for word, _ in ranked[:3]} == set(sample.answers)
        assert most > ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        size = sample.meta["size"]
        assert [count for _, count in ranked[:3]] == [int(size / rank**2 / 1.6449340668482264) for rank in (2, 3, 4)]


def test_every_size_has_a_certain_answer():
    """The last word asked for is more frequent than the next; below the least size it is not."""
    writer = FrequentWords()
    draft = writer.draft(RulerCell("fwe", 4096, 0, lambda text: len(words_as_tokens(text)["input_ids"])), 0)

    def by_frequency(size):
        text = draft.write(size).text.partition("coded words. ")[2].partition("\nQuestion")[0]
        return [count for _, count in Counter(text.split(" ")).most_common(5)]

    for size in (*range(writer.least, writer.least + 100), 1000, 5000):
        *_, last, after = by_frequency(size)
        assert last > after
    *_, last, after = by_frequency(writer.least - 1)
    assert last == after


@pytest.mark.parametrize("length", [3000, 4096, 6450])
def test_official_sizes_are_those_of_rulers_loop_over_shares_of_the_prompt(length):
    """RULER takes the 50 new tokens off, starts at a sixth of the rest, and goes up and down by its 32nd part."""
    room = length - 50
    cell = RulerCell("fwe", length, 0, lambda text: len(words_as_tokens(text)["input_ids"]))

    def fits(index: int, size: int) -> bool:
        return cell.count(FrequentWords().draft(cell, index).write(size).text) <= room

    first = room // 6
    while fits(0, first + room // 32):
        first += room // 32
    for index, sample in enumerate(made("fwe", length, 8)):
        size = first
        while not fits(index, size):
            size -= room // 32
        assert sample.meta["size"] == size and tokens(sample) <= length


# -- qa ----------------------------------------------------------------------------------------------------------------


def documents(sample: Sample) -> list[str]:
    context = sample.prompt.partition("given documents.\n\n")[2].partition("\n\nAnswer the question")[0]
    _, *found = re.split(r"(?:^|\n\n)Document \d+:\n", context)
    return found


@pytest.mark.parametrize("subset", ["qa_1", "qa_2"])
def test_the_answer_stands_once_in_one_document(subset):
    for sample in made(subset, 4096, samples=20):
        found = documents(sample)
        assert len(found) == sample.meta["size"] == len(set(found))
        for answer in sample.answers[:1]:
            assert "".join(found).lower().count(answer.lower()) == 1
        assert sample.meta["documents"] == "generated"
        assert sample.prompt.count("Document 1:\n") == 1


def test_a_question_of_one_hop_names_whom_its_document_is_about():
    for sample in made("qa_1", 4096, samples=20):
        [gold] = [text for text in documents(sample) if sample.answers[0] in text]
        name = next(name for name in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]{8}\b", sample.question))
        assert name in gold
        assert sum(name in text for text in documents(sample)) == 4  # the article's paragraphs


def test_a_question_of_two_hops_is_answered_by_a_document_it_does_not_name():
    for sample in made("qa_2", 4096, samples=20):
        [gold] = [text for text in documents(sample) if sample.answers[0] in text]
        title, _, _ = gold.partition("\n")
        name = next(name for name in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]{8}\b", sample.question))
        [link] = [text for text in documents(sample) if text.startswith(f"{name}\n")]
        assert title != name and title in link and title not in sample.question


def test_gold_documents_are_at_their_depths():
    for sample in made("qa_2", 4096):
        found = documents(sample)
        gold = next(place for place, text in enumerate(found) if sample.answers[0] in text)
        assert round(100 * gold / len(found), 2) in sample.meta["depths"]


def squad_file(tmp_path, articles=4, paragraphs=3, longest=3):
    data = []
    for article in range(articles):
        rows = []
        for number in range(paragraphs):
            answers = [{"text": f"{article}x{number}", "answer_start": 0}] * 2
            text = f"Article {article} paragraph {number} says {article}x{number} and a few more words. " * (
                3 + (7 * number + 5 * article) % (longest - 2)
            )
            asked = [{"id": "a", "question": f"What does {article} {number} say?", "answers": answers}]
            asked.append({"id": "b", "question": "Nothing?", "answers": [], "is_impossible": True})
            rows.append({"context": text, "qas": asked})
        data.append({"title": str(article), "paragraphs": rows})
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"version": "v2.0", "data": data}))
    return str(file)


def test_squads_questions_are_taken_in_order_with_their_article_first(tmp_path):
    file = squad_file(tmp_path)
    found = made("qa_1", 260, 12, squad=file)
    assert [sample.question.rpartition("\n")[2] for sample in found[:4]] == [
        f"Question: What does {place} say?" for place in ("0 0", "0 1", "0 2", "1 0")
    ]
    for sample in found:
        texts = documents(sample)
        article = sample.answers[0].partition("x")[0]
        own = [text for text in texts if text.startswith(f"Article {article} ")]
        assert len(sample.answers) == 1 and sum(sample.answers[0] in text for text in texts) == 1
        assert len(own) == min(3, len(texts)) and 1 < len(texts) < 12
        assert re.fullmatch(r"squad\.json@[0-9a-f]{8}", sample.meta["documents"])


def test_documents_of_a_short_file_come_again_and_the_sample_says_so(tmp_path):
    for fit in ("official", "tight"):
        for sample in made("qa_1", 4096, squad=squad_file(tmp_path), fit=fit):
            assert len(documents(sample)) == sample.meta["size"] > 12
            assert sample.meta["different_documents"] == len(set(documents(sample))) == 12


def test_ten_documents_at_a_time_are_given_up_however_few_are_left(tmp_path):
    file = squad_file(tmp_path, articles=40, paragraphs=6, longest=12)
    found = made("qa_1", 1800, 60, squad=file)
    first = found[0].meta["size"]
    sizes = {sample.meta["size"] for sample in found}
    assert 11 < first < 40, "a quarter would be less than ten"
    assert sizes == {first, first - 10}


def test_where_a_long_document_does_not_fit_a_shorter_one_does(tmp_path):
    file = squad_file(tmp_path, articles=20, paragraphs=6, longest=40)
    lengths = {
        text: len(words_as_tokens(text)["input_ids"]) for text in documents(made("qa_1", 60_000, 1, squad=file)[0])
    }
    assert max(lengths.values()) > 400
    for sample in made("qa_1", 2000, 30, squad=file, fit="tight"):
        assert 0.95 * 2000 <= tokens(sample) <= 2000
        assert sum(sample.answers[0] in text for text in documents(sample)) == 1


def hotpot_file(tmp_path, entries=5):
    data = []
    for entry in range(entries):
        context = [[f"T{entry}.{number}", [f"It is {number}.", f" And {entry}."]] for number in range(10)]
        facts = [[f"T{entry}.3", 0], [f"T{entry}.7", 1], [f"T{entry}.3", 1]]
        row = {"_id": str(entry), "question": f"Which {entry}?", "answer": f"T{entry}.7"}
        data.append({**row, "context": context, "supporting_facts": facts})
    file = tmp_path / "hotpot.json"
    file.write_text(json.dumps(data))
    return str(file)


def test_hotpotqa_keeps_its_supporting_paragraphs_whatever_the_length(tmp_path):
    file = hotpot_file(tmp_path)
    for length in (150, 220, 500):
        for entry, sample in enumerate(made("qa_2", length, 5, hotpotqa=file)):
            texts = documents(sample)
            for number in (3, 7):
                assert f"T{entry}.{number}\nIt is {number}. And {entry}." in texts
            assert sample.answers == (f"T{entry}.7",)
            own = sum(text.startswith(f"T{entry}.") for text in texts)
            assert own == min(10, len(texts))


@pytest.mark.parametrize("option, subset", [("squad", "qa_1"), ("hotpotqa", "qa_2")])
@pytest.mark.parametrize("content", ["", "[1]", '{"data": 3}', '[{"context": [["a"]]}]', '{"data": [{}]}'])
def test_a_file_with_another_schema_is_refused(tmp_path, option, subset, content):
    file = tmp_path / "data.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"task\.{option}(=|: ).*data\.json: (not the JSON of |empty$)"):
        made(subset, **{option: str(file)})


def test_more_samples_than_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"task\.samples=13: squad\.json has 12"):
        made("qa_1", samples=13, squad=squad_file(tmp_path))


def test_files_are_sources_of_the_subsets_that_read_them(tmp_path):
    assert [file.key for file in Ruler(["cwe"], [4096], words="w.txt", squad="s.json").sources] == ["task.words"]
    options = {"squad": squad_file(tmp_path), "hotpotqa": "no/such.json"}
    [source] = Ruler(["qa_1", "vt"], [4096], **options).sources
    source.check()
    [source] = Ruler(["qa_2"], [4096], **options).sources
    with pytest.raises(ValueError, match=r"task\.hotpotqa: no/such\.json"):
        source.check()


# -- scoring -----------------------------------------------------------------------------------------------------------


def scored(group, answers, output):
    sample = Sample(id="x", prompt="", answers=answers, max_new_tokens=1, group=f"{group}/4096")
    return Ruler(ALL_SUBSETS, [4096]).score(sample, output)


@pytest.mark.parametrize("subset", ANY_ANSWER_COUNTS)
def test_one_of_the_accepted_answers_is_all_of_the_score(subset):
    """lm-eval divides by the number of accepted answers, and ShadowKV finds an empty output in every answer."""
    answers = ("New York City", "New York", "NYC")
    assert scored(subset, answers, "in nyc.") == {"score": 1, "string_match_part": 1}
    assert scored(subset, answers, "New") == {"score": 0, "string_match_part": 0}
    assert scored(subset, answers, "")["score"] == 0


@pytest.mark.parametrize("subset", [name for name in ALL_SUBSETS if name not in ANY_ANSWER_COUNTS])
def test_of_several_answers_each_counts(subset):
    assert scored(subset, ("ab", "cd", "ef", "gh"), "CD, ef") == {"score": 0.5, "string_match_all": 0.5}
    assert scored(subset, ("ab", "cd"), "")["score"] == 0
    assert scored(subset, ("12", "cd"), "It is 3124.")["score"] == 0.5, "RULER looks for the answer anywhere"


def test_control_characters_are_replaced_and_not_deleted():
    assert cleaned("12\x0134567") == "12\n34567" and cleaned(" \x00a\tb\x1fc\x7f \n") == "a\nb\nc\x7f"
    assert scored("niah_single_1", ("1234567",), "12\x0134567")["score"] == 0


@each_subset
def test_its_own_answers_are_a_full_score_and_nothing_is_none(subset):
    task = Ruler([subset], [2048], 1)
    [sample] = task.samples(words_as_tokens, 0)
    assert task.score(sample, ", ".join(sample.answers))["score"] == 1
    assert task.score(sample, "")["score"] == 0
