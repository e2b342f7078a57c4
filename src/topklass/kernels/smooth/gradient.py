r"""Third kernel: one more read of the scores, one write of the gradient.

``∂/∂s_i = Σ_j c_j u_i^j`` for the tail, by Horner's rule; the heads and the label, whose slopes are
known, overwrite it. Marginal probabilities have the same form and are written here too.
"""

import triton
import triton.language as tl

from topklass.kernels.smooth.row_state import multiple, relative


@triton.jit
def polynomial(u, constants, inside, scale, K: tl.constexpr):
    """``scale · Σ_j c_j u^j`` of the tail, (R, B), for constants of rows (R)."""
    c = tl.load(constants + 3 * K - 1, inside, 0.0) * scale
    value = u * c.to(u.dtype)[:, None]
    for j in tl.static_range(1, K):
        c = tl.load(constants + 3 * K - 1 - j, inside, 0.0) * scale
        value = (value + c.to(u.dtype)[:, None]) * u
    return value


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "parts", "outgoing_stride"),
    do_not_specialize_on_alignment=("outgoing",),
)
def gradient_kernel(
    problem,
    buffer,
    outgoing,
    gradient,
    rows,
    columns,
    stride,
    parts,
    outgoing_stride,
    rate,
    TILE: tl.constexpr,
):
    """The gradient of a tile of scores, scaled by the outgoing gradient."""
    K: tl.constexpr = TILE.k
    ENTRIES: tl.constexpr = TILE.entries
    PRECISION: tl.constexpr = TILE.precision
    ALIGNED: tl.constexpr = TILE.aligned
    rate = tl.cast(rate, tl.float32)
    row = tl.program_id(0).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)
    inside = row < rows
    begin = tl.program_id(1) * TILE.block
    column = begin + tl.arange(0, TILE.block)[None, :]
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    there = inside[:, None] & (column < columns)
    constants = buffer + 1 + row * parts * (2 * ENTRIES + K + 2)
    of_tail = constants + 2 * ENTRIES

    slope = tl.load(of_tail + K + 1, inside, 0.0)
    scale = tl.load(outgoing + row * outgoing_stride, inside, 0.0).to(tl.float64)
    if TILE.reduction == "mean":
        scale = scale / tl.load(buffer)
    alive = slope != 0
    scale = tl.where(alive, scale, 0.0)
    threshold = tl.load(of_tail + K, inside, 0.0).to(tl.float32)
    line = problem.scores + row[:, None] * tl.cast(stride, tl.int64)
    x = tl.load(line + column, there, float("-inf")).to(tl.float32)
    u = relative(x, threshold[:, None], rate, PRECISION)
    value = tl.where(alive[:, None], polynomial(u, of_tail - 2 * K, inside, scale, K), 0.0)
    out = gradient + row[:, None] * tl.cast(columns, tl.int64)
    tl.store(out + column, value, there)

    tl.debug_barrier()
    end = tl.minimum(begin + TILE.block, columns)
    slots = tl.arange(0, TILE.slots)[None, :]
    kept = inside[:, None] & (slots < ENTRIES)
    place = tl.load(constants[:, None] + ENTRIES + slots, kept, -1.0).to(tl.int32)
    here = (place >= begin) & (place < end)
    of_head = tl.load(constants[:, None] + slots, here, 0.0) * scale[:, None]
    tl.store(out + place, of_head, here)
    if problem.labels is not None:
        label = tl.load(problem.labels + row, inside, -1)
        here = (label >= begin) & (label < end)
        tl.store(gradient + row * columns + label, slope * scale, here)
