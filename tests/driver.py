"""What tests drive methods with: the list of methods, the measured loop in a line, and an engine fed without a model.

A new method is one line in `METHODS`; every generic test then runs over it.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from _pytest.mark import ParameterSet
from omegaconf import DictConfig, OmegaConf

from kvbench.attention import executor as attention
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ASSETS, MethodConfig, method_config
from kvbench.engine.audit import extra_entries
from kvbench.engine.batch import Generation, generate
from kvbench.engine.engine import Engine
from kvbench.engine.replay import Template
from kvbench.memory.kinds import KV, NATIVE
from kvbench.method import HeadScores, Method, Replayed, Shape


@dataclass(frozen=True)
class Case:
    """A method with its options, under the id that test names carry; `file`: the YAML of one that is not kvbench's."""

    id: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    @functools.cached_property
    def config(self) -> MethodConfig:
        return (
            method_config(self.name, **self.options)
            if self.file is None
            else MethodConfig.of(cast(DictConfig, OmegaConf.load(self.file)))
        )

    def build(self) -> Method:
        """The method, with any budget: also below the least of its YAML, as prompts of tests are short."""
        method = self.as_configured()
        method.minimum = {}
        return method

    def as_configured(self) -> Method:
        """The method, which refuses less than the least of its YAML."""
        method: Method = self.config.build()
        return method


HEADS, MAPS, FILTERS = (str(ASSETS / kind / "dummy-tiny.json") for kind in ("heads", "surrogate", "filters"))
METHODS = [
    Case("full", "full"),
    Case("topk", "topk"),
    Case("topk-kv_head", "topk", {"granularity": "kv_head"}),
    Case("streaming_llm", "streaming_llm"),
    Case("snapkv", "snapkv"),
    Case("snapkv-kvpress", "snapkv", {"window": 16, "kernel": 5, "pooling": "mean", "join": "after"}),
    Case("snapkv-query_head", "snapkv", {"granularity": "query_head"}),
    # intervals and blocks far below the answers and prompts that the tests use
    Case("snapkv_decode", "snapkv_decode", {"interval": 12}),
    Case("keydiff", "keydiff"),
    Case("keydiff_decode-12", "keydiff_decode", {"interval": 12}),
    Case("keydiff_blocks", "keydiff_blocks", {"block": 12}),
    Case("knorm_decode-12", "knorm_decode", {"interval": 12}),
    Case("tova_decode-12", "tova_decode", {"interval": 12}),
    Case("expected_attention", "expected_attention"),
    Case("expected_attention_decode-12", "expected_attention_decode", {"interval": 12}),
    Case("adakv_expected_attention", "adakv_expected_attention"),
    Case("think", "think", {"whole": 8}),
    Case("pyramidkv", "pyramidkv"),
    Case("adakv_snapkv", "adakv_snapkv"),
    Case("adakv_snapkv-kvpress", "adakv_snapkv", {"safeguard": "top", "kernel": 5, "pooling": "mean", "join": "after"}),
    Case("adakv_snapkv-query_head", "adakv_snapkv", {"granularity": "query_head"}),
    Case("lagkv", "lagkv", {"lag": 12}),
    Case("curdkv", "curdkv"),
    Case("compactor", "compactor", {"chunk": 24, "sketch": 8}),
    Case("knorm", "knorm"),
    Case("knorm-protect", "knorm", {"protect": 0.1}),
    Case("random", "random"),
    Case("random-always", "random", {"evict": "always", "protect": 0.1}),
    Case("lru", "lru"),
    Case("tova", "tova"),
    Case("tova-protect", "tova", {"protect": 0.1}),
    Case("cake", "cake"),
    # chunks far below the prompts that the tests use
    Case("kvzip", "kvzip", {"chunk": 40}),
    Case("kvzip_plus", "kvzip_plus", {"chunk": 40}),
    Case("kvzip-layerwise", "kvzip", {"layerwise": True}),
    Case("qfilter", "qfilter", {"filters": FILTERS}),
    Case("kvzap", "kvzap", {"surrogate": MAPS}),
    Case("kvzap_threshold", "kvzap_threshold", {"surrogate": MAPS, "window": 8}),
    Case("attention_matching", "attention_matching"),
    Case("attention_matching-replay", "attention_matching", {"queries": "replay", "most": 100}),
    Case("h2o", "h2o"),
    Case("h2o-query_head", "h2o", {"granularity": "query_head", "recent": 0.25}),
    Case("h2o_prompt", "h2o_prompt"),
    # windows and pages far below the answers that the tests use
    Case("rkv", "rkv", {"buffer": 12}),
    Case("rkv-time", "rkv", {"buffer": 12, "order": "time"}),
    Case("triattention", "triattention", {"buffer": 12, "heads": HEADS}),
    Case("triattention-layer", "triattention", {"buffer": 12, "sets": "layer", "heads": HEADS}),
    Case("raas", "raas", {"page_size": 4, "alpha": 0.02}),
    Case("raas-unpinned", "raas", {"page_size": 1, "alpha": 0.02, "pin_prompt": False}),
    Case("scope", "scope", {"window": 12, "recent": 6}),
    Case("scope-discontinuous", "scope", {"strategy": "discontinuous", "window": 12, "recent": 6, "delta": 2}),
    Case(
        "scope-adaptive",
        "scope",
        {"compressor": "pyramidkv", "strategy": "adaptive", "granularity": "query_head", "recent": 6, "delta": 4},
    ),
    Case("squeeze", "squeeze"),
    Case("squeeze-window", "squeeze", {"base": "window"}),
    Case("squeeze-cache", "squeeze", {"positions": "cache"}),
    Case("razor", "razor", {"induction": 0.25, "heads": HEADS}),
    Case("duo", "duo", {"heads": HEADS}),
    Case("rocketkv", "rocketkv", {"window": 8, "kernel": 7}),
    # windows and cycles far below the prompts and answers that the tests use
    Case("racc", "racc", {"prompt_window": 16, "every": 4, "window": 2, "lag": 2, "beta": 0.1}),
    Case("racc_code", "racc_code", {"prompt_window": 16, "every": 4, "window": 2, "lag": 2, "beta": 0.1}),
    Case("racc_paper", "racc_paper", {"prompt_window": 16, "beta": 0.1}),
    Case("snapkv_racc", "snapkv_racc", {"beta": 0.1}),
    Case("snapkv_racc-hnsw", "snapkv_racc", {"beta": 0.1, "lag": 0, "index": "hnsw"}),
    Case("snapkv_racc-query_head", "snapkv_racc", {"beta": 0.1, "granularity": "query_head"}),
    Case("pyramidkv_racc", "pyramidkv_racc", {"beta": 0.1}),
    Case("quest", "quest"),
    Case("quest-kv_head", "quest", {"selection": "kv_head"}),
    Case("quest_structure", "quest_structure"),
    # a p below 1 prunes whatever the budget
    Case("twilight_quest", "twilight_quest", {"p": 1}),
    Case("twilight_topk", "twilight_topk", {"p": 1}),
    Case("twilight_quest-calibrated", "twilight_quest", {"calibrated": True}),
    # pages small enough for the budgets that the tests use
    Case("arkvale", "arkvale", {"page_size": 8}),
    Case("pqcache", "pqcache"),
    Case("pqcache-lfu", "pqcache", {"cache": "lfu", "cache_tokens": 16, "cache_block": 4}),
    Case("clusterkv", "clusterkv", {"cluster_size": 8, "buffer": 3, "cache_steps": 2}),
    # filters and their followers in models of two layers
    Case("omnikv", "omnikv", {"filters": [0], "wait": 0}),
    Case("magicpig", "magicpig"),
    Case("vattention", "vattention"),
    Case("shadowkv", "shadowkv", {"outliers": 2, "rank": 0.5}),
    Case("icecache", "icecache"),
    Case("icecache-exact", "icecache", {"index": "exact"}),
    Case("icecache_reuse", "icecache_reuse"),
    Case("icecache_plus", "icecache_plus"),
    # anchors in prompts of the tests' lengths
    Case("icecache_code", "icecache_code", {"exhaustive_below": 20, "anchors": [6, 2, 0.9], "promotion": [0.15, 0.3]}),
    Case("pariskv", "pariskv"),
    Case("pariskv-torch", "pariskv", {"compute": "torch"}),
    Case("pariskv_aligned", "pariskv_aligned"),
    Case("pariskv_adaptive", "pariskv_adaptive", {"k_min": 2}),
    # buffers far below the prompts that the tests use
    Case("lychee", "lychee", {"buffer": 16}),
    Case("lychee_plus", "lychee_plus", {"buffer": 32}),
    Case(
        "lychee-query_head",
        "lychee_plus",
        {"buffer": 16, "selection": "query_head", "build": "two_level", "radii": "strict"},
    ),
    Case(
        "lychee-fixed",
        "lychee",
        {"buffer": 16, "chunking": "fixed", "pooling": "max", "ub_weight": 0},
    ),
]
# Methods of your own: KVBENCH_CONF=FOLDER, with FOLDER/method/mine.yaml as for --config-dir.
METHODS += [
    Case(file.stem, file.stem, file=file)
    for file in sorted(Path(os.environ.get("KVBENCH_CONF", os.devnull), "method").glob("*.yaml"))
]
MODELS = ["dummy-tiny", "dummy-mistral", "dummy-qwen3"]  # Llama, Mistral, Qwen3
ACCOUNTINGS = ["paper", "unified"]

# A budget every method accepts under both accountings, far below the prompts that the tests use.
SMALL = 48

# Model outputs and attention outputs in fp32 that are equal on paper differ by the order of summation. Logits here are
# of the order of 1 to 10, so this is some tens of units in the last place, and far below what one wrong token changes.
CLOSE = 1e-5

HALF = torch.bfloat16
# Outputs are means of values of the order of 1 to 4, each rounded to eight bits on the way in and out.
CLOSE_IN_HALF = 4 * torch.finfo(HALF).eps

ATTEND = {
    "torch": attention.torch_executor.attend,
    "cpu": attention.cpu.attend,
    "reference": attention.reference.attend,
}
FAST = {name: attend for name, attend in ATTEND.items() if name != "reference"}

# The quick tests meet every preset, and with other options only where both accountings are met in turn; but for one
# whose kernels take as long to compile as those of all others.
LONG_TO_COMPILE = "icecache_code"
each_method = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] * (case.id == LONG_TO_COMPILE or case.id != case.name))
        for case in METHODS
    ],
)
each_accounting = pytest.mark.parametrize("accounting", ACCOUNTINGS)
# Every method under both accountings; the quick tests meet every method under one of them, in turn.
each_method_in_turn = pytest.mark.parametrize(
    ("accounting", "case"),
    [
        pytest.param(
            accounting,
            case,
            id=f"{accounting}-{case.id}",
            marks=[pytest.mark.slow] * ((turn + at) % 2 or case.id == LONG_TO_COMPILE),
        )
        for at, accounting in enumerate(ACCOUNTINGS)
        for turn, case in enumerate(METHODS)
    ],
)


class Inline(Executor):
    """Runs what is submitted at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def slow(*values: Any) -> list[ParameterSet]:
    """Parameters, single ones or tuples, that the quick tests leave to the slow ones."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.slow) for each in tuples]


def numbers(count: int, seed: int = 0) -> list[int]:
    """A prompt of random bytes."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


PROMPT = numbers(150)
RAGGED = [numbers(150, seed=1), numbers(97, seed=2), numbers(60, seed=3)]


def head_scores(layers: int, kv_heads: int, query_heads: int = 0, head_dim: int = 16, hidden: int = 0) -> HeadScores:
    """Of a model whose heads retrieve the more the later they stand; those of layer 0 hardly do. The rest is random."""
    scores = tuple(tuple(layer + 0.1 * head for head in range(kv_heads)) for layer in range(layers))
    means = torch.randn(layers, query_heads or kv_heads, head_dim, generator=torch.Generator().manual_seed(1))
    sizes = 1.5 * torch.hypot(*means.chunk(2, dim=-1))
    hidden = hidden or kv_heads * head_dim
    maps = torch.randn(layers, kv_heads, hidden + 1, generator=torch.Generator().manual_seed(2)) / hidden**0.5
    filters = torch.randn(layers, kv_heads, head_dim, generator=torch.Generator().manual_seed(3))
    return HeadScores(scores, scores, *(tuple(map(tuple, part.tolist())) for part in (means, sizes, maps, filters)))


def scores_of(model: Any) -> HeadScores:
    """Such scores for a model of transformers."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads
    return head_scores(*sizes, width, config.hidden_size)


def run_loop(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    method: Method,
    budget: int | float | None | Budget,
    *,
    accounting: str = "paper",
    steps: int = 6,
    dense_layers: Sequence[int] = (),
    executor: str = "auto",
    audit_every: int = 1,
    **options: Any,
) -> tuple[Generation, Engine]:
    """The measured loop over a batch, any budget; `steps` decode steps come after the first token."""
    method.minimum = {}
    engine = engine_for(
        loaded.model,
        list(map(len, prompts)),
        method,
        budget if isinstance(budget, Budget) else Budget(budget, accounting),
        dense_layers,
        loaded.tokenizer,
        attention=executor,
        new_tokens=steps + 1 + len(options.get("question", ())),
        audit_every=audit_every,
        head_scores=scores_of(loaded.model),
    )
    return generate(ModelRunner(loaded.model), prompts, engine, max_new_tokens=steps + 1, **options), engine


# -- an engine without a model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """What one layer attends at one step.

    Attributes:
        step: 1 for the first decode step.
        lengths: tokens of each row, the current one included.
        index: [B, Hs, M] token ids with trailing -1; for a method that selects None, the ids resident.
        in_place: the method selected None.
        extra: [B, Hkv] synthetic entries, or 0.
    """

    step: int
    layer: int
    lengths: tuple[int, ...]
    index: torch.Tensor
    in_place: bool
    extra: torch.Tensor | int = 0

    def sets(self, row: int) -> list[set[int]]:
        """The ids of each head of a row."""
        return [{token for token in head if token >= 0} for head in self.index[row].tolist()]


def watch(method: Method) -> list[Attended]:
    """Have every `select` of this method object noted in the list returned."""
    seen: list[Attended] = []
    select, step = method.select, method.step
    now = 0

    def watched_step(*arguments: torch.Tensor) -> None:
        nonlocal now
        now += 1
        step(*arguments)

    def watched_select(layer: int, query: torch.Tensor) -> Any:
        selection = select(layer, query)
        index = method.view.resident(layer) if selection is None else selection.index
        extra = 0
        if selection is not None and selection.extra is not None:
            extra = extra_entries(selection.extra, method.shape.kv_heads)
        lengths = tuple(method.view.lengths(layer))
        seen.append(Attended(now, layer, lengths, index.clone(), selection is None, extra))
        return selection

    method.step, method.select = watched_step, watched_select  # type: ignore[method-assign]
    return seen


# The vocabulary of a stream: most tokens end nothing, as in text.
PIECES = ["The", " key", "s", " of", "12", "ing", " a", ",", ".", " }", "\n", "\n\n"]


@dataclass(frozen=True)
class Stream:
    """Fixed queries, keys and values of a whole generation, as a model would hand them over.

    Attributes:
        lengths: prompt tokens of each row.
        queries: [layers, B, Hq, T, D]; token i of each row stands at position i, T covers prompt and all steps.
        keys, values: [layers, B, Hkv, T, D].
        tokens: [B, T] token ids, indices into `PIECES`.
    """

    lengths: tuple[int, ...]
    steps: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor

    def row(self, row: int) -> Stream:
        """One row alone."""
        one = slice(row, row + 1)
        return replace(
            self,
            lengths=self.lengths[one],
            queries=self.queries[:, one],
            keys=self.keys[:, one],
            values=self.values[:, one],
            tokens=self.tokens[one],
        )

    @property
    def scaling(self) -> float:
        return self.queries.shape[-1] ** -0.5

    def shape(self, dense_layers: Sequence[int] = ()) -> Shape:
        """What an engine knows of the model."""
        layers, _, query_heads, _, head_dim = self.queries.shape
        return Shape(
            layers=layers,
            query_heads=query_heads,
            kv_heads=self.keys.shape[2],
            head_dim=head_dim,
            lengths=self.lengths,
            dtype=self.keys.dtype,
            device=self.keys.device,
            scaling=self.scaling,
            sparse_layers=tuple(layer for layer in range(layers) if layer not in dense_layers),
        )


def stream(
    *lengths: int,
    steps: int = 4,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Stream:
    """Random normal queries, keys and values; queries are stretched, so that attention is far from uniform."""
    rng = torch.Generator().manual_seed(seed)
    size = (layers, len(lengths), kv_heads, max(lengths) + steps, head_dim)
    wide = (layers, len(lengths), query_heads, max(lengths) + steps, head_dim)
    keys, values = torch.randn(size, generator=rng), torch.randn(size, generator=rng)
    queries = 2 * torch.randn(wide, generator=rng)
    queries, keys, values = (part.to(dtype) for part in (queries, keys, values))
    tokens = torch.randint(len(PIECES), (len(lengths), size[3]), generator=rng)
    return Stream(lengths, steps, queries, keys, values, tokens)


class LlamaRotary:
    """Rotary positions as Llama's, in float64; see `kvbench.engine.positions.Rotary`."""

    def __init__(self, head_dim: int, device: torch.device) -> None:
        self.speed = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)

    def angles(self, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., n, D] of a turn by a number of positions [..., n]."""
        angle = by[..., None].double() * self.speed.repeat(2)
        return angle.cos(), angle.sin()

    def turn(self, vectors: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Vectors [..., n, D], turned."""
        one, two = vectors.double().chunk(2, dim=-1)
        return (vectors.double() * angles[0] + torch.cat([-two, one], dim=-1) * angles[1]).to(vectors.dtype)


def rotate(vectors: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Vectors [..., n, D] turned by a number of positions [..., n]."""
    rotary = LlamaRotary(vectors.shape[-1], vectors.device)
    return rotary.turn(vectors, rotary.angles(by))


TEMPLATE = Template(lambda text: [ord(letter) % len(PIECES) for letter in text[:3]])


def output_weight(query_heads: int, head_dim: int) -> torch.Tensor:
    """[Hq, D, hidden], of hidden states as wide as all heads."""
    own = torch.arange(query_heads * head_dim, dtype=torch.float64)
    hidden = own[:, None]
    return (1 + 0.7 * hidden + 1.3 * own + 0.17 * hidden * own).sin().T.float().view(query_heads, head_dim, -1)


def repeated(fixed: Stream, engine: Engine) -> dict[int, tuple[Replayed, ...]]:
    """What a replay shows: its tokens ask, and are, what the last tokens up to the end of their chunk are."""
    replay, template = engine.method.needs.replay, engine.template
    assert replay is not None and template is not None
    rows = [ids[:length].tolist() for ids, length in zip(fixed.tokens, fixed.lengths, strict=True)]
    found: dict[int, tuple[Replayed, ...]] = dict.fromkeys(range(len(fixed.queries)), ())
    for row, start, stop, ids in template.passes(rows, replay):
        at = torch.arange(stop - len(ids), stop) % fixed.lengths[row]
        for layer in found:
            queries, keys = (part[layer, row][:, at] for part in (fixed.queries, fixed.keys))
            norms = queries.float().transpose(0, 1).flatten(1).norm(dim=1)
            found[layer] += (Replayed(row, start, stop, queries, keys, norms),)
    return found


@dataclass
class Driven:
    """What came out of a driven engine: outputs [steps, layers, B, Hq, D] and what was attended."""

    engine: Engine
    outputs: torch.Tensor
    seen: list[Attended]

    @property
    def audit(self) -> dict[str, Any]:
        return self.engine.report()


def drive(
    fixed: Stream,
    method: Method,
    budget: int | float | None,
    *,
    accounting: str = "paper",
    generated: str = "free",
    chunk: int | None = None,
    left: bool = False,
    executor: str = "auto",
    kv: KV = NATIVE,
    dense_layers: Sequence[int] = (),
    template: Template = TEMPLATE,
    scores: HeadScores | None = None,
    after_prefill: Callable[[Engine], None] = lambda engine: None,
    any_budget: bool = True,  # below the least of the method's YAML, too, as streams are short
) -> Driven:
    """Feed a stream to an engine as `hf.py` does: rows right-padded, or left-padded as under `model.generate`."""
    method.minimum = {} if any_budget else method.minimum
    layers, columns = len(fixed.queries), max(fixed.lengths)
    offsets = [columns - length if left else 0 for length in fixed.lengths]
    shape = fixed.shape(dense_layers)
    engine = Engine(
        shape,
        method,
        Budget(budget, accounting, generated),
        offsets=offsets,
        attention=executor,
        kv=kv,
        new_tokens=None if left else fixed.steps,
        rotary=LlamaRotary(shape.head_dim, shape.device),
        pieces=PIECES if method.needs.token_text else None,
        template=template if method.needs.prefix else None,
        output=lambda layer: output_weight(shape.query_heads, shape.head_dim),
        head_scores=scores or head_scores(layers, shape.kv_heads, shape.query_heads, shape.head_dim),
    )
    seen = watch(method)
    parts = (fixed.queries, fixed.keys, fixed.values)
    ids = torch.stack([row.roll(offset) for row, offset in zip(fixed.tokens, offsets, strict=True)])
    prompts = [torch.stack([rows[:, b].roll(offset, 2) for b, offset in enumerate(offsets)], 1) for rows in parts]
    for start in range(0, columns, chunk or columns):
        here = slice(start, min(start + (chunk or columns), columns))
        engine.start_chunk(ids[:, here])
        for layer in range(layers):
            query, key, value = (prompt[layer, :, :, here] for prompt in prompts)
            if method.needs.inputs:
                engine.take_inputs(layer, key.transpose(1, 2).flatten(2))
            engine.attend(layer, query, key, value)
            if method.needs.layer_similarity:
                before, added = key.transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2)
                engine.residual(layer, before, before + added / (1 + layer))  # upper layers change less
    if engine.waiting:
        engine.begin_layers(repeated(fixed, engine))
    after_prefill(engine)
    outputs = []
    for step in range(fixed.steps):
        newest = [length + step for length in fixed.lengths]
        engine.start_step(torch.stack([row[at] for row, at in zip(fixed.tokens, newest, strict=True)]).cpu())
        now = [torch.stack([rows[:, b, :, at] for b, at in enumerate(newest)], 1)[..., None, :] for rows in parts]
        outputs.append(torch.stack([engine.attend(layer, *(part[layer] for part in now)) for layer in range(layers)]))
        engine.settle()
    return Driven(engine, torch.stack(outputs)[..., 0, :], seen)


def same_attended(ours: Sequence[Attended], theirs: Sequence[Attended]) -> bool:
    """Whether two generations attended the same ids in the same order, at every step and layer."""
    return len(ours) == len(theirs) and all(
        (a.step, a.layer, a.lengths) == (b.step, b.layer, b.lengths) and torch.equal(a.index, b.index)
        for a, b in zip(ours, theirs, strict=True)
    )


def attended_per_kv_head(at: Attended, kv_heads: int, row: int) -> list[int]:
    """Distinct ids that the query heads of each KV head attend, and synthetic entries."""
    heads = at.sets(row)
    if len(heads) == 1:
        heads = heads * kv_heads
    group = len(heads) // kv_heads
    extra = at.extra[row].tolist() if isinstance(at.extra, torch.Tensor) else [at.extra] * kv_heads
    return [len(set().union(*heads[head * group : (head + 1) * group])) + extra[head] for head in range(kv_heads)]
