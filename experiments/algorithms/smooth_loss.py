"""The smooth top-k loss on top of any algorithm for the symmetric polynomials.

Problem: compare those algorithms inside the loss they were designed for.

Closed form (eq. 10): with x = scores / (k τ), A = log σ_{k-1} and B = log σ_k of exp(x) without
the label y,

    L = τ log(exp(x_y + A) + exp(α/τ + B)) - τ (x_y + A) = -τ logsigmoid(-z), z = α/τ + B - A - x_y.

Adding a number to all scores changes nothing, so the k-th largest of the other scores, t, is
subtracted first: in exact arithmetic a no-op, in floating point it removes the common offset before
the division by k τ can magnify its rounding error, and it makes σ_{k-1} and σ_k at least 1 (so
that summation lasts to a lower τ than in Table 5).
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from experiments.algorithms.summation import esp_summation
from topklass._checks import check_scores_and_k


def smooth_topk_loss_with(
    log_esp: Callable[[Tensor, int], Tensor],
    scores: Tensor,
    target: Tensor,
    k: int,
    tau: float = 1.0,
    margin: float = 1.0,
) -> Tensor:
    """Smooth top-k loss of each row, with the given algorithm for the symmetric polynomials.

    L = -τ logsigmoid(-(α/τ + log σ_k - log σ_{k-1} - s_y/(kτ))),  the polynomials being those of
    exp(s/(kτ)) without the label. With fewer than k other classes present the label is always in
    the top k: the loss and its gradient are 0.

    Args:
        log_esp: function of (scores, k) that returns log σ_0..σ_k, such as ``log_esp_tree`` or
            ``lambda scores, k: esp_summation(scores, k).log()``.
        scores: tensor (N, C); a score of -inf is an absent class.
        target: labels (N,), integers in [0, C).
        k: number of predictions allowed, 1 <= k <= C.
        tau: temperature τ > 0.
        margin: margin α.

    Returns:
        Tensor (N,).

    Example:
        >>> import torch
        >>> from experiments.algorithms import log_esp_tree
        >>> scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> smooth_topk_loss_with(log_esp_tree, scores, torch.tensor([1]), k=2)
        tensor([1.0633])

    Reference:
        Berrada et al. (2018), eq. 9-10.
    """
    if scores.ndim != 2 or target.shape != scores.shape[:1]:
        raise ValueError(
            "expected scores of shape (N, C) and target of shape (N,), "
            f"got {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    check_scores_and_k(scores, k)
    if not tau > 0:
        raise ValueError(f"tau must be positive, got tau = {tau}")
    label_score = scores.gather(1, target.unsqueeze(1)).squeeze(1)
    others = scores.scatter(1, target.unsqueeze(1), -math.inf)
    threshold = others.detach().topk(k, dim=1).values[:, -1]
    always_in_top_k = threshold.isneginf()
    threshold = threshold.masked_fill(always_in_top_k, 0.0)

    log_sigma = log_esp((others - threshold.unsqueeze(1)) / (k * tau), k)
    z = (k * margin + threshold - label_score) / (k * tau) + log_sigma[:, k] - log_sigma[:, k - 1]
    return -tau * F.logsigmoid(-z.masked_fill(always_in_top_k, -math.inf))


def smooth_topk_loss_uncentred(scores: Tensor, target: Tensor, k: int, tau: float = 1.0) -> Tensor:
    """Smooth top-k loss of each row by summation of ``exp(s/(kτ))`` as they are, as in Table 5.

    L = -τ logsigmoid(-(1/τ + log σ_k - log σ_{k-1} - s_y/(kτ))),  inf or NaN where a sum overflows.

    Args:
        scores: tensor (N, C).
        target: labels (N,), integers in [0, C).
        k: number of predictions allowed, 1 <= k < C.
        tau: temperature τ > 0.

    Returns:
        Tensor (N,).

    Example:
        >>> import torch
        >>> scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> smooth_topk_loss_uncentred(scores, torch.tensor([1]), k=2)
        tensor([1.0633])

    Reference:
        Berrada et al. (2018), eq. 10 and Algorithm 3.
    """
    x = scores / (k * tau)
    label = x.gather(1, target[:, None])[:, 0]
    log_sigma = esp_summation(x.scatter(1, target[:, None], -math.inf), k).log()
    z = 1 / tau + log_sigma[:, k] - log_sigma[:, k - 1] - label
    return -tau * F.logsigmoid(-z)
