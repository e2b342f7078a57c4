"""The gradient of the noised top-k and its loss: sparse, from the chosen classes alone."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

ROWS = tl.constexpr(8)
"""Rows of a tile."""
BLOCK = tl.constexpr(128)
"""Columns that are filled together."""


class Kept(NamedTuple):
    """What the forward pass leaves; the operator has no buffer."""

    chosen: Any
    slopes: Any
    buffer: Any


@triton.jit
def fill_with_nan(gradient, spoilt, columns):
    """Fill the rows of a gradient, pointers (R), that are spoilt, if there are any."""
    if tl.max(spoilt.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)[None, :]
            there = spoilt[:, None] & (column < columns)
            tl.store(gradient[:, None] + column, float("nan"), there)


@triton.jit(
    do_not_specialize=("rows", "columns", "samples", "outgoing_stride"),
    do_not_specialize_on_alignment=("labels", "outgoing"),
)
def noised_gradient_kernel(
    labels,
    kept,
    outgoing,
    gradient,
    rows,
    columns,
    samples,
    outgoing_stride,
    SAMPLES: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Write the shares of the chosen classes, and −1 for the label, into a gradient of zeros.

    A row whose slope is NaN becomes NaN throughout.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    sample = tl.arange(0, SAMPLES)[None, :]
    used = inside[:, None] & (sample < samples)
    line = kept.chosen + row * samples
    place = tl.load(line[:, None] + sample, used, -1)
    count = tl.zeros((ROWS, SAMPLES), tl.float32)
    for b in range(samples):
        count += (place == tl.load(line + b, inside, -2)[:, None]).to(tl.float32)
    scale = tl.load(outgoing + row * outgoing_stride, inside, 0.0).to(tl.float32)
    slope = tl.load(kept.slopes + row, inside, 0.0)
    if MEAN:
        scale = scale / tl.load(kept.buffer).to(tl.float32)
    scale = tl.where(slope == 0, 0.0, scale * slope)
    if labels is not None:
        label = tl.load(labels + row, inside, -1)
        hits = tl.sum((used & (place == label[:, None])).to(tl.float32), 1)
        legal = inside & (label >= 0) & (label < columns) & (scale != 0)
        tl.store(gradient + row * columns + label, scale * (hits / samples - 1), legal)
        used = used & (place != label[:, None])
    out = gradient + row[:, None] * columns + place
    tl.store(out, scale[:, None] * count / samples, used & (place >= 0))
    fill_with_nan(gradient + row * columns, slope != slope, columns)
