"""States of rows, read once from the scores: what a device tells others about its classes."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    kernel = find_kernel("row_states", scores, k)
    source = scores if torch.is_grad_enabled() else scores.detach()
    heads, places, sums, label = _RowStates.apply(
        source, labels, k, temperature, reference if kernel is None else kernel
    )
    return States(heads, sums), places, label


class _RowStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, k: int, temperature: float, backend: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, places, sums = backend.read_states(scores, labels, k, temperature)
        label = torch.zeros_like(heads[:, :1])
        if scores.shape[1]:
            own = scores.gather(1, labels.clamp(min=0)).to(label.dtype)
            label = torch.where(labels < 0, label, own)
        ctx.save_for_backward(scores, labels, heads, places)
        ctx.mark_non_differentiable(places)
        ctx.temperature, ctx.backend = temperature, backend
        return heads, places, sums, label

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_heads, _, of_sums, of_label = gradients
        scores, labels, heads, places = ctx.saved_tensors
        spoilt = of_sums[:, :1].isnan()  # then the gradient of absent heads is NaN, too
        degree = torch.arange(1, heads.shape[1] + 1, device=heads.device)
        slopes = (
            of_heads.masked_fill(spoilt, torch.nan),
            of_sums * degree / ctx.temperature,
            of_label,
        )
        result = ctx.backend.write_gradient(scores, labels, heads, places, slopes, ctx.temperature)
        return result, None, None, None, None
