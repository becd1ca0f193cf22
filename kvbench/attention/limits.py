"""Names and limits of the executors, for checks that shall not wait for torch."""

from __future__ import annotations

# What FlashInfer's kernels are compiled for, and what to do where it is not installed.
FLASHINFER_HEAD_DIMS = (64, 128, 256)


FLASHINFER_DTYPES = ("bfloat16", "float16")


FLASHINFER_LATENT = "its kernels for latent attention are not used yet"
FLASHINFER_MISSING = "the package is not installed, pip install 'kvbench[flashinfer]'"
