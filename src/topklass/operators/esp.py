"""Elementary symmetric polynomials of exponentials, and what the losses need of them.

Chooses between power sums, their fused form and the tree of :mod:`topklass.reference`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from topklass._checks import check_scores_and_k, index_shape, to_rows
from topklass._transforms import is_eager, plain_backward
from topklass.dispatch import find_kernel
from topklass.reference import fused, power_sums, tree
from topklass.reference.row_blocks import RowFunction, by_rows


def log_esp(scores: Tensor, k: int, *, dim: int = -1) -> Tensor:
    r"""Logarithms of the elementary symmetric polynomials of ``exp(scores)``.

    .. math:: \log \sigma_j(e^{s}) = \log \sum_{|A| = j} \exp \sum_{i \in A} s_i, \quad j = 0..k

    (Berrada et al. 2018, section 4). Its gradient with respect to the scores holds the marginals of
    random j-subsets, see :func:`topk_marginals`.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: largest degree, 1 ≤ k ≤ n.
        dim: the class dimension.

    Returns:
        (…, k + 1), the degrees 0 to k in place of the classes; −inf for degrees above the number of
        present classes.

    Example:
        >>> import torch
        >>> log_esp(torch.tensor([1.0, 2.0, 3.0]).log(), k=2).exp().round(decimals=3)
        tensor([ 1.,  6., 11.])
    """
    return _operator("log_esp", power_sums.log_esp, tree.log_esp, scores, k, dim)


def topk_marginals(scores: Tensor, k: int, *, dim: int = -1) -> Tensor:
    r"""Probability that each class belongs to a random k-subset drawn by its scores.

    .. math:: \pi_i = \frac{e^{s_i} \sigma_{k-1}(e^{s_{\setminus i}})}{\sigma_k(e^s)}
        = \frac{\partial \log \sigma_k(e^s)}{\partial s_i}

    (Berrada et al. 2018, Appendix C, equations 63-66, where the printed σ_i is σ_k). With k = 1 it
    is the softmax. Its order is that of the scores: use it to average over crops or models. For the
    distribution that the smooth loss itself smooths over, pass ``scores / (k * tau)``.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: size of the subset, 1 ≤ k ≤ n.
        dim: the class dimension.

    Returns:
        Probabilities of the scores' shape that sum to k. A row with fewer than k present classes
        has 1 for each of them.

    Example:
        >>> import torch
        >>> topk_marginals(torch.tensor([0.0, 0.0, 0.0, 0.0]), k=2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    return _operator("topk_marginals", power_sums.marginals, tree.marginals, scores, k, dim)


def smooth_gap(scores: Tensor, labels: Tensor | None, k: int, tau: float) -> Tensor:
    r"""By how much the k-th largest rival exceeds the label, over k, smoothed.

    .. math:: g(s, y) = \tau \log \sigma_k(e_{\setminus y}) - \tau \log
        \sigma_{k-1}(e_{\setminus y}) - s_y / k, \qquad e = \exp(s / (k\tau))

    All of the smooth loss but its margin (Berrada et al. 2018, equation 10). In float64 for scores
    of any precision, since the loss adds a margin of the opposite sign.

    Args:
        scores: (R, n); −inf marks an absent class.
        labels: (R, m), or None for every class as the label.
        k: 1 ≤ k ≤ n − 1.
        tau: temperature, positive; as it vanishes, g becomes the hard gap over k.

    Returns:
        (R, m), or (R, n) for every label. −inf or nearly so where fewer than k classes are present
        besides the label, +inf where the label is absent.
    """
    if labels is None:
        power = power_sums.is_accurate(k, scores.dtype, scores.device)
        every = power_sums.smooth_gap_every_label if power else tree.smooth_gap_every_label
        return every(scores.to(power_sums.wide_dtype(scores)), k, tau)
    if not (is_eager(scores) and is_eager(labels)):
        return fused.plain_gap(scores, labels, k, tau)
    if power_sums.serves_labels(k, scores.shape[1], scores.device):
        return fused.smooth_gap(scores, labels, k, tau)
    return _by_rows(partial(tree.smooth_gap, k=k, tau=tau), k, scores, labels)


def _operator(
    name: str, by_power_sums: RowFunction, by_tree: RowFunction, scores: Tensor, k: int, dim: int
) -> Tensor:
    """An operator on classes in dimension ``dim``, by its kernel or by the reference."""
    check_scores_and_k(scores, k, dim=dim)
    rows = to_rows(scores, dim)
    power = power_sums.is_accurate(k, scores.dtype, scores.device)
    reference = partial(_by_rows, partial(by_power_sums if power else by_tree, k=k), k)
    kernel = find_kernel(name, rows, k)
    if kernel is None:
        result = reference(rows)
    else:
        result = _KernelOperator.apply(rows, k, getattr(kernel, name), reference)
    shape = (*index_shape(scores, dim), result.shape[-1])
    return result.to(scores.dtype).reshape(shape).movedim(-1, dim)


def _by_rows(function: RowFunction, k: int, scores: Tensor, *others: Tensor) -> Tensor:
    """A function of (R, n) scores in float64, in blocks of rows."""
    wide = power_sums.wide_dtype(scores)
    return by_rows(
        lambda block, *rest: function(block.to(wide), *rest), scores, *others, cost=8 * k
    )


class _KernelOperator(torch.autograd.Function):
    """A kernel for the values; derivatives are those of the reference."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: int, kernel: RowFunction, reference: RowFunction
    ) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.reference = reference
        return kernel(scores, k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = gradients
        (scores,) = ctx.saved_tensors
        result = plain_backward(lambda s: ctx.reference(s).to(grad.dtype), scores, grad)
        return result, None, None, None
