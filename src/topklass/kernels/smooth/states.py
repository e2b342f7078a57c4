"""The states of rows for others to merge, and the gradient that comes back for them.

Both by the kernels of the smooth loss; of :mod:`topklass.reference.row_states`, which has the same
two functions for rows in one piece, see there.
"""

import torch
from torch import Tensor

from topklass.kernels.smooth import launch


def read_states(
    scores: Tensor, labels: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads, their classes and power sums of the pieces of rows without their labels, (R, P, k)."""
    problem = launch.rows_of(scores, labels.squeeze(1).contiguous())
    tiles = launch.plan(*scores.shape, launch.alignment(problem.scores), k)
    buffer = launch.new_buffer(scores, k)
    launch.read_states(problem, buffer, temperature, tiles)
    rows, size = scores.shape[0] * tiles.parts, 3 * k + 2
    states = buffer[1 : 1 + rows * size].view(scores.shape[0], tiles.parts, size)
    heads, places, sums, _ = states.split((k, k, k, 2), 2)
    heads, order = heads.sort(2, descending=True)
    return heads, places.gather(2, order).long(), sums


def write_gradient(
    scores: Tensor,
    labels: Tensor,
    heads: Tensor,
    places: Tensor,
    slopes: tuple[Tensor, Tensor, Tensor],
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n) from slopes of heads, tail and label."""
    of_heads, coefficients, of_label = slopes
    k = heads.shape[1]
    threshold = heads[:, -1:].clamp(min=torch.finfo(torch.float32).min)
    # A slope of 0 tells the kernel that the whole row has none; that of a label elsewhere is lost.
    of_label = of_label.masked_fill(labels < 0, 1.0)
    constants = torch.cat([of_heads, places, coefficients, threshold, of_label], 1).flatten()
    buffer = torch.cat([constants.new_ones(1), constants])
    problem = launch.rows_of(scores, labels.squeeze(1).contiguous())
    tiles = launch.plan(*scores.shape, launch.alignment(problem.scores), k)
    one = scores.new_ones((), dtype=torch.float32)
    tiles = tiles._replace(parts=1)
    return launch.write_gradient(problem, buffer, one, temperature, tiles, out)
