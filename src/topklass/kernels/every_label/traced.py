"""Losses of every label for torch.compile and torch.export, which do not look inside operators."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from topklass._checks import Options
from topklass._lists import Lists
from topklass.kernels.every_label.launch import ListLoss, backward, forward, new_records
from topklass.kernels.smooth.launch import (
    margins_and_number,
    new_counter,
    new_gradient,
    new_result,
    of_no_rows,
)


class GivenLists(NamedTuple):
    """A loss of random lists as custom operators receive it."""

    given: Lists

    def lists(self) -> Lists:
        """The parameters."""
        return self.given


@torch.library.custom_op("topklass::every_label_loss", mutates_args=())
def _loss_and_records(
    scores: Tensor,
    target: Tensor,
    margins: Tensor | None,
    weight: Tensor | None,
    lengths: list[int],
    chances: list[float],
    numbers: list[float],
    ignore_index: int,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    if scores.shape[0] == 0:
        result = of_no_rows(new_result(scores, reduction), reduction)
        return result, new_records(scores, max(lengths))
    loss, smoothing = _given(lengths, chances, numbers, margins)
    options = Options(weight, ignore_index, reduction, smoothing)
    result, (records,) = forward(scores, target, loss, options, True, new_counter(scores))
    return result, records


@_loss_and_records.register_fake
def _(
    scores: Tensor,
    target: Tensor,
    margins: Tensor | None,
    weight: Tensor | None,
    lengths: list[int],
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return new_result(scores, rest[-1]), new_records(scores, max(lengths))


@torch.library.custom_op("topklass::every_label_loss_gradient", mutates_args=())
def _gradient(
    outgoing: Tensor,
    scores: Tensor,
    target: Tensor,
    records: Tensor,
    margins: Tensor | None,
    weight: Tensor | None,
    lengths: list[int],
    chances: list[float],
    numbers: list[float],
    reduction: str,
) -> Tensor:
    if scores.shape[0] == 0:
        return new_gradient(scores)
    loss, smoothing = _given(lengths, chances, numbers, margins)
    options = Options(weight, 0, reduction, smoothing)
    return backward(outgoing, scores, target, (records,), loss, options)


@_gradient.register_fake
def _(outgoing: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return new_gradient(scores)


def _given(
    lengths: list[int], chances: list[float], numbers: list[float], margins: Tensor | None
) -> tuple[GivenLists, float]:
    """The loss, and how much labels are smoothed."""
    temperature, scale, margin, smoothing = numbers
    given = margin if margins is None else margins
    lists = Lists(tuple(lengths), tuple(chances), temperature, scale, given)
    return GivenLists(lists), smoothing


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, target, margins, weight, ctx.lengths, ctx.chances, ctx.numbers, _, ctx.reduction = (
        inputs
    )
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(scores, target, output[1], margins, weight)


def _differentiated(ctx: Any, outgoing: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    numbers = (ctx.lengths, ctx.chances, ctx.numbers, ctx.reduction)
    return _gradient(outgoing, *ctx.saved_tensors, *numbers), *(None,) * 8


_loss_and_records.register_autograd(_differentiated, setup_context=_set_up)


def traced(scores: Tensor, target: Tensor, loss: ListLoss, options: Options) -> Tensor:
    """The loss, differentiable, as ``forward`` returns it."""
    lists = loss.lists()
    margins, margin = margins_and_number(lists.margin, scores)
    numbers = [lists.temperature, lists.scale, margin, options.label_smoothing]
    result, _ = _loss_and_records(
        scores,
        target,
        margins,
        options.weight,
        list(lists.lengths),
        list(lists.chances),
        [float(number) for number in numbers],
        options.ignore_index,
        options.reduction,
    )
    return cast(Tensor, result)
