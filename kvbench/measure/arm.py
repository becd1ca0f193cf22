"""One sample through one arm: its prompt, its generation, its score, and which errors fail that
sample alone.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from kvbench.backends.backend import Backend, GeneratedBatch, GenerationRequest, backend_of
from kvbench.backends.hf import loading as models
from kvbench.backends.hf.generate import (
    Choice,
    Decoding,
    Generation,
    Progress,
    QuestionTokens,
    Stops,
)
from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.prefilled import Prefilled, prefill_once
from kvbench.backends.hf.sampling import Sampler
from kvbench.backends.protocol import Protocol
from kvbench.backends.run_config import RunConfig
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.measure import fidelity, latency, machine
from kvbench.measure.render import Rendered, render
from kvbench.measure.synthetic import SyntheticEngine
from kvbench.method import Method
from kvbench.models import hub
from kvbench.models.heads import Calibration
from kvbench.models.prompts import tokenizing
from kvbench.models.types import Tokenizer
from kvbench.tasks import Sample, Task, Timed

# of a prompt in its record, and characters on each side of an answer
MOST_EXCERPTS, MARGIN = 3, 160
# tokens: questions about one context are not equally long, and the first one's memory must do for
# all
LONGER = 64


@dataclass
class Setup:
    """Model x method x budget under a protocol: all that generates, whatever it is asked.

    `calibration` is the model's, where the method needs it.
    """

    config: RunConfig
    protocol: Protocol
    loaded: models.Loaded
    method: Method
    budget: Budget
    dense_layers: tuple[int, ...]
    calibration: Calibration | None

    def engine(
        self,
        rows: Sequence[Sequence[int]],
        new_tokens: int,
        samples: Sequence[str] = ("",),
        kind: type[Engine] = Engine,
    ) -> Engine:
        """A fresh engine for the prompts `rows`, with room for so many new tokens; seeds derive
        from `samples`.
        """
        return engine_for(
            self.loaded.model,
            [len(row) for row in rows],
            self.method,
            self.budget,
            self.dense_layers,
            self.loaded.tokenizer,
            kind,
            new_tokens=new_tokens,
            attention=self.config.attention,
            kv=self.config.kv,
            seed=self.config.seed,
            samples=samples,
            probe_every=self.config.probe.every,
            head_scores=None if self.calibration is None else self.calibration.scores,
        )


@dataclass
class Arm(Setup):
    """A setup and its task: all that the samples of a run share.

    `decode` says whether tokens are decoded beside those of other arms and samples, "together", or
    "alone".
    """

    task: Task
    decode: Literal["alone", "together"] = "alone"

    @property
    def backend(self) -> Backend:
        """What runs its model."""
        return backend_of(self.config)

    def attends_whole(self, record: dict[str, Any]) -> bool:
        """Whether a method that has sizes of its own attended everything, as with a prompt shorter
        than they are.
        """
        if record["error"] or self.budget.size is not None or not self.backend.has_engine:
            return False
        tokens, method = record["prompt_tokens"], self.method
        limited = any(
            method.rule(layer, tokens, 1) is not None for layer in method.shape.sparse_layers
        )
        return limited and bool(record["audit"].get("attended_mean", 0.0) > tokens)


@dataclass(frozen=True)
class TokenizedSample:
    """A sample as the model reads it, the same for every arm of one protocol.

    Attributes
    ----------
    ids
        token ids to prefill, of a batch the first row's; [] where the sample cannot run.
    question
        token ids to read after it, unless `protocol.question` is "with".
    name
        what a method's randomness derives from: the sample's id, or the context's, which its
        questions share.
    record
        what samples.jsonl says of it before anything is generated.
    """

    sample: Sample
    ids: list[int]
    question: list[int]
    record: dict[str, Any]
    name: str = ""

    @property
    def new_tokens(self) -> int:
        """Tokens that follow the prompt, at most."""
        return self.sample.max_new_tokens + len(self.question)

    @property
    def room(self) -> int:
        """Tokens to have room for after the prompt, so that other questions about it have room,
        too.
        """
        return self.new_tokens + (LONGER if self.question else 0)


def excerpt(sample: Sample) -> str:
    """What a reader needs of a prompt: around its answers, where these stand in it, and its end,
    which asks.
    """
    text, cuts = sample.prompt, []
    for answer in filter(None, sample.answers[:MOST_EXCERPTS]):
        if match := re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text):
            cuts.append(text[max(0, match.start() - MARGIN) : match.end() + MARGIN])
    return "\n...\n".join([*cuts, text[-MARGIN:]])


def prompt_of(arm: Arm, sample: Sample) -> TokenizedSample:
    """The prompt of a sample under an arm's protocol.

    Raises
    ------
    ConfigError
        what the protocol asks for cannot be done with it, or it does not fit the window.
    """
    tokenizer, window = arm.loaded.tokenizer, arm.loaded.card.context_length
    chat = _token_ids(sample) is None and arm.protocol.uses_chat(sample, tokenizer)
    record: dict[str, Any] = {
        "id": sample.id,
        **({"sample": sample.of} if sample.of else {}),
        "group": sample.group,
        "meta": dict(sample.meta),
        "answers": list(sample.answers),
        **({"excerpt": excerpt(sample)} if sample.prompt and not arm.task.secret else {}),
        "chat": chat,
        "prompt_tokens": 0,
        "error": sample.error or None,
    }
    if sample.error:
        return TokenizedSample(sample, [], [], record)
    try:
        ready = _token_ids(sample)
        with tokenizing(str(tokenizer.name_or_path)):
            rendered = render(sample, tokenizer, chat, window) if ready is None else Rendered(ready)
    except ValueError as error:
        raise ConfigError(f"{sample.id}: {error}") from error
    ids, question = rendered.ids, []
    record |= {"prompt_tokens": len(rendered.ids), "cut_tokens": rendered.cut}
    last = max([*ids, *(sample.forced.tokens if sample.forced else ())], default=0)
    if last >= (vocabulary := arm.loaded.card.vocabulary):
        raise ConfigError(
            f"{sample.id}: the tokenizer of {arm.loaded.name} makes token {last} of it, and the"
            f" model has {vocabulary} tokens; expected the tokenizer that belongs to its weights"
        )
    if (how := arm.protocol.question) != "with":
        if not rendered.question_start or sample.question == sample.prompt:
            raise ConfigError(
                f"protocol.question={how}: {sample.id} has no question apart from its context; use"
                " with"
            )
        ids, question = ids[: rendered.question_start], ids[rendered.question_start :]
        record["question_tokens"] = len(question)
    if window is not None and len(rendered.ids) + sample.max_new_tokens > window:
        key = "task.lengths" if "lengths" in arm.config.task.options else "task"
        raise ConfigError(
            f"{key}: {sample.id} takes {len(rendered.ids)} tokens and {sample.max_new_tokens} new"
            f" ones, more than the {window} of {arm.loaded.name}; choose a shorter prompt or"
            " another model" + hub.how_to_stretch(arm.loaded.revision.startswith("dummy-"))
        )
    name = hashlib.sha256(str(ids).encode()).hexdigest() if question else sample.base_id
    return TokenizedSample(sample, ids, question, record, name)


def _token_ids(sample: Sample) -> list[int] | None:
    """The prompt of a sample that is no text, in a batch the first row's; None for a text."""
    if sample.timed:
        return list(sample.timed.rows[0])
    return list(sample.forced.prompt) if sample.forced else None


def batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples in batches of at most `size` that one generation can serve: alike in new tokens and
    in what ends them.

    Of two prompts of a batch, which is padded to the longest, none has twice the other's letters.

    Raises
    ------
    ConfigError
        a sample cannot be in a batch.
    """
    waiting: dict[Any, list[Sample]] = {}
    for sample in samples:
        if size > 1 and (sample.timed or sample.forced):
            raise ConfigError(f"batch={size}: {sample.id} is measured by itself; expected 1")
        key = (
            sample.max_new_tokens,
            sample.stop,
            sample.end_token,
            len(sample.prompt).bit_length(),
        )
        batch = waiting.setdefault(key, [])
        batch.append(sample)
        if len(batch) == size:
            yield waiting.pop(key)
    yield from waiting.values()


def prefill_shared(
    arms: Sequence[Arm], prompts: Sequence[TokenizedSample], progress: Progress | None = None
) -> Prefilled:
    """One prefill of a batch of prompts, from which each of `arms` can begin; `progress` as of a
    generation.
    """
    loaded, first = arms[0].loaded, prompts[0]
    total = max(len(prompt.ids) for prompt in prompts) + first.sample.max_new_tokens
    return prefill_once(
        loaded.model,
        [prompt.ids for prompt in prompts],
        [arm.method.needs for arm in arms],
        max_new_tokens=first.room,
        chunk=arms[0].protocol.prefill_chunk,
        not_first=() if first.question else stops(loaded, first.sample).not_first,
        tokenizer=loaded.tokenizer,
        progress=lambda done: progress and progress(done, total),
    )


class Batch(NamedTuple):
    """Prompts that are generated together.

    Attributes
    ----------
    again
        the next batch begins with the same contexts, or answers the same prompts.
    """

    prompts: list[TokenizedSample]
    again: bool = False

    @property
    def samples(self) -> list[Sample]:
        """Of the prompts."""
        return [prompt.sample for prompt in self.prompts]


def read(arm: Arm, samples: Iterable[Sample]) -> Iterator[Batch]:
    """Samples as the model reads them, in batches whose questions are equally long.

    Raises
    ------
    ConfigError
        a sample cannot run as the protocol asks, or not in a batch; after all before it.
    """
    waiting: list[TokenizedSample] = []
    prompt_batches = _by_question_length(arm, batches(samples, arm.config.batch))
    while True:
        try:
            prompts = next(prompt_batches, [])
        except ConfigError:
            if waiting:
                yield Batch(waiting)
            raise
        if waiting:
            of = contexts(waiting)
            yield Batch(waiting, bool(prompts) and of is not None and of == contexts(prompts))
        if not prompts:
            return
        waiting = prompts


def _by_question_length(
    arm: Arm, groups: Iterable[list[Sample]]
) -> Iterator[list[TokenizedSample]]:
    for group in groups:
        by_length: dict[int, list[TokenizedSample]] = {}
        for prompt in (prompt_of(arm, sample) for sample in group):
            by_length.setdefault(len(prompt.question), []).append(prompt)
        yield from by_length.values()


def contexts(prompts: Sequence[TokenizedSample]) -> list[tuple[str, list[int]]] | None:
    """What a prefill of prompts is of; None where no other prompts can have the same."""
    if not (prompts[0].question or prompts[0].sample.of):
        return None
    return [(prompt.name, prompt.ids) for prompt in prompts]


class PromptPrefill:
    """One prefill for all answers to a prompt, and all questions about a context, that come one
    after the other.

    It holds the newest alone.
    """

    def __init__(self) -> None:
        self._of: list[Any] | None = None
        self._room = 0
        self._prefilled: Prefilled | None = None

    def serves(self, prompts: Sequence[TokenizedSample]) -> bool:
        """Whether the prefill that is there is of these prompts."""
        return (
            self._of is not None
            and self._of == contexts(prompts)
            and prompts[0].new_tokens <= self._room
        )

    def __call__(
        self,
        arms: Sequence[Arm],
        prompts: Sequence[TokenizedSample],
        again: bool,
        progress: Progress | None,
    ) -> Prefilled:
        """The prefill of a batch of prompts from which each of `arms` can begin; `again`: the next
        batch can, too.
        """
        if not self.serves(prompts):
            self._prefilled = None  # its memory, before the next takes as much
            self._prefilled = prefill_shared(arms, prompts, progress)
            self._of, self._room = contexts(prompts), prompts[0].room
        assert self._prefilled is not None
        self._prefilled.again = again
        return self._prefilled


def measure(
    arm: Arm,
    prompts: Sequence[TokenizedSample],
    progress: Progress | None = None,
    prefilled: Prefilled | None = None,
    prefill: PromptPrefill | None = None,
    again: bool = False,
) -> list[dict[str, Any]]:
    """Generate for a batch of samples and score them: their records in samples.jsonl.

    Running out of memory, NaN logits and a broken budget rule fail a sample, which then scores 0;
    other errors are not the sample's. Where a batch fails, each of its samples has a generation of
    its own, and fails for itself.

    Parameters
    ----------
    arm
        what generates.
    prompts
        `prompt_of` each sample, as `batches` puts them together.
    progress
        called with tokens done and tokens in all.
    prefilled
        begin from this prefill of those of the prompts that can run; a timed sample always has its
        own.
    prefill
        makes it, where the prompt has several answers or its context several questions.
    again
        the next batch is about the same ones.
    """
    running = [prompt for prompt in prompts if not prompt.record["error"]]
    try:
        if prefill is not None and running and (again or prefill.serves(running)):
            prefilled = prefill([arm], running, again, progress)
        records = iter(_records(arm, running, progress, prefilled) if running else [])
    except Exception as error:
        if not is_failed_sample(error):
            raise
        if len(running) == 1:
            records = iter([failure(arm, running[0], f"{type(error).__name__}: {error}")])
        else:
            records = (record for prompt in running for record in measure(arm, [prompt], progress))
    return [
        failure(arm, prompt, prompt.record["error"]) if prompt.record["error"] else next(records)
        for prompt in prompts
    ]


def _records(
    arm: Arm,
    prompts: Sequence[TokenizedSample],
    progress: Progress | None,
    prefilled: Prefilled | None,
) -> list[dict[str, Any]]:
    """The records of samples that are generated together."""
    sample = prompts[0].sample
    if sample.timed:
        return _scored(arm, prompts, *_timed(arm, prompts[0], sample.timed, progress))
    if sample.forced:
        prefilled = prefilled or prefill_shared([arm], prompts, progress)
        fidelity.full_attention(arm.loaded.model, prefilled, prompts[0].ids, sample.forced.tokens)
    request, comparison = _request(arm, prompts, prefilled, id(arm), progress)
    with machine.observed(arm.loaded.device, arm.loaded.devices) as measured_on:
        generated = arm.backend.generate(arm, request)
    return _scored(
        arm,
        prompts,
        generated,
        {**(comparison.record() if comparison else {}), "machine": measured_on},
    )


def _scored(
    arm: Arm, prompts: Sequence[TokenizedSample], generated: GeneratedBatch, more: dict[str, Any]
) -> list[dict[str, Any]]:
    """The records of samples, from what they came to and what else their records say."""
    (generation, audits, broken), records = generated, []
    for row, prompt in enumerate(prompts):
        sample, tokens = prompt.sample, generation.tokens[row]
        fields = {
            "output": arm.loaded.tokenizer.decode(tokens, skip_special_tokens=True),
            "output_ids": tokens,
            "audit": audits[row],
            **({"batch": len(prompts)} if len(prompts) > 1 else {}),
            **measured(
                generation,
                bool(arm.config.probe.every),
                sample.timed.warmup if sample.timed else 0,
            ),
            **more,
        }
        if sample.keep_ids:
            fields["meta"] = {**sample.meta, "output_ids": tokens}
        if fields["audit"]["over_rule"]:
            records.append({**failure(arm, prompt, f"over_rule: {broken[row]}"), **fields})
            continue
        answers, meta = (
            tuple(fields.get("answers", sample.answers)),
            fields.get("meta", sample.meta),
        )
        scores = arm.task.score(
            replace(sample, id=sample.base_id, answers=answers, meta=meta), fields["output"]
        )
        records.append({**prompt.record, "scores": scores, **fields})
    return records


def _request(
    arm: Arm,
    prompts: Sequence[TokenizedSample],
    prefilled: Prefilled | None,
    owner: int,
    progress: Progress | None = None,
) -> tuple[GenerationRequest, fidelity.Comparison | None]:
    """What a batch of samples asks for, and, where their tokens are given, the comparison with full
    attention.

    Parameters
    ----------
    owner
        by which `prefilled` knows what this arm has made of the prompts.
    """
    sample, rows, names = (
        prompts[0].sample,
        [prompt.ids for prompt in prompts],
        [prompt.name for prompt in prompts],
    )
    fresh = partial(
        arm.engine, rows, len(sample.forced.tokens) if sample.forced else prompts[0].room, names
    )
    shared = prefilled is not None and (prefilled.again or prefilled.has_begun(owner))
    engine = partial(prefilled.engine, owner, fresh) if prefilled is not None and shared else fresh
    if sample.forced:
        assert prefilled is not None and prefilled.reference is not None
        tokens = sample.forced.tokens
        comparison = fidelity.Comparison(prefilled.reference, tokens[1:])
        more: dict[str, Any] = {"prefilled": prefilled, "progress": progress, "watch": comparison}
        return (
            GenerationRequest(
                rows,
                engine,
                len(tokens),
                Stops(),
                Choice(forced_tokens=[tokens]),
                None,
                QuestionTokens(),
                **more,
            ),
            comparison,
        )
    ends, draw = stops(arm.loaded, sample), draw_of(arm, [prompt.sample for prompt in prompts])
    request = GenerationRequest(
        rows,
        engine,
        sample.max_new_tokens,
        ends,
        Choice(draw),
        arm.protocol.prefill_chunk,
        _question(arm, prompts),
        prefilled,
        progress,
    )
    return request, None


def _question(arm: Arm, prompts: Sequence[TokenizedSample]) -> QuestionTokens:
    rows = [prompt.question for prompt in prompts]
    return (
        QuestionTokens(rows, at_once=arm.protocol.question == "after")
        if any(rows)
        else QuestionTokens()
    )


class Begun:
    """A batch of samples whose generation goes on beside others, with an engine and a method of its
    own.

    Parameters
    ----------
    arm
        whose they are.
    prompts
        those of a batch that can run.
    prefilled
        of these, divided; that of given tokens has begun its reference (`begin_reference`).
    """

    def __init__(self, arm: Arm, prompts: Sequence[TokenizedSample], prefilled: Prefilled) -> None:
        self.arm, self.prompts, self._prefilled = arm, prompts, prefilled
        self._observed = ExitStack()

    def begin(self) -> Decoding:
        """Begin the generation; again, where that has failed.

        Raises
        ------
        Exception
            as `measure` meets them; `is_failed_sample` says which are the samples' own.
        """
        loaded = self.arm.loaded
        arm = replace(self.arm, method=self.arm.config.method.build())
        request, self._comparison = _request(arm, self.prompts, self._prefilled, owner=id(self.arm))
        self._machine = self._observed.enter_context(
            machine.observed(loaded.device, loaded.devices)
        )
        self._decoding = self.arm.backend.begin(arm, request)
        return self._decoding

    def records(self, generation: Generation) -> list[dict[str, Any]]:
        """The samples' records, once their generation is over."""
        self._observed.close()
        generated = GeneratedBatch.by(self._decoding.engine, generation, len(self.prompts))
        more = self._comparison.record() if self._comparison else {}
        return _scored(self.arm, self.prompts, generated, {**more, "machine": self._machine})


def begin_reference(arm: Arm, prompt: TokenizedSample, prefilled: Prefilled) -> Decoding:
    """Begin what a sample whose tokens are given is compared with, to go on ahead of those that
    compare.
    """
    assert prompt.sample.forced is not None
    return fidelity.begin_full_attention(
        arm.loaded.model, prefilled, prompt.ids, prompt.sample.forced.tokens
    )


def _timed(
    arm: Arm, prompt: TokenizedSample, timed: Timed, progress: Progress | None
) -> tuple[GeneratedBatch, dict[str, Any]]:
    """The generation of a sample that is timed."""
    kind = SyntheticEngine if timed.keys == "synthetic_attention" else Engine
    generation, engine, more = latency.time_sample(
        arm.loaded.model,
        timed,
        prompt.sample.max_new_tokens,
        partial(arm.engine, samples=[prompt.sample.base_id], kind=kind),
        arm.protocol.prefill_chunk,
        progress,
        # a share of a shorter prompt may be less than the method can do with
        len(prompt.ids) if isinstance(arm.budget.size, float) else latency.REHEARSED,
        probed=bool(arm.config.probe.every),
    )
    return GeneratedBatch.by(engine, generation, 1), more


def draw_of(arm: Arm, samples: Sequence[Sample]) -> Sampler | None:
    """How the tokens of samples that are generated together are drawn; None: greedily."""
    protocol = arm.protocol
    if not protocol.temperature:
        return None
    seeds = [f"{arm.config.seed}/{sample.base_id}/{sample.answer}" for sample in samples]
    return Sampler(protocol.temperature, seeds, protocol.top_p, protocol.top_k)


def failure(arm: Arm, prompt: TokenizedSample, error: str) -> dict[str, Any]:
    """The record of a sample that scores 0 for a reason of its own."""
    return {**prompt.record, "output": "", "scores": {arm.task.metric: 0.0}, "error": error}


def stops(loaded: models.Loaded, sample: Sample) -> Stops:
    """What ends the output of a sample."""
    tokenizer, ids, texts, not_first = loaded.tokenizer, set(loaded.stop_ids), sample.stop, False
    if sample.end_token:
        last = tokenizer(sample.end_token, add_special_tokens=False)["input_ids"][-1]
        # of a character, and of others that end in the same byte
        if PART in tokenizer.decode([last]):
            texts = (*texts, sample.end_token[-1])
        else:
            ids.add(last)
            not_first = True
    ends = Stops(ids, not_first=ids if not_first else ())
    return replace(ends, ends=ends_at(tokenizer, texts)) if texts else ends


PART = "\N{REPLACEMENT CHARACTER}"  # what tokens are decoded to that hold less than a character


def ends_at(
    tokenizer: Tokenizer, stops: Sequence[str], skip_special_tokens: bool = True
) -> Callable[[Sequence[int]], bool]:
    """Whether an output ends with its newest token, as `generate` asks: once its text holds one of
    `stops`.
    """
    # A stop may begin inside a token, so texts are compared. The last tokens that have a text hold
    # what the newest one completed: a character takes a token for each of its bytes at most.
    tail = 4 * max(map(len, stops), default=0) + 8
    silent = set(tokenizer.all_special_ids) if skip_special_tokens else set()
    size = len(tokenizer)  # a model's vocabulary may be padded

    def ends(tokens: Sequence[int]) -> bool:
        last = list(
            islice(
                (token for token in reversed(tokens) if token not in silent and token < size),
                tail + 3,
            )
        )
        last.reverse()
        # Bytes of which the first character is cut may all be unreadable; one of four places is
        # between two characters.
        text = ""
        for cut in range(4 if len(last) == tail + 3 else 1):
            text = str(tokenizer.decode(last[cut:], skip_special_tokens=skip_special_tokens))
            if not text.startswith(PART):
                break
        return any(stop in text for stop in stops)

    return ends


def is_failed_sample(error: Exception) -> bool:
    """Whether an error belongs to one sample: out of memory, or numbers that are none."""
    return isinstance(error, FloatingPointError) or is_out_of_memory(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no more memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator, and CUDA's for pinned host memory, say it in words only
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "out of memory")
    )


def measured(generation: Generation, probed: bool, warmup: int = 0) -> dict[str, Any]:
    """The entries of a sample's record about the times of its generation; with probes, which cost
    time, about these.

    What a shared prefill hides, the time to the first token, is left out; so are the first `warmup`
    steps of the time per token. The times of a batch are those of each of its samples. Of a
    generation beside others there are only the engine's own parts of a step.
    """
    if probed:
        return {
            "probe": generation.probe,
            **({"decode": "together"} if generation.together else {}),
        }
    if generation.together:
        return {
            "breakdown_ms": generation.breakdown_ms,
            "shared_prefill": True,
            "decode": "together",
        }
    steps = generation.step_ms[warmup:]
    tpot: dict[str, float] | None = None
    if steps:
        cuts = (
            statistics.quantiles(steps, n=20, method="inclusive")
            if len(steps) > 1
            else [steps[0]] * 19
        )
        tpot = {"mean": statistics.fmean(steps), "p50": statistics.median(steps), "p95": cuts[18]}
    record: dict[str, Any] = {"tpot_ms": tpot, "breakdown_ms": generation.breakdown_ms}
    if generation.shared_prefill:
        return {**record, "shared_prefill": True}
    first = {
        "ttft_s": generation.ttft_s,
        "tt2t_s": generation.tt2t_s,
        "prefill_ms": generation.prefill_ms,
    }
    return {**record, **first}
