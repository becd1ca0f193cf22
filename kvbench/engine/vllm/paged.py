"""Keys and values where vLLM's CPU attention keeps them: blocks of tokens, of all requests, in a packed order.

Nothing is copied but what is read. A token that a method drops is no longer attended, and keeps its place: vLLM frees
the blocks of a request as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.config import ConfigError
from kvbench.memory.codec import Codecs
from kvbench.memory.device import DeviceTier, Located
from kvbench.memory.slots import Pool, with_free_slots
from kvbench.memory.store import LayerStore

PLAIN = ("vec", "vec16")  # a block's keys dimension after dimension, its values token after token
PACKED = ("amx",)  # in tiles: keys by pairs of dimensions of 16 tokens, values by 16 dimensions of pairs of tokens
TILE, PAIR = 16, 2


class Memory:
    """One layer's blocks, as rows of keys and values.

    Args:
        cache: [blocks, Hkv, block size, 2 D], as vLLM allocates it.
        isa: the order within a block, by the name vLLM's CPU attention gives it.

    Attributes:
        whole: the cache itself.
        size: tokens of a block.

    Raises:
        ConfigError: an order that kvbench does not know.
    """

    def __init__(self, cache: torch.Tensor, isa: str) -> None:
        if isa not in PLAIN + PACKED:
            raise ConfigError(
                f"vLLM's attention here is {isa}: kvbench reads the memory of {', '.join(PLAIN + PACKED)}"
            )
        self.whole, (blocks, self.kv_heads, self.size, width) = cache, cache.shape
        self.head_dim = width // 2
        halves = cache.view(blocks, self.kv_heads, 2, self.size * self.head_dim).unbind(2)
        # Either [blocks, Hkv, size / t, t, D / d, d]: token groups, their tokens, and the dimensions of each
        if isa in PLAIN:
            key = halves[0].unflatten(2, (self.head_dim, 1, self.size, 1)).permute(0, 1, 4, 5, 2, 3)
            value = halves[1].unflatten(2, (self.size, 1, self.head_dim, 1))
        else:
            key = halves[0].unflatten(2, (-1, self.head_dim // PAIR, TILE, PAIR)).transpose(3, 4)
            value = halves[1].unflatten(2, (-1, self.size // PAIR, TILE, PAIR)).permute(0, 1, 3, 5, 2, 4)
        self._parts = key, value

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, of all KV heads."""
        return self.whole[0].nbytes

    def rows(self, table: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token ids [1, Hkv, M] of the request with this block table, [1, Hkv, M, D] each."""
        block, offset = table[ids[0] // self.size], ids[0] % self.size
        head = torch.arange(self.kv_heads)[:, None]

        def read(part: torch.Tensor) -> torch.Tensor:
            group = part.shape[3]
            return part[block, head, offset // group, offset % group].flatten(2)[None]

        return read(self._parts[0]), read(self._parts[1])

    def first(self, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's first tokens, [1, Hkv, count, D] each."""
        blocks = table[: -(-count // self.size)]

        def read(part: torch.Tensor) -> torch.Tensor:
            return part[blocks].transpose(0, 1).flatten(1, 3).flatten(2)[None, :, :count]

        return read(self._parts[0]), read(self._parts[1])


class Table:
    """Which blocks a request has, in their order; vLLM tells anew at every step."""

    def __init__(self) -> None:
        self.blocks = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class _InBlocks(Located):
    """Tokens located in a request's blocks: slots are token ids."""

    tier: PagedTier

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Located.held`."""
        return self.tier.memory.rows(self.tier.table.blocks, self.slots)


class PagedTier(DeviceTier):
    """The blocks of one request in one layer: vLLM writes them, and which token is where follows from its id.

    What the tier keeps itself is which tokens a method still attends.

    Args:
        memory: of the layer.
        table: of the request.
    """

    def __init__(self, memory: Memory, table: Table) -> None:
        self.memory, self.table = memory, table
        heads = 1, memory.kv_heads
        self.codecs = Codecs.of("native", memory.head_dim, memory.whole.dtype)
        # Sizes are read of it, and bytes; its rows are not those of tokens
        self.pool = Pool(*(memory.whole.view(-1, memory.head_dim),) * 2)
        self.room, self.used = (torch.zeros(heads, dtype=torch.int64) for _ in range(2))
        self.first, self.even, self.capacity = torch.zeros(heads, dtype=torch.int64), True, 0
        self.ids: torch.Tensor | None = None
        self.reserved, self._grows = 0, True

    @property
    def key(self) -> torch.Tensor:
        """Keys of all tokens seen, [1, Hkv, n, D], copied."""
        return self.memory.first(self.table.blocks, self._seen)[0]

    @property
    def value(self) -> torch.Tensor:
        """Values, as `key`."""
        return self.memory.first(self.table.blocks, self._seen)[1]

    @property
    def _seen(self) -> int:
        return int(self.used.max())

    def write_prompt(self, key: torch.Tensor, value: torch.Tensor, column: int, offsets: Sequence[int]) -> None:
        """vLLM has written it."""

    def append(self, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """vLLM has written the next token, whose id is `lengths[0]`; it is attended from now on."""
        if self.ids is not None:
            self.ids = with_free_slots(self.ids, int(self.used.max()) + 1)
            self.ids.scatter_(2, self.used[..., None], lengths[0])
        self.used = self.used + 1

    def reserve(self, slots: int) -> None:
        """Blocks are vLLM's to reserve."""

    def keep(
        self, ids: torch.Tensor, used: torch.Tensor, key: torch.Tensor, value: torch.Tensor, room: int | None = None
    ) -> None:
        """Attend these tokens and no others; see `DeviceTier.keep`. Nothing is freed."""
        self.ids, self.used = ids, used

    def resident(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values of the tokens that are attended, [1, Hkv, n, D], copied; see `DeviceTier.resident`."""
        if self.ids is None:
            return (*self.memory.first(self.table.blocks, self._seen), None)
        ids = self.token_ids()
        mask = None if self.uniform else ids >= 0
        return (*self.memory.rows(self.table.blocks, ids.clamp(min=0)), mask)

    def locate(self, index: torch.Tensor) -> Located:
        """Where token ids [1, Hkv, M] (-1 = none) lie; see `DeviceTier.locate`."""
        index, present = self.upload(index)
        self.refuse_lost(index, self.find(index)[1])
        return _InBlocks(self.pool, index.clamp(min=0), present, self.codecs, self)


class PagedStore(LayerStore):
    """Keys and values of one request in one layer, in vLLM's memory.

    Args:
        memory: of the layer.
        table: of the request.
        settings: as of `LayerStore`.
    """

    def __init__(self, memory: Memory, table: Table, **settings: Any) -> None:
        whole = memory.whole
        super().__init__(1, memory.kv_heads, memory.head_dim, 0, whole.dtype, whole.device, grows=True, **settings)
        self.device = PagedTier(memory, table)

    def allocated_bytes(self) -> int:
        """Bytes of the request's blocks, those of dropped tokens among them."""
        tier = self.device
        assert isinstance(tier, PagedTier)
        return -(-max(self.lengths) // tier.memory.size) * tier.memory.block_bytes
