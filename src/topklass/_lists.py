"""Losses of random lists of classes, as the reference and kernels of every label take them."""

from typing import NamedTuple

from torch import Tensor


class Lists(NamedTuple):
    """Random lists with random lengths, and what is asked of the label's probability."""

    lengths: tuple[int, ...]
    chances: tuple[float, ...]
    """Of the lengths."""
    temperature: float
    """T, what scores are divided by."""
    scale: float
    """What the loss is multiplied by."""
    margin: float | Tensor
    """α, a number or one per class; several lengths have none."""


def leaders(longest: int) -> int:
    """How many of the largest scores are taken out of the tail, if there are as many.

    One more than the longest list: any of them may be the label. Float32 needs more of them from
    k = 7 on, see ``tests/test_every_label.py``.
    """
    if longest <= 10:
        return longest + (1 if longest < 7 else 3)
    return 2 * longest
