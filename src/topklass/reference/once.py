"""A derivative that cannot be differentiated again."""

from typing import Any

import torch
from torch import Tensor


def once(derivative: Tensor, scores: Tensor) -> Tensor:
    """``derivative``, for which a second derivative with respect to the scores raises an error."""
    result: Tensor = _Once.apply(derivative, scores)
    return result


class _Once(torch.autograd.Function):
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
            "noised_topk has no second derivative: with sampled noise its gradient is piecewise "
            "constant. Use smooth_topk_loss where second derivatives are needed."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Once.backward(ctx)
