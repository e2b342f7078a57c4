r"""Fifth kernel: one more read of the scores, one write of the gradient.

``T ∂E/∂s_c = −w_c r_c Σ_m (m + 1) h_m (−u_c)^m + Σ_j d_j u_c^j`` for the tail; the leaders, whose
slopes are known, overwrite it. See :mod:`topklass.reference.every_label`.
"""

import triton
import triton.language as tl

from topklass.kernels.every_label.classes import (
    horner,
    inverse_and_ratio,
    load_coefficients,
    margins_of,
    weights_of,
)
from topklass.kernels.smooth.row_state import multiple


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "outgoing_stride"),
    do_not_specialize_on_alignment=("outgoing",),
)
def gradient_kernel(
    scores,
    target,
    numbers,
    records,
    outgoing,
    gradient,
    rows,
    columns,
    stride,
    outgoing_stride,
    slope,
    slope_rest,
    LISTS: tl.constexpr,
):
    """The gradient of a tile of scores, scaled by the outgoing gradient and by the slope."""
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    ALIGNED: tl.constexpr = LISTS.aligned
    rate = tl.cast(numbers.rate, tl.float32)
    row = tl.program_id(0).to(tl.int64) * LISTS.rows + tl.arange(0, LISTS.rows)
    inside = row < rows
    begin = tl.program_id(1) * LISTS.block
    column = begin + tl.arange(0, LISTS.block)[None, :]
    columns, stride = multiple(columns, ALIGNED), multiple(stride, ALIGNED)
    there = inside[:, None] & (column < columns)
    record = records + 1 + row * (2 * K + 2 * M + 5)

    scale = tl.load(outgoing + row * outgoing_stride, inside, 0.0).to(tl.float64)
    scale = scale * (tl.cast(slope, tl.float64) + slope_rest)
    if LISTS.reduction == "mean":
        scale = scale / tl.load(records)
    alive = tl.load(record + 2 * K + 2 * M + 4, inside, 0.0) != 0
    scale = tl.where(alive, scale, 0.0)
    first = tl.load(record + K, inside, 0.0).to(tl.float32)
    least = tl.load(record + K + 2, inside, 0.0).to(tl.float32)
    x = tl.load(scores + row[:, None] * tl.cast(stride, tl.int64) + column, there, 0.0)
    x = x.to(tl.float32)
    u = tl.exp2((x - least[:, None]) * rate)
    coefficients = load_coefficients(record, inside, K)
    h = horner(coefficients, u, False, K)
    _, reach = margins_of(target, column, there, numbers)
    inverse, _ = inverse_and_ratio(h, u, first, reach, LISTS.margin)
    w = weights_of(target, row[:, None], column, there, columns, numbers)
    own = inverse * horner(coefficients, u, True, K)
    own = tl.where(x == float("-inf"), 0.0, own * (w * scale.to(tl.float32)[:, None]))
    d = tl.load(record + 2 * K + 2, inside, 0.0) * scale
    value = u * d.to(tl.float32)[:, None]
    for j in tl.static_range(1, K):
        d = tl.load(record + 2 * K + 2 - j, inside, 0.0) * scale
        value = (value + d.to(tl.float32)[:, None]) * u
    value = value - own
    if target.labels is not None:
        label = tl.load(target.labels + row, inside, -1)
        of_label = tl.load(record + 2 * K + 2 * M + 3, inside, 0.0) * scale
        value += tl.where(column == label[:, None], of_label.to(tl.float32)[:, None], 0.0)
    value = tl.where(alive[:, None], value, 0.0)
    out = gradient + row[:, None] * tl.cast(columns, tl.int64)
    tl.store(out + column, value, there)

    tl.debug_barrier()
    end = tl.minimum(begin + LISTS.block, columns)
    slots = tl.arange(0, LISTS.slots)[None, :]
    kept = inside[:, None] & (slots < M)
    place = tl.load(record[:, None] + 2 * K + 3 + M + slots, kept, -1.0).to(tl.int32)
    here = (place >= begin) & (place < end)
    of_leader = tl.load(record[:, None] + 2 * K + 3 + slots, here, 0.0) * scale[:, None]
    tl.store(out + place, tl.where(alive[:, None], of_leader, 0.0), here)
