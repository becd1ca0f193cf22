"""What holds of a store between any two calls, once its prompt has left; waits for the device."""

from __future__ import annotations

import torch

from kvbench.kernels.coded import GROUP
from kvbench.memory.device import NO_TOKEN, PAGE, DeviceTier
from kvbench.memory.grouped import WINDOW, GroupedTier
from kvbench.memory.host import HostTier
from kvbench.memory.stage import Stage
from kvbench.memory.store import LayerStore

DROPPED, DEVICE, HOST = range(3)


def check(store: LayerStore) -> None:
    lengths, device = torch.tensor(store.lengths)[:, None, None], store.device
    if isinstance(device, GroupedTier):
        check_grouped(device)
    else:
        check_device(device)
    assert bool((device.token_ids().cpu() < lengths).all()), "the device holds no token that was not seen"
    if device.counters is not None:
        assert torch.equal(device.counters.filled.cpu(), device.used), "the device counts what the host counts"
        assert device.counters.seen.tolist() == store.lengths, "the device has seen what the host has seen"
    assert (store.host is None) == (store.stage is None), "a host tier has a stage"
    if store.host is not None and store.stage is not None:
        check_host(store.host)
        check_stage(store.stage)
        beyond = torch.arange(store.host.capacity) >= lengths
        assert not bool((store.host.present & beyond).any()), "the host holds no token that was not seen"
        assert store.host.total == int(store.host.present.sum()), "the tokens of the host are counted"
    tiers = tiers_of(store)
    there = tiers[(torch.arange(tiers.shape[2]) < lengths).expand_as(tiers)]
    if store.home == "host":
        assert bool((there == HOST).all()), "a token whose home is the host is there"
    elif store.how.on_drop == "offload":
        assert bool((there != DROPPED).all()), "a token that left the device is on the host"
    elif device.ids is None:
        assert bool((there == DEVICE).all()), "a token that nobody dropped is on the device"


def tiers_of(store: LayerStore) -> torch.Tensor:
    """[B, Hkv, longest row] int8: `DEVICE`, `HOST` or `DROPPED` of each token seen (`DROPPED` beyond a row)."""
    tiers = torch.zeros(*store.device.used.shape, max(store.lengths), dtype=torch.int8)
    device_ids = store.device.token_ids().cpu()
    at = (device_ids >= 0).nonzero(as_tuple=True)
    tiers[at[0], at[1], device_ids[at]] = DEVICE
    if store.host is not None:
        on_host = store.host.present[:, :, : tiers.shape[2]]
        assert not bool((on_host & (tiers == DEVICE)).any()), "a token lives in one tier"
        tiers[on_host] = HOST
    return tiers


def everything(store: LayerStore, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, ascending, keys and values of all tokens that one KV head still has in any tier, on the CPU."""
    (ids, order), rows = store.remaining_ids()[row, head].sort(), store.remaining()
    order, ids = order[ids >= 0], ids[ids >= 0]
    return ids, rows.key[row, head].cpu()[order], rows.value[row, head].cpu()[order]


def ascending(lists: torch.Tensor) -> bool:
    """Each of lists [B, H, n] is distinct ids >= 0 in ascending order, then `NO_TOKEN` only."""
    rises = (lists[..., 1:] > lists[..., :-1]) | (lists[..., 1:] == NO_TOKEN)
    return bool((lists >= 0).all()) and bool(rises.all())


def check_device(tier: DeviceTier) -> None:
    assert len(tier.pool.key) == len(tier.pool.value), "a key has a value"
    assert len(tier.pool.key) == int(tier.room.sum()), "every slot is some head's"
    assert bool((tier.room % PAGE == 0).all()), "room is whole pages"
    assert 0 <= tier.reserved <= tier.capacity, "what is reserved is there"
    assert int(tier.used.min()) >= 0 and int(tier.used.max()) <= tier.reserved, "what is used was reserved"
    free = tier.reserved - int(tier.used.max())
    assert bool((tier.used + free <= tier.room).all()), "every head has room for the tokens to come"
    assert all(bool(part.isfinite().all()) for part in tier.codecs.decode(*tier.pool)), "every slot is finite"
    if tier.ids is not None:
        assert tier.ids.shape == (*tier.room.shape, tier.capacity), "a slot has an id"
        assert ascending(tier.ids), "tokens ascend from slot 0 without holes, none of them twice"
        assert torch.equal((tier.ids != NO_TOKEN).sum(dim=2).cpu(), tier.used), "a used slot has a token"


def check_grouped(tier: GroupedTier) -> None:
    slots = GROUP * len(tier.parameters)
    assert len(tier.pool.key) == len(tier.pool.value) == int(tier.room.sum()) == slots
    assert bool((tier.room % GROUP == 0).all()), "a KV head begins with a group of its own"
    assert bool((tier.coded % GROUP == 0).all()), "groups are coded whole"
    window = tier.used - tier.coded
    assert int(window.min()) >= 0 and int(window.max()) <= WINDOW, "the newest tokens are in the window"
    assert all(bool(part.isfinite().all()) for part in tier.stored_rows()[:2]), "every token is finite"


def check_host(tier: HostTier) -> None:
    assert tier.key.shape[:3] == tier.value.shape[:3], "a key has a value"
    if tier.decoded_bytes:  # rows that are turned differ in their last bits by how many they are
        keys = tier.codecs.key.decode(tier.key)
        assert torch.allclose(tier.blocks[2], keys, rtol=2**-7, atol=1e-5), "keys read in place are those held"
    assert tier.slot_of.shape == tier.present.shape == tier.key.shape[:3], "a slot for every token id"
    identity = torch.arange(tier.capacity).expand_as(tier.slot_of)
    assert torch.equal(tier.slot_of.sort(dim=2).values, identity), "no two tokens have one slot"
    assert tier.arranged or torch.equal(tier.slot_of, identity), "slots keep the order of the ids until arranged"
    for row, length in enumerate(tier._landing.lengths if tier._landing else ()):
        assert bool(tier.present[row, :, length].all()), "a token that is landing lives here"


def check_stage(stage: Stage) -> None:
    host = stage._host
    if stage.staged is not None:
        check_staged(stage.staged.ids.cpu(), host)
        for row, block in zip(stage.staged.rows or (), (host.key, host.value), strict=False):
            assert row.shape == (*stage.staged.ids.shape, block.shape[3]), "what is staged has a key and a value"
    pending = stage._pending
    if pending is not None:
        check_staged(pending.ids.cpu(), host)


def check_staged(ids: torch.Tensor, host: HostTier) -> None:
    assert ids.shape[2] % PAGE == 0, "a block is whole pages"
    assert ascending(ids), "tokens ascend without holes, none of them twice"
    lives = host.present.gather(2, ids.clamp(max=host.capacity - 1))
    assert bool((lives | (ids == NO_TOKEN)).all()), "what is staged lives on the host"
