"""The loss above the expected k-th largest score for torch.compile and torch.export.

They do not look inside custom operators.
"""

from typing import Any, cast

import torch
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.expected.launch import (
    Expected,
    Saved,
    integrate,
    of_loss,
    room_for_saved,
    write_gradient,
)
from topklass.kernels.noised.launch import HingeLoss
from topklass.kernels.smooth.launch import (
    margins_and_number,
    new_counter,
    new_gradient,
    new_result,
    of_no_rows,
    rows_of,
)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reduced loss, and what its gradient needs."""
    if scores.shape[0] == 0:
        return of_no_rows(new_result(scores, reduction), reduction), *room_for_saved(scores, k)
    problem = rows_of(scores, labels, margins, weight)
    expected, counter = Expected(k, epsilon, margin, scale), new_counter(scores)
    result, saved = integrate(problem, expected, ignore_index, reduction, differentiate, counter)
    return result, *saved


@expected_operator.register_fake
def _(scores: Tensor, labels: Tensor, margins: Tensor | None, k: int, *rest: Any) -> Any:
    *_, reduction, _ = rest
    return new_result(scores, reduction), *room_for_saved(scores, k)


@torch.library.custom_op("topklass::expected_gradient", mutates_args=())
def expected_gradient(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: list[Tensor],
    k: int,
    epsilon: float,
    mean: bool,
) -> Tensor:
    """The gradient, scaled, in the dtype of the scores."""
    if scores.shape[0] == 0:
        return new_gradient(scores)
    problem, expected = rows_of(scores, labels), Expected(k, epsilon)
    return write_gradient(outgoing, problem, Saved(*saved), expected, mean)


@expected_gradient.register_fake
def _(outgoing: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return new_gradient(scores)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, labels, _, ctx.k, ctx.epsilon, *_, reduction, _ = inputs
    ctx.mean = reduction == "mean"
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(scores, labels, *output[1:])


def _backward(ctx: Any, outgoing: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scores, labels, *saved = ctx.saved_tensors
    gradient = expected_gradient(outgoing, scores, labels, saved, ctx.k, ctx.epsilon, ctx.mean)
    return gradient, *(None,) * 10


expected_operator.register_autograd(_backward, setup_context=_setup_context)
