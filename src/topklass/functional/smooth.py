"""The smooth top-k SVM loss of Berrada et al. 2018."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import (
    Options,
    check_k,
    check_margin,
    check_temperature,
    every_class_counts,
)
from topklass._lists import Lists
from topklass._targets import Target
from topklass.dispatch import find_kernel
from topklass.functional._contract import (
    RowLoss,
    classification_loss,
    margin_of_label,
    row_targets_loss,
)
from topklass.functional._few_classes import losses_of_labels
from topklass.operators.esp import smooth_gap
from topklass.reference.power_sums import LINEAR_FROM


def smooth_topk_loss(
    logits: Tensor,
    target: Target,
    k: int = 5,
    tau: float = 1.0,
    margin: float | Tensor = 1.0,
    *,
    dim: int = 1,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
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
        logits: (C), (N, C) or (N, C, d1, …); −inf marks an absent class.
        target: class indices of the logits' shape without its class dimension, class
            probabilities of the logits' shape, or a :class:`topklass.SparseTarget`. An index
            that is not a class gives NaN where a kernel computes, and a device-side assertion in
            other calls on a GPU, as in PyTorch.
        k: length of the list that should hold the label, 1 ≤ k ≤ C − 1.
        tau: temperature τ; small is close to the hinge, large is smoother.
        margin: α, a number or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Returns:
        A scalar, or with ``reduction="none"`` one loss per target.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
        >>> smooth_topk_loss(logits, torch.tensor([0, 0]), k=2, reduction="none")
        tensor([0.6931, 2.1269])
    """
    check_margin(margin, check_k(k, logits, dim))
    check_temperature(tau)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return classification_loss(SmoothHinge(k, tau, margin), logits, target, dim, options)


@dataclass(frozen=True, eq=False)
class SmoothHinge(RowLoss):
    """``τ softplus((α_y + gap) / τ)`` of rows: equation 10 as the hinge that it smooths."""

    k: int
    tau: float
    margin: float | Tensor

    def cost(self) -> int:
        return 8 * self.k

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the lists whose gaps the loss is made of."""
        return (self.k,)

    @property
    def temperature(self) -> float:
        """What scores are divided by: kτ."""
        return self.k * self.tau

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        gap = smooth_gap(scores, labels, self.k, self.tau)
        return self.of_gaps([gap], margin_of_label(self.margin, labels))

    def lists(self) -> Lists:
        return Lists((self.k,), (1.0,), self.temperature, self.tau, self.margin / self.tau)

    def of_labels(self, scores: Tensor, labels: Tensor) -> Tensor:
        """By a kernel for all labels or for one after another, or by the reference."""
        columns, each = torch.split(labels, 1, 1), Options(reduction="none")
        if len(columns) > 1:
            kernel = self.find_kernel_of_few(scores, labels, each)
            if kernel is not None:
                return losses_of_labels(kernel, self, scores, labels)
        if self.find_kernel(scores, columns[0], each) is None:
            return super().of_labels(scores, labels)
        return torch.stack([row_targets_loss(self, scores, c, each) for c in columns], 1)

    def of_gaps(self, gaps: Sequence[Tensor], margin: float | Tensor) -> Tensor:
        """The loss from the gap of its list and the margins of the labels."""
        return F.softplus(gaps[0] + margin, beta=1 / self.tau, threshold=LINEAR_FROM)

    def find_kernel(self, scores: Tensor, targets: Target, options: Options) -> Any:
        every = "_of_every_label" if every_class_counts(targets, options) else ""
        name = f"smooth_topk_loss{every}"
        return find_kernel(name, scores, self.k, targets, options, margin=self.margin)

    def find_kernel_of_few(self, scores: Tensor, target: Target, options: Options) -> Any:
        return find_kernel(
            "smooth_topk_loss_of_few_classes",
            scores,
            self.k,
            target,
            options,
            margin=self.margin,
            optional=True,
        )
