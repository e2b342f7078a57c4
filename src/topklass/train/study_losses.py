"""The smooth loss as others evaluate it, for comparison only: by summation, and as published.

Nothing keeps these from overflow. So rows whose loss or gradient is not finite are counted and left
out of the step, which goes on with the others: without that, the first of them ends the training.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topklass._checks import check_count, check_temperature
from topklass.algorithms import esp_summation
from topklass.functional import smooth_topk_loss

COUNTS = ("calls", "first", "losses", "gradients")
"""What a counted loss has in its state dict."""


class CountedLoss(nn.Module):
    """Mean of a smooth top-k loss, with a count of the rows that are not finite.

    They count as 0, in the mean and in the gradient. Counts are of calls that can be differentiated
    and are in the state dict, so that they survive an interruption.

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
        """Losses (N) of scores (N, C) in float32, without care."""

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
        """``−τ logsigmoid(−(1/τ + log σ_k − log σ_{k−1} − s_y/(kτ)))``, eq. 10."""
        x = self.place(scores / (self.k * self.tau))
        label = x.gather(1, target[:, None])[:, 0]
        sigma = esp_summation(x.scatter(1, target[:, None], -inf), self.k)
        z = 1 / self.tau + sigma[:, self.k].log() - sigma[:, self.k - 1].log() - label
        return -self.tau * F.logsigmoid(-z)

    @staticmethod
    def place(x: Tensor) -> Tensor:
        """Logarithms whose exponentials are summed, up to a number for each row."""
        return x


class CentredSummationTopKLoss(SummationTopKLoss):
    """The same of exponentials that are at most 1: they do not overflow, but underflow.

    Example:
        >>> criterion = CentredSummationTopKLoss(k=2, tau=0.1)
        >>> scores = torch.tensor([[10.0, 20.0, 30.0], [0.0, 1.0, 99.0]], requires_grad=True)
        >>> _ = criterion(scores, torch.tensor([2, 2]))
        >>> criterion.losses
        tensor(1)
    """

    @staticmethod
    def place(x: Tensor) -> Tensor:
        """Below the largest one of the row."""
        return x - x.amax(1, keepdim=True)


class PublishedTopKLoss(CountedLoss):
    """The published code: log space, approximated backward pass, and a switch to the hard loss.

    It takes the hard loss of rows where the k-th score is k·τ·ln 1000 above the next, which is not
    in the paper. The code is that in the package difftopk.
    """

    def __init__(self, k: int = 5, tau: float = 1.0) -> None:
        if not published_is_installed():
            raise ImportError("the published loss needs pip install 'topklass[bench]' (difftopk)")
        super().__init__(k, tau)

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """Hard losses of the rows that switch, smooth ones of the others."""
        criterion, detect_large = _published(scores.shape[1], self.k, self.tau, str(scores.device))
        losses = scores.new_zeros(len(scores))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of that code
            parts = detect_large(scores, self.k, self.tau, criterion.thresh)
            for chosen, loss in zip(parts, (criterion.fn_smooth, criterion.fn_hard), strict=True):
                if chosen.any():
                    losses = losses.masked_scatter(chosen, loss(scores[chosen], target[chosen]))
        return losses


class CountedSmoothTopKLoss(CountedLoss):
    """That of this library."""

    def rows(self, scores: Tensor, target: Tensor) -> Tensor:
        """See :func:`topklass.functional.smooth_topk_loss`."""
        return smooth_topk_loss(scores, target, self.k, self.tau, reduction="none")


def published_is_installed() -> bool:
    """Whether difftopk is there, which carries the published code."""
    return find_spec("difftopk") is not None


@cache
def _published(classes: int, k: int, tau: float, device: str) -> tuple[Any, Any]:
    """The published loss, which stays where it was made, and its rule for the switch."""
    with redirect_stdout(StringIO()):  # the package says what it can do without
        from difftopk.smooth_topk import SmoothHardTopKLoss, detect_large

    return SmoothHardTopKLoss(classes, k, tau, device), detect_large
