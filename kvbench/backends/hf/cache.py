"""`KVCache`: a method inside plain `model.generate`."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NoReturn, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.backends.hf import rotary
from kvbench.backends.hf.continued import refuse_pieces
from kvbench.backends.hf.given import (
    Columns,
    check_length,
    check_rows,
    columns,
    lengths_and_offsets,
    refuse_packed,
    shown_tokens,
)
from kvbench.backends.hf.hooks import Call, mailbox
from kvbench.backends.hf.layers import kept_layers, reading_of
from kvbench.backends.hf.model import EnginePlan, inner_model, method_of
from kvbench.backends.hf.residuals import residuals_watched
from kvbench.backends.hf.watch import WatchedCache, watch
from kvbench.budget import Accounting, Budget
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine, worker_pool
from kvbench.memory.kinds import kv_of
from kvbench.method import Method

Question = Literal["after", "decode"]
AUDIT_EVERY = 8  # a user's own generate() shall not pay for a count of every union at every step


class KVCache(WatchedCache):
    """A KV-cache method inside plain `model.generate(past_key_values=KVCache(model, ...))`.

    The first forward pass is the prompt (left padding allowed) and is dense; a later one of a
    single token is a decode step. One of several tokens is a later turn of the conversation:
    `generate`, given the whole conversation and the same cache again, passes what the cache has not
    read. All rows of a batch take a turn of one length. No step is a CUDA graph, on a GPU either:
    `generate` calls the model itself, of which a graph would be all.

    Parameters
    ----------
    model
        a transformers causal language model, or peft's around one; without a KVCache it runs as it
        did before.
    method
        a method's name (with its options as keywords), or a Method object, which serves one cache.
    budget
        tokens (int), a fraction of the prompt (float in (0, 1]), or None: the method's own sizes.
    accounting
        "paper" or "unified" (what counts inside the budget).
    dense_layers
        true indices of layers that always attend everything; one with a sliding window stays as it
        is.
    question
        how the tokens of a later turn are read: "after", at once, attending all that the method has
        not dropped, or "decode", one by one, as decode steps (the logits are then the last token's
        alone).
    prompt_length
        columns of the prompt, padding included, where it is prefilled in several forward passes.
    attention
        the executor, "auto", "cpu", "torch", "reference" or "flashinfer".
    kv
        what keys and values are held in: "int8", or keys of `kvbench.memory.kinds.KV`.
    tokenizer
        for methods that read the text of tokens.
    seed
        what the method's randomness derives from.

    Raises
    ------
    ConfigError
        an unknown method or option, a bad budget, a model that kvbench does not support.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "quest",
        budget: int | float | None = 256,
        *,
        accounting: Accounting = "paper",
        dense_layers: Collection[int] = (0, 1),
        question: Question = "after",
        prompt_length: int | None = None,
        attention: str = "auto",
        kv: str | Mapping[str, Any] = "native",
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        model = inner_model(model)
        chosen, config, self._name = method_of(method, options)
        _check_options(question, prompt_length)
        settings: dict[str, Any] = {
            "attention": attention,
            "kv": kv_of(kv),
            "seed": seed,
            "audit_every": AUDIT_EVERY,
        }
        sizes = Budget.of(budget, config, accounting)
        self._plan = EnginePlan.of(model, chosen, sizes, dense_layers, tokenizer, settings)
        self.model, self._method = model, chosen
        shape = self._plan.shape
        self._kept, self._first_layer = kept_layers(model), shape.full_layers[0]
        self._last_layer = shape.readers(shape.full_layers[-1])[-1]
        super().__init__(shape.layers, self._kept)
        self._question, self.prompt_length = question, prompt_length
        self._stretched = bool(rotary.stretches(model))
        self.logits = shape.scaling, shape.softcap
        self._offsets: list[int] = []
        self._tokens = torch.empty(0, dtype=torch.int64)  # that a step reads, on the CPU
        self._modules = frozenset(map(id, reading_of(model).modules))
        watch(model)
        self._watched = ExitStack()
        self.reset()

    def __repr__(self) -> str:
        return (
            f"KVCache(method={self._name}, budget={self._plan.budget.size},"
            f" {_content(self.engine)})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a KVCache is not pickled, nor written by torch.save: it belongs to its model and to"
            " memory that methods share; expected cache.copy(), or the text read anew"
        )

    @property
    def batch_size(self) -> int:
        """Rows of the generation; -1 before the first prompt."""
        return -1 if self.engine is None else self.engine.shape.batch

    def reset(self) -> None:
        """Forget everything; the next forward pass is a new prompt."""
        super().reset()
        self.engine: Engine | None = None
        self._transcript = Transcript()
        self._passing = False  # a forward pass has begun and not ended
        self._unsettled = False  # a step was decoded and is not counted yet
        self._watch_prompt()

    def _watch_prompt(self) -> None:
        self._watched.close()
        self._watched.enter_context(residuals_watched(self.model, self._method.needs))

    def audit(self) -> dict[str, Any]:
        """What was attended and held so far; keys as in `summary.json`, and those of
        later turns.
        """
        if self.engine is None:
            raise ValueError("nothing to audit: no prompt was read yet")
        self._settle(self.engine)
        return self.engine.report()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        shared = *self._plan.shared, worker_pool()
        memo.update({id(thing): thing for thing in shared})
        memo[id(self._watched)] = ExitStack()
        if self.engine is not None:
            self._settle(self.engine)  # what is noted to be counted is of this cache's own stores
        copy.deepcopy(self.engine, memo)  # it knows what else is shared
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        if twin.engine is None or not twin.engine.prefilled:
            twin._watch_prompt()
        return twin

    def copy(self) -> KVCache:
        """A cache that goes on from here by itself, as `copy.deepcopy` gives one; it takes as much
        memory again.
        """
        return copy.deepcopy(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -`tokens_to_remove` tokens of every row back, as assisted decoding does.

        Raises
        ------
        ValueError
            no number of tokens, a positive one, as in transformers, or more than there are; or a
            method that cannot.
        """
        try:
            count = -operator.index(tokens_to_remove)
        except TypeError as error:
            raise ValueError(
                f"crop({tokens_to_remove}): expected minus the tokens to remove, such as -8"
            ) from error
        if count and self._kept:
            raise ValueError(
                f"crop({tokens_to_remove}): layers with a window or a state have forgotten what"
                " came before it"
            )
        shortest = 0 if self.engine is None else min(self.engine.lengths)
        if not 0 <= count < max(1, shortest):
            raise ValueError(
                f"crop({tokens_to_remove}): minus the tokens to remove, of a row of {shortest}"
            )
        if count:
            assert self.engine is not None
            self._settle(self.engine)
            self.engine.crop(count)
            self._transcript.cut(count)
            self.count(-count)

    def activate_past_recording(self) -> None:
        """Assisted decoding begins.

        Raises
        ------
        ValueError
            it takes tokens back, which the method cannot; or needs all logits of what is read.
        """
        self._plan.refuse_assisted(self._question)

    def take_chunk(self) -> None:
        """Look at a chunk of what `generate` prefills in chunks.

        Raises
        ------
        ValueError
            it is of a prompt whose length is not known.
        """
        started = (
            self.engine is not None and not self.engine.audit.generated and not self._unsettled
        )
        if started and self.prompt_length is None:
            raise ValueError(
                "a prompt prefilled in chunks: give the KVCache its columns, prompt_length="
            )

    def continue_with(self, input_ids: torch.Tensor) -> None:
        """Look at the whole conversation [B, n], as `generate` begins; it leaves out what was read.

        Raises
        ------
        ValueError
            it does not go on from what was read.
        """
        if self.engine is not None:
            check_rows(self.batch_size, len(input_ids))
            self._transcript.check(input_ids)

    def before(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Look at what a forward pass of the model is given; returns what it shall be given.

        Raises
        ------
        ValueError
            what it is given does not fit what was read.
        """
        past, read = self.get_seq_length(), self.engine is not None and self.engine.prefilled
        name, rows, width, mask = reads = Columns.of(arguments, past)
        tokens = reads.last_tokens(arguments)
        check_rows(self.batch_size, rows)
        check_length(None if read else self.prompt_length, past + width)
        lengths = _lengths_after(self.engine, mask, self.prompt_length, width)
        if self.engine is not None:
            tokens = shown_tokens(tokens, mask, self._offsets, past)
        if self._question == "after" or not read:
            refuse_pieces(self.model, past, width)
        if not read:
            refuse_packed(arguments.get("position_ids"), mask)
        if self._stretched:
            rotary.refuse_mixed(self.model, lengths)
        if read and width > 1 and self._question == "decode":
            for at in range(width - 1):
                self.model(
                    **columns(arguments, name, at, past),
                    past_key_values=self,
                    use_cache=True,
                    logits_to_keep=1,
                )
            arguments = arguments | columns(arguments, name, width - 1, past)
        rotary.note(lengths)
        self.expected, self._tokens = past + width, tokens
        return arguments

    def begin_pass(self) -> None:
        """A forward pass begins.

        Raises
        ------
        ValueError
            the last one has not ended.
        """
        if self._passing:
            raise ValueError(
                "the last forward pass through this KVCache did not end: it failed, or another"
                " thread generates with it; a KVCache serves one generation at a time, and after an"
                " error reset() or a new one"
            )
        self._passing = True

    def belongs_to(self, module: torch.nn.Module) -> bool:
        """Whether the attention module is of the model that this cache was made for."""
        return id(module) in self._modules

    @torch.no_grad()
    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer, see `Engine.attend`; the first layer with full attention opens
        the forward pass.
        """
        if call.layer == self._first_layer:
            self._start_forward(query, padding)
        assert self.engine is not None
        self.show_inputs(call)
        out = self.engine.attend(call.layer, query, call.key, call.value, call.sinks)
        if call.layer == self._last_layer:
            self._passing = False
        return out

    def _settle(self, engine: Engine) -> None:
        """Count the step before this one: the last layers of the model, with a window, may come
        after all others.
        """
        if self._unsettled:
            engine.settle()
        self._unsettled = False

    def _start_forward(self, query: torch.Tensor, padding: torch.Tensor | None) -> None:
        batch, width = len(query), query.shape[2]
        ids = _ids_of(query)
        if self.engine is None:
            columns = self.prompt_length or width
            lengths, self._offsets = lengths_and_offsets(padding, batch, columns)
            self.engine = self._plan.engine(lengths, self._offsets, columns)
            self.engine.windowed = self._kept
        if self._method.view is not self.engine.view:
            raise ValueError(
                "the Method object of this KVCache has begun another generation: give each cache"
                " its own"
            )
        self._settle(self.engine)
        if self.engine.prefilled:
            self._watched.close()  # of the prompt all is known
        if not self.engine.prefilled:
            ids = (
                ids
                if padding is None
                else ids.masked_fill(padding[:, -width:].to(ids.device) == 0, -1)
            )
            self.engine.start_chunk(ids)
        elif width == 1:
            self._unsettled = True
            self.engine.start_step(self._tokens)
        else:
            self.engine.start_turn(ids)
        self._transcript.add(ids)


class Transcript:
    """The token ids that a cache has read, which the next turn goes on from."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, token_ids: torch.Tensor) -> None:
        """The next columns, [B, q]; -1 where the id is not known, or is padding."""
        self._parts.append(token_ids)

    def cut(self, count: int) -> None:
        """Forget the last `count` columns."""
        ids = self._ids()
        self._parts = [ids[:, : ids.shape[1] - count]]

    def check(self, token_ids: torch.Tensor) -> None:
        """Refuse token_ids [B, n] that do not go on from what was read.

        Raises
        ------
        ValueError
            they do not, or hold nothing new.
        """
        previous, columns = self._ids(), token_ids.shape[1]
        length, previous = previous.shape[1], previous[:, :columns]
        same = previous == token_ids[:, :length].to(previous.device)
        differ = (~same & (previous >= 0)).any(dim=0).nonzero().flatten().tolist()
        if differ or columns <= length:
            why = f"column {differ[0]} differs" if differ else f"it has {columns} columns"
            raise ValueError(
                f"this KVCache has read {length} tokens, and the input does not go on from them"
                f" ({why}): give it the tokens that generate returned and the new turn after them,"
                " or take a new KVCache (or reset() this one)"
            )

    def _ids(self) -> torch.Tensor:
        self._parts = [torch.cat(self._parts, dim=1)]
        return self._parts[0]


def _check_options(question: Any, prompt_length: Any) -> None:
    if question not in get_args(Question):
        raise ConfigError(f"question={question!r}: one of {', '.join(get_args(Question))}")
    if prompt_length is not None and (type(prompt_length) is not int or prompt_length < 1):
        raise ConfigError(
            f"prompt_length={prompt_length!r}: expected columns of the prompt, 1 or more, or None"
        )


def _ids_of(query: torch.Tensor) -> torch.Tensor:
    """Token ids [B, q] of the forward pass that a query [B, Hq, q, D] is of; -1 where it was given
    embeddings.
    """
    (batch, _, width, _), (ids, mailbox.input_ids) = query.shape, (mailbox.input_ids, None)
    if ids is None or ids.shape != (batch, width):
        return torch.full((batch, width), -1, device=query.device)
    return ids


def _content(engine: Engine | None) -> str:
    """Tokens of each row that were read, and the bytes that keys and values take."""
    if engine is None or not engine.prefilled:
        return "tokens=[], bytes=0" if engine is None else "in the prompt"
    host = sum(store.host_bytes() for store in engine.stores.values())
    return f"tokens={engine.lengths}, bytes={engine.allocated_bytes() + host}"


def _lengths_after(
    engine: Engine | None, mask: torch.Tensor | None, prompt: int | None, width: int
) -> list[int]:
    """Tokens of each row once the next `width` columns are read; in a prompt, once all of it is."""
    if engine is None:
        return lengths_and_offsets(mask, 1, prompt or width)[0]
    return (
        [length + width for length in engine.lengths]
        if engine.prefilled
        else [*engine.shape.lengths]
    )
