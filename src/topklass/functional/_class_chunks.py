"""The loss of a linear layer's logits in chunks of classes: for so many that few rows fit.

Chunks of rows read the weight again for each chunk, and add to its gradient. Here every chunk has
all rows and some of the classes. The first pass reads the states of rows, which merge; the second
makes the logits again and their gradient with them. That is one product more, but each part of the
weight is read three times in all, and its gradient is written once, without sums in between.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass._checks import every_class_counts
from topklass._targets import SparseTarget
from topklass._transforms import graph_of_its_own
from topklass.functional._chunks import Gradients, Problem, Wanted, add_product
from topklass.functional._contract import margin_of_label, working
from topklass.functional.smooth import SmoothHinge
from topklass.functional.topk_cross_entropy import ListMixture
from topklass.operators.row_states import Slopes, find_backend, read_states, states_gradient
from topklass.reference.power_sums import LARGEST_K, wide_dtype, working_dtype
from topklass.reference.row_states import merged, shorter, smooth_gap

OPERATIONS_PER_BYTE = 150
"""Of products in half precision, in the time in which a GPU reads a byte."""
MULTIPLE = 64
"""Of classes in a chunk, if it has as many: unaligned rows of logits slow products threefold."""


def fewer_bytes(input: Tensor, problem: Problem, rows: int) -> bool:
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
    return 4 * size * features * (chunks - 1) > again


class _Piece(NamedTuple):
    """Some of the classes."""

    classes: slice
    labels: Tensor
    """(N, 1), −1 for those of other pieces."""


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

    def logits(piece: _Piece) -> Tensor:
        shift = None if bias is None else bias[piece.classes].to(dtype)
        return F.linear(features, weight[piece.classes].to(dtype), shift)

    pieces = _pieces(weight, problem)
    states = [
        read_states(backend, logits(piece), piece.labels, max(loss.lengths), loss.temperature)
        for piece in pieces
    ]
    heads, places, sums, of_labels = (torch.stack(each, 1) for each in zip(*states, strict=True))
    leaves = heads, sums, of_labels.sum(1)
    with graph_of_its_own():
        for leaf in leaves:
            leaf.requires_grad_(outgoing is not None)
        losses = _losses(loss, len(weight), problem, *leaves)
    if outgoing is None:
        return losses, (None, None, None)
    scale = outgoing.to(losses.dtype).expand_as(losses)
    slopes = Slopes(*torch.autograd.grad(losses, leaves, scale))

    of_input = torch.empty_like(input, dtype=wide) if wanted[0] else None
    of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    of_bias = None if bias is None else torch.empty_like(bias)
    for i, piece in enumerate(pieces):
        own = Slopes(slopes.heads[:, i], slopes.sums[:, i], slopes.label)
        made = logits(piece)
        gradient = states_gradient(
            backend, made, piece.labels, heads[:, i], places[:, i], own, loss.temperature, out=made
        )
        if of_input is not None:
            add_product(of_input, gradient, weight[piece.classes].to(dtype), first=i == 0)
        if wanted[1]:
            add_product(of_weight[piece.classes], gradient.t(), features, first=True)
        if of_bias is not None and wanted[2]:
            of_bias[piece.classes] = gradient.sum(0, dtype=wide)
        del made, gradient
    return losses.detach(), (
        None if of_input is None else of_input.to(input.dtype),
        of_weight if wanted[1] else None,
        of_bias if wanted[2] else None,
    )


def _pieces(weight: Tensor, problem: Problem) -> list[_Piece]:
    """Slices of the classes whose logits fit into a chunk."""
    labels, classes = problem.targets, len(weight)
    assert isinstance(labels, Tensor)
    most = max(1, problem.chunk_bytes // (max(1, len(labels)) * problem.dtype.itemsize))
    step = classes_of_a_piece(classes, most)
    found = []
    for start in range(0, classes, step):
        own = labels - start
        elsewhere = (own < 0) | (own >= min(step, classes - start))
        elsewhere |= labels == problem.options.ignore_index
        found.append(_Piece(slice(start, start + step), own.masked_fill(elsewhere, -1)))
    return found


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


def _losses(
    loss: SmoothHinge | ListMixture,
    classes: int,
    problem: Problem,
    heads: Tensor,
    sums: Tensor,
    of_label: Tensor,
) -> Tensor:
    """(N) losses from the states of pieces, (N, P, k) each, and the labels' scores, (N, 1)."""
    labels, options = problem.targets, problem.options
    assert isinstance(labels, Tensor)
    states, _ = merged(heads, sums, loss.temperature)
    lists = [shorter(states, k, loss.temperature) for k in loss.lengths]
    gaps = [smooth_gap(each, of_label, loss.temperature) for each in lists]
    ignored = labels == options.ignore_index
    known = (labels >= 0) & (labels < classes)
    labels = labels.masked_fill(ignored | ~known, 0)
    losses = loss.of_gaps(gaps, margin_of_label(loss.margin, labels))
    if options.weight is not None:
        losses = losses * working(options.weight)[labels]
    # A target that is no class has the loss NaN, an ignored one 0, and a gradient of 0.
    losses = losses * torch.where(known | ignored, 1.0, torch.nan)
    return losses.masked_fill(ignored, 0.0).squeeze(1).to(wide_dtype(heads))
