"""States of rows, read once from the scores: what a device tells others about its classes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from topklass._transforms import Saved, differentiable_once
from topklass.dispatch import find_kernel
from topklass.reference import row_states as reference
from topklass.reference.row_states import States


def row_states(
    scores: Tensor, labels: Tensor, k: int, temperature: float
) -> tuple[States, Tensor, Tensor]:
    """The states of (R, n) scores without their labels, see :mod:`topklass.reference.row_states`.

    Differentiable once; no class need be present.

    Args:
        scores: (R, n); −inf marks an absent class.
        labels: (R, 1), −1 for rows whose label is not among these classes.
        k: number of heads, may exceed n.
        temperature: T.

    Returns:
        The states; the classes of their heads, (R, k), without meaning for absent heads; and the
        labels' scores, (R, 1), 0 for those that are not here. All but the classes in float64.
    """
    source = scores if torch.is_grad_enabled() else scores.detach()
    heads, places, sums, label = _RowStates.apply(
        source, labels, k, temperature, find_backend(scores, k)
    )
    return States(heads, sums), places, label


class Slopes(NamedTuple):
    """Derivatives by what :func:`read_states` returns."""

    heads: Tensor
    """(R, k)."""
    sums: Tensor
    """(R, k)."""
    label: Tensor
    """(R, 1)."""


def find_backend(scores: Tensor, k: int) -> Any:
    """What reads the states of such scores, and writes their gradient."""
    kernel = find_kernel("row_states", scores, k)
    return reference if kernel is None else kernel


def read_states(
    backend: Any, scores: Tensor, labels: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads, their classes, power sums and the labels' scores, see :func:`row_states`."""
    heads, places, sums = backend.read_states(scores, labels, k, temperature)
    if heads.dim() == 3:  # pieces of rows
        (heads, sums), chosen = reference.merged(heads, sums, temperature)
        places = places.flatten(1).gather(1, chosen)
    label = torch.zeros_like(heads[:, :1])
    if scores.shape[1]:
        own = scores.gather(1, labels.clamp(min=0)).to(label.dtype)
        label = torch.where(labels < 0, label, own)
    return heads, places, sums, label


def states_gradient(
    backend: Any,
    scores: Tensor,
    labels: Tensor,
    heads: Tensor,
    places: Tensor,
    slopes: Slopes,
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the scores, (R, n); in ``out``, which may be the scores, if given."""
    spoilt = slopes.sums[:, :1].isnan()  # then the gradient of absent heads is NaN, too
    degree = torch.arange(1, heads.shape[1] + 1, device=heads.device)
    parts = (
        slopes.heads.masked_fill(spoilt, torch.nan),
        slopes.sums * degree / temperature,
        slopes.label,
    )
    result: Tensor = backend.write_gradient(
        scores, labels, heads, places, parts, temperature, out=out
    )
    return result


class _RowStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, k: int, temperature: float, backend: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, places, sums, label = read_states(backend, scores, labels, k, temperature)
        ctx.save_for_backward(scores, labels, heads, places)
        ctx.mark_non_differentiable(places)
        ctx.temperature, ctx.backend = temperature, backend
        return heads, places, sums, label

    @staticmethod
    @differentiable_once(
        "the states of rows, which devices exchange, have no second derivative: take the loss of "
        "all classes on one device where it is needed"
    )
    def backward(ctx: Any, saved: Saved, *outgoing: Tensor) -> tuple[Tensor | None, ...]:
        of_heads, _, of_sums, of_label = outgoing
        scores, labels, heads, places = saved()
        slopes = Slopes(of_heads, of_sums, of_label)
        result = states_gradient(
            ctx.backend, scores, labels, heads, places, slopes, ctx.temperature
        )
        return result, None, None, None, None
