"""The smooth top-k SVM loss of Berrada et al. 2018."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_temperature
from topklass.dispatch import (
    LONGEST_LIST,
    LossOptions,
    known_call,
    loss_options,
    was_served,
)
from topklass.functional._contract import (
    KernelLoss,
    Options,
    as_input,
    block_cost,
    check_k,
    check_margin_for,
    classification_loss,
    margin_obstacle,
    margin_of_label,
    working,
)
from topklass.operators.esp import smooth_gap

if TYPE_CHECKING:
    from typing_extensions import Unpack


EXACT = 40.0
"""Beyond it softplus(z) is z to the last digit of float64."""


def smooth_topk_loss(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    r"""Smooth top-k SVM loss: the label should be among the k largest scores, by a margin.

    .. math:: L_{k,\tau}(s, y) = \tau \log \Big[ 1 + e^{\alpha_y/\tau - s_y/(k\tau)}
        \frac{\sigma_k(e_{\setminus y})}{\sigma_{k-1}(e_{\setminus y})} \Big],
        \qquad e = \exp(s / (k\tau))

    (Berrada et al. 2018, equations 9 and 10, with the margin α of section 3.3), where σ are the
    elementary symmetric polynomials. Exact, without approximation. With k = 1, τ = 1, margin = 0 it
    is cross-entropy; as τ → 0 it becomes ``topk_hinge_loss(margin=k·α) / k``. Its gradient is about
    1/k that of cross-entropy: multiply the loss, or the learning rate, by k.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape. On
            a GPU an index that is no class gives NaN.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        tau: temperature τ; small is close to the hinge, large is smoother.
        margin: α, a number or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> smooth_topk_loss(logits, torch.tensor([0, 0]), k=2, reduction="none")
        tensor([0.6931, 2.1269])
    """
    call = known_call(input, target, (k, tau, margin), options)

    def by_kernel(scores: Tensor, options: LossOptions) -> Tensor:
        from topklass.kernels.smooth import smooth_loss

        return smooth_loss(scores, k, tau, margin, options)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        return smooth_hinge(scores, labels, k, tau, margin)

    def plain(scores: Tensor) -> Tensor:
        return classification_loss(row_loss, working(scores), target, **options)

    if was_served(call, input):
        return as_input(by_kernel(input, loss_options(target, options, plain)), input)

    check_k(k, input)
    check_temperature(tau)
    check_margin_for(margin, input)
    return classification_loss(
        row_loss,
        input,
        target,
        block_cost=block_cost(margin, 8 * k),
        kernel=KernelLoss(k, margin_obstacle(margin), call, by_kernel, LONGEST_LIST),
        **options,
    )


def smooth_hinge(
    scores: Tensor, labels: Tensor | None, k: int, tau: float, margin: float | Tensor
) -> Tensor:
    """``τ softplus((α_y + gap) / τ)`` of rows: equation 10, as the hinge that it smooths."""
    gap = smooth_gap(scores, labels, k, tau) + margin_of_label(margin, labels)
    return F.softplus(gap, beta=1 / tau, threshold=EXACT)
