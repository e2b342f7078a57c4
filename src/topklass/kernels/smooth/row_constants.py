r"""Second kernel: from the states of rows to their losses and the constants of their gradients.

Newton's identities give the tail's polynomial Q(X); multiplied by ``v_i + X`` for every head i it
is S(X). A tile has one column for each head, in which that head is left out: all terms of these
products are positive, and one factor more gives S. The last program to finish adds up the losses
of all programs, in a fixed order.

The constants of a row replace its (first) state: slopes of the heads, their classes, coefficients
of the tail, threshold, slope of the label.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from topklass.kernels.smooth.row_state import Shape, as_score, no_heads, read_rows, take_heads

LARGEST_K_UNROLLED = tl.constexpr(24)


class Numbers(NamedTuple):
    """The parameters of a smooth loss; those in float64 as sums of two numbers of float32."""

    tau: Any
    tau_rest: Any
    margin: Any
    margin_rest: Any
    rate: Any
    """log2(e) / (k·tau)."""


class Loss(NamedTuple):
    """The same inside a kernel."""

    tau: Any
    alpha: Any
    """The margin of all classes."""
    ignore_index: Any


class Outputs(NamedTuple):
    """What kernels write besides gradients."""

    buffer: Any
    """The total weight, what is kept of rows, and two sums for each program."""
    counter: Any
    """0 before and after."""
    result: Any
    """(R), or one number."""


@triton.jit
def merge_parts(states, row, inside, parts, temperature, TILE: tl.constexpr):
    """Merge the states of a row's pieces into the first."""
    K: tl.constexpr = TILE.k
    SLOTS: tl.constexpr = TILE.slots
    ROWS: tl.constexpr = TILE.rows
    SIZE: tl.constexpr = 3 * K + 2
    entry = tl.arange(0, TILE.parts * SLOTS)[None, :]
    part = entry // SLOTS
    slot = entry % SLOTS
    there = inside[:, None] & (part < parts) & (slot < K)
    state = states + (row[:, None] * parts + part) * SIZE
    x = tl.load(state + slot, there, float("-inf")).to(tl.float32)
    classes = tl.load(state + K + slot, there, -1.0).to(tl.int32)
    keys, places = no_heads(ROWS, K, SLOTS)
    x, keys, places, threshold = take_heads(x, classes, keys, places)

    # The sums of the pieces seen from the row's threshold, (R, parts, slots).
    part = tl.arange(0, TILE.parts)[None, :]
    there = inside[:, None] & (part < parts)
    state = states + (row[:, None] * parts + part) * SIZE
    base = tl.load(state + 3 * K, there, float("-inf"))
    j = tl.arange(0, SLOTS)[None, None, :]
    some = there[:, :, None] & (j < K)
    p = tl.load(state[:, :, None] + 2 * K + j, some, 0.0)
    drop = (base - threshold[:, None]) / temperature
    sums = tl.sum(p * tl.exp(drop[:, :, None] * (j + 1)), 1)
    # Heads of pieces that are not heads of the row belong to its tail.
    u = tl.exp((x - threshold[:, None]).to(tl.float64) / temperature)
    slots = tl.arange(0, SLOTS)[None, :]
    power = u
    for i in tl.static_range(K):
        sums += tl.where(slots == i, tl.sum(power, 1)[:, None], 0.0)
        power = power * u
    first = states + row * parts * SIZE
    kept = inside[:, None] & (slots < K)
    tl.debug_barrier()
    tl.store(first[:, None] + 2 * K + slots, sums, kept)
    tl.store(first[:, None] + slots, as_score(keys), kept)
    tl.store(first[:, None] + K + slots, places, kept)
    tl.store(first + 3 * K, threshold, inside)
    tl.debug_barrier()


@triton.jit
def load_sums(state, there, K: tl.constexpr):
    """The K power sums of states, each of the shape of ``there``."""
    zero = tl.zeros(there.shape, tl.int32)
    sums = ()
    for j in tl.static_range(K):
        sums = sums + (tl.load(state + (2 * K + j + zero), there, 0.0),)
    return sums


@triton.jit
def newton(sums, K: tl.constexpr):
    """``q_j = (1/j) Σ_{i=1..j} (−1)^{i−1} q_{j−i} p_i`` for j = 0..K."""
    return newton_step_by_step(sums, K) if K > LARGEST_K_UNROLLED else newton_unrolled(sums, K)


@triton.jit
def newton_step_by_step(sums, K: tl.constexpr):
    """The same numbers by a loop whose step adds the newest q to all sums that are to come.

    More work than the sums one after the other, but a K-th of the code, whose compilation takes
    seconds where k is large.
    """
    signed = (sums[0],)
    q = (sums[0] * 0,)
    for j in tl.static_range(1, K):
        signed = signed + (sums[j] if j % 2 == 0 else -sums[j],)
        q = q + (q[0],)
    q = q + (q[0] + 1,)
    total = signed
    for j in range(1, K + 1):
        newest = total[0] * (tl.full((), 1.0, tl.float64) / j)
        known, rest = (q[1],), ()
        for i in tl.static_range(K - 1):
            known = known + (q[i + 2],)
            rest = rest + (total[i + 1] + signed[i] * newest,)
        q, total = known + (newest,), rest + (total[K - 1],)
    return q


@triton.jit
def newton_unrolled(sums, K: tl.constexpr):
    """The same numbers, each sum on its own."""
    one = tl.full((), 1.0, tl.float64)
    q = (sums[0] * 0 + 1,)
    for j in tl.static_range(1, K + 1):
        # The newest q last: what comes before need not wait for it.
        total = sums[j - 1] if j % 2 == 1 else -sums[j - 1]
        for i in tl.static_range(j - 1, 0, -1):
            if i % 2 == 1:
                total = total + sums[i - 1] * q[j - i]
            else:
                total = total - sums[i - 1] * q[j - i]
        q = q + (total * (one / j),)
    return q


@triton.jit
def times(product, v, K: tl.constexpr):
    """Coefficients 0..K of a polynomial times ``v + X``."""
    result = (v * product[0],)
    for j in tl.static_range(1, K + 1):
        result = result + (v * product[j] + product[j - 1],)
    return result


@triton.jit
def without_each_head(q, inverted, there, K: tl.constexpr):
    """Coefficients 0..K of ``Q(X) Π_{i≠m} (v_i + X)``, (R, SLOTS), for v in memory."""
    product = q
    member = tl.arange(0, there.shape[1])[None, :]
    for i in range(1, K):
        v = tl.load(inverted[:, None] + (member + i) % K, there, 0.0)
        product = times(product, v, K)
    return product


@triton.jit
def polynomials(constants, inside, temperature, TILE: tl.constexpr):
    """Threshold (R), inverted heads, products without each head, and with all, (R, slots) each.

    The inverted heads take the place of the heads in memory, where all columns can read them.
    """
    K: tl.constexpr = TILE.k
    slots = tl.arange(0, TILE.slots)[None, :]
    kept = inside[:, None] & (slots < K)
    threshold = tl.load(constants + 3 * K, inside, 0.0)
    heads = tl.load(constants[:, None] + slots, kept, 0.0)
    height = tl.where(heads < threshold[:, None], threshold[:, None], heads)
    inverted = tl.exp((threshold[:, None] - height) / temperature)
    tl.debug_barrier()
    tl.store(constants[:, None] + slots, inverted, kept)
    tl.debug_barrier()
    sums = load_sums(constants[:, None], kept, K)
    product = without_each_head(newton(sums, K), constants, kept, K)
    return threshold, inverted, product, times(product, inverted, K)


@triton.jit
def softplus(z):
    """log(1 + exp(z)), to the last digit also where it is small."""
    e = tl.exp(-tl.abs(z))
    w = 1 + e
    small = tl.where(w == 1, e, tl.log(w) * (e / tl.where(w == 1, 1.0, w - 1)))
    return tl.where(z > 0, z, 0.0) + small


@triton.jit
def scaled(value, slope):
    """``value · slope``, 0 where the slope is, whatever the value."""
    return tl.where(slope == 0, 0.0, value * slope)


@triton.jit
def add_up(outputs, partials, value, weight, TILE: tl.constexpr):
    """Leave this program's two sums; the last program to come adds up those of all.

    The total weight goes to the beginning of the buffer.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partials + 2 * program, value)
    tl.store(partials + 2 * program + 1, weight)
    tl.debug_barrier()
    if tl.atomic_add(outputs.counter, 1.0) == programs - 1:
        chunk = tl.arange(0, 256)
        values = tl.zeros((256,), tl.float64)
        weights = tl.zeros((256,), tl.float64)
        for begin in range(0, programs, 256):
            there = begin + chunk < programs
            at = partials + 2 * (begin + chunk)
            values += tl.load(at, there, 0.0, cache_modifier=".cg")
            weights += tl.load(at + 1, there, 0.0, cache_modifier=".cg")
        weight = tl.sum(weights, 0)
        value = tl.sum(values, 0)
        tl.store(outputs.buffer, weight)
        tl.store(outputs.result, value / weight if TILE.reduction == "mean" else value)
        tl.store(outputs.counter, 0.0)


@triton.jit
def of_labels(problem, line, row, inside, columns, loss):
    """Whether labels of rows count, their scores (NaN if they are no classes), margins, weights."""
    label = tl.load(problem.labels + row, inside, 0)
    counted = inside & (label != loss.ignore_index)
    legal = counted & (label >= 0) & (label < columns)
    score = tl.load(line + label, legal, float("nan")).to(tl.float64)
    alpha = loss.alpha
    if problem.margins is not None:
        alpha = alpha + tl.load(problem.margins + label, legal, 0.0).to(tl.float64)
    weight = tl.where(counted, 1.0, 0.0).to(tl.float64)
    if problem.weights is not None:
        given = tl.load(problem.weights + label, legal, 0.0).to(tl.float64)
        weight = tl.where(counted, given, 0.0)
    return counted, score, alpha, weight


@triton.jit
def loss_and_slope(gap, tau, k, counted, weight):
    """``τ softplus(gap / τ)`` times the weight, and minus its derivative by the label's score."""
    z = gap / tau
    loss = tl.where(counted, tau * softplus(z) * weight, 0.0)
    return loss, tl.where(counted, weight / (k * (1 + tl.exp(-z))), 0.0)


@triton.jit
def finish_rows(problem, shape, states, row, inside, loss, TILE: tl.constexpr):
    """Losses and weights of rows (R); replaces their states by the constants of the gradient."""
    K: tl.constexpr = TILE.k
    line = problem.scores + row * shape.stride
    counted, of_label, alpha, weight = of_labels(problem, line, row, inside, shape.columns, loss)
    if TILE.parts > 1:
        merge_parts(states, row, inside, shape.parts, K * loss.tau, TILE)
    constants = states + row * shape.parts * (3 * K + 2)
    slots = tl.arange(0, TILE.slots)[None, :]
    threshold, inverted, product, whole = polynomials(constants, inside, K * loss.tau, TILE)
    upper = tl.sum(tl.where(slots == 0, whole[K], 0.0), 1)
    lower = tl.sum(tl.where(slots == 0, whole[K - 1], 0.0), 1)

    gap = (threshold - of_label) / K + loss.tau * tl.log(upper / lower) + alpha
    value, slope = loss_and_slope(gap, loss.tau, K, counted, weight)

    up, low = (1 / upper)[:, None], (1 / lower)[:, None]
    of_heads = inverted * (product[K - 1] * low - product[K] * up)
    of_tail = of_heads
    for j in tl.static_range(1, K + 1):
        c = whole[K - j] * up
        if j < K:
            c = c - whole[K - 1 - j] * low
        of_tail = tl.where(slots == j - 1, c if j % 2 == 1 else -c, of_tail)
    tl.debug_barrier()
    kept = inside[:, None] & (slots < K)
    tl.store(constants[:, None] + slots, scaled(of_heads, slope[:, None]), kept)
    tl.store(constants[:, None] + 2 * K + slots, scaled(of_tail, slope[:, None]), kept)
    tl.store(constants + 3 * K + 1, -slope, inside)
    return value, weight


@triton.jit(do_not_specialize=("rows", "columns", "stride", "parts", "ignore_index"))
def smooth_loss_kernel(
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
    """Losses of rows, reduced, and the constants of their gradients.

    A program takes every ``programs``-th tile of rows.
    """
    ROWS: tl.constexpr = TILE.rows
    SIZE: tl.constexpr = 3 * TILE.k + 2
    tau = tl.cast(numbers.tau, tl.float64) + numbers.tau_rest
    alpha = tl.cast(numbers.margin, tl.float64) + numbers.margin_rest
    loss = Loss(tau, alpha, ignore_index)
    shape = Shape(columns, stride, parts)
    states = outputs.buffer + 1
    all_losses = tl.zeros((ROWS,), tl.float64)
    all_weights = tl.zeros((ROWS,), tl.float64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        if TILE.reads:
            state = states + row * SIZE
            read_rows(problem, shape, state, row, inside, (0, columns), numbers.rate, TILE)
            tl.debug_barrier()
        value, weight = finish_rows(problem, shape, states, row, inside, loss, TILE)
        if TILE.reduction == "none":
            tl.store(outputs.result + row, value, inside)
        all_losses += value
        all_weights += weight
    if TILE.reduction != "none":
        partials = states + tl.cast(rows, tl.int64) * parts * SIZE
        value, weight = tl.sum(all_losses, 0), tl.sum(all_weights, 0)
        add_up(outputs, partials, value, weight, TILE)
