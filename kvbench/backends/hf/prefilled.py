"""One dense prefill that serves many methods: a snapshot from which any of them begins.

The prompt's keys and values are one immutable block with room for the generated tokens after it,
where a method writes. Who begins gets that very block, so that it has the memory layout, and the
bits, of a run of its own, and who began before must not go on; or a copy, of which Linux holds the
pages alone that its method writes, where several go on side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.backends.hf.model import engine_for
from kvbench.backends.hf.runner import ModelRunner, replayed
from kvbench.budget import Budget
from kvbench.engine.audit import method_bytes
from kvbench.engine.engine import Engine
from kvbench.engine.replay import Template
from kvbench.engine.request import chosen_tokens
from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import Original, shares_pages
from kvbench.method import Method, Needs, Prompt, Replay, Replayed


class Recorder(Method):
    """Keeps what the prefill shows of every layer, for the methods with these needs that begin from
    it.
    """

    def __init__(self, needs: Collection[Needs]) -> None:
        self.needs = Needs(
            query_window=max((need.query_window for need in needs), default=0),
            attention_sums=any(need.attention_sums for need in needs),
            layer_similarity=any(need.layer_similarity for need in needs),
            inputs=any(need.inputs for need in needs),
        )
        self.prompts: dict[int, Prompt] = {}
        self.similarity: torch.Tensor | None = None
        self.replays: dict[Replay, dict[int, tuple[Replayed, ...]]] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Keep what is shown of a layer beside its keys and values, which are in its store."""
        keys, values = prompt.keys.to("meta"), prompt.values.to("meta")
        self.prompts[layer] = replace(prompt, keys=keys, values=values)

    def shown_to(self, method: Method, layer: int) -> Prompt:
        """The prompt of a layer as a method asks for it.

        Raises
        ------
        ValueError
            it needs more than was recorded.
        """
        prompt, needs = self.prompts[layer], method.needs
        recorded = prompt.queries.shape[2]
        window = min(needs.query_window, max(prompt.lengths))
        if (
            window > recorded
            or (needs.attention_sums and prompt.attention_sums is None)
            or (needs.layer_similarity and self.similarity is None)
            or (needs.inputs and prompt.inputs is None)
            or (needs.replay is not None and needs.replay not in self.replays)
        ):
            raise ValueError(
                "the prefill recorded less than this method needs; name its needs in prefill_once"
            )
        queries = prompt.queries[:, :, recorded - window :]
        return replace(
            prompt,
            queries=queries if window else queries[:, :0],
            attention_sums=prompt.attention_sums if needs.attention_sums else None,
            inputs=prompt.inputs if needs.inputs else None,
            replayed=() if needs.replay is None else self.replays[needs.replay][layer],
        )

    def observe_layers(self, similarity: torch.Tensor) -> None:
        """Keep it, as of all layers: one with a window, which no method is asked about,
        has none.
        """
        layers = torch.tensor(self.shape.sparse_layers, device=similarity.device)
        every = similarity.new_zeros(self.shape.layers, similarity.shape[1])
        self.similarity = every.index_copy_(0, layers, similarity)


class Prefilled:
    """The snapshot of a dense prefill, see `prefill_once`; the engine that has made it lets go of
    its stores.

    Attributes
    ----------
    logits
        [B, vocabulary], of what comes after each row.
    lengths
        prompt tokens of each row.
    nbytes
        bytes of keys and values, and of what methods are shown beside them.
    copy_bytes
        bytes that a copy takes beside what it shares.

    Raises
    ------
    FloatingPointError
        the logits are NaN or infinite.
    """

    def __init__(
        self, logits: torch.Tensor, recorded: Recorder, engine: Engine, copies: bool
    ) -> None:
        chosen_tokens(logits)
        self.logits, self.lengths, self._capacity = logits, engine.shape.lengths, engine.capacity
        self._recorded, self._kept = recorded, engine.windowed
        tiers = [store.device for store in engine.stores.values()]
        blocks = [block for tier in tiers for block in (tier.key, tier.value)]
        engine.release()
        whole = sum(block.nbytes for block in blocks)
        left_out = torch.empty(0, device="meta")  # the keys and values of what methods are shown
        self.nbytes = whole + method_bytes(recorded, [left_out])
        self.copy_bytes = 0 if shares_pages(engine.shape.device) else whole
        self._copies = copies
        self._blocks = Original(blocks).copy if copies else lambda: blocks
        self._lent: list[LayerStore] = []  # of who began last, in place

    @torch.inference_mode()
    def lend(self, engine: Engine) -> torch.Tensor:
        """Let `engine`, fresh and made for these prompts, begin here; the logits of the prefill.

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
        recorded, method = self._recorded, engine.method
        prompts = {layer: recorded.shown_to(method, layer) for layer in recorded.prompts}
        for store in self._lent:
            store.close()
        blocks = self._blocks()
        layers = zip(engine.shape.full_layers, blocks[::2], blocks[1::2], strict=True)
        stores = [engine.adopt(layer, (key, value), prompts[layer]) for layer, key, value in layers]
        self._lent = [] if self._copies else stores
        engine.windowed = {layer: part.copy() for layer, part in self._kept.items()}
        if method.needs.layer_similarity:
            engine.end_prefill(recorded.similarity)
        return self.logits


@torch.inference_mode()
def prefill_once(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    needs: Iterable[Needs],
    *,
    max_new_tokens: int,
    chunk: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    copies: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> Prefilled:
    """Read prompts once for all methods with these needs, and again where some need that, once for
    each `Replay`.

    Parameters
    ----------
    model
        with "kvbench" attention.
    prompts, chunk, progress
        as of `kvbench.engine.batch.Sequence`.
    needs, max_new_tokens
        of the methods that will begin from the snapshot, and the most tokens that any generates.
    tokenizer
        the model's, for replays.
    copies
        who begins has a copy of the prompt, so that many go on side by side.
    """
    needs, lengths = list(needs), [len(prompt) for prompt in prompts]
    recorder = Recorder(needs)
    engine = engine_for(model, lengths, recorder, Budget(None), (), new_tokens=max_new_tokens)
    logits = ModelRunner(model).prefill(engine, prompts, chunk, progress)
    for replay in {need.replay for need in needs if need.replay is not None}:
        passes = Template.of(tokenizer, "a replay").passes(prompts, replay)
        recorder.replays[replay] = replayed(model, engine, passes)
    return Prefilled(logits, recorder, engine, copies)
