r"""The kernel of rows: from largest scores and sums over the others to the expected score.

At each node of the integral, the tail has the polynomial E(Y), from power sums by Newton's
identities, and the heads have ``C(Y) = Π_i (α_i + β_i Y)``; see ``reference/expected_bins.py``. The
chance of fewer than k above the node is ``Σ_b E_b D_b`` with ``D_b = Σ_{a<k−b} C_a r^(a+b−k)``.

For the gradient of a head its factor is divided out of C, from the end at which that is stable. All
coefficients lie in memory, and each node has its thread: so one compilation serves every k.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.noised.hinge import Hinge, hinge_loss
from topklass.kernels.smooth.row_constants import add_up


@dataclass(frozen=True)
class RowTile:
    """What the kernel is compiled for."""

    nodes: int
    """Room for the nodes, a power of two."""
    differentiate: bool
    reduction: str


class Nodes(NamedTuple):
    """The nodes of the integral, see ``reference/expected_tables.py``."""

    t: Any
    weight: Any
    scale: Any
    """r."""


class Numbers(NamedTuple):
    """Noise, and the parameters of the loss."""

    epsilon: Any
    margin: Any
    scale: Any


class Rows(NamedTuple):
    """What is known of rows, and what they leave for the gradient."""

    heads: Any
    """(R, H)."""
    sums: Any
    """(R, k, A); replaced by derivatives."""
    of_heads: Any
    """(R, H)."""
    slopes: Any
    """(R)."""


class Memory(NamedTuple):
    """Of a program: where its threads keep the coefficients of their polynomials."""

    heads: Any
    tail: Any
    fewer: Any
    """D."""


@triton.jit
def upper_tail(x):
    """``Φ(−x)`` for x ≥ 0: exp(−x²/2) times a polynomial in 1 / (1 + 0.3 x).

    Fitted up to x = 12.5, relative error below 1e-7 and that of the exponential.
    """
    t = 1.0 / (1.0 + 0.3 * x)
    p = -0.160514187 + 0.0364651734 * t
    p = 0.212096028 + p * t
    p = -0.0590110579 + p * t
    p = 0.131407376 + p * t
    p = 0.0990409735 + p * t
    p = 0.120895751 + p * t
    p = 0.119619894 + p * t
    return p * t * tl.exp(-0.5 * x * x)


@triton.jit
def factor(x, scale, among_k):
    """α and β of a head at x above the nodes, in float64."""
    less = upper_tail(tl.abs(x)).to(tl.float64)
    happens = tl.where(x > 0, 1 - less, less)
    does_not = tl.where(x > 0, less, 1 - less)
    if among_k:
        does_not = does_not * scale
    else:
        happens = happens / scale
    return does_not, happens


@triton.jit
def tail_polynomial(sums, tail, step, k, NODES: tl.constexpr):
    """Newton's identities: leaves the coefficients E, which begin with the chance of none."""
    tl.store(tail, tl.exp(tl.load(sums)))
    for j in range(1, k):
        tl.debug_barrier()
        total = tl.zeros((NODES,), tl.float64)
        sign = tl.full((), 1.0, tl.float64)
        for i in range(1, j + 1):
            total += sign * tl.load(tail + (j - i) * NODES) * tl.load(sums + i * step)
            sign = -sign
        tl.store(tail + j * NODES, total / j)
    tl.debug_barrier()


@triton.jit
def head_polynomial(top, center, inverse, nodes, polynomial, k, kept, NODES: tl.constexpr):
    """The product of the heads' factors: leaves its coefficients C."""
    tl.store(polynomial, tl.full((NODES,), 1.0, tl.float64))
    for i in range(kept):
        tl.debug_barrier()
        z = (tl.load(top + i) - center) * inverse
        does_not, happens = factor(z - nodes.t, nodes.scale, i < k)
        before = tl.zeros((NODES,), tl.float64)
        for j in range(i + 1):
            c = tl.load(polynomial + j * NODES)
            tl.store(polynomial + j * NODES, does_not * c + happens * before)
            before = c
        tl.store(polynomial + (i + 1) * NODES, happens * before)
    tl.debug_barrier()


@triton.jit
def fewer_than_k(memory, scale, k, NODES: tl.constexpr):
    """Probability that fewer than k are above; leaves its derivatives D by the tail."""
    fewer = tl.zeros((NODES,), tl.float64)
    below = tl.zeros((NODES,), tl.float64)
    inverse = 1 / scale
    for j in range(k):
        fewer = (fewer + tl.load(memory.heads + j * NODES)) * inverse
        below += fewer * tl.load(memory.tail + (k - 1 - j) * NODES)
        tl.store(memory.fewer + (k - 1 - j) * NODES, fewer)
    tl.debug_barrier()
    return below


@triton.jit
def differentiate_sums(memory, sums, step, below, weight, there, k, NODES: tl.constexpr):
    """Replace sums by the derivatives of the integral."""
    tl.store(sums, -weight * below, there)
    sign = tl.full((), 1.0, tl.float64)
    for i in range(1, k):
        total = tl.zeros((NODES,), tl.float64)
        for j in range(i, k):
            total += tl.load(memory.fewer + j * NODES) * tl.load(memory.tail + (j - i) * NODES)
        tl.store(sums + i * step, -weight * sign * total / i, there)
        sign = -sign


@triton.jit
def others_of(memory, does_not, happens, k, kept, NODES: tl.constexpr):
    """Chance of exactly k − 1 above without a head: its factor divided out of C."""
    down = happens >= does_not
    inverse = 1 / tl.where(down, happens, does_not)
    ratio = tl.where(down, does_not, happens) * inverse
    quotient = tl.zeros((NODES,), tl.float64)
    total = tl.zeros((NODES,), tl.float64)
    for j in range(kept):
        c = tl.load(memory.heads + tl.where(down, kept - j, j) * NODES)
        quotient = c * inverse - ratio * quotient
        degree = k - 1 - tl.where(down, kept - 1 - j, j)
        total += quotient * tl.load(memory.tail + degree * NODES, degree >= 0, 0.0)
    return total


@triton.jit(
    do_not_specialize=(
        "rows",
        "columns",
        "stride",
        "k",
        "kept",
        "count",
        "ignore_index",
        "rows_before",
    )
)
def integral_kernel(
    problem,
    known,
    nodes,
    outputs,
    memory,
    numbers,
    rows,
    columns,
    stride,
    k,
    kept,
    count,
    ignore_index,
    rows_before,
    TILE: tl.constexpr,
):
    """The expected k-th largest of every ``programs``-th row; with labels the loss.

    The slope is 0 where the loss is or the row is ignored, and NaN in a row with NaN. If there are
    rows before, of earlier launches with as many programs, their losses are added.
    """
    NODES: tl.constexpr = TILE.nodes
    hinge = Hinge(
        tl.cast(numbers.margin, tl.float32), tl.cast(numbers.scale, tl.float32), ignore_index
    )
    epsilon = tl.cast(numbers.epsilon, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    there = node < count
    t = tl.load(nodes.t + node, there, 0.0)
    weight = tl.load(nodes.weight + node, there, 0.0)
    scale = tl.load(nodes.scale + node, there, 1.0)
    begin = tl.load(nodes.t)
    at = Nodes(t.to(tl.float32), weight, scale)
    own = Memory(
        memory.heads + program * (kept + 1) * NODES + node,
        memory.tail + program * k * NODES + node,
        memory.fewer + program * k * NODES + node,
    )
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = tl.cast(row, tl.int64)
        top = known.heads + wide * kept
        sums = known.sums + wide * k * count + tl.where(there, node, 0)
        center = tl.load(top + k - 1)
        highest = tl.load(top)
        finite = (tl.abs(center) < float("inf")) & (highest == highest)
        result = tl.where(highest == highest, center, float("nan"))
        below = tl.zeros((NODES,), tl.float64)
        if finite:
            tail_polynomial(sums, own.tail, count, k, NODES)
            head_polynomial(top, center, 1 / epsilon, at, own.heads, k, kept, NODES)
            below = fewer_than_k(own, scale, k, NODES)
            shift = begin + tl.sum(weight * (1 - below), 0)
            result = (center + epsilon * shift).to(tl.float32)
        slope = tl.where(result == result, 1.0, float("nan"))
        if problem.labels is not None:
            line = problem.scores + wide * tl.cast(stride, tl.int64)
            loss, share, slope, _, _ = hinge_loss(problem, line, row, columns, result, hinge)
            all_losses += loss
            all_weights += share
            result = loss.to(tl.float32)
        if TILE.reduction == "none":
            tl.store(outputs.result + row, result)
        if TILE.differentiate:
            tl.store(known.slopes + row, slope)
            of_heads = known.of_heads + wide * kept
            if finite & (slope != 0):
                differentiate_sums(own, sums, count, below, weight, there, k, NODES)
                for i in range(kept):
                    x = (tl.load(top + i) - center) * (1 / epsilon) - at.t
                    does_not, happens = factor(x, scale, i < k)
                    others = others_of(own, does_not, happens, k, kept, NODES)
                    density = weight * (0.3989422804 * tl.exp(-0.5 * x * x))
                    if i >= k:
                        density = density / scale
                    tl.store(of_heads + i, tl.sum(density * others, 0).to(tl.float32))
            else:
                for i in range(k):
                    tl.store(sums + i * count, tl.zeros((NODES,), tl.float64), there)
                for i in range(kept):
                    tl.store(of_heads + i, 0.0)
        tl.debug_barrier()
    if problem.labels is not None and TILE.reduction != "none":
        partials = outputs.buffer + 1
        if rows_before > 0:
            all_losses += tl.load(partials + 2 * program)
            all_weights += tl.load(partials + 2 * program + 1)
            tl.debug_barrier()
        add_up(outputs, partials, all_losses, all_weights, TILE)
