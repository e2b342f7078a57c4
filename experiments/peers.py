"""The published losses, where their packages are installed (``pip install 'topklass[bench]'``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from typing import Any

from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def smooth(k: int, tau: float = 1.0, *, per_row: bool = False) -> Loss | None:
    """The smooth loss of Berrada et al. (2018), in difftopk's copy of the published code."""
    if not available("difftopk"):
        return None

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        criterion = _difftopk("SmoothTopKLoss", logits.shape[1], k, tau, str(logits.device))
        result: Tensor = (criterion.fn_smooth if per_row else criterion)(logits, target)
        return result

    return loss


def smooth_with_switch(k: int, tau: float = 1.0) -> Loss | None:
    """The same for each row, with the published switch to the hard loss.

    It takes the hard loss of rows whose k-th score is k·τ·ln 1000 above the next, which is not in
    the paper.
    """
    if not available("difftopk"):
        return None

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        criterion = _difftopk("SmoothHardTopKLoss", logits.shape[1], k, tau, str(logits.device))
        from difftopk.smooth_topk import detect_large

        losses = logits.new_zeros(len(logits))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of that code
            parts = detect_large(logits, k, tau, criterion.thresh)
            for rows, each in zip(parts, (criterion.fn_smooth, criterion.fn_hard), strict=True):
                if rows.any():
                    losses = losses.masked_scatter(rows, each(logits[rows], target[rows]))
        return losses

    return loss


def noised(k: int, epsilon: float, samples: int) -> Loss | None:
    """The noised loss of Garcin et al. (2022), in its authors' package."""
    if not available("pytopk"):
        return None
    from pytopk import BalNoisedTopK

    criterion: Loss = BalNoisedTopK(k=k, epsilon=epsilon, n_sample=samples)
    return criterion


@cache
def available(package: str) -> bool:
    """Whether a package is installed; says so if it is not."""
    found = find_spec(package) is not None
    if not found:
        print(f"{package} is not installed (pip install 'topklass[bench]'): left out", flush=True)
    return found


@cache
def _difftopk(name: str, classes: int, k: int, tau: float, device: str) -> Any:
    """A loss of difftopk, whose tensors stay on the device where they were created."""
    with redirect_stdout(StringIO()):  # the package prints which of its parts are missing
        import difftopk
    return getattr(difftopk, name)(classes, k, tau, device)
