"""Soft caps in Numba kernels."""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit


@jit
def capped(logit, softcap):  # type: ignore[no-untyped-def]
    """See `kvbench.method.capped`, of a float32; 0: no cap."""
    if softcap > 0 and logit > -np.inf:
        return softcap * np.tanh(logit / softcap)
    return logit
