"""The algorithms of Berrada et al. (2018), for comparison.

All of them evaluate elementary symmetric polynomials of ``e = exp(scores)``,

    σ_j(e) = Σ_{i_1 < ... < i_j} e_{i_1} ... e_{i_j},      σ_0 = 1,

over the last dimension, for j = 0..k. A score of -inf is an absent class. The losses of topklass
use none of them but :func:`log_esp_tree`, for large k.

====================================  ==========================  ===============================
Function                              Paper                       Gradient
====================================  ==========================  ===============================
:func:`log_esp_tree`                  Algorithm 1, in log space   autograd, any order
:func:`log_esp_recursive`             Algorithms 1 and 2          eq. 18 and 60, first order only
:func:`esp_summation`                 Algorithm 3                 autograd, any order
:func:`esp_summation_compensated`     Algorithm 3, compensated    autograd, any order
:func:`smooth_topk_loss_with`         eq. 10                      that of the algorithm given
:func:`smooth_topk_loss_uncentred`    eq. 10 by Algorithm 3       autograd, any order
====================================  ==========================  ===============================
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from topklass._checks import check_scores_and_k
from topklass.reference import tree


def log_esp_tree(scores: Tensor, k: int) -> Tensor:
    """Logarithms of σ_0..σ_k, (..., k + 1), by a tree of polynomial products (Algorithm 1).

    They are the first coefficients of Π_i (1 + e_i X). The paper writes σ_n(e) Π_i (X + 1/e_i)
    (eq. 13-14), which is the same; this form allows e_i = 0. All terms are positive, so nothing
    cancels. A coefficient that is log 0 has gradient 0.

    Example:
        >>> log_esp_tree(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).exp().round()
        tensor([ 1.,  6., 11.,  6.])
    """
    check_scores_and_k(scores, k)
    return tree.log_esp(scores, k)


def log_esp_recursive(scores: Tensor, k: int, order: int | None = None) -> Tensor:
    """Logarithms of σ_0..σ_k, (..., k + 1), with the paper's backward pass, differentiable once.

    Forward: :func:`log_esp_tree` up to degree k + p. Backward (eq. 18), in log space:

        ∂ log σ_j / ∂ scores_i = e_i δ_{j,i} / σ_j,  δ_{1,i} = 1,  δ_{j,i} = σ_{j-1} - e_i δ_{j-1,i}

    The subtraction cancels when e_i dominates (Observation 1). There, it is read backwards p + 1
    times, and the last, small, term is left out (eq. 60-62):

        δ_{k,i} ≈ Σ_{m=0..p} (-1)^m σ_{k+m} / e_i^{m+1}.

    The paper prints e_i^m, which agrees neither with its proof nor with eq. 61. It does not say
    when to switch, either. With ρ = σ_{j-1} / (e_i δ_{j-1,i}) - 1, the relative error is about u/ρ
    for the recursion, where u is that of the terms subtracted, and at most ρ^{p+1} for the
    approximation, by Newton's inequalities. The smaller is taken; u is estimated along with δ.

    Args:
        scores: (..., n).
        k: highest degree, 1 <= k <= n.
        order: p >= 0; by default max(1, round(0.2 k)), the paper's rule of thumb.

    Example:
        >>> scores = torch.tensor([1.0, 2.0, 3.0]).log().requires_grad_()
        >>> log_esp_recursive(scores, k=2)[2].exp().backward()
        >>> scores.grad.round()  # e_i (6 - e_i)
        tensor([5., 8., 9.])
    """
    check_scores_and_k(scores, k)
    order = max(1, round(0.2 * k)) if order is None else order
    log_sigma: Tensor = _LogESPRecursive.apply(scores, k, order)
    return log_sigma


def derivatives_recursive(e: Tensor, sigma: Tensor) -> Tensor:
    """δ_{j,i} = ∂σ_j/∂e_i at [..., i, j - 1] by Algorithm 2, in linear space, unprotected.

    Example:
        >>> derivatives_recursive(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 6.0, 11.0]))
        tensor([[1., 5.],
                [1., 4.],
                [1., 3.]])
    """
    derivatives = [torch.ones_like(e)]
    for j in range(2, sigma.shape[-1]):
        derivatives.append(sigma[..., j - 1, None] - e * derivatives[-1])
    return torch.stack(derivatives, dim=-1)


class _LogESPRecursive(torch.autograd.Function):
    """Algorithm 1 forward, Algorithm 2 backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor, k: int, order: int) -> Tensor:
        log_sigma = log_esp_tree(scores, min(k + order, scores.shape[-1]))
        ctx.save_for_backward(scores, log_sigma)
        ctx.k, ctx.order = k, order  # type: ignore[attr-defined]
        return log_sigma[..., : k + 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        scores, log_sigma = ctx.saved_tensors  # type: ignore[attr-defined]
        k, order = ctx.k, ctx.order  # type: ignore[attr-defined]
        log_sigma = log_sigma.unsqueeze(-2).unbind(-1)  # log_sigma[j] broadcasts against scores
        grad_scores = torch.zeros_like(scores)
        log_delta = torch.zeros_like(scores)  # δ_{1,i} = 1
        error = torch.zeros_like(scores)
        for j in range(1, k + 1):
            if j > 1:
                log_delta, error = _next_derivative(scores, log_sigma, log_delta, error, j, order)
            grad_j = grad_output[..., j, None] * (scores + log_delta - log_sigma[j]).exp()
            grad_scores += grad_j.masked_fill(log_sigma[j].isneginf(), 0.0)
        return grad_scores, None, None


def _next_derivative(
    scores: Tensor,
    log_sigma: tuple[Tensor, ...],
    log_previous: Tensor,
    previous_error: Tensor,
    j: int,
    order: int,
) -> tuple[Tensor, Tensor]:
    """Step from log δ_{j-1,i} and its error to log δ_{j,i} and its error, by eq. 18 or eq. 60."""
    log_gap = log_sigma[j - 1] - (scores + log_previous)
    recursion = log_sigma[j - 1] + (-torch.expm1(-log_gap)).clamp(min=0.0).log()

    series = torch.ones_like(scores)
    for m in range(1, min(order, len(log_sigma) - 1 - j) + 1):
        series += (-1) ** m * (log_sigma[j + m] - log_sigma[j] - m * scores).exp()
    approximation = log_sigma[j] - scores + series.clamp(min=0.0).log()

    # Rounding a logarithm L is an absolute error of |L| eps, hence a relative one of exp(L).
    size = torch.maximum(scores.abs(), log_sigma[j - 1].abs()).clamp(min=1.0)
    terms_error = (torch.finfo(scores.dtype).eps * size + previous_error).clamp(max=1.0)
    difference = torch.maximum(torch.expm1(log_gap), terms_error)
    recursion_error = terms_error / difference
    approximation_error = difference ** (order + 1)

    approximate = approximation_error < recursion_error
    return (
        torch.where(approximate, approximation, recursion),
        torch.where(approximate, approximation_error, recursion_error),
    )


def esp_summation(scores: Tensor, k: int) -> Tensor:
    """σ_0..σ_k, (..., k + 1), one class after the other (Algorithm 3), in linear space.

    σ_j(e_1..e_i) = σ_j(e_1..e_{i-1}) + e_i σ_{j-1}(e_1..e_{i-1}). Every operation is well
    conditioned; what fails is the range: the result is inf or NaN where it overflows (Table 5).

    Example:
        >>> esp_summation(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).round()
        tensor([ 1.,  6., 11.,  6.])
    """
    check_scores_and_k(scores, k)
    sigma = torch.ones_like(scores[..., :1])
    for e_i in scores.exp().unsqueeze(-1).unbind(-2):  # each of shape (..., 1)
        without_i = F.pad(sigma, (0, 1))
        with_i = F.pad(e_i * sigma, (1, 0))
        sigma = (without_i + with_i)[..., : k + 1]
    return sigma


def esp_summation_compensated(scores: Tensor, k: int) -> Tensor:
    """The same, with compensated rounding errors: as in twice the precision, rounded once.

    Every product and every sum also yields its exact rounding error (Jiang et al. 2016); the errors
    follow a recurrence of their own and are added at the end. Splitting a factor in two overflows a
    factor of about 2^12 (float32) or 2^27 (float64) earlier.

    Example:
        >>> esp_summation_compensated(torch.tensor([1.0, 2.0, 3.0]).log(), k=3).round()
        tensor([ 1.,  6., 11.,  6.])
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


def smooth_topk_loss_with(
    log_esp: Callable[[Tensor, int], Tensor],
    scores: Tensor,
    target: Tensor,
    k: int,
    tau: float = 1.0,
    margin: float = 1.0,
) -> Tensor:
    """Smooth top-k loss of each row, (N), with the given algorithm for log σ_0..σ_k.

    L = -τ logsigmoid(-(α/τ + log σ_k - log σ_{k-1} - s_y/(kτ))), of exp(s/(kτ)) without the label
    (eq. 10). The k-th largest rival is subtracted first, which makes σ_{k-1} and σ_k at least 1, so
    that summation lasts to a lower τ than in Table 5. With fewer than k rivals, the loss is 0.

    Example:
        >>> scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        >>> smooth_topk_loss_with(log_esp_tree, scores, torch.tensor([1]), k=2)
        tensor([1.0633])
    """
    label_score = scores.gather(1, target.unsqueeze(1)).squeeze(1)
    others = scores.scatter(1, target.unsqueeze(1), -math.inf)
    threshold = others.detach().topk(k, dim=1).values[:, -1]
    always_in_top_k = threshold.isneginf()
    threshold = threshold.masked_fill(always_in_top_k, 0.0)

    log_sigma = log_esp((others - threshold.unsqueeze(1)) / (k * tau), k)
    z = (k * margin + threshold - label_score) / (k * tau) + log_sigma[:, k] - log_sigma[:, k - 1]
    return -tau * F.logsigmoid(-z.masked_fill(always_in_top_k, -math.inf))


def smooth_topk_loss_uncentred(scores: Tensor, target: Tensor, k: int, tau: float = 1.0) -> Tensor:
    """The same by summation of ``exp(s/(kτ))`` as they are; inf or NaN where a sum overflows.

    Example:
        >>> smooth_topk_loss_uncentred(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([1]), k=2)
        tensor([1.0633])
    """
    x = scores / (k * tau)
    label = x.gather(1, target[:, None])[:, 0]
    log_sigma = esp_summation(x.scatter(1, target[:, None], -math.inf), k).log()
    z = 1 / tau + log_sigma[:, k] - log_sigma[:, k - 1] - label
    return -tau * F.logsigmoid(-z)
