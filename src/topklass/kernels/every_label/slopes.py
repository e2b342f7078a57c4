r"""What the losses of leaders and the moments of the tail mean for all scores.

Leaders are left out of the row one by one; derivatives by other leaders leave out two. Derivatives
of the tail's losses come from the moments by reverse mode. All terms of products are positive. See
:mod:`topklass.reference.every_label_rows`.
"""

import triton
import triton.language as tl

from topklass.kernels.every_label.polynomials import (
    at_rank,
    factor,
    leader,
    seen_from,
    without,
)
from topklass.kernels.smooth.row_constants import scaled


@triton.jit
def log1p(x):
    """log(1 + x), to the last digit also where x is small."""
    w = 1 + x
    return tl.where(w == 1, x, tl.log(w) * (x / tl.where(w == 1, 1.0, w - 1)))


@triton.jit
def expm1(x):
    """exp(x) − 1 for x ≤ 0, to the last digit also where x is small."""
    e = tl.exp(x)
    plain = (e == 1) | (e < 0.5)
    return tl.where(e == 1, x, tl.where(plain, e - 1, (e - 1) * (x / tl.log(e))))


@triton.jit
def threshold_without(row, K: tl.constexpr):
    """The K-th largest of the other leaders, for each leader."""
    return tl.where(row.rank < K, at_rank(row, K), at_rank(row, K - 1))


@triton.jit
def gap_of_leaders(row, K: tl.constexpr, LISTS: tl.constexpr):
    """``log σ_k − log σ_{k−1}`` without each leader, less its score over T."""
    threshold = threshold_without(row, K)
    slots = tl.arange(0, LISTS.slots)
    tail = seen_from(row.q, tl.exp((row.least - threshold) * row.inverse_t), K)
    s = without(row, tail, threshold, slots, slots, K, LISTS)
    return (threshold - row.h) * row.inverse_t + tl.log(s[K] / s[K - 1])


@triton.jit
def mixed(losses, LISTS: tl.constexpr):
    """``−log Σ_k P_k e^{−ℓ_k}``, to the last digits of losses near 0 and of small chances."""
    COUNT: tl.constexpr = len(LISTS.lengths)
    result = losses[0]
    if COUNT > 1:
        least = losses[0]
        for i in tl.static_range(1, COUNT):
            least = tl.where(losses[i] < least, losses[i], least)
        kept, change = least * 0, least * 0
        for i in tl.static_range(COUNT):
            chance = tl.full((), LISTS.chances[i], tl.float64)
            kept += chance * tl.exp(least - losses[i])
            change += chance * expm1(least - losses[i])
        result = least - tl.where(change > -0.5, log1p(change), tl.log(kept))
    return result


@triton.jit
def add_slopes_of_leaders(slopes, d, row, share, K: tl.constexpr, LISTS: tl.constexpr):
    """Add the derivatives of gaps of length K, times their share (S), by leaders and tail."""
    LONGEST: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    SLOTS: tl.constexpr = LISTS.slots
    slots = tl.arange(0, SLOTS)
    threshold = threshold_without(row, K)
    fall = tl.exp((row.least - threshold) * row.inverse_t)
    label, other = slots[:, None], slots[None, :]
    base, zero = threshold[:, None], tl.zeros((SLOTS, SLOTS), tl.float64)
    tail = seen_from(row.q, fall[:, None] + zero, K)
    product = without(row, tail, base, label, other, K, LISTS)
    a, b = factor(leader(row.state, other, M), base, row.inverse_t)
    skipped = (label == other) | (other >= M)
    a, b = tl.where(skipped, 1.0, a), tl.where(skipped, 0.0, b)
    upper = a * product[K] + b * product[K - 1]
    lower = a * product[K - 1]
    if K > 1:
        lower = lower + b * product[K - 2]
    each = b * product[K - 1] / upper
    if K > 1:
        each = each - b * product[K - 2] / lower
    each = tl.where(label == other, zero - 1, each)
    slopes = slopes + tl.sum(scaled(each, share[:, None] + zero), 0)

    # Of the tail, by the polynomial without the label alone, which stands on the diagonal.
    power = fall * share
    result = ()
    for j in tl.static_range(1, LONGEST + 1):
        if j <= K:
            c = product[K - j] / upper
            if j < K:
                c = c - product[K - 1 - j] / lower
            c = tl.sum(tl.where(label == other, c, 0.0), 1)
            c = tl.sum(scaled(c, power), 0)
            result = result + (d[j - 1] + (c if j % 2 == 1 else -c),)
            power = power * fall
        else:
            result = result + (d[j - 1],)
    return slopes, result


@triton.jit
def add_slopes_through_tail(
    slopes,
    d,
    row,
    threshold,
    by_coefficient,
    K: tl.constexpr,
    CHANCE: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Add what derivatives by the ``C_m`` mean for leaders and tail, for the length K."""
    LONGEST: tl.constexpr = LISTS.k
    SLOTS: tl.constexpr = LISTS.slots
    slots = tl.arange(0, SLOTS)
    own = at_rank(row, K - 1)
    fall = tl.exp((row.least - own) * row.inverse_t)
    tail = seen_from(row.q, fall + tl.zeros((SLOTS,), tl.float64), K)
    product = without(row, tail, own, slots, slots, K, LISTS)
    a, b = factor(row.h, own, row.inverse_t)
    s = (tl.sum(tl.where(slots == 0, a * product[0], 0.0), 0),)
    for j in tl.static_range(1, K + 1):
        s = s + (tl.sum(tl.where(slots == 0, a * product[j] + b * product[j - 1], 0.0), 0),)

    # Derivatives by S_0 … S_k.
    share = tl.full((), CHANCE, tl.float64) / s[K]
    drop = tl.exp((threshold - own) * row.inverse_t)
    last = share * 0
    adjoint = ()
    for m in tl.static_range(K):
        share = share * drop
        adjoint = (by_coefficient[m] * share,) + adjoint
        last = last - adjoint[0] * s[K - 1 - m] / s[K]
    adjoint = adjoint + (last,)

    of_leaders = slopes * 0
    for j in tl.static_range(1, K + 1):
        of_leaders += adjoint[j] * product[j - 1]
    slopes = slopes + tl.where(slots < LISTS.leaders, b * of_leaders, 0.0)
    power = fall
    result = ()
    for j in tl.static_range(1, LONGEST + 1):
        if j <= K:
            c = adjoint[j] * s[0]
            for i in tl.static_range(j + 1, K + 1):
                c = c + adjoint[i] * s[i - j]
            c = c * power
            result = result + (d[j - 1] + (c if j % 2 == 1 else -c),)
            power = power * fall
        else:
            result = result + (d[j - 1],)
    return slopes, result
