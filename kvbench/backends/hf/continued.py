"""Does transformers go on from a model's states exactly? Found by a trial, once for each model.

Of some architectures (Mamba 1) a pass of several tokens forgets the state that is there; then a
prompt is read in one pass, and what comes after it token by token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench.backends.hf.layers import card_of, kept_layers
from kvbench.config import ConfigError

TOKENS = 32
NEAR = 1e-2  # of what is there; a piece that forgets a state is off by a tenth and more
_reasons: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


def try_states(model: PreTrainedModel) -> None:
    """Try a model that holds states: one pass against two.

    Raises
    ------
    ConfigError
        a decode step does not go on from its states.
    """
    if model in _reasons or not any(part.has_states for part in kept_layers(model).values()):
        return
    whole, step, piece = (_read(model, cuts) for cuts in ([], [TOKENS - 1], [TOKENS // 2]))
    near = max(NEAR, 16 * torch.finfo(whole.dtype).eps)
    off = [float((part - whole).norm() / whole.norm()) for part in (step, piece)]
    name = f"{type(model).__name__}: transformers does not go on from its states"
    if not off[0] <= near:
        raise ConfigError(f"{name}: a token read after others is {off[0]:.2g} off")
    _reasons[model] = (
        "" if off[1] <= near else f"{name} with several tokens at once, {off[1]:.2g} off"
    )


def refuse_pieces(model: PreTrainedModel, before: int, tokens: int) -> None:
    """Refuse a pass of several tokens after others, where states would be forgotten.

    Parameters
    ----------
    before, tokens
        how many were read, and are to be.

    Raises
    ------
    ConfigError
        says how far off it would be, and what would be right.
    """
    if before and tokens > 1 and (reason := _reasons.get(model)):
        raise ConfigError(
            f"{reason}; expected the whole prompt in one pass, and later tokens one by one"
            " (question=decode)"
        )


@torch.no_grad()
def _read(model: PreTrainedModel, cuts: Sequence[int]) -> Tensor:
    """The last token's hidden state of a text read in pieces that end at `cuts`, and at its end."""
    vocabulary, cache = card_of(model).vocabulary, DynamicCache(config=model.config)
    ids = (torch.arange(TOKENS, device=model.device) * 7 + 3)[None] % vocabulary
    positions = torch.arange(TOKENS, device=model.device)[None]
    for start, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        out = model.base_model.forward(
            input_ids=ids[:, start:end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
    return out.last_hidden_state[0, -1].float()
