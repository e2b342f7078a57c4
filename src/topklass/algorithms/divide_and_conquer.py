"""Elementary symmetric polynomials by divide and conquer, in log space.

Problem: evaluate log σ_j(e), j = 0..k, for e = exp(scores), in few parallel steps and without
overflow.

Closed form: they are the first coefficients of one polynomial,

    Π_i (1 + e_i X) = Σ_j σ_j(e) X^j,

multiplied out on a binary tree, every product truncated at degree k (Algorithm 1). The paper
writes this polynomial as σ_n(e) Π_i (X + 1/e_i) (eq. 13-14): each factor e_i (X + 1/e_i) is
1 + e_i X, so the two are the same product. The form used here needs no division by e_i, hence
allows e_i = 0, and no final multiplication by Π e_i.

A product of numbers is a sum of logarithms, a sum is a log-sum-exp (Appendix B.2.1).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import check_scores_and_k


def log_esp_tree(scores: Tensor, k: int) -> Tensor:
    """Logarithms of the elementary symmetric polynomials, by a tree of polynomial products.

    log σ_j(exp(scores)),  j = 0..k,  in O(kn) operations on O(log n) levels. All terms are
    positive, so nothing cancels: the result is exact up to rounding for scores of any size. It
    can be differentiated by autograd any number of times ("DC (AD)" in Table 4); a coefficient
    which is log 0 has gradient 0.

    Args:
        scores: tensor (..., n); a score of -inf is an absent class.
        k: highest degree, 1 <= k <= n.

    Returns:
        Tensor (..., k + 1); -inf where there are fewer than j classes.

    Example:
        >>> log_esp_tree(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).exp().round()
        tensor([ 1.,  6., 11.,  6.])

    Reference:
        Berrada et al. (2018), Algorithm 1, eq. 11-14 and Appendix B.2.1.
    """
    check_scores_and_k(scores, k)
    polynomials = torch.stack((torch.zeros_like(scores), scores), dim=-1)  # 1 + e_i X
    while polynomials.shape[-2] > 1:
        if polynomials.shape[-2] % 2 == 1:
            polynomials = _append_constant_one(polynomials)
        left, right = polynomials[..., 0::2, :], polynomials[..., 1::2, :]
        polynomials = _log_product(left, right, max_degree=k)
    return polynomials.squeeze(-2)


def _append_constant_one(polynomials: Tensor) -> Tensor:
    """Append the polynomial 1, which is what an absent class contributes."""
    one = torch.full_like(polynomials[..., :1, :], -math.inf)
    one[..., 0] = 0.0
    return torch.cat((polynomials, one), dim=-2)


def _log_product(left: Tensor, right: Tensor, max_degree: int) -> Tensor:
    """Multiply polynomials of equal degree d, given and returned as log coefficients.

    Coefficient j of the product is log Σ_i exp(left_i + right_{j-i}); sliding a window of d + 1
    coefficients over ``right``, against ``left`` reversed, lines the two up for all j at once.
    """
    degree = left.shape[-1] - 1
    product_degree = min(2 * degree, max_degree)
    right = F.pad(right, (degree, product_degree - degree), value=-math.inf)
    terms = left.flip(-1).unsqueeze(-2) + right.unfold(-1, degree + 1, 1)
    return _logsumexp(terms)


def _logsumexp(terms: Tensor) -> Tensor:
    """Log-sum-exp over the last dimension, with gradient 0 (not NaN) where all terms are -inf."""
    largest = terms.detach().amax(dim=-1)
    absent = largest.isneginf()
    largest = largest.masked_fill(absent, 0.0)
    total = (terms - largest.unsqueeze(-1)).exp().sum(dim=-1)
    return (total.masked_fill(absent, 1.0).log() + largest).masked_fill(absent, -math.inf)
