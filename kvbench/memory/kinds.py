"""How keys and values are held in each tier: what `kv=` chooses. No torch.

`ROWS` code each token by itself. `GROUPED`, KIVI's, share parameters among tokens that stand together, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbench.config import ConfigError, show

if TYPE_CHECKING:  # it imports torch
    from kvbench.method import Method

ROWS = ("native", "fp8", "int8")
GROUPED = {"kivi4": 4, "kivi2": 2}  # and the bits of a code
KINDS = {"device": (*ROWS, *GROUPED), "host": ROWS}


class KV(NamedTuple):
    """A kind for the device's tokens, and one for the host's."""

    device: str = "native"
    host: str = "native"

    @property
    def coded(self) -> bool:
        """Whether any tier holds its tokens in fewer bits."""
        return self != NATIVE

    def __str__(self) -> str:
        own = "native" if self.device in GROUPED else self.device  # what goes with it on the host
        return self.device if self.host == own else f"{self.device}-{self.host}"


NATIVE = KV()


def kv_of(asked: str | Mapping[str, str]) -> KV:
    """What is asked for: one kind for both tiers, or a kind each as {"device": ..., "host": ...}.

    Raises:
        ConfigError: there is no such kind, or no such tier.
    """
    if isinstance(asked, str):
        if asked not in KINDS["device"]:
            raise ConfigError(f"kv={asked}: expected {' | '.join(KINDS['device'])}")
        return KV(asked, asked if asked in ROWS else "native")
    if not isinstance(asked, Mapping):
        raise ConfigError(f"kv={show(asked)}: expected {' | '.join(KINDS['device'])}, or one each for device and host")
    for tier, kind in asked.items():
        if tier not in KINDS:
            raise ConfigError(f"kv.{tier}={show(kind)}: no such tier; one of {', '.join(KINDS)}")
        if kind not in KINDS[tier]:
            raise ConfigError(f"kv.{tier}={show(kind)}: expected {' | '.join(KINDS[tier])}")
    return KV(**asked)


def kv_in(config: Mapping[str, Any]) -> KV:
    """That of a composed config, or of a stored one."""
    return KV(*(config["kv"][tier] for tier in KV._fields))


def unfit_for(kv: KV, method: Method, name: str, counted: bool) -> Iterator[str]:
    """Why the tokens of a method cannot be held so; `counted`: generated tokens count inside its budget."""
    needs, evicts = method.needs, method.evicts == "always" or (method.evicts == "counted" and counted)
    if kv.device in GROUPED and (needs.home != "device" or needs.on_drop == "offload"):
        yield f"kv={kv}: {name} keeps tokens on the host, which leave their groups; expected {' | '.join(ROWS)}"
    elif kv.device in GROUPED and evicts:
        yield f"kv={kv}: {name} drops tokens out of their groups as it generates; expected {' | '.join(ROWS)}"


def unfit(kv: KV, head_dim: int | None) -> Iterator[str]:
    """Why keys and values with heads of this size (None: not known yet) cannot be held so."""
    if head_dim is None:
        return
    if kv.coded and head_dim % 4:
        yield f"kv={kv}: reads rows in words of 4 bytes, and the model's heads have {head_dim} channels; use kv=native"
    elif kv.device in GROUPED and head_dim % 32:
        yield f"kv={kv}: groups 32 channels, and the model's heads have {head_dim}; expected {' | '.join(ROWS)}"
