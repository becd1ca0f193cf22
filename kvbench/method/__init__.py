"""The Method interface: what a KV-cache method learns, and the three questions it answers.

The harness owns keys and values, runs the attention kernel, counts what is attended and moved, and
applies the rules that are the same for all (dense layers, budget, when sparsity starts). A method
owns only its index and says what to keep, what to look at and what to remember. This module knows
no method and no model.

Symbols: B sequences, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head dim, N longest prompt, M
selected entries, W query window. Keys and queries are post-RoPE; KV heads are never repeated. A
token id is the token's logical position in its own sequence, 0 .. length-1, whatever padding the
caller had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch

from kvbench.budget import Budget
from kvbench.method.shape import Shape as Shape  # which is of the interface
from kvbench.method.shape import capped as capped
from kvbench.spans import Spans

Table = tuple[tuple[float, ...], ...]  # [layers][heads]


@dataclass(frozen=True)
class DeviceCache:
    """What stays on the device of tokens that were brought up from the host, beside those that the
    step attends.

    It changes what is moved and held, never what is attended. Policies other than "last" with one
    step are worked out on the CPU, which then waits for a selection made on a GPU.

    Attributes
    ----------
    policy
        "last", what the last steps attended; "lru" and "lfu", that of one step, and blocks of
        consecutive tokens in every KV head of a row, brought up whole: those used last, or most
        often since they came. A step uses the blocks of tokens that it attends and the step before
        did not.
    steps
        of "last", 1: of each step only what the next one attends, too, is not moved again.
    tokens
        of "lru" and "lfu", what the blocks of a row have room for.
    block
        tokens of a block.

    Raises
    ------
    ValueError
        not one step, or no room for one block.
    """

    policy: Literal["last", "lru", "lfu"] = "last"
    steps: int = 1
    tokens: int = 4096
    block: int = 128

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"cache_steps={self.steps}: expected a whole number, 1 or more")
        if self.block < 1 or self.tokens < self.block:
            raise ValueError(
                f"cache_tokens={self.tokens}: expected room for a block, cache_block={self.block}"
            )


@dataclass(frozen=True)
class Replay:
    """Prompts that are read once more after they were read: to repeat the context, as KVzip asks a
    model to.

    What follows a row's prefix is cut into chunks. For each the model, which sees the whole prompt,
    reads in one pass at the positions after the prompt: `ask` (for a later chunk `go_on`, and the
    last `overlap` tokens of the chunk before), what the chat template has after a user's text, and
    the chunk. Nothing of it stays in memory.

    Attributes
    ----------
    chunk
        tokens; None: all in one.
    ask, go_on
        texts.
    overlap
        tokens.

    Raises
    ------
    ValueError
        not one token in a chunk.
    """

    chunk: int | None
    ask: str
    go_on: str = ""
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk}: expected a number of tokens, 1 or more")


@dataclass(frozen=True)
class Needs:
    """What a method asks of the harness; read once, before the first token.

    Attributes
    ----------
    query_window
        last W prompt queries to hand over in `Prompt.queries`; a W no prompt reaches: all. They
        take Hq W D numbers of a layer as it is read, and of all layers in a prefill that several
        methods share.
    attention_sums
        hand over, per key, the attention received from all prompt queries (H2O).
    layer_similarity
        call `observe_layers` with how little attention changes the hidden states of each layer.
    inputs
        hand over in `Prompt.inputs` what each layer's attention reads: hidden states after the norm
        before it. They take N E numbers of a layer, of all layers in a prefill that several methods
        share, or that is read again; decode steps have none.
    prefix
        hand over in `Prompt.prefixes` how many tokens come before the context of each row; a replay
        needs it.
    replay
        hand over in `Prompt.replayed` what the model does when it reads the prompts again;
        `prefill` then comes once that is over, layer after layer. None: it does not.
    probabilities
        call `observe` with the attention probabilities of every decode step.
    queries
        `select` learns from what it is asked, so it is asked for the tokens of a later turn, too,
        which attend everything (`kvbench.engine.engine.Engine.start_turn`). Of layers that share
        keys the queries of the one that stores them count: what it selects the others attend, too.
    crops
        the last tokens may be taken back, which `crop` announces; then nothing may have been
        dropped.
    token_text
        hand over the text of every vocabulary entry in `Context.pieces`.
    rotation
        hand over in `Context.rotation` the model's rotary positions, to turn keys and queries back
        and on.
    home
        where prompt and generated tokens live: "device", or "host" with selected rows moved up;
        "by_layer": where `Method.home` says of each layer.
    cache
        of a home on the host, which of the rows moved up stay on the device.
    host_keys
        the index reads `View.host_keys` as it works, so that coded keys are there decoded, too.
    head_scores
        hand over in `Context.head_scores` what `kvbench calibrate` has measured of the model:
        "auto", its own file, found by the weights; or the name of a file. None: nothing.
    measures
        which kind of its files: the name of the method's option, see `kvbench.models.heads.KINDS`.
    on_drop
        what `View.keep` does with the other tokens: forget them, or move them to the host.
    rebuilds_keys
        `Selection.keys` are those of all tokens off the device, so that only their values are moved
        up; on the device the stored keys count.
    writes
        `View.write` gives tokens that stay other keys or values.
    positions
        "original" RoPE positions, or "cache": those inside the selection, without its gaps
        (StreamingLLM).
    host_step
        `append`, `select` and `observe` do something on the host in every step, such as to look at
        a number or to count in Python. False: they launch the same operations on the same memory in
        every step, `layout` says when not, and a GPU repeats them by itself as they were captured;
        `step` and `end_step` run on the host in any case. Nothing of it matters `at_rest`.
    """

    query_window: int = 0
    attention_sums: bool = False
    layer_similarity: bool = False
    inputs: bool = False
    prefix: bool = False
    replay: Replay | None = None
    probabilities: bool = False
    queries: bool = False
    crops: bool = False
    token_text: bool = False
    rotation: bool = False
    head_scores: str | None = None
    measures: str = "heads"
    home: Literal["device", "host", "by_layer"] = "device"
    host_keys: bool = False
    cache: DeviceCache = DeviceCache()
    on_drop: Literal["discard", "offload"] = "discard"
    rebuilds_keys: bool = False
    writes: bool = False
    positions: Literal["original", "cache"] = "original"
    host_step: bool = True

    def __post_init__(self) -> None:
        if self.replay is not None and (self.layer_similarity or not self.prefix):
            raise ValueError(
                "Needs: a replay is shown with prefix=True, and without layer_similarity"
            )


@dataclass(frozen=True)
class HeadScores:
    """What `kvbench calibrate` has measured of a model's heads; what a file has not is ().

    Of a table with one number a head, which comes from elsewhere, both scores are that number.

    Attributes
    ----------
    echo
        `[layers, Hkv]`, how far a KV head looks back to earlier copies of the token, from 0 to 1.
    induction
        how far to the tokens that followed these copies.
    query_means
        the mean query of each query head before RoPE, over plain text, `[layers, Hq, D]`; (): not
        known, as of models whose keys cannot be turned.
    query_sizes
        the mean length of its pairs (f, f + D / 2), `[layers, Hq, D / 2]`.
    surrogate
        by which hidden states, and last a 1, give KVzap's scores, `[layers, Hkv, E + 1]`.
    filters
        the direction in which a group's queries mostly lie, `[layers, Hkv, D]`.
    """

    echo: Table = ()
    induction: Table = ()
    query_means: tuple[Table, ...] = ()
    query_sizes: tuple[Table, ...] = ()
    surrogate: tuple[Table, ...] = ()
    filters: tuple[Table, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadScores:
        return self  # nothing of it changes, and there are many numbers in it


class Rotation(Protocol):
    """The model's rotary positions, for keys or queries [B, H, n, D] at any positions [B, 1 or H,
    n] from 0 on.

    A factor on the attention that a model has in its rotary positions stays in the keys.
    """

    def back(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys as they were before RoPE; in their dtype, turned in float32."""

    def turn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys with RoPE: `back` undone."""


@dataclass(frozen=True)
class Context:
    """What one generation may use besides its tensors.

    Attributes
    ----------
    seed, samples
        everything random derives from these two and the layer, never from the order of calls; of
        each row its sample's id, or one id for all.
    pool
        the one worker pool for background index work.
    spans
        timing spans, `with context.spans("gather"): ...` inside a method refines the breakdown; of
        the thread that calls the method, not of the pool's.
    pieces
        text of every vocabulary entry, when `Needs.token_text` asked for it.
    new_tokens
        decode steps to come at most; None: unknown, as under `model.generate`.
    head_scores
        of the model, when `Needs.head_scores` asked for them.
    rotation
        of the model, when `Needs.rotation` asked for it.
    output
        of a layer, the weight [Hq, D, hidden size] by which heads' outputs go into the hidden
        states; None: there is no model.
    """

    seed: int
    samples: tuple[str, ...]
    pool: Pool
    spans: Spans
    pieces: Sequence[str] | None = None
    new_tokens: int | None = None
    head_scores: HeadScores | None = None
    rotation: Rotation | None = None
    output: Callable[[int], torch.Tensor] | None = None

    def layer_seed(self, layer: int, row: int = 0) -> int:
        """A 63-bit seed for a row in `layer`, the same in any order, batch, process and thread
        count.
        """
        sample = self.samples[row if len(self.samples) > 1 else 0]
        digest = hashlib.sha256(f"{self.seed}/{sample}/{layer}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def generator(
        self, layer: int, device: torch.device | str = "cpu", row: int = 0
    ) -> torch.Generator:
        """A torch generator seeded by `layer_seed`."""
        return torch.Generator(device).manual_seed(self.layer_seed(layer, row))


@dataclass(frozen=True, eq=False)
class Replayed:
    """One layer in one pass of a `Replay`, whose last tokens are a chunk of a row's context.

    Attributes
    ----------
    row
        of the batch.
    start, stop
        the chunk is the row's tokens start .. stop - 1.
    queries, keys
        [Hq, q, D] and [Hkv, q, D], of all tokens of the pass.
    norms
        [q] fp32, of the attention module's inputs.
    """

    row: int
    start: int
    stop: int
    queries: torch.Tensor
    keys: torch.Tensor
    norms: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """One layer's prompt after its last prefill chunk.

    Rows are left-aligned; entries of a row at and beyond its length are undefined and must not be
    used.

    Attributes
    ----------
    lengths
        tokens of each row, as Python ints (no device sync).
    token_ids
        [B, N].
    keys, values
        [B, Hkv, N, D], in place in the store.
    queries
        [B, Hq, W, D], the last W queries of each row, right-aligned (W = `Needs.query_window`, at
        most N).
    attention_sums
        [B, Hq, N] fp32, or None.
    on_host
        resolves to (keys, values) in host memory when home is "host"; background work waits on it.
        It is the store's own memory, so join what reads it before `View.arrange` moves it.
    prefixes
        of each row, if `Needs.prefix`, how many tokens come before its context: what the chat
        template has before a user's text, or else a BOS token, if there is one.
    inputs
        [B, N, E], if `Needs.inputs`.
    replayed
        of each row in the order of its chunks, if `Needs.replay`.
    """

    lengths: tuple[int, ...]
    token_ids: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    attention_sums: torch.Tensor | None = None
    on_host: Future[tuple[torch.Tensor, torch.Tensor]] | None = None
    prefixes: tuple[int, ...] = ()
    inputs: torch.Tensor | None = None
    replayed: tuple[Replayed, ...] = ()

    def valid(self) -> torch.Tensor | None:
        """[B, N] bool, True on real tokens; None when no row is shorter than N."""
        longest = self.keys.shape[2]
        if all(length == longest for length in self.lengths):
            return None
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        return torch.arange(longest, device=self.keys.device) < lengths[:, None]


@dataclass(frozen=True, eq=False)
class Extra:
    """Synthetic entries attended beside the selected ones (RazorAttention's compensation token).

    Attributes
    ----------
    key, value
        [B, Hkv, E, D].
    log_weight
        [B, Hq, E], added to the logits; -inf: the head has no such entry.
    """

    key: torch.Tensor
    value: torch.Tensor
    log_weight: torch.Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """What one layer attends at one decode step, complete: the harness adds nothing, not even the
    current token.

    Attributes
    ----------
    index
        [B, Hs, M] int64 token ids, Hs in {1, Hkv, Hq}; unique in a row, best first, trailing -1 =
        none. On the device, or on the CPU where the method's index is: then nothing has to wait for
        the device.
    log_weight
        [B, Hq, M], added to the logits (MagicPIG's sampling correction), or None.
    keys
        [B, Hkv, M, D], used in place of the stored keys (ShadowKV), or None; needs Hs in {1, Hkv}.
        With `Needs.rebuilds_keys` of tokens off the device alone: what stands for the others is not
        read, and where these are the last ones nothing need stand for them.
    extra
        synthetic entries in the same softmax, or None.
    sinks
        with `Needs.positions` "cache" each list has recent tokens without a gap, newest first, and
        then the tokens before this one; nothing waits for an index on the device. None: unknown.
    """

    index: torch.Tensor
    log_weight: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    extra: Extra | None = None
    sinks: int | None = None


class View(Protocol):
    """A method's window on the stored keys and values: metered reads, and the eviction it may ask
    for.

    Every call takes the true layer index. Token ids are [B, Hkv or 1, M] int64 with -1 = none.
    """

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens seen by each row in `layer`, the current one included after its append."""

    def seen(self, layer: int) -> torch.Tensor:
        """`lengths` as [B] int64 on the device; nothing waits for it."""

    def keys(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Keys of `ids`, or of all tokens in the home tier, [B, Hkv, M, D], on the device they are
        stored on. Metered.

        Ids on the CPU are counted there, without a wait for the device.

        Raises
        ------
        LookupError
            an id that was dropped, or not seen yet.
        """

    def values(self, layer: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Values, as `keys`. Metered."""

    def host_keys(self, layer: int) -> torch.Tensor:
        """All host keys in place, [B, Hkv, capacity, D] in physical order, for an index that reads
        them as it works.

        Other memory once the store has grown. From a GPU the current token arrives by the next
        step. Not metered: say with `count_read` what was read.

        Raises
        ------
        ValueError
            nothing of this layer has its home on the host.
        """

    def count_read(self, layer: int, keys: int) -> None:
        """Meter `keys` keys, of one KV head each, that were read in `host_keys`."""

    def resident(self, layer: int) -> torch.Tensor:
        """Ids of the tokens on the device, ascending, [B, Hkv, M] with trailing -1."""

    def keep(self, layer: int, ids: torch.Tensor, room: int | None = None) -> None:
        """Keep `ids` on the device, the rest goes where `Needs.on_drop` says; ids on the host come
        back.

        Lists may be of query heads, too, [B, Hq, M]: of a KV head stays what any query head of its
        group names.

        Parameters
        ----------
        room
            tokens that come before the next `keep`, at most: memory is reserved for no more; None:
            for all.

        Raises
        ------
        ValueError
            an id twice in one list, or a store whose home is the host.
        """

    def write(
        self,
        layer: int,
        ids: torch.Tensor,
        values: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> None:
        """Other values, or keys, [B, Hkv, M, D] for `ids`, which `keep` has kept, in `prefill` or
        `end_prefill`.

        Raises
        ------
        LookupError
            an id that is not on the device.
        ValueError
            nothing was dropped, so that the prompt's memory may be that of others; or it is coded
            already.
        """

    def prefetch(self, layer: int, ids: torch.Tensor) -> None:
        """Begin to bring up host tokens that `layer` will select, ids on the CPU, while others are
        computed.
        """

    def arrange(self, layer: int, order: torch.Tensor) -> None:
        """Physical order of the host tier: slot s holds token order[b, h, s], a permutation of 0 ..

        S - 1.
        """


class Method:
    """A KV-cache method.

    Subclass, declare `needs`, override what the method does; every hook has a default.

    Order: `begin`; per sparse layer `prefill` once after its last chunk; `observe_layers`;
    `end_prefill`; then per decode step `step`, per sparse layer `append -> select -> (attention) ->
    observe`, and `end_step`.

    Tokens of a later turn are decode steps without an attention of their own: `step`, `append` and
    `end_step` of each, and where `needs` has `queries` or `probabilities`, `select` and `observe`,
    too.

    Attributes
    ----------
    needs
        what it asks of the harness.
    evicts
        whether `View.keep` drops tokens after the prompt: where generated tokens count inside the
        budget, or always.
    options_type
        a dataclass of the options, which the constructor then takes as one; None: it takes each by
        name.
    minimum
        the smallest budget in tokens by accounting, None for any; `kvbench.config.build` sets it.
    """

    needs: Needs = Needs()
    evicts: Literal["never", "counted", "always"] = "never"
    options_type: type[Any] | None = None
    minimum: Mapping[str, int | None] = MappingProxyType({})
    shape: Shape
    budget: Budget
    view: View
    context: Context

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """A new generation starts; forget the last one. `view` reads the store and evicts from it.

        Raises
        ------
        ValueError
            something is wrong that only the prompts or the model's shape show.
        """
        self.shape, self.view, self.context = shape, view, context
        self.budget = budget.of_method(self.minimum)
        self.check_budget()

    def check_options(self, budget: Budget) -> None:
        """Refuse options that a budget leaves no room, before a model is there to `begin` with.

        Raises
        ------
        ValueError
            names the option, its value, and what would be right.
        """
        self.budget = budget

    def first_cut(self, length: int) -> int:
        """The first decode step in which less than everything may be attended, of a prompt longer
        than the budget.

        Asked after `check_options`. Before that step a run is full attention's.

        Parameters
        ----------
        length
            prompt tokens.
        """
        return 1

    def check_budget(self) -> None:
        """Refuse what leaves a prompt fewer tokens than the method can keep to.

        Raises
        ------
        ValueError
            names the budget, the tokens and the minimum.
        """
        for length in self.shape.lengths:
            self.budget.check_prompt(length)

    @property
    def at_rest(self) -> bool:
        """After the prompt nothing is chosen, dropped or written: all that is held is attended.

        Asked after `begin`. `append` and `select` need not be called; `step` and `end_step` are.
        """
        return False

    @property
    def layout(self) -> object:
        """Differs from that of another step where `append`, `select` or `observe` would use other
        memory or launch other operations; None: the next step is like no other.

        Asked after `step`, of a method without a `host_step`.
        """
        return ()

    def calibrator(self) -> Any:
        """What measures a model for this method, once (`kvbench calibrate`): a method with
        `measure(texts, read)`, which has the model read prompts of token ids, `read(text)`, and
        returns numbers by their field of `HeadScores`, and facts of how they came about. None: what
        `kvbench.measure.calibration` measures, or nothing.
        """
        return None

    def home(self, layer: int) -> Literal["device", "host"]:
        """Where the tokens of a sparse layer live, asked after `begin`; for who needs "by_layer" to
        say.
        """
        assert self.needs.home != "by_layer", (
            f"{type(self).__name__} does not say where the tokens of a layer live"
        )
        return self.needs.home

    @property
    def capacities(self) -> list[int]:
        """The budget C of each row in tokens."""
        return [self.budget.tokens(length) for length in self.shape.lengths]

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Build the index of `layer`; may submit background work to `context.pool`.

        Raises
        ------
        ValueError
            something is wrong that only the prompt shows.
        """

    def observe_layers(self, similarity: torch.Tensor) -> None:
        """How little attention changes each sparse layer's hidden states, if
        `needs.layer_similarity`; in their order.

        Parameters
        ----------
        similarity
            [S, B] fp32, cosine of the hidden state before a layer's attention and after it is
            added, the mean over a row's prompt.
        """

    def end_prefill(self) -> None:
        """All layers are prefilled; may call `view.keep` on any sparse layer."""

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """A decode step begins, before layer 0; [B] each, on the CPU: token ids, positions, rows
        still running.
        """

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The current token's key and value, [B, Hkv, 1, D], are now in the store of `layer`."""

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """What `query` [B, Hq, 1, D] shall attend; None = everything resident, attended
        in place.
        """
        return None

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        """Attention probabilities [B, Hq, M (+ E)] of this step, if `needs.probabilities`; M =
        resident for None.
        """

    def end_step(self) -> None:
        """After the last layer: insert, re-encode, compress, evict."""

    def turn_weights(self, layer: int) -> torch.Tensor | None:
        """[B, Hkv, n] for `View.resident`, added to the logits of a later turn, which attends all
        of it; None: nothing.

        Where nothing is off the device alone.
        """
        return None

    def crop(self, layer: int) -> None:
        """The last tokens of every row are gone from the store of `layer`, if `needs.crops`; one or
        more are left.
        """

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """Most entries one KV head of a sparse layer may attend, by this method's line of the
        budget table.

        The audit measures what was attended and compares; it never believes this number. None = no
        limit.

        Parameters
        ----------
        layer
            true index of the layer.
        length
            prompt tokens of the row.
        generated
            tokens of the row after its prompt, the current one included.
        """
        return None if self.budget.size is None else self.budget.tokens(length)

    def mean_rule(self, length: int, generated: int) -> float | None:
        """Most entries that the KV heads of all sparse layers may attend on average in one step, in
        one row.

        For methods that share the budget out over layers or heads: each may attend more than C, but
        not all of them. The audit compares it as it does `rule`, whose arguments these are. None =
        what `rule` says of each head is all.
        """
        return None

    def report(self) -> dict[str, float]:
        """Numbers of the method's own, shown beside the audit's; peaks end in _max.

        The audit does not read them.
        """
        return {}
