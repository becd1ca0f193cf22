"""PQCache: product-quantised keys find the tokens to bring up from the host (Zhang et al. 2025,
"PQCache: Product Quantization-based KVCache for Long Context LLM Inference", section 3).

The device holds a short code of every key, and a query's product with a key is looked up by it. The
tokens with the largest estimated attention are attended, beside the first and the most recent ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.kernels.operators import operator
from kvbench.method import (
    Context,
    DeviceCache,
    Method,
    Needs,
    Prompt,
    Selection,
    Shape,
    View,
    capped,
)
from methods.blocks.kernels import KERNELS, is_compiled
from methods.blocks.kmeans import kmeans, nearest_point
from methods.blocks.ragged import stacked
from methods.blocks.recent import BothEnds
from methods.blocks.topk import top_earliest

SPARE = 256  # codes to make room for when the last ones have taken what there was


class CacheZones(NamedTuple):
    """Tokens of each kind that one row attends."""

    sinks: int
    recent: int
    retrieved: int


@operator("methods.blocks.gpu.codes", writes=["codes"])
def code_newest(
    key: torch.Tensor, table: torch.Tensor, codes: torch.Tensor, lengths: torch.Tensor, row: int
) -> None:
    """Write the codes of a row's newest key, of equally near centroids the first.

    Parameters
    ----------
    key
        [B, Hkv, 1, D].
    table, codes, lengths
        as of `coded_tokens`.
    """
    parts = key[row].float().view(-1, 1, table.shape[3])
    near = nearest_point(parts, table.flatten(0, 1)).view(*table.shape[:2], 1)
    token = (lengths[row] - 1).expand_as(near)
    codes[row].scatter_(2, token, near.to(torch.uint8))


@operator("methods.blocks.gpu.codes")
def coded_tokens(
    query: torch.Tensor,
    table: torch.Tensor,
    codes: torch.Tensor,
    lengths: torch.Tensor,
    row: int,
    sinks: int,
    recent: int,
    retrieved: int,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """The tokens of a row with the largest estimated attention, summed over the query group, [Hkv,
    retrieved] ids, best first, trailing -1; of equal ones the earlier.

    Parameters
    ----------
    query
        [Hkv, G, m, w].
    table
        [Hkv, m, K, w] float32, the centroids.
    codes
        [B, Hkv, m, n] uint8, by token id.
    lengths
        [B], of which the row's is the current token's and those before it.
    sinks, recent
        first tokens, and those before the current one, which are not chosen.
    """
    token = torch.arange(codes.shape[3], device=codes.device)
    outside = (token < sinks) | (token >= lengths[row] - 1 - recent)
    products = query.float().transpose(1, 2) @ table.transpose(2, 3)  # [Hkv, m, G, K]
    centroids = codes[row].long()[:, :, None].expand(-1, -1, query.shape[1], -1)
    logits = capped(products.gather(3, centroids).sum(dim=1) * scaling, softcap)
    attention = logits.masked_fill(outside, -torch.inf).softmax(dim=2).sum(dim=1)
    return top_earliest(attention.masked_fill(outside, -torch.inf)[None], retrieved)[0]


@dataclass(eq=False)
class PQCache(Method):
    """Attend sinks, the r most recent tokens before the current one, it, and the k that promise
    most attention.

    r = k = C / 2, as published with shares of the prompt; sinks and the current token are outside
    C. A KV head's query heads choose together: estimated probabilities are summed over the group.

    Parameters
    ----------
    subspaces
        m vectors that a key is cut into, each with a code of its own; a divisor of the head dim.
    bits
        of a code, 8 at most.
    iterations
        of k-means, over the prompt's keys. (The published code takes as many as a prefill leaves
        time for.)
    sinks
        first tokens, always attended; C / 8 where that is less and generated tokens count.
    cache, cache_tokens, cache_block
        what stays on the device, as in `DeviceCache`.

    Raises
    ------
    ValueError
        a code of more than 8 bits; subspaces that do not divide the head dim; a cache of no block.
    """

    subspaces: int = 2
    bits: int = 6
    iterations: int = 20
    sinks: int = 32
    cache: Literal["last", "lru", "lfu"] = "last"
    cache_tokens: int = 4096
    cache_block: int = 128

    def __post_init__(self) -> None:
        if self.bits > 8:
            raise ValueError(f"bits={self.bits}: a code is a byte; expected 8 at most")
        cache = DeviceCache(self.cache, tokens=self.cache_tokens, block=self.cache_block)
        self.needs = Needs(home="host", cache=cache)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Share the budget of each row out; nothing is coded yet."""
        super().begin(shape, budget, view, context)
        if shape.head_dim % self.subspaces:
            raise ValueError(
                f"subspaces={self.subspaces}: expected a divisor of the head dim, {shape.head_dim}"
            )
        self.zones = [self._zones(capacity) for capacity in self.capacities]
        # of each layer and row, centroids [Hkv, m, K, D / m] fp32
        self.tables: dict[int, list[torch.Tensor]] = {}
        self.ends = BothEnds()
        # of each layer, [B, Hkv, m, capacity] uint8, by token id
        self.codes: dict[int, torch.Tensor] = {}

    def _zones(self, capacity: int) -> CacheZones:
        """With a budget of `capacity` tokens."""
        sinks = self.sinks
        if self.budget.counts_generated:
            sinks = min(sinks, capacity // 8)
            capacity -= sinks + 1
        return CacheZones(sinks, capacity // 2, capacity - capacity // 2)

    # -- codes -------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Centroids of the keys after the sinks, and the codes of all."""
        heads = prompt.keys.shape[:2]
        room = prompt.keys.shape[2] + (self.context.new_tokens or SPARE)
        self.tables[layer] = []
        self.codes[layer] = torch.zeros(
            *heads, self.subspaces, room, dtype=torch.uint8, device=prompt.keys.device
        )
        for row, length in enumerate(prompt.lengths):
            vectors = self._cut(prompt.keys[row, :, :length])
            first = min(self.zones[row].sinks, length - 1)
            generator = self.context.generator(layer, row=row)
            table, _ = kmeans(
                vectors[:, first:], 2**self.bits, self.iterations, generator, nearest_point
            )
            self.tables[layer].append(table.unflatten(0, (-1, self.subspaces)))
            self.codes[layer][row, :, :, :length] = self._coded(layer, row, vectors)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The codes of the new keys; the centroids stay."""
        tokens = [length - 1 for length in self.view.lengths(layer)]
        codes = self.codes[layer]
        if max(tokens) >= codes.shape[3]:
            codes = self.codes[layer] = pad(codes, (0, SPARE))
        for row, token in enumerate(tokens):
            table = self.tables[layer][row]
            if not is_compiled(key):
                code_newest(key, table, codes, self.view.seen(layer), row)
            else:
                KERNELS.code(self._parts(key[row, :, 0]), table.contiguous(), codes, row, token)

    def _parts(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors [..., D] as [..., m, D / m] fp32."""
        return vectors.float().contiguous().unflatten(-1, (self.subspaces, -1))

    def _cut(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [Hkv, n, D] as [Hkv * m, n, D / m] fp32."""
        return keys.float().unflatten(2, (self.subspaces, -1)).transpose(1, 2).flatten(0, 1)

    def _coded(self, layer: int, row: int, vectors: torch.Tensor) -> torch.Tensor:
        """Codes [Hkv, m, n] of `_cut` keys."""
        table = self.tables[layer][row]
        codes = nearest_point(vectors, table.flatten(0, 1)).view(*table.shape[:2], -1)
        return codes.to(torch.uint8)

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Sinks, recent tokens, the current one, and the best of those between."""
        rows = [self._attended(layer, row, asks) for row, asks in enumerate(query[:, :, 0])]
        return Selection(stacked(rows))

    def _attended(self, layer: int, row: int, query: torch.Tensor) -> torch.Tensor:
        """Token ids [Hkv, n] of a row for query [Hq, D], trailing -1."""
        zones, length = self.zones[row], self.view.lengths(layer)[row]
        start = max(length - 1 - zones.recent, 0)
        sinks = min(zones.sinks, start)
        always = self.ends.of(row, sinks, start, length, query.device)
        always = always.expand(self.shape.kv_heads, -1)
        if start == sinks or not zones.retrieved:
            return always
        table, codes = self.tables[layer][row], self.codes[layer]
        grouped = query.view(self.shape.kv_heads, self.shape.group, self.subspaces, -1)
        if not is_compiled(query):
            where = table, codes, self.view.seen(layer), row
            best = coded_tokens(grouped, *where, *zones, self.shape.scaling, self.shape.softcap)
            return torch.cat([always, best], dim=1)
        attention = torch.empty(self.shape.kv_heads, start - sinks)
        of_row = table.contiguous(), codes, row, sinks
        logits = float(self.shape.scaling), float(self.shape.softcap or 0)
        KERNELS.coded_attention(grouped.float(), *of_row, *logits, attention)
        best = top_earliest(attention[None], zones.retrieved)[0]
        return torch.cat([always, best + sinks], dim=1)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, the sinks and the current token; C alone where generated tokens count."""
        capacity = self.budget.tokens(length)
        return capacity if self.budget.counts_generated else capacity + self.sinks + 1
