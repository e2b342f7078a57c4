"""The k-th largest score, smoothed by noise."""

from typing import Any

import torch
from torch import Tensor

from topklass._checks import check_count, check_number, check_scores_and_k, index_shape, to_rows
from topklass._transforms import needs_plain_backward
from topklass.dispatch import find_kernel
from topklass.reference import noised
from topklass.reference.exceedances import Noise
from topklass.reference.power_sums import working_dtype


def noised_topk(
    scores: Tensor,
    k: int,
    epsilon: float = 1.0,
    samples: int = 10,
    *,
    dim: int = -1,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Average over noise vectors of the k-th largest perturbed score.

    .. math:: \widehat{\mathrm{top}}_{k,\epsilon,B}(s)
        = \frac1B \sum_{b=1}^B (s + \epsilon Z_b)_{(k)}, \qquad Z_b \sim \mathcal N(0, I)

    (Garcin et al. 2022, Definitions 3.2 and 3.4, equation 11). Its gradient is, for each class,
    the share of samples in which the class was the k-th largest. That is piecewise constant:
    differentiating twice raises an error. :func:`expected_topk` is its expectation.

    Args:
        scores: (…, n); −inf marks an absent class.
        k: rank, 1 ≤ k ≤ n.
        epsilon: size of the noise; 0 gives the k-th largest score itself.
        samples: number B of noise vectors.
        dim: the class dimension.
        noise: the noise vectors, ``scores.shape + (B,)``, which also set the number of samples;
            drawn if not given, mostly for the classes that can be the k-th largest, so that no
            tensor of that shape is made.
        generator: source of the noise. Kernels and reference draw different numbers from it, and
            so do versions of this package.

    Returns:
        The scores' shape without the class dimension.

    Example:
        The worked example of section 3.2:

        >>> import torch
        >>> scores = torch.tensor([2.4, 2.6, 2.3, 0.5], requires_grad=True)
        >>> noise = torch.tensor(
        ...     [[0.2, 0.1, -0.1], [-0.1, 0.1, -0.1], [0.1, -0.1, 0.1], [0.3, 0.1, -0.1]]
        ... )
        >>> value = noised_topk(scores, k=2, noise=noise)
        >>> value.detach()
        tensor(2.4667)
        >>> torch.autograd.grad(value, scores)[0]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """
    check_scores_and_k(scores, k, dim=dim)
    check_number("epsilon", epsilon, positive=False)
    check_count("samples", samples)
    rows = to_rows(scores, dim)
    if noise is not None:
        noise = noise_rows(noise, scores, dim)
        samples = noise.shape[-1]
    result = noised_topk_of_rows(rows, Noise(k, epsilon, samples, generator, noise))
    return result.reshape(index_shape(scores, dim)).to(scores.dtype)


def noised_topk_of_rows(rows: Tensor, noise: Noise) -> Tensor:
    """The same of (R, n) scores to (R), without checks."""
    k, epsilon, samples, generator, given = noise
    kernel = find_kernel("noised_topk", rows, k, samples=samples, noise=given)
    if kernel is None:
        wide = rows.to(working_dtype(rows.dtype))
        return noised.noised_topk(wide, noise)
    result: Tensor = _KernelNoisedTopK.apply(rows, kernel, k, epsilon, samples, generator)
    return result


def noise_rows(noise: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Noise vectors for all scores, (…, B), as (R, n, B)."""
    if not isinstance(noise, Tensor) or noise.shape[:-1] != scores.shape or noise.dim() == 0:
        given = tuple(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
        raise ValueError(
            f"noise must have the scores' shape {tuple(scores.shape)} and one more dimension, "
            f"that of the samples, got {given}"
        )
    if noise.shape[-1] == 0:
        raise ValueError(f"noise must have at least one sample, got shape {tuple(noise.shape)}")
    last = noise.movedim(dim % scores.dim(), -2)
    return last.flatten(0, -3) if last.dim() > 2 else last.unsqueeze(0)


class _KernelNoisedTopK(torch.autograd.Function):
    """Values and chosen classes by the kernel; the gradient counts the chosen classes."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        kernel: Any,
        k: int,
        epsilon: float,
        samples: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        value, saved = kernel.noised_topk(scores, k, epsilon, samples, generator)
        ctx.save_for_backward(scores, *saved)
        ctx.kernel = kernel
        result: Tensor = value
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        scores, *saved = ctx.saved_tensors
        if needs_plain_backward(grad):
            ones = scores.new_ones(len(scores), dtype=torch.float32)
            whole = ctx.kernel.noised_topk_gradient(ones, scores, saved)
            product = whole * grad.unsqueeze(-1).to(whole.dtype)
            result = noised.piecewise_constant(product, scores)
        else:
            result = ctx.kernel.noised_topk_gradient(grad, scores, saved)
        return result, None, None, None, None, None
