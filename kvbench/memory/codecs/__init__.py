"""How a token's key or value is held in fewer bits: a file a family, and here which codec each kind
has.

A kind of one's own is a file beside these with a `Codec`, a line in `KINDS`, its name in
`kvbench.memory.kinds`, and a YAML in `conf/kv`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kvbench.memory.codecs.codec import Codec, Native, Within
from kvbench.memory.codecs.kivi import Channels, Tokens
from kvbench.memory.codecs.rotated import Rotated, haar, hadamard
from kvbench.memory.codecs.scaled import E4m3, Fp8, Int8
from kvbench.memory.codecs.turboquant import Lloyd, Residual, Uniform
from kvbench.memory.kinds import KV, NATIVE, Tier

Make = Callable[[int, torch.dtype], Codec]  # of D and the model's dtype


def _both(make: Make) -> tuple[Make, Make]:
    return make, make


def _turned(
    inner: Callable[..., Codec], rotation: Callable[[int], torch.Tensor], **options: object
) -> Make:
    return lambda head_dim, dtype: Rotated(
        head_dim, dtype, inner(head_dim, dtype, **options), rotation
    )


# Of keys, and of values. KIVI's keys have their parameters by groups of tokens:
# `kvbench.memory.grouped` writes them.
KINDS: dict[str, tuple[Make, Make]] = {
    "native": _both(Native),
    "int8": _both(Int8),
    "fp8": _both(Fp8),
    "int4": _both(partial(Channels, bits=4)),
    "kivi4": (partial(Tokens, bits=4), partial(Channels, bits=4)),
    "kivi2": (partial(Tokens, bits=2), partial(Channels, bits=2)),
    "turboquant_k8v4": (E4m3, partial(Uniform, bits=4)),
    "turboquant_4bit": (_turned(Lloyd, hadamard, bits=4, unit=True), partial(Uniform, bits=4)),
    "turboquant_k3v4": (_turned(Lloyd, hadamard, bits=3, unit=True), partial(Uniform, bits=4)),
    "turboquant_3bit": (_turned(Lloyd, hadamard, bits=3, unit=True), partial(Uniform, bits=3)),
    "turboquant_mse4": _both(_turned(Lloyd, haar, bits=4)),
    "turboquant_mse3": _both(_turned(Lloyd, haar, bits=3)),
    "turboquant_prod4": (_turned(Residual, haar, bits=4), _turned(Lloyd, haar, bits=4)),
    "turboquant_prod3": (_turned(Residual, haar, bits=3), _turned(Lloyd, haar, bits=3)),
}


class Codecs(NamedTuple):
    """How a tier holds keys and how it holds values, each a row a token; `Within` its key a value
    has none.
    """

    key: Codec
    value: Codec

    @classmethod
    def of(
        cls, kv: KV, tier: Tier, head_dim: int, dtype: torch.dtype, latent_dim: int = 0
    ) -> Codecs:
        """Those of a tier; `latent_dim` as of `kvbench.method.Shape`."""
        codecs = [KINDS[kind][side](head_dim, dtype) for side, kind in enumerate(kv.kinds(tier))]
        if kv.rotate != "none":
            codecs = [
                codec if isinstance(codec, Native) else Rotated(head_dim, dtype, codec, hadamard)
                for codec in codecs
            ]
        return cls(codecs[0], Within(latent_dim, dtype) if latent_dim else codecs[1])

    @classmethod
    def native(cls, head_dim: int, dtype: torch.dtype, latent_dim: int = 0) -> Codecs:
        """Rows as they come."""
        return cls.of(NATIVE, "device", head_dim, dtype, latent_dim)

    @property
    def latent_dim(self) -> int:
        """See `kvbench.method.Shape`."""
        return self.value.head_dim if isinstance(self.value, Within) else 0

    @property
    def in_place(self) -> Codecs:
        """What reads both where they lie has for a value within its key the whole key."""
        return Codecs(self.key, self.key) if self.latent_dim else self

    @property
    def nbytes(self) -> int:
        """Of a token's key and value in one KV head."""
        return self.key.nbytes + self.value.nbytes

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., D] as they are held."""
        return self.key.encode(key), self.value.encode(value)

    def decode(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Held keys and values as [..., D]."""
        key = self.key.decode(key)
        if self.latent_dim:
            return key, key[..., : self.latent_dim]
        return key, self.value.decode(value)

    def recoded(
        self, key: torch.Tensor, value: torch.Tensor, target: Codecs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Held keys and values as `target` holds them; a side that is held alike keeps
        every bit.
        """
        sides = zip(self, (key, value), target, strict=True)
        key, value = (
            rows if source == to else to.encode(source.decode(rows)) for source, rows, to in sides
        )
        return key, value
