"""What Triton kernels share: soft caps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(logit, softcap):  # type: ignore[no-untyped-def]
    """See `kvbench.method.capped`: tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    if softcap is not None:
        part = tl.exp(-2.0 * tl.abs(logit) / softcap)
        size = softcap * (1.0 - part) / (1.0 + part)
        logit = tl.where(logit < 0, -size, size)
    return logit
