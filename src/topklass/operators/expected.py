"""The k-th largest score under noise, in expectation."""

from typing import Any

import torch
from torch import Tensor

from topklass._checks import (
    check_number,
    check_scores_and_k,
    check_temperature,
    index_shape,
    to_rows,
)
from topklass._transforms import needs_plain_backward, plain_backward
from topklass.dispatch import find_kernel
from topklass.reference import expected, expected_bins
from topklass.reference.power_sums import working_dtype


def expected_topk(scores: Tensor, k: int, epsilon: float = 1.0, *, dim: int = -1) -> Tensor:
    r"""Expectation over noise of the k-th largest perturbed score.

    .. math:: \mathrm{top}_{k,\epsilon}(s) = \mathbb E\,(s + \epsilon Z)_{(k)}
        = a + \int_a^\infty P(N(t) \ge k)\,dt, \qquad Z \sim \mathcal N(0, I)

    (Garcin et al. 2022, Definition 3.2) for any a that the k-th largest surely exceeds, where N(t),
    the number of perturbed scores above t, counts independent events of probabilities
    :math:`\Phi((s_i - t) / \epsilon)`. It is what :func:`noised_topk` estimates, without variance.
    Its gradient is the probability of each class to be the k-th largest. The integral is computed
    numerically, within 1e-4·ε, and the gradient within 1e-4; derivatives of any order exist.

    Classes below the k largest go into bins of ε/2, of which only moments matter: time hardly
    depends on the scores. On the CPU it is 3 to 4 times that of :func:`noised_topk` with ten
    samples at k = 6, and 8 to 27 times at k = 21. This holds for eager calls in single and half
    precision up to k = 64, on CUDA devices by kernels. All other calls (float64,
    ``torch.compile``, second derivatives, larger k) go over the classes within 15·ε of the k-th
    score at every node of the integral, which takes up to 60 times as long.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: rank, 1 ≤ k ≤ n.
        epsilon: size of the noise; 0 gives the k-th largest score itself.
        dim: the class dimension.

    Returns:
        The scores' shape without the class dimension.

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
    check_scores_and_k(scores, k, dim=dim)
    check_number("epsilon", epsilon, positive=False)
    if epsilon:
        check_temperature(epsilon, "epsilon")
    rows = to_rows(scores, dim)
    method = find_kernel("expected_topk", rows, k) if epsilon else None
    if method is None and epsilon and expected_bins.serves(rows, k):
        method = expected_bins
    if method is None:
        result = _reference(rows, k, epsilon)
    else:
        # A gradient is computed only if it is asked for.
        wanted = rows if torch.is_grad_enabled() else rows.detach()
        result = _ValueAndGradient.apply(wanted, method, k, epsilon)
    return result.reshape(index_shape(scores, dim)).to(scores.dtype)


def _reference(rows: Tensor, k: int, epsilon: float) -> Tensor:
    return expected.expected_topk(rows.to(working_dtype(rows.dtype)), k, epsilon)


class _ValueAndGradient(torch.autograd.Function):
    """Value and gradient at once, by a kernel or bins; higher derivatives by plain operations."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, method: Any, k: int, epsilon: float) -> Tensor:
        value, slope = method.expected_topk(scores, k, epsilon, ctx.needs_input_grad[0])
        ctx.save_for_backward(scores, slope)
        ctx.k, ctx.epsilon = k, epsilon
        result: Tensor = value
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        scores, slope = ctx.saved_tensors
        if needs_plain_backward(grad):

            def plain(s: Tensor) -> Tensor:
                return _reference(s, ctx.k, ctx.epsilon).to(grad.dtype)

            result = plain_backward(plain, scores, grad)
        else:
            result = (slope * grad.unsqueeze(1)).to(scores.dtype)
        return result, None, None, None
