"""Row-wise functions in blocks of rows: bounded memory, and no graph kept between the passes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from topklass._transforms import has_tangent, is_gradient_batch, transforming

RowFunction = Callable[..., Tensor]

GRAPH_ELEMENTS = {"cpu": 2**22, "other": 2**27}
"""What the graph of one block may hold: 32 megabytes of float64 in cache, a gigabyte elsewhere."""


def row_blocks(scores: Tensor, elements: int) -> Iterator[slice]:
    """Slices of rows with about ``elements`` elements each; one empty slice for no rows."""
    rows, columns = scores.shape
    step = max(1, elements // max(1, columns))
    for start in range(0, max(1, rows), step):
        yield slice(start, start + step)


def transformed(scores: Tensor) -> bool:
    """Whether vmap, torch.func or forward mode is looking: they must see plain operations."""
    if transforming():
        return True
    if torch.compiler.is_compiling():
        return False
    return has_tangent(scores)


def needs_plain_backward(gradient: Tensor) -> bool:
    """Whether a backward pass will itself be differentiated, or runs for a batch of gradients."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or is_gradient_batch(gradient)


def plain_backward(function: RowFunction, scores: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of plain operations, differentiable where that is asked for."""
    again = torch.is_grad_enabled()
    leaf = scores if again else scores.detach().requires_grad_()
    with torch.enable_grad():
        value = function(leaf)
    (result,) = torch.autograd.grad(value, leaf, gradient, create_graph=again)
    return result


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: RowFunction, elements: int, scores: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scores, *others)
        ctx.function, ctx.elements = function, elements
        blocks = row_blocks(scores, elements)
        return torch.cat([function(*(t[rows] for t in (scores, *others))) for rows in blocks])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        scores, *others = ctx.saved_tensors
        if needs_plain_backward(gradient):
            result = plain_backward(lambda s: ctx.function(s, *others), scores, gradient)
        else:
            result = torch.empty_like(scores)
            for rows in row_blocks(scores, ctx.elements):
                block = scores[rows].detach().requires_grad_()
                with torch.enable_grad():
                    value = ctx.function(block, *(t[rows] for t in others))
                (result[rows],) = torch.autograd.grad(value, block, gradient[rows])
        return None, None, result, *(None for _ in others)


def by_rows(function: RowFunction, scores: Tensor, *others: Tensor, cost: int = 1) -> Tensor:
    """Apply a row-wise differentiable function to (R, n) scores, block by block.

    If there are several blocks, the graph of each is built again in the backward pass and freed at
    once, so memory stays that of one block. Differentiable any number of times.

    Args:
        function: maps (r, n) scores, and what goes with these rows, to (r, m).
        scores: (R, n).
        others: tensors of R rows handed to the function with the scores, not differentiated.
        cost: how many tensors of a block's size the function keeps; blocks shrink accordingly.
    """
    elements = GRAPH_ELEMENTS["cpu" if scores.device.type == "cpu" else "other"] // cost
    few = scores.numel() <= elements
    if few or torch.compiler.is_compiling() or transformed(scores):
        return function(scores, *others)
    result: Tensor = _ByRows.apply(function, elements, scores, *others)
    return result
