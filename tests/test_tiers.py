"""Tokens on the host, end to end: the same results as on the device, and bytes that stand a recount."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, Attended, drive, numbers, run_loop, stream, watch
from integrity import check

from kvbench.attention import executor as attention
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.memory.device import PAGE
from kvbench.memory.stage import Stage
from kvbench.method import Extra, Method, Needs, Prompt, Selection

RAGGED = [numbers(150, seed=1), numbers(97, seed=2), numbers(60, seed=3)]
STEPS = 8
DENSE = (1,)
SPARSE = (0, 2, 3)  # of four layers
ENTRY = 2 * 32 * 4  # bytes of one token's key and value in one KV head of the dummy models


class Walker(Method):
    """Attends the current token and up to 11 others of which each step replaces some, other ones in every head.

    Args:
        heads: lists of tokens a layer makes, 1, Hkv or Hq.
        home: where the tokens live.
    """

    def __init__(self, heads: int, home: str = "device") -> None:
        self.heads, self.needs = heads, Needs(home=home)  # type: ignore[arg-type]

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.last: dict[tuple[int, int, int], list[int]] = {}

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        lengths = self.view.lengths(layer)
        rows = [
            [self.walk(layer, row, head, length) for head in range(self.heads)] for row, length in enumerate(lengths)
        ]
        longest = max(len(head) for row in rows for head in row)
        return Selection(torch.tensor([[head + [-1] * (longest - len(head)) for head in row] for row in rows]))

    def walk(self, layer: int, row: int, head: int, length: int) -> list[int]:
        rng = random.Random(f"{layer}/{row}/{head}/{length}")
        last = self.last.get((layer, row, head), [])
        stays = rng.sample(last, k=min(6, len(last)))
        others = [token for token in range(length - 1) if token not in stays]
        chosen = [length - 1, *stays, *rng.sample(others, k=rng.randint(3, 5))]
        self.last[layer, row, head] = chosen
        return chosen

    def rule(self, layer: int, length: int, generated: int) -> None:
        return None


def living(method: Method, home: str) -> Method:
    """The same method with its tokens at `home`."""
    method.needs = replace(method.needs, home=home)  # type: ignore[arg-type]
    return method


PAIRS: dict[str, Callable[[str], Method]] = {
    "quest": lambda home: living(method_named("quest"), home),
    "quest-kv_head": lambda home: living(method_named("quest", selection="kv_head"), home),
    "topk": lambda home: living(method_named("topk"), home),
    "walker-1": lambda home: Walker(1, home),
    "walker-Hkv": lambda home: Walker(2, home),
    "walker-Hq": lambda home: Walker(4, home),
}
FAST = [name for name in attention.EXECUTORS if name != "reference"]
TRANSFER = {"cpu": "in place"}  # of other executors: simulated
each_pair = pytest.mark.parametrize("pair", PAIRS)


def logits_of(loaded: Loaded, run: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """What `run` returns, and the logits of the decode steps in it."""
    noted: list[torch.Tensor] = []
    hook = loaded.model.lm_head.register_forward_hook(lambda _, __, out: noted.append(out.clone()))
    try:
        result = run()
    finally:
        hook.remove()
    return result, torch.cat(noted[1:])


@each_pair
@pytest.mark.parametrize("executor", attention.EXECUTORS)
def test_host_home_generates_what_device_home_generates(tiny: Loaded, pair: str, executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "dense_layers": DENSE, "steps": STEPS}
    found = {}
    for home in ("device", "host"):
        method = PAIRS[pair](home)
        run = lambda method=method: run_loop(tiny, RAGGED, method, SMALL, **options)[0]  # noqa: E731
        found[home] = logits_of(tiny, run)
    (device, expected), (host, logits) = found["device"], found["host"]
    assert host.tokens == device.tokens
    assert torch.equal(logits, expected), "the same keys and values reach the same kernel"
    assert "transfer" not in device.audit
    assert host.audit["transfer"] == TRANSFER.get(executor, "simulated")
    assert device.audit["moved_bytes_per_step"] == device.audit["host_bytes"] == 0
    for name in ("attended_mean", "attended_max", "over_rule", "dense_share", "read_bytes_per_step"):
        assert host.audit[name] == device.audit[name]


def kv_head_sets(at: Attended, kv_heads: int, row: int) -> list[set[int]]:
    """Tokens that the query heads of each KV head attend."""
    heads = at.sets(row)
    if len(heads) == 1:
        heads = heads * kv_heads
    group = len(heads) // kv_heads
    return [set().union(*heads[head * group : (head + 1) * group]) for head in range(kv_heads)]


@each_pair
@pytest.mark.parametrize("executor", FAST)
def test_moved_and_held_bytes_stand_a_recount(
    tiny: Loaded, pair: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step moves what it attends, less the current token, which is on the device, and what the last step staged.

    Attended in place, nothing is read from the host to be sent, and as much counted.
    """
    transfers = count_transfers(monkeypatch)
    method = PAIRS[pair]("host")
    seen = watch(method)
    generation, _ = run_loop(tiny, RAGGED, method, SMALL, executor=executor, dense_layers=DENSE, steps=STEPS)
    moved, busy = 0, 0
    staged: dict[tuple[int, int, int], set[int]] = {}
    on_device = [0] * STEPS
    for at in seen:
        before = moved
        for row, length in enumerate(at.lengths):
            for head, wanted in enumerate(kv_head_sets(at, 2, row)):
                kv_head = (at.layer, row, head)
                moved += len(wanted - staged.get(kv_head, set()) - {length - 1})
                staged[kv_head] = wanted
                on_device[at.step - 1] += len(wanted)
        busy += moved > before
    for step in range(STEPS):
        on_device[step] += 2 * len(DENSE) * sum(len(prompt) + step + 1 for prompt in RAGGED)
    assert moved > 0
    assert generation.audit["moved_bytes_per_step"] == pytest.approx(moved * ENTRY / STEPS, rel=1e-12)
    assert sum(transfers) == (0 if executor == "cpu" else moved)
    assert len(transfers) == (0 if executor == "cpu" else busy), "one transfer carries all that a layer needs"
    assert generation.audit["device_kv_bytes"] == max(on_device) * ENTRY
    in_all = sum(len(prompt) + STEPS for prompt in RAGGED)
    assert generation.audit["host_bytes"] == in_all * 2 * len(SPARSE) * ENTRY


def count_transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of every transfer from the host from now on."""
    transfers: list[int] = []
    origins = Stage._origins

    def counted(self: Stage, *args: Any) -> Any:
        near, far = origins(self, *args)
        if count := int((far >= 0).sum()):
            transfers.append(count)
        return near, far

    monkeypatch.setattr(Stage, "_origins", counted)
    return transfers


def test_device_holds_no_prompt_of_a_host_home_layer(tiny: Loaded) -> None:
    _, engine = run_loop(tiny, RAGGED, PAIRS["walker-1"]("host"), SMALL, dense_layers=DENSE, steps=STEPS)
    staged_at_most = 3 * 2 * PAGE * ENTRY  # 12 tokens take a page
    for layer, store in engine.stores.items():
        if layer in SPARSE:
            assert store.allocated_bytes() <= staged_at_most
        else:
            assert store.allocated_bytes() >= sum(map(len, RAGGED)) * 2 * ENTRY


class Split(Walker):
    """A walker of whose sparse layers one has its tokens on the host."""

    def __init__(self) -> None:
        super().__init__(2, "by_layer")

    def home(self, layer: int) -> Any:
        return "host" if layer == SPARSE[1] else "device"


def test_each_layer_s_tokens_live_where_its_method_says(tiny: Loaded) -> None:
    options: dict[str, Any] = {"dense_layers": DENSE, "steps": STEPS}
    _, expected = logits_of(tiny, lambda: run_loop(tiny, RAGGED, Walker(2), SMALL, **options))
    method = Split()
    seen = watch(method)
    (generation, engine), logits = logits_of(tiny, lambda: run_loop(tiny, RAGGED, method, SMALL, **options))
    assert torch.equal(logits, expected)
    everything = sum(len(prompt) + STEPS for prompt in RAGGED) * 2 * ENTRY
    far = SPARSE[1]
    for layer, store in engine.stores.items():
        check(store)
        staged = [head for row in range(3) for head in seen[-2].sets(row)] if layer == far else []
        assert store.host_bytes() == (everything if layer == far else 0)
        assert store.resident_bytes() == (sum(map(len, staged)) * ENTRY if layer == far else everything)
    moved, last = 0, dict[tuple[int, int], set[int]]()
    for at in (at for at in seen if at.layer == far):
        for row, length in enumerate(at.lengths):
            for head, wanted in enumerate(at.sets(row)):
                moved += len(wanted - last.get((row, head), set()) - {length - 1})
                last[row, head] = wanted
    assert generation.audit["moved_bytes_per_step"] == pytest.approx(moved * ENTRY / STEPS, rel=1e-12)


# -- evicted to the host, and brought back -----------------------------------------------------------------------------


class Link(Method):
    """Keeps some tokens resident, moves the others to the host and brings some back (RACC's link).

    Its twin (`twin=True`) keeps everything on the device and selects the tokens that would be resident.
    """

    def __init__(self, twin: bool) -> None:
        self.twin = twin
        self.needs = Needs() if twin else Needs(on_drop="offload")

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.now, self.brought = 0, 0
        self.resident: dict[tuple[int, int, int], set[int]] = {}

    def every_head(self) -> list[tuple[int, int, int]]:
        sparse, rows = self.shape.sparse_layers, range(self.shape.batch)
        return [(layer, row, head) for layer in sparse for row in rows for head in range(self.shape.kv_heads)]

    def end_prefill(self) -> None:
        self.change()

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for at, row, head in self.every_head():
            if at == layer:
                self.resident[layer, row, head].add(self.view.lengths(layer)[row] - 1)

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        return Selection(self.ids(layer)) if self.twin else None

    def end_step(self) -> None:
        self.now += 1
        if self.now % 3 == 0:
            self.change()

    def change(self) -> None:
        """Other tokens for every KV head, the last one always among them, some of which are on the host by now."""
        for layer, row, head in self.every_head():
            length = self.view.lengths(layer)[row]
            rng = random.Random(f"{layer}/{row}/{head}/{length}")
            kept = {length - 1, *rng.sample(range(length), k=rng.randint(15, 25))}
            here = self.resident.get((layer, row, head), set(range(length)))
            self.brought += len(kept - here)
            self.resident[layer, row, head] = kept
        if not self.twin:
            for layer in self.shape.sparse_layers:
                self.view.keep(layer, self.ids(layer))

    def ids(self, layer: int) -> torch.Tensor:
        rows = [
            [sorted(self.resident[layer, row, head]) for head in range(self.shape.kv_heads)]
            for row in range(self.shape.batch)
        ]
        longest = max(len(head) for row in rows for head in row)
        return torch.tensor([[head + [-1] * (longest - len(head)) for head in row] for row in rows])

    def rule(self, layer: int, length: int, generated: int) -> None:
        return None


@pytest.mark.parametrize("executor", attention.EXECUTORS)
def test_tokens_come_back_from_the_host(tiny: Loaded, executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "dense_layers": DENSE, "steps": STEPS}
    method = Link(twin=False)
    (twin, _), expected = logits_of(tiny, lambda: run_loop(tiny, RAGGED, Link(twin=True), None, **options))
    (link, engine), logits = logits_of(tiny, lambda: run_loop(tiny, RAGGED, method, None, **options))
    assert link.tokens == twin.tokens
    torch.testing.assert_close(logits, expected, rtol=0, atol=CLOSE)
    assert method.brought > 0
    assert link.audit["moved_bytes_per_step"] == pytest.approx(method.brought * ENTRY / STEPS, rel=1e-12)
    assert link.audit["attended_mean"] == twin.audit["attended_mean"]
    assert link.audit["transfer"] == TRANSFER.get(executor, "simulated")
    resident = sum(map(len, method.resident.values()))
    seen = sum(len(prompt) + STEPS for prompt in RAGGED) * 2
    assert sum(engine.stores[layer].resident_bytes() for layer in SPARSE) == resident * ENTRY
    assert sum(engine.stores[layer].host_bytes() for layer in SPARSE) == (seen * len(SPARSE) - resident) * ENTRY


# -- what a method may do with the host tier ---------------------------------------------------------------------------


class Arranging(Walker):
    """Sets another physical order on the host after the prompt, and again at some steps."""

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.shuffle(layer, max(prompt.lengths))

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        if int(positions[0]) % 2:
            for layer in self.shape.sparse_layers:
                self.shuffle(layer, int(positions.max()))

    def shuffle(self, layer: int, count: int) -> None:
        rng = self.context.generator(layer)
        orders = [torch.randperm(count, generator=rng) for _ in range(self.shape.batch * self.shape.kv_heads)]
        self.view.arrange(layer, torch.stack(orders).view(self.shape.batch, self.shape.kv_heads, count))


def test_physical_order_on_the_host_changes_nothing(tiny: Loaded) -> None:
    found = []
    for method in (Walker(2, "host"), Arranging(2, "host")):
        run = lambda method=method: run_loop(tiny, RAGGED, method, None, dense_layers=DENSE, steps=STEPS)  # noqa: E731
        found.append(logits_of(tiny, run))
    ((plain, _), expected), ((arranged, engine), logits) = found
    assert not torch.equal(engine.stores[0].host.slot_of[0, 0], torch.arange(engine.stores[0].host.capacity))
    assert torch.equal(logits, expected)
    assert arranged.tokens == plain.tokens
    assert arranged.audit == plain.audit


class InPlace(Arranging):
    """Reads host keys where they lie, at every step, through arrangements and growth."""

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.addresses: set[int] = set()

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.addresses.add(self.view.host_keys(layer).data_ptr())
        super().prefill(layer, prompt)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        held, keys = self.view.host_keys(layer), self.view.keys(layer)
        self.addresses.add(held.data_ptr())
        for row, length in enumerate(self.view.lengths(layer)):
            for head in range(self.shape.kv_heads):
                order = self.view._stores[layer].host.slot_of[row, head, :length]
                assert torch.equal(held[row, head, order], keys[row, head, :length])
        self.view.count_read(layer, 5)
        return super().select(layer, query)


@pytest.mark.parametrize("grows", [False, True])
def test_host_keys_are_the_store_s_own_memory(grows: bool) -> None:
    method = InPlace(2, "host")
    driven = drive(stream(40, 21, steps=6, layers=1), method, None, left=grows)
    assert len(method.addresses) == 1 + grows
    every_key = sum(2 * 2 * (40 + step) for step in range(1, 7))
    assert driven.audit["read_bytes_per_step"] * 6 == (every_key + 6 * 5) * 16 * 4


def test_host_keys_need_a_host() -> None:
    with pytest.raises(ValueError, match="home='host'"):
        drive(stream(40), InPlace(2, "device"), None)


class Reader(Method):
    """Attends everything and reads keys and values beside it."""

    def __init__(self, home: str) -> None:
        self.needs = Needs(home=home)  # type: ignore[arg-type]

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        lengths = self.view.lengths(layer)
        some = torch.tensor([[[0, 3, -1], [2, 1, 5]]]).expand(len(lengths), 2, 3)
        keys, values = self.view.keys(layer, some), self.view.values(layer, some[:, :1])
        assert keys.shape == (len(lengths), 2, 3, self.shape.head_dim)
        assert values.shape == keys.shape
        assert self.view.keys(layer).shape[2] == max(lengths)
        ids = torch.arange(max(lengths)).expand(len(lengths), 1, -1)
        return Selection(torch.where(ids < torch.tensor(lengths)[:, None, None], ids, -1))


@pytest.mark.parametrize("home", ["device", "host"])
def test_reads_through_the_view_are_counted(tiny: Loaded, home: str) -> None:
    """Five keys and four values of both KV heads, -1 names none, and all keys of every row, padded to the longest."""
    generation, _ = run_loop(tiny, RAGGED, Reader(home), None, dense_layers=DENSE, steps=STEPS)
    vectors = sum(len(RAGGED) * (5 + 4 + 2 * (len(RAGGED[0]) + step + 1)) for step in range(STEPS))
    assert generation.audit["read_bytes_per_step"] == vectors * len(SPARSE) * (ENTRY // 2) / STEPS


@pytest.mark.parametrize("executor", attention.EXECUTORS)
def test_host_home_method_must_select(tiny: Loaded, executor: str) -> None:
    class Idle(Method):
        needs = Needs(home="host")

    with pytest.raises(LookupError, match="must select"):
        run_loop(tiny, RAGGED, Idle(), None, executor=executor)


class Background(Method):
    """Ranks the prompt's keys by their norm in a worker, from the copy on the host, and attends the largest."""

    needs = Needs(home="host")

    def __init__(self, in_background: bool) -> None:
        self.in_background = in_background

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.ranked: dict[int, Future[torch.Tensor]] = {}
        self.threads: set[int] = set()

    def prefill(self, layer: int, prompt: Prompt) -> None:
        on_host = prompt.on_host
        assert on_host is not None

        def rank() -> torch.Tensor:
            self.threads.add(threading.get_ident())
            keys, values = on_host.result()
            assert keys.shape == values.shape == prompt.keys.shape
            norms = torch.stack([keys, values]).norm(dim=4).sum(dim=0)
            valid = prompt.valid()
            return norms if valid is None else norms.masked_fill(~valid[:, None], -1)

        if self.in_background:
            self.ranked[layer] = self.context.pool.submit(rank)
        else:
            self.ranked[layer] = Future()
            self.ranked[layer].set_result(rank())

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        best = self.ranked[layer].result().topk(20, dim=2).indices
        current = torch.tensor(self.view.lengths(layer))[:, None, None] - 1
        return Selection(torch.cat([best, current.expand(-1, best.shape[1], 1)], dim=2))


def test_index_may_be_built_in_the_pool_from_the_copy_on_the_host(tiny: Loaded) -> None:
    here, in_pool = Background(False), Background(True)
    expected, _ = run_loop(tiny, RAGGED, here, None, steps=STEPS)
    generation, _ = run_loop(tiny, RAGGED, in_pool, None, steps=STEPS)
    assert generation.tokens == expected.tokens
    assert generation.audit["moved_bytes_per_step"] == expected.audit["moved_bytes_per_step"]
    assert here.threads == {threading.get_ident()}
    assert threading.get_ident() not in in_pool.threads


# -- every field of a selection, in every kind of store ----------------------------------------------------------------


class Fields(Method):
    """Selects with the fields it is told to use.

    Args:
        heads: lists of tokens a layer makes, 1, Hkv or Hq.
        parts: fields beside the index.
        where: "device"; "kept", a third of the prompt is evicted; "host".
    """

    def __init__(self, heads: int, parts: Sequence[str], where: str) -> None:
        self.heads, self.parts, self.where = heads, parts, where
        self.needs = Needs(home="host" if where == "host" else "device", probabilities=True)
        self.weights: list[torch.Tensor] = []

    def end_prefill(self) -> None:
        for layer in self.shape.sparse_layers if self.where == "kept" else ():
            rows = [[token for token in range(length) if token % 3] for length in self.shape.lengths]
            kept = torch.tensor([row + [-1] * (max(map(len, rows)) - len(row)) for row in rows])
            self.view.keep(layer, kept[:, None])

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Tokens that no `keep` above has dropped, five or three of them by row."""
        shape, lengths = self.shape, self.view.lengths(layer)
        rng = torch.Generator().manual_seed(100 * layer + lengths[0])
        index = torch.full((shape.batch, self.heads, 6), -1)
        for row, length in enumerate(lengths):
            choice = torch.tensor([token for token in range(length) if token % 3 or token >= shape.lengths[row]])
            for head in range(self.heads):
                count = 5 - 2 * row
                index[row, head, :count] = choice[torch.randperm(len(choice), generator=rng)[:count]]

        def normal(heads: int, *size: int) -> torch.Tensor:
            return torch.randn(shape.batch, heads, *size, generator=rng)

        extra = Extra(
            normal(shape.kv_heads, 2, shape.head_dim),
            normal(shape.kv_heads, 2, shape.head_dim),
            normal(shape.query_heads, 2),
        )
        log_weight, keys = normal(shape.query_heads, 6), normal(shape.kv_heads, 6, shape.head_dim)
        return Selection(
            index,
            log_weight=log_weight if "log_weight" in self.parts else None,
            keys=keys if "keys" in self.parts else None,
            extra=extra if "extra" in self.parts else None,
        )

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.weights.append(probabilities.clone())


PARTS: list[tuple[str, ...]] = [(), ("log_weight",), ("extra",), ("keys",), ("log_weight", "keys", "extra")]
WITHOUT_KEYS = [*PARTS[:3], ("log_weight", "extra")]  # replaced keys are per KV head


@pytest.mark.parametrize("where", ["device", "kept", "host"])
@pytest.mark.parametrize(
    ("heads", "parts"),
    [(heads, parts) for heads in (1, 2, 4) for parts in (PARTS if heads < 4 else WITHOUT_KEYS)],
    ids=lambda value: str(value) if isinstance(value, int) else "+".join(value) or "plain",
)
def test_every_field_of_a_selection_in_every_store(heads: int, parts: Sequence[str], where: str) -> None:
    fixed = stream(30, 21)
    methods = {name: Fields(heads, parts, where) for name in attention.EXECUTORS}
    driven = {name: drive(fixed, method, None, executor=name) for name, method in methods.items()}
    for name in FAST:
        torch.testing.assert_close(driven[name].outputs, driven["reference"].outputs, rtol=0, atol=CLOSE)
        for ours, theirs in zip(methods[name].weights, methods["reference"].weights, strict=True):
            assert ours.shape == (2, 4, 6 + 2 * ("extra" in parts))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)
        plain = drive(fixed, Fields(heads, parts, "device"), None, executor=name)
        assert torch.equal(driven[name].outputs, plain.outputs), "where a token lies changes nothing"
    if parts:
        assert not torch.allclose(driven["torch"].outputs, drive(fixed, Fields(heads, (), where), None).outputs)
