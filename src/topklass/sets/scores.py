"""How badly a label fits a sample: the scores E(x, y) of conformal sets, small if it is likely."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass.sets.calibrated import log_softmax

SCORES = ("aps", "lac", "pas", "saps")


def label_scores(
    logits: Tensor,
    score: str,
    *,
    penalty: float = 0.0,
    k_reg: int = 5,
    prevalence: Tensor | None = None,
    uniform: Tensor | None = None,
    max_size: int | None = None,
) -> Tensor:
    """E for every class as the label.

    Args:
        logits: (…, C).
        score: one of ``SCORES``; :class:`topklass.ConformalSets` has the formulas.
        penalty: λ.
        k_reg: how many labels are free of the penalty of APS.
        prevalence: how frequent the classes are, (C), for ``"pas"``.
        uniform: U, (…, 1); None for U = 0.
        max_size: labels of larger ranks have E = ∞.

    Returns:
        (…, C) in float64, where the device has it; ∞ for labels that may not be in a set.
    """
    chances, ordered_by = log_softmax(logits), logits
    if score == "pas":
        assert prevalence is not None
        chances = ordered_by = chances - prevalence.to(chances).log()
    order = ordered_by.argsort(dim=-1, descending=True, stable=True)
    chances = chances.exp().gather(-1, order)
    rank = torch.arange(1, logits.shape[-1] + 1, dtype=chances.dtype, device=logits.device)
    own = 0.0 if uniform is None else uniform
    if score == "aps":
        before = F.pad(chances.cumsum(-1)[..., :-1], (1, 0))
        scores = before + own * chances + penalty * (rank - k_reg).clamp(min=0)
    elif score == "saps":
        first = chances[..., :1]
        scores = torch.where(rank == 1, own * first, first + penalty * (rank - 2 + own))
    else:
        scores = -chances
    if max_size is not None:
        scores = scores.masked_fill(rank > max_size, inf)
    by_class = torch.empty_like(scores).scatter(-1, order, scores)
    return by_class.masked_fill(logits == -inf, inf)


def largest_score(score: str, classes: int, penalty: float, k_reg: int) -> float:
    """A score that none exceeds, but for ∞."""
    if score == "aps":
        return 1.0 + penalty * max(0, classes - k_reg)
    if score == "saps":
        return 1.0 + penalty * (classes - 1)
    return 0.0
