"""How the last layer of a network meets the loss in training."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topklass
from topklass._targets import SparseTarget, Target
from topklass.functional import (
    linear_smooth_topk_loss,
    linear_topk_cross_entropy,
    target_rank,
)
from topklass.models.adapt import find_head as find_head

RANK_BYTES = 2**28
"""Memory for logits whose labels are ranked."""


class Head(Protocol):
    """Computes loss and ranks from what the network returns, and the labels of its images."""

    rank: int
    processes: int
    """Those that compute together."""

    def with_network(self, network: nn.Module) -> Head:
        """One for another network, which returns logits, and is not trained."""

    def targets(self, target: Target) -> Target:
        """The targets that belong to the output: those of all processes that compute together."""

    def loss(self, criterion: nn.Module, output: object, targets: Target) -> Tensor:
        """The loss of the samples; the mean over processes is that of the whole batch."""

    def ranks(self, output: object, targets: Target) -> Tensor:
        """How many logits are larger than the label's, for the samples of this process.

        The label of mixed images is their first.
        """

    def in_order(self, ranks: Tensor) -> Tensor:
        """Ranks of all samples, of which each process has its share, in the order of samples."""


def first_labels(targets: Target) -> Tensor:
    """The label of each sample, the first if it has several."""
    return targets.indices[:, 0] if isinstance(targets, SparseTarget) else targets


class PlainHead:
    """The network returns logits."""

    rank, processes = 0, 1

    def with_network(self, network: nn.Module) -> Head:
        """Any network will do."""
        return PlainHead()

    def targets(self, target: Target) -> Target:
        """All targets are here."""
        return target

    def loss(self, criterion: nn.Module, output: object, targets: Target) -> Tensor:
        """The criterion of the logits."""
        loss: Tensor = criterion(output, targets)
        return loss

    def ranks(self, output: object, targets: Target) -> Tensor:
        """Ranks of the labels."""
        assert isinstance(output, Tensor)
        return target_rank(output.detach(), first_labels(targets))

    def in_order(self, ranks: Tensor) -> Tensor:
        """All ranks are here."""
        return ranks


class Layer(NamedTuple):
    """A linear layer and its input, in place of its logits."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None


class _OpenLinear(nn.Linear):
    """A linear layer that in training returns itself and its input."""

    def forward(self, features: Tensor) -> Tensor | Layer:  # type: ignore[override]
        if self.training:
            return Layer(features, self.weight, self.bias)
        return super().forward(features)


class FusedHead(PlainHead):
    """The last layer and the loss in one; in training, logits are made in chunks.

    Args:
        network: returns a :class:`Layer` from now on, and logits in ``eval()`` mode.
        classes: its number of logits.
    """

    def __init__(self, network: nn.Module, classes: int) -> None:
        head = find_head(network, classes)[1]
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"fused_head needs a linear last layer, got {type(head).__name__}: take head=linear"
            )
        head.__class__ = _OpenLinear

    def loss(self, criterion: nn.Module, output: object, targets: Target) -> Tensor:
        """The criterion's fused form, which never has all logits."""
        if not isinstance(output, Layer):
            return super().loss(criterion, output, targets)
        features, weight, bias = output
        assert isinstance(criterion, topklass.SmoothTopKLoss | topklass.TopKCrossEntropyLoss)
        options = criterion.label_options | {"linear_bias": bias}
        if isinstance(criterion, topklass.SmoothTopKLoss):
            parameters = (criterion.k, criterion.tau, criterion.margin)
            return linear_smooth_topk_loss(features, weight, targets, *parameters, **options)
        return linear_topk_cross_entropy(
            features,
            weight,
            targets,
            criterion.k,
            criterion.margin,
            criterion.temperature,
            **options,
        )

    @torch.no_grad()
    def ranks(self, output: object, targets: Target) -> Tensor:
        """Ranks of the labels, for some rows at a time."""
        if not isinstance(output, Layer):
            return super().ranks(output, targets)
        rows = max(1, RANK_BYTES // (4 * len(output.weight)))
        parts = zip(
            *(torch.split(t, rows) for t in (output.features, first_labels(targets))), strict=True
        )
        layer = (output.weight, output.bias)
        return torch.cat([target_rank(F.linear(part, *layer), own) for part, own in parts])
