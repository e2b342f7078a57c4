"""Losses to compare with, as modules: hinges of the k-th largest score, and the focal loss."""

from torch import Tensor

from topklass import functional
from topklass._checks import Options, check_count, check_number
from topklass._targets import Target
from topklass.losses import ClassificationLoss, Margin, MarginLoss


class TopKHingeLoss(MarginLoss):
    """Top-k hinge loss, see :func:`topklass.functional.topk_hinge_loss`.

    Args:
        k: length of the list that should hold the label.
        margin: a number, or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> import torch
        >>> criterion = TopKHingeLoss(k=2)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> criterion(logits, target)  # 1 + 3 − 2
        tensor(2.)
    """

    def __init__(
        self,
        k: int = 5,
        margin: Margin = 1.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(margin, dim, Options(weight, ignore_index, reduction, label_smoothing))
        check_count("k", k)
        self.k = k

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.topk_hinge_loss(logits, target, self.k, self.margin, **self.options)


class ConvexTopKHingeLoss(TopKHingeLoss):
    """Convex top-k hinge loss, see :func:`topklass.functional.convex_topk_hinge_loss`.

    Takes the arguments of :class:`TopKHingeLoss`.

    Example:
        >>> import torch
        >>> criterion = ConvexTopKHingeLoss(k=2)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> criterion(logits, target)  # (5 + 4) / 2 − 2
        tensor(2.5000)
    """

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.convex_topk_hinge_loss(
            logits, target, self.k, self.margin, **self.options
        )


class CalibratedTopKHingeLoss(TopKHingeLoss):
    """Calibrated top-k hinge loss, see :func:`topklass.functional.calibrated_topk_hinge_loss`.

    Takes the arguments of :class:`TopKHingeLoss`.

    Example:
        >>> import torch
        >>> criterion = CalibratedTopKHingeLoss(k=2)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> criterion(logits, target)  # 1 + 2 − 2
        tensor(1.)
    """

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.calibrated_topk_hinge_loss(
            logits, target, self.k, self.margin, **self.options
        )


class FocalLoss(ClassificationLoss):
    """Focal loss, see :func:`topklass.functional.focal_loss`.

    Args:
        gamma: how strongly probable labels are discounted; 0 is cross-entropy.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> import torch
        >>> criterion = FocalLoss(gamma=2.0)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> criterion(logits, target)
        tensor(2.0334)
    """

    def __init__(
        self,
        gamma: float = 2.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(dim, Options(weight, ignore_index, reduction, label_smoothing))
        check_number("gamma", gamma, positive=False)
        self.gamma = gamma

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.focal_loss(logits, target, self.gamma, **self.options)
