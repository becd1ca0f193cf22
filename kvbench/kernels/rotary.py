"""Rotary positions of stored keys, in one pass over them."""

from __future__ import annotations

from kvbench.kernels.vectors import kernel


@kernel
def turn(vectors, positions, cosines, sines, turned):  # type: ignore[no-untyped-def]
    """Turn vectors by their positions, one half of the channels against the other (RoPE as Llama
    has it).

    Parameters
    ----------
    vectors
        [B, H, n, D] float32.
    positions
        [B, 1 or H, n] int64.
    cosines, sines
        [length, R] float32, of each position; the first R channels are turned.
    turned
        [B, H, n, D] float32; written.
    """
    heads, half = vectors.shape[1], cosines.shape[1] // 2
    for row in range(len(vectors)):
        for head in range(heads):
            for at in range(vectors.shape[2]):
                place = positions[row, head * positions.shape[1] // heads, at]
                cosine, sine = cosines[place], sines[place]
                vector, out = vectors[row, head, at], turned[row, head, at]
                for i in range(half):
                    out[i] = vector[i] * cosine[i] - vector[half + i] * sine[i]
                for i in range(half):
                    out[half + i] = vector[half + i] * cosine[half + i] + vector[i] * sine[half + i]
                out[2 * half :] = vector[2 * half :]
