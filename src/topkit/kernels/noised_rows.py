r"""Kernels of the noised top-k: the k-th largest of ``s + εZ_b`` for each sample b, without Z.

Normal noise made from 32-bit uniforms is bounded, ``|z| ≤ FARTHEST``, so that only scores within
``2ε·FARTHEST`` of the k-th largest can be chosen. A program reads its row once for that bound and
once more to collect those candidates; only they get noise, from a counter-based generator (Philox)
keyed by seed, row, class and sample. What is kept for the backward pass are the chosen classes.
"""

import triton
import triton.language as tl

from topkit.kernels.row_constants import add_up
from topkit.kernels.row_state import as_score, no_heads, take_heads

FARTHEST = tl.constexpr(6.77)
"""sqrt(2 log 2^33), rounded up."""
SCALE = tl.constexpr(2.0**-32)
FULL_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def normal_pair(first, second):
    """Two normal numbers from two 32-bit integers (Box and Muller)."""
    radius = tl.sqrt(-2.0 * tl.log(first.to(tl.float32) * SCALE + SCALE / 2))
    angle = second.to(tl.float32) * (SCALE * FULL_TURN)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def normals(seed, row, classes, SAMPLES: tl.constexpr, TILE: tl.constexpr):
    """Noise of SAMPLES samples (a multiple of 4) for TILE classes of a row, (SAMPLES, TILE)."""
    GROUPS: tl.constexpr = SAMPLES // 4
    group = tl.arange(0, GROUPS)[:, None]
    zero = group * 0 + classes[None, :] * 0
    a, b, c, d = tl.philox(seed, zero + classes[None, :], zero + row, zero + group, zero)
    a, b = normal_pair(a, b)
    c, d = normal_pair(c, d)
    four = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(four, (0, 2, 3, 1)), (SAMPLES, TILE))


@triton.jit
def row_bound(line, columns, epsilon, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """A score that every chosen class reaches, and whether some score is not a number."""
    heads, places = no_heads(1, K, SLOTS)
    threshold = tl.full((1,), float("-inf"), tl.float32)
    spoilt = 0
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
        spoilt = tl.maximum(spoilt, tl.max(tl.max((x != x).to(tl.int32), 1), 0))
        x, heads, places, threshold = take_heads(x, column, heads, places)
    return tl.max(threshold, 0) - 2 * FARTHEST * epsilon, spoilt


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
    summary,
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

    ``candidates`` has room for 2·BLOCK classes for each program.
    """
    seed = tl.load(seeds)
    room = candidates + tl.program_id(0) * (2 * BLOCK)
    sample = tl.arange(0, SAMPLES)
    all_losses = tl.zeros((), tl.float64)
    all_weights = tl.zeros((), tl.float64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = scores + tl.cast(row, tl.int64) * tl.multiple_of(stride, ALIGNED)
        bound, spoilt = row_bound(line, columns, epsilon, K, SLOTS, BLOCK)
        heads, places = no_heads(SAMPLES, K, SLOTS)
        found = 0
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(line + column, column < columns, float("-inf")).to(tl.float32)
            near = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
            tl.store(room + found + tl.cumsum(near, 0) - 1, column, near > 0)
            found += tl.sum(near, 0)
            if (found > BLOCK) | (begin + BLOCK >= columns):
                tl.debug_barrier()
                for start in range(0, found, TILE):
                    entry = start + tl.arange(0, TILE)
                    here = entry < found
                    classes = tl.load(room + entry, here, 0)
                    s = tl.load(line + classes, here, float("-inf")).to(tl.float32)
                    noised = s[None, :] + epsilon * normals(seed, row, classes, SAMPLES, TILE)
                    noised, heads, places, _ = take_heads(
                        noised, tl.broadcast_to(classes[None, :], (SAMPLES, TILE)), heads, places
                    )
                tl.debug_barrier()
                found = 0
        least = tl.min(heads, 1)
        place = tl.max(tl.where(heads == least[:, None], places, -1), 1)
        used = sample < samples
        tl.store(chosen + tl.cast(row, tl.int64) * samples + sample, place, used)
        top = tl.sum(tl.where(used, as_score(least), 0.0), 0) / samples
        top = tl.where(spoilt > 0, float("nan"), top)
        if HAS_LABEL:
            label = tl.load(labels + row)
            counted = label != ignore_index
            legal = counted & (label >= 0) & (label < columns)
            of_label = tl.load(line + label, legal, float("nan")).to(tl.float32)
            gap = tl.where(of_label == float("-inf"), float("inf"), top - of_label)
            if HAS_MARGINS:
                gap += tl.load(margins + label, legal, 0.0)
            else:
                gap += margin
            if HAS_WEIGHTS:
                weight = tl.load(weights + label, legal, 0.0)
            else:
                weight = 1.0
            weight = tl.where(counted, weight, 0.0)
            hinge = tl.where(gap <= 0, 0.0, scale * gap)  # NaN stays
            loss = tl.where(counted, hinge * weight, 0.0)
            tl.store(slopes + row, tl.where(gap > 0, scale * weight, 0.0))
            if REDUCTION == "none":
                tl.store(result + row, loss)
            all_losses += loss
            all_weights += weight
        else:
            tl.store(result + row, top)
    if REDUCTION != "none":
        add_up(summary, result, all_losses, all_weights, REDUCTION == "mean", 1024)


@triton.jit(
    do_not_specialize=("rows", "columns", "samples", "outgoing_stride"),
    do_not_specialize_on_alignment=("labels", "outgoing"),
)
def noised_gradient_kernel(
    labels,
    chosen,
    slopes,
    outgoing,
    summary,
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
        scale = scale * tl.load(slopes + row, inside, 0.0)
        if MEAN:
            scale = scale / tl.load(summary + 1).to(tl.float32)
        label = tl.load(labels + row, inside, -1)
        hits = tl.sum((used & (place == label[:, None])).to(tl.float32), 1)
        legal = inside & (label >= 0) & (label < columns) & (scale != 0)
        tl.store(gradient + row * columns + label, scale * (hits / samples - 1), legal)
        used = used & (place != label[:, None])
    out = gradient + row[:, None] * columns + place
    tl.store(out, scale[:, None] * count / samples, used & (place >= 0))
