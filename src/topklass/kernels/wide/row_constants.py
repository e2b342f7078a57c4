r"""Second kernel: from the states of rows to their losses and the constants of their gradients.

The entries of a row, its kept scores and labels, are put in descending order. For each label the
threshold t is the k-th of the others. Those up to it, the heads, are factors ``v_i + X``, those
behind it, the middle, factors ``1 + w_i X``, with ``v = exp(t − h)`` and ``w = exp(h − t)`` at most
1. A tile has one column for each entry, in which that entry is left out: all terms of these
products are positive, and one factor more gives S(X).

The constants of a row replace its (first) state: slopes of the entries, their classes, coefficients
of the tail, threshold, and whether there is a gradient. They are sums over the labels.
"""

import triton
import triton.language as tl

from topklass.kernels.smooth.row_constants import (
    Loss,
    add_up,
    loss_and_slope,
    newton,
    scaled,
    times,
)
from topklass.kernels.smooth.row_state import LOWEST, Shape, as_key, relative
from topklass.kernels.wide.row_state import NO_CLASS, keep_largest, load_heads, read_rows


@triton.jit
def merge_parts(states, row, inside, parts, temperature, rate, TILE: tl.constexpr):
    """Merge the states of a row's pieces into the first."""
    K: tl.constexpr = TILE.k
    M: tl.constexpr = TILE.kept
    ENTRIES: tl.constexpr = TILE.entries
    ROWS: tl.constexpr = TILE.rows
    SLOTS: tl.constexpr = TILE.slots
    entry = tl.arange(0, TILE.parts * SLOTS)[None, :]
    part = entry // SLOTS
    slot = entry % SLOTS
    there = inside[:, None] & (part < parts) & (slot < M)
    state = states + (row[:, None] * parts + part) * TILE.size
    x = tl.load(state + slot, there, float("-inf")).to(tl.float32)
    classes = tl.load(state + ENTRIES + slot, there, -1.0)
    first = states + row * parts * TILE.size
    tl.debug_barrier()
    keep_largest(x, classes, inside, first, TILE)
    slots = tl.arange(0, SLOTS)[None, :]
    heads, _, threshold = load_heads(first, inside, TILE)

    # The sums of the pieces seen from the row's threshold.
    part = tl.arange(0, TILE.parts)[None, :]
    there = inside[:, None] & (part < parts)
    state = states + (row[:, None] * parts + part) * TILE.size
    base = tl.load(state + 2 * ENTRIES + K, there, float("-inf"))
    fall = tl.exp((base - threshold[:, None]) / temperature)
    sums = tl.zeros((ROWS, SLOTS), tl.float64)
    power = fall
    for i in tl.static_range(K):
        p = tl.load(state + 2 * ENTRIES + i, there, 0.0)
        sums = tl.where(slots == i, tl.sum(p * power, 1)[:, None], sums)
        power = power * fall
    # What is kept of pieces and not of the row belongs to its tail: the scores below its threshold,
    # and some at it. Those that were read take fewer registers than those that were left over.
    least = threshold[:, None]
    u = tl.where(x < least, relative(x, least, rate, 1), 0.0)
    ties = tl.sum((x == least).to(tl.int32), 1)
    ties -= tl.sum((heads == as_key(least)).to(tl.int32), 1)
    powers = u
    for i in range(K):
        sums += tl.where(slots == i, (tl.sum(powers, 1) + ties)[:, None], 0.0)
        powers = powers * u
    tl.debug_barrier()
    tl.store(first[:, None] + 2 * ENTRIES + slots, sums, inside[:, None] & (slots < K))
    tl.store(first + 2 * ENTRIES + K, threshold, inside)
    tl.debug_barrier()


@triton.jit
def sort_entries(problem, line, constants, row, inside, columns, loss, TILE: tl.constexpr):
    """Put the labels of rows into their states, and all entries into descending order.

    Returns the entries' scores, and behind which entries each label comes, (R, slots) each; the
    latter, and the labels' classes, in the slots behind the kept scores.
    """
    M: tl.constexpr = TILE.kept
    LABELS: tl.constexpr = TILE.labels
    ENTRIES: tl.constexpr = TILE.entries
    slots = tl.arange(0, TILE.slots)[None, :]
    there = inside[:, None] & (slots < ENTRIES)
    own = there & (slots >= M)
    given = problem.labels + row[:, None] * LABELS + (slots - M)
    label = class_of(tl.load(given, own, 0), columns, loss.ignore_index)
    again = ~own
    for i in range(LABELS):
        other = tl.load(problem.labels + row * LABELS + i, inside, 0)
        other = class_of(other, columns, loss.ignore_index)
        again = again | ((label == other[:, None]) & (slots > M + i))
    once = own & ~again & (label >= 0)
    score = tl.load(line[:, None] + label, once, float("-inf")).to(tl.float32)
    score = tl.where(own & (label < NO_CLASS), float("nan"), score)
    score = tl.where(own, score, tl.load(constants[:, None] + slots, there & ~own, 0.0))
    place = tl.load(constants[:, None] + ENTRIES + slots, there & ~own, -1.0)
    place = tl.where(once, label, place)
    tl.debug_barrier()
    tl.store(constants[:, None] + slots, score, there)
    tl.debug_barrier()
    score = tl.load(constants[:, None] + slots, there, float("-inf"))
    key = as_key(score.to(tl.float32))
    rank = tl.zeros_like(key)
    for i in range(ENTRIES):
        other = as_key(tl.load(constants + i, inside, 0.0).to(tl.float32))[:, None]
        rank += ((other > key) | ((other == key) & (i < slots))).to(tl.int32)
    tl.debug_barrier()
    tl.store(constants[:, None] + rank, score, there)
    tl.store(constants[:, None] + ENTRIES + rank, place, there)
    tl.debug_barrier()
    score = tl.load(constants[:, None] + slots, there, float("-inf"))
    return score, tl.where(own & ~again, rank, -1), tl.where(own, label, -1)


@triton.jit
def class_of(label, columns, ignore_index):
    """A label, −1 if it is padding, −2 if it is no class."""
    wrong = (label < 0) | (label >= columns)
    return tl.where(label == ignore_index, NO_CLASS, tl.where(wrong, NO_CLASS - 1, label))


@triton.jit
def times_middle(product, w, K: tl.constexpr):
    """Coefficients 0..K of a polynomial times ``1 + wX``."""
    result = (product[0],)
    for j in tl.static_range(1, K + 1):
        result = result + (product[j] + w * product[j - 1],)
    return result


@triton.jit
def times_either(product, c, head, K: tl.constexpr):
    """Coefficients 0..K of a polynomial times ``c + X`` for heads, ``1 + cX`` for the middle."""
    a, b = tl.where(head, c, 1.0), tl.where(head, 1.0, c)
    result = (a * product[0],)
    for j in tl.static_range(1, K + 1):
        result = result + (a * product[j] + b * product[j - 1],)
    return result


@triton.jit
def without_each(q, factors, position, there, K: tl.constexpr, REST: tl.constexpr):
    """Coefficients 0..K of Q(X) times all factors but one, (R, slots).

    Args:
        q: coefficients 0..K of Q(X).
        factors: in memory (R), K of heads, REST of the middle.
        position: which factor is left out, (R, slots).
        there: whether it exists.
        K: number of heads.
        REST: number of factors of the middle, at least 1.
    """
    head = position < K
    of_heads, of_rest = position % K, tl.where(head, position, position - K) % REST
    product = q
    for i in range(1, K):
        v = tl.load(factors[:, None] + (of_heads + i) % K, there, 0.0)
        product = times(product, v, K)
    for i in range(1, REST):
        w = tl.load(factors[:, None] + K + (of_rest + i) % REST, there, 0.0)
        product = times_middle(product, w, K)
    last = tl.load(factors[:, None] + tl.where(head, K + of_rest, of_heads), there, 0.0)
    return times_either(product, last, ~head, K)


@triton.jit
def moved_sums(state, there, factor, ENTRIES: tl.constexpr, K: tl.constexpr):
    """The K power sums of states, of the shape of ``there``, seen from another threshold."""
    zero = tl.zeros(there.shape, tl.int32)
    power = factor
    sums = ()
    for j in tl.static_range(K):
        sums = sums + (tl.load(state + (2 * ENTRIES + j + zero), there, 0.0) * power,)
        power = power * factor
    return sums


@triton.jit
def finish_rows(problem, outputs, shape, states, row, inside, loss, rate, TILE: tl.constexpr):
    """Losses and weights of rows (R); replaces their states by the constants of the gradient."""
    K: tl.constexpr = TILE.k
    M: tl.constexpr = TILE.kept
    LABELS: tl.constexpr = TILE.labels
    ENTRIES: tl.constexpr = TILE.entries
    ROWS: tl.constexpr = TILE.rows
    SLOTS: tl.constexpr = TILE.slots
    temperature = K * loss.tau
    line = problem.scores + row * shape.stride
    if TILE.parts > 1:
        merge_parts(states, row, inside, shape.parts, temperature, rate, TILE)
    constants = states + row * shape.parts * TILE.size
    slots = tl.arange(0, SLOTS)[None, :]
    there = inside[:, None] & (slots < ENTRIES)
    score, rank, label = sort_entries(
        problem, line, constants, row, inside, shape.columns, loss, TILE
    )
    base = tl.load(constants + 2 * ENTRIES + K, inside, 0.0)
    all_slopes = tl.zeros((ROWS, SLOTS), tl.float64)
    all_coefficients = tl.zeros((ROWS, SLOTS), tl.float64)
    value = tl.zeros((ROWS,), tl.float64)
    total = tl.zeros((ROWS,), tl.float64)
    alive = tl.zeros((ROWS,), tl.int32)
    for i in range(LABELS):
        class_ = tl.max(tl.where(slots == M + i, label, NO_CLASS - 1), 1)
        position_of_label = tl.max(tl.where(label == class_[:, None], rank, -1), 1)[:, None]
        position = slots - (slots > position_of_label).to(tl.int32)
        head = position < K
        at = K - 1 + (position_of_label <= K - 1).to(tl.int32)
        threshold = tl.sum(tl.where(slots == at, score, 0.0), 1)
        threshold = tl.where(threshold < LOWEST, LOWEST, threshold)
        rise = score - threshold[:, None]
        rise = tl.where(head & (rise < 0), 0.0, rise)
        factor = tl.exp(tl.where(head, -rise, rise) / temperature)
        tl.debug_barrier()
        tl.store(constants[:, None] + position, factor, there & (slots != position_of_label))
        tl.debug_barrier()
        drop = ((base - threshold) / temperature)[:, None]
        sums = moved_sums(constants[:, None], there, tl.exp(drop), ENTRIES, K)
        product = without_each(newton(sums, K), constants, position, there, K, ENTRIES - 1 - K)
        factor = tl.load(constants[:, None] + position, there, 0.0)
        whole = times_either(product, factor, head, K)
        upper = tl.sum(tl.where(slots == 0, whole[K], 0.0), 1)
        lower = tl.sum(tl.where(slots == 0, whole[K - 1], 0.0), 1)

        of_label = tl.sum(tl.where(slots == position_of_label, score, 0.0), 1)
        alpha, weight = of_class(problem, row, class_, i, loss.alpha, TILE)
        gap = (threshold - of_label) / K + loss.tau * tl.log(upper / lower) + alpha
        if problem.chances is None:
            counted = inside & (class_ != NO_CLASS)
            weight = tl.where(counted, weight, 0.0)
            total += weight
        else:
            counted = inside & ((weight != 0) | (gap < float("inf")) | (gap != gap))
        loss_of_label, slope = loss_and_slope(gap, loss.tau, K, counted, weight)
        value += loss_of_label
        if TILE.reduction == "none" and problem.chances is None:
            tl.store(outputs.result + row * LABELS + i, loss_of_label, inside)

        alive = tl.where(slope != 0, 1, alive)
        slope = slope[:, None]
        up, low = (1 / upper)[:, None], (1 / lower)[:, None]
        of_heads = product[K - 1] * low - product[K] * up
        of_middle = product[K - 1] * up
        if K > 1:
            of_middle = of_middle - product[K - 2] * low
        slopes = scaled(factor * tl.where(head, of_heads, of_middle), slope)
        all_slopes += tl.where(slots == position_of_label, -slope, slopes)
        coefficients = up
        for j in tl.static_range(1, K + 1):
            c = whole[K - j] * up
            if j < K:
                c = c - whole[K - 1 - j] * low
            coefficients = tl.where(slots == j - 1, c if j % 2 == 1 else -c, coefficients)
        all_coefficients += scaled(coefficients * tl.exp(drop * (slots + 1)), slope)
    tl.debug_barrier()
    tl.store(constants[:, None] + slots, all_slopes, there)
    some = inside[:, None] & (slots < K)
    tl.store(constants[:, None] + 2 * ENTRIES + slots, all_coefficients, some)
    tl.store(constants + 2 * ENTRIES + K + 1, alive, inside)
    if problem.chances is not None:
        total = tl.where(inside, 1.0, 0.0).to(tl.float64)
    return value, total


@triton.jit
def of_class(problem, row, class_, i, alpha, TILE: tl.constexpr):
    """Margin and weight of the i-th labels of rows, their classes given (R)."""
    legal = class_ >= 0
    if problem.margins is not None:
        alpha = alpha + tl.load(problem.margins + class_, legal, 0.0).to(tl.float64)
    weight = tl.where(legal, 1.0, 0.0).to(tl.float64)
    if problem.weights is not None:
        weight = tl.load(problem.weights + class_, legal, 0.0).to(tl.float64)
    if problem.chances is not None:
        weight = weight * tl.load(problem.chances + row * TILE.labels + i, legal, 0.0)
    return alpha, weight


@triton.jit(do_not_specialize=("rows", "columns", "stride", "parts", "ignore_index"))
def wide_loss_kernel(
    problem,
    outputs,
    numbers,
    rows,
    columns,
    stride,
    parts,
    ignore_index,
    TILE: tl.constexpr,
):
    """Losses of rows, reduced, or of each label; and the constants of their gradients.

    A program takes every ``programs``-th tile of rows.
    """
    ROWS: tl.constexpr = TILE.rows
    tau = tl.cast(numbers.tau, tl.float64) + numbers.tau_rest
    alpha = tl.cast(numbers.margin, tl.float64) + numbers.margin_rest
    loss = Loss(tau, alpha, ignore_index)
    rate = tl.cast(numbers.rate, tl.float32)
    shape = Shape(columns, stride, parts)
    states = outputs.buffer + 1
    all_losses = tl.zeros((ROWS,), tl.float64)
    all_weights = tl.zeros((ROWS,), tl.float64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        if TILE.reads:
            state = states + row * TILE.size
            every = (0, columns)
            read_rows(problem, shape, state, row, inside, every, rate, ignore_index, TILE)
            tl.debug_barrier()
        value, weight = finish_rows(problem, outputs, shape, states, row, inside, loss, rate, TILE)
        if TILE.reduction == "none" and problem.chances is not None:
            tl.store(outputs.result + row, value, inside)
        all_losses += value
        all_weights += weight
    if TILE.reduction != "none":
        partials = states + tl.cast(rows, tl.int64) * parts * TILE.size
        value, weight = tl.sum(all_losses, 0), tl.sum(all_weights, 0)
        add_up(outputs, partials, value, weight, TILE)
