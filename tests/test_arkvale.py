"""ArkVale: cuboids of pages, and a cache of pages that is attended whole, against its published bookkeeping."""

from __future__ import annotations

from driver import Stream, drive, stream
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named

Vectors = list[list[float]]


def cuboid(page: Vectors) -> tuple[list[float], list[float]]:
    """Centre -+ mean distance from it, of one head's keys, in plain lists."""
    low, high = [], []
    for numbers in zip(*page, strict=True):
        centre = (min(numbers) + max(numbers)) / 2
        radius = sum(abs(centre - number) for number in numbers) / len(numbers)
        low.append(centre - radius)
        high.append(centre + radius)
    return low, high


class Reference:
    """One row of one layer: the slots of a cache of pages, page by page and slot by slot.

    Args:
        keys: of each KV head, all tokens to come included.
        slots, best, sinks, window: pages of the cache, those that a step's scores choose, first and last ones.
    """

    def __init__(self, keys: list[Vectors], size: int, slots: int, best: int, sinks: int, window: int) -> None:
        self.keys, self.size, self.slots, self.best = keys, size, slots, best
        self.sinks, self.window, self.evictions = sinks, window, 0
        self.cache: list[int] = []

    def scores(self, queries: Vectors, pages: int) -> list[float]:
        """Of the first pages but the last, whose keys may not all be there."""
        group = len(queries) // len(self.keys)
        scores = []
        for page in range(pages - 1):
            boxes = [cuboid(head[page * self.size : (page + 1) * self.size]) for head in self.keys]
            logits = [
                sum(max(q * low, q * high) for q, low, high in zip(query, *boxes[at // group], strict=True))
                for at, query in enumerate(queries)
            ]
            scores.append(sum(logits) / len(logits))
        return scores

    def prefill(self, queries: Vectors, length: int) -> None:
        pages = -(-length // self.size)
        self.cache = list(range(pages))
        if pages > self.slots:
            first, last = max(2, self.sinks), range(pages - self.window, pages)
            scores = self.scores(queries, pages)
            ranked = sorted(range(first, last[0]), key=lambda page: -scores[page])
            self.cache = [*range(first), *ranked[: self.slots - first - self.window], *last]

    def step(self, queries: Vectors, length: int) -> set[int]:
        """The tokens attended when the row has `length`."""
        pages = -(-length // self.size)
        if (length - 1) % self.size == 0:  # the first token of a page
            if len(self.cache) == self.slots:
                place = self.slots - self.window + self.evictions % (self.window - 1)
                self.evictions += 1
                self.cache[place] = self.cache[-1]
                self.cache[-1] = pages - 1
            else:
                self.cache.append(pages - 1)
        if pages > self.slots:
            scores, between = self.scores(queries, pages), range(self.sinks, pages - self.window)
            best = sorted(between, key=lambda page: -scores[page])[: self.best]
            missing = [page for page in best if page not in self.cache]
            places = range(self.sinks, self.slots - self.window)
            worst = sorted(places, key=lambda place: scores[self.cache[place]])[: len(missing)]
            for place, page in zip(worst, missing, strict=True):
                self.cache[place] = page
        return {token for page in self.cache for token in range(page * self.size, min((page + 1) * self.size, length))}


def check(fixed: Stream, size: int, slots: int, share: float, sinks: int, window: int, accounting: str) -> None:
    """Whether every step of a stream attends what the reference does."""
    options = {"page_size": size, "sink_pages": sinks, "window_pages": window, "topk_share": share}
    driven = drive(fixed, method_named("arkvale", **options), slots * size, accounting=accounting)
    best = min(max(int(share * slots) - sinks - window + 1, 1), slots - sinks - window)
    rows: dict[tuple[int, int], Reference] = {}
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            queries, keys = fixed.queries[at.layer, row], fixed.keys[at.layer, row]
            if at.step == 1:
                rows[at.layer, row] = Reference(keys.tolist(), size, slots, best, sinks, window)
                rows[at.layer, row].prefill(queries[:, length - 2].tolist(), length - 1)
            expected = rows[at.layer, row].step(queries[:, length - 1].tolist(), length)
            assert at.sets(row) == [expected], f"row {row}, {length} tokens"
    assert driven.audit["attended_max"] <= slots * size and not driven.audit["over_rule"]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=2),
    steps=st.integers(1, 14),
    group=st.sampled_from([1, 2]),
    size=st.sampled_from([1, 3, 4]),
    more=st.integers(1, 5),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    sinks=st.integers(1, 3),
    window=st.integers(2, 3),
    accounting=st.sampled_from(["paper", "unified"]),
    seed=st.integers(0, 1000),
)
@example([60], 14, 2, 3, 3, 0.5, 1, 2, "paper", 0)
@example([13, 40], 12, 1, 4, 1, 1.0, 1, 3, "unified", 1)
def test_attended_are_the_pages_of_the_published_cache(
    lengths: list[int],
    steps: int,
    group: int,
    size: int,
    more: int,
    share: float,
    sinks: int,
    window: int,
    accounting: str,
    seed: int,
) -> None:
    fixed = stream(*lengths, steps=steps, layers=1, query_heads=2 * group, head_dim=8, seed=seed)
    check(fixed, size, sinks + window + more, share, sinks, window, accounting)


def test_a_budget_that_ends_within_a_page_attends_no_more_than_it_says() -> None:
    """All is attended up to the budget; with the token after it the cache has whole pages only."""
    fixed = stream(17, steps=6, layers=1)
    driven = drive(fixed, method_named("arkvale", page_size=4), 19)
    assert [len(at.sets(0)[0]) for at in driven.seen] == [18, 19, 16, 13, 14, 15]
    assert driven.seen[2].sets(0) == [{*range(8), *range(12, 20)}]


def test_bytes_are_those_of_the_cache_and_of_what_is_recalled() -> None:
    """Digests and the unfinished page are the index; the device has the cache, the host all; a step moves what it
    recalls, and the first one all."""
    size, slots, length, steps = 4, 6, 61, 5
    fixed = stream(length, steps=steps, layers=2)
    driven = drive(fixed, method_named("arkvale", page_size=size), slots * size)
    heads, entry = 2, 2 * 16 * 4  # KV heads, bytes of a key and a value
    pages = -(-(length + steps) // size)
    per_layer: dict[int, list[set[int]]] = {0: [], 1: []}
    for at in driven.seen:
        per_layer[at.layer] += at.sets(0)
    moved = sum(
        len(now - before - {length + step})  # the newest is on the device
        for steps_of in per_layer.values()
        for step, (before, now) in enumerate(zip([set[int](), *steps_of], steps_of, strict=False))
    )
    audit = driven.audit
    assert audit["moved_bytes_per_step"] == moved * heads * entry / steps
    assert audit["host_bytes"] == 2 * (length + steps) * heads * entry
    assert audit["device_kv_bytes"] == 2 * slots * size * heads * entry
    room = slots - 3
    assert audit["index_bytes"] == 2 * heads * entry * (pages + size / 2) + 2 * room * 8
