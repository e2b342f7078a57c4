"""The operators ``log_esp`` and ``topk_marginals`` on a GPU; derivatives are the reference's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from topklass.kernels.esp_rows import log_esp_kernel, marginal_constants_kernel
from topklass.kernels.launch import launch
from topklass.kernels.rows import Tiles, gradient, plan, read_states, row_buffer, with_whole_rows
from topklass.reference.row_blocks import plain_backward

Operator = Callable[[Tensor], Tensor]


def log_esp(scores: Tensor, k: int, plain: Operator) -> Tensor:
    """``log σ_0 … log σ_k`` of (R, n) scores, (R, k + 1), in float32."""
    result: Tensor = _WithPlainBackward.apply(scores, int(k), _log_esp, plain)
    return result


def topk_marginals(scores: Tensor, k: int, plain: Operator) -> Tensor:
    """Marginals of (R, n) scores, (R, n), in their dtype."""
    result: Tensor = _WithPlainBackward.apply(scores, int(k), _marginals, plain)
    return result


class _WithPlainBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: int, kernel: Callable[[Tensor, int], Tensor], plain: Operator
    ) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.plain = plain
        return kernel(with_whole_rows(scores), k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (outgoing,) = gradients
        (scores,) = ctx.saved_tensors
        plain = plain_backward(lambda s: ctx.plain(s).to(outgoing.dtype), scores, outgoing)
        return plain, None, None, None


def _states(scores: Tensor, k: int) -> tuple[Tensor, Tiles]:
    rows, columns = scores.shape
    tiles = plan(rows, columns, k, exact=True)
    buffer = row_buffer(scores, k, tiles)
    read_states(scores, None, k, 1.0, tiles, buffer)
    return buffer, tiles


def _log_esp(scores: Tensor, k: int) -> Tensor:
    rows = scores.shape[0]
    buffer, tiles = _states(scores, k)
    tall = 32 if tiles.parts == 1 else 1
    result = scores.new_empty((rows, k + 1), dtype=torch.float32)
    launch(
        log_esp_kernel,
        (-(-rows // tall), 1, 1),
        (buffer, result, rows, tiles.parts),
        (k, tiles.slots, tiles.merged, tall),
        1,
        scores,
    )
    return result


def _marginals(scores: Tensor, k: int) -> Tensor:
    rows = scores.shape[0]
    buffer, tiles = _states(scores, k)
    launch(
        marginal_constants_kernel,
        (-(-rows // tiles.constant_rows), 1, 1),
        (buffer, rows, tiles.parts),
        (k, tiles.slots, tiles.merged, tiles.constant_rows),
        1,
        scores,
    )
    one = scores.new_ones((), dtype=torch.float32)
    return gradient(scores, None, buffer, one, False, k, 1.0, tiles)
