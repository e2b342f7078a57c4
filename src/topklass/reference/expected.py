r"""The expected k-th largest score under noise: an integral of Poisson-binomial probabilities.

**Problem.** Find ``E (s + εZ)_(k)`` for Z standard normal, and its derivatives.

**Closed form.** ``a + ∫_a^∞ P(N(t) ≥ k) dt``, where N(t) counts the perturbed scores above t: a
Poisson-binomial count with probabilities ``Φ((s_i − t) / ε)``. On a window that holds all but a
negligible probability the trapezoidal rule converges geometrically.

**Which classes matter.** In units of ε and relative to the k-th score, the window lies between
``−DOWN`` and ``UP``. A class more than ``FAR`` below the window is never the k-th largest, and one
more than ``always`` above a threshold is always above it.
"""

from functools import partial
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from topklass._transforms import can_read_values, spread_nan
from topklass.reference.poisson_binomial import fewer_than
from topklass.reference.row_blocks import by_rows


class Rule(NamedTuple):
    """How finely the integral is taken, by the precision of the scores."""

    nodes: int
    """Of the trapezoidal rule, which converges geometrically here."""
    nearly: float
    """Probability beyond the window of integration, at either end."""
    always: float
    """So far above a threshold, in units of noise, a class is above it in any case."""


RULES = {torch.float32: Rule(32, 1e-6, 6.0), torch.float64: Rule(64, 1e-13, 8.0)}
NEVER = -12.0
"""So far below a threshold a class is never above it."""
DOWN, UP = 7.5, 8.5
"""From the k-th score, in units of noise: the window lies between, for k ≤ 10⁴ and n ≤ 10⁶."""
FAR = 7.5
"""So far below the window a class is never the k-th largest, not even one of 10⁶ of them."""
SECTIONS, ROUNDS = 8, 3
"""How the window is found: in so many parts, so many times."""


def expected_topk(rows: Tensor, k: int, epsilon: float) -> Tensor:
    """The expected k-th largest of (R, n) scores under noise of size ε, (R)."""
    rows = spread_nan(rows)
    heads, places = rows.topk(k, dim=1)
    kth = heads[:, -1:]
    if epsilon == 0 or rows.numel() == 0:
        return kth.squeeze(1)
    known = kth.detach().isfinite()
    center = kth.detach().masked_fill(~known, 0.0)
    others = within_reach(rows.scatter(1, places, -inf), center - (DOWN + FAR) * epsilon)
    beyond = UP + RULES[rows.dtype].always
    heads = without_certain(heads, (heads <= center + beyond * epsilon) & known)
    k = heads.shape[1]
    z = (torch.cat([heads, others], 1) - center) / epsilon
    low, high = by_rows(partial(window, k=k), z.detach(), cost=8 * SECTIONS).unbind(1)
    cost = RULES[z.dtype].nodes * (8 + k)
    shift = by_rows(partial(integral, k=k), z, low, high, cost=cost)
    return torch.where(known, center + epsilon * shift, kth.detach()).squeeze(1)


def within_reach(scores: Tensor, limits: Tensor) -> Tensor:
    """The largest scores of each row, as many as reach the limit in some row; or all of them."""
    if not can_read_values(scores):
        return scores
    count = int((scores >= limits).sum(1).amax())
    if 2 * count > scores.shape[1]:
        return scores
    return scores.topk(count, dim=1, sorted=False).values


def without_certain(heads: Tensor, uncertain: Tensor) -> Tensor:
    """The k largest scores without those that are above the k-th in any case, in every row."""
    if not can_read_values(heads) or heads.shape[1] == 1:
        return heads
    certain = int((~uncertain[:, :-1]).sum(1).amin())
    return heads[:, certain:]


def window(z: Tensor, k: int) -> Tensor:
    """Where the k-th largest of each row is to be found, (R, 2), in units of noise."""
    low = torch.full_like(z[:, :1], -DOWN)
    high = torch.full_like(low, UP)
    nearly = RULES[z.dtype].nearly
    step = torch.arange(1, SECTIONS, device=z.device, dtype=z.dtype) / SECTIONS
    for _ in range(ROUNDS):
        t = low + (high - low) * step
        chance = below(t, z, k)
        low = torch.where(chance <= nearly, t, low).amax(1, keepdim=True)
        high = torch.where(1 - chance <= nearly, t, high).amin(1, keepdim=True)
    return torch.cat([low, high], 1)


def integral(z: Tensor, low: Tensor, high: Tensor, k: int) -> Tensor:
    """``lo + ∫_lo^hi P(k-th largest > t) dt`` by the trapezoidal rule, (R, 1)."""
    nodes = RULES[z.dtype].nodes
    node = torch.arange(nodes, device=z.device, dtype=z.dtype)
    width = (high - low).unsqueeze(1) / (nodes - 1)
    chance = 1 - below(low.unsqueeze(1) + width * node, z, k)
    total = chance.sum(1, keepdim=True) - (chance[:, :1] + chance[:, -1:]) / 2
    return (low.unsqueeze(1) + width * total).to(z.dtype)


def below(thresholds: Tensor, z: Tensor, k: int) -> Tensor:
    """Probability that the k-th largest of z + noise is below each threshold, (R, T).

    The k largest of z come first.
    """
    x = (z.unsqueeze(1) - thresholds.unsqueeze(2)).clamp(NEVER, RULES[z.dtype].always)
    return fewer_than(k, *log_chances(x))


def log_chances(x: Tensor) -> tuple[Tensor, Tensor]:
    """``log Φ(x)`` and ``log Φ(−x)``; unlike ``torch.special.log_ndtr`` also under vmap."""
    positive = x > 0
    distance = torch.where(positive, x, -x)
    less = (torch.special.erfcx(distance * sqrt(0.5)) / 2).log() - distance.square() / 2
    more = (-less.exp()).log1p()
    return torch.where(positive, more, less), torch.where(positive, less, more)
