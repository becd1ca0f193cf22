"""RACC: compression of the cache, and asynchronous retrieval of what was evicted.

A sequence is parted in three: the prompt (L1), the older generated tokens (L2) and the observation window (L3). After
every n generated tokens the queries of the window vote, a share alpha of L2 stays, and the rest goes to the host, where
an index finds what a later query asks for (sections 4.1 and 4.2; Algorithm 1). A prompt may be compressed as well, by
any method that evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.nn.functional import avg_pool1d, pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.votes import Pooling
from methods.pyramidkv import PyramidKV
from methods.racc.index import KeyIndex, Kind, Metric, Settings, Tokens
from methods.racc.ratio import alpha_for, measured_ratio, retained, share
from methods.racc.retrieval import Batch, Log, Mode, Retriever
from methods.snapkv import SnapKV

NO_TOKEN = torch.iinfo(torch.int64).max  # sorts behind every token id
Scenario = Literal["auto", "liso", "silo", "lilo"]

FIRST_INDEXED = 2  # the published code, which links at compressions, indexes from the second one on


class Evictions:
    """The view that a compressor gets: as the store's own, but that `keep` also tells the method that retrieves."""

    def __init__(self, view: View, keep: Any) -> None:
        self._view, self.keep = view, keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class RACC(Method):
    """Compress the prompt, the generated tokens or both, and attend evicted tokens that a search found.

    Scenarios: "liso" (long input, short output) compresses the prompt once, "silo" the generated tokens after every n
    of them, "lilo" both; "auto" takes liso where the answer is shorter than every prompt, or where the budget counts
    tokens, and silo elsewhere. In liso the budget is the compressor's; where generated tokens count (unified
    accounting, or generated=counted), an eighth of it is for retrieved tokens. In silo and lilo a budget is the share
    of the tokens that stays on the device, from which alpha follows by the paper's formula (4).

    Args:
        compressor: what compresses the prompt; "none" leaves it whole.
        capacity: prompt tokens it keeps without a budget.
        prompt_window, kernel, pooling: its settings, see `SnapKV`.
        scenario: see above.
        every, window: n and w, tokens between two compressions and in the observation window.
        alpha, beta: share of L2 that stays, and of all tokens that is retrieved.
        vote: softmax over L2, softmax over all that is resident, or the raw logits (equations 5 and 6).
        vote_kernel: width of the votes' mean pooling, odd.
        link: "step", every step asks, and what was found is attended until the next answer; "compress", each cycle
            asks once, and what was found returns to the cache at the next compression (in liso, which has none: is
            attended for the n tokens that follow).
        lag: steps between a request and the use of its answer.
        metric, index, lists, probes, subspaces, neighbours, ef_construction, ef_search: see `index.Settings`.
        mode: see `retrieval`.

    Raises:
        ValueError: alpha, beta, n or lag is out of its range.
    """

    def __init__(
        self,
        compressor: Literal["snapkv", "pyramidkv", "none"] = "snapkv",
        capacity: int = 6000,
        prompt_window: int = 128,
        kernel: int = 5,
        pooling: Pooling = "mean",
        scenario: Scenario = "auto",
        every: int = 400,
        window: int = 40,
        alpha: float = 0.6,
        beta: float = 0.01,
        vote: Literal["softmax_l2", "softmax_all", "raw"] = "softmax_l2",
        vote_kernel: int = 5,
        link: Literal["compress", "step"] = "compress",
        lag: int = 200,
        metric: Metric = "cosine",
        index: Kind = "flat",
        lists: int = 100,
        probes: int = 10,
        subspaces: int = 8,
        neighbours: int = 32,
        ef_construction: int = 200,
        ef_search: int = 100,
        mode: Mode = "deterministic",
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: expected a share in (0, 1]")
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta}: expected a share in [0, 1]")
        if every <= window:
            raise ValueError(f"every={every}: expected more tokens than the observation window has, window={window}")
        if link == "compress" and lag >= every:
            raise ValueError(f"lag={lag}: expected fewer steps than lie between two compressions, every={every}")
        settings = {"window": prompt_window, "kernel": kernel, "pooling": pooling}
        compressors = {"snapkv": SnapKV, "pyramidkv": PyramidKV}
        self.compressor = compressors[compressor](**settings) if compressor != "none" else None
        self.capacity, self.asked_scenario = capacity, scenario
        self.every, self.window, self.asked_alpha, self.beta = every, window, alpha, beta
        self.vote, self.vote_kernel = vote, vote_kernel
        self.link, self.lag, self.mode = link, lag, mode
        self.settings = Settings(index, metric, lists, probes, subspaces, neighbours, ef_construction, ef_search)
        self.needs = Needs(query_window=prompt_window if self.compressor else 0, on_drop="offload")

    # -- a new generation ------------------------------------------------------------------------------------------

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        super().begin(shape, budget, view, context)
        if self.settings.kind == "ivfpq" and self.settings.subspaces > shape.head_dim:
            raise ValueError(f"subspaces={self.settings.subspaces}: at most the head dimension, {shape.head_dim}")
        self.compresses_prompt = self.scenario != "silo" and self.compressor is not None
        self.compresses_generated = self.scenario != "liso"
        self.moves = self.link == "compress" and self.compresses_generated
        self.alpha = self._alpha()
        self.steps = self.compressions = 0
        self.prompt_ids: dict[int, torch.Tensor] = {}  # L1: prompt tokens on the device, [B, Hkv, M]
        self.held: dict[int, torch.Tensor] = {}  # tokens on the device since the last eviction, [B, Hkv, M], -1 = none
        self.since: dict[int, tuple[int, ...]] = {}  # tokens there were then; all later ones are on the device, too
        self.kept: dict[int, float] = {}  # and how many these are, per KV head
        self.retained: dict[int, torch.Tensor] = {}  # those of them that are L2 and L3, [B, Hkv, M]
        self.voting: dict[int, Voting] = {}  # while the window votes
        self.retrievers: dict[int, Retriever] = {}
        self.attended: dict[int, int] = {}  # tokens on the host that the last step attended, per KV head
        self.jobs = Batch(context.pool.submit, torch.get_num_threads())
        self.log = Log()
        self.entries: list[float] = []  # of each step, see `_entries`
        if self.compressor is not None and self.compresses_prompt:
            evictions = cast("View", Evictions(view, self._keep))
            self.compressor.begin(shape, self._compressor_budget(), evictions, context)

    def check_budget(self) -> None:
        """Settle the scenario, and refuse a budget that it has no rule for."""
        self.scenario = self._scenario()
        size = self.budget.size
        if self.scenario == "liso":
            super().check_budget()
        elif self.budget.counts_generated:
            key = "accounting=unified" if self.budget.unified else "generated=counted"
            raise ValueError(f"protocol.{key}: scenario={self.scenario} has no rule for it; scenario=liso has")
        elif isinstance(size, int):
            raise ValueError(
                f"budget={size}: in scenario={self.scenario} a budget is the share of the tokens that stays (0.15), or "
                "null: alpha and n alone; scenario=liso takes tokens"
            )
        elif size is not None and self.context.new_tokens is None:
            raise ValueError(
                f"budget={size}: alpha follows from the length of the answer, which is not known here; use budget=null"
            )

    def _scenario(self) -> Scenario:
        if self.asked_scenario != "auto":
            return self.asked_scenario
        answer = self.context.new_tokens
        counts_tokens = isinstance(self.budget.size, int) or self.budget.counts_generated
        short = answer is None or answer < min(self.shape.lengths)
        return "liso" if counts_tokens or short else "silo"

    def _alpha(self) -> float:
        if not self.compresses_generated or self.budget.size is None:
            return self.asked_alpha
        assert self.context.new_tokens is not None
        compressions = max(1, self.context.new_tokens // self.every)
        try:
            return alpha_for(float(self.budget.size), compressions, self.beta)
        except ValueError as error:
            raise ValueError(f"budget={self.budget.size}: {error}") from error

    def _capacity(self, length: int) -> int:
        """C of a prompt of `length` tokens."""
        return self.capacity if self.budget.size is None else self.budget.tokens(length)

    def _compressor_budget(self) -> Budget:
        size = self.capacity if self.budget.size is None else self.budget.size
        if self.budget.counts_generated and self.beta:
            size = 7 * size // 8 if isinstance(size, int) else 7 * size / 8
        return Budget(size, self.budget.accounting, self.budget.generated)

    def _wanted(self, row: int, length: int) -> int:
        """Tokens to retrieve for a row of `length` tokens."""
        if self.budget.counts_generated and self.compressor is not None:
            prompt = self.shape.lengths[row]
            return self._capacity(prompt) - self.compressor.budget.tokens(prompt)
        return share(self.beta, length)

    # -- eviction --------------------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self._hold(layer, self._range([0] * self.shape.batch, prompt.lengths), prompt.lengths)
        if self.compressor is not None and self.compresses_prompt:
            self.compressor.prefill(layer, prompt)
            self.jobs.flush()  # the index is built beside the prefill of later layers
        self.prompt_ids[layer] = self.held[layer]
        self.retained[layer] = self.held[layer][:, :, :0]

    def _keep(self, layer: int, ids: torch.Tensor) -> None:
        """Evict all but `ids` [B, Hkv or 1, M] to the host, and have the rest indexed."""
        lengths = self.view.lengths(layer)
        ids = ids.expand(-1, self.shape.kv_heads, -1)
        if self.budget.counts_generated:  # a budget of at least the current length drops nothing
            ids = self._of_long_rows(layer, ids)
        self.view.keep(layer, ids)
        self._hold(layer, ids, lengths)
        if not self.beta or (self.moves and self.compressions < FIRST_INDEXED):
            return
        if self.moves or layer not in self.retrievers:
            self.retrievers[layer] = self._new_retriever(layer)
        self.retrievers[layer].cover(self.steps, self._evicted(layer))

    def _hold(self, layer: int, ids: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """Note that of the tokens so far `ids` [B, Hkv, M] are on the device."""
        self.held[layer], self.since[layer] = _packed(ids), lengths
        self.kept[layer] = float((ids >= 0).sum()) / (self.shape.batch * self.shape.kv_heads)

    def _evicted(self, layer: int) -> list[list[Tokens]]:
        """Tokens of each KV head that are on the host."""
        held = self.held[layer].cpu()
        longest = max(self.since[layer])
        gone = torch.ones(*held.shape[:2], longest + 1, dtype=torch.bool)
        gone.scatter_(2, torch.where(held < 0, longest, held), False)
        return [
            [head[:length].nonzero()[:, 0].numpy() for head in heads]
            for heads, length in zip(gone, self.since[layer], strict=True)
        ]

    def _new_retriever(self, layer: int) -> Retriever:
        def read(row: int, head: int, tokens: Tokens) -> Any:
            return self.view.host_keys(layer)[row, head, torch.from_numpy(tokens)].float().numpy()

        seed = self.context.layer_seed(layer)
        index = [
            [KeyIndex(self.settings, partial(read, row, head), seed + head) for head in range(self.shape.kv_heads)]
            for row in range(self.shape.batch)
        ]
        count_read = partial(self.view.count_read, layer)
        return Retriever(layer, index, self.jobs.submit, self.mode, self.lag, count_read, self.log)

    # -- a decode step ---------------------------------------------------------------------------------------------

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, active: torch.Tensor) -> None:
        self.steps += 1

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        in_window = (self.steps - 1) % self.every >= self.every - self.window
        if self.compresses_generated and self.alpha < 1 and in_window:
            self._count_votes(layer, query)
        retriever, found = self.retrievers.get(layer), None
        if retriever is not None:
            if self.link == "step" or (self.steps + self.lag) % self.every == 0:
                counts = [self._wanted(row, length) for row, length in enumerate(self.view.lengths(layer))]
                queries = query.unflatten(1, (self.shape.kv_heads, -1)).mean(dim=2)[:, :, 0]
                retriever.request(self.steps, queries, counts)
                if self.lag == 0:
                    self.jobs.flush()
            if not self.moves:
                found = retriever.latest(self.steps)
        rolling = self.compressor.select(layer, query) if self.compressor and self.compresses_prompt else None
        self.attended[layer] = 0 if found is None else found.tokens.shape[2]
        if found is None and rolling is None:
            return None
        here = self._resident(layer) if rolling is None else self._of_long_rows(layer, rolling.index)
        if found is None:
            return Selection(here)
        return Selection(_packed(torch.cat([here, found.tokens], dim=2)))

    def end_step(self) -> None:
        if self.compressor is not None and self.compresses_prompt:
            self.compressor.end_step()
        if self.compresses_generated and self.steps % self.every == 0 and self.alpha < 1:
            self.compressions += 1
            for layer in self.shape.sparse_layers:
                self._compress(layer)
        self.jobs.flush()
        self.entries.append(self._entries())

    def _count_votes(self, layer: int, query: torch.Tensor) -> None:
        """Add what the queries of a step in the window say of L2: in fp32, summed over the group."""
        if layer not in self.voting:
            starts = [length - 1 for length in self.view.lengths(layer)]  # the window begins with this token
            older = torch.cat([self.retained[layer], self._range(self.since[layer], starts)], dim=2)
            resident = _ascending(torch.cat([self.held[layer], self._range(self.since[layer], starts)], dim=2))
            self.voting[layer] = Voting.over(_ascending(older), resident)
        voting = self.voting[layer]
        keys = self.view.keys(layer)
        grouped = query.unflatten(1, (self.shape.kv_heads, -1))[:, :, :, 0].float()
        first = 0 if self.vote == "softmax_all" else voting.first
        logits = grouped @ keys[:, :, first:].float().transpose(2, 3) * self.shape.scaling
        if self.vote == "softmax_all":
            resident = _ascending(self._resident(layer))
            absent = (resident == NO_TOKEN)[:, :, None, : logits.shape[3]]
            logits = logits.masked_fill(absent, -torch.inf).softmax(dim=-1)
        slots = (voting.slots - first).clamp(min=0)[:, :, None].expand(-1, -1, self.shape.group, -1)
        of_older, absent = logits.gather(3, slots), (voting.ids == NO_TOKEN)[:, :, None]
        if self.vote == "softmax_l2":
            of_older = of_older.masked_fill(absent, -torch.inf).softmax(dim=-1)
        voting.votes += of_older.masked_fill(absent, 0).sum(dim=2)

    def _compress(self, layer: int) -> None:
        """Keep L1, the share alpha of L2 with most votes, what was retrieved (if it moves), and L3."""
        voting, length = self.voting.pop(layer), self.view.lengths(layer)
        kept = voting.best(self.alpha, self.vote_kernel)
        window = self._range([end - self.window for end in length], length)
        parts = [kept, window]
        if self.moves and layer in self.retrievers:
            retriever = self.retrievers[layer]
            found = retriever.latest(self.steps)
            if found is not None:
                parts.append(found.tokens)
            else:
                self.log.late += 1
        self.retained[layer] = torch.cat(parts, dim=2)
        self._keep(layer, torch.cat([self.prompt_ids[layer], self.retained[layer]], dim=2))

    # -- what is where ---------------------------------------------------------------------------------------------

    def _range(self, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
        """Tokens first[b] .. last[b] - 1 of each row, [B, Hkv, M] with trailing -1."""
        rows = list(zip(first, last, strict=True))
        if len(set(rows)) == 1:
            return torch.arange(*rows[0], device=self.shape.device).expand(self.shape.batch, self.shape.kv_heads, -1)
        return _stacked([torch.arange(*row, device=self.shape.device).expand(self.shape.kv_heads, -1) for row in rows])

    def _resident(self, layer: int) -> torch.Tensor:
        """Tokens whose home is the device, the current one included, [B, Hkv, M] with trailing -1."""
        newer = self._range(self.since[layer], self.view.lengths(layer))
        return _packed(torch.cat([newer, self.held[layer]], dim=2))

    def _within(self, row: int, length: int) -> bool:
        """A row of `length` tokens fits its budget whole."""
        return self._capacity(self.shape.lengths[row]) >= length

    def _of_long_rows(self, layer: int, rolling: torch.Tensor) -> torch.Tensor:
        """What the compressor selected [B, Hkv, M], and all of the rows that fit their budget."""
        lengths = self.view.lengths(layer)
        rows = [
            torch.arange(length, device=own.device).expand(len(own), -1) if self._within(row, length) else own
            for row, (length, own) in enumerate(zip(lengths, rolling, strict=True))
        ]
        return _stacked(rows)

    # -- budget and report -----------------------------------------------------------------------------------------

    def rule(self, length: int, generated: int) -> int:
        retrieved = share(self.beta, length + generated)
        compressor = self.compressor if self.compresses_prompt else None
        if self.scenario == "liso":
            if compressor is None:
                return length + generated
            if self.budget.counts_generated:
                capacity = self._capacity(length)
                return max(capacity, compressor.rule(length, generated) + capacity - compressor.budget.tokens(length))
            return compressor.rule(length, generated) + retrieved
        prompt = length if compressor is None else compressor.rule(length, 0)
        if self.alpha == 1:
            return prompt + generated

        def linked(number: int) -> int:
            asks = self.moves and number > FIRST_INDEXED
            return share(self.beta, length + number * self.every - self.lag) if asks else 0

        done = (generated - 1) // self.every
        older = retained(done, self.alpha, self.every, self.window, linked)
        return prompt + older + generated - done * self.every + (0 if self.moves else retrieved)

    def _entries(self) -> float:
        """Tokens on the device that the scenario's ratio counts, per KV head and sparse layer."""
        prompt = sum(self.shape.lengths) / self.shape.batch if self.scenario == "silo" else 0.0
        layers = self.shape.sparse_layers
        since = sum(self.view.lengths(layer)[0] - self.since[layer][0] for layer in layers)
        return (sum(self.kept[layer] for layer in layers) + since + sum(self.attended.values())) / len(layers) - prompt

    def report(self) -> dict[str, float]:
        """The measured ratio (`ratio.measured_ratio`), and what became of the searches (`retrieval.Log`)."""
        self.jobs.flush()  # a step that an error ended has not done so, and the audit waits for the jobs
        prompt = 0.0 if self.scenario == "silo" else sum(self.shape.lengths) / self.shape.batch
        return {**measured_ratio(self.entries, prompt + self.steps), **self.log.report()}


@dataclass
class Voting:
    """The votes of one window for the tokens of L2.

    Attributes:
        ids: [B, Hkv, M] ascending, `NO_TOKEN` behind the last.
        slots: their places among the tokens on the device, [B, Hkv, M].
        first: the smallest of these.
        votes: [B, Hkv, M] fp32, summed over queries and group.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    first: int
    votes: torch.Tensor

    @classmethod
    def over(cls, ids: torch.Tensor, resident: torch.Tensor) -> Voting:
        """No votes yet, for `ids` among the tokens on the device, both ascending."""
        slots = torch.searchsorted(resident, ids).clamp(max=resident.shape[2] - 1)
        return cls(ids, slots, int(slots.min()), torch.zeros(ids.shape, device=ids.device))

    def best(self, alpha: float, kernel: int) -> torch.Tensor:
        """The share alpha of each head's tokens with most votes, smoothed by mean pooling: [B, Hkv, M], -1 = none."""
        smoothed = avg_pool1d(self.votes, kernel, stride=1, padding=kernel // 2)
        ranked = smoothed.masked_fill(self.ids == NO_TOKEN, -torch.inf).argsort(dim=2, descending=True, stable=True)
        sizes = (self.ids != NO_TOKEN).sum(dim=2).tolist()
        counts = torch.tensor([[share(alpha, size) for size in heads] for heads in sizes], device=ranked.device)
        chosen = torch.arange(ranked.shape[2], device=ranked.device) < counts[..., None]
        return torch.where(chosen, self.ids.gather(2, ranked), -1)[:, :, : int(counts.max())]


def _ascending(ids: torch.Tensor) -> torch.Tensor:
    """Ids [B, H, M], -1 = none, in ascending order with `NO_TOKEN` behind the last."""
    return torch.where(ids < 0, NO_TOKEN, ids).sort(dim=2).values


def _packed(ids: torch.Tensor) -> torch.Tensor:
    """Ids [B, H, M] with every -1 at the end, the others in their order."""
    if not ids.is_cuda and bool((ids >= 0).all()):
        return ids
    return ids.gather(2, (ids < 0).to(torch.int8).argsort(dim=2, stable=True))


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [Hkv, M] as one [B, Hkv, longest] tensor, trailing -1."""
    longest = max(row.shape[1] for row in rows)
    return torch.stack([pad(row, (0, longest - row.shape[1]), value=-1) for row in rows])
