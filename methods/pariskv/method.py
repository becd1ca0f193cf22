"""ParisKV (ICML 2026, arXiv 2602.07721): sign patterns that collide with the query's vote, 4-bit
codes rerank.

The past of a sequence has four zones: sink tokens at its beginning, the local window and the update
buffer at its end, and the retrieval zone between. Keys and values live on the host; of the zone's
keys the device holds codes (`codebook.py`). A step attends sinks, window and buffer whole, and of
the zone the k tokens whose estimated q.k is largest among those with most votes. A full buffer is
encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.ragged import stacked
from methods.pariskv.adaptive import enough
from methods.pariskv.codebook import Quotas, quotas, random_signs
from methods.pariskv.index import KERNELS, Index, KernelIndex, VectorIndex

# A budget of so many tokens or more has the sizes of the published runs at equal budgets; a smaller
# one, shares of it.
ALIGNED = 420
ALIGNED_SINKS, ALIGNED_LOCAL = 64, 256
ALIGNED_UPDATE = 512
SPARE_NORMS = 256  # room for tokens to come that is added at once


@dataclass(frozen=True)
class Zones:
    """How the past of one row is divided.

    Attributes
    ----------
    sinks
        first tokens, always attended.
    local
        most recent tokens that are always attended, the buffer's not among them.
    update
        generated tokens that are encoded together; up to update - 1 wait in the buffer and are
        attended.
    k
        tokens retrieved from the zone; with theta, at most.
    dense
        a sequence of up to so many tokens is attended whole.
    """

    sinks: int
    local: int
    update: int
    k: int
    dense: int

    def waiting(self, length: int, zone: int) -> int:
        """Tokens after a zone of `zone` tokens and the local window, in a sequence of `length`;
        negative: none.
        """
        return length - self.sinks - zone - self.local

    @property
    def most(self) -> int:
        """Entries attended at most."""
        return max(self.dense, self.sinks + self.local + self.update - 1 + self.k)


@dataclass(frozen=True)
class ParisKVOptions:
    """All options of the method."""

    # of runs without a budget, see `Zones`
    sinks: int = 4
    local: int = 512
    update: int = 512
    k: int = 100
    # such runs attend a shorter sequence whole, and any below sinks + local + 2 k
    dense_below: int = 2000

    beta: float | None = None  # this, rho and tiers: see `codebook.quotas`
    rho: float | None = None
    tiers: Literal[1, 6] = 6
    # None: k tokens; a share: as many as hold it, see `adaptive.enough`; k is the most
    theta: float | None = None
    k_min: int = 100  # the least then
    # C++ (on the CPU): where keys are computed on the CPU
    compute: Literal["auto", "torch", "compiled"] = "auto"

    def zones(self) -> Zones:
        """Of a row in a run without a budget."""
        dense = max(self.dense_below, self.sinks + self.local + 2 * self.k) - 1
        return Zones(self.sinks, self.local, self.update, self.k, dense)


class ParisKV(Method):
    """Attend sinks, local window, update buffer and the k tokens of the retrieval zone that score
    best.

    A budget C sets sinks + local + k, and the buffer is outside; where generated tokens count
    (unified accounting, or generated=counted), the buffer is inside. Without a budget the sizes are
    those of its options.
    """

    needs = Needs(home="host")
    options_type = ParisKVOptions

    def __init__(self, options: ParisKVOptions) -> None:
        self.options = options

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Divide each row into zones, and draw the signs of the rotation."""
        super().begin(shape, budget, view, context)
        self.zones = [self._zones(length) for length in shape.lengths]
        compute = self.options.compute
        is_there = shape.device.type == "cpu" and KERNELS.why_missing is None
        self.on_cpu = compute == "compiled" or (compute == "auto" and is_there)
        signs = random_signs(shape.head_dim, context.seed)
        self.signs = shape.for_layers(signs)
        if self.on_cpu:
            self.signs = dict.fromkeys(range(shape.layers), signs)
        self.index: dict[int, Index] = {}
        # of each device, what the layers' searches ask for
        self.asks: dict[torch.device, dict[Any, torch.Tensor]] = {}
        self.norms: dict[int, torch.Tensor] = {}  # with theta: [B, Hkv, capacity], of the values
        # of each row and device, for which length and end
        self.whole: dict[tuple[int, torch.device], tuple[tuple[int, int], torch.Tensor]] = {}
        self.searches = self.candidates = 0  # of one row in one layer at one step; in all
        self.retrieved = 0.0

    def _zones(self, length: int) -> Zones:
        """The zones of a row whose prompt has `length` tokens."""
        if self.budget.size is None:
            return self.options.zones()
        capacity = self.budget.tokens(length)
        counted = self.budget.counts_generated
        if capacity >= ALIGNED and not counted:
            k = capacity - ALIGNED_SINKS - ALIGNED_LOCAL
            return Zones(ALIGNED_SINKS, ALIGNED_LOCAL, ALIGNED_UPDATE, max(1, k), capacity)
        sinks, local = capacity // 16, capacity // 4
        update = max(1, local)
        k = capacity - sinks - local - (update if counted else 0)
        return Zones(sinks, local, update, max(1, k), capacity)

    def _new_index(self, layer: int) -> Index:
        sizes = self.shape.batch, self.shape.kv_heads, self.signs[layer]
        begins = [zones.sinks for zones in self.zones]
        if self.on_cpu:
            return KernelIndex(*sizes, self.context.pool, begins)
        asks = self.asks.setdefault(self.signs[layer].device, {})
        return VectorIndex(*sizes, begins, self.context.new_tokens, asks)

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Encode the prompt's tokens between sinks and window."""
        self.index[layer] = self._new_index(layer)
        if self.options.theta is not None:
            self.norms[layer] = prompt.values.float().norm(dim=3)
        for row, (zones, length) in enumerate(zip(self.zones, prompt.lengths, strict=True)):
            keys = prompt.keys[row, :, zones.sinks : max(zones.sinks, length - zones.local)]
            self._extend(layer, row, keys)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Encode the oldest of window and buffer once the new token has filled the buffer."""
        index = self.index[layer]
        if self.options.theta is not None:
            self._note(layer, value)
        for row, length in enumerate(self.view.lengths(layer)):
            zones = self.zones[row]
            if zones.waiting(length, index.lengths[row]) >= zones.update:
                first = zones.sinks + index.lengths[row]
                keys = self.view.host_keys(layer)[row, :, first : first + zones.update]
                self.view.count_read(layer, keys.shape[0] * keys.shape[1])
                if first + zones.update == length:  # from a GPU the current token is not there yet
                    keys = torch.cat([keys[:, :-1], key[row].to(keys.device, keys.dtype)], dim=1)
                self._extend(layer, row, keys)

    def _extend(self, layer: int, row: int, keys: torch.Tensor) -> None:
        try:
            self.index[layer].extend(row, keys)
        except ValueError as error:
            raise FloatingPointError(f"layer {layer}: {error}") from error

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Sinks, window, buffer, and the k tokens that a search of the retrieval zone finds."""
        row_quotas = self._quotas(layer)
        self.searches += len(row_quotas)
        self.candidates += sum(quota.candidates for quota in row_quotas.values())
        grouped = query[:, :, 0].unflatten(1, (self.shape.kv_heads, -1))
        with self.context.spans("query"):
            retrieved = self._retrieved(layer, grouped, row_quotas)
        rows = [self._attended(layer, row, retrieved.get(row)) for row in range(self.shape.batch)]
        return Selection(stacked(rows))

    def _quotas(self, layer: int) -> dict[int, Quotas]:
        """How far a search goes, of each row that has one."""
        options, rows = self.options, {}
        zone_lengths = self.index[layer].lengths
        for row, length in enumerate(self.view.lengths(layer)):
            zones, zone = self.zones[row], zone_lengths[row]
            if length > zones.dense and zone > zones.k:
                rows[row] = quotas(zone, zones.k, options.beta, options.rho, options.tiers)
        return rows

    def _retrieved(
        self, layer: int, grouped: torch.Tensor, row_quotas: dict[int, Quotas]
    ) -> dict[int, torch.Tensor]:
        """What searches of these rows find for queries [B, Hkv, G, D]: tokens [Hkv, k] each."""
        index = self.index[layer]
        if self.options.theta is None:
            self.retrieved += sum(quota.retrieved for quota in row_quotas.values())
            return index.search(grouped, row_quotas)
        all_candidates = {
            row: replace(quota, retrieved=quota.candidates) for row, quota in row_quotas.items()
        }
        return {
            row: self._enough(layer, row, grouped[row], *ranked)
            for row, ranked in index.ranked(grouped, all_candidates).items()
        }

    def _note(self, layer: int, value: torch.Tensor) -> None:
        """Add the norms of the current tokens' values, [B, Hkv, 1, D]."""
        norms, lengths = self.norms[layer], self.view.lengths(layer)
        if max(lengths) > norms.shape[2]:
            self.norms[layer] = norms = pad(norms, (0, SPARE_NORMS))
        for row, length in enumerate(lengths):
            norms[row, :, length - 1] = value[row, :, 0].float().norm(dim=1)

    def _enough(
        self,
        layer: int,
        row: int,
        queries: torch.Tensor,
        tokens: torch.Tensor,
        estimates: torch.Tensor,
    ) -> torch.Tensor:
        """Of candidates [Hkv, C] of a row's zone, as many as its KV heads need for `theta`, [Hkv,
        k], trailing -1.

        Parameters
        ----------
        queries
            [Hkv, G, D].
        estimates
            [Hkv, C], of the products of the group's mean query.
        """
        theta, shape = self.options.theta, self.shape
        assert theta is not None
        most = min(self.zones[row].k, tokens.shape[1])
        least = min(self.options.k_min, most)
        norms = self.norms[layer][row].to(tokens.device)
        always = self._always(layer, row)[0]
        keys = self._keys(layer, row, always)
        if self.on_cpu:
            best = torch.empty(len(tokens), most, dtype=torch.int64)
            parts = (keys, queries.float().cpu(), norms, always, tokens, estimates)
            arrays = [part.contiguous() for part in parts]
            factors = float(shape.scaling), float(shape.softcap or 0)
            count = KERNELS.write_enough(*arrays, *factors, float(theta), least, best)
            self.retrieved += count / len(tokens)
            return best
        mean = queries.float().mean(dim=1).to(keys.device)
        logits = shape.logits((keys @ mean[..., None]).squeeze(2).to(tokens.device))
        candidate_norms = norms.gather(1, tokens.clamp(min=0))
        order, counts = enough(
            logits, norms[:, always], shape.logits(estimates), candidate_norms, theta, most
        )
        counts = counts.clamp(min=least, max=most)
        self.retrieved += float(counts.sum()) / len(tokens)
        beyond = torch.arange(most, device=counts.device) >= counts
        return tokens.gather(1, order).masked_fill(beyond, -1)

    def _keys(self, layer: int, row: int, tokens: torch.Tensor) -> torch.Tensor:
        """Keys [Hkv, n, D] fp32 of tokens [n] of a row."""
        ids = torch.full((self.shape.batch, 1, len(tokens)), -1, device=tokens.device)
        ids[row] = tokens
        return self.view.keys(layer, ids)[row].float()

    def _attended(self, layer: int, row: int, retrieved: torch.Tensor | None) -> torch.Tensor:
        """What a row's KV heads attend, [Hkv, M]: buffer, window, sinks and tokens of the zone;
        None: everything.

        It lies where the index does: one on the CPU does not wait for a GPU to hear of it.
        """
        heads = self.shape.kv_heads
        if retrieved is None:
            length = self.view.lengths(layer)[row]
            return self._whole(layer, row, length, 0, 0).expand(heads, -1)
        return torch.cat([self._always(layer, row).expand(heads, -1), retrieved], dim=1)

    def _always(self, layer: int, row: int) -> torch.Tensor:
        """[1, n] buffer, window and sinks of a row."""
        sinks = self.zones[row].sinks
        end = sinks + self.index[layer].lengths[row]
        return self._whole(layer, row, self.view.lengths(layer)[row], end, sinks)

    def _whole(self, layer: int, row: int, length: int, end: int, sinks: int) -> torch.Tensor:
        """[1, n] the tokens from `end` on, newest first, and the sinks; the same in all layers of a
        device.
        """
        device = self.signs[layer].device
        cached_span, whole = self.whole.get((row, device), ((0, 0), torch.empty(0)))
        if cached_span != (length, end):
            recent = torch.arange(length - 1, end - 1, -1, device=device)
            whole = torch.cat([recent, torch.arange(sinks, device=device)])[None]
            self.whole[row, device] = (length, end), whole
        return whole

    def report(self) -> dict[str, float]:
        """Mean tokens reranked and retrieved by a search of a row's zone; {} where all was attended
        whole.
        """
        if not self.searches:
            return {}
        return {
            "candidates": self.candidates / self.searches,
            "retrieved": self.retrieved / self.searches,
        }

    def rule(self, layer: int, length: int, generated: int) -> int:
        """The zones that are attended, the buffer as full as it gets."""
        return self._zones(length).most
