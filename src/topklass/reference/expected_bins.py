r"""The expected k-th largest score with its gradient, by moments of bins: for eager calls.

The same integral as in :mod:`topklass.reference.expected`, which proves it. The k largest scores of
a row, the *heads*, or 2k for long lists, are treated one by one. All others go into bins: a class
adds the powers of its place in its bin to the moments of the bin. A matrix product makes them sums
over classes at each node, see :mod:`topklass.reference.expected_tables`.

The chance of fewer than k scores above a node is the sum of the first k coefficients of

    Π_tail (1 − p_i) · Q(rX) · Π_heads (1 − p_i + p_i X),

with Q from power sums by Newton's identities, and r ≥ 1 near the odds of the k-th score. It is
computed as a polynomial of Y = rX: then no coefficient overflows. The gradient goes the same way
back. That of a class in a bin is a polynomial of its place there.
"""

from math import inf, nan, pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._transforms import can_read_values
from topklass.reference.expected_tables import TERMS, WIDTH, Tables, tables
from topklass.reference.power_sums import kept_out

LARGEST_K = 64
"""Its tables take 20 MB."""
BLOCK_ELEMENTS = 2**17
"""Classes, or coefficients, of a block of rows: it stays in the processor's cache."""
LONGEST_SUM = 256
"""Terms of a sum in float32."""


def serves(scores: Tensor, k: int) -> bool:
    """Whether the expectation of (R, n) scores is taken here: eager calls in single precision."""
    return (
        can_read_values(scores)
        and scores.dtype != torch.float64
        and scores.numel() > 0
        and k <= LARGEST_K
    )


def expected_topk(
    scores: Tensor, k: int, epsilon: float, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """The expected k-th largest of (R, n) scores, (R), and its gradient, (R, n) or empty."""
    rows, classes = scores.shape
    fixed = tables(1 << (classes - 1).bit_length(), k)
    value = scores.new_empty(rows, dtype=torch.float32)
    slope = scores.new_empty((rows if differentiate else 0, classes), dtype=torch.float32)
    size = max(1, BLOCK_ELEMENTS // max(classes, k * len(fixed.nodes)))
    for start in range(0, rows, size):
        block = slice(start, start + size)
        _expected_block(scores[block].float(), k, epsilon, fixed, value[block], slope[block])
    return value, slope


def _expected_block(
    scores: Tensor, k: int, epsilon: float, fixed: Tables, value: Tensor, slope: Tensor
) -> None:
    """Write the expected k-th largest of some rows, and the gradient where there is room for it."""
    heads, places = scores.topk(kept_out(k, scores.shape[1]), dim=1)
    kth, spoilt = heads[:, k - 1 : k], heads[:, :1].isnan()
    unknown = spoilt | kth.isinf()
    some_unknown = bool(unknown.any())
    if some_unknown:
        scores, heads = scores.masked_fill(unknown, 0.0), heads.masked_fill(unknown, 0.0)
    center = heads[:, k - 1 : k]
    depth = scores.scatter(1, places, -inf).neg_().add_(center).div_(WIDTH * epsilon)
    number = depth.clamp_(max=fixed.bins).round()
    place = torch.sub(number, depth, out=depth).mul_(2)
    number = number.long()
    sums = _moments(number, place, fixed.bins) @ fixed.sums
    z = ((heads - center).double() / epsilon).t()
    shift, of_heads, of_sums = integral(z, sums, fixed, slope.numel() > 0)
    value.copy_(center.squeeze(1) + epsilon * shift)
    if some_unknown:
        hard = kth.masked_fill(spoilt, nan)
        value.copy_(torch.where(unknown, hard, value.unsqueeze(1)).squeeze(1))
    if slope.numel() == 0:
        return
    of_moments = torch.bmm(of_sums, fixed.sums.transpose(1, 2)).sum(0)
    _write_polynomials(of_moments.view(len(scores), -1, TERMS), number, place, slope)
    slope.scatter_(1, places, of_heads.t().float())
    if some_unknown:
        slope.masked_fill_(unknown, 0.0).masked_fill_(spoilt, nan)


def _moments(number: Tensor, place: Tensor, bins: int) -> Tensor:
    """``Σ f^m`` of the classes in each bin, (R, bins·TERMS).

    Classes below the last bin do not count. Neighbours add to copies of the bins: the sums of many
    classes need not wait for each other, and keep their digits.
    """
    rows, classes = place.shape
    copies = max(4, classes // LONGEST_SUM)
    copy = torch.arange(classes, device=place.device).remainder_(copies).mul_(bins + 1)
    moments = place.new_zeros(TERMS, rows, copies * (bins + 1))
    where, power = number + copy, torch.ones_like(place)
    for each in moments:
        each.scatter_add_(1, where, power)
        power.mul_(place)
    moments = moments.view(TERMS, rows, copies, -1).sum(2, dtype=torch.float64)
    return moments[..., :bins].permute(1, 2, 0).flatten(1)


def _write_polynomials(of_moments: Tensor, number: Tensor, place: Tensor, out: Tensor) -> None:
    """``Σ_m c_m df^m/dz`` of each class, with the coefficients (R, bins, TERMS) of its bin."""
    degree = torch.arange(TERMS, dtype=torch.float64, device=place.device) * (2 / WIDTH)
    padded = F.pad(of_moments * degree, (0, 0, 0, 1)).float()
    lowest, *others = padded.permute(2, 0, 1).contiguous()[1:]
    out.zero_()
    for coefficient in reversed(others):
        out.add_(coefficient.gather(1, number)).mul_(place)
    out.add_(lowest.gather(1, number))


def integral(
    z: Tensor, sums: Tensor, fixed: Tables, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The expectation in units of noise, (R), and its derivatives by heads and sums.

    Args:
        z: heads, the k largest first, (H, R).
        sums: of the tail at all nodes, (k, R, A).
        fixed: the tables.
        differentiate: whether derivatives are wanted; else they are empty.
    """
    k = len(sums)
    degree = torch.arange(k, dtype=torch.float64, device=z.device).view(k, 1, 1)
    scale = fixed.log_scale.exp()
    last = scale ** (degree - k)
    x = z.unsqueeze(2) - fixed.nodes
    do_not = torch.special.erfc(x * sqrt(0.5)).div_(2)
    happen = 1 - do_not
    do_not[:k].mul_(scale)
    happen[k:].div_(scale)
    tail = newton_scaled(sums)
    counts, before = tail, []
    for p, q in zip(happen, do_not, strict=True):
        before.append(counts)
        counts = times(counts, q, p)
    shift = fixed.nodes[0] + (1 - (counts * last).sum(0)) @ fixed.weights
    if not differentiate:
        return shift, z[:0], sums[:0]
    density = x.square_().div_(-2).exp_().mul_(fixed.weights / sqrt(2 * pi))
    density[k:].div_(scale)
    slopes, of_heads = last.expand_as(sums), torch.empty_like(z)
    for i in range(len(z) - 1, -1, -1):
        # The chance that exactly k − 1 of the others are above.
        others = (slopes * before[i]).sum(0).mul_(scale)
        others -= (slopes[1:] * before[i][:-1]).sum(0)
        torch.sum(others.mul_(density[i]), 1, out=of_heads[i])
        slopes = times(slopes, do_not[i], happen[i], up=False)
    return shift, of_heads, newton_scaled_backward(tail, slopes * -fixed.weights)


def times(polynomial: Tensor, constant: Tensor, linear: Tensor, up: bool = True) -> Tensor:
    """Coefficients (k, …) times ``constant + linear·X``, or ``linear/X``, without those beyond."""
    result = polynomial * constant
    to, of = (result[1:], polynomial[:-1]) if up else (result[:-1], polynomial[1:])
    to.addcmul_(of, linear)
    return result


def newton_scaled(sums: Tensor) -> Tensor:
    """``exp(s_0)`` times the elementary symmetric polynomials of power sums s_1, …, (k, …)."""
    result = torch.empty_like(sums)
    torch.exp(sums[0], out=result[0])
    for j in range(1, len(sums)):
        total = result[j].zero_()
        for i in range(1, j + 1):
            total.addcmul_(result[j - i], sums[i], value=(-1) ** (i - 1) / j)
    return result


def newton_scaled_backward(polynomials: Tensor, slopes: Tensor) -> Tensor:
    """Derivatives by the sums; that of polynomial j by s_i is ``(−1)^(i−1)/i`` times the j−i-th."""
    k = len(slopes)
    terms = [(slopes[i:] * polynomials[: k - i]).sum(0) for i in range(k)]
    return torch.stack([terms[0], *((-1) ** (i - 1) / i * terms[i] for i in range(1, k))])
