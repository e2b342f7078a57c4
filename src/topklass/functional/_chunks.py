"""The loss of a linear layer's logits in chunks of rows: never all logits at once.

The logits of a chunk, their losses and their gradient are made while the chunk is there, and the
gradient is multiplied on to the input, the weight and the bias at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from topklass._checks import Options, every_class_counts
from topklass._targets import Target, some_rows
from topklass.functional._contract import RowLoss
from topklass.reference.power_sums import wide_dtype, working_dtype

LEAST_BYTES, MOST_BYTES = 2**29, 7 * 2**28
"""Memory of a chunk by default: a little less than that of the weight, within these bounds."""
EVEN_ROWS = 128
"""Matrices of a multiple of so many rows are multiplied fastest."""
SLICE_ELEMENTS = 2**22
"""Of a product that is added to a gradient of higher precision: 16 MiB of float32."""
WIDENS = hasattr(torch.ops.aten.mm, "dtype")
"""Whether GPUs multiply matrices of half precision into float32, from PyTorch 2.8 on."""

Wanted = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
NONE: Gradients = (None, None, None)


class Problem(NamedTuple):
    """A loss of the logits of a layer."""

    loss: RowLoss
    targets: Target
    """Class indices (N, 1), class probabilities (N, C), or those of a few classes."""
    options: Options
    total: Tensor | None
    """What the mean divides by."""
    factor: float
    """The result is multiplied by it."""
    dtype: torch.dtype
    """Of logits."""
    chunk_bytes: int
    most_classes: int = 0
    """For which chunks are planned, if not for those of the weight: the most of any rank."""
    share: float = 1.0
    """Sums over rows are multiplied by it before they are rounded."""


def in_chunks(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    outgoing: Tensor | None,
    wanted: Wanted,
    step: int,
) -> tuple[Tensor, Gradients]:
    """(N) losses, and with an outgoing gradient, () or (N), those of input, weight and bias.

    A chunk has ``step`` rows.
    """
    count, dtype = len(input), problem.dtype
    wide = working_dtype(dtype)
    narrow, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    losses = input.new_empty(count, dtype=wide_dtype(input))
    options = problem.options._replace(reduction="none")
    of_input, of_weight, of_bias = NONE
    if outgoing is not None:
        of_input = torch.empty_like(input) if wanted[0] else None
        if wanted[1]:
            of_weight = _new_gradient(weight, count, step, problem)
        of_bias = input.new_zeros(len(weight), dtype=wide) if wanted[2] else None
    for start in range(0, count, step):
        rows = slice(start, start + step)
        features, targets = input[rows].to(dtype), some_rows(problem.targets, rows)
        logits = torch.nn.functional.linear(features, narrow, shift)
        if outgoing is None:
            losses[rows] = problem.loss.losses(logits, targets, options)
        else:
            scale = outgoing[rows] if outgoing.dim() else outgoing
            losses[rows], slopes = problem.loss.losses_and_gradient(logits, targets, options, scale)
            if of_input is not None:
                of_input[rows] = slopes @ narrow
            if of_weight is not None:
                add_product(of_weight, slopes.t(), features, start == 0, problem.share)
            if of_bias is not None:
                of_bias += slopes.sum(0, dtype=wide).mul_(problem.share)
            del slopes
        del logits  # before the next chunk's are made
    return losses, (
        of_input,
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None or bias is None else of_bias.to(bias.dtype),
    )


def chunk_rows(input: Tensor, weight: Tensor, problem: Problem) -> int:
    """Rows of a chunk, at least one."""
    classes = problem.most_classes or len(weight)
    row = input.new_empty((), dtype=problem.dtype).expand(1, classes)
    targets, options = problem.targets, problem.options
    each = 1
    if len(input):
        first = some_rows(targets, slice(1))
        each = problem.loss.gradient_bytes(row, first, options)
    rows = problem.chunk_bytes // max(1, classes * each)
    if rows == 0 and every_class_counts(targets, options):
        raise RuntimeError(
            f"class probabilities and label smoothing take the loss of every class as the label: "
            f"{classes * each} bytes for one row of {classes} classes, got "
            f"chunk_bytes={problem.chunk_bytes}. Raise chunk_bytes, or pass class indices and "
            f"label_smoothing=0"
        )
    count = max(1, len(input))
    equal = -(-count // -(-count // max(1, rows)))  # rather than a last chunk of few rows
    even = -(-equal // EVEN_ROWS) * EVEN_ROWS
    return even if even <= rows else equal


def default_bytes(weight: Tensor) -> int:
    """Memory of a chunk, if none is given."""
    return min(max(LEAST_BYTES, weight.nbytes // 8 * 7), MOST_BYTES)


def _new_gradient(weight: Tensor, count: int, step: int, problem: Problem) -> Tensor:
    """Room for the gradient of the weight: in float32, if that fits and rounding would add up."""
    dtype, wide = weight.dtype, working_dtype(weight.dtype)
    if step < count and weight.numel() * wide.itemsize <= problem.chunk_bytes:
        dtype = wide
    if count == 0:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def add_product(
    total: Tensor, left: Tensor, right: Tensor, first: bool, share: float = 1.0
) -> None:
    """``total += share · left @ right``, (C, R) and (R, d), rounded once; ``=`` the first time."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1, alpha=share)
        return
    step = max(1, SLICE_ELEMENTS // max(1, total.shape[1]))
    for start in range(0, len(total), step):
        part = total[start : start + step]
        product = _widened(left[start : start + step], right, total.dtype)
        if share != 1:
            product.mul_(share)
        if first:
            part.copy_(product)
        else:
            part.add_(product)
        del product


def _widened(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in another precision, without rounding to that of the factors."""
    if left.is_cuda and WIDENS and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
