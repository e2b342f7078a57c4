r"""Kernels of the noised top-k: the k-th largest of ``s + εZ_b`` for each sample b, without Z.

Normal noise made from 24-bit uniforms is bounded, ``|z| ≤ FARTHEST``. A program reads its row once
to find the k largest scores; the least of them with their noise, less ``ε·FARTHEST``, is a bound
that every chosen class reaches. It reads the row once more to collect the candidates above the
bound; only they get noise, from a counter-based generator (Philox) keyed by seed, row, class and
sample. What is kept for the backward pass are the chosen classes.
"""

import triton
import triton.language as tl

from topklass.kernels.hinge_rows import hinge_loss
from topklass.kernels.row_constants import add_up
from topklass.kernels.row_state import (
    ABSENT,
    NOWHERE,
    as_key,
    as_score,
    multiple,
    no_heads,
    row_heads,
    take_heads,
)

FARTHEST = tl.constexpr(5.43)
"""The quantile of 1 − 2^−25, rounded up."""


@triton.jit
def normal(bits):
    """A normal number from 24 bits of a random integer, by way of erfinv: a quantile and a sign.

    The polynomials are those of M. Giles, Approximating the erfinv function (2010), for single
    precision; relative error below 4e-7.
    """
    half = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-24)  # up to 1/2
    w = -tl.log(4.0 * half * (1.0 - half))
    c = w - 2.5
    p = 3.43273939e-07 + 2.81022636e-08 * c
    p = -3.5233877e-06 + p * c
    p = -4.39150654e-06 + p * c
    p = 0.00021858087 + p * c
    p = -0.00125372503 + p * c
    p = -0.00417768164 + p * c
    p = 0.246640727 + p * c
    p = 1.50140941 + p * c
    t = tl.sqrt(w) - 3.0
    q = 0.000100950558 - 0.000200214257 * t
    q = 0.00134934322 + q * t
    q = -0.00367342844 + q * t
    q = 0.00573950773 + q * t
    q = -0.0076224613 + q * t
    q = 0.00943887047 + q * t
    q = 1.00167406 + q * t
    q = 2.83297682 + q * t
    size = 1.4142135 * (1.0 - 2.0 * half) * tl.where(w < 5.0, p, q)
    return tl.where((bits & 1) == 1, size, -size)


@triton.jit
def normals(seed, row, classes, SAMPLES: tl.constexpr, TILE: tl.constexpr):
    """Noise of SAMPLES samples (a multiple of 4) for TILE classes of a row, (SAMPLES, TILE)."""
    GROUPS: tl.constexpr = SAMPLES // 4
    group = tl.arange(0, GROUPS)[:, None]
    zero = group * 0 + classes[None, :] * 0
    a, b, c, d = tl.philox(seed, zero + classes[None, :], zero + row, zero + group, zero)
    four = tl.join(tl.join(normal(a), normal(b)), tl.join(normal(c), normal(d)))
    return tl.reshape(tl.permute(four, (0, 2, 3, 1)), (SAMPLES, TILE))


@triton.jit
def noised_scores(
    line, room, start, found, seed, row, epsilon, SAMPLES: tl.constexpr, TILE: tl.constexpr
):
    """The noised scores of TILE candidates, (SAMPLES, TILE), and their classes, (1, TILE)."""
    entry = start + tl.arange(0, TILE)
    classes = tl.load(room + entry, entry < found, 0)
    s = tl.load(line + classes, entry < found, float("-inf")).to(tl.float32)
    noise = normals(seed, row, classes, SAMPLES, TILE)
    return s[None, :] + epsilon * noise, classes[None, :]


@triton.jit
def row_bound(
    line,
    room,
    columns,
    seed,
    row,
    samples,
    epsilon,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """A score that every chosen class reaches, and whether some score is not a number.

    In no sample is the K-th largest below the least of the K largest scores with their noise. K is
    at most TILE.
    """
    heads, places, spoilt = row_heads(line, columns, K, SLOTS, BLOCK)
    bound = as_score(tl.min(tl.min(heads, 1), 0)) - 2 * FARTHEST * epsilon
    if bound > float("-inf"):
        slots = tl.arange(0, SLOTS)[None, :]
        tl.store(room + slots, places, slots < K)
        tl.debug_barrier()
        noised, _ = noised_scores(line, room, 0, K, seed, row, epsilon, SAMPLES, TILE)
        used = (tl.arange(0, SAMPLES)[:, None] < samples) & (tl.arange(0, TILE)[None, :] < K)
        least = tl.min(tl.min(tl.where(used, noised, float("inf")), 1), 0)
        bound = tl.maximum(bound, least - FARTHEST * epsilon)
        tl.debug_barrier()
    return bound, spoilt


@triton.jit
def kth_of_few(
    line,
    room,
    found,
    seed,
    row,
    epsilon,
    K: tl.constexpr,
    SAMPLES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Key of the K-th largest of all candidates, and its class: K times the next smaller one."""
    noised, classes = noised_scores(line, room, 0, found, seed, row, epsilon, SAMPLES, TILE)
    best = tl.max(noised, 1)
    kth = best
    taken = tl.sum((noised == best[:, None]).to(tl.int32), 1)
    for _ in range(K - 1):
        best = tl.max(tl.where(noised < best[:, None], noised, float("-inf")), 1)
        kth = tl.where(taken < K, best, kth)
        taken += tl.sum((noised == best[:, None]).to(tl.int32), 1)
    place = tl.min(tl.where(noised == kth[:, None], classes, NOWHERE), 1)
    return as_key(kth), tl.where(kth == float("-inf"), -1, place)


@triton.jit(
    do_not_specialize=("rows", "columns", "stride", "samples", "ignore_index"),
    do_not_specialize_on_alignment=("labels", "margins", "weights", "seeds"),
)
def noised_kernel(
    scores,
    labels,
    margins,
    weights,
    seeds,
    candidates,
    chosen,
    slopes,
    buffer,
    counter,
    result,
    rows,
    columns,
    stride,
    samples,
    epsilon,
    margin,
    scale,
    ignore_index,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    HAS_MARGINS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    REDUCTION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The K-th largest noised score, averaged, of every ``programs``-th row; with labels the loss.

    ``candidates`` has room for 2·BLOCK classes for each program. Usually there are few of them; if
    not, samples keep heads as rows do, from one tile of candidates to the next.
    """
    epsilon = tl.cast(epsilon, tl.float32)
    margin = tl.cast(margin, tl.float32)
    scale = tl.cast(scale, tl.float32)
    seed = tl.load(seeds)
    room = candidates + tl.program_id(0) * (2 * BLOCK)
    sample = tl.arange(0, SAMPLES)
    columns = multiple(columns, ALIGNED)
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = scores + tl.cast(row, tl.int64) * tl.cast(multiple(stride, ALIGNED), tl.int64)
        bound, spoilt = row_bound(
            line, room, columns, seed, row, samples, epsilon, K, SLOTS, SAMPLES, BLOCK, TILE
        )
        heads, places = no_heads(SAMPLES, K, SLOTS)
        least = tl.full((SAMPLES,), ABSENT, tl.int32)
        place = tl.full((SAMPLES,), -1, tl.int32)
        found = 0
        before = 0
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
            near = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
            tl.store(room + found + tl.cumsum(near, 0) - 1, column, near > 0)
            found += tl.sum(near, 0)
            last = begin + BLOCK >= columns
            if last & (before == 0) & (found <= TILE):
                tl.debug_barrier()
                least, place = kth_of_few(line, room, found, seed, row, epsilon, K, SAMPLES, TILE)
                tl.debug_barrier()
            elif last | (found > BLOCK):
                tl.debug_barrier()
                for start in range(0, found, TILE):
                    noised, classes = noised_scores(
                        line, room, start, found, seed, row, epsilon, SAMPLES, TILE
                    )
                    classes = tl.broadcast_to(classes, (SAMPLES, TILE))
                    noised, heads, places, _ = take_heads(noised, classes, heads, places)
                least = tl.min(heads, 1)
                place = tl.max(tl.where(heads == least[:, None], places, -1), 1)
                tl.debug_barrier()
                before += found
                found = 0
        used = sample < samples
        tl.store(chosen + tl.cast(row, tl.int64) * samples + sample, place, used)
        top = tl.sum(tl.where(used, as_score(least), 0.0), 0) / samples
        top = tl.where(spoilt > 0, float("nan"), top)
        if HAS_LABEL:
            loss, weight, slope, _, _ = hinge_loss(
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
            tl.store(slopes + row, slope)
            if REDUCTION == "none":
                tl.store(result + row, loss)
            all_losses += loss
            all_weights += weight
        else:
            tl.store(result + row, top)
    if REDUCTION != "none":
        partials = buffer + 1
        add_up(partials, counter, buffer, result, all_losses, all_weights, REDUCTION == "mean")


@triton.jit(
    do_not_specialize=("rows", "columns", "samples", "outgoing_stride"),
    do_not_specialize_on_alignment=("labels", "outgoing"),
)
def noised_gradient_kernel(
    labels,
    chosen,
    slopes,
    outgoing,
    buffer,
    gradient,
    rows,
    columns,
    samples,
    outgoing_stride,
    SAMPLES: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the shares of the chosen classes, and −1 for the label, into a gradient of zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    sample = tl.arange(0, SAMPLES)[None, :]
    used = inside[:, None] & (sample < samples)
    line = chosen + row * samples
    place = tl.load(line[:, None] + sample, used, -1)
    count = tl.zeros((ROWS, SAMPLES), tl.float32)
    for b in range(samples):
        count += (place == tl.load(line + b, inside, -2)[:, None]).to(tl.float32)
    scale = tl.load(outgoing + row * outgoing_stride, inside, 0.0).to(tl.float32)
    if HAS_LABEL:
        slope = tl.load(slopes + row, inside, 0.0)
        if MEAN:
            scale = scale / tl.load(buffer).to(tl.float32)
        scale = tl.where(slope == 0, 0.0, scale * slope)
        label = tl.load(labels + row, inside, -1)
        hits = tl.sum((used & (place == label[:, None])).to(tl.float32), 1)
        legal = inside & (label >= 0) & (label < columns) & (scale != 0)
        tl.store(gradient + row * columns + label, scale * (hits / samples - 1), legal)
        used = used & (place != label[:, None])
    out = gradient + row[:, None] * columns + place
    tl.store(out, scale[:, None] * count / samples, used & (place >= 0))
