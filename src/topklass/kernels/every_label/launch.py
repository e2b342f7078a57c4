"""Losses of every label on a GPU: smooth loss, top-k cross-entropy, lists of several lengths.

The forward pass reads the scores twice: for the states of rows, by the first kernel of the smooth
loss, and for the losses of all classes in the tail (``classes.py``). In between the states become
polynomials (``marginals.py``); afterwards the losses of leaders are added, and the slopes follow
(``losses.py``). The backward pass reads the scores once more and writes their gradient
(``gradient.py``).
"""

from dataclasses import replace
from functools import lru_cache
from math import expm1
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from topklass._checks import Options
from topklass._lists import Lists, leaders
from topklass.kernels.every_label.classes import Numbers, Target, classes_kernel
from topklass.kernels.every_label.gradient import gradient_kernel
from topklass.kernels.every_label.losses import losses_kernel
from topklass.kernels.every_label.marginals import marginals_kernel
from topklass.kernels.every_label.polynomials import ListTile
from topklass.kernels.smooth.launch import (
    LOG2_E,
    MOST_PROGRAMS,
    alignment,
    halves,
    launch,
    margins_and_number,
    new_buffer,
    new_gradient,
    new_result,
    plan,
    power_of_two,
    read_states,
    room_for_heads,
    row_stride,
    rows_of,
    shared_counter,
)
from topklass.kernels.smooth.launch import Plan as StatesPlan
from topklass.kernels.smooth.row_constants import Outputs
from topklass.kernels.smooth.row_state import Tile

WIDEST = 512
"""Columns of a tile of the gradient."""


class ListLoss(Protocol):
    """A loss of random lists."""

    def lists(self) -> Lists:
        """Its parameters."""


class Plan(NamedTuple):
    """How the work on rows is divided."""

    states: StatesPlan
    merged: Tile
    """Of the second kernel."""
    classes: ListTile
    """Of the third."""
    losses: ListTile
    """Of the fourth."""
    gradient: ListTile
    """Of the fifth."""


@lru_cache(maxsize=1024)
def plan_of_lists(
    rows: int,
    columns: int,
    aligned: int,
    lengths: tuple[int, ...],
    chances: tuple[float, ...],
    margin: bool,
    reduction: str,
) -> Plan:
    """Tiles for lists of some lengths."""
    longest = max(lengths)
    count = min(leaders(longest), columns)
    slots = room_for_heads(count)
    states = plan(rows, columns, aligned, count)
    states = states._replace(states=replace(states.states, precision=0))
    merged = Tile(count, slots, 1, parts=power_of_two(states.parts))
    lists = ListTile(lengths, chances, longest, count, slots, margin, aligned=aligned)
    any_lists = replace(lists, lengths=(), chances=())  # one compilation for all of them
    wide = min(WIDEST, max(32, power_of_two(columns)))
    mean = "mean" if reduction == "mean" else "none"
    return Plan(
        states,
        merged,
        replace(any_lists, rows=states.states.rows, block=states.states.block),
        replace(lists, aligned=1, reduction=reduction),
        replace(any_lists, rows=max(1, 256 // wide), block=wide, reduction=mean),
    )


class Call(NamedTuple):
    """What all kernels of a call receive."""

    scores: Tensor
    target: Target
    numbers: Numbers
    tiles: Plan
    scale: float
    temperature: float


def _call(scores: Tensor, target: Tensor, loss: ListLoss, options: Options) -> Call:
    lists, smoothing = loss.lists(), float(options.label_smoothing)
    margins, margin = margins_and_number(lists.margin, scores)
    soft = target.is_floating_point()
    problem = rows_of(scores, None if soft else target, margins, options.weight)
    given = Target(
        problem.labels, target.contiguous() if soft else None, problem.weights, problem.margins
    )
    rows, columns = scores.shape
    numbers = Numbers(
        *halves(1 / lists.temperature),
        *halves(margin),
        *halves(smoothing / columns),
        *halves(1 - smoothing),
        LOG2_E / lists.temperature,
        -expm1(-margin),
    )
    tiles = plan_of_lists(
        rows,
        columns,
        alignment(problem.scores),
        tuple(lists.lengths),
        tuple(lists.chances),
        margins is not None or margin != 0,
        options.reduction,
    )
    return Call(problem.scores, given, numbers, tiles, lists.scale, lists.temperature)


def new_records(scores: Tensor, longest: int) -> Tensor:
    """Room for a number, the records of rows, and two sums for each program, at most."""
    size = 1 + scores.shape[0] * (2 * longest + 2 * leaders(longest) + 5) + 2 * MOST_PROGRAMS
    return scores.new_empty(size, dtype=torch.float64)


def forward(
    scores: Tensor,
    target: Tensor,
    loss: ListLoss,
    options: Options,
    differentiate: bool,
    counter: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs.

    The target has labels, (R), or class probabilities, (R, n).
    """
    counter = shared_counter(scores) if counter is None else counter
    scores, given, numbers, tiles, scale, temperature = _call(scores, target, loss, options)
    rows, columns = scores.shape
    lists, parts = tiles.losses, tiles.states.parts
    states = new_buffer(scores, lists.leaders)
    buffer = new_records(scores, lists.k)
    sums = states.new_empty(rows * parts * (lists.k + 1))
    result = new_result(scores, options.reduction)
    read_states(rows_of(scores), states, temperature, tiles.states)
    launch(
        marginals_kernel,
        (rows,),
        1,
        scores,
        states,
        buffer,
        rows,
        parts,
        *halves(1 / temperature),
        tiles.merged,
        lists,
    )
    launch(
        classes_kernel,
        (-(-rows // tiles.classes.rows), parts),
        tiles.states.warps,
        scores,
        scores,
        given,
        numbers,
        buffer,
        sums,
        states,
        rows,
        columns,
        scores.stride(0),
        tiles.states.piece,
        tiles.classes,
    )
    launch(
        losses_kernel,
        (min(rows, MOST_PROGRAMS),),
        1 if lists.slots <= 8 else 4,
        scores,
        scores,
        given,
        numbers,
        states,
        sums,
        Outputs(buffer, counter, result),
        rows,
        columns,
        scores.stride(0),
        parts,
        int(options.ignore_index),
        *halves(scale),
        lists,
    )
    return result, (buffer,)


def backward(
    outgoing: Tensor,
    scores: Tensor,
    target: Tensor,
    saved: tuple[Tensor, ...],
    loss: ListLoss,
    options: Options,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R).

    It is written into ``out``, if given: contiguous, and possibly the scores themselves.
    """
    (buffer,) = saved
    result = new_gradient(scores) if out is None else out
    scores, given, numbers, tiles, scale, temperature = _call(scores, target, loss, options)
    rows, columns = scores.shape
    tile = tiles.gradient
    launch(
        gradient_kernel,
        (-(-rows // tile.rows), -(-columns // tile.block)),
        1,
        scores,
        scores,
        given,
        numbers,
        buffer,
        outgoing,
        result,
        rows,
        columns,
        scores.stride(0),
        row_stride(outgoing),
        *halves(scale / temperature),
        tile,
    )
    return result
