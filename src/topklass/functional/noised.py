"""The noised top-k hinge loss of Garcin et al. 2022."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from topklass._checks import (
    Options,
    check_count,
    check_k,
    check_margin,
    check_number,
    check_temperature,
    class_dimension,
)
from topklass._targets import Target
from topklass._transforms import can_read_values
from topklass.dispatch import find_kernel
from topklass.functional._contract import (
    RowLoss,
    classification_loss,
    margin_of_label,
    of_label,
    working,
)
from topklass.functional.hinge import CalibratedTopKHinge, hinge
from topklass.operators.expected import expected_topk
from topklass.operators.noised import noise_rows, noised_topk_of_rows
from topklass.reference.exceedances import Noise
from topklass.reference.noised import noised_topk_and_labels


def noised_topk_loss(
    logits: Tensor,
    target: Target,
    k: int = 5,
    epsilon: float = 1.0,
    samples: int | None = 10,
    margin: float | Tensor = 1.0,
    scale: float = 1.0,
    *,
    dim: int = 1,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Noised top-k hinge loss: the calibrated hinge with its threshold smoothed by noise.

    .. math:: \ell(s, y)
        = \left( c \, (m_y + \tfrac1B \sum_{b=1}^B (s + \epsilon Z_b)_{(k+1)} - s_y) \right)_+,
        \qquad Z_b \sim \mathcal N(0, I)

    (Garcin et al. 2022, equation 10 with a number as the margin, equation 13 with one margin per
    class; the scale c is that of their experiments with cosine scores, section 4.5). Noise
    moves the threshold among the scores near it, so these share the gradient, which is sparse. With
    ``samples=None`` the average is the expectation itself, see :func:`topklass.expected_topk`: the
    limit of infinitely many noise vectors, without variance, at a higher cost.

    Args:
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`. An index
            that is not a class gives NaN where a kernel computes, and a device-side assertion in
            other calls on a GPU, as in PyTorch.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        epsilon: size of the noise; 0 is :func:`calibrated_topk_hinge_loss`.
        samples: number B of noise vectors; None for the exact expectation.
        margin: a number, or one per class (see :func:`topklass.class_margins`).
        scale: multiplies the loss before its positive part is taken.
        dim: the class dimension.
        noise: the noise vectors, ``logits.shape + (B,)``, which also set ``samples``; drawn if not
            given.
        generator: source of the noise, for reproducible losses.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> noised_topk_loss(logits, target, k=2, noise=torch.zeros(1, 4, 10))
        tensor(1.)
    """
    check_margin(margin, check_k(k, logits, dim))
    check_number("epsilon", epsilon, positive=False)
    check_number("scale", scale, positive=True)
    if samples is not None:
        check_count("samples", samples)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    loss: RowLoss
    if noise is not None:
        noise = noise_rows(noise, logits, class_dimension(logits, dim))
        drawn = int(noise.shape[-1])  # a tensor under torch.jit.trace
        loss = NoisedHinge(k, epsilon, drawn, scale, margin, noise)
    elif samples is not None:
        loss = NoisedHinge(k, epsilon, samples, scale, margin, None, generator)
    elif epsilon == 0:  # nothing to integrate
        calibrated = CalibratedTopKHinge(k, margin)
        return classification_loss(calibrated, logits, target, dim, options, factor=scale)
    else:
        check_temperature(epsilon, "epsilon")
        loss = ExpectedHinge(k, epsilon, scale, margin)
    return classification_loss(loss, logits, target, dim, options)


@dataclass(frozen=True, eq=False)
class NoisedHinge(RowLoss):
    """``(c (m_y + mean_b (s + ε Z_b)_(k+1) − s_y))_+`` of rows: equations 10 and 13."""

    k: int
    epsilon: float
    samples: int
    scale: float
    margin: float | Tensor
    noise: Tensor | None = None
    """(R, C, B), or drawn."""
    generator: torch.Generator | None = None
    is_random: ClassVar[bool] = True

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        noise = Noise(self.k + 1, self.epsilon, self.samples, self.generator, self.noise)
        if labels is not None and can_read_values(scores):
            rival, label = noised_topk_and_labels(scores, labels, noise)
        else:
            rival, label = noised_topk_of_rows(scores, noise), of_label(scores, labels)
        losses = hinge(margin_of_label(self.margin, labels), rival.unsqueeze(1), label)
        return losses if self.scale == 1 else self.scale * losses

    def find_kernel(self, scores: Tensor, targets: Target, options: Options) -> Any:
        return find_kernel(
            "noised_topk_loss",
            scores,
            self.k,
            targets,
            options,
            margin=self.margin,
            samples=self.samples,
            noise=self.noise,
        )


@dataclass(frozen=True, eq=False)
class ExpectedHinge(RowLoss):
    """``(c (m_y + E (s + ε Z)_(k+1) − s_y))_+`` of rows."""

    k: int
    epsilon: float
    scale: float
    margin: float | Tensor

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        scores = working(scores)
        rival = expected_topk(scores, self.k + 1, self.epsilon)
        label, margin = of_label(scores, labels), margin_of_label(self.margin, labels)
        return self.scale * hinge(margin, rival.unsqueeze(1), label)

    def find_kernel(self, scores: Tensor, targets: Target, options: Options) -> Any:
        return find_kernel(
            "expected_topk_loss", scores, self.k, targets, options, margin=self.margin
        )
