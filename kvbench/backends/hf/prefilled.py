"""One dense prefill that serves many methods: a snapshot from which any of them begins.

The prompt's keys and values are one immutable block with room for the generated tokens after it;
the method that holds the snapshot writes there, and the next one writes over it. So one method at a
time generates from a snapshot, in the very memory layout of a run of its own, and gets the same
bits. Once a snapshot is `divided`, every method has a copy to write to, which takes memory for the
pages that it writes alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.replay import replayed, template_of
from kvbench.backends.hf.rotary import refuse_recomputed
from kvbench.backends.hf.runner import ModelRunner, windows_of
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.engine.request import Draw, chosen_tokens
from kvbench.memory.large import Original
from kvbench.memory.store import LayerStore, Sealed
from kvbench.method import Method, Needs, Prompt, Replay, Replayed

RECORDED_LESS = "the prefill recorded less than this method needs; name its needs in prefill_once"


class Recorder(Method):
    """Keeps what the prefill shows of every layer, for the methods that begin from it."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.prompts: dict[int, Prompt] = {}
        self.similarity: torch.Tensor | None = None
        self.replays: dict[Replay, dict[int, tuple[Replayed, ...]]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep the prompt of a layer."""
        self.prompts[layer] = prompt

    def observe_layers(self, similarity: torch.Tensor) -> None:
        """Keep it, as of all layers: one with a window, which no method is asked about,
        has none.
        """
        layers = torch.tensor(self.shape.sparse_layers, device=similarity.device)
        every = similarity.new_zeros(self.shape.layers, similarity.shape[1])
        self.similarity = every.index_copy_(0, layers, similarity)


class Prefilled:
    """The snapshot of a dense prefill.

    Attributes
    ----------
    lengths
        prompt tokens of each row.
    tokens
        [B], the likeliest first new token of each row.
    seconds
        what the prefill took.
    reference
        [vocabulary] fp32 each, what full attention says after each token of a text that is given
        (see `kvbench.measure.fidelity`); None: nobody asked.
    again
        more will be asked about these prompts, so what each method has made of them is kept.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        not_first: Collection[int],
        recorded: Recorder,
        engine: Engine,
        start: float,
    ) -> None:
        self.lengths = engine.shape.lengths
        self._logits, self._not_first = logits, not_first
        self.tokens = chosen_tokens(logits, not_first)
        self.seconds = time.perf_counter() - start
        self._prompts, self._replays = recorded.prompts, recorded.replays
        self._similarity = recorded.similarity
        self._sealed = {layer: Sealed.of(store) for layer, store in engine.stores.items()}
        self._original: Original | None = None
        self._windowed = engine.windowed
        self._capacity = engine.capacity
        self.reference: list[torch.Tensor] | None = None
        self._lent: list[LayerStore] = []
        self.again, self._begun_engines = False, dict[object, Engine]()

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds: keys and values, and what methods are shown beside them."""
        parts = [part for entry in self._sealed.values() for part in (entry.key, entry.value)]
        parts += [prompt.queries for prompt in self._prompts.values()]
        parts += [
            prompt.attention_sums
            for prompt in self._prompts.values()
            if prompt.attention_sums is not None
        ]
        shown = (
            entry
            for layers in self._replays.values()
            for passes in layers.values()
            for entry in passes
        )
        return sum(part.nbytes for part in parts) + sum(
            entry.queries.nbytes + entry.keys.nbytes for entry in shown
        )

    def first_tokens(self, draw: Draw | None) -> torch.Tensor:
        """The first new token of each row, [B] on the CPU: the likeliest, or drawn."""
        return self.tokens if draw is None else chosen_tokens(self._logits, self._not_first, draw)

    def has_begun(self, owner: object) -> bool:
        """Whether an engine of this owner has begun here, and a copy of it is kept."""
        return owner in self._begun_engines

    @torch.inference_mode()
    def engine(self, owner: object, make: Callable[[], Engine]) -> Engine:
        """An engine that has begun here: the owner's first, made by `make`, or a copy of what that
        was then.

        Raises
        ------
        ConfigError
            more will be asked, and the method cannot be copied.
        ValueError
            as `lend`.
        """
        engine = self._begun_engines.pop(owner, None)
        if engine is None:
            self.lend(engine := make())
        if self.again:
            try:
                self._begun_engines[owner] = copy.deepcopy(engine)
            except TypeError as error:
                raise ConfigError(
                    f"{type(engine.method).__name__}: several questions about one context need a"
                    f" copy of what the method has made of it, and it has none ({error}); expected"
                    " a method that copy.deepcopy can copy"
                ) from error
        return engine

    def lend(self, engine: Engine) -> None:
        """Let `engine`, fresh and made for these prompts, begin here.

        Unless the snapshot is divided, the engine that began before it must not go on.

        Raises
        ------
        ValueError
            the engine was made for other prompts, or needs more than was recorded.
        """
        if engine.shape.lengths != self.lengths:
            raise ValueError(
                f"the prefill read prompts of {self.lengths} tokens, the engine expects others"
            )
        if engine.capacity > self._capacity:
            raise ValueError(
                "the prefill left less room than this engine needs; raise max_new_tokens in"
                " prefill_once"
            )
        prompts = {
            layer: self._shown_to(engine.method, layer, prompt)
            for layer, prompt in self._prompts.items()
        }
        similar = engine.method.needs.layer_similarity
        if similar and self._similarity is None:
            raise ValueError(RECORDED_LESS)
        for store in self._lent:
            store.close()
        self._lent = []
        sealed = self._prompt_memory()
        for layer, prompt in prompts.items():
            store = engine.adopt(layer, sealed.pop(layer), prompt)
            if self._original is None:
                self._lent.append(store)
        for layer, windowed in windows_of(engine).items():
            windowed.begin_from(self._windowed[layer])
        if similar:
            engine.end_prefill(self._similarity)

    def divide(self) -> None:
        """From now on the engines that begin here may all go on, each with tokens of its own after
        the prompt.
        """
        if self._original is not None:
            return
        self._original = Original(
            [part for sealed in self._sealed.values() for part in (sealed.key, sealed.value)]
        )
        # What lies in the original needs its own memory no more.
        for layer, prompt in self._prompts.items():
            self._prompts[layer] = replace(
                prompt, keys=prompt.keys.to("meta"), values=prompt.values.to("meta")
            )
        for layer, sealed in self._sealed.items():
            self._sealed[layer] = sealed._replace(
                key=sealed.key.to("meta"), value=sealed.value.to("meta")
            )

    def _prompt_memory(self) -> dict[int, Sealed]:
        """The prompt of each layer in the memory that an engine shall have."""
        if self._original is None:
            return dict(self._sealed)
        parts = self._original.copy()
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return {
            layer: Sealed(*pair, sealed.lengths)
            for pair, (layer, sealed) in zip(pairs, self._sealed.items(), strict=True)
        }

    def _shown_to(self, method: Method, layer: int, prompt: Prompt) -> Prompt:
        window, replay = min(method.needs.query_window, max(prompt.lengths)), method.needs.replay
        if window > prompt.queries.shape[2] or (
            method.needs.attention_sums and prompt.attention_sums is None
        ):
            raise ValueError(RECORDED_LESS)
        if replay is not None and replay not in self._replays:
            raise ValueError(RECORDED_LESS)
        queries = prompt.queries[:, :, prompt.queries.shape[2] - window :]
        return replace(
            prompt,
            queries=queries if window else queries[:, :0],
            attention_sums=prompt.attention_sums if method.needs.attention_sums else None,
            replayed=() if replay is None else self._replays[replay][layer],
        )


@torch.inference_mode()
def prefill_once(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    needs: Iterable[Needs],
    *,
    max_new_tokens: int,
    chunk: int | None = None,
    not_first: Collection[int] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> Prefilled:
    """Read prompts once for all methods with these needs, and again where some need that, once for
    each `Replay`.

    Parameters
    ----------
    model
        with "kvbench" attention.
    prompts
        token ids of each row.
    needs
        of the methods that will begin from the snapshot.
    max_new_tokens
        most tokens any of them will generate.
    chunk
        prompt columns in one forward pass; None: all.
    not_first
        tokens that no row may begin with.
    tokenizer
        the model's, for replays.
    progress
        called with the prompt columns read, after each pass.
    """
    start, needs = time.perf_counter(), list(needs)
    shape = shape_of(model, [len(prompt) for prompt in prompts], (), model.dtype, model.device)
    refuse_recomputed(model, shape.lengths, max_new_tokens)
    recorder = Recorder(union(needs))
    engine = Engine(shape, recorder, Budget(None), new_tokens=max_new_tokens)
    logits = ModelRunner(model).prefill(engine, prompts, chunk, progress)
    for replay in {need.replay for need in needs if need.replay is not None}:
        passes = template_of(tokenizer, "a replay").passes(prompts, replay)
        recorder.replays[replay] = replayed(model, engine, passes)
    return Prefilled(logits, not_first, recorder, engine, start)


def union(needs: Collection[Needs]) -> Needs:
    """What a prefill must record to serve all of `needs`."""
    return Needs(
        query_window=max((need.query_window for need in needs), default=0),
        attention_sums=any(need.attention_sums for need in needs),
        layer_similarity=any(need.layer_similarity for need in needs),
    )
