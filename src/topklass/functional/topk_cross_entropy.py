"""Cross-entropy of lists of k classes: how probable it is that a random list holds the label."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from topklass._checks import check_count, is_number
from topklass.dispatch import kernel_serves
from topklass.functional._contract import (
    Options,
    block_cost,
    check_k,
    classification_loss,
    working,
)
from topklass.functional.smooth import smooth_hinge, smooth_topk_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack


def topk_cross_entropy(
    input: Tensor,
    target: Tensor,
    k: int | Mapping[int, float] = 5,
    **options: Unpack[Options],
) -> Tensor:
    r"""Top-k cross-entropy: the label should probably be in a random list of k classes.

    .. math:: \ell(s, y) = -\log \pi_y^{(k)}, \qquad
        \pi_y^{(k)} = \frac{e^{s_y} \sigma_{k-1}(e^{s_{\setminus y}})}{\sigma_k(e^s)}

    with the marginals of :func:`topklass.topk_marginals` (Berrada et al. 2018, Appendix C). With
    k = 1 it is cross-entropy. It is the smooth loss at τ = 1/k without margin, times k. Several
    lengths of the list may be mixed, ``k={1: 0.5, 5: 0.5}``: the list then has a random length K,

    .. math:: \ell(s, y) = -\log \sum_k P_K(k) \, \pi_y^{(k)}

    (the mixture of Petersen et al. 2022, Figure 1).

    Use it where lists of k classes should have probabilities: as a likelihood it never stops
    pushing, has neither margin nor temperature to set, and gradients of the size of
    cross-entropy's. A mixture with k = 1 also trains the order, which a list of one length does
    not.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1, or a mapping from lengths
            to positive weights, which are divided by their sum.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1])
        >>> topk_cross_entropy(logits, target, k=2)
        tensor(0.3647)
        >>> topk_cross_entropy(logits, target, k={1: 0.5, 2: 0.5})
        tensor(0.7643)
    """
    if not isinstance(k, Mapping):
        check_k(k, input)
        return smooth_topk_loss(input, target, k, 1 / k, 0.0, **options) * int(k)

    check_lengths(k)
    for length in k:
        check_k(length, input)
    total = sum(k.values())
    chances = [weight / total for weight in k.values()]

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        return _mixed([_of_rows(scores, labels, int(length)) for length in k], chances)

    cost = block_cost(0.0, 8 * int(sum(k)))
    return classification_loss(row_loss, input, target, block_cost=cost, **options)


def check_lengths(k: int | Mapping[int, float]) -> None:
    """Require the length of a list, or several with positive weights."""
    if not isinstance(k, Mapping):
        return check_count("k", k)
    if not k:
        raise ValueError("k must have at least one length with its weight, got an empty mapping")
    for length, weight in k.items():
        check_count("k", length)
        if not is_number(weight):
            raise TypeError(f"the weight of k={length} must be a number, got {weight!r}")
        if not 0 < weight < inf:
            raise ValueError(
                f"the weight of k={length} must be positive and finite, got {weight!r}"
            )
    return None


def _of_rows(scores: Tensor, labels: Tensor | None, k: int) -> Tensor:
    """``−log π^(k)`` of rows, (R, 1), or (R, C) for every label."""
    if labels is not None:
        return topk_cross_entropy(scores, labels.squeeze(1), k, reduction="none").unsqueeze(1)
    kernel_serves(scores, k, "class probabilities and label smoothing")  # raises if demanded
    return k * smooth_hinge(scores, None, k, 1 / k, 0.0)


def _mixed(losses: list[Tensor], chances: list[float]) -> Tensor:
    """``−log Σ_k P_k e^{−ℓ_k}``, to the last digits of losses near 0 and of small chances.

    The least loss is taken out of the sum, and what is left is at most 1. For an absent label every
    loss is +inf: so is the result, with gradient 0.
    """
    least = torch.stack(losses).amin(0).detach()
    absent = least == inf
    falls = [(least - loss).masked_fill(absent, 0.0) for loss in losses]
    pairs = list(zip(chances, falls, strict=True))
    kept = torch.stack([p * fall.exp() for p, fall in pairs]).sum(0)
    change = torch.stack([p * torch.expm1(fall) for p, fall in pairs]).sum(0)
    near = change > -0.5
    log_kept = torch.where(near, change.masked_fill(~near, 0.0).log1p(), kept.log())
    return least - log_kept
