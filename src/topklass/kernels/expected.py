"""The expected k-th largest score under noise, and its loss, on a GPU.

The gradient comes with the value, in one launch; the backward pass scales it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topklass.dispatch import LossOptions
from topklass.kernels.expected_rows import expected_kernel, scaled_kernel
from topklass.kernels.launch import launch, unharmed, zero_counter
from topklass.kernels.rows import alignment, power_of_two, room_for_heads, with_whole_rows
from topklass.kernels.smooth import per_class_or_number
from topklass.reference.row_blocks import needs_plain_backward, plain_backward

NODES = 64
"""Of the integral."""
WARPS = 4
"""One thread for each node and half of the candidates."""
LONG = 24
"""Ranks beyond which a program has no room for two candidates of a half at a time."""
MOST_PROGRAMS = 2048
MOST_BYTES = 2**27
"""Of memory that all programs may need for what they keep, unless one alone needs more."""
Window = tuple[float, float, float]
"""How far, in units of noise, the nodes may be below and above the k-th score, and how far below it
classes matter."""


def expected_topk(
    scores: Tensor, k: int, epsilon: float, window: Window, plain: Callable[[Tensor], Tensor]
) -> Tensor:
    """The expected k-th largest of (R, n) scores, (R), in float32.

    Args:
        scores: (R, n).
        k: rank.
        epsilon: size of the noise.
        window: see :data:`Window`.
        plain: the same by the reference, for derivatives of higher order.
    """
    result: Tensor = _Expected.apply(
        _prepared(scores),
        None,
        None,
        None,
        int(k),
        float(epsilon),
        window,
        0.0,
        1.0,
        0,
        "none",
        None if torch.compiler.is_compiling() else plain,
    )
    return result


def expected_loss(
    scores: Tensor,
    k: int,
    epsilon: float,
    window: Window,
    margin: float | Tensor,
    scale: float,
    options: LossOptions,
) -> Tensor:
    """The reduced loss of (R, n) scores with the (k + 1)-th largest, or with "none" (R) losses."""
    labels, weight, ignore_index, reduction, plain = options
    margins, number = per_class_or_number(margin, scores)
    result: Tensor = _Expected.apply(
        _prepared(scores),
        labels,
        margins,
        weight,
        int(k) + 1,
        float(epsilon),
        window,
        number,
        float(scale),
        int(ignore_index),
        reduction,
        None if torch.compiler.is_compiling() else plain,
    )
    return result


def _prepared(scores: Tensor) -> Tensor:
    """With whole rows, and only with a gradient that is asked for: it costs more than the value."""
    return with_whole_rows(scores if torch.is_grad_enabled() else scores.detach())


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        labels: Tensor | None,
        margins: Tensor | None,
        weight: Tensor | None,
        k: int,
        epsilon: float,
        window: Window,
        margin: float,
        scale: float,
        ignore_index: int,
        reduction: str,
        plain: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        rows, columns = scores.shape
        differentiate = bool(ctx.needs_input_grad[0])
        half = -(-columns // 2)
        segment = min(512, max(8, power_of_two(round(int(half) ** 0.5))))
        kept = (-(-half // segment) + segment) * k + segment if differentiate else 0
        room = 2 * (k + kept) * NODES
        programs = max(1, min(rows, MOST_PROGRAMS, MOST_BYTES // (4 * room + 8 * columns)))
        buffer = scores.new_empty(1 + 2 * programs, dtype=torch.float64)
        result = scores.new_empty(rows if reduction == "none" else (), dtype=torch.float32)
        shape = scores.shape if differentiate else (1,)
        gradient = scores.new_zeros(shape, dtype=torch.float32)
        launch(
            expected_kernel,
            (programs, 1, 1),
            (
                *unharmed(scores, labels, margins, weight),
                scores.new_empty(programs * columns, dtype=torch.int32),
                scores.new_empty(programs * columns, dtype=torch.float32),
                scores.new_empty(programs * room, dtype=torch.float32),
                buffer,
                zero_counter(scores),
                result,
                gradient,
                rows,
                columns,
                scores.stride(0),
                room,
                epsilon,
                *window,
                margin,
                scale,
                ignore_index,
            ),
            (
                k,
                room_for_heads(k),
                differentiate,
                labels is not None,
                margins is not None,
                weight is not None,
                reduction,
                alignment(scores),
                min(512, max(64, power_of_two(columns))),
                segment,
                NODES,
                1 if k > LONG else 2,
            ),
            WARPS,
            scores,
        )
        if differentiate:
            ctx.save_for_backward(scores, gradient, buffer)
            ctx.mean, ctx.plain = reduction == "mean", plain
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outgoing,) = gradients
        scores, gradient, total = ctx.saved_tensors
        if needs_plain_backward(outgoing):
            result = plain_backward(lambda s: ctx.plain(s).float(), scores, outgoing)
        else:
            result = _scaled(gradient, outgoing, total, ctx.mean, scores)
        return result, *(None,) * 11


def _scaled(
    gradient: Tensor, outgoing: Tensor, total: Tensor, mean: bool, scores: Tensor
) -> Tensor:
    """The gradient times the outgoing one, over the weight of all rows if it is of their mean."""
    rows, columns = gradient.shape
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    block = min(1024, max(64, power_of_two(columns)))
    stride = outgoing.stride(0) if outgoing.dim() else 0
    launch(
        scaled_kernel,
        (rows, -(-columns // block), 1),
        (gradient, outgoing, total, result, columns, stride),
        (mean, block),
        1,
        scores,
    )
    return result
