r"""Elementary symmetric polynomials by a tree of positive products: any k, to the last digit.

**Problem.** Power sums lose digits as k grows. A product tree has positive terms only, but its
coefficients overflow.

**Closed form.** Tilt: for any ρ, with ``p_i = sigmoid(x_i − ρ)`` and N the number of successes of
independent trials with these probabilities (a Poisson-binomial count),

    σ_j(e) = exp(jρ) · Π_i (1 + exp(x_i − ρ)) · P(N = j).

Choose ρ such that N has mean k − 1/2. Then P(N = k) and P(N = k−1) stand at the mode, every
number is a probability, and ``log σ_k − log σ_{k−1} = ρ + log P(N = k) − log P(N = k−1)``.
Leaving class c out is a derivative: P(N = k) is linear in the pair (1 − p_c, p_c), with slopes
P(N without c = k) and P(N without c = k−1), and reverse mode through positive products adds
positive terms only.
"""

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

BISECTIONS = 20


def smooth_gap(scores: Tensor, labels: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\y) − τ log σ_{k−1}(e\y) − s_y/k`` for one label y a row, (…, 1)."""
    label = scores.gather(-1, labels)
    x, threshold, absent = _centred(scores.scatter(-1, labels, -inf), k, k * tau)
    tilt = _tilt(x, k)
    count = _counts(_trials(x, tilt), k).masked_fill(absent, 1.0)
    change = (count[..., k:] / count[..., k - 1 : k]).log()
    return _mask_certain((threshold - label) / k + tau * (tilt + change), label, absent)


def smooth_gap_every_label(scores: Tensor, k: int, tau: float) -> Tensor:
    r"""``τ log σ_k(e\c) − τ log σ_{k−1}(e\c) − s_c/k`` for every class c, (…, n).

    One tilt serves the k largest classes, whose absence lowers the threshold to the (k + 1)-th
    score, another serves the rest.
    """
    index = scores.topk(k, dim=-1).indices
    leading = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, True)
    gaps = []
    for mean in (k, k + 1):
        x, threshold, absent = _centred(scores, mean, k * tau)
        tilt = _tilt(x, mean)
        _, without = _leave_one_out(_trials(x, tilt), k)
        used = (leading == (mean == k + 1)) & ~absent & (scores != -inf)
        slopes = without.masked_fill(~used.unsqueeze(-1), 1.0)
        change = (slopes[..., 0] / slopes[..., 1]).log()
        gaps.append((threshold - scores) / k + tau * (tilt + change))
    return _mask_certain(torch.where(leading, gaps[1], gaps[0]), scores, absent)


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


def _mask_certain(gap: Tensor, label: Tensor, absent: Tensor) -> Tensor:
    """Where fewer than k rivals are present: −inf for a present label, +inf for an absent one."""
    present = absent & (label > -inf)
    missing = absent & (label == -inf)
    return gap.masked_fill(present, -inf).masked_fill(missing, inf)


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


def _counts(trials: Tensor, k: int) -> Tensor:
    """P(N = 0) … P(N = k), (…, k + 1): multiply the polynomials pairwise until one is left."""
    polynomials = trials
    while polynomials.shape[-2] > 1:
        if polynomials.shape[-2] % 2:
            one = torch.zeros_like(polynomials[..., :1, :])
            one[..., 0] = 1.0
            polynomials = torch.cat([polynomials, one], -2)
        polynomials = _multiply(polynomials[..., ::2, :], polynomials[..., 1::2, :], k)
    counts = polynomials.squeeze(-2)
    return F.pad(counts, (0, k + 1 - counts.shape[-1]))


def _multiply(a: Tensor, b: Tensor, k: int) -> Tensor:
    """The product of two polynomials of equal degree, up to the power k."""
    size = a.shape[-1]
    width = min(2 * size - 1, k + 1)
    terms = a.unsqueeze(-1) * b.unsqueeze(-2)
    power = torch.arange(size, device=a.device)
    terms = terms.masked_fill(power.unsqueeze(1) + power >= width, 0.0)
    # Read with rows one entry shorter, row i is shifted by i: columns are powers.
    sheared = F.pad(terms, (0, width + 1 - size)).flatten(-2)[..., : size * width]
    return sheared.reshape(*sheared.shape[:-1], size, width).sum(-2)


def _leave_one_out(trials: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """P(N = k), (…, 1), and without each class P(N = k) and P(N = k−1), (…, n, 2)."""
    count, pull_back, *_ = torch.func.vjp(lambda leaves: _counts(leaves, k)[..., k:], trials)
    (slopes,) = pull_back(torch.ones_like(count))
    return count, slopes
