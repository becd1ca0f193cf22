"""What a run measures besides its score: time by span, and the budget audit.

Nothing here believes a method: attended entries come from the selections the executor was given,
bytes from the store's tensors and from the memory a method object holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.kernels.lists import count_lists
from kvbench.memory.codecs import Codecs
from kvbench.memory.device import of_kv_heads
from kvbench.method import Extra, Method, Selection, Shape

TWICE = "the method selected a token twice for one head"
UNREAD = 64  # steps whose counts stay on a GPU until they are read together
# One sparse layer of one step, kept until the clock stops: which, and what it attends or, of None,
# [B, Hkv] how many.
_Attended = tuple[int, Selection | None, NDArray[np.int64] | None]
# [B, Hkv] entries attended, on the host or on a GPU; None: not counted
_Counts = NDArray[np.int64] | torch.Tensor | None


@dataclass
class _Step:
    """A step whose entries are counted, and not yet compared with the rules.

    Attributes
    ----------
    number, generated
        of the step, 1 is the first; and tokens that each row had generated with it.
    rows
        that were still generating.
    counts
        of each sparse layer.
    """

    number: int
    generated: int
    method: Method
    rows: list[int]
    lengths: list[int]
    counts: dict[int, _Counts]


@dataclass
class Tally:
    """Entries attended by the KV heads of some rows: their sum and that of their squares, how many
    counts these are of, and the most.

    Attributes
    ----------
    broken
        where the method first attended more than one of its rules allows; None: nowhere.
    """

    total: float = 0.0
    squares: float = 0.0
    count: int = 0
    most: int = 0
    broken: str | None = None

    def add(self, counts: NDArray[np.int64]) -> None:
        """Take the counts of a step's layers."""
        self.total += float(counts.sum())
        self.squares += float(np.square(counts).sum())
        self.count += counts.size
        self.most = max(self.most, int(counts.max()))


@dataclass
class Audit:
    """Counts what was attended, held and read during one generation.

    Parameters
    ----------
    shape
        sizes of the generation.
    every
        steps between two counts of per-query-head selections, whose union over the group takes a
        sort.

    Attributes
    ----------
    turn_tokens
        tokens of later turns that were read at once, of each row: no decode steps.
    turn_moved_bytes
        what went to the device for them.
    """

    shape: Shape
    every: int = 1
    steps: int = 0
    read_bytes: int = 0
    moved_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    device_kv_bytes: int = 0
    device_kv_allocated_bytes: int = 0
    host_bytes: int = 0
    turn_tokens: int = 0
    turn_moved_bytes: int = 0
    _before_turn: tuple[int, int] = (0, 0)
    _rows: list[Tally] = field(init=False)
    _pending: list[_Attended] = field(default_factory=list)
    _unread: list[_Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = [Tally() for _ in self.shape.lengths]

    @property
    def generated(self) -> int:
        """Tokens of each row after its prompt, but for those of a step or turn that goes on."""
        return self.steps + self.turn_tokens

    @property
    def attended_mean(self) -> float:
        """Entries that a KV head attends in a sparse layer, the mean over heads, layers, rows and
        steps.
        """
        self._read_counts()
        return _mean(self._rows)

    def broken(self, row: int | None = None) -> str | None:
        """Where the method first attended more than its rule allows, in any row or in this one;
        None: nowhere.
        """
        self._read_counts()
        rows = self._rows if row is None else self._rows[row : row + 1]
        return next((tally.broken for tally in rows if tally.broken), None)

    def read(self, size: int) -> None:
        """A method read `size` bytes of stored keys or values through its view."""
        self.read_bytes += size

    def moved(self, size: int) -> None:
        """`size` bytes of keys and values went from the host to the device."""
        self.moved_bytes += size

    def count_hits(self, here: int, moved: int) -> None:
        """Of the host's tokens that KV heads attended, so many were on the device already, and so
        many were not.
        """
        self.cache_hits += here
        self.cache_misses += moved

    def end_prefill(self) -> None:
        """What was moved and read until here is of the prompt, and of no decode step."""
        self.moved_bytes = self.read_bytes = 0

    def start_turn(self) -> None:
        """Several tokens are read at once; what that moves and reads is not that of
        decode steps.
        """
        self._before_turn = self.moved_bytes, self.read_bytes

    def end_turn(self, tokens: int) -> None:
        """They were so many tokens of each row."""
        self.turn_tokens += tokens
        before, self.read_bytes = self._before_turn
        self.turn_moved_bytes += self.moved_bytes - before
        self.moved_bytes = before

    def attended(
        self, layer: int, selection: Selection | None, resident: NDArray[np.int64], times: int = 1
    ) -> None:
        """Note what a sparse layer attends; counted by `end_step`, outside the timed part.

        Parameters
        ----------
        selection
            what the method returned; None = everything resident.
        resident
            [B, Hkv] entries resident in this layer; the caller may change the array later.
        times
            -1 takes the last note back.
        """
        if times < 0:
            self._pending.pop()
        else:
            self._pending.append((layer, selection, resident.copy() if selection is None else None))

    def end_step(
        self,
        method: Method,
        lengths: Iterable[int],
        active: Iterable[bool],
        device_bytes: int,
        allocated_bytes: int,
        host_bytes: int,
    ) -> None:
        """Count the step that just ended.

        Parameters
        ----------
        method
            asked for its two rules only.
        lengths
            prompt tokens of each row.
        active
            rows that were still generating in this step.
        device_bytes, host_bytes
            bytes of KV in the two tiers, all layers.
        allocated_bytes
            what the device's take there, all layers: with reserved slots, and whole pages.
        """
        rows = [row for row, running in enumerate(active) if running]
        counts = {noted[0]: self._counts(*noted) for noted in self._pending}
        step = _Step(self.steps + 1, self.generated + 1, method, rows, list(lengths), counts)
        self._unread.append(step)
        self._pending.clear()
        on_device = any(isinstance(part, torch.Tensor) for part in counts.values())
        if not on_device or len(self._unread) == UNREAD:
            self._read_counts()
        self.device_kv_bytes = max(self.device_kv_bytes, device_bytes)
        self.device_kv_allocated_bytes = max(self.device_kv_allocated_bytes, allocated_bytes)
        self.host_bytes = max(self.host_bytes, host_bytes)
        self.steps += 1

    def _read_counts(self) -> None:
        """Compare the steps that were counted with the rules; waits for a GPU that has counted."""
        waiting = [
            (step, layer, counts)
            for step in self._unread
            for layer, counts in step.counts.items()
            if isinstance(counts, torch.Tensor)
        ]
        for device in {counts.device for *_, counts in waiting}:
            of_device = [entry for entry in waiting if entry[2].device == device]
            read = torch.stack([counts for *_, counts in of_device]).cpu().numpy()
            for (step, layer, _), counts in zip(of_device, read, strict=True):
                if (counts < 0).any():
                    raise ValueError(f"layer {layer}: {TWICE}")
                step.counts[layer] = counts
        steps, self._unread = self._unread, []
        for step in steps:
            self._hold_step(step)

    def _hold_step(self, step: _Step) -> None:
        layers = {layer: counts for layer, counts in step.counts.items() if counts is not None}
        if not layers:
            return
        counts = np.array([*layers.values()])  # [layers, B, Hkv]
        most = counts.max(axis=2).T.tolist()
        # a rule for the mean is one of what is kept, and a layer that reuses keeps nothing
        kept = counts[[layer not in self.shape.reuses for layer in layers]]
        means = (kept.sum(axis=(0, 2)) / max(len(kept) * kept.shape[2], 1)).tolist()
        for row in step.rows:
            arguments = step.lengths[row], step.generated
            for layer, attended in zip(layers, most[row], strict=True):
                rule = step.method.rule(self.shape.source(layer), *arguments)
                self._hold_to(row, step, rule, layer, attended)
            self._rows[row].add(counts[:, row])
            if len(layers) == len(step.counts):
                self._hold_mean_to(row, step, step.method.mean_rule(*arguments), means[row])

    def _hold_to(self, row: int, step: _Step, rule: int | None, layer: int, most: int) -> None:
        """Remember the first time that a row attended more than the rule allows, `most` entries in
        a KV head.
        """
        tally = self._rows[row]
        if tally.broken is None and rule is not None and most > rule:
            at = f"layer {layer}, step {step.number}"
            tally.broken = f"{at}: a KV head attended {most} entries, its rule allows {rule}"

    def _hold_mean_to(self, row: int, step: _Step, rule: float | None, mean: float) -> None:
        """As `_hold_to`, for the mean over the KV heads of all sparse layers."""
        if self._rows[row].broken is None and rule is not None and mean > rule:
            self._rows[row].broken = (
                f"step {step.number}: the KV heads attended {mean:.2f} entries on average, the"
                f" method's rule allows {rule}"
            )

    def _counts(
        self, layer: int, selection: Selection | None, resident: NDArray[np.int64] | None
    ) -> _Counts:
        """[B, Hkv] entries attended, or None where this step's unions are not counted."""
        if selection is None:
            return resident
        heads, kv_heads = selection.index.shape[1], self.shape.kv_heads
        if heads > kv_heads and self.steps % self.every:
            return None
        if selection.index.is_cuda:
            return counted_on_device(selection, kv_heads)
        named, distinct = count_lists(selection.index.contiguous().numpy(), kv_heads)
        if heads <= kv_heads and (named != distinct).any():
            raise ValueError(f"layer {layer}: {TWICE}")
        return (
            distinct
            if selection.extra is None
            else distinct + extra_entries(selection.extra, kv_heads).cpu().numpy()
        )

    def report(
        self,
        method: Method,
        budget: int | None,
        stored: Iterable[torch.Tensor] = (),
        row: int | None = None,
    ) -> dict[str, Any]:
        """The audit of a finished generation; keys as in `summary.json`.

        What no step had is left out.

        Parameters
        ----------
        method
            whose memory is counted.
        budget
            C in tokens.
        stored
            the tensors of the stores.
        row
            whose attended entries are meant; None: those of all. Bytes are of all rows.
        """
        self._read_counts()
        rows = self._rows if row is None else self._rows[row : row + 1]
        report = {
            **_entries(rows),
            "budget": budget,
            "device_kv_bytes": self.device_kv_bytes,
            "device_kv_allocated_bytes": self.device_kv_allocated_bytes,
            "index_bytes": method_bytes(method, stored),
            "host_bytes": self.host_bytes,
            "dense_share": self._dense_share(),
            "over_rule": self.broken(row) is not None,
        }
        if self.steps:
            per_step = {"moved": self.moved_bytes, "read": self.read_bytes}
            report |= {
                f"{what}_bytes_per_step": size / self.steps for what, size in per_step.items()
            }
        if self.cache_hits + self.cache_misses:
            report["cache_hit_share"] = self.cache_hits / (self.cache_hits + self.cache_misses)
        if self.turn_tokens:
            report |= {"turn_tokens": self.turn_tokens, "turn_moved_bytes": self.turn_moved_bytes}
        return report

    def _dense_share(self) -> float:
        """Layers with full attention that no method is asked about, over all."""
        full, sparse = self.shape.full_layers, self.shape.sparse_layers
        dense = sum(len(self.shape.readers(layer)) for layer in full if layer not in sparse)
        return 1 - (self.shape.layers - dense) / self.shape.layers


def _entries(rows: Sequence[Tally]) -> dict[str, float]:
    """Entries that a KV head attended in a sparse layer, over heads, layers, rows and steps; {}
    without a step.
    """
    count = sum(tally.count for tally in rows)
    if not count:
        return {}
    mean = _mean(rows)
    variance = sum(tally.squares for tally in rows) / count - mean**2
    most = max(tally.most for tally in rows)
    return {"attended_mean": mean, "attended_std": max(variance, 0.0) ** 0.5, "attended_max": most}


def _mean(rows: Iterable[Tally]) -> float:
    rows = list(rows)
    return sum(tally.total for tally in rows) / max(sum(tally.count for tally in rows), 1)


def attended_bytes(
    shape: Shape, attended_mean: float, steps: int, entry_bytes: Mapping[int, float] | None = None
) -> float:
    """Bytes of keys and values that a decode step attends, the mean over `steps` steps.

    In each of the B rows and Hkv KV heads a sparse layer attends `attended_mean` entries, as the
    audit counted them, and a dense one all: N + s at step s of a prompt of N tokens, N + (steps +
    1) / 2 in the mean; one with a window its tokens at most:

        B * Hkv * (sum of sparse layers' entry bytes * attended_mean + of dense ones' * (N + (steps
            + 1) / 2) + of windowed ones' * min(window, N + (steps + 1) / 2))

    Parameters
    ----------
    entry_bytes
        of a key and a value in a layer, where they are not D numbers each in the dtype of the
        model.
    """
    plain = float(Codecs.native(shape.head_dim, shape.dtype, shape.latent_dim).nbytes)
    entry_sizes = dict.fromkeys(shape.full_layers, plain) | dict(entry_bytes or {})
    length = sum(shape.lengths) / shape.batch + (steps + 1) / 2
    full = sum(
        entry_sizes[layer]
        * (attended_mean if layer in shape.sparse_layers else length)
        * len(shape.readers(layer))
        for layer in shape.full_layers
    )
    windowed = plain * sum(min(window, length) for window in shape.windows.values())
    return shape.batch * shape.kv_heads * (full + windowed)


def counted_on_device(selection: Selection, kv_heads: int) -> torch.Tensor:
    """[B, Hkv] entries of a selection on a GPU, attended once or more by the query heads of each KV
    head; -1 where one list has a token twice.
    """
    ids = of_kv_heads(selection.index, kv_heads).sort(dim=2).values
    first = ids[..., :1] >= 0, (ids[..., 1:] >= 0) & (ids[..., 1:] != ids[..., :-1])
    distinct = torch.cat(first, dim=2).sum(dim=2)
    if selection.index.shape[1] <= kv_heads:
        distinct = distinct.masked_fill(distinct != (ids >= 0).sum(dim=2), -1)
    if selection.extra is None:
        return distinct
    return torch.where(distinct < 0, -1, distinct + extra_entries(selection.extra, kv_heads))


def extra_entries(extra: Extra, kv_heads: int) -> torch.Tensor:
    """Synthetic entries attended by each KV head, [B, Hkv]."""
    there = extra.log_weight.unflatten(1, (kv_heads, -1)) > -torch.inf
    return there.any(dim=2).sum(dim=2)


def method_bytes(method: Method, stored: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of all tensors and arrays a method object holds, each storage once; the harness's own
    parts left out.

    A library's memory, which Python does not see, is what an object says in `foreign_bytes`. A view
    of what the store holds (`stored`) is no memory of the method's; of keys that the store has
    dropped it is.
    """
    visited = {tensor.untyped_storage().data_ptr() for tensor in stored}
    outside = {"shape", "budget", "view", "context", "needs"}

    def size(thing: Any) -> int:
        if isinstance(thing, Executor):
            return 0  # threads, which are everybody's
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            key, nbytes = storage.data_ptr(), storage.nbytes()
        elif isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            key, nbytes = thing.ctypes.data, thing.nbytes
        else:
            key, nbytes = id(thing), getattr(thing, "foreign_bytes", 0)
        if key in visited:
            return 0
        visited.add(key)
        if isinstance(thing, dict):
            return sum(map(size, thing.values()))
        if isinstance(thing, (list, tuple, set, frozenset, deque)):
            return sum(map(size, thing))
        parts = getattr(thing, "__dict__", {})
        return nbytes + sum(size(value) for name, value in parts.items() if name not in outside)

    return size(method)
