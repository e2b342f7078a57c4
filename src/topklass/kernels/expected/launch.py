"""The expected k-th largest score under noise, and the loss above it, on a GPU.

The forward pass reads the scores twice, for the largest of each row and for the moments of its bins
(``bins.py``). A product with fixed tables makes them sums at the nodes of an integral, which
``integral.py`` takes. All this is done for some rows after others, so that memory is bounded. The
backward pass reads the scores once more and writes their gradient.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import Options
from topklass.kernels.expected.bins import (
    BINS,
    TERMS,
    Constants,
    Tile,
    gradient_kernel,
    heads_kernel,
    moments_kernel,
)
from topklass.kernels.expected.integral import (
    Memory,
    Nodes,
    Numbers,
    Rows,
    RowTile,
    integral_kernel,
)
from topklass.kernels.noised.launch import HingeLoss
from topklass.kernels.smooth.launch import (
    alignment,
    launch,
    margins_and_number,
    new_gradient,
    new_result,
    power_of_two,
    room_for_heads,
    row_stride,
    rows_of,
    shared_counter,
)
from topklass.kernels.smooth.row_constants import Outputs
from topklass.kernels.smooth.row_state import Problem
from topklass.reference import expected_tables
from topklass.reference.power_sums import kept_out

MOST_PROGRAMS = 2048
MOST_BYTES = 2**27
"""Of memory for coefficients of programs, and for moments and sums of rows, unless 1 or 16 of them
need more."""
MOST_PIECES = 2048
"""Rows times the pieces of each, unless there are more rows."""
WIDTH = expected_tables.WIDTH
STATE = BINS.value * TERMS.value
"""Moments of a row."""


class Expected(NamedTuple):
    """The parameters of an expected top-k, or of the hinge loss above it."""

    k: int
    """Rank."""
    epsilon: float
    margin: float = 0.0
    scale: float = 1.0


def of_loss(loss: HingeLoss, margin: float) -> Expected:
    """The label competes with the (k + 1)-th largest score."""
    return Expected(int(loss.k) + 1, float(loss.epsilon), margin, float(loss.scale))


class Saved(NamedTuple):
    """What the gradient needs: see ``bins.Constants``, and the weight of all rows in a buffer."""

    heads: Tensor
    places: Tensor
    of_heads: Tensor
    of_moments: Tensor
    slopes: Tensor
    buffer: Tensor


class DeviceTables(NamedTuple):
    """Those of ``reference/expected_tables.py`` as the kernels take them."""

    nodes: Nodes
    bins: int
    sums: Tensor
    """From moments to sums, (STATE, k·A)."""


@cache
def device_tables(classes: int, k: int, device: torch.device) -> DeviceTables:
    """The tables on a device, kept for good: CUDA graphs may refer to them.

    They are made in a thread of their own, whose memory belongs to no graph.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(new_tables, classes, k, device).result()


def new_tables(classes: int, k: int, device: torch.device) -> DeviceTables:
    """The tables on a device, with room for all bins."""
    fixed = expected_tables.tables(classes, k)
    nodes = (t.to(device) for t in (fixed.nodes, fixed.weights, fixed.log_scale.exp()))
    by_bin = fixed.sums.view(k, fixed.bins, TERMS.value, -1)
    every = F.pad(by_bin, (0, 0, 0, 0, 0, BINS.value - fixed.bins)).permute(2, 1, 0, 3)
    return DeviceTables(Nodes(*nodes), fixed.bins, every.reshape(STATE, -1).to(device))


def tables_for(scores: Tensor, k: int) -> DeviceTables:
    """Those for the number of classes, rounded up."""
    return device_tables(power_of_two(scores.shape[1]), k, scores.device)


def room_for_saved(scores: Tensor, k: int) -> Saved:
    """Room for what the gradient needs."""
    rows, columns = scores.shape
    kept = kept_out(k, columns)
    return Saved(
        scores.new_empty(rows, kept, dtype=torch.float32),
        scores.new_empty(rows, kept, dtype=torch.int32),
        scores.new_empty(rows, kept, dtype=torch.float32),
        scores.new_empty(rows, STATE, dtype=torch.float32),
        scores.new_empty(rows, dtype=torch.float32),
        scores.new_empty(1 + 2 * MOST_PROGRAMS, dtype=torch.float64),
    )


def read_rows(scores: Tensor, saved: Saved, expected: Expected, bins: int) -> Tensor:
    """Moments (R, STATE) of rows, in float64; leaves their largest scores, and classes of these."""
    rows, columns = scores.shape
    kept = saved.heads.shape[1]
    block = min(1024, max(32, power_of_two(columns)))
    count = -(-columns // block)
    piece = -(-count // max(1, min(count // 4, MOST_PIECES // rows, 32))) * block
    parts = -(-columns // piece)
    tile = Tile(kept, room_for_heads(kept), 1, block, alignment(scores), joined=parts == 1)
    heads, places = saved.heads, saved.places
    if parts > 1:
        heads, places = (t.new_empty(rows, parts * kept) for t in (heads, places))
    moments = scores.new_empty(rows, parts * STATE, dtype=torch.float64)
    rate = 1 / (WIDTH * expected.epsilon)
    numbers = (columns, scores.stride(0), piece, expected.k, rate, float(bins), tile)
    grid = (rows, parts)
    launch(heads_kernel, grid, 1, scores, scores, heads, places, moments, *numbers)
    if parts > 1:
        heads, order = heads.sort(1, descending=True)  # NaN first
        saved.heads.copy_(heads[:, :kept])
        saved.places.copy_(places.gather(1, order[:, :kept]))
        launch(moments_kernel, grid, 1, scores, scores, saved.heads, moments, *numbers)
        moments = moments.view(rows, parts, STATE).sum(1)
    return moments


def integrate(
    problem: Problem,
    expected: Expected,
    ignore_index: int,
    reduction: str,
    differentiate: bool,
    counter: Tensor,
) -> tuple[Tensor, Saved]:
    """The expected top-k or the reduced loss, and what its gradient needs."""
    scores, k = problem.scores, expected.k
    rows, columns = scores.shape
    fixed = tables_for(scores, k)
    result, saved = new_result(scores, reduction), room_for_saved(scores, k)
    kept, nodes = saved.heads.shape[1], len(fixed.nodes.t)
    width = max(64, power_of_two(nodes))
    size = (kept + 1 + 2 * k) * width
    chunk = max(16, MOST_BYTES // (8 * (STATE + k * nodes)) // 16 * 16)  # keeps rows aligned
    programs = max(1, min(rows, chunk, MOST_PROGRAMS, MOST_BYTES // (8 * size)))
    memory = scores.new_empty(programs * size, dtype=torch.float64)
    for first in range(0, rows, chunk):
        some = slice(first, first + chunk)
        part = Saved(*(t if t is saved.buffer else t[some] for t in saved))
        whole = scores[some]
        labels = None if problem.labels is None else problem.labels[some]
        moments = read_rows(whole, part, expected, fixed.bins)
        sums = moments @ fixed.sums
        launch(
            integral_kernel,
            (programs,),
            width // 32,
            scores,
            problem._replace(scores=whole, labels=labels),
            Rows(part.heads, sums, part.of_heads, part.slopes),
            fixed.nodes,
            Outputs(saved.buffer, counter, result[some] if reduction == "none" else result),
            Memory(*memory.split([programs * n * width for n in (kept + 1, k, k)])),
            Numbers(expected.epsilon, expected.margin, expected.scale),
            len(whole),
            columns,
            scores.stride(0),
            k,
            kept,
            nodes,
            int(ignore_index),
            first,
            RowTile(width, differentiate, reduction),
        )
        if differentiate:
            part.of_moments.copy_(torch.mm(sums, fixed.sums.t(), out=moments))
    return result, saved


def write_gradient(
    outgoing: Tensor, problem: Problem, saved: Saved, expected: Expected, mean: bool
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R)."""
    scores, kept = problem.scores, saved.heads.shape[1]
    rows, columns = scores.shape
    result = new_gradient(scores)
    wide = min(512, max(32, power_of_two(columns)))
    tall = max(1, 256 // wide)
    launch(
        gradient_kernel,
        (-(-rows // tall), -(-columns // wide)),
        1,
        scores,
        problem,
        Constants(*saved[:5]),
        outgoing,
        saved.buffer,
        result,
        rows,
        columns,
        scores.stride(0),
        expected.k,
        row_stride(outgoing),
        1 / (WIDTH * expected.epsilon),
        float(expected_tables.bin_count(power_of_two(columns), expected.k)),
        Tile(kept, room_for_heads(kept), tall, wide, alignment(scores), mean=mean),
    )
    return result


def forward(
    scores: Tensor, labels: Tensor, loss: HingeLoss, options: Options, differentiate: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reduced loss of (R, n) scores, float32, or (R) losses; and what the gradient needs."""
    margins, margin = margins_and_number(loss.margin, scores)
    problem = rows_of(scores, labels, margins, options.weight)
    return integrate(
        problem,
        of_loss(loss, margin),
        options.ignore_index,
        options.reduction,
        differentiate,
        shared_counter(scores),
    )


def backward(
    outgoing: Tensor,
    scores: Tensor,
    labels: Tensor,
    saved: tuple[Tensor, ...],
    loss: HingeLoss,
    options: Options,
) -> Tensor:
    """The gradient (R, n), scaled by the outgoing one, () or (R)."""
    problem, expected = rows_of(scores, labels), of_loss(loss, 0.0)
    return write_gradient(outgoing, problem, Saved(*saved), expected, options.reduction == "mean")


def expected_topk(
    scores: Tensor, k: int, epsilon: float, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """The expected k-th largest of (R, n) scores, (R), and its gradient, (R, n) or empty."""
    expected, problem = Expected(int(k), float(epsilon)), rows_of(scores)
    value, saved = integrate(problem, expected, 0, "none", differentiate, shared_counter(scores))
    if not differentiate:
        return value, value.new_empty(0)
    return value, write_gradient(value.new_ones(()), problem, saved, expected, False)
