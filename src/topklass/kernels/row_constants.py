r"""Second kernel: from the states of rows to their losses and the constants of their gradients.

Newton's identities give the tail's polynomial Q(X); multiplied by ``v_i + X`` for every head i it
is S(X). A tile has one column for each head, in which that head is left out: all terms of these
products are positive, and one factor more gives S. The last program to finish adds up the losses
of all, in a fixed order.

The constants of a row take the place of its (first) state: slopes of the heads, their classes,
coefficients of the tail, threshold, slope of the label.
"""

import triton
import triton.language as tl

from topklass.kernels.row_state import as_score, no_heads, read_rows, take_heads

LARGEST_K_UNROLLED = tl.constexpr(20)


@triton.jit
def merge_parts(
    states,
    row,
    inside,
    parts,
    temperature,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the states of a row's pieces into the first."""
    SIZE: tl.constexpr = 3 * K + 2
    entry = tl.arange(0, PARTS * SLOTS)[None, :]
    part = entry // SLOTS
    slot = entry % SLOTS
    there = inside[:, None] & (part < parts) & (slot < K)
    state = states + (row[:, None] * parts + part) * SIZE
    x = tl.load(state + slot, there, float("-inf")).to(tl.float32)
    classes = tl.load(state + K + slot, there, -1.0).to(tl.int32)
    keys, places = no_heads(ROWS, K, SLOTS)
    x, keys, places, threshold = take_heads(x, classes, keys, places)

    # The sums of the pieces seen from the row's threshold, (R, PARTS, SLOTS).
    part = tl.arange(0, PARTS)[None, :]
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
def polynomials(constants, inside, temperature, K: tl.constexpr, SLOTS: tl.constexpr):
    """Threshold (R), inverted heads, products without each head, and with all, (R, SLOTS) each.

    The inverted heads take the place of the heads in memory, where all columns can read them.
    """
    slots = tl.arange(0, SLOTS)[None, :]
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
def add_up(partials, counter, total, result, value, weight, MEAN: tl.constexpr):
    """Leave this program's two sums; the last program to come adds up those of all.

    The counter is 0 before and after.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partials + 2 * program, value)
    tl.store(partials + 2 * program + 1, weight)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1.0) == programs - 1:
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
        tl.store(total, weight)
        tl.store(result, value / weight if MEAN else value)
        tl.store(counter, 0.0)


@triton.jit
def of_labels(
    line,
    labels,
    margins,
    weights,
    row,
    inside,
    columns,
    alpha,
    ignore_index,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Whether labels of rows count, their scores (NaN if they are no classes), margins, weights."""
    label = tl.load(labels + row, inside, 0)
    counted = inside & (label != ignore_index)
    legal = counted & (label >= 0) & (label < columns)
    score = tl.load(line + label, legal, float("nan")).to(tl.float64)
    if HAS_MARGINS:
        alpha = alpha + tl.load(margins + label, legal, 0.0).to(tl.float64)
    weight = tl.where(counted, 1.0, 0.0).to(tl.float64)
    if HAS_WEIGHTS:
        weight = tl.where(counted, tl.load(weights + label, legal, 0.0).to(tl.float64), 0.0)
    return counted, score, alpha, weight


@triton.jit
def loss_and_slope(gap, tau, k, counted, weight):
    """``τ softplus(gap / τ)`` times the weight, and minus its derivative by the label's score."""
    z = gap / tau
    loss = tl.where(counted, tau * softplus(z) * weight, 0.0)
    return loss, tl.where(counted, weight / (k * (1 + tl.exp(-z))), 0.0)


@triton.jit
def finish_rows(
    scores,
    labels,
    margins,
    weights,
    states,
    row,
    inside,
    columns,
    stride,
    parts,
    tau,
    alpha,
    ignore_index,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Losses and weights of rows (R); replaces their states by the constants of the gradient."""
    counted, of_label, alpha, weight = of_labels(
        scores + row * stride,
        labels,
        margins,
        weights,
        row,
        inside,
        columns,
        alpha,
        ignore_index,
        HAS_MARGINS,
        HAS_WEIGHTS,
    )
    if PARTS > 1:
        merge_parts(states, row, inside, parts, K * tau, K, SLOTS, ROWS, PARTS)
    constants = states + row * parts * (3 * K + 2)
    slots = tl.arange(0, SLOTS)[None, :]
    kept = inside[:, None] & (slots < K)
    threshold, inverted, product, whole = polynomials(constants, inside, K * tau, K, SLOTS)
    upper = tl.sum(tl.where(slots == 0, whole[K], 0.0), 1)
    lower = tl.sum(tl.where(slots == 0, whole[K - 1], 0.0), 1)

    gap = (threshold - of_label) / K + tau * tl.log(upper / lower) + alpha
    loss, slope = loss_and_slope(gap, tau, K, counted, weight)

    up, low, slopes = (1 / upper)[:, None], (1 / lower)[:, None], slope[:, None]
    of_heads = inverted * (product[K - 1] * low - product[K] * up)
    of_tail = of_heads
    for j in tl.static_range(1, K + 1):
        c = whole[K - j] * up
        if j < K:
            c = c - whole[K - 1 - j] * low
        of_tail = tl.where(slots == j - 1, c if j % 2 == 1 else -c, of_tail)
    tl.debug_barrier()
    tl.store(constants[:, None] + slots, scaled(of_heads, slopes), kept)
    tl.store(constants[:, None] + 2 * K + slots, scaled(of_tail, slopes), kept)
    tl.store(constants + 3 * K + 1, -slope, inside)
    return loss, weight


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "parts", "ignore_index"),
    do_not_specialize_on_alignment=("labels", "margins", "weights"),
)
def smooth_loss_kernel(
    scores,
    labels,
    margins,
    weights,
    buffer,
    counter,
    result,
    rows,
    columns,
    stride,
    parts,
    tau,
    tau_rest,
    margin,
    margin_rest,
    rate,
    ignore_index,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCTION: tl.constexpr,
    READS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Losses of rows, reduced, and the constants of their gradients.

    A program takes every ``programs``-th tile of ROWS rows. READS: it also does the first kernel's
    work. The buffer holds the total weight, the states of rows, and two sums for each program.
    """
    tau = tl.cast(tau, tl.float64) + tau_rest
    alpha = tl.cast(margin, tl.float64) + margin_rest
    states = buffer + 1
    all_losses = tl.zeros((ROWS,), tl.float64)
    all_weights = tl.zeros((ROWS,), tl.float64)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        if READS:
            read_rows(
                scores,
                labels,
                states + row * (3 * K + 2),
                row,
                inside,
                0,
                columns,
                stride,
                rate,
                K,
                SLOTS,
                True,
                PRECISION,
                ALIGNED,
                ROWS,
                BLOCK,
            )
            tl.debug_barrier()
        loss, weight = finish_rows(
            scores,
            labels,
            margins,
            weights,
            states,
            row,
            inside,
            columns,
            stride,
            parts,
            tau,
            alpha,
            ignore_index,
            K,
            SLOTS,
            PARTS,
            HAS_MARGINS,
            HAS_WEIGHTS,
            ROWS,
        )
        if REDUCTION == "none":
            tl.store(result + row, loss, inside)
        all_losses += loss
        all_weights += weight
    if REDUCTION != "none":
        partials = states + tl.cast(rows, tl.int64) * parts * (3 * K + 2)
        loss = tl.sum(all_losses, 0)
        weight = tl.sum(all_weights, 0)
        add_up(partials, counter, buffer, result, loss, weight, REDUCTION == "mean")
