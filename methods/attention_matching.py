"""Attention Matching (Zweiger et al. 2026, "Fast KV Compaction via Attention Matching", section 3;
the code's `AM-HighestAttnKeys` with the queries of the whole model, not of one whose lower layers
are compacted already).

A few keys of each head stand for all: they are chosen, get weights with which they take as much
attention as all took, and then values with which the outputs come near. All three are fitted to
reference queries, once, after the prompt.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Replay, Selection, Shape, View, capped
from methods.blocks.one_ranking import check_context
from methods.blocks.ragged import stacked
from methods.blocks.scorer import ROLLING_WINDOW, Scorer, scored_weights

ASK = "Repeat the previous context verbatim."  # as published
BLOCK = 1024  # queries whose attention is computed at once
CUT = 1e-8  # singular values below this share of the largest are the rounding of float32 logits
LIMITS = -3.0, 3.0  # of a weight's logarithm
# of the projected gradient, and of the power iteration that says how long they are
STEPS, POWERS = 2, 3


@dataclass(eq=False)
class AttentionMatching(Scorer):
    """Attend C prompt keys of each head, with weights and values that are not theirs; generated
    tokens as they are.

    The tokens before the context stay as they are, inside C; where generated tokens count, the most
    recent ones, too.

    Parameters
    ----------
    queries
        for which the attention shall stay what it was: the context's own, or those of a replay, in
        which the model repeats it.
    most
        reference queries of a KV head; of more, these are drawn.
    """

    queries: Literal["context", "replay"] = "context"
    most: int = 50000

    def __post_init__(self) -> None:
        self.needs = Needs(prefix=True, writes=True, host_step=False)
        if self.queries == "context":
            self.needs = replace(self.needs, query_window=sys.maxsize)
        else:
            self.needs = replace(self.needs, replay=Replay(None, ASK))

    @property
    def at_rest(self) -> bool:
        """What is held is attended with weights."""
        return False

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Nothing is matched yet."""
        super().begin(shape, budget, view, context)
        # logarithms for what is in `scored`, [B, Hkv, n]
        self.weights: dict[int, torch.Tensor] = {}

    # -- prompt ------------------------------------------------------------------------------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Choose and weigh keys, and write their values.

        Raises
        ------
        ValueError
            there is no context, or no room for any of it.
        """
        rows = [self._match_row(layer, row, prompt) for row in range(len(prompt.lengths))]
        longest = max(row.ids.shape[1] for row in rows)
        most = max(row.values.shape[1] for row in rows)
        self.scored[layer] = [row.ids for row in rows]
        self.weights[layer] = torch.stack(
            [pad(row.weights, (0, longest - row.weights.shape[1])) for row in rows]
        )
        if most:
            self.view.keep(
                layer,
                self._attended(layer),
                ROLLING_WINDOW if self.budget.counts_generated else None,
            )
            chosen = stacked([row.ids[:, row.ids.shape[1] - row.values.shape[1] :] for row in rows])
            values = [pad(row.values, (0, 0, 0, most - row.values.shape[1])) for row in rows]
            self.view.write(layer, chosen, torch.stack(values))

    def _match_row(self, layer: int, row: int, prompt: Prompt) -> Matched:
        """Of a row, what it keeps but for the most recent tokens: first what stays as it is, then
        the chosen keys.
        """
        length, before = prompt.lengths[row], prompt.prefixes[row]
        capacity = self.capacities[row]
        check_context(length, before, capacity, self.fixed(capacity) - self.end(capacity))
        position = torch.arange(length, device=prompt.keys.device)
        stays = self.protected(prompt)[row, 0, :length] | (position < before) | (length <= capacity)
        first, last = self.recents[row]
        fixed_ids = position[stays & ((position < first) | (position >= last))]
        fixed_ids = fixed_ids.expand(self.shape.kv_heads, -1)
        choice = position[~stays]
        nothing = torch.zeros(fixed_ids.shape, device=fixed_ids.device)
        if not len(choice):
            return Matched(fixed_ids, nothing, prompt.values[row, :, :0])
        queries = self._reference_queries(layer, row, prompt)
        count = capacity - int(stays.sum())
        keys, values = prompt.keys[row, :, choice], prompt.values[row, :, choice]
        heads = [
            matched(*parts, count, self.shape.scaling, self.shape.softcap)
            for parts in zip(queries, keys, values, strict=True)
        ]
        best = Matched(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
        return Matched(
            torch.cat([fixed_ids, choice[best.ids]], dim=1),
            torch.cat([nothing, best.weights], dim=1),
            best.values,
        )

    def _reference_queries(self, layer: int, row: int, prompt: Prompt) -> torch.Tensor:
        """Reference queries of each KV head, those of its group one after the other,
        [Hkv, n, D].
        """
        if self.queries == "replay":
            queries = torch.cat(
                [replay.queries for replay in prompt.replayed if replay.row == row], dim=1
            )
        else:
            context = prompt.lengths[row] - prompt.prefixes[row]
            queries = prompt.queries[row, :, prompt.queries.shape[2] - context :]
        grouped = queries.unflatten(0, (self.shape.kv_heads, -1)).flatten(1, 2)
        if grouped.shape[1] <= self.most:
            return grouped
        drawn = torch.randperm(grouped.shape[1], generator=self.context.generator(layer, row=row))
        return grouped[:, drawn[: self.most].to(grouped.device)]

    # -- decode ------------------------------------------------------------------------------------

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """What is held, with the weights of the chosen keys; the newest tokens come first and have
        none.
        """
        index = self._attended(layer)
        _, *newest = self._lists(layer)
        log_weights = scored_weights(self.weights[layer], *newest, self.shape.group, index.shape[2])
        return Selection(index, log_weight=log_weights)

    def turn_weights(self, layer: int) -> torch.Tensor:
        """Those of the chosen keys, in a later turn too."""
        resident, scored = self.view.resident(layer), stacked(self.scored[layer])
        tokens = max(self.view.lengths(layer)) + 1  # the last is none
        every = self.weights[layer].new_zeros(*scored.shape[:2], tokens)
        every.scatter_(2, scored.remainder(every.shape[2]), self.weights[layer])
        return every.gather(2, resident.remainder(every.shape[2]))


class Matched(NamedTuple):
    """Keys that stand for all of a head: their ids [n], logarithms of their weights [n], and their
    values [n, D].
    """

    ids: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor


def matched(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    count: int,
    scaling: float,
    softcap: float | None = None,
) -> Matched:
    """Few keys, with whose weights and values the attention of the queries is near what it was.

    Parameters
    ----------
    queries
        [n, D].
    keys, values
        [N, D], all of which every query attends.
    count
        keys to choose, best first: those with the largest root mean square of the attention they
        get.
    """
    asking = queries.float() * scaling
    keys, values = keys.float(), values.float()
    squares = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    # of each query: its largest logit, the sum of its weights, and its output
    largest, mass = squares.new_empty(2, len(asking), 1)
    outputs = squares.new_empty(len(asking), values.shape[1])
    for first in range(0, len(asking), BLOCK):
        block = slice(first, first + BLOCK)
        attention = capped(asking[block] @ keys.T, softcap)  # in place, as it is large
        peak = attention.amax(dim=-1, keepdim=True)
        total = attention.sub_(peak).exp_().sum(dim=-1, keepdim=True)
        largest[block], mass[block] = peak, total
        outputs[block] = attention.div_(total) @ values
        squares += attention.square_().sum(dim=0)
    ids = squares.argsort(descending=True, stable=True)[:count]
    # a row's largest logit over all keys is 0, so that a query whose attention is spread over many
    # counts most
    logits = capped(asking @ keys[ids].T, softcap).double() - largest
    sums = logits.exp()
    weights = projected(sums, mass, solved(sums, mass))[:, 0].log()
    attention = (logits + weights).softmax(dim=-1)
    return Matched(ids, weights.float(), solved(attention, outputs))


def projected(matrix: torch.Tensor, target: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Nearer to the least squares of matrix @ x = target, inside the limits of a weight, from x =
    start on.
    """
    least, most = (torch.tensor(limit).exp().item() for limit in LIMITS)
    # published: at random; the matrix is positive, as this is
    towards = matrix.new_ones(matrix.shape[1], 1)
    for _ in range(POWERS):
        towards = matrix.T @ (matrix @ towards)
        towards = towards / towards.norm()
    step, weights = 1 / (matrix @ towards).square().sum(), start.clamp(least, most)
    for _ in range(STEPS):
        weights = (weights - step * (matrix.T @ (matrix @ weights - target))).clamp(least, most)
    return weights


def solved(matrix: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The shortest x with the least squares of matrix @ x = target, [n, t] and [n, m], in float64.

    Keys that are alike make columns that nearly are: by QR and the singular values of its triangle,
    as products of the matrix with itself would square these.
    """
    columns = matrix.shape[1]
    triangle = torch.linalg.qr(torch.cat([matrix, target], dim=1), mode="r").R[:columns]
    svd = torch.linalg.svd(triangle[:, :columns], full_matrices=False)
    rank = int((CUT * svd.S[0] < svd.S).sum())
    turned = svd.U[:, :rank].mT @ triangle[:, columns:]
    return svd.Vh[:rank].mT @ (turned / svd.S[:rank, None])
