r"""Elementary symmetric polynomials by a tree of positive products: any k, to the last digit.

**Problem.** Power sums lose digits as k grows. The product ``Π_i (1 + e_i X)``, multiplied out on a
binary tree (Berrada et al. 2018, Algorithm 1), has positive terms only, but its coefficients
overflow.

**Closed form.** Tilt: for any ρ, with ``p_i = sigmoid(x_i − ρ)`` and N the number of successes of
independent trials with these probabilities (a Poisson-binomial count),

    σ_j(e) = exp(jρ) · Π_i (1 + exp(x_i − ρ)) · P(N = j).

Choose ρ such that N has mean k − 1/2. Then P(N = k) and P(N = k−1) stand at the mode, every
number is a probability, and ``log σ_k − log σ_{k−1} = ρ + log P(N = k) − log P(N = k−1)``.
Without class c, P(N = k) and P(N = k−1) are coefficients of the product of all other factors, which
the same tree gives from the top down, again by positive terms only.

``log_esp`` needs all degrees, which no single tilt serves: it multiplies in log space.
"""

from collections.abc import Callable
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

BISECTIONS = 20


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` for each of m labels y, (…, m)."""
    if labels.shape[-1] > 1:
        return smooth_gap_every_label(scores, k, tau).gather(-1, labels)
    label = scores.gather(-1, labels)
    x, threshold, absent = _centred(scores.scatter(-1, labels, -inf), k, k * tau)
    tilt = _tilt(x, k)
    count = first_coefficients(_trials(x, tilt), k + 1).masked_fill(absent, 1.0)
    change = (count[..., k:] / count[..., k - 1 : k]).log()
    return _mask_certain((threshold - label) / k + tau * (tilt + change), label, absent, k)


def smooth_gap_every_label(scores: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\c) − τ log σ_{k−1}(e\c) − s_c/k`` for every class c, (…, n).

    One tilt serves the k largest classes, whose absence lowers the threshold to the (k + 1)-th
    score, another serves the rest.
    """
    index = scores.topk(k, dim=-1).indices
    ones = torch.ones_like(index, dtype=torch.bool)
    leading = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, ones)
    gaps = []
    for mean in (k, k + 1):
        x, threshold, absent = _centred(scores, mean, k * tau)
        tilt = _tilt(x, mean)
        _, without = _leave_one_out(_trials(x, tilt), k)
        used = (leading == (mean == k + 1)) & ~absent & (scores != -inf)
        slopes = without.masked_fill(~used.unsqueeze(-1), 1.0)
        change = (slopes[..., 0] / slopes[..., 1]).log()
        gaps.append((threshold - scores) / k + tau * (tilt + change))
    return _mask_certain(torch.where(leading, gaps[1], gaps[0]), scores, absent, k)


def marginals(scores: Tensor, k: int) -> Tensor:
    r"""``π_i = e_i σ_{k−1}(e\i) / σ_k(e) = p_i P(N without i = k−1) / P(N = k)``, (…, n)."""
    x, _, absent = _centred(scores, k, 1.0)
    trials = _trials(x, _tilt(x, k))
    count, without = _leave_one_out(trials, k)
    result = trials[..., 1] * without[..., 1] / count.masked_fill(absent, 1.0)
    return torch.where(absent, (scores != -inf).to(result.dtype), result)


def _centred(scores: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(s − s_[k]) / temperature``, the threshold, and where fewer than k classes are present."""
    heads = scores.detach().topk(k, dim=-1).values
    lowest = heads[..., -1:]
    absent = (lowest == -inf) & ~heads[..., :1].isnan()
    threshold = lowest.masked_fill(lowest == -inf, 0.0)
    return (scores - threshold) / temperature, threshold, absent


def _mask_certain(gap: Tensor, label: Tensor, absent: Tensor, k: int) -> Tensor:
    """Where fewer than k rivals are present: −inf for a present label, else −label/k, +inf."""
    present = absent & (label > -inf)
    missing = absent & (label == -inf)
    return torch.where(missing, -label / k, gap.masked_fill(present, -inf))


@torch.no_grad()
def _tilt(x: Tensor, k: int) -> Tensor:
    """Solve ``Σ_i sigmoid(x_i − ρ) = k − 1/2`` for scores whose k-th largest is 0, (…, 1)."""
    size = torch.ones_like(x[..., :1])
    low = -(2.0 * k * size).log()
    high = (2.0 * (x.shape[-1] - k + 1) * size).log()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = torch.sigmoid(x - middle).sum(-1, keepdim=True) > k - 0.5
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _trials(x: Tensor, tilt: Tensor) -> Tensor:
    """The pairs (1 − p_i, p_i), (…, n, 2)."""
    return torch.stack([torch.sigmoid(tilt - x), torch.sigmoid(x - tilt)], -1)


def log_esp(scores: Tensor, k: int) -> Tensor:
    """``log σ_0 … log σ_k`` of ``exp(scores)``, (…, k + 1), in log space; log 0 has gradient 0."""
    factors = torch.stack((torch.zeros_like(scores), scores), -1)  # 1 + e_i X
    return _product_tree(factors, k + 1, _log_product, zero=-inf, one=0.0)


def first_coefficients(factors: Tensor, count: int) -> Tensor:
    """First coefficients of a product of polynomials, (…, n, m) to (…, count)."""
    return _product_tree(factors, count, _product, zero=0.0, one=1.0)


def _product_tree(
    factors: Tensor,
    count: int,
    product: Callable[[Tensor, Tensor, int], Tensor],
    zero: float,
    one: float,
) -> Tensor:
    """Multiply polynomials pairwise until one is left, every product truncated to ``count``."""
    while factors.shape[-2] > 1:
        left, right = _pairs(factors, zero, one)
        factors = product(left, right, min(count, 2 * factors.shape[-1] - 1))
    result = factors[..., 0, :count]
    return F.pad(result, (0, count - result.shape[-1]), value=zero)


def _pairs(factors: Tensor, zero: float, one: float) -> tuple[Tensor, Tensor]:
    """Every other polynomial, and its neighbour: the last of an odd number is paired with 1."""
    if factors.shape[-2] % 2:
        neutral = torch.full_like(factors[..., :1, :1], one)
        neutral = F.pad(neutral, (0, factors.shape[-1] - 1), value=zero)
        factors = torch.cat([factors, neutral], -2)
    return factors[..., 0::2, :], factors[..., 1::2, :]


def _product(left: Tensor, right: Tensor, length: int) -> Tensor:
    """The first coefficients of products of polynomials, sums of positive terms."""
    rows, columns = left.shape[-1], right.shape[-1]
    terms = left.unsqueeze(-1) * right.unsqueeze(-2)
    power = torch.arange(max(rows, columns), device=left.device)
    terms = terms.masked_fill(power[:rows].unsqueeze(1) + power[:columns] >= length, 0.0)
    # Read with rows one entry shorter, row i is shifted by i: columns are powers.
    sheared = F.pad(terms, (0, length + 1 - columns)).flatten(-2)[..., : rows * length]
    return sheared.reshape(*sheared.shape[:-1], rows, length).sum(-2)


def _log_product(left: Tensor, right: Tensor, length: int) -> Tensor:
    """The same of logarithms, by log-sum-exp; gradient 0 where all terms are −inf."""
    size = left.shape[-1]
    right = F.pad(right, (size - 1, length - size), value=-inf)
    terms = left.flip(-1).unsqueeze(-2) + right.unfold(-1, size, 1)
    largest = terms.detach().amax(-1)
    absent = largest == -inf
    largest = largest.masked_fill(absent, 0.0)
    total = (terms - largest.unsqueeze(-1)).exp().sum(-1)
    return (total.masked_fill(absent, 1.0).log() + largest).masked_fill(absent, -inf)


def _leave_one_out(trials: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """P(N = k), (…, 1), and without each class P(N = k) and P(N = k−1), (…, n, 2).

    Down the tree, the product of all factors outside a node is that outside its parent times its
    sibling: positive terms only.
    """
    levels, factors = [], trials
    while factors.shape[-2] > 1:
        levels.append((factors.shape[-2], *_pairs(factors, 0.0, 1.0)))
        factors = _product(*levels[-1][1:], min(k + 1, 2 * factors.shape[-1] - 1))
    outside = torch.ones_like(factors[..., :1])
    for nodes, left, right in reversed(levels):
        length = min(k + 1, outside.shape[-1] + left.shape[-1] - 1)
        both = [_product(sibling, outside, length) for sibling in (right, left)]
        outside = torch.stack(both, -2).flatten(-3, -2)[..., :nodes, :]
    count, without = (F.pad(p, (0, k + 1 - p.shape[-1])) for p in (factors[..., 0, :], outside))
    return count[..., k:], torch.stack([without[..., k], without[..., k - 1]], -1)
