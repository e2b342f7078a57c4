"""Noised losses that are changed in one thing, for ``python -m experiments small-epsilon``.

The hinge (m + E(s + εZ)_(k+1) − s_y)_+ uses ε twice: it decides which images have a gradient, and
which classes that gradient pushes down, each by its probability to be the (k+1)-th largest. Ten
noise vectors estimate the expectation.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from topklass import NoisedTopKLoss, noised_topk
from topklass.train.criterion import LossInfo


class SplitNoise(nn.Module):
    """One ε decides which images have a gradient, another which classes it pushes down.

    Args:
        k: length of the list.
        margin: m.
        active: ε of the threshold that the label has to exceed.
        pushed: ε of the threshold that is differentiated.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[9.0, 6.0, 3.0, 0.0], [9.0, 6.0, 3.0, 0.0]], requires_grad=True)
        >>> SplitNoise(k=2, active=0.1, pushed=0.1)(scores, torch.tensor([3, 0])).backward()
        >>> scores.grad
        tensor([[ 0.0000,  0.0000,  0.5000, -0.5000],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """

    def __init__(
        self, k: int = 5, margin: float = 1.0, *, active: float = 1.0, pushed: float = 1.0
    ) -> None:
        super().__init__()
        self.k, self.margin, self.active, self.pushed = k, margin, active, pushed

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean; it may be negative where both ε differ."""
        missing = self.margin - logits.gather(1, target[:, None]).squeeze(1)
        is_active = missing.detach() + noised_topk(logits.detach(), self.k + 1, self.active) > 0
        return (is_active * (missing + noised_topk(logits, self.k + 1, self.pushed))).mean()


class WarmedNoise(NoisedTopKLoss):
    """The noised loss whose ε falls from 1 to its value, geometrically, then stays.

    Args:
        k: length of the list.
        epsilon: the last ε.
        epochs: after so many it is reached.

    Example:
        >>> criterion = WarmedNoise(epsilon=0.25, epochs=4)
        >>> [criterion.set_epoch(epoch) or criterion.epsilon for epoch in (0, 2, 4, 5)]
        [1.0, 0.5, 0.25, 0.25]
    """

    def __init__(self, k: int = 5, epsilon: float = 0.2, *, epochs: int = 10) -> None:
        super().__init__(k, epsilon)
        self.last, self.epochs = epsilon, epochs

    def set_epoch(self, epoch: int) -> None:
        """Set ε of an epoch."""
        self.epsilon = self.last ** min(1.0, epoch / self.epochs)


ACTIVE_02 = LossInfo(
    partial(SplitNoise, active=0.2, pushed=1.0), "images as with ε = 0.2, classes as with ε = 1"
)
PUSHED_02 = LossInfo(
    partial(SplitNoise, active=1.0, pushed=0.2), "images as with ε = 1, classes as with ε = 0.2"
)
WARMED = LossInfo(WarmedNoise, "ε falls from 1", ("epsilon",))
"""For recipes, as ``loss: experiments.noise_losses:WARMED``."""
