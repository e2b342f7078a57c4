"""What every loss shares with ``torch.nn.functional.cross_entropy``.

A loss is given as a function of rows: ``row_loss(scores, labels)`` maps (R, C) scores and (R, 1)
labels to (R, 1) losses, and with ``labels=None`` to the (R, C) losses of every class as the label.
Input shapes, class weights, ignored targets, label smoothing, class probabilities, precision and
reduction are here, once.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from topklass._checks import check_count, check_margin, check_per_class, is_number
from topklass._transforms import can_look
from topklass.dispatch import (
    LARGEST_K,
    Call,
    LossOptions,
    check_devices,
    kernel_serves,
    plain_tensor,
    remember,
)
from topklass.reference.limits import working_dtype
from topklass.reference.row_blocks import by_rows, transformed

REDUCTIONS = ("none", "mean", "sum")


class Options(TypedDict, total=False):
    """The keyword arguments of ``cross_entropy``, with its meanings and defaults."""

    weight: Tensor | None
    """One weight per class; default none."""
    ignore_index: int
    """A target that contributes neither loss nor gradient; default −100."""
    reduction: str
    """"mean" (over the labels' weights, the default), "sum" or "none"."""
    label_smoothing: float
    """How much of the target is spread over all classes, 0 (the default) to 1."""


class RowLoss(Protocol):
    """The losses of rows, for one label each or for every label."""

    def __call__(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """Map (R, C) scores and (R, 1) labels to (R, 1), or to (R, C) without labels."""


class KernelLoss(NamedTuple):
    """A loss with class indices that kernels compute and reduce in one go."""

    k: int
    """The number of heads that it keeps."""
    obstacle: str | None
    """What its parameters ask that the kernels do not do."""
    call: Call | None
    """How the call is remembered, if it is."""
    loss: Callable[[Tensor, LossOptions], Tensor]
    """From (R, C) scores to the reduced loss, or with "none" to (R) losses."""
    largest: int = LARGEST_K
    """How many heads it can keep."""


def classification_loss(
    row_loss: RowLoss,
    input: Tensor,
    target: Tensor,
    *,
    block_cost: int | None = None,
    kernel: KernelLoss | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **unknown: object,
) -> Tensor:
    """Reduce a row loss to what ``cross_entropy`` would return for the same arguments.

    With class indices the loss of a row is ``Σ_c w_c P_c ℓ(s, c)`` for P the smoothed one-hot
    target, and "mean" divides by the sum of the labels' weights; with class probabilities P is the
    smoothed target, and "mean" divides by the number of rows.

    A deterministic row loss that has no other tensor to differentiate than the scores may name its
    ``block_cost`` (see ``by_rows``): the losses of every label are then found block by block.
    A loss that has a ``kernel`` takes it where :mod:`topklass.dispatch` says so.
    """
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(map(repr, unknown))}; besides its own parameters a loss "
            f"takes {', '.join(Options.__annotations__)}"
        )
    check_options(reduction, label_smoothing)
    probabilities = check_target(input, target)
    if probabilities and ignore_index >= 0:
        raise ValueError(
            "ignore_index does not apply to a target of class probabilities, "
            f"got ignore_index={ignore_index}"
        )
    if weight is not None:
        check_per_class("weight", weight, input.shape[class_dimension(input)])
        weight = working(weight)

    def reference(scores: Tensor) -> Tensor:
        if probabilities:
            chances = _smoothed(working(to_rows(target)), label_smoothing)
            losses, total = _expected(row_loss, scores, chances, weight, block_cost), None
        else:
            labels = target.reshape(-1, 1)
            losses, total = _indexed(
                row_loss, scores, labels, weight, ignore_index, label_smoothing, block_cost
            )
        return reduced(losses, total, reduction)

    scores = to_rows(input)
    if kernel is not None and kernel_serves(
        scores,
        kernel.k,
        kernel.obstacle or _obstacle(target, label_smoothing, weight, ignore_index),
        kernel.largest,
    ):
        check_devices(scores, target=target, weight=weight)
        remember(kernel.call)
        labels = target.reshape(-1).long().contiguous()
        narrow = None if weight is None else weight.float().contiguous()
        options = LossOptions(labels, narrow, ignore_index, reduction, reference)
        result = kernel.loss(scores, options)
    else:
        result = reference(scores)
    if reduction == "none":
        result = result.reshape(shape_of_indices(input))
    return as_input(result, input)


def _smoothed(chances: Tensor, label_smoothing: float) -> Tensor:
    """Probabilities of which a part is spread over all classes."""
    if label_smoothing == 0:
        return chances
    return chances * (1 - label_smoothing) + label_smoothing / chances.shape[1]


def _obstacle(
    target: Tensor, label_smoothing: float, weight: Tensor | None, ignore_index: int
) -> str | None:
    """What target and options ask that no kernel does."""
    if target.is_floating_point() or label_smoothing:
        return "class probabilities and label smoothing"
    if not plain_tensor(target):
        return f"a target that is a {type(target).__name__}"
    if weight is not None and (weight.requires_grad or transformed(weight)):
        return "derivatives by the class weights"
    if abs(ignore_index) >= 2**31:
        return f"ignore_index={ignore_index}, beyond 32 bits"
    return None


def reduced(losses: Tensor, total: Tensor | None, reduction: str) -> Tensor:
    """(R, 1) losses as one number, or as (R); "mean" divides by the total, if not by R."""
    if reduction == "none":
        return losses.squeeze(1)
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if total is None else losses.sum() / total


def _indexed(
    row_loss: RowLoss,
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    block_cost: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows with class indices, (R, 1), and what their mean divides by, if not R."""
    labels, ignored = labels.long(), None
    if not known_in_range(labels, scores.shape[1], ignore_index):
        ignored = labels == ignore_index
        labels = labels.masked_fill(ignored, 0)
    weights = None if weight is None else weight[labels]
    if label_smoothing == 0:
        losses = row_loss(scores, labels)
        losses = losses if weights is None else losses * weights
    else:
        spread = label_smoothing / scores.shape[1]
        chances = torch.full_like(scores, spread, dtype=working_dtype(scores.dtype))
        chances = chances.scatter(1, labels, 1 - label_smoothing + spread)
        losses = _expected(row_loss, scores, chances, weight, block_cost)
    if ignored is None:
        return losses, None if weights is None else weights.sum()
    counted = torch.ones_like(losses) if weights is None else weights
    return losses.masked_fill(ignored, 0.0), counted.masked_fill(ignored, 0.0).sum()


def _expected(
    row_loss: RowLoss,
    scores: Tensor,
    chances: Tensor,
    weight: Tensor | None,
    block_cost: int | None,
) -> Tensor:
    """``Σ_c w_c P_c ℓ(s, c)``, (R, 1), where an absent class of probability 0 does not count."""

    def expected(scores: Tensor, chances: Tensor) -> Tensor:
        losses = row_loss(scores, None)
        impossible = (chances == 0) & (losses == inf)
        return (losses.masked_fill(impossible, 0.0) * chances).sum(1, keepdim=True)

    if weight is not None:
        chances = chances * weight
    if block_cost is None or chances.requires_grad:
        return expected(scores, chances)
    return by_rows(expected, scores, chances, cost=block_cost)


def check_options(reduction: str, label_smoothing: float) -> None:
    """Require a known reduction and a smoothing from 0 to 1."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not is_number(label_smoothing) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be a number from 0 to 1, got {label_smoothing!r}")


def check_input(input: Tensor) -> None:
    """Require floating-point logits with a dimension of classes."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor of logits, got {type(input).__name__}")
    if input.dim() == 0 or not input.is_floating_point():
        raise ValueError(
            "input must be a floating-point tensor of shape (C), (N, C) or (N, C, d1, ...), "
            f"got shape {tuple(input.shape)} and {input.dtype}"
        )


def check_target(input: Tensor, target: Tensor) -> bool:
    """Require a target that belongs to the input; tell whether it holds class probabilities."""
    if not isinstance(target, Tensor):
        raise TypeError(
            "target must be a tensor of class indices or class probabilities, "
            f"got {type(target).__name__}"
        )
    expected = shape_of_indices(input)
    if target.is_floating_point():
        if target.shape != input.shape:
            hint = " (for class indices: target.long())" if target.shape == expected else ""
            raise ValueError(
                f"a floating-point target holds class probabilities and must have the input's "
                f"shape {tuple(input.shape)}, got {tuple(target.shape)}{hint}"
            )
        return True
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(
            f"target must hold class indices (integers) or class probabilities, got {target.dtype}"
        )
    if target.shape != expected:
        raise ValueError(
            f"for input of shape {tuple(input.shape)}, classes in dimension "
            f"{class_dimension(input)}, a target of class indices must have shape "
            f"{tuple(expected)}, got {tuple(target.shape)}{_hint(input, target)}"
        )
    return False


def _hint(input: Tensor, target: Tensor) -> str:
    """What a target of class indices with a wrong shape may have meant."""
    if target.shape == input.shape:
        return " (one-hot targets must be floating point: target.float())"
    if target.shape == (*shape_of_indices(input), 1):
        return " (target.squeeze(-1))"
    if target.shape == input.shape[:-1]:
        return " (classes in the last dimension: input.movedim(-1, 1))"
    return ""


def known_in_range(labels: Tensor, classes: int, ignore_index: int) -> bool:
    """Whether all labels are known to be classes, none of them ignored.

    Known only where looking costs nothing; there, a label that is neither raises.
    """
    if not can_look(labels) or labels.numel() == 0:
        return False
    lowest, highest = (int(bound) for bound in labels.aminmax())
    if lowest >= 0 and highest < classes:
        return not 0 <= ignore_index < classes
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"target must hold class indices from 0 to {classes - 1}, or "
            f"ignore_index={ignore_index}, got {int(wrong[0])}"
        )
    return False


def class_dimension(input: Tensor) -> int:
    """Where the classes are: the only dimension of (C), the second of everything else."""
    return 0 if input.dim() == 1 else 1


def shape_of_indices(input: Tensor) -> torch.Size:
    """The input's shape without its dimension of classes."""
    class_dim = class_dimension(input)
    return input.shape[:class_dim] + input.shape[class_dim + 1 :]


def autocasting(input: Tensor) -> bool:
    """Whether autocast is on for the input's device."""
    device = input.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def as_input(result: Tensor, input: Tensor) -> Tensor:
    """A loss in the input's precision, or under autocast in that of losses."""
    if result.dtype == input.dtype:
        return result
    return result.to(working_dtype(input.dtype) if autocasting(input) else input.dtype)


def to_rows(tensor: Tensor) -> Tensor:
    """(C), (N, C) or (N, C, d1, …) as (rows, C)."""
    if tensor.dim() == 2:
        return tensor
    last = tensor.movedim(class_dimension(tensor), -1)
    return last.reshape(-1, last.shape[-1])


def check_k(k: int, input: Tensor) -> None:
    """Require room for at least one class outside the list of k."""
    check_input(input)
    classes = input.shape[class_dimension(input)]
    check_count("k", k, classes - 1, f"one less than the input's {classes} classes")


def check_margin_for(margin: float | Tensor, input: Tensor) -> None:
    """Require a non-negative margin, a number or one per class."""
    check_margin(margin)
    if isinstance(margin, Tensor) and margin.dim():
        check_per_class("margin", margin, input.shape[class_dimension(input)])


def working(scores: Tensor) -> Tensor:
    """Scores in the precision in which losses are computed."""
    return scores.to(working_dtype(scores.dtype))


def of_label(values: Tensor, labels: Tensor | None) -> Tensor:
    """The label's entry of each row, (R, 1), or all entries where every class is a label."""
    return values if labels is None else values.gather(1, labels)


def margin_of_label(margin: float | Tensor, labels: Tensor | None) -> float | Tensor:
    """The label's margin, (R, 1), or all margins, (C); a number stays a number."""
    if not isinstance(margin, Tensor) or margin.dim() == 0 or labels is None:
        return margin
    return margin[labels]


def block_cost(margin: float | Tensor, cost: int = 8) -> int | None:
    """What the graph of every label's loss keeps for each score; None if the margin is learnt."""
    learnt = isinstance(margin, Tensor) and margin.requires_grad
    return None if learnt else cost


def margin_obstacle(margin: float | Tensor) -> str | None:
    """What the margin asks that no kernel does."""
    if isinstance(margin, Tensor) and (margin.requires_grad or transformed(margin)):
        return "derivatives by the margin"
    return None
