"""Scores and positives that the tests of the multi-label loss share, and its definition by hand."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

INF = math.inf
PAD = -100
C = 7
TARGET = torch.tensor([[0, 3, PAD, PAD], [6, 1, 6, 2], [PAD, PAD, PAD, PAD], [4, 4, PAD, PAD]])
MASK = torch.tensor([[c in row for c in range(C)] for row in TARGET.tolist()])
KINDS = ["indices", "bool", "float"]

every_kind = pytest.mark.parametrize("kind", KINDS)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def as_target(kind: str) -> Tensor:
    """The positives of the four samples above: two, three, none and one; some are repeated."""
    return {"indices": TARGET, "bool": MASK, "float": MASK.double()}[kind]


def scores_of(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64).to(dtype)


def oracle(scores, positives, k, tau=1.0, margin=1.0, weight=None) -> Tensor:
    """One sample, with all subsets of the negatives: σ_k/σ_{k−1}, as the definition has it."""
    negatives = [c for c in range(len(scores)) if c not in positives]

    def log_sigma(j: int) -> Tensor:
        subsets = torch.tensor(list(combinations(negatives, j)), dtype=torch.long)
        return (scores[subsets].sum(1) / (k * tau)).logsumexp(0)

    if not positives or len(negatives) < k:
        return 0 * scores.sum()
    losses = []
    for y in positives:
        m = margin[y] if isinstance(margin, Tensor) else margin
        exponent = m / tau - scores[y] / (k * tau) + log_sigma(k) - log_sigma(k - 1)
        loss = tau * torch.logaddexp(exponent, torch.zeros_like(exponent))
        losses.append(loss if weight is None else weight[y] * loss)
    return torch.stack(losses).mean()


def by_hand(scores, reduction="none", **parameters):
    sets = [sorted(set(row) - {PAD}) for row in TARGET.tolist()]
    losses = torch.stack(
        [oracle(row, y, **parameters) for row, y in zip(scores, sets, strict=True)]
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / 3
