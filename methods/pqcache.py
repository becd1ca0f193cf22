"""PQCache: product-quantised keys find the tokens to bring up from the host (Zhang et al. 2025,
"PQCache: Product Quantization-based KVCache for Long Context LLM Inference", section 3).

The device holds a short code of every key, and a query's product with a key is looked up by it. The
tokens with the largest estimated attention are attended, beside the first and the most recent ones.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, DeviceCache, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks import code_kernels
from methods.blocks.kmeans import kmeans, nearest_point
from methods.blocks.ragged import stacked
from methods.blocks.topk import top_earliest

SPARE = 256  # codes to make room for when the last ones have taken what there was


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

    def __init__(
        self,
        subspaces: int = 2,
        bits: int = 6,
        iterations: int = 20,
        sinks: int = 32,
        cache: Literal["last", "lru", "lfu"] = "last",
        cache_tokens: int = 4096,
        cache_block: int = 128,
    ) -> None:
        if bits > 8:
            raise ValueError(f"bits={bits}: a code is a byte; expected 8 at most")
        self.needs = Needs(
            home="host", cache=DeviceCache(cache, tokens=cache_tokens, block=cache_block)
        )
        self.subspaces, self.centroids, self.iterations, self.sinks = (
            subspaces,
            2**bits,
            iterations,
            sinks,
        )

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

    def _zones(self, capacity: int) -> tuple[int, int, int]:
        """Sinks, recent and retrieved tokens of a budget of `capacity` tokens."""
        sinks = self.sinks
        if self.budget.counts_generated:
            sinks = min(sinks, capacity // 8)
            capacity -= sinks + 1
        return sinks, capacity // 2, capacity - capacity // 2

    # -- codes -------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Centroids of the keys after the sinks, and the codes of all."""
        batch, heads, count, _ = prompt.keys.shape
        room = count + (self.context.new_tokens or SPARE)
        self.tables[layer] = []
        self.codes[layer] = torch.zeros(
            batch, heads, self.subspaces, room, dtype=torch.uint8, device=prompt.keys.device
        )
        for row, length in enumerate(prompt.lengths):
            vectors = self._cut(prompt.keys[row, :, :length])
            first = min(self.zones[row][0], length - 1)
            generator = self.context.generator(layer, row=row)
            table, _ = kmeans(
                vectors[:, first:], self.centroids, self.iterations, generator, nearest_point
            )
            self.tables[layer].append(table.unflatten(0, (heads, self.subspaces)))
            self.codes[layer][row, :, :, :length] = self._coded(layer, row, vectors)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The codes of the new keys; the centroids stay."""
        tokens = [length - 1 for length in self.view.lengths(layer)]
        codes = self.codes[layer]
        if max(tokens) >= codes.shape[3]:
            codes = self.codes[layer] = torch.nn.functional.pad(codes, (0, SPARE))
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
        return (
            nearest_point(vectors, table.flatten(0, 1)).view(*table.shape[:2], -1).to(torch.uint8)
        )

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Sinks, recent tokens, the current one, and the best of those between."""
        return Selection(
            stacked(
                [self._attended(layer, row, query[row, :, 0]) for row in range(self.shape.batch)]
            )
        )

    def _attended(self, layer: int, row: int, query: torch.Tensor) -> torch.Tensor:
        """Token ids [Hkv, n] of a row for query [Hq, D], trailing -1."""
        sinks, recent, retrieved = self.zones[row]
        length = self.view.lengths(layer)[row]
        start = max(length - 1 - recent, 0)
        sinks = min(sinks, start)
        always = torch.cat([torch.arange(sinks), torch.arange(start, length)]).to(query.device)
        always = always.expand(self.shape.kv_heads, -1)
        if start == sinks or not retrieved:
            return always
        probabilities = self._estimated(layer, row, query, sinks, start)
        return torch.cat([always, top_earliest(probabilities[None], retrieved)[0] + sinks], dim=1)

    def _estimated(
        self, layer: int, row: int, query: torch.Tensor, first: int, stop: int
    ) -> torch.Tensor:
        """Estimated attention among the tokens `first` to `stop` - 1, summed over the group: [Hkv,
        n].
        """
        heads, group, table = self.shape.kv_heads, self.shape.group, self.tables[layer][row]
        grouped = query.float().view(heads, group, self.subspaces, -1)
        if query.device.type == "cpu":
            attention = torch.empty(heads, stop - first)
            arguments = (
                grouped.numpy(),
                table.numpy(),
                self.codes[layer].numpy(),
                row,
                first,
                self.shape.scaling,
            )
            code_kernels.attention(*arguments, attention.numpy())
            return attention
        products = grouped.transpose(1, 2) @ table.transpose(2, 3)  # [Hkv, m, G, K]
        codes = (
            self.codes[layer][row, :, :, first:stop].long()[:, :, None].expand(-1, -1, group, -1)
        )
        logits = products.gather(3, codes).sum(dim=1) * self.shape.scaling
        return logits.softmax(dim=2).sum(dim=1)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, the sinks and the current token; C alone where generated tokens count."""
        capacity = self.budget.tokens(length)
        return capacity if self.budget.counts_generated else capacity + self.sinks + 1
