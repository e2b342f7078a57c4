"""Elementary symmetric polynomials by summation, in linear space.

Problem: evaluate σ_j(e), j = 0..k, for e = exp(scores), one class after the other.

Closed form: a j-subset of the first i classes either leaves class i out or holds it (Algorithm 3),

    σ_j(e_1..e_i) = σ_j(e_1..e_{i-1}) + e_i σ_{j-1}(e_1..e_{i-1}).

For positive e every operation is well conditioned; what fails is the range. The values overflow
as soon as exp(scores) or a product of k of them does (Table 5). Compensation recovers the
rounding errors, not the range.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_scores_and_k


def esp_summation(scores: Tensor, k: int) -> Tensor:
    """Elementary symmetric polynomials by the summation algorithm.

    σ_j(e_1..e_i) = σ_j(e_1..e_{i-1}) + e_i σ_{j-1}(e_1..e_{i-1}),  e = exp(scores), in n steps of
    O(k) operations. Where the values leave the range of the dtype the result is inf (or NaN, once
    inf has met an absent class), as in Table 5 of the paper.

    Args:
        scores: tensor (..., n); a score of -inf is an absent class.
        k: highest degree, 1 <= k <= n.

    Returns:
        Tensor (..., k + 1): σ_0 = 1, σ_1, ..., σ_k themselves, not their logarithms.

    Example:
        >>> esp_summation(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).round()
        tensor([ 1.,  6., 11.,  6.])

    Reference:
        Berrada et al. (2018), Algorithm 3 (Appendix B.3.1).
    """
    check_scores_and_k(scores, k)
    sigma = torch.ones_like(scores[..., :1])
    for e_i in scores.exp().unsqueeze(-1).unbind(-2):  # each of shape (..., 1)
        without_i = F.pad(sigma, (0, 1))
        with_i = F.pad(e_i * sigma, (1, 0))
        sigma = (without_i + with_i)[..., : k + 1]
    return sigma


def esp_summation_compensated(scores: Tensor, k: int) -> Tensor:
    """Elementary symmetric polynomials by summation with compensated rounding errors.

    The recurrence of :func:`esp_summation`, in which every product and every sum also yields its
    exact rounding error; the errors follow a recurrence of their own and are added at the end:

        c_j ← c_j + e_i c_{j-1} + (error of the product) + (error of the sum),    result σ_j + c_j.

    The result is that of twice the working precision, rounded once, for e = exp(scores) as
    rounded to the dtype. It overflows where :func:`esp_summation` does, and a factor of about
    2^12 (float32) or 2^27 (float64) earlier, where splitting a factor in two overflows.

    Args:
        scores: tensor (..., n); a score of -inf is an absent class.
        k: highest degree, 1 <= k <= n.

    Returns:
        Tensor (..., k + 1): σ_0 = 1, σ_1, ..., σ_k; inf or NaN where out of range.

    Example:
        >>> esp_summation_compensated(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).round()
        tensor([ 1.,  6., 11.,  6.])

    Reference:
        Jiang, Graillat, Barrio and Yang (2016), "Accurate, validated and fast evaluation of
        elementary symmetric functions and its application"; Berrada et al. (2018), Appendix B.3.3,
        who leave compensation aside because it does not help stability.
    """
    check_scores_and_k(scores, k)
    sigma = torch.ones_like(scores[..., :1])
    correction = torch.zeros_like(sigma)
    leave_out, take = partial(F.pad, pad=(0, 1)), partial(F.pad, pad=(1, 0))
    for e_i in scores.exp().unsqueeze(-1).unbind(-2):  # each of shape (..., 1)
        product, product_error = _two_product(e_i, sigma)
        sigma, sum_error = _two_sum(leave_out(sigma), take(product))
        correction = leave_out(correction) + (take(e_i * correction + product_error) + sum_error)
        sigma, correction = sigma[..., : k + 1], correction[..., : k + 1]
    return sigma + correction


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return fl(a + b) and its exact rounding error (Knuth)."""
    total = a + b
    b_seen = total - a
    a_seen = total - b_seen
    return total, (a - a_seen) + (b - b_seen)


def _two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return fl(a · b) and its exact rounding error, barring overflow and underflow (Dekker)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Split a into two parts of half as many significant bits each (Veltkamp)."""
    significant_bits = 1 - int(math.log2(torch.finfo(a.dtype).eps))
    scaled = a * (2.0 ** math.ceil(significant_bits / 2) + 1.0)
    high = scaled - (scaled - a)
    return high, a - high
