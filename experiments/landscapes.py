"""Losses of three scores on the simplex: what the level sets of Garcin et al. (2022) show.

The label is the last of three, the upper corner of the triangle. Margins are 1 in units of scores,
as in the paper: the smooth loss, whose limit as τ → 0 is ``topk_hinge_loss(margin=k·α) / k``, has
α = 1/k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass import functional
from topklass.data.seeds import generator

LABEL = 2
SIZE = 2.0
"""Sum of the scores, in the paper's figures."""

Options = Mapping[str, float | None]


def simplex(rows: int) -> Tensor:
    """Points of 2·Δ3 on a triangular grid, (P, 3), from the lower edge to the label's corner.

    Example:
        >>> simplex(1)
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]], dtype=torch.float64)
    """
    points = [
        (rows - label - other, other, label)
        for label in range(rows + 1)
        for other in range(rows + 1 - label)
    ]
    return SIZE * torch.tensor(points, dtype=torch.float64) / rows


def zero_one(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """``1{top_k(s) > s_y}``, eq. 3."""
    return (scores.topk(k).values[:, -1] > scores.gather(1, labels[:, None])[:, 0]).double()


def cross_entropy(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """The usual one, whatever k is."""
    return F.cross_entropy(scores, labels, reduction="none")


def smooth(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    """With α = 1/k, a margin of 1 between scores."""
    return functional.smooth_topk_loss(scores, labels, k, tau, 1 / k, reduction="none")


def noised(
    scores: Tensor,
    labels: Tensor,
    k: int,
    epsilon: float,
    samples: int | None,
    margin: float = 1.0,
    replications: int = 1,
) -> Tensor:
    """Mean over replications, each with noise of its own at every point."""
    if samples is None:
        replications = 1
    source = generator(0, "level sets", k, str(epsilon), str(samples), str(margin))
    total = torch.zeros_like(scores[:, 0])
    for _ in range(replications):
        total += functional.noised_topk_loss(
            scores, labels, k, epsilon, samples, margin, generator=source, reduction="none"
        )
    return total / replications


LANDSCAPES: dict[str, Callable[..., Tensor]] = {
    "zero-one": zero_one,
    "cross-entropy": cross_entropy,
    "hinge": lambda s, y, k: functional.topk_hinge_loss(s, y, k, reduction="none"),
    "calibrated-hinge": lambda s, y, k: functional.calibrated_topk_hinge_loss(
        s, y, k, reduction="none"
    ),
    "convex-hinge": lambda s, y, k: functional.convex_topk_hinge_loss(s, y, k, reduction="none"),
    "smooth": smooth,
    "noised": noised,
}
"""Functions of scores (P, 3), labels (P) and k."""


def landscape(loss: str, k: int, points: Tensor, **options: float | None) -> Tensor:
    """The loss at each point, (P)."""
    labels = torch.full((len(points),), LABEL)
    return LANDSCAPES[loss](points, labels, k, **options)


def rescaled(values: Tensor) -> Tensor:
    """From 0 to 1, as the paper's figures; a constant becomes 0.

    Example:
        >>> rescaled(torch.tensor([3.0, 1.0, 5.0]))
        tensor([0.5000, 0.0000, 1.0000])
    """
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
