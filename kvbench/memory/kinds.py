"""How keys and values are held in each tier: what `kv=` chooses. No torch.

Rows (`ROWS`) code each token by itself. KIVI's (`GROUPED`) share parameters among tokens that are stored together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvbench.config import ConfigError, show

ROWS = ("native", "fp8", "int8")


class KV(NamedTuple):
    """A kind for the device's tokens, and one for the host's."""

    device: str = "native"
    host: str = "native"

    @property
    def coded(self) -> bool:
        """Whether any tier holds its tokens in fewer bits."""
        return self != NATIVE

    def __str__(self) -> str:
        return self.device if self.device == self.host else f"{self.device}-{self.host}"


NATIVE = KV()


def kv_of(asked: str | Mapping[str, str]) -> KV:
    """What is asked for: one kind for both tiers, or a kind each as {"device": ..., "host": ...}.

    Raises:
        ConfigError: there is no such kind, or no such tier.
    """
    tiers = {"device": asked, "host": asked} if isinstance(asked, str) else asked
    for tier, kind in tiers.items():
        if tier not in KV._fields:
            raise ConfigError(f"kv.{tier}={show(kind)}: no such tier; one of {', '.join(KV._fields)}")
        if kind not in ROWS:
            key = "kv" if isinstance(asked, str) else f"kv.{tier}"
            raise ConfigError(f"{key}={show(kind)}: expected {' | '.join(ROWS)}")
    return KV(**tiers)


def kv_in(config: Mapping[str, Any]) -> KV:
    """That of a composed config; of one from before there was a choice, native."""
    return KV(**{tier: kind for tier, kind in (config.get("kv") or {}).items() if tier in KV._fields})


def unfit(kv: KV, head_dim: int | None) -> Iterator[str]:
    """Why keys and values with heads of this size (None: not known yet) cannot be held so."""
    if kv.coded and head_dim is not None and head_dim % 4:
        yield f"kv={kv}: reads rows in words of 4 bytes, and the model's heads have {head_dim} channels; use kv=native"
