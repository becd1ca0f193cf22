"""How keys and values are held in each tier: what `kv=` chooses. No torch.

`ROWS` code each token by itself. `GROUPED`, KIVI's, share parameters among tokens that stand
together, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvbench.config import ConfigError, show

if TYPE_CHECKING:  # it imports torch
    from kvbench.method import Method

# TurboQuant's, of vLLM
PUBLISHED = ("turboquant_k8v4", "turboquant_4bit", "turboquant_k3v4", "turboquant_3bit")
# and of its paper
PAPERS = ("turboquant_mse4", "turboquant_mse3", "turboquant_prod4", "turboquant_prod3")
# turn rows by a Hadamard matrix
HADAMARD = {"turboquant_4bit", "turboquant_k3v4", "turboquant_3bit"}
ROWS = ("native", "fp8", "int8", "int4", *PUBLISHED, *PAPERS)
GROUPED = ("kivi4", "kivi2")
EVERY = (*ROWS, *GROUPED)
# code keys and values in one way, each row by itself
ALIKE = ("native", "fp8", "int8", "int4", "turboquant_mse4", "turboquant_mse3")
ROTATIONS = ("none", "hadamard")
# Raised where the numbers of a kind change: run ids have them.
VERSIONS = dict.fromkeys(EVERY, 1)
# What each key may be; null of a side: as its tier.
KINDS = {"device": EVERY, "host": ROWS, "key": EVERY, "value": EVERY, "rotate": ROTATIONS}
SIDES = ("key", "value")
Tier = Literal["device", "host"]
TIERS: tuple[Tier, Tier] = ("device", "host")


class KV(NamedTuple):
    """How keys and values are held.

    Attributes
    ----------
    device, host
        the kind of each tier's tokens.
    key, value
        of keys, and of values, another kind than their tier's; None: their tier's.
    rotate
        "hadamard" turns rows before they are coded.
    native_layers
        so many first, and so many last layers hold their tokens as they came.
    """

    device: str = "native"
    host: str = "native"
    key: str | None = None
    value: str | None = None
    rotate: str = "none"
    native_layers: int = 0

    def kinds(self, tier: Tier) -> tuple[str, str]:
        """Of a tier's keys, and of its values."""
        tier_kind: str = getattr(self, tier)
        requested = [getattr(self, side) or tier_kind for side in SIDES]
        key, value = (
            tier_kind if tier == "host" and kind in GROUPED else kind for kind in requested
        )
        return key, value

    @property
    def named(self) -> set[str]:
        """The kinds of both tiers, of keys and of values."""
        return {kind for tier in TIERS for kind in self.kinds(tier)}

    @property
    def versions(self) -> dict[str, int]:
        """Of each kind that codes tokens."""
        return {kind: VERSIONS[kind] for kind in sorted(self.named - {"native"})}

    @property
    def coded(self) -> bool:
        """Whether any tier holds its tokens in fewer bits."""
        return self.named != {"native"}

    @property
    def grouped(self) -> bool:
        """Whether the device's keys are coded in groups of tokens."""
        return self.kinds("device")[0] in GROUPED

    def of_layer(self, layer: int, layers: int, windows: int) -> KV:
        """That of one of so many layers; where some have a window none is left native."""
        ends = 0 if windows else min(self.native_layers, layers // 2)
        return NATIVE if layer < ends or layer >= layers - ends else self

    def stored(self) -> dict[str, Any]:
        """As a run's identity has it: the tiers' kinds, and what else differs from none."""
        return {
            key: value
            for key, value in self._asdict().items()
            if key in TIERS or value != getattr(NATIVE, key)
        }

    def __str__(self) -> str:
        key, value = self.kinds("device")
        # what goes with it on the host
        host_default = "native" if self.device in GROUPED else self.device
        parts = [key if key == value else f"{key}+{value}"]
        if self.kinds("host") != self._replace(host=host_default).kinds("host"):
            parts.append("+".join(dict.fromkeys(self.kinds("host"))))
        if self.rotate != "none":
            parts.append(self.rotate)
        if self.native_layers != native_layers(self.device):
            parts.append(f"ends{self.native_layers}")
        return "-".join(parts)

    def unfit(
        self,
        head_dim: int | None,
        layers: int | None = None,
        windows: int = 0,
        latent_dim: int = 0,
    ) -> Iterator[str]:
        """Why keys and values cannot be held so, with heads of this size and so many layers, some
        with a window (None: not known yet); `latent_dim` as of `kvbench.method.Shape`.
        """
        key, value = self.kinds("device")
        pairs = {self.kinds(tier) for tier in TIERS}
        if latent_dim and pairs - {(kind, kind) for kind in ALIKE}:
            why = "codes values apart from keys, and in latent attention a value is part of its key"
            yield f"kv={self}: {why}; expected {_listed(ALIKE)}"
        kinds, turned = self.named - {"native"}, self.rotate != "none"
        if value in GROUPED and key not in GROUPED:
            why = "codes values with their keys, in groups of tokens"
            yield f"kv.value={value}: {why}; expected kv.key={value}, or int4"
        if turned and not kinds:
            why = "turns rows before they are coded, and kv=native codes none"
            yield f"kv.rotate={self.rotate}: {why}; expected none"
        if turned and (turning := sorted(kinds & {*PUBLISHED, *PAPERS})):
            yield f"kv.rotate={self.rotate}: {turning[0]} turns rows itself; expected none"
        of_layers = {self.of_layer(layer, layers or 0, windows) for layer in range(layers or 0)}
        if self.coded and of_layers == {NATIVE}:
            why = f"no layer of the model's {layers} would be coded"
            yield f"kv.native_layers={self.native_layers}: {why}; expected fewer"
        if head_dim is None:
            return
        if (turned or kinds & HADAMARD) and head_dim & (head_dim - 1):
            why = "turns rows by a Hadamard matrix, of a power of two"
            yield f"kv={self}: {why}; the model's heads have {head_dim} channels"
        elif kinds - {"fp8", "int8"} and head_dim % 32:
            why = f"packs 32 channels, and the model's heads have {head_dim}"
            yield f"kv={self}: {why}; expected native | fp8 | int8"

    def unfit_for(
        self, method: Method, name: str, counted: bool, latent_dim: int = 0
    ) -> Iterator[str]:
        """Why the tokens of a method cannot be held so; `counted`: generated tokens count inside
        its budget; `latent_dim` as of `kvbench.method.Shape`.
        """
        needs = method.needs
        if latent_dim and (needs.writes or needs.rebuilds_keys):
            does = "writes keys or values anew" if needs.writes else "moves values without keys"
            yield (
                f"method={name}: {does}, and in latent attention a value is part of its key;"
                " expected a method that keeps or selects tokens as they are, such as snapkv"
            )
        evicts = method.evicts == "always" or (method.evicts == "counted" and counted)
        why = None
        if needs.home != "device" or needs.on_drop == "offload":
            why = "keeps tokens on the host, which leave their groups"
        elif evicts:
            why = "drops tokens out of their groups as it generates"
        if self.grouped and why:
            yield f"kv={self}: {name} {why}; expected {_listed(ROWS)}"


NATIVE = KV()


def native_layers(kind: str) -> int:
    """First and last layers that a kind leaves native as published, where none has a window."""
    return 2 if kind in PUBLISHED else 0


def _listed(kinds: Sequence[str]) -> str:
    """Kinds for a message; those of TurboQuant in short."""
    short = [kind for kind in kinds if not kind.startswith("turboquant")]
    return " | ".join(
        [*short, *(["turboquant_3bit, ... (kvbench --help)"] if len(short) < len(kinds) else [])]
    )


def kv_of(choice: str | Mapping[str, Any]) -> KV:
    """What is asked for: one kind for both tiers, or some of the keys of `KV`.

    Raises
    ------
    ConfigError
        there is no such kind, or no such key.
    """
    keys = ", ".join(KV._fields)
    if isinstance(choice, str):
        if choice not in EVERY:
            raise ConfigError(f"kv={choice}: expected {_listed(EVERY)}")
        host = choice if choice in ROWS else "native"
        return KV(choice, host, native_layers=native_layers(choice))
    if not isinstance(choice, Mapping):
        raise ConfigError(f"kv={show(choice)}: expected {_listed(EVERY)}, or some of {keys}")
    for key, value in choice.items():
        if key not in KV._fields:
            raise ConfigError(f"kv.{key}={show(value)}: no such key; one of {keys}")
        expected = KINDS.get(key)
        if expected and value not in expected and not (value is None and key in SIDES):
            raise ConfigError(f"kv.{key}={show(value)}: expected {_listed(expected)}")
    kv = KV(**choice)
    if type(kv.native_layers) is not int or kv.native_layers < 0:
        shown = show(kv.native_layers)
        raise ConfigError(f"kv.native_layers={shown}: expected a whole number, 0 or more")
    return kv


def kv_in(config: Mapping[str, Any]) -> KV:
    """That of a composed config, or of a stored one."""
    return KV(**{key: config["kv"][key] for key in KV._fields if key in config["kv"]})
