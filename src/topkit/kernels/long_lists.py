"""The smooth top-k loss on a GPU for long lists, where power sums have no digits left."""

from collections.abc import Callable
from math import log
from typing import Any

import torch
from torch import Tensor

from topkit.dispatch import LossOptions
from topkit.kernels.launch import launch, zero_counter
from topkit.kernels.long_list_rows import long_list_gradient_kernel, long_list_kernel
from topkit.kernels.rows import MOST_PROGRAMS, power_of_two, with_whole_rows
from topkit.kernels.smooth import halves, per_class_or_number
from topkit.reference.row_blocks import needs_plain_backward, plain_backward

NEGLIGIBLE = 24.0
"""Minus the logarithm of the chance of a count that is taken for k."""
TILE, BLOCK, WIDE, WARPS = 32, 32, 512, 4
"""Nodes and classes of a tile; classes read together; warps."""


def long_list_loss(
    scores: Tensor, k: int, tau: float, margin: float | Tensor, options: LossOptions
) -> Tensor:
    """The reduced loss of (R, n) scores, or with "none" (R) losses, in float32."""
    labels, weight, ignore_index, reduction, plain = options
    margins, number = per_class_or_number(margin, scores)
    result: Tensor = _LongListLoss.apply(
        with_whole_rows(scores),
        labels,
        margins,
        weight,
        int(k),
        float(tau),
        number,
        int(ignore_index),
        reduction,
        None if torch.compiler.is_compiling() else plain,
    )
    return result


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


class _LongListLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        labels: Tensor,
        margins: Tensor | None,
        weight: Tensor | None,
        k: int,
        tau: float,
        margin: float,
        ignore_index: int,
        reduction: str,
        plain: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        rows, columns = scores.shape
        programs = min(rows, MOST_PROGRAMS)
        size = 1 + rows * (2 * nodes(k) + 5) + 2 * programs
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
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(scores, labels, buffer)
            ctx.k, ctx.tau, ctx.mean, ctx.plain = k, tau, reduction == "mean", plain
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outgoing,) = gradients
        scores, labels, buffer = ctx.saved_tensors
        if needs_plain_backward(outgoing):
            result = plain_backward(lambda s: ctx.plain(s).float(), scores, outgoing)
        else:
            result = _gradient(ctx, scores, labels, buffer, outgoing)
        return result, *(None,) * 9


def _gradient(ctx: Any, scores: Tensor, labels: Tensor, buffer: Tensor, outgoing: Tensor) -> Tensor:
    rows, columns = scores.shape
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    launch(
        long_list_gradient_kernel,
        (rows, -(-columns // BLOCK), 1),
        (
            scores,
            labels,
            buffer,
            outgoing,
            result,
            columns,
            scores.stride(0),
            ctx.k,
            outgoing.stride(0) if outgoing.dim() else 0,
            *halves(ctx.tau),
        ),
        (ctx.mean, nodes(ctx.k), TILE, BLOCK),
        WARPS,
        scores,
    )
    return result
