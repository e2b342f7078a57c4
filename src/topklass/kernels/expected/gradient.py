"""The gradient of the expected k-th largest score: the chance of each class to be it.

It needs the product of all factors but that of the class: the coefficients of those before it,
times those of the ones after it. All terms are positive, so nothing cancels. Products before are
kept once for every segment of candidates, and made again for one segment at a time, from the last
to the first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.expected.counting import candidate, count, keep, kept, next_chances

ENTRIES = tl.constexpr(8)
"""Candidates whose chances are written together."""


class Integral(NamedTuple):
    """Nodes and weights of the integral, inside a kernel."""

    t: Any
    weight: Any


@triton.jit
def keep_segment(near, saved, begin, length, t, inner, TILE: tl.constexpr):
    """Keep the product before each candidate of a segment, from the one before the segment."""
    K: tl.constexpr = TILE.k
    NODES: tl.constexpr = TILE.nodes
    SIZE: tl.constexpr = 2 * K * NODES
    FEW: tl.constexpr = TILE.few
    counts = kept(saved, False, K, NODES)
    for i in range(0, length, FEW):
        above, not_above = next_chances(near, begin + i, t, FEW)
        for j in tl.static_range(FEW):
            keep(inner + (i + j) * SIZE, counts, K, NODES)
            counts = count(counts, above[j], not_above[j], K)


@triton.jit
def write_densities(near, i, before, after, integral, products, TILE: tl.constexpr):
    """Density at each node times weight of a few candidates; returns the product after them."""
    K: tl.constexpr = TILE.k
    FEW: tl.constexpr = TILE.few
    place, first = products
    both = tl.arange(0, 2)[:, None] * TILE.nodes + tl.arange(0, TILE.nodes)[None, :]
    above, not_above = next_chances(near, i, integral.t, FEW)
    for j in tl.static_range(FEW - 1, -1, -1):
        others = before[j][0] * after[K - 1]
        for m in tl.static_range(1, K):
            others += before[j][m] * after[K - 1 - m]
        x = candidate(near, i + j) - integral.t[None, :]
        density = 0.3989422804 * tl.exp(-0.5 * x * x)
        product = integral.weight[None, :] * density * others.to(tl.float32)
        tl.store(place + 2 * (first + j) * TILE.nodes + both, product)
        after = count(after, above[j], not_above[j], K)
    return after


@triton.jit
def write_chances(near, begin, length, slope, products, gradient, NODES: tl.constexpr):
    """Sums over nodes, times the slope, to the classes of a segment."""
    half = tl.cdiv(near.found, 2)
    node = tl.arange(0, NODES)
    for start in range(0, 2 * length, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        number = entry % 2 * half + begin + entry // 2
        there = (entry < 2 * length) & (number < near.found)
        product = tl.load(products + entry[:, None] * NODES + node[None, :], there[:, None], 0)
        column = tl.load(near.classes + number, there, 0)
        tl.store(gradient + column, slope * tl.sum(product, 1), there)


@triton.jit
def write_shares(near, saved, integral, slope, gradient, TILE: tl.constexpr):
    """Write the chance of each candidate to be the k-th largest, times the slope, to its class."""
    K: tl.constexpr = TILE.k
    NODES: tl.constexpr = TILE.nodes
    SIZE: tl.constexpr = 2 * K * NODES
    FEW: tl.constexpr = TILE.few
    half = tl.cdiv(near.found, 2)
    segments = tl.cdiv(half, TILE.segment)
    whole = saved + tl.cast(segments, tl.int64) * SIZE
    inner = whole + SIZE
    products = inner + TILE.segment * SIZE
    after = kept(whole, True, K, NODES)
    for done in range(segments):
        segment = segments - 1 - done
        begin = segment * TILE.segment
        length = tl.minimum(half - begin, TILE.segment)
        ahead = saved + tl.cast(segment, tl.int64) * SIZE
        keep_segment(near, ahead, begin, length, integral.t, inner, TILE)
        tl.debug_barrier()
        for back in range(0, length, FEW):
            i = (length - 1) // FEW * FEW - back
            before = ()
            for j in tl.static_range(FEW):
                before = before + (kept(inner + (i + j) * SIZE, False, K, NODES),)
            after = write_densities(near, begin + i, before, after, integral, (products, i), TILE)
        tl.debug_barrier()
        write_chances(near, begin, length, slope, products, gradient, NODES)
        tl.debug_barrier()


@triton.jit(
    do_not_specialize=("columns", "outgoing_stride"), do_not_specialize_on_alignment=("outgoing",)
)
def scaled_kernel(
    gradient,
    outgoing,
    total,
    result,
    columns,
    outgoing_stride,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a row of the gradient, times the outgoing one; what is 0 stays 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    scale = tl.load(outgoing + row * outgoing_stride).to(tl.float32)
    if MEAN:
        scale = scale / tl.load(total).to(tl.float32)
    slope = tl.load(gradient + row * columns + column, there, 0.0)
    tl.store(result + row * columns + column, tl.where(slope == 0, 0.0, slope * scale), there)
