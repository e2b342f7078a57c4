"""The operators ``log_esp`` and ``topk_marginals`` on a GPU, without derivatives."""

from dataclasses import replace

import torch
from torch import Tensor

from topklass.kernels.esp.polynomials import log_esp_kernel, marginal_constants_kernel
from topklass.kernels.smooth.launch import (
    Plan,
    alignment,
    launch,
    new_buffer,
    plan,
    read_states,
    rows_of,
    write_gradient,
)
from topklass.kernels.smooth.row_state import Problem


def log_esp(scores: Tensor, k: int) -> Tensor:
    """``log σ_0 … log σ_k`` of (R, n) scores, (R, k + 1), in float32."""
    _, buffer, tiles = _states(scores, k)
    rows = scores.shape[0]
    tile = replace(tiles.constants, rows=32 if tiles.parts == 1 else 1)
    result = scores.new_empty((rows, k + 1), dtype=torch.float32)
    grid = (-(-rows // tile.rows),)
    launch(log_esp_kernel, grid, 1, scores, buffer, result, rows, tiles.parts, tile)
    return result


def topk_marginals(scores: Tensor, k: int) -> Tensor:
    """Marginals of (R, n) scores, (R, n), in their dtype."""
    problem, buffer, tiles = _states(scores, k)
    rows, tile = scores.shape[0], tiles.constants
    grid = (-(-rows // tile.rows),)
    launch(marginal_constants_kernel, grid, 1, scores, buffer, rows, tiles.parts, tile)
    one = scores.new_ones((), dtype=torch.float32)
    return write_gradient(problem, buffer, one, 1.0, tiles)


def _states(scores: Tensor, k: int) -> tuple[Problem, Tensor, Plan]:
    problem, k = rows_of(scores), int(k)
    tiles = plan(*scores.shape, alignment(problem.scores), k, exact=True)
    buffer = new_buffer(scores, k)
    read_states(problem, buffer, 1.0, tiles)
    return problem, buffer, tiles
