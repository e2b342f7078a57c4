"""Losses as modules, with the options of ``torch.nn.CrossEntropyLoss``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from topkit import functional
from topkit._checks import check_count, check_margin, check_number
from topkit.functional._contract import Options, check_options

Margin = float | Sequence[float] | Tensor
"""A number, or one per class."""


class _Loss(nn.Module):
    """Holds the options of cross-entropy; tensors move with ``.to()`` and are in the state dict."""

    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    @property
    def options(self) -> Options:
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }

    def extra_repr(self) -> str:
        shown = {n: v for n, v in vars(self).items() if not n.startswith("_") and n != "training"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class _MarginLoss(_Loss):
    """Holds a margin: a number stays one, one per class becomes a buffer."""

    margin: float | Tensor

    def __init__(self, margin: Margin, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        if not isinstance(margin, int | float | Tensor):
            margin = torch.tensor(margin, dtype=torch.get_default_dtype())
        check_margin(margin)
        if isinstance(margin, Tensor):
            self.register_buffer("margin", margin)
        else:
            self.margin = margin


class SmoothTopKLoss(_MarginLoss):
    """Smooth top-k SVM loss, see :func:`topkit.functional.smooth_topk_loss`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> criterion = SmoothTopKLoss(k=5)
        >>> criterion(torch.randn(8, 100), torch.randint(100, (8,))) > 0
        tensor(True)
    """

    def __init__(
        self,
        k: int = 5,
        tau: float = 1.0,
        margin: Margin = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(margin, **options)
        check_count("k", k)
        check_number("tau", tau, positive=True)
        self.k = k
        self.tau = tau

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_topk_loss(
            input, target, self.k, self.tau, self.margin, **self.options
        )


class _HingeLoss(_MarginLoss):
    def __init__(self, k: int = 5, margin: Margin = 1.0, **options: Unpack[Options]) -> None:
        super().__init__(margin, **options)
        check_count("k", k)
        self.k = k


class TopKHingeLoss(_HingeLoss):
    """Top-k hinge loss, see :func:`topkit.functional.topk_hinge_loss`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.topk_hinge_loss(input, target, self.k, self.margin, **self.options)


class ConvexTopKHingeLoss(_HingeLoss):
    """Convex top-k hinge loss, see :func:`topkit.functional.convex_topk_hinge_loss`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.convex_topk_hinge_loss(input, target, self.k, self.margin, **self.options)


class CalibratedTopKHingeLoss(_HingeLoss):
    """Calibrated top-k hinge loss, see :func:`topkit.functional.calibrated_topk_hinge_loss`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.calibrated_topk_hinge_loss(
            input, target, self.k, self.margin, **self.options
        )


class NoisedTopKLoss(_HingeLoss):
    """Noised top-k hinge loss, see :func:`topkit.functional.noised_topk_loss`.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> criterion = NoisedTopKLoss(k=5, epsilon=0.2, samples=10)
        >>> criterion(torch.randn(8, 100), torch.randint(100, (8,))) > 0
        tensor(True)
    """

    def __init__(
        self,
        k: int = 5,
        epsilon: float = 0.2,
        samples: int = 10,
        margin: Margin = 1.0,
        scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(k, margin, **options)
        check_number("epsilon", epsilon, positive=False)
        check_count("samples", samples)
        check_number("scale", scale, positive=True)
        self.epsilon = epsilon
        self.samples = samples
        self.scale = scale

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return functional.noised_topk_loss(
            input,
            target,
            self.k,
            self.epsilon,
            self.samples,
            self.margin,
            self.scale,
            noise=noise,
            generator=generator,
            **self.options,
        )


class LDAMLoss(_MarginLoss):
    """Label-distribution-aware margin loss, see :func:`topkit.functional.ldam_loss`."""

    def __init__(self, margin: Margin, scale: float = 30.0, **options: Unpack[Options]) -> None:
        super().__init__(margin, **options)
        check_number("scale", scale, positive=True)
        self.scale = scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.ldam_loss(input, target, self.margin, self.scale, **self.options)


class FocalLoss(_Loss):
    """Focal loss, see :func:`topkit.functional.focal_loss`."""

    def __init__(self, gamma: float = 2.0, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        check_number("gamma", gamma, positive=False)
        self.gamma = gamma

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.focal_loss(input, target, self.gamma, **self.options)
