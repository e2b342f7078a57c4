"""The k-th largest of noised scores without noise: exact expectations, to verify samplers by.

With ``p_i(t) = Φ((s_i − t)/ε)`` the number of noised scores above t is a sum of independent coins:
the coefficients of ``Π_i (1 − p_i + p_i X)`` are its probabilities, and these are elementary
symmetric polynomials of the odds. So ``P(k-th largest > t) = 1 − Σ_{j<k} P(count = j)``, and

    E = lo + ∫ P(k-th largest > t) dt,      ∂E/∂s_i = P(class i is the k-th largest),

over the window in which that probability falls from 1 to 0, by the trapezoidal rule.
"""

import torch
from torch import Tensor

from experiments.algorithms import log_esp_tree

NODES = 32
NEARLY = 1e-9
"""Probability outside of the window, at either end."""


def expected_topk(scores: Tensor, k: int, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the k-th largest noised score, (R,), and each class's chance, (R, n)."""
    scores = scores.detach().requires_grad_()
    with torch.no_grad():
        low = crossing(scores, k, epsilon, 1 - NEARLY)
        high = crossing(scores, k, epsilon, NEARLY)
    step = (high - low) / (NODES - 1)
    mean, second = low.clone(), torch.zeros_like(low)
    chances = torch.zeros_like(scores)
    for node in range(NODES):
        weight = step * (0.5 if node in (0, NODES - 1) else 1.0)
        area = weight * above(scores, low + node * step, k, epsilon)
        (part,) = torch.autograd.grad(area.sum(), scores)
        chances += part
        mean += area.detach()
        second += 2 * node * step * area.detach()
    second += step**2 / 6  # the rule's error, as t − lo has a slope where the window begins
    return mean, second - (mean - low) ** 2, chances


def above(scores: Tensor, threshold: Tensor, k: int, epsilon: float) -> Tensor:
    """Probability that the k-th largest noised score exceeds the threshold of its row, k ≥ 2."""
    z = (scores - threshold[:, None]) / epsilon
    log_in, log_out = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    log_count = log_esp_tree(log_in - log_out, k - 1) + log_out.sum(1, keepdim=True)
    below: Tensor = log_count.exp().sum(1)
    return 1 - below


def crossing(scores: Tensor, k: int, epsilon: float, probability: float) -> Tensor:
    """Where the probability to exceed a threshold falls to the one given, by bisection."""
    kth = scores.topk(k, dim=1).values[:, -1]
    low, high = kth - 20 * epsilon, kth + 20 * epsilon
    for _ in range(24):
        middle = (low + high) / 2
        right = above(scores, middle, k, epsilon) > probability
        low, high = torch.where(right, middle, low), torch.where(right, high, middle)
    return (low + high) / 2
