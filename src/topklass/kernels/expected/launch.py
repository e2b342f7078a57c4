"""The expected k-th largest score under noise, and the loss above it, on a GPU.

The gradient comes with the value, in one launch; the backward pass scales it.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.expected.counting import Tile
from topklass.kernels.expected.gradient import scaled_kernel
from topklass.kernels.expected.loss import Numbers, Room, expected_kernel
from topklass.kernels.noised.launch import HingeLoss
from topklass.kernels.smooth.launch import (
    alignment,
    launch,
    margins_and_number,
    new_counter,
    new_gradient,
    new_result,
    of_no_rows,
    power_of_two,
    room_for_heads,
    row_stride,
    rows_of,
    shared_counter,
)
from topklass.kernels.smooth.row_constants import Outputs
from topklass.kernels.smooth.row_state import Problem
from topklass.reference.expected import DOWN, FAR, UP

NODES = 64
"""Of the integral."""
WARPS = 4
"""One thread for each node and half of the candidates."""
LONG = 24
"""Ranks beyond which a program has no room for two candidates of a half at a time."""
MOST_PROGRAMS = 2048
MOST_BYTES = 2**27
"""Of memory that all programs may need for what they keep, unless one alone needs more."""


class Expected(NamedTuple):
    """The parameters of an expected top-k, or of the hinge loss above it."""

    k: int
    """Rank."""
    epsilon: float
    margin: float = 0.0
    scale: float = 1.0


def of_loss(loss: HingeLoss, margin: float) -> Expected:
    """The label competes with the (k + 1)-th largest score."""
    return Expected(int(loss.k) + 1, float(loss.epsilon), margin, float(loss.scale))


def new_outputs(scores: Tensor, reduction: str, differentiate: bool) -> tuple[Tensor, ...]:
    """Room for the result, its gradient (of zeros), and two sums for each program."""
    shape = scores.shape if differentiate else (0, scores.shape[1])
    return (
        new_result(scores, reduction),
        scores.new_zeros(shape, dtype=torch.float32),
        scores.new_empty(1 + 2 * MOST_PROGRAMS, dtype=torch.float64),
    )


def integrate(
    problem: Problem,
    expected: Expected,
    ignore_index: int,
    reduction: str,
    differentiate: bool,
    counter: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The expected top-k or the reduced loss, its unscaled gradient, and its weight in a buffer."""
    scores, k = problem.scores, expected.k
    rows, columns = scores.shape
    half = -(-columns // 2)
    segment = min(512, max(8, power_of_two(round(half**0.5))))
    kept = (-(-half // segment) + segment) * k + segment if differentiate else 0
    size = 2 * (k + kept) * NODES
    programs = max(1, min(rows, MOST_PROGRAMS, MOST_BYTES // (4 * size + 8 * columns)))
    result, gradient, buffer = new_outputs(scores, reduction, differentiate)
    launch(
        expected_kernel,
        (programs,),
        WARPS,
        scores,
        problem,
        Room(
            scores.new_empty(programs * columns, dtype=torch.int32),
            scores.new_empty(programs * columns, dtype=torch.float32),
            scores.new_empty(programs * size, dtype=torch.float32),
        ),
        Outputs(buffer, counter, result),
        gradient if differentiate else None,
        Numbers(expected.epsilon, DOWN, UP, DOWN + FAR, expected.margin, expected.scale),
        rows,
        columns,
        scores.stride(0),
        size,
        int(ignore_index),
        Tile(
            k,
            room_for_heads(k),
            min(512, max(64, power_of_two(columns))),
            NODES,
            segment,
            1 if k > LONG else 2,
            alignment(scores),
            differentiate,
            reduction,
        ),
    )
    return result, gradient, buffer


def scaled(
    outgoing: Tensor, gradient: Tensor, total: Tensor, mean: bool, dtype: torch.dtype
) -> Tensor:
    """The gradient times the outgoing one, over the weight of all rows if it is of their mean."""
    rows, columns = gradient.shape
    result = torch.empty_like(gradient, dtype=dtype)
    block = min(1024, max(64, power_of_two(columns)))
    launch(
        scaled_kernel,
        (rows, -(-columns // block)),
        1,
        gradient,
        gradient,
        outgoing,
        total,
        result,
        columns,
        row_stride(outgoing),
        mean,
        block,
    )
    return result


def forward(
    scores: Tensor, labels: Tensor, loss: HingeLoss, options: Options, differentiate: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The latter is the gradient itself, which costs more than the loss, and the total weight.
    """
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight)
    result, *saved = integrate(
        problem,
        of_loss(loss, margin),
        options.ignore_index,
        options.reduction,
        differentiate,
        shared_counter(scores),
    )
    return result, tuple(saved)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    loss: HingeLoss,
    options: Options,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R)."""
    gradient, total = saved
    return scaled(outgoing, gradient, total, options.reduction == "mean", scores.dtype)


def expected_topk(
    scores: Tensor, k: int, epsilon: float, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """The expected k-th largest of (R, n) scores, (R), and its gradient, (R, n) or empty."""
    expected = Expected(int(k), float(epsilon))
    counter = shared_counter(scores)
    value, gradient, _ = integrate(rows_of(scores), expected, 0, "none", differentiate, counter)
    return value, gradient


# The same for torch.compile and torch.export, which do not look inside custom operators.


def traced(scores: Tensor, labels: Tensor, loss: HingeLoss, options: Options) -> Tensor:
    """The loss, differentiable, as ``forward`` returns it."""
    margins, margin = margins_and_number(loss.margin, scores)
    k, *numbers = of_loss(loss, margin)
    given = (options.weight, options.ignore_index, options.reduction)
    # An exported program is called with gradients, however it was exported.
    differentiate = torch.is_grad_enabled() or torch.compiler.is_exporting()
    result, *_ = expected_operator(scores, labels, margins, k, *numbers, *given, differentiate)
    return cast(Tensor, result)


@torch.library.custom_op("topklass::expected", mutates_args=())
def expected_operator(
    scores: Tensor,
    labels: Tensor,
    margins: Tensor | None,
    k: int,
    epsilon: float,
    margin: float,
    scale: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    differentiate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reduced loss, its unscaled gradient and its weight."""
    if scores.shape[0] == 0:
        result, gradient, buffer = new_outputs(scores, reduction, differentiate)
        return of_no_rows(result, reduction), gradient, buffer
    problem = rows_of(scores, labels, margins, weight)
    expected, counter = Expected(k, epsilon, margin, scale), new_counter(scores)
    return integrate(problem, expected, ignore_index, reduction, differentiate, counter)


@expected_operator.register_fake
def _(scores: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, reduction, differentiate = rest
    return new_outputs(scores, reduction, differentiate)


@torch.library.custom_op("topklass::expected_gradient", mutates_args=())
def expected_gradient(
    outgoing: Tensor, gradient: Tensor, buffer: Tensor, scores: Tensor, mean: bool
) -> Tensor:
    """The gradient, scaled, in the dtype of the scores."""
    return scaled(outgoing, gradient, buffer, mean, scores.dtype)


@expected_gradient.register_fake
def _(outgoing: Tensor, gradient: Tensor, buffer: Tensor, scores: Tensor, mean: bool) -> Tensor:
    return new_gradient(scores)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, *_, reduction, _ = inputs
    ctx.mean = reduction == "mean"
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], scores)


def _backward(ctx: Any, outgoing: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return expected_gradient(outgoing, *ctx.saved_tensors, ctx.mean), *(None,) * 10


expected_operator.register_autograd(_backward, setup_context=_setup_context)
