"""Launches of the smooth loss for long lists, where power sums have no digits left."""

from math import log

import torch
from torch import Tensor

from topklass.kernels.launch import launch, zero_counter
from topklass.kernels.long_list_rows import MORE, long_list_gradient_kernel, long_list_kernel
from topklass.kernels.rows import MOST_PROGRAMS, halves, power_of_two

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


def long_list_losses(
    scores: Tensor,
    labels: Tensor,
    margins: Tensor | None,
    weight: Tensor | None,
    k: int,
    tau: float,
    margin: float,
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Losses of (R, n) scores, reduced, and a buffer with the constants of their gradient."""
    rows, columns = scores.shape
    programs = min(rows, MOST_PROGRAMS)
    size = 1 + rows * (2 * nodes(k) + MORE.value) + 2 * programs
    buffer = scores.new_empty(size, dtype=torch.float64)
    result = scores.new_empty(rows if reduction == "none" else (), dtype=torch.float32)
    launch(
        long_list_kernel,
        (programs, 1, 1),
        (
            scores,
            labels,
            scores if margins is None else margins,
            scores if weight is None else weight,
            buffer,
            zero_counter(scores),
            result,
            rows,
            columns,
            scores.stride(0),
            k,
            *halves(tau),
            *halves(margin),
            ignore_index,
        ),
        (
            margins is not None,
            weight is not None,
            reduction,
            nodes(k),
            TILE,
            BLOCK,
            min(WIDE, power_of_two(columns)),
        ),
        WARPS,
        scores,
    )
    return result, buffer


def long_list_gradient(
    scores: Tensor,
    labels: Tensor,
    buffer: Tensor,
    outgoing: Tensor,
    mean: bool,
    k: int,
    tau: float,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one; ``mean``: and divided by the weight."""
    rows, columns = scores.shape
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    launch(
        long_list_gradient_kernel,
        (rows, max(1, min(-(-columns // BLOCK), GRADIENT_PROGRAMS // rows)), 1),
        (
            scores,
            labels,
            buffer,
            outgoing,
            result,
            columns,
            scores.stride(0),
            k,
            outgoing.stride(0) if outgoing.dim() else 0,
            *halves(tau),
        ),
        (mean, nodes(k), TILE, BLOCK),
        WARPS,
        scores,
    )
    return result
