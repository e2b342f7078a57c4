r"""Kernel of the expected k-th largest score under noise, or its hinge, with its gradient.

``E (s + εZ)_(K) = a + ∫_a P(N(t) ≥ K) dt``, where N(t) counts the scores above t. A program takes a
row: it finds the K-th largest score, collects the candidates within reach of it, and multiplies
``Π_i (1 − p_i(t) + p_i(t) X)`` out, one candidate after another, for all nodes t of the integral at
once. The chance of a class to be the K-th largest, which is the gradient, needs the same product
without that class: the coefficients of those before it, times those of the ones after it. All terms
are positive, so nothing cancels. Products before are kept once for every segment of candidates,
and made again for one segment at a time, from the last to the first.

Each product waits for the one before, and small batches leave a program alone with its wait. So the
candidates are halved, and both halves multiplied out side by side, (2, NODES): what comes after a
candidate then begins with the whole product of the other half. And FEW candidates are taken at a
time: their chances do not depend on each other.
"""

import triton
import triton.language as tl

from topklass.kernels.hinge_rows import hinge_loss
from topklass.kernels.row_constants import add_up
from topklass.kernels.row_state import as_score, multiple, row_heads

NEARLY = tl.constexpr(1e-6)
"""Probability beyond the window of integration, at either end."""


@triton.jit
def upper_tail(x):
    """``Φ(−x)`` for x ≥ 0: exp(−x²/2) times a polynomial in 1 / (1 + 0.3 x).

    Fitted up to x = 12.5, relative error below 1e-7 and that of the exponential.
    """
    t = 1.0 / (1.0 + 0.3 * x)
    p = -0.160514187 + 0.0364651734 * t
    p = 0.212096028 + p * t
    p = -0.0590110579 + p * t
    p = 0.131407376 + p * t
    p = 0.0990409735 + p * t
    p = 0.120895751 + p * t
    p = 0.119619894 + p * t
    return p * t * tl.exp(-0.5 * x * x)


@triton.jit
def chances(z, t):
    """Probabilities of z with noise to be above thresholds t, and not to be, in float64."""
    x = z - t
    less = upper_tail(tl.abs(x)).to(tl.float64)
    more = 1.0 - less
    return tl.where(x > 0, more, less), tl.where(x > 0, less, more)


@triton.jit
def nothing_counted(K: tl.constexpr, NODES: tl.constexpr):
    """Coefficients of the empty product, up to X^(K−1), for both halves."""
    counts = (tl.full((2, NODES), 1.0, tl.float64),)
    for _ in tl.static_range(1, K):
        counts = counts + (tl.zeros((2, NODES), tl.float64),)
    return counts


@triton.jit
def count(counts, above, not_above, K: tl.constexpr):
    """Coefficients times ``not_above + above·X``."""
    result = (counts[0] * not_above,)
    for j in tl.static_range(1, K):
        result = result + (counts[j] * not_above + counts[j - 1] * above,)
    return result


@triton.jit
def candidates(values, i, found):
    """The i-th candidate of either half, (2, 1); −∞ where there is none: it is never above."""
    half = tl.cdiv(found, 2)
    begin = tl.arange(0, 2)[:, None] * half
    return tl.load(values + begin + i, begin + i < tl.minimum(begin + half, found), float("-inf"))


@triton.jit
def next_chances(values, i, found, t, FEW: tl.constexpr):
    """Chances of FEW candidates of either half, from the i-th on."""
    above, not_above = (), ()
    for j in tl.static_range(FEW):
        one, other = chances(candidates(values, i + j, found), t[None, :])
        above, not_above = above + (one,), not_above + (other,)
    return above, not_above


@triton.jit
def keep(place, counts, K: tl.constexpr, NODES: tl.constexpr):
    """Write coefficients, rounded."""
    number = tl.arange(0, 2)[:, None] * NODES + tl.arange(0, NODES)[None, :]
    for j in tl.static_range(K):
        tl.store(place + 2 * j * NODES + number, counts[j].to(tl.float32))


@triton.jit
def kept(place, SWAPPED: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr):
    """Read them again; swapped, each half gets those of the other."""
    half = tl.arange(0, 2)[:, None]
    if SWAPPED:
        half = 1 - half
    number = half * NODES + tl.arange(0, NODES)[None, :]
    counts = (tl.load(place + number).to(tl.float64),)
    for j in tl.static_range(1, K):
        counts = counts + (tl.load(place + 2 * j * NODES + number).to(tl.float64),)
    return counts


@triton.jit
def fewer_than_k(
    values,
    found,
    t,
    saved,
    KEEP: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    NODES: tl.constexpr,
    FEW: tl.constexpr,
):
    """Probability that fewer than K candidates are above t.

    Coefficients of either half are kept at the end and, with KEEP, before each segment.
    """
    SIZE: tl.constexpr = 2 * K * NODES
    half = tl.cdiv(found, 2)
    segments = tl.cdiv(half, SEGMENT)
    counts = nothing_counted(K, NODES)
    tl.debug_barrier()
    place = saved
    for segment in range(segments + 1):
        keep(place, counts, K, NODES)
        begin = segment * SEGMENT
        for i in range(begin, tl.minimum(half, begin + SEGMENT), FEW):
            above, not_above = next_chances(values, i, found, t, FEW)
            for j in tl.static_range(FEW):
                counts = count(counts, above[j], not_above[j], K)
        place += KEEP * SIZE
    tl.debug_barrier()
    others = kept(place - KEEP * SIZE, True, K, NODES)
    at_most = others[0]
    total = counts[K - 1] * at_most
    for j in tl.static_range(1, K):
        at_most += others[j]
        total += counts[K - 1 - j] * at_most
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, total, 0.0), 0)


@triton.jit
def write_shares(
    values,
    classes,
    found,
    saved,
    t,
    weight,
    slope,
    gradient,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    NODES: tl.constexpr,
    FEW: tl.constexpr,
):
    """Write the chance of each candidate to be the K-th largest, times the slope, to its class."""
    SIZE: tl.constexpr = 2 * K * NODES
    ENTRIES: tl.constexpr = 8
    node = tl.arange(0, NODES)
    both = tl.arange(0, 2)[:, None] * NODES + node[None, :]
    half = tl.cdiv(found, 2)
    segments = tl.cdiv(half, SEGMENT)
    whole = saved + tl.cast(segments, tl.int64) * SIZE
    inner = whole + SIZE
    products = inner + SEGMENT * SIZE
    after = kept(whole, True, K, NODES)
    for done in range(segments):
        segment = segments - 1 - done
        begin = segment * SEGMENT
        length = tl.minimum(half - begin, SEGMENT)
        counts = kept(saved + tl.cast(segment, tl.int64) * SIZE, False, K, NODES)
        for i in range(0, length, FEW):
            above, not_above = next_chances(values, begin + i, found, t, FEW)
            for j in tl.static_range(FEW):
                keep(inner + (i + j) * SIZE, counts, K, NODES)
                counts = count(counts, above[j], not_above[j], K)
        tl.debug_barrier()
        for back in range(0, length, FEW):
            i = (length - 1) // FEW * FEW - back
            above, not_above = next_chances(values, begin + i, found, t, FEW)
            before = ()
            for j in tl.static_range(FEW):
                before = before + (kept(inner + (i + j) * SIZE, False, K, NODES),)
            for j in tl.static_range(FEW - 1, -1, -1):
                others = before[j][0] * after[K - 1]
                for m in tl.static_range(1, K):
                    others += before[j][m] * after[K - 1 - m]
                x = candidates(values, begin + i + j, found) - t[None, :]
                density = 0.3989422804 * tl.exp(-0.5 * x * x)
                product = weight[None, :] * density * others.to(tl.float32)
                tl.store(products + 2 * (i + j) * NODES + both, product)
                after = count(after, above[j], not_above[j], K)
        tl.debug_barrier()
        for start in range(0, 2 * length, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            number = entry % 2 * half + begin + entry // 2
            there = (entry < 2 * length) & (number < found)
            product = tl.load(products + entry[:, None] * NODES + node[None, :], there[:, None], 0)
            column = tl.load(classes + number, there, 0)
            tl.store(gradient + column, slope * tl.sum(product, 1), there)
        tl.debug_barrier()


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "room", "ignore_index"),
    do_not_specialize_on_alignment=("labels", "margins", "weights"),
)
def expected_kernel(
    scores,
    labels,
    margins,
    weights,
    all_classes,
    all_values,
    all_saved,
    buffer,
    counter,
    result,
    gradient,
    rows,
    columns,
    stride,
    room,
    epsilon,
    down,
    up,
    far,
    margin,
    scale,
    ignore_index,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCTION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    NODES: tl.constexpr,
    FEW: tl.constexpr,
):
    """The expected K-th largest of every ``programs``-th row; with labels the loss.

    The gradient, not yet divided by the weight of all rows, goes to the candidates and the label;
    it is 0 before. Each program has room for all classes and their values, and for ``room``
    coefficients.
    """
    epsilon = tl.cast(epsilon, tl.float32)
    down, up = tl.cast(down, tl.float32), tl.cast(up, tl.float32)
    far = tl.cast(far, tl.float32)
    margin, scale = tl.cast(margin, tl.float32), tl.cast(scale, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    classes, values = all_classes + program * columns, all_values + program * columns
    saved = all_saved + program * room
    columns = multiple(columns, ALIGNED)
    node = tl.arange(0, NODES)
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = scores + tl.cast(row, tl.int64) * tl.cast(multiple(stride, ALIGNED), tl.int64)
        heads, _, spoilt = row_heads(line, columns, K, SLOTS, BLOCK)
        center = as_score(tl.min(tl.min(heads, 1), 0))
        known = (spoilt == 0) & (tl.abs(center) < float("inf"))
        top = tl.where(spoilt > 0, float("nan"), center)
        found = 0
        t = tl.zeros((NODES,), tl.float32)
        weight = tl.zeros((NODES,), tl.float32)
        if known:
            bound = center - far * epsilon
            for begin in range(0, columns, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
                near = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
                entry = found + tl.cumsum(near, 0) - 1
                tl.store(classes + entry, column, near > 0)
                tl.store(values + entry, (x - center) / epsilon, near > 0)
                found += tl.sum(near, 0)
            tl.debug_barrier()
            low, high = -down, up
            reached = tl.zeros((NODES,), tl.float64)
            for narrowed in range(2):  # to where the K-th largest is, but for NEARLY at either end
                step = (high - low) / (NODES - 1)
                t = low + step * node.to(tl.float32)
                weight = tl.where((node == 0) | (node == NODES - 1), step / 2, step)
                below = fewer_than_k(values, found, t, saved, HAS_GRADIENT, K, SEGMENT, NODES, FEW)
                reached = 1.0 - below
                if narrowed == 0:
                    low = tl.max(tl.where(below <= NEARLY, t, low), 0)
                    high = tl.min(tl.where(reached <= NEARLY, t, high), 0)
            top = center + epsilon * (low + tl.sum(weight * reached.to(tl.float32), 0))
        slope = 1.0
        if HAS_LABEL:
            loss, share, slope, label, legal = hinge_loss(
                line,
                row,
                top,
                labels,
                margins,
                weights,
                columns,
                margin,
                scale,
                ignore_index,
                HAS_MARGINS,
                HAS_WEIGHTS,
            )
            all_losses += loss
            all_weights += share
            if REDUCTION == "none":
                tl.store(result + row, loss)
        else:
            tl.store(result + row, top)
        if HAS_GRADIENT:
            out = gradient + tl.cast(row, tl.int64) * columns
            tl.debug_barrier()
            if known & (slope != 0):
                write_shares(
                    values,
                    classes,
                    found,
                    saved,
                    t,
                    weight,
                    slope,
                    out,
                    K,
                    SEGMENT,
                    NODES,
                    FEW,
                )
            if HAS_LABEL:
                tl.debug_barrier()
                of_label = tl.load(out + label, legal, 0.0)
                tl.debug_barrier()
                tl.store(out + label, of_label - slope, legal)
        tl.debug_barrier()
    if HAS_LABEL and REDUCTION != "none":
        add_up(buffer + 1, counter, buffer, result, all_losses, all_weights, REDUCTION == "mean")


@triton.jit(
    do_not_specialize=("columns", "outgoing_stride"), do_not_specialize_on_alignment=("outgoing",)
)
def scaled_kernel(
    gradient,
    outgoing,
    total,
    result,
    columns,
    outgoing_stride,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a row of the gradient, times the outgoing one; what is 0 stays 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    scale = tl.load(outgoing + row * outgoing_stride).to(tl.float32)
    if MEAN:
        scale = scale / tl.load(total).to(tl.float32)
    slope = tl.load(gradient + row * columns + column, there, 0.0)
    tl.store(result + row * columns + column, tl.where(slope == 0, 0.0, slope * scale), there)
