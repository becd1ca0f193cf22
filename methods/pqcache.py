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
from kvbench.method import Context, DeviceCache, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks import code_kernels
from methods.blocks.kmeans import kmeans, nearest_point
from methods.blocks.ragged import stacked
from methods.blocks.topk import top_earliest

SPARE = 256  # codes to make room for when the last ones have taken what there was


class CacheZones(NamedTuple):
    """Tokens of each kind that one row attends."""

    sinks: int
    recent: int
    retrieved: int


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
            if key.device.type == "cpu":
                parts, table = self._parts(key[row, :, 0]).numpy(), self.tables[layer][row].numpy()
                code_kernels.code(parts, table, codes.numpy()[row, :, :, token])
            else:
                codes[row, :, :, token] = self._coded(layer, row, self._cut(key[row]))[:, :, 0]

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
        always = torch.cat([torch.arange(sinks), torch.arange(start, length)]).to(query.device)
        always = always.expand(self.shape.kv_heads, -1)
        if start == sinks or not zones.retrieved:
            return always
        probabilities = self._estimated(layer, row, query, sinks, start)
        best = top_earliest(probabilities[None], zones.retrieved)[0]
        return torch.cat([always, best + sinks], dim=1)

    def _estimated(
        self, layer: int, row: int, query: torch.Tensor, first: int, stop: int
    ) -> torch.Tensor:
        """Estimated attention among the tokens `first` to `stop` - 1, summed over the group: [Hkv,
        n].
        """
        table, codes = self.tables[layer][row], self.codes[layer]
        grouped = query.float().view(self.shape.kv_heads, self.shape.group, self.subspaces, -1)
        if query.device.type == "cpu":
            attention = torch.empty(self.shape.kv_heads, stop - first)
            arrays = grouped.numpy(), table.numpy(), codes.numpy()
            code_kernels.attention(*arrays, row, first, self.shape.scaling, attention.numpy())
            return attention
        products = grouped.transpose(1, 2) @ table.transpose(2, 3)  # [Hkv, m, G, K]
        centroids = codes[row, :, :, first:stop].long()[:, :, None]
        logits = products.gather(3, centroids.expand(-1, -1, self.shape.group, -1)).sum(dim=1)
        logits = logits * self.shape.scaling
        return logits.softmax(dim=2).sum(dim=1)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, the sinks and the current token; C alone where generated tokens count."""
        capacity = self.budget.tokens(length)
        return capacity if self.budget.counts_generated else capacity + self.sinks + 1
