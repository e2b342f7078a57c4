"""Row-wise functions in blocks of rows: bounded memory, and no graph kept between the passes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from topklass._transforms import is_eager, needs_plain_backward, plain_backward

RowFunction = Callable[..., Tensor]

GRAPH_ELEMENTS = {"cpu": 2**22, "other": 2**27}
"""Elements that the graph of one block may hold: 32 MB of float64 on the CPU, 1 GB elsewhere."""


def by_rows(function: RowFunction, scores: Tensor, *others: Tensor, cost: int = 1) -> Tensor:
    """Apply a row-wise differentiable function to (R, n) scores, block by block.

    If there are several blocks, the graph of each is built again in the backward pass and freed at
    once, so memory is bounded by that of one block. Differentiable any number of times. Calls that
    are not eager see the function itself.

    Args:
        function: maps (r, n) scores, and the same rows of ``others``, to (r, m).
        scores: (R, n).
        others: tensors of R rows handed to the function with the scores, not differentiated.
        cost: how many tensors of a block's size the function keeps; blocks shrink accordingly.
    """
    if not is_eager(scores):
        return function(scores, *others)
    elements = GRAPH_ELEMENTS["cpu" if scores.device.type == "cpu" else "other"] // cost
    if scores.numel() <= elements:
        return function(scores, *others)
    result: Tensor = _ByRows.apply(function, elements, scores, *others)
    return result


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: RowFunction, elements: int, scores: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scores, *others)
        ctx.function, ctx.elements = function, elements
        blocks = _row_slices(scores, elements)
        return torch.cat([function(*(t[rows] for t in (scores, *others))) for rows in blocks])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        scores, *others = ctx.saved_tensors
        if needs_plain_backward(gradient):
            result = plain_backward(lambda s: ctx.function(s, *others), scores, gradient)
        else:
            result = torch.empty_like(scores)
            for rows in _row_slices(scores, ctx.elements):
                block = scores[rows].detach().requires_grad_()
                with torch.enable_grad():
                    value = ctx.function(block, *(t[rows] for t in others))
                (result[rows],) = torch.autograd.grad(value, block, gradient[rows])
        return None, None, result, *(None for _ in others)


def _row_slices(scores: Tensor, elements: int) -> Iterator[slice]:
    """Slices of rows with about ``elements`` elements each."""
    rows, columns = scores.shape
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)
