r"""The smooth loss of long lists: a kernel for all k.

Tilted as in ``reference/tree.py``, the polynomials are chances of a count: with
``p_i = sigmoid((s_i − ρ) / kτ)`` and N the number of successes of independent trials,

    log σ_k − log σ_{k−1} = ρ / kτ + log P(N = k) − log P(N = k−1).

These are two Fourier coefficients of ``φ(θ) = E exp(iθN) = Π_i (1 − p_i + p_i exp(iθ))`` (the
method of Y. Hong, On computing the distribution function for the Poisson binomial distribution,
2013), at ``θ_m = π(2m + 1) / M``. Counts M apart are taken for each other, so M exceeds the spread
of N; both chances stand at the mode, so sums lose no digits in float64. Leaving class i out
divides φ by its factor, which never vanishes at these θ. No operation waits for a product of other
classes but one at the end.

The constants of a row are, in float64, real and imaginary parts of ``φ(θ_m) exp(−iθ_m (k−1))`` for
m < M / 2 (the other half is conjugate), ρ in two parts, the slope of the label, and that over
either chance; 0 over the first if there are fewer than k rivals, which then have no gradient.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.smooth.row_constants import Loss, add_up, loss_and_slope, of_labels

PI = tl.constexpr(3.141592653589793)
MORE = tl.constexpr(5)
"""Constants of a row besides those of nodes."""
NEAR = tl.constexpr(0.25)
"""How far the mean count may be from k − 1/2."""


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for."""

    nodes: int
    rows: int
    """Nodes that are worked on together."""
    block: int
    """Classes that are worked on together."""
    wide: int = 1
    """Classes that are read together where they are only counted."""
    reduction: str = "none"


class Numbers(NamedTuple):
    """The parameters of the loss, each the sum of two numbers of float32."""

    tau: Any
    tau_rest: Any
    margin: Any
    margin_rest: Any


class Rivals(NamedTuple):
    """A row of scores without its label, and the rate 1 / kτ."""

    line: Any
    columns: Any
    label: Any
    rate: Any


class Tilt(NamedTuple):
    """ρ in two parts."""

    pivot: Any
    rest: Any


@triton.jit
def rivals(row, column):
    """Scores of classes, without that of the label."""
    x = tl.load(row.line + column, column < row.columns, float("-inf")).to(tl.float32)
    return tl.where(column == row.label, float("-inf"), x)


@triton.jit
def bracket(row, BLOCK: tl.constexpr):
    """Least and largest finite rival; how many are infinite, are present, and are NaN."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    infinite = tl.zeros((BLOCK,), tl.int32)
    present = tl.zeros((BLOCK,), tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, row.columns, BLOCK):
        x = rivals(row, begin + tl.arange(0, BLOCK))
        finite = tl.abs(x) < float("inf")
        least = tl.where(finite & (x < least), x, least)
        most = tl.where(finite & (x > most), x, most)
        infinite += (x == float("inf")).to(tl.int32)
        present += (x > float("-inf")).to(tl.int32)
        spoilt += (x != x).to(tl.int32)
    extremes = (tl.min(least, 0).to(tl.float64), tl.max(most, 0).to(tl.float64))
    return extremes, tl.sum(infinite, 0), tl.sum(present, 0), tl.sum(spoilt, 0)


@triton.jit
def mean_count(row, pivot, tilt, BLOCK: tl.constexpr):
    """``Σ_i sigmoid(rate·(s_i − pivot − tilt))``."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, row.columns, BLOCK):
        x = rivals(row, begin + tl.arange(0, BLOCK)).to(tl.float64)
        total += tl.sigmoid(((x - pivot - tilt) * row.rate).to(tl.float32))
    return tl.sum(total, 0)


@triton.jit
def search(row, pivot, low, high, k, BLOCK: tl.constexpr):
    """The tilt, between low and high, at which the mean count is near k − 1/2; and whether it is.

    Where it is not, low is the last number of float64 before it.
    """
    tilt = (low + high) / 2
    excess = mean_count(row, pivot, tilt, BLOCK) - (k - 0.5)
    while (tl.abs(excess) > NEAR) & (tilt > low) & (tilt < high):
        low, high = tl.where(excess > 0, tilt, low), tl.where(excess > 0, high, tilt)
        tilt = (low + high) / 2
        excess = mean_count(row, pivot, tilt, BLOCK) - (k - 0.5)
    return tilt, low, tl.abs(excess) <= NEAR


@triton.jit
def step_to_nearest(row, place, BLOCK: tl.constexpr):
    """From a place to the finite rival that is nearest to it."""
    step = tl.full((BLOCK,), float("inf"), tl.float64)
    for begin in range(0, row.columns, BLOCK):
        x = rivals(row, begin + tl.arange(0, BLOCK)).to(tl.float64)
        step = tl.where(tl.abs(x - place) < tl.abs(step), x - place, step)
    up = tl.min(tl.where(step >= 0, step, float("inf")), 0)
    down = tl.max(tl.where(step < 0, step, float("-inf")), 0)
    return tl.where(up < -down, up, down)


@triton.jit
def find_tilt(row, least, most, k, BLOCK: tl.constexpr):
    """ρ in two parts, pivot and tilt: it may lie closer to a score than one number can say.

    Then no other score is as near: those of float32 are never neighbours in float64. The reach is
    wider by what low may be off.
    """
    reach = tl.log(2.0 * row.columns.to(tl.float64)) / row.rate
    pivot = tl.cast(0.0, tl.float64)
    tilt, low, found = search(row, pivot, least - reach, most + reach, k, BLOCK)
    if found == 0:
        pivot = low + step_to_nearest(row, low, BLOCK)
        tilt, _, _ = search(row, pivot, -5 * reach, 5 * reach, k, BLOCK)
    return pivot, tilt


@triton.jit
def chances(x, tilt, rate):
    """``sigmoid(rate·(x − ρ))`` and what is left to 1, in float64."""
    z = (x.to(tl.float64) - tilt.pivot - tilt.rest) * rate
    e = tl.exp(-tl.abs(z))
    less, more = e / (1 + e), 1 / (1 + e)
    return tl.where(z > 0, more, less), tl.where(z > 0, less, more)


@triton.jit
def turn(node, times, NODES: tl.constexpr):
    """Cosine and sine of ``times·θ``: the angle is reduced among integers."""
    turns = (2 * node + 1) * times % (4 * NODES)
    angle = turns.to(tl.float64) * (PI / (2 * NODES))
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def product(a, b, c, d):
    """``(a + ib)(c + id)``."""
    return a * c - b * d, a * d + b * c


@triton.jit
def transform(row, tilt, cosine, sine, TILE: tl.constexpr):
    """Real and imaginary parts of φ at angles of these cosines and sines."""
    ROWS: tl.constexpr = TILE.rows
    BLOCK: tl.constexpr = TILE.block
    real = tl.full((ROWS, BLOCK), 1.0, tl.float64)
    imaginary = tl.zeros((ROWS, BLOCK), tl.float64)
    for begin in range(0, row.columns, BLOCK):
        x = rivals(row, begin + tl.arange(0, BLOCK))
        p, q = chances(x, tilt, row.rate)
        c = q[None, :] + p[None, :] * cosine[:, None]
        d = p[None, :] * sine[:, None]
        real, imaginary = product(real, imaginary, c, d)
    return tl.reduce((real, imaginary), 1, product)


@triton.jit
def two_chances(row, tilt, k, constants, TILE: tl.constexpr):
    """P(N = k) and P(N = k−1), from the constants of nodes, which are written."""
    NODES: tl.constexpr = TILE.nodes
    upper = tl.cast(0.0, tl.float64)
    lower = tl.cast(0.0, tl.float64)
    for start in range(0, NODES, TILE.rows):
        node = start + tl.arange(0, TILE.rows)
        cosine, sine = turn(node, 1, NODES)
        real, imaginary = transform(row, tilt, cosine, sine, TILE)
        c, d = turn(node, k - 1, NODES)
        real, imaginary = product(real, imaginary, c, -d)
        lower += tl.sum(real, 0) / NODES
        upper += tl.sum(real * cosine + imaginary * sine, 0) / NODES
        tl.store(constants + node, real)
        tl.store(constants + NODES + node, imaginary)
    return upper, lower


@triton.jit
def row_loss(row, k, constants, loss, of_label, TILE: tl.constexpr):
    """Loss of a row and its weight; writes the constants of its gradient."""
    WIDE: tl.constexpr = TILE.wide
    counted, score, alpha, weight = of_label
    extremes, infinite, present, spoilt = bracket(row, WIDE)
    enough = present >= k
    known = (spoilt == 0) & (infinite < k) & enough
    pivot = tl.cast(0.0, tl.float64)
    rest = tl.cast(0.0, tl.float64)
    upper = tl.cast(0.0, tl.float64)
    lower = tl.cast(0.0, tl.float64)
    if known:
        pivot, rest = find_tilt(row, extremes[0], extremes[1], k, WIDE)
        upper, lower = two_chances(row, Tilt(pivot, rest), k, constants, TILE)

    gap = (pivot - score + rest) / k + loss.tau * tl.log(upper / lower) + alpha
    certain = tl.where(score == float("-inf"), float("inf"), float("-inf"))
    gap = tl.where(enough | (spoilt > 0) | (score != score), gap, certain)
    value, slope = loss_and_slope(gap, loss.tau, k, counted, weight)
    slope = tl.where(known | (gap != gap) | (gap == float("inf")), slope, 0.0)
    others = constants + 2 * TILE.nodes
    tl.store(others, pivot)
    tl.store(others + 1, rest)
    tl.store(others + 2, -slope)
    tl.store(others + 3, tl.where(known | (gap != gap), slope / upper, 0.0))
    tl.store(others + 4, slope / lower)
    return value, weight


@triton.jit(do_not_specialize=("rows", "columns", "stride", "k", "ignore_index"))
def long_list_kernel(
    problem,
    outputs,
    numbers,
    rows,
    columns,
    stride,
    k,
    ignore_index,
    TILE: tl.constexpr,
):
    """Losses of every ``programs``-th row, reduced, and the constants of their gradients."""
    tau = tl.cast(numbers.tau, tl.float64) + numbers.tau_rest
    alpha = tl.cast(numbers.margin, tl.float64) + numbers.margin_rest
    loss = Loss(tau, alpha, ignore_index)
    rate = 1 / (k * tau)
    SIZE: tl.constexpr = 2 * TILE.nodes + MORE
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = problem.scores + tl.cast(row, tl.int64) * tl.cast(stride, tl.int64)
        constants = outputs.buffer + 1 + tl.cast(row, tl.int64) * SIZE
        others = Rivals(line, columns, tl.load(problem.labels + row), rate)
        of_label = of_labels(problem, line, row, row < rows, columns, loss)
        value, weight = row_loss(others, k, constants, loss, of_label, TILE)
        if TILE.reduction == "none":
            tl.store(outputs.result + row, value)
        all_losses += value
        all_weights += weight
    if TILE.reduction != "none":
        partials = outputs.buffer + 1 + tl.cast(rows, tl.int64) * SIZE
        add_up(outputs, partials, all_losses, all_weights, TILE)
