"""The k-th largest score under sampled noise, one noise vector after another."""

from typing import Any

import torch
from torch import Tensor

from topklass._transforms import is_traced, spread_nan


def noised_topk(
    scores: Tensor,
    k: int,
    epsilon: float,
    samples: int,
    noise: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The k-th largest of ``scores + ε·noise``, averaged over noise vectors, (…, n) to (…).

    Noise that is drawn needs no tensor larger than the scores.
    """
    scores = spread_nan(scores)
    with torch.no_grad():
        chosen = [
            _kth_perturbed(scores, k, epsilon, None if noise is None else noise[..., b], generator)
            for b in range(samples)
        ]
        places = torch.cat([place for place, _ in chosen], -1)
        shifts = torch.cat([shift for _, shift in chosen], -1)
    return (_gather(scores, places) + shifts).mean(-1)


def _kth_perturbed(
    scores: Tensor, k: int, epsilon: float, noise: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The class that is k-th largest under one noise vector, and its noise, (…, 1) each."""
    if noise is None and generator is None:  # with a symbolic shape randn takes no generator
        noise = torch.randn_like(scores)
    elif noise is None:
        noise = torch.randn(
            scores.shape, generator=generator, dtype=scores.dtype, device=scores.device
        )
    shift = epsilon * noise.to(scores.dtype)
    top, places = (scores + shift).topk(k, dim=-1)
    last = places[..., -1:]
    # NaN sorts first, also that of noise which was given
    return last, shift.gather(-1, last).masked_fill(top[..., :1].isnan(), float("nan"))


def _gather(scores: Tensor, places: Tensor) -> Tensor:
    if is_traced():
        return scores.gather(-1, places)
    result: Tensor = _Chosen.apply(scores, places)
    return result


class _Chosen(torch.autograd.Function):
    """``scores.gather(-1, places)`` for places that depend on the scores: first order only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, places: Tensor) -> Tensor:
        return scores.gather(-1, places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        scores, places = ctx.saved_tensors
        counts = gradient.new_zeros(scores.shape).scatter_add(-1, places, gradient)
        return first_order_only(counts, scores), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        scores, places = ctx.saved_tensors
        return first_order_only(tangent.gather(-1, places), scores)


def first_order_only(derivative: Tensor, scores: Tensor) -> Tensor:
    """``derivative``, whose own derivative with respect to the scores raises an error."""
    result: Tensor = _FirstOrderOnly.apply(derivative, scores)
    return result


class _FirstOrderOnly(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: Tensor, scores: Tensor) -> Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "sampled noise has no second derivative: its gradient is piecewise constant. Take the "
            "exact expectation (samples=None, expected_topk) where second derivatives are needed."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _FirstOrderOnly.backward(ctx)
