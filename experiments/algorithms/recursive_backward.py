"""The custom backward pass: derivatives of the symmetric polynomials by a recursion on the degree.

Problem: given σ_0..σ_k from the forward pass, find δ_{j,i} = ∂σ_j/∂e_i = σ_{j-1}(e without e_i)
(eq. 15-16) for all i without going back through the tree.

Closed form (eq. 18, Algorithm 2):

    δ_{1,i} = 1,      δ_{j,i} = σ_{j-1} - e_i δ_{j-1,i}.

The subtraction cancels when e_i dominates (Observation 1). There, eq. 18 is read backwards
(eq. 62) p + 1 times and the last, small, term is left out:

    δ_{k,i} ≈ Σ_{m=0..p} (-1)^m σ_{k+m} / e_i^{m+1},   |error| = σ_{k+p}(e without e_i) / e_i^{p+1}.

This is eq. 60 corrected: the paper prints e_i^m in the denominator, which agrees neither with the
proof of its Proposition 6 nor with the error of eq. 61.

When to switch. The paper says: where the terms subtracted "have a very small relative difference",
without a number, and that the error of the approximation is hard to bound at run time. Both follow
from that difference, ρ = σ_{j-1} / (e_i δ_{j-1,i}) - 1 = δ_{j,i} / (e_i δ_{j-1,i}):

    relative error of the recursion:      about u/ρ, if the terms subtracted carry the error u;
    relative error of the approximation:  at most ρ^{p+1}, because the ratios σ_{j+1}/σ_j of
                                          positive numbers fall with j (Newton's inequalities).

The smaller is taken, that is, the approximation where ρ^{p+2} < u. As u grows from step to step
(eq. 59), it is estimated along with δ: a fixed threshold on ρ would miss a loss of digits that is
spread over several steps.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from experiments.algorithms.divide_and_conquer import log_esp_tree
from topklass._checks import check_scores_and_k


def log_esp_recursive(scores: Tensor, k: int, order: int | None = None) -> Tensor:
    """Logarithms of the elementary symmetric polynomials, with the paper's backward pass.

    Forward: :func:`log_esp_tree` up to degree k + p. Backward, in log space, for all j = 1..k:

        ∂ log σ_j / ∂ scores_i = e_i δ_{j,i} / σ_j,    δ_{j,i} = σ_{j-1} - e_i δ_{j-1,i},

    with the p-th order approximation of δ_{j,i} where that is estimated to be more accurate. The
    gradient itself cannot be differentiated; to autograd it is a constant or an error.

    Args:
        scores: tensor (..., n); a score of -inf is an absent class.
        k: highest degree, 1 <= k <= n.
        order: order p >= 0 of the approximation; by default max(1, round(0.2 k)), the paper's
            rule of thumb. From p = n - k on that of δ_{k,i} is exact.

    Returns:
        Tensor (..., k + 1); -inf where there are fewer than j classes.

    Example:
        >>> scores = torch.tensor([1.0, 2.0, 3.0]).log().requires_grad_()
        >>> log_esp_recursive(scores, k=2)[2].exp().backward()
        >>> scores.grad.round()  # e_i (6 - e_i)
        tensor([5., 8., 9.])

    Reference:
        Berrada et al. (2018), Algorithms 1 and 2, eq. 18, 60-62 and Appendix B.2.2.
    """
    check_scores_and_k(scores, k)
    if order is None:
        order = max(1, round(0.2 * k))
    if order < 0:
        raise ValueError(f"order must be at least 0, got order = {order}")
    log_sigma: Tensor = _LogESPRecursive.apply(scores, k, order)
    return log_sigma


def derivatives_recursive(e: Tensor, sigma: Tensor) -> Tensor:
    """Derivatives of the symmetric polynomials by Algorithm 2, in linear space, unprotected.

    δ_{1,i} = 1,  δ_{j,i} = σ_{j-1} - e_i δ_{j-1,i}.

    Args:
        e: positive numbers (..., n).
        sigma: σ_0..σ_k of ``e``, (..., k + 1), k >= 1.

    Returns:
        Tensor (..., n, k): δ_{j,i} = ∂σ_j/∂e_i at [..., i, j - 1].

    Example:
        >>> derivatives_recursive(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 6.0, 11.0]))
        tensor([[1., 5.],
                [1., 4.],
                [1., 3.]])

    Reference:
        Berrada et al. (2018), Algorithm 2, eq. 15-18.
    """
    k = sigma.shape[-1] - 1
    if k < 1:
        raise ValueError(f"sigma must hold σ_0..σ_k with k >= 1, got shape {tuple(sigma.shape)}")
    derivatives = [torch.ones_like(e)]
    for j in range(2, k + 1):
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
