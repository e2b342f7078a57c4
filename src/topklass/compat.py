"""The names and constructors of smooth-topk, the code that Berrada et al. 2018 published.

Change one line:

    from topk.svm import SmoothTop1SVM         # before
    from topklass.compat import SmoothTop1SVM  # after

Values and gradients are those of the paper. The published code differs from it in these points:

- **A switch to the hard loss.** Where the k-th largest score exceeds the next by kτ·log(thresh),
  its smooth losses return the hard one: they jump there, and most classes receive no gradient.
  There is no switch here, so ``thresh`` is accepted and has no effect.
- **Approximate gradients.** ``SmoothTopkSVM`` has a wrong gradient for k = 1, and an inexact one at
  low temperatures. Here all are exact.
- **Input.** A score of −inf gives NaN there; here it is an absent class. From k = 5 on it refuses
  n = k + 1 classes, which are enough here.

These losses follow ``.to()``, can be pickled, and do not wait for a CUDA device. Their state dicts
have the published key ``labels``: checkpoints of a model that holds its loss, as in CLAM, load with
either. They have the attributes of :class:`topklass.SmoothTopKLoss` and
:class:`topklass.TopKHingeLoss`, from which they are derived.
"""

from typing import Any

import torch
from torch import Tensor, nn

from topklass._checks import check_count, check_logits, check_number
from topklass._targets import Target
from topklass.baseline_losses import TopKHingeLoss
from topklass.losses import SmoothTopKLoss

__all__ = ["MaxTop1SVM", "MaxTopkSVM", "SmoothTop1SVM", "SmoothTopkSVM"]


class _PublishedSVM(nn.Module):
    """A loss that knows its number of classes."""

    labels: Tensor

    def __init__(self, n_classes: int, **parameters: Any) -> None:
        check_count("n_classes", n_classes)
        super().__init__(**parameters)
        self.n_classes = n_classes
        self.register_buffer("labels", torch.arange(n_classes))

    def forward(self, x: Tensor, y: Target) -> Tensor:
        """The mean loss of a batch.

        Args:
            x: scores (N, n_classes).
            y: class indices (N).
        """
        found = check_logits(x)
        if found != self.n_classes:
            raise ValueError(
                f"x must have the scores of {self.n_classes} classes, as n_classes says, got "
                f"{found}: shape {tuple(x.shape)}"
            )
        loss: Tensor = super().forward(x, y)
        return loss


class SmoothTop1SVM(_PublishedSVM, SmoothTopKLoss):
    r"""Smooth top-1 SVM loss: :class:`topklass.SmoothTopKLoss` with k = 1.

    .. math:: \tau \log \Big[ 1 + \sum_{j \ne y} e^{(\alpha + s_j - s_y) / \tau} \Big]

    (Berrada et al. 2018, equation 9 with k = 1.)

    Args:
        n_classes: number of classes.
        alpha: margin α; None is 1.
        tau: temperature τ.
        thresh: has no effect, since there is no switch to the hard loss.

    Example:
        >>> criterion = SmoothTop1SVM(n_classes=2)
        >>> criterion(torch.tensor([[2.0, 1.0], [0.5, 0.5]]), torch.tensor([0, 1]))
        tensor(1.0032)
    """

    def __init__(
        self, n_classes: int, alpha: float | None = None, tau: float = 1.0, thresh: float = 1e3
    ) -> None:
        super().__init__(n_classes, k=1, tau=tau, margin=_margin(alpha))
        self.thresh = thresh


class SmoothTopkSVM(_PublishedSVM, SmoothTopKLoss):
    """Smooth top-k SVM loss: :class:`topklass.SmoothTopKLoss` (Berrada et al. 2018, equation 10).

    Args:
        n_classes: number of classes.
        alpha: margin α; None is 1.
        tau: temperature τ.
        k: length of the list that should hold the label, 1 ≤ k ≤ n_classes − 1.
        thresh: has no effect, since there is no switch to the hard loss.

    Example:
        >>> criterion = SmoothTopkSVM(n_classes=4, k=2)
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0]))
        tensor(0.6931)
    """

    def __init__(
        self,
        n_classes: int,
        alpha: float | None = None,
        tau: float = 1.0,
        k: int = 5,
        thresh: float = 1e3,
    ) -> None:
        super().__init__(n_classes, k=k, tau=tau, margin=_margin(alpha))
        self.thresh = thresh


class MaxTopkSVM(_PublishedSVM, TopKHingeLoss):
    r"""Hard top-k SVM loss: :class:`topklass.TopKHingeLoss` with the margin kα, over k.

    .. math:: \big( \alpha + \tfrac1k (s_{\setminus y})_{(k)} - \tfrac1k s_y \big)_+

    (Berrada et al. 2018, equation 8.)

    Args:
        n_classes: number of classes.
        alpha: margin α; None is 1.
        k: length of the list that should hold the label, 1 ≤ k ≤ n_classes − 1.

    Example:
        >>> criterion = MaxTopkSVM(n_classes=4, k=2)
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]))
        tensor(1.5000)
    """

    def __init__(self, n_classes: int, alpha: float | None = None, k: int = 5) -> None:
        super().__init__(n_classes, k=k, margin=k * _margin(alpha))

    def forward(self, x: Tensor, y: Target) -> Tensor:
        """The mean loss of a batch.

        Args:
            x: scores (N, n_classes).
            y: class indices (N).
        """
        return super().forward(x, y) / self.k


class MaxTop1SVM(MaxTopkSVM):
    r"""Hard top-1 SVM loss: :class:`topklass.TopKHingeLoss` with k = 1.

    .. math:: \big( \alpha + \max_{j \ne y} s_j - s_y \big)_+

    (Berrada et al. 2018, equation 3; Crammer and Singer 2001.)

    Args:
        n_classes: number of classes.
        alpha: margin α; None is 1.

    Example:
        >>> criterion = MaxTop1SVM(n_classes=4)
        >>> criterion(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([2]))
        tensor(3.)
    """

    def __init__(self, n_classes: int, alpha: float | None = None) -> None:
        super().__init__(n_classes, alpha, k=1)


def _margin(alpha: float | None) -> float:
    """α, which is 1 unless it is given."""
    if alpha is None:
        return 1.0
    check_number("alpha", alpha, positive=False)
    return alpha
