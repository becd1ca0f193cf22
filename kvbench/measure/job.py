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

from torch import Tensor, float32

from kvbench.backends.backend import GeneratedBatch
from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.backends.hf.sampling import Sampler
from kvbench.budget import Budget
from kvbench.engine import batch
from kvbench.engine.batch import Generation
from kvbench.engine.engine import Engine
from kvbench.engine.request import GenerationRequest, Progress, QuestionTokens, Stops
from kvbench.measure import fidelity, latency, machine
from kvbench.measure.arm import Arm
from kvbench.measure.prompts import TokenizedSample
from kvbench.measure.synthetic import SyntheticEngine
from kvbench.method import Method
from kvbench.models.types import Tokenizer
from kvbench.tasks import Sample, Timed


class SharedPrompts:
    """One prefill of the prompts of a batch that can run, from which arms begin: side by side if
    they decode together, else one after the other.

    Attributes
    ----------
    room
        tokens that there is room for after the prompts.
    reference
        [vocabulary] fp32 each, what full attention says after each forced token; [] before
        `begin_reference`.
    nbytes
        bytes of the prefill and the reference.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        prompts: Sequence[TokenizedSample],
        progress: Progress | None = None,
        room: int = 0,
    ) -> None:
        arm, sample = arms[0], prompts[0].sample
        self._model, self._forced = arm.loaded.model, sample.forced
        self.room, self.reference = max(prompts[0].room, room), list[Tensor]()
        total = max(len(prompt.ids) for prompt in prompts) + sample.max_new_tokens
        self.prefilled = prefill_once(
            self._model,
            [prompt.ids for prompt in prompts],
            [arm.method.needs for arm in arms],
            max_new_tokens=self.room,
            chunk=arm.protocol.prefill_chunk,
            tokenizer=arm.loaded.tokenizer,
            copies=arm.decode == "together",
            progress=lambda done: progress and progress(done, total),
        )
        steps = len(sample.forced.tokens) - 1 if sample.forced else 0
        vocabulary = arm.loaded.card.vocabulary
        self.nbytes = self.prefilled.nbytes + steps * vocabulary * float32.itemsize

    def begin_reference(self) -> batch.Sequence:
        """Begin full attention on the forced tokens of a sample, which notes what it says after
        each, to go on ahead of those that compare; unless these have copies of the prefill, none
        has begun.
        """
        assert self._forced is not None
        model, tokens = self._model, self._forced.tokens
        shape = shape_of(model, self.prefilled.lengths, (), model.dtype, model.device)
        engine = Engine(shape, Method(), Budget(None), new_tokens=len(tokens))

        def watch(logits: Tensor) -> None:
            self.reference.append(logits[0].float().log_softmax(dim=-1))

        request = GenerationRequest(len(tokens), forced_tokens=[tokens], watch=watch)
        return batch.Sequence(ModelRunner(model), engine, (), self.prefilled).ask(request)


class PromptJob:
    """Prompts that one generation of an arm serves; those that cannot run fail.

    Parameters
    ----------
    shared
        the prefill of the others, to begin from; None: the generation reads them itself. Forced
        tokens need one.
    progress
        of a generation that is alone.
    before
        of the same arm and contexts, begun before this one, which goes on from a copy of what that
        one's method has made of them.
    """

    def __init__(
        self,
        arm: Arm,
        prompts: Sequence[TokenizedSample],
        shared: SharedPrompts | None = None,
        progress: Progress | None = None,
        before: PromptJob | None = None,
    ) -> None:
        self.arm, self.prompts = arm, [prompt for prompt in prompts if prompt.can_run]
        self._failed = [prompt for prompt in prompts if not prompt.can_run]
        self._rows = [prompt.ids for prompt in self.prompts]
        self._shared, self._progress = shared, progress
        self._comparison: fidelity.Comparison | None = None
        self._observed = ExitStack()
        self._waiting: batch.Sequence | None = None  # to be asked
        self._next: PromptJob | None = None
        if before is not None:
            before._next = self

    @property
    def _sample(self) -> Sample:
        return self.prompts[0].sample

    @property
    def room(self) -> int:
        """Tokens to have room for after each prompt."""
        return self._shared.room if self._shared else self.prompts[0].room

    @property
    def has_room_alone(self) -> bool:
        """Whether it may have room where a shared prefill has none, which holds all keys and values
        on the device.
        """
        return self.arm.method.needs.home != "device" and not self._sample.forced

    def memory(self, index_share: float) -> float:
        """Bytes that it takes beside the shared prefill; `index_share` as of `Setup.row_bytes`."""
        assert self._shared is not None
        prefilled = self._shared.prefilled
        size = self.arm.row_bytes(list(map(len, self._rows)), self.room, index_share)
        size += prefilled.copy_bytes
        # what is kept, and a copy, share no page with the prompt
        copied = self._next is not None or self._waiting is not None
        return 2 * (size + prefilled.nbytes) if copied else size

    def run(self) -> list[dict[str, Any]]:
        """Generate alone and with a clock, and score; the samples' records.

        Raises
        ------
        Exception
            `is_failed_sample` says which are the samples' own.
        """
        if not self.prompts:
            return self._failures()
        arm, sample, shared = self.arm, self._sample, self._shared
        if sample.timed:
            return self._scored(*self._timed(sample.timed))
        if sample.forced and shared is not None and not shared.reference:
            shared.begin_reference().decode()
        request = self._request()
        begin = partial(self._sequence, arm, request, timed=True)
        with machine.observed(arm.loaded.device, arm.loaded.devices) as measured_on:
            generated = arm.backend.generate(arm, self._rows, begin, request)
        return self._scored(generated, self._compared() | {"machine": measured_on})

    def begin(self) -> batch.Sequence:
        """Begin beside others, with a method of its own; again, where that has failed.

        Raises
        ------
        Exception
            as `run`.
        """
        arm = replace(self.arm, method=self.arm.config.method.build())
        observed = machine.observed(arm.loaded.device, arm.loaded.devices)
        self._machine = self._observed.enter_context(observed)
        return self._sequence(arm, self._request())

    def records(self, sequence: batch.Sequence) -> list[dict[str, Any]]:
        """The samples' records, once a generation beside others is over."""
        self._observed.close()
        generated = GeneratedBatch.by(sequence.engine, sequence.conclude(), len(self.prompts))
        return self._scored(generated, self._compared() | {"machine": self._machine})

    def _sequence(
        self, arm: Arm, request: GenerationRequest, timed: bool = False
    ) -> batch.Sequence:
        """A generation that goes on; where more will be asked, the next job has a copy of it.

        Raises
        ------
        ConfigError
            more will be asked, and the method cannot be copied.
        """
        sequence, self._waiting = self._waiting, None
        if sequence is None:
            sequence = batch.Sequence(
                ModelRunner(arm.loaded.model),
                arm.engine(self._rows, self.room, [prompt.name for prompt in self.prompts]),
                self._rows,
                self._shared.prefilled if self._shared else None,
                arm.protocol.prefill_chunk,
                partial(request.note, max(map(len, self._rows))),
            )
        if self._next is not None:
            self._next._waiting = sequence.copy()
        return sequence.ask(request, timed)

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

    def _request(self) -> GenerationRequest:
        """What is generated."""
        sample, forced, progress = self._sample, self._sample.forced, self._progress
        if forced:
            assert self._shared is not None
            self._comparison = fidelity.Comparison(self._shared.reference, forced.tokens[1:])
            return GenerationRequest(
                len(forced.tokens),
                forced_tokens=[forced.tokens],
                watch=self._comparison,
                progress=progress,
            )
        rows = [prompt.question for prompt in self.prompts if prompt.question]
        question = QuestionTokens(rows, at_once=self.arm.protocol.question == "after")
        ends, draw = stops(self.arm.loaded, sample), self._draw()
        return GenerationRequest(
            sample.max_new_tokens, ends, draw, question=question, progress=progress
        )

    def _draw(self) -> Sampler | None:
        """How tokens are drawn; None: greedily."""
        protocol, seed = self.arm.protocol, self.arm.config.seed
        if not protocol.temperature:
            return None
        samples = [prompt.sample for prompt in self.prompts]
        seeds = [f"{seed}/{sample.base_id}/{sample.answer}" for sample in samples]
        return Sampler(protocol.temperature, seeds, protocol.top_p, protocol.top_k)

    def _compared(self) -> dict[str, Any]:
        return self._comparison.record() if self._comparison else {}

    def _scored(self, generated: GeneratedBatch, more: dict[str, Any]) -> list[dict[str, Any]]:
        """The records of the samples, from what they came to and what else their records say."""
        warmup = self._sample.timed.warmup if self._sample.timed else 0
        probed = bool(self.arm.config.probe.every)
        more = measured(generated.generation, probed, warmup) | more
        if len(self.prompts) > 1:
            more = {"batch": len(self.prompts)} | more
        records = [self._record(row, generated, more) for row in range(len(self.prompts))]
        return self._failures() + records

    def _failures(self) -> list[dict[str, Any]]:
        return [prompt.failure(self.arm.task.metric) for prompt in self._failed]

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
    together = {"decode": "together"} if generation.together else {}
    if probed:
        return {"probe": generation.probe, **together}
    breakdown = {"breakdown_ms": generation.breakdown_ms}
    if generation.together:
        return {**breakdown, "shared_prefill": True, **together}
    steps = generation.step_ms[warmup:]
    tpot: dict[str, float] | None = None
    if steps:
        cuts = statistics.quantiles(
            steps if len(steps) > 1 else steps * 2, n=20, method="inclusive"
        )
        tpot = {"mean": statistics.fmean(steps), "p50": statistics.median(steps), "p95": cuts[18]}
    if generation.shared_prefill:
        return {"tpot_ms": tpot, **breakdown, "shared_prefill": True}
    first = {key: getattr(generation, key) for key in ("ttft_s", "tt2t_s", "prefill_ms")}
    return {"tpot_ms": tpot, **breakdown, **first}
