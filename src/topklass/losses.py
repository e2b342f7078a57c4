"""Losses as modules, with the options of ``torch.nn.CrossEntropyLoss``.

Every class holds the parameters of one function of :mod:`topklass.functional`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from topklass import functional
from topklass._checks import (
    Options,
    check_count,
    check_dim,
    check_margin,
    check_number,
    check_options,
    check_temperature,
)
from topklass._targets import Target
from topklass.functional.topk_cross_entropy import Lengths, length_weights

Margin = float | list[float] | tuple[float, ...] | Tensor
"""A number, or one per class."""


class _Parameters(nn.Module):
    """Prints the parameters of a loss."""

    margin: float | Tensor

    def extra_repr(self) -> str:
        shown = {n: v for n, v in vars(self).items() if not n.startswith("_") and n != "training"}
        tensors = dict(self.named_parameters(recurse=False)) | dict(
            self.named_buffers(recurse=False)
        )
        parts = [f"{name}={value!r}" for name, value in shown.items()]
        parts += [f"{name}=<{value.numel()} values>" for name, value in tensors.items()]
        return ", ".join(parts)

    def _set_margin(self, margin: Margin) -> None:
        """Keep a number as it is, one per class as a buffer, and a parameter as a parameter."""
        if isinstance(margin, (list, tuple)):
            margin = torch.tensor(margin, dtype=torch.get_default_dtype())
        check_margin(margin)
        if isinstance(margin, Tensor) and not isinstance(margin, nn.Parameter):
            self.register_buffer("margin", margin)
        else:
            self.margin = margin


class ClassificationLoss(_Parameters):
    """Holds the options of cross-entropy; tensors move with ``.to()`` and are in the state dict."""

    weight: Tensor | None
    temperature: float = 1.0
    """What the loss divides logits by. Give it to :func:`topklass.predict_topk`, too."""

    def __init__(self, dim: int, options: Options) -> None:
        super().__init__()
        check_dim(dim)
        check_options(options)
        self.dim = dim
        self.register_buffer("weight", options.weight)
        self.ignore_index = options.ignore_index
        self.reduction = options.reduction
        self.label_smoothing = options.label_smoothing

    @property
    def options(self) -> dict[str, Any]:
        """The options of cross-entropy, as keyword arguments."""
        return {"dim": self.dim, **self.label_options}

    @property
    def label_options(self) -> dict[str, Any]:
        """Those of ``torch.nn.CrossEntropyLoss``: all but the class dimension."""
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }


class MarginLoss(ClassificationLoss):
    """Holds a margin, too."""

    def __init__(self, margin: Margin, dim: int, options: Options) -> None:
        super().__init__(dim, options)
        self._set_margin(margin)


class SmoothTopKLoss(MarginLoss):
    """Smooth top-k SVM loss, see :func:`topklass.functional.smooth_topk_loss`.

    Args:
        k: length of the list that should hold the label.
        tau: smoothing; small is close to the hinge. Logits are divided by ``temperature``, k·tau.
        margin: a number, or one per class.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

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
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(margin, dim, Options(weight, ignore_index, reduction, label_smoothing))
        check_count("k", k)
        check_temperature(tau)
        self.k, self.tau = k, tau

    @property
    def temperature(self) -> float:  # type: ignore[override]
        """What the loss divides logits by: kτ."""
        return self.k * self.tau

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.smooth_topk_loss(
            logits, target, self.k, self.tau, self.margin, **self.options
        )


class MultiLabelSmoothTopKLoss(_Parameters):
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

    weight: Tensor | None

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
        super().__init__()
        check_count("k", k)
        check_temperature(tau)
        check_options(Options(weight, ignore_index, reduction))
        self.k, self.tau = k, tau
        self._set_margin(margin)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return functional.multilabel_smooth_topk_loss(
            logits,
            target,
            self.k,
            self.tau,
            self.margin,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


class TopKCrossEntropyLoss(MarginLoss):
    """Top-k cross-entropy, see :func:`topklass.functional.topk_cross_entropy`.

    For lists that should have probabilities. With a temperature and a margin it is also the smooth
    top-k SVM loss, times k.

    Args:
        k: length of the list that should hold the label; a mapping from lengths to weights; or a
            sequence with the weights of the lengths 1, 2, … Weights are divided by their sum.
        margin: subtracted from the label's logit over the temperature; a number, or one per class.
        temperature: T of ``T·ℓ(s/T)``; the larger it is, the larger the logits it asks for.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> criterion = TopKCrossEntropyLoss(k={1: 0.5, 2: 0.5})
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1]))
        tensor(0.7643)
    """

    def __init__(
        self,
        k: Lengths = 5,
        margin: Margin = 0.0,
        temperature: float = 1.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(margin, dim, Options(weight, ignore_index, reduction, label_smoothing))
        length_weights(k)
        check_temperature(temperature, "temperature")
        self.k = dict(k) if isinstance(k, Mapping) else k
        self.temperature = temperature

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.topk_cross_entropy(
            logits, target, self.k, self.margin, self.temperature, **self.options
        )


class ShortListLoss(TopKCrossEntropyLoss):
    """The first guess and the list in one loss: the one to try first.

    It is :class:`TopKCrossEntropyLoss` with lists of 1 and of k classes, a temperature and label
    smoothing.

    Args:
        k: length of the list that should hold the label.
        first_guess: weight of the list of one class, from 0 to 1; the list of k classes has the
            rest.
        temperature: see :class:`TopKCrossEntropyLoss`.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> criterion = ShortListLoss(k=2)
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([1]))
        tensor(4.6029)
    """

    def __init__(
        self,
        k: int = 5,
        first_guess: float = 0.5,
        temperature: float = 5.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.1,
    ) -> None:
        check_count("k", k)
        check_number("first_guess", first_guess, positive=False)
        if first_guess > 1:
            raise ValueError(f"first_guess must be from 0 to 1, got first_guess={first_guess!r}")
        super().__init__(
            {1: 1.0} if k == 1 else {1: first_guess, k: 1 - first_guess},
            temperature=temperature,
            dim=dim,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


class NoisedTopKLoss(MarginLoss):
    """Noised top-k hinge loss, see :func:`topklass.functional.noised_topk_loss`.

    Noise is drawn in every call, also in ``eval()`` mode; ``forward`` takes ``noise`` or a
    ``generator`` to fix it. ``samples=None`` is the exact expectation over noise.

    Args:
        k: length of the list that should hold the label.
        epsilon: size of the noise on the scores.
        samples: number of noise vectors; None for the exact expectation.
        margin: a number, or one per class, see :func:`topklass.class_margins`.
        scale: multiplies the loss before its positive part is taken.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> criterion = NoisedTopKLoss(k=5)
        >>> criterion(torch.randn(8, 100), torch.randint(100, (8,))) > 0
        tensor(True)
    """

    def __init__(
        self,
        k: int = 5,
        epsilon: float = 1.0,
        samples: int | None = 10,
        margin: Margin = 1.0,
        scale: float = 1.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(margin, dim, Options(weight, ignore_index, reduction, label_smoothing))
        check_count("k", k)
        check_number("epsilon", epsilon, positive=False)
        if samples is not None:
            check_count("samples", samples)
        check_number("scale", scale, positive=True)
        self.k, self.epsilon, self.samples, self.scale = k, epsilon, samples, scale

    @property
    def temperature(self) -> float:  # type: ignore[override]
        """What the loss divides logits by: 1/scale."""
        return 1 / self.scale

    def forward(
        self,
        logits: Tensor,
        target: Target,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return functional.noised_topk_loss(
            logits,
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


class LDAMLoss(MarginLoss):
    """Label-distribution-aware margin loss, see :func:`topklass.functional.ldam_loss`.

    Args:
        margin: one per class, see :func:`topklass.class_margins`, or a number.
        scale: multiplies the scores; 30 suits cosines in [−1, 1], use 1 for ordinary logits.
        dim: the class dimension.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.

    Example:
        >>> criterion = LDAMLoss(margin=[0.1, 0.1, 0.2, 0.4], scale=1.0)
        >>> logits, target = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2])
        >>> criterion(logits, target)
        tensor(2.6243)
    """

    def __init__(
        self,
        margin: Margin,
        scale: float = 30.0,
        *,
        dim: int = 1,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(margin, dim, Options(weight, ignore_index, reduction, label_smoothing))
        check_number("scale", scale, positive=True)
        self.scale = scale

    @property
    def temperature(self) -> float:  # type: ignore[override]
        """What the loss divides logits by: 1/scale."""
        return 1 / self.scale

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        return functional.ldam_loss(logits, target, self.margin, self.scale, **self.options)
