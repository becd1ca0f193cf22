"""Keys and values where vLLM's CPU attention keeps them: blocks of all requests, packed.

Nothing is copied but what is read, and in an engine that frees prompts what a method keeps of them:
see `side.py`. In another a token that is dropped is no longer attended, and keeps its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.attention.cpu import WORTH_A_THREAD, Beside, bias_of, rebuilt_keys, run
from kvbench.backends.vllm import kernels
from kvbench.config import ConfigError
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import GROWTH, DeviceTier, Located, Pool, Resident, with_free_slots
from kvbench.memory.store import LayerStore
from kvbench.method import Selection

PLAIN = ("vec", "vec16")  # a block's keys dimension after dimension, its values token after token
# in tiles: keys by pairs of dimensions of 16 tokens, values by 16 dimensions of pairs of tokens
PACKED = ("amx",)


class Memory:
    """One layer's blocks, as rows of keys and values.

    Parameters
    ----------
    cache
        [blocks, Hkv, block size, 2 D], as vLLM allocates it.
    isa
        the order within a block, by the name vLLM's CPU attention gives it.

    Attributes
    ----------
    whole
        the cache itself.
    size
        tokens of a block.

    Raises
    ------
    ConfigError
        an order that kvbench does not know.
    """

    def __init__(self, cache: torch.Tensor, isa: str) -> None:
        if isa not in PLAIN + PACKED:
            raise ConfigError(
                f"vLLM's attention here is {isa}: kvbench reads the memory of"
                f" {', '.join(PLAIN + PACKED)}"
            )
        assert cache.is_contiguous(), "a kernel finds a block by its number alone"
        self.whole, self._pair = cache, 2 if isa in PACKED else 1
        self.kv_heads, self.size = cache.shape[1:3]
        self.head_dim = cache.shape[3] // 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, of all KV heads."""
        return self.whole[0].nbytes

    def blocks(self, tables: torch.Tensor) -> kernels.Blocks:
        """Those of requests with these block tables, [B, blocks]."""
        return kernels.Blocks(tables.contiguous(), self.whole, self._pair)

    def rows(self, table: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, Hkv, M, D] of a request's token ids [1, Hkv, M], by its block table.

        In place of a token that is none, -1, stands another.
        """
        key, value = (
            torch.empty(*ids.shape, self.head_dim, dtype=self.whole.dtype) for _ in range(2)
        )
        threads = max(1, min(torch.get_num_threads(), key.nbytes // WORTH_A_THREAD))
        kernels.gather(threads, self.blocks(table[None]), ids[0].contiguous(), key, value)
        return key, value

    def first(self, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's first tokens, [1, Hkv, count, D] each."""
        return self.rows(table, torch.arange(count).expand(1, self.kv_heads, count))


class BlockTable:
    """Which blocks a request has, in their order; vLLM names them anew at every step.

    Parameters
    ----------
    groups
        of each layer, the row of `blocks` that is its own; none: all layers have the first.

    Attributes
    ----------
    blocks
        [groups, blocks] int64.
    """

    def __init__(self, groups: Sequence[int] = ()) -> None:
        self.blocks, self._groups = torch.empty(1, 0, dtype=torch.int64), groups

    def group(self, layer: int) -> int:
        """The row of `blocks` that is a layer's."""
        return self._groups[layer] if self._groups else 0

    def of(self, layer: int) -> torch.Tensor:
        """Those of a layer, [blocks]."""
        return self.blocks[self.group(layer)]


@dataclass(frozen=True, eq=False)
class InBlocks(Located):
    """Tokens located in a request's blocks, by their ids."""

    tier: PagedTier
    ids: torch.Tensor

    def stored_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Located.stored_rows`."""
        return self.tier.rows(self.ids)


class PagedTier(DeviceTier):
    """The blocks of one request in one layer, which vLLM writes.

    Which token is where follows from its id.

    What the tier keeps itself is which tokens a method still attends.

    Parameters
    ----------
    memory
        of the layer.
    table
        of the request.
    layer
        its true index.
    """

    writable = False

    def __init__(self, memory: Memory, table: BlockTable, layer: int) -> None:
        self.memory = memory
        self._tables = table
        self._layer = layer
        heads = 1, memory.kv_heads
        self.codecs = Codecs.native(memory.head_dim, memory.whole.dtype)
        # Sizes are read of it, and bytes; its rows are not those of tokens
        self.pool = Pool(*(memory.whole.view(-1, memory.head_dim),) * 2)
        self.room, self.used = (torch.zeros(heads, dtype=torch.int64) for _ in range(2))
        self.first = torch.zeros(heads, dtype=torch.int64)
        self.even = True
        self.capacity = 0
        self.ids: torch.Tensor | None = None
        self.reserved, self._grows = 0, True

    @property
    def table(self) -> torch.Tensor:
        """The request's blocks in this layer, [blocks] int64."""
        return self._tables.of(self._layer)

    @property
    def key(self) -> torch.Tensor:
        """Keys of all tokens seen, [1, Hkv, n, D], copied."""
        return self.memory.first(self.table, self.longest)[0]

    @property
    def value(self) -> torch.Tensor:
        """Values, as `key`."""
        return self.memory.first(self.table, self.longest)[1]

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [1, Hkv, M], copied; see `Memory.rows`."""
        return self.memory.rows(self.table, ids)

    def write_prompt(
        self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]
    ) -> None:
        """vLLM has written it."""

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """vLLM has written the next token, whose id is `lengths[0]`; it is attended from now on."""
        if self.ids is not None:
            if self.longest >= self.ids.shape[2]:
                self.ids = with_free_slots(self.ids, self.longest + GROWTH)
            self.ids.scatter_(2, self.used[..., None], lengths[0])
        self.numbers = self.numbers + 1
        self.longest += 1
        self.total += self.numbers.size

    def reserve(self, slots: int) -> None:
        """Blocks are vLLM's to reserve."""

    def keep(
        self,
        ids: torch.Tensor,
        used: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        room: int | None = None,
    ) -> None:
        """Attend these tokens and no others; see `DeviceTier.keep`. Nothing is freed."""
        self.ids, self.used = ids, used

    def end_prompt(self, length: int) -> None:
        """The prompt, of so many tokens, is over, and what the method does with it.

        Blocks are vLLM's, and stay.
        """

    def bytes_for(self, length: int) -> int:
        """Bytes of the blocks of so many tokens."""
        return -(-length // self.memory.size) * self.memory.block_bytes

    def resident(self, whole: bool = False) -> Resident:
        """Keys and values of the tokens that are attended, [1, Hkv, n, D], copied.

        See `DeviceTier.resident`.
        """
        ids = self.token_ids()
        return Resident(*self.rows(ids), None if self.uniform else ids >= 0)

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [1, Hkv, M] (-1 = none) lie; see `DeviceTier.locate`."""
        self.refuse_absent(index)
        index, present = self.upload(index)
        return InBlocks(self.pool, index, present, self.codecs, self, index)

    def refuse_absent(self, index: torch.Tensor) -> None:
        """Refuse token ids [1, Hs, M] (-1 = none) that are not attended any more, or never were.

        Raises
        ------
        LookupError
            one is not here.
        """
        if self.ids is None and (index.numpy() < self.longest).all():
            return
        heads = self.used.shape[1]
        by_head = (
            index.reshape(1, heads, -1) if index.shape[1] > heads else index.expand(1, heads, -1)
        )
        self.refuse_lost(by_head, self.find(by_head)[1])


class PagedStore(LayerStore):
    """Keys and values of one request in one layer, in vLLM's memory.

    Parameters
    ----------
    tier
        of the layer.
    settings
        as of `LayerStore`.
    """

    def __init__(self, tier: PagedTier, **settings: Any) -> None:
        memory, whole = tier.memory, tier.memory.whole
        super().__init__(
            1,
            memory.kv_heads,
            memory.head_dim,
            0,
            whole.dtype,
            whole.device,
            grows=True,
            **settings,
        )
        self.device: PagedTier = tier

    def blocks_with(self, selection: Selection | None) -> tuple[kernels.Blocks, Selection]:
        """The request's blocks, and what is attended of them.

        Raises
        ------
        LookupError
            a token that is selected is not attended any more, or was never seen.
        """
        tier = self.device
        if selection is None:
            selection = Selection(tier.token_ids())
        else:
            tier.refuse_absent(selection.index)
        return tier.memory.blocks(tier.table[None]), selection

    def encode(self) -> None:
        """The prompt is over, and the method's eviction of it."""
        self.device.end_prompt(max(self.lengths))

    def allocated_bytes(self) -> int:
        """Bytes of the request's blocks that are not freed, dropped tokens included, and copies."""
        return self.device.bytes_for(max(self.lengths))


def attend_blocks(
    query: torch.Tensor, blocks: kernels.Blocks, selection: Selection, scaling: float
) -> torch.Tensor:
    """As `attend`, of tokens that lie in a serving engine's blocks, of all rows of the batch; all
    of them are there.
    """
    batch, heads = len(query), blocks.heads
    index = selection.index.contiguous()
    lists = max(index.shape[1], heads)
    bias, rebuilt = bias_of(selection, batch, lists), rebuilt_keys(selection, query.dtype)
    parts = [kernels.blocks_part(index, bias, blocks, rebuilt, query.dtype)]
    if selection.extra is not None:
        parts.append(Beside.of(selection.extra, query.dtype).alone(index, bias, heads))
    return run(query, scaling, batch * lists, parts, 0).out
