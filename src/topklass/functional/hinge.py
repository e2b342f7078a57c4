"""The top-k hinge losses: plain, convex and calibrated."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from topklass._checks import Options, check_k, check_margin
from topklass._targets import Target
from topklass.functional._contract import (
    RowLoss,
    classification_loss,
    margin_of_label,
    of_label,
    working,
)


def topk_hinge_loss(
    logits: Tensor,
    target: Target,
    k: int = 5,
    margin: float | Tensor = 1.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Top-k hinge loss: the label's score should exceed the k-th largest of the others.

    .. math:: \ell(s, y) = \left( m_y + (s_{\setminus y})_{(k)} - s_y \right)_+

    (Garcin et al. 2022, equation 4; Berrada et al. 2018, equation 6; Lapin et al. 2015). Two
    scores receive a gradient, and it is not top-k calibrated: use it as a baseline.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(2.)
    """
    check_margin(margin, check_k(k, logits, dim))
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(TopKHinge(k, margin), logits, target, dim, options)


def convex_topk_hinge_loss(
    logits: Tensor,
    target: Target,
    k: int = 5,
    margin: float | Tensor = 1.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Convex top-k hinge loss: the label's score should exceed the mean of the k largest.

    .. math:: \ell(s, y)
        = \left( \frac1k \sum_{j=1}^k (s + m_y (1 - \delta_y))_{(j)} - s_y \right)_+

    (Garcin et al. 2022, Table 1; Lapin et al. 2015). The convex upper bound of
    :func:`topk_hinge_loss`, not calibrated either.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> convex_topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(2.5000)
    """
    check_margin(margin, check_k(k, logits, dim))
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(ConvexTopKHinge(k, margin), logits, target, dim, options)


def calibrated_topk_hinge_loss(
    logits: Tensor,
    target: Target,
    k: int = 5,
    margin: float | Tensor = 1.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Calibrated top-k hinge loss: the label's score should exceed the (k + 1)-th largest of all.

    .. math:: \ell(s, y) = \left( m_y + s_{(k+1)} - s_y \right)_+

    (Garcin et al. 2022, equation 5; Yang & Koyejo 2020). Its minimiser ranks the k most probable
    classes first, but its gradient is as sparse as the plain hinge's: :func:`noised_topk_loss` is
    the form to train networks with.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> calibrated_topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(1.)
    """
    check_margin(margin, check_k(k, logits, dim))
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(CalibratedTopKHinge(k, margin), logits, target, dim, options)


@dataclass(frozen=True, eq=False)
class TopKHinge(RowLoss):
    """``(m_y + (s∖y)_(k) − s_y)_+`` of rows."""

    k: int
    margin: float | Tensor

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        top, leads = _top_and_membership(scores, labels, self.k)
        label, margin = of_label(scores, labels), margin_of_label(self.margin, labels)
        return hinge(margin, _kth_rival(top, leads), label)


@dataclass(frozen=True, eq=False)
class ConvexTopKHinge(RowLoss):
    """The mean of the k largest scores, rivals raised by the margin, above the label's."""

    k: int
    margin: float | Tensor

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores, k = working(scores), self.k
        top, leads = _top_and_membership(scores, labels, k)
        label, m = of_label(scores, labels), margin_of_label(self.margin, labels)
        rival = _kth_rival(top, leads)
        leaders = top[:, : k - 1].sum(1, keepdim=True)
        others = torch.where(leads, leaders + top[:, k - 1 : k] - label, leaders) + (k - 1) * m
        largest = (others + torch.maximum(rival + m, label)) / k
        certain = (rival == -inf) | ((rival < inf) & (label == inf))
        loss = (largest - label).relu().masked_fill(certain, 0.0)
        return loss.masked_fill(label == -inf, inf)


@dataclass(frozen=True, eq=False)
class CalibratedTopKHinge(RowLoss):
    """``(m_y + s_(k+1) − s_y)_+`` of rows."""

    k: int
    margin: float | Tensor

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        top = scores.topk(self.k + 1, dim=1).values
        label, margin = of_label(scores, labels), margin_of_label(self.margin, labels)
        return hinge(margin, top[:, self.k :], label)


def hinge(margin: float | Tensor, rival: Tensor, label: Tensor) -> Tensor:
    """``(margin + rival − label)_+``; 0 without a rival, +inf for an absent label."""
    gap = (rival - label).masked_fill((rival == -inf) & (label == -inf), inf)
    return (gap + margin).relu()


def _top_and_membership(scores: Tensor, labels: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k + 1 largest scores, (R, k + 1), and whether each label is among the first k."""
    top, places = scores.topk(k + 1, dim=1)
    ones = torch.ones_like(places[:, :k], dtype=torch.bool)
    leads = torch.zeros_like(scores, dtype=torch.bool).scatter(1, places[:, :k], ones)
    return top, of_label(leads, labels)


def _kth_rival(top: Tensor, leads: Tensor) -> Tensor:
    """The k-th largest score besides the label."""
    return torch.where(leads, top[:, -1:], top[:, -2:-1])
