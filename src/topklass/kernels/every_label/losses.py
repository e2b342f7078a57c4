r"""Fourth kernel: losses of leaders and of a label in the tail, and all slopes but direct ones."""

import triton
import triton.language as tl

from topklass.kernels.every_label.classes import weights_of
from topklass.kernels.every_label.marginals import coefficients
from topklass.kernels.every_label.polynomials import row_of
from topklass.kernels.every_label.slopes import (
    add_slopes_of_leaders,
    add_slopes_through_tail,
    gap_of_leaders,
    mixed,
)
from topklass.kernels.smooth.row_constants import add_up, scaled, softplus


@triton.jit
def margin_at(target, classes, there, numbers):
    """Margins of some classes in float64."""
    margin = tl.cast(numbers.margin, tl.float64) + numbers.margin_rest
    if target.margins is not None:
        margin = margin + tl.load(target.margins + classes, there, 0.0).to(tl.float64)
    return margin


@triton.jit
def of_label(
    scores, target, numbers, record, place, present, number, columns, row, LISTS: tl.constexpr
):
    """The label's part: its weight if it is a leader, its loss, ``r``, ``u`` and slope if not."""
    K: tl.constexpr = LISTS.k
    label = tl.load(target.labels + number)
    legal = (label >= 0) & (label < columns)
    w = tl.cast(numbers.own, tl.float64) + numbers.own_rest
    if target.weights is not None:
        w = w * tl.load(target.weights + label, legal, 0.0).to(tl.float64)
    w = tl.where(legal, w, float("nan"))
    mine = present & (place == label)
    leads = tl.max(mine.to(tl.int32), 0) > 0
    of_leaders = tl.where(mine, w, 0.0)
    x = tl.load(scores + label, legal, float("nan")).to(tl.float64)
    counts = (leads == 0) & (w != 0)
    depth = tl.where(counts, (x - row.least) * row.inverse_t, 0.0)
    u = tl.exp(depth)
    h, derived, power = u * 0, u * 0, u * 0 + 1
    for m in tl.static_range(K):
        c = tl.load(record + m) * power
        h += c
        derived += c * (m + 1)
        power = power * u
    alpha = margin_at(target, label, legal, numbers)
    missing = u * 0 + 1
    if LISTS.margin:
        missing = 1 - (1 - tl.exp(-alpha)) * tl.load(record + K) * u * h
    loss = tl.load(record + K + 1) + tl.log(missing / h) + alpha - depth
    loss = tl.where(counts, loss * w, 0.0)
    w = tl.where(counts & (x != float("-inf")), w, 0.0)
    inverse = scaled(1 / (h * missing), w)
    return of_leaders, loss, inverse, u, scaled(-derived / (h * missing), w)


@triton.jit
def finish_row(
    scores,
    target,
    numbers,
    row,
    record,
    sums,
    number,
    columns,
    parts,
    counted,
    LISTS: tl.constexpr,
):
    """The loss of a row; the rest of its record is written."""
    COUNT: tl.constexpr = len(LISTS.lengths)
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    SLOTS: tl.constexpr = LISTS.slots
    slots = tl.arange(0, SLOTS)
    kept = slots < M
    present = kept & (tl.load(row.state + slots, kept, float("-inf")) != float("-inf"))
    place = tl.load(row.state + M + slots, kept, -1.0).to(tl.int32)

    # The tail: what the third kernel found, and the label.
    total = tl.zeros((), tl.float64)
    moments = ()
    for _ in tl.static_range(K):
        moments = moments + (tl.zeros((), tl.float64),)
    for part in range(parts):
        total += tl.load(sums + part * (K + 1))
        added = ()
        for m in tl.static_range(K):
            added = added + (moments[m] + tl.load(sums + part * (K + 1) + 1 + m),)
        moments = added
    w = weights_of(target, number, place, present, columns, numbers).to(tl.float64)
    w = tl.where(present, w, 0.0)
    slope_of_label = tl.zeros((), tl.float64)
    if target.labels is not None:
        extra, loss, inverse, u, slope_of_label = of_label(
            scores, target, numbers, record, place, present, number, columns, row, LISTS
        )
        w += extra
        total += loss
        added = ()
        for m in tl.static_range(K):
            added = added + (moments[m] + inverse,)
            inverse = inverse * u
        moments = added

    # The leaders.
    alpha = margin_at(target, place, present, numbers)
    gaps, losses = (), ()
    for i in tl.static_range(COUNT):
        gap = gap_of_leaders(row, LISTS.lengths[i], LISTS) + alpha
        gaps, losses = gaps + (gap,), losses + (softplus(gap),)
    of_list = mixed(losses, LISTS)
    total += tl.sum(scaled(of_list, w), 0)
    slopes = tl.zeros((SLOTS,), tl.float64)
    d = ()
    for _ in tl.static_range(K):
        d = d + (tl.zeros((), tl.float64),)
    for i in tl.static_range(COUNT):
        chance = tl.full((), LISTS.chances[i], tl.float64)
        share = chance * tl.exp(of_list - losses[i]) / (1 + tl.exp(-gaps[i]))
        slopes, d = add_slopes_of_leaders(slopes, d, row, scaled(share, w), LISTS.lengths[i], LISTS)

    # Reverse mode through the coefficients C_m.
    c, threshold = coefficients(row, LISTS)
    fall = tl.exp((row.least - threshold) * row.inverse_t)
    power = -1 / c[0]
    by_coefficient = ()
    for m in tl.static_range(K):
        by_coefficient = by_coefficient + (moments[m] * power,)
        power = -power * fall
    for i in tl.static_range(COUNT):
        slopes, d = add_slopes_through_tail(
            slopes,
            d,
            row,
            threshold,
            by_coefficient,
            LISTS.lengths[i],
            LISTS.chances[i],
            LISTS,
        )
    for j in tl.static_range(K):
        tl.store(record + K + 3 + j, d[j])
    tl.store(record + 2 * K + 3 + slots, slopes, kept)
    tl.store(record + 2 * K + 3 + M + slots, place, kept)
    tl.store(record + 2 * K + 2 * M + 3, slope_of_label)
    tl.store(record + 2 * K + 2 * M + 4, tl.where(counted, 1.0, 0.0))
    return total


@triton.jit(do_not_specialize=("rows", "columns", "stride", "parts", "ignore_index"))
def losses_kernel(
    scores,
    target,
    numbers,
    states,
    sums,
    outputs,
    rows,
    columns,
    stride,
    parts,
    ignore_index,
    scale,
    scale_rest,
    LISTS: tl.constexpr,
):
    """Losses of rows, reduced, and the rest of their records.

    A program takes every ``programs``-th row.
    """
    K: tl.constexpr = LISTS.k
    M: tl.constexpr = LISTS.leaders
    inverse_t = tl.cast(numbers.inverse_t, tl.float64) + numbers.inverse_t_rest
    factor = tl.cast(scale, tl.float64) + scale_rest
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for one in range(tl.program_id(0), rows, tl.num_programs(0)):
        number = tl.cast(one, tl.int64)
        counted = number >= 0
        weight = tl.full((), 1.0, tl.float64)
        if target.labels is not None:
            label = tl.load(target.labels + number)
            counted = label != ignore_index
            if target.weights is not None:
                legal = counted & (label >= 0) & (label < columns)
                weight = tl.load(target.weights + label, legal, 0.0).to(tl.float64)
        record = outputs.buffer + 1 + number * (2 * K + 2 * M + 5)
        value = finish_row(
            scores + number * stride,
            target,
            numbers,
            row_of(states + 1 + number * parts * (3 * M + 2), inverse_t, LISTS),
            record,
            sums + number * parts * (K + 1),
            number,
            columns,
            parts,
            counted,
            LISTS,
        )
        value = tl.where(counted, value * factor, 0.0)
        if LISTS.reduction == "none":
            tl.store(outputs.result + number, value)
        all_losses += value
        all_weights += tl.where(counted, weight, 0.0)
    if LISTS.reduction != "none":
        partials = outputs.buffer + 1 + tl.cast(rows, tl.int64) * (2 * K + 2 * M + 5)
        add_up(outputs, partials, all_losses, all_weights, LISTS)
