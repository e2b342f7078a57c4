"""Cross-entropy for imbalanced data: label-distribution-aware margins, and focal weights."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from topklass._checks import Options, check_logits, check_margin, check_number
from topklass._targets import Target
from topklass.functional._contract import RowLoss, classification_loss, of_label, working
from topklass.functional.smooth import SmoothHinge


def ldam_loss(
    logits: Tensor,
    target: Target,
    margin: float | Tensor,
    scale: float = 30.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Label-distribution-aware margin loss: cross-entropy in which the label must win by a margin.

    .. math:: \ell(s, y) = -\log
        \frac{e^{c (s_y - m_y)}}{e^{c (s_y - m_y)} + \sum_{j \ne y} e^{c s_j}}

    (Cao et al. 2019; Garcin et al. 2022, Table 1), for cosine scores scaled by c. It is the smooth
    top-1 loss at temperature 1/c, times c.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        margin: a number, or one per class (see :func:`topklass.class_margins`).
        scale: c, by which scores and margins are multiplied.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> cosines, margins = torch.tensor([[0.9, 0.1, -0.3]]), torch.tensor([0.1, 0.2, 0.2])
        >>> ldam_loss(cosines, torch.tensor([0]), margins, scale=10.0)
        tensor(0.0009)
    """
    classes = check_logits(logits, dim)
    check_margin(margin, classes)
    check_number("scale", scale, positive=True)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    if classes < 2:  # certain by any margin: cross-entropy
        return classification_loss(Focal(0.0), logits, target, dim, options)
    smooth = SmoothHinge(1, 1 / scale, margin)
    return classification_loss(smooth, logits, target, dim, options, factor=scale)


def focal_loss(
    logits: Tensor,
    target: Target,
    gamma: float = 2.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Focal loss: cross-entropy in which labels that are already probable count less.

    .. math:: \ell(s, y) = (1 - p_y)^\gamma \, (-\log p_y), \qquad p = \mathrm{softmax}(s)

    (Lin et al. 2017; the formula in Garcin et al. 2022, Table 1 is misprinted). With γ = 0 it is
    cross-entropy.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        gamma: how strongly probable labels are discounted, at least 0.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> focal_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(0.0109)
    """
    check_logits(logits, dim)
    check_number("gamma", gamma, positive=False)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(Focal(gamma), logits, target, dim, options)


@dataclass(frozen=True, eq=False)
class Focal(RowLoss):
    """``(1 − p_y)^γ (−log p_y)`` of rows."""

    gamma: float

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        log_probability = of_label(torch.log_softmax(working(scores), 1), labels)
        impossible = log_probability == -inf
        log_probability = log_probability.masked_fill(impossible, 0.0)
        miss = -torch.expm1(log_probability)
        factor = miss.masked_fill(miss == 0, 1.0) ** self.gamma  # 0^(γ−1) is infinite
        return (-log_probability * factor).masked_fill(impossible, inf)
