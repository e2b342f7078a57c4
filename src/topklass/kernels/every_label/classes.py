r"""Third kernel: losses of the classes in the tail as labels, and the moments of their slopes.

``Σ_c w_c ℓ_c`` and ``Σ_c w_c r_c u_c^m``, m = 0..K − 1, of a piece of a row, added up in float64;
leaders are left out. See :mod:`topklass.reference.every_label`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.smooth.row_state import multiple


class Target(NamedTuple):
    """How much classes count as labels: tensors on the host, pointers in a kernel."""

    labels: Any
    """(R), int64; or None."""
    chances: Any
    """(R, n), contiguous; or None."""
    weights: Any
    """(n), float32; or None."""
    margins: Any
    """(n), float32; or None."""


class Numbers(NamedTuple):
    """Parameters; those in float64 as sums of two numbers of float32."""

    inverse_t: Any
    """1 / T."""
    inverse_t_rest: Any
    margin: Any
    margin_rest: Any
    spread: Any
    """The weight of every class."""
    spread_rest: Any
    own: Any
    """What the label, or the given probability, has besides."""
    own_rest: Any
    rate: Any
    """log2(e) / T."""
    reach: Any
    """``1 − exp(−margin)``."""


@triton.jit
def weights_of(target, row, column, there, columns, numbers):
    """The weights of classes (…), without what the label has besides, in float32."""
    if target.chances is not None:
        chance = tl.load(target.chances + row * columns + column, there, 0.0).to(tl.float32)
        w = chance * numbers.own + numbers.spread
    else:
        w = tl.zeros(there.shape, tl.float32) + numbers.spread
    if target.weights is not None:
        w = w * tl.load(target.weights + column, there, 0.0)
    return w


@triton.jit
def margins_of(target, column, there, numbers):
    """Margins and ``1 − exp(−margin)`` of classes, in float32."""
    alpha = tl.zeros(there.shape, tl.float32) + numbers.margin
    reach = tl.zeros(there.shape, tl.float32) + numbers.reach
    if target.margins is not None:
        alpha = tl.load(target.margins + column, there, 0.0)
        reach = 1 - tl.exp(-alpha)
    return alpha, reach


@triton.jit
def load_coefficients(record, inside, K: tl.constexpr):
    """K numbers of rows (R) in float32."""
    result = ()
    for m in tl.static_range(K):
        result = result + (tl.load(record + m, inside, 0.0).to(tl.float32),)
    return result


@triton.jit
def horner(c, u, DERIVED: tl.constexpr, K: tl.constexpr):
    """``Σ_m c_m u^m``, or ``Σ_m (m + 1) c_m u^m``, for coefficients of rows (R) and u of (R, B)."""
    value = tl.zeros(u.shape, tl.float32) + (c[K - 1] * K if DERIVED else c[K - 1])[:, None]
    for i in tl.static_range(1, K):
        value = value * u + (c[K - 1 - i] * (K - i) if DERIVED else c[K - 1 - i])[:, None]
    return value


@triton.jit
def inverse_and_ratio(h, u, first, reach, MARGIN: tl.constexpr):
    """``1 / (h (1 − b π))`` and ``(1 − b π) / h``."""
    inverse = 1 / h
    ratio = inverse
    if MARGIN:
        missing = 1 - reach * (first[:, None] * u * h)
        ratio = missing * inverse
        inverse = inverse / missing
    return inverse, ratio


@triton.jit(do_not_specialize=("rows", "columns", "stride", "piece"))
def classes_kernel(
    scores,
    target,
    numbers,
    records,
    sums,
    places,
    rows,
    columns,
    stride,
    piece,
    LISTS: tl.constexpr,
):
    """The sums of columns ``piece·i`` to ``piece·(i + 1)`` of a tile of rows, (R, parts, K + 1)."""
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    ALIGNED: tl.constexpr = LISTS.aligned
    ROWS: tl.constexpr = LISTS.rows
    BLOCK: tl.constexpr = LISTS.block
    rate = tl.cast(numbers.rate, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    part, parts = tl.program_id(1), tl.num_programs(1)
    record = records + 1 + row * (2 * K + 2 * M + 5)
    place = places + 1 + row * parts * (3 * M + 2) + M
    first = tl.load(record + K, inside, 0.0).to(tl.float32)
    constant = tl.load(record + K + 1, inside, 0.0).to(tl.float32)
    least = tl.load(record + K + 2, inside, 0.0).to(tl.float32)
    coefficients = load_coefficients(record, inside, K)
    line = scores + row[:, None] * tl.cast(multiple(stride, ALIGNED), tl.int64)
    start = part * piece
    end = multiple(tl.minimum(start + piece, columns), ALIGNED)
    total = tl.zeros((ROWS,), tl.float64)
    moments = ()
    for _ in tl.static_range(K):
        moments = moments + (tl.zeros((ROWS,), tl.float64),)
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        there = inside[:, None] & (column < end)
        x = tl.load(line + column, there, float("nan")).to(tl.float32)
        tied = x == least[:, None]
        if tl.max(tl.max(tied.to(tl.int32), 1), 0) > 0:
            for m in tl.static_range(M):
                taken = tl.load(place + m, inside, -1.0).to(tl.int32)
                tied = tied & (column != taken[:, None])
        in_tail = tied | (x < least[:, None])
        y = tl.where(in_tail, (x - least[:, None]) * rate, 0.0)
        u = tl.exp2(y)
        w = tl.where(
            in_tail, weights_of(target, row[:, None], column, there, columns, numbers), 0.0
        )
        h = horner(coefficients, u, False, K)
        alpha, reach = margins_of(target, column, there, numbers)
        inverse, ratio = inverse_and_ratio(h, u, first, reach, LISTS.margin)
        loss = constant[:, None] + tl.log(ratio) - y * 0.6931471805599453
        if LISTS.margin:
            loss = loss + alpha
        total += tl.sum(tl.where(w == 0, 0.0, w * loss), 1)
        term = tl.where(x == float("-inf"), 0.0, w * inverse)
        added = (moments[0] + tl.sum(term, 1),)
        for m in tl.static_range(1, K):
            term = term * u
            added = added + (moments[m] + tl.sum(term, 1),)
        moments = added
    out = sums + (row * parts + part) * (K + 1)
    tl.store(out, total, inside)
    for m in tl.static_range(K):
        tl.store(out + 1 + m, moments[m], inside)
