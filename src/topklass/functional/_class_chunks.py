"""The loss of a linear layer's logits in chunks of classes: for so many that few rows fit.

Chunks of rows read the weight again for each chunk, and add to its gradient. Here every chunk has
all rows and some of the classes. The first pass reads the states of rows, which merge; the second
makes the logits again and their gradient with them. That is one product more, but each part of the
weight is read three times in all, and its gradient is written once, without sums in between.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import every_class_counts
from topklass._targets import SparseTarget, labels_within
from topklass._transforms import graph_of_its_own
from topklass.functional._chunks import Gradients, Problem, Wanted, add_product
from topklass.functional._contract import margin_of_label, working
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import ListMixture, losses_of_states
from topklass.operators.row_states import Slopes, find_backend, read_states, states_gradient
from topklass.reference.power_sums import LARGEST_K, wide_dtype, working_dtype
from topklass.reference.row_states import States, merged

OPERATIONS_PER_BYTE = 150
"""Of products in half precision, in the time in which a GPU reads a byte."""
STARTING_BYTES = 10**10
"""What a GPU reads in the time in which the many small kernels of chunks of classes start."""
MULTIPLE = 64
"""Of classes in a chunk, if it has as many: unaligned rows of logits slow products threefold."""


def fewer_bytes(input: Tensor, classes: int, problem: Problem, rows: int) -> bool:
    """Whether chunks of classes serve, and take less time than chunks of so many rows.

    Another product, and logits written and read once more, against a weight that is read twice and
    a gradient that is read and written for each further chunk of rows.
    """
    loss, options = problem.loss, problem.options
    if not input.is_cuda or not isinstance(loss, (SmoothHinge, ListMixture)):
        return False
    if isinstance(problem.targets, SparseTarget) or every_class_counts(problem.targets, options):
        return False
    if max(loss.lengths) > LARGEST_K[working_dtype(problem.dtype)]:
        return False
    count, features = input.shape
    size, chunks = problem.dtype.itemsize, -(-count // rows)
    again = 2 * size * count + 2 * count * features / OPERATIONS_PER_BYTE
    saved = 4 * size * features * (chunks - 1) - again
    return saved * classes > STARTING_BYTES


def in_class_chunks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    outgoing: Tensor | None,
    wanted: Wanted,
) -> tuple[Tensor, Gradients]:
    """(N) losses, and with an outgoing gradient, () or (N), those of input, weight and bias."""
    loss, dtype, wide = problem.loss, problem.dtype, working_dtype(problem.dtype)
    assert isinstance(loss, (SmoothHinge, ListMixture))
    features = input.to(dtype)
    backend = find_backend(features.new_empty((1, 1)).expand(len(input), len(weight)), 1)

    def logits(piece: slice) -> Tensor:
        shift = None if bias is None else bias[piece].to(dtype)
        return F.linear(features, weight[piece].to(dtype), shift)

    assert isinstance(problem.targets, Tensor)
    labels = problem.targets.masked_fill(problem.targets == problem.options.ignore_index, -1)
    pieces = _pieces(weight, problem)
    row = _read(backend, loss, pieces, logits, labels, len(weight))
    with graph_of_its_own():
        for leaf in (*row.states, row.label):
            leaf.requires_grad_(outgoing is not None)
        losses = _losses(loss, len(weight), problem, row)
    if outgoing is None:
        return losses, (None, None, None)
    scale = outgoing.to(losses.dtype).expand_as(losses)
    slopes = Slopes(*torch.autograd.grad(losses, (*row.states, row.label), scale))
    heads = row.states.heads.detach()

    of_input = torch.empty_like(input, dtype=wide) if wanted[0] else None
    of_weight = of_bias = None
    if wanted[1]:
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if wanted[2] and bias is not None:
        of_bias = torch.empty_like(bias)
    for i, piece in enumerate(pieces):
        made = logits(piece)
        count = made.shape[1]
        here = labels_within(labels, piece.start, count)
        places = labels_within(row.places, piece.start, count, nowhere=count)
        gradient = states_gradient(
            backend, made, here, heads, places, slopes, loss.temperature, out=made
        )
        if of_input is not None:
            add_product(of_input, gradient, weight[piece].to(dtype), first=i == 0)
        if of_weight is not None:
            add_product(of_weight[piece], gradient.t(), features, True, problem.share)
        if of_bias is not None:
            of_bias[piece] = gradient.sum(0, dtype=wide).mul_(problem.share)
        del made, gradient
    of_input = None if of_input is None else of_input.to(input.dtype)
    return losses.detach(), (of_input, of_weight, of_bias)


def _pieces(weight: Tensor, problem: Problem) -> list[slice]:
    """Slices of the classes whose logits fit into a chunk."""
    rows, classes = len(problem.targets), len(weight)
    most = max(1, problem.chunk_bytes // (max(1, rows) * problem.dtype.itemsize))
    step = classes_of_a_piece(classes, most)
    return [slice(start, min(start + step, classes)) for start in range(0, classes, step)]


def classes_of_a_piece(classes: int, most: int) -> int:
    """At most so many, such that pieces are about equal.

    Example:
        >>> classes_of_a_piece(10_000_000, 917_504), classes_of_a_piece(100, 30)
        (909120, 25)
    """
    multiple = MULTIPLE if most >= MULTIPLE else 1
    most = most // multiple * multiple
    equal = -(-classes // -(-classes // most))
    return -(-equal // multiple) * multiple


class _Rows(NamedTuple):
    """What the first pass finds."""

    states: States
    places: Tensor
    """The classes of the heads, (N, k); the number of all classes for absent ones."""
    label: Tensor
    """The labels' scores, (N, 1)."""


def _read(
    backend: Any,
    loss: SmoothHinge | ListMixture,
    pieces: list[slice],
    logits: Callable[[slice], Tensor],
    labels: Tensor,
    classes: int,
) -> _Rows:
    """Read the logits of each piece once; only the states of rows so far are kept."""
    k, temperature = max(loss.lengths), loss.temperature
    rows: _Rows | None = None
    for piece in pieces:
        here = labels_within(labels, piece.start, piece.stop - piece.start)
        heads, places, sums, label = read_states(backend, logits(piece), here, k, temperature)
        places = (places + piece.start).masked_fill(heads == -inf, classes)
        if rows is not None:
            before = rows.states
            heads, sums = (
                torch.stack(each, 1) for each in ((before.heads, heads), (before.sums, sums))
            )
            (heads, sums), chosen = merged(heads, sums, temperature)
            places = torch.cat([rows.places, places], 1).gather(1, chosen)
            label = rows.label + label
        rows = _Rows(States(heads, sums), places, label)
    assert rows is not None
    return rows


def _losses(loss: SmoothHinge | ListMixture, classes: int, problem: Problem, row: _Rows) -> Tensor:
    """(N) losses."""
    labels, options = problem.targets, problem.options
    assert isinstance(labels, Tensor)
    ignored = labels == options.ignore_index
    known = (labels >= 0) & (labels < classes)
    labels = labels.masked_fill(ignored | ~known, 0)
    losses = losses_of_states(loss, row.states, row.label, margin_of_label(loss.margin, labels))
    if options.weight is not None:
        losses = losses * working(options.weight)[labels]
    # A target that is no class has the loss NaN, an ignored one 0, and a gradient of 0.
    losses = losses * torch.where(known | ignored, 1.0, torch.nan)
    return losses.masked_fill(ignored, 0.0).squeeze(1).to(wide_dtype(row.label))
