"""Samples through an arm: their generation, alone or beside others, their records, and which errors
fail a sample alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from kvbench.backends.backend import GeneratedBatch
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.prefilled import Prefilled, prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.hf.sampling import Sampler
from kvbench.engine import batch
from kvbench.engine.batch import Generation
from kvbench.engine.engine import Engine
from kvbench.engine.request import Choice, GenerationRequest, Progress, QuestionTokens, Stops
from kvbench.measure import fidelity, latency, machine
from kvbench.measure.arm import Arm
from kvbench.measure.prompts import TokenizedSample, contexts
from kvbench.measure.synthetic import SyntheticEngine
from kvbench.models.types import Tokenizer
from kvbench.tasks import Sample, Timed


class PromptJob:
    """Prompts that one generation of an arm serves.

    Parameters
    ----------
    arm
        what generates.
    prompts
        those of a batch that can run.
    prefilled
        of these, to begin from; None: the generation reads them itself. Beside others it is
        divided, and of forced tokens it has begun its reference (`begin_reference`).
    progress
        called with tokens done and tokens in all, of a generation that is alone.
    """

    def __init__(
        self,
        arm: Arm,
        prompts: Sequence[TokenizedSample],
        prefilled: Prefilled | None,
        progress: Progress | None = None,
    ) -> None:
        self.arm, self.prompts = arm, prompts
        self._rows, self._sample = [prompt.ids for prompt in prompts], prompts[0].sample
        self._prefilled, self._progress = prefilled, progress
        self._comparison: fidelity.Comparison | None = None
        self._observed = ExitStack()

    # -- alone -------------------------------------------------------------------------------------

    def run(self) -> list[dict[str, Any]]:
        """Generate with a clock, and score; the samples' records."""
        arm, sample = self.arm, self._sample
        if sample.timed:
            return self._scored(*self._timed(sample.timed))
        if sample.forced:
            self._note_reference()
        make, request = self._request(arm)
        with machine.observed(arm.loaded.device, arm.loaded.devices) as measured_on:
            generated = arm.backend.generate(arm, self._rows, make, request)
        return self._scored(generated, self._compared() | {"machine": measured_on})

    def _note_reference(self) -> None:
        """Have full attention say what the arm is compared with, if it has not yet."""
        arm = self.arm
        self._prefilled = self._prefilled or prefill_shared([arm], self.prompts, self._progress)
        if self._prefilled.reference is None:
            engine, request = _full_attention(arm.loaded, self.prompts[0], self._prefilled)
            batch.generate(ModelRunner(arm.loaded.model), self._rows, engine, **vars(request))

    def _timed(self, timed: Timed) -> tuple[GeneratedBatch, dict[str, Any]]:
        """The generation of a sample that is timed, and what its record holds besides."""
        arm, sample = self.arm, self._sample
        kind = SyntheticEngine if timed.keys == "synthetic_attention" else Engine
        generation, engine, more = latency.time_sample(
            arm.loaded.model,
            timed,
            sample.max_new_tokens,
            partial(arm.engine, samples=[sample.base_id], kind=kind),
            arm.protocol.prefill_chunk,
            self._progress,
            # a share of a shorter prompt may be less than the method can do with
            len(self._rows[0]) if isinstance(arm.budget.size, float) else latency.REHEARSED,
            probed=bool(arm.config.probe.every),
        )
        return GeneratedBatch.by(engine, generation, 1), more

    # -- beside others -----------------------------------------------------------------------------

    def begin(self) -> batch.Sequence:
        """Begin the generation with a method of its own; again, where that has failed.

        Raises
        ------
        Exception
            as `measure` meets them; `is_failed_sample` says which are the samples' own.
        """
        loaded = self.arm.loaded
        make, request = self._request(replace(self.arm, method=self.arm.config.method.build()))
        observed = machine.observed(loaded.device, loaded.devices)
        self._machine = self._observed.enter_context(observed)
        runner = ModelRunner(loaded.model)
        return batch.Sequence.begin(runner, self._rows, make(), request)

    def records(self, sequence: batch.Sequence) -> list[dict[str, Any]]:
        """The samples' records, once their generation is over."""
        self._observed.close()
        generated = GeneratedBatch.by(sequence.engine, sequence.conclude(), len(self.prompts))
        return self._scored(generated, self._compared() | {"machine": self._machine})

    # -- both --------------------------------------------------------------------------------------

    def _request(self, arm: Arm) -> tuple[Callable[[], Engine], GenerationRequest]:
        """What makes an engine for the prompts, and what is generated."""
        prefilled, forced = self._prefilled, self._sample.forced
        room = len(forced.tokens) if forced else self.prompts[0].room
        names = [prompt.name for prompt in self.prompts]
        make: Callable[[], Engine] = partial(arm.engine, self._rows, room, names)
        owner = id(self.arm)
        if prefilled is not None and (prefilled.again or prefilled.has_begun(owner)):
            make = partial(prefilled.engine, owner, make)
        more: dict[str, Any] = {"prefilled": prefilled, "progress": self._progress}
        if forced:
            assert prefilled is not None and prefilled.reference is not None
            self._comparison = fidelity.Comparison(prefilled.reference, forced.tokens[1:])
            choice = Choice(forced_tokens=[forced.tokens])
            more |= {"choice": choice, "watch": self._comparison}
            return make, GenerationRequest(len(forced.tokens), **more)
        return make, GenerationRequest(
            self._sample.max_new_tokens,
            stops(arm.loaded, self._sample),
            Choice(self._draw()),
            self._question(),
            prefill_chunk=arm.protocol.prefill_chunk,
            **more,
        )

    def _draw(self) -> Sampler | None:
        """How tokens are drawn; None: greedily."""
        protocol, seed = self.arm.protocol, self.arm.config.seed
        if not protocol.temperature:
            return None
        samples = [prompt.sample for prompt in self.prompts]
        seeds = [f"{seed}/{sample.base_id}/{sample.answer}" for sample in samples]
        return Sampler(protocol.temperature, seeds, protocol.top_p, protocol.top_k)

    def _question(self) -> QuestionTokens:
        rows = [prompt.question for prompt in self.prompts]
        at_once = self.arm.protocol.question == "after"
        return QuestionTokens(rows, at_once) if any(rows) else QuestionTokens()

    def _compared(self) -> dict[str, Any]:
        return self._comparison.record() if self._comparison else {}

    def _scored(self, generated: GeneratedBatch, more: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of the samples, from what they came to and what else their records say."""
        warmup = self._sample.timed.warmup if self._sample.timed else 0
        probed = bool(self.arm.config.probe.every)
        more = measured(generated.generation, probed, warmup) | more
        if len(self.prompts) > 1:
            more = {"batch": len(self.prompts)} | more
        return [self._record(row, generated, more) for row in range(len(self.prompts))]

    def _record(self, row: int, generated: GeneratedBatch, more: dict[str, Any]) -> dict[str, Any]:
        arm, prompt = self.arm, self.prompts[row]
        sample, tokens = prompt.sample, generated.generation.tokens[row]
        output = arm.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        audit = generated.audits[row]
        fields = {"output": output, "output_ids": tokens, "audit": audit, **more}
        if sample.keep_ids:
            fields["meta"] = {**sample.meta, "output_ids": tokens}
        if audit["over_rule"]:
            error = f"over_rule: {generated.broken[row]}"
            return {**prompt.failure(arm.task.metric, error), **fields}
        scored = replace(
            sample,
            id=sample.base_id,
            answers=tuple(fields.get("answers", sample.answers)),
            meta=fields.get("meta", sample.meta),
        )
        scores = arm.task.score(scored, fields["output"])
        return {**prompt.record, "scores": scores, **fields}


def begin_reference(
    loaded: Loaded, prompt: TokenizedSample, prefilled: Prefilled
) -> batch.Sequence:
    """Begin what a sample with forced tokens is compared with, to go on ahead of those that
    compare.
    """
    engine, request = _full_attention(loaded, prompt, prefilled)
    return batch.Sequence.begin(ModelRunner(loaded.model), [prompt.ids], engine, request)


def _full_attention(
    loaded: Loaded, prompt: TokenizedSample, prefilled: Prefilled
) -> tuple[Engine, GenerationRequest]:
    forced = prompt.sample.forced
    assert forced is not None
    return fidelity.full_attention(loaded.model, prefilled, prompt.ids, forced.tokens)


def measure(
    arm: Arm,
    prompts: Sequence[TokenizedSample],
    progress: Progress | None = None,
    prefilled: Prefilled | None = None,
) -> list[dict[str, Any]]:
    """Generate for a batch of samples, alone, and score them: their records in samples.jsonl.

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
    """
    running = [prompt for prompt in prompts if not prompt.record["error"]]
    records: list[dict[str, Any]] = []
    try:
        records = PromptJob(arm, running, prefilled, progress).run() if running else []
    except Exception as error:
        if not is_failed_sample(error):
            raise
        if len(running) == 1:
            failed = f"{type(error).__name__}: {error}"
            records = [running[0].failure(arm.task.metric, failed)]
    if len(records) < len(running):
        records = [record for prompt in running for record in measure(arm, [prompt], progress)]
    ready = iter(records)
    return [
        prompt.failure(arm.task.metric) if prompt.record["error"] else next(ready)
        for prompt in prompts
    ]


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


def stops(loaded: Loaded, sample: Sample) -> Stops:
    """What ends the output of a sample."""
    tokenizer, ids = loaded.tokenizer, set(loaded.stop_ids)
    texts, not_first = sample.stop, False
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
    return isinstance(error, FloatingPointError) or batch.is_out_of_memory(error)


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
