"""The k-th largest score under sampled noise."""

from typing import Any

import torch
from torch import Tensor

from topklass._transforms import (
    can_read_values,
    first_order_only,
    is_eager,
    is_traced,
    needs_plain_backward,
    spread_nan,
)
from topklass.reference.exceedances import Noise, enough, kth_noised
from topklass.reference.ranks import kth_largest

TOGETHER = 2**16
"""Noised scores that are made at once where rows are short."""


def noised_topk(scores: Tensor, noise: Noise) -> Tensor:
    """The k-th largest of ``scores + ε·noise``, averaged over noise vectors, (R, n) to (R).

    Noise that is drawn needs no tensor much larger than the scores. Where values may be read, long
    rows get noise above a threshold only.
    """
    scores = spread_nan(scores)
    places, shifts = _choose(scores, noise)
    if is_eager(scores):
        result: Tensor = _MeanAndLabels.apply(scores, places, shifts)[0]
    elif is_traced():
        result = (scores.gather(-1, places) + shifts).mean(-1)
    else:
        result = _MeanOfChosen.apply(scores, places, shifts)
    return result


def noised_topk_and_labels(scores: Tensor, labels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The same and the labels' scores, (R) and (R, m), of an eager call: one gradient for both.

    A row with NaN must have nothing else.
    """
    places, shifts = _choose(scores, noise)
    result: tuple[Tensor, Tensor] = _MeanAndLabels.apply(scores, places, shifts, labels)
    return result


def _choose(scores: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The class that is k-th largest in each sample, and its noise times ε, (R, B) each."""
    if noise.epsilon == 0 and noise.given is None:
        noise = noise._replace(samples=1)
    with torch.no_grad():
        if noise.given is None and noise.epsilon > 0 and _is_large(scores, noise):
            return kth_noised(scores.detach(), noise)
        return _one_after_another(scores, noise)


def _is_large(scores: Tensor, noise: Noise) -> bool:
    """Whether noise for all classes costs more than finding those above a threshold."""
    if not can_read_values(scores) or scores.numel() * noise.samples <= TOGETHER:
        return False
    return scores.shape[1] > 8 * enough(noise.k)


def _one_after_another(scores: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """The class that is k-th largest under each noise vector, and its noise times ε, (R, B) each.

    Where values may be read, short rows get several noise vectors at once.
    """
    reads = noise.given is None and can_read_values(scores)
    step = max(1, TOGETHER // max(1, scores.numel())) if reads else 1
    chosen = []
    for start in range(0, noise.samples, step):
        few = min(step, noise.samples - start)
        if noise.given is not None:
            vectors = noise.given[..., start : start + few].mT
        else:
            vectors = _draw(scores, few, noise.generator)
        shift = noise.epsilon * vectors.to(scores.dtype)
        chosen.append((_kth_drawn if reads else _kth_given)(scores, noise.k, shift))
    if len(chosen) == 1:
        return chosen[0]
    places, shifts = zip(*chosen, strict=True)
    return torch.cat(places, -1), torch.cat(shifts, -1)


def _draw(scores: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """Noise vectors, (R, samples, n)."""
    if generator is None:  # with a symbolic shape randn takes no generator
        return torch.randn_like(scores.unsqueeze(1).expand(-1, samples, -1))
    shape = (scores.shape[0], samples, scores.shape[1])
    return torch.randn(shape, generator=generator, dtype=scores.dtype, device=scores.device)


def _kth_drawn(scores: Tensor, k: int, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The class that is k-th largest under each shift, (R, B, n), and its shift, (R, B) each."""
    rows = (scores.unsqueeze(1) + shift).flatten(0, 1)
    places = kth_largest(rows, k).view(shift.shape[:2])
    return places, shift.gather(-1, places.unsqueeze(-1)).squeeze(-1)


def _kth_given(scores: Tensor, k: int, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The same by operations of any device and transformation, for any shifts."""
    top, places = (scores.unsqueeze(1) + shift).topk(k, dim=-1)
    last = places[..., -1:]
    # NaN sorts first, also that of noise which was given
    result = shift.gather(-1, last).masked_fill(top[..., :1].isnan(), float("nan"))
    return last.squeeze(-1), result.squeeze(-1)


class _MeanAndLabels(torch.autograd.Function):
    """Mean of ``scores.gather(-1, places) + shifts``, and the labels' scores.

    Places depend on the scores: first order only.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, places: Tensor, shifts: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        columns = places if labels is None else torch.cat([places, labels], 1)
        ctx.save_for_backward(scores, columns)
        chosen, own = scores.gather(1, columns).tensor_split([places.shape[1]], 1)
        return (chosen + shifts).mean(1), own.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, own = gradients
        scores, columns = ctx.saved_tensors
        samples = columns.shape[1] - own.shape[-1]
        each = (mean / samples).unsqueeze(-1).expand(*mean.shape, samples)
        each = torch.cat([each, own], -1)
        zeros = each.new_zeros(scores.shape)
        if is_eager(each) and not needs_plain_backward(each):
            return zeros.scatter_add_(1, columns, each), None, None, None
        return piecewise_constant(zeros.scatter_add(1, columns, each), scores), None, None, None


class _MeanOfChosen(torch.autograd.Function):
    """The mean for transformations, which need a context apart; that takes PyTorch longer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, places: Tensor, shifts: Tensor) -> Tensor:
        return (scores.gather(-1, places) + shifts).mean(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        scores, places = ctx.saved_tensors
        each = (gradient / places.shape[-1]).unsqueeze(-1).expand(places.shape)
        zeros = gradient.new_zeros(scores.shape)
        return piecewise_constant(zeros.scatter_add(-1, places, each), scores), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        scores, places = ctx.saved_tensors
        return piecewise_constant(tangent.gather(-1, places).mean(-1), scores)


def piecewise_constant(gradient: Tensor, scores: Tensor) -> Tensor:
    """The gradient of the mean, of which a derivative by the scores is an error."""
    return first_order_only(
        gradient,
        "sampled noise has no second derivative: its gradient is piecewise constant. Take the "
        "exact expectation (samples=None, expected_topk) where second derivatives are needed.",
        scores,
    )
