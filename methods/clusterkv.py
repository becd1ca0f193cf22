"""ClusterKV: clusters of similar keys, recalled token by token (Liu et al. 2025, "ClusterKV:
Manipulating LLM KV Cache in Semantic Space for Recallable Compression", sections 3 and 4).

The prompt's keys are clustered by their cosines. A query ranks the clusters by the products with
their mean keys, and attends the tokens of the best, the last of them cut, until the budget is full.
Keys and values live on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize, pad

from kvbench.budget import Budget
from kvbench.kernels.operators import operator
from kvbench.method import Context, DeviceCache, Method, Needs, Prompt, Selection, Shape, View
from methods.blocks.kmeans import kmeans, lists_of, nearest
from methods.blocks.products import products
from methods.blocks.ragged import entries, stacked
from methods.blocks.recent import BothEnds
from methods.blocks.topk import interleave, top_earliest

TOKENS_PER_NEW_CLUSTER = 40  # 8 clusters of 320 generated tokens, as in the published kernels


@dataclass
class Clusters:
    """The clusters of one row, in every KV head.

    Attributes
    ----------
    means
        [Hkv, K, D] fp32, the mean key of each.
    starts, sizes
        [Hkv, K], where the members of each begin, and how many there are.
    members
        [Hkv, n] token ids.
    """

    means: torch.Tensor
    starts: torch.Tensor
    sizes: torch.Tensor
    members: torch.Tensor

    def with_more(self, other: Clusters) -> Clusters:
        """These clusters, and those of other tokens after them."""
        return Clusters(
            torch.cat([self.means, other.means], dim=1),
            torch.cat([self.starts, other.starts + self.members.shape[1]], dim=1),
            torch.cat([self.sizes, other.sizes], dim=1),
            torch.cat([self.members, other.members], dim=1),
        )


def cosine_kmeans(
    keys: torch.Tensor, count: int, first: int, iterations: int, generator: torch.Generator
) -> Clusters:
    """Cluster keys by their cosines with the clusters' means, beginning from keys drawn without
    repeats.

    Parameters
    ----------
    keys
        [Hkv, n, D], of the tokens `first` to `first` + n - 1.
    count
        clusters, as far as there are keys.
    """
    if not keys.shape[1]:
        none = torch.zeros(len(keys), 0, dtype=torch.int64, device=keys.device)
        return Clusters(keys.float(), none, none, none)
    means, assigned = kmeans(keys.float(), count, iterations, generator, nearest_direction)
    members, starts = lists_of(assigned, means.shape[1])
    return Clusters(means, starts[:, :-1], starts.diff(dim=1), members + first)


def nearest_direction(keys: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The mean [Hkv, K, D] with the largest cosine for each of the keys [Hkv, n, D]: [Hkv, n]."""
    return nearest(keys, normalize(means, dim=2))


def best_members(
    query: torch.Tensor,
    means: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    members: torch.Tensor,
    room: int,
) -> torch.Tensor:
    """The `room` tokens, or all, of the clusters with the largest products for each query [Hq, D]:
    [Hq, n], trailing -1.

    Parameters
    ----------
    means, starts, sizes, members
        of `Clusters`.
    """
    heads, clusters = sizes.shape
    scores = products(query[None, :, None], means[None])[0]
    # so that all are ranked
    scores = scores.nan_to_num(torch.inf, torch.inf, torch.finfo(scores.dtype).min)
    order = top_earliest(scores, clusters).view(heads, -1)
    first, count = (part.gather(1, order).view(-1, clusters) for part in (starts, sizes))
    indexes, _ = entries(first, count, room)
    tokens = members.gather(1, indexes.clamp(min=0).view(heads, -1)).view_as(indexes)
    return tokens.masked_fill(indexes < 0, -1)


@operator("methods.blocks.gpu.clusters")
def cluster_tokens(
    query: torch.Tensor,
    means: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    members: torch.Tensor,
    room: int,
) -> torch.Tensor:
    """`best_members`, [Hq, room] however many there are."""
    best = best_members(query, means, starts, sizes, members, room)
    return pad(best, (0, room - best.shape[1]), value=-1)


@dataclass(eq=False)
class ClusterKV(Method):
    """Attend the first tokens, the tokens of the best clusters, and the generated tokens that are
    in no cluster yet.

    Each query head ranks clusters for itself; with unified accounting the group's lists are joined
    by rank and cut. Generated tokens are clustered among themselves when `buffer` of them have
    come.

    Parameters
    ----------
    clusters
        of the prompt, as in the published accuracy code.
    cluster_size
        where given, the prompt has one cluster for so many tokens instead.
    iterations
        of k-means.
    sinks
        first tokens, always attended and inside C; C / 16 where that is less and generated tokens
        count.
    buffer
        generated tokens that wait to be clustered, outside C; where they count inside, and C / 4 if
        that is less.
    cache_steps
        steps whose tokens stay on the device.
    """

    clusters: int = 400
    cluster_size: int | None = None
    iterations: int = 20
    sinks: int = 16
    buffer: int = 320
    cache_steps: int = 1

    def __post_init__(self) -> None:
        self.needs = Needs(home="host", cache=DeviceCache(steps=self.cache_steps))

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Share the budget of each row out; nothing is clustered yet."""
        super().begin(shape, budget, view, context)
        self.zones = [self._zones(capacity) for capacity in self.capacities]
        self.rows: dict[int, list[Clusters]] = {}
        self.ends = BothEnds()
        # keys [Hkv, 1, D] of the generated tokens in no cluster
        self.fresh: dict[int, list[list[torch.Tensor]]] = {}

    def _zones(self, capacity: int) -> tuple[int, int]:
        """Sinks, and generated tokens that wait at most, of a budget of `capacity` tokens."""
        if not self.budget.counts_generated:
            return self.sinks, self.buffer
        return min(self.sinks, capacity // 16), min(self.buffer, capacity // 4)

    # -- index -------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Cluster the keys of each row, the sinks left out."""
        self.rows[layer] = []
        self.fresh[layer] = [[] for _ in prompt.lengths]
        for row, length in enumerate(prompt.lengths):
            sinks = min(self.zones[row][0], length)
            count = self.clusters
            if self.cluster_size:
                count = -(-(length - sinks) // self.cluster_size)
            keys = prompt.keys[row, :, sinks:length]
            generator = self.context.generator(layer, row=row)
            self.rows[layer].append(cosine_kmeans(keys, count, sinks, self.iterations, generator))

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new token waits; a full buffer becomes clusters of its own before that."""
        for row, fresh in enumerate(self.fresh[layer]):
            if len(fresh) == self.zones[row][1]:
                first = self.view.lengths(layer)[row] - 1 - len(fresh)
                count = max(1, len(fresh) // TOKENS_PER_NEW_CLUSTER)
                generator = self.context.generator(layer, row=row)
                clusters = cosine_kmeans(
                    torch.cat(fresh, dim=1), count, first, self.iterations, generator
                )
                self.rows[layer][row] = self.rows[layer][row].with_more(clusters)
                fresh.clear()
            fresh.append(key[row])

    # -- selection ---------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Sinks, the tokens in no cluster, and those of the best clusters."""
        rows = [self._attended(layer, row, asks) for row, asks in enumerate(query[:, :, 0])]
        return Selection(stacked(rows))

    def _attended(self, layer: int, row: int, query: torch.Tensor) -> torch.Tensor:
        """Token ids of a row for query [Hq, D]: [Hq, or Hkv where the group shares C, n]."""
        sinks, _ = self.zones[row]
        length, waiting = self.view.lengths(layer)[row], len(self.fresh[layer][row])
        room = self.capacities[row] - sinks - (waiting if self.budget.counts_generated else 0)
        retrieved = self._best(self.rows[layer][row], query, room)
        if self.budget.unified:
            retrieved = interleave(retrieved[None], self.shape.kv_heads, room)[0]
        ends = min(sinks, self.shape.lengths[row]), length - waiting, length
        always = self.ends.of(row, *ends, retrieved.device)
        return torch.cat([always.expand(retrieved.shape[0], -1), retrieved], dim=1)

    def _best(self, row: Clusters, query: torch.Tensor, room: int) -> torch.Tensor:
        """The `room` tokens, or all, of the clusters with the largest products for each query: [Hq,
        n], trailing -1.
        """
        if not row.sizes.shape[1]:
            return torch.empty(self.shape.query_heads, 0, dtype=torch.int64, device=query.device)
        best = cluster_tokens if query.is_cuda else best_members
        return best(query, row.means, row.starts, row.sizes, row.members, room)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, each query head's own but for the sinks, and a full buffer; with unified
        accounting C.
        """
        capacity = self.budget.tokens(length)
        if self.budget.unified:
            return capacity
        sinks, buffer = self._zones(capacity)
        waiting = 0 if self.budget.counts_generated else buffer
        return sinks + self.shape.group * (capacity - sinks) + waiting
