"""Cutting a text at its delimiters, and the lists and clusters that stand on it, each against a plain reading."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.config import bind_methods

bind_methods()

from methods.blocks.chunking import Chunks, Cutter, Delimiters, Text, cutter, delimiters  # noqa: E402
from methods.blocks.kmeans import lists_of, spherical_kmeans  # noqa: E402
from methods.blocks.ragged import entries  # noqa: E402

quick = settings(max_examples=80)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- what a token ends -------------------------------------------------------------------------------------------------

ENDS = {
    4: ["\n\n", ".\n\n", "\n \n", "}", " }", "]", '"},', "\n]", ">", "</p>", "<eos>", "---", "***", "```"],
    3: [".", "?", "!", " done.", '."', ".)", "\n", ":\n", "。", "你好。", "！", "？"],
    2: [",", ";", ":", '",', '":', "),", "，", "；", "：", "、", "中，"],
    1: [" ", "\t", "word ", "  "],
    0: [
        "a",
        " word",
        "3.14",
        ".com",
        "a.b",
        "don't",
        "12",
        '"',
        "(",
        "{",
        "[",
        "_",
        "___",
        "===",
        "~~~",
        "-",
        "你",
        "\ufffd",
        "",
        "、a",
    ],
}


@pytest.mark.parametrize("strength", ENDS)
def test_a_token_ends_what_stands_behind_its_last_letter(strength: int) -> None:
    pieces = [*ENDS[strength], "."]
    assert delimiters(pieces).ends.tolist() == [strength] * len(ENDS[strength]) + [3, 0]


def strengths(*pieces: str) -> list[int]:
    """How strong the boundary is behind each token of a text."""
    vocabulary = sorted({*pieces, "."})
    return delimiters(vocabulary).strengths(torch.tensor([vocabulary.index(piece) for piece in pieces])).tolist()


def test_a_space_in_front_of_a_token_ends_the_word_before_it() -> None:
    assert strengths("The", " key", "s", " are", ",", " or", "12", ".") == [1, 0, 1, 0, 2, 0, 0, 3]


def test_two_line_breaks_of_one_token_each_end_a_paragraph() -> None:
    """SentencePiece vocabularies write them as two bytes, some byte-level ones as two tokens."""
    assert strengths("end", ".", "\n", "\n", "New", "\n", " ", "\n") == [0, 3, 3, 4, 1, 3, 1, 3]
    assert strengths("end", ".\n", "\n", "New") == [0, 3, 4, 0]


def test_ids_beyond_the_vocabulary_end_nothing() -> None:
    assert delimiters([".", "a"]).strengths(torch.tensor([0, 1, 2, 9000, -1])).tolist() == [3, 0, 0, 0, 0]


@pytest.mark.parametrize("pieces", [[], ["", ""], ["a", "bc", "\ufffd"]], ids=str)
def test_pieces_that_are_no_text_are_refused(pieces: list[str]) -> None:
    with pytest.raises(
        ValueError, match=rf"none of the tokenizer's {len(pieces)} pieces ends .* method.chunking=fixed"
    ):
        delimiters(pieces)


# -- chunks ------------------------------------------------------------------------------------------------------------

OF_STRENGTH = Delimiters(
    torch.tensor([0, 1, 2, 3, 4, 0], dtype=torch.int8), *(torch.zeros(6, dtype=torch.bool) for _ in range(3))
)  # token i ends something of strength i


def greedy(ends: Sequence[int], shortest: int, longest: int) -> list[int]:
    """Chunk by chunk, by the words of the paper."""
    bounds = [0]
    while bounds[-1] < len(ends):
        first = bounds[-1]
        choices = range(first + shortest, first + longest + 1)
        ahead = [(ends[end - 1] if end <= len(ends) else 0) for end in choices]
        best = max(ahead)
        end = choices[ahead.index(best)] if best else first + longest
        bounds.append(min(end, len(ends)))
    return bounds


texts = st.lists(st.integers(0, 4), max_size=120) | st.lists(st.sampled_from([0, 0, 0, 0, 0, 1]), max_size=120)


@quick
@given(texts, st.integers(1, 9), st.integers(0, 9))
@example([0] * 50, 8, 8)
@example([1] * 50, 8, 8)
@example([], 8, 8)
def test_chunks_are_cut_greedily_at_the_strongest_boundary(ends: list[int], shortest: int, more: int) -> None:
    bounds = Cutter(shortest, shortest + more, OF_STRENGTH).bounds(torch.tensor(ends, dtype=torch.int64)).tolist()
    assert bounds == greedy(ends, shortest, shortest + more)
    lengths = [end - first for first, end in zip(bounds, bounds[1:], strict=False)]
    assert sum(lengths) == len(ends), "chunks partition the text"
    assert all(shortest <= length <= shortest + more for length in lengths[:-1])
    assert not lengths or 1 <= lengths[-1] <= shortest + more


@quick
@given(texts, st.integers(0, 130))
def test_uncut_tokens_are_left_for_later(ends: list[int], uncut: int) -> None:
    ids = torch.tensor(ends, dtype=torch.int64)
    whole, part = (Cutter(8, 16, OF_STRENGTH).bounds(ids, left).tolist() for left in (0, uncut))
    assert part == whole[: len(part)]
    assert len(ends) - part[-1] <= uncut
    assert all(len(ends) - first > uncut for first in part[:-1])


@given(st.integers(0, 200))
def test_without_delimiters_chunks_are_fixed(count: int) -> None:
    fixed = [*range(0, count, 16), count]
    ids = torch.zeros(count, dtype=torch.int64)
    assert Cutter(8, 16, OF_STRENGTH).bounds(ids).tolist() == fixed
    assert Cutter(8, 16).bounds(torch.full_like(ids, 4)).tolist() == fixed


PIECES = ["The", " key", "s", " of", "12", "ing", " a", ",", ".", " }", "\n", "\n\n"]
CPU = torch.device("cpu")


@quick
@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(0, 80), st.sampled_from([16, 17, 40]), st.integers(0, 9))
def test_a_text_that_grows_is_cut_as_one_read_at_once(
    seed: int, prompt: int, generated: int, rest: int, first: int
) -> None:
    ids = torch.randint(len(PIECES), (prompt + generated,), generator=seeded(seed))
    first, by_structure = min(first, prompt), cutter("structure", 8, 16, PIECES)
    grown = Text(ids[:prompt], by_structure, rest, CPU, first)
    for token in ids[prompt:].tolist():
        end = grown.end
        grown.append(token)
        assert grown.end == end + sum(grown.cut) and len(grown.cut) <= 1
        assert rest - 16 < grown.length - grown.end <= rest or grown.end == first
    whole = Text(ids, by_structure, rest, CPU, first)
    assert torch.equal(grown.chunks.bounds, whole.chunks.bounds)
    assert grown.length == whole.length == len(ids)


def test_a_prompt_cut_whole_leaves_the_rest_to_what_follows() -> None:
    ids = torch.randint(len(PIECES), (150,), generator=seeded())
    text = Text(ids, cutter("structure", 8, 16, PIECES), 40, CPU, whole_prompt=True)
    assert text.end == text.length == 150
    for token in range(40):
        text.append(token % len(PIECES))
    assert text.end == 150 and text.cut == []
    text.append(0)
    assert len(text.cut) == 1 and text.end == 150 + text.cut[0] and 8 <= text.cut[0] <= 16


@quick
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 120), st.sampled_from([16, 17, 40]))
def test_a_buffer_packed_whole_is_cut_to_its_end_and_begins_anew(
    seed: int, prompt: int, generated: int, rest: int
) -> None:
    ids = torch.randint(len(PIECES), (prompt + generated,), generator=seeded(seed))
    by_structure = cutter("structure", 8, 16, PIECES)
    text = Text(ids[:prompt], by_structure, rest, CPU, whole_prompt=True, packing="buffer")
    for at, token in enumerate(ids[prompt:].tolist()):
        text.append(token)
        packed = at and at % rest == 0
        assert text.length - text.end == at % rest + 1, "the new token stays"
        first = prompt + at - rest
        assert text.cut == (by_structure.bounds(ids[first : first + rest]).diff().tolist() if packed else [])
    assert text.short == sum(length < 8 for length in text.chunks.lengths.tolist())


@quick
@given(st.lists(st.integers(1, 16), min_size=1, max_size=9), st.integers(0, 80), st.data())
def test_chunks_are_taken_as_far_as_they_fit(lengths: list[int], room: int, data: st.DataObject) -> None:
    bounds = [5 + sum(lengths[:at]) for at in range(len(lengths) + 1)]
    chunks = Chunks(torch.tensor(bounds))
    wanted = data.draw(st.permutations(range(len(lengths))))
    kept = chunks.fitting(torch.tensor([*wanted, -1]), room).tolist()
    count = sum(chunk >= 0 for chunk in kept)
    assert kept == wanted[:count] + [-1] * (len(wanted) + 1 - count)
    used = sum(lengths[chunk] for chunk in wanted[:count])
    assert used <= room
    assert count == len(wanted) or used + lengths[wanted[count]] > room
    tokens = [token for chunk in wanted[:count] for token in range(bounds[chunk], bounds[chunk + 1])]
    assert chunks.tokens(torch.tensor([kept])).tolist() == [tokens]


# -- lists -------------------------------------------------------------------------------------------------------------


@quick
@given(st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=3, max_size=3), min_size=1))
def test_entries_are_the_numbers_of_every_range(ranges: list[list[tuple[int, int]]]) -> None:
    numbers, source = entries(*torch.tensor(ranges).permute(2, 0, 1))
    expected = [
        [(number, at) for at, (first, count) in enumerate(row) for number in range(first, first + count)]
        for row in ranges
    ]
    assert numbers.shape[1] == max(map(len, expected))
    for got, of, row in zip(numbers.tolist(), source.tolist(), expected, strict=True):
        assert got == [number for number, _ in row] + [-1] * (len(got) - len(row))
        assert of[: len(row)] == [at for _, at in row]


@quick
@given(st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=3))
def test_lists_are_a_permutation_by_cluster(assigned: list[list[int]]) -> None:
    """Of five clusters; the sixth number is none."""
    members, starts = lists_of(torch.tensor(assigned), 5)
    for row, of_row, first in zip(assigned, members.tolist(), starts.tolist(), strict=True):
        assert sorted(of_row) == list(range(7))
        for cluster in range(5):
            own = of_row[first[cluster] : first[cluster + 1]]
            assert own == [point for point, at in enumerate(row) if at == cluster]


# -- k-means -----------------------------------------------------------------------------------------------------------


def unit(*size: int, seed: int = 0) -> torch.Tensor:
    vectors = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return vectors / vectors.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("ragged", [False, True])
def test_kmeans_moves_every_centroid_to_the_mean_of_its_nearest_points(ragged: bool) -> None:
    """Several sets at once equal a loop over points and clusters; some sets have fewer points."""
    points, sizes = unit(3, 40, 6), [40, 31, 9] if ragged else [40] * 3
    counts = torch.tensor(sizes) if ragged else None
    first = spherical_kmeans(points, 5, 1, seeded(), counts)[1]
    previous, _ = spherical_kmeans(points, 5, 3, seeded(), counts)
    centroids, assigned = spherical_kmeans(points, 5, 4, seeded(), counts)
    assert not torch.equal(first, assigned), "iterations change something"
    for at, count in enumerate(sizes):
        for point in range(40):
            best = int((previous[at] @ points[at, point]).argmax()) if point < count else 5
            assert int(assigned[at, point]) == best
        for cluster in range(5):
            mean = points[at][assigned[at] == cluster].sum(dim=0)
            torch.testing.assert_close(centroids[at, cluster], mean / mean.norm(), rtol=0, atol=1e-5)


def test_kmeans_begins_with_distinct_points_and_empty_clusters_keep_theirs() -> None:
    """As many clusters as points find each its own; of equal points one cluster takes all."""
    points = unit(2, 12, 6)
    centroids, assigned = spherical_kmeans(points, 12, 3, seeded())
    assert assigned.sort(dim=1).values.tolist() == [list(range(12))] * 2
    torch.testing.assert_close(centroids.gather(1, assigned[..., None].expand(-1, -1, 6)), points)
    equal = points[:, :1].repeat(1, 12, 1)
    centroids, assigned = spherical_kmeans(equal, 4, 3, seeded())
    assert all(len(set(row)) == 1 for row in assigned.tolist())
    torch.testing.assert_close(centroids, equal[:, :4])


def test_kmeans_draws_from_its_generator_alone() -> None:
    points = unit(2, 50, 6)
    one, same, other = (spherical_kmeans(points, 7, 1, seeded(seed))[1] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
