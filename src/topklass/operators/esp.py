"""Elementary symmetric polynomials of exponentials, and what the losses need of them.

The one place that chooses between the algorithms of :mod:`topklass.reference`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from topklass._checks import check_scores_and_k
from topklass.algorithms import log_esp_tree
from topklass.dispatch import kernel_serves
from topklass.reference import fused, power_sums, tree
from topklass.reference.limits import by_power_sums, working_dtype
from topklass.reference.row_blocks import RowFunction, by_rows, transformed


def log_esp(scores: Tensor, k: int) -> Tensor:
    r"""Logarithms of the elementary symmetric polynomials of ``exp(scores)``.

    .. math:: \log \sigma_j(e^{s}) = \log \sum_{|A| = j} \exp \sum_{i \in A} s_i, \quad j = 0..k

    (Berrada et al. 2018, section 4). Its gradient with respect to the scores holds the marginals of
    random j-subsets, see :func:`topk_marginals`.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: largest degree, 1 ≤ k ≤ n.

    Returns:
        (…, k + 1), the degrees 0 to k; −inf for degrees above the number of present classes.

    Example:
        >>> import torch
        >>> log_esp(torch.tensor([1.0, 2.0, 3.0]).log(), k=2).exp().round(decimals=3)
        tensor([ 1.,  6., 11.])
    """
    check_scores_and_k(scores, k)
    power = by_power_sums(k, scores.dtype, scores.device)
    algorithm = power_sums.log_esp if power else log_esp_tree

    def by_kernel(rows: Tensor, reference: RowFunction) -> Tensor:
        from topklass.kernels import esp

        return esp.log_esp(rows, k, reference)

    return _computed(scores, k, algorithm, by_kernel, log_esp_obstacle(k))


def topk_marginals(scores: Tensor, k: int) -> Tensor:
    r"""Probability that each class belongs to a random k-subset drawn by its scores.

    .. math:: \pi_i = \frac{e^{s_i} \sigma_{k-1}(e^{s_{\setminus i}})}{\sigma_k(e^s)}
        = \frac{\partial \log \sigma_k(e^s)}{\partial s_i}

    (Berrada et al. 2018, Appendix C, equations 63-66, where the printed σ_i is σ_k). With k = 1 it
    is the softmax. Its order is that of the scores: use it to average over crops or models. For the
    distribution that the smooth loss itself smooths over, pass ``scores / (k * tau)``.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: size of the subset, 1 ≤ k ≤ n.

    Returns:
        (…, n), in [0, 1], summing to k. A row with fewer than k present classes has 1 for each.

    Example:
        >>> import torch
        >>> topk_marginals(torch.tensor([0.0, 0.0, 0.0, 0.0]), k=2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_scores_and_k(scores, k)
    power = by_power_sums(k, scores.dtype, scores.device)
    algorithm = power_sums.marginals if power else tree.marginals

    def by_kernel(rows: Tensor, reference: RowFunction) -> Tensor:
        from topklass.kernels import esp

        return esp.topk_marginals(rows, k, reference)

    return _computed(scores, k, algorithm, by_kernel)


def smooth_gap(scores: Tensor, labels: Tensor | None, k: int, tau: float) -> Tensor:
    r"""By how much the k-th largest rival exceeds the label, over k, smoothed.

    .. math:: g(s, y) = \tau \log \sigma_k(e_{\setminus y}) - \tau \log
        \sigma_{k-1}(e_{\setminus y}) - s_y / k, \qquad e = \exp(s / (k\tau))

    All of the smooth loss but its margin (Berrada et al. 2018, equation 10). In float64 for scores
    of any precision, since the loss adds a margin of the opposite sign.

    Args:
        scores: (R, n); −inf marks an absent class.
        labels: (R, 1), or None for every class as the label.
        k: 1 ≤ k ≤ n − 1.
        tau: temperature, positive; as it vanishes, g becomes the hard gap over k.

    Returns:
        (R, 1), or (R, n) for every label. −inf or nearly so where fewer than k classes are present
        besides the label, +inf where the label is absent.
    """
    power = by_power_sums(k, scores.dtype, scores.device)
    if labels is None:
        every = power_sums.smooth_gap_every_label if power else tree.smooth_gap_every_label
        return every(scores.to(power_sums.wide_dtype(scores)), k, tau)
    if not power:
        return _by_rows(partial(tree.smooth_gap, k=k, tau=tau), scores, labels, k=k)
    if transformed(scores):
        return power_sums.smooth_gap(scores.to(working_dtype(scores.dtype)), labels, k, tau)
    return fused.smooth_gap(scores, labels, k, tau)


def log_esp_obstacle(k: int) -> str | None:
    """Beyond this k the kernel would take long to compile."""
    largest = 16
    return f"log_esp with k = {k}, only up to {largest}" if k > largest else None


def kernel_obstacle() -> str | None:
    """What the operators' kernels do not do: their derivatives are those of the reference."""
    return "these operators in torch.compile" if torch.compiler.is_compiling() else None


def _computed(
    scores: Tensor,
    k: int,
    algorithm: RowFunction,
    by_kernel: Callable[[Tensor, RowFunction], Tensor],
    obstacle: str | None = None,
) -> Tensor:
    """An operator on (…, n) scores by its kernel, if that can serve, or by the reference."""

    def reference(rows: Tensor) -> Tensor:
        return _by_rows(partial(algorithm, k=k), rows, k=k)

    if kernel_serves(scores, k, obstacle or kernel_obstacle()):
        result = by_kernel(scores.reshape(-1, scores.shape[-1]), reference)
        result = result.reshape(*scores.shape[:-1], -1)
    else:
        result = reference(scores)
    return result.to(scores.dtype)


def _by_rows(function: RowFunction, scores: Tensor, *others: Tensor, k: int) -> Tensor:
    wide = power_sums.wide_dtype(scores)
    rows = scores.reshape(-1, scores.shape[-1])
    result = by_rows(
        lambda block, *rest: function(block.to(wide), *rest), rows, *others, cost=8 * k
    )
    return result.reshape(*scores.shape[:-1], result.shape[-1])
