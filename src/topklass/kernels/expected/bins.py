r"""Kernels over all classes: the largest scores, moments of bins, and the gradient.

A class that is not among the largest adds ``Σ f^m``, m = 0..7, to the moments of its bin, where
``−1 ≤ f ≤ 1`` is its place there; its gradient is a polynomial of f with the coefficients of its
bin. See ``reference/expected_tables.py``. Both passes leave out tiles without a class in reach.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.smooth.row_state import as_score, multiple, row_heads
from topklass.reference import expected_tables

TERMS = tl.constexpr(expected_tables.TERMS)
"""Moments of a bin."""
BINS = tl.constexpr(expected_tables.MOST_BINS)
LANES = tl.constexpr(32)
"""Room for the bins, a power of two."""
FEW = tl.constexpr(256)
"""Classes whose moments are taken together: there may be one of them in reach, or all."""
PLACES = tl.constexpr(2 / expected_tables.WIDTH)
"""How fast the place in a bin changes, in units of noise."""


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for."""

    k: int
    """The number of heads."""
    slots: int
    """Room for the heads, a power of two."""
    rows: int
    block: int
    """Columns."""
    aligned: int
    """What divides the stride and the length of rows."""
    joined: bool = False
    """Whether heads and moments of a row take one kernel."""
    mean: bool = False
    """Whether the gradient is that of the mean."""


class Constants(NamedTuple):
    """What the gradient needs of each row."""

    heads: Any
    """The largest scores in descending order, (R, H)."""
    places: Any
    """Their classes, (R, H), −1 for those that are absent."""
    of_heads: Any
    """Their derivatives, (R, H)."""
    of_moments: Any
    """Derivatives by the moments, (R, TERMS·BINS)."""
    slopes: Any
    """Of the loss by the expected score, and minus that by the label's score, (R)."""


@triton.jit
def bin_of(x, center, least, rate, bins):
    """Which bin a score is in, where there, and whether it is in any: not above the least head."""
    depth = (center - x) * rate
    near = (x <= least) & (depth < bins - 0.5)
    number = tl.where(near, tl.minimum(depth + 0.5, bins - 0.5), 0.0).to(tl.int32)
    return number, tl.where(near, 2 * (number - depth), 0.0), near


@triton.jit
def next_bin(number, near, bin):
    """The first bin above another that is not empty; LANES if there is none."""
    return tl.min(tl.where(near & (number > bin), number, LANES), 0)


@triton.jit
def added(moments, number, place, near, bin, sign):
    """Moments (LANES), one after another, and those of the classes in one bin."""
    power = tl.where(near & (number == bin), sign, 0.0)
    lane = tl.arange(0, LANES) == bin
    result = ()
    for m in tl.static_range(TERMS):
        result = result + (moments[m] + tl.where(lane, tl.sum(power, 0), 0.0).to(tl.float64),)
        power = power * place
    return result


@triton.jit
def row_moments(line, span, columns, heads, marks, scale, out, TILE: tl.constexpr):
    """Write the moments of the bins of a piece of a row.

    All scores up to the least head are in bins; the heads that are equal to it are taken out again
    if they are given.
    """
    BLOCK: tl.constexpr = FEW if TILE.block > FEW else TILE.block
    center, least = marks
    rate, bins = scale
    moments = ()
    for _ in tl.static_range(TERMS):
        moments = moments + (tl.zeros((LANES,), tl.float64),)
    of_head, there, equal = bin_of(heads, center, least, rate, bins)
    moments = added(moments, of_head, there, equal, tl.max(of_head, 0), -1.0)
    for begin in range(span[0], span[1], BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        number, place, near = bin_of(x, center, least, rate, bins)
        bin = next_bin(number, near, -1)
        while bin < LANES:
            moments = added(moments, number, place, near, bin, 1.0)
            bin = next_bin(number, near, bin)
    lane = tl.arange(0, LANES)
    for m in tl.static_range(TERMS):
        tl.store(out + m * BINS + lane, moments[m], lane < BINS)


@triton.jit
def descending(keys, K: tl.constexpr):
    """At which place each of K keys is in descending order; other slots are larger, and behind."""
    slot = tl.arange(0, keys.shape[0])
    rank = tl.where(slot < K, 0, slot)
    for i in range(K):
        key = tl.sum(tl.where(slot == i, keys, 0), 0)
        before = (key > keys) | ((key == keys) & (i < slot))
        rank += (before & (slot < K)).to(tl.int32)
    return rank


@triton.jit(do_not_specialize=("columns", "stride", "piece", "k"))
def heads_kernel(
    scores, heads, places, moments, columns, stride, piece, k, rate, bins, TILE: tl.constexpr
):
    """The largest scores in a piece of a row, and their classes; a NaN if there is one.

    If the piece is the row, also its moments.
    """
    ALIGNED: tl.constexpr = TILE.aligned
    K: tl.constexpr = TILE.k
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    start = multiple(part * piece, TILE.block)
    line = scores + row * tl.cast(stride, tl.int64)
    keys, found, spoilt = row_heads(line + start, tl.minimum(piece, columns - start), TILE)
    keys, found = tl.reshape(keys, (TILE.slots,)), tl.reshape(found, (TILE.slots,))
    rank = descending(keys, K)
    values = as_score(keys)
    at = (row * tl.num_programs(1) + part) * K + rank
    first = (spoilt > 0) & (rank == 0)
    tl.store(heads + at, tl.where(first, float("nan"), values), rank < K)
    tl.store(places + at, tl.where(found < 0, -1, found + start), rank < K)
    if TILE.joined:
        scale = (tl.cast(rate, tl.float32), tl.cast(bins, tl.float32))
        center = tl.sum(tl.where(rank == k - 1, values, 0.0), 0)
        least = tl.sum(tl.where(rank == K - 1, values, 0.0), 0)
        values = tl.where(rank < K, values, float("inf"))
        out = moments + row * TERMS * BINS
        row_moments(line, (0, columns), columns, values, (center, least), scale, out, TILE)


@triton.jit(do_not_specialize=("columns", "stride", "piece", "k"))
def moments_kernel(
    scores, heads, moments, columns, stride, piece, k, rate, bins, TILE: tl.constexpr
):
    """Moments of a piece of a row, for heads of the whole row."""
    ALIGNED: tl.constexpr = TILE.aligned
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    start = multiple(part * piece, TILE.block)
    scale = (tl.cast(rate, tl.float32), tl.cast(bins, tl.float32))
    line = scores + row * tl.cast(stride, tl.int64)
    top = heads + row * TILE.k
    marks = (tl.load(top + k - 1), tl.load(top + TILE.k - 1))
    slot = tl.arange(0, TILE.slots)
    values = tl.load(top + slot, slot < TILE.k, float("inf"))
    values = tl.where(part == 0, values, float("inf"))
    out = moments + (row * tl.num_programs(1) + part) * TERMS * BINS
    span = (start, tl.minimum(start + piece, columns))
    row_moments(line, span, columns, values, marks, scale, out, TILE)


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "k", "outgoing_stride"),
    do_not_specialize_on_alignment=("outgoing",),
)
def gradient_kernel(
    problem,
    constants,
    outgoing,
    total,
    gradient,
    rows,
    columns,
    stride,
    k,
    outgoing_stride,
    rate,
    bins,
    TILE: tl.constexpr,
):
    """The gradient of a tile of scores, scaled by the outgoing one."""
    ALIGNED: tl.constexpr = TILE.aligned
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    rate, bins = tl.cast(rate, tl.float32), tl.cast(bins, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)[None, :]
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    there = inside[:, None] & (column < columns)

    slope = tl.load(constants.slopes + row, inside, 0.0)
    scale = slope * tl.load(outgoing + row * outgoing_stride, inside, 0.0).to(tl.float32)
    if TILE.mean:
        scale = scale / tl.load(total).to(tl.float32)
    scale = tl.where(slope == 0, 0.0, scale)[:, None]
    top = constants.heads + row * TILE.k
    center = tl.load(top + k - 1, inside, 0.0)[:, None]
    least = tl.load(top + TILE.k - 1, inside, 0.0)[:, None]
    line = problem.scores + row[:, None] * tl.cast(stride, tl.int64)
    x = tl.load(line + column, there, float("-inf")).to(tl.float32)
    number, place, near = bin_of(x, center, least, rate, bins)
    share = tl.zeros((ROWS, BLOCK), tl.float32)
    if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
        at = constants.of_moments + row[:, None] * TERMS * BINS + number
        for back in tl.static_range(1, TERMS):
            m = TERMS - back
            c = tl.load(at + m * BINS, near, 0.0).to(tl.float32)
            share = share * place + m * PLACES * c
    slots = tl.arange(0, TILE.slots)[None, :]
    kept = inside[:, None] & (slots < TILE.k)
    which = tl.load(constants.places + row[:, None] * TILE.k + slots, kept, -1)
    of_head = tl.load(constants.of_heads + row[:, None] * TILE.k + slots, kept, 0.0)
    if problem.labels is not None:
        label = tl.load(problem.labels + row, inside, -1)[:, None]
        share = share - tl.where(column == label, 1.0, 0.0)
        of_head = of_head - tl.where(which == label, 1.0, 0.0)
    out = gradient + row[:, None] * tl.cast(columns, tl.int64)
    tl.store(out + column, share * scale, there)
    tl.debug_barrier()
    here = (which >= begin) & (which < begin + BLOCK)
    tl.store(out + which, of_head * scale, here)
