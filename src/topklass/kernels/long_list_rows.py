r"""Kernels of the smooth loss for long lists: any k, compiled once for all.

Tilted as in ``reference/tree.py``, the polynomials are chances of a count: with
``p_i = sigmoid((s_i − ρ) / kτ)`` and N the number of successes of independent trials,

    log σ_k − log σ_{k−1} = ρ / kτ + log P(N = k) − log P(N = k−1).

These are two Fourier coefficients of ``φ(θ) = E exp(iθN) = Π_i (1 − p_i + p_i exp(iθ))`` (the
method of Y. Hong, On computing the distribution function for the Poisson binomial distribution,
2013), at ``θ_m = π(2m + 1) / M``. Counts M apart are taken for each other, so M exceeds the spread
of N; both chances stand at the mode, so sums lose no digits in float64. Leaving class i out
divides φ by its factor, which never vanishes at these θ. No operation waits for a product of other
classes but one at the end.

The constants of a row are, in float64, real and imaginary parts of ``φ(θ_m) exp(−iθ_m (k−1))`` for
m < M / 2 (the other half is conjugate), ρ in two parts, the slope of the label, and that over
either chance.
"""

import triton
import triton.language as tl

from topklass.kernels.row_constants import add_up, loss_and_slope, of_labels

PI = tl.constexpr(3.141592653589793)
MORE = tl.constexpr(5)
"""Constants of a row besides those of nodes."""
NEAR = tl.constexpr(0.25)
"""How far the mean count may be from k − 1/2."""


@triton.jit
def rivals(line, column, columns, label):
    """Scores of classes, without that of the label."""
    x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
    return tl.where(column == label, float("-inf"), x)


@triton.jit
def bracket(line, columns, label, BLOCK: tl.constexpr):
    """Least and largest finite rival, how many are infinite, how many are there, and NaN if any."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    infinite = tl.zeros((BLOCK,), tl.int32)
    present = tl.zeros((BLOCK,), tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, columns, BLOCK):
        x = rivals(line, begin + tl.arange(0, BLOCK), columns, label)
        finite = tl.abs(x) < float("inf")
        least = tl.where(finite & (x < least), x, least)
        most = tl.where(finite & (x > most), x, most)
        infinite += (x == float("inf")).to(tl.int32)
        present += (x > float("-inf")).to(tl.int32)
        spoilt += (x != x).to(tl.int32)
    return (
        tl.min(least, 0),
        tl.max(most, 0),
        tl.sum(infinite, 0),
        tl.sum(present, 0),
        tl.sum(spoilt, 0),
    )


@triton.jit
def mean_count(line, columns, label, pivot, tilt, rate, BLOCK: tl.constexpr):
    """``Σ_i sigmoid(rate·(s_i − pivot − tilt))``."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, columns, BLOCK):
        x = rivals(line, begin + tl.arange(0, BLOCK), columns, label).to(tl.float64)
        total += tl.sigmoid(((x - pivot - tilt) * rate).to(tl.float32))
    return tl.sum(total, 0)


@triton.jit
def search(line, columns, label, pivot, low, high, k, rate, BLOCK: tl.constexpr):
    """The tilt, between low and high, at which the mean count is near k − 1/2; and whether it is.

    Where it is not, low is the last number of float64 before it.
    """
    tilt = (low + high) / 2
    excess = mean_count(line, columns, label, pivot, tilt, rate, BLOCK) - (k - 0.5)
    while (tl.abs(excess) > NEAR) & (tilt > low) & (tilt < high):
        low, high = tl.where(excess > 0, tilt, low), tl.where(excess > 0, high, tilt)
        tilt = (low + high) / 2
        excess = mean_count(line, columns, label, pivot, tilt, rate, BLOCK) - (k - 0.5)
    return tilt, low, tl.abs(excess) <= NEAR


@triton.jit
def step_to_nearest(line, columns, label, place, BLOCK: tl.constexpr):
    """From a place to the finite rival that is nearest to it."""
    step = tl.full((BLOCK,), float("inf"), tl.float64)
    for begin in range(0, columns, BLOCK):
        x = rivals(line, begin + tl.arange(0, BLOCK), columns, label).to(tl.float64)
        step = tl.where(tl.abs(x - place) < tl.abs(step), x - place, step)
    up = tl.min(tl.where(step >= 0, step, float("inf")), 0)
    down = tl.max(tl.where(step < 0, step, float("-inf")), 0)
    return tl.where(up < -down, up, down)


@triton.jit
def find_tilt(line, columns, label, least, most, k, rate, BLOCK: tl.constexpr):
    """ρ in two parts, pivot and tilt: it may lie closer to a score than one number can say.

    Then no other score is as near: those of float32 are never neighbours in float64. The reach is
    wider by what low may be off.
    """
    reach = tl.log(2.0 * columns.to(tl.float64)) / rate
    pivot = tl.cast(0.0, tl.float64)
    tilt, low, found = search(
        line, columns, label, pivot, least - reach, most + reach, k, rate, BLOCK
    )
    if found == 0:
        pivot = low + step_to_nearest(line, columns, label, low, BLOCK)
        tilt, _, _ = search(line, columns, label, pivot, -5 * reach, 5 * reach, k, rate, BLOCK)
    return pivot, tilt


@triton.jit
def chances(x, pivot, tilt, rate):
    """``sigmoid(rate·(x − pivot − tilt))`` and what is left to 1, in float64."""
    z = (x.to(tl.float64) - pivot - tilt) * rate
    e = tl.exp(-tl.abs(z))
    less, more = e / (1 + e), 1 / (1 + e)
    return tl.where(z > 0, more, less), tl.where(z > 0, less, more)


@triton.jit
def turn(node, times, NODES: tl.constexpr):
    """Cosine and sine of ``times·θ``: the angle is reduced among integers."""
    turns = (2 * node + 1) * times % (4 * NODES)
    angle = turns.to(tl.float64) * (PI / (2 * NODES))
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def product(a, b, c, d):
    """``(a + ib)(c + id)``."""
    return a * c - b * d, a * d + b * c


@triton.jit
def transform(
    line,
    columns,
    label,
    pivot,
    tilt,
    rate,
    cosine,
    sine,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Real and imaginary parts of φ where cosine and sine of θ are these, (TILE)."""
    real = tl.full((TILE, BLOCK), 1.0, tl.float64)
    imaginary = tl.zeros((TILE, BLOCK), tl.float64)
    for begin in range(0, columns, BLOCK):
        x = rivals(line, begin + tl.arange(0, BLOCK), columns, label)
        p, q = chances(x, pivot, tilt, rate)
        c = q[None, :] + p[None, :] * cosine[:, None]
        d = p[None, :] * sine[:, None]
        real, imaginary = product(real, imaginary, c, d)
    return tl.reduce((real, imaginary), 1, product)


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "k", "ignore_index"),
    do_not_specialize_on_alignment=("labels", "margins", "weights"),
)
def long_list_kernel(
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
    k,
    tau,
    tau_rest,
    margin,
    margin_rest,
    ignore_index,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCTION: tl.constexpr,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Losses of every ``programs``-th row, reduced, and the constants of their gradients.

    The buffer holds the total weight, the constants, and two sums for each program.
    """
    tau = tl.cast(tau, tl.float64) + tau_rest
    rate = 1 / (k * tau)
    SIZE: tl.constexpr = 2 * NODES + MORE
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = scores + tl.cast(row, tl.int64) * tl.cast(stride, tl.int64)
        constants = buffer + 1 + tl.cast(row, tl.int64) * SIZE
        label = tl.load(labels + row)
        counted, of_label, alpha, weight = of_labels(
            line,
            labels,
            margins,
            weights,
            row,
            row < rows,
            columns,
            tl.cast(margin, tl.float64) + margin_rest,
            ignore_index,
            HAS_MARGINS,
            HAS_WEIGHTS,
        )
        least, most, infinite, present, spoilt = bracket(line, columns, label, WIDE)
        enough = present >= k
        known = (spoilt == 0) & (infinite < k) & enough
        pivot = tl.cast(0.0, tl.float64)
        tilt = tl.cast(0.0, tl.float64)
        upper = tl.cast(0.0, tl.float64)
        lower = tl.cast(0.0, tl.float64)
        if known:
            low, high = least.to(tl.float64), most.to(tl.float64)
            pivot, tilt = find_tilt(line, columns, label, low, high, k, rate, WIDE)
            for start in range(0, NODES, TILE):
                node = start + tl.arange(0, TILE)
                cosine, sine = turn(node, 1, NODES)
                real, imaginary = transform(
                    line, columns, label, pivot, tilt, rate, cosine, sine, TILE, BLOCK
                )
                c, d = turn(node, k - 1, NODES)
                real, imaginary = product(real, imaginary, c, -d)
                lower += tl.sum(real, 0) / NODES
                upper += tl.sum(real * cosine + imaginary * sine, 0) / NODES
                tl.store(constants + node, real)
                tl.store(constants + NODES + node, imaginary)

        gap = (pivot - of_label + tilt) / k + tau * tl.log(upper / lower) + alpha
        certain = tl.where(of_label == float("-inf"), float("inf"), float("-inf"))
        gap = tl.where(enough | (spoilt > 0) | (of_label != of_label), gap, certain)
        loss, slope = loss_and_slope(gap, tau, k, counted, weight)
        slope = tl.where(known | (gap != gap), slope, 0.0)
        others = constants + 2 * NODES
        tl.store(others, pivot)
        tl.store(others + 1, tilt)
        tl.store(others + 2, -slope)
        tl.store(others + 3, slope / upper)
        tl.store(others + 4, slope / lower)
        if REDUCTION == "none":
            tl.store(result + row, loss)
        all_losses += loss
        all_weights += weight
    if REDUCTION != "none":
        partials = buffer + 1 + tl.cast(rows, tl.int64) * SIZE
        add_up(partials, counter, buffer, result, all_losses, all_weights, REDUCTION == "mean")


@triton.jit(
    do_not_specialize=("columns", "stride", "k", "outgoing_stride"),
    do_not_specialize_on_alignment=("labels", "outgoing"),
)
def long_list_gradient_kernel(
    scores,
    labels,
    buffer,
    outgoing,
    gradient,
    columns,
    stride,
    k,
    outgoing_stride,
    tau,
    tau_rest,
    MEAN: tl.constexpr,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a row, every ``programs``-th BLOCK of columns, scaled by the outgoing gradient.

    With ``A_j = P(N without i = j)``, ``P(N = j) = (1 − p_i) A_j + p_i A_{j−1}`` and

        ∂/∂s_i ∝ p_i (A_{k−1} / P(N = k) − A_{k−2} / P(N = k−1))
               = p_i (1 − p_i) ((A_{k−1} − A_k) / P(N = k) − (A_{k−2} − A_{k−1}) / P(N = k−1)),

    which keeps its digits where p_i is nearly 1.
    """
    rate = 1 / (k * (tl.cast(tau, tl.float64) + tau_rest))
    row = tl.program_id(0).to(tl.int64)
    constants = buffer + 1 + row * (2 * NODES + MORE)
    others = constants + 2 * NODES
    pivot, tilt, of_label = tl.load(others), tl.load(others + 1), tl.load(others + 2)
    upper, lower = tl.load(others + 3), tl.load(others + 4)
    label = tl.load(labels + row)
    scale = tl.load(outgoing + row * outgoing_stride).to(tl.float64)
    if MEAN:
        scale = scale / tl.load(buffer)
    line = scores + row * tl.cast(stride, tl.int64)
    out = gradient + row * tl.cast(columns, tl.int64)
    for begin in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        p, q = chances(rivals(line, column, columns, label), pivot, tilt, rate)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, NODES, TILE):
            node = start + tl.arange(0, TILE)
            cosine, sine = turn(node, 1, NODES)
            real, imaginary = tl.load(constants + node), tl.load(constants + NODES + node)
            a, b = product(real, imaginary, upper - lower * cosine, -lower * sine)
            a, b = product(a, b, 1 - cosine, sine)
            c = q[None, :] + p[None, :] * cosine[:, None]
            d = p[None, :] * sine[:, None]
            size = 1 - 2 * (p * q)[None, :] * (1 - cosine)[:, None]
            total += tl.sum((a[:, None] * c + b[:, None] * d) / size, 0)
        value = tl.where(column == label, of_label, p * q * total / NODES)
        value = tl.where(of_label == 0, 0.0, value * scale)
        tl.store(out + column, value, column < columns)
