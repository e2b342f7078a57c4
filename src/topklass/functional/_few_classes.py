"""Losses of a few labels of each row, by kernels that read the scores once for all of them."""

from typing import Any, Protocol

import torch
from torch import Tensor

from topklass._transforms import needs_plain_backward, plain_backward, spread_nan


class LossOfLabels(Protocol):
    """A loss of rows, see :class:`topklass.functional._contract.RowLoss`."""

    def rows(self, scores: Tensor, labels: Tensor | None) -> Tensor:
        """Map (R, C) scores and (R, m) labels to (R, m)."""


def losses_of_labels(kernel: Any, loss: LossOfLabels, scores: Tensor, labels: Tensor) -> Tensor:
    """(R, m) losses of (R, C) scores with (R, m) labels, differentiable."""
    source = scores if torch.is_grad_enabled() else scores.detach()
    result: Tensor = _LossesOfLabels.apply(source, labels, kernel, loss)
    return result


class _LossesOfLabels(torch.autograd.Function):
    """Losses and gradient by kernels; higher derivatives are those of the reference."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, labels: Tensor, kernel: Any, loss: LossOfLabels
    ) -> Tensor:
        result, states = kernel.losses_of_labels(scores, labels, loss)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(scores, labels, states)
            ctx.call = kernel, loss
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        scores, labels, states = ctx.saved_tensors
        kernel, loss = ctx.call
        if needs_plain_backward(grad):

            def plain(s: Tensor) -> Tensor:
                losses: Tensor = loss.rows(spread_nan(s), labels)
                return losses.float()

            return plain_backward(plain, scores, grad), None, None, None
        return kernel.gradient_of_labels(grad, scores, labels, states, loss), None, None, None
