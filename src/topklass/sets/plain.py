"""Sets without a guarantee of coverage: always k labels, or k on average."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from torch import Tensor, nn

from topklass._checks import check_count, check_dim, check_number
from topklass.prediction import among_first
from topklass.sets.calibrated import CalibratedSets, checked, log_softmax

if TYPE_CHECKING:
    from typing_extensions import Self


class TopKSets(nn.Module):
    """The k labels of the largest logits.

    Exactly k labels, ties in the order of their indices; fewer only where fewer are present.

    Args:
        k: number of labels, 1 ≤ k ≤ C.
        dim: the dimension of the classes.

    Example:
        >>> import torch
        >>> TopKSets(k=2)(torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
        tensor([[ True, False,  True],
                [ True,  True, False]])
    """

    def __init__(self, k: int, *, dim: int = -1) -> None:
        super().__init__()
        check_count("k", k)
        check_dim(dim)
        self.k = k
        self.dim = dim

    def calibrate(self, logits: Tensor, target: Tensor | None = None) -> Self:
        """Do nothing, so that all sets can be used in the same way."""
        return self

    def forward(self, logits: Tensor) -> Tensor:
        """Mask of the sets, of the logits' shape."""
        logits = checked(logits, self.dim)
        check_count("k", self.k, logits.shape[-1], "the number of classes")
        mask = among_first(self.k, logits) & (logits > -inf)
        return mask.movedim(-1, self.dim)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"k={self.k}, dim={self.dim}"


class AverageKSets(CalibratedSets):
    r"""All labels above one threshold, which gives k labels on average.

    .. math:: S(x) = \{ y : p_y(x) \ge \theta \}, \qquad \frac1N \sum_n |S(x_n)| = k

    (Lorieul, Joly and Shasha 2021): clear samples get fewer labels, ambiguous ones more, and a
    sample without any p above θ none. No guarantee of coverage.

    Args:
        k: number of labels on average, positive, at most C; need not be an integer.
        dim: the dimension of the classes.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[9.0, 0.0, 0.0], [2.0, 2.0, 1.9]])
        >>> AverageKSets(k=2).calibrate(logits)(logits)
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """

    parameters_of_sets = ("k",)

    def __init__(self, k: float, *, dim: int = -1) -> None:
        check_number("k", k, positive=True)
        super().__init__(dim)
        self.k = float(k)

    def calibrate(self, logits: Tensor, target: Tensor | None = None) -> Self:
        """Find θ; this waits for the device.

        Args:
            logits: those of at least one sample.
            target: not needed; taken so that all sets can be used in the same way.

        Returns:
            Itself. The average on these logits is k to the nearest whole number of labels; ties at
            θ are all in, and raise it.
        """
        logits = checked(logits, self.dim, look=True)
        chances = log_softmax(logits).flatten()
        classes = logits.shape[-1]
        count = round(self.k * (chances.numel() // classes))
        if self.k > classes or count == 0:
            raise ValueError(
                f"k must be at most the number of classes, and k times the number of rows at least "
                f"one label, got k={self.k:g} for logits of shape {tuple(logits.shape)}"
            )
        self.threshold = chances.topk(count, sorted=False).values.amin().item()
        self.classes = classes
        return self

    def forward(self, logits: Tensor) -> Tensor:
        """Mask of the sets, of the logits' shape."""
        logits, threshold = self._calibrated_for(logits)
        mask = (log_softmax(logits) >= threshold) & (logits > -inf)
        return mask.movedim(-1, self.dim)
