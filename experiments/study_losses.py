"""The smooth loss by other algorithms, for comparison: summation, and the published code.

Nothing prevents overflow in these. Rows whose loss or gradient is not finite are counted and left
out of the step; otherwise the first of them would end the training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments import peers
from experiments.algorithms import smooth_topk_loss_uncentred
from topklass import SmoothTopKLoss, TopKCrossEntropyLoss
from topklass._checks import check_count, check_temperature
from topklass.functional import smooth_topk_loss
from topklass.train.criterion import LossInfo

COUNTS = ("calls", "first", "losses", "gradients")
"""What a counted loss has in its state dict."""


class CountedLoss(nn.Module):
    """Mean of a smooth top-k loss, with a count of the rows that are not finite.

    These rows contribute 0 to the mean and to the gradient. Only calls that require a gradient are
    counted. The counts are in the state dict, so that they survive an interruption.

    Args:
        k: length of the list that should hold the label.
        tau: temperature.

    Attributes:
        calls: how many batches there were.
        first: number of the first batch with a row that was not finite, from 1; 0 for none.
        losses: rows whose loss was not finite.
        gradients: other rows whose gradient was not.
    """

    calls: Tensor
    first: Tensor
    losses: Tensor
    gradients: Tensor

    def __init__(self, k: int = 5, tau: float = 1.0) -> None:
        super().__init__()
        check_count("k", k)
        check_temperature(tau)
        self.k, self.tau = k, tau
        for name in COUNTS:
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """Losses (N) of scores (N, C) in float32, finite or not."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The mean, in float32."""
        scores = input.float().view_as(input)  # a tensor of its own, to see its gradient
        losses = self.rows(scores, target)
        lost = ~losses.detach().isfinite()
        if scores.requires_grad and torch.is_grad_enabled():
            self.calls += 1
            self._count("losses", lost)

            def clean(gradient: Tensor) -> Tensor:
                wrong = ~gradient.isfinite().all(1)
                self._count("gradients", wrong & ~lost)
                return gradient.masked_fill((wrong | lost)[:, None], 0.0)

            scores.register_hook(clean)  # type: ignore[no-untyped-call]
        return losses.masked_fill(lost, 0.0).mean()

    def _count(self, name: str, rows: Tensor) -> None:
        number = rows.sum()
        getattr(self, name).add_(number)
        self.first.copy_(torch.where((self.first == 0) & (number > 0), self.calls, self.first))


class SummationTopKLoss(CountedLoss):
    """By Algorithm 3 of Berrada et al. (2018), in float32, of ``exp(s/(kτ))`` as they are.

    Example:
        >>> criterion = SummationTopKLoss(k=2, tau=0.1)
        >>> scores = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], requires_grad=True)
        >>> _ = criterion(scores, torch.tensor([2, 2]))
        >>> criterion.losses
        tensor(1)
    """

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """See :func:`experiments.algorithms.smooth_topk_loss_uncentred`."""
        return smooth_topk_loss_uncentred(scores, target, self.k, self.tau)


class CentredSummationTopKLoss(SummationTopKLoss):
    """The same with the largest score subtracted: exponentials underflow instead of overflowing.

    Example:
        >>> criterion = CentredSummationTopKLoss(k=2, tau=0.1)
        >>> scores = torch.tensor([[10.0, 20.0, 30.0], [0.0, 1.0, 99.0]], requires_grad=True)
        >>> _ = criterion(scores, torch.tensor([2, 2]))
        >>> criterion.losses
        tensor(1)
    """

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """The loss does not change if a number is added to all scores."""
        return super().rows(scores - scores.amax(1, keepdim=True), target)


class PublishedTopKLoss(CountedLoss):
    """The published code: log space, approximated backward pass, and a switch to the hard loss."""

    def __init__(self, k: int = 5, tau: float = 1.0) -> None:
        super().__init__(k, tau)
        loss = peers.smooth_with_switch(k, tau)
        if loss is None:
            raise ImportError("the published loss needs pip install 'topklass[bench]' (difftopk)")
        self.loss = loss

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """See :func:`experiments.peers.smooth_with_switch`."""
        return self.loss(scores, target)


class CountedSmoothTopKLoss(CountedLoss):
    """The loss of topklass, with the same counts."""

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """See :func:`topklass.functional.smooth_topk_loss`."""
        return smooth_topk_loss(scores, target, self.k, self.tau, reduction="none")


class Times(nn.Module):
    """A loss times a number.

    Args:
        loss: any.
        factor: the number.
    """

    def __init__(self, loss: nn.Module, factor: float) -> None:
        super().__init__()
        self.loss, self.factor = loss, factor

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss, times the number."""
        loss: Tensor = self.factor * self.loss(input, target)
        return loss


def times_k(loss: Callable[..., nn.Module], k: int = 5, **options: Any) -> Times:
    """A smooth loss with the slope of cross-entropy at equal scores, but not its curvature."""
    return Times(loss(k=k, **options), k)


def times_k2tau(k: int = 5, tau: float = 1.0, **options: Any) -> Times:
    """A smooth loss of which gradient descent moves s/(kτ) as it moves s of cross-entropy."""
    return Times(SmoothTopKLoss(k, tau, **options), k * k * tau)


class MovingShortList(TopKCrossEntropyLoss):
    """A short-list loss whose weight of the first guess moves linearly during training.

    Args:
        k: length of the list.
        first: weight of the first guess in the first epoch.
        last: its weight after the last one.
        label_smoothing: share of the target that is spread uniformly over all classes.
        epochs: of the training.
    """

    def __init__(
        self,
        k: int = 5,
        *,
        first: float,
        last: float,
        label_smoothing: float = 0.1,
        epochs: int = 40,
    ) -> None:
        super().__init__({1: first, k: 1 - first}, label_smoothing=label_smoothing)
        self.length, self.first, self.last, self.epochs = k, first, last, epochs

    def set_epoch(self, epoch: int) -> None:
        """Set the weights of an epoch."""
        share = self.first + (self.last - self.first) * min(1.0, epoch / self.epochs)
        self.k = {1: share, self.length: 1 - share}


def _smooth(loss: type[nn.Module], about: str) -> LossInfo:
    return LossInfo(loss, about, ("tau",), matched=partial(times_k, loss))


SUMMATION = _smooth(SummationTopKLoss, "smooth, by summation in float32")
CENTRED_SUMMATION = _smooth(CentredSummationTopKLoss, "the same, of centred scores")
PUBLISHED = _smooth(PublishedTopKLoss, "smooth, the published code")
TOPKLASS = _smooth(CountedSmoothTopKLoss, "smooth, with the same counts")
TIMES_K2TAU = LossInfo(SmoothTopKLoss, "smooth, times k²τ", ("tau", "margin"), matched=times_k2tau)
LIST_FIRST = LossInfo(
    partial(MovingShortList, first=0.05, last=0.5), "short list, more and more of the first guess"
)
LIST_LAST = LossInfo(
    partial(MovingShortList, first=0.5, last=0.05), "short list, less and less of the first guess"
)
"""For recipes, as ``loss: experiments.study_losses:SUMMATION``."""
