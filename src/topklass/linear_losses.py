"""Last layers with their losses, with the options of ``torch.nn.LinearCrossEntropyLoss``.

Every class holds a linear layer and the parameters of one function of :mod:`topklass.functional`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from topklass import functional
from topklass._checks import Options, check_count, check_k, check_margin, check_options
from topklass._targets import Target
from topklass.functional.linear_prediction import BestClasses
from topklass.functional.topk_cross_entropy import Lengths, length_weights
from topklass.losses import Margin, SmoothTopKLoss, TopKCrossEntropyLoss


class _Layer(nn.Module):
    """Holds the layer, beside the parameters of a loss."""

    k: Any
    margin: float | Tensor
    linear: nn.Linear
    chunk_bytes: int | None
    label_options: dict[str, Any]

    def _set_layer(
        self,
        in_features: int,
        num_classes: int,
        bias: bool,
        chunk_bytes: int | None,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ) -> None:
        check_count("in_features", in_features)
        check_count("num_classes", num_classes)
        logits = torch.empty(0, num_classes, device="meta")
        for length in length_weights(self.k):
            check_k(length, logits)
        check_margin(self.margin, num_classes)
        check_options(Options(**self.label_options), num_classes)
        if chunk_bytes is not None:
            check_count("chunk_bytes", chunk_bytes)
        self.linear = nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.chunk_bytes = chunk_bytes

    @property
    def layer_options(self) -> dict[str, Any]:
        """The options of cross-entropy and of the layer, as keyword arguments."""
        of_layer = {"linear_bias": self.linear.bias, "chunk_bytes": self.chunk_bytes}
        return self.label_options | of_layer

    def predict_topk(self, input: Tensor, k: int | None = None) -> BestClasses:
        """The k best classes, see :func:`topklass.functional.linear_predict_topk`.

        Args:
            input: (d), (N, d) or (…, d).
            k: length of the list; by default that of the loss, the longest if there are several.

        Example:
            >>> best, scores = LinearSmoothTopKLoss(16, 1000).predict_topk(torch.ones(2, 16), k=3)
            >>> best.shape, scores.shape
            (torch.Size([2, 3]), torch.Size([2, 3]))
        """
        return functional.linear_predict_topk(
            input,
            self.linear.weight,
            max(length_weights(self.k)) if k is None else k,
            linear_bias=self.linear.bias,
            chunk_bytes=self.chunk_bytes,
        )


class LinearSmoothTopKLoss(_Layer, SmoothTopKLoss):
    """A linear layer and the smooth top-k SVM loss of its logits, which are never all in memory.

    See :func:`topklass.functional.linear_smooth_topk_loss`. The layer is ``self.linear``: give its
    parameters to the optimizer, and take its logits, or :meth:`predict_topk`, to predict.

    Args:
        in_features: size of an input.
        num_classes: number of classes.
        k: length of the list that should hold the label.
        tau: temperature; small is close to the hinge, large is smoother.
        margin: a number, or one per class.
        bias: whether the layer has a bias.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_bytes: memory for the logits of a chunk; None for the default.
        device: of the layer.
        dtype: of the layer.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> criterion = LinearSmoothTopKLoss(16, 1000, k=5)
        >>> criterion(torch.randn(8, 16), torch.randint(1000, (8,))) > 0
        tensor(True)
        >>> criterion.predict_topk(torch.randn(8, 16), k=5).labels.shape
        torch.Size([8, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: int = 5,
        tau: float = 1.0,
        margin: Margin = 1.0,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk_bytes: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        SmoothTopKLoss.__init__(
            self,
            k,
            tau,
            margin,
            dim=-1,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self._set_layer(in_features, num_classes, bias, chunk_bytes, device, dtype)

    def forward(self, input: Tensor, target: Target) -> Tensor:
        return functional.linear_smooth_topk_loss(
            input,
            self.linear.weight,
            target,
            self.k,
            self.tau,
            self.margin,
            **self.layer_options,
        )


class LinearTopKCrossEntropyLoss(_Layer, TopKCrossEntropyLoss):
    """A linear layer and the top-k cross-entropy of its logits, which are never all in memory.

    See :func:`topklass.functional.linear_topk_cross_entropy`, and :class:`LinearSmoothTopKLoss` for
    the arguments that are not here. With k = 1 it is cross-entropy.

    Args:
        in_features: size of an input.
        num_classes: number of classes.
        k: length of the list that should hold the label; a mapping from lengths to weights; or a
            sequence with the weights of the lengths 1, 2, …
        margin: subtracted from the label's logit over the temperature; a number, or one per class.
        temperature: T of ``T·ℓ(s/T)``; the larger it is, the larger the logits it asks for.
        bias: whether the layer has a bias.
        weight: one weight per class.
        ignore_index: a target that contributes neither loss nor gradient.
        reduction: "mean" (weighted by the labels' weights), "sum" or "none".
        label_smoothing: share of the target that is spread uniformly over all classes.
        chunk_bytes: memory for the logits of a chunk; None for the default.
        device: of the layer.
        dtype: of the layer.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> criterion = LinearTopKCrossEntropyLoss(16, 1000, k={1: 0.3, 5: 0.7})
        >>> criterion(torch.randn(8, 16), torch.randint(1000, (8,))) > 0
        tensor(True)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        k: Lengths = 5,
        margin: Margin = 0.0,
        temperature: float = 1.0,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk_bytes: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        TopKCrossEntropyLoss.__init__(
            self,
            k,
            margin,
            temperature,
            dim=-1,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self._set_layer(in_features, num_classes, bias, chunk_bytes, device, dtype)

    def forward(self, input: Tensor, target: Target) -> Tensor:
        return functional.linear_topk_cross_entropy(
            input,
            self.linear.weight,
            target,
            self.k,
            self.margin,
            self.temperature,
            **self.layer_options,
        )
