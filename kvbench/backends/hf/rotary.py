"""A model's rotary positions: keys turned to others, and angles that follow the length of a text.

Under dynamic NTK scaling and LongRoPE transformers takes the angles of all that a forward pass
reads from its largest position, and keeps some of that in the module for the next pass: what a
prompt gives would depend on its chunks, on the rows beside it, and on what the model read before.
Here they follow from the length of a row alone: those that the pass which reads it alone, at once,
with a fresh model would have.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvbench.backends.hf.hooks import CountingCache, module_function
from kvbench.backends.hf.layers import attention_modules, card_of, read_token
from kvbench.config import ConfigError
from kvbench.engine.positions import Angles
from kvbench.models.card import WITH_ALL_KEYS, ModelCard
from kvbench.models.rope import FULL

PLACE = 3  # where a key is turned to, to see whether that is right


class RotaryOf:
    """The model's own rotary positions, see `kvbench.engine.positions.Rotary`.

    Parameters
    ----------
    layers
        true indices of the layers whose keys will be turned, all of them with full attention.
    instead
        what an error advises.

    Raises
    ------
    ConfigError
        keys of these layers have no rotary positions, or others than transformers' common ones, or
        angles that depend on the length, so that a stored key cannot be turned to another position.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Iterable[int], instead: str = "positions=original"
    ) -> None:
        rotary, rope = _modules(model), card_of(model).rope.get(FULL)
        kind, reason = rope.kind if rope else "default", ""
        if _follows_length(kind):
            reason = f"its {kind} RoPE changes with the length"
        elif not rotary:
            reason = "it has layers without rotary positions"
        else:
            self._rotary = rotary[0]
            # of layer, where layers with a window have other angles
            kinds = _rope_type(self._rotary)
            with_all = [kind for kind in WITH_ALL_KEYS if kind in kinds]
            self._kind = tuple(with_all) if isinstance(kinds, dict) else ()
            self._scaling = getattr(self._rotary, "_".join([*self._kind, "attention_scaling"]), 1.0)
            attention = next(iter(attention_modules(model).values()))
            self._apply = module_function(attention, "apply_rotary_pos_emb")
            reason = self._tried(model, layers)
        if reason:
            raise ConfigError(
                f"model={type(model).__name__}: {reason}, so stored keys cannot be turned to other"
                f" positions; use {instead}"
            )

    def angles(self, by: torch.Tensor) -> Angles:
        """cos and sin [B, L, n, R] of a turn by [B, L, n] positions.

        R of D dimensions are turned.
        """
        flat = by.flatten(0, 1)
        # read for its dtype and device
        parts = self._rotary(torch.empty(0, device=by.device), flat, *self._kind)
        cos, sin = (part.to(by.device).unflatten(0, by.shape[:2]) / self._scaling for part in parts)
        return cos, sin

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D] of any dtype, turned in float32."""
        lists = vectors.float().reshape(
            -1, vectors.shape[1] // angles[0].shape[1], *vectors.shape[2:]
        )
        cos, sin = (part.flatten(0, 1) for part in angles)
        first, last = self._turns
        part = lists[..., first:last]
        whole: torch.Tensor = self._apply(part, part[:, :0], cos, sin)[0]
        if whole.shape[-1] < lists.shape[-1]:
            whole = torch.cat([lists[..., :first], whole, lists[..., last:]], dim=-1)
        return whole.view_as(vectors).to(vectors.dtype)

    @torch.no_grad()
    def _tried(self, model: PreTrainedModel, layers: Iterable[int]) -> str:
        """Why keys of these layers cannot be turned to a later position; "": they can.

        The hidden states of one token do not depend on its position: it attends itself alone.
        """
        first, later = (read_token(model, position).calls for position in (0, PLACE))
        for layer in layers:
            key, expected = first[layer].key.float(), later[layer].key.float()
            near = max(1e-3, 4 * torch.finfo(later[layer].key.dtype).eps)
            # channel by channel: in some models a few that hardly turn are far larger than all
            # others
            if not ((expected - key).abs() > near * expected.abs()).any():
                return "it has layers without rotary positions"
            if not any(
                (expected - turned).norm() <= near * expected.norm() for turned in self._turned(key)
            ):
                return (
                    "it does more to a key than to turn it by its position, or does so in a way of"
                    " its own"
                )
        return ""

    def _turned(self, key: torch.Tensor) -> Iterator[torch.Tensor]:
        """A key [1, H, 1, D] turned as a whole, and as far as angles reach, from its first channel
        on or to its last: models do one of these.
        """
        width = key.shape[-1]
        with suppress(RuntimeError, TypeError, ValueError):
            angles = self.angles(torch.full((1, 1, 1), PLACE, device=key.device))
            reach = angles[0].shape[-1]
            for self._turns in ((0, width), (0, reach), (width - reach, width)):
                with suppress(RuntimeError):  # sizes that do not fit
                    yield self.turn(key, angles)


# -- angles that follow the length -----------------------------------------------------------------


class Stretch(NamedTuple):
    """Rotary positions of a model, or of one kind of its layers, whose angles follow the length.

    Attributes
    ----------
    rope_type
        "dynamic" or "longrope".
    limit
        up to so many tokens the angles are those that the model began with.
    key
        of the model's config, what says the limit.
    """

    rope_type: str
    limit: int
    key: str

    def side(self, length: int) -> int:
        """Texts with the same have the same angles."""
        return int(length > self.limit) if self.rope_type == "longrope" else max(length, self.limit)

    def __str__(self) -> str:
        return f"rope_type={self.rope_type} with {self.key}={self.limit}"


class _Noted(threading.local):
    """Tokens of each row that this thread's forward pass has angles for.

    None: the pass is not kvbench's.
    """

    lengths: Sequence[int] | None = None


_noted = _Noted()


def note(lengths: Sequence[int] | None) -> None:
    """Say to what lengths the rows of the next forward passes come, see `Stretch`.

    None: transformers' own angles.
    """
    _noted.lengths = lengths


@contextmanager
def angles_of(lengths: Sequence[int]) -> Iterator[None]:
    """Meanwhile `note` the lengths of the rows."""
    note(lengths)
    try:
        yield
    finally:
        note(None)


def stretches(model: PreTrainedModel) -> list[Stretch]:
    """Those of a model; [] where positions alone say its angles."""
    card, modules = card_of(model), _modules(model)
    return [stretch for module in modules for stretch in _stretches(module, card).values()]


def watch_length(model: PreTrainedModel) -> None:
    """Have the angles of a model follow what is noted, where they follow the length."""
    for module in _modules(model):
        by_prefix = _stretches(module, card_of(model))
        if by_prefix and not getattr(module, "_kvbench_watches", False):
            module.register_forward_hook(partial(_angles, by_prefix), with_kwargs=True)
            module._kvbench_watches = True


def refuse_mixed(model: PreTrainedModel, lengths: Sequence[int]) -> None:
    """Refuse a batch whose rows transformers would give each other's angles.

    Raises
    ------
    ConfigError
        names the kind of rotary positions, and where it changes.
    """
    for stretch in stretches(model):
        if len({stretch.side(length) for length in lengths}) > 1:
            raise ConfigError(
                f"{type(model).__name__}: rows of {min(lengths)} and {max(lengths)} tokens have"
                f" different angles ({stretch}); expected rows of one length, or none beyond the"
                " limit, or each row with its own KVCache"
            )


def refuse_recomputed(model: PreTrainedModel, lengths: Sequence[int], new_tokens: int) -> None:
    """Refuse prompts that pass, as they go on, where the model's class computes all keys again.

    Raises
    ------
    ConfigError
        names the kind of rotary positions, and where it changes.
    """
    for stretch in stretches(model):
        crossing = [length for length in lengths if length <= stretch.limit < length + new_tokens]
        if crossing and drops_cache(model, stretch.limit):
            raise ConfigError(
                f"{type(model).__name__}: a prompt of {crossing[0]} tokens and {new_tokens} new"
                f" ones pass where it computes all keys again with other angles ({stretch}), which"
                f" a method's cache cannot; expected prompt and new tokens within {stretch.limit},"
                " or a longer prompt"
            )


def drops_cache(model: PreTrainedModel, read: int) -> bool:
    """Whether the model's class, in `generate`, drops a cache that has read so many tokens."""
    cache = CountingCache(card_of(model).layers, {})
    cache.count(read)
    ids = torch.zeros(1, read + 1, dtype=torch.int64, device=model.device)
    arguments = {
        "past_key_values": cache,
        "attention_mask": torch.ones_like(ids),
        "use_cache": True,
    }
    prepared = type(model).prepare_inputs_for_generation(
        model, ids, next_sequence_length=1, **arguments
    )
    return prepared.get("past_key_values") is not cache


def _modules(model: PreTrainedModel) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("rotary_emb")]


def _follows_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _rope_type(module: Any) -> Any:
    """The kind of scaling of a module's angles; a mapping where each kind of layer has its own."""
    return getattr(module, "rope_type", "default")


def _stretches(module: Any, card: ModelCard) -> dict[str, Stretch]:
    """What of a module follows the length, by the prefix of its buffers: "" or a layer kind's."""
    kinds = _rope_type(module)
    by_layer = kinds if isinstance(kinds, dict) else {FULL: kinds}
    stretches = {}
    for layer, kind in by_layer.items():
        if not _follows_length(kind):
            continue
        limit, key = module.original_max_seq_len, "max_position_embeddings"
        if kind == "longrope":
            limit, key = card.rope[layer].original, "original_max_position_embeddings"
        stretches[f"{layer}_" if by_layer is kinds else ""] = Stretch(kind, limit, key)
    return stretches


def _angles(
    by_prefix: Mapping[str, Stretch],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """cos and sin [B, q, R] of positions [B, q], each row's for its noted length."""
    lengths = _noted.lengths
    if lengths is None:
        return output
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    positions = arguments.pop("position_ids")
    # one list of positions is for all rows
    if len(positions) != len(lengths) or len(set(lengths)) == 1:
        rows = [(positions, max(lengths))]
    else:
        rows = [(positions[row : row + 1], length) for row, length in enumerate(lengths)]
    angles = []
    for row_positions, length in rows:
        _renew(module, by_prefix)
        angles.append(_for_length(module, row_positions, length, arguments))
    _renew(module, by_prefix)
    return tuple(torch.cat(parts) for parts in zip(*angles, strict=True))


def _for_length(
    module: Any, positions: torch.Tensor, length: int, arguments: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The module's own, of positions the last of which is the text's."""
    last = positions.new_full((len(positions), 1), length - 1)
    out = module.forward(position_ids=torch.cat([positions, last], dim=1), **arguments)
    return tuple(part[:, :-1] for part in out)


def _renew(module: Any, by_prefix: Mapping[str, Stretch]) -> None:
    """Forget the longest text that a module was asked about; only dynamic scaling goes by it."""
    for prefix, stretch in by_prefix.items():
        if stretch.rope_type != "longrope":
            module.register_buffer(
                f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
            )
            for name in (f"{prefix}max_seq_len_cached", "max_seq_len_cached"):
                setattr(module, name, module.original_max_seq_len)
