r"""Second kernel: the polynomial that gives the marginal of every class in the tail.

See :mod:`topklass.reference.every_label`: ``π = C_0 u Σ_m h_m (−u)^m`` with ``h_0 = 1``.

The record of a row in float64: the h_m with their signs (K), C_0, −log C_0, the least leader;
the coefficients of the tail's gradient (K), slopes of the leaders and their classes (M each), the
slope of a label in the tail, and whether the row counts. The fourth kernel writes all but the
first K + 3 of these.
"""

import triton
import triton.language as tl

from topklass.kernels.every_label.polynomials import at_rank, row_of, seen_from, without
from topklass.kernels.smooth.row_constants import merge_parts


@triton.jit
def with_length(c, row, threshold, K: tl.constexpr, CHANCE: tl.constexpr, LISTS: tl.constexpr):
    """Add ``P_k exp(−(m + 1) (own − θ) / T) S_{k−1−m} / S_k`` of a length k to c_m."""
    LONGEST: tl.constexpr = LISTS.k
    own = at_rank(row, K - 1)
    tail = seen_from(row.q, tl.exp((row.least - own) * row.inverse_t), K)
    s = without(row, tail, own, -1, -1, K, LISTS)
    fall = tl.exp((threshold - own) * row.inverse_t)
    share = tl.full((), CHANCE, tl.float64) / s[K]
    result = ()
    for m in tl.static_range(LONGEST):
        if m < K:
            share = share * fall
            result = result + (c[m] + s[K - 1 - m] * share,)
        else:
            result = result + (c[m],)
    return result


@triton.jit
def coefficients(row, LISTS: tl.constexpr):
    """``C_0 … C_{K−1}`` seen from the threshold θ of the longest list, and θ."""
    LONGEST: tl.constexpr = LISTS.k
    COUNT: tl.constexpr = len(LISTS.lengths)
    threshold = at_rank(row, LONGEST - 1)
    c = ()
    for _ in tl.static_range(LONGEST):
        c = c + (threshold * 0,)
    for i in tl.static_range(COUNT):
        c = with_length(c, row, threshold, LISTS.lengths[i], LISTS.chances[i], LISTS)
    return c, threshold


@triton.jit(do_not_specialize=("rows", "parts"))
def marginals_kernel(
    states,
    records,
    rows,
    parts,
    inverse_t,
    inverse_t_rest,
    TILE: tl.constexpr,
    LISTS: tl.constexpr,
):
    """The first numbers of the record of a row; states of its pieces are merged before."""
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    number = tl.program_id(0).to(tl.int64)
    inverse_t = tl.cast(inverse_t, tl.float64) + inverse_t_rest
    if TILE.parts > 1:
        one = number + tl.arange(0, 1)
        merge_parts(states + 1, one, one < rows, parts, 1 / inverse_t, TILE)
    row = row_of(states + 1 + number * parts * (3 * M + 2), inverse_t, LISTS)
    record = records + 1 + number * (2 * K + 2 * M + 5)
    c, threshold = coefficients(row, LISTS)
    depth = (row.least - threshold) * inverse_t
    fall = tl.exp(depth)
    power = fall * 0 + 1
    for m in tl.static_range(K):
        tl.store(record + m, c[m] / c[0] * power)
        power = -power * fall
    tl.store(record + K, c[0] * fall)
    tl.store(record + K + 1, -depth - tl.log(c[0]))
    tl.store(record + K + 2, row.least)
