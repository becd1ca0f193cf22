"""ThinK: keys with fewer channels (Xu et al. 2024, "ThinK: Thinner Key Cache by Query-Driven
Pruning", section 3).

SnapKV cuts the prompt to C tokens. Of those that stay each KV head drops the key channels that
matter least to the last queries: a logit is a sum over channels, and some add next to nothing to
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.snapkv import SnapKV

QUERIES = 32  # last queries of the prompt that weigh the channels


@dataclass(eq=False)
class ThinK(SnapKV):
    """SnapKV, and the keys of what stays of the prompt, its last `whole` tokens aside, lose a share
    of their channels.

    A channel is dropped by setting it to 0, which gives the same logits as a store without it;
    memory is that of whole keys. `key_channels` of a run says which share of the prompt's keys such
    a store would hold. A prompt of C tokens or fewer stays whole, channels too. The channels are a
    KV head's, by the mean over its query heads, as in kvpress; the published code repeats the keys
    and drops channels for each query head.

    Parameters
    ----------
    channels
        share of the channels that is dropped, lambda.
    whole
        last tokens of the prompt whose keys stay whole.
    """

    channels: float = 0.4
    whole: int = 32

    def __post_init__(self) -> None:
        self.needs = Needs(query_window=max(self.window, QUERIES), writes=True)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle which rows are cut; their channels follow."""
        super().begin(shape, budget, view, context)
        self.dropped = int(self.channels * shape.head_dim)
        self.cut = [
            length > capacity
            for length, capacity in zip(shape.lengths, self.capacities, strict=True)
        ]
        self.channel_shares: list[float] = []  # of each layer, the share of its keys' channels

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Cut the prompt, and then the keys that are left."""
        last = prompt.queries[:, :, -QUERIES:]
        super().prefill(layer, prompt)
        if not any(self.cut) or not self.dropped:
            return
        ids = self.view.resident(layer)
        keys, pruned = self.view.keys(layer, ids).clone(), torch.full_like(ids, -1)
        for row, length in enumerate(self.shape.lengths):
            if not self.cut[row]:
                continue
            pruned[row] = torch.where(ids[row] < length - self.whole, ids[row], -1)
            present = (ids[row] >= 0)[..., None]
            row_keys = keys[row].float().masked_fill(~present, 0)
            queries = last[row, :, -length:].unflatten(0, (len(row_keys), -1))
            weakest = weakest_channels(queries, row_keys, self.dropped)
            keys[row].scatter_(2, weakest[:, None].expand(-1, keys.shape[2], -1), 0)
        self.view.write(layer, pruned, keys=keys)
        gone = (pruned >= 0).sum() * self.dropped / self.shape.head_dim
        self.channel_shares.append(1 - float(gone / (ids >= 0).sum()))

    def report(self) -> dict[str, float]:
        """The share of the channels of the prompt's keys that are not dropped."""
        if not self.channel_shares:
            return {}
        return {"key_channels": sum(self.channel_shares) / len(self.channel_shares)}


def weakest_channels(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """The channels with the smallest mean of q^2 times mean of k^2, [H, count].

    Parameters
    ----------
    queries
        [H, G, W, D], the last ones.
    keys
        [H, n, D], zero where there is none.
    """
    weight = queries.float().square().mean(dim=(1, 2)) * keys.float().square().sum(dim=1)
    return weight.argsort(dim=1, stable=True)[:, :count]
