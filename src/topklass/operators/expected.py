"""The k-th largest score under noise, in expectation: noise without chance."""

from functools import partial
from math import inf, nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from topklass._checks import check_number, check_scores_and_k, check_temperature
from topklass._transforms import can_look
from topklass.dispatch import LARGEST_RANK, kernel_serves
from topklass.reference.limits import working_dtype
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
WINDOW = (DOWN, UP, DOWN + FAR)
"""For the kernel."""
SECTIONS, ROUNDS = 8, 3
"""How the window is found: in so many parts, so many times."""


def expected_topk(scores: Tensor, k: int, epsilon: float = 1.0) -> Tensor:
    r"""Expectation over noise of the k-th largest perturbed score.

    .. math:: \mathrm{top}_{k,\epsilon}(s) = \mathbb E\,(s + \epsilon Z)_{(k)}
        = a + \int_a^\infty P(N(t) \ge k)\,dt, \qquad Z \sim \mathcal N(0, I)

    (Garcin et al. 2022, Definition 3.2) for any a that the k-th largest surely exceeds, where N(t),
    the number of perturbed scores above t, counts independent events of probabilities
    :math:`\Phi((s_i - t) / \epsilon)`. It is what :func:`noised_topk` estimates, without variance.
    Its gradient is the probability of each class to be the k-th largest. The integral is taken
    numerically, within 1e-4·ε, and the gradient within 1e-4; derivatives of any order exist.

    Only classes within 15·ε of the k-th score matter. Where these are few it takes little time; on
    the CPU 2 to 60 times that of :func:`noised_topk` with ten samples. On a CUDA device it is a
    kernel up to k = 64; there beyond that, and on the CPU under ``torch.compile``, plain operations
    go over all classes.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: rank, 1 ≤ k ≤ n.
        epsilon: size of the noise; 0 gives the k-th largest score itself.

    Returns:
        (…), the scores' shape without its last dimension.

    Example:
        The larger of two equal scores, under noise: 1/√π on average.

        >>> import torch
        >>> scores = torch.zeros(2, requires_grad=True)
        >>> value = expected_topk(scores, k=1)
        >>> value.detach()
        tensor(0.5642)
        >>> torch.autograd.grad(value, scores)[0]
        tensor([0.5000, 0.5000])
    """
    check_scores_and_k(scores, k)
    check_number("epsilon", epsilon, positive=False)
    if epsilon:
        check_temperature(epsilon, "epsilon")
    rows = scores.reshape(-1, scores.shape[-1])

    def reference(rows: Tensor) -> Tensor:
        return _by_integrals(rows.to(working_dtype(rows.dtype)), k, epsilon)

    if epsilon and kernel_serves(rows, k, largest=LARGEST_RANK):
        from topklass.kernels.expected import expected_topk as by_kernel

        result = by_kernel(rows, k, epsilon, WINDOW, reference)
    else:
        result = reference(rows)
    return result.reshape(scores.shape[:-1]).to(scores.dtype)


def _by_integrals(rows: Tensor, k: int, epsilon: float) -> Tensor:
    """The same of (R, n) scores, (R)."""
    heads, places = rows.topk(k, dim=1)
    kth = heads[:, -1:].masked_fill(heads[:, :1].isnan(), nan)
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
    if not can_look(scores):
        return scores
    count = int((scores >= limits).sum(1).amax())
    if 2 * count > scores.shape[1]:
        return scores
    return scores.topk(count, dim=1, sorted=False).values


def without_certain(heads: Tensor, uncertain: Tensor) -> Tensor:
    """The k largest scores without those that are above the k-th in any case, in every row."""
    if not can_look(heads) or heads.shape[1] == 1:
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
