"""The smooth loss of long lists (k > 32) on a GPU, where power sums have no digits left."""

from math import log

import torch
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.long_lists.gradient import long_list_gradient_kernel
from topklass.kernels.long_lists.loss import MORE, Numbers, Tile, long_list_kernel
from topklass.kernels.smooth.launch import (
    MOST_PROGRAMS,
    SmoothLoss,
    custom_operator,
    halves,
    launch,
    margins_and_number,
    new_gradient,
    new_result,
    power_of_two,
    row_stride,
    rows_of,
    shared_counter,
)
from topklass.kernels.smooth.row_constants import Outputs

NEGLIGIBLE = 24.0
"""Minus the logarithm of the chance of a count that is taken for k."""
TILE, BLOCK, WIDE, WARPS = 32, 32, 512, 4
"""Nodes and classes of a tile; classes read together; warps."""
GRADIENT_PROGRAMS = 8192
"""Unless there are more rows."""


def nodes(k: int) -> int:
    """Half of M, the other half being conjugate: counts M above or below k are negligible.

    By Chernoff's bounds for a count with mean k.

    Example:
        >>> nodes(33), nodes(64), nodes(1024)
        (32, 32, 128)
    """
    m = 64
    while (k + m) * log(1 + m / k) - m < NEGLIGIBLE or (m < k and m * m / (2 * k) < NEGLIGIBLE):
        m *= 2
    return m // 2


def new_buffer(scores: Tensor, k: int) -> Tensor:
    """Room for a number, the constants of rows, and two sums for each program, at most."""
    size = 1 + scores.shape[0] * (2 * nodes(k) + MORE.value) + 2 * MOST_PROGRAMS
    return scores.new_empty(size, dtype=torch.float64)


def forward(
    scores: Tensor,
    labels: Tensor,
    loss: SmoothLoss,
    options: Options,
    differentiate: bool,
    counter: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The latter is a buffer with the constants of rows, a by-product of the loss.
    """
    counter = shared_counter(scores) if counter is None else counter
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight)
    scores = problem.scores
    rows, columns = scores.shape
    k, tau = int(loss.k), float(loss.tau)
    buffer, result = new_buffer(scores, k), new_result(scores, options.reduction)
    wide = min(WIDE, power_of_two(columns))
    launch(
        long_list_kernel,
        (min(rows, MOST_PROGRAMS),),
        WARPS,
        scores,
        problem,
        Outputs(buffer, counter, result),
        Numbers(*halves(tau), *halves(margin)),
        rows,
        columns,
        scores.stride(0),
        k,
        int(options.ignore_index),
        Tile(nodes(k), TILE, BLOCK, wide, options.reduction),
    )
    return result, (buffer,)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    loss: SmoothLoss,
    options: Options,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R).

    It is written into ``out``, if given: contiguous, and possibly the scores themselves.
    """
    (buffer,) = saved
    problem = rows_of(scores, labels)
    scores = problem.scores
    rows, columns = scores.shape
    result = new_gradient(scores) if out is None else out
    k, tau = int(loss.k), float(loss.tau)
    mean = "mean" if options.reduction == "mean" else "none"
    launch(
        long_list_gradient_kernel,
        (rows, max(1, min(-(-columns // BLOCK), GRADIENT_PROGRAMS // rows))),
        WARPS,
        scores,
        problem,
        buffer,
        outgoing,
        result,
        halves(tau),
        columns,
        scores.stride(0),
        k,
        row_stride(outgoing),
        Tile(nodes(k), TILE, BLOCK, reduction=mean),
    )
    return result


traced = custom_operator("smooth_loss_of_long_lists", forward, backward, new_buffer)
