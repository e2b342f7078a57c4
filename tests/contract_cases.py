"""What the tests of the contract share: the losses, their options, and how two are compared."""

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from losses_table import CLASSES, LOSSES, Loss

INF = math.inf
C = CLASSES
SHAPES = [(C,), (4, C), (3, C, 2), (2, C, 2, 3)]
KINDS = ["indices", "probabilities"]
TARGETS = [(shape, kind, None) for shape in SHAPES for kind in KINDS] + [
    (shape, "indices", ignore_index) for shape in SHAPES[1:] for ignore_index in (-7, 2)
]
CROSS_ENTROPIES = [loss for loss in LOSSES if loss.as_cross_entropy is not None]


def name(loss: Loss) -> str:
    return loss.name


every_loss = pytest.mark.parametrize("loss", LOSSES, ids=name)
every_smooth_loss = pytest.mark.parametrize("loss", [x for x in LOSSES if x.smooth], ids=name)
every_kind = pytest.mark.parametrize("kind", KINDS)
with_and_without_weight = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def all_pairs(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few choices in which any two values of different options meet at least once."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    rows = list(product(*options))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def value_and_gradient(function: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A loss and its gradient; those of several samples are weighted differently."""
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf, *args, **kwargs)
    cotangent = torch.arange(1, value.numel() + 1).reshape(value.shape).to(value)
    (gradient,) = torch.autograd.grad(value, leaf, cotangent)
    return value.detach(), gradient


def assert_same(
    first: Any, second: Any, logits: Tensor, target: Tensor, tolerance: float = 1e-10, **kwargs: Any
) -> None:
    """Both functions have the same finite values and gradients."""
    actual = value_and_gradient(first, logits, target, **kwargs)
    expected = value_and_gradient(second, logits, target, **kwargs)
    assert all(x.isfinite().all() for x in expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
