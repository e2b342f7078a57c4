"""The smooth top-k loss of longer lists, and of several labels for a row, on a GPU.

The passes are those of ``smooth/launch.py``; what differs is how many scores the states keep.
"""

from functools import lru_cache

import torch
from torch import Tensor

from topklass._checks import Options
from topklass._targets import SparseTarget, Target
from topklass.kernels.smooth.launch import (
    LARGEST_K_JOINED,
    LOG2_E,
    MOST_PROGRAMS,
    SMALL,
    Plan,
    SmoothLoss,
    alignment,
    custom_operator,
    halves,
    launch,
    margins_and_number,
    new_result,
    power_of_two,
    rows_of,
    shared_counter,
    write_gradient,
)
from topklass.kernels.smooth.row_constants import Numbers, Outputs
from topklass.kernels.smooth.row_state import Problem
from topklass.kernels.wide.row_constants import wide_loss_kernel
from topklass.kernels.wide.row_state import WideTile, wide_state_kernel
from topklass.reference.power_sums import LARGEST_K_IN_FLOAT32

NO_INDEX = -100
"""The ignored index where all labels are classes."""
MOST_PIECES = 4096
"""Rows times the pieces of each, unless there are more rows."""
LARGEST_K_OF_SEVERAL_ROWS = 20
"""Beyond it, a thread has too few registers for the power sums of two rows."""
WIDEST = 1024
"""Columns of a tile, which one warp reads: where many scores are kept, a short row at once."""


def kept_out(k: int, labels: int) -> int:
    """How many of the largest scores are kept out of the power sums, so that float32 serves.

    There must be more entries than the label and k heads.
    """
    return k + k // 2 if k > LARGEST_K_IN_FLOAT32 else max(k, k + 2 - labels)


@lru_cache(maxsize=1024)
def plan(
    rows: int,
    columns: int,
    aligned: int,
    k: int,
    labels: int = 1,
    reduction: str = "none",
    apart: bool = False,
) -> Plan:
    """Tiles of one warp: several rows, one row or a piece of it.

    ``apart``: whether the states are wanted, so that the first two kernels cannot be one.
    """
    kept = kept_out(k, labels)
    slots = power_of_two(kept + labels)
    widest = WIDEST if k > LARGEST_K_IN_FLOAT32 else WIDEST // 2
    block = min(widest, max(slots, power_of_two(columns)))
    small = rows * columns <= SMALL and columns <= WIDEST
    joined = small and k <= LARGEST_K_JOINED and slots <= 32 and not apart
    parts, piece = 1, columns
    if not joined:
        tiles = -(-columns // block)
        piece = -(-tiles // max(1, min(tiles, MOST_PIECES // rows, 32))) * block
        parts = -(-columns // piece)

    def tile(rows: int, block: int = 1, parts: int = 1, reduction: str = "none") -> WideTile:
        return WideTile(
            k, slots, rows, block, 0, aligned, parts, joined, reduction, kept=kept, labels=labels
        )

    states = tile(max(1, 256 // block) if k <= LARGEST_K_OF_SEVERAL_ROWS else 1, block)
    tall = states.rows if joined else 1 if parts > 1 else max(1, 32 // slots)
    constants = tile(tall, block, power_of_two(parts), reduction)
    wide = min(1024, max(32, power_of_two(columns)))
    mean = "mean" if reduction == "mean" else "none"
    gradient = tile(max(1, 256 // wide), wide, reduction=mean)
    programs = min(-(-rows // tall), MOST_PROGRAMS)
    return Plan(states, constants, gradient, max(1, slots // 32), parts, piece, programs)


def new_buffer(scores: Tensor, k: int, labels: int = 1) -> Tensor:
    """Room for a number, the states of rows, and two sums for each program, at most."""
    states = torch.sym_max(scores.shape[0], MOST_PIECES)
    size = 1 + states * (2 * (kept_out(k, labels) + labels) + k + 2) + 2 * MOST_PROGRAMS
    return scores.new_empty(size, dtype=torch.float64)


def read_states(
    problem: Problem, buffer: Tensor, temperature: float, ignore_index: int, plan: Plan
) -> None:
    """Write the states of rows into the buffer."""
    rows, columns = problem.scores.shape
    launch(
        wide_state_kernel,
        (-(-rows // plan.states.rows), plan.parts),
        1,
        problem.scores,
        problem,
        buffer,
        rows,
        columns,
        problem.scores.stride(0),
        plan.piece,
        ignore_index,
        LOG2_E / temperature,
        plan.states,
    )


def write_losses(
    problem: Problem,
    outputs: Outputs,
    loss: SmoothLoss,
    margin: float,
    ignore_index: int,
    plan: Plan,
) -> None:
    """Write losses; replace states by constants of the gradient."""
    rows, columns = problem.scores.shape
    k, tau = int(loss.k), float(loss.tau)
    launch(
        wide_loss_kernel,
        (plan.programs,),
        plan.warps,
        problem.scores,
        problem,
        outputs,
        Numbers(*halves(tau), *halves(margin), LOG2_E / (k * tau)),
        rows,
        columns,
        problem.scores.stride(0),
        plan.parts,
        ignore_index,
        plan.constants,
    )


def forward(
    scores: Tensor,
    target: Target,
    loss: SmoothLoss,
    options: Options,
    differentiate: bool,
    counter: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The latter is a buffer with the constants of rows, a by-product of the loss. The target is
    labels (R), or several for a row, (R, m), with how much each of them counts.
    """
    labels, chances = target if isinstance(target, SparseTarget) else (target.unsqueeze(1), None)
    counter = shared_counter(scores) if counter is None else counter
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight, chances)
    k, count = int(loss.k), labels.shape[1]
    tiles = plan(*scores.shape, alignment(problem.scores), k, count, options.reduction)
    buffer, result = new_buffer(scores, k, count), new_result(scores, options.reduction)
    ignore_index = int(options.ignore_index)
    if not tiles.constants.reads:
        read_states(problem, buffer, k * float(loss.tau), ignore_index, tiles)
    outputs = Outputs(buffer, counter, result)
    write_losses(problem, outputs, loss, margin, ignore_index, tiles)
    return result, (buffer,)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    target: Target,
    saved: tuple[Tensor, ...],
    loss: SmoothLoss,
    options: Options,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R).

    It is written into ``out``, if given: contiguous, and possibly the scores themselves.
    """
    count = target.indices.shape[1] if isinstance(target, SparseTarget) else 1
    k, problem = int(loss.k), rows_of(scores)
    tiles = plan(*scores.shape, alignment(problem.scores), k, count, options.reduction)
    return write_gradient(problem, saved[0], outgoing, k * float(loss.tau), tiles, out)


# The losses of each label, from which others make a loss.


def losses_of_labels(scores: Tensor, labels: Tensor, loss: SmoothLoss) -> tuple[Tensor, Tensor]:
    """(R, m) losses of (R, n) scores with (R, m) labels, float32; and the states of rows."""
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels.contiguous(), margins)
    k, count = int(loss.k), labels.shape[1]
    tiles = plan(*scores.shape, alignment(problem.scores), k, count, apart=True)
    states = new_buffer(scores, k, count)
    read_states(problem, states, k * float(loss.tau), NO_INDEX, tiles)
    result = scores.new_empty(labels.shape, dtype=torch.float32)
    outputs = Outputs(states.clone(), shared_counter(scores), result)
    write_losses(problem, outputs, loss, margin, NO_INDEX, tiles)
    return result, states


def gradient_of_labels(
    outgoing: Tensor, scores: Tensor, labels: Tensor, states: Tensor, loss: SmoothLoss
) -> Tensor:
    """The gradient (R, n) of the sum of these losses, each times the outgoing one, (R, m)."""
    margins, margin = margins_and_number(loss.margin, scores)
    chances = outgoing.to(torch.float32).contiguous()
    problem = rows_of(scores, labels.contiguous(), margins, None, chances)
    k, count = int(loss.k), labels.shape[1]
    tiles = plan(*scores.shape, alignment(problem.scores), k, count, apart=True)
    result = new_result(scores, "none")
    constants = states.clone()
    outputs = Outputs(constants, shared_counter(scores), result)
    write_losses(problem, outputs, loss, margin, NO_INDEX, tiles)
    one = scores.new_ones((), dtype=torch.float32)
    return write_gradient(rows_of(scores), constants, one, k * float(loss.tau), tiles)


traced = custom_operator("smooth_loss_of_longer_lists", forward, backward, new_buffer)
