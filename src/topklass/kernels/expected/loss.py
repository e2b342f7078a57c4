r"""The expected k-th largest score under noise, or the hinge loss above it, with its gradient.

``E (s + εZ)_(k) = a + ∫_a P(N(t) ≥ k) dt``, where N(t) counts the scores above t. A program takes a
row: it finds the k-th largest score, collects the candidates within reach of it, and multiplies
``Π_i (1 − p_i(t) + p_i(t) X)`` out, one candidate after another (``counting.py``).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.expected.counting import Candidates, fewer_than_k
from topklass.kernels.expected.gradient import Integral, write_shares
from topklass.kernels.noised.hinge import Hinge, hinge_loss
from topklass.kernels.smooth.row_constants import add_up
from topklass.kernels.smooth.row_state import as_score, multiple, row_heads

NEARLY = tl.constexpr(1e-6)
"""Probability beyond the window of integration, at either end."""


class Numbers(NamedTuple):
    """Noise, the window of integration in units of noise, and the parameters of the loss."""

    epsilon: Any
    down: Any
    up: Any
    far: Any
    """So far below the k-th score, classes matter."""
    margin: Any
    scale: Any


class Room(NamedTuple):
    """Memory of each program: for all classes and their values, and for coefficients."""

    classes: Any
    z: Any
    saved: Any


@triton.jit
def collect(line, columns, center, numbers, memory, TILE: tl.constexpr):
    """The candidates within reach of the k-th score: how many there are."""
    epsilon = tl.cast(numbers.epsilon, tl.float32)
    bound = center - tl.cast(numbers.far, tl.float32) * epsilon
    found = 0
    for begin in range(0, columns, TILE.block):
        column = begin + tl.arange(0, TILE.block)
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        near = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
        entry = found + tl.cumsum(near, 0) - 1
        tl.store(memory.classes + entry, column, near > 0)
        tl.store(memory.z + entry, (x - center) / epsilon, near > 0)
        found += tl.sum(near, 0)
    return found


@triton.jit
def integrate(near, saved, numbers, TILE: tl.constexpr):
    """The expectation in units of noise, and the nodes and weights of the integral.

    The window is narrowed once, to where the k-th largest is but for NEARLY at either end.
    """
    NODES: tl.constexpr = TILE.nodes
    node = tl.arange(0, NODES)
    low, high = -tl.cast(numbers.down, tl.float32), tl.cast(numbers.up, tl.float32)
    t = tl.zeros((NODES,), tl.float32)
    weight = tl.zeros((NODES,), tl.float32)
    reached = tl.zeros((NODES,), tl.float64)
    for narrowed in range(2):
        step = (high - low) / (NODES - 1)
        t = low + step * node.to(tl.float32)
        weight = tl.where((node == 0) | (node == NODES - 1), step / 2, step)
        below = fewer_than_k(near, t, saved, TILE)
        reached = 1.0 - below
        if narrowed == 0:
            low = tl.max(tl.where(below <= NEARLY, t, low), 0)
            high = tl.min(tl.where(reached <= NEARLY, t, high), 0)
    return low + tl.sum(weight * reached.to(tl.float32), 0), t, weight


@triton.jit
def row_top(line, columns, numbers, memory, TILE: tl.constexpr):
    """The expected k-th largest score of a row, and how it was found.

    That is: whether by integration, the number of candidates, nodes and weights of the integral.
    """
    NODES: tl.constexpr = TILE.nodes
    heads, _, spoilt = row_heads(line, columns, TILE)
    center = as_score(tl.min(tl.min(heads, 1), 0))
    known = (spoilt == 0) & (tl.abs(center) < float("inf"))
    top = tl.where(spoilt > 0, float("nan"), center)
    found = 0
    t = tl.zeros((NODES,), tl.float32)
    weight = tl.zeros((NODES,), tl.float32)
    if known:
        found = collect(line, columns, center, numbers, memory, TILE)
        tl.debug_barrier()
        near = Candidates(memory.classes, memory.z, found)
        shift, t, weight = integrate(near, memory.saved, numbers, TILE)
        top = center + tl.cast(numbers.epsilon, tl.float32) * shift
    return top, known, found, t, weight


@triton.jit(do_not_specialize=("rows", "columns", "stride", "size", "ignore_index"))
def expected_kernel(
    problem,
    room,
    outputs,
    gradient,
    numbers,
    rows,
    columns,
    stride,
    size,
    ignore_index,
    TILE: tl.constexpr,
):
    """The expected k-th largest of every ``programs``-th row; with labels the loss.

    The gradient, not yet divided by the weight of all rows, goes to the candidates and the label;
    it is 0 before. In a row with NaN it is NaN throughout. Each program has room for ``size``
    coefficients.
    """
    ALIGNED: tl.constexpr = TILE.aligned
    hinge = Hinge(
        tl.cast(numbers.margin, tl.float32), tl.cast(numbers.scale, tl.float32), ignore_index
    )
    program = tl.program_id(0).to(tl.int64)
    memory = Room(
        room.classes + program * columns,
        room.z + program * columns,
        room.saved + program * size,
    )
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = problem.scores + tl.cast(row, tl.int64) * tl.cast(stride, tl.int64)
        top, known, found, t, weight = row_top(line, columns, numbers, memory, TILE)
        slope = tl.where(top == top, 1.0, float("nan"))
        if problem.labels is not None:
            loss, share, slope, label, legal = hinge_loss(problem, line, row, columns, top, hinge)
            all_losses += loss
            all_weights += share
            if TILE.reduction == "none":
                tl.store(outputs.result + row, loss)
        else:
            tl.store(outputs.result + row, top)
        if TILE.differentiate:
            out = gradient + tl.cast(row, tl.int64) * columns
            tl.debug_barrier()
            if known & (slope != 0):
                near = Candidates(memory.classes, memory.z, found)
                write_shares(near, memory.saved, Integral(t, weight), slope, out, TILE)
            if problem.labels is not None:
                tl.debug_barrier()
                of_label = tl.load(out + label, legal, 0.0)
                tl.debug_barrier()
                tl.store(out + label, of_label - slope, legal)
            if slope != slope:
                tl.debug_barrier()
                for begin in range(0, columns, TILE.block):
                    column = begin + tl.arange(0, TILE.block)
                    tl.store(out + column, float("nan"), column < columns)
        tl.debug_barrier()
    if problem.labels is not None and TILE.reduction != "none":
        partials = outputs.buffer + 1
        add_up(outputs, partials, all_losses, all_weights, TILE)
