"""The top-k hinge losses: plain, convex and calibrated."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from topklass.functional._contract import (
    Options,
    block_cost,
    check_k,
    check_margin_for,
    classification_loss,
    margin_of_label,
    of_label,
    working,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def topk_hinge_loss(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    margin: float | Tensor = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    r"""Top-k hinge loss: the label's score should exceed the k-th largest of the others.

    .. math:: \ell(s, y) = \big( m_y + (s_{\setminus y})_{(k)} - s_y \big)_+

    (Garcin et al. 2022, equation 4; Berrada et al. 2018, equation 6; Lapin et al. 2015). Two
    scores receive a gradient, and it is not top-k calibrated: use it as a baseline.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(2.)
    """
    check_k(k, input)
    check_margin_for(margin, input)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        top, leads = _top_and_membership(scores, labels, k)
        rival = with_nan_of(top, torch.where(leads, top[:, k:], top[:, k - 1 : k]))
        return hinge(margin_of_label(margin, labels), rival, of_label(scores, labels))

    return classification_loss(row_loss, input, target, block_cost=block_cost(margin), **options)


def convex_topk_hinge_loss(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    margin: float | Tensor = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    r"""Convex top-k hinge loss: the label's score should exceed the mean of the k largest.

    .. math:: \ell(s, y) = \Big( \frac1k \sum_{j=1}^k (s + m_y (1 - \delta_y))_{(j)} - s_y \Big)_+

    (Garcin et al. 2022, Table 1; Lapin et al. 2015). The convex upper bound of
    :func:`topk_hinge_loss`, not calibrated either.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> convex_topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(2.5000)
    """
    check_k(k, input)
    check_margin_for(margin, input)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        top, leads = _top_and_membership(scores, labels, k)
        label, m = of_label(scores, labels), margin_of_label(margin, labels)
        rival = with_nan_of(top, torch.where(leads, top[:, k:], top[:, k - 1 : k]))
        leaders = top[:, : k - 1].sum(1, keepdim=True)
        others = torch.where(leads, leaders + top[:, k - 1 : k] - label, leaders) + (k - 1) * m
        largest = (others + torch.maximum(rival + m, label)) / k
        loss = (largest - label).relu().masked_fill(rival == -inf, 0.0)
        return loss.masked_fill(label == -inf, inf)

    return classification_loss(row_loss, input, target, block_cost=block_cost(margin), **options)


def calibrated_topk_hinge_loss(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    margin: float | Tensor = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    r"""Calibrated top-k hinge loss: the label's score should exceed the (k + 1)-th largest of all.

    .. math:: \ell(s, y) = \big( m_y + s_{(k+1)} - s_y \big)_+

    (Garcin et al. 2022, equation 5; Yang & Koyejo 2020). Its minimiser ranks the k most probable
    classes first, but its gradient is as sparse as the plain hinge's: :func:`noised_topk_loss` is
    the form to train networks with.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> calibrated_topk_hinge_loss(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]), k=2)
        tensor(1.)
    """
    check_k(k, input)
    check_margin_for(margin, input)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        top = scores.topk(k + 1, dim=1).values
        rival = with_nan_of(top, top[:, k:])
        return hinge(margin_of_label(margin, labels), rival, of_label(scores, labels))

    return classification_loss(row_loss, input, target, block_cost=block_cost(margin), **options)


def hinge(margin: float | Tensor, rival: Tensor, label: Tensor) -> Tensor:
    """``(margin + rival − label)_+``; 0 without a rival, +inf for an absent label."""
    gap = (rival - label).masked_fill((rival == -inf) & (label == -inf), inf)
    return (gap + margin).relu()


def with_nan_of(top: Tensor, rival: Tensor) -> Tensor:
    """NaN in any row that holds one: it sorts first."""
    return rival.masked_fill(top[:, :1].isnan(), float("nan"))


def _top_and_membership(scores: Tensor, labels: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k + 1 largest scores, (R, k + 1), and whether each label is among the first k."""
    top, index = scores.topk(k + 1, dim=1)
    leads = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index[:, :k], True)
    return top, of_label(leads, labels)
