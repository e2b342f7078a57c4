"""The expected k-th largest score under noise on a GPU: value and gradient in one launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topkit.kernels.expected_rows import expected_kernel
from topkit.kernels.launch import launch
from topkit.kernels.rows import alignment, power_of_two, room_for_heads, with_whole_rows
from topkit.reference.row_blocks import needs_plain_backward, plain_backward

NODES = 64
"""Of the integral."""
WARPS = 2
"""One thread for each node."""
MOST_PROGRAMS = 2048
MOST_BYTES = 2**27
"""Of memory that all programs may need for what they keep, unless one alone needs more."""
Window = tuple[float, float, float]


def expected_topk(
    scores: Tensor, k: int, epsilon: float, window: Window, plain: Callable[[Tensor], Tensor]
) -> Tensor:
    """The expected k-th largest of (R, n) scores, (R), in float32.

    Args:
        scores: (R, n).
        k: rank.
        epsilon: size of the noise.
        window: how far, in units of noise, the nodes may be below and above the k-th score, and how
            far below it classes matter.
        plain: the same by the reference, for derivatives of higher order.
    """
    reference = None if torch.compiler.is_compiling() else plain
    if not torch.is_grad_enabled():
        scores = scores.detach()  # the gradient costs more than the value
    result: Tensor = _Expected.apply(
        with_whole_rows(scores), int(k), float(epsilon), window, reference
    )
    return result


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        k: int,
        epsilon: float,
        window: Window,
        plain: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        rows, columns = scores.shape
        differentiate = bool(ctx.needs_input_grad[0])
        segment = min(512, max(8, power_of_two(round(int(columns) ** 0.5))))
        room = (-(-columns // segment) + segment) * k * NODES if differentiate else 1
        programs = max(1, min(rows, MOST_PROGRAMS, MOST_BYTES // (4 * room + 8 * columns)))
        result = scores.new_empty(rows, dtype=torch.float32)
        shape = scores.shape if differentiate else (1,)
        gradient = scores.new_zeros(shape, dtype=torch.float32)
        launch(
            expected_kernel,
            (programs, 1, 1),
            (
                scores,
                scores.new_empty(programs * columns, dtype=torch.int32),
                scores.new_empty(programs * columns, dtype=torch.float32),
                scores.new_empty(programs * room, dtype=torch.float32),
                result,
                gradient,
                rows,
                columns,
                scores.stride(0),
                room,
                epsilon,
                *window,
            ),
            (
                k,
                room_for_heads(k),
                differentiate,
                alignment(scores),
                min(512, max(64, power_of_two(columns))),
                segment,
                NODES,
            ),
            WARPS,
            scores,
        )
        if differentiate:
            ctx.save_for_backward(scores, gradient)
            ctx.plain = plain
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outgoing,) = gradients
        scores, shares = ctx.saved_tensors
        if needs_plain_backward(outgoing):
            result = plain_backward(lambda s: ctx.plain(s).float(), scores, outgoing)
        else:
            result = (shares * outgoing.unsqueeze(1)).to(scores.dtype)
        return result, None, None, None, None
