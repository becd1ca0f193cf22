"""Latent attention in its absorbed form, as inference engines run it (DeepSeek-AI 2024,
"DeepSeek-V2", section 2.1.2).

A layer stores of each token a latent and one rotary key for all heads. transformers' `expand_kv`
makes the keys and values of all heads of them, a linear map. A query times that map attends what is
stored, as one KV head of multi-query attention does: the key is latent and rotary key, the value
the latent. Of the latent that comes out the same map makes the output of each head.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.config import ConfigError


class Absorbed(NamedTuple):
    """What an attention module makes of the latents that it stores.

    Attributes
    ----------
    key
        [Hq, D of queries, rank + rotary], what makes keys of latent and rotary key.
    value
        [Hq, rank, D of values], what makes values of latents.
    """

    key: Tensor
    value: Tensor

    @classmethod
    @torch.inference_mode(False)  # what is made in this mode takes part in no other
    @torch.no_grad()
    def of(cls, module: Any, latent: Tensor, rotary: Tensor) -> Absorbed:
        """Of a module that stores such latents [B, 1, q, rank] and rotary keys: what it makes of
        each unit vector.
        """
        rank, width = latent.shape[3], latent.shape[3] + rotary.shape[3]
        units = torch.eye(width, dtype=latent.dtype, device=latent.device)[None, None]
        key, value = module.expand_kv(units[..., :rank], units[..., rank:])
        return cls(key[0].transpose(1, 2), value[0, :, :rank].contiguous())

    def queries(self, query: Tensor) -> Tensor:
        """Queries [B, Hq, q, D] as they attend what is stored, [B, Hq, q, rank + rotary]."""
        return torch.einsum("bhqd,hdw->bhqw", query, self.key)

    def outputs(self, latents: Tensor) -> Tensor:
        """What heads make of the latents that they attended, [B, Hq, q, rank]."""
        return torch.einsum("bhqr,hrd->bhqd", latents, self.value)

    def expands(self, stored: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the last of the tokens `stored` [B, 1, q, rank + rotary] has, near enough, the
        last of these keys and values of heads, [B, Hq, q, D].
        """
        latent = stored[:, :, -1:, : self.value.shape[1]]
        made = stored[:, :, -1:] @ self.key.transpose(1, 2), latent @ self.value
        near = max(1e-4, 4 * torch.finfo(stored.dtype).eps)
        pairs = zip(made, (key[:, :, -1:], value[:, :, -1:]), strict=True)
        return all((ours - theirs).norm() <= near * theirs.norm() for ours, theirs in pairs)


# of each module, as it was when it last read a prompt
_absorbed: weakref.WeakKeyDictionary[torch.nn.Module, Absorbed] = weakref.WeakKeyDictionary()


def absorbed_in(module: Any) -> Absorbed | None:
    """What was last worked out for a module; None: it attends what it stores."""
    return _absorbed.get(module)


def absorbed_of(
    module: Any, stored: tuple[Tensor, Tensor], key: Tensor, value: Tensor
) -> Absorbed | None:
    """What an attention module makes of the latents that it stores; None: it attends what it
    stores.

    It is worked out anew where a prompt shows that the weights have changed.

    Parameters
    ----------
    stored
        what the module has given its cache.
    key, value
        [B, Hq, q, D], what it attends.

    Raises
    ------
    ConfigError
        keys and values are no linear map of what is stored.
    """
    if getattr(type(module), "expand_kv", None) is None:
        return None
    absorbed, rows = _absorbed.get(module), torch.cat(stored, dim=3)
    if (
        absorbed is None
        or absorbed.key.dtype != rows.dtype
        or absorbed.key.device != rows.device
        or (key.shape[2] > 1 and not absorbed.expands(rows, key, value))
    ):
        absorbed = _absorbed[module] = Absorbed.of(module, *stored)
        if not absorbed.expands(rows, key, value):
            raise ConfigError(
                f"{type(module).__name__}: its keys and values are no linear map of the latents"
                " that it stores, so that no query can attend these"
            )
    return absorbed
