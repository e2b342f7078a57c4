"""What the tests of sets share: samples of a known distribution, coverage, errors."""

import random

import torch
from torch import Tensor


def samples(n: int, classes: int = 8, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of the true distribution, and labels drawn from it."""
    logits = spread * torch.randn(n, classes, dtype=torch.float64)
    return logits, logits.softmax(-1).multinomial(1).squeeze(1)


def covered(members: Tensor, target: Tensor) -> Tensor:
    return members.gather(-1, target.unsqueeze(-1)).squeeze(-1).double()


def long_tail(n: int = 900, classes: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and labels of a long tail, the same on every machine; odd classes are hard."""
    uniform = random.Random(seed).random
    frequency = [0.7**c for c in range(classes)]
    rows, labels = [], []
    for _ in range(n):
        label = _drawn(frequency, uniform())
        row = [4 * uniform() for _ in range(classes)]
        row[label] += (2 if label % 2 else 8) * uniform()
        rows.append(row)
        labels.append(label)
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)


def _drawn(weights: list[float], uniform: float) -> int:
    """Where the sum of the weights exceeds this share of it."""
    total, place = uniform * sum(weights), 0
    while total >= weights[place]:
        total -= weights[place]
        place += 1
    return place
