"""The noised top-k hinge loss of Garcin et al. 2022."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from topklass._checks import check_count, check_number, check_temperature
from topklass.dispatch import LARGEST_RANK, LossOptions, known_call, loss_options, was_served
from topklass.functional._contract import (
    KernelLoss,
    Options,
    as_input,
    check_k,
    check_margin_for,
    class_dimension,
    classification_loss,
    margin_obstacle,
    margin_of_label,
    of_label,
    working,
)
from topklass.functional.hinge import hinge
from topklass.operators.expected import WINDOW, expected_topk
from topklass.operators.noised import check_noise, kernel_obstacle, noised_topk

if TYPE_CHECKING:
    from typing_extensions import Unpack


def noised_topk_loss(
    input: Tensor,
    target: Tensor,
    k: int = 5,
    epsilon: float = 0.2,
    samples: int | None = 10,
    margin: float | Tensor = 1.0,
    scale: float = 1.0,
    *,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""Noised top-k hinge loss: the calibrated hinge with its threshold smoothed by noise.

    .. math:: \ell(s, y) = \big( c \, (m_y + \tfrac1B \sum_{b=1}^B (s + \epsilon Z_b)_{(k+1)} - s_y)
        \big)_+, \qquad Z_b \sim \mathcal N(0, I)

    (Garcin et al. 2022, equation 10 with a number as the margin, equation 13 with one margin per
    class; the scale c is that of their experiments with cosine scores, section 4.5). Noise
    moves the threshold among the scores near it, so these share the gradient, which is sparse. With
    ``samples=None`` the average is the expectation itself, see :func:`topklass.expected_topk`: the
    limit of infinitely many noise vectors, without variance, at a higher cost.

    Args:
        input: logits (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices (), (N) or (N, d1, …), or class probabilities of the input's shape. On
            a GPU an index that is no class gives NaN.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        epsilon: size of the noise; 0 is :func:`calibrated_topk_hinge_loss`.
        samples: number B of noise vectors; None for the exact expectation.
        margin: a number, or one per class (see :func:`topklass.class_margins`).
        scale: multiplies the loss before its positive part is taken.
        noise: the noise vectors, of shape ``input.shape + (samples,)``; drawn if not given.
        generator: source of the noise, for reproducible losses.
        **options: ``weight``, ``ignore_index``, ``reduction`` and ``label_smoothing``, as for
            :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> noised_topk_loss(logits, target, k=2, noise=torch.zeros(1, 4, 10))
        tensor(1.)
    """
    parameters = (k, epsilon, samples, margin, scale)
    call = known_call(input, target, parameters, options) if noise is None else None

    def by_kernel(scores: Tensor, options: LossOptions) -> Tensor:
        if samples is None:
            from topklass.kernels.expected import expected_loss

            return expected_loss(scores, k, epsilon, WINDOW, margin, scale, options)
        from topklass.kernels.noised import noised_loss

        return noised_loss(scores, k, epsilon, samples, margin, scale, generator, options)

    def row_loss(scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        if samples is None:
            rival = expected_topk(scores, k + 1, epsilon)
        else:
            rival = noised_topk(scores, k + 1, epsilon, samples, noise=noise, generator=generator)
        label, m = of_label(scores, labels), margin_of_label(margin, labels)
        return scale * hinge(m, rival.unsqueeze(1), label)

    def plain(scores: Tensor) -> Tensor:
        return classification_loss(row_loss, working(scores), target, **options)

    if was_served(call, input):
        return as_input(by_kernel(input, loss_options(target, options, plain)), input)

    check_k(k, input)
    check_margin_for(margin, input)
    check_number("scale", scale, positive=True)
    check_number("epsilon", epsilon, positive=False)
    if samples is not None:
        check_count("samples", samples)
    elif epsilon:
        check_temperature(epsilon, "epsilon")
    if noise is not None:
        if samples is None:
            raise ValueError("samples=None takes no noise; pass the number of noise vectors")
        check_noise(noise, input, samples)
        by_class = noise.movedim(class_dimension(input), -2)
        noise = by_class.reshape(-1, *by_class.shape[-2:])

    obstacle = margin_obstacle(margin)
    if samples is not None:
        obstacle = obstacle or kernel_obstacle(samples, noise)
    kernel = KernelLoss(k + 1, obstacle, call, by_kernel, LARGEST_RANK)
    no_noise = samples is None and epsilon == 0  # nothing to integrate
    return classification_loss(
        row_loss, input, target, kernel=None if no_noise else kernel, **options
    )
