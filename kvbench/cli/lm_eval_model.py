"""The model `kvbench` of lm-eval: its `hf` model, but every token that is scored or generated comes
through a method.

Texts become tokens, and tokens texts, as in lm-eval's `hf` model, which this one inherits from:
with full attention both give the same scores. What is asked of the model goes through the measured
loop (`kvbench.engine.batch`).

A continuation is scored as it would have been generated. All of its context but the last token is
prefilled, once for all continuations of that context; the last token and then the continuation's
own are read one by one as decode steps, side by side with other continuations, so that the method
decides what each scored token's predecessor attends. A context of one token, as an empty one is
(BOS alone), has nothing to choose from: the model's answer to it is every method's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

import kvbench
from kvbench.backends.hf.prefilled import Prefilled, prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.cli.greedy import refuse_settings, refuse_shipped
from kvbench.cli.lm_eval import LM_EVAL_KEYS, setup_config
from kvbench.config import ConfigError
from kvbench.engine import batch
from kvbench.engine.request import GenerationRequest, Stops
from kvbench.measure.arm import PREFILLING, Setup
from kvbench.measure.job import ends_at
from kvbench.measure.kernels import load_kernels
from kvbench.models.footprint import Prompts
from kvbench.runs.run import build_method, load_model, set_up
from kvbench.runs.summary import summarise
from kvbench.runs.terminal import Console

# What of the options of lm-eval's `hf` model is not about loading a model.
HF_OPTIONS = (
    "max_length",
    "truncation",
    "add_bos_token",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)

log = logging.getLogger(__name__)

# of each context, its continuations by their index
Continuations = Sequence[Mapping[int, list[int]]]
# of a continuation: its index, its log-probability, whether it is greedy
Answer = Callable[[int, float, bool], None]


class Continued(NamedTuple):
    """A generation: a continuation of each of some contexts.

    Attributes
    ----------
    rows
        what is prefilled of the contexts.
    indices
        of the continuations; None: a row has none left.
    forced
        the tokens of each row.
    longest
        tokens that any generation of these contexts has.
    """

    rows: list[list[int]]
    indices: list[int | None]
    forced: list[list[int]]
    longest: int


@register_model("kvbench")
class KVBenchLM(HFLM):  # type: ignore[misc]
    """lm-eval's model `kvbench`.

    Parameters
    ----------
    batch_size
        contexts that are read together, a whole number.
    device
        as a run's, "auto" where lm-eval names none.
    max_batch_size
        lm-eval's own, for batch sizes that are found out; unused.
    settings
        keys of a run that say what generates (`pretrained` or `model.path`, `method`, `budget`,
        `dtype`, `protocol.accounting`, `method.page_size`, ...), and options of lm-eval's `hf`
        model (`HF_OPTIONS`).

    Attributes
    ----------
    setup
        what generates.

    Raises
    ------
    ConfigError
        bad settings, before a model is loaded.
    """

    def __init__(
        self,
        batch_size: int | str | None = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        if not str(batch_size).isdecimal() or int(str(batch_size)) < 1:
            raise ConfigError(f"--batch_size={batch_size}: expected a whole number, 1 or more")
        options = {key: settings.pop(key) for key in HF_OPTIONS if key in settings}
        config = setup_config({"device": device or "auto", **settings})
        if config.threads:
            torch.set_num_threads(config.threads)
        method = build_method(config)
        self.setup: Setup = set_up(config, method, load_model(config, method, Prompts(0)))
        load_kernels(Console())
        loaded = self.setup.loaded
        options["max_length"] = options.get("max_length") or loaded.card.context_length
        logger = logging.getLogger(HFLM.__module__)
        logger.disabled = True  # it warns at length of a model which it did not load itself
        try:
            super().__init__(
                loaded.model, "causal", tokenizer=loaded.tokenizer, batch_size=batch_size, **options
            )
        finally:
            logger.disabled = False
        try:
            refuse_shipped(loaded.model.generation_config, loaded.name)
        except ConfigError as error:
            # no matter where continuations are scored; hours may pass before a text is due
            log.warning("no text will be generated: %s", error)
        self._parameters = loaded.model.num_parameters()
        self._audits: dict[str, list[Mapping[str, Any]]] = {}
        self._broken, self._token_bytes = False, math.inf

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say of the model: under "kvbench" what generated, and what was
        attended and moved.

        The audit is one for texts generated and one for continuations scored, each as of a run's
        summary, with `attended_share`, the entries attended over C.
        """
        setup, config = self.setup, self.setup.config
        protocol = asdict(setup.protocol).items()
        return {
            "model_num_parameters": self._parameters,
            "model_dtype": str(setup.loaded.model.dtype),
            "model_revision": setup.loaded.revision,
            "kvbench": {
                "version": kvbench.__version__,
                "model": setup.loaded.name,
                "method": {"name": config.method.name, **config.method.options},
                "budget": setup.budget.size,
                "kv": str(config.kv),
                "protocol": {
                    key: value for key, value in protocol if f"protocol.{key}" not in LM_EVAL_KEYS
                },
                "dense_layers": list(setup.dense_layers),
                "seed": config.seed,
                "audit": {kind: _combined(audits) for kind, audits in self._audits.items()},
            },
        }

    def _note(self, kind: str, audit: Mapping[str, Any], steps: int, broken: str | None) -> None:
        """Keep a generation's audit, if it had a step to audit; the first that broke the method's
        rule is named.
        """
        if steps:
            self._audits.setdefault(kind, []).append(audit)
        if broken is not None and not self._broken:
            self._broken = True
            log.warning("over_rule: %s", broken)

    # -- generating --------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's, of requests whose settings are checked before the first text.

        Raises
        ------
        ConfigError
            see `refuse_settings` and `refuse_shipped`.
        """
        loaded = self.setup.loaded
        for settings in (request.args[1] for request in requests):
            refuse_settings(settings)
            refuse_shipped(loaded.model.generation_config, loaded.name, settings)
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: Sequence[str], **options: Any
    ) -> torch.Tensor:
        """Greedy tokens after contexts [B, N], left-padded as `attention_mask` says, as [B, N +
        new].
        """
        mask = options["attention_mask"].bool()
        setup, tokenizer = self.setup, self.tokenizer
        rows = [ids[there].tolist() for ids, there in zip(context.cpu(), mask.cpu(), strict=True)]
        new_tokens = max_length - context.shape[1]
        engine = setup.engine(rows, new_tokens)
        generation = batch.generate(
            ModelRunner(setup.loaded.model),
            rows,
            engine,
            max_new_tokens=new_tokens,
            stops=Stops(
                set(setup.loaded.stop_ids), ends_at(tokenizer, stop, skip_special_tokens=False)
            ),
            prefill_chunk=setup.protocol.prefill_chunk,
        )
        self._note(
            "generate_until", generation.audit, len(generation.step_ms), engine.audit.broken()
        )
        longest = max(map(len, generation.tokens))
        padded = [
            tokens + [tokenizer.pad_token_id] * (longest - len(tokens))
            for tokens in generation.tokens
        ]
        return torch.cat([context, torch.tensor(padded, device=context.device)], dim=1)

    # -- scoring -----------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """lm-eval's, which knows no token of nothing after nothing."""
        for request in requests:
            if request.args == ("", ""):
                refuse_empty("")
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one.

        Parameters
        ----------
        requests
            what lm-eval caches the answer under, token ids of the context, and of the continuation.
        disable_tqdm
            no progress bar.
        override_bs
            contexts that are read together, in place of `batch_size`.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not continuation:
                refuse_empty(self.tok_decode(context))
            contexts.setdefault(self._fitting(context, continuation), []).append(index)
        longest_first = sorted(contexts, key=len, reverse=True)
        answers: dict[int, tuple[float, bool]] = {}
        size = override_bs or self.batch_size
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests"
        ) as bar:

            def answer(index: int, likelihood: float, greedy: bool) -> None:
                answers[index] = likelihood, greedy
                # else a window of a longer text, which has a key of its own
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                bar.update()

            decoding = batch.Batch(ModelRunner(self.setup.loaded.model), self.setup.room)
            for start in range(0, len(longest_first), size):
                part = longest_first[start : start + size]
                continuations = [
                    {index: requests[index][2] for index in contexts[context]} for context in part
                ]
                self._score(decoding, part, continuations, answer)
            decoding.clear()
        return [answers[index] for index in range(len(requests))]

    def _fitting(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """What of a context has room in the window before a continuation, whose last token is never
        read.

        Raises
        ------
        ConfigError
            there is no room for the continuation itself.
        """
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(
                f"max_length={self.max_length}: expected {len(continuation)} or more, the tokens of"
                " a continuation"
            )
        return tuple(context[-room:])

    def _score(
        self,
        decoding: batch.Batch,
        contexts: Sequence[Sequence[int]],
        continuations: Continuations,
        answer: Answer,
    ) -> None:
        """Have a batch of contexts scored, of each of which some continuations are asked for, by
        their index.

        The first ones of all contexts are a generation, the second ones another, and so on; they go
        on side by side, with those of other batches.
        """
        setup = self.setup
        rows = [list(context[:-1] or context) for context in contexts]
        forced = [
            {
                index: [*context[len(row) :], *continuation]
                for index, continuation in by_index.items()
            }
            for context, row, by_index in zip(contexts, rows, continuations, strict=True)
        ]
        longest = max(len(tokens) for by_index in forced for tokens in by_index.values())
        columns = len(rows) * max(map(len, rows))
        # by what the last prefill took; nothing else goes on before the first
        decoding.clear(PREFILLING * self._token_bytes * columns, len(rows))
        more = {
            "max_new_tokens": longest,
            "chunk": setup.protocol.prefill_chunk,
            "tokenizer": setup.loaded.tokenizer,
            "copies": True,
        }
        prefilled = prefill_once(setup.loaded.model, rows, [setup.method.needs], **more)
        self._token_bytes = prefilled.nbytes / columns
        for turn in zip_longest(*(by_index.items() for by_index in forced), fillvalue=(None, [0])):
            # A row whose continuations are all scored rests: it has nothing to read but its
            # context.
            indices, now = zip(*turn, strict=True)
            self._join(
                decoding,
                contexts,
                Continued(rows, list(indices), list(now), longest),
                prefilled,
                answer,
            )

    def _join(
        self,
        decoding: batch.Batch,
        contexts: Sequence[Sequence[int]],
        now: Continued,
        prefilled: Prefilled,
        answer: Answer,
    ) -> None:
        setup, likelihoods = (
            replace(self.setup, method=self.setup.config.method.build()),
            Likelihoods(now.forced),
        )
        lengths = list(map(len, now.rows))

        def begin() -> batch.Sequence:
            request = GenerationRequest(
                max(map(len, now.forced)),
                forced_tokens=now.forced,
                watch=likelihoods,
            )
            engine, runner = setup.engine(now.rows, now.longest), ModelRunner(setup.loaded.model)
            return batch.Sequence(runner, engine, now.rows, prefilled).ask(request)

        def ended(sequence: batch.Sequence | None, error: Exception | None) -> None:
            if sequence is None:
                raise error or AssertionError("a generation ends with an error, or is over")
            audit, broken = sequence.conclude().audit, sequence.engine.audit.broken()
            self._note("loglikelihood", audit, sequence.steps, broken)
            for row, index in enumerate(now.indices):
                if index is not None:
                    if len(contexts[row]) == 1:
                        likelihoods.add(
                            row, self._logits_after(contexts[row][0]), now.forced[row][0]
                        )
                    answer(index, likelihoods.sums[row], likelihoods.greedy[row])

        size = setup.row_bytes(lengths, now.longest) + prefilled.copy_bytes
        admission = batch.Admission(ended, self, {prefilled: prefilled.nbytes, likelihoods: size})
        decoding.admit(begin, len(lengths), admission)

    @torch.inference_mode()
    def _logits_after(self, token: int) -> torch.Tensor:
        """Logits [vocabulary] of what comes after a text of one token."""
        ids = torch.tensor([[token]], device=self.device)
        logits: torch.Tensor = self.setup.loaded.model(input_ids=ids, use_cache=False).logits
        return logits[0, -1]


class Likelihoods:
    """Adds up the log-probabilities of given tokens, row by row; `watch` of a request.

    Parameters
    ----------
    forced
        the tokens of each row; all but the first are predicted by a step.

    Attributes
    ----------
    sums
        natural logarithms of what was predicted so far, of each row.
    greedy
        whether each of these tokens was the likeliest one.
    """

    def __init__(self, forced: Sequence[Sequence[int]]) -> None:
        self._forced, self._step = forced, 0
        self.sums, self.greedy = [0.0] * len(forced), [True] * len(forced)

    def __call__(self, logits: torch.Tensor) -> None:
        """Take the next step's logits [B, vocabulary]."""
        self._step += 1
        for row, tokens in enumerate(self._forced):
            if self._step < len(tokens):
                self.add(row, logits[row], tokens[self._step])

    def add(self, row: int, logits: torch.Tensor, token: int) -> None:
        """Take the logits [vocabulary] that predict the next token of a row.

        Raises
        ------
        FloatingPointError
            they are no numbers.
        """
        logits = logits.float()
        likelihood = float(logits[token] - logits.logsumexp(dim=-1))
        if math.isnan(likelihood):
            raise FloatingPointError("the model's logits are NaN or infinite")
        self.sums[row] += likelihood
        self.greedy[row] &= int(logits.argmax()) == token


def refuse_empty(context: str) -> NoReturn:
    """Refuse to score a continuation without a token, as lm-eval's `hf` model does by an assertion.

    Raises
    ------
    ConfigError
        says what it stands after.
    """
    raise ConfigError(
        f"loglikelihood: an empty continuation after {context[-40:]!r}; expected one token or more"
    )


def _combined(audits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One audit of many generations, and how much of the budget was attended."""
    audit: dict[str, Any] = summarise([{"audit": audit} for audit in audits], "")["audit"]
    budget = audit.get("budget")
    return {
        **audit,
        "generations": len(audits),
        "attended_share": audit["attended_mean"] / budget if budget else None,
    }
