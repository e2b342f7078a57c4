"""Likelihoods with a twist for imbalanced data: label-distribution-aware margins, and focal."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from topklass._checks import check_number
from topklass.functional._contract import (
    Options,
    block_cost,
    check_input,
    check_k,
    check_margin_for,
    classification_loss,
    of_label,
    working,
)
from topklass.functional.smooth import smooth_hinge

if TYPE_CHECKING:
    from typing_extensions import Unpack


def ldam_loss(
    input: Tensor,
    target: Tensor,
    margin: float | Tensor,
    scale: float = 30.0,
    **options: Unpack[Options],
) -> Tensor:
    r"""Label-distribution-aware margin loss: cross-entropy in which the label must win by a margin.

    .. math:: \ell(s, y) = -\log
        \frac{e^{c (s_y - m_y)}}{e^{c (s_y - m_y)} + \sum_{j \ne y} e^{c s_j}}

    (Cao et al. 2019; Garcin et al. 2022, Table 1), for cosine scores scaled by c. It is the smooth
    top-1 loss at temperature 1/c, times c.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        margin: a number, or one per class (see :func:`topklass.class_margins`).
        scale: c, by which scores and margins are multiplied.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> cosines, margins = torch.tensor([[0.9, 0.1, -0.3]]), torch.tensor([0.1, 0.2, 0.2])
        >>> ldam_loss(cosines, torch.tensor([0]), margins, scale=10.0)
        tensor(0.0009)
    """
    check_number("scale", scale, positive=True)
    check_k(1, input)
    check_margin_for(margin, input)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        return scale * smooth_hinge(scores, labels, 1, 1 / scale, margin)

    return classification_loss(row_loss, input, target, block_cost=block_cost(margin), **options)


def focal_loss(
    input: Tensor, target: Tensor, gamma: float = 2.0, **options: Unpack[Options]
) -> Tensor:
    r"""Focal loss: cross-entropy in which labels that are already probable count less.

    .. math:: \ell(s, y) = (1 - p_y)^\gamma \, (-\log p_y), \qquad p = \mathrm{softmax}(s)

    (Lin et al. 2017; the formula in Garcin et al. 2022, Table 1 is misprinted). With γ = 0 it is
    cross-entropy.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        gamma: how strongly probable labels are discounted, at least 0.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> focal_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(0.0109)
    """
    check_input(input)
    check_number("gamma", gamma, positive=False)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        log_probability = of_label(torch.log_softmax(working(scores), 1), labels)
        impossible = log_probability == -inf
        log_probability = log_probability.masked_fill(impossible, 0.0)
        miss = -torch.expm1(log_probability)
        loss = -log_probability * miss.masked_fill(miss == 0, 1.0) ** gamma  # 0^(γ−1) is infinite
        return loss.masked_fill(impossible, inf)

    return classification_loss(row_loss, input, target, block_cost=block_cost(0.0), **options)
