r"""Fixed tables for sums over classes at the nodes of an integral.

**Problem.** At a threshold t, :mod:`topklass.reference.expected` needs of the classes below the
largest only sums ``Σ_i F_j(z_i − t)``, j = 0..k−1, where ``z_i ≤ 0`` is a score relative to the
k-th, in units of noise:

* ``F_0(x) = log Φ(−x)``, the logarithm of the chance that none of them is above t,
* ``F_j(x) = (ω(x) / r)^j``, powers of the odds ``ω = Φ(x) / Φ(−x)`` relative to those of the k-th
  score, or to 1 if these are less: ``r = max(ω(−t), 1)``.

**Closed form.** On a bin of z of half a unit of noise, each F is a polynomial of degree 7 up to
rounding. So the sums are products of a fixed matrix with the moments of each bin, ``Σ_i f_i^m`` for
``−1 ≤ f_i ≤ 1`` and m = 0..7, whatever the number of classes and of nodes.

**Nodes.** All rows share them. The k-th largest is nowhere more concentrated than among n equal
scores: there ``log E N(t)`` falls with slope ρ, and P(N(t) < k) is that a Gamma variable exceeds
its exponential. The characteristic function of its logarithm gives the step.
"""

from functools import lru_cache
from math import ceil, exp, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from topklass.reference.expected import log_chances

TERMS = 8
"""Moments of a bin."""
WIDTH = 0.5
"""Of a bin, in units of noise."""
MOST_BINS = 24
"""Enough for n·k = 10⁹."""
BEYOND = 3e-7
"""Probability of the k-th largest to be beyond the nodes, or a class out of reach."""


class Tables(NamedTuple):
    """What all rows of n classes share, for one k, in float64."""

    nodes: Tensor
    """Thresholds, equally spaced, (A)."""
    weights: Tensor
    """Of the trapezoidal rule, (A)."""
    log_scale: Tensor
    """``log r``: of the odds of a class at 0 to be above each threshold, or of 1, (A)."""
    bins: int
    """Of z, the first one around 0, the others below."""
    sums: Tensor
    """From moments to sums, (k, bins·TERMS, A)."""


def quantile(chance: float) -> float:
    """The standard normal quantile."""
    return float(torch.special.ndtri(torch.tensor(chance, dtype=torch.float64, device="cpu")))


def step(classes: int, k: int) -> float:
    """The distance of nodes that resolves n equal scores: errors near 1e-6."""
    few = min(k, classes - k + 1)
    share = (few - 0.5) / classes
    slope = exp(-(quantile(share) ** 2) / 2) / sqrt(2 * pi * (1 - share)) / share
    return pi / (2 * slope * (1 + sqrt(few)))


@lru_cache(maxsize=64)
def bin_count(classes: int, k: int) -> int:
    """How many bins hold all classes that may be the k-th largest."""
    reach = -quantile(BEYOND / (classes * k)) * sqrt(2)  # the noise of a difference
    return min(MOST_BINS, ceil(reach / WIDTH) + 1)


@lru_cache(maxsize=4)
def tables(classes: int, k: int) -> Tables:
    """Those for rows of up to so many classes."""
    low, high = quantile(BEYOND / k), -quantile(BEYOND / classes)
    count = ceil((high - low) / step(classes, k)) + 1
    nodes = torch.linspace(low, high, count, dtype=torch.float64, device="cpu")
    weights = torch.full_like(nodes, (high - low) / (count - 1))
    weights[[0, -1]] /= 2
    log_in, log_out = log_chances(-nodes)
    log_scale = (log_in - log_out).clamp(min=0)
    bins = bin_count(classes, k)
    degree = torch.arange(TERMS, dtype=torch.float64, device="cpu")
    f = torch.cos((degree + 0.5) * pi / TERMS)
    z = WIDTH * (f / 2 - torch.arange(bins, device="cpu").unsqueeze(1))
    log_in, log_out = log_chances(z.unsqueeze(2) - nodes)
    power = torch.arange(1, k, device="cpu").view(-1, 1, 1, 1)
    values = torch.cat([log_out[None], (power * (log_in - log_out - log_scale)).exp()])
    coefficients = torch.linalg.solve(f.unsqueeze(1) ** degree, values)
    return Tables(nodes, weights, log_scale, bins, coefficients.flatten(1, 2))
