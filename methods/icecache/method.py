"""IceCache (ICLR 2026, sections 3 and 4): semantic pages on the host, found by a DCI tree per layer
and KV head.

The past of a sequence has three regions: sink pages at its beginning, window pages at its end, and
all between them, the indexed tokens, which lie on the host in the order of the tree's pages. A step
attends sinks, window and the pages whose best member has the largest q.k. A page that rolls out of
the window is inserted into the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.icecache.forest import Forest, RefusedError
from methods.icecache.index import DCITree, ExactScan
from methods.icecache.kernels import KERNELS
from methods.icecache.settings import IceCacheOptions
from methods.icecache.tree import Keys, Workspace, as_stored


@dataclass(frozen=True)
class Regions:
    """How the past of one row is divided.

    Attributes
    ----------
    capacity
        the row's budget C in tokens.
    page_size
        tokens of a page, s.
    sinks
        first tokens, always attended.
    window_pages
        pages of s consecutive tokens at the end, always attended; the last is partly filled.
    recalled
        page slots left to the index.
    """

    capacity: int
    page_size: int
    sinks: int
    window_pages: int
    recalled: int

    def window(self, length: int) -> int:
        """The first token of the window of a row with `length` tokens."""
        return max(
            self.sinks, ((length - 1) // self.page_size + 1 - self.window_pages) * self.page_size
        )

    def indexed(self, length: int) -> int:
        """Tokens between sinks and window."""
        return self.window(length) - self.sinks


class IceCache(Method):
    """Attend C / s page slots: the sink pages, the window pages, and the best pages of the tree in
    all others.

    The ranked pages of a group's query heads are joined by rank and cut to the slots. A slot counts
    whole as published, even if its page is not full; with unified accounting entries count, and
    further pages fill what is left of C. A budget of at least the current length attends
    everything.
    """

    needs = Needs(home="host", host_keys=True)
    options_type = IceCacheOptions

    def __init__(self, options: IceCacheOptions) -> None:
        self.options = options
        self.tree = {"dci": DCITree, "exact": ExactScan}[options.index]

    def check_options(self, budget: Budget) -> None:
        """The tree needs a compiler."""
        super().check_options(budget)
        KERNELS.require()

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Divide each row into sinks, index and window, and share the trees out between
        the layers.
        """
        super().begin(shape, budget, view, context)
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"dtype={shape.dtype}: IceCache's index reads float32 or bfloat16 keys"
            )
        self.regions = [self._regions(capacity) for capacity in self.capacities]
        layers = shape.sparse_layers
        reuse = self.options.reuse
        # of each layer the one whose trees it takes; and of each that has some, who takes them
        self.anchor = {layer: layers[at - at % reuse] for at, layer in enumerate(layers)}
        self.followers = {
            layers[at]: layers[at + 1 : at + reuse] for at in range(0, len(layers), reuse)
        }
        self.building: dict[int, list[list[Future[DCITree]]]] = {}
        self.trees: dict[int, list[list[DCITree]]] = {}  # of each anchor, by row and KV head
        self.forests: dict[int, Forest] = {}  # of each anchor, the same trees
        self.memory: dict[int, int] = {}  # where the keys lie that the trees of each anchor read
        self.workspaces = [Workspace() for _ in range(torch.get_num_threads())]

    def __getstate__(self) -> dict[str, Any]:
        """A copy's keys lie elsewhere; its trees are bound to them before they are asked."""
        return {**self.__dict__, "memory": dict.fromkeys(self.memory, 0)}

    def _regions(self, capacity: int) -> Regions:
        options = self.options
        fixed = options.sink_pages + options.window_pages
        large = capacity >= 2 * fixed * options.page_size
        page_size = options.page_size if large else options.small_page_size
        recalled = max(0, capacity // page_size - fixed)
        return Regions(
            capacity, page_size, options.sink_pages * page_size, options.window_pages, recalled
        )

    # -- prefill: the trees of a layer are built while the next layers are computed ----------------

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Have the trees of a layer built in the background, one for each row and KV head."""
        if layer != self.anchor[layer]:
            return
        assert prompt.on_host is not None
        # a build that waits for its turn must not hold the prompt, whose memory on the device is to
        # be freed
        submit, on_host = self.context.pool.submit, prompt.on_host
        rows, heads = range(self.shape.batch), range(self.shape.kv_heads)
        self.building[layer] = [
            [submit(self._build, layer, on_host, row, head) for head in heads] for row in rows
        ]

    def _build(self, layer: int, on_host: Future[Any], row: int, head: int) -> DCITree:
        on_host.result()
        regions = self.regions[row]
        layout = replace(self.options, page_size=regions.page_size)
        # the first generated token may open a page, and another one then leaves the window
        count = regions.indexed(self.shape.lengths[row] + 1)
        keys = self._keys(layer)[row, head, regions.sinks :]
        seed = self.context.layer_seed(layer, row) + head
        try:
            return self.tree(keys, count, layout, seed)
        except ValueError as error:
            raise _not_finite(layer, head, error) from error

    def end_prefill(self) -> None:
        """Wait for the trees, and arrange the host's memory by their pages."""
        for layer, rows in self.building.items():
            self.trees[layer] = [[tree.result() for tree in heads] for heads in rows]
            self.forests[layer] = Forest(self.trees[layer], self.context.pool, self.workspaces)
            self.memory[layer] = self.view.host_keys(layer).data_ptr()
        self.building.clear()
        for layer, anchor in self.anchor.items():
            if layer == anchor:
                order = self._order(layer)
            self.view.arrange(layer, order)

    def _order(self, layer: int) -> torch.Tensor:
        """Tokens [B, Hkv, S] in the order of their pages: the sinks, the indexed tokens, the rest
        of longer rows.
        """
        orders = []
        for regions, trees in zip(self.regions, self.trees[layer], strict=True):
            sinks = np.arange(regions.sinks)
            orders += [np.append(sinks, regions.sinks + tree.arrange()) for tree in trees]
        longest = min(max(map(len, orders)), max(self.view.lengths(layer)))
        orders = [np.append(order, np.arange(len(order), longest))[:longest] for order in orders]
        return torch.tensor(np.array(orders)).unflatten(0, (self.shape.batch, -1))

    def _keys(self, layer: int) -> Keys:
        """[B, Hkv, capacity, D] as the index reads them, in place."""
        keys: Keys = as_stored(self.view.host_keys(layer))
        return keys

    # -- decode ------------------------------------------------------------------------------------

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Insert the page that has left the window, if the new token has opened one."""
        if layer != self.anchor[layer]:
            return
        self._follow(layer)
        lengths = self.view.lengths(layer)
        departed = [
            regions.indexed(length) - len(heads[0])
            for regions, length, heads in zip(self.regions, lengths, self.trees[layer], strict=True)
        ]
        if any(departed):
            with self.context.spans("insert"), self._named(layer):
                self.forests[layer].insert(departed)

    def _follow(self, layer: int) -> None:
        """Point the trees to the keys' new memory if the store has grown."""
        address = self.view.host_keys(layer).data_ptr()
        if address == self.memory[layer]:
            return
        self.memory[layer] = address
        for row, regions in enumerate(self.regions):
            for head, tree in enumerate(self.trees[layer][row]):
                tree.bind(self._keys(layer)[row, head, regions.sinks :])

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """Sinks, window, and the tokens of the best pages; a layer that has no trees takes those of
        its anchor.
        """
        if layer == self.anchor[layer]:
            lengths = self.view.lengths(layer)
            shape = self.shape.batch, self.shape.kv_heads, self.shape.group, self.shape.head_dim
            # where entries count instead of slots, pages that are not full leave room for more
            slots = 2 if self.budget.unified else 1
            regions = [
                (row.capacity, row.sinks, row.window(length), length, slots * row.recalled)
                for row, length in zip(self.regions, lengths, strict=True)
            ]
            longest = max(map(min, self.capacities, lengths))
            with self.context.spans("query"), self._named(layer):
                queries = query.float().cpu().reshape(shape).numpy()
                forest, options = self.forests[layer], self.options
                index, read = forest.attend(queries, np.array(regions), options, longest)
            self.view.count_read(layer, read)
            # on the CPU, from where its tokens are sent up
            self.selection = Selection(torch.from_numpy(index))
            for follower in self.followers[layer]:
                self.view.prefetch(follower, self.selection.index)
        return self.selection

    @contextmanager
    def _named(self, layer: int) -> Iterator[None]:
        """Numbers the index refuses are an error of this layer and head."""
        try:
            yield
        except RefusedError as error:
            raise _not_finite(layer, error.head % self.shape.kv_heads, error) from error

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C."""
        return self.budget.tokens(length)


def _not_finite(layer: int, head: int, error: ValueError) -> FloatingPointError:
    """What an index refuses names layer and head."""
    return FloatingPointError(f"layer {layer}, KV head {head}: {error}")
