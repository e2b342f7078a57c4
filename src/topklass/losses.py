"""Losses as modules, with the options of ``torch.nn.CrossEntropyLoss``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from topklass import functional
from topklass._checks import (
    check_count,
    check_margin,
    check_number,
    check_per_class,
    check_temperature,
)
from topklass.functional._contract import Options, check_options
from topklass.functional.topk_cross_entropy import check_lengths

if TYPE_CHECKING:
    from typing_extensions import Unpack


Margin = float | list[float] | tuple[float, ...] | Tensor
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
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown:
            own = (name for name in signature(type(self)).parameters if name != "options")
            known = ", ".join(dict.fromkeys((*own, *Options.__annotations__)))
            given = ", ".join(map(repr, unknown))
            raise TypeError(f"{type(self).__name__} has no option {given}; it takes {known}")
        check_options(reduction, label_smoothing)
        if weight is not None:
            check_per_class("weight", weight)
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
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        parts = [f"{name}={value!r}" for name, value in shown.items()]
        parts += [f"{name}=<{value.numel()} values>" for name, value in tensors.items()]
        return ", ".join(parts)


class _MarginLoss(_Loss):
    """Holds a margin: a number stays one, one per class is a buffer, or a parameter if it was."""

    margin: float | Tensor

    def __init__(self, margin: Margin, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        if isinstance(margin, (list, tuple)):
            margin = torch.tensor(margin, dtype=torch.get_default_dtype())
        check_margin(margin)
        if isinstance(margin, Tensor) and not isinstance(margin, nn.Parameter):
            self.register_buffer("margin", margin)
        else:
            self.margin = margin


class SmoothTopKLoss(_MarginLoss):
    """Smooth top-k SVM loss, see :func:`topklass.functional.smooth_topk_loss`.

    Args:
        k: length of the list that should hold the label.
        tau: temperature; small is close to the hinge, large is smoother.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.

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
        check_temperature(tau)
        self.k = k
        self.tau = tau

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_topk_loss(
            input, target, self.k, self.tau, self.margin, **self.options
        )


class MultiLabelSmoothTopKLoss(_MarginLoss):
    """Smooth top-k loss of a set, see :func:`topklass.functional.multilabel_smooth_topk_loss`.

    For tags, or wherever several classes are right at once. The target holds class indices (N, P),
    padded with ``ignore_index``, or is a mask (N, C).

    Args:
        k: length of the list that should hold each positive, among negatives alone.
        tau: temperature; small is close to the hinge, large is smoother.
        margin: a number, or one per class.
        weight: one weight per class.
        ignore_index: what pads class indices.
        reduction: "mean" (over samples that have positives), "sum" or "none".

    Example:
        >>> criterion = MultiLabelSmoothTopKLoss(k=2)
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[0, 1]]))
        tensor(0.4021)
    """

    def __init__(
        self,
        k: int = 5,
        tau: float = 1.0,
        margin: Margin = 1.0,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(margin, weight=weight, ignore_index=ignore_index, reduction=reduction)
        del self.label_smoothing  # a set of positives has none
        check_count("k", k)
        check_temperature(tau)
        self.k = k
        self.tau = tau

    @property
    def options(self) -> Options:
        """Those of cross-entropy but label smoothing."""
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.multilabel_smooth_topk_loss(
            input,
            target,
            self.k,
            self.tau,
            self.margin,
            **self.options,  # type: ignore[misc]
        )


class TopKCrossEntropyLoss(_Loss):
    """Top-k cross-entropy, see :func:`topklass.functional.topk_cross_entropy`.

    For lists that should have probabilities, without margin and temperature.

    Args:
        k: length of the list that should hold the label, or a mapping from several lengths to
            their weights.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.

    Example:
        >>> criterion = TopKCrossEntropyLoss(k={1: 0.5, 2: 0.5})
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1]))
        tensor(0.7643)
    """

    def __init__(self, k: int | Mapping[int, float] = 5, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        check_lengths(k)
        self.k = dict(k) if isinstance(k, Mapping) else k

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.topk_cross_entropy(input, target, self.k, **self.options)


class _HingeLoss(_MarginLoss):
    def __init__(self, k: int = 5, margin: Margin = 1.0, **options: Unpack[Options]) -> None:
        super().__init__(margin, **options)
        check_count("k", k)
        self.k = k


class TopKHingeLoss(_HingeLoss):
    """Top-k hinge loss, see :func:`topklass.functional.topk_hinge_loss`.

    Args:
        k: length of the list that should hold the label.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.topk_hinge_loss(input, target, self.k, self.margin, **self.options)


class ConvexTopKHingeLoss(_HingeLoss):
    """Convex top-k hinge loss, see :func:`topklass.functional.convex_topk_hinge_loss`.

    Args:
        k: length of the list that should hold the label.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.convex_topk_hinge_loss(input, target, self.k, self.margin, **self.options)


class CalibratedTopKHingeLoss(_HingeLoss):
    """Calibrated top-k hinge loss, see :func:`topklass.functional.calibrated_topk_hinge_loss`.

    Args:
        k: length of the list that should hold the label.
        margin: a number, or one per class.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.calibrated_topk_hinge_loss(
            input, target, self.k, self.margin, **self.options
        )


class NoisedTopKLoss(_HingeLoss):
    """Noised top-k hinge loss, see :func:`topklass.functional.noised_topk_loss`.

    The noise is drawn anew in every call; ``forward`` takes ``noise`` or a ``generator`` to fix it.
    In ``eval()`` mode the loss is the exact expectation over noise, unless noise is given: losses
    of validation do not depend on chance.

    Args:
        k: length of the list that should hold the label.
        epsilon: size of the noise on the scores.
        samples: number of noise vectors; None for the exact expectation also in training.
        margin: a number, or one per class, see :func:`topklass.class_margins`.
        scale: multiplies the loss before its positive part is taken.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.

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
        samples: int | None = 10,
        margin: Margin = 1.0,
        scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(k, margin, **options)
        check_number("epsilon", epsilon, positive=False)
        if samples is not None:
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
            self.samples if self.training or noise is not None else None,
            self.margin,
            self.scale,
            noise=noise,
            generator=generator,
            **self.options,
        )


class LDAMLoss(_MarginLoss):
    """Label-distribution-aware margin loss, see :func:`topklass.functional.ldam_loss`.

    Args:
        margin: one per class, see :func:`topklass.class_margins`, or a number.
        scale: multiplies the scores; 30 suits cosines in [−1, 1], take 1 for ordinary logits.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.
    """

    def __init__(self, margin: Margin, scale: float = 30.0, **options: Unpack[Options]) -> None:
        super().__init__(margin, **options)
        check_number("scale", scale, positive=True)
        self.scale = scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.ldam_loss(input, target, self.margin, self.scale, **self.options)


class FocalLoss(_Loss):
    """Focal loss, see :func:`topklass.functional.focal_loss`.

    Args:
        gamma: how strongly probable labels are discounted; 0 is cross-entropy.
        **options: ``weight``, ``ignore_index``, ``reduction``, ``label_smoothing``, as for
            :class:`torch.nn.CrossEntropyLoss`.
    """

    def __init__(self, gamma: float = 2.0, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        check_number("gamma", gamma, positive=False)
        self.gamma = gamma

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.focal_loss(input, target, self.gamma, **self.options)
