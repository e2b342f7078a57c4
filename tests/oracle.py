"""The smooth loss and its gradient in extended precision, see ``benchmarks/exact.py``."""

from typing import Any

import numpy as np
import torch
from benchmarks import exact
from numpy.typing import NDArray


def smooth_loss(
    scores: NDArray[np.floating[Any]], label: int, k: int, tau: float, margin: float = 1.0
) -> tuple[np.longdouble, NDArray[np.longdouble]]:
    """Loss and gradient of one row of scores."""
    row, labels = torch.from_numpy(scores)[None], torch.tensor([label])
    losses, gradients = exact.smooth_loss(row, labels, k, tau, margin)
    return losses[0], gradients[0]
