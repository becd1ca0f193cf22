"""RACC: compression of the cache, and asynchronous retrieval of what was evicted.

A sequence has three regions: the prompt (L1), the older generated tokens (L2) and the observation
window (L3). After every n generated tokens the queries of the window vote, a share alpha of L2
stays (`compressor`), and the rest goes to the host, where an index finds what a later query asks
for (`retrieval`; sections 4.1 and 4.2, Algorithm 1). A prompt may be compressed as well, by any
method that evicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.ragged import stacked
from methods.pyramidkv import PyramidKV
from methods.racc.compressor import Compressor
from methods.racc.ratio import actual_ratio, retained, share
from methods.racc.residents import Residents, packed
from methods.racc.retrieval import Retrieval, RetrievedTokens
from methods.racc.scenario import of_compressor, refuse_budget, settled, with_share
from methods.racc.settings import RACCOptions
from methods.snapkv import SnapKV

FIRST_INDEXED = 2  # the published code, which links at compressions, indexes from the second one on


class Evictions:
    """The view that the prompt's compressor gets: as the store's own, but that `keep` has the rest
    indexed, too.
    """

    def __init__(self, view: View, keep: Callable[..., None]) -> None:
        self._view, self.keep = view, keep

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks before it has a view
            raise AttributeError(name)
        return getattr(self._view, name)


class RACC(Method):
    """Compress the prompt, the generated tokens or both, and attend evicted tokens that a search
    found.
    """

    options_type = RACCOptions

    def __init__(self, options: RACCOptions) -> None:
        self.requested_options, window = options, options.prompt_window
        kind = {"snapkv": SnapKV, "pyramidkv": PyramidKV, "none": None}[options.compressor]
        self.compressor: SnapKV | None = None
        if kind is not None:
            self.compressor = kind(
                window=window,
                kernel=options.kernel,
                pooling=options.pooling,
                granularity=options.granularity,
            )
        self.needs = Needs(
            query_window=window if kind else 0, queries=True, on_drop="offload", host_keys=True
        )

    # -- a new generation --------------------------------------------------------------------------

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle what is compressed, and how much of it stays."""
        super().begin(shape, budget, view, context)
        self.options = options = self._with_budget()
        if options.index == "ivfpq" and options.subspaces > shape.head_dim:
            raise ValueError(
                f"subspaces={options.subspaces}: at most the head dimension, {shape.head_dim}"
            )
        # what was found returns to the cache
        self.moves = options.link == "compress" and self.scenario != "liso"
        # lists of a KV head: under unified accounting those of a group are joined
        per_query_head = options.granularity == "query_head" and not budget.unified
        self.group = shape.group if per_query_head else 1
        self.steps = self.compressions = 0
        self.residents: dict[int, Residents] = {}
        self.of_generated = Compressor(options, shape, view) if options.alpha < 1 else None
        self.of_prompt = self.compressor if self.scenario != "silo" else None
        self.retrieval = Retrieval(options, shape, view, context)
        # tokens on the host that the last step attended, per KV head
        self.from_host: dict[int, int] = {}
        self.entries: list[float] = []  # of each step, see `_entries`
        if self.of_prompt is not None:
            whole = budget if budget.size is not None else replace(budget, size=options.capacity)
            evictions = cast("View", Evictions(view, self._keep))
            self.of_prompt.begin(shape, of_compressor(whole, options.beta), evictions, context)

    def check_budget(self) -> None:
        """Settle the scenario, and refuse a budget that it has no rule for."""
        answer = self.context.new_tokens
        requested = self.requested_options.scenario
        self.scenario = settled(requested, self.budget, self.shape.lengths, answer)
        if self.scenario == "liso":
            super().check_budget()
        else:
            refuse_budget(self.scenario, self.budget, answer)

    def _with_budget(self) -> RACCOptions:
        """The options with the alpha of scenario and budget; in liso no generated token goes,
        whatever alpha.
        """
        answer = self.context.new_tokens
        if self.scenario == "liso":
            return replace(self.requested_options, alpha=1)
        if self.budget.size is None or answer is None:
            return self.requested_options
        return with_share(self.requested_options, float(self.budget.size), answer)

    def _capacity(self, length: int) -> int:
        """C of a prompt of `length` tokens."""
        return self.options.capacity if self.budget.size is None else self.budget.tokens(length)

    # -- eviction ----------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Have the prompt compressed, and what it drops indexed beside the prefill of
        later layers.
        """
        shape = self.shape
        sizes = prompt.lengths, shape.kv_heads, shape.device_of(layer), self.group
        residents = self.residents[layer] = Residents(
            *sizes, search_prompt=self.options.search_prompt
        )
        if self.of_prompt is not None:
            self.of_prompt.prefill(layer, prompt)
            self.retrieval.flush()
        residents.end_prompt()

    def _keep(self, layer: int, ids: torch.Tensor, room: int | None = None) -> None:
        """Evict all but `ids` [B, H, M] to the host, and have the rest indexed."""
        if self.budget.counts_generated:  # a budget of at least the current length drops nothing
            ids = self._of_long_rows(layer, ids)
        self.view.keep(layer, ids, room)
        self.residents[layer].hold(ids, self.view.lengths(layer))
        if not self.options.beta or (self.moves and self.compressions < FIRST_INDEXED):
            return
        evicted = self.residents[layer].evicted()
        if any(len(head) for heads in evicted for head in heads):
            self.retrieval.cover(layer, self.steps, evicted, anew=self.moves)

    def _compress(self, layer: int) -> None:
        """Keep L1, the share alpha of L2 with most votes, L3, and what was retrieved, if
        it moves.
        """
        assert self.of_generated is not None
        residents, lengths = self.residents[layer], self.view.lengths(layer)
        window = residents.range([length - self.options.window for length in lengths], lengths)
        retained, lost = self.of_generated.pop_best(layer)
        residents.lost = torch.cat([residents.lost, lost], dim=2)
        lists = [retained, window]
        if self.moves and layer in self.retrieval.layers:
            retrieved = self.retrieval.layers[layer].latest(self.steps)
            self.retrieval.log.late += retrieved is None
            lists = lists if retrieved is None else [self._for_all(retrieved), *lists]
        residents.generated = torch.cat(lists, dim=2)
        self._keep(layer, torch.cat([residents.prompt, residents.generated], dim=2))

    # -- a decode step -----------------------------------------------------------------------------

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        """Count the steps of the cycle."""
        self.steps += 1

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """What is on the device, and the tokens on the host that the latest search found."""
        if self.of_generated is not None and self.options.votes(self.steps):
            self.of_generated.vote(layer, query, self.residents[layer])
        retrieved = self._retrieved(layer, query)
        self.from_host[layer] = 0 if retrieved is None else retrieved.tokens.shape[2]
        rolls = self.of_prompt if self.budget.counts_generated else None
        rolling = rolls.select(layer, query) if rolls is not None else None
        if retrieved is None and rolling is None and self.group == 1:
            return None
        others = [] if retrieved is None else [self._for_all(retrieved)]
        if rolling is None:
            return Selection(self.residents[layer].all(self.view.lengths(layer), *others))
        here = self._of_long_rows(layer, rolling.index)
        return Selection(packed(torch.cat([here, *others], dim=2)) if others else here)

    def _for_all(self, retrieved: RetrievedTokens) -> torch.Tensor:
        """What a search found, for each list of a KV head: [B, H, k]."""
        if self.group == 1:
            return retrieved.tokens
        return retrieved.tokens.repeat_interleave(self.group, dim=1)

    def _retrieved(self, layer: int, query: torch.Tensor) -> RetrievedTokens | None:
        """Ask if it is time to; what to attend of earlier answers, if they do not return to the
        cache.
        """
        if layer not in self.retrieval.layers:
            return None
        if self.options.asks(self.steps):
            lengths = self.view.lengths(layer)
            counts = [self._retrieval_count(row, length) for row, length in enumerate(lengths)]
            self.retrieval.ask(layer, self.steps, query, counts)
        return None if self.moves else self.retrieval.layers[layer].latest(self.steps)

    def _retrieval_count(self, row: int, length: int) -> int:
        """Tokens to retrieve for a row of `length` tokens: of a budget that counts them what the
        compressor leaves.
        """
        if self.budget.counts_generated and self.of_prompt is not None:
            prompt = self.shape.lengths[row]
            return self._capacity(prompt) - self.of_prompt.budget.tokens(prompt)
        return share(self.options.beta, length)

    def _of_long_rows(self, layer: int, rolling: torch.Tensor) -> torch.Tensor:
        """What the compressor selected [B, H, M], and all of the rows that fit their budget."""
        rows = [*rolling]
        for row, length in enumerate(self.view.lengths(layer)):
            if self._capacity(self.shape.lengths[row]) >= length:
                rows[row] = torch.arange(length, device=rolling.device).expand(len(rows[row]), -1)
        return stacked(rows)

    def end_step(self) -> None:
        """At the end of a cycle compress the generated tokens; start the searches that were asked
        for.
        """
        if self.of_prompt is not None:
            self.of_prompt.end_step()
        if self.of_generated is not None and self.options.compresses(self.steps):
            self.compressions += 1
            for layer in self.shape.sparse_layers:
                self._compress(layer)
        self.retrieval.flush()
        self.entries.append(self._entries())

    # -- budget and report -------------------------------------------------------------------------

    def rule(self, layer: int, length: int, generated: int) -> int:
        """What stays of the prompt, what the cycles so far leave of the generated tokens, and what
        is retrieved.
        """
        retrieved = share(self.options.beta, length + generated)
        if self.of_prompt is not None and self.budget.counts_generated:
            capacity = self._capacity(length)
            others = capacity - self.of_prompt.budget.tokens(length)
            return max(capacity, self.of_prompt.rule(layer, length, generated) + others)
        if self.scenario == "liso":
            if self.of_prompt is None:
                return length + generated
            return retrieved + self.of_prompt.rule(layer, length, generated)
        prompt = self.of_prompt.rule(layer, length, 0) if self.of_prompt else length
        if self.options.alpha == 1:
            return prompt + generated
        done, newest = divmod(generated - 1, self.options.every)
        on_top = newest + 1 + (0 if self.moves else retrieved)
        return prompt + self.group * self._older(length, done) + on_top

    def _older(self, length: int, compressions: int) -> int:
        """Generated tokens of a list right after so many compressions; see `ratio.retained`."""
        options = self.options

        def linked(number: int) -> int:
            if not self.moves or number <= FIRST_INDEXED:
                return 0
            return share(options.beta, length + number * options.every - options.lag)

        return retained(compressions, options.alpha, options.every, options.window, linked)

    def _entries(self) -> float:
        """Tokens on the device that the scenario's ratio counts, per list and sparse layer."""
        layers = self.shape.sparse_layers
        since = sum(
            self.view.lengths(layer)[0] - self.residents[layer].since[0] for layer in layers
        )
        count = sum(self.residents[layer].count for layer in layers)
        count = count + since + sum(self.from_host.values())
        return count / len(layers) - self._uncounted()

    def _uncounted(self) -> float:
        """Tokens of a mean prompt, which silo's ratio leaves out."""
        return sum(self.shape.lengths) / self.shape.batch if self.scenario == "silo" else 0.0

    def mean_rule(self, length: int, generated: int) -> float | None:
        """C, which a compressor of the prompt may share out over layers, where generated tokens
        count.
        """
        return self._capacity(length) if self.of_prompt and self.budget.counts_generated else None

    def report(self) -> dict[str, float]:
        """The actual ratio (`ratio.actual_ratio`), and what became of the searches
        (`retrieval.Log`).
        """
        # a step that an error ended has not done so, and the audit waits for the jobs
        self.retrieval.flush()
        counted = sum(self.shape.lengths) / self.shape.batch - self._uncounted()
        return {**actual_ratio(self.entries, counted + self.steps), **self.retrieval.log.report()}
