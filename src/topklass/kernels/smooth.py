"""The smooth top-k loss on a GPU: few reads of the logits, one write of their gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topklass.dispatch import LARGEST_K, LossOptions, check_devices
from topklass.kernels.launch import launch, zero_counter
from topklass.kernels.long_lists import long_list_gradient, long_list_losses
from topklass.kernels.row_constants import smooth_loss_kernel
from topklass.kernels.rows import (
    LOG2_E,
    alignment,
    gradient,
    halves,
    plan,
    read_states,
    row_buffer,
    with_whole_rows,
)
from topklass.reference.row_blocks import needs_plain_backward, plain_backward


def smooth_loss(
    scores: Tensor, k: int, tau: float, margin: float | Tensor, options: LossOptions
) -> Tensor:
    """The reduced loss of (R, n) scores, or with "none" (R) losses, in float32."""
    labels, weight, ignore_index, reduction, plain = options
    margins, number = per_class_or_number(margin, scores)
    result: Tensor = _SmoothLoss.apply(
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


def per_class_or_number(margin: float | Tensor, scores: Tensor) -> tuple[Tensor | None, float]:
    """Margins in float32 and 0, or none and a number."""
    if not isinstance(margin, Tensor):
        return None, float(margin)
    if margin.dim() == 0:
        margin = margin.to(scores.device)
    check_devices(scores, margin=margin)
    return margin.float().expand(scores.shape[1]).contiguous(), 0.0


class _SmoothLoss(torch.autograd.Function):
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
        losses = _losses if k <= LARGEST_K else long_list_losses
        result, buffer = losses(
            scores, labels, margins, weight, k, tau, margin, ignore_index, reduction
        )
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(scores, labels, buffer)
            ctx.k, ctx.tau, ctx.mean, ctx.plain = k, tau, reduction == "mean", plain
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outgoing,) = gradients
        scores, labels, buffer = ctx.saved_tensors
        k, tau = ctx.k, ctx.tau
        if needs_plain_backward(outgoing):
            result = plain_backward(lambda s: ctx.plain(s).float(), scores, outgoing)
        elif k <= LARGEST_K:
            rows, columns = scores.shape
            tiles = plan(rows, columns, k)
            result = gradient(scores, labels, buffer, outgoing, ctx.mean, k, k * tau, tiles)
        else:
            result = long_list_gradient(scores, labels, buffer, outgoing, ctx.mean, k, tau)
        return result, *(None,) * 9


def _losses(
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
    tiles = plan(rows, columns, k)
    buffer = row_buffer(scores, k, tiles)
    result = scores.new_empty(rows if reduction == "none" else (), dtype=torch.float32)
    if not tiles.joined:
        read_states(scores, labels, k, k * tau, tiles, buffer)
    launch(
        smooth_loss_kernel,
        (tiles.programs, 1, 1),
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
            tiles.parts,
            *halves(tau),
            *halves(margin),
            LOG2_E / (k * tau),
            ignore_index,
        ),
        (
            k,
            tiles.slots,
            tiles.merged,
            margins is not None,
            weight is not None,
            reduction,
            tiles.joined,
            tiles.precision,
            alignment(scores) if tiles.joined else 1,
            tiles.constant_rows,
            tiles.block if tiles.joined else 1,
        ),
        tiles.warps if tiles.joined else 1,
        scores,
    )
    return result, buffer
