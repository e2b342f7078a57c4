"""The k-th largest score, smoothed by noise."""

from typing import Any

import torch
from torch import Tensor

from topklass._checks import check_count, check_number, check_scores_and_k
from topklass.dispatch import LARGEST_RANK, kernel_serves
from topklass.reference.limits import working_dtype
from topklass.reference.once import once

LARGEST_SAMPLES = 32
"""The kernel works on all samples of a row at once."""


def noised_topk(
    scores: Tensor,
    k: int,
    epsilon: float = 1.0,
    samples: int = 5,
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
        noise: the noise vectors, ``scores.shape + (samples,)``; drawn one after another if not
            given, so that no tensor of that shape is made.
        generator: source of the noise; kernels and reference draw different numbers from it.

    Returns:
        (…), the scores' shape without its last dimension.

    Example:
        The worked example of section 3.2:

        >>> import torch
        >>> scores = torch.tensor([2.4, 2.6, 2.3, 0.5], requires_grad=True)
        >>> noise = torch.tensor(
        ...     [[0.2, 0.1, -0.1], [-0.1, 0.1, -0.1], [0.1, -0.1, 0.1], [0.3, 0.1, -0.1]]
        ... )
        >>> value = noised_topk(scores, k=2, samples=3, noise=noise)
        >>> value
        tensor(2.4667, grad_fn=<MeanBackward1>)
        >>> torch.autograd.grad(value, scores)[0]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """
    check_scores_and_k(scores, k)
    check_number("epsilon", epsilon, positive=False)
    check_count("samples", samples)
    if noise is not None:
        check_noise(noise, scores, samples)
    if kernel_serves(scores, k, kernel_obstacle(samples, noise), LARGEST_RANK):
        from topklass.kernels.noised import noised_topk as by_kernel

        rows = scores.reshape(-1, scores.shape[-1])
        result = by_kernel(rows, k, epsilon, samples, generator)
        return result.reshape(scores.shape[:-1]).to(scores.dtype)
    wide = scores.to(working_dtype(scores.dtype))
    with torch.no_grad():
        chosen = [
            _kth_perturbed(wide, k, epsilon, None if noise is None else noise[..., b], generator)
            for b in range(samples)
        ]
        index = torch.cat([i for i, _ in chosen], -1)
        shift = torch.cat([s for _, s in chosen], -1)
    return (_gather(wide, index) + shift).mean(-1).to(scores.dtype)


def check_noise(noise: Tensor, scores: Tensor, samples: int) -> None:
    """Require one noise vector per sample for all scores."""
    expected = (*scores.shape, samples)
    if noise.shape != expected:
        raise ValueError(
            f"noise must have shape {tuple(expected)}, the scores' shape and the number of "
            f"samples, got {tuple(noise.shape)}"
        )


def kernel_obstacle(samples: int, noise: Tensor | None) -> str | None:
    """What a call asks that the kernel does not do."""
    if noise is not None:
        return "given noise"
    if samples > LARGEST_SAMPLES:
        return f"samples = {samples}, only up to {LARGEST_SAMPLES}"
    return None


def _kth_perturbed(
    scores: Tensor, k: int, epsilon: float, noise: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The class that is k-th largest under one noise vector, and its own noise, (…, 1) each."""
    if noise is None:
        noise = torch.randn(
            scores.shape, generator=generator, dtype=scores.dtype, device=scores.device
        )
    shift = epsilon * noise.to(scores.dtype)
    top, index = (scores + shift).topk(k, dim=-1)
    last = index[..., -1:]
    return last, shift.gather(-1, last).masked_fill(top[..., :1].isnan(), float("nan"))


def _gather(scores: Tensor, index: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return scores.gather(-1, index)
    result: Tensor = _Chosen.apply(scores, index)
    return result


class _Chosen(torch.autograd.Function):
    """``scores.gather(-1, index)`` for an index that depends on the scores: first order only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, index: Tensor) -> Tensor:
        return scores.gather(-1, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        scores, index = ctx.saved_tensors
        counts = gradient.new_zeros(scores.shape).scatter_add(-1, index, gradient)
        return once(counts, scores), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        scores, index = ctx.saved_tensors
        return once(tangent.gather(-1, index), scores)
