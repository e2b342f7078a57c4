"""The smooth top-k loss where several classes are right at once."""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import (
    Options,
    check_k,
    check_margin,
    check_options,
    check_temperature,
    index_shape,
    labels_in_range,
    to_rows,
)
from topklass._transforms import can_read_values, is_differentiated, spread_nan
from topklass.functional._contract import (
    margin_of_label,
    of_label,
    reduced,
    result_dtype,
    working,
)
from topklass.operators.esp import smooth_gap
from topklass.reference.power_sums import LINEAR_FROM
from topklass.reference.row_blocks import by_rows


def multilabel_smooth_topk_loss(
    logits: Tensor,
    target: Tensor,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""Smooth top-k loss of several right classes: each should be among the k largest scores.

    .. math:: L(s, P) = \frac{1}{|P|} \sum_{y \in P} \tau \log \Big[ 1 + e^{\alpha_y/\tau -
        s_y/(k\tau)} \frac{\sigma_k(e_N)}{\sigma_{k-1}(e_N)} \Big], \qquad e = \exp(s / (k\tau))

    P are the positive classes and N all others: a positive competes with the negatives alone
    (Berrada et al. 2018, equation 10, for a set). With one positive it is
    :func:`smooth_topk_loss`; as τ → 0 it becomes the mean over P of
    ``(k·α_y + s_[k] − s_y)_+ / k``, where s_[k] is the k-th largest score of N. With fewer than k
    negatives it is 0.

    Use it for tags, or where annotators name several classes that are all right. Where they
    disagree about the one right class, give :func:`smooth_topk_loss` class probabilities.

    Args:
        logits: (C) or (N, C); −inf marks an absent class.
        target: the positives of each sample: class indices (P) or (N, P), padded with
            ``ignore_index``, where one that is repeated counts once; or a mask of the logits'
            shape, of bool or of floating-point zeros and ones.
        k: length of the list that should hold a positive, 1 ≤ k ≤ C − 1.
        tau: temperature τ; small is close to the hinge, large is smoother.
        margin: α, a number or one per class.
        weight: one weight w per class: the loss of a sample is ``Σ_{y∈P} w_y ℓ_y / |P|``.
        ignore_index: what pads class indices.
        reduction: "mean" (over the samples that have positives, whatever their weights; NaN if
            there are none, as for cross-entropy), "sum" or "none". A sample without positives has
            loss 0.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per sample.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> positives = torch.tensor([[0, 1], [0, -100]])
        >>> multilabel_smooth_topk_loss(logits, positives, k=2, reduction="none")
        tensor([0.4021, 2.1269])
    """
    _check_shape(logits)
    classes = check_k(k, logits, -1)
    check_temperature(tau)
    check_margin(margin, classes)
    check_options(Options(weight, ignore_index, reduction), classes)
    weight = None if weight is None else working(weight)
    _check_target(logits, target)
    scores = spread_nan(to_rows(logits, -1))
    labels, counted, positive = _positives(scores, target, ignore_index)

    def row_loss(scores: Tensor, counted: Tensor, positive: Tensor) -> Tensor:
        gaps = _gaps(scores, labels, positive, k, tau) + margin_of_label(margin, labels)
        losses = F.softplus(gaps, beta=1 / tau, threshold=LINEAR_FROM).masked_fill(~counted, 0.0)
        if weight is not None:
            losses = losses * (weight if labels is None else weight[labels])
        return losses.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)

    if labels is None and not (is_differentiated(margin) or is_differentiated(weight)):
        losses = by_rows(row_loss, scores, counted, positive, cost=16)
    else:
        losses = row_loss(scores, counted, positive)
    result = reduced(losses, counted.any(1).sum(), reduction)
    if reduction == "none":
        result = result.reshape(index_shape(logits, -1))
    return result.to(result_dtype(logits))


class Positives(NamedTuple):
    """The right classes of each row."""

    labels: Tensor | None
    """Classes in question, (R, P); None where these are all classes, in their order."""
    counted: Tensor
    """Which of them are positive, (R, P); a class that is repeated counts once."""
    positive: Tensor
    """Which of all classes are, (R, C)."""


def _positives(scores: Tensor, target: Tensor, ignore_index: int) -> Positives:
    rows, classes = scores.shape
    target = target.reshape(rows, target.shape[-1])
    if target.dtype == torch.bool or target.is_floating_point():
        positive = target.bool()
        return Positives(None, positive, positive)
    labels = target.long()
    labels_in_range(labels, classes, ignore_index)
    labels = labels.sort(1).values
    before = torch.cat([torch.full_like(labels[:, :1], ignore_index), labels[:, :-1]], 1)
    counted = (labels != ignore_index) & (labels != before)
    places = labels.masked_fill(~counted, classes)  # one column more, for what does not count
    ones = torch.ones_like(places, dtype=torch.bool)
    positive = scores.new_zeros(rows, classes + 1, dtype=torch.bool).scatter(1, places, ones)
    return Positives(labels.masked_fill(~counted, 0), counted, positive[:, :classes])


def _gaps(scores: Tensor, labels: Tensor | None, positive: Tensor, k: int, tau: float) -> Tensor:
    """By how much the k-th largest negative exceeds each label, over k, smoothed.

    The negatives are compared with a further class of score 0, once for all labels.
    """
    negatives = F.pad(scores.masked_fill(positive, -inf), (0, 1))
    further = torch.full_like(negatives[:, :1], scores.shape[1], dtype=torch.long)
    gap = smooth_gap(negatives, further, k, tau)
    label = of_label(scores, labels).to(gap.dtype)
    return (gap - label / k).masked_fill(label == -inf, inf)


def _check_shape(logits: Tensor) -> None:
    """Require one sample, or a batch of them."""
    if isinstance(logits, Tensor) and logits.dim() > 2:
        raise ValueError(
            f"logits must have shape (C) or (N, C), got {tuple(logits.shape)}: "
            f"move the classes to the end and flatten the other dimensions"
        )


def _check_target(logits: Tensor, target: Tensor) -> None:
    """Require positives of each sample, as indices or as a mask."""
    if not isinstance(target, Tensor) or target.is_complex():
        given = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(
            f"target must be a tensor of class indices, or a mask of bool or floating point, "
            f"got {given}"
        )
    shape, expected = tuple(target.shape), tuple(logits.shape)
    if target.dtype == torch.bool or target.is_floating_point():
        if shape != expected:
            raise ValueError(f"a mask of positives must have shape {expected}, got {shape}")
        return _check_mask(target)
    if shape == expected:
        raise ValueError(
            f"an integer target of the logits' shape {expected} may be a mask or class indices: "
            f"for a mask pass target.bool(), for indices add a column of ignore_index"
        )
    if target.dim() != logits.dim() or shape[:-1] != expected[:-1]:
        rows = "(P)" if logits.dim() == 1 else f"({len(logits)}, P)"
        raise ValueError(
            f"for logits of shape {expected} a target of class indices must have shape {rows}, "
            f"got {shape} (for one class a sample: target.unsqueeze(-1))"
        )
    return None


def _check_mask(target: Tensor) -> None:
    """Require zeros and ones, where looking is free."""
    if target.dtype != torch.bool and can_read_values(target):
        wrong = target[(target != 0) & (target != 1)]
        if wrong.numel():
            raise ValueError(
                f"a mask of positives must hold zeros and ones, got {wrong[0].item()} (class "
                f"probabilities are for smooth_topk_loss)"
            )
