"""The noised top-k and its loss on a GPU: no tensor of noise, sparse gradients."""

from typing import Any

import torch
from torch import Tensor

from topklass.dispatch import LossOptions
from topklass.kernels.launch import launch, unharmed, zero_counter
from topklass.kernels.noised_rows import noised_gradient_kernel, noised_kernel
from topklass.kernels.rows import (
    MOST_PROGRAMS,
    alignment,
    power_of_two,
    room_for_heads,
    with_whole_rows,
)
from topklass.kernels.smooth import per_class_or_number
from topklass.reference.once import once
from topklass.reference.row_blocks import needs_plain_backward

FEW_ROWS = 1024
"""Up to so many, programs leave a GPU idle while they wait, and take more together."""
GRADIENT_ROWS = 8


def noised_topk(
    scores: Tensor, k: int, epsilon: float, samples: int, generator: torch.Generator | None
) -> Tensor:
    """The k-th largest noised score of (R, n) scores, averaged over samples, (R)."""
    seed = draw_seed(scores, generator)
    result: Tensor = _Noised.apply(
        with_whole_rows(scores),
        seed,
        None,
        None,
        None,
        int(k),
        epsilon,
        int(samples),
        0.0,
        1.0,
        0,
        "none",
    )
    return result


def noised_loss(
    scores: Tensor,
    k: int,
    epsilon: float,
    samples: int,
    margin: float | Tensor,
    scale: float,
    generator: torch.Generator | None,
    options: LossOptions,
) -> Tensor:
    """The reduced loss of (R, n) scores with the (k + 1)-th largest, or with "none" (R) losses."""
    labels, weight, ignore_index, reduction, _ = options
    margins, number = per_class_or_number(margin, scores)
    seed = draw_seed(scores, generator)
    result: Tensor = _Noised.apply(
        with_whole_rows(scores),
        seed,
        labels,
        margins,
        weight,
        int(k) + 1,
        epsilon,
        int(samples),
        number,
        scale,
        int(ignore_index),
        reduction,
    )
    return result


def room_for_samples(samples: int) -> int:
    """Samples in a tile: noise comes in fours."""
    return max(4, power_of_two(samples))


def tile_and_warps(rows: int, columns: int, k: int, samples: int) -> tuple[int, int]:
    """Candidates that get their noise together, at least as many as there are heads, and warps.

    Example:
        >>> tile_and_warps(256, 1000, 5, 3), tile_and_warps(256, 1000, 5, 10)
        ((128, 1), (32, 4))
        >>> tile_and_warps(4096, 1000, 5, 3), tile_and_warps(4096, 1000, 5, 10)
        ((32, 1), (32, 1))
    """
    few_rows, few_samples = rows <= FEW_ROWS, samples <= 4
    tile = 128 if few_rows and few_samples and columns >= 512 else 32
    return max(tile, room_for_heads(k)), 4 if few_rows and not few_samples else 1


def draw_seed(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """A seed that stays on the device: nothing waits for it, and a CUDA graph draws it anew."""
    return torch.randint(2**62, (1,), generator=generator, device=scores.device)


class _Noised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        seed: Tensor,
        labels: Tensor | None,
        margins: Tensor | None,
        weight: Tensor | None,
        k: int,
        epsilon: float,
        samples: int,
        margin: float,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> Tensor:
        rows, columns = scores.shape
        programs = min(rows, MOST_PROGRAMS)
        tile, warps = tile_and_warps(rows, columns, k, samples)
        block = min(512, max(32, power_of_two(columns)))
        candidates = scores.new_empty(programs * 2 * block, dtype=torch.int32)
        chosen = scores.new_empty((rows, samples), dtype=torch.int32)
        slopes = scores.new_empty(rows, dtype=torch.float32)
        buffer = scores.new_empty(1 + 2 * programs, dtype=torch.float64)
        result = scores.new_empty(rows if reduction == "none" else (), dtype=torch.float32)
        launch(
            noised_kernel,
            (programs, 1, 1),
            (
                *unharmed(scores, labels, margins, weight),
                seed,
                candidates,
                chosen,
                slopes,
                buffer,
                zero_counter(scores),
                result,
                rows,
                columns,
                scores.stride(0),
                samples,
                float(epsilon),
                float(margin),
                float(scale),
                ignore_index,
            ),
            (
                k,
                room_for_heads(k),
                room_for_samples(samples),
                labels is not None,
                margins is not None,
                weight is not None,
                reduction,
                alignment(scores),
                block,
                tile,
            ),
            warps,
            scores,
        )
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(scores, labels, chosen, slopes, buffer)
            ctx.samples, ctx.mean = samples, reduction == "mean"
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outgoing,) = gradients
        scores, *_ = ctx.saved_tensors
        if needs_plain_backward(outgoing):
            whole = _gradient(ctx, scores.new_ones((), dtype=torch.float32))
            each = outgoing.unsqueeze(-1) if outgoing.dim() else outgoing
            result = once(whole * each.to(whole.dtype), scores)
        else:
            result = _gradient(ctx, outgoing)
        return result, *(None,) * 11


def _gradient(ctx: Any, outgoing: Tensor) -> Tensor:
    scores, labels, chosen, slopes, buffer = ctx.saved_tensors
    rows, columns = scores.shape
    result = torch.zeros_like(scores, memory_format=torch.contiguous_format)
    launch(
        noised_gradient_kernel,
        (-(-rows // GRADIENT_ROWS), 1, 1),
        (
            chosen if labels is None else labels,
            chosen,
            slopes,
            outgoing,
            buffer,
            result,
            rows,
            columns,
            ctx.samples,
            outgoing.stride(0) if outgoing.dim() else 0,
        ),
        (room_for_samples(ctx.samples), labels is not None, ctx.mean, GRADIENT_ROWS),
        1,
        scores,
    )
    return result
