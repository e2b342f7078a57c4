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

from torch import Tensor

from topklass._checks import check_scores_and_k
from topklass.reference import tree


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
        >>> import torch
        >>> log_esp_tree(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).exp().round()
        tensor([ 1.,  6., 11.,  6.])

    Reference:
        Berrada et al. (2018), Algorithm 1, eq. 11-14 and Appendix B.2.1.
    """
    check_scores_and_k(scores, k)
    return tree.log_esp(scores, k)
