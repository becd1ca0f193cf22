"""A model's own layers, for a few tokens: linear, feed-forward and attention's projections, RMS
norm.

Arguments of all: addresses of what they are named after, in the type of `stored`; `rows` tokens.
Sums and what lies between are float32; results are rounded once.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.rows import BLOCK, lay_out, load_scalar, meet
from kvbench.kernels.threads import claim, in_threads
from kvbench.kernels.vectors import (
    LANES,
    LINE,
    NOTHING,
    ONE,
    exponential,
    fetch,
    inner,
    kernel,
    larger,
    load,
    over,
    plus,
    put,
    splat,
    store,
    times,
    width_of,
)

OUTPUTS_PIECE = 2 * BLOCK  # of a linear layer
# bytes after those of a weight that are read, on their way to the cache; past its end nothing
# happens
AHEAD = 4608


@kernel
def products(threads, x, weight, bias, out, rows, inputs, outputs, stored):  # type: ignore[no-untyped-def]
    """A linear layer, in so many threads: out [rows, outputs] = x [rows, inputs] . weight [outputs,
    inputs]^T + bias.

    Parameters
    ----------
    bias
        [outputs], or 0.
    """
    laid = _laid_out(x, rows, inputs, stored)
    _linear(threads, laid, (weight,), bias, (out,), (outputs,), stored, stored)


@kernel
def gated(threads, x, gate, up, down, out, rows, inputs, hidden, stored):  # type: ignore[no-untyped-def]
    """A feed-forward part, in so many threads: down . (silu(gate . x) * (up . x)).

    Parameters
    ----------
    x, out
        [rows, inputs].
    gate, up
        [hidden, inputs].
    down
        [inputs, hidden].
    """
    # rows for what whole vectors read and write after the last
    count, padding = rows * hidden, -(-LANES // hidden)
    gates = np.empty((rows + padding, hidden), np.float32)
    ups = np.empty((rows + padding, hidden), np.float32)
    between = np.intp(gates.ctypes.data), np.intp(ups.ctypes.data)
    laid, sizes = _laid_out(x, rows, inputs, stored), (hidden, hidden)
    _linear(threads, laid, (gate, up), 0, between, sizes, stored, NOTHING)
    ones, minus = splat(ONE), splat(-ONE)
    nothing = splat(NOTHING)
    for i in range(0, count, LANES):
        # arrays that are read by address alone would be freed before
        number = load(gates.ctypes.data + 4 * i)
        negated = times(number, minus)
        smaller = exponential(times(larger(negated, nothing), minus))  # of min(number, 0)
        whole = plus(ones, exponential(times(larger(number, negated), minus)))
        weight = over(times(number, smaller), whole)
        store(ups.ctypes.data + 4 * i, times(load(ups.ctypes.data + 4 * i), weight))
    lay_out(ups[:rows], gates[:rows], stored)
    _linear(threads, gates[:rows], (down,), 0, (out,), (inputs,), stored, stored)


@kernel
def rotated(threads, x, weights, angles, outs, rows, inputs, heads, stored):  # type: ignore[no-untyped-def]
    """Queries, keys and values of tokens, in so many threads, the first two turned by their
    positions' angles (RoPE).

    Parameters
    ----------
    weights
        three, [heads * D, inputs].
    angles
        cosines and sines, [rows, D].
    outs
        [rows, heads * D], for each weight.
    heads
        of queries; of keys, as of values; D.
    """
    head_dim = heads[2]
    sizes = heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim
    queries, keys = np.empty((rows, sizes[0]), np.float32), np.empty((rows, sizes[1]), np.float32)
    values = np.empty((rows, sizes[2]), np.float32)
    between = np.intp(queries.ctypes.data), np.intp(keys.ctypes.data), np.intp(values.ctypes.data)
    laid = _laid_out(x, rows, inputs, stored)
    _linear(threads, laid, weights, 0, between, sizes, stored, NOTHING)
    _turn(queries, angles, outs[0], head_dim, stored)
    _turn(keys, angles, outs[1], head_dim, stored)
    for r in range(rows):
        for i in range(sizes[2]):
            put(outs[2], r * sizes[2] + i, values[r, i], stored)


@inner
def _turn(vectors, angles, out, head_dim, stored):  # type: ignore[no-untyped-def]
    """Write vectors [rows, heads * D], each half of a head turned against the other; see
    `rotated`.
    """
    rows, width = vectors.shape
    cosines, sines = angles
    half = head_dim // 2
    for r in range(rows):
        for head in range(0, width, head_dim):
            for i in range(head_dim):
                other = vectors[r, head + i - half] if i >= half else -vectors[r, head + i + half]
                cosine = load_scalar(cosines, r * head_dim + i, stored)
                sine = load_scalar(sines, r * head_dim + i, stored)
                put(out, r * width + head + i, vectors[r, head + i] * cosine + other * sine, stored)


@kernel
def normed(x, weight, out, rows, width, epsilon, stored):  # type: ignore[no-untyped-def]
    """Vectors x [rows, width] over their root mean square, times a weight [width] (Zhang and
    Sennrich, 2019).
    """
    numbers = np.empty(width, np.float32)
    for first in range(0, rows * width, width):
        for i in range(width):
            numbers[i] = load_scalar(x, first + i, stored)
        scale = np.float32(1 / np.sqrt(np.mean(numbers * numbers) + epsilon))
        for i in range(width):
            put(out, first + i, numbers[i] * scale * load_scalar(weight, i, stored), stored)


@inner
def _laid_out(x, rows, width, stored):  # type: ignore[no-untyped-def]
    """The numbers [rows, width] at an address, laid out for weights."""
    numbers, laid = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    for r in range(rows):
        for j in range(width):
            numbers[r, j] = load_scalar(x, r * width + j, stored)
    lay_out(numbers, laid, stored)
    return laid


@inner
def _linear(threads, x, weights, bias, outs, outputs, stored, written):  # type: ignore[no-untyped-def]
    """Linear layers of the same x [rows, inputs], in so many threads.

    Parameters
    ----------
    weights, outs
        addresses, of each layer.
    bias
        address, of all of them, or 0.
    outputs
        how many, of each.
    stored, written
        a number of the weights, and of the results, as they are stored.
    """
    layers = np.empty((len(weights), 4), np.int64)
    pieces = 0
    for i in range(len(weights)):
        layers[i, 0], layers[i, 1] = weights[i], outs[i]
        layers[i, 2], layers[i, 3] = outputs[i], pieces
        pieces += -(-outputs[i] // OUTPUTS_PIECE)
    claims = np.zeros(min(threads, pieces), np.int64)
    in_threads(len(claims), _products, (claims, pieces, x, layers, bias, stored, written))


@inner
def _products(number, claims, pieces, x, layers, bias, stored, written):  # type: ignore[no-untyped-def]
    """As many pieces of the outputs of layers as other threads leave, after those of a stretch of
    its own.

    Where a core reads one long stretch, its own hardware is ahead of it; lines on the way to one
    core and read by the other are read twice.
    """
    block, threads = np.empty((len(x), BLOCK), np.float32), len(claims)
    for turn in range(threads):
        stretch = (number + turn) % threads
        before, end = pieces * stretch // threads, pieces * (stretch + 1) // threads
        piece = before + claim(claims[stretch:])
        while piece < end:
            layer = len(layers) - 1
            while layers[layer, 3] > piece:
                layer -= 1
            weight, out = layers[layer, 0], layers[layer, 1]
            outputs, start = layers[layer, 2], (piece - layers[layer, 3]) * OUTPUTS_PIECE
            stop = min(outputs, start + OUTPUTS_PIECE)
            for first in range(start, stop, BLOCK):
                count = min(BLOCK, stop - first)
                _some_products(x, weight, first, count, block, stored)
                for r in range(len(x)):
                    _put_products(block[r], bias, first, count, out, r * outputs, stored, written)
            piece = before + claim(claims[stretch:])


@inner
def _some_products(x, weight, first, count, block, stored):  # type: ignore[no-untyped-def]
    """block [rows, BLOCK] = x [rows, inputs] . `count` rows of a weight, from `first` on."""
    many, inputs = x.shape
    size, whole = inputs * width_of(stored), inputs // LANES * LANES
    at, last = weight + first * size, weight + (first + count - 1) * size
    for i in range(0, count, 4):
        rows = at, min(at + size, last), min(at + 2 * size, last), min(at + 3 * size, last)
        for line in range(at + AHEAD, at + AHEAD + 4 * size, LINE):
            fetch(line)
        meet(x.ctypes.data, 4 * inputs, many, rows, rows, whole, stored, block.ctypes.data + 4 * i)
        at += 4 * size
    if whole < inputs:
        for r in range(many):
            for i in range(count):
                row = weight + (first + i) * size
                for j in range(whole, inputs):
                    block[r, i] += x[r, j] * load_scalar(row, j, stored)


@inner
def _put_products(products, bias, first, count, out, place, stored, written):  # type: ignore[no-untyped-def]
    """Write the products of one row of x to out, from `place` + `first` on."""
    if bias:
        for i in range(count):
            products[i] += load_scalar(bias, first + i, stored)
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        put(out, place + first + i, load(products.ctypes.data + 4 * i), written)
    for i in range(whole, count):
        put(out, place + first + i, products[i], written)
